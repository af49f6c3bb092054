"""`diloco checkpoint`, `resume`, `rollback`, `gc` and `install-units`; `diloco run` beside it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from diloco.cli import options as shared
from diloco.cli.command import command, group
from diloco.cli.screen import confirm, say, working
from diloco.common import log
from diloco.operate.run_command import run_app
from diloco.operate.timed import TimerOptions, status, timed

app = group()
app.add_typer(run_app, name="run")
config_app = group("Look at configuration files.")
app.add_typer(config_app, name="config")


@command(config_app, "check")
def config_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the run's TOML file")],
) -> None:
    """Check a file: every key known and in range, and nothing that is known to train badly.

    Needs neither bus nor store. `diloco task check` tries the task, `diloco doctor` the run.
    """
    log.configure("error")
    from diloco.operate.settings import checked

    config, warned = checked(file)
    for sentence in warned:
        say(f"[yellow]warning:[/] {escape(sentence)}")
    say(f"{escape(str(file))} is a file of run [bold]{config.run.name}[/]")


@command(app)
def checkpoint(run: shared.Run, timer: TimerOptions) -> int:
    """Checkpoint the whole run, so that it can resume even on a new NATS server.

    The checkpoint is in the object store; `diloco resume` starts from it. Training continues.
    """
    log.configure("warning")
    from diloco.operate.change import mark

    with working("storing the newest versions"):
        marked = asyncio.run(timed(run, lambda: mark(run), timer))
    say(f"checkpoint [bold]{marked.name}[/]: versions {_vector(marked.versions)}")
    return asyncio.run(status(run, timer))


@command(app)
def resume(
    run: shared.Run,
    source: Annotated[
        str | None,
        typer.Option("--from", help="checkpoint name [default: the newest]", metavar="CHECKPOINT"),
    ] = None,
) -> None:
    """Resume a run from a checkpoint on a NATS server that does not have the run.

    Then start aggregators and learners as usual; data continues where the checkpoint was taken.
    """
    log.configure("error")
    from diloco.operate.change import resume as resume_run

    with working("beginning a tape from the checkpoint"):
        resumed = asyncio.run(resume_run(run, source))
    say(
        f"resumed from checkpoint [bold]{resumed.checkpoint}[/] as epoch {resumed.epoch}: "
        f"versions {_vector(resumed.versions)}"
    )


@command(app)
def rollback(
    run: shared.Run,
    to: Annotated[
        str,
        typer.Option(
            help="a version, one version per fragment (12,12,11), a checkpoint name, a time "
            "(2026-01-31T12:00:00Z) or an age (90m, 2h, 1d)",
            metavar="VERSIONS|TIME",
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="skip the confirmation")] = False,
) -> None:
    """Roll back: publish earlier contents as each fragment's next version.

    Updates based on later versions are rejected, learners adopt the earlier parameters, and the
    global step goes back; data positions do not. Nothing is deleted: a rollback can be rolled back.
    """
    log.configure("error")
    from diloco.operate.change import plan_rollback, roll_back

    with working("looking for the versions"):
        moves = asyncio.run(plan_rollback(run, to))
    for move in moves:
        record = move.target.record
        say(
            f"fragment {move.fragment}: version {move.newest} -> contents of version "
            f"{record.version} (step {record.global_step})"
        )
    if not yes:
        confirm("roll back?")
    with working("making the versions again and publishing them"):
        made = asyncio.run(roll_back(run, moves))
    say(f"rolled back: versions are now {_vector([record.version for record in made])}")


@command(app)
def gc(
    run: shared.Run,
    timer: TimerOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list what would be removed, remove nothing")
    ] = False,
) -> int:
    """Remove objects and messages that recovery, the replay window and checkpoints do not need.

    Aggregators do this themselves (`gc.enabled`); this command also removes what no aggregator
    tracks, such as shards of learners that left long ago. Training may continue meanwhile.
    """
    log.configure("warning")
    from diloco.operate.collect import collect, table

    with working("looking for garbage" if dry_run else "collecting garbage"):
        found = asyncio.run(timed(run, lambda: collect(run, dry_run=dry_run), timer))
    Console().print(table(found, dry_run=dry_run))
    return asyncio.run(status(run, timer))


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """The options of `diloco install-units`, as given."""

    units: Annotated[
        list[str] | None,
        typer.Argument(metavar="[UNIT]...", help="units to write [default: all]"),
    ] = None
    to: Annotated[Path, typer.Option("--to", help="folder of systemd units", metavar="DIR")] = Path(
        "/etc/systemd/system"
    )
    programs: Annotated[
        Path | None,
        typer.Option(
            help="folder of diloco and nats-server; links are followed [default: that of this "
            "command]",
            metavar="DIR",
        ),
    ] = None
    credentials: Annotated[
        bool,
        typer.Option(help="whether NATS needs credentials (/etc/diloco/credentials)"),
    ] = True
    store_folder: Annotated[
        Path | None,
        typer.Option(
            help="the store is this folder: also write its user, as whom the daemons run",
            metavar="DIR",
        ),
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace units that were edited by hand")
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the files, write nothing")] = (
        False
    )


@command(app, "install-units")
def install_units(options: UnitOptions) -> None:
    """Write the systemd units of aggregator, learners, NATS server and timers; start nothing.

    Run it again to update them, one unit at a time if you name them. Drop-ins of your own stay, and
    edited units are named, not overwritten. docs/systemd.md describes the next steps.
    """
    from diloco.operate.units import Install
    from diloco.operate.units import install_units as install

    wanted = Install(
        folder=options.to,
        programs=options.programs,
        units=tuple(options.units or ()),
        credentials=options.credentials,
        store_folder=options.store_folder,
        overwrite=options.overwrite,
        dry_run=options.dry_run,
    )
    done = install(wanted)
    for path in done.files:
        say(f"{'would write' if options.dry_run else 'wrote'} {path}")
    for path, copy in done.kept.items():
        say(f"{path} was edited: its text {'would be' if options.dry_run else 'is'} in {copy}")
    if not options.dry_run:
        say(
            "now: systemd-sysusers; systemd-tmpfiles --create; systemctl daemon-reload; "
            "systemctl enable --now UNIT ..."
        )


def _vector(versions: Sequence[int]) -> str:
    return ",".join(str(version) for version in versions)
