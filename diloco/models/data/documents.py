"""Reads documents from a file one by one, so that only a few are in memory.

Rules:
  1. Content that is not text, or a line or row without a document, is an error that names its
     place. An empty document is not an error; `prepare` counts and skips it.
  2. Columns of tables are read by the library `datasets`. JSON lines are read here, since that
     library silently turns numbers into texts and ignores missing fields, and its errors name
     neither file nor line (ADR 72).
"""

import bz2
import gzip
import io
import itertools
import json
import lzma
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from diloco.common.process.config import keep_offline
from diloco.common.protocol.errors import DataError
from diloco.models.data.chats import Chat, ChatError, ChatTemplate
from diloco.models.data.sources import TABLES, SourceFile
from diloco.models.data.token_files import stored_documents

T = TypeVar("T")
# The largest document, in bytes. Encoding it takes some fifty times as much memory.
MOST_BYTES = 64 << 20
# The number of documents of a column that are decoded at a time.
ROWS = 64
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
_TEXT_TYPES = ("string", "large_string", "string_view")
# The key of the tools that the assistant may call, beside a chat's messages.
_TOOLS = "tools"
# A text, a chat, or the tokens of a document in a token file.
Content = str | Chat | npt.NDArray[np.integer]


class Document(NamedTuple):
    """One document of a file.

    Attributes:
        content: text, chat or tokens; of length 0 for an empty document.
        size_bytes: the document's size in the file, in bytes (in a table: in characters).
        after: start of the next document in the file: an offset in bytes; in tables the number of a
            row; in token files `TokenDocument.after`.
    """

    content: Content
    size_bytes: int
    after: int


class Reading(NamedTuple):
    """The options by which documents are read from files.

    Attributes:
        field: the field of JSON lines, or column of a table, that has the document.
        by_line: True: each line of a text file is a document; False: the whole file is one.
        vocabulary: the tokenizer's vocabulary size.
        end: the token that ends each document in a file of tokens.
        template: renders the chats that the field has; None: the field has texts.
    """

    field: str
    by_line: bool
    vocabulary: int
    end: int
    template: ChatTemplate | None = None


def read_documents(file: SourceFile, start: int, reading: Reading) -> Iterator[Document]:
    """Yields the documents of a file.

    Args:
        file: the file.
        start: 0, or `Document.after` of the last document that was read.
        reading: the options.

    Raises:
        DataError: the file is damaged, or does not fit `reading`.
    """
    if file.kind in TABLES:
        yield from _rows(file, start, reading)
    elif file.kind == "json":
        for at, line in _lines(file, start):
            if line.strip():
                yield Document(_content_of(file, at, line, reading), len(line), at + len(line))
    elif reading.template is not None:
        raise DataError(
            f"{file.path!r} has no chats", hint="chats are in JSON lines, Parquet or Arrow"
        )
    elif file.kind == "tokens":
        yield from _stored(file, start, reading)
    else:
        yield from _texts(file, start, by_line=reading.by_line)


def _stored(file: SourceFile, start: int, reading: Reading) -> Iterator[Document]:
    for tokens, after in stored_documents(
        file.path, start, vocabulary=reading.vocabulary, end=reading.end
    ):
        if tokens.nbytes > MOST_BYTES:
            raise _too_long(file, f"what ends before place {after} is one document")
        yield Document(tokens, tokens.nbytes, after)


def _texts(file: SourceFile, start: int, *, by_line: bool) -> Iterator[Document]:
    if by_line:
        for at, line in _lines(file, start):
            text = _decoded(file, at, line).rstrip("\r\n")
            yield Document(text, len(line), at + len(line))
    elif not start:
        with _opened(file) as stream:
            data = _guarded(file, lambda: stream.read(MOST_BYTES + 1))
        if len(data) > MOST_BYTES:
            raise _too_long(file, "it is one document")
        yield Document(_decoded(file, 0, data), len(data), max(1, len(data)))


def check_file(file: SourceFile, reading: Reading) -> list[Content]:
    """Checks that a file's columns and first document fit `reading`.

    Returns:
        A list of the first document, or an empty list for files of which only columns are checked
        or nothing is.

    Raises:
        DataError: the file does not fit `reading`, or is damaged.
    """
    if file.kind in TABLES:
        _check_column(file, reading.field, chats=reading.template is not None)
    if file.kind in ("json", "tokens") or reading.template is not None:
        return [first.content for first in itertools.islice(read_documents(file, 0, reading), 1)]
    return []


def _check_column(file: SourceFile, field: str, *, chats: bool) -> None:
    with _damage_told(file):
        features = _table(file).features
    hint = "name the column that has the documents: --field NAME"
    if field not in features:
        raise DataError(
            f"{file.path!r} has no column {field!r}; it has {', '.join(features)}",
            hint=_chats_hint(features, hint),
        )
    if chats:
        return
    if (held := getattr(features[field], "dtype", "lists")) not in _TEXT_TYPES:
        raise DataError(f"the column {field!r} of {file.path!r} holds {held}, not text", hint=hint)


def _rows(file: SourceFile, start: int, reading: Reading) -> Iterator[Document]:
    field = reading.field
    with _damage_told(file):
        rows = _table(file)
        tools = reading.template is not None and _TOOLS in rows.features
        columns = [field, _TOOLS] if tools else [field]
        for batch in _table(file, columns).select_columns(columns).skip(start).iter(ROWS):
            for number, value in enumerate(batch[field], start + 1):
                beside = batch[_TOOLS][number - start - 1] if tools else None
                content = _chat_or_text(file, number, value, beside, reading)
                if len(content) > MOST_BYTES:
                    raise _too_long(file, f"row {number} is one document")
                yield Document(content, len(content), number)
            start += len(batch[field])


def _chat_or_text(file: SourceFile, row: int, value: Any, tools: Any, reading: Reading) -> Content:
    if not value or reading.template is None:
        return value or ""
    with _chat_placed(file, lambda: f"row {row}"):
        return reading.template.chat(value, tools)


@contextmanager
def _damage_told(file: SourceFile) -> Iterator[None]:
    """Turns errors of pyarrow and `datasets` about a damaged file into one that names the file.

    Raises:
        DataError: the file is damaged.
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the machine, not of the file's content
        raise DataError(
            f"{file.path!r} cannot be read as {file.kind.title()} data: {error}",
            hint="copy it again, or leave it out",
        ) from error


def _table(file: SourceFile, wanted: list[str] | None = None) -> Any:
    """Opens a table; returns a dataset of its rows, which are read lazily.

    `wanted` has the names of the columns to read; None: all.
    """
    keep_offline(cache=tempfile.gettempdir())
    import datasets

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    if file.kind == "saved":
        return datasets.load_from_disk(file.path)
    columns = {"columns": wanted, "batch_size": ROWS} if wanted and file.kind == "parquet" else {}
    # The file is streamed, so that the cache has no content; `datasets` locks it while opening.
    with tempfile.TemporaryDirectory() as cache:
        return datasets.load_dataset(
            file.kind, data_files=[file.path], split="train", streaming=True, cache_dir=cache,
            **columns,
        )  # fmt: skip


def _lines(file: SourceFile, start: int) -> Iterator[tuple[int, bytes]]:
    """Yields (offset in bytes, line) from the offset `start` on; offsets are of unpacked data."""
    at = start
    with _opened(file) as stream:
        if file.compression:  # a compressed stream may not be able to seek
            _guarded(file, lambda: sum(map(len, _blocks(stream, start))))
        else:
            stream.seek(start)
        while line := _guarded(file, lambda: stream.readline(MOST_BYTES + 1)):
            if len(line) > MOST_BYTES:
                raise _too_long(file, f"line {_line_number(file, at)} is one document")
            yield at, line
            at += len(line)


def _content_of(file: SourceFile, at: int, line: bytes, reading: Reading) -> Content:
    found = _object_of(file, at, line, reading.field)
    value = "" if found[reading.field] is None else found[reading.field]
    if reading.template is not None:
        if not value:
            return ""
        with _chat_placed(file, lambda: f"line {_line_number(file, at)}"):
            return reading.template.chat(value, found.get(_TOOLS))
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        kind = "half of a surrogate pair" if isinstance(value, str) else type(value).__name__
        raise DataError(
            f"line {_line_number(file, at)} of {file.path!r}: the field {reading.field!r} holds"
            f" {kind}, not text",
            hint=_chats_hint(
                [reading.field] if isinstance(value, list) else (),
                "repair that line, or name another field: --field NAME",
            ),
        ) from error
    return cast("str", value)


@contextmanager
def _chat_placed(file: SourceFile, place: Callable[[], str]) -> Iterator[None]:
    """Turns a `ChatError` into a DataError that names the file and the place in it.

    Args:
        file: the file.
        place: returns the place for people, such as "line 3"; called only after an error.

    Raises:
        DataError: the block raised a `ChatError`.
    """
    try:
        yield
    except ChatError as error:
        raise DataError(f"{place()} of {file.path!r}: {error}", hint=error.hint) from error


def _chats_hint(fields: Iterable[str], otherwise: str) -> str:
    if "messages" in fields:
        return "its field messages has chats: --chats"
    return otherwise


def _object_of(file: SourceFile, at: int, line: bytes, field: str) -> dict[str, Any]:
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
            hint=_chats_hint(
                found if isinstance(found, dict) else (),
                "name the field that has the documents: --field NAME",
            ),
        )
    return found


def _decoded(file: SourceFile, at: int, data: bytes) -> str:
    """Decodes UTF-8; drops a byte order mark at the file's beginning.

    Args:
        file: the file, for errors.
        at: offset of `data` in the file, in bytes.
        data: the bytes.

    Raises:
        DataError: the bytes are not text.
    """
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
    """Returns the result of `read()`; turns errors of a damaged compressed file into DataErrors."""
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
    """Returns the number, from 1 on, of the line at offset `at`; reads the file up to there."""
    with _opened(file) as stream:
        return 1 + sum(block.count(b"\n") for block in _blocks(stream, at))


def _blocks(stream: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """Yields the first `size_bytes` bytes of a stream, in blocks."""
    left = size_bytes
    while left and (block := stream.read(min(left, 1 << 20))):
        yield block
        left -= len(block)
