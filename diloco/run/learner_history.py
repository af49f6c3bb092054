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
# The number of longest gaps between a learner's newest updates that its rate leaves out.
PAUSES = 2
# If a round's median norm is below this part of the greatest median of the fragment's rounds, none
# of its updates counts as short, or as shortened by clipping: at the end of a learning-rate
# schedule, a learner that is a few steps behind sends far longer updates than the others.
FADED = 0.01
# An update counts as long if its norm is far above its round's median, and above this part of the
# greatest median of the fragment's rounds. For the first updates of a new life are as long as the
# run's first, and once a run has memorized its data, norms are small and vary by chance.
SHORT = 0.35


class Trend:
    """At most `POINTS` points, evenly spread over all points that were added."""

    def __init__(self) -> None:
        self.points: list[MergedPoint] = []
        self._stride = 1
        self._came = 0

    def add(self, point: MergedPoint) -> None:
        """Adds the next point; drops every other one once there are more than `POINTS`."""
        if self._came % self._stride == 0:
            self.points.append(point)
        self._came += 1
        if len(self.points) > POINTS:
            self.points = self.points[::2]
            self._stride *= 2


def throughput(
    newest: Sequence[MergedPoint], trend: Sequence[MergedPoint], merged: int
) -> Throughput | None:
    """Returns the rates of a learner's newest merged updates, and their change.

    Args:
        newest: its newest merged updates, at most `RECENT`; with fewer, returns None.
        trend: points spread over all its merged updates.
        merged: the number of all its merged updates.
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
    """Totals over a learner's lives, as their heartbeats state them.

    Attributes:
        bytes_down: bytes of objects read.
        stall_s: seconds that synchronization took from training.
        run_s: seconds since each life began to train.
    """

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
    """One learner's newest heartbeat, and when it was stored (seconds since the epoch)."""

    heartbeat: wire.Heartbeat
    heard_at_s: float


@dataclass
class LearnerHistory:
    """Facts about one learner, in memory that does not grow with its time in the run.

    Times (`_s`, `_at_s`) are seconds since the epoch, if nothing else is said.

    Attributes:
        release: from its newest join: the program's release, digest of the packages' versions, and
            platform.
        errors: errors that ended its last lives.
        views: (version, time) of each check in which its view differed from the run's.
        slices: from its newest join: its slices; `fewer_from_s`: since when its lives have had
            fewer than it has; 0: it has all.
        holds: from its newest join: the modules that it holds; empty: all; None: not read.
        twins_s: times at which an earlier life left although a newer one had joined.
        uploads_s: seconds that each of its last updates took to be stored.
        lives: number of its joins.
        joined: incarnation of its newest life; 0: the join was not read.
        sudden_s: times at which a life joined although the one before had not left, nor lost a
            slice.
        left: incarnation of the newest life that left in order, by a message of sequence
            `left_seq`; 0: none has.
        word: the newest message that quarantines it or lets it in again.
        last: the newest heartbeat of any life.
        merged, rejected: numbers of its updates with this verdict.
        tokens: tokens credited to it, in all fragments together.
        reasons: number of its rejected updates by reason.
        less: number of its merged updates that count for less than they claim, by limit.
        recent: verdicts on its last updates; `beside`: on its last updates that were merged
            together with other learners'.
        trend: points spread over all its merged updates; `newest`: the last ones.
        invalid: its last messages that are not of the protocol; `invalids`: number of them all.
        sent_at_s: when it last announced an update or joined; 0: never.
        announced_s: when it last announced an update of each fragment.
        told_s, took_s: seconds of a step in its last updates, as they claim, and as the times of
            their announcements show.
    """

    host: str = ""
    release: tuple[str, str, str] = ("", "", "")
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))
    views: list[tuple[int, float]] = field(default_factory=list)
    slices: wire.LearnerSlices | None = None
    holds: tuple[str, ...] | None = None
    fewer_from_s: float = 0.0
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

    def join(self, join: wire.Join, seq: int, at_s: float) -> None:
        """Notes a join with this stream sequence, stored at `at_s`."""
        before, now = self.slices, join.slices
        lost = before is not None and now is not None and now.present < before.present
        if self.joined > self.left and not lost:
            self.sudden_s.append(at_s)
        self.lives, self.joined, self.host = self.lives + 1, seq, join.host
        self.release, self.holds = (join.release, join.lock, join.platform), join.holds
        self.sent_at_s = max(self.sent_at_s, at_s)
        if join.before:
            self.errors.append(join.before)
        if join.platform != wire.NOT_A_LEARNER:
            fewer = now is not None and now.present < now.given
            self.fewer_from_s = (self.fewer_from_s or at_s) if fewer else 0.0
            self.slices = now

    def hear(self, beat: wire.Heartbeat, at_s: float) -> None:
        """Notes the next heartbeat, stored at `at_s`.

        The heartbeat of a superseded life is not added to the totals.
        """
        self.last = LastHeartbeat(beat, at_s)
        newest = self._newest
        if newest is not None and beat.incarnation > newest.incarnation:
            self._earlier = self._earlier.and_of(newest)
        if newest is None or beat.incarnation >= newest.incarnation:
            self._newest = beat

    def announce(self, manifest: wire.Manifest, at_s: float) -> None:
        """Notes the first announcement of an update, stored at `at_s`."""
        self.sent_at_s = at_s
        self.uploads_s.append(manifest.upload_s)
        before_s = self.announced_s.get(manifest.fragment)
        self.announced_s[manifest.fragment] = at_s
        if before_s is not None:
            self.told_s.append(manifest.step_time_s)
            self.took_s.append(max(0.0, at_s - before_s) / manifest.steps)

    @property
    def spent(self) -> LifeTotals:
        """The totals of all lives, up to each one's last heartbeat."""
        return self._earlier.and_of(self._newest) if self._newest is not None else self._earlier


class Reading(NamedTuple):
    """The facts that were read about one learner.

    Attributes:
        known: facts from the tape and its heartbeats.
        last: its last heartbeat; None: it sent none, or one of a life that never joined.
        newest: incarnation of its newest life, by joins and records; 0: none is known.
        members: its entries in the newest records of the fragments.
        quarantined: whether it is quarantined.
    """

    known: LearnerHistory
    last: LastHeartbeat | None
    newest: int
    members: Sequence[wire.MemberState]
    quarantined: bool

    def beat(self, now_s: float) -> tuple[wire.Heartbeat | None, float | None]:
        """Returns the newest life's last heartbeat and its age in seconds at `now_s`.

        Both are None if the newest life has sent no heartbeat.
        """
        if self.last is None or self.last.heartbeat.incarnation < self.newest:
            return None, None
        return self.last.heartbeat, max(0.0, now_s - self.last.heard_at_s)

    @property
    def ahead_s(self) -> float | None:
        """Seconds by which the learner's clock is ahead of the server's; None: unknown."""
        if self.last is None or not self.last.heartbeat.now_s:
            return None
        return self.last.heartbeat.now_s - self.last.heard_at_s

    @property
    def left(self) -> bool:
        """Whether the newest life, by joins, records and heartbeats, has left in order."""
        heard = self.last.heartbeat.incarnation if self.last is not None else 0
        life = max(self.newest, heard)
        gone = any(one.left and one.incarnation == life for one in self.members)
        return self.known.left >= max(life, 1) or gone

    @property
    def superseded(self) -> int:
        """The incarnation of the last heartbeat, if that is of a life earlier than the newest.

        0 if the newest life sent the last heartbeat, or has left after it.
        """
        if self.last is None or self.last.heartbeat.incarnation >= self.newest:
            return 0
        if self.left and self.last.heard_at_s <= self.known.left_at_s:
            return 0
        return self.last.heartbeat.incarnation


def told_delays(beat: wire.Heartbeat | None) -> Delays | None:
    """Returns a learner's delays from sending updates to their verdicts; None if not reported."""
    if beat is None or not beat.worst_delay_s:
        return None
    return Delays(beat.delay_s, beat.worst_delay_s, beat.delay_steps, beat.worst_delay_steps)


def waits_of(record: wire.Record, made_at_s: float) -> tuple[tuple[float, float], ...]:
    """Returns each update's wait for its version: (seconds, inner steps of its sender).

    Args:
        record: the record that merged the updates; its policy has the senders' speeds.
        made_at_s: when the server stored the record, in seconds since the epoch.
    """
    speeds = {one.learner: one.speed for one in record.policy.members}
    waits_s = [(one.learner, max(0.0, made_at_s - one.announced_at_s)) for one in record.inputs]
    return tuple((wait_s, wait_s * speeds.get(learner, 0.0)) for learner, wait_s in waits_s)


def usual_norm(inputs: Sequence[wire.Input]) -> float:
    """Returns the median norm of a round's updates; of an even number, the lower middle one.

    So, of two updates, the longer one differs from it. Without updates, returns 1.
    """
    return median_low([one.norm for one in inputs] or [1.0])


def answers(
    inputs: Sequence[wire.Input], waits: Sequence[tuple[float, float]], longest: float = 0.0
) -> Iterator[UpdateAnswer]:
    """Yields an `UpdateAnswer` for each update that a round merged, in their order.

    Args:
        inputs: the updates that the round merged.
        waits: each update's wait for the version: (seconds, inner steps).
        longest: the greatest `usual_norm` of the fragment's rounds so far. An update that is long
            in its round, but short beside this, does not count as long.
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
    """Returns, for each learner of a round, the median loss of the other learners' updates.

    It is None if the round has no other learner.
    """
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
