"""One piece of the sources becomes its shards, and a note that it has: whole or not at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from diloco.common.store import ObjectStore
from diloco.common.token_manifest import (
    SIDES,
    UNFINISHED,
    Counted,
    Identity,
    Side,
    TokenShard,
    json_bytes,
)
from diloco.data.documents import read_span
from diloco.data.plan import Span, is_held_out
from diloco.data.shards import ShardWriter
from diloco.data.tokenizer import Ends, TextTokenizer

# A shard has one at most for each two bytes of source that a piece has: hardly a tokenizer needs
# more, and where a compressed file holds more there is another shard.
BYTES_PER_TOKEN = 2


class SourcePart(BaseModel):
    """What a piece has of one source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: int
    empty: int
    train: Counted
    held_out: Counted


class PieceNote(BaseModel):
    """What became of a piece; it is stored behind its shards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shards: tuple[TokenShard, ...]
    sources: tuple[SourcePart, ...]


def note_name(piece: int) -> str:
    """The object of a piece's note."""
    return f"{UNFINISHED}/{piece:05d}.json"


@dataclass(frozen=True, kw_only=True)
class Maker:
    """What makes pieces, one after the other.

    Attributes:
        store: for shards and notes.
        tokenizer: of documents.
        identity: of the folder.
        hear: is told how many bytes of sources have been read since it was told last.
    """

    store: ObjectStore
    tokenizer: TextTokenizer
    identity: Identity
    hear: Callable[[int], None]

    def make(self, piece: int, spans: Sequence[Span]) -> PieceNote:
        """Make a piece's shards, and store its note.

        Raises:
            DataError: a source is not what it must be.
            StoreError: a shard cannot be stored.
        """
        capacity = max(1, self.identity.options.shard_bytes // BYTES_PER_TOKEN)
        writers = {
            side: ShardWriter(self.store, side, piece, self.identity.dtype, capacity)
            for side in SIDES
        }
        parts: dict[int, SourcePart] = {}
        for span in spans:
            part = self._add(span, writers)
            before = parts.get(part.source)
            parts[part.source] = part if before is None else _together(before, part)
        for writer in writers.values():
            writer.flush()
        shards = tuple(shard for side in SIDES for shard in writers[side].shards)
        note = PieceNote(shards=shards, sources=tuple(parts.values()))
        self.store.put(note_name(piece), json_bytes(note))
        return note

    def _add(self, span: Span, writers: dict[Side, ShardWriter]) -> SourcePart:
        options = self.identity.options
        empty, heard = 0, 0
        counted: dict[Side, Counted] = {side: Counted() for side in SIDES}
        for text, size_bytes in read_span(span, options.field, by_line=options.documents == "line"):
            if not text:
                empty += 1
                continue
            held_out = is_held_out(text.encode(), options.held_out)
            side: Side = "held_out" if held_out else "train"
            counted[side] += writers[side].add(self.tokenizer.encode(text))
            # What a compressed file unpacks to is more than it is itself.
            new = min(size_bytes, span.size_bytes - heard)
            self.hear(new)
            heard += new
        self.hear(span.size_bytes - heard)
        return SourcePart(source=span.file.source, empty=empty, **counted)


def _together(one: SourcePart, two: SourcePart) -> SourcePart:
    return SourcePart(
        source=one.source,
        empty=one.empty + two.empty,
        train=one.train + two.train,
        held_out=one.held_out + two.held_out,
    )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a process needs to be a maker."""

    place: str
    tokenizer: Path
    ends: Ends
    identity: Identity
