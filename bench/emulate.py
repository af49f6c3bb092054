"""A run in virtual time, in one process: the system's cores, kernels and merge, without its IO.

Learners run `learner.sync` over a `Replica`, fragments `aggregator.machine` over
`FragmentArrays`, as the daemons do; only bus, store and clock are replaced, by a queue of calls
ordered by virtual time. A full-speed step takes a second. So the outer settings can be swept in
a fraction of the time that processes would need, with speeds and latencies as chosen.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from aggregator import machine, merge, policy
from aggregator.fragment import FragmentArrays, Payload
from bench import loops
from common import names, shards, slices, wire
from common.config import RunSettings
from common.layout import Layout
from common.quantize import Encoded
from common.shards import shard_bytes, shard_ranges
from learner import sync, tree
from learner.adopt import Delta
from learner.delta import make_kernels
from learner.replica import Replica
from learner.task import Batch, Params, Task


class Weather(NamedTuple):
    """What a run meets: learners' speeds, steps that a message travels, jitter of a step's time."""

    speeds: tuple[float, ...]
    latency_steps: float = 0.5
    jitter: float = 0.05


class Outcome(NamedTuple):
    """What a run came to; `steps` are inner steps a learner, `inputs` updates a version."""

    loss: float
    steps: float
    versions: int
    inputs: float
    staleness: float


class Start(NamedTuple):
    """What runs of one task share, so that they compile once."""

    task: Task
    layout: Layout
    params: loops.Start


def begin(settings: RunSettings, task: Task) -> Start:
    """The task's layout under a run's settings, and first parameters of the run's seed."""
    return Start(task, tree.task_layout(task, settings.sync), loops.start(task, settings.run.seed))


def emulate(settings: RunSettings, start: Start, weather: Weather) -> Outcome:
    """Train a run to its end."""
    return _World(settings, start, weather).run()


@dataclass
class _Owner:
    """The aggregator of one fragment."""

    world: "_World"
    rules: policy.FragmentRules
    arrays: FragmentArrays
    state: machine.State
    payloads: dict[machine.UpdateId, Payload] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)

    def take(self, event: machine.Event) -> None:
        self.state, effects = machine.step(self.rules, self.state, event)
        for effect in effects:
            self._perform(effect)
        due_s = machine.deadline(self.rules, self.state)
        if due_s is not None:
            self.world.at(due_s, lambda: self._ring(due_s))

    def _ring(self, due_s: float) -> None:
        if machine.deadline(self.rules, self.state) == due_s:
            self.take(machine.Timer(due_s))

    def _perform(self, effect: machine.Effect) -> None:
        world, fragment = self.world, self.rules.fragment
        match effect:
            case machine.Fetch(update):
                norm = self.payloads[update].norm
                world.later(lambda: self.take(machine.Fetched(world.now_s, update, norm)))
            case machine.OpenRound(version):
                self.arrays.open_round()
                world.tell_all(sync.RoundOpened(fragment, version))
            case machine.Merge(admitted):
                update = machine.UpdateId(*_identity(admitted.manifest))
                self.arrays.merge(self.payloads.pop(update), admitted)
            case machine.Commit():
                self._commit(effect)
            case machine.Ignored(manifest, reason):
                raise AssertionError((manifest, reason))

    def _commit(self, commit: machine.Commit) -> None:
        world, state, rules = self.world, commit.state, self.rules
        assert not state.rejected, state.rejected
        digest, payload, version = state.view_digest, None, state.version
        clock = state.global_step
        if commit.what == "version":
            part = machine.share(state) if world.settings.outer.participation else 1.0
            made = self.arrays.close_round(state.admitted, part)
            self.inputs += [taken.staleness for taken in state.admitted]
            digest, version = made.view_digest, version + 1
            clock = machine.global_step_after(rules, state)
            payload = _decoded(world.settings, made.delta, self.arrays.grid.size)
        record_seq = world.next_seq()
        marks = {(m.learner, m.incarnation): m.seq for m in machine.policy_after(state).marks}
        for learner in world.learners:
            mark = marks.get((learner.name, learner.incarnation), 0)
            ready = sync.Ready(rules.fragment, record_seq, version, digest, clock, mark)
            world.tell(learner, ready, payload)
        self.take(machine.Committed(world.now_s, record_seq, digest))
        world.watch()


@dataclass
class _Learner:
    """One learner: `learner.train.Trainer` with virtual time for its clock."""

    world: "_World"
    name: str
    incarnation: int
    speed: float
    replica: Replica
    optimizer_state: Any
    batches: Iterator[Batch]
    state: sync.State
    position: int = 0
    waiting: bool = False
    payloads: dict[tuple[int, int], Delta | None] = field(default_factory=dict)

    def step(self) -> None:
        world, task = self.world, self.world.start.task
        if self.state.stopping:
            return
        clock = np.int32(sync.clock(world.sync_rules, self.state))
        self.replica.trained, self.optimizer_state, _ = world.start.params.inner_step(
            self.replica.trained, self.optimizer_state, next(self.batches), clock
        )
        self.position += 1
        self._exchange(task.tokens_per_batch, 1)
        self._go_on()

    def hear(self, event: sync.Event, payload: Delta | None) -> None:
        if isinstance(event, sync.Ready):
            self.payloads[event.fragment, event.record_seq] = payload
        self.state, _ = sync.step(self.world.sync_rules, self.state, event)
        if self.waiting or self.state.stopping:
            self._exchange(0, 0)
        if self.waiting:
            self._go_on()

    def _go_on(self) -> None:
        self.waiting = sync.must_wait(self.world.sync_rules, self.state)
        if not self.waiting:
            self.world.after(self.world.step_s(self.speed), self.step)

    def _exchange(self, tokens: int, steps: int) -> None:
        stepped = sync.Stepped(self.world.now_s, tokens, steps)
        self.state, effects = sync.step(self.world.sync_rules, self.state, stepped)
        for effect in effects:
            match effect:
                case sync.Adopt(ready, resolved):
                    payload = self.payloads.pop((ready.fragment, ready.record_seq))
                    self.replica.adopt(ready.fragment, payload, resolved=resolved)
                case sync.Send():
                    self._send(effect)
                case sync.Finished(fragments):
                    self.world.finished(self, fragments)

    def _send(self, send: sync.Send) -> None:
        world, owner = self.world, self.world.owners[send.fragment]
        parts = tuple(Encoded(*map(np.asarray, p)) for p in self.replica.send(send.fragment))
        manifest = _manifest(world, self, send)
        norms_S = merge.segment_norms(owner.arrays.grid, world.settings.sync.codec, parts)
        payload = Payload(parts, norms_S, float(np.sqrt(np.square(norms_S).sum())))
        owner.payloads[machine.UpdateId(*_identity(manifest))] = payload

        def arrive() -> None:
            published = sync.Published(world.now_s, send.fragment, send.seq)
            self.state, _ = sync.step(world.sync_rules, self.state, published)
            owner.take(machine.Announced(world.now_s, world.next_seq(), manifest))

        world.later(arrive)


class _World:
    """Virtual time, and everybody in it."""

    def __init__(self, settings: RunSettings, start: Start, weather: Weather) -> None:
        self.settings, self.start, self.weather = settings, start, weather
        self.now_s = 1.0
        self.sync_rules = sync.sync_rules(settings.sync)
        self.stopped = False
        self._seq = itertools.count(1)
        self._order = itertools.count()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._chance = np.random.default_rng(settings.run.seed)
        self.owners = [self._owner(f.index) for f in start.layout.fragments]
        self.learners = [self._learner(i, s) for i, s in enumerate(weather.speeds)]

    def run(self) -> Outcome:
        for index, learner in enumerate(self.learners):
            self.after(index / len(self.learners), learner.step)
        while not all(owner.state.final for owner in self.owners):
            self.now_s, _, call = heapq.heappop(self._calls)
            call()
        versions = sum(owner.state.version for owner in self.owners)
        staleness = [s for owner in self.owners for s in owner.inputs]
        return Outcome(
            loss=self.start.task.evaluate(self._view()),
            steps=float(np.mean([learner.position for learner in self.learners])),
            versions=versions,
            inputs=len(staleness) / versions,
            staleness=float(np.mean(staleness)),
        )

    def next_seq(self) -> int:
        return next(self._seq)

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (max(when_s, self.now_s), next(self._order), call))

    def after(self, wait_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + wait_s, call)

    def later(self, call: Callable[[], None]) -> None:
        self.after(self.weather.latency_steps, call)

    def step_s(self, speed: float) -> float:
        return (1 + self.weather.jitter * float(self._chance.uniform(-1, 1))) / speed

    def tell(self, learner: _Learner, event: sync.Event, payload: Delta | None = None) -> None:
        self.later(lambda: learner.hear(event, payload))

    def tell_all(self, event: sync.Event) -> None:
        for learner in self.learners:
            self.tell(learner, event)

    def finished(self, learner: _Learner, fragments: tuple[int, ...]) -> None:
        def arrive() -> None:
            seq = self.next_seq()
            for fragment in fragments:
                self.owners[fragment].take(
                    machine.Finished(self.now_s, seq, learner.name, learner.incarnation)
                )

        self.later(arrive)

    def watch(self) -> None:
        """Stop the run once every fragment has all its versions, as the conductor does."""
        if self.stopped or any(machine.has_next(o.rules, o.state) for o in self.owners):
            return
        self.stopped = True
        seq = self.next_seq()
        for owner in self.owners:
            self.later(lambda owner=owner: owner.take(machine.Stopped(self.now_s, seq)))  # type: ignore[misc]
        self.tell_all(sync.Stop())

    def _owner(self, fragment: int) -> _Owner:
        settings, layout = self.settings, self.start.layout
        kernels = make_kernels(
            layout,
            fragment,
            codec=settings.sync.codec,
            delta_codec=settings.sync.delta_codec,
            shard_elements=settings.sync.shard_elements,
        )
        leaves = tree.by_name(self.start.params.trained)
        view = np.asarray(kernels.flatten({name: leaves[name] for name in kernels.names}))
        state = machine.State(
            version=0,
            record_seq=self.next_seq(),
            view_digest=shards.digest(view),
            seen_seq=0,
            members={},
            marks={},
            pending={},
        )
        rules = policy.fragment_rules(settings, layout, fragment)
        return _Owner(
            self, rules, FragmentArrays.from_view(settings, layout, fragment, view), state
        )

    def _learner(self, index: int, speed: float) -> _Learner:
        settings, start = self.settings, self.start
        name, incarnation = f"learner-{index}", self.next_seq()
        for owner in self.owners:
            owner.take(machine.Joined(self.now_s, incarnation, name))
        replica = self._replica()
        starts = [sync.Start(0, o.state.view_digest, o.state.record_seq, 0) for o in self.owners]
        return _Learner(
            world=self,
            name=name,
            incarnation=incarnation,
            speed=speed,
            replica=replica,
            optimizer_state=start.task.optimizer.init(replica.trained),
            batches=start.task.batches(name, 0),
            state=sync.begin(sync.sync_rules(settings.sync), tuple(starts)),
        )

    def _replica(self) -> Replica:
        views = [owner.arrays.view for owner in self.owners]
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._like())
        return Replica(self.settings.sync, self.start.layout, like, [v.copy() for v in views])

    def _like(self) -> Params:
        return self.start.params.trained

    def _view(self) -> Params:
        return tree.join(self._replica().trained, self.start.params.constants)


def _identity(manifest: wire.Manifest) -> tuple[str, int, int]:
    return manifest.learner, manifest.incarnation, manifest.seq


def _decoded(settings: RunSettings, delta: bytes, size: int) -> Delta:
    section = settings.sync
    return Delta(
        shards.unpack_delta(delta, codec=section.delta_codec, count=size, block=section.block)
    )


def _manifest(world: _World, learner: _Learner, send: sync.Send) -> wire.Manifest:
    section, run = world.settings.sync, world.settings.run.name
    ranges = shard_ranges(
        world.owners[send.fragment].rules.size, section.block, section.shard_elements
    )
    entries = tuple(
        wire.Shard(
            name=names.shard(
                run, learner.name, send.fragment, 0, learner.incarnation, send.seq, index
            ),
            size_bytes=shard_bytes(section.codec, stop - start, section.block),
            crc32c=0,
            slices=slices.of_range(start, stop, section.block),
        )
        for index, (start, stop) in enumerate(ranges)
    )
    return wire.Manifest(
        run=run,
        learner=learner.name,
        epoch=0,
        incarnation=learner.incarnation,
        seq=send.seq,
        fragment=send.fragment,
        base_version=send.base_version,
        base_digest=send.base_digest,
        layout=world.start.layout.digest,
        codec=section.codec,
        shards=entries,
        tokens=send.tokens,
        steps=send.steps,
        position=learner.position,
        local_step=learner.position,
        loss=0.0,
        step_time_s=1 / learner.speed,
        encode_s=0.0,
        upload_s=0.0,
        attempt=0,
        final=send.final,
    )
