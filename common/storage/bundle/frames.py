"""Frames of a file: msgpack behind its length and checksum, so that damage is known where it is."""

import contextlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

from diloco.common.protocol.errors import ConfigError, IntegrityError
from diloco.common.protocol.shards import crc32c

MAGIC = b"DLBUND1\n"
# Of the tapes that were exported before bundles could be without objects.
EXPORTED = b"DLTAPE1\n"
# A message, its subject and its id, or a piece of an object, with room to spare.
FRAME_BYTES = 2 << 20
HEAD = struct.Struct("<II")


class Frame(NamedTuple):
    """A frame's content, and its place in the file."""

    at: int
    content: Any


def is_bundle(path: Path) -> bool:
    """Whether a file is a bundle, or an exported tape of an earlier diloco, which none can read."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, EXPORTED)


def write_frame(file: BinaryIO, content: Any) -> None:
    """Append a frame."""
    data: bytes = msgpack.packb(content)
    file.write(HEAD.pack(len(data), crc32c(data)))
    file.write(data)


def damaged(path: Path, what: str) -> IntegrityError:
    """The error of a file that is not as it was written."""
    return IntegrityError(
        f"the bundle {str(path)!r} {what}",
        hint="make it again, or make a whole one of what is left: "
        f"diloco bundle {path} NEW --salvage",
    )


def read_frames(path: Path, file: BinaryIO) -> Iterator[Frame]:
    """Every frame, in order.

    Raises:
        IntegrityError: the file begins otherwise, is damaged, or was cut short.
        ConfigError: it is what an earlier diloco wrote of a tape.
    """
    begin = file.read(len(MAGIC))
    if begin == EXPORTED:
        raise ConfigError(
            f"{str(path)!r} is an exported tape of an earlier diloco, which nothing reads now",
            hint="make a bundle of the run: diloco bundle RUN FILE --no-objects",
        )
    if begin != MAGIC:
        raise damaged(path, "does not begin as a bundle does")
    at = len(MAGIC)
    while head := file.read(HEAD.size):
        if len(head) < HEAD.size:
            raise damaged(path, "was cut short")
        size, checksum = HEAD.unpack(head)
        data = file.read(size) if size <= FRAME_BYTES else b""
        if len(data) != size or crc32c(data) != checksum:
            raise damaged(path, f"is damaged before byte {file.tell()}")
        yield Frame(at, _unpacked(path, data))
        at += HEAD.size + size


def read_frame(path: Path, data: bytes) -> Any:
    """Read the content of a frame from its bytes.

    Raises:
        IntegrityError: it is damaged.
    """
    size, checksum = HEAD.unpack_from(data)
    body = data[HEAD.size : HEAD.size + size]
    if len(body) != size or crc32c(body) != checksum:
        raise damaged(path, "has changed since it was opened")
    return _unpacked(path, body)


def frame_bytes(head: bytes) -> int:
    """Length of a whole frame, by its first bytes."""
    return HEAD.size + int(HEAD.unpack(head)[0])


def whole_frames(path: Path) -> Iterator[Frame]:
    """The frames of a damaged file that are whole; what stands between them is passed over."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = len(MAGIC)
        while at + HEAD.size < len(data):
            size, checksum = HEAD.unpack_from(data, at)
            end = at + HEAD.size + size
            if 0 < size <= FRAME_BYTES and end <= len(data):
                body = data[at + HEAD.size : end]
                if crc32c(body) == checksum:
                    # What is whole and no msgpack was never written by this project.
                    with contextlib.suppress(IntegrityError):
                        yield Frame(at, _unpacked(path, body))
                    at = end
                    continue
            at += 1


def _unpacked(path: Path, data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise damaged(path, f"holds no msgpack: {error}") from error
