"""Sending an object: small ones at once, large ones in a session that outlives a connection."""

import itertools
import json
import secrets
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import requests
from google.api_core import exceptions as api

from diloco.common.protocol.buffers import Buffers
from diloco.common.protocol.errors import StoreUnavailableError
from diloco.common.storage.store.gcs.bucket import PART_BYTES, Bucket
from diloco.common.storage.store.gcs.faults import brief, is_damage

_TYPE = "application/octet-stream"


def upload(bucket: Bucket, name: str, data: Buffers, checksum: str) -> None:
    """Store an object where there is none.

    Raises:
        PreconditionFailed: there is one.
    """
    send = _upload_at_once if len(data) <= PART_BYTES else _upload_in_session
    metadata = json.dumps({"name": bucket.prefix + name, "crc32c": checksum})
    send(bucket, metadata, data)


def _upload_at_once(bucket: Bucket, metadata: str, data: Buffers) -> None:
    boundary = secrets.token_hex(16)
    begin, end = f"--{boundary}\r\nContent-Type: ", f"\r\n--{boundary}--"
    head = f"{begin}application/json\r\n\r\n{metadata}\r\n{begin}{_TYPE}\r\n\r\n"
    body = _Body(Buffers(head.encode()), data, Buffers(end.encode()))
    kind = f"multipart/related; boundary={boundary}"
    bucket.retry(_begin)(bucket, "multipart", body, kind)


def _upload_in_session(bucket: Bucket, metadata: str, data: Buffers) -> None:
    begun = bucket.retry(_begin)(bucket, "resumable", metadata.encode(), "application/json")
    session = _Session(bucket, begun.headers["Location"], data)
    while session.sent < len(data):
        bucket.retry(session.step)()


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

    It goes piece by piece, because a time-out counts for each piece and not for the whole.
    """

    def __init__(self, *parts: Buffers) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Any]:  # memoryviews, of which the types of requests know nothing
        return itertools.chain.from_iterable(self._parts)


class _Session:
    """One resumable upload.

    Args:
        bucket: where to.
        url: of the upload session.
        data: all bytes.

    Attributes:
        sent: bytes that the service is known to have; all of them once the object is stored.
    """

    def __init__(self, bucket: Bucket, url: str, data: Buffers) -> None:
        self.sent = 0
        self._bucket = bucket
        self._url = url
        self._data = data
        self._unsure = False

    def step(self) -> None:
        """Send what is left; after a failure, only ask how much has arrived."""
        size, before = len(self._data), self.sent
        if self._unsure:
            self.sent = self._request(f"bytes */{size}", b"")
        self._unsure = True
        if self.sent <= before:
            span = f"bytes {self.sent}-{size - 1}/{size}"
            self.sent = self._request(span, _Body(self._data.behind(self.sent)))
        if self.sent <= before:
            raise api.ServiceUnavailable(f"the upload took no byte beyond {before}")
        self._unsure = False

    def _request(self, span: str, data: "_Body | bytes") -> int:
        """The bytes that the service has after this request."""
        response = self._bucket.session.put(
            self._url,
            data=data,
            headers={"Content-Range": span, "Content-Type": _TYPE},
            timeout=self._bucket.timeout_s,
            allow_redirects=False,
        )
        if response.status_code in {200, 201}:
            return len(self._data)
        if response.status_code == HTTPStatus.PERMANENT_REDIRECT:
            last = response.headers.get("Range", "").rpartition("-")[2]
            return int(last) + 1 if last else 0
        error = api.from_http_response(response)
        if response.status_code in {404, 410} or is_damage(error):
            raise StoreUnavailableError(f"an upload must restart: {brief(error)}")
        raise error
