"""`diloco dashboard`: a run's page, served until Ctrl-C."""

import asyncio
import signal

from rich.console import Console

from diloco.cli.opening import Place, open_run, placed_bus, use_place
from diloco.common.errors import ConfigError
from diloco.dashboard.page import served
from diloco.look.runs import read_runs


def run_dashboard(target: str | None, bus: str | None, store: str | None, port: int | None) -> None:
    """Serve RUN's page until Ctrl-C or SIGTERM; arguments as the command's options.

    Raises:
        DilocoError: no such run; bus or store are away; the port is not to be had.
    """
    if bus is not None or store is not None:
        use_place(Place(bus, store))
    asyncio.run(_serve(target, port))


async def _serve(target: str | None, port: int | None) -> None:
    console = Console(soft_wrap=True, highlight=False)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    target = target or await _only_run()
    async with open_run(target, name="dashboard", reads=True) as opened:
        created_s, again = opened.specification.created_at_s, f"diloco dashboard {target}"
        page = served(
            opened.context, created_s, port=port, again=again, goes_on=opened.kept is None
        )
        async with page as url:
            console.print(f"run {opened.context.run}: {url}", markup=False)
            console.print("Ctrl-C ends it")
            await stop.wait()
    console.print("stopped")


async def _only_run() -> str:
    """The name of the run on the bus.

    Raises:
        ConfigError: there is none, or several.
        BusError: the bus is away, or lists nothing to whoever asks.
    """
    found = [line.run for line in await read_runs(placed_bus())]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"this bus has {len(found)} runs: {', '.join(found[:20])}"
        if found
        else "there are no runs on this bus",
        hint="name one: diloco dashboard RUN --bus URL --store URL",
    )
