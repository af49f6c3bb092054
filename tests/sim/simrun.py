"""One simulated run under faults, and its outcome.

`simtrial.py` derives the run and its faults from the seed. For three quarters of the time there are
faults; then there are none, and the run must end without help, with a verdict on every update.
"""

import asyncio
import contextlib
import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

from simactor import Actor
from simadmission import LIAR
from simchain import Violation
from simdisk import Disk
from simfault_rates import CALM
from simfaults import DrawnFaults
from simlearner import SimLearner
from simoperator import Operator
from simslices import SlicedLearner
from simtensors import Ledger, Light, Numbers
from simtrial import Outcome, Trial, faults, settings
from simworld import World, ended

from diloco.common.process.config import BusSection, GcSection
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ObjectMissingError
from diloco.common.storage import checkpoint_files
from diloco.common.storage.data_share_allocation import Sizes

# Share of the time with faults, and how much longer than planned the rest may take.
FAULTY = 0.75
PATIENCE_S = 1800.0
# Seconds without new faults after which a superseded process has ended: a pause may still last.
SUPERSEDED_S = 45.0
# Seconds of a pause in which no learner may take a step.
PAUSED_S = 15.0
# Seconds without faults for which a run with damaged objects is watched.
STANDSTILL_S = 30.0
# Seconds between the operator's checks for quarantined learners, when there are no faults.
RETURNS_S = 5.0
# Simulations between two runs of Python's garbage collector.
COLLECT_EVERY = 16
_simulated = itertools.count(1)


class Scenario:
    """The processes of a plan's run, their restarts, and the final checks."""

    def __init__(self, plan: Trial) -> None:
        self.plan = plan
        self.world = World(
            settings(plan),
            seed=plan.seed,
            tensors=self._tensors(),
            faults=faults(plan),
            streams=BusSection(duplicate_window_s=plan.rng("window").choice([5.0, 30.0])),
            gc=GcSection(replay_window_s=plan.rng("gc").choice([0.0, 20.0, 60.0])),
            traced=plan.traced,
            record_bytes=self._record_bytes(),
            averaged=plan.has("averaged"),
            modules=self._modules(),
            sizes=self._sizes(),
            share_expiry_s=plan.rng("expiry").choice([4.0, 8.0, 20.0]),
        )
        # Learners that die after each update that they announce: how often each will still die.
        self.looping: Counter[str] = Counter()
        if plan.has("bad_machine"):
            self.world.bad = "two"
        self.world.power_fails = plan.has("power_cut")
        self.calm = False
        self.closed = False
        self._clocks = plan.rng("skew")
        self._effects = plan.rng("crash_at_effect")
        self._releases = plan.rng("releases")
        # A record in an object is named after its contents, and is written as it is; the earlier
        # release knows of no centered clipping, and of no modules.
        later = self.world.settings.robust
        later = later or len(self.world.layout.modules) > 1
        self._mixed = plan.has("releases") and not (later or plan.has("bodies"))
        self.operator = Operator(
            self.world, [f"learner-{index}" for index in range(plan.learners)], self.begin
        )
        self._work: list[asyncio.Future[None]] = []
        self.learners: list[SimLearner] = []
        sliced = plan.has("slices")
        self.learners += [self._sliced(0)] if sliced else []
        self.learners += [self.learner(index) for index in range(sliced, plan.learners)]

    def _tensors(self) -> Light | Ledger | Numbers:
        if self.plan.dense:
            return Ledger(16 * 512)
        # Some updates have two shards, so that an upload can be half done.
        two = self.plan.rng("shards").random() < 0.3
        return Numbers(1536) if self.plan.has("numbers") else Light(2048 if two else 32)

    def _sizes(self) -> Sizes | None:
        """Returns how an epoch of the data is divided into shares; None if it is not."""
        rng = self.plan.rng("sizes")
        return (
            Sizes(rng.choice([1, 2, 4]), rng.choice([2, 5, 9])) if self.plan.has("shares") else None
        )

    def _record_bytes(self) -> int:
        """Returns the size limit of records on the tape: all, a few, or none of them fit."""
        if not self.plan.has("bodies"):
            return wire.RECORD_BYTES
        return self.plan.rng("bodies").choice([1, 1500, 3000])

    def _modules(self) -> int:
        """Returns the number of modules: with dense tensors, and numbers, one, that all hold."""
        if not self.plan.has("modules") or self.plan.dense or self.plan.has("numbers"):
            return 1
        fragments = settings(self.plan)["sync"]["fragments"]
        return min(fragments, self.plan.rng("modules").choice([2, 3]))

    def _step_s(self, index: int) -> float:
        step_s = 1.0
        if self.plan.has("speeds"):
            step_s = self.plan.rng(f"speed-{index}").choice([0.5, 1.0, 1.0, 3.0])
            self.world.injected["speeds"] += step_s != 1.0
        return step_s

    def learner(self, index: int) -> SimLearner:
        hosts: tuple[int, ...] = (1,)
        if self.plan.has("meshes") or self.plan.has("host_loss"):
            hosts = self.plan.rng(f"hosts-{index}").choice([(1,), (2,), (1, 2, 3)])
        disk = Disk(self.plan.rng(f"disk-{index}")) if self.plan.has("checkpoints") else None
        carries = self.plan.has("carried")
        steps = self.plan.rng(f"snapshots-{index}").choice([0, 1, 1, 4]) if carries else 0
        return SimLearner(
            self.world,
            index,
            step_s=self._step_s(index),
            hosts=hosts,
            disk=disk,
            snapshot_steps=steps,
        )

    def _sliced(self, index: int) -> SlicedLearner:
        return SlicedLearner(
            self.world,
            index,
            rng=self.plan.rng("learner of slices"),
            programs=self.learners,
            opened=self.opened,
            is_calm=lambda: self.calm,
            step_s=self._step_s(index),
        )

    def begin(self, actor: Actor) -> None:
        """Gives one life its faults, clock and release."""
        actor.faults = CALM if self.calm else self.world.faults
        if self.plan.has("skew"):
            actor.offset_s = self._clocks.uniform(-20, 20)
            actor.drift = self._clocks.uniform(-0.01, 0.01)
            self.world.injected["skew"] += 1
        daemon = actor.name not in ("operator", LIAR)
        if self._mixed and daemon and self._releases.random() < 0.5:
            actor.earlier = True
            self.world.injected["releases"] += 1
        if self.plan.has("crash_at_effect") and not self.calm and self._effects.random() < 0.5:
            actor.kill_at = int(self._effects.randint(1, 120) / self.plan.intensity)
            actor.killed_before = self._effects.random() < 0.5

    async def run(self) -> None:
        """Run all processes and faults until the run has ended."""
        world, plan = self.world, self.plan
        await world.create()
        names: dict[str, float | None] = {"one": None}
        if plan.has("standby") or plan.has("bad_machine"):
            lease_ttl_s = plan.rng("lease").choice([1.5, 3.0, 6.0])
            names = dict.fromkeys(("one", "two", "three"), lease_ttl_s)
            world.injected["standby"] += 2
        if plan.has("rivals"):
            names["rival"] = None  # Takes no leases, and believes that it owns all fragments.
            world.injected["rivals"] += 1
        work = self._work
        work += [asyncio.ensure_future(self._keep_aggregating(*item)) for item in names.items()]
        for learner in self.learners:
            self.start_learning(learner)
        if plan.has("resume"):
            work.append(asyncio.ensure_future(self._lose_the_server(plan.rng("resume"))))
        trouble = DrawnFaults(self).begin()
        await asyncio.sleep(plan.minutes * 60 * FAULTY)
        for task in trouble:
            task.cancel()
        self._calm_down()
        if world.damaged:
            # Fragments may stand still until somebody has repaired the damaged objects.
            await asyncio.wait(work, timeout=STANDSTILL_S)
            self._check_adopted()
            return
        work.append(asyncio.ensure_future(self._let_everybody_in(plan.rng("let in"))))
        work.append(asyncio.ensure_future(self._check_superseded()))
        if len(world.layout.modules) > 1:
            work.append(asyncio.ensure_future(self._let_modules_be_held()))
        if plan.has("life"):
            work.append(asyncio.ensure_future(self._check_paused(plan.rng("calm"))))
        await asyncio.gather(*work)

    def _calm_down(self) -> None:
        self.calm = True
        for actor in self.world.actors:
            actor.faults = CALM
            actor.kill_at = None
            actor.bus_cut_until_s = actor.store_cut_until_s = 0.0
        self.world.full_until_s = {"bus": 0.0, "store": 0.0}
        self.world.revoked.clear()
        self.world.store.slow_until_s.clear()
        self.looping.clear()

    # Processes

    async def _keep_aggregating(self, name: str, lease_ttl_s: float | None) -> None:
        rng = self.plan.rng(f"restarts-{name}")

        while True:
            await self.opened()
            actor = self.world.aggregator(name, lease_ttl_s)
            self.begin(actor)
            await ended(actor)
            if not actor.dead:
                return
            await asyncio.sleep(rng.uniform(0.0, 4.0))

    def start_learning(self, learner: SimLearner) -> None:
        """Start a task that runs a learner's lives, one after the other."""
        self._work.append(asyncio.ensure_future(self._keep_learning(learner)))

    async def _keep_learning(self, learner: SimLearner) -> None:
        rng = self.plan.rng(f"restarts-{learner.name}")
        if self.plan.has("membership") and rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, self.plan.minutes * 30))
        await self.opened()
        while not await learner.live(self.begin) or learner.leave_asked:
            if learner.superseded:
                return
            await asyncio.sleep(self._away_s(learner, rng))
            await self.opened()

    def _away_s(self, learner: SimLearner, rng: random.Random) -> float:
        """Draws the seconds between two lives of a learner; at times longer than others wait for it."""
        if self.looping[learner.name]:
            return rng.uniform(0.05, 0.3)
        long = self.plan.has("shares") and not self.calm and rng.random() < 0.3
        return rng.uniform(6.0, 40.0) if long else rng.uniform(0.1, 6.0)

    def _outlives(self, rng: random.Random, actor: Actor) -> float | None:
        """Draws how long a process is paused when its server is lost; None if it dies instead."""
        survives = actor.name not in ("operator", LIAR) and rng.random() < 0.5
        longest_s = self.plan.minutes * 30
        return rng.uniform(0.5, longest_s) if self.plan.has("outlived") and survives else None

    async def opened(self) -> None:
        """Wait until processes may start, which is while there is a server."""
        while self.closed:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.1)

    async def _let_everybody_in(self, rng: random.Random) -> None:
        """Release quarantined learners until the run stops, in place of a command that was killed."""
        while not self.world.checkers.stopped:
            if self.world.checkers.admission.shut_out():
                await self.operator.command(self.operator.release, rng)
            await asyncio.sleep(RETURNS_S)

    async def _let_modules_be_held(self) -> None:
        """Has learners start again that hold all, until some living learner holds each module."""
        modules = self.world.layout.modules
        while not self.world.checkers.stopped:
            living = [one for one in self.learners if one.actor is not None]
            held = {module for one in living for module in one.holds or modules}
            partial_ones = [one for one in living if one.holds and not one.leave_asked]
            if held < {*modules}:
                for one in partial_ones:
                    one.holds_all = one.leave_asked = True
            await asyncio.sleep(RETURNS_S)

    async def _check_paused(self, rng: random.Random) -> None:
        """Checks, without faults, that a pause holds every learner; then ends the pause.

        A life that begins meanwhile stops at its first step boundary, behind one step.
        """
        world, at = self.world, self.operator
        held, epoch = await at.command(at.hold, rng), world.epoch
        await asyncio.sleep(SUPERSEDED_S)
        before = world.steps - world.first_steps
        await asyncio.sleep(PAUSED_S)
        # A run that was resumed from a checkpoint before the pause is not paused.
        stays = held and world.epoch == epoch and not world.checkers.stopped
        more = world.steps - world.first_steps - before
        if stays and more:
            what = f"{more} steps of a run that is paused"
            world.fail(Violation("paused", "learners", what))
        await at.command(at.let_go, rng)
        proceeds = False
        while not (proceeds or world.checkers.stopped):
            proceeds = await at.command(at.proceed, rng)
            await asyncio.sleep(1.0)

    def _check_adopted(self) -> None:
        """Checks that learners have views of this tape, also after it lost messages."""
        world = self.world
        if not world.tail_lost or world.injected["rot_record"]:
            return  # The views of unreadable records are unknown.
        if world.without_server:
            return  # There is no new tape, since the checkpoint could not be resumed.
        try:
            standing = [
                world.checkers.views(fragment) for fragment in range(len(world.layout.fragments))
            ]
        except ObjectMissingError:
            return  # A record's body was collected because of records that are lost.
        # A learner that was paused until a moment ago has not read yet what it missed.
        before_s = world.loop.now_s - STANDSTILL_S / 3
        living = {
            (one.name, one.incarnation)
            for one in self.learners
            if one.actor is not None and one.actor.awake_since_s < before_s
        }
        for (name, incarnation, fragment), digest in world.checkers.adopted.items():
            if (name, incarnation) in living and digest not in standing[fragment]:
                what = f"trains on a view of fragment {fragment} that no record has: {digest}"
                world.fail(Violation("unnoticed", name, what))

    async def _check_superseded(self) -> None:
        """Checks, without faults, that the older of two processes with one name ends."""
        await asyncio.sleep(SUPERSEDED_S)
        before = self._superseded()
        await asyncio.sleep(SUPERSEDED_S)
        for learner, incarnation in before & self._superseded():
            what = f"incarnation {incarnation} goes on beside a newer one"
            self.world.fail(Violation("superseded", learner, what))

    def _superseded(self) -> set[tuple[str, int]]:
        """Returns the lives that go on although a newer life of the same name has joined."""
        joined = self.world.checkers.joined
        living = [learner for learner in self.learners if learner.actor is not None]
        return {
            (learner.name, learner.incarnation)
            for learner in living
            if 0 < learner.incarnation < joined.get(learner.name, 0)
        }

    async def _lose_the_server(self, rng: random.Random) -> None:
        """Lose the server and its disk, and resume the run from a checkpoint on a new server."""
        world, plan = self.world, self.plan
        # A process that outlives the server reads messages if the new tape is soon as long.
        early = 0.25 if plan.has("outlived") else 1.0
        await asyncio.sleep(early * rng.uniform(0.2, 0.5) * plan.minutes * 60)
        while not checkpoint_files.checkpoints(world.store, world.run_name):
            await self.operator.command(self.operator.mark, rng)
            await asyncio.sleep(rng.uniform(0.5, 2.0))
        await asyncio.sleep(early * rng.uniform(0.0, 0.2) * plan.minutes * 60)
        if world.checkers.stopped:
            return
        self.closed = True
        world.injected["resume"] += 1
        await world.lose_the_server(partial(self._outlives, plan.rng("outlived")))
        resumed = False
        while not resumed:
            await asyncio.sleep(rng.uniform(0.1, 5.0))
            resumed = await self.operator.command(self.operator.resume, rng)
        self.closed = False


@cache
def _freeze() -> None:
    """Freezes imported objects, so that no collection looks through them again."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Stop Python's garbage collector during the block; run it after every few blocks.

    The collector is started again if it ran before; then it looks through the whole world at once.
    """
    _freeze()
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if next(_simulated) % COLLECT_EVERY == 0:
            gc.collect()
        if runs:
            gc.enable()


def simulate(plan: Trial) -> Outcome:
    """Simulate one run; the outcome has the rule that it breaks, if any."""
    began_s = time.process_time()
    scenario = Scenario(plan)
    world = scenario.world
    outcome = Outcome(plan, injected=world.injected, world=world)
    with _without_collector():
        try:
            world.run(scenario.run, plan.minutes * 60 + PATIENCE_S)
            if not world.damaged:
                world.checkers.check_resolved()
                if not world.tail_lost:
                    world.checkers.check_what_is_left()
        except Violation as violation:
            outcome.violation = violation
        finally:
            for learner in scenario.learners:
                if learner.disk is not None:
                    learner.disk.close()
    outcome.fates = world.checkers.fates()
    outcome.fates["learner_steps"] = world.steps
    outcome.events = world.events
    outcome.simulated_s = world.loop.now_s
    outcome.cpu_s = time.process_time() - began_s
    return outcome


def simulate_alone(plan: Trial) -> Outcome:
    """Works as `simulate`; the outcome has no world, so that it can be sent to another process.

    From the first call on, the process's garbage is collected by `simulate` alone: it simulates
    nothing but seeds.
    """
    gc.disable()
    return replace(simulate(plan), world=None)
