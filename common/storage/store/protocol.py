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

# First tokens of names that a backend keeps for itself.
TEMP, KEPT = ".tmp", ".kept"
RESERVED = frozenset({TEMP, KEPT})
_NAME = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*")
_MAX_NAME = 512
_MAX_TOKEN = 255  # what common file systems allow


class ObjectInfo(NamedTuple):
    """An object's name and its size in bytes."""

    name: str
    size_bytes: int


class ObjectStore(Protocol):
    """The store that daemons use; see the module's rules."""

    def put(self, name: str, data: Data) -> None:
        """Store `data` under `name`.

        Args:
            name: of the object.
            data: its bytes; they must not change before this returns.

        Raises:
            ObjectExistsError: other bytes stand under that name.
            StoreUnavailableError: a transient fault; nothing or everything was stored.
            StoreError: not permitted, no such bucket, or `name` is not an object name.
        """

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """The bytes of `name`.

        Args:
            name: of the object.
            limit_bytes: the largest size to read.
            within_s: give up after so long; None for never, beyond what a backend waits for itself.

        Raises:
            ObjectMissingError: no such object.
            ObjectTooLargeError: it has more than `limit_bytes`; it was not read.
            ObjectUnreadableError: no plain object has the name, but a folder, say.
            StoreSlowError: it took longer than `within_s`.
            StoreUnavailableError: a transient fault, or the bytes come damaged again and again.
            StoreError: as of `put`.
        """

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of `name`, 0 <= start < stop.

        No store can check parts against the checksum of the whole, so the caller must.

        Raises:
            ObjectRangeError: the range is empty, or ends beyond the object.
            StoreError: as of `get`, but for size and time.
        """

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose names begin with `prefix`, in order of name.

        Raises:
            StoreUnavailableError: a transient fault.
            StoreError: not permitted, no such bucket, or the prefix is none of a name.
        """
        return sorted(self.walk(prefix))

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `list`, one after the other, in any order: for callers that meet very many objects."""

    def delete(self, name: str) -> None:
        """Remove `name`; one that is not there is no error.

        Raises:
            StoreUnavailableError: a transient fault.
            StoreError: as of `put`.
        """


@runtime_checkable
class Keeps(Protocol):
    """A store whose objects their writers may remove, unless they are kept.

    Others need no such thing: a bucket's rules give no learner the right to delete.
    """

    def keep(self, name: str, limit_bytes: int) -> None:
        """Keep the present bytes of `name`, whatever its writer does."""


def check_range(name: str, start: int, stop: int, size_bytes: int | None = None) -> None:
    """Refuse a range of bytes that is empty, or not within an object of `size_bytes`.

    Args:
        name: the object.
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
    """Refuse an object that is larger than its reader wants.

    Raises:
        ObjectTooLargeError: it has more than `limit_bytes`.
    """
    if limit_bytes is not None and size_bytes > limit_bytes:
        raise ObjectTooLargeError(
            f"object {name!r} has {size_bytes} bytes, at most {limit_bytes} were expected"
        )


def check_object_name(name: str) -> None:
    """Refuse a name that some backend could not hold.

    Names are relative: tokens of `[A-Za-z0-9._=-]`, at most 255 long, joined by single '/', no
    token '.' or '..', 512 characters in all; first tokens '.tmp' and '.kept' are a backend's own.

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
    """Bucket, and prefix without a last '/', of a URL like "gs://bucket/prefix".

    Raises:
        ConfigError: it names no bucket, or a prefix that cannot be one.
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
    """The error that `put` raises when other bytes stand under `name`."""
    return ObjectExistsError(
        f"an object {name!r} with other bytes exists",
        hint="names are create-only; two writers used one name for different contents",
    )


def object_unreadable(name: str, why: str) -> ObjectUnreadableError:
    """The error that reading raises when no plain object stands under `name`."""
    return ObjectUnreadableError(
        f"object {name!r} cannot be read: {why}",
        hint="nothing of this project stores such an object; see who may write there",
    )


def object_missing(name: str) -> ObjectMissingError:
    """The error that `get` raises when there is no `name`."""
    return ObjectMissingError(f"no object {name!r}")


class Deadline:
    """A time by which reading an object must be done.

    Args:
        name: the object.
        within_s: from now on; None for however long.
    """

    def __init__(self, name: str, within_s: float | None) -> None:
        self._name = name
        self._within_s = within_s
        self._until_s = None if within_s is None else time.monotonic() + within_s

    def check(self) -> None:
        """Refuse to read on when it has passed.

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
        """Call `interrupt` from another thread if it passes while the block runs.

        Who waits for bytes that come one by one never gets to `check`.
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
    """The bytes of an object, compared with size and checksum in the message that names it.

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
