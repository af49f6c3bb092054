"""The store that a URL means; `KINDS` has a row for each kind."""

import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Final

from diloco.common.process.config import storage_emulator
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.store.directory import DirectoryStore
from diloco.common.storage.store.protocol import ObjectStore


def open_store(url: str, *, emulator: bool = False, create: bool = False) -> ObjectStore:
    """The store at `url`, which is of one of `KINDS`, or the path of a folder.

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
    scheme, separator, _ = url.partition("://")
    if not separator:
        if not url:
            raise ConfigError("the store's URL is empty", hint="file:///path, or a folder's path")
        return DirectoryStore(Path(url).absolute(), create=create)
    if scheme not in KINDS:
        raise ConfigError(
            f"{url!r}: unknown kind of store {scheme!r}",
            hint=f"write one of {', '.join(f'{known}://' for known in KINDS)}; see docs/stores.md",
        )
    return KINDS[scheme](url, emulator, create)


def _open_folder(url: str, _: bool, create: bool) -> ObjectStore:
    path = url.removeprefix("file://")
    if not path.startswith("/"):
        raise ConfigError(f"{url!r} names no absolute path", hint="write file:///path")
    return DirectoryStore(Path(urllib.parse.unquote(path)), create=create)


def _open_gcs(url: str, emulator: bool, _: bool) -> ObjectStore:
    # Only here, because to load the client of Google takes a second that most never need.
    from diloco.common.storage.store.gcs import open_gcs

    return open_gcs(url, storage_emulator(asked_for=emulator))


def _open_bucket(url: str, _: bool, create: bool) -> ObjectStore:
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


# By the scheme of URLs: what opens a store, from the URL, `emulator` and `create` of `open_store`.
KINDS: Final[dict[str, Callable[[str, bool, bool], ObjectStore]]] = {
    "gs": _open_gcs,
    "s3": _open_bucket,
    "az": _open_bucket,
    "file": _open_folder,
}
