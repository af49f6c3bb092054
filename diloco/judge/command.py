"""`diloco doctor`."""

from typing import Annotated

import typer

from diloco.run.cli import options as shared
from diloco.run.cli.command import command, group

app = group()


@command(app)
def doctor(
    run: shared.RunOrTape,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="also read every object, recompute every version, judge every record"
        ),
    ] = False,
    json: shared.Json = False,
) -> int:
    """Diagnose a run or its file; each finding names its runbook.

    The exit status is 1 if there is an error.
    """
    from diloco.judge.doctor import run_doctor

    return run_doctor(run, deep=deep, json=json)
