"""Which part of which file is done together, and which document is held out. Pure.

Rules:
  1. Pieces follow from the files' sizes alone, so any number of processes makes the same shards,
     and what a kill left is made again piece by piece.
  2. A document belongs to the span in which it begins, so each is read once.
  3. Whether a document is held out follows from its text alone: copies of it are on one side, and
     neither its place nor other documents matter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import xxhash

Kind = Literal["text", "json", "parquet"]
# How much larger a compressed file is when it is read, roughly: for even shards, no more.
EXPANSION = 4


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file.

    Attributes:
        source: number of the source that it belongs to.
        path: as it is opened.
        size_bytes: on disk.
        modified_ns: when it was changed last.
        kind: what is in it.
        compression: the suffix that says how it is compressed, "" for not.
        groups: bytes of each row group of a Parquet file.
    """

    source: int
    path: str
    size_bytes: int
    modified_ns: int
    kind: Kind
    compression: str = ""
    groups: tuple[int, ...] = ()


class Span(NamedTuple):
    """A part of a file: bytes or row groups [start, stop); stop None is the end, wherever it is."""

    file: SourceFile
    start: int
    stop: int | None
    size_bytes: int


def pieces(files: Sequence[SourceFile], piece_bytes: int, *, by_line: bool) -> list[list[Span]]:
    """Spans that become shards together: each piece has about `piece_bytes` at most.

    Args:
        files: in their order.
        piece_bytes: of sources; one span may have more.
        by_line: a text file's lines are its documents.
    """
    found: list[list[Span]] = []
    room = 0
    for file in files:
        for span in _spans(file, piece_bytes, by_line=by_line):
            weight = span.size_bytes * (EXPANSION if file.compression else 1)
            if not found or weight > room:
                found.append([])
                room = piece_bytes
            found[-1].append(span)
            room -= weight
    return found


def _spans(file: SourceFile, piece_bytes: int, *, by_line: bool) -> Iterator[Span]:
    if file.kind == "parquet":
        for number, size_bytes in enumerate(file.groups):
            yield Span(file, number, number + 1, size_bytes)
    elif file.compression or (file.kind == "text" and not by_line):
        yield Span(file, 0, None, file.size_bytes)
    else:
        for start in range(0, file.size_bytes, piece_bytes):
            stop = min(start + piece_bytes, file.size_bytes)
            yield Span(file, start, stop, stop - start)


def is_held_out(text: bytes, share: float) -> bool:
    """Whether a document is held out, of which `share` are."""
    return xxhash.xxh3_64_intdigest(text) < share * 2.0**64
