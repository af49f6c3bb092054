"""The run's checkpoints: made as they come due, by whichever aggregator looks first.

Without one a run whose NATS servers are lost with their disks is lost with them. Each aggregator
looks at times of its own; that two make one at once is rare, and harms nothing.
"""

import asyncio
import time
from dataclasses import dataclass, field

from diloco.aggregator.checkpoint import mark
from diloco.aggregator.context import Context
from diloco.common import metrics
from diloco.common.checkpoint_files import checkpoints, load_file
from diloco.common.errors import DilocoError
from diloco.common.tape import has_ended, last_record, load_specification

LOOK_S = 60.0
# A checkpoint that took long is not made again before so many times that long.
REST = 20.0


async def watch_checkpoints(context: Context, interval_s: float) -> None:
    """Keep the newest checkpoint no older than `interval_s`, 0: make none; never returns."""
    watch = CheckpointWatch(context, interval_s)
    look_s = min(LOOK_S, interval_s / 4) if interval_s else LOOK_S
    while True:
        await watch.look()
        await asyncio.sleep(look_s * context.runtime.rng.uniform(0.75, 1.25))


@dataclass
class CheckpointWatch:
    """What is known of the run's newest checkpoint."""

    context: Context
    interval_s: float
    _known: str | None = None
    _made_at_s: float = 0.0
    _versions: tuple[int, ...] = ()
    _took_s: float = 0.0
    _told: str = field(default="")

    async def look(self) -> None:
        """Tell its age, and make another one that is due; what fails is told once."""
        try:
            await self._read()
            if await self._due():
                await self._make()
        except DilocoError as error:
            if error.message != self._told:
                self.context.logger.warning("checkpoint_failed", why=error.message)
            self._told = error.message
        else:
            self._told = ""

    async def _read(self) -> None:
        context = self.context
        names = await context.runtime.call(checkpoints, context.store, context.run)
        newest = names[-1] if names else ""
        if newest == self._known:
            return
        if newest:
            file = await context.runtime.call(load_file, context.store, context.run, newest)
            self._made_at_s = file.created_at_s
            self._versions = tuple(record.version for record in file.records)
        else:
            specification = await load_specification(context.bus, context.run)
            self._made_at_s = specification.created_at_s
        context.metrics.set(metrics.RUN_CHECKPOINTED_AT, self._made_at_s)
        self._known = newest

    async def _due(self) -> bool:
        context = self.context
        age_s = context.runtime.clock() - self._made_at_s
        if not self.interval_s or age_s < max(self.interval_s, REST * self._took_s):
            return False
        fragments = range(len(context.layout.fragments))
        now = tuple([(await last_record(context, fragment))[0].version for fragment in fragments])
        return now != self._versions and not await has_ended(context.bus, context.run)

    async def _make(self) -> None:
        began_s = time.monotonic()
        made = await mark(self.context)
        self._took_s = time.monotonic() - began_s
        self.context.logger.info("checkpoint_made", name=made.name, took_s=round(self._took_s, 3))
        await self._read()
