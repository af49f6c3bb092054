"""An object store in a folder, which processes of one machine or one file system may share."""

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from diloco.common.protocol.errors import (
    ObjectMissingError,
    ObjectTooLargeError,
    ObjectUnreadableError,
    StoreError,
    StoreMissingError,
    StoreUnavailableError,
)
from diloco.common.protocol.shards import Buffers, Data, parts_of
from diloco.common.storage.store.protocol import (
    KEPT,
    RESERVED,
    TEMP,
    Deadline,
    ObjectInfo,
    ObjectStore,
    check_object_name,
    check_range,
    check_size,
    object_exists,
    object_missing,
    object_unreadable,
)

_PASSING = {
    # Missing objects are handled where they are opened; here the folder itself is missing.
    errno.ENOENT: "the store's folder is gone; mount it again, or put it back",
    errno.ENOSPC: "the disk is full; free space, and the call may be repeated",
    errno.EDQUOT: "the disk quota is used up; free space, and the call may be repeated",
    errno.EIO: "the disk reported an error; see the kernel's log",
    errno.ESTALE: "the network file system lost the folder; mount it again",
    errno.ETIMEDOUT: "the network file system does not answer",
    errno.ENOTCONN: "the program behind the mount has ended; mount it again",
    errno.ESHUTDOWN: "the network file system was shut down; mount it again",
    errno.EHOSTDOWN: "the network file system's server is down",
    errno.EHOSTUNREACH: "the network file system's server cannot be reached",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.ENFILE: "the system has too many open files",
}


# Reading checks its deadline after this many bytes: a network file system may be slow.
_PIECE_BYTES = 8 << 20
# Errors of opening a link, which is not followed, and a pipe or device without a peer.
_NO_FILE = {errno.ELOOP, errno.ENXIO}


class DirectoryStore(ObjectStore):
    """Objects as read-only files below a folder, which several processes may share.

    An object is written to `.tmp`, synced, and given its name by a hard link, which fails if the
    name exists: so objects are never overwritten, and visible only when complete. Files that a
    crash leaves in `.tmp` are never listed, and may be removed while nothing runs. `keep` makes a
    second hard link below `.kept`, and reads prefer that link, so that the object's writer can no
    longer remove or replace the object. A name cannot be both an object and a folder of objects.
    Files that root writes get the folder's owner, as daemons could not write root's files.

    Args:
        root: the folder.
        create: make the folder if it does not exist, and accept an empty one.

    Raises:
        StoreMissingError: there is no such folder, or it is empty: it may not be mounted.
        StoreError: the folder cannot be used.
    """

    def __init__(self, root: Path, *, create: bool = True) -> None:
        self.root = root
        with _os_errors("open", str(root)):
            if not create and not (root.is_dir() and any(root.iterdir())):
                raise StoreMissingError(
                    f"there is no store in the folder {str(root)!r}",
                    hint="mount it or put it back, or correct store.url: runbooks/store-away.md; "
                    "`diloco run create` makes one only for a run that never was",
                )
        with _os_errors("open", str(root)):
            (root / TEMP).mkdir(parents=True, exist_ok=True)
            self._keep_owner(root / TEMP)

    def put(self, name: str, data: Data) -> None:
        """Implements `ObjectStore.put`; object and name are on disk when `put` returns."""
        check_object_name(name)
        path = self.root / name
        parts = parts_of(data)
        with _os_errors("store", name):
            temp = self._write_temp(parts)
            try:
                self._make_folder(path.parent)
                while not _link(temp, path):
                    try:
                        same = path.read_bytes() == parts
                    except FileNotFoundError:
                        continue  # deleted since the link failed
                    if not same:
                        raise object_exists(name)
                    break
                # Another writer may have made the link of an equal object, and not synced it yet.
                _sync_folder(path.parent)
            finally:
                temp.unlink(missing_ok=True)

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Implements `ObjectStore.get`; links, pipes and devices are unreadable."""
        deadline = Deadline(name, within_s)
        return self._read(
            name, lambda file, size: _read_all(name, file, size, limit_bytes, deadline)
        )

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Implements `ObjectStore.get_range`."""
        check_range(name, start, stop)
        return self._read(name, lambda file, size: _read_range(name, file, size, start, stop))

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Implements `ObjectStore.walk`, folder by folder."""
        folder = prefix.rpartition("/")[0]
        if folder:
            check_object_name(folder)
        with _os_errors("list", prefix):
            self._check_there()
            for info in self._walk(self.root, folder):
                if info.name.startswith(prefix):
                    yield info
            for info in self._walk(self.root / KEPT, folder):
                # An object below both folders is listed once.
                if info.name.startswith(prefix) and not os.path.lexists(self.root / info.name):
                    yield info

    def delete(self, name: str) -> None:
        """Implements `ObjectStore.delete`; removes a kept copy too."""
        check_object_name(name)
        with _os_errors("delete", name):
            self._check_there()
            for path in (self.root / name, self.root / KEPT / name):
                with contextlib.suppress(NotADirectoryError):
                    path.unlink(missing_ok=True)

    def keep(self, name: str, limit_bytes: int) -> None:
        """Protects the present bytes of `name` until `delete` removes them.

        The writer of the object can then remove or replace the file under `name` without effect. A
        missing file is not protected. Where the file is another user's, which Linux allows only to
        copy, neither is a file of more than `limit_bytes`, nor one that is no plain file.

        Raises:
            StoreUnavailableError: the disk is full or failed.
            StoreError: not permitted, or `name` is not an object name.
        """
        check_object_name(name)
        kept = self.root / KEPT / name
        with _os_errors("keep", name):
            self._make_folder(kept.parent)
            try:
                _link(self.root / name, kept)
            except FileNotFoundError:
                return
            except PermissionError:
                # Linux forbids hard links to another user's file, so it is copied.
                self._keep_copy(name, kept, limit_bytes)

    def protected_only(self, prefix: str) -> Iterator[str]:
        """Yields the names of objects whose file is gone, so that only the link of `keep` is left.

        Raises:
            StoreUnavailableError: the disk failed.
        """
        folder = prefix.rpartition("/")[0]
        with _os_errors("list", prefix):
            self._check_there()
            for info in self._walk(self.root / KEPT, folder):
                if not os.path.lexists(self.root / info.name):
                    yield info.name

    def _keep_copy(self, name: str, kept: Path, limit_bytes: int) -> None:
        with contextlib.suppress(ObjectMissingError, ObjectTooLargeError, ObjectUnreadableError):
            temp = self._write_temp(Buffers(self.get(name, limit_bytes)))
            try:
                _link(temp, kept)
            finally:
                temp.unlink(missing_ok=True)

    def _check_there(self) -> None:
        """Checks that the store's folder is there, so that no object counts as missing without it.

        Raises:
            FileNotFoundError: the folder was unmounted, renamed or replaced.
        """
        if not (self.root / TEMP).is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))

    def _read(self, name: str, read: Callable[[BinaryIO, int], bytes]) -> bytes:
        """Calls `read` with an object's open file and its size, and returns the result."""
        check_object_name(name)
        with _os_errors("read", name):
            with contextlib.suppress(ObjectMissingError):
                return self._read_file(self.root / KEPT, name, read)
            try:
                return self._read_file(self.root, name, read)
            except ObjectMissingError:
                # The folder may have been unmounted for a moment, so look again.
                self._check_there()
                return self._read_file(self.root, name, read)

    def _read_file(self, root: Path, name: str, read: Callable[[BinaryIO, int], bytes]) -> bytes:
        try:
            with open(root / name, "rb", opener=_open_file) as file:
                found = os.fstat(file.fileno())
                if stat.S_ISDIR(found.st_mode):
                    raise object_missing(name)
                if not stat.S_ISREG(found.st_mode):
                    raise object_unreadable(name, "it is no file")
                return read(file, found.st_size)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise object_missing(name) from None
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            raise object_unreadable(name, "it is a link, or something else that is no file") from (
                error
            )

    def _write_temp(self, data: Buffers) -> Path:
        temp = self.root / TEMP / secrets.token_hex(16)
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(data)
                file.flush()
                self._keep_owner(descriptor)
                os.fsync(descriptor)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        return temp

    def _make_folder(self, folder: Path) -> None:
        """Makes `folder` below the root, with its parents, and syncs them to disk."""
        if folder == self.root or folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        self._keep_owner(folder)
        _sync_folder(folder.parent)

    def _keep_owner(self, file: Path | int) -> None:
        """Gives a file or folder that root has made to the owner of the store's folder."""
        if os.geteuid() == 0:
            owner = self.root.stat()
            # A network file system may map root to a user without the right to change owners.
            with contextlib.suppress(PermissionError):
                os.chown(file, owner.st_uid, owner.st_gid)

    def _walk(self, root: Path, folder: str) -> Iterator[ObjectInfo]:
        """Yields every object below `folder` ('' for all), in any order.

        Objects that are deleted meanwhile may be left out.
        """
        try:
            entries = _entries(root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if name in RESERVED:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(root, name)
                continue
            with contextlib.suppress(FileNotFoundError):
                # Links are not followed, as a circular one would break the listing.
                yield ObjectInfo(name, entry.stat(follow_symlinks=False).st_size)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [*entries]


def _read_all(
    name: str, file: BinaryIO, size_bytes: int, limit_bytes: int | None, deadline: Deadline
) -> bytes:
    check_size(name, size_bytes, limit_bytes)
    # A BytesIO that is filled through its buffer returns `bytes` without another copy.
    buffer, filled = io.BytesIO(bytes(size_bytes)), 0
    with buffer.getbuffer() as window:
        while filled < size_bytes:
            deadline.check()
            count = file.readinto(window[filled : filled + _PIECE_BYTES])  # type: ignore[attr-defined]
            if not count:
                break
            filled += count
    return buffer.getvalue() if filled == size_bytes else buffer.getvalue()[:filled]


def _read_range(name: str, file: BinaryIO, size_bytes: int, start: int, stop: int) -> bytes:
    check_range(name, start, stop, size_bytes)
    file.seek(start)
    return file.read(stop - start)


def _open_file(path: str, flags: int) -> int:
    """Opens a file without following a link and without waiting.

    A learner that may write to the folder could otherwise make a reader follow a link to an endless
    file, or wait at a pipe.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _link(source: Path, target: Path) -> bool:
    """Gives `source`, even if it is a link, the second name `target`; False if `target` exists."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _os_errors(action: str, name: str) -> Iterator[None]:
    """Turns operating system errors into this project's errors."""
    try:
        yield
    except OSError as error:
        message = f"cannot {action} {name!r}: {error}"
        if error.errno in _PASSING:
            raise StoreUnavailableError(message, hint=_PASSING[error.errno]) from error
        raise StoreError(message, hint="check the folder's kind, owner and permissions") from error
