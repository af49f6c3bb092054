"""Until when an object must be read."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from diloco.common.errors import StoreSlowError


class Deadline:
    """A time by which reading an object must be done.

    Args:
        name: the object.
        within_s: from now on; None for however long.
    """

    def __init__(self, name: str, within_s: float | None) -> None:
        self._name = name
        self._within_s = within_s
        self._until_s = None if within_s is None else time.monotonic() + within_s

    def check(self) -> None:
        """Refuse to read on when it has passed.

        Raises:
            StoreSlowError: it has.
        """
        if self._until_s is not None and time.monotonic() >= self._until_s:
            raise StoreSlowError(
                f"object {self._name!r} was not read within {self._within_s:.0f} s",
                hint="look at the store, and at the link to it",
            )

    @contextlib.contextmanager
    def interrupting(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Call `interrupt` from another thread if it passes while the block runs.

        Who waits for bytes that come one by one never gets to `check`.
        """
        if self._until_s is None:
            yield
            return
        timer = threading.Timer(max(0.0, self._until_s - time.monotonic()), interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
