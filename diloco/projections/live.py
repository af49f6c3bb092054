"""A run as it is now: followed from the tape and the heartbeats, by who is no part of the run."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.common import names, wire
from diloco.common.errors import StreamMissingError, WireError
from diloco.common.service import cancel
from diloco.common.tape import (
    Entry,
    Item,
    Recorded,
    RunContext,
    check_record,
    decode_as,
    read_item,
)
from diloco.projections.trend import Trend, points_of

# Rounds whose staleness and size the averages look back on.
RECENT = 64
# Of a large fleet fewer, down to so many: each holds what is known of every learner.
RECENT_INPUTS, LEAST_RECENT = 4096, 4


# Learner, incarnation and number of an update of a fragment.
Update = tuple[str, int, int]


@dataclass
class LastHeartbeat:
    """One learner's newest heartbeat, and when it came (seconds since the epoch)."""

    heartbeat: wire.Heartbeat
    heard_at_s: float


def share(part_s: float, whole_s: float) -> float:
    """A share of a time, 0 to 1, of what a learner says: it may say that a part is the longer."""
    return min(part_s / whole_s, 1.0) if whole_s else 0.0


class Spent(NamedTuple):
    """What lives of a learner say that they took: bytes read, seconds stalled and in all."""

    bytes_down: int = 0
    stall_s: float = 0.0
    run_s: float = 0.0

    def and_of(self, beat: wire.Heartbeat) -> "Spent":
        """With what another life says."""
        return Spent(
            self.bytes_down + beat.bytes_down,
            self.stall_s + beat.stall_s,
            self.run_s + beat.run_s,
        )


@dataclass
class LifeSums:
    """One learner's lives, in the same memory however many there are, or are made up.

    Attributes:
        newest: the last heartbeat of the newest life.
        earlier: what all those before it took.
    """

    newest: wire.Heartbeat
    earlier: Spent = field(default_factory=Spent)

    def take(self, beat: wire.Heartbeat) -> None:
        """The next heartbeat; one of a life that a newer has superseded adds nothing."""
        if beat.incarnation < self.newest.incarnation:
            return
        if beat.incarnation > self.newest.incarnation:
            self.earlier = self.earlier.and_of(self.newest)
        self.newest = beat

    @property
    def spent(self) -> Spent:
        """What all of them took."""
        return self.earlier.and_of(self.newest)


@dataclass
class LiveState:
    """Sums and newest facts of a run.

    `lives` holds what each learner's lives took: sums over all of them are taken of it.
    `records` are the newest of each fragment, and when they were stored; `waiting` the updates
    that these do not answer, and when they were announced (seconds since the epoch); `joined` the
    newest incarnations and `left` those that have ended on purpose, by learner; `trends` what was
    merged of each learner.
    """

    versions: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    totals: dict[int, wire.Totals] = field(default_factory=dict)
    recent: list[wire.Record] = field(default_factory=list)
    records: dict[int, Recorded] = field(default_factory=dict)
    waiting: dict[int, dict[Update, float]] = field(default_factory=lambda: defaultdict(dict))
    joined: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    learners: dict[str, LastHeartbeat] = field(default_factory=dict)
    lives: dict[str, LifeSums] = field(default_factory=dict)
    updates_sent: int = 0
    bytes_up: int = 0
    stopped: bool = False
    stopped_at_s: float = 0.0
    ended: bool = False
    marks: dict[int, dict[tuple[str, int], int]] = field(default_factory=dict)
    rejections: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    trends: dict[str, Trend] = field(default_factory=lambda: defaultdict(Trend))

    @property
    def global_step(self) -> int:
        """The run's clock, of the fragment that is furthest; a rollback sets it back."""
        return max(self.steps.values(), default=0)

    @property
    def versions_made(self) -> int:
        """Versions committed, over all fragments."""
        return sum(self.versions.values())

    @property
    def updates_merged(self) -> int:
        """Updates merged, over all fragments."""
        return sum(totals.updates_merged for totals in self.totals.values())

    @property
    def updates_rejected(self) -> int:
        """Updates rejected, over all fragments."""
        return sum(totals.updates_rejected for totals in self.totals.values())

    @property
    def tokens_merged(self) -> int:
        """Tokens merged; each reaches every fragment, by another update."""
        merged = sum(totals.tokens_merged for totals in self.totals.values())
        return merged // max(1, len(self.totals))

    @property
    def bytes_down(self) -> int:
        """Bytes that learners have read."""
        return sum(sums.spent.bytes_down for sums in self.lives.values())

    @property
    def stall_fraction(self) -> float:
        """Share of the learners' time that synchronization took from training."""
        spent = [sums.spent for sums in self.lives.values()]
        total_s = sum(one.run_s for one in spent)
        return share(sum(one.stall_s for one in spent), total_s)

    @property
    def staleness(self) -> float:
        """Mean staleness of recently merged updates, in versions."""
        inputs = [taken.staleness for record in self.recent for taken in record.inputs]
        return sum(inputs) / len(inputs) if inputs else 0.0

    @property
    def round_size(self) -> float:
        """Mean number of updates in recent rounds."""
        return sum(len(r.inputs) for r in self.recent) / len(self.recent) if self.recent else 0.0


class Follower:
    """Keeps a `LiveState` by a bus, for as long as `follow` runs.

    Args:
        context: the run's.
        beside: is given each message of the tape too.
    """

    def __init__(self, context: RunContext, beside: Callable[[Item], None] | None = None) -> None:
        self._context = context
        self._beside = beside
        self.state = LiveState()
        self.changed = asyncio.Event()

    async def follow(self, start_seq: int = 1) -> None:
        """Follow the tape from a sequence on, and heartbeats; returns once the run has ended."""
        beats = asyncio.ensure_future(self._follow_heartbeats())
        try:
            await self._follow_tape(start_seq)
        finally:
            await cancel(beats)

    async def _follow_tape(self, start_seq: int) -> None:
        run = self._context.run
        subjects = names.tape_subjects(run)
        async for message in self._context.bus.read(self._context.tape, subjects, start_seq):
            self.take(await read_item(self._context, message))
            if self.state.ended:
                return

    def take(self, item: Item) -> None:
        """Note what comes next on the tape.

        Raises:
            IntegrityError, RunMismatchError: as `check_record`.
        """
        if self._beside is not None:
            self._beside(item)
        # Who may say stop and end is believed whatever else is said: as the daemons do.
        match names.parse_subject(item.subject):
            case names.Subject(kind="end"):
                self.state.ended = True
            case names.Subject(kind="stop"):
                self.state.stopped, self.state.stopped_at_s = True, item.time_s
        # The body of an unreadable record may have been collected: newer ones follow.
        if isinstance(item, Entry):
            self._note(item)
        self.changed.set()

    def _note(self, entry: Entry) -> None:
        match entry.body:
            case wire.Record() as record:
                check_record(self._context, record)
                self.note_record(Recorded(record, entry.seq, entry.time_s))
            case wire.Manifest() as manifest:
                self._note_update(manifest, entry.time_s)
            case wire.Join() as join:
                self.state.joined[join.learner] = entry.seq
            case wire.Leave() as leave if not leave.fragments:
                self.state.left[leave.learner] = leave.incarnation

    def note_record(self, recorded: Recorded) -> None:
        """Note a record of a fragment, the newest known."""
        record, state = recorded.record, self.state
        known = state.records.get(record.fragment)
        if known is not None and known.record_seq >= recorded.record_seq:
            return
        state.records[record.fragment] = recorded
        marks = {(mark.learner, mark.incarnation): mark.seq for mark in record.policy.marks}
        state.marks[record.fragment] = marks
        state.waiting[record.fragment] = {
            update: at_s
            for update, at_s in state.waiting[record.fragment].items()
            if update[2] > marks.get(update[:2], 0)
        }
        state.versions[record.fragment] = record.version
        state.totals[record.fragment] = record.totals
        state.steps[record.fragment] = record.global_step
        for rejected in record.rejected:
            state.rejections[rejected.reason] += 1
        if record.inputs:
            state.recent = newest([*state.recent, record])
        for learner, point in points_of(record):
            state.trends[learner].add(point)

    def _note_update(self, manifest: wire.Manifest, at_s: float) -> None:
        state = self.state
        if manifest.attempt == 0:
            state.updates_sent += 1
            state.bytes_up += sum(shard.size_bytes for shard in manifest.shards)
        marks = state.marks.get(manifest.fragment)
        answered = marks is None or manifest.seq <= marks.get(
            (manifest.learner, manifest.incarnation), 0
        )
        if not answered:
            update = (manifest.learner, manifest.incarnation, manifest.seq)
            state.waiting[manifest.fragment].setdefault(update, at_s)

    async def _follow_heartbeats(self) -> None:
        context = self._context
        subjects = [names.heartbeat(context.run, "*")]
        async for message in context.bus.read(names.ops_stream(context.run), subjects, 1):
            try:
                beat = decode_as(wire.Heartbeat, message.subject, message.payload)
            except WireError:
                continue
            self.state.lives.setdefault(beat.learner, LifeSums(beat)).take(beat)
            self.state.learners[beat.learner] = LastHeartbeat(beat, message.time_s)
            self.changed.set()


async def read_heartbeats(context: RunContext, learners: Iterable[str]) -> dict[str, LastHeartbeat]:
    """The newest heartbeat of each of these learners that is still kept."""
    views: dict[str, LastHeartbeat] = {}
    stream = names.ops_stream(context.run)
    for learner in learners:
        message = await context.bus.last(stream, names.heartbeat(context.run, learner))
        if message is not None:
            with contextlib.suppress(WireError):
                beat = decode_as(wire.Heartbeat, message.subject, message.payload)
                views[learner] = LastHeartbeat(beat, message.time_s)
    return views


async def read_leases(context: RunContext) -> dict[int, wire.Lease]:
    """Who has a lease of which fragment."""
    found: dict[int, wire.Lease] = {}
    stream = names.leases_stream(context.run)
    for fragment in range(len(context.layout.fragments)):
        subject = names.fragment_lease(context.run, fragment)
        with contextlib.suppress(StreamMissingError, WireError):
            message = await context.bus.last(stream, subject)
            if message is not None:
                found[fragment] = decode_as(wire.Lease, subject, message.payload)
    return found


def newest(records: list[wire.Record]) -> list[wire.Record]:
    """The newest of records that are worth their memory."""
    kept, inputs = 0, 0
    for record in records[::-1][:RECENT]:
        inputs += len(record.inputs)
        if kept >= LEAST_RECENT and inputs > RECENT_INPUTS:
            break
        kept += 1
    return records[-kept:]
