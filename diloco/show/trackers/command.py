"""`diloco track`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from diloco.common.protocol.errors import ConfigError
from diloco.run.cli import options as shared
from diloco.run.cli.command import command, group

if TYPE_CHECKING:
    from diloco.common.storage.tape import RunContext
    from diloco.show.trackers.follow import Sink

app = group()


@command(app)
def track(
    run: shared.RunOrTape,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", help="write TensorBoard's event files here", metavar="DIR"),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option("--wandb", help="send to this project of Weights & Biases", metavar="PROJECT"),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="with --wandb: keep it in ./wandb, for `wandb sync`")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="pass on the present figures, then exit")
    ] = False,
) -> None:
    """Show a run in TensorBoard or Weights & Biases.

    Reads the run's tape from its beginning, its heartbeats and kept scores, until the run ends. No
    learner or aggregator waits for it.
    """
    if tensorboard is None and wandb is None:
        raise ConfigError("where to? give --tensorboard DIR, --wandb PROJECT, or both")
    from diloco.show.trackers.follow import TensorBoard, Wandb
    from diloco.show.trackers.follow import track as follow

    def make(context: "RunContext") -> "list[Sink]":
        sinks: list[Sink] = []
        if tensorboard is not None:
            sinks.append(TensorBoard(tensorboard / context.run))
        if wandb is not None:
            settings = context.settings.model_dump()
            sinks.append(Wandb(wandb, context.run, settings, offline=offline))
        return sinks

    written = asyncio.run(follow(run, make, once=once))
    Console(highlight=False).print(f"{written:,} points")
