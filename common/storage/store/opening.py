"""Which store a URL means."""

import urllib.parse
from pathlib import Path

from diloco.common.process.config import storage_emulator
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.store.directory import DirectoryStore
from diloco.common.storage.store.protocol import ObjectStore


def open_store(url: str, *, emulator: bool = False, create: bool = False) -> ObjectStore:
    """The store at `url`: `gs://bucket/prefix`, `s3://...`, `az://...`, or a folder.

    A folder is `file:///absolute/path`, or its path.

    Args:
        url: where the objects are.
        create: make a folder that is not there, as who creates a run does. For all others it is not
            mounted: an empty one in its place would hide that. Of a bucket of another service than
            Google's, try that it never overwrites.
        emulator: a gs:// URL means the server at STORAGE_EMULATOR_HOST.

    Raises:
        ConfigError: the URL is of a kind that this version does not know, or `emulator` and the
            environment disagree.
        StoreMissingError: there is no such folder.
        StoreError: the folder cannot be used, or there are no credentials.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise ConfigError("the store's URL is empty", hint="file:///path, or a folder's path")
        return DirectoryStore(Path(url).absolute(), create=create)
    if scheme == "file":
        if not rest.startswith("/"):
            raise ConfigError(f"{url!r} names no absolute path", hint="write file:///path")
        return DirectoryStore(Path(urllib.parse.unquote(rest)), create=create)
    if scheme == "gs":
        # Only here, because to load the client of Google takes a second that most never need.
        from diloco.common.storage.store.gcs import open_gcs

        return open_gcs(url, storage_emulator(asked_for=emulator))
    if scheme in ("s3", "az"):
        return _open_bucket(url, create=create)
    raise ConfigError(
        f"{url!r}: unknown kind of store {scheme!r}",
        hint="write gs://bucket/prefix, s3://bucket/prefix, az://container/prefix or file:///path",
    )


def _open_bucket(url: str, *, create: bool) -> ObjectStore:
    try:
        from diloco.common.storage.store.s3_azure import open_bucket
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise ConfigError(
            f"{url!r}: the client for such buckets is not installed",
            hint="pip install 'diloco[buckets]'; see docs/stores.md",
        ) from error
    return open_bucket(url, check=create)
