"""Tells the run's held-out loss: of the scores that `diloco evaluate` and others keep in the store.

An aggregator evaluates nothing: it has no task. It reads each score once.
"""

import asyncio
from dataclasses import dataclass, field

from diloco.aggregator.context import Context
from diloco.common import metrics, names, shards, wire
from diloco.common.errors import DilocoError, ObjectMissingError, WireError

LOOK_S = 60.0


async def watch_scores(context: Context) -> None:
    """Keep the figures of held-out loss those of the newest scores; never returns."""
    watch = ScoreWatch(context)
    while True:
        await watch.look()
        await asyncio.sleep(LOOK_S * context.runtime.rng.uniform(0.75, 1.25))


@dataclass
class ScoreWatch:
    """What is known of the run's scores."""

    context: Context
    _seen: set[str] = field(default_factory=set)
    _first: wire.Score | None = None
    _best: wire.Score | None = None
    _newest: wire.Score | None = None
    _told: str = ""

    async def look(self) -> None:
        """Read what is new, and tell; what fails is told once."""
        try:
            await self._read()
        except DilocoError as error:
            if error.message != self._told:
                self.context.logger.warning("scores_unread", why=error.message)
            self._told = error.message
        else:
            self._told = ""
            self._show()

    async def _read(self) -> None:
        context = self.context
        listed = await context.runtime.call(context.store.list, names.scores_prefix(context.run))
        for info in listed:
            if info.name not in self._seen:
                await self._take(info.name)
                self._seen.add(info.name)

    async def _take(self, name: str) -> None:
        context = self.context
        try:
            data = await context.runtime.call(context.store.get, name)
            score = wire.decode(wire.Score, data)
        except (ObjectMissingError, WireError):
            return  # Collected meanwhile, or of another release.
        if not name.endswith(f"-{shards.digest(data)}"):
            return  # Edited or damaged.
        if (score.run, score.epoch) != (context.run, context.epoch):
            return
        if self._first is None or score.at_s < self._first.at_s:
            self._first = score
        if self._newest is None or score.at_s >= self._newest.at_s:
            self._newest = score
        if self._best is None or score.loss < self._best.loss:
            self._best = score

    def _show(self) -> None:
        found = {"first": self._first, "best": self._best, "newest": self._newest}
        for which, score in found.items():
            if score is not None:
                self.context.metrics.set(metrics.HELD_OUT, score.loss, which)
        if self._newest is not None:
            self.context.metrics.set(metrics.HELD_OUT_STEP, self._newest.global_step)
