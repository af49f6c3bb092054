"""The rounds of one fragment in virtual time, decided by the programs that run in production.

The aggregator's side is `aggregator/core/`, the learner's `learner/sync.py`; what is simulated is
everything between them: steps, links, the merge, and learners that come and go. All fragments of a
run have the same rounds at other offsets, so one stands for all.
Pure: randomness comes in as a generator, times are seconds since the beginning.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from diloco.aggregator.core import events
from diloco.aggregator.core.policy import FragmentRules, fragment_rules
from diloco.common import names, slices, wire
from diloco.common.config import RunSettings
from diloco.common.layout import Tensor, make_layout
from diloco.common.shards import shard_bytes
from diloco.learner import sync
from diloco.plan.outages import Trace
from diloco.plan.owner import NEVER_S, Aggregator, Listeners, Owner, Rounds, Timeline, digest_of

# No two uploads take the same time: uniformly this much more or less.
JITTER = 0.2
_ENDLESS = 1 << 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """A learner as its rounds see it; times in seconds.

    Attributes:
        step_s: of one inner step over `step_tokens` tokens, with all of its slices.
        upload_s: from sending an update to its announcement.
        download_s: from a record to its delta, decoded.
        trace: when it trains.
    """

    step_s: float
    step_tokens: int
    upload_s: float
    download_s: float
    trace: Trace


def planned_rules(settings: RunSettings) -> FragmentRules:
    """The run's rules for a fragment that is as small as can be, in a run that does not end."""
    sizes = {"fragments": 1, "shard_elements": 1024}
    settings = settings.model_copy(update={"sync": settings.sync.model_copy(update=sizes)})
    block = settings.sync.block
    tensor = Tensor(name="w", shape=(2 * block,), dtype="float32")
    rules = fragment_rules(settings, make_layout([tensor], fragments=1, block=block), 0)
    return replace(rules, steps=_ENDLESS)


def simulate(
    settings: RunSettings,
    workers: list[Worker],
    *,
    aggregator: Aggregator,
    horizon_s: float,
    rng: np.random.Generator,
) -> Rounds:
    """The rounds of one fragment until `horizon_s`.

    Args:
        settings: of the run.
        workers: its learners, all there at the beginning.
        aggregator: how fast it reads, merges and stores.
        horizon_s: no longer than the workers' traces.
        rng: of the uploads' times.
    """
    line = _Line(settings, workers, aggregator, horizon_s, rng)
    line.run()
    return line.result()


class _Work:
    """Steps and tokens of a trace, as functions of time and back."""

    def __init__(self, worker: Worker) -> None:
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
        """(whole steps, tokens) by then."""
        index = bisect_right(self._times_s, now_s) - 1
        share = self._shares[index]
        steps = (now_s - self._times_s[index]) / self._worker.step_s if share else 0.0
        tokens = self._tokens[index] + steps * share * self._worker.step_tokens
        return int(self._steps_list[index] + steps + 1e-6), tokens

    def when(self, steps: int) -> float:
        """When so many steps are done."""
        index = int(np.searchsorted(self._steps, steps - 1e-6)) - 1
        end_s = self._times_s[index] + (steps - self._steps_list[index]) * self._worker.step_s
        return end_s if index >= 0 and self._shares[index] else NEVER_S


class _Learner:
    """One learner: its core, and the work that it has fed to it."""

    def __init__(self, name: str, worker: Worker, manifest: wire.Manifest) -> None:
        self.name = name
        self.worker = worker
        self.work = _Work(worker)
        self.manifest = manifest
        self.state: sync.State | None = None
        self.incarnation = 0
        self.fed_steps = 0
        self.fed_tokens = 0.0
        self.unannounced_tokens = 0
        self.waiting = False
        self.opened = 0


class _Line:
    """The line of events; effects of the two cores become events of the other."""

    def __init__(
        self,
        settings: RunSettings,
        workers: list[Worker],
        aggregator: Aggregator,
        horizon_s: float,
        rng: np.random.Generator,
    ) -> None:
        self._rules = planned_rules(settings)
        self._sync = sync.sync_rules(settings.sync)
        self._rng = rng
        self._timeline = Timeline(horizon_s)
        self._owner = Owner(
            self._rules,
            aggregator,
            settings.sync.snapshot_interval_versions,
            self._timeline,
            Listeners(self._opened, self._committed, self._rejected),
        )
        manifests = _manifest(self._rules)
        self._learners = {
            f"learner-{n}": _Learner(f"learner-{n}", worker, manifests)
            for n, worker in enumerate(workers)
        }
        self._trained = self._sent = 0.0

    def run(self) -> None:
        for learner in self._learners.values():
            self._plan_life(learner)
        self._timeline.run()

    def result(self) -> Rounds:
        found, possible = self._owner.found, 0.0
        for learner in self._learners.values():
            self._feed(learner)
            self._let_go(learner, kept=True)
            possible += learner.work.at(self._timeline.now_s)[1]
        found.kept = self._sent / self._trained if self._trained else 1.0
        found.utilization = min(1.0, self._trained / possible) if possible else 1.0
        return found

    # Lives

    def _plan_life(self, learner: _Learner) -> None:
        """Its joins and deaths, and the silences in which nobody waits for it."""
        trace = learner.worker.trace
        deaths = set(trace.deaths_s)
        self._timeline.at(0.0, self._join, learner)
        times_s = [*trace.times_s.tolist(), trace.horizon_s]
        stands = [share == 0 for share in trace.shares.tolist()]
        for (begins_s, ends_s), still in zip(pairwise(times_s), stands, strict=True):
            if not still:
                continue
            if ends_s - begins_s > self._rules.quorum.liveness_timeout_s:
                self._timeline.at(
                    begins_s + self._rules.quorum.liveness_timeout_s, self._heard, learner, False
                )
                self._timeline.at(ends_s, self._heard, learner, True)
            # A trace takes the step under way back: a death lies within the standstill.
            died = [death for death in deaths if begins_s <= death < ends_s]
            if died:
                self._timeline.at(died[0], self._die, learner)
                self._timeline.at(ends_s, self._join, learner)

    def _join(self, learner: _Learner) -> None:
        state = self._owner.state
        start = sync.Start(state.version, digest_of(state.version), max(1, state.record_seq), 0)
        learner.state = sync.begin(self._sync, (start,))
        learner.fed_steps, learner.fed_tokens = learner.work.at(self._timeline.now_s)
        learner.unannounced_tokens = 0
        learner.waiting, learner.opened = False, 0
        learner.incarnation = self._owner.join(learner.name)
        self._plan_boundary(learner)

    def _die(self, learner: _Learner) -> None:
        self._feed(learner)
        self._let_go(learner, kept=False)
        learner.state = None

    def _let_go(self, learner: _Learner, *, kept: bool) -> None:
        """Account for the work of a life that is not on the tape."""
        if learner.state is None:
            return
        self._trained += learner.state.done.tokens
        if kept:
            unsent = sync.unsent_of(learner.state, learner.state.fragments[0]).tokens
            self._sent += unsent + learner.unannounced_tokens

    def _heard(self, learner: _Learner, live: bool) -> None:
        now_s = self._timeline.now_s
        self._owner.decide(events.Liveness(now_s, learner.name, learner.incarnation, live))

    # The learner's side

    def _boundary(self, learner: _Learner, incarnation: int) -> None:
        if learner.state is not None and learner.incarnation == incarnation:
            self._feed(learner)
            self._plan_boundary(learner)

    def _feed(self, learner: _Learner) -> None:
        """Take the steps that were trained since the last ones."""
        if learner.state is None:
            return
        steps, tokens = learner.work.at(self._timeline.now_s)
        if learner.waiting:
            learner.fed_steps, learner.fed_tokens = steps, tokens
        taken, over = steps - learner.fed_steps, round(tokens - learner.fed_tokens)
        learner.fed_steps = steps
        learner.fed_tokens += over
        if learner.opened:
            self._tell(learner, sync.RoundOpened(0, learner.opened))
            learner.opened = 0
        self._tell(learner, sync.Stepped(self._timeline.now_s, over, taken))
        assert learner.state is not None
        learner.waiting = sync.must_wait(self._sync, learner.state)

    def _plan_boundary(self, learner: _Learner) -> None:
        """Look again when the fragment is due."""
        assert learner.state is not None
        fragment = learner.state.fragments[0]
        if fragment.in_flight is None:
            opened = fragment.open_version > fragment.version and not self._sync.lockstep
            least = fragment.due_steps
            if opened:
                least = min(least, self._sync.min_steps)
            steps = least - sync.unsent_of(learner.state, fragment).steps
            due_s = learner.work.when(learner.fed_steps + max(1, steps))
            self._timeline.at(due_s, self._boundary, learner, learner.incarnation)

    def _tell(self, learner: _Learner, event: sync.Event) -> None:
        assert learner.state is not None
        learner.state, effects = sync.step(self._sync, learner.state, event)
        for effect in effects:
            if isinstance(effect, sync.Send):
                self._send(learner, effect)

    def _send(self, learner: _Learner, send: sync.Send) -> None:
        manifest = _filled(self._rules, learner, send)
        learner.unannounced_tokens = send.tokens
        upload_s = learner.worker.upload_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
        self._timeline.at(self._timeline.now_s + upload_s, self._announce, learner, manifest)

    def _announce(self, learner: _Learner, manifest: wire.Manifest) -> None:
        if learner.state is None or learner.incarnation != manifest.incarnation:
            return
        learner.unannounced_tokens = 0
        self._sent += manifest.tokens
        self._tell(learner, sync.Published(self._timeline.now_s, 0, manifest.seq))
        self._owner.announce(manifest)

    def _opened(self, version: int) -> None:
        """A round is open: whoever has nothing under way looks at its next step boundary."""
        for learner in self._learners.values():
            if learner.state is None:
                continue
            learner.opened = version
            if learner.state.fragments[0].in_flight is None:
                self._look(learner)

    def _committed(self, read_by: Callable[[str, int], sync.Ready]) -> None:
        """A record stands: each learner has its version once the delta is there."""
        for learner in self._learners.values():
            ready = read_by(learner.name, learner.incarnation)
            arrives_s = self._timeline.now_s + learner.worker.download_s
            self._timeline.at(arrives_s, self._adopt, learner, learner.incarnation, ready)

    def _rejected(self, tokens: int) -> None:
        self._sent -= tokens

    def _adopt(self, learner: _Learner, incarnation: int, ready: sync.Ready) -> None:
        """A version has arrived: it takes effect at the next step boundary."""
        if learner.state is None or learner.incarnation != incarnation:
            return
        flying = learner.state.fragments[0].in_flight
        if flying and ready.resolved_seq < flying.seq and not self._sync.overwrite:
            # Nothing follows from it before its update is resolved, by a newer version.
            return
        self._tell(learner, ready)
        self._look(learner)

    def _look(self, learner: _Learner) -> None:
        if learner.waiting:
            self._boundary(learner, learner.incarnation)
        else:
            steps, _ = learner.work.at(self._timeline.now_s)
            at_s = learner.work.when(steps + 1)
            self._timeline.at(at_s, self._boundary, learner, learner.incarnation)


def _manifest(rules: FragmentRules) -> wire.Manifest:
    """A manifest of these rules, for `_filled`."""
    shard = wire.Shard(
        name="update",
        size_bytes=shard_bytes(rules.codec, rules.size, rules.block),
        crc32c=0,
        slices=slices.of_range(0, rules.size, rules.block),
    )
    return wire.Manifest(
        run=rules.run,
        learner="learner-0",
        epoch=rules.epoch,
        incarnation=1,
        seq=1,
        fragment=rules.fragment,
        base_version=0,
        base_digest=digest_of(0),
        layout=rules.layout,
        codec=rules.codec,
        shards=(shard,),
        tokens=1,
        steps=1,
        position=0,
        local_step=0,
        loss=0.0,
        step_time_s=0.0,
        encode_s=0.0,
        upload_s=0.0,
        attempt=0,
        final=False,
    )


def _filled(rules: FragmentRules, learner: _Learner, send: sync.Send) -> wire.Manifest:
    """The manifest that announces what a learner sends."""
    name = names.shard(
        rules.run, learner.name, rules.fragment, rules.epoch, learner.incarnation, send.seq, 0
    )
    shard = learner.manifest.shards[0].model_copy(update={"name": name})
    fields = {
        "learner": learner.name,
        "incarnation": learner.incarnation,
        "seq": send.seq,
        "base_version": send.base_version,
        "base_digest": send.base_digest,
        "shards": (shard,),
        "tokens": max(1, send.tokens),
        "steps": send.steps,
        "step_time_s": learner.worker.step_s,
        "final": send.final,
    }
    return learner.manifest.model_copy(update=fields)
