"""A run's whole tape in memory, decoded: what was sent, and what became of it.

For whoever compares everything with everything, as `diloco doctor` and `diloco replay` do. What
goes over the tape once is a fold of its own that holds less (`timeseries.py`, `live.py`).

Garbage collection trims the tape, so a history begins where the tape does: from sequence
`whole_from` on nothing is missing; what stands before it are the last messages of their subjects
and the tails of the chains of records. Each fragment is accounted for from its oldest record on:
that one says what was resolved before (`settled`).
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.common import wire
from diloco.common.config import RunSettings, parse_settings
from diloco.common.errors import WireError
from diloco.common.layout import Layout
from diloco.common.store import ObjectStore
from diloco.common.tape import (
    Entry,
    Extent,
    Garbage,
    Item,
    RunContext,
    Unreadable,
    changed_settings,
    load_specification,
    read_tape,
)

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
        extent: how far it goes, and from where on nothing is missing.
        times_s: when each message was stored.
        entries: all decoded messages but records.
        garbage: what is no message of the protocol, or of another run, learner or epoch.
        unreadable: records that are damaged, or whose body is damaged or gone.
        bodies: names of the objects that hold records.
        settings: of the specification; `changes` are later ones by their sequence.
    """

    specification: wire.Specification
    settings: RunSettings
    layout: Layout
    store: ObjectStore
    extent: Extent = field(default_factory=Extent)
    times_s: dict[int, float] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    garbage: list[Garbage] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    bodies: set[str] = field(default_factory=set)
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

    @property
    def whole_from(self) -> int:
        """No message from here on is missing."""
        return self.extent.whole_from

    @property
    def last_seq(self) -> int:
        """Sequence of the newest message."""
        return self.extent.last_seq

    @property
    def run(self) -> str:
        """The run's name."""
        return self.settings.run.name

    @property
    def trimmed(self) -> bool:
        """Whether garbage collection has taken something from the tape."""
        return self.whole_from > 1

    def take(self, item: Item) -> None:
        """Add the tape's next message."""
        self.extent.take(item)
        self.times_s[item.seq] = item.time_s
        if isinstance(item, Garbage):
            self.garbage.append(item)
            return
        if item.stored is not None:
            self.bodies.add(item.stored.name)
        if isinstance(item, Unreadable):
            self.unreadable.append(item)
        elif isinstance(item.body, wire.Record):
            self.records[item.body.fragment].append((item.seq, item.body))
        else:
            self.entries.append(item)
            self._take_entry(item)

    def _take_entry(self, entry: Entry) -> None:
        seq = entry.seq
        match entry.body:
            case wire.Join() as join:
                self.joins.append((seq, join))
            case wire.Leave() as leave:
                self.leaves.append((seq, leave))
            case wire.Manifest() as manifest:
                self._take_manifest(entry, manifest)
            case wire.Settings() as settings:
                self._take_settings(entry, settings)
            case wire.Quarantine() as word:
                self.quarantines.append((seq, word))
            case wire.Checkpoint() as checkpoint:
                self.checkpoints.append((seq, checkpoint))
            case wire.Stop() as stop:
                self.stop = self.stop or (seq, stop)
            case wire.End() as end:
                self.end = self.end or (seq, end)

    def _take_manifest(self, entry: Entry, manifest: wire.Manifest) -> None:
        epoch = self.specification.epoch
        if manifest.epoch == epoch:
            self.manifests.append((entry.seq, manifest))
        else:
            self._refuse(entry, f"an update of epoch {manifest.epoch}, the tape is of {epoch}")

    def _take_settings(self, entry: Entry, settings: wire.Settings) -> None:
        try:
            self.changes[entry.seq] = changed_settings(self.settings, settings)
        except WireError as error:
            self._refuse(entry, error.message)

    def _refuse(self, entry: Entry, why: str) -> None:
        self.garbage.append(Garbage(entry.seq, entry.time_s, entry.subject, why))

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
        found: dict[Sent, Announced] = {}
        for seq, manifest in self.manifests:
            found.setdefault(identity(manifest), Announced(seq, self.times_s[seq], manifest))
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
    async for item in read_tape(context):
        history.take(item)
    return history
