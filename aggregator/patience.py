"""How long the reading of an update may take, and whose fault it is when it takes longer.

A store that is slow is slow for everybody, and rejects nobody: each attempt may take twice as long
as the one before. What alone is slow, while whole updates of others are read beside it, is its
sender's.
"""

import time
from typing import Final, Protocol

from diloco.common import wire
from diloco.common.errors import StoreSlowError, WireError
from diloco.common.reasons import Reason

# An attempt may take so long, and a second for each of so many bytes.
FIRST_S: Final = 30.0
LEAST_BYTES_PER_S: Final = 1 << 20
# No attempt takes longer than so many doublings allow.
DOUBLINGS: Final = 10


class Reads(Protocol):
    """What reading an update needs of a store."""

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """As `ObjectStore.get`."""


class Limited:
    """A store whose reads take no longer, all together, than a number of seconds."""

    def __init__(self, store: Reads, left_s: float) -> None:
        self._store = store
        self._left_s = left_s

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """As `ObjectStore.get`.

        Raises:
            StoreSlowError: the seconds are over.
        """
        left_s = self._left_s if within_s is None else min(within_s, self._left_s)
        began_s = time.monotonic()
        try:
            return self._store.get(name, limit_bytes, left_s)
        finally:
            self._left_s -= time.monotonic() - began_s


class Patience:
    """Of one update's reading, over all attempts."""

    def __init__(self, manifest: wire.Manifest) -> None:
        size_bytes = sum(shard.size_bytes for shard in manifest.shards)
        self._first_s = FIRST_S + size_bytes / LEAST_BYTES_PER_S
        self._slow = 0  # attempts that took too long
        self._alone = 0  # of these, while updates of others were read

    @property
    def within_s(self) -> float:
        """How long the next attempt may take."""
        return float(self._first_s * 2 ** min(self._slow, DOUBLINGS))

    def lost(self, error: StoreSlowError, *, others_read: bool) -> None:
        """An attempt took too long; `others_read`: updates of others were read from end to end.

        Raises:
            WireError: "slow": it is its sender's fault.
        """
        self._slow += 1
        self._alone += others_read
        # Once is nobody's: the attempt may have begun on a store that had recovered when the
        # others' began.
        if self._alone > 1:
            what = f"slow {self._slow} times, while others were read: {error.message}"
            raise WireError(Reason.SLOW, what) from error
