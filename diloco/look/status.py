"""A run as it is now, for `diloco status`: from the end of its tape, heartbeats and leases.

`diloco doctor` looks deeper, at everything that is stored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from diloco.check import fleet, members, symptoms
from diloco.check.members import Answer
from diloco.check.symptoms import Finding
from diloco.common import wire
from diloco.common.bus import Filled
from diloco.common.errors import BusUnavailableError
from diloco.common.kept import KeptBus
from diloco.common.tape import (
    Item,
    Recorded,
    RunContext,
    effective_settings,
    last_record,
    read_tape,
)
from diloco.projections.live import Follower, LiveState, read_heartbeats, read_leases, share
from diloco.projections.trend import Point

# Messages at the end of the tape that rates and averages are taken of.
WINDOW = 2000


@dataclass(frozen=True, kw_only=True)
class LearnerStatus:
    """One learner; `staleness` is the mean of its recent updates, in versions.

    `state` is "shut out" whatever it does, else "left", "failed" or "silent", else its own word.
    """

    name: str
    state: str
    heard_s: float | None
    local_step: int
    loss: float | None
    metrics: dict[str, float]
    tokens_per_s: float
    step_time_s: float
    stall_fraction: float
    data_fraction: float
    staleness: float | None
    rejected: int
    updates_sent: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, kw_only=True)
class FragmentStatus:
    """One fragment; `round_updates` were merged by its newest version, which took `round_s`.

    They are of the `live_learners` that were there then.
    `waiting` updates are not answered yet; the first of them came `waiting_s` ago.
    """

    fragment: int
    version: int
    global_step: int
    owner: str | None
    waiting: int
    waiting_s: float
    version_s: float
    round_updates: int
    round_s: float
    live_learners: int


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run as it is now; times are ages in seconds.

    `current` is False where the bus is away: all else is as it was at `as_of_s`, for nobody can say
    who has gone silent since. `trends` has each learner's merged updates of lately. Both have their
    times since the epoch.
    """

    run: str
    state: str
    current: bool
    as_of_s: float
    epoch: int
    global_step: int
    steps: int
    tokens_merged: int
    updates_merged: int
    updates_rejected: int
    versions_per_s: float
    tokens_per_s: float
    bytes_up_per_s: float
    tape_bytes: int
    tape_limit_bytes: int
    learners: tuple[LearnerStatus, ...]
    fragments: tuple[FragmentStatus, ...]
    alerts: tuple[Finding, ...]
    trends: dict[str, tuple[Point, ...]]


class Watch:
    """Knows how a run fares, from the end of its tape on.

    Args:
        context: the run's.
        beside: is given each message of the tape that is read, too.
    """

    def __init__(self, context: RunContext, beside: Callable[[Item], None] | None = None) -> None:
        self._context = context
        # Of a run that went on without it; nor has it the leases.
        self._copied = isinstance(context.bus, KeptBus)
        self._follower = Follower(context, beside)
        self._next_seq = 1
        self._leases: dict[int, wire.Lease] = {}
        self._filled = Filled(0, 0)
        self._last_seq = 0
        self._settings = context.settings
        self._as_of_s = 0.0

    @property
    def observed(self) -> LiveState:
        """What was read."""
        return self._follower.state

    async def first_seq(self) -> int:
        """Where `begin` begins to read the tape as it is now."""
        context = self._context
        return max(1, await context.bus.last_sequence(context.tape) - WINDOW)

    async def begin(self, start_seq: int | None = None) -> Status:
        """Read what there is, from `first_seq` on, or from that of some moments ago."""
        context, observed = self._context, self._follower.state
        self._next_seq = start_seq or await self.first_seq()
        async for item in read_tape(context, self._next_seq):
            self._follower.take(item)
            self._next_seq = item.seq + 1
        for fragment in range(len(context.layout.fragments)):
            if fragment not in observed.records:
                record, seq = await last_record(context, fragment)
                self._follower.note_record(Recorded(record, seq, record.closed_at_s))
        observed.learners |= await read_heartbeats(context, _known(observed))
        self._as_of_s = context.runtime.clock()
        return await self.now()

    async def follow(self, start_seq: int | None = None) -> None:
        """Go on from there, or from a sequence; returns once the run has ended."""
        if not self._follower.state.ended:
            await self._follower.follow(start_seq or self._next_seq)

    async def now(self) -> Status:
        """The run as it is now; where the bus is away, as it was."""
        context = self._context
        try:
            self._leases = await read_leases(context)
            self._settings, _ = await effective_settings(context)
            self._filled = await context.bus.filled(context.tape)
            self._last_seq = await context.bus.last_sequence(context.tape)
        except BusUnavailableError as error:
            away = symptoms.failed("bus", error, symptoms.NATS_AWAY)
            return self._status((away,), current=False)
        self._as_of_s = context.runtime.clock()
        return self._status((), current=True)

    def as_it_was(self) -> Status:
        """The run as the bus last told of it."""
        return self._status((), current=False)

    def _believed(self) -> tuple[LiveState, list[Finding]]:
        """What was read without heartbeats of lives that cannot be, and what is said of those."""
        observed = self._follower.state
        if not self._last_seq or self._copied:
            return observed, []
        lives = _Lives(observed)
        newest = {name: lives.newest(name) for name in observed.learners}
        # The tape may have been read from its midst: of lives before that nothing is known.
        unborn = [*members.unborn(observed.learners, newest, 0, self._last_seq)]
        known = members.born(observed.learners, unborn)
        return replace(observed, learners=known) if unborn else observed, unborn

    def _status(self, more: tuple[Finding, ...], *, current: bool) -> Status:
        context, (observed, unborn) = self._context, self._believed()
        now_s = self._as_of_s
        lives, answers = _Lives(observed), members.answers(observed.recent)
        learners = tuple(
            _learner(
                observed, name, lives, answers.get(name, ()), now_s,
                context.settings.quorum.liveness_timeout_s,
            )
            for name in sorted(_known(observed))
        )  # fmt: skip
        return Status(
            run=context.run,
            state=_state(observed, paused=self._settings.run.paused),
            current=current,
            as_of_s=now_s,
            epoch=context.epoch,
            global_step=observed.global_step,
            steps=self._settings.run.steps,
            tokens_merged=observed.tokens_merged,
            updates_merged=observed.updates_merged,
            updates_rejected=observed.updates_rejected,
            versions_per_s=_versions_per_s(observed, now_s),
            tokens_per_s=sum(each.tokens_per_s for each in learners),
            bytes_up_per_s=_bytes_up_per_s(observed, now_s),
            tape_bytes=self._filled.size_bytes,
            tape_limit_bytes=self._filled.max_bytes,
            learners=learners,
            fragments=tuple(self._fragment(index, now_s) for index in sorted(observed.records)),
            alerts=(*more, *unborn, *self._alerts(observed, now_s)),
            trends={name: (*trend.points,) for name, trend in sorted(observed.trends.items())},
        )

    def _fragment(self, index: int, now_s: float) -> FragmentStatus:
        observed = self._follower.state
        record, _, stored_at_s, _ = observed.records[index]
        # Who left once it had sent its last update was there for the round.
        there = {one.learner for one in record.policy.members if one.live and not one.left}
        there |= {one.learner for one in record.inputs}
        lease = self._leases.get(index)
        return FragmentStatus(
            fragment=index,
            version=record.version,
            global_step=record.global_step,
            owner=lease.aggregator if lease is not None and lease.state == "held" else None,
            waiting=len(observed.waiting[index]),
            waiting_s=max(0.0, now_s - min(observed.waiting[index].values(), default=now_s)),
            version_s=max(0.0, now_s - stored_at_s),
            round_updates=len(record.inputs),
            round_s=record.closed_at_s - record.opened_at_s if record.inputs else 0.0,
            live_learners=len(there),
        )

    def _stopping(self, now_s: float) -> Iterator[Finding]:
        observed = self._follower.state
        newest_s = [item.stored_at_s for item in observed.records.values()]
        stopping_s = now_s - max([observed.stopped_at_s, *newest_s])
        if stopping_s > symptoms.patience_s(self._context.settings):
            yield symptoms.stops_for_long(stopping_s)

    def _nobody(self, observed: LiveState, lives: "_Lives", now_s: float) -> Iterator[Finding]:
        settings = self._settings
        if settings.run.paused or self._copied:
            return
        there = {
            name: members.of_life(observed.learners.get(name), lives.newest(name))
            for name in _known(observed)
        }
        left = {name for name in there if lives.has_left(name)}
        yield from members.nobody(there, left, now_s, settings.quorum.liveness_timeout_s)

    def _alerts(self, observed: LiveState, now_s: float) -> Iterator[Finding]:
        settings = self._context.settings
        yield from (found for found in symptoms.room(self._filled) if found.severity != "ok")
        if observed.ended:
            return
        if observed.stopped:
            yield from self._stopping(now_s)
            return
        lives, answers = _Lives(observed), members.answers(observed.recent)
        left = {name for name in observed.learners if lives.has_left(name)}
        yield from members.troubles(observed.learners, left)
        memories = [item.record.policy for item in observed.records.values()]
        timeout_s = settings.quorum.liveness_timeout_s
        for name in sorted(_known(observed)):
            yield from members.shut_out(name, memories)
            if not lives.has_left(name):
                view, life = observed.learners.get(name), lives.newest(name)
                yield from members.superseded(name, life, view)
                view = members.of_life(view, life)
                ended = [*members.failed(name, view)]
                yield from ended or members.silence(name, view, now_s, timeout_s)
                yield from members.usefulness(name, answers.get(name, ()))
        yield from self._nobody(observed, lives, now_s)
        yield from fleet.strangers(observed.recent)
        longest_s = symptoms.patience_s(settings)
        for fragment, waiting in sorted(observed.waiting.items()):
            since_s = [*waiting.values(), now_s]
            waited_s = now_s - max(min(since_s), observed.records[fragment].stored_at_s)
            if waited_s > longest_s:
                yield symptoms.standing_still(fragment, len(waiting), waited_s)
        held = {index for index, lease in self._leases.items() if lease.state != "released"}
        free = sorted(observed.records.keys() - held)
        if free and _known(observed) and not self._copied:
            yield symptoms.ownerless(free)


def _state(observed: LiveState, *, paused: bool) -> str:
    """What the run does; one that everybody has left waits as one that nobody has joined."""
    if observed.ended:
        return "ended"
    if observed.stopped:
        return "stopping"
    if paused:
        return "paused"
    lives = _Lives(observed)
    there = any(not lives.has_left(name) for name in _known(observed))
    return "under way" if there else "waiting for learners"


def _known(observed: LiveState) -> set[str]:
    """Every learner that a record, a join or a heartbeat names."""
    recorded = {
        member.learner
        for item in observed.records.values()
        for member in item.record.policy.members
    }
    return recorded | observed.joined.keys() | observed.learners.keys()


class _Lives:
    """What the records know of each learner's newest life."""

    def __init__(self, observed: LiveState) -> None:
        self._observed = observed
        self._newest: dict[str, int] = {}
        self._left: set[tuple[str, int]] = set()
        for item in observed.records.values():
            for member in item.record.policy.members:
                name, life = member.learner, member.incarnation
                self._newest[name] = max(self._newest.get(name, 0), life)
                if member.left:
                    self._left.add((name, life))

    def newest(self, name: str) -> int:
        """The newest incarnation that tape or records know; 0 for none."""
        return max(self._observed.joined.get(name, 0), self._newest.get(name, 0))

    def has_left(self, name: str) -> bool:
        """Whether a learner has left with its newest life."""
        view, newest = self._observed.learners.get(name), self.newest(name)
        if view is not None:
            newest = max(newest, view.heartbeat.incarnation)
        return self._observed.left.get(name, 0) >= max(newest, 1) or (name, newest) in self._left


def _learner(
    observed: LiveState,
    name: str,
    lives: _Lives,
    answers: Sequence[Answer],
    now_s: float,
    liveness_timeout_s: float,
) -> LearnerStatus:
    view = members.of_life(observed.learners.get(name), lives.newest(name))
    beat = view.heartbeat if view is not None else None
    heard_s = None if view is None else max(0.0, now_s - view.heard_at_s)
    silent = heard_s is None or heard_s > liveness_timeout_s
    left, failed = lives.has_left(name), any(members.failed(name, view))
    stale = [answer.staleness for answer in answers if answer.staleness is not None]
    there = beat is not None and not silent and not left and not failed
    memories = [item.record.policy for item in observed.records.values()]
    shut_out = any(members.shut_out(name, memories))
    own = "silent" if beat is None or (silent and not failed) else members.state_of(beat)
    return LearnerStatus(
        name=name,
        state="shut out" if shut_out else "left" if left else own,
        heard_s=heard_s,
        local_step=beat.local_step if beat else 0,
        loss=beat.loss if beat and beat.loss else None,
        metrics=beat.metrics if beat else {},
        tokens_per_s=beat.tokens_per_s if there and beat else 0.0,
        step_time_s=beat.step_time_s if beat else 0.0,
        stall_fraction=share(beat.stall_s, beat.run_s) if beat else 0.0,
        data_fraction=share(beat.data_s, beat.run_s) if beat else 0.0,
        staleness=sum(stale) / len(stale) if stale else None,
        rejected=sum(bool(answer.reason) for answer in answers),
        updates_sent=beat.updates_sent if beat else 0,
        bytes_up=beat.bytes_up if beat else 0,
        bytes_down=beat.bytes_down if beat else 0,
    )


def _versions_per_s(observed: LiveState, now_s: float) -> float:
    """Of the rounds that averages look back on; 0 once a run has ended."""
    if len(observed.recent) < 2 or observed.ended:
        return 0.0
    return len(observed.recent) / max(1e-3, now_s - observed.recent[0].closed_at_s)


def _bytes_up_per_s(observed: LiveState, now_s: float) -> float:
    """Bytes of the updates that those rounds merged, by the time that they took."""
    if len(observed.recent) < 2 or observed.ended:
        return 0.0
    merged = sum(
        shard.size_bytes
        for record in observed.recent
        for taken in record.inputs
        for shard in taken.shards
    )
    return merged / max(1e-3, now_s - observed.recent[0].closed_at_s)
