"""A run in virtual time, in one process: the system's cores, kernels and merge, without its IO.

Learners run `diloco.learner.sync` over a `Replica`, fragments `diloco.aggregator.core` over
`FragmentArrays`, as the daemons do; only bus, store and clock are replaced, by a queue of calls
ordered by virtual time. A full-speed step takes a second. So the outer settings can be swept in
a fraction of the time that processes would need, with speeds and latencies as chosen.

Learners may be killed, come back and join late (`Life`). Who is killed loses what is unsent, and
begins its next life as a daemon does: with the newest views, the data behind its last manifest,
and the inner optimizer of its last checkpoint, if it has one.

Learners train on JAX's default device, aggregators merge on the CPU, as in a real run. What is to
happen is data (bound methods and their arguments), so that a world can be kept in a file between
two pieces of a run (`bench/keep.py`).
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from bench import loops
from diloco.aggregator.arrays import merge
from diloco.aggregator.arrays.fragment import FragmentArrays, Payload
from diloco.aggregator.conductor import Newest, stop_reason
from diloco.aggregator.core import events, machine, memory, policy, rounds
from diloco.aggregator.core.effects import AskCut, Commit, Effect, Fetch, Ignored, Merge, OpenRound
from diloco.aggregator.core.state import State
from diloco.aggregator.core.updates import UpdateId
from diloco.common import cores, names, shards, slices, wire
from diloco.common.codec import Encoded
from diloco.common.config import RunSettings
from diloco.common.layout import Layout
from diloco.common.shards import shard_bytes, shard_ranges
from diloco.learner import sync, tree
from diloco.learner.checkpoint import copied
from diloco.learner.delta import vector_of
from diloco.learner.replica import Replica
from diloco.learner.task import Batch, Params, Task, held_out_loss


class Life(NamedTuple):
    """A learner lives from one virtual time to another; the end is a SIGKILL."""

    from_s: float = 0.0
    until_s: float = math.inf


ALWAYS = (Life(),)
# Virtual time at which a run begins: to the machine, a time of 0 means never.
BEGAN_S = 1.0


class Weather(NamedTuple):
    """What a run meets.

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
    lives: tuple[tuple[Life, ...], ...] = ()
    checkpoint_steps: int = 60
    stop_steps: int = 0
    look_steps: int = 0


class Outcome(NamedTuple):
    """What a run came to.

    Attributes:
        loss: of the last versions, on held-out data.
        steps: inner steps a learner, also those that were lost.
        lost: share of all inner steps that died with a learner, in a mean fragment.
        tokens: merged, in a mean fragment.
        versions: of all fragments.
        inputs: updates a version; `staleness`: their mean.
        took_s: virtual time until the run's stop.
        looks: (inner steps of all learners, held-out loss) on the way.
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
    outcome = World(settings, start, weather).run()
    assert outcome is not None
    return outcome


def _merging() -> Any:
    """Arrays made within this are on the CPU."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


@dataclass
class _Owner:
    """The aggregator of one fragment."""

    world: "World"
    rules: policy.FragmentRules
    arrays: FragmentArrays
    state: State
    payloads: dict[UpdateId, Payload] = field(default_factory=dict)
    tokens: int = 0
    inputs: list[int] = field(default_factory=list)

    def take(self, event: events.Event) -> None:
        self.state, effects = machine.step_at(self.rules, self.state, event, self.world.now_s)
        with _merging():
            for effect in effects:
                self._perform(effect)
        due_s = rounds.deadline(self.rules, self.state)
        if due_s is not None:
            self.world.at(due_s, partial(self._ring, due_s))

    def hear_of(self, update: UpdateId, norm: float) -> None:
        """An update has been read."""
        self.take(events.Fetched(self.world.now_s, update, norm))

    def stop(self, seq: int) -> None:
        """The run's stop message arrived."""
        self.take(events.Stopped(self.world.now_s, seq))

    def _ring(self, due_s: float) -> None:
        if rounds.deadline(self.rules, self.state) == due_s:
            self.take(events.Timer(due_s))

    def _perform(self, effect: Effect) -> None:
        world, fragment = self.world, self.rules.fragment
        match effect:
            case Fetch(update):
                norm = self.payloads[update].norm
                world.later(partial(self.hear_of, update, norm))
            case OpenRound(version):
                world.tell_all(sync.RoundOpened(fragment, version))
            case Merge(admitted):
                update = UpdateId(*_identity(admitted.manifest))
                self.arrays.merge(self.payloads.pop(update), admitted)
            case AskCut():
                # Nothing is on its way to the machine: what is announced, it was told.
                self.take(events.CutKnown(world.now_s, self.state.seen_seq))
            case Commit():
                self._commit(effect)
            case Ignored(learner, reason, detail):
                raise AssertionError((learner, reason, detail))

    def _commit(self, commit: Commit) -> None:
        world, state, rules = self.world, commit.state, self.rules
        assert not state.rejected, state.rejected
        digest, payload, version = state.view_digest, None, state.version
        clock = state.global_step
        if commit.what == "version":
            part = rounds.step_share(state, participation=world.settings.outer.participation)
            made = self.arrays.close_round(state.admitted, part)
            self.inputs += [taken.staleness for taken in state.admitted]
            self.tokens += sum(taken.credit.tokens for taken in state.admitted)
            digest, version = made.view_digest, version + 1
            clock = rounds.global_step_after(rules, state)
            payload = _decoded(world.settings, made.delta, self.arrays.grid.size)
            self.take(events.Made(world.now_s, digest))
        record_seq = world.next_seq()
        marks = {(m.learner, m.incarnation): m.seq for m in memory.policy_after(state).marks}
        for learner in world.learners.values():
            mark = marks.get((learner.name, learner.incarnation), 0)
            merged = [
                taken.manifest.seq
                for taken in state.admitted
                if commit.what == "version"
                and (taken.manifest.learner, taken.manifest.incarnation)
                == (learner.name, learner.incarnation)
            ]
            ready = sync.Ready(
                rules.fragment,
                record_seq,
                version,
                digest,
                clock,
                mark,
                merged_seq=max(merged, default=0),
            )
            world.tell(learner, ready, payload)
        self.take(events.Committed(world.now_s, record_seq))
        world.watch()


@dataclass
class _Learner:
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

    def step(self) -> None:
        world, task = self.world, self.world.start.task
        if self.state.stopping or self.dead:
            return
        if self.batches is None:
            self.batches = task.batches(self.name, self.position)
        clock = np.int32(sync.clock(world.sync_rules, self.state))
        self.replica.trained, self.optimizer_state, _ = world.start.params.inner_step(
            self.replica.trained, self.optimizer_state, next(self.batches), clock
        )
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

    def hear(self, event: sync.Event, payload: Encoded | None) -> None:
        if self.dead:
            return
        if isinstance(event, sync.Ready):
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
        world.after(silent_s, partial(world.silent, self.name, self.incarnation))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"batches": None}

    def _go_on(self) -> None:
        self.waiting = sync.must_wait(self.world.sync_rules, self.state)
        if not self.waiting:
            self.world.after(self.world.step_s(self.speed), self.step)

    def _exchange(self, tokens: int, steps: int) -> None:
        stepped = sync.Stepped(self.world.now_s, tokens, steps)
        self.state, effects = sync.step(self.world.sync_rules, self.state, stepped)
        for effect in effects:
            match effect:
                case sync.Adopt(ready, resolved, blended):
                    fragment = ready.fragment
                    rows = self.payloads.pop((fragment, ready.record_seq))
                    delta = None if rows is None else self.replica.place(fragment, rows)
                    self.replica.adopt(fragment, delta, resolved=resolved, blended=blended)
                case sync.Send():
                    self._send(effect)
                case sync.Finished(fragments):
                    self.world.finished(self, fragments)

    def _send(self, send: sync.Send) -> None:
        world, owner = self.world, self.world.owners[send.fragment]
        rows = self.replica.collect(send.fragment, self.replica.send(send.fragment))
        parts: tuple[Encoded, ...] = (Encoded(rows.scales, rows.codes.reshape(-1)),)
        manifest, parts = world.forge(_manifest(world, self, send), parts)
        with _merging():
            norms_S = merge.segment_norms(owner.arrays.grid, world.settings.sync.codec, parts)
        payload = Payload(parts, norms_S, float(np.sqrt(np.square(norms_S).sum())))
        owner.payloads[UpdateId(*_identity(manifest))] = payload
        world.later(partial(self._arrive, manifest))

    def _arrive(self, manifest: wire.Manifest) -> None:
        """A manifest is on the tape; who died before is not heard."""
        if self.dead:
            return
        world = self.world
        world.positions[self.name] = manifest.position
        published = sync.Published(world.now_s, manifest.fragment, manifest.seq)
        self.state, _ = sync.step(world.sync_rules, self.state, published)
        owner = world.owners[manifest.fragment]
        owner.take(events.Announced(world.now_s, world.next_seq(), manifest))


class World:
    """Virtual time, and everybody in it."""

    def __init__(self, settings: RunSettings, start: Start, weather: Weather) -> None:
        self.settings, self.start, self.weather = settings, start, weather
        self.now_s = BEGAN_S
        self.sync_rules = sync.sync_rules(settings.sync)
        self.stopped = False
        self._seq = 0
        self._order = 0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._rng = np.random.default_rng(settings.run.seed)
        self.owners = [self._owner(f.index) for f in start.layout.fragments]
        self.learners: dict[str, _Learner] = {}
        self.checkpoints: dict[str, Any] = {}
        self.positions: dict[str, int] = {}
        self.steps = 0
        self.lost = 0.0
        self.stopped_at_s = 0.0
        self.looks: list[tuple[int, float]] = []
        self._schedule_lives()

    def run(self, pause: loops.Pause = loops.never) -> Outcome | None:
        """Train to the end; None if it has paused before, and is to go on."""
        while not all(owner.state.final for owner in self.owners):
            if pause():
                return None
            self.now_s, _, call = heapq.heappop(self._calls)
            call()
        versions = sum(owner.state.version for owner in self.owners)
        staleness = [s for owner in self.owners for s in owner.inputs]
        return Outcome(
            loss=held_out_loss(self.start.task, self.view()),
            steps=self.steps / len(self.weather.speeds),
            lost=self.lost / self.steps,
            tokens=float(np.mean([owner.tokens for owner in self.owners])),
            versions=versions,
            inputs=len(staleness) / versions,
            staleness=float(np.mean(staleness)),
            took_s=self.stopped_at_s - BEGAN_S,
            looks=tuple(self.looks),
        )

    def forge(
        self, manifest: wire.Manifest, parts: tuple[Encoded, ...]
    ) -> tuple[wire.Manifest, tuple[Encoded, ...]]:
        """What a learner announces and stores in place of this; here the same."""
        return manifest, parts

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._calls, (max(when_s, self.now_s), self._order, call))

    def after(self, wait_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + wait_s, call)

    def later(self, call: Callable[[], None]) -> None:
        self.after(self.weather.latency_steps, call)

    def step_s(self, speed: float) -> float:
        return (1 + self.weather.jitter * float(self._rng.uniform(-1, 1))) / speed

    def tell(self, learner: _Learner, event: sync.Event, payload: Encoded | None = None) -> None:
        self.later(partial(learner.hear, event, payload))

    def tell_all(self, event: sync.Event) -> None:
        for learner in self.learners.values():
            self.tell(learner, event)

    def finished(self, learner: _Learner, fragments: tuple[int, ...]) -> None:
        self.later(partial(self._finished, learner.name, learner.incarnation, fragments))

    def _finished(self, name: str, incarnation: int, fragments: tuple[int, ...]) -> None:
        seq = self.next_seq()
        for fragment in fragments:
            self.owners[fragment].take(events.Finished(self.now_s, seq, name, incarnation))

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
        self.stopped_at_s = self.now_s
        self.later(self._say_stop)
        self.tell_all(sync.Stop())

    def _say_stop(self) -> None:
        seq = self.next_seq()
        for owner in self.owners:
            owner.stop(seq)

    def _owner(self, fragment: int) -> _Owner:
        settings, layout = self.settings, self.start.layout
        view = vector_of(layout, fragment, tree.by_name(self.start.params.params))
        state = State(
            version=0,
            record_seq=self.next_seq(),
            view_digest=shards.digest(view),
            seen_seq=0,
        )
        rules = policy.fragment_rules(settings, layout, fragment)
        arrays = FragmentArrays.from_view(settings, layout, fragment, view, cores.available())
        return _Owner(self, rules, arrays, state)

    def _has_its_steps(self) -> bool:
        stop_steps = self.weather.stop_steps
        return bool(stop_steps) and self.steps - self.lost >= stop_steps

    def _stops(self) -> bool:
        newest = {owner.rules.fragment: _newest(owner) for owner in self.owners}
        return stop_reason(self.settings, newest) is not None

    def silent(self, name: str, incarnation: int) -> None:
        """Tell the aggregators that a life is over; who has begun another is not meant."""
        for owner in self.owners:
            owner.take(events.Liveness(self.now_s, name, incarnation, False))

    def _schedule_lives(self) -> None:
        speeds = self.weather.speeds
        for index, speed in enumerate(speeds):
            for life in self.weather.lives[index] if self.weather.lives else ALWAYS:
                first_s = BEGAN_S + life.from_s + index / len(speeds)
                self.at(first_s, partial(self._live, index, speed, life.until_s))

    def _live(self, index: int, speed: float, until_s: float) -> None:
        """Begin a life; none begins once the run stops."""
        if self.stopped:
            return
        learner = self._learner(f"learner-{index}", speed)
        self.learners[learner.name] = learner
        learner.step()
        if until_s < math.inf:
            self.at(BEGAN_S + until_s, learner.die)

    def _learner(self, name: str, speed: float) -> _Learner:
        settings, start = self.settings, self.start
        incarnation, position = self.next_seq(), self.positions.get(name, 0)
        for owner in self.owners:
            owner.take(events.Joined(self.now_s, incarnation, name))
        replica = self.make_replica()
        starts = [_start(owner) for owner in self.owners]
        checkpoint = self.checkpoints.get(name)
        fresh = checkpoint is None
        return _Learner(
            world=self,
            name=name,
            incarnation=incarnation,
            speed=speed,
            replica=replica,
            optimizer_state=start.task.optimizer.init(replica.trained)
            if fresh
            else copied(checkpoint),
            state=sync.begin(sync.sync_rules(settings.sync), tuple(starts)),
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


def _newest(owner: _Owner) -> Newest:
    state = owner.state
    return Newest(
        version=state.version,
        record_seq=state.record_seq,
        global_step=state.global_step,
        tokens=owner.tokens,
        final=state.final,
    )


def _start(owner: _Owner) -> sync.Start:
    state = owner.state
    return sync.Start(state.version, state.view_digest, state.record_seq, state.global_step)


def _identity(manifest: wire.Manifest) -> tuple[str, int, int]:
    return manifest.learner, manifest.incarnation, manifest.seq


def _decoded(settings: RunSettings, delta: bytes, size: int) -> Encoded:
    section = settings.sync
    return shards.unpack_delta(delta, codec=section.delta_codec, count=size, block=section.block)


def _manifest(world: World, learner: _Learner, send: sync.Send) -> wire.Manifest:
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
