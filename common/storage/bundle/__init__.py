"""A run in a file: its tape, and unless it is made without, its objects, heartbeats and logs.

- `frames.py`: the bytes: frames with checksums; `check.py`: what they must be, whoever made them.
- `reader.py`: where everything stands in the file, which is read once for that; `contents.py`: its
  objects and files, by name.
- `bus.py`, `store.py`: the file as bus and store that can be read, so that every command which
  only reads takes it.
- `writer.py`: makes bundles. docs/protocol.md has the format.
"""

from diloco.common.storage.bundle.bus import BundleBus
from diloco.common.storage.bundle.check import is_file_name
from diloco.common.storage.bundle.frames import is_bundle
from diloco.common.storage.bundle.reader import Bundle, open_bundle, read_header
from diloco.common.storage.bundle.store import BundleStore
from diloco.common.storage.bundle.writer import BundleWriter
