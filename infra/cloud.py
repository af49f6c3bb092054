"""A machine's access to Google Cloud by HTTP, as the machine's service account."""

import base64
import hashlib
import json
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/"
STORAGE = "https://storage.googleapis.com/storage/v1/"
SECRETS = "https://secretmanager.googleapis.com/v1/"
COMPUTE = "https://compute.googleapis.com/compute/v1/"
DNS = "https://dns.googleapis.com/dns/v1/"
LOGGING = "https://logging.googleapis.com/v2/entries:write"


class Google:
    """Accesses Google Cloud as the machine's service account.

    Methods raise OSError if Google cannot be reached, and urllib.error.HTTPError, which is one too,
    if it refuses a request.

    Args:
        metadata: base URL of the machine's metadata server.
        storage: base URL of Cloud Storage.
        secrets: base URL of Secret Manager.
    """

    def __init__(
        self, metadata: str = METADATA, storage: str = STORAGE, secrets: str = SECRETS
    ) -> None:
        self._metadata = metadata
        self._storage = storage
        self._secrets = secrets

    def parameters(self) -> dict[str, Any]:
        """Returns the metadata attribute `diloco`, which Terraform writes for this machine."""
        told: dict[str, Any] = json.loads(self.about_me("attributes/diloco"))
        return told

    def about_me(self, path: str) -> bytes:
        """Returns one entry of this machine's metadata, such as `zone`, as bytes."""
        return _fetch(self._metadata + path, _FLAVOR)

    def tell(self, attribute: str, value: str) -> None:
        """Writes a guest attribute of this machine, NAMESPACE/KEY.

        All who may read the machine's description may read the attribute.
        """
        url = f"{self._metadata}guest-attributes/{attribute}"
        _send(url, _FLAVOR, value.encode(), "PUT").close()

    def call(self, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Sends a request to a service of Google; returns its JSON response.

        The request is a GET if `body` is None, else a POST.
        """
        headers = {**self._authorized(), "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with _send(url, headers, data, "GET" if data is None else "POST") as answer:
            told: dict[str, Any] = json.loads(answer.read() or b"{}")
        return told

    def change(self, url: str, fields: Mapping[str, Any]) -> None:
        """Changes fields of something that Google has, by PATCH."""
        headers = {**self._authorized(), "Content-Type": "application/json"}
        _send(url, headers, json.dumps(fields).encode(), "PATCH").close()

    def object(self, bucket: str, name: str) -> bytes:
        """Returns the bytes of an object of a bucket."""
        return self._get(self._media(bucket, name))

    def save(self, bucket: str, name: str, path: Path) -> str:
        """Downloads an object to a file; returns its sha256 in hexadecimal.

        The object may be larger than memory.
        """
        digest = hashlib.sha256()
        with (
            _open(self._media(bucket, name), self._authorized()) as answer,
            path.open("wb") as file,
        ):
            while data := answer.read(1 << 20):
                digest.update(data)
                file.write(data)
        return digest.hexdigest()

    def secret(self, version: str) -> bytes:
        """Returns the bytes of a secret's version, given the version's resource name."""
        answer = json.loads(self._get(f"{self._secrets}{version}:access"))
        return base64.b64decode(answer["payload"]["data"])

    def _media(self, bucket: str, name: str) -> str:
        return f"{self._storage}b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"

    def _get(self, url: str) -> bytes:
        return _fetch(url, self._authorized())

    def token(self) -> str:
        """Returns the access token of the machine's service account."""
        told = json.loads(self.about_me("service-accounts/default/token"))
        return str(told["access_token"])

    def _authorized(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token()}"}


_FLAVOR = {"Metadata-Flavor": "Google"}


def _open(url: str, headers: Mapping[str, str]) -> HTTPResponse:
    return _send(url, headers, None, "GET")


def _send(url: str, headers: Mapping[str, str], data: bytes | None, method: str) -> HTTPResponse:
    request = urllib.request.Request(  # noqa: S310 - none but Google's
        url, data, dict(headers), method=method
    )
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=60)  # noqa: S310 - as above
    return answer


def _fetch(url: str, headers: Mapping[str, str]) -> bytes:
    with _open(url, headers) as answer:
        return answer.read()
