"""A run that is followed for a page: one reader of its tape; heartbeats and scores beside it."""

import asyncio
import contextlib
import sys
from typing import NamedTuple

from diloco.common import wire
from diloco.common.errors import (
    BusUnavailableError,
    StoreError,
    StoreUnavailableError,
)
from diloco.common.service import cancel
from diloco.common.tape import Item, RunContext, read_tape
from diloco.look.status import Status, Watch
from diloco.model.scores import kept
from diloco.projections.condense import condense
from diloco.projections.timeseries import Builder, TimeSeries
from diloco.report.lanes import make_lanes
from diloco.report.numbers import Shown

# Seconds between two looks for scores that others have kept.
SCORES_S = 15.0
# Messages between two looks at how long the columns have become, and two words on progress.
LOOK_EVERY = 2000
# Of a life in a lane: more than a page has points for.
STRETCHES = 160
# Before another try to read, where bus or store were away.
RETRY_S = 1.0
# Within so long the bus says how the run is, or what is known counts as old.
ANSWER_S = 4.0


class Progress(NamedTuple):
    """Messages of the tape that were read, of about so many."""

    done: int
    total: int


class LiveRun:
    """Keeps what a page shows of a run, in memory that does not grow with what learners send.

    Args:
        context: the run's.
        created_s: when the run was created.
        goes_on: whether more may come: not so in a file.

    Attributes:
        series: the tape's columns, condensed.
        progress: while what the tape holds is read for the first time.
        failure: why the run is not followed any more.
    """

    def __init__(self, context: RunContext, created_s: float, *, goes_on: bool = True) -> None:
        self._context = context
        self._goes_on = goes_on
        self.series = TimeSeries(context.run, context.settings, context.layout, created_s)
        # Cosines are not shown, so none is computed.
        self._builder = Builder(self.series, context.epoch, every=sys.maxsize)
        self._watch = Watch(context, self._take)
        self._scores: list[wire.Score] = []
        self._known: dict[str, wire.Score] = {}
        self._taken = 0
        self._caught_up = False
        self.progress: Progress | None = Progress(0, 0)
        self.failure: Exception | None = None

    async def follow(self) -> None:
        """Read the tape, and go on with it, until it is cancelled."""
        scoring = asyncio.ensure_future(self._follow_scores())
        try:
            await self._follow_tape()
            await scoring
        finally:
            await cancel(scoring)

    async def _follow_tape(self) -> None:
        try:
            while True:
                if await self._followed():
                    return
                await asyncio.sleep(RETRY_S)
        except Exception as error:  # noqa: BLE001 - told on the page; what goes on beside goes on
            self.failure = error

    async def _followed(self) -> bool:
        """Go on from where the reading was; False once bus or store are away."""
        try:
            if not self._caught_up:
                await self._catch_up()
            if self._goes_on:
                await self._watch.follow(self._next_seq)
        except (BusUnavailableError, StoreUnavailableError):
            return False
        return True

    @property
    def _next_seq(self) -> int:
        return self.series.extent.last_seq + 1

    async def status(self) -> Status | None:
        """How the run fares; None until the tape has been read."""
        if not self._caught_up:
            return None
        try:
            return await asyncio.wait_for(self._watch.now(), ANSWER_S)
        except TimeoutError:
            return self._watch.as_it_was()

    def shown(self) -> Shown:
        """The figures as of now."""
        self.series.beats = self._watch.observed.learners
        return Shown(self.series, make_lanes(self.series, STRETCHES), self._scores)

    @property
    def name(self) -> str:
        """The run's."""
        return self._context.run

    def clock(self) -> float:
        """Seconds since the epoch; of a file, those of when it was made."""
        return self._context.runtime.clock()

    @property
    def moved(self) -> tuple[int, int]:
        """Differs when there is something new to be drawn."""
        return self._taken, len(self._scores)

    async def _catch_up(self) -> None:
        start_seq = await self._watch.first_seq()
        self.progress = Progress(0, await self._context.bus.last_sequence(self._context.tape))
        reading = read_tape(self._context, self._next_seq)
        async with contextlib.aclosing(reading) as items:  # type: ignore[type-var]
            async for item in items:
                if item.seq >= start_seq:
                    break
                self._take(item)
        await self._watch.begin(max(start_seq, self._next_seq))
        self.progress, self._caught_up = None, True

    def _take(self, item: Item) -> None:
        self._builder.take(item)
        self._taken += 1
        if self._taken % LOOK_EVERY == 0:
            condense(self.series)
            if self.progress is not None:
                self.progress = self.progress._replace(done=item.seq)

    async def _follow_scores(self) -> None:
        while True:
            await self._read_scores()
            await asyncio.sleep(SCORES_S)

    async def _read_scores(self) -> None:
        with contextlib.suppress(StoreError):  # Until it is back, those that were read.
            self._scores = await kept(self._context, self._known)
