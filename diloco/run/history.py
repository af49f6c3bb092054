"""A run's whole tape: updates sent, their verdicts, and operators' acts.

For code that compares any message with any other, as `diloco doctor` and `diloco replay` do. Code
that needs each message once uses a fold with less memory (`timeseries.py`, `observed.py`). Messages
are in a file and decoded on access (`spool.py`): iterate over them, and keep few.

Garbage collection trims the tape. From sequence `whole_from` on, no message is missing; of those
before, only the last messages of their subjects and the last records of fragments are left.
"""

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, TypeVar

from diloco.common.process.config import RunSettings, parse_settings
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.layout import Layout
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.tape import (
    Entry,
    Extent,
    InvalidMessage,
    Item,
    RunContext,
    Unreadable,
    changed_settings,
    load_specification,
    read_tape,
    same_tape,
)
from diloco.run.spool import Spool, Spooled, Subset, Times

Body = TypeVar("Body", bound=wire.Body)


class Sent(NamedTuple):
    """The identity of an update; a repeated announcement has the same.

    `seq` numbers the updates of an incarnation and fragment: 1, 2, 3 ...
    """

    learner: str
    incarnation: int
    fragment: int
    seq: int


# A fragment's records, in order, with their sequences.
Chain = Sequence[tuple[int, wire.Record]]


def _spooled(spool: Spool, kind: type[Body]) -> Spooled[tuple[int, Body]]:
    """Returns an empty list of (stream sequence, body) in a spool, for messages of one kind."""

    def unpack(index: int, raw: bytes) -> tuple[int, Body]:
        return found.seqs[index], wire.decode(kind, raw)

    found: Spooled[tuple[int, Body]] = Spooled(spool, unpack)
    return found


def _manifests(spool: Spool) -> Spooled[tuple[int, wire.Manifest]]:
    return _spooled(spool, wire.Manifest)


class Chains(dict[int, Chain]):
    """Each fragment's chain: its records in order; an empty chain if there are none."""

    def __missing__(self, fragment: int) -> Chain:
        return ()


class NonRecordMessages(Spooled[Entry]):
    """The readable messages of a tape, apart from records, in order; they are in a spool."""

    def __init__(self, spool: Spool, times_s: Times) -> None:
        super().__init__(spool, self._entry)
        self._times_s = times_s
        self._subjects: dict[str, type[wire.Body]] = {}
        self._names: list[str] = []
        self._ids: dict[str, int] = {}
        self._whose = array("i")
        self._sizes = array("i")

    def take(self, entry: Entry, place: int) -> None:
        """Adds the next message, whose bytes begin at offset `place` in the spool."""
        if entry.subject not in self._ids:
            self._ids[entry.subject] = len(self._names)
            self._names.append(entry.subject)
            self._subjects[entry.subject] = type(entry.body)
        self._whose.append(self._ids[entry.subject])
        self._sizes.append(entry.size_bytes)
        self.add(entry.seq, place, None if entry.raw else entry)

    def _entry(self, index: int, raw: bytes) -> Entry:
        subject, seq = self._names[self._whose[index]], self.seqs[index]
        body = wire.decode(self._subjects[subject], raw)
        return Entry(seq, self._times_s[seq], subject, body, self._sizes[index], raw=raw)

    def concerning(self, fragment: int, first_seq: int = 0) -> Sequence[Entry]:
        """Returns the messages about a fragment or about the whole run, from `first_seq` on."""
        of = [names.parse_subject(subject) for subject in self._names]
        about = [None if one is None else one.fragment for one in of]
        chosen = {index for index, one in enumerate(about) if one in (None, fragment)}
        first = bisect_left(self.seqs, first_seq)
        rows = (row for row in range(first, len(self._whose)) if self._whose[row] in chosen)
        return Subset(self, array("q", rows))


@dataclass
class History:
    """A run's tape up to `last_seq`, decoded; every list in order of the tape.

    Lists of messages have pairs (stream sequence, message).

    Attributes:
        settings: the settings with which the run was created.
        extent: the part of the tape that was read, and from where on nothing is missing.
        spool: the file with the bytes of all readable messages.
        times_s: when each message was stored, by its sequence (seconds since the epoch).
        entries: all readable messages but records.
        garbage: messages that are not of the protocol, or that belong to another run, learner or
            epoch; `undecoded`: those of them that are not among `entries`.
        unreadable: records that are damaged, or whose body is damaged or missing.
        bodies: names of the objects that hold records too large for a message.
        manifests_of: for each fragment, the indices of its updates in `manifests`.
        changes: the settings after each change, by the sequence of the change's message.
        stop, end: the run's first message of this kind; None if there is none.
    """

    specification: wire.Specification
    settings: RunSettings
    layout: Layout
    store: ObjectStore
    extent: Extent = field(default_factory=Extent)
    spool: Spool = field(default_factory=Spool)
    times_s: Times = field(default_factory=Times)
    # Made from the spool, unless they come from another history.
    entries: NonRecordMessages = None  # type: ignore[assignment]
    garbage: list[InvalidMessage] = field(default_factory=list)
    undecoded: list[InvalidMessage] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    bodies: set[str] = field(default_factory=set)
    joins: list[tuple[int, wire.Join]] = field(default_factory=list)
    leaves: list[tuple[int, wire.Leave]] = field(default_factory=list)
    manifests: Spooled[tuple[int, wire.Manifest]] = None  # type: ignore[assignment]
    manifests_of: "dict[int, array[int]]" = field(default_factory=dict)
    records: Chains = field(default_factory=Chains)
    changes: dict[int, RunSettings] = field(default_factory=dict)
    checkpoints: list[tuple[int, wire.Checkpoint]] = field(default_factory=list)
    stop: tuple[int, wire.Stop] | None = None
    end: tuple[int, wire.End] | None = None

    def __post_init__(self) -> None:
        """Makes the lists whose messages are in the spool, unless another history gave them."""
        if self.entries is None:
            self.entries = NonRecordMessages(self.spool, self.times_s)
            self.manifests = _manifests(self.spool)

    @property
    def whole_from(self) -> int:
        """The stream sequence from which on no message is missing; 1: the tape is whole."""
        return self.extent.whole_from

    @property
    def last_seq(self) -> int:
        """The stream sequence of the newest message."""
        return self.extent.last_seq

    @property
    def run(self) -> str:
        """The run's name."""
        return self.settings.run.name

    @property
    def in_force(self) -> RunSettings:
        """The newest settings: those of the last change, else those of the run's creation."""
        return self.changes[max(self.changes)] if self.changes else self.settings

    @property
    def trimmed(self) -> bool:
        """Whether garbage collection has removed messages from the tape."""
        return self.whole_from > 1

    def take(self, item: Item) -> None:
        """Adds the tape's next message."""
        self.extent.take(item)
        self.times_s.add(item.seq, item.time_s)
        if isinstance(item, InvalidMessage):
            self.garbage.append(item)
            self.undecoded.append(item)
            return
        if item.stored is not None:
            self.bodies.add(item.stored.name)
        if isinstance(item, Unreadable):
            self.unreadable.append(item)
            return
        place = self.spool.put(item.raw)
        if isinstance(item.body, wire.Record):
            self._take_record(item, item.body, place)
        else:
            self.entries.take(item, place)
            self._take_entry(item, place)

    def _take_record(self, entry: Entry, record: wire.Record, place: int) -> None:
        chain = self.records.setdefault(record.fragment, _spooled(self.spool, wire.Record))
        assert isinstance(chain, Spooled)
        chain.add(entry.seq, place, None if entry.raw else (entry.seq, record))

    def _take_entry(self, entry: Entry, place: int) -> None:
        seq = entry.seq
        match entry.body:
            case wire.Join() as join:
                self.joins.append((seq, join))
            case wire.Leave() as leave:
                self._take_leave(entry, leave)
            case wire.Manifest() as manifest:
                self._take_manifest(entry, manifest, place)
            case wire.Settings() as settings:
                self._take_settings(entry, settings)
            case wire.Checkpoint() as checkpoint:
                self.checkpoints.append((seq, checkpoint))
            case wire.Stop() as stop:
                self.stop = self.stop or (seq, stop)
            case wire.End() as end:
                self.end = self.end or (seq, end)

    def _take_leave(self, entry: Entry, leave: wire.Leave) -> None:
        if not same_tape(leave.incarnation, entry.seq):
            self._refuse(entry, f"a leave of life {leave.incarnation}, which another tape began")
            return
        self.leaves.append((entry.seq, leave))

    def _take_manifest(self, entry: Entry, manifest: wire.Manifest, place: int) -> None:
        epoch = self.specification.epoch
        if manifest.epoch != epoch:
            self._refuse(entry, f"an update of epoch {manifest.epoch}, the tape is of {epoch}")
            return
        own = self.manifests_of.setdefault(manifest.fragment, array("i"))
        own.append(len(self.manifests))
        self.manifests.add(entry.seq, place, None if entry.raw else (entry.seq, manifest))

    def _take_settings(self, entry: Entry, settings: wire.Settings) -> None:
        try:
            self.changes[entry.seq] = changed_settings(self.settings, settings)
        except WireError as error:
            self._refuse(entry, error.message)

    def _refuse(self, entry: Entry, why: str) -> None:
        self.garbage.append(InvalidMessage(entry.seq, entry.time_s, entry.subject, why))

    def let_go_of_messages(self) -> None:
        """Drops `entries` and `manifests`, whose indices take most of the memory for a long tape.

        To be called once only records and times are still needed.
        """
        self.entries, self.manifests = (
            NonRecordMessages(self.spool, self.times_s),
            _manifests(self.spool),
        )
        self.manifests_of = {}

    def versions(self) -> list[int]:
        """Returns the newest version of each fragment that has a record, in order of fragments."""
        return [self.records[fragment][-1][1].version for fragment in sorted(self.records)]

    def all_records(self) -> Iterator[wire.Record]:
        """Yields every record, fragment by fragment; `in_order` yields them in order of tape."""
        for chain in self.records.values():
            for _, record in chain:
                yield record

    def announced(self, fragment: int) -> Sequence[tuple[int, wire.Manifest]]:
        """Returns (sequence, manifest) of each announcement of a fragment, also repeated ones."""
        return Subset(self.manifests, self.manifests_of.get(fragment, ()))

    def manifest_at(self, seq: int) -> wire.Manifest | None:
        """Returns the manifest at a stream sequence; None if another message is there."""
        found = self.manifests.at(seq)
        return None if found is None else found[1]

    def sent(self, fragment: int | None = None) -> dict[Sent, int]:
        """Returns the stream sequence of each update's first announcement.

        Args:
            fragment: whose updates; None: those of all fragments.
        """
        found: dict[Sent, int] = {}
        for seq, sent in self.manifests if fragment is None else self.announced(fragment):
            found.setdefault(identity(sent), seq)
        return found

    def merged(self) -> dict[Sent, wire.Input]:
        """Returns every merged update, with its entry in the record; for short tapes only."""
        return {
            answered(record, taken): taken
            for record in self.all_records()
            for taken in record.inputs
        }

    def rejected(self) -> dict[Sent, wire.Rejected]:
        """Returns every rejected update, with its entry in the record."""
        return {
            answered(record, taken): taken
            for record in self.all_records()
            for taken in record.rejected
        }

    def in_order(self) -> Iterator[tuple[int, wire.Record]]:
        """Yields (sequence, record) for every record, in order of the tape."""
        return in_order(self.records.values())

    def lives(self, learner: str) -> list[int]:
        """Returns the incarnations of a learner that joined, in order."""
        return [seq for seq, join in self.joins if join.learner == learner]

    def settings_at(self, seq: int) -> RunSettings:
        """Returns the settings that the message at `seq` put in force; 0: those of the creation."""
        return self.changes[seq] if seq else self.settings

    def settings_of(self, record: wire.Record) -> RunSettings | None:
        """Returns the settings a record was made under; None if they are trimmed from the tape."""
        seq = record.policy.settings_seq
        return self.changes.get(seq) if seq else self.settings


def up_to(chain: Chain, last_seq: int) -> Chain:
    """Returns the records of a chain whose stream sequence is `last_seq` or less."""
    return chain[: bisect_right(chain, last_seq, key=itemgetter(0))]


def in_order(chains: Iterable[Chain]) -> Iterator[tuple[int, wire.Record]]:
    """Yields (sequence, record) of several fragments' chains, in order of the tape."""
    return heapq.merge(*chains, key=itemgetter(0))


def identity(manifest: wire.Manifest) -> Sent:
    """Returns the identity of the update that a manifest announces."""
    return Sent(manifest.learner, manifest.incarnation, manifest.fragment, manifest.seq)


def resolves(record: wire.Record) -> tuple[wire.Input | wire.Rejected, ...]:
    """Returns a record's verdicts: its merged updates, then its rejected ones."""
    merged: tuple[wire.Input | wire.Rejected, ...] = record.inputs
    return merged + record.rejected


def answered(record: wire.Record, taken: wire.Input | wire.Rejected) -> Sent:
    """Returns the identity of an update that a record merges or rejects."""
    return Sent(taken.learner, taken.incarnation, record.fragment, taken.seq)


async def read_history(
    context: RunContext, beside: Callable[[Item], None] | None = None
) -> History:
    """Reads a run's tape up to now; calls `beside` with each message as well.

    Raises:
        RunMismatchError: there is no such run.
        BusError, StoreUnavailableError: bus or store are unreachable.
        BusUnavailableError: the bus does not deliver its messages in time.
    """
    specification = await load_specification(context.bus, context.run)
    history = History(
        specification=specification,
        settings=parse_settings(specification.settings),
        layout=context.layout,
        store=context.store,
    )
    async for item in read_tape(context):
        history.take(item)
        if beside is not None:
            beside(item)
    return history


_PAUSES = {"run.paused: False -> True": "paused", "run.paused: True -> False": "continued"}


@dataclass(frozen=True)
class Event:
    """An event in a run's history.

    Attributes:
        at_s: seconds since the epoch.
        what: a sentence.
        by: who caused it; "" for a learner's own join or leave, and for the creation.
    """

    at_s: float
    what: str
    by: str


def act_of(body: wire.Body, at_s: float) -> Event | None:
    """Returns the event that a message records in the run's history; None for other messages.

    Events are joins, leaves, stop, end, changes of settings, checkpoints, quarantine and rollbacks.

    Args:
        body: the message.
        at_s: when the message was stored, in seconds since the epoch.
    """
    match body:
        case wire.Join() as join:
            some = join.slices
            slices = f" with {some.present} of {some.given} slices" if some is not None else ""
            holds = f", and holds {', '.join(join.holds)}" if join.holds else ""
            return Event(at_s, f"{join.learner} joined{slices}{holds}", "")
        case wire.Leave(fragments=()) as leave:
            return Event(at_s, f"{leave.learner} left", "")
        case wire.End():
            return Event(at_s, "end: every fragment's last version is committed", "aggregators")
        case wire.Stop() as stop:
            what = f"stop at global step {stop.global_step} ({stop.reason})"
            return Event(at_s, what, stop.by)
        case wire.Settings() as settings:
            return Event(at_s, _change(settings.changed), settings.by)
        case wire.Checkpoint() as checkpoint:
            return Event(at_s, f"checkpoint {checkpoint.name}", checkpoint.by)
        case wire.Quarantine() as word:
            done = "quarantined" if word.active else "let in again"
            return Event(at_s, f"{word.learner} {done}: {word.reason}", word.by)
        case wire.Record(what="restore") as record:
            what = f"fragment {record.fragment} rolled back to version {record.restored_version}"
            return Event(at_s, what, record.aggregator)
    return None


def _change(changed: Sequence[str]) -> str:
    """Returns a sentence on a change of settings: "paused", "continued", or the changed keys."""
    if len(changed) == 1 and changed[0] in _PAUSES:
        return _PAUSES[changed[0]]
    return f"settings changed: {'; '.join(changed) or 'carried over from the tape before'}"


async def happened(context: RunContext, created_at_s: float, *, everything: bool) -> list[Event]:
    """Returns the acts of operators and aggregators on a run, oldest first.

    Args:
        context: the run's context.
        created_at_s: when the run was created, in seconds since the epoch.
        everything: whether to return joins and leaves of learners as well.
    """
    what = f"resumed on this tape, epoch {context.epoch}" if context.epoch else "created"
    found = [Event(created_at_s, what, "")]
    async for item in read_tape(context):
        if isinstance(item, Entry):
            event = act_of(item.body, item.time_s)
            found += [event] if event and (event.by or everything) else []
    return found
