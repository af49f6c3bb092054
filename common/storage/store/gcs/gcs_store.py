"""The Google Cloud Storage backend of the object store."""

import contextlib
import time
from collections.abc import Iterator

import google.auth
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.auth.credentials import AnonymousCredentials, Credentials
from google.cloud.storage import Blob

from diloco.common.protocol.errors import (
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from diloco.common.protocol.shards import Buffers, Data, parts_of
from diloco.common.storage.store.gcs.bucket import (
    ENDPOINT,
    checksum_of,
    open_bucket,
)
from diloco.common.storage.store.gcs.downloads import Downloads
from diloco.common.storage.store.gcs.faults import brief, no_credentials
from diloco.common.storage.store.gcs.retries import RETRY_S, TIMEOUT_S
from diloco.common.storage.store.gcs.uploads import upload
from diloco.common.storage.store.protocol import (
    Deadline,
    ObjectInfo,
    ObjectStore,
    check_object_name,
    check_range,
    object_exists,
    split_url,
)

_DOWNLOADS = 3  # attempts for an object whose bytes come damaged
_UPLOADS, _PAUSE_S = 3, 1.0  # attempts for an object that is not there after its upload
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


def open_gcs(url: str, emulator: str | None = None) -> "GcsStore":
    """Opens the store at `url`, "gs://bucket" or "gs://bucket/prefix".

    Args:
        url: names the bucket, and the prefix of the objects.
        emulator: address of a server for tests, used without credentials; None for Google's, with
            application-default credentials.

    Raises:
        ConfigError: the URL names no bucket, or has a prefix that cannot be used.
        StoreError: there are no credentials.
    """
    bucket, prefix = split_url(url)
    credentials = AnonymousCredentials() if emulator else _default_credentials()
    return GcsStore(bucket, prefix, credentials, endpoint=emulator or ENDPOINT)


class GcsStore(ObjectStore):
    """Objects in a bucket, below a prefix.

    Args:
        bucket: name of the bucket.
        prefix: precedes every object's name, joined with '/'; '' for none.
        credentials: the account's credentials.
        endpoint: address of the service.
        retry_s: seconds after a transient fault for which a request is retried without progress.
        timeout_s: the longest waits in seconds: to connect, and between two bytes.
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
        self._bucket = open_bucket(bucket, prefix, credentials, endpoint, retry_s, timeout_s)
        self._downloads = Downloads(self._bucket)

    def put(self, name: str, data: Data) -> None:
        """Implements `ObjectStore.put`; the object is durable when this returns."""
        check_object_name(name)
        parts = parts_of(data)
        checksum = checksum_of(parts)
        with self._bucket.errors("store", name, "storage.objects.create"):
            for _ in range(_UPLOADS):
                if self._try_put(name, parts, checksum):
                    return
        raise StoreError(
            f"the bucket refuses to store {name!r}, and no object of that name is there",
            hint="look for a policy of the bucket or the organization that refuses new objects",
        )

    def _try_put(self, name: str, parts: Buffers, checksum: str) -> bool:
        """Tries one upload; returns True if the object is known to be stored.

        Raises:
            ObjectExistsError: other bytes are stored under that name.
        """
        with contextlib.suppress(api.PreconditionFailed):
            if upload(self._bucket, name, parts, checksum):
                return True
        found = self._look_up(name)
        if found is not None and found != (len(parts), checksum):
            raise object_exists(name)
        if found is None:  # deleted since, or refused for another reason than an existing object
            time.sleep(_PAUSE_S)
        return found is not None

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Implements `ObjectStore.get`.

        If `within_s` is None, the time limit is 60 s plus the time that 1 Mbit/s needs.
        """
        check_object_name(name)
        with self._bucket.errors("read", name, "storage.objects.get"):
            deadline = None if within_s is None else Deadline(name, within_s)
            for _ in range(_DOWNLOADS):
                data, checksum = self._downloads.whole(name, limit_bytes, deadline)
                if checksum_of(data) == checksum:
                    return data
        raise StoreUnavailableError(
            f"the bytes of {name!r} came damaged {_DOWNLOADS} times: their crc32c is not "
            f"{checksum}",
            hint="look for a proxy or a faulty network device between here and the store",
        )

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Implements `ObjectStore.get_range`.

        All bytes are of one generation of the object, even if it is replaced meanwhile.
        """
        check_object_name(name)
        check_range(name, start, stop)
        with self._bucket.errors("read", name, "storage.objects.get"):
            return self._downloads.range(name, start, stop)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Implements `ObjectStore.walk`, page by page."""
        bucket = self._bucket
        with bucket.errors("list", prefix, "storage.objects.list"):
            blobs = bucket.client.list_blobs(
                prefix=bucket.prefix + prefix,
                fields="items(name,size),nextPageToken",
                retry=bucket.retry,
                timeout=bucket.timeout_s,
            )
            cut = len(bucket.prefix)
            for blob in blobs:
                yield ObjectInfo(blob.name[cut:], _size_of(blob))

    def delete(self, name: str) -> None:
        """Implements `ObjectStore.delete`."""
        check_object_name(name)
        bucket = self._bucket
        with (
            contextlib.suppress(ObjectMissingError),
            bucket.errors("delete", name, "storage.objects.delete"),
        ):
            blob = bucket.client.blob(bucket.prefix + name)
            blob.delete(retry=bucket.retry, timeout=bucket.timeout_s)

    def _look_up(self, name: str) -> tuple[int, str] | None:
        """Returns the size in bytes and the crc32c (base64) of an object; None if there is none."""
        bucket = self._bucket
        with bucket.errors("look up", name, "storage.objects.get"):
            blob = bucket.client.get_blob(
                bucket.prefix + name, retry=bucket.retry, timeout=bucket.timeout_s
            )
        return None if blob is None else (_size_of(blob), str(blob.crc32c))


def _size_of(blob: Blob) -> int:
    """Returns an object's size; an answer without a size means 0 (protobuf omits zeros)."""
    return int(blob.size or 0)


def _default_credentials() -> Credentials:
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except auth.GoogleAuthError as error:
        raise no_credentials(f"there are no Google credentials: {brief(error)}") from error
    return credentials
