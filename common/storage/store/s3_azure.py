"""Buckets of S3 and Azure, and of compatible servers (R2, MinIO), through `obstore`.

Address and credentials come from the environment variables `AWS_...` and `AZURE_...`, as with the
vendors' own tools. Google's buckets have another client (`diloco.common.storage.store.gcs`). Most
errors of obstore have one class, so that only their text tells them apart.
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


# For connecting, and for a request, which may send some gigabytes.
_TIMEOUTS = {"connect_timeout": "10s", "timeout": "1h"}
# Of requests that send little: until the answer, and between two bytes of it. It counts from the
# request's beginning, so that it would end an upload that takes longer.
_ANSWER = {"read_timeout": "30s"}
_RETRY: Any = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}
# The credentials that the environment must provide.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give this machine an"
    " identity",
}
HTTP = {"s3": "AWS_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}


class BucketLocation(NamedTuple):
    """The bucket and the prefix of a store's objects.

    Attributes:
        scheme: "s3" or "az".
        prefix: precedes every object's name; '' or ending in '/'.
    """

    scheme: str
    bucket: str
    prefix: str

    def url(self, name: str) -> str:
        """Returns the URL of an object, for messages."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}{name}"


def parse(url: str) -> BucketLocation:
    """Parses a URL like "s3://bucket/prefix".

    Raises:
        ConfigError: the URL names no bucket, or has a prefix that cannot be used.
    """
    bucket, prefix = split_url(url)
    return BucketLocation(url.partition("://")[0], bucket, f"{prefix}/" if prefix else "")


def connect(place: BucketLocation, *, uploads: bool = False) -> S3Store | AzureStore:
    """Returns a client for a bucket; sends no request yet.

    Args:
        place: the bucket.
        uploads: whether the client's requests send objects, which take long.

    Raises:
        ConfigError: the environment's variables do not describe a usable client.
    """
    options: Any = {
        "prefix": place.prefix.rstrip("/") or None,
        "client_options": {
            **_TIMEOUTS,
            **({} if uploads else _ANSWER),
            "allow_http": allows_http(HTTP[place.scheme]),
        },
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
# The metadata server, which clients ask if the environment has no credentials.
_METADATA = re.compile(r"169\.254\.\d+\.\d+")
# Errors before any request: the environment's variables are not usable.
_UNSENT = re.compile(r"must be specified|Missing[A-Z]\w+|builder error|invalid peer certificate")
_PLAIN = "builder error"


def bucket_is_missing(error: BaseException) -> bool:
    """True if an error says that the bucket itself does not exist."""
    return bool(_NO_BUCKET.search(str(error)))


@contextlib.contextmanager
def our_errors(action: str, place: BucketLocation, name: str) -> Iterator[None]:
    """Turns the client's errors into this project's errors.

    Args:
        action: the attempt: "store", "read", "list" or "delete".
        place: the store's location.
        name: the object's name without the prefix.

    Raises:
        ObjectMissingError: the service has no object of that name.
        StoreUnavailableError: a transient fault.
        StoreError: any other error.
    """
    where = place.url(name)
    try:
        yield
    except FileNotFoundError as error:
        if action in {"store", "list"} or bucket_is_missing(error):
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
    """Returns this project's error for a client's error that has no class of its own."""
    text, status = str(error), _status_of(error)
    told = f"cannot {action} {where!r}: {_brief(error)}"
    if bucket_is_missing(error):
        return _no_bucket(action, where, place)
    if _METADATA.search(text):
        # On a machine that has a metadata server, the server may be away for a moment.
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
    """Returns an error as one line for a log, without the client's internal structures."""
    told = str(error).partition("Debug source")[0]
    return " ".join(f"{type(error).__name__}: {told}".split())[:300]


def _status_of(error: BaseException) -> int | None:
    """Returns the HTTP status of the answer; None if there was no answer."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


PART_BYTES = 8 << 20  # the part size of downloads; parts of a large object are read in parallel
_THREADS = 8


def open_bucket(url: str, *, check: bool = False) -> "BucketStore":
    """Opens the store at `url`, "s3://bucket/prefix" or "az://container/prefix".

    Args:
        url: names the bucket, and the prefix of the objects.
        check: first store and delete an object, to see that the service never overwrites an object,
            as some services with the S3 protocol do.

    Raises:
        ConfigError: the URL names no bucket, has a prefix that cannot be used, or the environment's
            variables are not usable.
        StoreError: the service overwrites, or cannot be used.
    """
    store = BucketStore(parse(url))
    if check:
        store.check_creates_only()
    return store


class BucketStore(ObjectStore):
    """Objects in a bucket, below a prefix.

    Args:
        place: the store's location.
    """

    def __init__(self, place: BucketLocation) -> None:
        self._place = place
        self._client, self._uploads = connect(place), connect(place, uploads=True)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="bucket")

    def check_creates_only(self) -> None:
        """Checks, by trying, that the service never overwrites an object.

        Raises:
            StoreError: the service overwrites, or cannot be used.
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
        """Implements `ObjectStore.put`; the object is durable when this returns."""
        check_object_name(name)
        # The client needs contiguous bytes, or makes a copy itself.
        view = memoryview(bytes(data) if isinstance(data, Buffers) else data).cast("B")
        with our_errors("store", self._place, name):
            while True:
                try:
                    obstore.put(self._uploads, name, view, mode="create", use_multipart=False)
                except theirs.AlreadyExistsError:
                    same = self._has(name, view)
                else:
                    return
                # None: the object was deleted since, so try again.
                if same:
                    return
                if same is not None:
                    raise object_exists(name)

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Implements `ObjectStore.get`; encoded objects are unreadable."""
        check_object_name(name)
        deadline = Deadline(name, within_s)
        with our_errors("read", self._place, name):
            first = self._open(name)
            check_size(name, first.meta["size"], limit_bytes)
            return self._span(name, first, (0, first.meta["size"]), deadline)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Implements `ObjectStore.get_range`.

        All bytes are of one generation of the object, even if it is replaced meanwhile.
        """
        check_object_name(name)
        check_range(name, start, stop)
        with our_errors("read", self._place, name):
            try:
                first = self._open(name, range=(start, min(stop, start + PART_BYTES)))
            except theirs.BaseError:
                # Services answer with different errors to a range that begins after the end.
                check_range(name, start, stop, obstore.head(self._client, name)["size"])
                raise
            check_range(name, start, stop, first.meta["size"])
            return self._span(name, first, (start, stop), Deadline(name, None))

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Implements `ObjectStore.walk`, page by page."""
        # The client's prefixes consist of whole tokens.
        folder = prefix.rpartition("/")[0]
        with our_errors("list", self._place, prefix):
            for page in obstore.list(self._client, prefix=folder or None):
                for found in page:
                    if found["path"].startswith(prefix):
                        yield ObjectInfo(found["path"], found["size"])

    def delete(self, name: str) -> None:
        """Implements `ObjectStore.delete`."""
        check_object_name(name)
        with our_errors("delete", self._place, name):
            try:
                obstore.delete(self._client, name)
            except FileNotFoundError as error:
                if bucket_is_missing(error):
                    raise

    def _has(self, name: str, view: memoryview) -> bool | None:
        """True if the object `name` has the bytes of `view`; None if there is no such object."""
        try:
            found = self._open(name)
        except FileNotFoundError:
            return None
        size = found.meta["size"]
        if size != view.nbytes:
            return False
        return self._span(name, found, (0, size), Deadline(name, None)) == view

    def _open(self, name: str, **options: object) -> "GetResult":
        """Requests an object; returns the answer, whose body the caller reads.

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
        """Returns the bytes of `span`, [start, stop); `first` is the answer for the first part."""
        start, stop = span
        etag = first.meta["e_tag"]

        def read(begin: int) -> None:
            part = window[begin : begin + PART_BYTES]
            bounds = (start + begin, start + begin + len(part))
            answer = self._open(name, range=bounds, if_match=etag) if begin else first
            _fill(name, answer, part, deadline)

        # A BytesIO of zeros, filled through its buffer, returns `bytes` without another copy.
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
                wait(others)  # until no thread writes into the buffer any more
            for other in others:
                other.result()
        return buffer.getvalue()


def _fill(name: str, answer: "GetResult", part: memoryview, deadline: Deadline) -> None:
    """Fills `part` with an answer's body.

    Raises:
        StoreUnavailableError: the body is shorter than `part`.
        StoreSlowError: the deadline has passed.
    """
    count = 0
    deadline.check()
    # Small pieces as they come, so that the deadline is checked even if bytes trickle in.
    for piece in answer.stream(min_chunk_size=1):
        data = memoryview(piece)[: len(part) - count]
        part[count : count + len(data)] = data
        count += len(data)
        if count == len(part):
            return  # Other threads read the rest.
        deadline.check()
    if count < len(part):
        raise StoreUnavailableError(
            f"object {name!r} broke off after {count} of {len(part)} bytes",
            hint="this is retried; see runbooks/store-away.md if it lasts",
        )
