"""Buckets of S3 and Azure, and of servers that speak as they do (R2, MinIO), by `obstore`.

Where they are and who asks is read from the environment, as their own tools do: `AWS_...` and
`AZURE_...`. Google's buckets have a client of their own (`diloco.common.storage.store.gcs`). Most
of the client's errors are of one class: what they are stands in their text.
"""

import contextlib
import io
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import obstore
from obstore import exceptions as theirs
from obstore.store import AzureStore, S3Store

from diloco.common.process.config import allows_http
from diloco.common.protocol.errors import (
    ConfigError,
    ObjectExistsError,
    StoreError,
    StoreUnavailableError,
)
from diloco.common.protocol.shards import Buffers, Data
from diloco.common.storage.store.protocol import (
    Deadline,
    ObjectInfo,
    ObjectStore,
    check_object_name,
    check_range,
    check_size,
    object_exists,
    object_missing,
    object_unreadable,
    split_url,
)

if TYPE_CHECKING:
    from obstore import GetResult


# To connect; between two bytes; and of a request, which may send some gigabytes.
_TIMEOUTS = {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "1h"}
_RETRY: Any = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}
# What the environment must say of who asks.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give this machine an"
    " identity",
}
HTTP = {"s3": "AWS_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}


class BucketLocation(NamedTuple):
    """The place of a store's objects; `prefix` is '' or ends in '/'."""

    scheme: str
    bucket: str
    prefix: str

    def url(self, name: str) -> str:
        """The URL of an object, for messages."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}{name}"


def parse(url: str) -> BucketLocation:
    """Parse a URL like "s3://bucket/prefix".

    Raises:
        ConfigError: it names no bucket, or a prefix that cannot be one.
    """
    bucket, prefix = split_url(url)
    return BucketLocation(url.partition("://")[0], bucket, f"{prefix}/" if prefix else "")


def connect(place: BucketLocation) -> S3Store | AzureStore:
    """A client for a bucket; nothing is asked of the service yet.

    Raises:
        ConfigError: the environment's variables do not describe a usable client.
    """
    options: Any = {
        "prefix": place.prefix.rstrip("/") or None,
        "client_options": {**_TIMEOUTS, "allow_http": allows_http(HTTP[place.scheme])},
        "retry_config": _RETRY,
    }
    try:
        if place.scheme == "az":
            return AzureStore(place.bucket, **options)
        return S3Store(place.bucket, conditional_put="etag", checksum_algorithm="SHA256", **options)
    except (theirs.BaseError, ValueError) as error:
        told = str(error).partition("\n")[0]
        raise ConfigError(
            f"{place.url('')!r}: {told}", hint=f"set {CREDENTIALS[place.scheme]}"
        ) from error


_STATUS = re.compile(r"status code: (\d{3})")
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound")
# Whom clients ask for a machine's own credentials where the environment has none.
_METADATA = re.compile(r"169\.254\.\d+\.\d+")
# Nothing was sent: the environment's variables are not usable.
_UNSENT = re.compile(r"must be specified|Missing[A-Z]\w+|builder error|invalid peer certificate")
_PLAIN = "builder error"


def names_no_bucket(error: BaseException) -> bool:
    """Whether an object is missing because its bucket is."""
    return bool(_NO_BUCKET.search(str(error)))


@contextlib.contextmanager
def our_errors(action: str, place: BucketLocation, name: str) -> Iterator[None]:
    """Turn the client's errors into our errors.

    Args:
        action: the attempt: "store", "read", "list" or "delete".
        place: where.
        name: of the object, without the prefix.
    """
    where = place.url(name)
    try:
        yield
    except FileNotFoundError as error:
        if action in {"store", "list"} or names_no_bucket(error):
            raise _no_bucket(action, where, place) from error
        raise object_missing(name) from error
    except (theirs.PermissionDeniedError, theirs.UnauthenticatedError) as error:
        raise StoreError(
            f"cannot {action} {where!r}: {_brief(error)}",
            hint=f"let this daemon's account {action} in {place.bucket!r}; see docs/stores.md",
        ) from error
    except (theirs.BaseError, OSError) as error:
        raise _fault(action, where, place, error) from error


def _fault(action: str, where: str, place: BucketLocation, error: BaseException) -> StoreError:
    """The error of ours for an error that has no class of its own."""
    text, status = str(error), _status_of(error)
    told = f"cannot {action} {where!r}: {_brief(error)}"
    if names_no_bucket(error):
        return _no_bucket(action, where, place)
    if _METADATA.search(text):
        # It may be away for a moment where a machine has one.
        fault = StoreUnavailableError if status is None or status in _PASSING else StoreError
        return fault(
            f"the environment names nobody, and {told}", hint=f"set {CREDENTIALS[place.scheme]}"
        )
    if status is None and _UNSENT.search(text):
        plain = f"of an endpoint without TLS, set {HTTP[place.scheme]}=true"
        return StoreError(told, hint=plain if _PLAIN in text else None)
    if status is None or status in _PASSING:
        return StoreUnavailableError(
            told, hint="this is retried; see runbooks/store-away.md if it lasts"
        )
    return StoreError(told)


def _no_bucket(action: str, where: str, place: BucketLocation) -> StoreError:
    return StoreError(
        f"cannot {action} {where!r}: there is no bucket {place.bucket!r}",
        hint="correct store.url, or make the bucket",
    )


def _brief(error: BaseException) -> str:
    """An error in one line that a log can hold, without the client's own structures."""
    told = str(error).partition("Debug source")[0]
    return " ".join(f"{type(error).__name__}: {told}".split())[:300]


def _status_of(error: BaseException) -> int | None:
    """The status of the answer over HTTP, if there was one."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


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


class BucketStore(ObjectStore):
    """Objects in a bucket, below a prefix.

    Args:
        place: where.
    """

    def __init__(self, place: BucketLocation) -> None:
        self._place = place
        self._client = connect(place)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="bucket")

    def check_creates_only(self) -> None:
        """Check, by trying, that the service never stores an object over another.

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
        """As `ObjectStore.put`; durable when this returns."""
        check_object_name(name)
        # Its client takes them in one place, or makes a copy itself.
        view = memoryview(bytes(data) if isinstance(data, Buffers) else data).cast("B")
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
        """As `ObjectStore.get`; unreadable is what is encoded."""
        check_object_name(name)
        deadline = Deadline(name, within_s)
        with our_errors("read", self._place, name):
            first = self._open(name)
            check_size(name, first.meta["size"], limit_bytes)
            return self._span(name, first, (0, first.meta["size"]), deadline)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """As `ObjectStore.get_range`, all of one object."""
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

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `ObjectStore.walk`, page by page."""
        # What the client calls a prefix is made of whole tokens.
        folder = prefix.rpartition("/")[0]
        with our_errors("list", self._place, prefix):
            for page in obstore.list(self._client, prefix=folder or None):
                for found in page:
                    if found["path"].startswith(prefix):
                        yield ObjectInfo(found["path"], found["size"])

    def delete(self, name: str) -> None:
        """As `ObjectStore.delete`."""
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
