"""`diloco data prepare`: tokenizes sources into a folder of shards, piece by piece.

Rules:
  1. The plan, which determines all bytes, is stored first; the manifest, which says that the folder
     is whole, is stored last. A process that resumes an unfinished folder finds the plan in it, and
     refuses to continue if its own plan differs.
  2. A piece is a number of successive documents of at least `shard_bytes` bytes together. It
     becomes one shard of each side (`train`, `held_out`). After the shards a note is stored, which
     says where the next piece begins; then the piece is done. A piece without a note is made again,
     with the same bytes.
  3. Whether a document is held out is decided by a hash of its text alone: all copies of a document
     are on one side, wherever they are and whatever other documents there are.
"""

import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from diloco.common.protocol.errors import ConfigError, DataError, StoreError
from diloco.common.storage.store import ObjectStore
from diloco.models.data.chats import Chat
from diloco.models.data.command import PrepareArguments
from diloco.models.data.documents import Content, Document, Reading, check_file, read_documents
from diloco.models.data.manifest import (
    MANIFEST,
    PLAN,
    SIDES,
    UNFINISHED,
    Counted,
    Dtype,
    FolderIdentity,
    Given,
    PrepareOptions,
    Sha256,
    Side,
    TokenManifest,
    TokenShard,
    TokenSource,
    dtype_for,
    json_bytes,
    parse_manifest,
    shard_name,
)
from diloco.models.data.places import (
    alone_in,
    first_of,
    found_at,
    local_folder,
    reader,
    tidy,
    writer,
)
from diloco.models.data.sources import SourceFile, find_files, listing_digest
from diloco.models.data.tokenizer import TextTokenizer
from diloco.run.cli.screen import Hear

# Shards are NumPy files of one axis. Their bytes must not depend on NumPy's release: the format is
# version 1.0, and the padding of the header, which the format leaves open, is our own.
HEADER_BYTES = 128
_PREFIX = b"\x93NUMPY\x01\x00"
# Characters that are encoded in one call: enough for all cores, and few beside a shard.
BATCH_CHARACTERS = 1 << 20


class PreparationPlan(FolderIdentity):
    """The inputs and options of a preparation.

    Attributes:
        times_sha256: SHA-256 of the names, sizes and modification times of all source files.
    """

    times_sha256: Sha256


class Note(BaseModel):
    """The result of one piece, stored after the piece's shards.

    Attributes:
        shards: the piece's shards, one of each side that has a document.
        given: counts of the piece's documents, by the index of their source on the command line.
        file: index of the file in which the next piece begins.
        start: start of the next piece in that file, as `Document.after`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shards: tuple[TokenShard, ...]
    given: dict[int, Given]
    file: int
    start: int


def prepare(wanted: PrepareArguments, hear: Hear) -> TokenManifest:
    """Prepares data, or resumes a preparation; returns the manifest of the finished folder.

    A folder that the same plan finished before is left as it is.

    Args:
        wanted: the command's arguments.
        hear: called with (bytes of sources done, bytes in all), to show progress.

    Raises:
        ConfigError: an option is wrong, or the place has other data.
        DataError: a source is invalid or damaged, or a side comes out empty.
        StoreError: an object cannot be read or stored.
    """
    tokenizer = TextTokenizer(wanted)
    _check_apart(wanted)
    files = find_files(wanted.sources)
    options = {name: getattr(wanted, name) for name in PrepareOptions.model_fields}
    options["field"] = wanted.field or ("messages" if wanted.chats else "text")
    vocabulary = tokenizer.facts.vocabulary
    plan = PreparationPlan(
        tokenizer=tokenizer.facts,
        dtype="int32" if wanted.chats else dtype_for(vocabulary),
        begin=tokenizer.begin,
        end=tokenizer.end,
        template_sha256=tokenizer.template_sha256,
        options=PrepareOptions(**options),
        input_sha256=listing_digest(files),
        times_sha256=listing_digest(files, times=True),
    )
    by_line = plan.options.documents == "line"
    reading = Reading(plan.options.field, by_line, vocabulary, plan.end, tokenizer.template)
    for file in files:
        tokenizer.encode(check_file(file, reading))
    with alone_in(wanted.out):
        if (whole := _begun(wanted.out, plan)) is not None:
            # Temporary files may be left. Without any, the place is only read: it may be read-only.
            if found_at(reader(wanted.out), PLAN) is not None:
                tidy(wanted.out, writer(wanted.out))
            return whole
        try:
            store = writer(wanted.out)
            store.put(PLAN, json_bytes(plan))
            notes = list(_Pieces(files, plan, reading, tokenizer, store, hear))
            manifest = _manifest(wanted.sources, files, plan, notes)
            store.put(MANIFEST, json_bytes(manifest))
            tidy(wanted.out, store)
        except StoreError as error:
            raise type(error)(
                f"{wanted.out!r}: {error.message}",
                hint=f"{error.hint or 'see what the store says'}; then run the same command again,"
                " which continues",
            ) from error
    return manifest


def is_held_out(document: Content, share: float) -> bool:
    """Returns True if a document is held out, by a hash of its content.

    About `share` of all documents, from 0 to 1, are.
    """
    text = document.text if isinstance(document, Chat) else document
    data = text.encode() if isinstance(text, str) else text.astype("<u4").tobytes()
    return xxhash.xxh3_64_intdigest(data) < share * 2.0**64


class _Pieces:
    """Iterates over the notes of all pieces: first those stored earlier, then those it makes.

    Args:
        files: all source files.
        plan: the plan.
        reading: the options by which documents are read.
        tokenizer: encodes the documents.
        store: the place of the folder.
        hear: called with (bytes of sources done, bytes in all), to show progress.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        plan: PreparationPlan,
        reading: Reading,
        tokenizer: TextTokenizer,
        store: ObjectStore,
        hear: Hear,
    ) -> None:
        self._files, self._plan, self._tokenizer = files, plan, tokenizer
        self._reading = reading
        self._store, self._hear = store, hear
        # Counts and tokens of the current piece.
        self._given: dict[int, Given] = {}
        self._tokens: dict[Side, list[npt.NDArray[np.integer]]] = {}

    def __iter__(self) -> Iterator[Note]:
        kept = {info.name for info in self._store.list(f"{UNFINISHED}/")} - {PLAN}
        file = start = 0
        for name in sorted(kept, key=lambda name: (len(name), name)):
            note = Note.model_validate_json(self._store.get(name))
            file, start = note.file, note.start
            yield note
        documents = self._documents(file, start)
        for number in itertools.count(len(kept)):
            if (made := self._make(number, documents)) is None:
                return
            yield made

    def _documents(self, first: int, start: int) -> Iterator[tuple[int, Document]]:
        """Yields (index of the file, document) from a place on, to the end of the last file.

        Args:
            first: index of the first file.
            start: start of the first document in that file, as `Document.after`.
        """
        done = sum(file.size_bytes for file in self._files[:first])
        total = sum(file.size_bytes for file in self._files)
        for number, file in enumerate(self._files[first:], first):
            read = 0
            for document in read_documents(file, start, self._reading):
                yield number, document
                read += document.size_bytes
                # A compressed file's documents are larger than the file.
                self._hear(done + min(read, file.size_bytes), total)
            done, start = done + file.size_bytes, 0

    def _make(self, piece: int, documents: Iterator[tuple[int, Document]]) -> Note | None:
        """Makes the next piece: stores its shards, then its note; returns the note.

        Args:
            piece: number of the piece.
            documents: the documents that are left, from `_documents`.

        Returns:
            The note; None if no document is left.
        """
        self._given, self._tokens = {}, {side: [] for side in SIDES}
        waiting: list[tuple[int, Content]] = []
        size_bytes = characters = 0
        last = None
        for file, (document, own_bytes, after) in documents:
            last = file, after
            source = self._files[file].source
            if len(document):
                waiting.append((source, document))
            else:
                self._count(source, Given(empty=1))
            characters += len(document)
            size_bytes += own_bytes
            if characters >= BATCH_CHARACTERS:
                self._encode(waiting)
                waiting, characters = [], 0
            if size_bytes >= self._plan.options.shard_bytes:
                break
        if last is None:
            return None
        self._encode(waiting)
        shards = tuple(
            store_shard(self._store, side, piece, self._plan.dtype, tokens)
            for side, tokens in self._tokens.items()
            if tokens
        )
        note = Note(shards=shards, given=self._given, file=last[0], start=last[1])
        self._store.put(f"{UNFINISHED}/{piece:05d}.json", json_bytes(note))
        return note

    def _encode(self, documents: Sequence[tuple[int, Content]]) -> None:
        """Encodes (index of the source, document) pairs, and adds them to the current piece."""
        found = self._tokenizer.encode([document for _, document in documents])
        for (source, document), tokens in zip(documents, found, strict=True):
            held_out = is_held_out(document, self._plan.options.held_out)
            side: Side = "held_out" if held_out else "train"
            self._tokens[side].append(tokens)
            self._count(source, Given(**{side: Counted(documents=1, tokens=len(tokens))}))

    def _count(self, source: int, more: Given) -> None:
        self._given[source] = self._given.get(source, Given()) + more


def _check_apart(wanted: PrepareArguments) -> None:
    """Checks that the output folder is not within a source, or output would become input.

    Raises:
        ConfigError: `--out` is within a source.
    """
    folder = local_folder(wanted.out)
    for source in wanted.sources:
        if folder is not None and folder.resolve().is_relative_to(Path(source).resolve()):
            raise ConfigError(
                f"--out {wanted.out!r} lies in the source {source!r}",
                hint="give a folder that is not among the sources",
            )


def _begun(place: str, plan: PreparationPlan) -> TokenManifest | None:
    """Returns the manifest of a place whose data is finished; None if there is work left.

    Raises:
        ConfigError: the place has other data, or was prepared by another plan.
    """
    read = reader(place)
    if (data := found_at(read, MANIFEST)) is not None:
        manifest = parse_manifest(data, f"{place}/{MANIFEST}")
        _check_same(place, manifest, plan)
        return manifest
    if (data := found_at(read, PLAN)) is not None:
        try:
            _check_same(place, PreparationPlan.model_validate_json(data), plan)
        except ValidationError as error:
            raise ConfigError(
                f"{place!r} was begun by diloco data copy, or by another release",
                hint="finish it by the command that began it, or give another --out",
            ) from error
    elif (other := first_of(place)) is not None:
        raise ConfigError(
            f"{place!r} is not empty: it has {other!r}, and is not prepared data",
            hint="give a new folder or prefix to --out",
        )
    return None


def _check_same(place: str, there: FolderIdentity, wanted: PreparationPlan) -> None:
    old, new = _facts(there), _facts(wanted)
    for name, value in old.items():
        if name in new and new[name] != value:
            what = _OTHER.get(name, f"another {name}: {value!r}, not {new[name]!r}")
            raise ConfigError(
                f"{place!r} was prepared with {what}",
                hint="give another --out; or remove that one, to prepare it again",
            )


def _facts(identity: FolderIdentity) -> dict[str, Any]:
    """Returns the fields of a folder's identity, with its options among them, by name."""
    facts: dict[str, Any] = identity.model_dump()
    options: dict[str, Any] = facts.pop("options")
    return facts | options


_OTHER = {
    "tokenizer": "another tokenizer",
    "dtype": "another tokenizer",
    "template_sha256": "another chat template, or none",
    "input_sha256": "other sources: names or sizes of their files differ",
    "times_sha256": "sources that were changed since",
}


def _manifest(
    paths: Sequence[str], files: Sequence[SourceFile], plan: PreparationPlan, notes: Sequence[Note]
) -> TokenManifest:
    """Makes the manifest of a folder from the notes of all pieces.

    Raises:
        DataError: a source has no tokens, or a side has no documents.
    """
    sources = []
    for number, path in enumerate(paths):
        own = [file.size_bytes for file in files if file.source == number]
        given = sum((note.given.get(number, Given()) for note in notes), Given())
        source = TokenSource(path=path, files=len(own), size_bytes=sum(own), **dict(given))
        if own and not (source.train + source.held_out).tokens:
            raise DataError(
                f"the source {path!r} is empty: none of its documents has any text",
                hint="leave it out, or put documents there, and give another --out",
            )
        sources.append(source)
    shards = sorted((shard for note in notes for shard in note.shards), key=lambda one: one.name)
    manifest = TokenManifest(
        **{name: getattr(plan, name) for name in FolderIdentity.model_fields},
        sources=tuple(sources),
        shards=tuple(shards),
    )
    counts = {side: manifest.counted(side).documents for side in SIDES}
    for side in SIDES:
        if not counts[side] and (side == "train" or plan.options.held_out):
            raise DataError(
                f"the side {side!r} came out empty: of {sum(counts.values())} documents"
                f" {counts['held_out']} are held out, at --held-out {plan.options.held_out:g}",
                hint="give more documents, another --held-out, or --documents line, where each line"
                " of a text file is a document; and another --out",
            )
    return manifest


def store_shard(
    store: ObjectStore,
    side: Side,
    piece: int,
    dtype: Dtype,
    documents: Sequence[npt.NDArray[np.integer]],
) -> TokenShard:
    """Stores one shard, and returns its facts.

    Args:
        store: the place of the folder.
        side: "train" or "held_out".
        piece: number of the piece that the documents are of.
        dtype: dtype of the tokens in the file.
        documents: the tokens of each document.
    """
    tokens = np.concatenate(documents, dtype=np.dtype(dtype).newbyteorder("<"), casting="unsafe")
    data = header(tokens.dtype, len(tokens)) + tokens.tobytes()
    store.put(shard_name(side, piece), data)
    unlearned = tokens < 0
    return TokenShard(
        name=shard_name(side, piece),
        side=side,
        size_bytes=len(data),
        documents=len(documents),
        tokens=len(tokens),
        unlearned=int(unlearned.sum()),
        largest=int(np.where(unlearned, ~tokens, tokens).max()),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def header(dtype: np.dtype[np.integer], count: int) -> bytes:
    """Returns the header of an .npy file of `count` tokens, `HEADER_BYTES` long."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({count},), }}"
    length = HEADER_BYTES - len(_PREFIX) - 2
    return _PREFIX + struct.pack("<H", length) + text.ljust(length - 1).encode() + b"\n"
