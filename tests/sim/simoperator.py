"""The operator of a simulated run, whose commands meet the same faults as daemons."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from simactor import Actor
from simchain import Violation

from diloco.aggregator import checkpoint, rollback
from diloco.aggregator import settings as run_settings
from diloco.aggregator.context import Context
from diloco.aggregator.owner.garbage_collector import delete, trim_tape
from diloco.aggregator.owner.quarantine_messages import quarantine, quarantined_learners
from diloco.common.process.config import parse_settings
from diloco.common.protocol.errors import DilocoError, IntegrityError
from diloco.common.storage.tape import effective_settings
from diloco.operate.run_garbage import find

if TYPE_CHECKING:
    from simworld import World

Command = Callable[[Context, random.Random], Awaitable[None]]
# A command that takes longer is interrupted.
PATIENCE_S = 30.0
# The probability that a change of the run's length makes it longer.
LONGER = 0.75
# Steps by which a paused run is made longer, so that it cannot end during the check of pauses.
FAR = 200


class Operator:
    """Runs operators' commands, each as an actor of its own.

    Args:
        world: the simulated world.
        learners: names of the run's learners.
        begin: called with the actor of each command before the command runs.
    """

    def __init__(self, world: "World", learners: list[str], begin: Callable[[Actor], None]) -> None:
        self._world = world
        self._learners = learners
        self._begin = begin
        self._length = 1

    async def command(self, command: Command, rng: random.Random) -> bool:
        """Run a command; returns whether it succeeded. Who cancels this ends the command's process."""
        context = self._world.operator()
        actor: Actor = context.bus.actor  # type: ignore[attr-defined]
        self._begin(actor)
        self._world.note(actor, "begins", command.__name__)
        task: asyncio.Task[Any] = actor.spawn(command(context, rng))  # type: ignore[arg-type]
        try:
            await asyncio.wait([task], timeout=PATIENCE_S)
            error = task.exception() if task.done() and not task.cancelled() else None
            unexpected = not isinstance(error, DilocoError)
            # A missing object may be one that the store does not show yet: the error allows a retry.
            unexpected |= isinstance(error, IntegrityError) and not error.retry
            if error is not None and unexpected and not (actor.dead or self._world.damaged):
                self._world.fail(Violation("breaks", actor.name, repr(error)))
            return task.done() and not actor.dead and error is None
        finally:
            actor.kill()

    async def change(self, context: Context, rng: random.Random) -> None:
        """Run `diloco run set` with drawn values."""
        now, seq = await effective_settings(context)
        sections = {
            "sync": {"min_steps": min(now.sync.interval_steps, rng.choice([1, 2, 4]))},
            "quorum": {"min_learners": rng.choice([1, 2, 3])},
            "outer": {"learning_rate": rng.choice([0.5, 1.0])},
        }
        document = now.model_dump()
        for section, values in sections.items():
            document[section] |= values
        await run_settings.change_settings(context, parse_settings(document), based_on=seq)

    async def lengthen(self, context: Context, rng: random.Random) -> None:
        """Run `diloco run set run.steps=...` with a greater number, now and then a smaller one."""
        now, _ = await effective_settings(context)
        by = rng.choice([1, now.sync.interval_steps, 2 * now.sync.interval_steps])
        longer = rng.random() < LONGER
        await self._set_run(context, steps=max(1, now.run.steps + (by if longer else -by)))

    async def pause(self, context: Context, _chance: random.Random) -> None:
        """Run `diloco run pause`."""
        await self._set_run(context, paused=True)

    async def proceed(self, context: Context, _chance: random.Random) -> None:
        """Run `diloco run continue`."""
        await self._set_run(context, paused=False)

    async def hold(self, context: Context, _chance: random.Random) -> None:
        """Pause a run, and make it so long that it cannot end even if learners ignore the pause."""
        now, _ = await effective_settings(context)
        self._length = now.run.steps
        await self._set_run(context, paused=True, steps=self._length + FAR)

    async def let_go(self, context: Context, _chance: random.Random) -> None:
        """Give the run the length that it had before `hold`."""
        await self._set_run(context, steps=self._length)

    async def end(self, context: Context, _chance: random.Random) -> None:
        """Run `diloco run end`."""
        await run_settings.end_run(context, "operator")

    @staticmethod
    async def _set_run(context: Context, **changed: Any) -> None:
        now, seq = await effective_settings(context)
        document = now.model_dump()
        document["run"] |= changed
        await run_settings.change_settings(context, parse_settings(document), based_on=seq)

    async def roll_back(self, context: Context, rng: random.Random) -> None:
        """Run `diloco run rollback`, by up to four versions."""
        back = rng.randint(0, 4)
        newest = [chain.record.version for chain in self._world.checkers.chains if chain.record]
        wanted = {fragment: max(0, version - back) for fragment, version in enumerate(newest)}
        targets = await rollback.find_versions(context, wanted)
        await rollback.roll_back(context, targets)

    async def mark(self, context: Context, _chance: random.Random) -> None:
        """Run `diloco run checkpoint`."""
        await checkpoint.mark(context)

    async def resume(self, context: Context, _chance: random.Random) -> None:
        """Run `diloco run resume`."""
        await self._world.resume(context.bus.actor)  # type: ignore[attr-defined]

    async def shut_out(self, context: Context, rng: random.Random) -> None:
        """Run `diloco run quarantine` for one learner."""
        await quarantine(context, rng.choice(self._learners), active=True, reason="simulated")

    async def release(self, context: Context, _chance: random.Random) -> None:
        """Run `diloco run release` for each quarantined learner."""
        for learner in sorted(await quarantined_learners(context)):
            await quarantine(context, learner, active=False, reason="simulated")

    async def collect(self, context: Context, _chance: random.Random) -> None:
        """Run `diloco run gc`, beside the aggregators' own garbage collection."""
        found = await find(context, context.gc)
        await trim_tape(context, found.trims)
        await delete(context, [item.name for item in found.objects])
