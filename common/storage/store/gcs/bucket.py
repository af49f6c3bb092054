"""A bucket as a store uses it: its clients, its reads, and the retries of transient faults."""

import base64
import contextlib
import urllib.parse
from typing import NamedTuple

import requests
from google.api_core import exceptions as api
from google.auth import compute_engine
from google.auth.credentials import Credentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from requests.adapters import HTTPAdapter

from diloco.common.protocol.shards import Data, crc32c
from diloco.common.storage.store.gcs.faults import header, our_errors
from diloco.common.storage.store.gcs.retries import TransientRetries
from diloco.common.storage.store.protocol import object_unreadable

ENDPOINT = "https://storage.googleapis.com"
_UNIVERSE = "googleapis.com"
PART_BYTES = 8 << 20  # the part size of downloads; larger objects are uploaded in a session
# Callers' threads need a connection each, in addition to those of the range threads.
_CONNECTIONS = 64


# The encoding of an answer, and that of a stored object which the service decodes.
_ENCODINGS = ("Content-Encoding", "x-goog-stored-content-encoding")


class Bucket(NamedTuple):
    """A bucket with a prefix, as one store uses it.

    Attributes:
        prefix: precedes every object's name; '' or ending in '/'.
        endpoint: address of the service.
        client: Google's client, for requests about objects as a whole.
        session: sends the requests that carry an object's bytes.
        retry: repeats a call that fails by a transient fault.
        timeout_s: the longest waits in seconds: to connect, and between two bytes.
    """

    prefix: str
    endpoint: str
    client: storage.Bucket
    session: AuthorizedSession
    retry: TransientRetries
    timeout_s: tuple[float, float]

    def errors(
        self, action: str, name: str, permission: str
    ) -> contextlib.AbstractContextManager[None]:
        """Returns `our_errors` for a block of requests about the object `name` of this bucket."""
        return our_errors(action, self.client.name, self.prefix, name, permission)

    def read(
        self, name: str, start: int, count: int | None, generation: str | None = None
    ) -> requests.Response:
        """Requests bytes of an object; returns the answer, whose body the caller reads and closes.

        Args:
            name: the object's name without the prefix.
            start: the first byte.
            count: number of bytes; None for all, with `start` 0.
            generation: the generation that the object must have; None for any.

        Raises:
            ObjectUnreadableError: the object is encoded.
            GoogleAPICallError: the service refuses the request, or has no such object.
        """
        headers = {"Accept-Encoding": "identity"}
        if count is not None:
            headers["Range"] = f"bytes={start}-{start + count - 1}"
        params = {"alt": "media"} | ({"generation": generation} if generation else {})
        quoted = urllib.parse.quote(self.prefix + name, safe="")
        response = self.session.get(
            f"{self.endpoint}/download/storage/v1/b/{self.client.name}/o/{quoted}",
            params=params,
            headers=headers,
            timeout=self.timeout_s,
            stream=True,
        )
        encoding = next(filter(_is_coding, map(response.headers.get, _ENCODINGS)), None)
        if encoding is not None:
            # Decoding gives other bytes than the checksum covers, and as many as the sender of
            # the object likes.
            response.close()
            raise object_unreadable(name, f"it is stored with the encoding {encoding!r}")
        if response.status_code != (200 if count is None else 206):
            raise api.from_http_response(response)
        return response


def _is_coding(encoding: str | None) -> bool:
    return encoding not in (None, "", "identity")


def open_bucket(
    bucket: str,
    prefix: str,
    credentials: Credentials,
    endpoint: str,
    retry_s: float,
    timeout_s: tuple[float, float],
) -> Bucket:
    """Returns a bucket without sending a request; the arguments are those of `GcsStore`."""
    if isinstance(credentials, compute_engine.Credentials):
        # Without a universe domain the client would ask the metadata server here.
        credentials = credentials.with_universe_domain(_UNIVERSE)
    session = AuthorizedSession(credentials)
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=_CONNECTIONS))
    session.hooks["response"].append(_read_refusal)
    # The session is given so that all requests share its large pool of connections.
    client = storage.Client(
        project=None,
        credentials=credentials,
        _http=session,
        client_options={"api_endpoint": endpoint},
    )
    joined = f"{prefix}/" if prefix else ""
    return Bucket(
        joined, endpoint, client.bucket(bucket), session, TransientRetries(retry_s), timeout_s
    )


def _read_refusal(response: requests.Response, **_: object) -> None:
    """Reads an error's body at once, so that the connection is free again."""
    if not response.ok:
        response.content  # noqa: B018 - reading the attribute reads the body


def checksum_of(data: Data) -> str:
    """Returns the crc32c of `data` as base64 of four bytes, big endian."""
    return base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()


def stored_checksum(response: requests.Response) -> str:
    """Returns the object's crc32c (base64) from the header x-goog-hash of an answer.

    Raises:
        MalformedAnswerError: the header has none.
    """
    return header(response, "x-goog-hash", r"crc32c=([A-Za-z0-9+/]{6}==)")
