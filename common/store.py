"""Object stores: immutable, create-only objects under names with '/' in them.

Rules of every backend:
- An object never changes. Putting the same bytes under an existing name succeeds (a retry whose
  first answer was lost); putting other bytes raises `ObjectExistsError`.
- An object is visible whole or not at all, and durable once `put` returns.
- Calls block and may be made from any thread; passing faults raise `StoreUnavailableError`.
"""

from typing import NamedTuple, Protocol


class ObjectInfo(NamedTuple):
    """An object's name and its size in bytes."""

    name: str
    size_bytes: int


class ObjectStore(Protocol):
    """What the daemons need of a store; see the module's rules."""

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Store `data` under `name`.

        Raises:
            ObjectExistsError: other bytes stand under that name.
            StoreUnavailableError: a passing fault; nothing or everything was stored.
        """

    def get(self, name: str) -> bytes:
        """The bytes of `name`.

        Raises:
            ObjectMissingError: no such object.
            StoreUnavailableError: a passing fault.
        """

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose names begin with `prefix`, in order of name."""

    def delete(self, name: str) -> None:
        """Remove `name`; one that is not there is no error."""
