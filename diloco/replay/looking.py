"""`diloco show` and `diloco diff`: a run's tape, opened and told of."""

import asyncio
from collections.abc import Iterable

from diloco.cli.opening import open_run
from diloco.cli.screen import say_plainly
from diloco.projections.history import read_history
from diloco.replay import diff, show


def run_show(target: str, what: str) -> None:
    """Tell of what is meant by WHAT.

    Raises:
        ConfigError: the run has nothing of the kind.
        DilocoError: no such run; bus or store are away.
    """
    _print(asyncio.run(_show(target, what)))


async def _show(target: str, what: str) -> list[str]:
    async with open_run(target, name="show", reads=True) as opened:
        history = await read_history(opened.context)
        return await asyncio.to_thread(lambda: [*show.tell(history, show.find(history, what))])


def run_diff(one: str, other: str) -> None:
    """Tell what two runs differ in.

    Raises:
        DilocoError: no such run; bus or store are away.
    """
    _print(asyncio.run(_diff(one, other)))


async def _diff(one: str, other: str) -> list[str]:
    async with (
        open_run(one, name="diff", reads=True) as first,
        open_run(other, name="diff", reads=True) as second,
    ):
        histories = [await read_history(run.context) for run in (first, second)]
        return [*diff.differences(*histories)]


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        say_plainly(line)
