"""`diloco task`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from diloco.cli.command import command, group
from diloco.common import log
from diloco.common.errors import DilocoError
from diloco.common.exits import Exit

app = group()
task = group("Try a task before anything depends on it.")
app.add_typer(task, name="task")


@command(task)
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the run's TOML file")],
    learner: Annotated[
        str, typer.Option("--learner", help="with the options of this learner", metavar="NAME")
    ] = "a",
    steps: Annotated[int, typer.Option("--steps", help="steps to take", min=2)] = 8,
) -> int:
    """Take a few steps of a run's task on the CPU; tell all that is wrong with it at once.

    Needs no bus and no store. The exit status is 1 if a learner would refuse the task.
    """
    log.configure("error")
    from diloco.common.config import load_config
    from diloco.task.trying import tried

    trial = tried(load_config(file), learner, steps)
    console = Console(soft_wrap=True, highlight=False)
    for name, value in trial.facts:
        console.print(f"{name + ':':<26} {escape(value)}")
    for sentence in trial.warned:
        console.print(f"[yellow]warning:[/] {escape(sentence)}")
    for error in trial.refused:
        console.print(f"[red]refused:[/] {escape(_words(error))}")
    if not trial.refused:
        console.print("[green]a learner would take it[/]")
    return Exit.FAILED if trial.refused else 0


def _words(error: DilocoError) -> str:
    return f"{error.message}\n  hint: {error.hint}" if error.hint else error.message
