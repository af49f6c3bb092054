"""`diloco report`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from diloco.cli.command import command, group
from diloco.common import log

app = group()


@command(app)
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN ...",
            help="TOML file, folder of a local run, file of diloco bundle or diloco tape export, "
            "or name of a run on a bus; several are compared",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="output folder [default: report/ in the folder of a local run, else report-RUN; "
            "of several runs, comparison]",
            metavar="DIR",
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
    """Write a report of a run: one self-contained HTML file, and a PNG per figure.

    Shows loss, each learner's activity, staleness and weights, rounds, traffic, agreement between
    learners, and rejected updates with reasons. Works on active and ended runs; changes nothing.
    Several runs are compared: figures side by side, and the settings that differ.
    """
    log.configure("error")
    from diloco.report.build import run_report
    from diloco.report.compare import run_comparison

    if len(runs) > 1:
        page = run_comparison(runs, out=out or Path("comparison"), evaluations=evaluations)
    else:
        page = run_report(runs[0], out=out, evaluations=evaluations)
    # On standard output stands the file alone, for scripts.
    Console().print(str(page), soft_wrap=True)
