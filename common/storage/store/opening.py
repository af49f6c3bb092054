"""Opens the store that a URL names; `KINDS` has a row for each kind of store."""

import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Final

from diloco.common.process.config import storage_emulator
from diloco.common.process.config.daemon import StoreSection
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.store.cached import CachedStore
from diloco.common.storage.store.directory import DirectoryStore
from diloco.common.storage.store.protocol import ObjectStore


def open_nearby(section: StoreSection) -> ObjectStore:
    """Opens a learner's store: through the cache, if `section` names one.

    Raises:
        DilocoError: as `open_store`.
    """
    store = open_store(section.url, emulator=section.emulator)
    return CachedStore(store, section.cache) if section.cache else store


def open_store(url: str, *, emulator: bool = False, create: bool = False) -> ObjectStore:
    """Opens the store at `url`.

    Args:
        url: a URL with a scheme of `KINDS`, or the path of a folder.
        create: make a missing folder; only the creator of a run does so. For all others a missing
            folder is one that is not mounted, and a new empty folder would hide that. For a bucket
            of a service other than Google's: check, by trying, that the service never overwrites.
        emulator: use the server at STORAGE_EMULATOR_HOST for a gs:// URL.

    Raises:
        ConfigError: this release does not know the URL's scheme, or `emulator` contradicts the
            environment.
        StoreMissingError: there is no such folder, or it is empty: it may not be mounted.
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
    # Imported here, because loading Google's client takes a second that most never need.
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


# For each URL scheme, the function that opens a store, given `open_store`'s arguments.
KINDS: Final[dict[str, Callable[[str, bool, bool], ObjectStore]]] = {
    "gs": _open_gcs,
    "s3": _open_bucket,
    "az": _open_bucket,
    "file": _open_folder,
}
