"""`diloco data prepare`: sources become a folder of tokens, piece by piece.

Rules:
  1. What decides the bytes is stored first (the plan), what says that they are whole last (the
     manifest). A process that begins where another was ended finds its plan there, and goes on only
     with the same.
  2. A piece is done when its note is stored, which is behind its shards. What is not done is made
     again, to the same bytes; so a kill at any moment costs at most the pieces in work.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diloco.common.errors import ConfigError, DataError, StoreError
from diloco.common.store import ObjectStore
from diloco.common.token_manifest import (
    MANIFEST,
    PLAN,
    SIDES,
    Counted,
    Identity,
    PrepareOptions,
    Sha256,
    TokenManifest,
    TokenSource,
    dtype_for,
    json_bytes,
    parse_manifest,
)
from diloco.data.piece import PieceNote, Setup, note_name
from diloco.data.places import alone_in, first_of, found_at, local_folder, reader, tidy, writer
from diloco.data.plan import SourceFile, Span, pieces
from diloco.data.pool import make_beside, make_here
from diloco.data.sources import find_files, listing_digest
from diloco.data.tokenizer import Ends, TextTokenizer

# Is told how many bytes of how many have been read.
Progress = Callable[[int, int], None]


class Plan(Identity):
    """What a place is being prepared with: also when files were changed last."""

    times_sha256: Sha256


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command line asks for."""

    sources: Sequence[str]
    place: str
    tokenizer: Path
    ends: Ends
    options: PrepareOptions
    workers: int


def prepare(wanted: Wanted, progress: Progress) -> TokenManifest:
    """Prepare data, or go on with it; what is whole already stays as it is.

    Raises:
        ConfigError: an option is wrong, or the place has something else.
        DataError: a source is not what it must be, or the sides come out empty.
        StoreError: something cannot be stored.
    """
    tokenizer = TextTokenizer(wanted.tokenizer, wanted.ends, special=wanted.options.special)
    _check_apart(wanted)
    files = find_files(wanted.sources, wanted.options.field)
    plan = Plan(
        tokenizer=tokenizer.facts,
        dtype=dtype_for(tokenizer.facts.vocabulary),
        begin=tokenizer.begin,
        end=tokenizer.end,
        options=wanted.options,
        input_sha256=listing_digest(files),
        times_sha256=listing_digest(files, times=True),
    )
    with alone_in(wanted.place):
        if (whole := _begun(wanted.place, plan)) is not None:
            # It may be whole and not tidy; if it is both, it may be a place that takes no writer.
            if found_at(reader(wanted.place), PLAN) is not None:
                tidy(wanted.place, writer(wanted.place))
            return whole
        try:
            store = writer(wanted.place)
            store.put(PLAN, json_bytes(plan))
            return _finish(wanted, files, plan, store, progress)
        except StoreError as error:
            raise type(error)(
                f"{wanted.place!r}: {error.message}",
                hint=f"{error.hint or 'see what the store says'}; then run the same command again,"
                " which continues",
            ) from error


def _check_apart(wanted: Wanted) -> None:
    """Refuse to write among the sources: they would be others the next time.

    Raises:
        ConfigError: the place lies in a source.
    """
    folder = local_folder(wanted.place)
    for source in wanted.sources:
        if folder is not None and folder.resolve().is_relative_to(Path(source).resolve()):
            raise ConfigError(
                f"--out {wanted.place!r} lies in the source {source!r}",
                hint="give a folder that is not among the sources",
            )


def _begun(place: str, plan: Plan) -> TokenManifest | None:
    """The manifest of a place that is whole; None if it is to be prepared, from the start or on.

    Raises:
        ConfigError: the place has something else.
    """
    read = reader(place)
    if (data := found_at(read, MANIFEST)) is not None:
        manifest = parse_manifest(data, f"{place}/{MANIFEST}")
        _check_same(place, manifest, plan)
        return manifest
    if (data := found_at(read, PLAN)) is not None:
        _check_same(place, _plan_of(place, data), plan)
    elif (other := first_of(place)) is not None:
        raise ConfigError(
            f"{place!r} is not empty: it has {other!r}, and is not prepared data",
            hint="give a new folder or prefix to --out",
        )
    return None


def _plan_of(place: str, data: bytes) -> Plan:
    try:
        return Plan.model_validate_json(data)
    except ValidationError as error:
        raise ConfigError(
            f"{place!r} was begun by diloco data copy, or by another release",
            hint="finish it by the command that began it, or give another --out",
        ) from error


def _check_same(place: str, there: Identity, wanted: Plan) -> None:
    old, new = _facts(there), _facts(wanted)
    for name, value in old.items():
        if name in new and new[name] != value:
            what = _OTHER.get(name, f"another {name}: {value!r}, not {new[name]!r}")
            raise ConfigError(
                f"{place!r} was prepared with {what}",
                hint="give another --out; or remove that one, to prepare it again",
            )


def _facts(identity: Identity) -> dict[str, Any]:
    """What decides a folder, option by option."""
    facts: dict[str, Any] = identity.model_dump()
    options: dict[str, Any] = facts.pop("options")
    return facts | options


_OTHER = {
    "tokenizer": "another tokenizer",
    "dtype": "another tokenizer",
    "input_sha256": "other sources: names or sizes of their files differ",
    "times_sha256": "sources that were changed since",
}


def _finish(
    wanted: Wanted,
    files: Sequence[SourceFile],
    plan: Plan,
    store: ObjectStore,
    progress: Progress,
) -> TokenManifest:
    by_line = wanted.options.documents == "line"
    work = dict(enumerate(pieces(files, wanted.options.shard_bytes, by_line=by_line)))
    notes = _make(wanted, plan, store, work, progress)
    manifest = _manifest(wanted.sources, files, plan, [notes[number] for number in sorted(notes)])
    _check_sides(wanted, manifest)
    store.put(MANIFEST, json_bytes(manifest))
    tidy(wanted.place, store)
    return manifest


def _make(
    wanted: Wanted,
    plan: Plan,
    store: ObjectStore,
    work: Mapping[int, Sequence[Span]],
    progress: Progress,
) -> dict[int, PieceNote]:
    """The notes of all pieces: those that are stored, and those that are made now."""
    total = sum(_bytes_of(spans) for spans in work.values())
    notes = _kept(store, len(work))
    left = {number: spans for number, spans in work.items() if number not in notes}
    heard = total - sum(_bytes_of(spans) for spans in left.values())

    def hear(count: int) -> None:
        nonlocal heard
        heard += count
        progress(heard, total)

    setup = Setup(
        place=wanted.place,
        tokenizer=wanted.tokenizer,
        ends=wanted.ends,
        identity=Identity(**{name: getattr(plan, name) for name in Identity.model_fields}),
    )
    workers = min(wanted.workers, len(left))
    made = make_here(setup, left, hear) if workers < 2 else make_beside(setup, left, hear, workers)
    notes.update(made)
    return notes


def _bytes_of(spans: Sequence[Span]) -> int:
    return sum(span.size_bytes for span in spans)


def _kept(store: ObjectStore, count: int) -> dict[int, PieceNote]:
    """The notes of pieces that an earlier process has made."""
    there = {info.name for info in store.list(note_name(0).rpartition("/")[0] + "/")}
    return {
        number: PieceNote.model_validate_json(store.get(note_name(number)))
        for number in range(count)
        if note_name(number) in there
    }


def _manifest(
    sources: Sequence[str], files: Sequence[SourceFile], plan: Plan, notes: Sequence[PieceNote]
) -> TokenManifest:
    shards = sorted((shard for note in notes for shard in note.shards), key=lambda one: one.name)
    return TokenManifest(
        **{name: getattr(plan, name) for name in Identity.model_fields},
        sources=tuple(_source(number, path, files, notes) for number, path in enumerate(sources)),
        shards=tuple(shards),
    )


def _source(
    number: int, path: str, files: Sequence[SourceFile], notes: Sequence[PieceNote]
) -> TokenSource:
    own = [file for file in files if file.source == number]
    parts = [part for note in notes for part in note.sources if part.source == number]
    return TokenSource(
        path=path,
        files=len(own),
        size_bytes=sum(file.size_bytes for file in own),
        empty=sum(part.empty for part in parts),
        train=sum((part.train for part in parts), Counted()),
        held_out=sum((part.held_out for part in parts), Counted()),
    )


def _check_sides(wanted: Wanted, manifest: TokenManifest) -> None:
    """Refuse what nobody could train on, or score.

    Raises:
        DataError: a source has no text, or a side has none.
    """
    for source in manifest.sources:
        if not source.train.tokens + source.held_out.tokens and source.files:
            raise DataError(
                f"the source {source.path!r} is empty: none of its documents has any text",
                hint="leave it out, or put documents there, and give another --out",
            )
    counts = {side: manifest.counted(side).documents for side in SIDES}
    for side in SIDES:
        if not counts[side] and (side == "train" or wanted.options.held_out):
            raise DataError(
                f"the side {side!r} came out empty: of {sum(counts.values())} documents"
                f" {counts['held_out']} are held out, at --held-out {wanted.options.held_out:g}",
                hint="give more documents, another --held-out, or --documents line, where each line"
                " of a text file is a document; and another --out",
            )
