"""Simulates the rounds of one fragment in virtual time, with the cores that run in production.

The aggregator's core is `aggregator/core/`, the learner's `learner/core/sync.py`; everything
between them is simulated: steps, links, the merge, and learners that join and die. All fragments of
a run have the same rounds at different offsets, so one fragment stands for all. Pure: randomness
comes in as a generator, times are seconds since the beginning.
"""

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from diloco.aggregator.core import events
from diloco.aggregator.core.events import AskCut, Commit, Effect, Fetch, OpenRound
from diloco.aggregator.core.round_and_weight_formulas import FragmentRules, fragment_rules
from diloco.common.process.config import RunSettings
from diloco.common.protocol import wire
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.learner.core import sync
from diloco.learner.core.carry import Carried, carry, snapshot
from diloco.learner.core.events import (
    Adopt,
    Event,
    Published,
    Ready,
    RoundOpened,
    Send,
    Stepped,
    SyncRules,
    sync_rules,
)
from diloco.learner.core.sync import Work
from diloco.plan.outages import Trace
from diloco.plan.virtual_time import NEVER_S, Timeline, VirtualFragment

# Uploads differ in time: uniformly by up to this share more or less.
JITTER = 0.2
_ENDLESS = 1 << 50


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLearner:
    """The figures of a learner that determine its rounds; times in seconds.

    Attributes:
        step_s: time of one inner step, with all of the learner's slices.
        step_tokens: tokens of that step.
        upload_s: time from sending an update to its announcement; each varies by `JITTER`.
        download_s: time from a version's record until the learner has the version's decoded delta.
        trace: the times at which the learner trains, and with which share of its slices.
        snapshot_steps: steps between two snapshots of its unsent work, with which the life after a
            death goes on; 0: there are none.
    """

    step_s: float
    step_tokens: int
    upload_s: float
    download_s: float
    trace: Trace
    snapshot_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedAggregator:
    """The times of an aggregator's work, in seconds.

    Attributes:
        read_s: time to read and verify one update, limited by link or cores.
        make_s: time from a round's close until the version is computed (outer step and delta).
            The core gets no event in that time.
        store_s: time from there to the version's record.
        message_s: time to deliver a message, or the answer to a request.
        snapshot_s: added to `store_s` when the view and the outer state are stored too.
        away_s: (start, end) of an outage of the aggregator, whose core gets no event until its end.
    """

    read_s: float
    make_s: float
    store_s: float
    message_s: float
    snapshot_s: float = 0.0
    away_s: tuple[float, float] = (0.0, 0.0)


@dataclass(kw_only=True, slots=True)
class RoundTotals:
    """The results of simulated rounds.

    Attributes:
        committed_s: time of the record of each version.
        merged: the number of updates merged in each version.
        staleness: staleness of each merged update, in versions, in the order of the versions.
        waits_s: seconds of each merged update from its announcement to the close of its round.
        adoptions_s: seconds of each version at each learner, from its record to its adoption.
        reasons: the number of rounds that closed for each reason (`Commit.reason`).
        reads: the number of updates that the aggregator read.
        kept: share of the trained tokens that was merged, or was still to be merged at the end;
            the rest was rejected or died with its learner.
        utilization: tokens that learners trained, as a share of those possible by their traces
            without waiting for versions.
        stands_for: learners of the fleet for each simulated learner.
    """

    committed_s: list[float] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    adoptions_s: list[float] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    reads: int = 0
    kept: float = 1.0
    utilization: float = 1.0
    stands_for: float = 1.0

    @property
    def versions(self) -> int:
        """The number of versions made."""
        return len(self.committed_s)

    @property
    def interval_s(self) -> float:
        """Mean seconds between two versions of the fragment; infinite for fewer than two."""
        if self.versions < 2:
            return NEVER_S
        return (self.committed_s[-1] - self.committed_s[0]) / (self.versions - 1)

    @property
    def participants(self) -> float:
        """Mean number of updates in a version, in learners of the fleet."""
        simulated = len(self.staleness) / self.versions if self.versions else 0.0
        return self.stands_for * simulated

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of merged updates, in versions; 0 without updates."""
        return sum(self.staleness) / len(self.staleness) if self.staleness else 0.0

    @property
    def wait_s(self) -> tuple[float, float]:
        """(Mean, worst) of `waits_s`; zeros if it is empty."""
        return _mean_and_worst(self.waits_s)

    @property
    def adoption_s(self) -> tuple[float, float]:
        """(Mean, worst) of `adoptions_s`; zeros if it is empty."""
        return _mean_and_worst(self.adoptions_s)

    @property
    def late_share(self) -> float:
        """Share of merged updates that missed the round for which they were sent."""
        return sum(s > 0 for s in self.staleness) / len(self.staleness) if self.staleness else 0.0


def _mean_and_worst(times_s: list[float]) -> tuple[float, float]:
    return sum(times_s) / max(1, len(times_s)), max(times_s, default=0.0)


def simulate(
    settings: RunSettings,
    workers: list[PlannedLearner],
    *,
    aggregator: PlannedAggregator,
    horizon_s: float,
    rng: np.random.Generator,
    most_versions: int = _ENDLESS,
) -> RoundTotals:
    """Simulates the rounds of one fragment until `horizon_s`, or until `most_versions` are made.

    Args:
        settings: settings of the run.
        workers: the run's learners; all join at 0 s.
        aggregator: the times of the aggregator's work.
        horizon_s: seconds to simulate; no longer than the workers' traces.
        rng: draws the times of uploads.
        most_versions: the number of versions to simulate at most.
    """
    timeline = Timeline()
    owner = _PlannedOwner(settings, aggregator, timeline)
    rules = sync_rules(settings.sync)
    for number, worker in enumerate(workers):
        owner.learners.append(_Learner(f"learner-{number}", worker, owner, rules, rng))
    while owner.found.versions < most_versions:
        if timeline.next_s >= horizon_s:
            timeline.now_s = horizon_s
            break
        timeline.advance()
    return owner.result()


def _planned_rules(settings: RunSettings) -> FragmentRules:
    """Returns the run's rules for one fragment of two blocks, in a run that does not end."""
    sizes = {"fragments": 1, "shard_elements": 1024}
    settings = settings.model_copy(update={"sync": settings.sync.model_copy(update=sizes)})
    block = settings.sync.block
    tensor = Tensor(name="w", shape=(2 * block,), dtype="float32")
    rules = fragment_rules(settings, make_layout([tensor], fragments=1, block=block), 0)
    return replace(rules, steps=_ENDLESS)


def _digest(version: int) -> str:
    """Returns a string of the version's number, in place of the digest of its view."""
    return f"{version:032x}"


class _PlannedOwner(VirtualFragment):
    """The simulated aggregator: reads one update after another, since all share its link.

    Attributes:
        learners: the simulated learners.
        found: the results of the rounds so far.
        trained: tokens trained by learners until they died, or until the end (`result`).
        sent: the tokens of announced updates that were not rejected; at the end also those that
            learners have not announced yet.
    """

    def __init__(
        self, settings: RunSettings, aggregator: PlannedAggregator, timeline: Timeline
    ) -> None:
        super().__init__(_planned_rules(settings), timeline, _digest(0))
        self.learners: list[_Learner] = []
        self.found = RoundTotals()
        self.trained = self.sent = 0.0
        self._aggregator = aggregator
        self._snapshots = settings.sync.snapshot_interval_versions
        self._read_until_s = 0.0

    def result(self) -> RoundTotals:
        possible = 0.0
        for learner in self.learners:
            learner.feed()
            learner.count_tokens(kept=True)
            possible += learner.work.at(self.timeline.now_s)[1]
        self.found.kept = self.sent / self.trained if self.trained else 1.0
        self.found.utilization = min(1.0, self.trained / possible) if possible else 1.0
        return self.found

    def decide(self, event: events.Event) -> None:
        begins_s, ends_s = self._aggregator.away_s
        if begins_s <= self.timeline.now_s < ends_s:
            self.timeline.at(ends_s, self.decide, event)
        else:
            super().decide(event)

    def perform(self, effect: Effect) -> None:
        message_s = self._aggregator.message_s
        match effect:
            case Fetch():
                self.found.reads += 1
                begins_s = max(self._read_until_s, self.timeline.now_s)
                self._read_until_s = begins_s + self._aggregator.read_s
                self.timeline.at(self._read_until_s + message_s, self._fetched, effect)
            case AskCut():
                self.timeline.after(message_s, self._tell_cut, self.newest_seq)
            case OpenRound(version):
                for learner in self.learners:
                    learner.hear_of_round(version)
            case Commit():
                self._close(effect)

    def _fetched(self, fetch: Fetch) -> None:
        # Every update has the same norm per step: none is clipped.
        norm = float(fetch.manifest.steps)
        self.decide(events.Fetched(self.timeline.now_s, fetch.update, norm))

    def _tell_cut(self, stream_seq: int) -> None:
        self.decide(events.CutKnown(self.timeline.now_s, stream_seq))

    def _close(self, commit: Commit) -> None:
        made_s, version = self.timeline.now_s, _version_of(commit)
        if commit.what == "version":
            made_s += self._aggregator.make_s
            self.timeline.at(made_s, self.made, _digest(version))
        stored_s = made_s + self._aggregator.store_s + self._aggregator.message_s
        if commit.what == "version" and version % self._snapshots == 0:
            stored_s += self._aggregator.snapshot_s
        self.timeline.at(stored_s, self._commit, commit)

    def _commit(self, commit: Commit) -> None:
        closed, now_s = commit.state, self.timeline.now_s
        if commit.what == "version":
            self.found.committed_s.append(now_s)
            self.found.merged.append(len(closed.admitted))
            self.found.staleness += [taken.staleness for taken in closed.admitted]
            self.found.waits_s += [commit.at_s - one.announced_at_s for one in closed.admitted]
            self.found.reasons[commit.reason] = self.found.reasons.get(commit.reason, 0) + 1
        self.sent -= sum(refused.manifest.tokens for refused in closed.rejected)
        record_seq = self.timeline.next_seq()
        read_by = self.read_by(commit, record_seq, _digest(_version_of(commit)))
        self.decide(events.Committed(now_s, record_seq))
        for learner in self.learners:
            learner.hear_of_record(read_by(learner.name, learner.incarnation))


def _version_of(commit: Commit) -> int:
    return commit.state.version + (commit.what == "version")


class _Work:
    """The steps and tokens that a learner's trace allows by a time, and the time of a step."""

    def __init__(self, worker: PlannedLearner) -> None:
        trace = worker.trace
        lengths_s = np.diff(np.append(trace.times_s, trace.horizon_s))
        trains = trace.shares > 0
        self._times_s = trace.times_s.tolist()
        self._steps = (np.cumsum(lengths_s * trains) - lengths_s * trains) / worker.step_s
        self._steps_list = self._steps.tolist()
        work = lengths_s * trace.shares
        self._tokens = ((np.cumsum(work) - work) * worker.step_tokens / worker.step_s).tolist()
        self._shares = trace.shares.tolist()
        self._worker = worker

    def at(self, now_s: float) -> tuple[int, float]:
        """Returns (whole steps, tokens) that the trace allows from 0 to `now_s`."""
        index = bisect_right(self._times_s, now_s) - 1
        share = self._shares[index]
        steps = (now_s - self._times_s[index]) / self._worker.step_s if share else 0.0
        tokens = self._tokens[index] + steps * share * self._worker.step_tokens
        return int(self._steps_list[index] + steps + 1e-6), tokens

    def when(self, steps: int) -> float:
        """Returns the time at which this number of steps is done; `NEVER_S` if it never is."""
        index = int(np.searchsorted(self._steps, steps - 1e-6)) - 1
        end_s = self._times_s[index] + (steps - self._steps_list[index]) * self._worker.step_s
        return end_s if index >= 0 and self._shares[index] else NEVER_S


class _Learner:
    """One simulated learner over all of its incarnations: gives its core the steps of its trace.

    Attributes:
        work: the steps and tokens that the learner's trace allows.
        state: the core's state; None while the learner is dead.
        incarnation: sequence of the learner's last join; 0 before the first.
    """

    def __init__(
        self,
        name: str,
        worker: PlannedLearner,
        owner: _PlannedOwner,
        rules: SyncRules,
        rng: np.random.Generator,
    ) -> None:
        self.name = name
        self.work = _Work(worker)
        self.state: sync.State | None = None
        self.incarnation = 0
        self._worker, self._owner, self._rules, self._rng = worker, owner, rules, rng
        self._timeline = owner.timeline
        self._fed_steps, self._fed_tokens = 0, 0.0
        self._unannounced = 0
        self._waiting = False
        self._opened = 0
        self._going_on: tuple[Carried, ...] = ()
        self._plan_lives()

    def _plan_lives(self) -> None:
        """Schedules the learner's joins and deaths, and the times at which it counts as silent.

        A learner is silent from `quorum.liveness_timeout_s` into a stop until it trains again.
        """
        trace = self._worker.trace
        silent_s = self._owner.rules.quorum.liveness_timeout_s
        self._timeline.at(0.0, self._join)
        times_s = [*trace.times_s.tolist(), trace.horizon_s]
        stands = [share == 0 for share in trace.shares.tolist()]
        for (begins_s, ends_s), still in zip(pairwise(times_s), stands, strict=True):
            if not still:
                continue
            if ends_s - begins_s > silent_s:
                self._timeline.at(begins_s + silent_s, self._be_heard, False)
                self._timeline.at(ends_s, self._be_heard, True)
            # A trace drops the step in progress: a death comes after the last whole step.
            died_s = [at_s for at_s in trace.deaths_s if begins_s <= at_s < ends_s]
            if died_s:
                self._timeline.at(died_s[0], self._die)
                self._timeline.at(ends_s, self._join)

    def _join(self) -> None:
        self.incarnation = self._timeline.next_seq()
        start = self._owner.join(self.name, self.incarnation)
        self.state = carry(self._rules, sync.begin(self._rules, (start,)), self._going_on)
        self._fed_steps, self._fed_tokens = self.work.at(self._timeline.now_s)
        self._unannounced = self._opened = 0
        self._waiting = False
        self._plan_boundary()

    def _die(self) -> None:
        self.feed()
        self.count_tokens(kept=False)
        self._going_on = self._snapshot()
        self.state = None

    def _snapshot(self) -> tuple[Carried, ...]:
        """Returns the work of the newest snapshot, which the present incarnation has not announced.

        It is at most `snapshot_steps` old.
        """
        if self.state is None or not self._worker.snapshot_steps:
            return ()
        (unsent,) = snapshot(self.state)
        again = bool(unsent.flying.steps)
        steps = unsent.work.steps + unsent.flying.steps
        tokens = unsent.work.tokens + unsent.flying.tokens
        late = min(steps, int(self._rng.integers(self._worker.snapshot_steps + 1)))
        left = steps - late
        return (Carried(Work(left, tokens * left // max(1, steps)), again),)

    def count_tokens(self, *, kept: bool) -> None:
        """Adds the tokens of the present incarnation to the owner's totals.

        Args:
            kept: whether tokens that are not announced yet count as not lost: True at the end of
                the simulation, False at the learner's death.
        """
        if self.state is None:
            return
        self._owner.trained += self.state.done.tokens
        if kept:
            unsent = sync.unsent_of(self.state, self.state.fragments[0]).tokens
            self._owner.sent += unsent + self._unannounced

    def _be_heard(self, live: bool) -> None:
        now_s = self._timeline.now_s
        self._owner.decide(events.Liveness(now_s, self.name, self.incarnation, live))

    def _boundary(self, incarnation: int) -> None:
        if self.state is not None and self.incarnation == incarnation:
            self.feed()
            self._plan_boundary()

    def feed(self) -> None:
        """Gives the core the steps trained since the last call; none if the learner waited."""
        if self.state is None:
            return
        steps, tokens = self.work.at(self._timeline.now_s)
        if self._waiting:
            self._fed_steps, self._fed_tokens = steps, tokens
        taken, over = steps - self._fed_steps, round(tokens - self._fed_tokens)
        self._fed_steps = steps
        self._fed_tokens += over
        if self._opened:
            self._tell(RoundOpened(0, self._opened))
            self._opened = 0
        state = self._tell(Stepped(self._timeline.now_s, over, taken))
        self._waiting = sync.must_wait(self._rules, state)

    def _plan_boundary(self) -> None:
        """Schedules the step boundary at which the fragment's next update is due.

        Schedules nothing while an update is in flight.
        """
        assert self.state is not None
        fragment = self.state.fragments[0]
        if fragment.in_flight is None:
            opened = fragment.open_version > fragment.version and not self._rules.lockstep
            least = fragment.due_steps
            if opened:
                least = min(least, self._rules.min_steps)
            steps = least - sync.unsent_of(self.state, fragment).steps
            due_s = self.work.when(self._fed_steps + max(1, steps))
            self._timeline.at(due_s, self._boundary, self.incarnation)

    def _tell(self, event: Event) -> sync.State:
        assert self.state is not None
        self.state, effects = sync.step(self._rules, self.state, event)
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case Adopt(ready):
                    late_s = self._timeline.now_s - ready.made_at_s
                    self._owner.found.adoptions_s.append(late_s)
        return self.state

    def _send(self, send: Send) -> None:
        manifest = self._owner.manifest(self.name, self.incarnation, send, 0, self._worker.step_s)
        self._unannounced = send.tokens
        upload_s = self._worker.upload_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
        self._timeline.after(upload_s, self._announce, manifest)

    def _announce(self, manifest: wire.Manifest) -> None:
        if self.state is None or self.incarnation != manifest.incarnation:
            return
        self._unannounced = 0
        self._owner.sent += manifest.tokens
        self.feed()
        self._tell(Published(self._timeline.now_s, 0, manifest.seq))
        self._owner.announce(manifest)

    def hear_of_round(self, version: int) -> None:
        """Tells the learner that the round that makes `version` is open.

        Its core gets the event at once if an update is in flight, else at the next step boundary.
        """
        if self.state is None:
            return
        if self.state.fragments[0].in_flight is None:
            self._opened = version
            self._look()
        else:
            self.feed()
            self._tell(RoundOpened(0, version))

    def hear_of_record(self, ready: Ready) -> None:
        """Tells the learner of a record: its core gets the event after the delta's download."""
        self._timeline.after(self._worker.download_s, self._adopt, self.incarnation, ready)

    def _adopt(self, incarnation: int, ready: Ready) -> None:
        """Gives the core a version that has arrived, to be adopted at the next step boundary."""
        if self.state is None or self.incarnation != incarnation:
            return
        flying = self.state.fragments[0].in_flight
        if flying and ready.resolved_seq < flying.seq and not self._rules.overwrite:
            # The core needs no event until a newer record resolves the update in flight.
            return
        self._tell(ready)
        self._look()

    def _look(self) -> None:
        if self._waiting:
            self._boundary(self.incarnation)
        else:
            steps, _ = self.work.at(self._timeline.now_s)
            self._timeline.at(self.work.when(steps + 1), self._boundary, self.incarnation)
