"""Bundles: a run in one file, with its tape, and optionally its objects, heartbeats and logs.

- `frames.py`: reads and writes frames (a length, a checksum, and msgpack); `check.py` checks the
  contents of frames, since anybody may have made the file.
- `reader.py`: reads the file once to index it; `contents.py`: the index of objects and files.
- `bus.py`, `store.py`: the file as a read-only bus and a read-only store, so that every command
  that only reads accepts a bundle in place of a run.
- `writer.py`: makes bundles. docs/protocol.md has the format.
"""

from diloco.common.storage.bundle.bus import BundleBus
from diloco.common.storage.bundle.check import is_file_name
from diloco.common.storage.bundle.frames import is_bundle
from diloco.common.storage.bundle.reader import Bundle, open_bundle, read_header
from diloco.common.storage.bundle.store import BundleStore
from diloco.common.storage.bundle.writer import BundleWriter
