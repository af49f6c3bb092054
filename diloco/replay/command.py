"""`diloco replay`, `diloco export` and `diloco tape`: a run's past, from tape and store."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from diloco.cli import options as shared
from diloco.cli.command import command, group
from diloco.cli.loading import interrupts_wait
from diloco.cli.screen import confirm, say, working
from diloco.common import log
from diloco.replay.options import Options

app = group()
tape_app = group("Copy a run's tape to a file and back.")
app.add_typer(tape_app, name="tape")


@command(app)
def replay(run: shared.RunOrTape, options: Options) -> int:
    """Verify a run's versions, repeat its decisions, or replay it with other settings.

    By default every version is merged again from its recorded inputs and compared bit for bit.
    --decide repeats the decisions: when rounds opened and closed, and what was admitted. --set
    merges with other settings and evaluates the resulting model beside the original. The exit
    status is 0 if all of it is as recorded, 1 if something is wrong or missing, and 2 if something
    could not be looked at, such as what garbage collection has taken.
    """
    log.configure("error")
    with interrupts_wait():
        from diloco.replay.run import run_replay

    return run_replay(run, options)


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
        typer.Option(help="of the floats of hf: float32, bfloat16, float16 [default: float32]"),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="hf: adapters are added to their base, one model")
    ] = False,
    version: Annotated[
        str | None,
        typer.Option(
            help="a version, one version per fragment, a checkpoint, a time or an age "
            "[default: the newest]",
            metavar="VERSIONS|TIME",
        ),
    ] = None,
) -> None:
    """Write the global model with its layout and settings to a folder.

    Its safetensors file can start another run: diloco run create --from FILE. A folder of the
    format hf can too: --from DIR.
    """
    log.configure("error")
    from diloco.replay.export import run_export

    with working("loading and writing the model"):
        run_export(run, to, form, version, dtype, merge=merge)


@command(app)
def show(
    run: shared.RunOrTape,
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="a sequence of the tape, FRAGMENT@VERSION, LEARNER:INCARNATION-SEQ, the name of "
            "an object, or a line of a log",
        ),
    ],
) -> None:
    """Show a version's round as a story, or an update from its announcement to its answer.

    A round: when it opened, had its quorum and closed, which updates it merged, refused or left to
    the next, with their numbers, norms and cosines by tensor, and the objects it made.
    """
    log.configure("error")
    from diloco.replay.looking import run_show

    run_show(run, what)


@command(app)
def diff(
    one: shared.RunOrTape,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="another RUN")],
) -> None:
    """Compare two runs: settings, releases, learners, and the first version that differs."""
    log.configure("error")
    from diloco.replay.looking import run_diff

    run_diff(one, other)


@command(app)
def bundle(
    run: shared.RunOrTape,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="new file to write")],
    first: Annotated[
        int | None,
        typer.Option(
            "--from",
            help="begin at the newest stored state up to this version [default: the oldest]",
            metavar="VERSION",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="stop at a version, one version per fragment, a checkpoint, a time or an age "
            "[default: the newest version]",
            metavar="VERSIONS|TIME",
        ),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option("--redact", help="hash the names of run, learners, machines and people"),
    ] = False,
    logs: Annotated[
        list[Path] | None,
        typer.Option(
            "--log",
            help="log file, or folder of them, to add; repeatable [default: those of a local run]",
            metavar="PATH",
        ),
    ] = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="RUN is a damaged file: take what is whole of it")
    ] = False,
) -> None:
    """Write a run, or a part of it, to one file: tape, objects, heartbeats, logs, packages.

    Every command that only reads takes FILE in place of RUN, on any machine, without bus or store.
    It holds outer gradients and views of the model: who has them can learn of the data.
    """
    log.configure("error")
    from diloco.replay.bundle import Wanted, run_bundle

    wanted = Wanted(first=first, until=until, redact=redact, logs=logs or (), salvage=salvage)
    run_bundle(run, file, wanted)


@command(app)
def archive(
    run: shared.Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="new file to write")],
    yes: Annotated[bool, typer.Option("--yes", help="skip the confirmation")] = False,
) -> None:
    """Move a run that has ended into one file: bundle it, read the file back, remove the run.

    Every command that only reads takes FILE in place of RUN. Logs of machines are not in it:
    `diloco bundle --log` takes them along.
    """
    log.configure("error")
    from diloco.operate.remove import belongings, remove
    from diloco.replay.bundle import Wanted, run_bundle

    found = asyncio.run(belongings(run, going_on=False))
    run_bundle(run, file, Wanted())
    with working("reading it back"):
        asyncio.run(found.check_kept_in(file))
    for sentence in found.sentences():
        say(escape(sentence))
    if not yes:
        confirm(f"it is all in {file}; remove it here?")
    with working("removing"):
        asyncio.run(remove(run, found))
    say(f"run [bold]{found.run}[/] is in {escape(str(file))}")


@command(app)
def unbundle(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="file of diloco bundle")],
    to: Annotated[Path, typer.Argument(metavar="DIR", help="new folder to write")],
) -> None:
    """Write a bundle's logs, list of packages and notes to a folder."""
    log.configure("error")
    from diloco.replay.bundle import run_unpack

    run_unpack(file, to)


@command(tape_app, "export")
def tape_export(
    run: shared.RunOrTape,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="new file to write")],
) -> None:
    """Write a run's tape to one file, up to its newest message.

    With it and the run's objects, `diloco replay FILE` works without the run's NATS server.
    """
    log.configure("error")
    from diloco.replay.tape import run_tape_export

    run_tape_export(run, file)


@command(tape_app, "import")
def tape_import(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="tape file written by diloco tape export")
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file that names the server", metavar="FILE"),
    ] = None,
) -> None:
    """Restore a run's tape on another server, with its sequence numbers, times and message ids.

    The server is from `diloco --bus URL tape import`, --config or DILOCO_BUS_URL.
    """
    log.configure("error")
    from diloco.replay.tape import run_tape_import

    run_tape_import(file, config)
