"""Objects that messages of the tape name."""

from diloco.common.protocol import shards, wire
from diloco.common.protocol.errors import IntegrityError, ObjectLostError, ObjectMissingError
from diloco.common.storage.store import ObjectStore


def get_object(store: ObjectStore, expected: wire.ObjectRef) -> bytes:
    """The bytes of an object, compared with what the message says that names it.

    Raises:
        IntegrityError: its size or checksum differs.
        ObjectMissingError, StoreUnavailableError: as `ObjectStore.get`.
    """
    data = store.get(expected.name)
    if len(data) != expected.size_bytes or shards.crc32c(data) != expected.crc32c:
        raise IntegrityError(
            f"object {expected.name!r}: {len(data)} bytes with crc32c {shards.crc32c(data)}, "
            f"the message that names it says {expected.size_bytes} with {expected.crc32c}",
            hint="runbooks/digest-mismatch.md",
        )
    return data


def lost_for_good(what: str, error: ObjectMissingError) -> ObjectLostError:
    """The error of an object that the newest record needs: no collection took it."""
    return ObjectLostError(f"{what}: {error.message}", hint="runbooks/missing-object.md")
