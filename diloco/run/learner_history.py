"""Facts read of one learner, in the same memory however long it takes part. Pure."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

from diloco.common.protocol import wire
from diloco.common.storage.tape import InvalidMessage
from diloco.run.state import RECENT, Delays, MergedPoint, Throughput, UpdateAnswer

# Points of a trend that are kept: beyond, every other one is let go.
POINTS = 64
# Of the gaps between a learner's newest updates so many, the longest, are no part of its pace.
PAUSES = 2
# A round that is shorter than this part of the longest says nothing of lengths: where a schedule
# ends at zero, who has begun a little earlier sends far longer updates.
FADED = 0.01


class Trend:
    """A few points, spread over all points that came."""

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
    """The rates of the newest updates, and their change; None if the updates are too few.

    Args:
        newest: `RECENT` of them, or what there is.
        trend: points over all that came.
        merged: the number of points that came.
    """
    # A pause, or a life that ended, is no pace.
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
    """Totals that lives of a learner report: bytes read, seconds stalled and in all."""

    bytes_down: int = 0
    stall_s: float = 0.0
    run_s: float = 0.0

    def and_of(self, beat: wire.Heartbeat) -> "LifeTotals":
        """The totals with those of another life."""
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
        joined: its newest life that joined; `left` the newest that ended on purpose.
        sudden_s: when lives joined of which the one before had not left.
        last: the heartbeat that came last, whichever life's.
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
        """Take the next heartbeat; that of a superseded life adds nothing to the sums."""
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
        """Totals of all lives."""
        return self._earlier.and_of(self._newest) if self._newest is not None else self._earlier


class Reading(NamedTuple):
    """One learner: its last heartbeat if it counts, and what the fragments' machines remember."""

    known: LearnerHistory
    last: LastHeartbeat | None
    newest: int
    members: Sequence[wire.MemberState]
    quarantined: bool

    def beat(self, now_s: float) -> tuple[wire.Heartbeat | None, float | None]:
        """The newest life's heartbeat, and its age."""
        if self.last is None or self.last.heartbeat.incarnation < self.newest:
            return None, None
        return self.last.heartbeat, max(0.0, now_s - self.last.heard_at_s)

    @property
    def ahead_s(self) -> float | None:
        """Seconds that the learner's clock is ahead of the server's, by the newest heartbeat."""
        if self.last is None or not self.last.heartbeat.now_s:
            return None
        return self.last.heartbeat.now_s - self.last.heard_at_s

    @property
    def left(self) -> bool:
        """Whether the newest life that is known, or heard of, has ended on purpose."""
        heard = self.last.heartbeat.incarnation if self.last is not None else 0
        life = max(self.newest, heard)
        gone = any(one.left and one.incarnation == life for one in self.members)
        return self.known.left >= max(life, 1) or gone

    @property
    def superseded(self) -> int:
        """An earlier life that was heard of last, also after the newest had left; 0: none."""
        if self.last is None or self.last.heartbeat.incarnation >= self.newest:
            return 0
        if self.left and self.last.heard_at_s <= self.known.left_at_s:
            return 0
        return self.last.heartbeat.incarnation


def told_delays(beat: wire.Heartbeat | None) -> Delays | None:
    """The delays that a heartbeat tells, if any."""
    if beat is None or not beat.worst_delay_s:
        return None
    return Delays(beat.delay_s, beat.worst_delay_s, beat.delay_steps, beat.worst_delay_steps)


def waits_of(record: wire.Record, made_at_s: float) -> tuple[tuple[float, float], ...]:
    """The wait of each update for its version, in seconds and in steps of its sender.

    Args:
        record: has the updates, and how fast their senders were seen to be.
        made_at_s: when the server stored it; so it stored the announcements.
    """
    speeds = {one.learner: one.speed for one in record.policy.members}
    waits_s = [(one.learner, max(0.0, made_at_s - one.announced_at_s)) for one in record.inputs]
    return tuple((wait_s, wait_s * speeds.get(learner, 0.0)) for learner, wait_s in waits_s)


def usual_norm(inputs: Sequence[wire.Input]) -> float:
    """The usual norm of a round's updates; of two the shorter, so that a long one stands out."""
    return median_low([one.norm for one in inputs] or [1.0])


def answers(
    inputs: Sequence[wire.Input], waits: Sequence[tuple[float, float]], longest: float = 0.0
) -> Iterator[UpdateAnswer]:
    """The answer to each update of a round, with its wait.

    Args:
        inputs: of the round.
        waits: of each, in seconds and steps.
        longest: usual norm of the fragment's rounds so far, at most.
    """
    usual, least = usual_norm(inputs), FADED * longest
    faded = usual < least
    others = others_losses(inputs)
    for taken, wait in zip(inputs, waits, strict=True):
        norm = max(taken.norm, least) / least if faded else taken.norm / usual if usual else 1.0
        less = tuple(why for why in taken.less_for if why != "norm" or not faded)
        yield UpdateAnswer(
            "", less, taken.staleness, taken.loss, norm, others[taken.learner], wait,
            taken.tokens, taken.tokens_credited,
        )  # fmt: skip


def others_losses(inputs: Sequence[wire.Input]) -> dict[str, float | None]:
    """For each learner the median of the others' losses in a round, if there are others."""
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
