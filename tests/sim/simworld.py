"""A run in virtual time: the production aggregator and learner code on a faulty bus and store.

Everything that happens follows from the settings and the seed. `simcheck.py` watches every
message and object; `simactor.py` has what may go wrong, `simtensors.py` what stands for tensors.
"""

import asyncio
import contextlib
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import structlog
from simactor import CALM, Actor, Faults, Killed
from simaveraged import Life
from simbus import SimBroker
from simchain import Violation
from simcheck import Checkers
from simdisk import Disk
from simloop import StuckError, VirtualLoop
from simmesh import MeshUploader
from simstore import SimStore
from simtensors import TOKENS, Ledger, Light, Numbers

from diloco.aggregator import checkpoint
from diloco.aggregator.context import Context as AggregatorContext
from diloco.aggregator.daemon import aggregate, load_run
from diloco.aggregator.leases import Leases
from diloco.common.process.config import (
    BusSection,
    Config,
    GcSection,
    RunSettings,
    check_same_run,
    parse_settings,
)
from diloco.common.process.service import cancel
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import SupersededError
from diloco.common.protocol.layout import Layout, Tensor, TensorHint, make_layout
from diloco.common.storage import checkpoint_files
from diloco.common.storage.bus import Message, subject_matches
from diloco.common.storage.tape import load_specification, place_on_tape
from diloco.learner.background import Alone
from diloco.learner.background import Context as LearnerContext
from diloco.learner.core import sync
from diloco.learner.core.boundary import NOTHING, Arrived, Decoded
from diloco.learner.synchronizer import HOLD_S, Meter, Planner, Synchronizer
from diloco.learner.wire.incarnation import Joined, end_when_superseded, join, place_after_join
from diloco.learner.wire.publish import Publisher, Uploader
from diloco.learner.wire.receive import Receiver, VersionFetcher, load, start_at
from diloco.operate.create import create_run
from diloco.operate.streams import make_streams

EPOCH_S = 1_000_000.0
# Events kept for the trace of a failure.
TRACE = 4000
# As `learner.drain_timeout_s`.
LEAVE_S = 20.0


class World:
    """Bus, store, settings, actors and checkers of one simulated run.

    Args:
        settings: the run's sections.
        seed: of everything that is left to chance.
        tensors: what stands for them.
        faults: of actors that are given no others.
        streams: how the run's streams are made.
        gc: what garbage collection leaves.
        traced: keep the last events.
        record_bytes: a longer record keeps its body in an object.
        averaged: the last of several fragments holds state that is averaged.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        seed: int,
        tensors: Light | Ledger | Numbers,
        faults: Faults = CALM,
        streams: BusSection | None = None,
        gc: GcSection | None = None,
        traced: bool = False,
        record_bytes: int = wire.RECORD_BYTES,
        averaged: bool = False,
    ) -> None:
        self.record_bytes = record_bytes
        self.seed = seed
        self.tensors = tensors
        self.faults = faults
        self.streams = streams or BusSection()
        self.gc = gc or GcSection()
        self.duplicate_window_s = self.streams.duplicate_window_s
        self.loop = VirtualLoop()
        self.context = copy_context()
        self.actors: dict[Actor, None] = {}
        self.lives = 0
        self.injected: Counter[str] = Counter()
        self.damaged = False
        self.without_server = False
        # Processes whose credentials the server refuses, and manifests that it has damaged.
        self.revoked: set[str] = set()
        self.garbled: set[bytes] = set()
        # The tape lacks messages that were acknowledged: what stands on it needs not fit any more.
        self.tail_lost = False
        # Processes that die do so because their machine's power fails.
        self.power_fails = False
        self.full_until_s = {"bus": 0.0, "store": 0.0}
        self.delivered = 0
        self.steps = 0
        # By how much each machine's wall clock was set; a machine keeps it over its processes.
        self.set_by_s: defaultdict[str, float] = defaultdict(float)
        self.trace: deque[tuple[float, str, str, str]] | None = (
            deque(maxlen=TRACE) if traced else None
        )
        self.settings = RunSettings.model_validate(
            {"run": {"name": "sim", "steps": 100, "seed": seed}, **settings}
        )
        self.run_name = self.settings.run.name
        self._config = Config.model_validate(
            self.settings.model_dump() | {"store": {"url": "memory://simulated"}}
        )
        self.layout = self._make_layout(averaged=averaged)
        self.epoch = 0
        self.store = SimStore()
        self.checkers = Checkers(self)
        self.store.deleting = self.checkers.on_deleted
        self.broker = SimBroker(self.clock, self._hear, self.checkers.on_trimming)
        self.rng = random.Random(f"world-{seed}")

    def _make_layout(self, *, averaged: bool) -> Layout:
        count, block = self.settings.sync.fragments, self.settings.sync.block
        shape = (self.tensors.elements,)
        tensors = [Tensor(name=f"ledger{i}", shape=shape, dtype="float32") for i in range(count)]
        state = tensors[-1].name if averaged and count > 1 else None

        def hint(name: str, _shape: tuple[int, ...]) -> TensorHint:
            return TensorHint(kind="averaged" if name == state else "trained")

        return make_layout(tensors, fragments=count, block=block, hint=hint)

    def clock(self) -> float:
        """The servers' time, in seconds since the epoch."""
        return EPOCH_S + self.loop.now_s

    def is_full(self, what: str) -> bool:
        """Whether the disk of the bus's server or of the store takes nothing now."""
        return self.loop.now_s < self.full_until_s[what]

    def revoke(self, name: str) -> None:
        """The server refuses a process from now on, and closes its connections."""
        self.revoked.add(name)
        for actor in [*self.actors]:
            if actor.name == name:
                actor.bus.hang_up()

    def lose_tail(self, count: int) -> None:
        """The server fails over to one that lacks the newest messages of the tape.

        Not those that a run begins with: without them there is none.
        """
        self.damaged = self.tail_lost = True
        tape = names.tape_stream(self.run_name)
        beginning = 1 + len(self.layout.fragments)
        since = place_on_tape(self.broker.stream(tape).last_seq) - beginning
        self.broker.lose(tape, min(count, max(0, since)))

    def note(self, actor: Actor, what: str, name: str) -> None:
        """Keep an event for the trace."""
        if self.trace is not None:
            self.trace.append((self.loop.now_s, actor.name, what, name))

    def _hear(self, stream: str, message: Message) -> None:
        if self.trace is not None:
            self.trace.append((self.loop.now_s, "tape", f"#{message.seq}", message.subject))
        self.checkers.on_message(stream, message)

    def fail(self, failure: BaseException) -> None:
        """End the simulation with this."""
        self.loop.fail(failure)

    def on_exception(self, actor: Actor, event: str, error: BaseException | None) -> None:
        """An actor has logged an exception: unless something was damaged, nothing may stop."""
        if not (self.damaged or actor.outlived):
            self.fail(Violation("stopped", actor.name, f"{event}: {error!r}"))

    @property
    def events(self) -> int:
        """Messages and objects stored, deliveries and steps so far."""
        stored = sum(
            place_on_tape(stream.last_seq) for stream in self.broker._streams.values() if stream.log
        )
        return stored + len(self.store._objects) + self.delivered + self.steps

    def run(self, scenario: Callable[[], Coroutine[Any, Any, Any]], limit_s: float = 36e3) -> Any:
        """Run a scenario to its end, within `limit_s` virtual seconds.

        Raises:
            Violation: a checker has found something, or the scenario does not end.
        """
        logging_as_before = structlog.get_config()
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
        try:
            return self.loop.run_until_complete(asyncio.wait_for(scenario(), limit_s))
        except (TimeoutError, StuckError) as error:
            raise Violation("ends", "run", f"not within {limit_s:.0f} s") from error
        finally:
            for actor in list(self.actors):
                actor.kill()
            self.loop.drain()
            structlog.configure(**logging_as_before)

    async def create(self) -> None:
        """Create the run."""
        creator = Actor("create", self)
        params = {tensor.name: jnp.zeros(tensor.shape) for tensor in self.layout.tensors}
        await create_run(
            self.settings, self.streams, self.layout, params, creator.bus, creator.store,
            creator.runtime,
        )  # fmt: skip
        del self.actors[creator]

    async def lose_the_server(self, stopped_s: Callable[[Actor], float | None]) -> None:
        """Lose the tape: what is left is the store.

        Args:
            stopped_s: for how long a process is stopped, which then goes on; None: it dies.
        """
        self.without_server = True
        for actor in list(self.actors):
            for_s = stopped_s(actor)
            if for_s is None:
                actor.kill()
            else:
                self.injected["outlived"] += 1
                actor.outlived = True
                actor.pause(for_s)
        lost, self.broker = (
            self.broker,
            SimBroker(self.clock, self._hear, self.checkers.on_trimming),
        )
        lost.silence()

    async def resume(self, actor: Actor) -> None:
        """As `diloco.operate.change.resume`: begin a new tape from the newest checkpoint."""
        file = checkpoint_files.load_file(actor.store, self.run_name, None)
        epoch = await checkpoint.next_epoch(actor.bus, actor.store, file)
        await make_streams(actor.bus, self.run_name, self.streams, epoch)
        context = replace(self._context(actor, "resume"), epoch=epoch)
        if context.epoch != self.epoch:
            self.epoch = context.epoch
            self.checkers.begin_epoch(context.epoch, file)
        await checkpoint.begin_epoch(context, file)
        await checkpoint.begin_fragments(context, file.records)
        self.without_server = False

    # Aggregators

    def operator(self, **life: Any) -> AggregatorContext:
        """What an operator's command works with; its actor is `context.bus.actor`."""
        actor = Actor("operator", self, **{"faults": self.faults, **life})
        return self._context(actor, "operator")

    def _context(self, actor: Actor, name: str) -> AggregatorContext:
        return AggregatorContext(
            settings=self.settings,
            layout=self.layout,
            epoch=self.epoch,
            bus=actor.bus,
            store=actor.store,
            runtime=actor.runtime,
            logger=actor.logger,
            name=name,
            gc=self.gc,
            record_bytes=self.record_bytes,
            # Where records are in objects, so are positions.
            most_positions=wire.MAX_KEYS if self.record_bytes == wire.RECORD_BYTES else 1,
            arithmetic=self.tensors.arithmetic,
        )

    def learner_context(self, actor: Actor) -> LearnerContext:
        """What one life of a learner works with."""
        return LearnerContext(
            settings=self.settings,
            layout=self.layout,
            epoch=self.epoch,
            bus=actor.bus,
            store=actor.store,
            runtime=actor.runtime,
            logger=actor.logger,
            learner=actor.name,
        )

    def aggregator(
        self, name: str = "aggregator", lease_ttl_s: float | None = None, **life: Any
    ) -> Actor:
        """Start one life of an aggregator; without `lease_ttl_s` it owns all fragments, unasked.

        `life` as of `Actor`.
        """
        actor = Actor(name, self, **{"faults": self.faults, **life})
        actor.spawn(self._aggregate(actor, lease_ttl_s))
        return actor

    async def _aggregate(self, actor: Actor, lease_ttl_s: float | None) -> None:
        """As `diloco.aggregator.daemon.serve`."""
        actor.starting = True
        layout, epoch = await load_run(self._config, actor.bus, actor.store, actor.runtime)
        actor.starting = False
        context = replace(self._context(actor, actor.name), layout=layout, epoch=epoch)
        await aggregate(context, Leases(context, lease_ttl_s) if lease_ttl_s else None)

    async def keep_aggregating(self, next_life: Callable[[], tuple[Actor, float]]) -> None:
        """Start an aggregator's lives one after another until one ends by itself."""
        while True:
            actor, down_s = next_life()
            await ended(actor)
            if not actor.dead:
                return
            await asyncio.sleep(down_s)

    # What is on the tape

    def messages(self, kind: type[wire.T], subject: str) -> list[tuple[int, wire.T]]:
        """Sequence and body of each message of a subject."""
        stream = self.broker.stream(names.tape_stream(self.run_name))
        return [
            (message.seq, wire.decode(kind, message.payload))
            for message in stream.log.values()
            if subject_matches(subject, message.subject)
        ]

    def records(self, fragment: int) -> list[tuple[int, wire.Record]]:
        """A fragment's records, with their sequences."""
        return self.messages(wire.Record, names.record(self.run_name, fragment))

    def digests(self) -> list[list[str]]:
        """Of each fragment its versions' view digests."""
        return [
            [record.view_digest for _, record in self.records(f) if record.what == "version"]
            for f in range(len(self.layout.fragments))
        ]


async def ended(actor: Actor) -> None:
    """Wait until the actor's main task has ended; what broke it ends the simulation."""
    main = actor.tasks[0]
    await asyncio.wait([main])
    if actor.dead:
        await asyncio.gather(*actor.tasks, return_exceptions=True)
        return
    del actor.world.actors[actor]
    error = main.exception() if not main.cancelled() else None
    if error is not None and actor.may_end_with(error):
        actor.world.actors[actor] = None
        actor.kill()
        return
    if error is not None:
        actor.world.fail(Violation("breaks", actor.name, repr(error)))
        raise error
    await cancel(*(task for task in actor.tasks if task is not main))


class SimBackground:
    """`diloco.learner.background.Background` within the virtual loop."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.arrived: list[Arrived] = []

    def post(self, event: sync.Event, payload: Decoded = NOTHING) -> None:
        self.arrived.append(Arrived(event, payload))

    def events(self, _wait_s: float = 0.0) -> list[Arrived]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def spawn(self, coroutine) -> None:
        self.actor.spawn(coroutine).add_done_callback(self._ended)

    def _ended(self, task) -> None:
        self.actor.tasks.remove(task)
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, Killed):
            return
        if self.actor.may_end_with(error):
            self.actor.kill()
        else:
            self.actor.world.fail(Violation("breaks", self.actor.name, repr(error)))


@dataclass(kw_only=True)
class SimSynchronizer(Synchronizer):
    """`Synchronizer` that shows the checkers each view it has adopted.

    Attributes:
        life: whose it is.
    """

    life: Life

    def _perform(self, effect: sync.Effect) -> None:
        super()._perform(effect)
        if isinstance(effect, sync.Adopt):
            world, ready = self.boundaries.inbox.actor.world, effect.ready
            view = world.tensors.view(self.replica, ready.fragment)
            world.checkers.on_adopted(self.life, ready, view, self.position)


class SimLearner:
    """A learner in virtual time: production publisher, receiver, core and synchronizer, life by life.

    Args:
        world: where it trains.
        index: its number; it is named after it.
        step_s: of an inner step.
        heartbeat_interval_s: between heartbeats.
        hosts: numbers of hosts, one of which each life has.
        disk: keeps its checkpoints.
        life: of `Actor`, for all its lives.
    """

    def __init__(
        self,
        world: World,
        index: int,
        *,
        step_s: float = 1.0,
        heartbeat_interval_s: float = 1.0,
        hosts: Sequence[int] = (1,),
        disk: Disk | None = None,
        **life: Any,
    ) -> None:
        self.disk = disk
        self.world = world
        self.index = index
        self.name = f"learner-{index}"
        self.step_s = step_s
        self.heartbeat_interval_s = heartbeat_interval_s
        self.hosts = hosts
        self.life = life
        self.steps = 0
        self.actor: Actor | None = None
        self.leave_asked = False
        self.superseded = False
        self.incarnation = 0

    async def live(self, begin: Callable[[Actor], None] | None = None) -> bool:
        """One life, to its end; True if it ended on purpose. `begin` may change the actor."""
        world = self.world
        self.leave_asked = False
        self.incarnation = 0
        life = {"faults": world.faults, "reads_replicas": True, **self.life}
        self.actor = actor = Actor(self.name, world, **life)
        if begin is not None:
            begin(actor)
        context = world.learner_context(actor)
        actor.spawn(self._live(actor, SimBackground(actor), context))
        await ended(actor)
        self.actor = None
        if self.disk is not None and actor.dead and world.power_fails and self.disk.lose_power():
            world.injected["power_cut"] += 1
        return not actor.dead

    async def _live(self, actor: Actor, background: SimBackground, context: LearnerContext) -> None:
        """As `diloco.learner.lead` does it."""
        world, tensors, peers = self.world, self.world.tensors, Alone()
        actor.starting = True
        specification = await load_specification(actor.bus, world.run_name)
        theirs = parse_settings(specification.settings)
        check_same_run(world.settings, theirs, world.layout.digest, specification.layout)
        context = replace(context, epoch=specification.epoch)
        fragments = range(len(world.layout.fragments))
        # A replica that is far behind may know of no record for longer than a start has patience.
        loaded = [await load(context, fragment) for fragment in fragments]
        actor.starting = False
        views = [item.view for item in loaded]
        starts = tuple(start_at(item) for item in loaded)
        replica = tensors.replica(self.index, world.settings.sync, world.layout, views)
        found = self.disk.restore(actor, context) if self.disk is not None else None
        local_step, tokens = (found.local_step, found.tokens) if found else (0, 0)
        meter = Meter(self.name, context.traffic, local_step=local_step, earlier_tokens=tokens)
        life = await join(context, "sim")
        self.incarnation = life.incarnation
        uploader = self._uploader(actor, context, replica)
        publisher = Publisher(context, background.post, uploader, peers, life)
        receiver = Receiver(
            context,
            background.post,
            VersionFetcher(context, replica),
            peers,
            starts,
            life.incarnation,
        )
        background.spawn(receiver.follow())
        background.spawn(self._end_when_superseded(context, life))
        background.spawn(
            publisher.beat(lambda: meter.heartbeat(life.incarnation), self.heartbeat_interval_s)
        )
        position = (await place_after_join(context)).position
        tensors.begin(replica, position)
        self.meter = meter
        own = Life(context.epoch, self.name, life.incarnation)
        world.checkers.on_began(own, [start.version for start in starts], position)
        rules = sync.sync_rules(world.settings.sync, world.layout)
        planner = Planner(
            rules=rules, state=sync.begin(rules, starts),
            inbox=background, tokens_per_step=TOKENS, drain_timeout_s=LEAVE_S, clock=actor.clock,
            asked_to_leave=lambda: self.leave_asked,
        )  # fmt: skip
        synchronizer = SimSynchronizer(
            replica=replica, position=position, tokens_per_step=TOKENS, boundaries=planner,
            outbox=lambda word: background.spawn(publisher.say(word)), meter=meter,
            saver=None, clock=actor.clock, life=own,
        )  # fmt: skip
        save = None
        if self.disk is not None:
            save = partial(self.disk.save, actor, context, synchronizer, life.incarnation)
        await self._train(actor, synchronizer, save)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(publisher.leave(synchronizer.position), LEAVE_S)

    async def _end_when_superseded(self, context: LearnerContext, life: Joined) -> None:
        """As `diloco.learner.lead` does it: the error ends the process."""
        try:
            await end_when_superseded(context, life)
        except SupersededError:
            self.superseded = True
            context.bus.actor.kill()

    def _uploader(self, actor: Actor, context: LearnerContext, replica: Any) -> Any:
        """Of as many hosts as this life has."""
        hosts = actor.rng.choice(self.hosts) if len(self.hosts) > 1 else self.hosts[0]
        if hosts == 1:
            return Uploader(context, replica)
        self.world.injected["meshes"] += 1
        return MeshUploader(context, replica, actor.rng, hosts)

    async def _train(
        self, actor: Actor, synchronizer: SimSynchronizer, save: Callable[[], None] | None
    ) -> None:
        world, meter, loop = self.world, synchronizer.meter, self.world.loop
        meter.step_time_s = self.step_s
        then = "step"
        while then != "end":
            if then == "hold":
                await asyncio.sleep(HOLD_S)
                actor.check()
                then = synchronizer.turn().then
                continue
            await asyncio.sleep(self.step_s * actor.rng.uniform(0.95, 1.05))
            actor.check()
            began_s = loop.now_s
            world.tensors.train(synchronizer.replica, self.index, synchronizer.position)
            synchronizer.position += 1
            self.steps += 1
            world.steps += 1
            meter.local_step += 1
            meter.tokens += TOKENS
            synchronizer.losses.stepped(None, 1.0)
            if save is not None:
                save()
            then = synchronizer.turn().then
            world.checkers.on_stepped(self.name, loop.now_s - began_s)
