"""Folds a run's tape and heartbeats into the current state of the run.

`Observed` takes messages one by one; its memory grows with learners and fragments, not with the
tape. `Observed.run` returns the state at a moment (`state.py`). Pure.

Records are facts. Heartbeats are claims of learners about themselves, and may be false.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from diloco.common.process.config import RunSettings
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import WireError
from diloco.common.storage.bus import Filled
from diloco.common.storage.tape import (
    Entry,
    Extent,
    InvalidMessage,
    Item,
    Recorded,
    changed_settings,
)
from diloco.run.learner_history import (
    LastHeartbeat,
    LearnerHistory,
    Reading,
    answers,
    usual_norm,
    waits_of,
)
from diloco.run.learner_status import Moment, learner_status, over_all, trained_per_s
from diloco.run.state import (
    HOUR_S,
    RECENT,
    Change,
    Finding,
    FragmentStatus,
    LearnerStatus,
    MergedPoint,
    RunStatus,
    ShardFigures,
    StoodStill,
    UpdateAnswer,
    delays_of,
    share,
)

# The number of rounds over which rates and averages go; and the number of updates in the newest
# rounds that are kept complete, for readers of their shards.
ROUNDS, WHOLE_UPDATES = 64, 256
# An update of a fragment: learner, incarnation and number.
Update = tuple[str, int, int]


class _Round(NamedTuple):
    """The figures of one round from which rates and averages are computed.

    Attributes:
        closed_at_s: seconds since the epoch.
        staleness: sum over the round's updates, in versions.
        size_bytes: sum over their shards.
        waits: each update's wait for the version: (seconds, inner steps of its sender).
    """

    closed_at_s: float
    staleness: int
    size_bytes: int
    waits: tuple[tuple[float, float], ...]

    @property
    def inputs(self) -> int:
        """The number of updates that the round merged."""
        return len(self.waits)


class Observed:
    """The state of a run, from the messages read so far.

    Args:
        name: the run's name.
        epoch: the tape's epoch.
        settings: the settings with which the run was created.
        copied: whether the tape is a copy in a file; the run itself may have gone on.
        modules: the module of each fragment (`TensorHint.module`); empty: not known.

    Attributes:
        settings: the current settings.
        leases: each fragment's lease, and `aggregators`: each live aggregator's, as the bus last
            reported them.
        filled: size and limit of the tape, and `last_seq`: its newest sequence, by the bus too.
        from_start: whether the tape was read from its beginning.
        extent: the part of the tape that was read, and from where on nothing is missing.
        ended: whether the run's end is on the tape.
        known: facts about each learner that a message or record names.
        records: the newest record of each fragment.
        rounds: records of the newest rounds with three updates or more, the oldest first.
        shards: each learner's figures from the shards of `rounds`; empty until these are read.
        stored: findings on the store, from its last check.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        settings: RunSettings,
        *,
        copied: bool = False,
        modules: Sequence[str] = (),
    ) -> None:
        self._name = name
        self._epoch = epoch
        self._created = settings
        self.copied = copied
        self._modules = modules
        self.settings = settings
        self.leases: dict[int, wire.Lease] = {}
        self.aggregators: list[wire.Lease] = []
        self.filled = Filled(0, 0)
        self.last_seq = 0
        self.from_start = False
        self.extent = Extent()
        self.ended = False
        self.known: dict[str, LearnerHistory] = defaultdict(LearnerHistory)
        self.records: dict[int, Recorded] = {}
        self.rounds: deque[wire.Record] = deque()
        self.shards: Mapping[str, ShardFigures] = {}
        self.stored: tuple[Finding, ...] = ()
        self._whole_updates = 0
        self._taken_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._stood_still: StoodStill | None = None
        self._changes: deque[Change] = deque(maxlen=RECENT)
        self._recent: deque[_Round] = deque(maxlen=ROUNDS)
        self._longest: dict[int, float] = {}
        self._marks: dict[int, dict[tuple[str, int], int]] = {}
        self._waiting: dict[int, dict[Update, float]] = defaultdict(dict)
        self._stopped: tuple[int, float] | None = None
        self._updates_sent = 0
        self._bytes_up = 0

    @property
    def global_step(self) -> int:
        """The greatest global step of the fragments; a rollback sets it back."""
        return max((one.record.global_step for one in self.records.values()), default=0)

    @property
    def beats(self) -> dict[str, LastHeartbeat]:
        """The last heartbeat of each learner that sent one."""
        return {name: one.last for name, one in self.known.items() if one.last is not None}

    def names(self) -> set[str]:
        """Returns the names of all learners in the newest records and in other messages."""
        members = (one.record.policy.members for one in self.records.values())
        return {one.learner for each in members for one in each} | self.known.keys()

    def take(self, item: Item) -> None:
        """Notes the tape's next message."""
        self.extent.take(item)
        # Stop and end count even if their bodies are invalid, as for the daemons.
        match names.parse_subject(item.subject):
            case names.Subject(kind="end"):
                self.ended = True
            case names.Subject(kind="stop"):
                self._stopped = self._stopped or (item.seq, item.time_s)
            case names.Subject(learner=str(learner)) if isinstance(item, InvalidMessage):
                self.known[learner].invalid.append(item)
                self.known[learner].invalids += 1
        # An unreadable record may be an old one without a body: newer ones follow.
        if isinstance(item, Entry):
            self._take(item)

    def _take(self, entry: Entry) -> None:
        match entry.body:
            case wire.Record() as record:
                self.note_record(Recorded(record, entry.seq, entry.time_s))
            case wire.Manifest() as manifest:
                self._note_update(manifest, entry.time_s)
            case wire.Join() as join:
                self.known[join.learner].join(join, entry.seq, entry.time_s)
            case wire.Leave(fragments=()) as leave:
                one = self.known[leave.learner]
                if leave.incarnation < one.joined and not leave.by:
                    one.twins_s.append(entry.time_s)
                if leave.incarnation >= one.left:
                    one.left, one.left_at_s = leave.incarnation, entry.time_s
                    one.left_seq = entry.seq
            case wire.Quarantine() as word:
                self.known[word.learner].word = word
            case wire.Settings() as settings:
                with contextlib.suppress(WireError):  # Daemons refuse it, too.
                    self.settings = changed_settings(self._created, settings)
                version = max((one.record.version for one in self.records.values()), default=0)
                change = Change(entry.time_s, version, tuple(settings.changed), settings.by)
                self._changes.append(change)

    def hear(self, beat: wire.Heartbeat, at_s: float) -> None:
        """Notes a heartbeat that was stored at `at_s` (seconds since the epoch)."""
        self.known[beat.learner].hear(beat, at_s)

    def note_record(self, recorded: Recorded) -> None:
        """Notes a record, unless the same or a newer one of its fragment is known."""
        record, known = recorded.record, self.records.get(recorded.record.fragment)
        if known is not None and known.record_seq >= recorded.record_seq:
            return
        self.records[record.fragment] = recorded
        marks = {(mark.learner, mark.incarnation): mark.seq for mark in record.policy.marks}
        self._marks[record.fragment] = marks
        self._waiting[record.fragment] = {
            update: at_s
            for update, at_s in self._waiting[record.fragment].items()
            if update[2] > marks.get(update[:2], 0)
        }
        if record.version > 1 and any(one.what == "resumed" for one in record.observations):
            self._taken_s[record.fragment].append(recorded.stored_at_s)
        for refused in record.rejected:
            one = self.known[refused.learner]
            one.rejected += 1
            one.reasons[refused.reason] += 1
            if refused.reason == "view":
                one.views.append((record.version, recorded.stored_at_s))
            one.recent.append(UpdateAnswer(refused.reason))
        if record.inputs:
            self._note_round(record, recorded.stored_at_s)

    def _note_round(self, record: wire.Record, made_at_s: float) -> None:
        sizes = (shard.size_bytes for taken in record.inputs for shard in taken.shards)
        stale = sum(taken.staleness for taken in record.inputs)
        waits = waits_of(record, made_at_s)
        self._recent.append(_Round(record.closed_at_s, stale, sum(sizes), waits))
        stood = StoodStill(max(wait_s for wait_s, _ in waits), record.version, made_at_s)
        longest = self._stood_still
        if longest is None or stood >= longest or longest.at_s < made_at_s - HOUR_S:
            self._stood_still = stood
        if len(record.inputs) > 2:
            self.rounds.append(record)
            self._whole_updates += len(record.inputs)
            while self._whole_updates > WHOLE_UPDATES and len(self.rounds) > 1:
                self._whole_updates -= len(self.rounds.popleft().inputs)
        speeds = {one.learner: one.speed for one in record.policy.members}
        norm = self._longest.get(record.fragment, 0.0)
        # A round of one learner does not count: its norm would define which norms are long.
        if len({one.learner for one in record.inputs}) > 1:
            norm = self._longest[record.fragment] = max(norm, usual_norm(record.inputs))
        answered = answers(record.inputs, waits, norm)
        for taken, answer in zip(record.inputs, answered, strict=True):
            one = self.known[taken.learner]
            one.merged += 1
            one.tokens += taken.tokens_credited
            one.less.update(taken.less_for)
            one.recent.append(answer)
            if answer.others_loss is not None:
                one.beside.append(answer)
            point = MergedPoint(
                record.closed_at_s, answer.loss, answer.norm, record.version, answer.others_loss,
                speeds.get(taken.learner, 0.0) * taken.tokens_credited / taken.steps_credited,
            )  # fmt: skip
            one.trend.add(point)
            one.newest.append(point)

    def _note_update(self, manifest: wire.Manifest, at_s: float) -> None:
        if manifest.attempt == 0:
            self._updates_sent += 1
            self._bytes_up += sum(shard.size_bytes for shard in manifest.shards)
            self.known[manifest.learner].announce(manifest, at_s)
        marks = self._marks.get(manifest.fragment)
        life = (manifest.learner, manifest.incarnation)
        if marks is not None and manifest.seq > marks.get(life, 0):
            self._waiting[manifest.fragment].setdefault((*life, manifest.seq), at_s)

    def run(self, now_s: float, *, current: bool = True) -> RunStatus:
        """Returns the run at a moment, without findings (`health_findings.judged` adds them).

        Args:
            now_s: the moment, in seconds since the epoch by the server's clock.
            current: False if the bus is unreachable.
        """
        found = [one.record.totals for one in self.records.values()]
        learners, unjoined = self._learners(now_s)
        spent = [one.spent for one in self.known.values()]
        merged = sum(one.inputs for one in self._recent)
        stored_s = [one.stored_at_s for one in self.records.values()]
        stopped_s = max([self._stopped[1], *stored_s]) if self._stopped is not None else now_s
        per_s = self._per_s(now_s)
        return RunStatus(
            run=self._name,
            state=self._state(learners),
            current=current,
            as_of_s=now_s,
            whole=self.extent.whole_from == 1,
            epoch=self._epoch,
            global_step=self.global_step,
            steps=self.settings.run.steps,
            versions=sum(one.record.version for one in self.records.values()),
            # Each token is counted once for every fragment.
            tokens_merged=sum(one.tokens_credited for one in found) // max(1, len(found)),
            updates_sent=self._updates_sent,
            updates_merged=sum(one.updates_merged for one in found),
            updates_rejected=sum(one.updates_rejected for one in found),
            versions_per_s=per_s * len(self._recent),
            tokens_per_s=trained_per_s(learners),
            bytes_up_per_s=per_s * sum(one.size_bytes for one in self._recent),
            bytes_up=self._bytes_up,
            bytes_down=sum(one.bytes_down for one in spent),
            staleness=sum(one.staleness for one in self._recent) / max(1, merged),
            wait=delays_of(wait for one in self._recent for wait in one.waits),
            usual_wait_s=self._usual_wait(0),
            usual_wait_steps=self._usual_wait(1),
            delay=over_all([one.delay for one in learners]),
            adoption=over_all([one.adoption for one in learners]),
            round_size=merged / max(1, len(self._recent)),
            stall_fraction=share(
                sum(one.stall_s for one in spent), sum(one.run_s for one in spent)
            ),
            tape_bytes=self.filled.size_bytes,
            tape_limit_bytes=self.filled.max_bytes,
            quiet_s=max(0.0, now_s - self.extent.last_s),
            stopping_s=max(0.0, now_s - stopped_s),
            unjoined=unjoined,
            cut_off=tuple(sorted({one.aggregator for one in self.aggregators if one.cut_off})),
            stood_still=self._stood_still,
            takeovers=self._takeovers(self.extent.last_s if self.ended else now_s),
            changes=tuple(self._changes),
            stored=self.stored,
            learners=learners,
            fragments=tuple(self._fragment(index, now_s) for index in sorted(self.records)),
        )

    def _usual_wait(self, unit: int) -> float:
        """Returns the median of recent rounds' mean waits; `unit` 0: seconds, 1: inner steps."""
        return median([fmean(wait[unit] for wait in one.waits) for one in self._recent] or [0.0])

    def _takeovers(self, until_s: float) -> tuple[float, ...]:
        """Returns the times of a fragment's changes of owner in the hour before `until_s`.

        The fragment is the one with the most changes.
        """
        each = [
            tuple(at_s for at_s in found if at_s >= until_s - HOUR_S)
            for found in self._taken_s.values()
        ]
        return max(each, key=len, default=())

    def _per_s(self, now_s: float) -> float:
        """Returns the inverse of the time that the recent rounds took; 0 after the run's end."""
        if len(self._recent) < 2 or self.ended:
            return 0.0
        return 1 / max(1e-3, now_s - self._recent[0].closed_at_s)

    def _state(self, learners: Sequence[LearnerStatus]) -> str:
        """Returns `RunStatus.state`; "waiting for learners" also if all learners have left."""
        if self.ended:
            return "ended"
        if self._stopped is not None:
            return "stopping"
        if self.settings.run.paused:
            return "paused"
        there = any(not one.left for one in learners)
        return "under way" if there else "waiting for learners"

    def _fragment(self, index: int, now_s: float) -> FragmentStatus:
        record, _, stored_at_s, _ = self.records[index]
        # A learner that left after its last update took part in the round.
        there = {one.learner for one in record.policy.members if one.live and not one.left}
        there |= {one.learner for one in record.inputs}
        lease, waiting = self.leases.get(index), self._waiting[index]
        return FragmentStatus(
            fragment=index,
            module=self._modules[index] if self._modules else "",
            version=record.version,
            global_step=record.global_step,
            owner=lease.aggregator if lease is not None and lease.state == "held" else None,
            free=lease is None or lease.state == "released",
            refused_by=tuple(
                sorted({one.aggregator for one in self.aggregators if index in one.refuses})
            ),
            waiting=len(waiting),
            waiting_s=max(0.0, now_s - min(waiting.values(), default=now_s)),
            version_s=max(0.0, now_s - stored_at_s),
            round_updates=len(record.inputs),
            round_s=record.closed_at_s - record.opened_at_s if record.inputs else 0.0,
            live_learners=len(there),
        )

    def _learners(self, now_s: float) -> tuple[tuple[LearnerStatus, ...], dict[str, int]]:
        """Returns the learners that joined or sent heartbeats, and `RunStatus.unjoined`."""
        members: dict[str, list[wire.MemberState]] = defaultdict(list)
        quarantined: set[str] = set()
        for recorded in self.records.values():
            quarantined.update(recorded.record.policy.quarantined)
            for member in recorded.record.policy.members:
                # To the owner of a fragment that it does not hold, it is as one that has left.
                if member.incarnation not in member.not_holding:
                    members[member.learner].append(member)
        unjoined: dict[str, int] = {}
        moment = Moment(
            now_s=now_s,
            until_s=self.extent.last_s if self.ended else now_s,
            whole_s=self.extent.whole_s,
            stop_seq=self._stopped[0] if self._stopped is not None else 0,
            liveness_timeout_s=self.settings.quorum.liveness_timeout_s,
            fragments=len(self.records),
        )
        found = []
        for name in sorted(self.known.keys() | members.keys() | quarantined):
            known = self.known.get(name, LearnerHistory())
            newest = max([known.joined, *(one.incarnation for one in members[name])])
            last = known.last
            if last is not None and self._never_joined(last.heartbeat.incarnation, newest):
                unjoined[name], last = last.heartbeat.incarnation, None
            if newest or name not in unjoined:
                out = known.word.active if known.word is not None else name in quarantined
                read = Reading(known, last, newest, members[name], out)
                found.append(learner_status(name, read, moment, self.shards.get(name)))
        return tuple(found), unjoined

    def _never_joined(self, life: int, newest: int) -> bool:
        """Returns whether a heartbeat of incarnation `life` is of a life that never joined.

        A life's incarnation is the sequence of its join message. None can be above the tape's last
        sequence, which was read after the heartbeats. A reader that began in the middle of the tape
        does not know earlier lives.
        """
        # A copy may lack the newest joins, and have the heartbeats of those lives.
        if not self.copied and 0 < self.last_seq < life:
            return True
        return self.from_start and newest < life <= self.extent.last_seq
