"""A tape in one file: every message of a run's stream, with its sequence, time and message id.

docs/protocol.md has the format. The same tape gives the same bytes, whichever bus held it; each
frame has a checksum, and the last one counts the messages, so that a file which was cut short is
known for one.
"""

import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from diloco.common.bus import Message
from diloco.common.errors import ConfigError, IntegrityError
from diloco.common.shards import crc32c

MAGIC = b"DLTAPE1\n"
# A message, its subject and its id, with room to spare.
FRAME_BYTES = 2 << 20
_FRAME = struct.Struct("<II")


def is_tape_file(path: Path) -> bool:
    """Whether a file begins as an exported tape does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


async def write_tape_file(path: Path, run: str, messages: AsyncIterator[Message]) -> int:
    """Write a tape to a new file, which stands under its name once it is whole; how many messages.

    Raises:
        ConfigError: the file is there already, or cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{str(path)!r} exists already", hint="give another name")
    partial = path.with_name(f"{path.name}.partial")
    count = 0
    try:
        with partial.open("wb") as file:
            file.write(MAGIC)
            _write(file, {"run": run})
            async for message in messages:
                _write(file, list(message))
                count += 1
            _write(file, {"messages": count})
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return count


def _write(file: BinaryIO, content: Any) -> None:
    data: bytes = msgpack.packb(content)
    file.write(_FRAME.pack(len(data), crc32c(data)))
    file.write(data)


def tape_file_run(path: Path) -> str:
    """The run whose tape a file holds.

    Raises:
        IntegrityError: it is no tape, or damaged.
    """
    with path.open("rb") as file:
        return _run(path, next(_frames(path, file), None))


def read_tape_file(path: Path) -> Iterator[Message]:
    """Every message of an exported tape, in order.

    Raises:
        IntegrityError: it is no tape, is damaged, or was cut short.
    """
    with path.open("rb") as file:
        frames = _frames(path, file)
        _run(path, next(frames, None))
        count = before = 0
        for content in frames:
            if isinstance(content, dict):
                if content != {"messages": count} or next(frames, None) is not None:
                    raise _damaged(path, f"ends after {count} messages with {content}")
                return
            message = _message(path, content)
            if message.seq <= before:
                raise _damaged(path, f"sequence {message.seq} comes after {before}")
            before = message.seq
            count += 1
            yield message
    raise _damaged(path, f"was cut short after {count} messages")


def _run(path: Path, header: Any) -> str:
    if not isinstance(header, dict) or not isinstance(header.get("run"), str):
        raise _damaged(path, "has no header")
    return str(header["run"])


def _message(path: Path, content: Any) -> Message:
    kinds = (str, int, float, bytes, str)
    if not isinstance(content, list) or [type(part) for part in content] != list(kinds):
        raise _damaged(path, "holds what is no message")
    return Message(*content)


def _frames(path: Path, file: BinaryIO) -> Iterator[Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise _damaged(path, "does not begin as a tape does")
    while head := file.read(_FRAME.size):
        if len(head) < _FRAME.size:
            raise _damaged(path, "was cut short")
        size, checksum = _FRAME.unpack(head)
        data = file.read(size) if size <= FRAME_BYTES else b""
        if len(data) != size or crc32c(data) != checksum:
            raise _damaged(path, f"is damaged before byte {file.tell()}")
        try:
            yield msgpack.unpackb(data, max_ext_len=0)
        except (ValueError, msgpack.UnpackException) as error:
            raise _damaged(path, f"holds no msgpack: {error}") from error


def _damaged(path: Path, what: str) -> IntegrityError:
    return IntegrityError(
        f"the tape file {str(path)!r} {what}", hint="export it again: diloco tape export"
    )
