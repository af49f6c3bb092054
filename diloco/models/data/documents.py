"""Documents of a file, one after the other: never more than a few are in memory.

Rules:
  1. What is not text, or has no document where one must be, is refused with its place. Nothing is
     skipped but empty documents, which are counted.
  2. Columns are read by `datasets`. Lines are read here: of JSON lines that library silently makes
     texts of numbers and nothing of missing fields, and it tells neither file nor line (ADR 72).
"""

import bz2
import gzip
import io
import json
import lzma
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from diloco.common.process.config import keep_offline
from diloco.common.protocol.errors import DataError
from diloco.models.data.sources import TABLES, SourceFile

T = TypeVar("T")
# Of one document. Its tokens take some fifty times as much memory for a moment.
MOST_BYTES = 64 << 20
# Documents of a column that are decoded at a time.
ROWS = 64
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
_TEXT_TYPES = ("string", "large_string", "string_view")


class Document(NamedTuple):
    """One document of a file.

    Attributes:
        text: "" for an empty document.
        size_bytes: bytes of its file that it took.
        after: where the next document begins in the file: a byte, or the number of a row.
    """

    text: str
    size_bytes: int
    after: int


def read_documents(
    file: SourceFile, start: int, field: str, *, by_line: bool
) -> Iterator[Document]:
    """The documents of a file from a place on.

    Args:
        file: which one.
        start: 0, or `Document.after` of the one before.
        field: of JSON lines, or column.
        by_line: a text file's lines are its documents.

    Raises:
        DataError: the file is damaged, no text, or has no such field.
    """
    if file.kind in TABLES:
        yield from _rows(file, start, field)
    elif file.kind == "json":
        for at, line in _lines(file, start):
            if line.strip():
                yield Document(_text_of(file, at, line, field), len(line), at + len(line))
    elif by_line:
        for at, line in _lines(file, start):
            text = _decoded(file, at, line).rstrip("\r\n")
            yield Document(text, len(line), at + len(line))
    elif not start:
        with _opened(file) as stream:
            data = _guarded(file, lambda: stream.read(MOST_BYTES + 1))
        if len(data) > MOST_BYTES:
            raise _too_long(file, "it is one document")
        yield Document(_decoded(file, 0, data), len(data), max(1, len(data)))


def check_column(file: SourceFile, field: str) -> None:
    """Refuse a file whose documents are in a column that it does not have, or not as text.

    Raises:
        DataError: so it is, or the file is damaged.
    """
    with _damage_told(file):
        features = _table(file).features
    hint = "name the column that has the documents: --field NAME"
    if field not in features:
        raise DataError(
            f"{file.path!r} has no column {field!r}; it has {', '.join(features)}", hint=hint
        )
    if (held := getattr(features[field], "dtype", "lists")) not in _TEXT_TYPES:
        raise DataError(f"the column {field!r} of {file.path!r} holds {held}, not text", hint=hint)


def _rows(file: SourceFile, start: int, field: str) -> Iterator[Document]:
    with _damage_told(file):
        rows = _table(file, field).select_columns([field]).skip(start)
        for batch in rows.iter(ROWS):
            for text in batch[field]:
                start += 1
                if len(text or "") > MOST_BYTES:
                    raise _too_long(file, f"row {start} is one document")
                yield Document(text or "", len(text or ""), start)


@contextmanager
def _damage_told(file: SourceFile) -> Iterator[None]:
    """Say which file it is that the library cannot read.

    Raises:
        DataError: the file is damaged.
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the machine, not of what is in the file
        raise DataError(
            f"{file.path!r} cannot be read as {file.kind.title()} data: {error}",
            hint="copy it again, or leave it out",
        ) from error


def _table(file: SourceFile, field: str | None = None) -> Any:
    """The rows of a file as a dataset that reads them when they are asked for."""
    keep_offline(cache=tempfile.gettempdir())
    import datasets

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    if file.kind == "saved":
        return datasets.load_from_disk(file.path)
    columns = {"columns": [field], "batch_size": ROWS} if field and file.kind == "parquet" else {}
    # It is streamed: of a cache it needs the lock, while it is opened.
    with tempfile.TemporaryDirectory() as cache:
        return datasets.load_dataset(
            file.kind, data_files=[file.path], split="train", streaming=True, cache_dir=cache,
            **columns,
        )  # fmt: skip


def _lines(file: SourceFile, start: int) -> Iterator[tuple[int, bytes]]:
    """Lines from a byte on, each with the byte at which it begins."""
    at = start
    with _opened(file) as stream:
        if file.compression:  # there may be no other way to get there
            _guarded(file, lambda: sum(map(len, _blocks(stream, start))))
        else:
            stream.seek(start)
        while line := _guarded(file, lambda: stream.readline(MOST_BYTES + 1)):
            if len(line) > MOST_BYTES:
                raise _too_long(file, f"line {_line_number(file, at)} is one document")
            yield at, line
            at += len(line)


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
    if not isinstance(found, dict) or field not in found:
        has = f"an object with {', '.join(found)}" if isinstance(found, dict) else repr(found)[:60]
        raise DataError(
            f"line {_line_number(file, at)} of {file.path!r} has no field {field!r}: it is {has}",
            hint="name the field that has the documents: --field NAME",
        )
    value = "" if found[field] is None else found[field]
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


def _zstd(path: str) -> BinaryIO:
    import pyarrow as pa

    return cast("BinaryIO", io.BufferedReader(pa.input_stream(path, compression="zstd")))


_OPENERS: dict[str, Callable[[str], Any]] = {
    "": lambda path: open(path, "rb"),  # noqa: PTH123, SIM115 - whoever calls it closes it
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}


def _opened(file: SourceFile) -> BinaryIO:
    return cast("BinaryIO", _OPENERS[file.compression](file.path))


def _guarded(file: SourceFile, read: Callable[[], T]) -> T:
    """Read a file that may be compressed, and damaged."""
    try:
        return read()
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and (not file.compression or error.errno is not None):
            raise
        raise DataError(
            f"{file.path!r} cannot be unpacked: {error}",
            hint="it is damaged or cut short: copy it again, or leave it out",
        ) from error


def _too_long(file: SourceFile, what: str) -> DataError:
    return DataError(
        f"{file.path!r}: {what} of more than {MOST_BYTES >> 20} MiB",
        hint="cut it into documents; with --documents line each line of a text file is one",
    )


def _line_number(file: SourceFile, at: int) -> int:
    """Which line begins at a byte: counted only where something is wrong there."""
    with _opened(file) as stream:
        return 1 + sum(block.count(b"\n") for block in _blocks(stream, at))


def _blocks(stream: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """The first bytes of a stream."""
    left = size_bytes
    while left and (block := stream.read(min(left, 1 << 20))):
        yield block
        left -= len(block)
