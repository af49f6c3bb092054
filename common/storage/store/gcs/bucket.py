"""The requests that a store makes of its bucket, with retries of what passes."""

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
from diloco.common.storage.store.gcs.faults import TransientRetries, header, our_errors
from diloco.common.storage.store.protocol import object_unreadable

ENDPOINT = "https://storage.googleapis.com"
_UNIVERSE = "googleapis.com"
RETRY_S = 10.0
TIMEOUT_S = (10.0, 30.0)  # to connect, or to send a piece; between two bytes of an answer
PART_BYTES = 8 << 20  # of a download; what is larger goes up in a session
# Callers run on many threads of their own; each needs a connection beside those of the ranges.
_CONNECTIONS = 64


# Of an answer as it is sent, and of the object where the service decodes it.
_ENCODINGS = ("Content-Encoding", "x-goog-stored-content-encoding")


class Bucket(NamedTuple):
    """A bucket as one store sees it.

    Attributes:
        prefix: before every object's name; '' or ending in '/'.
        client: Google's, for requests about objects as a whole.
        session: for requests with an object's bytes.
        retry: repeats what fails by a transient fault.
        timeout_s: longest waits to connect, and between two bytes.
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
        """As `our_errors`, about the object `name` of the store."""
        return our_errors(action, self.client.name, self.prefix, name, permission)

    def read(
        self, name: str, start: int, count: int | None, generation: str | None = None
    ) -> requests.Response:
        """The answer for `count` bytes from `start`, of which only the head has been read.

        Raises:
            ObjectUnreadableError: the object is encoded.
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
            # Decoded, here or by the service, it gives other bytes than its checksum is of, and as
            # many as whoever stored it likes.
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
    """A bucket; nothing is asked of the service yet."""
    if isinstance(credentials, compute_engine.Credentials):
        # Unless it is told whose cloud this is, the client asks the metadata server here.
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
    """Read an error's body at once, which frees its connection even where nobody else looks."""
    if not response.ok:
        response.content  # noqa: B018 - reading the attribute reads the body


def checksum_of(data: Data) -> str:
    """The crc32c of `data`: base64 of four bytes, the greatest first."""
    return base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()


def stored_checksum(response: requests.Response) -> str:
    """The crc32c in a header like "crc32c=AAAAAA==,md5=..."."""
    return header(response, "x-goog-hash", r"crc32c=([A-Za-z0-9+/]{6}==)")
