"""Where a bucket is, and the client for it."""

from datetime import timedelta
from typing import Any, NamedTuple

from obstore import exceptions as theirs
from obstore.store import AzureStore, S3Store

from diloco.common.config import allows_http
from diloco.common.errors import ConfigError
from diloco.common.store.protocol import split_url

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


class Place(NamedTuple):
    """Where a store's objects are; `prefix` is '' or ends in '/'."""

    scheme: str
    bucket: str
    prefix: str

    def url(self, name: str) -> str:
        """Of an object, for messages."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}{name}"


def parse(url: str) -> Place:
    """What a URL like "s3://bucket/prefix" names.

    Raises:
        ConfigError: it names no bucket, or a prefix that cannot be one.
    """
    bucket, prefix = split_url(url)
    return Place(url.partition("://")[0], bucket, f"{prefix}/" if prefix else "")


def connect(place: Place) -> S3Store | AzureStore:
    """A client for a bucket; nothing is asked of the service yet.

    Raises:
        ConfigError: what the environment says does not do.
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
