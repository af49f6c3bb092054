"""Object stores: immutable, create-only objects under names with '/' in them.

`protocol.py` has the rules of every backend; `memory.py`, `directory.py`, `s3_azure.py` and `gcs/`
are backends; `opening.py` chooses one by a URL; `cached.py` reads through a
cache nearby.
"""

from diloco.common.storage.store.cached import OUTCOMES, CachedStore
from diloco.common.storage.store.directory import DirectoryStore
from diloco.common.storage.store.memory import MemoryStore
from diloco.common.storage.store.opening import open_nearby, open_store
from diloco.common.storage.store.protocol import (
    ObjectInfo,
    ObjectStore,
    ProtectsObjects,
    check_object_name,
    check_range,
    check_size,
    object_missing,
)
