"""Facts about one learner from the tape and its heartbeats, in constant memory. Pure."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

from diloco.common.protocol import wire
from diloco.common.storage.tape import InvalidMessage
from diloco.run.state import RECENT, Delays, MergedPoint, Throughput, UpdateAnswer

# The most points of a trend; when there are more, every other one is dropped.
POINTS = 64
# The longest gaps between a learner's newest updates are left out of its rate: so many.
PAUSES = 2
# In a round below this part of the fragment's longest no update is called short, or shortened: at
# the end of a schedule, a learner that is a few steps behind sends far longer ones.
FADED = 0.01
# An update is long beside the usual one of its round, and beside this part of the longest round: a
# new life's first steps are as long as the run's first, and where data are learnt by heart lengths
# are chance.
SHORT = 0.35


class Trend:
    """A few points, spread over all points that were added."""

    def __init__(self) -> None:
        self.points: list[MergedPoint] = []
        self._stride = 1
        self._came = 0

    def add(self, point: MergedPoint) -> None:
        """Add the next point."""
        if self._came % self._stride == 0:
            self.points.append(point)
        self._came += 1
        if len(self.points) > POINTS:
            self.points = self.points[::2]
            self._stride *= 2


def throughput(
    newest: Sequence[MergedPoint], trend: Sequence[MergedPoint], merged: int
) -> Throughput | None:
    """Returns the rates of the newest updates, and their change; None if there are too few.

    Args:
        newest: the newest updates, at most `RECENT`.
        trend: points spread over all updates.
        merged: the number of all updates.
    """
    # The longest gaps may be pauses or restarts.
    gaps_s = sorted(late.at_s - early.at_s for early, late in pairwise(newest))[:-PAUSES]
    if len(newest) < RECENT or not sum(gaps_s) > 0:
        return None
    tokens_per_s = median(point.tokens_per_s for point in newest)
    found = Throughput(tokens_per_s, len(gaps_s) / sum(gaps_s))
    earlier = [point for point in trend if point.at_s < newest[0].at_s]
    before = median(point.tokens_per_s for point in earlier) if earlier else 0.0
    if len(earlier) < RECENT or not before:
        return found
    per_s = (merged - len(newest)) / (newest[0].at_s - earlier[0].at_s)
    return found._replace(
        tokens_change=tokens_per_s / before, updates_change=found.updates_per_s / per_s
    )


class LifeTotals(NamedTuple):
    """Totals that a learner's lives report: bytes read, seconds stalled, and all seconds."""

    bytes_down: int = 0
    stall_s: float = 0.0
    run_s: float = 0.0

    def and_of(self, beat: wire.Heartbeat) -> "LifeTotals":
        """Returns the sum of these totals and those in the heartbeat of another life."""
        return LifeTotals(
            self.bytes_down + beat.bytes_down,
            self.stall_s + beat.stall_s,
            self.run_s + beat.run_s,
        )


@dataclass
class LastHeartbeat:
    """One learner's newest heartbeat, and when it came (seconds since the epoch)."""

    heartbeat: wire.Heartbeat
    heard_at_s: float


@dataclass
class LearnerHistory:
    """Facts about one learner, in memory that does not grow with its time in the run.

    Attributes:
        joined: incarnation of its newest life; `left`: of the newest life that left in order.
        sudden_s: times at which a life joined although the one before had not left.
        last: the newest heartbeat of any life.
    """

    host: str = ""
    release: tuple[str, str, str] = ("", "", "")
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))
    views: list[tuple[int, float]] = field(default_factory=list)
    twins_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    uploads_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    lives: int = 0
    joined: int = 0
    sudden_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    left: int = 0
    left_seq: int = 0
    left_at_s: float = 0.0
    word: wire.Quarantine | None = None
    last: LastHeartbeat | None = None
    merged: int = 0
    rejected: int = 0
    tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    less: Counter[str] = field(default_factory=Counter)
    recent: deque[UpdateAnswer] = field(default_factory=lambda: deque(maxlen=RECENT))
    beside: deque[UpdateAnswer] = field(default_factory=lambda: deque(maxlen=RECENT))
    trend: Trend = field(default_factory=Trend)
    newest: deque[MergedPoint] = field(default_factory=lambda: deque(maxlen=RECENT))
    invalid: deque[InvalidMessage] = field(default_factory=lambda: deque(maxlen=RECENT))
    invalids: int = 0
    sent_at_s: float = 0.0
    announced_s: dict[int, float] = field(default_factory=dict)
    told_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _newest: wire.Heartbeat | None = None
    _earlier: LifeTotals = field(default_factory=LifeTotals)

    def hear(self, beat: wire.Heartbeat, at_s: float) -> None:
        """Take the next heartbeat; one of a superseded life is not added to the totals."""
        self.last = LastHeartbeat(beat, at_s)
        newest = self._newest
        if newest is not None and beat.incarnation > newest.incarnation:
            self._earlier = self._earlier.and_of(newest)
        if newest is None or beat.incarnation >= newest.incarnation:
            self._newest = beat

    def announce(self, manifest: wire.Manifest, at_s: float) -> None:
        """Note that the learner has announced an update."""
        self.sent_at_s = at_s
        self.uploads_s.append(manifest.upload_s)
        before_s = self.announced_s.get(manifest.fragment)
        self.announced_s[manifest.fragment] = at_s
        if before_s is not None:
            self.told_s.append(manifest.step_time_s)
            self.took_s.append(max(0.0, at_s - before_s) / manifest.steps)

    @property
    def spent(self) -> LifeTotals:
        """The totals of all lives."""
        return self._earlier.and_of(self._newest) if self._newest is not None else self._earlier


class Reading(NamedTuple):
    """One learner: its history, its last heartbeat, and its entries in the fragments' states."""

    known: LearnerHistory
    last: LastHeartbeat | None
    newest: int
    members: Sequence[wire.MemberState]
    quarantined: bool

    def beat(self, now_s: float) -> tuple[wire.Heartbeat | None, float | None]:
        """Returns the newest life's heartbeat, and its age in seconds."""
        if self.last is None or self.last.heartbeat.incarnation < self.newest:
            return None, None
        return self.last.heartbeat, max(0.0, now_s - self.last.heard_at_s)

    @property
    def ahead_s(self) -> float | None:
        """The seconds by which the learner's clock is ahead of the server's, by its heartbeat."""
        if self.last is None or not self.last.heartbeat.now_s:
            return None
        return self.last.heartbeat.now_s - self.last.heard_at_s

    @property
    def left(self) -> bool:
        """Whether the newest life in records and heartbeats has left in order."""
        heard = self.last.heartbeat.incarnation if self.last is not None else 0
        life = max(self.newest, heard)
        gone = any(one.left and one.incarnation == life for one in self.members)
        return self.known.left >= max(life, 1) or gone

    @property
    def superseded(self) -> int:
        """The incarnation of an earlier life, if that one sent the last heartbeat; else 0."""
        if self.last is None or self.last.heartbeat.incarnation >= self.newest:
            return 0
        if self.left and self.last.heard_at_s <= self.known.left_at_s:
            return 0
        return self.last.heartbeat.incarnation


def told_delays(beat: wire.Heartbeat | None) -> Delays | None:
    """Returns the delays that a heartbeat reports, if any."""
    if beat is None or not beat.worst_delay_s:
        return None
    return Delays(beat.delay_s, beat.worst_delay_s, beat.delay_steps, beat.worst_delay_steps)


def waits_of(record: wire.Record, made_at_s: float) -> tuple[tuple[float, float], ...]:
    """Returns the wait of each update for its version, in seconds and in steps of its sender.

    Args:
        record: the record that merged the updates; its policy has the senders' speeds.
        made_at_s: the server's time at which the record was stored.
    """
    speeds = {one.learner: one.speed for one in record.policy.members}
    waits_s = [(one.learner, max(0.0, made_at_s - one.announced_at_s)) for one in record.inputs]
    return tuple((wait_s, wait_s * speeds.get(learner, 0.0)) for learner, wait_s in waits_s)


def usual_norm(inputs: Sequence[wire.Input]) -> float:
    """Returns the median norm of a round's updates; of two, the lower one, so a long one shows."""
    return median_low([one.norm for one in inputs] or [1.0])


def answers(
    inputs: Sequence[wire.Input], waits: Sequence[tuple[float, float]], longest: float = 0.0
) -> Iterator[UpdateAnswer]:
    """Yields the answer to each update of a round, with its wait.

    Args:
        inputs: the updates that the round merged.
        waits: the wait of each, in seconds and steps.
        longest: the greatest `usual_norm` of the fragment's rounds so far.
    """
    usual = usual_norm(inputs)
    least, faded = SHORT * longest, usual < FADED * longest
    others = others_losses(inputs)
    for taken, wait in zip(inputs, waits, strict=True):
        norm = taken.norm / usual if usual else 1.0
        if norm > 1:
            norm = max(1.0, taken.norm / max(usual, least))
        elif faded:
            norm = 1.0
        less = tuple(why for why in taken.less_for if why != "norm" or not faded)
        yield UpdateAnswer(
            "", less, taken.staleness, taken.loss, norm, others[taken.learner], wait,
            taken.tokens, taken.tokens_credited,
        )  # fmt: skip


def others_losses(inputs: Sequence[wire.Input]) -> dict[str, float | None]:
    """Returns the median of the others' losses for each learner of a round; None without others."""
    order = sorted(range(len(inputs)), key=lambda index: inputs[index].loss)
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, index in enumerate(order):
        ranks[inputs[index].learner].append(rank)

    def beside(own: Sequence[int]) -> float | None:
        count = len(order) - len(own)
        if not count:
            return None
        found = 0.0
        for place in ((count - 1) // 2, count // 2):
            at = place
            for rank in own:
                at += rank <= at
            found += inputs[order[at]].loss / 2
        return found

    return {learner: beside(own) for learner, own in ranks.items()}
