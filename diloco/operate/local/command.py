"""`diloco local`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from diloco.run.cli.command import command, group
from diloco.run.cli.options import Settings


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """The options of `diloco local` on the command line."""

    learners: Annotated[
        int | None,
        typer.Option(
            help="number of learners [default: 4, or the number of items in --mesh or --hosts]",
            min=1,
            max=64,
        ),
    ] = None
    mesh: Annotated[
        str | None,
        typer.Option(
            help="devices per learner: 4,2,1,1; or sizes of the mesh axes data, fsdp, expert and "
            "tensor: fsdp=2/tensor=2,2,1,1; GPUs or TPU chips where this machine has them, else "
            "emulated on the CPU [default: equal shares]",
            metavar="LIST",
        ),
    ] = None
    cpu: Annotated[
        bool,
        typer.Option("--cpu", help="train on the CPU, with devices emulated for --mesh"),
    ] = False
    hosts: Annotated[
        str | None,
        typer.Option(
            help="processes per learner, which share its devices: 2,1,1,1 [default: 1 each]",
            metavar="LIST",
        ),
    ] = None
    aggregators: Annotated[int, typer.Option(help="number of aggregators", min=1, max=16)] = 1
    steps: Annotated[
        int | None,
        typer.Option(help="inner steps of the run [default: from the file, else 250]", min=1),
    ] = None
    run_dir: Annotated[
        Path | None,
        typer.Option(help="folder of the run, new or empty [default: runs/NAME]", metavar="DIR"),
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            help="resume the run in this folder, after Ctrl-C, a closed terminal or a crash",
            metavar="DIR",
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file to start from; bus and store are replaced", metavar="FILE"),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="function that builds the task [default: from the file, else the built-in task]",
            metavar="MODULE:FUNCTION",
        ),
    ] = None
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="first parameters: a safetensors file, or a folder that the task reads [default: "
            "what the task says]",
            metavar="PATH",
        ),
    ] = None
    corpus: Annotated[
        str | None,
        typer.Option(
            help="folder of text for the built-in task [default: Python's standard library]",
            metavar="DIR",
        ),
    ] = None
    speed: Annotated[
        str | None,
        typer.Option(
            help="slow learners down: a share of full speed per learner, 1,1,0.5,1", metavar="LIST"
        ),
    ] = None
    kill: Annotated[
        list[str] | None,
        typer.Option(
            help="SIGKILL a learner or an aggregator at a step and restart it (of a learner with "
            "--hosts, its last host); repeatable; 'none' disables [default: without --config "
            "and --task the second learner after a third of the run, else none]",
            metavar="NAME@STEP",
        ),
    ] = None
    settings: Settings = field(default_factory=list)
    json: Annotated[
        bool, typer.Option("--json", help="print a summary as JSON on the last line")
    ] = False


app = group()


@command(app)
def local(options: LocalOptions) -> int:
    """Train on this machine: learners, an aggregator, a NATS server.

    Every part is a process of its own and runs the same commands and protocol as on machines far
    apart. Learners may have different numbers of devices (`--mesh`) and consist of several
    processes (`--hosts`). Ctrl-C stops all of them cleanly; a second Ctrl-C kills them. What was
    stopped, or crashed, continues with `--resume`.
    """
    from diloco.operate.local.run import run_local

    return run_local(options)
