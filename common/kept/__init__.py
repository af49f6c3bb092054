"""A run in a file: an exported tape, or a bundle of a tape with its objects.

- `index.py`: where everything stands in the file, which is read once for that.
- `bus.py`, `store.py`: the file as bus and store that can be read, so that every command which
  only reads takes it.
- `check.py`: what its frames must be, whoever made it.
- `writer.py`: makes bundles. docs/protocol.md has the format.
"""

from diloco.common.kept.bus import KeptBus
from diloco.common.kept.check import is_file_name
from diloco.common.kept.index import Kept, is_bundle, is_kept, open_kept, read_header
from diloco.common.kept.store import KeptStore
from diloco.common.kept.writer import BundleWriter

__all__ = [
    "BundleWriter",
    "Kept",
    "KeptBus",
    "KeptStore",
    "is_bundle",
    "is_file_name",
    "is_kept",
    "open_kept",
    "read_header",
]
