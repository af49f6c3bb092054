"""A run's whole tape, decoded: what was sent, and what became of it.

Garbage collection trims the tape, so a history begins where the tape does: from sequence
`whole_from` on nothing is missing; what stands before it are the last messages of their subjects
and the tails of the chains of records. Each fragment is accounted for from its oldest record on:
that one says what was resolved before (`settled`).
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.common import names, wire
from diloco.common.bus import Bus, Message
from diloco.common.config import RunSettings, parse_settings
from diloco.common.errors import BusUnavailableError, IntegrityError, ObjectMissingError, WireError
from diloco.common.layout import Layout
from diloco.common.store import ObjectStore
from diloco.common.tape import RunContext, get_object, load_specification, parse_changed

# A server that says that there are messages gives the next one within so long.
SILENCE_S = 30.0
# A fragment's records, in order, with their sequences.
Chain = list[tuple[int, wire.Record]]


class Sent(NamedTuple):
    """An update by its identity, whatever how often it was announced."""

    learner: str
    incarnation: int
    fragment: int
    seq: int


class Announced(NamedTuple):
    """An update's first announcement that the tape still holds."""

    stream_seq: int
    time_s: float
    manifest: wire.Manifest


@dataclass
class History:
    """A run's tape up to `last_seq`, decoded; every list in order of the tape.

    Attributes:
        garbage: what is no message of the protocol, or of another run, learner or epoch.
        unreadable: records whose body is gone or is no record: (sequence, fragment, why).
        settings: of the specification; `changes` are later ones by their sequence.
        whole_from: no message from here on is missing.
    """

    specification: wire.Specification
    settings: RunSettings
    layout: Layout
    store: ObjectStore
    messages: list[Message] = field(default_factory=list)
    garbage: list[Message] = field(default_factory=list)
    unreadable: list[tuple[int, int, str]] = field(default_factory=list)
    joins: list[tuple[int, wire.Join]] = field(default_factory=list)
    leaves: list[tuple[int, wire.Leave]] = field(default_factory=list)
    manifests: list[tuple[int, wire.Manifest]] = field(default_factory=list)
    records: dict[int, list[tuple[int, wire.Record]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    changes: dict[int, RunSettings] = field(default_factory=dict)
    quarantines: list[tuple[int, wire.Quarantine]] = field(default_factory=list)
    checkpoints: list[tuple[int, wire.Checkpoint]] = field(default_factory=list)
    stop: tuple[int, wire.Stop] | None = None
    end: tuple[int, wire.End] | None = None
    whole_from: int = 1
    last_seq: int = 0

    @property
    def run(self) -> str:
        """The run's name."""
        return self.settings.run.name

    @property
    def trimmed(self) -> bool:
        """Whether garbage collection has taken something from the tape."""
        return self.whole_from > 1

    def versions(self) -> list[int]:
        """Newest version of each fragment."""
        return [self.records[fragment][-1][1].version for fragment in sorted(self.records)]

    def all_records(self) -> Iterator[wire.Record]:
        """Every record, fragment by fragment."""
        for chain in self.records.values():
            for _, record in chain:
                yield record

    def sent(self) -> dict[Sent, Announced]:
        """Every distinct update, by its first announcement."""
        times = {message.seq: message.time_s for message in self.messages}
        found: dict[Sent, Announced] = {}
        for seq, manifest in self.manifests:
            found.setdefault(identity(manifest), Announced(seq, times[seq], manifest))
        return found

    def merged(self) -> dict[Sent, wire.Input]:
        """Every update that a record merges."""
        return {
            answered(record, taken): taken
            for record in self.all_records()
            for taken in record.inputs
        }

    def rejected(self) -> dict[Sent, wire.Rejected]:
        """Every update that a record rejects."""
        return {
            answered(record, taken): taken
            for record in self.all_records()
            for taken in record.rejected
        }

    def lives(self, learner: str) -> list[int]:
        """Incarnations of a learner, in order."""
        return [seq for seq, join in self.joins if join.learner == learner]

    def full_leaves(self, learner: str) -> list[tuple[int, wire.Leave]]:
        """Ends of lives, without the words that only some fragments are finished."""
        return [at for at in self.leaves if at[1].learner == learner and not at[1].fragments]

    def settings_of(self, record: wire.Record) -> RunSettings | None:
        """The settings a record was made under; None if they are trimmed from the tape."""
        seq = record.policy.settings_seq
        return self.changes.get(seq) if seq else self.settings


def identity(manifest: wire.Manifest) -> Sent:
    """Which update a manifest announces."""
    return Sent(manifest.learner, manifest.incarnation, manifest.fragment, manifest.seq)


def resolves(record: wire.Record) -> tuple[wire.Input | wire.Rejected, ...]:
    """All that a record says of updates."""
    merged: tuple[wire.Input | wire.Rejected, ...] = record.inputs
    return merged + record.rejected


def answered(record: wire.Record, taken: wire.Input | wire.Rejected) -> Sent:
    """Which update a record merges or rejects."""
    return Sent(taken.learner, taken.incarnation, record.fragment, taken.seq)


def settled(first: wire.Record, update: Sent, announced_seq: int) -> bool:
    """Whether an update was resolved when a fragment's oldest record was made, by its word."""
    if announced_seq < first.position:
        return True
    return any(
        mark.seq >= update.seq
        for mark in first.policy.marks
        if (mark.learner, mark.incarnation) == (update.learner, update.incarnation)
    )


async def read_history(context: RunContext) -> History:
    """Everything on a run's tape up to now.

    Raises:
        RunMismatchError: there is no such run.
        BusError, StoreUnavailableError: bus or store are away.
        BusUnavailableError: the bus does not give what it has in time.
    """
    specification = await load_specification(context.bus, context.run)
    history = History(
        specification=specification,
        settings=parse_settings(specification.settings),
        layout=context.layout,
        store=context.store,
    )
    subjects = names.tape_subjects(context.run)
    history.messages = await read_stream(context.bus, context.tape, subjects)
    await context.runtime.call(sort_all, history)
    return history


async def read_stream(
    bus: Bus, stream: str, subjects: list[str], start_seq: int = 1
) -> list[Message]:
    """Every message that a stream holds now, as `messages_of` gives them."""
    return [message async for message in messages_of(bus, stream, subjects, start_seq)]


async def messages_of(
    bus: Bus, stream: str, subjects: list[str], start_seq: int = 1
) -> AsyncIterator[Message]:
    """Every message that a stream holds now, from a sequence on, one after the other.

    Its newest one must be there, and of one of `subjects`: so it is on a tape.

    Raises:
        StreamMissingError: there is no such stream.
        BusUnavailableError: the bus does not give what it has in time.
    """
    last, count, at = await bus.last_sequence(stream), 0, 0
    if last < start_seq:
        return
    async with contextlib.aclosing(bus.read(stream, subjects, start_seq)) as reading:  # type: ignore[type-var]
        while at < last:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await anext(reading)
            except TimeoutError as error:
                raise BusUnavailableError(
                    f"stream {stream!r}: after {count} messages none came for {SILENCE_S:g} s"
                ) from error
            count, at = count + 1, message.seq
            yield message


def sort_all(history: History) -> None:
    """Decode a history's messages."""
    before = 0
    for message in history.messages:
        if message.seq != before + 1:
            history.whole_from = message.seq
        before = message.seq
        _, _, kind, *rest = message.subject.split(".")
        try:
            _SORT[kind](history, message, rest)
        except WireError:
            history.garbage.append(message)
    history.last_seq = before


def decode_message(
    message: Message, *, run: str, epoch: int, store: ObjectStore
) -> "wire.Join | wire.Leave | wire.Manifest | wire.Record":
    """What a learner or an aggregator says on the tape, if it speaks for its subject.

    Raises:
        WireError: it is no message of the protocol, or of another run, learner or epoch.
        IntegrityError, ObjectMissingError: a record's body is damaged or gone.
    """
    _, _, kind, *rest = message.subject.split(".")
    match kind:
        case "join":
            join = wire.decode(wire.Join, message.payload)
            _hold(join.run == run and rest == [join.learner])
            return join
        case "leave":
            leave = wire.decode(wire.Leave, message.payload)
            _hold(leave.run == run and rest == [leave.learner])
            return leave
        case "update":
            manifest = wire.decode(wire.Manifest, message.payload)
            own = [manifest.learner, str(manifest.fragment)]
            _hold(manifest.run == run and rest == own and manifest.epoch == epoch)
            return manifest
    found = wire.decode_record(message.payload)
    if isinstance(found, wire.RecordPointer):
        found = wire.decode(wire.Record, get_object(store, found.body))
    _hold(found.run == run and rest == [str(found.fragment)])
    _hold(message.msg_id == found.attempt_id)
    return found


def _sort_said(history: History, message: Message, rest: list[str]) -> None:
    seq = message.seq
    try:
        match decode_message(
            message, run=history.run, epoch=history.specification.epoch, store=history.store
        ):
            case wire.Join() as join:
                history.joins.append((seq, join))
            case wire.Leave() as leave:
                history.leaves.append((seq, leave))
            case wire.Manifest() as manifest:
                history.manifests.append((seq, manifest))
            case wire.Record() as record:
                history.records[record.fragment].append((seq, record))
    except (WireError, IntegrityError, ObjectMissingError) as error:
        if ".record." not in message.subject:
            raise
        fragment = int(rest[0]) if rest[0].isdecimal() else -1
        history.unreadable.append((seq, fragment, error.message))


def _sort_settings(history: History, message: Message, _rest: list[str]) -> None:
    history.changes[message.seq] = parse_changed(history.settings, message.payload)


def _sort_quarantine(history: History, message: Message, rest: list[str]) -> None:
    word = wire.decode(wire.Quarantine, message.payload)
    _hold(word.run == history.run and rest == [word.learner])
    history.quarantines.append((message.seq, word))


def _sort_checkpoint(history: History, message: Message, _rest: list[str]) -> None:
    history.checkpoints.append((message.seq, wire.decode(wire.Checkpoint, message.payload)))


def _sort_stop(history: History, message: Message, _rest: list[str]) -> None:
    history.stop = history.stop or (message.seq, wire.decode(wire.Stop, message.payload))


def _sort_end(history: History, message: Message, _rest: list[str]) -> None:
    history.end = history.end or (message.seq, wire.decode(wire.End, message.payload))


def _sort_specification(_history: History, _message: Message, _rest: list[str]) -> None:
    """It was read first."""


_SORT = {
    "spec": _sort_specification,
    "join": _sort_said,
    "leave": _sort_said,
    "update": _sort_said,
    "record": _sort_said,
    "settings": _sort_settings,
    "quarantine": _sort_quarantine,
    "checkpoint": _sort_checkpoint,
    "stop": _sort_stop,
    "end": _sort_end,
}


def _hold(own: bool) -> None:
    """Refuse what stands under another's subject.

    Raises:
        WireError: it does.
    """
    if not own:
        raise WireError("subject", "it is of another run, learner, fragment or epoch")
