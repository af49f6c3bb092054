"""`diloco report`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from diloco.cli import options as shared
from diloco.cli.command import command, group
from diloco.common import log

app = group()


@command(app)
def report(
    run: shared.RunOrTape,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="output folder [default: report/ in the folder of a local run, else report-RUN]",
            metavar="DIR",
        ),
    ] = None,
    evaluations: Annotated[
        int,
        typer.Option(
            "--evaluations", help="number of views to score on held-out data, 0 for none", min=0
        ),
    ] = 16,
) -> None:
    """Write a report of a run: one self-contained HTML file, and a PNG per figure.

    Shows loss, each learner's activity, staleness and weights, rounds, traffic, agreement between
    learners, and rejected updates with reasons. Works on active and ended runs; changes nothing.
    """
    log.configure("error")
    from diloco.report.build import run_report

    # On standard output stands the file alone, for scripts.
    Console().print(str(run_report(run, out=out, evaluations=evaluations)), soft_wrap=True)
