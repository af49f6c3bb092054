"""`diloco run`: a run's life, from its creation to its end."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from diloco.cli import options as shared
from diloco.cli.command import command, group
from diloco.cli.screen import confirm, say, working
from diloco.common import log

run_app = group("Create runs, see and change their settings, pause, end and remove them.")

Yes = Annotated[bool, typer.Option("--yes", help="skip the confirmation")]


@command(run_app, "create")
def run_create(
    config: shared.ConfigFile,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="safetensors file with the initial parameters, which needs no [task] in the "
            "run's file; or a folder that the task reads [default: what the task says]",
            metavar="PATH",
        ),
    ] = None,
    log_level: shared.LogLevel = "info",
) -> None:
    """Create a run: streams, specification, and version 0 of every fragment."""
    log.configure(log_level)
    from diloco.common.config import load_config

    loaded = load_config(config)
    from diloco.common.config import warnings
    from diloco.operate.create import create

    for sentence in warnings(loaded.settings()):
        say(f"[yellow]warning:[/] {escape(sentence)}")
    with working("first parameters, streams, version 0"):
        layout = create(loaded, source, tasked="task" in loaded.model_fields_set)
    elements = sum(fragment.elements for fragment in layout.fragments)
    Console().print(
        f"created run [bold]{loaded.run.name}[/]: {elements:,} parameters in "
        f"{len(layout.fragments)} fragments, layout {layout.digest}",
        soft_wrap=True,
    )


@command(run_app, "show")
def run_show(
    run: shared.RunOrTape,
    created: Annotated[
        bool, typer.Option("--created", help="as the run was created, before all changes")
    ] = False,
    json: shared.Json = False,
) -> None:
    """Print a run's settings as they are now, as TOML or JSON."""
    log.configure("error")
    from diloco.operate.settings import show

    asyncio.run(show(run, created=created, json=json))


@command(run_app, "set")
def run_set(
    run: shared.Run,
    assignments: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE...", help="settings to change, as section.key=value"),
    ],
    yes: Yes = False,
) -> None:
    """Change settings of a run, effective from each fragment's next version.

    Can be changed: the run's length, the intervals of `sync`, the outer learning rate and momentum,
    `staleness`, `quorum` and `bounds`; docs/configuration.md marks each key. Shows what changes and
    asks first. The change is recorded on the tape, with who made it.
    """
    log.configure("error")
    from diloco.operate.change import change, preview

    found = asyncio.run(preview(run, assignments))
    if not found.changed:
        say("nothing changed: the run has these settings already")
        return
    for sentence in found.changed:
        say(escape(sentence))
    for sentence in found.rates:
        say(escape(sentence))
    for sentence in found.warned:
        say(f"[yellow]warning:[/] {escape(sentence)}")
    if not yes:
        confirm("change it?")
    changed, _ = asyncio.run(change(run, assignments))
    for sentence in changed:
        say(f"changed {escape(sentence)}")


@command(run_app, "pause")
def run_pause(run: shared.Run) -> None:
    """Pause a run: learners wait at their next step, with all that they have, and lose nothing.

    A learner that starts meanwhile waits as well. Daemons keep running; to free the machines,
    stop them. `diloco run continue` ends the pause.
    """
    _pause(run, paused=True)


@command(run_app, "continue")
def run_continue(run: shared.Run) -> None:
    """Continue a paused run."""
    _pause(run, paused=False)


def _pause(run: str, *, paused: bool) -> None:
    log.configure("error")
    from diloco.operate.change import change

    changed, _ = asyncio.run(change(run, [f"run.paused={str(paused).lower()}"]))
    now = "paused" if paused else "going on"
    say(f"{run} is {now if changed else f'{now} already'}")


@command(run_app, "end")
def run_end(run: shared.Run, yes: Yes = False) -> None:
    """End a run early: learners send what is unsent, the last rounds close, and all daemons leave.

    A run that has ended cannot continue; its parameters can begin another one. `run pause` can be
    undone.
    """
    log.configure("error")
    from diloco.operate.change import end

    if not yes:
        confirm(f"end {run} for good?")
    step = asyncio.run(end(run))
    say(f"stopped at step {step:,}: the end follows once the last rounds are closed")


@command(run_app, "delete")
def run_delete(
    run: shared.Run,
    yes: Yes = False,
    going_on: Annotated[
        bool, typer.Option("--going-on", help="also a run that has not ended")
    ] = False,
) -> None:
    """Remove a run: its streams on the bus and all its objects in the store. Says what, and asks.

    A run that has not ended needs --going-on: stop its daemons first. `diloco archive` keeps a
    copy.
    """
    log.configure("error")
    from diloco.operate.remove import belongings, remove

    found = asyncio.run(belongings(run, going_on=going_on))
    for sentence in found.sentences():
        say(escape(sentence))
    if not yes:
        confirm("remove all of it? it cannot be undone")
    with working("removing"):
        asyncio.run(remove(run, found))
    say(f"removed run [bold]{found.run}[/]")
