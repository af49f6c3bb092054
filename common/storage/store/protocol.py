"""Object stores: immutable, create-only objects under names with '/' in them.

Rules of every backend:
- An object never changes. Putting the same bytes under an existing name succeeds (a retry whose
  first answer was lost); putting other bytes raises `ObjectExistsError`.
- An object is visible whole or not at all, and durable once `put` returns.
- Calls block and may be made from any thread; transient faults raise `StoreUnavailableError`.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from diloco.common.protocol import shards, wire
from diloco.common.protocol.errors import (
    ConfigError,
    IntegrityError,
    ObjectExistsError,
    ObjectLostError,
    ObjectMissingError,
    ObjectRangeError,
    ObjectTooLargeError,
    ObjectUnreadableError,
    StoreError,
    StoreSlowError,
)
from diloco.common.protocol.shards import Data

# First tokens of names that backends reserve for themselves.
TEMP, KEPT = ".tmp", ".kept"
RESERVED = frozenset({TEMP, KEPT})
_NAME = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*")
_MAX_NAME = 512
_MAX_TOKEN = 255  # the limit of common file systems


class ObjectInfo(NamedTuple):
    """An object's name (without the store's prefix) and its size in bytes."""

    name: str
    size_bytes: int


class ObjectStore(Protocol):
    """The interface of the store that daemons use; the module's docstring has the rules."""

    def put(self, name: str, data: Data) -> None:
        """Stores `data` under `name`.

        Args:
            name: the object's name.
            data: the object's bytes, which must not change before `put` returns.

        Raises:
            ObjectExistsError: other bytes are stored under that name.
            StoreUnavailableError: a transient fault; nothing or everything was stored.
            StoreError: not permitted, no such bucket, or `name` is not an object name.
        """

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Returns the bytes of `name`.

        Args:
            name: the object's name.
            limit_bytes: the largest size to read; None for no limit.
            within_s: time limit in seconds; None for the backend's own time limits.

        Raises:
            ObjectMissingError: no such object.
            ObjectTooLargeError: the object has more than `limit_bytes`; it was not read.
            ObjectUnreadableError: the name is that of no plain object, but of a link, a pipe or an
                encoded object.
            StoreSlowError: reading took longer than `within_s`.
            StoreUnavailableError: a transient fault, or the bytes come damaged again and again.
            StoreError: as in `put`.
        """

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop) of `name`, 0 <= start < stop.

        The caller must check these bytes, as stores have checksums of whole objects only.

        Raises:
            ObjectRangeError: the range is empty, or ends beyond the object.
            StoreError: as in `get`, except for size and time.
        """

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Returns all objects whose names begin with `prefix`, sorted by name.

        Raises:
            StoreUnavailableError: a transient fault.
            StoreError: not permitted, no such bucket, or no name can begin with `prefix`.
        """
        return sorted(self.walk(prefix))

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yields the objects that `list` returns one by one, in any order, with the same errors."""

    def delete(self, name: str) -> None:
        """Removes `name`; does nothing if there is no such object.

        Raises:
            StoreUnavailableError: a transient fault.
            StoreError: as in `put`.
        """


@runtime_checkable
class ProtectsObjects(Protocol):
    """A store in which the writer of an object can remove the object, unless `keep` protects it.

    Stores in buckets lack this method: their access rules give learners no right to delete.
    """

    def keep(self, name: str, limit_bytes: int) -> None:
        """Protects the present bytes of the object `name` from removal or change by its writer.

        An object of more than `limit_bytes`, or one that cannot be read, need not be protected.
        """


def check_range(name: str, start: int, stop: int, size_bytes: int | None = None) -> None:
    """Refuses a byte range that is empty, or not within an object of `size_bytes`.

    Args:
        name: the object's name.
        start: first byte.
        stop: the byte after the last.
        size_bytes: the object's size; None while it is not known.

    Raises:
        ObjectRangeError: nothing can be read for that range.
    """
    if not 0 <= start < stop:
        raise ObjectRangeError(f"[{start}, {stop}) is not a byte range of object {name!r}")
    if size_bytes is not None and stop > size_bytes:
        raise ObjectRangeError(
            f"object {name!r} has {size_bytes} bytes, [{start}, {stop}) of them were expected"
        )


def check_size(name: str, size_bytes: int, limit_bytes: int | None) -> None:
    """Refuses an object that is larger than its reader allows.

    Raises:
        ObjectTooLargeError: the object has more than `limit_bytes`.
    """
    if limit_bytes is not None and size_bytes > limit_bytes:
        raise ObjectTooLargeError(
            f"object {name!r} has {size_bytes} bytes, at most {limit_bytes} were expected"
        )


def check_object_name(name: str) -> None:
    """Refuses a name that some backend could not store.

    A name is relative: tokens of `[A-Za-z0-9._=-]`, each at most 255 long, joined by single '/', at
    most 512 characters in all. No token is '.' or '..', and the first is not '.tmp' or '.kept'.

    Raises:
        StoreError: `name` breaks a rule.
    """
    tokens = name.split("/")
    if (
        len(name) > _MAX_NAME
        or not _NAME.fullmatch(name)
        or any(token in {".", ".."} or len(token) > _MAX_TOKEN for token in tokens)
        or tokens[0] in RESERVED
    ):
        raise StoreError(
            f"{name[:80]!r} is not an object name",
            hint="tokens of [A-Za-z0-9._=-] joined by '/', relative, no '..', at most 512 long",
        )


def split_url(url: str) -> tuple[str, str]:
    """Returns (bucket, prefix) of a URL like "gs://bucket/prefix"; the prefix has no last '/'.

    Raises:
        ConfigError: the URL names no bucket, or has a prefix that cannot be used.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if not bucket:
        raise ConfigError(f"{url!r} names no bucket", hint=f"write {scheme}://bucket/prefix")
    try:
        if prefix:
            check_object_name(prefix)
    except StoreError as error:
        raise ConfigError(f"{url!r}: {error.message}", hint=error.hint) from error
    return bucket, prefix


def object_exists(name: str) -> ObjectExistsError:
    """Returns the error that `put` raises if other bytes are stored under `name`."""
    return ObjectExistsError(
        f"an object {name!r} with other bytes exists",
        hint="names are create-only; two writers used one name for different contents",
    )


def object_unreadable(name: str, why: str) -> ObjectUnreadableError:
    """Returns the error that `get` raises for a name of no plain object; `why` is part of it."""
    return ObjectUnreadableError(
        f"object {name!r} cannot be read: {why}",
        hint="nothing of this project stores such an object; see who may write there",
    )


def object_missing(name: str) -> ObjectMissingError:
    """Returns the error that `get` raises if there is no object `name`."""
    return ObjectMissingError(f"no object {name!r}")


class Deadline:
    """A time limit for reading an object.

    Args:
        name: the object's name.
        within_s: seconds from now; None for no limit.
    """

    def __init__(self, name: str, within_s: float | None) -> None:
        self._name = name
        self._within_s = within_s
        self._until_s = None if within_s is None else time.monotonic() + within_s

    def check(self) -> None:
        """Checks the time.

        Raises:
            StoreSlowError: the deadline has passed.
        """
        if self._until_s is not None and time.monotonic() >= self._until_s:
            raise StoreSlowError(
                f"object {self._name!r} was not read within {self._within_s:.0f} s",
                hint="look at the store, and at the link to it",
            )

    @contextlib.contextmanager
    def interrupting(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Calls `interrupt` from another thread if the deadline passes while the block runs.

        For a reader that waits for bytes and so cannot call `check` in time.
        """
        if self._until_s is None:
            yield
            return
        timer = threading.Timer(max(0.0, self._until_s - time.monotonic()), interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def get_object(store: ObjectStore, expected: wire.ObjectRef) -> bytes:
    """Returns the bytes of an object that a message names, after verifying size and checksum.

    Raises:
        IntegrityError: size or checksum differs.
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
    """Returns the error for a missing object that garbage collection cannot have removed.

    Args:
        what: what the object was needed for, such as "version 7 of fragment 2".
        error: the store's error.
    """
    return ObjectLostError(f"{what}: {error.message}", hint="runbooks/missing-object.md")
