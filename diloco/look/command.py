"""`diloco status`, `runs`, `learners` and `history`."""

import asyncio
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from diloco.cli import options as shared
from diloco.cli.command import command, group
from diloco.cli.screen import say
from diloco.common import log

app = group()


@command(app)
def status(
    run: shared.RunOrTape,
    once: Annotated[bool, typer.Option("--once", help="show the current state and exit")] = False,
    json: shared.Json = False,
) -> None:
    """Show a run live: learners, fragments, rounds, rates and problems.

    Exits when the run ends, or with Ctrl-C. Without a terminal it shows the current state once.
    """
    log.configure("error")
    from diloco.look.status_screen import show_status

    show_status(run, once=once, json=json)


@command(app)
def runs(
    bus: Annotated[
        str | None,
        typer.Argument(
            metavar="BUS",
            help="NATS server (nats://host:4222), a run's TOML file, or the folder of an active "
            "local run [default: nats://127.0.0.1:4222]",
        ),
    ] = None,
    json: shared.Json = False,
) -> None:
    """List the runs on a bus, newest first."""
    log.configure("error")
    from diloco.look.runs import list_runs

    list_runs(bus, json=json)


@command(app)
def learners(
    run: shared.RunOrTape,
    shut_out: Annotated[
        str | None, typer.Option("--quarantine", help="quarantine this learner", metavar="NAME")
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(help="release this learner and reset its offence count", metavar="NAME"),
    ] = None,
    reason: Annotated[
        str, typer.Option(help="reason to record on the tape", metavar="TEXT")
    ] = "by hand",
    json: shared.Json = False,
) -> None:
    """List the learners with their merged and rejected updates, and quarantines with reasons.

    Aggregators quarantine a learner after `bounds.quarantine_offences`: they reject its updates
    and do not wait for it until it is released.
    """
    log.configure("error")
    from diloco.look.learners import as_json, chosen, judge, look, over_the_run, table

    judged = chosen(shut_out, release)
    if judged is not None:
        name, active = judged
        asyncio.run(judge(run, name, active=active, reason=reason))
        say(f"{name} is {'quarantined' if active else 'released'}")
        return
    found = asyncio.run(look(run))
    if json:
        Console().print_json(data=as_json(found))
        return
    if not found:
        say("no learner has joined yet")
        return
    Console().print(table(found))
    if any(one.trend for one in found):
        Console().print()
        Console().print(over_the_run(found))
    for one in found:
        if one.why:
            say(f"[bold]{one.name}[/] is quarantined: {escape(one.why)}")


@command(app)
def history(
    run: shared.RunOrTape,
    everything: Annotated[
        bool, typer.Option("--all", help="also learners that join and leave")
    ] = False,
    json: shared.Json = False,
) -> None:
    """Tell what was done to a run, when and by whom: settings, checkpoints, rollbacks, its stop.

    Operators are named by their account and machine, as they were when they gave the command.
    """
    log.configure("error")
    from diloco.look.history import as_json, happened, table

    found = asyncio.run(happened(run, everything=everything))
    if json:
        Console().print_json(data=as_json(found))
    else:
        Console().print(table(found))
