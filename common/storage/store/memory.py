"""An object store in this process's memory, for tests, the simulator and single-process runs."""

import threading
from collections.abc import Iterator

from diloco.common.protocol.shards import Data
from diloco.common.storage.store.protocol import (
    Deadline,
    ObjectInfo,
    ObjectStore,
    check_object_name,
    check_range,
    check_size,
    object_exists,
    object_missing,
)


class MemoryStore(ObjectStore):
    """Objects in this process's memory, for tests, the simulator and single-process runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}

    def put(self, name: str, data: Data) -> None:
        """Implements `ObjectStore.put`."""
        check_object_name(name)
        copy = bytes(data)
        with self._lock:
            if self._objects.setdefault(name, copy) != copy:
                raise object_exists(name)

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Implements `ObjectStore.get`."""
        check_object_name(name)
        with self._lock:
            data = self._objects.get(name)
        if data is None:
            raise object_missing(name)
        check_size(name, len(data), limit_bytes)
        Deadline(name, within_s).check()
        return data

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Implements `ObjectStore.get_range`."""
        check_range(name, start, stop)
        data = self.get(name)
        check_range(name, start, stop, len(data))
        return data[start:stop]

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Implements `ObjectStore.walk`."""
        with self._lock:
            sizes = {name: len(data) for name, data in self._objects.items()}
        return (ObjectInfo(*found) for found in sizes.items() if found[0].startswith(prefix))

    def delete(self, name: str) -> None:
        """Implements `ObjectStore.delete`."""
        check_object_name(name)
        with self._lock:
            self._objects.pop(name, None)
