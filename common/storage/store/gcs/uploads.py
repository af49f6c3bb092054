"""Uploads objects: small objects in one request, large ones in a resumable session."""

import itertools
import json
import secrets
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import requests
from google.api_core import exceptions as api

from diloco.common.protocol.errors import StoreUnavailableError
from diloco.common.protocol.shards import Buffers
from diloco.common.storage.store.gcs.bucket import PART_BYTES, Bucket
from diloco.common.storage.store.gcs.faults import MalformedAnswerError, brief, header, is_damage

_TYPE = "application/octet-stream"


def upload(bucket: Bucket, name: str, data: Buffers, checksum: str) -> bool:
    """Uploads an object unless the name exists; True if the answer proves that it is stored.

    The answer to a single request is proof, as it states name, size and crc32c of the new object.
    The answer to a session is no proof: it may confirm the received bytes although another object
    has the name.

    Args:
        bucket: the bucket to upload to.
        name: the object's name without the prefix.
        data: the object's bytes.
        checksum: crc32c of the bytes, as `checksum_of` returns it.

    Raises:
        PreconditionFailed: an object of that name exists.
    """
    metadata = json.dumps({"name": bucket.prefix + name, "crc32c": checksum})
    if len(data) > PART_BYTES:
        _upload_in_session(bucket, metadata, data)
        return False
    made = _upload_at_once(bucket, metadata, data)
    stated = (made.get("name"), made.get("crc32c"), str(made.get("size", 0)))
    return stated == (bucket.prefix + name, checksum, str(len(data)))


def _upload_at_once(bucket: Bucket, metadata: str, data: Buffers) -> dict[str, Any]:
    boundary = secrets.token_hex(16)
    begin, end = f"--{boundary}\r\nContent-Type: ", f"\r\n--{boundary}--"
    head = f"{begin}application/json\r\n\r\n{metadata}\r\n{begin}{_TYPE}\r\n\r\n"
    body = _Body(Buffers(head.encode()), data, Buffers(end.encode()))
    kind = f"multipart/related; boundary={boundary}"
    response = bucket.retry(_begin)(bucket, "multipart", body, kind)
    try:
        made = response.json()
    except requests.JSONDecodeError:
        return {}
    return made if isinstance(made, dict) else {}


def _upload_in_session(bucket: Bucket, metadata: str, data: Buffers) -> None:
    session = _Session(bucket, bucket.retry(_begin_session)(bucket, metadata), data)
    while not session.finished:
        bucket.retry(session.step)()


def _begin_session(bucket: Bucket, metadata: str) -> str:
    """Begins an upload session and returns its URL."""
    begun = _begin(bucket, "resumable", metadata.encode(), "application/json")
    return header(begun, "Location", r"^(https?://.+)$")


def _begin(
    bucket: Bucket, kind: str, body: "_Body | bytes", content_type: str
) -> requests.Response:
    response = bucket.session.post(
        f"{bucket.endpoint}/upload/storage/v1/b/{bucket.client.name}/o",
        params={"uploadType": kind, "ifGenerationMatch": "0"},
        data=body,
        headers={"Content-Type": content_type},
        timeout=bucket.timeout_s,
    )
    if not response.ok:
        raise api.from_http_response(response)
    return response


class _Body:
    """A request's body, sent without a copy.

    The body is sent piece by piece, because the time-out then applies to each piece.
    """

    def __init__(self, *parts: Buffers) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Any]:  # memoryviews, which the type stubs of requests lack
        return itertools.chain.from_iterable(self._parts)


class _Session:
    """One resumable upload.

    Args:
        bucket: the bucket to upload to.
        url: the session's URL.
        data: all bytes of the object.

    Attributes:
        finished: True once the service has answered that the upload is complete. That the service
            has received every byte is not enough, as it may still have to make the object.
    """

    def __init__(self, bucket: Bucket, url: str, data: Buffers) -> None:
        self.finished = False
        self._sent = 0  # bytes that the service is known to have
        self._bucket = bucket
        self._url = url
        self._data = data
        self._unsure = False

    def step(self) -> None:
        """Sends the bytes that are left; after a failure, first asks how many bytes have arrived.

        Raises:
            ServiceUnavailable: no further byte has arrived.
            StoreUnavailableError: the session is gone, so the upload must begin again.
            GoogleAPICallError, requests.RequestException: the request failed.
        """
        size, before = len(self._data), self._sent
        ask = self._unsure or before == size
        self._unsure = True
        if ask:
            self._request(f"bytes */{size}", b"")
        if not self.finished and self._sent <= before < size:
            span = f"bytes {self._sent}-{size - 1}/{size}"
            self._request(span, _Body(self._data.between(self._sent)))
        if not self.finished and self._sent <= before:
            raise api.ServiceUnavailable(f"the upload took no byte beyond {before} of {size}")
        self._unsure = False

    def _request(self, span: str, data: "_Body | bytes") -> None:
        """Sends one request of the session, and updates `finished` and the number of bytes sent."""
        response = self._bucket.session.put(
            self._url,
            data=data,
            headers={"Content-Range": span, "Content-Type": _TYPE},
            timeout=self._bucket.timeout_s,
            allow_redirects=False,
        )
        if response.status_code in {200, 201}:
            self.finished = True
        elif response.status_code == HTTPStatus.PERMANENT_REDIRECT:
            self._sent = self._received(response)
        else:
            error = api.from_http_response(response)
            if response.status_code in {404, 410} or is_damage(error):
                raise StoreUnavailableError(f"an upload must restart: {brief(error)}")
            raise error

    def _received(self, response: requests.Response) -> int:
        """Returns how many bytes an unfinished session has, by its Range header (missing: none)."""
        if "Range" not in response.headers:
            return 0
        received = int(header(response, "Range", r"^bytes=0-(\d+)$")) + 1
        if received > len(self._data):
            raise MalformedAnswerError(f"a session of {len(self._data)} bytes has {received}")
        return received
