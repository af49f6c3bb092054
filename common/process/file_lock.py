"""A lock between processes: a file that one process locks until its block, or the process, ends."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Seconds between two attempts to take a lock that another process holds.
LOOK_S: Final = 0.05


@contextlib.contextmanager
def file_lock(path: Path, patience_s: float) -> Iterator[None]:
    """Holds the lock file `path` while the block runs.

    Args:
        path: the lock's file; made if it does not exist.
        patience_s: seconds to wait while another process holds the lock.

    Raises:
        BlockingIOError: another process held the lock for longer than `patience_s`.
        OSError: the lock's file cannot be made or opened.
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
