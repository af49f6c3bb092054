"""The objects of a bundle as a store that can be read."""

from collections.abc import Iterator

from diloco.common.errors import StoreError
from diloco.common.kept.contents import Whole
from diloco.common.kept.index import Kept
from diloco.common.parts import Data
from diloco.common.store import (
    ObjectInfo,
    check_object_name,
    check_range,
    check_size,
    object_missing,
)


class KeptStore:
    """Objects in a file; from any thread.

    Args:
        kept: the file; who opened it closes it.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def put(self, name: str, data: Data) -> None:
        """Refused.

        Raises:
            StoreError: always.
        """
        raise StoreError(f"{str(self._kept.path)!r} is a file: it takes no object {name!r}")

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """The bytes of `name`, which lie in a file here: `within_s` is not looked at.

        Raises:
            ObjectMissingError: no such object.
            ObjectTooLargeError: it has more than `limit_bytes`.
        """
        del within_s
        whole = self._whole(name)
        check_size(name, whole.size_bytes, limit_bytes)
        return self._kept.read(whole, 0, whole.size_bytes)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of `name`.

        Raises:
            ObjectMissingError: no such object.
            ObjectRangeError: the range is empty, or ends beyond the object.
        """
        check_range(name, start, stop)
        whole = self._whole(name)
        check_range(name, start, stop, whole.size_bytes)
        return self._kept.read(whole, start, stop)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose names begin with `prefix`, in order of name."""
        return sorted(self.walk(prefix))

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `list`, one after the other, in any order."""
        for name, size_bytes in self._kept.objects.sizes():
            if name.startswith(prefix):
                yield ObjectInfo(name, size_bytes)

    def delete(self, name: str) -> None:
        """Refused.

        Raises:
            StoreError: always.
        """
        raise StoreError(f"{str(self._kept.path)!r} is a file: object {name!r} stays in it")

    def _whole(self, name: str) -> Whole:
        check_object_name(name)
        whole = self._kept.objects.get(name)
        if whole is None:
            raise object_missing(name)
        return whole
