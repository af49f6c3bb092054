"""Frames of a bundle: length (4 bytes), crc32c (4 bytes), msgpack; damage is found and located."""

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
# The first bytes of exported tapes, an earlier format that bundles have replaced.
EXPORTED = b"DLTAPE1\n"
# Enough for a message with its subject and id, or for a piece of an object.
FRAME_BYTES = 2 << 20
HEAD = struct.Struct("<II")


class Frame(NamedTuple):
    """The content of a frame (unpacked msgpack), and the frame's byte offset `at` in the file."""

    at: int
    content: Any


def is_bundle(path: Path) -> bool:
    """True if the file is a bundle, or a tape in the obsolete format of an earlier release."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, EXPORTED)


def write_frame(file: BinaryIO, content: Any) -> None:
    """Appends a frame with `content`, of msgpack's types, to the file."""
    data: bytes = msgpack.packb(content)
    file.write(HEAD.pack(len(data), crc32c(data)))
    file.write(data)


def damaged(path: Path, what: str) -> IntegrityError:
    """Returns the error for a damaged bundle; `what` continues the sentence "the bundle ..."."""
    return IntegrityError(
        f"the bundle {str(path)!r} {what}",
        hint="make it again, or make a whole one of what is left: "
        f"diloco bundle {path} NEW --salvage",
    )


def read_frames(path: Path, file: BinaryIO) -> Iterator[Frame]:
    """Yields every frame, in order.

    Raises:
        IntegrityError: the file does not begin as a bundle, is damaged, or was cut short.
        ConfigError: the file is a tape that an earlier release exported.
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
    """Returns the content of the frame whose bytes are `data`.

    Raises:
        IntegrityError: the frame is damaged.
    """
    size, checksum = HEAD.unpack_from(data)
    body = data[HEAD.size : HEAD.size + size]
    if len(body) != size or crc32c(body) != checksum:
        raise damaged(path, "has changed since it was opened")
    return _unpacked(path, body)


def frame_bytes(head: bytes) -> int:
    """Returns the length in bytes of a frame, from its first `HEAD.size` bytes."""
    return HEAD.size + int(HEAD.unpack(head)[0])


def whole_frames(path: Path) -> Iterator[Frame]:
    """Yields the undamaged frames of a damaged file, and skips the other bytes."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = len(MAGIC)
        while at + HEAD.size < len(data):
            size, checksum = HEAD.unpack_from(data, at)
            end = at + HEAD.size + size
            if 0 < size <= FRAME_BYTES and end <= len(data):
                body = data[at + HEAD.size : end]
                if crc32c(body) == checksum:
                    # A valid checksum over bytes that are no msgpack: not a frame, so skip it.
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
