"""A bundle's objects as a read-only store."""

from collections.abc import Iterator
from typing import Any

from diloco.common.protocol.errors import StoreError
from diloco.common.storage.bundle.contents import Whole
from diloco.common.storage.bundle.reader import Bundle
from diloco.common.storage.store import (
    ObjectInfo,
    ObjectStore,
    check_object_name,
    check_range,
    check_size,
    object_missing,
)


class BundleStore(ObjectStore):
    """Serves the objects of a bundle, read-only; callable from any thread.

    Args:
        bundle: the open bundle; the caller closes it.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def _refuse(self, *_args: Any, **_named: Any) -> Any:
        """Refuses any operation that would change the store.

        Raises:
            StoreError: always.
        """
        raise StoreError(f"{str(self._bundle.path)!r} is a file: its objects stay as they are")

    put = delete = _refuse

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Implements `ObjectStore.get`; ignores `within_s`, as the file is local."""
        del within_s
        whole = self._whole(name)
        check_size(name, whole.size_bytes, limit_bytes)
        return self._bundle.read(whole, 0, whole.size_bytes)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Implements `ObjectStore.get_range`."""
        check_range(name, start, stop)
        whole = self._whole(name)
        check_range(name, start, stop, whole.size_bytes)
        return self._bundle.read(whole, start, stop)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Implements `ObjectStore.walk`."""
        for name, size_bytes in self._bundle.objects.sizes():
            if name.startswith(prefix):
                yield ObjectInfo(name, size_bytes)

    def _whole(self, name: str) -> Whole:
        check_object_name(name)
        whole = self._bundle.objects.get(name)
        if whole is None:
            raise object_missing(name)
        return whole
