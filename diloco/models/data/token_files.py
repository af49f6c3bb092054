"""Reads token files of other tools: `.bin` of nanoGPT, of llm.c, and of Megatron with an `.idx`.

Layouts, little-endian:
  - nanoGPT: uint16 tokens and nothing else; uint32 tokens if the vocabulary exceeds 65,536.
  - llm.c: 256 int32 (a magic number, a version, the number of tokens, zeros), then the tokens,
    with the token that ends a text before each.
  - Megatron: tokens and nothing else. The index has a magic of 9 bytes, a version (u64), the dtype
    (u8), numbers of sequences and of documents' bounds (u64 each); then lengths of sequences in
    tokens (int32), offsets of sequences in bytes (int64), and the sequence with which each document
    begins, with one more for the end (int64).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.common.protocol.errors import DataError
from diloco.models.data.manifest import dtype_for

INDEX = ".idx"
_INDEX_MAGIC = b"MMIDIDX\0\0"
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER_BYTES = 1024
_HEADER_DTYPES = {20240520: "<u2", 20240801: "<u4"}
# The number of tokens that are searched at a time.
_BLOCK = 1 << 20

Tokens = npt.NDArray[np.integer]


class TokenDocument(NamedTuple):
    """One document of a token file.

    Attributes:
        tokens: the document's tokens.
        after: start of the next document, from which `stored_documents` can resume: the index of a
            token; in Megatron's files the number of a document.
    """

    tokens: Tokens
    after: int


def stored_documents(
    path: str, start: int, *, vocabulary: int, end: int
) -> Iterator[TokenDocument]:
    """Yields the documents of a token file from `start` on, without the tokens that end them.

    Args:
        path: the `.bin` file.
        start: 0, or `TokenDocument.after` of the last document that was read.
        vocabulary: vocabulary size of the tokenizer that made the tokens.
        end: the token that ends each document; if the file has an index, documents may lack it.

    Raises:
        DataError: the file is damaged, or was made by another tokenizer.
    """
    index = Path(path).with_suffix(INDEX)
    found = (
        _indexed(path, start, index) if index.exists() else _divided(path, start, vocabulary, end)
    )
    for document in found:
        tokens = document.tokens
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0]
            raise DataError(
                f"{path!r} has the token {wrong}, read as {tokens.dtype.name}, but the tokenizer"
                f" has {vocabulary}",
                hint="--tokenizer must be the one that made the file",
            )
        ended = len(tokens) > 0 and int(tokens[-1]) == end
        yield TokenDocument(tokens[:-1] if ended else tokens, document.after)


def _indexed(path: str, start: int, index: Path) -> Iterator[TokenDocument]:
    bounds, dtype = _bounds(path, index)
    tokens = _mapped(path, dtype, 0)
    if len(tokens) < bounds[-1]:
        raise DataError(
            f"{path!r} has {len(tokens)} tokens of {dtype.name}, but {str(index)!r} says"
            f" {bounds[-1]}",
            hint="the two are of different files, or cut short: copy both again",
        )
    for number in range(start, len(bounds) - 1):
        yield TokenDocument(tokens[bounds[number] : bounds[number + 1]], number + 1)


def _bounds(path: str, index: Path) -> tuple[npt.NDArray[np.int64], np.dtype[np.integer]]:
    """Reads Megatron's index; returns (documents' bounds, dtype of the tokens).

    The bounds are the index of each document's first token, then the index after the last token.

    Raises:
        DataError: `index` is not such an index.
    """
    data = index.read_bytes()
    try:
        magic, version, code, sequences, documents = _INDEX_HEADER.unpack_from(data)
        dtype: np.dtype[np.integer] = np.dtype(_INDEX_DTYPES[code])
        place = _INDEX_HEADER.size
        lengths = np.frombuffer(data, "<i4", sequences, place)
        places = np.frombuffer(data, "<i8", sequences, place + lengths.nbytes)
        begins = np.frombuffer(data, "<i8", documents, place + lengths.nbytes + places.nbytes)
        ends = np.append(places // dtype.itemsize, places[-1] // dtype.itemsize + lengths[-1])
        bounds: npt.NDArray[np.int64] = ends[begins]
        rises = bounds[0] >= 0 and bool((np.diff(bounds) >= 0).all())
        right = magic == _INDEX_MAGIC and version == 1 and rises
    except (struct.error, LookupError, ValueError, OverflowError):
        right = False
    if not right:
        raise DataError(
            f"{str(index)!r} is not an index of Megatron's, version 1, of tokens in {path!r}",
            hint="copy it again; an index of another kind belongs elsewhere",
        )
    return bounds, dtype


def _divided(path: str, start: int, vocabulary: int, end: int) -> Iterator[TokenDocument]:
    tokens = _plain(path, vocabulary)
    first, seen = start, start > 0
    for block in range(start, len(tokens), _BLOCK):
        for place in np.flatnonzero(tokens[block : block + _BLOCK] == end):
            after, seen = block + int(place) + 1, True
            yield TokenDocument(tokens[first:after], after)
            first = after
    if not seen:
        raise DataError(
            f"no document of {path!r} ends in token {end}",
            hint="name the token that is behind each: --end TOKEN; of a file without, prepare the"
            " text",
        )
    if first < len(tokens):
        yield TokenDocument(tokens[first:], len(tokens))


def _plain(path: str, vocabulary: int) -> Tokens:
    with open(path, "rb") as file:  # noqa: PTH123 - as other documents are opened
        header = file.read(_HEADER_BYTES)
    magic = int.from_bytes(header[:4], "little")
    if magic in _HEADER_DTYPES and len(header) == _HEADER_BYTES:
        tokens = _mapped(path, np.dtype(_HEADER_DTYPES[magic]), _HEADER_BYTES)
        if (said := int.from_bytes(header[8:12], "little")) != len(tokens):
            raise DataError(
                f"{path!r} has {len(tokens)} tokens, but {said} by its header",
                hint="it is cut short: copy it again",
            )
        return tokens
    dtype = np.dtype(dtype_for(vocabulary)).newbyteorder("<")
    tokens = _mapped(path, dtype, 0)
    if dtype.itemsize == 2 and len(tokens) > 1 and not tokens[1 : 2 * _BLOCK : 2].any():
        raise DataError(
            f"{path!r} has numbers of 32 bits, but tokens of a vocabulary of {vocabulary} have 16",
            hint="--tokenizer must be the one that made the file; numpy.fromfile(FILE, 'uint32')"
            ".astype('uint16').tofile(NEW) makes them shorter",
        )
    return tokens


def _mapped(path: str, dtype: np.dtype[np.integer], offset: int) -> Tokens:
    size_bytes = Path(path).stat().st_size - offset
    if size_bytes % dtype.itemsize:
        raise DataError(
            f"{path!r} has {size_bytes} bytes of tokens, which is not a multiple of"
            f" {dtype.itemsize}, the bytes of a {dtype.name}",
            hint="it is cut short, or no file of tokens: copy it again, or leave it out",
        )
    return np.memmap(path, dtype, "r", offset) if size_bytes > 0 else np.empty(0, dtype)
