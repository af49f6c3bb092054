"""A run in virtual time: the production aggregator and learner code on a faulty bus and store.

`VirtualLoop` is an event loop whose clock jumps to the next timer instead of waiting, so that an
hour of a run takes seconds and every interleaving follows from the seed. Each actor (one life of
an aggregator or a learner) has its own clients of one `MemoryBroker` and one `MemoryStore`; they
inject faults and, once the actor is killed, let nothing through any more.

Tensors are *ledgers*: element (learner, position) of each fragment counts how often the progress
of that learner's batch at that data position was sent. A step subtracts 1 from its element, so
that a float32 update is a list of the steps it covers, and sums over updates show exactly what
was merged once, twice or never.
"""

import asyncio
import random
import selectors
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import structlog

from aggregator.context import Context as AggregatorContext
from aggregator.daemon import aggregate
from aggregator.fragment import FragmentArrays, make_grid
from common import names, shards, wire
from common.bus import MemoryBroker, MemoryBus, Message
from common.config import BusSection, RunSettings
from common.errors import BusUnavailableError, DilocoError, StoreUnavailableError
from common.layout import Layout, Tensor, make_layout
from common.quantize import decode_numpy
from common.service import Runtime, cancel
from common.store import MemoryStore
from diloco.create import create_run
from learner import sync
from learner.adopt import Adopter, starts
from learner.background import Arrived
from learner.publish import Context as LearnerContext
from learner.publish import Publisher
from learner.replica import Replica
from learner.train import Meter, Trainer

EPOCH_S = 1_000_000.0
TOKENS = 100


class StuckError(Exception):
    """Nothing is scheduled, and what was awaited has not come."""


class _Jump(selectors.BaseSelector):
    """Instead of waiting, moves the loop's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def register(self, fileobj, events, data=None):
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj):
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout=None):
        if timeout is None:
            raise StuckError
        self.now_s += max(0.0, timeout)
        return []

    def get_map(self):
        return {}


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, from 0 s on."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


class Killed(BaseException):
    """The actor is dead: raised at everything it still tries."""


@dataclass(kw_only=True)
class Faults:
    """How often what goes wrong; probabilities per operation."""

    latency_s: float = 0.01
    lost_answer: float = 0.0
    refused: float = 0.0
    lost_broadcast: float = 0.0


@dataclass
class Actor:
    """One life of a process. `operations` counts its effects on the world, for kills at the k-th."""

    name: str
    world: "World"
    faults: Faults
    operations: int = 0
    kill_at: int | None = None
    killed_before: bool = True
    dead: bool = False
    cut_until_s: float = 0.0
    tasks: list[asyncio.Task] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.world.seed}-{self.name}-{len(self.world.actors)}")
        self.world.actors.append(self)
        self.bus = ActorBus(self)
        self.store = ActorStore(self)
        self.runtime = Runtime(clock=self.world.clock, offload=self._offload, chance=self.chance)

    async def _offload(self, function, *args, **kwargs):
        await self.wait()
        return function(*args, **kwargs)

    async def wait(self) -> None:
        if self.faults.latency_s:
            await asyncio.sleep(self.chance.expovariate(1 / self.faults.latency_s))
        self.check()

    def check(self) -> None:
        if self.dead:
            raise Killed

    def cut(self) -> bool:
        return self.world.clock() < self.cut_until_s

    def effect(self, action: Callable[[], Any], error: type[DilocoError]) -> Any:
        """Do something to the world, unless a fault or the planned kill stands in the way."""
        self.check()
        self.operations += 1
        if self.operations == self.kill_at:
            if not self.killed_before:
                action()
            self.kill()
            raise Killed
        if self.cut() or self.chance.random() < self.faults.refused:
            raise error(f"{self.name}: injected")
        result = action()
        if self.chance.random() < self.faults.lost_answer:
            raise error(f"{self.name}: injected, done all the same")
        return result

    def kill(self) -> None:
        self.dead = True
        for task in self.tasks:
            task.cancel()

    def spawn(self, coroutine) -> asyncio.Task:
        task = asyncio.ensure_future(coroutine)
        self.tasks.append(task)
        return task


class ActorBus:
    """One actor's client of the world's broker."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._inner = MemoryBus(actor.world.broker)

    async def create_stream(self, stream, subjects, limits) -> None:
        await self._inner.create_stream(stream, subjects, limits)

    async def publish(self, subject, payload, *, msg_id=None, expected_last=None) -> int:
        await self._actor.wait()
        return self._actor.effect(
            lambda: self._actor.world.broker.publish(subject, payload, msg_id, expected_last),
            BusUnavailableError,
        )

    async def last(self, stream, subject):
        await self._actor.wait()
        if self._actor.cut():
            raise BusUnavailableError("injected")
        return await self._inner.last(stream, subject)

    async def last_sequence(self, stream):
        await self._actor.wait()
        return await self._inner.last_sequence(stream)

    async def trim(self, stream, subject, below_seq) -> None:
        await self._actor.wait()
        broker = self._actor.world.broker
        self._actor.effect(
            lambda: broker.stream(stream).trim(subject, below_seq), BusUnavailableError
        )

    async def read(self, stream, subjects, start_seq) -> AsyncIterator[Message]:
        async for message in self._inner.read(stream, subjects, start_seq):
            while self._actor.cut():  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)
            await self._actor.wait()
            yield message

    async def broadcast(self, subject, payload) -> None:
        self._actor.check()
        lost = self._actor.chance.random() < self._actor.faults.lost_broadcast
        if not lost and not self._actor.cut():
            await self._inner.broadcast(subject, payload)

    async def listen(self, subject):
        async for item in self._inner.listen(subject):
            if not self._actor.cut():
                await self._actor.wait()
                yield item

    async def close(self) -> None:
        await self._inner.close()


class ActorStore:
    """One actor's client of the world's store."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._inner = actor.world.store

    def put(self, name, data) -> None:
        self._actor.effect(lambda: self._inner.put(name, data), StoreUnavailableError)

    def get(self, name) -> bytes:
        self._actor.check()
        if self._actor.cut() or self._actor.chance.random() < self._actor.faults.refused:
            raise StoreUnavailableError("injected")
        return self._inner.get(name)

    def list(self, prefix):
        return self._inner.list(prefix)

    def delete(self, name) -> None:
        self._actor.effect(lambda: self._inner.delete(name), StoreUnavailableError)


class World:
    """Bus, store, settings and all actors of one simulated run."""

    def __init__(self, settings: dict[str, Any], *, seed: int, rows: int, faults: Faults) -> None:
        self.seed = seed
        self.faults = faults
        self.loop = VirtualLoop()
        self.actors: list[Actor] = []
        self.broker = MemoryBroker(self.clock)
        self.store = MemoryStore()
        self.settings = RunSettings.model_validate(
            {"run": {"name": "sim", "steps": 100, "seed": seed}, **settings}
        )
        self.rows = rows
        count = self.settings.sync.fragments
        tensors = [Tensor(name=f"ledger{i}", shape=(rows,), dtype="float32") for i in range(count)]
        self.layout: Layout = make_layout(tensors, fragments=count, block=self.settings.sync.block)
        self.chance = random.Random(f"world-{seed}")

    def clock(self) -> float:
        return EPOCH_S + self.loop.time()

    def run(self, scenario, *, limit_s: float = 36_000.0) -> Any:
        """Run a coroutine function to its end within `limit_s` virtual seconds."""
        logging_as_before = structlog.get_config()
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
        asyncio.set_event_loop(None)

        async def bounded():
            try:
                return await asyncio.wait_for(scenario(), limit_s)
            finally:
                for actor in self.actors:
                    actor.kill()
                await asyncio.gather(
                    *(task for actor in self.actors for task in actor.tasks), return_exceptions=True
                )

        try:
            return self.loop.run_until_complete(bounded())
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            structlog.configure(**logging_as_before)

    async def create(self) -> None:
        creator = Actor("create", self, Faults(latency_s=0.0))
        params = {f"ledger{i}": jnp.zeros(self.rows) for i in range(len(self.layout.tensors))}
        await create_run(
            self.settings, BusSection(), self.layout, params, creator.bus, creator.store,
            creator.runtime,
        )  # fmt: skip

    # Aggregators

    def aggregator(self, name: str = "aggregator", faults: Faults | None = None) -> Actor:
        actor = Actor(name, self, faults or self.faults)
        context = AggregatorContext(
            settings=self.settings,
            layout=self.layout,
            epoch=0,
            bus=actor.bus,
            store=actor.store,
            runtime=actor.runtime,
            logger=structlog.get_logger(),
            name=name,
        )
        actor.spawn(aggregate(context))
        return actor

    async def keep_aggregating(self, next_life: Callable[[], tuple[Actor, float]]) -> None:
        """Start an aggregator's lives one after another until one ends by itself."""
        while True:
            actor, down_s = next_life()
            (task,) = actor.tasks
            await asyncio.wait([task])
            if not actor.dead:
                task.result()
                return
            await asyncio.sleep(down_s)

    # Checks

    def messages(self, kind: type[wire.T], subject: str) -> list[tuple[int, wire.T]]:
        from common.bus import subject_matches

        stream = self.broker._streams[names.tape_stream("sim")]
        return [
            (message.seq, wire.decode(kind, message.payload))
            for message in stream.log.values()
            if subject_matches(subject, message.subject)
        ]

    def records(self, fragment: int) -> list[tuple[int, wire.Record]]:
        return self.messages(wire.Record, names.record("sim", fragment))

    def ledger_of(self, entries: tuple[wire.Shard, ...]) -> np.ndarray:
        parts = []
        for entry in entries:
            encoded = shards.unpack(
                self.store.get(entry.name),
                codec=self.settings.sync.codec,
                count=entry.stop - entry.start,
                block=self.layout.block,
            )
            parts.append(
                decode_numpy(self.settings.sync.codec, encoded, self.layout.block)[: self.rows]
            )
        return np.concatenate(parts)

    def check_chain(self) -> None:
        """Invariant 1: versions 0, 1, 2 ... without gap or fork; each record builds on the last."""
        for fragment in range(len(self.layout.fragments)):
            version, previous = -1, None
            for seq, record in self.records(fragment):
                version += record.what == "version"
                assert record.version == version
                if previous is not None:
                    assert record.base_seq == previous[0]
                    assert record.base_digest == previous[1].view_digest
                    assert record.position >= previous[1].position
                previous = (seq, record)

    def check_accounts(self) -> dict[str, int]:
        """Invariants 2 and 4, from the tape and the ledgers; counts of updates by fate."""
        fates: dict[str, int] = defaultdict(int)
        for fragment in range(len(self.layout.fragments)):
            self._check_fragment(fragment, fates)
        return dict(fates)

    def _check_fragment(self, fragment: int, fates: dict[str, int]) -> None:
        merged: dict[tuple, wire.Input] = {}
        rejected: dict[tuple, wire.Rejected] = {}
        for _, record in self.records(fragment):
            for taken in (*record.inputs, *record.rejected):
                key = (taken.learner, taken.incarnation, taken.seq)
                assert key not in merged, f"{key} resolved twice"
                assert key not in rejected, f"{key} resolved twice"
                (merged if isinstance(taken, wire.Input) else rejected)[key] = taken
        sent = {}
        awaited = set()
        ends = [seq for seq, _ in self.messages(wire.End, names.end("sim"))]
        for seq, manifest in self.messages(wire.Manifest, names.update("sim", "*", fragment)):
            key = (manifest.learner, manifest.incarnation, manifest.seq)
            sent[key] = manifest
            if not ends or seq < ends[0]:  # nothing after the end counts
                awaited.add(key)
        assert merged.keys() | rejected.keys() <= sent.keys()
        total = np.zeros(self.rows)
        for manifest in sent.values():
            ledger = self.ledger_of(manifest.shards)
            counts = np.rint(ledger)
            np.testing.assert_allclose(ledger, counts, atol=1e-2)
            assert set(np.unique(counts)) <= {0.0, 1.0}
            assert counts.sum() == manifest.steps
            assert manifest.tokens == manifest.steps * TOKENS
            total += counts
        assert total.max(initial=0) <= 1, "a step's progress entered two updates"
        fates["sent"] += len(sent)
        fates["merged"] += len(merged)
        fates["rejected"] += len(rejected)
        fates["in_flight"] += len(awaited - merged.keys() - rejected.keys())
        fates["steps"] += int(total.sum())

    def check_digests(self) -> int:
        """Invariants 3 and 5: every version, merged again from version 0 on, has its digests."""
        again = 0
        for fragment in range(len(self.layout.fragments)):
            chain = self.records(fragment)
            arrays = FragmentArrays.from_objects(
                self.settings,
                self.layout,
                fragment,
                view=self.store.get(chain[0][1].snapshot.name),
                outer_state=self.store.get(chain[0][1].outer.name),
            )
            for _, record in chain[1:]:
                if record.what == "version":
                    arrays.merge_again(record, self.store)
                    again += 1
            make_grid(self.settings, self.layout, fragment)
        return again

    def digests(self) -> list[list[str]]:
        return [
            [record.view_digest for _, record in self.records(f) if record.what == "version"]
            for f in range(len(self.layout.fragments))
        ]


class SimBackground:
    """`learner.background.Background` within the virtual loop."""

    def __init__(self, actor: Actor, context: LearnerContext) -> None:
        self.actor = actor
        self.arrived: list[Arrived] = []
        self.publisher = Publisher(context, self._post)
        self.adopter = Adopter(context, self._post)

    def _post(self, event, payload=None) -> None:
        self.arrived.append(Arrived(event, payload))

    def events(self, wait_s: float = 0.0) -> list[Arrived]:
        for task in self.actor.tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise task.exception()
        arrived, self.arrived = self.arrived, []
        return arrived

    def send(self, outgoing) -> None:
        self.actor.spawn(self.publisher.send(outgoing))

    def republish(self, again) -> None:
        self.actor.spawn(self.publisher.republish(again))

    def finished(self, position, fragments) -> None:
        self.actor.spawn(self.publisher.leave(position, fragments))


Work = Callable[[dict[str, Any], int, int], dict[str, Any]]


class SimLearner:
    """A learner in virtual time: production publisher, adopter, core, replica and trainer."""

    def __init__(
        self, world: World, index: int, *, step_s: float = 1.0, work: Work | None = None
    ) -> None:
        self.world = world
        self.index = index
        self.name = f"learner-{index}"
        self.step_s = step_s
        self.work = work or self._count
        self.steps = 0
        self.lives = 0
        self.actor: Actor | None = None
        self.longest_wait_s = 0.0
        self.trainer: Trainer | None = None
        self.leave_asked = False

    def _count(self, trained, index: int, position: int):
        """One step's progress: the element of (learner, position) goes down by one."""
        element = index * (self.world.rows // 16) + position
        assert position < self.world.rows // 16
        return {name: leaf.at[element].add(-1.0) for name, leaf in trained.items()}

    async def live(self) -> bool:
        """One life, to its end; True if it ended on purpose."""
        world = self.world
        self.lives += 1
        self.leave_asked = False
        self.actor = actor = Actor(self.name, world, world.faults)
        context = LearnerContext(
            settings=world.settings,
            layout=world.layout,
            epoch=0,
            bus=actor.bus,
            store=actor.store,
            runtime=actor.runtime,
            logger=structlog.get_logger(),
            learner=self.name,
        )
        life = actor.spawn(self._live(actor, SimBackground(actor, context), context))
        await asyncio.wait([life])
        if actor.dead:
            actor.kill()
            return False
        life.result()
        await cancel(*(task for task in actor.tasks if task is not life))
        return True

    async def _live(self, actor: Actor, background: SimBackground, context) -> None:
        world = self.world
        loaded = await background.adopter.load()
        position = await background.adopter.position()
        like = {name.name: jnp.zeros(name.shape) for name in world.layout.tensors}
        replica = Replica(world.settings.sync, world.layout, like, [i.view for i in loaded])
        meter = Meter(self.name, context.traffic)
        rules = sync.sync_rules(world.settings.sync)
        self.trainer = trainer = Trainer(
            task=None, replica=replica, inner_step=None, batches=None, position=position,
            background=background, rules=rules, state=sync.begin(rules, starts(loaded)), meter=meter,
            asked_to_leave=lambda: self.leave_asked, clock=world.clock,
        )  # fmt: skip
        incarnation = await background.publisher.join("sim")
        background.adopter.incarnation = incarnation
        actor.spawn(background.adopter.follow())
        actor.spawn(background.publisher.beat(lambda: meter.heartbeat(incarnation), 1.0))
        await self._train(trainer, replica, meter)
        while not sync.flushed(trainer.state):
            await asyncio.sleep(0.05)
            trainer.exchange(sync.Stepped(world.clock(), 0, steps=0))
        await background.publisher.leave(trainer.position)

    async def _train(self, trainer: Trainer, replica: Replica, meter: Meter) -> None:
        world = self.world
        while not (trainer.state.stopping or trainer.state.leaving):
            began_s = world.clock()
            await asyncio.sleep(self.step_s * world.chance.uniform(0.95, 1.05))
            self.actor.check()
            replica.trained = self.work(replica.trained, self.index, trainer.position)
            trainer.position += 1
            self.steps += 1
            meter.local_step += 1
            meter.tokens += TOKENS
            meter.step_time_s = self.step_s
            trainer.exchange(sync.Stepped(world.clock(), TOKENS))
            stepped_s = world.clock()
            self.longest_wait_s = max(self.longest_wait_s, stepped_s - began_s - 1.05 * self.step_s)
            while sync.must_wait(trainer.rules, trainer.state):
                await asyncio.sleep(0.01)
                trainer.exchange(sync.Stepped(world.clock(), 0, steps=0))
