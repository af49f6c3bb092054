"""A run in virtual time, in one process: the system's cores, kernels and merge, without its IO.

Learners run `diloco.learner.core.sync` over a `Replica`, fragments `diloco.aggregator.core` over
`FragmentArrays`, as the daemons do; only bus, store and clock are replaced, by a queue of calls
ordered by virtual time. A full-speed step takes a second. So the outer settings can be swept in
a fraction of the time that processes would need, with speeds and latencies as chosen.

Learners may be killed, come back and join late (`LifeSpan`). A killed learner loses what is unsent,
and begins its next life as a daemon does: with the newest views, the data behind its last manifest,
and the inner optimizer of its last checkpoint, if it has one.

Learners train on JAX's default device, aggregators merge on the CPU, as in a real run. What is to
happen is data (bound methods and their arguments), so that a world can be kept in a file between
two pieces of a run (`bench/large.py`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from diloco.aggregator.arrays import merge
from diloco.aggregator.arrays.fragment import FragmentArrays, Payload
from diloco.aggregator.core import events, rounds
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.events import AskCut, Commit, Effect, Fetch, Ignored, Merge, OpenRound
from diloco.aggregator.core.updates import UpdateId, update_id
from diloco.aggregator.stop_and_end import NewestRecord, stop_reason
from diloco.common.process import cores
from diloco.common.process.config import RunSettings
from diloco.common.protocol import shards, wire
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.errors import DivergedError
from diloco.common.protocol.layout import Layout
from diloco.learner.core import sync
from diloco.learner.core.events import (
    Adopt,
    Event,
    Finished,
    Published,
    Ready,
    RoundOpened,
    Send,
    Stepped,
    Stop,
    sync_rules,
)
from diloco.learner.synchronizer import Losses
from diloco.learner.task import Batch, Params, Task, held_out_loss
from diloco.learner.tensors import tree
from diloco.learner.tensors.checkpoint import copied
from diloco.learner.tensors.inner_step import InnerStep, make_inner_step
from diloco.learner.tensors.send_and_adopt import Replica
from diloco.learner.tensors.send_and_adopt_kernels import vector_of
from diloco.plan.virtual_time import Timeline, VirtualFragment


class LifeSpan(NamedTuple):
    """A learner lives from one virtual time to another; the end is a SIGKILL."""

    from_s: float = 0.0
    until_s: float = math.inf


ALWAYS = (LifeSpan(),)
# Virtual time at which a run begins: to the machine, a time of 0 means never.
BEGAN_S = 1.0


class Weather(NamedTuple):
    """The speeds, latencies and failures that a run meets.

    Attributes:
        speeds: shares of full speed, by learner.
        latency_steps: steps that a message travels.
        jitter: of a step's time.
        lives: of each learner, in order and apart; empty: all live always.
        checkpoint_steps: own steps between two checkpoints of the inner optimizer; 0 for none.
        stop_steps: the run is stopped once so many inner steps were taken that are not lost, by
            all learners together; 0: its settings say when.
        look_steps: inner steps of all learners between two looks at the held-out loss; 0: none.
    """

    speeds: tuple[float, ...]
    latency_steps: float = 0.5
    jitter: float = 0.05
    lives: tuple[tuple[LifeSpan, ...], ...] = ()
    checkpoint_steps: int = 60
    stop_steps: int = 0
    look_steps: int = 0


class RunOutcome(NamedTuple):
    """The result of a run.

    Attributes:
        loss: of the last versions, on held-out data.
        steps: inner steps a learner, also those that were lost.
        lost: share of all inner steps that died with a learner, in a mean fragment.
        tokens: merged, in a mean fragment.
        versions: of all fragments.
        inputs: updates a version; `staleness`: their mean.
        took_s: virtual time until the run's stop.
        looks: (inner steps of all learners, held-out loss) on the way.
        credited: steps of each learner that were credited and merged, of all fragments together.
    """

    loss: float
    steps: float
    lost: float
    tokens: float
    versions: int
    inputs: float
    staleness: float
    took_s: float
    looks: tuple[tuple[int, float], ...] = ()
    credited: Mapping[str, int] = Counter()


class Begun(NamedTuple):
    """The state with which every loop begins: the created parameters, and the inner step."""

    params: Params
    inner_step: InnerStep


def first(task: Task, seed: int) -> Begun:
    """The task's first parameters from a seed."""
    return Begun(jax.jit(task.init)(jax.random.key(seed)), make_inner_step(task))


# Asked between two steps whether to leave the rest for later.
Pause = Callable[[], bool]


def never() -> bool:
    """No pause."""
    return False


class Start(NamedTuple):
    """The task, layout and parameters that runs of one task share, so that they compile once."""

    task: Task
    layout: Layout
    params: Begun


def begin(settings: RunSettings, task: Task) -> Start:
    """The task's layout under a run's settings, and first parameters of the run's seed."""
    return Start(task, tree.task_layout(task, settings.sync), first(task, settings.run.seed))


def emulate(settings: RunSettings, start: Start, weather: Weather) -> RunOutcome:
    """Train a run to its end."""
    outcome = World(settings, start, weather).run()
    assert outcome is not None
    return outcome


def _merging() -> Any:
    """Arrays made within this are on the CPU."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


class VirtualOwner(VirtualFragment):
    """The aggregator of one fragment, which merges tensors."""

    def __init__(
        self, world: "World", rules: formulas.FragmentRules, arrays: FragmentArrays
    ) -> None:
        super().__init__(rules, world.time, shards.digest(arrays.view))
        self.world, self.arrays = world, arrays
        self.payloads: dict[UpdateId, Payload] = {}
        self.tokens = 0
        self.inputs: list[int] = []
        self.credited = Counter[str]()

    def perform(self, effect: Effect) -> None:
        """Read, merge and make versions at once; only messages take time."""
        world = self.world
        match effect:
            case Fetch(update):
                world.later(self._fetched, update)
            case OpenRound(version):
                world.tell_all(RoundOpened(self.rules.fragment, version))
            case Merge(admitted):
                payload = self.payloads.pop(update_id(admitted.manifest))
                with _merging():
                    self.arrays.merge(payload, admitted)
            case AskCut():
                # Nothing is on its way to the machine: what is announced, it was told.
                self.decide(events.CutKnown(world.time.now_s, self.state.seen_seq))
            case Commit():
                self._commit(effect)
            case Ignored(learner, reason, detail):
                raise AssertionError((learner, reason, detail))

    def _fetched(self, update: UpdateId) -> None:
        self.decide(events.Fetched(self.world.time.now_s, update, self.payloads[update].norm))

    def _commit(self, commit: Commit) -> None:
        world, state, settings = self.world, commit.state, self.world.settings
        assert not state.rejected, state.rejected
        digest, payload = state.view_digest, None
        if commit.what == "version":
            part = rounds.step_share(
                state,
                participation=settings.outer.participation,
                centered=self.arrays.grid.centered,
            )
            with _merging():
                made = self.arrays.close_round(state.admitted, part)
            self.inputs += [taken.staleness for taken in state.admitted]
            for taken in state.admitted:
                self.tokens += taken.credit.tokens
                self.credited[taken.manifest.learner] += taken.credit.steps
            digest = made.view_digest
            payload = _decoded(world.settings, made.delta, self.arrays.grid.size)
            self.made(digest)
        record_seq = world.time.next_seq()
        read_by = self.read_by(commit, record_seq, digest)
        for learner in world.learners.values():
            world.tell(learner, read_by(learner.name, learner.incarnation), payload)
        self.decide(events.Committed(world.time.now_s, record_seq))
        world.watch()


@dataclass
class _VirtualLearner:
    """One life of a learner: `learner.synchronizer` with virtual time for its clock."""

    world: "World"
    name: str
    incarnation: int
    speed: float
    replica: Replica
    optimizer_state: Any
    state: sync.State
    position: int = 0
    batches: Iterator[Batch] | None = None
    steps: int = 0
    dead: bool = False
    waiting: bool = False
    payloads: dict[tuple[int, int], Encoded | None] = field(default_factory=dict)
    losses: Losses = field(default_factory=Losses)
    loss: jax.Array | None = None

    def step(self) -> None:
        world, task = self.world, self.world.start.task
        if self.state.stopping or self.dead:
            return
        if self.batches is None:
            self.batches = task.batches(self.name, self.position)
        clock = np.int32(sync.clock(world.sync_rules, self.state))
        self.replica.trained, self.optimizer_state, outcome = world.start.params.inner_step(
            self.replica.trained, self.optimizer_state, next(self.batches), clock
        )
        self.losses.stepped(None if self.loss is None else float(self.loss), outcome.loss)
        self.loss = outcome.loss
        self.position += 1
        world.steps += 1
        self.steps += 1
        every = world.weather.checkpoint_steps
        if every and self.steps % every == 0:
            world.checkpoints[self.name] = copied(self.optimizer_state)
        self._exchange(task.tokens_per_batch, 1)
        world.look()
        world.watch()
        self._go_on()

    def hear(self, event: Event, payload: Encoded | None) -> None:
        if self.dead:
            return
        if isinstance(event, Ready):
            self.payloads[event.fragment, event.record_seq] = payload
        self.state, _ = sync.step(self.world.sync_rules, self.state, event)
        if self.waiting or self.state.stopping:
            self._exchange(0, 0)
        if self.waiting:
            self._go_on()

    def die(self) -> None:
        """SIGKILL: what is not announced is lost; all know after the liveness timeout."""
        world = self.world
        if world.stopped:
            return
        self.dead = True
        world.lost += sum(sync.unsent(self.state).values()) / len(self.state.fragments)
        silent_s = world.settings.quorum.liveness_timeout_s
        world.time.after(silent_s, world.silent, self.name, self.incarnation)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"batches": None}

    def _go_on(self) -> None:
        self.waiting = sync.must_wait(self.world.sync_rules, self.state)
        if not self.waiting:
            self.world.time.after(self.world.step_s(self.speed), self.step)

    def _exchange(self, tokens: int, steps: int) -> None:
        stepped = Stepped(self.world.time.now_s, tokens, steps)
        self.state, effects = sync.step(self.world.sync_rules, self.state, stepped)
        for effect in effects:
            match effect:
                case Adopt(ready, resolved, blended):
                    fragment = ready.fragment
                    rows = self.payloads.pop((fragment, ready.record_seq))
                    delta = None if rows is None else self.replica.place(fragment, rows)
                    self.replica.adopt(fragment, delta, resolved=resolved, blended=blended)
                case Send():
                    self._send(effect)
                case Finished(fragments):
                    self.world.finished(self, fragments)

    def _send(self, send: Send) -> None:
        world, owner = self.world, self.world.owners[send.fragment]
        try:
            loss = self.losses.mean(send.steps)()
        except DivergedError:
            self.die()
            return
        rows = self.replica.collect(send.fragment, self.replica.send(send.fragment))
        parts: tuple[Encoded, ...] = (Encoded(rows.scales, rows.codes.reshape(-1)),)
        honest = owner.manifest(
            self.name, self.incarnation, send, self.position, 1 / self.speed, loss
        )
        manifest, parts = world.forge(honest, parts)
        with _merging():
            norms_S = merge.segment_norms(owner.arrays.grid, world.settings.sync.codec, parts)
        payload = Payload(parts, norms_S, float(np.sqrt(np.square(norms_S).sum())))
        owner.payloads[update_id(manifest)] = payload
        world.time.after(world.travels_s(self.name), self._arrive, manifest)

    def _arrive(self, manifest: wire.Manifest) -> None:
        """A manifest is on the tape; who died before is not heard."""
        if self.dead:
            return
        world = self.world
        world.positions[self.name] = manifest.position
        published = Published(world.time.now_s, manifest.fragment, manifest.seq)
        self.state, _ = sync.step(world.sync_rules, self.state, published)
        world.owners[manifest.fragment].announce(manifest)


class World:
    """Virtual time, and everybody in it."""

    owner: ClassVar[type[VirtualOwner]] = VirtualOwner

    def __init__(self, settings: RunSettings, start: Start, weather: Weather) -> None:
        self.settings, self.start, self.weather = settings, start, weather
        self.time = Timeline(BEGAN_S)
        self.sync_rules = sync_rules(settings.sync)
        self.stopped = False
        self._rng = np.random.default_rng(settings.run.seed)
        self.owners = [self._owner(f.index) for f in start.layout.fragments]
        self.learners: dict[str, _VirtualLearner] = {}
        self.checkpoints: dict[str, Any] = {}
        self.positions: dict[str, int] = {}
        self.steps = 0
        self.lost = 0.0
        self.stopped_at_s = 0.0
        self.looks: list[tuple[int, float]] = []
        self._schedule_lives()

    def run(self, pause: Pause = never) -> RunOutcome | None:
        """Train to the end; None if it has paused before, and is to go on."""
        while not all(owner.state.final for owner in self.owners):
            if pause():
                return None
            self.time.advance()
        versions = sum(owner.state.version for owner in self.owners)
        staleness = [s for owner in self.owners for s in owner.inputs]
        return RunOutcome(
            loss=held_out_loss(self.start.task, self.view()),
            steps=self.steps / len(self.weather.speeds),
            lost=self.lost / self.steps,
            tokens=float(np.mean([owner.tokens for owner in self.owners])),
            versions=versions,
            inputs=len(staleness) / versions,
            staleness=float(np.mean(staleness)),
            took_s=self.stopped_at_s - BEGAN_S,
            looks=tuple(self.looks),
            credited=sum((owner.credited for owner in self.owners), Counter[str]()),
        )

    def forge(
        self, manifest: wire.Manifest, parts: tuple[Encoded, ...]
    ) -> tuple[wire.Manifest, tuple[Encoded, ...]]:
        """The manifest and codes that a learner sends in place of these; here the same."""
        return manifest, parts

    def travels_s(self, name: str) -> float:  # noqa: ARG002 - a world may have who is late
        """How long an announcement of a learner's is on its way."""
        return self.weather.latency_steps

    def later(self, call: Callable[..., None], *args: Any) -> None:
        self.time.after(self.weather.latency_steps, call, *args)

    def step_s(self, speed: float) -> float:
        return (1 + self.weather.jitter * float(self._rng.uniform(-1, 1))) / speed

    def tell(self, learner: _VirtualLearner, event: Event, payload: Encoded | None = None) -> None:
        self.later(learner.hear, event, payload)

    def tell_all(self, event: Event) -> None:
        for learner in self.learners.values():
            self.tell(learner, event)

    def finished(self, learner: _VirtualLearner, fragments: tuple[int, ...]) -> None:
        self.later(self._finished, learner.name, learner.incarnation, fragments)

    def _finished(self, name: str, incarnation: int, fragments: tuple[int, ...]) -> None:
        seq = self.time.next_seq()
        for fragment in fragments:
            finished = events.Finished(self.time.now_s, seq, name, incarnation)
            self.owners[fragment].decide(finished)

    def look(self) -> None:
        """Note the held-out loss of the newest versions, if it is time."""
        every = self.weather.look_steps
        if every and self.steps % every == 0:
            self.looks.append((self.steps, held_out_loss(self.start.task, self.view())))

    def watch(self) -> None:
        """Stop the run when the conductor would, or after the steps that were asked for."""
        if self.stopped or not (self._has_its_steps() or self._stops()):
            return
        self.stopped = True
        self.stopped_at_s = self.time.now_s
        self.later(self._say_stop)
        self.tell_all(Stop())

    def _say_stop(self) -> None:
        seq = self.time.next_seq()
        for owner in self.owners:
            owner.decide(events.Stopped(self.time.now_s, seq))

    def _owner(self, fragment: int) -> VirtualOwner:
        settings, layout = self.settings, self.start.layout
        view = vector_of(layout, fragment, tree.by_name(self.start.params.params))
        arrays = FragmentArrays.from_view(settings, layout, fragment, view, cores.available())
        return self.owner(self, formulas.fragment_rules(settings, layout, fragment), arrays)

    def _has_its_steps(self) -> bool:
        stop_steps = self.weather.stop_steps
        return bool(stop_steps) and self.steps - self.lost >= stop_steps

    def _stops(self) -> bool:
        newest = {owner.rules.fragment: _newest(owner) for owner in self.owners}
        return stop_reason(self.settings, newest) is not None

    def silent(self, name: str, incarnation: int) -> None:
        """Tell the aggregators that a life is over; who has begun another is not meant."""
        for owner in self.owners:
            owner.decide(events.Liveness(self.time.now_s, name, incarnation, False))

    def _schedule_lives(self) -> None:
        speeds = self.weather.speeds
        for index, speed in enumerate(speeds):
            for life in self.weather.lives[index] if self.weather.lives else ALWAYS:
                first_s = BEGAN_S + life.from_s + index / len(speeds)
                self.time.at(first_s, self._live, index, speed, life.until_s)

    def _live(self, index: int, speed: float, until_s: float) -> None:
        """Begin a life; none begins once the run stops."""
        if self.stopped:
            return
        learner = self._learner(f"learner-{index}", speed)
        self.learners[learner.name] = learner
        learner.step()
        if until_s < math.inf:
            self.time.at(BEGAN_S + until_s, learner.die)

    def _learner(self, name: str, speed: float) -> _VirtualLearner:
        settings, start = self.settings, self.start
        incarnation, position = self.time.next_seq(), self.positions.get(name, 0)
        starts = [owner.join(name, incarnation) for owner in self.owners]
        replica = self.make_replica()
        checkpoint = self.checkpoints.get(name)
        fresh = checkpoint is None
        return _VirtualLearner(
            world=self,
            name=name,
            incarnation=incarnation,
            speed=speed,
            replica=replica,
            optimizer_state=start.task.optimizer.init(replica.trained)
            if fresh
            else copied(checkpoint),
            state=sync.begin(sync_rules(settings.sync), tuple(starts)),
            position=position,
        )

    def make_replica(self) -> Replica:
        views = [owner.arrays.view for owner in self.owners]
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._like())
        return Replica(self.settings.sync, self.start.layout, like, [v.copy() for v in views])

    def _like(self) -> Params:
        return self.start.params.params

    def view(self) -> Params:
        return self.make_replica().trained


def _newest(owner: VirtualOwner) -> NewestRecord:
    state = owner.state
    return NewestRecord(
        version=state.version,
        record_seq=state.record_seq,
        global_step=state.global_step,
        tokens=owner.tokens,
        final=state.final,
    )


def _decoded(settings: RunSettings, delta: bytes, size: int) -> Encoded:
    section = settings.sync
    return shards.unpack_delta(delta, codec=section.delta_codec, count=size, block=section.block)
