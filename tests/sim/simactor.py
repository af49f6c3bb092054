"""A simulated process, called an actor, and the faults that may strike it.

A daemon that restarts gets a new actor; the time of one actor is one *life* of the daemon, and of a
learner one incarnation. An actor has its own clients of bus and store (`simbus.py`, `simstore.py`),
its own clock and its own random numbers. It counts its effects on the world, so that it can be
killed at its k-th effect, before or after that effect takes place. It can be paused for any time
and then continues with its state.
"""

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from simbus import ActorBus
from simclock import ACTOR
from simfault_rates import CALM, Faults
from simstore import ActorStore

from diloco.common.process.retry import Clock, Runtime
from diloco.common.protocol.errors import (
    AccessDeniedError,
    DilocoError,
    IntegrityError,
    ReadFurtherError,
    RunIncompleteError,
    RunMismatchError,
    WireError,
)

if TYPE_CHECKING:
    from simworld import World


class Killed(BaseException):
    """The actor is dead; raised by each operation that it still tries."""


# Mean time that a collector waits between two of its steps; versions are made meanwhile.
INTERLEAVED_S = 3.0


def _collects() -> bool:
    """Whether the current task is a collection of garbage, by an owner or an operator."""
    task = asyncio.current_task()
    name = getattr(task.get_coro(), "__qualname__", "") if task else ""
    return name in ("Collector.work", "Operator.collect")


class ActorLog:
    """An actor's logger: adds events to the trace; an exception is a `Violation`, unless allowed."""

    def __init__(self, actor: "Actor", about: str = "") -> None:
        self._actor = actor
        self._about = about

    def bind(self, **fields: Any) -> "ActorLog":
        return ActorLog(self._actor, " ".join(f"{key} {value}" for key, value in fields.items()))

    def info(self, event: str, **fields: Any) -> None:
        world = self._actor.world
        if world.trace is not None:
            what = " ".join(f"{key}={value}" for key, value in fields.items())
            world.note(self._actor, event, f"{self._about} {what}")

    debug = warning = error = info

    def exception(self, event: str, **fields: Any) -> None:
        self.info(event, **fields)
        self._actor.world.on_exception(self._actor, event, sys.exc_info()[1])


class Actor:
    """A simulated process, from its start to its end or death.

    Args:
        name: name of the process.
        world: the world in which the process runs.
        faults: rates of faults of the process's operations.
        offset_s, drift: error of the process's clock: seconds ahead, and seconds gained a second.
        reads_replicas: the process may read from a stream's replica that lacks the newest
            messages, as learners do.
    """

    def __init__(
        self,
        name: str,
        world: "World",
        faults: Faults = CALM,
        *,
        offset_s: float = 0.0,
        drift: float = 0.0,
        reads_replicas: bool = False,
    ) -> None:
        self.name = name
        self.world = world
        self.faults = faults
        self.reads_replicas = reads_replicas
        self.offset_s = offset_s
        self.drift = drift
        self.operations = 0
        self.kill_at: int | None = None
        self.killed_before = True
        self.dead = False
        # The daemon has not opened its run yet; the process outlives the loss of its server.
        self.starting = False
        self.outlived = False
        self.awake_since_s = 0.0
        # The process is of an earlier release.
        self.earlier = False
        self.bus_cut_until_s = 0.0
        self.store_cut_until_s = 0.0
        self.tasks: list[asyncio.Task[Any]] = []
        # Ids of the messages that the process tried to publish.
        self.tried: set[str | None] = set()
        self.rng = random.Random(f"{world.seed}-{name}-{world.lives}")
        world.lives += 1
        world.actors[self] = None
        self._context = copy_context()
        self._context.run(ACTOR.set, self)
        self.bus = ActorBus(self)
        self.store = ActorStore(self)
        self.logger = ActorLog(self)
        self.clock = Clock(self.wall_clock, self.monotonic)
        self.runtime = Runtime(
            clock=self.clock,
            offload=self._offload,
            rng=self.rng,
            new_id=lambda: f"{self.rng.getrandbits(128):032x}",
        )

    def monotonic(self) -> float:
        """Seconds since the machine was started, as its oscillator counts them."""
        return self.world.loop.now_s * (1 + self.drift)

    def wall_clock(self) -> float:
        """Seconds since the epoch by this machine's clock, which somebody may set."""
        since_s = self.monotonic() - self.world.loop.now_s
        return self.world.clock() + since_s + self.offset_s + self.world.set_by_s[self.name]

    # Faults

    @property
    def is_slow(self) -> bool:
        """Whether the actor's operations may be delayed."""
        return bool(self.faults.delay or self.faults.interleaved)

    def hit(self, rate: float, kind: str) -> bool:
        """Draws whether a fault of this rate happens now; counts the fault if it does."""
        if rate and self.rng.random() < rate:
            self.world.injected[kind] += 1
            return True
        return False

    def lasting(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s)

    async def delay(self) -> None:
        """Wait if a delay is drawn; then end the caller if this actor has died."""
        if self.hit(self.faults.delay, "delay"):
            await asyncio.sleep(self.lasting(self.faults.delay_s))
        if (
            self.faults.interleaved
            and _collects()
            and self.hit(self.faults.interleaved, "interleaved")
        ):
            await asyncio.sleep(self.lasting(INTERLEAVED_S))
        self.check()

    async def _offload(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        faults = self.faults
        if self.is_slow:
            await self.delay()
        else:
            self.check()
        if self.hit(faults.store_slow, "store_slow"):
            await asyncio.sleep(self.lasting(faults.slow_s))
            self.check()
        result = function(*args, **kwargs)
        if self.is_slow:
            await self.delay()
        return result

    def check(self) -> None:
        """Raise `Killed` if this actor is dead."""
        if self.dead:
            raise Killed

    def may_end_with(self, error: BaseException) -> bool:
        """Whether this error may end the process under the faults so far, without a violation."""
        amiss = self.world.damaged or self.name == self.world.bad
        if amiss and isinstance(error, IntegrityError | WireError):
            return True
        if self.name == self.world.bad and isinstance(error, MemoryError):
            return True
        if self.reads_replicas and isinstance(error, RunIncompleteError):
            return True  # The replica lacked the records for as long as the process waits for them.
        if isinstance(error, AccessDeniedError) or (
            self.world.tail_lost and isinstance(error, DilocoError)
        ):
            return True
        if isinstance(error, ReadFurtherError):
            return True  # The twin before this process has ended late.
        if self.starting:
            return isinstance(error, RunMismatchError) or getattr(error, "retry", False)
        return self.outlived and isinstance(error, DilocoError)

    def bus_is_cut(self) -> bool:
        away = self.outlived and self.world.without_server
        return away or self.world.loop.now_s < self.bus_cut_until_s

    def store_is_cut(self) -> bool:
        return self.world.loop.now_s < self.store_cut_until_s

    def effect(self, what: str, name: str, action: Callable[[], Any]) -> Any:
        """Carry out an action on the world; effect `kill_at` kills the actor before or after it."""
        self.check()
        self.operations += 1
        self.world.note(self, what, name)
        if self.operations == self.kill_at:
            self.world.injected["crash_at_effect"] += 1
            if not self.killed_before:
                action()
            self.kill()
            raise Killed
        return action()

    def later(self, after_s: float, action: Callable[[], Any]) -> None:
        """Carry out an action later, even if this actor is dead; errors of the project are dropped."""

        def act() -> None:
            try:
                action()
            except DilocoError:
                self.world.note(self, "refused", "what came late")

        self.world.loop.call_later(after_s, act, context=self.world.context)

    # Life

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine as a task of this process."""
        task = self.world.loop.create_task(coroutine, context=self._context)
        self.tasks.append(task)
        return task

    def kill(self) -> None:
        """End this life, as SIGKILL does: no further operation of it reaches the world."""
        self.dead = True
        self.world.actors.pop(self, None)
        self.world.note(self, "killed", "")
        self.world.loop.thaw(self)
        if self.world.power_fails:
            self.world.store.cut_power(self)
        for task in self.tasks:
            task.cancel()

    def pause(self, for_s: float) -> None:
        """Stop this process for a while, as SIGSTOP and SIGCONT do."""
        loop = self.world.loop
        self.world.note(self, "paused", f"{for_s:.1f} s")
        loop.freeze(self)
        self.awake_since_s = loop.now_s + for_s
        loop.call_later(for_s, loop.thaw, self, context=self.world.context)
