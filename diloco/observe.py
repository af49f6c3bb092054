"""A run as an onlooker sees it: followed from the tape and the heartbeats, no part of the run."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from common import names, wire
from common.errors import WireError
from common.service import cancel
from common.tape import RunContext, read_record

# Rounds whose staleness and size the averages look back on.
RECENT = 64


@dataclass
class LearnerView:
    """One learner's newest heartbeat, and when it came (seconds since the epoch)."""

    heartbeat: wire.Heartbeat
    heard_at_s: float


@dataclass
class Observed:
    """Sums and newest facts of a run.

    `heartbeats` holds the last one of every incarnation: sums over all lives are taken of it.
    """

    versions: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    totals: dict[int, wire.Totals] = field(default_factory=dict)
    recent: list[wire.Record] = field(default_factory=list)
    learners: dict[str, LearnerView] = field(default_factory=dict)
    heartbeats: dict[tuple[str, int], wire.Heartbeat] = field(default_factory=dict)
    updates_sent: int = 0
    bytes_up: int = 0
    stopped: bool = False
    ended: bool = False
    rejections: dict[str, int] = field(default_factory=lambda: defaultdict(int))

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
    def tokens(self) -> int:
        """Tokens trained on by all learners in all their lives."""
        return sum(beat.tokens for beat in self.heartbeats.values())

    @property
    def bytes_down(self) -> int:
        """Bytes that learners have read."""
        return sum(beat.bytes_down for beat in self.heartbeats.values())

    @property
    def stall_fraction(self) -> float:
        """Share of the learners' time that synchronization took from training."""
        total_s = sum(beat.run_s for beat in self.heartbeats.values())
        return sum(beat.stall_s for beat in self.heartbeats.values()) / total_s if total_s else 0.0

    @property
    def staleness(self) -> float:
        """Mean staleness of recently merged updates, in versions."""
        inputs = [taken.staleness for record in self.recent for taken in record.inputs]
        return sum(inputs) / len(inputs) if inputs else 0.0

    @property
    def round_size(self) -> float:
        """Mean number of updates in recent rounds."""
        return sum(len(r.inputs) for r in self.recent) / len(self.recent) if self.recent else 0.0


class Observer:
    """Fills an `Observed` from a bus, for as long as `observe` runs."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.observed = Observed()
        self.changed = asyncio.Event()

    async def observe(self) -> None:
        """Follow tape and heartbeats from the beginning; returns once the run has ended."""
        beats = asyncio.ensure_future(self._follow_heartbeats())
        try:
            await self._follow_tape()
        finally:
            await cancel(beats)

    async def _follow_tape(self) -> None:
        run = self._context.run
        subjects = [names.record(run, "*"), names.update(run, "*", "*")]
        subjects += [names.stop(run), names.end(run)]
        async for message in self._context.bus.read(self._context.tape, subjects, 1):
            kind = message.subject.split(".")[2]
            if kind == "end":
                self.observed.ended = True
                return
            if kind == "stop":
                self.observed.stopped = True
            elif kind == "record":
                self._note_record(await read_record(self._context, message.payload))
            else:
                self._note_update(message.payload)
            self.changed.set()

    def _note_record(self, record: wire.Record) -> None:
        observed = self.observed
        observed.versions[record.fragment] = record.version
        observed.totals[record.fragment] = record.totals
        observed.steps[record.fragment] = record.global_step
        for rejected in record.rejected:
            observed.rejections[rejected.reason] += 1
        if record.inputs:
            observed.recent = [*observed.recent, record][-RECENT:]

    def _note_update(self, payload: bytes) -> None:
        try:
            manifest = wire.decode(wire.Manifest, payload)
        except WireError:
            return  # The aggregator counts what is no manifest.
        if manifest.attempt == 0:
            self.observed.updates_sent += 1
            self.observed.bytes_up += sum(shard.size_bytes for shard in manifest.shards)

    async def _follow_heartbeats(self) -> None:
        context = self._context
        subjects = [names.heartbeat(context.run, "*")]
        async for message in context.bus.read(names.ops_stream(context.run), subjects, 1):
            try:
                beat = wire.decode(wire.Heartbeat, message.payload)
            except WireError:
                continue
            self.observed.heartbeats[beat.learner, beat.incarnation] = beat
            self.observed.learners[beat.learner] = LearnerView(beat, message.time_s)
            self.changed.set()
