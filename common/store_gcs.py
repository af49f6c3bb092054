"""Google Cloud Storage as an object store: `gs://bucket/prefix`.

- Create-only: every upload has the condition "generation 0". A 412 answer may mean that an earlier
  attempt was stored and its answer lost, so what is there is compared by size and crc32c.
- Large objects go up in one resumable session, which asks after a broken connection how much has
  arrived and sends the rest; they come down as ranges on several threads, into one buffer.
- Checked from end to end: the service compares each upload with our crc32c, we each download of a
  whole object. It knows no checksum of a range: who reads ranges checks what they hold.
- Passing faults (408, 429, 5xx, broken connections, time-outs) are retried with exponential backoff
  and full jitter, but only for `RETRY_S` without a byte of progress: callers wait out long outages
  with `Runtime.retry`, which tells the operator.

The only file that imports google.cloud, and requests under it.
"""

import base64
import contextlib
import io
import json
import secrets
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from http import HTTPStatus
from typing import Any

import google.auth
import google_crc32c
import requests
from google.api_core import exceptions as api
from google.api_core.retry import Retry
from google.auth import exceptions as auth
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from requests.adapters import HTTPAdapter

from diloco.common.errors import (
    ConfigError,
    ObjectMissingError,
    ObjectRangeError,
    ObjectTooLargeError,
    StoreError,
    StoreUnavailableError,
)
from diloco.common.store import (
    ObjectInfo,
    check_object_name,
    check_range,
    check_size,
    object_exists,
    object_missing,
)

ENDPOINT = "https://storage.googleapis.com"
RETRY_S = 10.0
TIMEOUT_S = (10.0, 30.0)  # to connect, or to send a piece; between two bytes of an answer
PART_BYTES = 8 << 20  # of a download; what is larger goes up in a session
RANGE_THREADS = 8
# Callers run on many threads of their own; each needs a connection beside those of the ranges.
CONNECTIONS = 64
DOWNLOADS = 3  # of an object whose bytes come damaged
_PIECE_BYTES = 1 << 20
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_TYPE = "application/octet-stream"
_PASSING_CODES = {408, 429, 500, 502, 503, 504}
_BROKEN = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    auth.TransportError,
    ConnectionError,
)


def open_gcs(url: str, emulator: str | None = None) -> "GcsStore":
    """The store at `url`, "gs://bucket" or "gs://bucket/prefix".

    Args:
        url: names the bucket; objects are below the prefix.
        emulator: address of a server for tests, used without credentials; None for Google's, with
            application-default credentials.

    Raises:
        ConfigError: the URL names no bucket, or a prefix that cannot be one.
        StoreError: there are no credentials.
    """
    bucket, _, prefix = url.removeprefix("gs://").partition("/")
    prefix = prefix.rstrip("/")
    if not bucket:
        raise ConfigError(f"{url!r} names no bucket", hint="write gs://bucket/prefix")
    try:
        if prefix:
            check_object_name(prefix)
    except StoreError as error:
        raise ConfigError(f"{url!r}: {error.message}", hint=error.hint) from error
    credentials = AnonymousCredentials() if emulator else _default_credentials()
    return GcsStore(bucket, prefix, credentials, endpoint=emulator or ENDPOINT)


class GcsStore:
    """Objects in a bucket, below a prefix.

    Args:
        bucket: its name.
        prefix: before every object's name, joined with '/'; '' for none.
        credentials: who asks.
        endpoint: address of the service.
        retry_s: passing faults are retried for so long without progress.
        timeout_s: longest waits to connect, and between two bytes.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        credentials: Credentials,
        *,
        endpoint: str = ENDPOINT,
        retry_s: float = RETRY_S,
        timeout_s: tuple[float, float] = TIMEOUT_S,
    ) -> None:
        self._prefix = f"{prefix}/" if prefix else ""
        self._session = AuthorizedSession(credentials)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
        self._session.hooks["response"].append(_read_refusal)
        # The session is given so that all requests share its large pool of connections.
        client = storage.Client(
            project=None,
            credentials=credentials,
            _http=self._session,
            client_options={"api_endpoint": endpoint},
        )
        self._bucket = client.bucket(bucket)
        self._media_url = f"{endpoint}/download/storage/v1/b/{bucket}/o/"
        self._upload_url = f"{endpoint}/upload/storage/v1/b/{bucket}/o"
        self._timeout_s = timeout_s
        self._retry = Retry(
            predicate=_is_passing, initial=0.1, maximum=2.0, multiplier=2.0, timeout=retry_s
        )
        self._pool = ThreadPoolExecutor(RANGE_THREADS, thread_name_prefix="gcs")

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Store `data` under `name`; durable when this returns.

        Raises:
            ObjectExistsError: other bytes stand under that name.
            StoreUnavailableError: a passing fault; nothing or everything was stored.
            StoreError: not permitted, no such bucket, or `name` is no object name.
        """
        check_object_name(name)
        view = memoryview(data).cast("B")
        checksum = _encode(_crc32c(data, view))
        upload = self._upload_at_once if view.nbytes <= PART_BYTES else self._upload_in_session
        with self._errors("store", name, "storage.objects.create"):
            while True:
                try:
                    return upload(name, view, checksum)
                except api.PreconditionFailed:
                    found = self._look_up(name)
                # None: deleted since.
                if found == (view.nbytes, checksum):
                    return None
                if found is not None:
                    raise object_exists(name)

    def get(self, name: str, limit_bytes: int | None = None) -> bytes:
        """The bytes of `name`.

        Raises:
            ObjectMissingError: no such object.
            ObjectTooLargeError: it has more than `limit_bytes`; no more than its head was read.
            StoreUnavailableError: a passing fault, or the bytes come damaged again and again.
            StoreError: not permitted, no such bucket, or `name` is no object name.
        """
        check_object_name(name)
        with self._errors("read", name, "storage.objects.get"):
            for _ in range(DOWNLOADS):
                data, checksum = self._download(name, limit_bytes)
                if _encode(google_crc32c.value(data)) == checksum:
                    return data
        raise StoreUnavailableError(
            f"the bytes of {name!r} came damaged {DOWNLOADS} times: their crc32c is not {checksum}",
            hint="look for a proxy or a faulty network device between here and the store",
        )

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of `name`, all of one object, but not compared with a checksum.

        Raises:
            ObjectMissingError: no such object.
            ObjectRangeError: the range is empty, or ends beyond the object.
            StoreUnavailableError: a passing fault.
            StoreError: not permitted, no such bucket, or `name` is no object name.
        """
        check_object_name(name)
        check_range(name, start, stop)
        with self._errors("read", name, "storage.objects.get"):
            try:
                first = self._retry(self._open)(name, start, min(stop - start, PART_BYTES))
            except api.RequestRangeNotSatisfiable as error:
                raise ObjectRangeError(
                    f"object {name!r} ends before byte {start}, [{start}, {stop}) were expected"
                ) from error
            try:
                check_range(name, start, stop, _size_of(first))
            except ObjectRangeError:
                first.close()
                raise
            return self._read_span(name, first, start, stop)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose names begin with `prefix`, in order of name.

        Raises:
            StoreUnavailableError: a passing fault.
            StoreError: not permitted, or no such bucket.
        """
        with self._errors("list", prefix, "storage.objects.list"):
            blobs = self._bucket.list_blobs(
                prefix=self._prefix + prefix,
                fields="items(name,size),nextPageToken",
                retry=self._retry,
                timeout=self._timeout_s,
            )
            cut = len(self._prefix)
            return sorted(ObjectInfo(blob.name[cut:], int(blob.size)) for blob in blobs)

    def delete(self, name: str) -> None:
        """Remove `name`; one that is not there is no error.

        Raises:
            StoreUnavailableError: a passing fault.
            StoreError: not permitted, no such bucket, or `name` is no object name.
        """
        check_object_name(name)
        with (
            contextlib.suppress(ObjectMissingError),
            self._errors("delete", name, "storage.objects.delete"),
        ):
            self._blob(name).delete(retry=self._retry, timeout=self._timeout_s)

    def _blob(self, name: str) -> storage.Blob:
        return self._bucket.blob(self._prefix + name)

    def _look_up(self, name: str) -> tuple[int, str] | None:
        """Size and crc32c of an object; None if it is not there."""
        with self._errors("look up", name, "storage.objects.get"):
            blob = self._bucket.get_blob(
                self._prefix + name, retry=self._retry, timeout=self._timeout_s
            )
        return None if blob is None else (int(blob.size), str(blob.crc32c))

    def _upload_at_once(self, name: str, view: memoryview, checksum: str) -> None:
        boundary = secrets.token_hex(16)
        begin, end = f"--{boundary}\r\nContent-Type: ", f"\r\n--{boundary}--"
        metadata = json.dumps({"name": self._prefix + name, "crc32c": checksum})
        head = f"{begin}application/json\r\n\r\n{metadata}\r\n{begin}{_TYPE}\r\n\r\n"
        body = _Body(head.encode(), view, end.encode())
        self._retry(self._begin)("multipart", body, f"multipart/related; boundary={boundary}")

    def _upload_in_session(self, name: str, view: memoryview, checksum: str) -> None:
        metadata = json.dumps({"name": self._prefix + name, "crc32c": checksum})
        begun = self._retry(self._begin)("resumable", metadata.encode(), "application/json")
        upload = _Upload(self._session, begun.headers["Location"], view, self._timeout_s)
        while upload.sent < view.nbytes:
            self._retry(upload.step)()

    def _begin(self, kind: str, body: "_Body | bytes", content_type: str) -> requests.Response:
        response = self._session.post(
            self._upload_url,
            params={"uploadType": kind, "ifGenerationMatch": "0"},
            data=body,
            headers={"Content-Type": content_type},
            timeout=self._timeout_s,
        )
        if not response.ok:
            raise api.from_http_response(response)
        return response

    def _download(self, name: str, limit_bytes: int | None) -> tuple[bytes, str]:
        """An object's bytes, not yet checked, and the crc32c that the service has of them."""
        try:
            first = self._retry(self._open)(name, 0, PART_BYTES)
        except api.RequestRangeNotSatisfiable:  # An empty object has no range.
            with self._retry(self._open)(name, 0, None) as first:
                return first.content, _stored_checksum(first)
        size = _size_of(first)
        try:
            check_size(name, size, limit_bytes)
        except ObjectTooLargeError:
            first.close()
            raise
        return self._read_span(name, first, 0, size), _stored_checksum(first)

    def _read_span(self, name: str, first: requests.Response, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of an object; `first` is the answer for their first part."""
        # A BytesIO of zeros, filled through its buffer, gives out `bytes` without another copy.
        buffer = io.BytesIO(bytes(stop - start))
        with buffer.getbuffer() as window:
            self._fill(name, first, start, window)
        return buffer.getvalue()

    def _fill(self, name: str, first: requests.Response, begin: int, window: memoryview) -> None:
        """Read what begins at byte `begin`; `first` is the answer for its first part."""
        generation = first.headers["x-goog-generation"]
        broken = threading.Event()

        def read(start: int, opened: requests.Response | None) -> None:
            part = window[start : start + PART_BYTES]
            try:
                self._read_part(name, generation, begin + start, part, opened, broken)
            except BaseException:
                broken.set()
                raise
            finally:
                part.release()

        starts = range(PART_BYTES, len(window), PART_BYTES)
        others = [self._pool.submit(read, start, None) for start in starts]
        try:
            read(0, first)
        finally:
            wait(others)
        for other in others:
            other.result()

    def _read_part(
        self,
        name: str,
        generation: str,
        start: int,
        part: memoryview,
        opened: requests.Response | None,
        broken: threading.Event,
    ) -> None:
        """Fill `part` with the bytes from `start`; a broken answer is continued where it ended.

        Returns early once `broken` is set: another part has failed.
        """
        filled = 0

        def attempt() -> int:
            nonlocal opened
            response, opened = opened, None
            if response is None:
                left = len(part) - filled
                response = self._open(name, start + filled, left, generation)
            return _read_into(response, part[filled:])

        while filled < len(part) and not broken.is_set():
            filled += self._retry(attempt)()

    def _open(
        self, name: str, start: int, count: int | None, generation: str | None = None
    ) -> requests.Response:
        """The answer for `count` bytes from `start`, of which only the head has been read."""
        headers = {"Accept-Encoding": "identity"}
        if count is not None:
            headers["Range"] = f"bytes={start}-{start + count - 1}"
        params = {"alt": "media"} | ({"generation": generation} if generation else {})
        url = self._media_url + urllib.parse.quote(self._prefix + name, safe="")
        response = self._session.get(
            url, params=params, headers=headers, timeout=self._timeout_s, stream=True
        )
        if response.status_code != (200 if count is None else 206):
            raise api.from_http_response(response)
        return response

    @contextlib.contextmanager
    def _errors(self, action: str, name: str, permission: str) -> Iterator[None]:
        """Turn what the client raises into our errors."""
        where = f"gs://{self._bucket.name}/{self._prefix}{name}"
        try:
            yield
        except api.RetryError as error:
            raise _away(action, where, error.cause or error) from error
        except api.NotFound as error:
            if action in {"store", "list"} or "bucket does not exist" in str(error):
                raise StoreError(
                    f"cannot {action} {where!r}: there is no bucket {self._bucket.name!r}",
                    hint="correct store.url, or make the bucket; names are global",
                ) from error
            raise object_missing(name) from error
        except api.Forbidden as error:
            raise StoreError(
                f"cannot {action} {where!r}: {_brief(error)}",
                hint=f"grant {permission} on bucket {self._bucket.name!r} to this daemon's account",
            ) from error
        except (api.Unauthorized, auth.GoogleAuthError) as error:
            if _is_passing(error):
                raise _away(action, where, error) from error
            raise _no_credentials(f"cannot {action} {where!r}: {_brief(error)}") from error
        except (api.GoogleAPICallError, requests.RequestException, ConnectionError) as error:
            if _is_passing(error):
                raise _away(action, where, error) from error
            raise StoreError(f"cannot {action} {where!r}: {_brief(error)}") from error


class _Body:
    """A request's body of several views, sent without a copy.

    It goes piece by piece, because a time-out counts for each piece and not for the whole.
    """

    def __init__(self, *views: bytes | memoryview) -> None:
        self._views = [memoryview(view) for view in views]

    def __len__(self) -> int:
        return sum(view.nbytes for view in self._views)

    def __iter__(self) -> Iterator[Any]:  # memoryviews, of which the types of requests know nothing
        for view in self._views:
            for start in range(0, view.nbytes, _PIECE_BYTES):
                yield view[start : start + _PIECE_BYTES]


class _Upload:
    """One resumable upload.

    Args:
        session: makes the requests.
        url: of the upload session.
        view: all bytes.
        timeout_s: see `GcsStore`.

    Attributes:
        sent: bytes that the service is known to have; all of them once the object is stored.
    """

    def __init__(
        self, session: requests.Session, url: str, view: memoryview, timeout_s: tuple[float, float]
    ) -> None:
        self.sent = 0
        self._session = session
        self._url = url
        self._view = view
        self._timeout_s = timeout_s
        self._unsure = False

    def step(self) -> None:
        """Send what is left; after a failure, only ask how much has arrived."""
        size, before = self._view.nbytes, self.sent
        if self._unsure:
            self.sent = self._request(f"bytes */{size}", b"")
        self._unsure = True
        if self.sent <= before:
            span = f"bytes {self.sent}-{size - 1}/{size}"
            self.sent = self._request(span, _Body(self._view[self.sent :]))
        if self.sent <= before:
            raise api.ServiceUnavailable(f"the upload took no byte beyond {before}")
        self._unsure = False

    def _request(self, span: str, data: "_Body | bytes") -> int:
        """The bytes that the service has after this request."""
        response = self._session.put(
            self._url,
            data=data,
            headers={"Content-Range": span, "Content-Type": _TYPE},
            timeout=self._timeout_s,
            allow_redirects=False,
        )
        if response.status_code in {200, 201}:
            return self._view.nbytes
        if response.status_code == HTTPStatus.PERMANENT_REDIRECT:
            last = response.headers.get("Range", "").rpartition("-")[2]
            return int(last) + 1 if last else 0
        error = api.from_http_response(response)
        if response.status_code in {404, 410} or _is_damage(error):
            raise StoreUnavailableError(f"an upload must restart: {_brief(error)}")
        raise error


def _read_into(response: requests.Response, part: memoryview) -> int:
    """Read an answer's body into `part`; the bytes read, some at least, if it breaks off."""
    count = 0
    with response:
        try:
            for piece in response.iter_content(_PIECE_BYTES):
                part[count : count + len(piece)] = piece
                count += len(piece)
        except _BROKEN:
            if not count:
                raise
    return count


def _read_refusal(response: requests.Response, **_: object) -> None:
    """Read an error's body at once, which frees its connection even where nobody else looks."""
    if not response.ok:
        response.content  # noqa: B018 - reading the attribute reads the body


def _default_credentials() -> Credentials:
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except auth.GoogleAuthError as error:
        raise _no_credentials(f"there are no Google credentials: {_brief(error)}") from error
    return credentials


def _is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed soon."""
    if isinstance(error, api.GoogleAPICallError):
        return error.code in _PASSING_CODES or _is_damage(error)
    if isinstance(error, auth.GoogleAuthError):
        return isinstance(error, auth.TransportError) or bool(error.retryable)
    return isinstance(error, _BROKEN)


def _is_damage(error: api.GoogleAPICallError) -> bool:
    """Whether an upload was refused because its bytes are not those that were sent."""
    return error.code == HTTPStatus.BAD_REQUEST and "CRC32C" in str(error)


def _away(action: str, where: str, error: BaseException) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"cannot {action} {where!r}: {_brief(error)}",
        hint="this is retried; see runbooks/store-away.md if it lasts",
    )


def _no_credentials(message: str) -> StoreError:
    return StoreError(
        message,
        hint="give this daemon a service account, or run 'gcloud auth application-default login'",
    )


def _brief(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _size_of(response: requests.Response) -> int:
    """Size of the object that a range was read of, from a header like "bytes 0-9/1000"."""
    return int(response.headers["Content-Range"].rpartition("/")[2])


def _stored_checksum(response: requests.Response) -> str:
    """The crc32c in a header like "crc32c=AAAAAA==,md5=..."."""
    hashes = (item.strip().partition("=") for item in response.headers["x-goog-hash"].split(","))
    return next(value for kind, _, value in hashes if kind == "crc32c")


def _crc32c(data: bytes | memoryview, view: memoryview) -> int:
    """Of `data`, whose bytes `view` shows; the library takes nothing but `bytes`."""
    if isinstance(data, bytes):
        return int(google_crc32c.value(data))
    value = 0
    for start in range(0, view.nbytes, _PIECE_BYTES):
        value = google_crc32c.extend(value, bytes(view[start : start + _PIECE_BYTES]))
    return value


def _encode(crc32c: int) -> str:
    """A checksum as the service writes it: base64 of four bytes, the greatest first."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()
