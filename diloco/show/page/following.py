"""Follows a run for its live page: reads the tape once, for all browsers.

The server draws each section of the page once for all browsers, except the learners' section: a
browser asks for the learners that it shows, and only these are drawn for it.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from rich.console import Console

from diloco.common.process.tasks import cancel, within
from diloco.common.protocol import wire
from diloco.common.protocol.errors import (
    BusUnavailableError,
    ConfigError,
    DilocoError,
    StoreError,
    StoreUnavailableError,
    StreamMissingError,
)
from diloco.common.storage.tape import Item, RunContext, read_tape
from diloco.run.cli.opening import open_run, placed
from diloco.run.model.evaluate import read_scores
from diloco.run.state import RunStatus
from diloco.run.timeseries import Builder, TimeSeries, condense
from diloco.run.watch import Watch, read_runs
from diloco.show.page import html_sections
from diloco.show.page.lanes import make_lanes
from diloco.show.page.numbers import Shown
from diloco.show.page.server import Board, serving

# Seconds between two updates of the run's state.
EVERY_S = 1.0
# Figures: the share of a core that drawing them may take, which determines the interval between
# two drawings; the shortest such interval; and the interval if nothing comes, since time passes.
SHARE, FIGURES_S, STILL_S = 0.1, 2.0, 15.0
# Seconds between two reads of stored scores.
SCORES_S = 15.0
# Messages between two checks of the columns' length, and between two reports of progress.
LOOK_EVERY = 2000
# Seconds before another attempt to read, after bus or store were unreachable.
RETRY_S = 1.0
# Seconds in which the bus must tell the run's state; otherwise the known state counts as old.
ANSWER_S = 4.0


class ReadingProgress(NamedTuple):
    """The progress of reading a tape: the sequences of the last message read and of the newest."""

    done: int
    total: int


class LiveRun:
    """A run that is followed for its page, in memory that does not grow with its updates.

    Args:
        context: the run's context.
        created_s: when the run was created, in seconds since the epoch.
        goes_on: whether more messages may come; False for a bundle.
        copied: whether the run is read from a bundle, whose maker may have altered it.

    Attributes:
        series: the tape as a time series, condensed if it is long.
        progress: progress of the first reading of the tape; None: that is over.
        failure: the error for which the run is no longer followed; None: it is followed.
    """

    def __init__(
        self, context: RunContext, created_s: float, *, goes_on: bool = True, copied: bool = False
    ) -> None:
        self.context = context
        self._goes_on = goes_on
        self._copied = copied
        self.series = TimeSeries(context.run, context.settings, context.layout, created_s)
        self._builder = Builder(self.series, context.epoch)
        self._watch = Watch(context, self._take)
        self._scores: list[wire.Score] = []
        self._known: dict[str, wire.Score] = {}
        self._taken = 0
        self.progress: ReadingProgress | None = ReadingProgress(0, 0)
        self.failure: Exception | None = None

    async def follow(self) -> None:
        """Reads the tape and the scores, and follows both until the run ends.

        If bus or store are unreachable, tries again. Any other error becomes `failure`.
        """
        scoring = asyncio.ensure_future(self._follow_scores())
        try:
            while not await self._followed():  # noqa: ASYNC110 - what is away tells nobody
                await asyncio.sleep(RETRY_S)
        except Exception as error:  # noqa: BLE001 - told on the page; what goes on beside goes on
            self.failure = error
        finally:
            await cancel(scoring)

    async def _followed(self) -> bool:
        """Follows the tape from the next message on.

        Returns False if bus or store are unreachable, True if no more messages will come.
        """
        try:
            if self.progress is not None:
                await self.catch_up()
            if self._goes_on:
                await self._watch.follow(self._next_seq, store=True)
        except (BusUnavailableError, StoreUnavailableError):
            return False
        return True

    @property
    def _next_seq(self) -> int:
        return self.series.extent.last_seq + 1

    async def status(self) -> RunStatus | None:
        """Returns the run's status; None until the tape has been read once.

        If the bus does not answer in time, returns the last known status, marked as not current.
        """
        if self.progress is not None:
            return None
        try:
            return await within(ANSWER_S, self._watch.now())
        except TimeoutError:
            return self._watch.as_it_was()

    def shown(self) -> Shown:
        """Returns the present numbers for the page's figures."""
        self.series.beats = self._watch.observed.beats
        lanes = make_lanes(self.series)
        return Shown(self.series, lanes, self._scores, copied=self._copied)

    @property
    def moved(self) -> tuple[int, int]:
        """The numbers of messages and of scores read; if they change, there is more to draw."""
        return self._taken, len(self._scores)

    async def catch_up(self) -> None:
        """Reads the tape up to its newest message.

        Raises:
            BusError, StoreUnavailableError: bus or store are unreachable.
        """
        start_seq = await self._watch.first_seq()
        last_seq = await self.context.bus.last_sequence(self.context.tape)
        self._builder.set_cosine_sampling(last_seq)
        self.progress = ReadingProgress(0, last_seq)
        reading = read_tape(self.context, self._next_seq)
        async with contextlib.aclosing(reading) as items:  # type: ignore[type-var]
            async for item in items:
                if item.seq >= start_seq:
                    break
                self._take(item)
        await self._watch.begin(max(start_seq, self._next_seq))
        self.progress = None

    def _take(self, item: Item) -> None:
        self._builder.take(item)
        self._taken += 1
        if self._taken % LOOK_EVERY == 0:
            condense(self.series)
            if self.progress is not None:
                self.progress = self.progress._replace(done=item.seq)

    async def _follow_scores(self) -> None:
        while True:
            with contextlib.suppress(StoreError):  # until then, the scores that were read stay
                self._scores = await read_scores(self.context, self._known, thinned=True)
            await asyncio.sleep(SCORES_S)


@asynccontextmanager
async def served(run: LiveRun, *, port: int | None, again: str) -> AsyncIterator[str]:
    """Serves a run's page while the block lasts; yields the page's URL.

    Args:
        run: the run to show.
        port: port on loopback; 0: any free one; None: `DEFAULT_PORT`, or any free one.
        again: the command that the page names to show it again once this process has ended.

    Raises:
        ConfigError: the port is in use.
    """
    board = Board(html_sections.skeleton(run.context.run))
    with serving(board, port) as url:
        keeping = asyncio.ensure_future(LivePage(board, run, again).keep())
        try:
            yield url
        finally:
            await cancel(keeping)


class LivePage:
    """Follows a run, and writes its page to a board while a browser has the page open.

    Args:
        board: the contents of the page.
        run: the run to show.
        again: as in `served`.
    """

    def __init__(self, board: Board, run: LiveRun, again: str) -> None:
        self._board = board
        self._run = run
        self._again = again
        self._drawn: tuple[int, int] | None = None
        self._drawn_s = self._next_s = 0.0

    async def keep(self) -> None:
        """Follows the run and draws its page, until cancelled."""
        following = asyncio.ensure_future(self._run.follow())
        try:
            while True:
                if self._board.watched:
                    await self._try_to_show()
                else:
                    self._board.clear()
                    self._drawn, self._next_s = None, 0.0
                await asyncio.sleep(EVERY_S)
        finally:
            await cancel(following)

    async def _try_to_show(self) -> None:
        """Draws the page; on an error, shows the error and leaves the figures as they were."""
        try:
            await self._show()
        except Exception as error:  # noqa: BLE001 - told on the page, and tried again
            self._say(None, error)

    async def _show(self) -> None:
        status = await self._run.status()
        self._say(status, self._run.failure)
        if status is None:
            return
        self._board.show(html_sections.now(status, self._run.series))
        began_s = time.monotonic()
        still = began_s < self._drawn_s + STILL_S
        if began_s < self._next_s or (self._drawn == self._run.moved and still):
            return
        self._drawn, self._drawn_s = self._run.moved, began_s
        shown = self._run.shown()
        self._board.show(html_sections.figures(shown))
        self._board.show_learners(html_sections.Learners(shown, status))
        self._next_s = began_s + max(FIGURES_S, (time.monotonic() - began_s) / SHARE)

    def _say(self, status: RunStatus | None, failure: Exception | None) -> None:
        """Sets the status at the page's head: a word, and a sentence if there is more to say."""
        kind, word, sentence = "", "reading the tape", ""
        as_of_s = self._run.context.runtime.clock()
        if status is not None:
            word, as_of_s = status.state, status.as_of_s
        if self._run.progress is not None:
            done, total = self._run.progress
            sentence = f"Reading the tape: {done:,} of about {total:,} messages."
        if status is not None and not status.current:
            kind, word = "bad", "out of touch"
            sentence = "The bus does not answer: what is shown is as it was. This page tries on."
        if failure is not None:
            kind, word = "bad", "not followed"
            sentence = f"The run is not followed any more: {_words(failure)}."
        said = {"kind": kind, "word": word, "sentence": sentence, "as_of_s": as_of_s}
        self._board.say(said | {"again": self._again})


def run_dashboard(target: str | None, port: int | None) -> None:
    """Serves RUN's page until Ctrl-C or SIGTERM; arguments as of `diloco dashboard`.

    Raises:
        DilocoError: no such run; bus or store are unreachable; the port is in use.
    """
    asyncio.run(_serve(target, port))


async def _serve(target: str | None, port: int | None) -> None:
    console = Console(soft_wrap=True, highlight=False)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    target = target or await _only_run()
    async with open_run(target, name="dashboard", reads=True) as opened:
        copied = opened.bundle is not None
        created_s = opened.specification.created_at_s
        run = LiveRun(opened.context, created_s, goes_on=not copied, copied=copied)
        async with served(run, port=port, again=f"diloco dashboard {target}") as url:
            console.print(f"run {opened.context.run}: {url}", markup=False)
            console.print("Ctrl-C ends it")
            await stop.wait()
    console.print("stopped")


async def _only_run() -> str:
    """Returns the name of the only run on the bus.

    Raises:
        ConfigError: the bus has no run, or several.
        BusError: the bus is unreachable, or does not let this user list runs.
    """
    found = [line.run for line in await read_runs(placed("unnamed", stored=False).bus)]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"this bus has {len(found)} runs: {', '.join(found[:20])}"
        if found
        else "there are no runs on this bus",
        hint="name one: diloco --bus URL --store URL dashboard RUN",
    )


def _words(error: Exception) -> str:
    if isinstance(error, StreamMissingError):
        return (
            "its tape is gone. Either it was deleted, or its NATS server lost its disk: "
            "runbooks/restore-from-bucket.md"
        )
    if isinstance(error, DilocoError):
        return f"{error.message}{f' ({error.hint})' if error.hint else ''}"
    return f"a bug: {error!r}"
