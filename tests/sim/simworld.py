"""A run in virtual time: the production aggregator and learner code on a faulty bus and store.

All events follow from the settings and the seed. `siminvariants.py` checks every message and object;
`simactor.py` injects faults, `simtensors.py` has the substitutes of tensors.
"""

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import structlog
from simactor import Actor
from simbus import SimBroker
from simchain import Violation
from simclock import StuckError, VirtualLoop
from simfault_rates import CALM, Faults
from siminvariants import Checkers
from simstore import SimStore
from simtensors import Ledger, Light, Numbers

from diloco.aggregator import checkpoint
from diloco.aggregator.arrays.arithmetic import PRODUCTION, Arithmetic
from diloco.aggregator.context import Context as AggregatorContext
from diloco.aggregator.daemon import aggregate, load_run
from diloco.aggregator.leases import Leases
from diloco.common.process.config import (
    BusSection,
    Config,
    GcSection,
    RunSettings,
)
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.protocol.layout import Layout, Tensor, TensorHint, make_layout
from diloco.common.storage import checkpoint_files
from diloco.common.storage.bus import Message, subject_matches
from diloco.common.storage.data_share_allocation import Sizes
from diloco.common.storage.tape import place_on_tape
from diloco.learner.background import Context as LearnerContext
from diloco.operate.create import create_run
from diloco.operate.make_streams import make_streams

EPOCH_S = 1_000_000.0
# Events kept for the trace of a failure.
TRACE = 4000


class World:
    """Bus, store, settings, actors and checkers of one simulated run.

    Args:
        settings: the run's settings by section; others have their defaults.
        seed: seed of all random numbers.
        tensors: the substitutes of tensors.
        faults: rates of faults of actors without rates of their own.
        streams: replicas and limits of the run's streams.
        gc: settings of garbage collection.
        traced: True to keep the last events, for a trace.
        record_bytes: size above which a record's body is in an object.
        averaged: whether the last of several fragments holds averaged state.
        modules: the number of the model's modules, at most that of its fragments.
        sizes: the sizes of the data's epoch and shares; None: the data has no shares.
        share_expiry_s: seconds of silence after which an aggregator frees a learner's shares.
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
        modules: int = 1,
        sizes: Sizes | None = None,
        share_expiry_s: float = 600.0,
    ) -> None:
        self.sizes = sizes
        self.share_expiry_s = share_expiry_s
        # Name of the aggregator with a bad machine, and the fault: it "reads" versions otherwise than
        # they are stored, or fails at each update that it "merges" or each round that it "closes".
        self.bad, self.bad_at = "", "reads"
        # Whether the store does not answer an actor at a time.
        self.store_is_away: Callable[[str, float], bool] = lambda _name, _now_s: False
        # Whether it refuses what an actor writes at a time, and answers what it reads.
        self.store_refuses_writes: Callable[[str, float], bool] = lambda _name, _now_s: False
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
        # The tape lacks acknowledged messages: its records may be inconsistent from now on.
        self.tail_lost = False
        # Processes that die do so because their machine's power fails.
        self.power_fails = False
        # Called with each manifest of an honest learner when it is announced for the first time.
        self.announced: Callable[[wire.Manifest], None] = lambda _manifest: None
        self.full_until_s = {"bus": 0.0, "store": 0.0}
        self.delivered = 0
        self.steps = 0
        # Steps that are the first of their lives.
        self.first_steps = 0
        # Seconds by which each machine's wall clock was set; they stay when its processes restart.
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
        self.layout = self._make_layout(averaged=averaged, modules=modules)
        self.epoch = 0
        self.store = SimStore()
        self.checkers = Checkers(self)
        self.store.stored = self.checkers.on_stored
        self.store.deleting = self.checkers.on_deleted
        self.broker = SimBroker(self.clock, self._hear, self.checkers.on_trimming)
        self.rng = random.Random(f"world-{seed}")

    def _make_layout(self, *, averaged: bool, modules: int) -> Layout:
        count, block = self.settings.sync.fragments, self.settings.sync.block
        shape = (self.tensors.elements,)
        tensors = [Tensor(name=f"ledger{i}", shape=shape, dtype="float32") for i in range(count)]
        state = tensors[-1].name if averaged and count > 1 else None
        module = {tensor.name: f"module-{i % modules}" for i, tensor in enumerate(tensors)}

        def hint(name: str, _shape: tuple[int, ...]) -> TensorHint:
            kind = "averaged" if name == state else "trained"
            return TensorHint(kind=kind, module=module[name] if modules > 1 else "")

        return make_layout(tensors, fragments=count, block=block, hint=hint)

    def clock(self) -> float:
        """The servers' time, in seconds since the epoch."""
        return EPOCH_S + self.loop.now_s

    def is_full(self, what: str) -> bool:
        """Whether the disk of the bus's server ("bus") or of the store ("store") is full now."""
        return self.loop.now_s < self.full_until_s[what]

    def revoke(self, name: str) -> None:
        """Revoke a process's credentials, and close its connections."""
        self.revoked.add(name)
        for actor in [*self.actors]:
            if actor.name == name:
                actor.bus.hang_up()

    def lose_tail(self, count: int) -> None:
        """Fail over to a server that lacks the tape's newest `count` messages.

        The messages with which the run was created stay: without them there is no run.
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
        """End the simulation with this failure."""
        self.loop.fail(failure)

    def on_exception(self, actor: Actor, event: str, error: BaseException | None) -> None:
        """Takes an exception that an actor logged: a violation, unless damage explains it."""
        if not (self.damaged or actor.outlived or actor.name == self.bad):
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
        except TimeoutError as error:
            raise Violation("ends", "run", f"not within {limit_s:.0f} s") from error
        except StuckError as error:
            raise Violation("ends", "run", str(error)) from error
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
        """Lose the server with the tape; the store stays.

        Args:
            stopped_s: returns the seconds for which an actor is paused before it goes on; None if it
                dies.
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
        """Begin a new tape from the newest checkpoint, as `diloco.operate.change.resume` does."""
        named = checkpoint_files.checkpoints(actor.store, self.run_name)
        await checkpoint.from_newest(named, lambda name: self._resume_from(actor, name))
        self.without_server = False

    async def _resume_from(self, actor: Actor, name: str | None) -> None:
        file = checkpoint_files.load_file(actor.store, self.run_name, name)
        epoch = await checkpoint.next_epoch(actor.bus, actor.store, file)
        await make_streams(actor.bus, self.run_name, self.streams, epoch)
        context = replace(self._context(actor, "resume"), epoch=epoch)
        await checkpoint.check_begun(context, file)
        await checkpoint.check_objects(context, file.records)
        # Of a command that was interrupted before, the tape may be there, and empty.
        if context.epoch != self.epoch or not self.broker.stream(context.tape).log:
            self.epoch = context.epoch
            self.checkers.begin_epoch(context.epoch, file)
        await checkpoint.begin_epoch(context, file)
        await checkpoint.begin_fragments(context, file.records)

    # Aggregators

    def operator(self, **life: Any) -> AggregatorContext:
        """Returns the context of an operator's command; its actor is `context.bus.actor`."""
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
            share_expiry_s=self.share_expiry_s,
            record_bytes=self.record_bytes,
            # Where records are in objects, so are positions.
            most_positions=wire.MAX_KEYS if self.record_bytes == wire.RECORD_BYTES else 1,
            arithmetic=self._arithmetic(actor),
        )

    def _arithmetic(self, actor: Actor) -> Arithmetic | None:
        arithmetic = self.tensors.arithmetic
        if actor.name != self.bad or self.bad_at == "reads":
            return arithmetic

        def fail(*_: Any, **__: Any) -> Any:
            self.injected["bad_machine"] += 1
            raise MemoryError

        what = {"merges": "coefficients", "closes": "factors"}[self.bad_at]
        return (arithmetic or PRODUCTION)._replace(**{what: fail})

    def learner_context(self, actor: Actor) -> LearnerContext:
        """Returns the context of one life of a learner."""
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
        """Start one life of an aggregator; without `lease_ttl_s` it owns all fragments, unleased.

        `life` are arguments of `Actor`.
        """
        actor = Actor(name, self, **{"faults": self.faults, **life})
        actor.spawn(self._aggregate(actor, lease_ttl_s))
        return actor

    async def _aggregate(self, actor: Actor, lease_ttl_s: float | None) -> None:
        """Run an aggregator, in the order of `diloco.aggregator.daemon.serve`."""
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
        """Returns the sequence and body of each message of a subject."""
        stream = self.broker.stream(names.tape_stream(self.run_name))
        return [
            (message.seq, wire.decode(kind, message.payload))
            for message in stream.log.values()
            if subject_matches(subject, message.subject)
        ]

    def records(self, fragment: int) -> list[tuple[int, wire.Record]]:
        """Returns a fragment's records, with their sequences."""
        return self.messages(wire.Record, names.record(self.run_name, fragment))

    def digests(self) -> list[list[str]]:
        """Returns the view digests of each fragment's versions."""
        return [
            [record.view_digest for _, record in self.records(f) if record.what == "version"]
            for f in range(len(self.layout.fragments))
        ]


async def ended(actor: Actor) -> None:
    """Wait until the actor's main task has ended; an unexpected error ends the simulation."""
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
