"""Documents of a part of a file, one after the other: never more than one is in memory.

Rules:
  1. What is not text, or has no document where one must be, is refused with its place. Nothing is
     skipped but empty documents, which are counted.
  2. A line belongs to the part in which its first byte lies.
"""

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from diloco.common.errors import ConfigError, DataError
from diloco.data.parquet import column_values
from diloco.data.plan import SourceFile, Span

# Of one document. Its tokens take some fifty times as much memory for a moment.
MOST_BYTES = 64 << 20
BOM = b"\xef\xbb\xbf"
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


class Document(NamedTuple):
    """A text, "" for an empty document, and how many bytes of its source it was."""

    text: str
    size_bytes: int


def read_span(span: Span, field: str, *, by_line: bool) -> Iterator[Document]:
    """The documents that begin in a span.

    Args:
        span: of a file.
        field: of JSON lines, or column.
        by_line: a text file's lines are its documents.

    Raises:
        DataError: the file is damaged, no text, or has no such field.
    """
    file = span.file
    if file.kind == "parquet":
        assert span.stop is not None
        values = column_values(file.path, field, span.start, span.stop)
        yield from (Document(text, size_bytes) for text, size_bytes in values)
    elif file.kind == "json":
        for at, line in _lines(span):
            if line.strip():
                yield Document(_text_of(file, at, line, field), len(line))
    elif by_line:
        for at, line in _lines(span):
            yield Document(_decoded(file, at, line).rstrip("\r\n"), len(line))
    else:
        with _opened(file) as stream:
            data = _guarded(file, lambda: stream.read(MOST_BYTES + 1))
        if len(data) > MOST_BYTES:
            raise _too_long(file, "it is one document")
        yield Document(_decoded(file, 0, data), len(data))


def _lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """Lines that begin in a span, each with the byte at which it does."""
    file = span.file
    with _opened(file) as stream:
        at = _first_line(stream, span.start)
        while span.stop is None or at < span.stop:
            line = _guarded(file, lambda: stream.readline(MOST_BYTES + 1))
            if not line:
                return
            if len(line) > MOST_BYTES:
                raise _too_long(file, f"line {_line_number(file, at)} is one document")
            yield at, line
            at += len(line)


def _first_line(stream: BinaryIO, start: int) -> int:
    """Where the first line from `start` on begins; the stream stands there."""
    if not start:
        return 0
    stream.seek(start - 1)
    while (passed := stream.readline(1 << 20)) and not passed.endswith(b"\n"):
        pass
    return stream.tell()


def _text_of(file: SourceFile, at: int, line: bytes, field: str) -> str:
    text = _decoded(file, at, line)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"line {_line_number(file, at)} of {file.path!r} is not JSON: {why}",
            hint="files called .json, .jsonl and .ndjson have an object on each line",
        ) from error
    return _value_of(file, at, found, field)


def _value_of(file: SourceFile, at: int, found: Any, field: str) -> str:
    if not isinstance(found, dict) or field not in found:
        has = f"an object with {', '.join(found)}" if isinstance(found, dict) else repr(found)[:60]
        raise DataError(
            f"line {_line_number(file, at)} of {file.path!r} has no field {field!r}: it is {has}",
            hint="name the field that has the documents: --field NAME",
        )
    value = found[field]
    if value is None:
        return ""
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        kind = "half of a surrogate pair" if isinstance(value, str) else type(value).__name__
        raise DataError(
            f"line {_line_number(file, at)} of {file.path!r}: the field {field!r} holds {kind},"
            " not text",
            hint="repair that line, or name another field: --field NAME",
        ) from error
    return cast("str", value)


def _decoded(file: SourceFile, at: int, data: bytes) -> str:
    """Text of bytes that begin at byte `at` of the file."""
    try:
        text = data.decode()
        place = data.find(0)
        if place < 0:
            return text.removeprefix("\ufeff") if at == 0 else text
        what = "it has a zero byte"
    except UnicodeDecodeError as error:
        place, what = error.start, "it is not UTF-8"
    unpacked = " of what it unpacks to" if file.compression else ""
    raise DataError(
        f"{file.path!r} is not text: {what}, at byte {at + place}{unpacked}",
        hint="convert it to UTF-8, or leave it out: a glob such as 'text/**/*.md' names the rest",
    )


def _opened(file: SourceFile) -> BinaryIO:
    if file.compression == ".zst":
        return _zstd(file)
    if not file.compression:
        return Path(file.path).open("rb")
    openers: dict[str, Callable[[str], Any]] = {
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".xz": lzma.open,
    }
    return cast("BinaryIO", openers[file.compression](file.path))


def _zstd(file: SourceFile) -> BinaryIO:
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{file.path!r} is compressed by zstd, and pyarrow, which reads it, is not installed",
            hint="pip install 'diloco[arrow]'",
        ) from error
    return cast("BinaryIO", io.BufferedReader(pa.input_stream(file.path, compression="zstd")))


def _guarded(file: SourceFile, read: Callable[[], bytes]) -> bytes:
    """What a read gives of a file that may be compressed, and damaged."""
    try:
        return read()
    except _DAMAGED as error:
        raise _damaged(file, error) from error
    except OSError as error:
        if not file.compression or error.errno is not None:
            raise
        raise _damaged(file, error) from error


def _damaged(file: SourceFile, error: Exception) -> DataError:
    return DataError(
        f"{file.path!r} cannot be unpacked: {error}",
        hint="it is damaged or cut short: copy it again, or leave it out",
    )


def _too_long(file: SourceFile, what: str) -> DataError:
    return DataError(
        f"{file.path!r}: {what} of more than {MOST_BYTES >> 20} MiB",
        hint="cut it into documents; with --documents line each line of a text file is one",
    )


def _line_number(file: SourceFile, at: int) -> int:
    """Which line begins at a byte: counted only where something is wrong there."""
    number, left = 1, at
    with _opened(file) as stream:
        while left and (data := stream.read(min(left, 1 << 20))):
            number += data.count(b"\n")
            left -= len(data)
    return number
