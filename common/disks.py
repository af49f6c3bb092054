"""Disks: whether there is room."""

import shutil
from pathlib import Path

# With less a server cannot begin a stream, and a daemon not write its log.
_NO_ROOM_BYTES = 1 << 20


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder has as good as no room left."""
    return shutil.disk_usage(folder).free < _NO_ROOM_BYTES
