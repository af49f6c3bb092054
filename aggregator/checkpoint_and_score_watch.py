"""Two periodic checks that each aggregator makes for the whole run: of checkpoints and of scores.

If a run without a checkpoint loses its NATS servers and their disks, the run is lost. So
aggregators make a checkpoint whenever one is due. They check at random intervals, so that two
aggregators seldom make a checkpoint at once; two checkpoints do no harm. Scores of held-out loss
are stored by `diloco evaluate` and others; an aggregator has no task and evaluates nothing, it only
shows the scores as metrics.
"""

import asyncio
import time
from dataclasses import dataclass, field

from diloco.aggregator.checkpoint import mark
from diloco.aggregator.context import Context
from diloco.common.process import metrics
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import DilocoError, ObjectMissingError, WireError
from diloco.common.storage.checkpoint_files import checkpoints, load_file
from diloco.common.storage.tape import has_ended, last_record, load_specification

LOOK_S = 60.0
# The shortest interval between checkpoints, in multiples of the time that the last one took.
REST = 20.0


@dataclass
class Lookout:
    """Base class of a periodic check; a fault that persists is logged once."""

    context: Context
    _told: str = field(default="", init=False)

    async def watch(self, look_s: float = LOOK_S) -> None:
        """Calls `look` every 0.75 to 1.25 x `look_s` seconds; never returns."""
        while True:
            await self.look()
            await asyncio.sleep(look_s * self.context.runtime.rng.uniform(0.75, 1.25))

    async def look(self) -> None:
        """Makes one check; logs a fault unless it is the same as the last one logged."""
        try:
            await self._look()
        except DilocoError as error:
            if error.message != self._told:
                self._failed(error.message)
            self._told = error.message
        except Exception as error:
            # A bug, or a moment without memory, must not end this process's checks.
            if repr(error) != self._told:
                self.context.logger.exception("check_broke")
            self._told = repr(error)
        else:
            self._told = ""

    async def _look(self) -> None:
        raise NotImplementedError

    def _failed(self, why: str) -> None:
        raise NotImplementedError


@dataclass
class CheckpointWatch(Lookout):
    """Sets the metric with the newest checkpoint's time, and makes the next one when it is due.

    Attributes:
        interval_s: the shortest time between two checkpoints, in seconds; 0: never make one. A
            checkpoint is due later if the last one took long, or if there is no newer version.
    """

    interval_s: float
    _known: str | None = None
    _made_at_s: float = 0.0
    _seen_s: float = 0.0
    _versions: tuple[int, ...] = ()
    _took_s: float = 0.0

    async def _look(self) -> None:
        await self._read()
        if await self._due():
            await self._make()

    async def _read(self) -> None:
        context = self.context
        known = await context.runtime.call(checkpoints, context.store, context.run)
        newest = known[-1] if known else ""
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
        self._known, self._seen_s = newest, time.monotonic()

    def _failed(self, why: str) -> None:
        self.context.logger.warning("checkpoint_failed", why=why)

    async def _due(self) -> bool:
        context = self.context
        # The clock of the machine that made it may be ahead of this one's, by hours.
        age_s = max(context.runtime.clock() - self._made_at_s, time.monotonic() - self._seen_s)
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


@dataclass
class ScoreWatch(Lookout):
    """Sets the metrics of held-out loss: first, best and newest score; reads each score once."""

    _seen: set[str] = field(default_factory=set)
    _first: wire.Score | None = None
    _best: wire.Score | None = None
    _newest: wire.Score | None = None

    async def _look(self) -> None:
        context = self.context
        listed = await context.runtime.call(context.store.list, names.scores_prefix(context.run))
        for info in listed:
            if info.name not in self._seen:
                await self._take(info.name)
                self._seen.add(info.name)
        self._show()

    async def _take(self, name: str) -> None:
        context = self.context
        try:
            data = await context.runtime.call(context.store.get, name)
            score = wire.decode(wire.Score, data)
        except (ObjectMissingError, WireError):
            return  # Deleted meanwhile, or written by another release.
        if not name.endswith(f"-{shards.digest(data)}"):
            return  # The bytes differ from the name's digest: edited or damaged.
        if (score.run, score.epoch) != (context.run, context.epoch):
            return
        if self._first is None or score.at_s < self._first.at_s:
            self._first = score
        if self._newest is None or score.at_s >= self._newest.at_s:
            self._newest = score
        if self._best is None or score.loss < self._best.loss:
            self._best = score

    def _failed(self, why: str) -> None:
        self.context.logger.warning("scores_unread", why=why)

    def _show(self) -> None:
        found = {"first": self._first, "best": self._best, "newest": self._newest}
        for which, score in found.items():
            if score is not None:
                self.context.metrics.set(metrics.HELD_OUT, score.loss, which)
        if self._newest is not None:
            self.context.metrics.set(metrics.HELD_OUT_STEP, self._newest.global_step)
