"""`diloco report` and `diloco dashboard`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from diloco.run.cli.command import command, group

app = group()


@command(app)
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN ...",
            help="TOML file, folder of a local run, file of diloco bundle, or "
            "name of a run on a bus; several are compared",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="file to write [default: report.html in the folder of a local run, else "
            "report-RUN.html; of several runs, comparison.html]",
            metavar="FILE",
        ),
    ] = None,
    evaluations: Annotated[
        int,
        typer.Option(
            "--evaluations",
            help="number of views to score on held-out data beside stored scores, 0 for none",
            min=0,
        ),
    ] = 16,
) -> None:
    """Write the page of a run as one HTML file that needs nothing else.

    Shows what the live page shows, and how far learners agree. Works on active and ended runs;
    changes nothing. Several runs are compared: figures of all, and the settings that differ.
    """
    from diloco.show.page.report import run_report

    # Standard output has the file's path alone, for scripts.
    Console().print(str(run_report(runs, out=out, evaluations=evaluations)), soft_wrap=True)


@command(app)
def dashboard(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="TOML file, folder of a local run, file of diloco bundle, or "
            "name of a run on a bus [default: the only run on `diloco --bus URL`]",
        ),
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
    """Show a run live to a browser on this machine, until Ctrl-C.

    Shows loss, each learner's activity, rounds, staleness, traffic, alerts with their runbooks
    and the newest text sample. Works on active and ended runs; changes nothing.
    """
    from diloco.show.page.following import run_dashboard

    run_dashboard(run, port)
