"""Opens places of prepared data; a place is a local folder's path, or a URL of an object store."""

import fcntl
import os
import shutil
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.common.process.config import store_emulator
from diloco.common.protocol.errors import ConfigError, DataError, ObjectMissingError
from diloco.common.storage.store import ObjectStore, open_store
from diloco.models.data.manifest import MANIFEST, UNFINISHED, TokenManifest, parse_manifest
from diloco.run.cli.folders import make_folder

Read = Callable[[str], bytes]
_HERE = "file://"
# The folder in which a store on a local disk writes partial files; a killed writer leaves some.
_TEMPORARY = ".tmp"


def local_folder(place: str) -> Path | None:
    """Returns the local folder of a place, from its path or file:// URL; None for a bucket."""
    if place.startswith(_HERE):
        return Path(urllib.parse.unquote(place.removeprefix(_HERE)))
    return None if "://" in place else Path(place)


def writer(place: str) -> ObjectStore:
    """Opens a place for writing, as an object store; creates a folder that does not exist."""
    return open_store(place, emulator=store_emulator(), create=True)


def reader(place: str) -> Read:
    """Returns a function (name) -> bytes that reads a file of a place; writes nothing there."""
    folder = local_folder(place)
    if folder is None:
        return open_store(place, emulator=store_emulator()).get
    return lambda name: (folder / name).read_bytes()


def found_at(read: Read, name: str) -> bytes | None:
    """Returns the bytes of the file `name`, read by `read`; None if there is no such file."""
    try:
        return read(name)
    except (FileNotFoundError, NotADirectoryError, ObjectMissingError):
        return None


def manifest_at(place: str, read: Read) -> TokenManifest:
    """Returns the manifest of a place.

    Args:
        place: the place, for errors.
        read: reads a file of the place, from `reader`.

    Raises:
        DataError: there is no manifest, or it is invalid.
    """
    if (data := found_at(read, MANIFEST)) is None:
        raise _without_manifest(place)
    return parse_manifest(data, f"{place}/{MANIFEST}")


def _without_manifest(place: str) -> DataError:
    """Returns the error for a place without a manifest, which says what kind of folder it is."""
    folder, checked = local_folder(place), "and check the run: diloco check RUN.toml"
    if folder is not None and any(folder.glob("*.npz")):
        return DataError(
            f"{place!r} has rows with images (*.npz), which diloco data does not prepare: there"
            f" is no {MANIFEST} to check them by",
            hint="save what the model's processor gives (docs/models.md, Images), name the"
            f" folder in the task's option data, {checked}",
        )
    if folder is not None and (folder / "config.json").exists():
        return DataError(
            f"{place!r} is not prepared data, but a checkpoint, as it has a config.json",
            hint=f"name the folder in the task's option model, {checked}",
        )
    if folder is not None and any(folder.glob("train*.npy")) and not (folder / UNFINISHED).exists():
        return DataError(
            f"{place!r} has tokens of your own (train*.npy): there is no {MANIFEST} to check them"
            " by",
            hint=f"name the folder in the task's option data, {checked}",
        )
    return DataError(
        f"{place!r} has no {MANIFEST}: it is not prepared data, or not prepared to its end",
        hint="run diloco data prepare; one that was ended midway continues by the same command",
    )


def first_of(place: str) -> str | None:
    """Returns the name of any object in a place; None if the place is empty or does not exist."""
    folder = local_folder(place)
    if folder is None:
        store = open_store(place, emulator=store_emulator())
        return next((info.name for info in store.walk("")), None)
    if not folder.exists():
        return None
    return next((one.name for one in sorted(folder.iterdir()) if one.name != _TEMPORARY), None)


@contextmanager
def alone_in(place: str) -> Iterator[None]:
    """Locks a local folder against other writers within the block; creates a missing folder.

    A bucket is not locked: two writers of the same data do no harm, since objects are create-only.

    Raises:
        ConfigError: another process holds the folder's lock.
    """
    folder = local_folder(place)
    if folder is None:
        yield
        return
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process writes to {place!r} just now", hint="wait for it, or end it"
            ) from error
        yield
    finally:
        os.close(descriptor)


def tidy(place: str, store: ObjectStore) -> None:
    """Removes the files that only an unfinished preparation or copy needs.

    Args:
        place: a place whose data is complete.
        store: the place, opened by `writer`.
    """
    for info in store.list(f"{UNFINISHED}/"):
        store.delete(info.name)
    if (folder := local_folder(place)) is not None:
        for name in (_TEMPORARY, UNFINISHED):
            shutil.rmtree(folder / name, ignore_errors=True)
