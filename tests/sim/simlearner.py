"""A learner of a simulated run: production code, assembled as in `diloco.learner.leading_host`."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from simactor import Actor, Killed
from simaveraged import Life
from simchain import Violation
from simdisk import Disk, SimSaver, Snapshots
from simmesh import MeshUploader
from simtensors import TOKENS
from simworld import World, ended

from diloco.common.process.config import check_same_run, parse_settings
from diloco.common.protocol.errors import ExpiredError, SupersededError
from diloco.common.storage.data_share_allocation import Holding
from diloco.common.storage.tape import load_specification
from diloco.learner.background import Context as LearnerContext
from diloco.learner.background import NoOtherHosts
from diloco.learner.core import sync
from diloco.learner.core.carry import carry
from diloco.learner.core.events import (
    Adopt,
    Effect,
    Event,
    sync_rules,
)
from diloco.learner.core.handover import NOTHING, Arrived, Decoded
from diloco.learner.leading_host import leaves_snapshot, losses_of, say_end
from diloco.learner.synchronizer import HOLD_S, Losses, Meter, Planner, Synchronizer, never
from diloco.learner.wire.claims import LOOK_S, Claims
from diloco.learner.wire.fetch_versions import Receiver, VersionFetcher, load, start_at
from diloco.learner.wire.incarnation import (
    Membership,
    end_when_superseded,
    join,
)
from diloco.learner.wire.publish import Publisher, Uploader
from diloco.learner.wire.resume_position import ResumePosition, place_after_join

# The value of `learner.drain_timeout_s`.
LEAVE_S = 20.0


class SimBackground:
    """Replaces `diloco.learner.background.Background`: its tasks run in the virtual loop."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.loop = actor.world.loop
        self.check = actor.check
        self.arrived: list[Arrived] = []

    def post(self, event: Event, payload: Decoded = NOTHING) -> None:
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


class SimClaims(Claims):
    """`Claims` that wait for a share in the virtual loop, instead of blocking a thread."""

    async def held_at(self, position: int) -> Holding | None:
        """Works as `at`, and waits in the virtual loop; returns None if the learner is to end."""
        while self._find(position) is None:
            self._check_life()
            if self._ends():
                return None
            await asyncio.sleep(LOOK_S)
        return self.at(position)


@dataclass(kw_only=True)
class SimSynchronizer(Synchronizer):
    """A `Synchronizer` that tells the checkers of each view that it adopts.

    Attributes:
        life: the learner's incarnation to which the synchronizer belongs.
    """

    life: Life

    def _perform(self, effect: Effect) -> None:
        super()._perform(effect)
        if isinstance(effect, Adopt):
            world, ready = self.boundaries.inbox.actor.world, effect.ready
            view = world.tensors.view(self.replica, ready.fragment)
            world.checkers.on_adopted(self.life, ready, view, self.position)


class SimLearner:
    """A learner in virtual time, with the production publisher, receiver, core and synchronizer.

    Args:
        world: the world in which the learner trains.
        index: the learner's number, from which its name is made.
        step_s: mean seconds of an inner step.
        heartbeat_interval_s: seconds between heartbeats.
        hosts: possible numbers of hosts; each start of the learner draws one of them.
        disk: the disk with the learner's checkpoints.
        snapshot_steps: steps between two snapshots of unsent work; 0: there are none.
        life: arguments of `Actor` for each start of the learner.
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
        snapshot_steps: int = 0,
        **life: Any,
    ) -> None:
        self.disk = disk
        self.snapshot_steps = snapshot_steps
        self.snapshots = Snapshots()
        self.world = world
        self.index = index
        self.name = f"learner-{index}"
        self.step_s = step_s
        self.heartbeat_interval_s = heartbeat_interval_s
        self.hosts = hosts
        self.life = life
        self.steps = 0
        self.tokens_per_step = TOKENS
        self.actor: Actor | None = None
        self.leave_asked = False
        self.run_ended = False
        self.superseded = False
        self.incarnation = 0
        # The modules that its life holds; empty: all. Once `holds_all`, its next lives hold all.
        self.holds: tuple[str, ...] = ()
        self.holds_all = False

    async def live(self, begin: Callable[[Actor], None] | None = None) -> bool:
        """Run one life to its end; returns True if it was not killed. `begin` may change its actor."""
        world = self.world
        self.leave_asked = self.run_ended = False
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
        """Run one life, in the order of `diloco.learner.leading_host`."""
        world, tensors, peers = self.world, self.world.tensors, NoOtherHosts()
        actor.starting = True
        specification = await load_specification(actor.bus, world.run_name)
        theirs = parse_settings(specification.settings)
        check_same_run(world.settings, theirs, world.layout.digest, specification.layout)
        context = replace(context, epoch=specification.epoch)
        self.holds = self._draw_modules(actor)
        # A replica that is far behind may know of no record for longer than a start has patience.
        loaded = [
            await load(context, one.index) if one.module in (self.holds or one.module) else None
            for one in world.layout.fragments
        ]
        actor.starting = False
        views = [item.view if item is not None else None for item in loaded]
        starts = tuple(start_at(item) if item is not None else None for item in loaded)
        replica = tensors.replica(self.index, world.settings.sync, world.layout, views)
        found = self.disk.restore(actor, context) if self.disk is not None else None
        local_step, tokens = (found.local_step, found.tokens) if found else (0, 0)
        meter = Meter(self.name, context.traffic, local_step=local_step, earlier_tokens=tokens)
        life = await join(context, "sim", holds=self.holds)
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
        place = await place_after_join(context, life.incarnation)
        rules = sync_rules(world.settings.sync, world.layout)
        going_on = self.snapshots.going_on(place, life, rules, starts)
        if going_on is not None:
            place = place.going_on(going_on[0].position, going_on[2])
        position = place.position
        tensors.begin(replica, position)
        if going_on is not None:
            world.injected["carried"] += 1
            replica.carry(going_on[1], going_on[2])
        self.meter = meter
        own = Life(context.epoch, self.name, life.incarnation)
        before = life.before if going_on is not None else 0
        versions = [start.version if start is not None else 0 for start in starts]
        world.checkers.on_began(own, versions, position, before)
        claims = self._claims(context, background, life, place)
        saver = None
        if self.snapshot_steps:
            saver = SimSaver(actor, context, life.incarnation, self.snapshots)
        planner = Planner(
            rules=rules, state=carry(rules, sync.begin(rules, starts), going_on[2] if going_on else ()),
            snapshot_steps=self.snapshot_steps, saver_idle=saver.idle if saver else never,
            inbox=background, tokens_per_step=self.tokens_per_step, drain_timeout_s=LEAVE_S, clock=actor.clock,
            asked_to_leave=lambda: self.leave_asked,
        )  # fmt: skip
        synchronizer = SimSynchronizer(
            replica=replica, position=position, tokens_per_step=self.tokens_per_step, boundaries=planner,
            outbox=lambda word: background.spawn(publisher.say(word)), meter=meter,
            saver=saver, clock=actor.clock, life=own,
            losses=losses_of(going_on[0], going_on[2]) if going_on else Losses(),
        )  # fmt: skip
        save = None
        if self.disk is not None:
            save = partial(self.disk.save, actor, context, synchronizer, life.incarnation)
        await self._train(actor, synchronizer, claims, save)
        self.run_ended = planner.state.stopping
        world.checkers.on_leaving(own, synchronizer.position)
        with contextlib.suppress(TimeoutError):
            said = say_end(
                publisher, claims, synchronizer.position, snapshot=leaves_snapshot(planner)
            )
            await asyncio.wait_for(said, LEAVE_S)

    def _draw_modules(self, actor: Actor) -> tuple[str, ...]:
        """Draws the modules that a life holds; empty: all."""
        modules = self.world.layout.modules
        if len(modules) == 1 or self.holds_all or actor.rng.random() < 0.3:
            return ()
        self.world.injected["modules"] += 1
        return tuple(actor.rng.sample(modules, actor.rng.randint(1, len(modules) - 1)))

    def _claims(
        self,
        context: LearnerContext,
        background: SimBackground,
        life: Membership,
        place: ResumePosition,
    ) -> SimClaims:
        """Returns the life's claims to shares of the data; they are divided only if the world's are."""

        def told(holding: Holding, _end: int) -> None:
            own = Life(context.epoch, context.learner, life.incarnation)
            self.world.checkers.on_granted(own, holding)

        claims = SimClaims(
            context, lambda: self.leave_asked, life, place, background=background, told=told
        )
        if self.world.sizes is not None:
            claims.divide(self.world.sizes)
        return claims

    async def _end_when_superseded(self, context: LearnerContext, life: Membership) -> None:
        """End the process once a newer one has its name, or its life has expired."""
        try:
            await end_when_superseded(context, life)
        except SupersededError:
            self.superseded = True
            context.bus.actor.kill()
        except ExpiredError:
            self.world.injected["expired"] += 1
            context.bus.actor.kill()

    def _uploader(self, actor: Actor, context: LearnerContext, replica: Any) -> Any:
        """Returns an uploader for the number of hosts that this life draws."""
        hosts = actor.rng.choice(self.hosts) if len(self.hosts) > 1 else self.hosts[0]
        if hosts == 1:
            return Uploader(context, replica)
        self.world.injected["meshes"] += 1
        return MeshUploader(context, replica, actor, hosts)

    async def _next_batch(self, synchronizer: SimSynchronizer, claims: SimClaims) -> bool:
        """Waits for the next batch; returns False if the learner is to end instead."""
        holding, life = await claims.held_at(synchronizer.position), synchronizer.life
        if holding is not None:
            self.world.checkers.on_batch(life, synchronizer.position, holding)
        return holding is not None

    async def step(self, actor: Actor, _synchronizer: SimSynchronizer) -> None:
        """Takes the time of a step."""
        await asyncio.sleep(self.step_s * actor.rng.uniform(0.95, 1.05))
        actor.check()

    async def _train(
        self,
        actor: Actor,
        synchronizer: SimSynchronizer,
        claims: SimClaims,
        save: Callable[[], None] | None,
    ) -> None:
        world, meter, loop = self.world, synchronizer.meter, self.world.loop
        meter.step_time_s = self.step_s
        then, first = "step", True
        while then != "end":
            if then == "hold":
                await asyncio.sleep(HOLD_S)
                actor.check()
                then = synchronizer.turn().then
                continue
            if world.sizes is not None and not await self._next_batch(synchronizer, claims):
                synchronizer.boundaries.give_up()
                then = "hold"
                continue
            await self.step(actor, synchronizer)
            began_s = loop.now_s
            world.tensors.train(synchronizer.replica, self.index, synchronizer.position)
            synchronizer.position += 1
            self.steps += 1
            world.steps += 1
            world.first_steps += first
            first = False
            meter.local_step += 1
            meter.tokens += self.tokens_per_step
            synchronizer.losses.stepped(None, 1.0)
            if save is not None:
                save()
            boundary = synchronizer.turn()
            if boundary.unsent:
                synchronizer.checkpoint(None, boundary)
            then = boundary.then
            world.checkers.on_stepped(self.name, loop.now_s - began_s)
