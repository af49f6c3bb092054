"""One process at a time, by a lock file that ends with its holder."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LOOK_S: Final = 0.05


@contextlib.contextmanager
def turn(path: Path, patience_s: float) -> Iterator[None]:
    """While no other process has the lock at a path; waited for so long.

    Raises:
        BlockingIOError: another one, which may be stopped for ever, had it for longer.
        OSError: there can be no such file.
    """
    with path.open("ab") as lock:
        until_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise
            time.sleep(LOOK_S)
        yield
