"""The store: what the protocol asks for, of one bucket."""

import io
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, cast

import obstore
from obstore import exceptions as theirs

from diloco.common.errors import (
    ObjectExistsError,
    StoreError,
    StoreUnavailableError,
)
from diloco.common.parts import Data, Parts
from diloco.common.store.buckets.faults import names_no_bucket, our_errors
from diloco.common.store.buckets.place import Place, connect, parse
from diloco.common.store.deadline import Deadline
from diloco.common.store.protocol import (
    ObjectInfo,
    check_object_name,
    check_range,
    check_size,
    object_exists,
    object_unreadable,
)

if TYPE_CHECKING:
    from obstore import GetResult

PART_BYTES = 8 << 20  # of a download; larger objects come in several at once
_THREADS = 8


def open_bucket(url: str, *, check: bool = False) -> "BucketStore":
    """The store at `url`, "s3://bucket/prefix" or "az://container/prefix".

    Args:
        url: names the bucket; objects are below the prefix.
        check: try first that the service keeps what stands under a name, as not all that speak S3
            do. It stores an object and deletes it.

    Raises:
        ConfigError: the URL names no bucket, or a prefix that cannot be one; what the environment
            says does not do.
        StoreError: the service overwrites, or cannot be used.
    """
    store = BucketStore(parse(url))
    if check:
        store.check_creates_only()
    return store


class BucketStore:
    """Objects in a bucket, below a prefix.

    Args:
        place: where.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._client = connect(place)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="bucket")

    def check_creates_only(self) -> None:
        """Try that an object cannot be stored over another.

        Raises:
            StoreError: it can be, or the service cannot be used.
        """
        name = f"check/{secrets.token_hex(8)}"
        self.put(name, b"first")
        try:
            self.put(name, b"other")
        except ObjectExistsError:
            return
        finally:
            self.delete(name)
        raise StoreError(
            f"{self._place.url('')!r} overwrites what stands there: it ignores If-None-Match",
            hint="use a service, or a release of it, that has conditional writes",
        )

    def put(self, name: str, data: Data) -> None:
        """Store `data` under `name`; durable when this returns.

        Raises:
            ObjectExistsError: other bytes stand under that name.
            StoreUnavailableError: a transient fault; nothing or everything was stored.
            StoreError: not permitted, no such bucket, or `name` is not an object name.
        """
        check_object_name(name)
        # Its client takes them in one place, or makes a copy itself.
        view = memoryview(bytes(data) if isinstance(data, Parts) else data).cast("B")
        with our_errors("store", self._place, name):
            while True:
                try:
                    obstore.put(self._client, name, view, mode="create", use_multipart=False)
                except theirs.AlreadyExistsError:
                    same = self._has(name, view)
                else:
                    return
                # None: deleted since.
                if same:
                    return
                if same is not None:
                    raise object_exists(name)

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """The bytes of `name`.

        Raises:
            ObjectMissingError: no such object.
            ObjectTooLargeError: it has more than `limit_bytes`; it was not read.
            ObjectUnreadableError: it is encoded.
            StoreSlowError: it took longer than `within_s`.
            StoreUnavailableError: a transient fault.
            StoreError: not permitted, no such bucket, or `name` is not an object name.
        """
        check_object_name(name)
        deadline = Deadline(name, within_s)
        with our_errors("read", self._place, name):
            first = self._open(name)
            check_size(name, first.meta["size"], limit_bytes)
            return self._span(name, first, (0, first.meta["size"]), deadline)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of `name`, all of one object.

        Raises:
            ObjectMissingError: no such object.
            ObjectRangeError: the range is empty, or ends beyond the object.
            ObjectUnreadableError: it is encoded.
            StoreUnavailableError: a transient fault.
            StoreError: not permitted, no such bucket, or `name` is not an object name.
        """
        check_object_name(name)
        check_range(name, start, stop)
        with our_errors("read", self._place, name):
            try:
                first = self._open(name, range=(start, min(stop, start + PART_BYTES)))
            except theirs.BaseError:
                # Services have several words for a range that begins behind the end.
                check_range(name, start, stop, obstore.head(self._client, name)["size"])
                raise
            check_range(name, start, stop, first.meta["size"])
            return self._span(name, first, (start, stop), Deadline(name, None))

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose names begin with `prefix`, in order of name.

        Raises:
            StoreUnavailableError: a transient fault.
            StoreError: not permitted, or no such bucket.
        """
        return sorted(self.walk(prefix))

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `list`, one after the other, page by page.

        Raises:
            StoreUnavailableError: a transient fault.
            StoreError: not permitted, or no such bucket.
        """
        # What the client calls a prefix is made of whole tokens.
        folder = prefix.rpartition("/")[0]
        with our_errors("list", self._place, prefix):
            for page in obstore.list(self._client, prefix=folder or None):
                for found in page:
                    if found["path"].startswith(prefix):
                        yield ObjectInfo(found["path"], found["size"])

    def delete(self, name: str) -> None:
        """Remove `name`; one that is not there is no error.

        Raises:
            StoreUnavailableError: a transient fault.
            StoreError: not permitted, no such bucket, or `name` is not an object name.
        """
        check_object_name(name)
        with our_errors("delete", self._place, name):
            try:
                obstore.delete(self._client, name)
            except FileNotFoundError as error:
                if names_no_bucket(error):
                    raise

    def _has(self, name: str, view: memoryview) -> bool | None:
        """Whether an object has these bytes; None if it is not there."""
        try:
            found = self._open(name)
        except FileNotFoundError:
            return None
        size = found.meta["size"]
        if size != view.nbytes:
            return False
        return self._span(name, found, (0, size), Deadline(name, None)) == view

    def _open(self, name: str, **options: object) -> "GetResult":
        """The answer for an object, of which only the head has been read.

        Raises:
            ObjectUnreadableError: the object is encoded.
        """
        found = obstore.get(self._client, name, options=cast("Any", options) or None)
        encoding = found.attributes.get("Content-Encoding")
        if encoding not in (None, "", "identity"):
            raise object_unreadable(name, f"it is stored with the encoding {encoding!r}")
        return found

    def _span(
        self, name: str, first: "GetResult", span: tuple[int, int], deadline: Deadline
    ) -> bytes:
        """Bytes [start, stop) of an object; `first` is the answer for what begins there."""
        start, stop = span
        etag = first.meta["e_tag"]

        def read(begin: int) -> None:
            part = window[begin : begin + PART_BYTES]
            bounds = (start + begin, start + begin + len(part))
            answer = self._open(name, range=bounds, if_match=etag) if begin else first
            _fill(name, answer, part, deadline)

        # A BytesIO of zeros, filled through its buffer, gives out `bytes` without another copy.
        buffer = io.BytesIO(bytes(stop - start))
        with buffer.getbuffer() as window:
            begins = range(PART_BYTES, stop - start, PART_BYTES)
            others = [self._pool.submit(read, begin) for begin in begins]
            try:
                read(0)
            except BaseException:
                for other in others:
                    other.cancel()
                raise
            finally:
                wait(others)  # until nobody writes into the buffer any more
            for other in others:
                other.result()
        return buffer.getvalue()


def _fill(name: str, answer: "GetResult", part: memoryview, deadline: Deadline) -> None:
    """Read an answer's body into `part`."""
    count = 0
    deadline.check()
    # As they come: who waits for large pieces of what comes byte by byte never looks at the time.
    for piece in answer.stream(min_chunk_size=1):
        data = memoryview(piece)[: len(part) - count]
        part[count : count + len(data)] = data
        count += len(data)
        if count == len(part):
            return  # Others read the rest.
        deadline.check()
    if count < len(part):
        raise StoreUnavailableError(
            f"object {name!r} broke off after {count} of {len(part)} bytes",
            hint="this is retried; see runbooks/store-away.md if it lasts",
        )
