"""The faults that strike a simulated run, at times drawn from the seed, until its calm end."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from simactor import Actor
from simadmission import LIAR
from simhostile import Liar
from simoperator import Command
from simtensors import Light
from simworld import ended

from diloco.aggregator.context import Context
from diloco.aggregator.core.members import LIVES
from diloco.common.protocol import wire

if TYPE_CHECKING:
    from simrun import Scenario

# How often an operator who might end the run does.
ENDED_EARLY = 0.2


class DrawnFaults:
    """Strikes the processes of a scenario with the kinds of faults that the scenario's plan has."""

    def __init__(self, scenario: "Scenario") -> None:
        self._scenario = scenario
        self.plan, self.world = scenario.plan, scenario.world

    def begin(self) -> list[asyncio.Future[None]]:
        """Start a task for each kind of fault in the plan; returns the tasks."""
        kinds = {
            "crash": self._crash,
            "pause": self._pause,
            "partition": self._cut,
            "membership": self._ask_to_leave,
            "operator": self._operate,
            "clock_step": self._set_clock,
            "twin": self._start_twin,
            "commands": self._command_more,
            "life": self._lead_a_life,
            "disk_full": self._fill_disks,
            "revoked": self._revoke,
            "tail_lost": self._lose_tail,
            "crash_loop": self._loop_crashing,
        }
        if isinstance(self.world.tensors, Light):
            kinds["hostile"] = self._lie
        return [
            asyncio.ensure_future(strike(self.plan.rng(kind)))
            for kind, strike in kinds.items()
            if self.plan.has(kind)
        ]

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
        """Somebody sets a machine's clock, by seconds or by hours, and nobody corrects it."""
        mean_s = rng.choice([5.0, 20.0])
        while True:
            await self._every(rng, mean_s)
            self.world.injected["clock_step"] += 1
            victim = self._somebody(rng)
            by_s = rng.choice([-1, 1]) * 10 ** rng.uniform(0, 4)
            self.world.set_by_s[victim.name] += by_s
            self.world.note(victim, "clock set", f"by {by_s:+.1f} s")

    async def _operate(self, rng: random.Random) -> None:
        """An operator changes settings, rolls the run back, and makes checkpoints."""
        at = self._scenario.operator
        await self._give_commands(rng, "operator", [at.change, at.roll_back, at.mark])

    async def _command_more(self, rng: random.Random) -> None:
        """An operator quarantines learners, releases them, and collects garbage."""
        at = self._scenario.operator
        await self._give_commands(rng, "commands", [at.shut_out, at.release, at.collect])

    async def _lead_a_life(self, rng: random.Random) -> None:
        """An operator makes the run longer or shorter, pauses it for a while, or ends it early."""
        at = self._scenario.operator
        while True:
            await self._every(rng, 20.0)
            self.world.injected["life"] += 1
            act = rng.choice([at.lengthen, at.lengthen, at.pause, at.pause, self._end_rarely])
            await at.command(act, rng)
            if act == at.pause:
                await asyncio.sleep(rng.uniform(0.5, 20.0))
                await at.command(at.proceed, rng)

    async def _end_rarely(self, context: Context, rng: random.Random) -> None:
        if rng.random() < ENDED_EARLY:
            await self._scenario.operator.end(context, rng)

    async def _give_commands(
        self, rng: random.Random, kind: str, commands: Sequence[Command]
    ) -> None:
        while True:
            await self._every(rng, 25.0)
            self.world.injected[kind] += 1
            await self._scenario.operator.command(rng.choice(commands), rng)

    async def _loop_crashing(self, rng: random.Random) -> None:
        """A learner dies after each update that it announces, before its first update is read."""
        world = self.world
        world.announced = partial(self._crash_soon, rng)
        while True:
            await self._every(rng, 15.0)
            victim = rng.choice(self._scenario.learners).name
            world.injected["crash_loop"] += 1
            world.note(self._somebody(rng), "crash loop", victim)
            self._scenario.looping[victim] = LIVES + rng.randint(1, 3)

    def _crash_soon(self, rng: random.Random, manifest: wire.Manifest) -> None:
        world, left = self.world, self._scenario.looping[manifest.learner]
        if not left:
            return
        if left > LIVES:
            # What the first lives have sent is slow to read.
            until_s = world.loop.now_s + rng.uniform(10.0, 60.0)
            world.store.slow_until_s |= {shard.name: until_s for shard in manifest.shards}
        self._scenario.looping[manifest.learner] -= 1
        dying = {manifest.learner} if left > 1 else {"aggregator", "one", "two", "three"}
        for actor in [one for one in world.actors if one.name in dying]:
            actor.later(rng.uniform(0.0, 0.3), actor.kill)

    async def _fill_disks(self, rng: random.Random) -> None:
        """The disk of the bus's server or of the store is full for a while."""
        while True:
            await self._every(rng, 20.0)
            self.world.injected["disk_full"] += 1
            for what in rng.choice([("bus",), ("store",), ("bus", "store")]):
                self.world.full_until_s[what] = self.world.loop.now_s + rng.uniform(0.5, 20.0)

    async def _revoke(self, rng: random.Random) -> None:
        """A process's credentials are revoked, and restored after a while."""
        while True:
            await self._every(rng, 20.0)
            name = self._somebody(rng).name
            if name == "operator":
                continue
            self.world.injected["revoked"] += 1
            self.world.revoke(name)
            await asyncio.sleep(rng.uniform(0.5, 20.0))
            self.world.revoked.discard(name)

    async def _lose_tail(self, rng: random.Random) -> None:
        """The server loses the tape's newest messages, once; from then on no checker judges it."""
        await self._every(rng, 30.0)
        self.world.injected["tail_lost"] += 1
        self.world.lose_tail(rng.choice([1, 2, 5]))

    async def _lie(self, rng: random.Random) -> None:
        """Runs a hostile learner, and starts it again whenever its process has ended."""
        positions = itertools.count(1)
        while True:
            await self._scenario.opened()
            context = self.world.learner_context(Actor(LIAR, self.world))
            actor = context.bus.actor
            self._scenario.begin(actor)
            actor.spawn(Liar(context, self.world, rng, positions).live())
            await ended(actor)
            await asyncio.sleep(rng.uniform(0.1, 6.0))

    async def _start_twin(self, rng: random.Random) -> None:
        """Somebody starts a second process with a learner's name."""
        while True:
            await self._every(rng, 30.0)
            self.world.injected["twin"] += 1
            twin = self._scenario.learner(rng.randrange(self.plan.learners))
            self._scenario.learners.append(twin)
            self._scenario.start_learning(twin)

    async def _ask_to_leave(self, rng: random.Random) -> None:
        while True:
            await self._every(rng, 20.0)
            self.world.injected["membership"] += 1
            rng.choice(self._scenario.learners).leave_asked = True
