"""`diloco replay`, `show`, `export`, `bundle` and `restore`: a run's past."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.common.process.signals import interrupts_wait
from diloco.common.protocol.errors import ConfigError
from diloco.replay.options import BundleOptions, Options
from diloco.run.cli import options as shared
from diloco.run.cli.command import command, group

app = group()


@command(app)
def replay(run: shared.RunOrTape, options: Options) -> int:
    """Verify how a run was merged, or merge it with other settings.

    By default every version is merged again from its recorded inputs and compared bit for bit.
    --decide repeats the decisions: when rounds opened and closed, and what was admitted. --set
    merges with other settings and evaluates the resulting model beside the original. The exit
    status is 0 if all of it is as recorded, 1 if something is wrong or missing, and 2 if something
    could not be looked at, such as what garbage collection has taken.
    """
    with interrupts_wait():
        from diloco.replay.modes import run_replay

    return run_replay(run, options)


@command(app)
def why(
    run: shared.RunOrTape,
    since: Annotated[
        str | None,
        typer.Option(
            help="only findings that began at a version, a time (2026-01-31T12:00:00Z) or an age "
            "(2h), or later",
            metavar="VERSION|TIME",
        ),
    ] = None,
    learner: Annotated[
        str | None,
        typer.Option(help="only findings about this learner, or about none", metavar="NAME"),
    ] = None,
    json: shared.Json = False,
) -> int:
    """Show the problems of a run or its file, the worst first.

    Each finding names the subject and the problem, its beginning, figures compared with the
    others', the effect on the held-out loss, advice and a runbook. `diloco doctor` also shows what
    is well. The exit status is 1 if there is an error.
    """
    from diloco.replay.why_screen import run_why

    return run_why(run, since=since, learner=learner, json=json)


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
    """Show the findings of `why`, and also those that are well.

    The exit status is 1 if there is an error.
    """
    from diloco.replay.why_screen import run_why

    return run_why(run, everything=True, deep=deep, json=json)


@command(app)
def export(
    run: shared.RunOrTape,
    to: Annotated[Path, typer.Argument(metavar="DIR", help="new folder to write")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="safetensors or orbax; hf: what transformers loads, of tasks that write it",
            metavar="FORMAT",
        ),
    ] = "safetensors",
    dtype: Annotated[
        str | None,
        typer.Option(help="floats of hf: float32, bfloat16 or float16 [default: float32]"),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="hf: add adapters to their base model")
    ] = False,
    version: shared.Version = None,
    learner: Annotated[
        str | None,
        typer.Option(
            "--learner",
            help="with this learner's private leaves and local state, of its newest checkpoint; "
            "RUN is the learner's file",
            metavar="NAME",
        ),
    ] = None,
) -> None:
    """Write the global model with its layout and settings to a folder.

    Its safetensors file can start another run: diloco run create --from FILE. A folder of the
    format hf can too: --from DIR.
    """
    from diloco.run.model.files import run_export

    run_export(run, to, form, version, dtype, merge=merge, learner=learner)


@command(app)
def show(
    run: shared.RunOrTape,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WHAT",
            help="a sequence of the tape, FRAGMENT@VERSION, LEARNER:INCARNATION-SEQ, the name of "
            "an object, or a line of a log",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="another RUN: tell what differs", metavar="RUN"),
    ] = None,
) -> None:
    """Show a round, an update or an object; or how two runs differ.

    A round: when it opened, had its quorum and closed, which updates it merged, refused or left to
    the next, with their numbers, norms and cosines by tensor, and the objects it made. An update:
    from its announcement to its answer. Two runs: settings, releases, learners, and the first
    version that differs.
    """
    from diloco.replay.diff import run_diff
    from diloco.replay.show import run_show

    if (what is None) == (against is None):
        raise ConfigError("show takes either WHAT or --against", hint="diloco show --help")
    if what is not None:
        run_show(run, what)
    else:
        run_diff(run, str(against))


@command(app)
def bundle(
    run: shared.RunOrTape,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="new file to write")],
    options: BundleOptions,
) -> None:
    """Write a run, or a part of it, to one file: tape and objects.

    Every command that only reads takes FILE in place of RUN, on any machine, without bus or store.
    The file holds outer gradients and views of the model: its readers can learn of the data. To
    delete the run as well: `diloco run delete RUN --bundle FILE`.
    """
    from diloco.replay.bundle import run_bundle

    run_bundle(run, file, options)


@command(app)
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="file of diloco bundle")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="TOML file that names the server and the store", metavar="FILE"
        ),
    ] = None,
    objects: Annotated[
        bool, typer.Option("--objects", help="put its objects into the store as well")
    ] = False,
    logs: Annotated[
        Path | None,
        typer.Option(
            "--logs",
            help="only write its logs, list of packages and notes to this new folder",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Put a bundle's tape back on a server, or its logs in a folder.

    Messages have their sequence numbers, times and message ids again. The server is that of
    `diloco --bus URL restore`, --config or DILOCO_BUS_URL, and must not have the run.
    """
    from diloco.replay.restore import run_restore, run_unpack

    if logs is not None:
        run_unpack(file, logs)
    else:
        run_restore(file, config, objects=objects)
