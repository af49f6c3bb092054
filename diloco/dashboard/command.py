"""`diloco dashboard`."""

from typing import Annotated

import typer

from diloco.cli.command import command, group
from diloco.common import log

app = group()


@command(app)
def dashboard(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="TOML file, folder of a local run, file of diloco bundle or diloco tape export, "
            "or name of a run on a bus [default: the only run on --bus]",
        ),
    ] = None,
    bus: Annotated[
        str | None,
        typer.Option(help="NATS server of a run given by name, or not at all", metavar="URL"),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="object store of such a run", metavar="URL")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="port on 127.0.0.1, 0 for any free one [default: 8780, else any free one]",
            min=0,
            max=65535,
            metavar="PORT",
        ),
    ] = None,
) -> None:
    """Serve one page that shows a run live, for a browser on this machine, until Ctrl-C.

    Shows loss, each learner's activity, rounds, staleness, traffic, alerts with their runbooks
    and the newest text sample. Works on active and ended runs; changes nothing.
    """
    log.configure("error")
    from diloco.dashboard.serve import run_dashboard

    run_dashboard(run, bus, store, port)
