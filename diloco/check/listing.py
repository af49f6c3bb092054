"""What a store has: sixteen bytes for each object, however many there are."""

from array import array
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt
import xxhash

from diloco.common import names
from diloco.common.errors import IntegrityError, RunMismatchError, WireError
from diloco.common.store import ObjectStore
from diloco.common.tape import RunContext, last_record


class Listing:
    """Sizes of objects by the hashes of their names.

    Args:
        listed: names and sizes.
        picked: which names to keep in full, such as those a tape may not have come to.

    Attributes:
        picked: names of those.
    """

    def __init__(
        self,
        listed: Iterable[tuple[str, int]] = (),
        picked: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._added = array("q")
        self._rows = np.empty((0, 2), np.int64)
        self.picked: list[str] = []
        for name, size_bytes in listed:
            self.add(name, size_bytes)
            if picked(name):
                self.picked.append(name)

    def add(self, name: str, size_bytes: int = 0) -> None:
        """An object; another one of the name replaces it."""
        self._added.extend((_hash(name), size_bytes))

    def _table(self) -> npt.NDArray[np.int64]:
        """Rows of (hash, size) in order of hashes, each hash once."""
        if self._added:
            new = np.frombuffer(self._added, np.int64).reshape(-1, 2)
            rows = np.concatenate([self._rows, new])
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
            self._rows = rows[np.diff(rows[:, 0], append=-1) != 0]
            self._added = array("q")
        return self._rows

    def size(self, name: str) -> int | None:
        """Of an object; None if it is not there."""
        rows, wanted = self._table(), _hash(name)
        index = int(np.searchsorted(rows[:, 0], wanted))
        found = index < len(rows) and rows[index, 0] == wanted
        return int(rows[index, 1]) if found else None

    def __contains__(self, name: object) -> bool:
        return self.size(str(name)) is not None

    def __len__(self) -> int:
        return len(self._table())

    def beside(self, other: "Listing") -> "Listing":
        """What of this the other one lacks, or has with another size."""
        found, rows = Listing(), self._table()
        found._rows = rows[~_stand_in(other._table(), rows)]  # noqa: SLF001 - of this class
        return found


def _stand_in(rows: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of these rows are among others, which are in order."""
    if not len(rows):
        return np.zeros(len(wanted), np.bool_)
    at = np.minimum(np.searchsorted(rows[:, 0], wanted[:, 0]), len(rows) - 1)
    same: npt.NDArray[np.bool_] = (rows[at] == wanted).all(axis=1)
    return same


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1


async def read_listing(context: RunContext) -> Listing:
    """The run's objects, with the names of those that a tape read later may not have come to.

    Raises:
        BusError, StoreError: bus or store are away.
    """
    fragments = range(len(context.layout.fragments))
    newest = {index: await _newest_version(context, index) for index in fragments}
    last_seq = await context.bus.last_sequence(context.tape)
    return await context.runtime.call(
        list_now, context.store, context.run, may_be_newer(context.run, newest, last_seq)
    )


def list_now(
    store: ObjectStore, run: str, picked: Callable[[str], bool] = lambda _: False
) -> Listing:
    """A run's objects as they are; blocks.

    Raises:
        StoreError: the store cannot be listed.
    """
    return Listing(store.walk(f"{run}/"), picked)


async def _newest_version(context: RunContext, fragment: int) -> int:
    try:
        return (await last_record(context, fragment))[0].version
    except (IntegrityError, RunMismatchError, WireError):
        # All its objects may be newer; whoever reads the tape says what is wrong with it.
        return -1


def fragment_of(run: str, name: str) -> int | None:
    """The fragment that an object is of; None for what is the whole run's."""
    if (sent := names.parse_shard(run, name)) is not None:
        return sent.fragment
    fragment = name.removeprefix(names.global_prefix(run)).partition("/")[0]
    return int(fragment) if fragment.isdecimal() else None


def may_be_newer(run: str, newest: Mapping[int, int], last_seq: int) -> Callable[[str], bool]:
    """Whether an object is of something later than these versions and this sequence.

    `diloco.check.evidence.newer_objects` judges by the tape, once it is read.
    """

    def judge(name: str) -> bool:
        if name.startswith(names.checkpoint_prefix(run)):
            return True
        if (sent := names.parse_shard(run, name)) is not None:
            return sent.incarnation > last_seq
        fragment, _, rest = name.removeprefix(names.global_prefix(run)).partition("/")
        version = rest.partition("-")[0]
        known = fragment.isdecimal() and version.isdecimal() and int(fragment) in newest
        return known and int(version) > newest[int(fragment)]

    return judge
