"""A lock between processes: a file that one of them holds, until the block or the process ends."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Seconds between two looks at a lock that another process holds.
LOOK_S: Final = 0.05


@contextlib.contextmanager
def file_lock(path: Path, patience_s: float) -> Iterator[None]:
    """Hold the lock at a path within the block.

    Args:
        path: of the lock's file, made if it is not there.
        patience_s: seconds to wait for another process that holds it.

    Raises:
        BlockingIOError: another one, which may be stopped for ever, had it for longer.
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
