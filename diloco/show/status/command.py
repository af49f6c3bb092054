"""`diloco status`: a run, its learners, its history, or the runs of a bus."""

from typing import Annotated

import typer

from diloco.common.protocol.errors import ConfigError
from diloco.run.cli import options as shared
from diloco.run.cli.command import command, group

app = group()


@command(app)
def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="TOML file, folder of a local run, file of diloco bundle, or name of a run on a "
            "bus; or the bus (nats://host:4222), whose runs are listed [default: "
            "nats://127.0.0.1:4222]",
        ),
    ] = None,
    learners: Annotated[
        bool,
        typer.Option(
            "--learners", help="what became of each learner's updates, from the whole tape"
        ),
    ] = False,
    history: Annotated[
        bool,
        typer.Option("--history", help="what was done to the run, when and by whom"),
    ] = False,
    runs: Annotated[
        bool, typer.Option("--runs", help="the runs on RUN's bus, the newest version first")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="with --history: also learners that join and leave")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="show the current state and exit")] = False,
    json: shared.Json = False,
) -> None:
    """Show a run live: learners, fragments, rounds, rates, problems.

    Exits when the run ends, or with Ctrl-C. Without a terminal it shows the current state once.

    Aggregators quarantine a learner after `bounds.quarantine_offences`: they reject its updates
    and do not wait for it until `diloco run release`. Operators are named by their account and
    machine, as they were when they gave the command.
    """
    if learners + history + runs > 1:
        raise ConfigError("--learners, --history and --runs are asked one at a time")
    if everything and not history:
        raise ConfigError("--all goes with --history")
    from diloco.run.watch import is_bus
    from diloco.show.status import screen

    if run is None or runs or is_bus(run):
        if learners or history:
            raise ConfigError(
                "which run? a bus may have several", hint="`diloco status` lists them"
            )
        screen.show_runs(run, json=json)
    elif history:
        screen.show_history(run, everything=everything, json=json)
    elif learners:
        screen.show_learners(run, json=json)
    else:
        screen.show_status(run, once=once, json=json)
