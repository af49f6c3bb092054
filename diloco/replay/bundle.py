"""`diloco bundle`: a run, or a part of it, in one file: tape, objects, heartbeats, logs, packages.

Every command that only reads takes the file in place of RUN, on another machine, without bus or
store. A bundle that begins at a later version has what garbage collection would have left of the
run, and is judged as a trimmed tape.
"""

import asyncio
import contextlib
import json
import platform
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from diloco.common.process.release import packages, release
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import ConfigError, ObjectMissingError, StreamMissingError
from diloco.common.storage.bundle import BundleWriter, is_file_name
from diloco.common.storage.bus import Message
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.tape import (
    Entry,
    Item,
    RunContext,
    first_message,
    messages_of,
    read_item,
    records_of,
)
from diloco.judge.evidence import LastRecord, newer_than
from diloco.judge.objects import named
from diloco.replay.options import BundleOptions
from diloco.replay.redact import Redactor, names_in, task_of
from diloco.run.cli.opening import OpenRun, open_run
from diloco.run.cli.screen import say, working
from diloco.run.cli.versions import find_targets

WARNING = (
    "its shards are outer gradients, and its views the model: who has them can learn of the data "
    "that they were trained on; no redaction changes them"
)
ABOUT, PACKAGES, LOGS = "about.json", "packages.txt", "logs/"


def run_bundle(target: str, path: Path, wanted: BundleOptions) -> None:
    """Writes the bundle of the run `target` to the new file `path`, and prints what it has.

    Raises:
        DilocoError: there is no such run, or the file exists.
    """
    if wanted.redact and not wanted.objects:
        raise ConfigError("--redact gives objects other names: it needs them in the file")
    with working("copying"):
        done = asyncio.run(_bundle(target, path, wanted))
    say(
        f"{done.messages:,} messages, {done.objects:,} objects and {len(done.files)} files are in "
        f"{path} ({path.stat().st_size:,} bytes)"
    )
    if done.lost:
        say(f"[yellow]a part only:[/] {done.lost}")
    if wanted.objects:
        say(f"[yellow]mind:[/] {WARNING}")


class BundleSummary(NamedTuple):
    """The numbers of messages and objects in a bundle, and the names of its files.

    Attributes:
        lost: the damage of the bundle from which this one was made; "" if there was none.
    """

    messages: int
    objects: int
    files: list[str]
    lost: str


async def _bundle(target: str, path: Path, wanted: BundleOptions) -> BundleSummary:
    async with open_run(target, name="bundle", reads=True, salvage=wanted.salvage) as opened:
        context = opened.context
        # The store is listed before the tape is read: a listed object that the tape does not
        # name is then newer than the tape.
        there = await context.runtime.call(context.store.list, f"{context.run}/")
        part = await _part(context, wanted)
        redactor = await _redactor(context) if wanted.redact else None
        lost = opened.bundle.lost or opened.bundle.header.get("lost", "") if opened.bundle else ""
        made_s = context.runtime.clock()
        run = redactor.name(context.run) if redactor else context.run
        header = {
            "run": run, "made_s": made_s, "objects": wanted.objects, "redacted": wanted.redact,
            "lost": lost,
        }  # fmt: skip
        with BundleWriter(path, header) as writer:
            copy = _Copy(opened, writer, redactor)
            # First the parts without which a damaged file cannot be read.
            if wanted.objects:
                await copy.objects([names.layout_object(context.run, context.layout.digest)])
            await copy.tape(part)
            await copy.heartbeats()
            if wanted.objects:
                await copy.needed([info.name for info in there], newer=wanted.until is None)
            await copy.collected()
            files = [*_notes(header | {"warning": WARNING}), *_logs(target, wanted.logs)]
            files += _earlier(opened, {name for name, _ in files})
            for name, data in files:
                writer.file(*(copy.hidden(name, data) if redactor else (name, data)))
    return BundleSummary(writer.messages, writer.objects, [name for name, _ in files], lost)


# Choosing a part of the tape


@dataclass
class TapeRange:
    """A part of the tape.

    Attributes:
        last_seq: the last stream sequence.
        below: by subject, the first sequence; subjects that it lacks begin with their first
            message.
    """

    last_seq: int
    below: dict[str, int] = field(default_factory=dict)

    def has(self, message: Message) -> bool:
        """True if `message` is not below the first sequence of its subject; ignores `last_seq`."""
        return message.seq >= self.below.get(message.subject, 0)


async def _part(context: RunContext, wanted: BundleOptions) -> TapeRange:
    last_seq = await context.bus.last_sequence(context.tape)
    if wanted.until is not None:
        targets = await find_targets(context, wanted.until, option="--until")
        last_seq = max(at.record_seq for at in targets.values())
    part = TapeRange(last_seq)
    if wanted.first is not None:
        for fragment in range(len(context.layout.fragments)):
            await _begin(context, fragment, wanted.first, part)
    return part


async def _begin(context: RunContext, fragment: int, first: int, part: TapeRange) -> None:
    """Sets in `part.below` where a fragment's messages begin.

    That is the record of the newest version up to `first` that is stored whole.

    Raises:
        ConfigError: no version up to `first` is stored whole.
    """
    begin: tuple[int, int] | None = None
    learners: set[str] = set()
    async for record, seq, *_ in records_of(context, fragment):
        stored = record.outer_version == record.version and record.what != "verdict"
        if stored and record.version <= first and seq <= part.last_seq:
            begin = (seq, record.position)
        learners |= {mark.learner for mark in record.policy.marks}
    if begin is None:
        raise ConfigError(
            f"fragment {fragment}: no view is stored of version {first} or before",
            hint="begin later; gc.replay_window_s sets how much garbage collection keeps",
        )
    part.below[names.record(context.run, fragment)] = begin[0]
    for learner in learners:
        part.below[names.update(context.run, learner, fragment)] = begin[1]


async def _messages(context: RunContext, part: TapeRange | None = None) -> AsyncIterator[Message]:
    subjects = names.tape_subjects(context.run)
    async for message in messages_of(context.bus, context.tape, subjects):
        if part is None or (message.seq <= part.last_seq and part.has(message)):
            yield message


async def _redactor(context: RunContext) -> Redactor:
    """Returns a redactor of the run's name, and of all names and modules on its tape."""
    known, tasks = set[str](), set[str]()
    async for message in _messages(context):
        known |= {name for name in [names.subject_learner(message.subject)] if name}
        item = await read_item(context, message)
        if not isinstance(item, Entry):
            continue
        known |= {*names_in(message.payload)}
        if item.stored is not None:
            known |= {*names_in(item.raw)}
        if isinstance(item.body, wire.Specification | wire.Settings):
            tasks.add(task_of(item.body.settings))
        if (beside := _positions_of(item)) is not None:
            with contextlib.suppress(ObjectMissingError):
                known |= {*names_in(context.store.get(beside))}
    return Redactor(context.run, known, tasks)


def _positions_of(item: Item) -> str | None:
    """Returns the name of the object to which a specification moves its data positions, or None."""
    body = item.body if isinstance(item, Entry) else None
    beside = body.positions_object if isinstance(body, wire.Specification) else None
    return beside.name if beside else None


# Copying


class _Copy:
    """Copies a run into a bundle.

    Args:
        opened: the run.
        writer: writes the file.
        redactor: replaces names; None to keep them.
    """

    def __init__(self, opened: OpenRun, writer: BundleWriter, redactor: Redactor | None) -> None:
        self._context = opened.context
        self._writer = writer
        self._redactor = redactor
        self._needed: set[str] = set()
        self._pinned: tuple[str, ...] = ()
        fragments = range(len(opened.context.layout.fragments))
        self._newest: dict[int, LastRecord | None] = dict.fromkeys(fragments)
        self._oldest: dict[int, int] = {}
        self._last_seq = 0

    async def tape(self, part: TapeRange) -> None:
        """Writes every message of a part of the tape."""
        context = self._context
        async for message in _messages(context, part):
            item = await read_item(context, message)
            self._need(item)
            self._last_seq = message.seq
            self._writer.message(await self._told(message, item))

    async def _told(self, message: Message, item: Item) -> Message:
        """Returns a message as the bundle stores it; writes the objects that redaction changes."""
        if self._redactor is None:
            return message
        if (beside := _positions_of(item)) is not None:
            with contextlib.suppress(ObjectMissingError):
                data = await self._context.runtime.call(self._context.store.get, beside)
                self._needed.discard(beside)
                self._writer.object(*self._redactor.positions(beside, data))
        if not isinstance(item, Entry) or item.stored is None:
            return self._redactor.message(message)[0]
        context, name = self._context, item.stored.name
        body = await context.runtime.call(context.store.get, name)
        told, again = self._redactor.message(message, body)
        pointer = wire.decode(wire.RecordPointer, told.payload)
        self._needed.discard(name)
        self._writer.object(pointer.body.name, again)
        return told

    def _need(self, item: Item) -> None:
        """Notes the objects that a message names, and each fragment's oldest and newest record."""
        run = self._context.run
        if getattr(item, "stored", None) is not None:
            self._needed.add(item.stored.name)  # type: ignore[union-attr]
        if not isinstance(item, Entry):
            return
        match item.body:
            case wire.Specification() as specification:
                beside = specification.positions_object
                self._needed |= {name for name in [specification.constants] if name}
                self._needed |= {beside.name} if beside else set()
            case wire.Manifest() as manifest:
                self._needed |= {shard.name for shard in manifest.shards}
            case wire.Record() as record:
                self._needed |= {ref.name for ref in named(record)}
                self._oldest.setdefault(record.fragment, item.seq)
                self._newest[record.fragment] = LastRecord(item.seq, record, item.time_s)
            case wire.Checkpoint() as checkpoint:
                self._needed.add(names.checkpoint_object(run, checkpoint.name))
                self._pinned += tuple(
                    names.version_object(run, fragment, version, "", "").removesuffix("--")
                    for fragment, version in enumerate(checkpoint.versions)
                )

    async def heartbeats(self) -> None:
        """Writes heartbeats and rejections, as far as they are stored."""
        context, subjects = self._context, names.ops_subjects(self._context.run)
        with contextlib.suppress(StreamMissingError):
            stream = names.ops_stream(context.run)
            async for message in messages_of(context.bus, stream, subjects):
                told = self._redactor.message(message)[0] if self._redactor else message
                self._writer.ops(told)

    async def needed(self, there: Sequence[str], *, newer: bool) -> None:
        """Writes the objects that the messages written so far name, scores, and kept checkpoints.

        Args:
            there: names of the run's objects, listed before the tape was read.
            newer: True to write objects of versions beyond the tape's end too.
        """
        context, wanted = self._context, self._needed
        if newer:
            newest, last_seq = self._newest, self._last_seq
            found = newer_than(context.run, context.epoch, newest, there, last_seq)
            wanted = wanted | {*found}
        # If the run is in progress, the tape names objects newer than the list.
        late = wanted.difference(there)
        if late:
            listed = await context.runtime.call(context.store.list, f"{context.run}/")
            await self.objects(info.name for info in listed if info.name in late)
        prefixes = (names.scores_prefix(context.run), names.epoch_prefix(context.run))
        await self.objects(
            name for name in there if name in wanted or name.startswith((*prefixes, *self._pinned))
        )

    async def objects(self, wanted: Iterable[str]) -> None:
        """Writes objects; those that were collected meanwhile are left out."""
        for name in wanted:
            await self._context.runtime.call(self._object, self._context.store, name)

    def _object(self, store: ObjectStore, name: str) -> None:
        with contextlib.suppress(ObjectMissingError):  # It was collected meanwhile.
            data = store.get(name)
            if self._redactor is not None:
                name, data = self._redactor.object(name, data)
            self._writer.object(name, data)

    async def collected(self) -> None:
        """Notes each fragment's oldest record, if the tape was trimmed since it was copied."""
        for fragment, oldest_seq in self._oldest.items():
            subject = names.record(self._context.run, fragment)
            oldest = await first_message(self._context, subject)
            if oldest.seq > oldest_seq:
                self._writer.oldest(fragment, oldest.seq)

    def hidden(self, name: str, data: bytes) -> tuple[str, bytes]:
        """Returns a file's name and text with the run's names replaced in both."""
        assert self._redactor is not None
        text = self._redactor.text(data.decode(errors="replace"))
        folder, _, last = name.rpartition("/")
        stem, dot, suffix = last.partition(".")
        return f"{folder}{'/' if folder else ''}{self._redactor.name(stem)}{dot}{suffix}", (
            text.encode()
        )


# Files beside


def _notes(about: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yields (name, contents) of the files about this machine and its installed packages."""
    host = {"release": release(), "python": sys.version, "platform": platform.platform()}
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(about["made_s"]))
    yield ABOUT, (json.dumps({**about, "made": made, **host}, indent=1) + "\n").encode()
    yield PACKAGES, ("\n".join(packages()) + "\n").encode()


def _logs(target: str, given: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Yields (name, contents) of the logs of a local run, and of the given files and folders.

    Raises:
        ConfigError: there is no such file, or its name is not allowed in a bundle.
    """
    path = Path(target)
    own = (path if path.is_dir() else path.parent) / "logs"
    run_folder = path.is_dir() or path.name == "run.toml"
    for place in [*([own] if run_folder and own.is_dir() else []), *given]:
        if not place.exists():
            raise ConfigError(f"there is no log {str(place)!r}", hint="journalctl -u UNIT > FILE")
        for file in sorted(place.iterdir()) if place.is_dir() else [place]:
            if file.is_file():
                if not is_file_name(name := f"{LOGS}{file.name}"):
                    raise ConfigError(
                        f"{str(file)!r} is not a name that a bundle can hold", hint="rename it"
                    )
                yield name, file.read_bytes()


def _earlier(opened: OpenRun, new: Iterable[str]) -> list[tuple[str, bytes]]:
    """Returns (name, contents) of the files of a source bundle, except those named in `new`."""
    source, known = opened.bundle, {*new}
    if source is None:
        return []
    return [(name, source.file(name)) for name in source.files if name not in known]
