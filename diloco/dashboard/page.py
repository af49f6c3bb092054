"""A run's page, kept as new as the run: follow, draw up, hang up for the server to show."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from diloco.common.errors import DilocoError, StreamMissingError
from diloco.common.service import cancel
from diloco.common.tape import RunContext
from diloco.dashboard import frames
from diloco.dashboard.board import Board
from diloco.dashboard.following import LiveRun
from diloco.dashboard.frames import Learners
from diloco.dashboard.server import serving
from diloco.look.status import Status
from diloco.report.summary import settings

# Between two words on how the run is; and the share of a core that its figures may take, of which
# the interval between two follows.
EVERY_S = 1.0
SHARE = 0.1
# Figures of a run where nothing comes are drawn again so often: its time goes on.
STILL_S = 15.0


@asynccontextmanager
async def served(
    context: RunContext,
    created_s: float,
    *,
    port: int | None,
    again: str,
    goes_on: bool = True,
) -> AsyncIterator[str]:
    """Serve a run's page while the block lasts; its address.

    Args:
        context: the run's.
        created_s: when the run was created.
        port: as `serving`.
        again: the command that shows the page once more, for when this one has ended.
        goes_on: as `LiveRun`.

    Raises:
        ConfigError: the port is not to be had.
    """
    board = Board()
    page = Page(board, LiveRun(context, created_s, goes_on=goes_on), again)
    with serving(board, port) as url:
        keeping = asyncio.ensure_future(page.keep())
        try:
            yield url
        finally:
            await cancel(keeping)


class Page:
    """Hangs up what a run's page shows, as long as somebody looks.

    Args:
        board: where.
        run: what it shows.
        again: as `served`.
    """

    def __init__(self, board: Board, run: LiveRun, again: str) -> None:
        self._board = board
        self._run = run
        self._again = again
        self._drawn: tuple[int, int] | None = None
        self._drawn_s = 0.0
        self._next_s = 0.0

    async def keep(self) -> None:
        """Follow the run, and show it, until cancelled."""
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
        """Show the run, or why it cannot be shown; the page beside it stays as it was."""
        try:
            await self._show()
        except Exception as error:  # noqa: BLE001 - told on the page, and tried again
            self._board.show("now", frames.as_bytes(self._known(error)))

    async def _show(self) -> None:
        status = await self._run.status()
        self._board.show("now", frames.as_bytes(self._now(status)))
        began_s = time.monotonic()
        if status is None or not self._is_due(began_s):
            return
        self._drawn, self._drawn_s = self._run.moved, began_s
        self._draw(status)
        took_s = time.monotonic() - began_s
        self._next_s = began_s + took_s / SHARE

    def _is_due(self, at_s: float) -> bool:
        still = at_s < self._drawn_s + STILL_S
        return at_s >= self._next_s and (self._drawn != self._run.moved or not still)

    def _now(self, status: Status | None) -> dict[str, Any]:
        known = self._known(self._run.failure)
        if status is None:
            return known
        return known | frames.now(status, self._run.series)

    def _known(self, failure: Exception | None) -> dict[str, Any]:
        """What is told also where the run is not to be seen."""
        return {
            "run": self._run.name,
            "at_s": self._run.clock(),
            "again": self._again,
            "reading": self._run.progress,
            "failure": _words(failure) if failure is not None else None,
        }

    def _draw(self, status: Status) -> None:
        shown = self._run.shown()
        lanes = {lane.learner: lane for lane in shown.lanes}
        self._board.learners = Learners(status.learners, lanes, shown.begin_s, shown.span_s)
        self._board.settings = frames.as_bytes({"rows": settings(shown).rows})
        self._board.show("figures", frames.as_bytes(frames.figures(shown, self._run.clock())))


def _words(error: Exception) -> str:
    if isinstance(error, StreamMissingError):
        return (
            "its tape is gone. Either it was deleted, or its NATS server lost its disk: "
            "runbooks/restore-from-bucket.md"
        )
    if isinstance(error, DilocoError):
        return f"{error.message}{f' ({error.hint})' if error.hint else ''}"
    return f"a bug: {error!r}"
