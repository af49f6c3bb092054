"""What timers start: work that waits for NATS and the store, and a run's end that stops it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from diloco.cli.opening import open_run
from diloco.common import log
from diloco.common.config import service_manager
from diloco.common.exits import Exit
from diloco.common.health import Health, View
from diloco.common.manager import Starting, tell
from diloco.common.service import Runtime
from diloco.common.tape import has_ended

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TimerOptions:
    """What a timer asks for beside the work."""

    wait_s: Annotated[
        float,
        typer.Option(
            "--wait",
            help="keep trying while NATS or the store is unreachable",
            min=0,
            metavar="SECONDS",
        ),
    ] = 0.0
    until_end: Annotated[
        bool,
        typer.Option("--until-end", help=f"exit with status {int(Exit.OVER)} if the run has ended"),
    ] = False


async def timed(target: str, work: Callable[[], Awaitable[T]], options: TimerOptions) -> T:
    """The result of the work, once NATS and the store are there; systemd hears what it waits for.

    Raises:
        DilocoError: what the work meets, or met last when its time was over.
    """
    runtime, manager = Runtime(), service_manager()
    told = Starting(Health(view=lambda: View("working"), waiting=runtime.retries.now), manager)
    told.begin()
    try:
        result = await runtime.retry(
            target, work, logger=log.get(run=target), deadline_s=options.wait_s
        )
    finally:
        told.over()
    tell(manager, STATUS="done")
    return result


async def status(target: str, options: TimerOptions) -> int:
    """The exit status of work that is done."""
    if not options.until_end:
        return Exit.ENDED
    async with open_run(target, reads=True) as opened:
        ended = await has_ended(opened.context.bus, opened.context.run)
    return Exit.OVER if ended else Exit.ENDED
