"""One simulated run under faults: what a seed means, and what became of it.

A seed chooses the run's settings, which kinds of faults there are and how often; each kind has
chance of its own, so that leaving one out changes nothing about the others. For three quarters of
the time there are faults; then there are none, and the run must end by itself with every update
resolved.
"""

import asyncio
import contextlib
import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from simactor import CALM, Actor, Faults
from simcheck import Violation
from simtensors import Ledger, Light
from simworld import SimLearner, World, ended

from diloco.aggregator import checkpoint, rollback
from diloco.aggregator import settings as run_settings
from diloco.aggregator.context import Context
from diloco.common.config import BusSection, GcSection, parse_settings
from diloco.common.errors import DilocoError, IntegrityError

# Kinds of faults of single operations, with the greatest probability of each.
OPERATIONS = {
    "delay": 1.0,
    "lost_request": 0.2,
    "lost_answer": 0.2,
    "late_request": 0.1,
    "duplicate": 0.2,
    "redelivered": 0.2,
    "lost_broadcast": 1.0,
    "stale_read": 0.5,
    "store_refused": 0.2,
    "store_lost_answer": 0.2,
    "store_slow": 0.1,
    "late_object": 0.1,
}
# Kinds of faults that befall whole processes.
PROCESSES = (
    "crash",
    "crash_at_effect",
    "pause",
    "partition",
    "skew",
    "speeds",
    "meshes",
    "membership",
    "operator",
    "resume",
    "standby",
    "rivals",
    "clock_step",
)
KINDS = (*OPERATIONS, *PROCESSES)
# Share of the time with faults, and how much longer than planned the rest may take.
FAULTY = 0.75
PATIENCE_S = 1800.0
# Simulations between two collections of what they leave.
COLLECT_EVERY = 8
_simulated = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is simulated.

    Attributes:
        kinds: of faults that may be; which of them are, the seed says.
        intensity: how often they are, against what is usual here, which is far too often for a
            run of hours that should also get somewhere.
        dense: with dense ledgers and the production arithmetic.
    """

    seed: int
    minutes: float = 2.0
    learners: int = 4
    fragments: int = 2
    kinds: tuple[str, ...] = KINDS
    intensity: float = 1.0
    dense: bool = False
    traced: bool = False

    def rng(self, of: str) -> random.Random:
        """The seed's chance for one purpose."""
        return random.Random(f"{self.seed}-{of}")

    def has(self, kind: str) -> bool:
        """Whether there are faults of a kind: half of all seeds have it."""
        return kind in self.kinds and self.rng(f"has-{kind}").random() < 0.5


@dataclass
class Outcome:
    """What became of a simulation."""

    plan: Trial
    violation: Violation | None = None
    injected: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    events: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    world: World | None = None


def settings(plan: Trial) -> dict[str, Any]:
    """The settings of a plan's run."""
    rng = plan.rng("settings")
    interval = max(plan.fragments, rng.choice([4, 8, 12]))
    return {
        "run": {"name": "sim", "steps": max(interval, int(plan.minutes * 60 * 0.8))},
        "sync": {
            "interval_steps": interval,
            "fragments": plan.fragments,
            "min_steps": rng.choice([1, 2, 4]),
            "codec": "float32",
            "delta_codec": "float32",
            "block": 16,
            "shard_elements": 1 << 20 if plan.dense else 1024,
            "snapshot_interval_versions": max(rng.choice([1, 2, 5]), plan.fragments // 3),
            "overlap_steps": rng.choice([0, 2]),
            "reannounce_timeout_s": rng.choice([4.0, 20.0]),
        },
        "outer": {
            "optimizer": "sgd",
            "learning_rate": 1.0,
            "merge": "average",
            "participation": rng.random() < 0.3,
        },
        "staleness": {"max_versions": rng.choice([0, 0, 3])},
        "quorum": {
            "min_learners": rng.choice([1, 2, 3]),
            "liveness_timeout_s": rng.choice([3.0, 6.0]),
            "deadline_s": rng.choice([8.0, 20.0]),
        },
        "bounds": {"norm_reject": 1e9, "norm_clip": 1e8},
    }


def faults(plan: Trial) -> Faults:
    """How often single operations go wrong."""
    rates = {
        kind: plan.intensity * greatest * plan.rng(kind).random() ** 2
        for kind, greatest in OPERATIONS.items()
        if plan.has(kind)
    }
    rng = plan.rng("durations")
    return Faults(
        **rates,
        delay_s=rng.choice([0.01, 0.1, 0.5]),
        late_s=rng.choice([1.0, 5.0]),
        slow_s=rng.choice([1.0, 5.0]),
        visible_s=rng.choice([0.2, 3.0]),
        stale_messages=rng.choice([2, 20, 200]),
    )


class Scenario:
    """The processes of a plan's run, and who troubles them."""

    def __init__(self, plan: Trial) -> None:
        self.plan = plan
        # Some updates have two shards, so that an upload can be half done.
        elements = 2048 if plan.rng("shards").random() < 0.3 else 32
        self.world = World(
            settings(plan),
            seed=plan.seed,
            tensors=Ledger(16 * 512) if plan.dense else Light(elements),
            faults=faults(plan),
            streams=BusSection(duplicate_window_s=plan.rng("window").choice([5.0, 30.0])),
            gc=GcSection(replay_window_s=plan.rng("gc").choice([0.0, 20.0, 60.0])),
            traced=plan.traced,
        )
        self.calm = False
        self.closed = False
        self._clocks = plan.rng("skew")
        self._effects = plan.rng("crash_at_effect")
        self.learners = [self._learner(index) for index in range(plan.learners)]

    def _learner(self, index: int) -> SimLearner:
        step_s = 1.0
        if self.plan.has("speeds"):
            step_s = self.plan.rng(f"speed-{index}").choice([0.5, 1.0, 1.0, 3.0])
            self.world.injected["speeds"] += step_s != 1.0
        hosts = (1,)
        if self.plan.has("meshes"):
            hosts = self.plan.rng(f"hosts-{index}").choice([(1,), (2,), (1, 2, 3)])
        return SimLearner(self.world, index, step_s=step_s, hosts=hosts)

    def _begin(self, actor: Actor) -> None:
        """What is peculiar to one life."""
        actor.faults = CALM if self.calm else self.world.faults
        if self.plan.has("skew"):
            actor.offset_s = self._clocks.uniform(-20, 20)
            actor.drift = self._clocks.uniform(-0.01, 0.01)
            self.world.injected["skew"] += 1
        if self.plan.has("crash_at_effect") and not self.calm and self._effects.random() < 0.5:
            actor.kill_at = int(self._effects.randint(1, 120) / self.plan.intensity)
            actor.killed_before = self._effects.random() < 0.5

    async def run(self) -> None:
        """The whole run, to its end."""
        world, plan = self.world, self.plan
        await world.create()
        names: dict[str, float | None] = {"one": None}
        if plan.has("standby"):
            lease_ttl_s = plan.rng("lease").choice([1.0, 2.5, 5.0])
            names = dict.fromkeys(("one", "two", "three"), lease_ttl_s)
            world.injected["standby"] += 2
        if plan.has("rivals"):
            names["rival"] = None  # It asks nobody, and believes that it owns everything.
            world.injected["rivals"] += 1
        work = [asyncio.ensure_future(self._keep_aggregating(*item)) for item in names.items()]
        work += [asyncio.ensure_future(self._keep_learning(learner)) for learner in self.learners]
        if plan.has("resume"):
            work.append(asyncio.ensure_future(self._lose_the_server(plan.rng("resume"))))
        trouble = [
            asyncio.ensure_future(make(plan.rng(kind)))
            for kind, make in (
                ("crash", self._crash),
                ("pause", self._pause),
                ("partition", self._cut),
                ("membership", self._ask_to_leave),
                ("operator", self._operate),
                ("clock_step", self._set_clock),
            )
            if plan.has(kind)
        ]
        await asyncio.sleep(plan.minutes * 60 * FAULTY)
        for task in trouble:
            task.cancel()
        self._calm_down()
        await asyncio.gather(*work)

    def _calm_down(self) -> None:
        self.calm = True
        for actor in self.world.actors:
            actor.faults = CALM
            actor.kill_at = None
            actor.bus_cut_until_s = actor.store_cut_until_s = 0.0

    # Processes

    async def _keep_aggregating(self, name: str, lease_ttl_s: float | None) -> None:
        rng = self.plan.rng(f"restarts-{name}")

        while True:
            await self._opened()
            actor = self.world.aggregator(name, lease_ttl_s)
            self._begin(actor)
            await ended(actor)
            if not actor.dead:
                return
            await asyncio.sleep(rng.uniform(0.0, 4.0))

    async def _keep_learning(self, learner: SimLearner) -> None:
        rng = self.plan.rng(f"restarts-{learner.name}")
        if self.plan.has("membership") and rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, self.plan.minutes * 30))
        await self._opened()
        while not await learner.live(self._begin) or learner.leave_asked:
            await asyncio.sleep(rng.uniform(0.1, 6.0))
            await self._opened()

    async def _opened(self) -> None:
        """Wait until processes may start: not while there is no server."""
        while self.closed:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.1)

    # Trouble

    def _somebody(self, rng: random.Random) -> Actor:
        return rng.choice(list(self.world.actors))

    async def _every(self, rng: random.Random, mean_s: float) -> None:
        await asyncio.sleep(rng.expovariate(self.plan.intensity / mean_s))
        while not self.world.actors:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.1)

    async def _crash(self, rng: random.Random) -> None:
        mean_s = rng.choice([5.0, 15.0, 40.0])
        while True:
            await self._every(rng, mean_s)
            self.world.injected["crash"] += 1
            self._somebody(rng).kill()

    async def _pause(self, rng: random.Random) -> None:
        mean_s = rng.choice([5.0, 20.0])
        while True:
            await self._every(rng, mean_s)
            self.world.injected["pause"] += 1
            self._somebody(rng).pause(rng.choice([0.5, 5.0, 15.0]) * rng.uniform(0.5, 2))

    async def _cut(self, rng: random.Random) -> None:
        mean_s = rng.choice([5.0, 20.0])
        while True:
            await self._every(rng, mean_s)
            self.world.injected["partition"] += 1
            victim, sides = self._somebody(rng), rng.choice(["bus", "store", "both"])
            until_s = self.world.loop.now_s + rng.uniform(0.5, 12.0)
            self.world.note(victim, "cut off", f"{sides} until {until_s:.1f} s")
            if sides != "store":
                victim.bus_cut_until_s = until_s
            if sides != "bus":
                victim.store_cut_until_s = until_s

    async def _set_clock(self, rng: random.Random) -> None:
        """Somebody sets a machine's clock, by moments or by hours, and never back again."""
        mean_s = rng.choice([5.0, 20.0])
        while True:
            await self._every(rng, mean_s)
            self.world.injected["clock_step"] += 1
            victim = self._somebody(rng)
            by_s = rng.choice([-1, 1]) * 10 ** rng.uniform(0, 4)
            self.world.set_by_s[victim.name] += by_s
            self.world.note(victim, "clock set", f"by {by_s:+.1f} s")

    async def _operate(self, rng: random.Random) -> None:
        """An operator changes settings, goes back, and marks checkpoints."""
        while True:
            await self._every(rng, 25.0)
            self.world.injected["operator"] += 1
            command = rng.choice([self._change, self._roll_back, self._mark])
            await self._command(command, rng)

    async def _command(
        self, command: Callable[[Context, random.Random], Awaitable[None]], rng: random.Random
    ) -> bool:
        """Run an operator's command; whether it succeeded."""
        context = self.world.operator()
        actor = context.bus.actor
        self._begin(actor)
        self.world.note(actor, "begins", command.__name__)
        task = actor.spawn(command(context, rng))
        await asyncio.wait([task], timeout=30.0)
        error = task.exception() if task.done() and not task.cancelled() else None
        unexpected = isinstance(error, IntegrityError) or not isinstance(error, DilocoError)
        if error is not None and unexpected and not actor.dead:
            self.world.fail(Violation("breaks", actor.name, repr(error)))
        succeeded = task.done() and not actor.dead and error is None
        actor.kill()
        return succeeded

    async def _lose_the_server(self, rng: random.Random) -> None:
        """All processes die, the server with its disk too; the run goes on from a checkpoint."""
        world = self.world
        await asyncio.sleep(rng.uniform(0.2, 0.5) * self.plan.minutes * 60)
        while not checkpoint.checkpoints(world.store, world.run_name):
            await self._command(self._mark, rng)
            await asyncio.sleep(rng.uniform(0.5, 2.0))
        await asyncio.sleep(rng.uniform(0.0, 0.2) * self.plan.minutes * 60)
        if world.checkers.stopped:
            return
        self.closed = True
        world.injected["resume"] += 1
        await world.lose_the_server()
        resumed = False
        while not resumed:
            await asyncio.sleep(rng.uniform(0.1, 5.0))
            resumed = await self._command(self._resume, rng)
        self.closed = False

    async def _resume(self, context: Context, _chance: random.Random) -> None:
        await self.world.resume(context.bus.actor)

    async def _change(self, context: Context, rng: random.Random) -> None:
        now, _ = await run_settings.effective_settings(context)
        sections = {
            "sync": {"min_steps": rng.choice([1, 2, 4])},
            "quorum": {"min_learners": rng.choice([1, 2, 3])},
            "outer": {"learning_rate": rng.choice([0.5, 1.0])},
        }
        document = now.model_dump()
        for section, values in sections.items():
            document[section] |= values
        await run_settings.change_settings(context, parse_settings(document))

    async def _roll_back(self, context: Context, rng: random.Random) -> None:
        back = rng.randint(0, 4)
        newest = [chain.record.version for chain in self.world.checkers.chains if chain.record]
        wanted = {fragment: max(0, version - back) for fragment, version in enumerate(newest)}
        targets = await rollback.find_versions(context, wanted)
        await rollback.roll_back(context, targets)

    async def _mark(self, context: Context, _chance: random.Random) -> None:
        await checkpoint.mark(context)

    async def _ask_to_leave(self, rng: random.Random) -> None:
        while True:
            await self._every(rng, 20.0)
            self.world.injected["membership"] += 1
            rng.choice(self.learners).leave_asked = True


@cache
def _freeze() -> None:
    """What is imported by now stays, and need not be looked through again."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """No cycle is worth looking for while a world stands, which is one itself; then now and then."""
    _freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if next(_simulated) % COLLECT_EVERY == 0:
            gc.collect()


def simulate(plan: Trial) -> Outcome:
    """Simulate one run; what it breaks is in the outcome."""
    began_s = time.process_time()
    scenario = Scenario(plan)
    world = scenario.world
    outcome = Outcome(plan, injected=world.injected, world=world)
    with _without_collector():
        try:
            world.run(scenario.run, plan.minutes * 60 + PATIENCE_S)
            world.checkers.check_resolved()
        except Violation as violation:
            outcome.violation = violation
    outcome.fates = world.checkers.fates()
    outcome.fates["learner_steps"] = world.steps
    outcome.events = world.events
    outcome.simulated_s = world.loop.now_s
    outcome.cpu_s = time.process_time() - began_s
    return outcome


def simulate_alone(plan: Trial) -> Outcome:
    """As `simulate`, without the world: what one process can tell another."""
    return replace(simulate(plan), world=None)
