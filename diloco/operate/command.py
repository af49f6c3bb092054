"""`diloco run`: a run's life, from its creation to its end; and `diloco host units`."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from diloco.common.process import log
from diloco.common.protocol.errors import Exit
from diloco.operate.units import UnitOptions
from diloco.run.cli import options as shared
from diloco.run.cli.command import command, group
from diloco.run.cli.help import host
from diloco.run.cli.screen import confirm, say, working

app = group()
run_app = group("Create, change, pause, checkpoint, roll back, end, delete runs.")
app.add_typer(run_app, name="run")


Learner = Annotated[str, typer.Argument(metavar="NAME", help="name of the learner")]
Reason = Annotated[str, typer.Option(help="reason to record on the tape", metavar="TEXT")]
Yes = Annotated[bool, typer.Option("--yes", help="skip the confirmation")]


@dataclass(frozen=True, kw_only=True)
class TimerOptions:
    """Further options of commands that a systemd timer runs."""

    wait_s: Annotated[
        float,
        typer.Option(
            "--wait",
            help="keep trying while NATS or the store is unreachable",
            min=0,
            metavar="SECONDS",
        ),
    ] = 0.0
    until_end: Annotated[
        bool,
        typer.Option("--until-end", help=f"exit with status {int(Exit.OVER)} if the run has ended"),
    ] = False


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
    from diloco.common.process.config import load_config

    loaded = load_config(config)
    from diloco.common.process.config import unfilled, warnings
    from diloco.learner.compilation_cache import keep_programs
    from diloco.operate.create import create_from

    for sentence in warnings(loaded.settings()):
        say(f"[yellow]warning:[/] {escape(sentence)}")
    with working("first parameters, streams, version 0"):
        keep_programs(loaded.learner.compilation_cache_dir, log.get(run=loaded.run.name))
        layout = create_from(loaded, source, tasked="task" in loaded.model_fields_set)
    if sentence := unfilled(loaded, len(layout.fragments)):
        say(sentence)
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
        bool, typer.Option("--created", help="the settings with which the run was created")
    ] = False,
    json: shared.Json = False,
) -> None:
    """Print a run's settings as they are now, as TOML or JSON."""
    from diloco.operate.change import show

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
    from diloco.operate.change import change

    changed, _ = asyncio.run(change(run, [f"run.paused={str(paused).lower()}"]))
    now = "paused" if paused else "going on"
    say(f"{run} is {now if changed else f'{now} already'}")


@command(run_app, "quarantine")
def run_quarantine(run: shared.Run, name: Learner, reason: Reason = "by hand") -> None:
    """Reject a learner's updates, and wait for it no more, until `diloco run release`.

    Aggregators do so themselves after `bounds.quarantine_offences`.
    """
    _quarantine(run, name, active=True, reason=reason)


@command(run_app, "release")
def run_release(run: shared.Run, name: Learner, reason: Reason = "by hand") -> None:
    """Take a learner's updates again; its offences are forgotten."""
    _quarantine(run, name, active=False, reason=reason)


def _quarantine(run: str, name: str, *, active: bool, reason: str) -> None:
    from diloco.operate.change import quarantine

    asyncio.run(quarantine(run, name, active=active, reason=reason))
    say(f"{name} is {'quarantined' if active else 'released'}")


@command(run_app, "end")
def run_end(run: shared.Run, yes: Yes = False) -> None:
    """End a run early: learners send their last updates, the last rounds close, all daemons leave.

    A run that has ended cannot continue; its parameters can begin another one. `run pause` can be
    undone.
    """
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
        bool, typer.Option("--going-on", help="remove also a run that has not ended")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            help="remove only if this bundle is complete; reads it back first",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Remove a run: its streams on the bus and all its objects in the store. Says what, and asks.

    A run that has not ended needs --going-on: stop its daemons first. `diloco bundle` makes a copy.
    """
    from diloco.operate.remove import belongings, check_bundled, remove

    found = asyncio.run(belongings(run, going_on=going_on))
    if bundle is not None:
        with working("reading the bundle back"):
            asyncio.run(check_bundled(run, bundle))
    for sentence in found.sentences():
        say(escape(sentence))
    if not yes:
        confirm("remove all of it? it cannot be undone")
    with working("removing"):
        asyncio.run(remove(run, found))
    say(f"removed run [bold]{found.run}[/]")


@command(run_app, "checkpoint", logs="warning")
def run_checkpoint(run: shared.Run, timer: TimerOptions) -> int:
    """Checkpoint the whole run, so that it can resume even on a new NATS server.

    The checkpoint is in the object store; `diloco run resume` starts from it. Training continues.
    """
    from diloco.operate.change import make_checkpoint
    from diloco.operate.run_garbage import status, timed

    with working("storing the newest versions"):
        marked = asyncio.run(timed(run, lambda: make_checkpoint(run), timer))
    say(f"checkpoint [bold]{marked.name}[/]: versions {_vector(marked.versions)}")
    return asyncio.run(status(run, timer))


@command(run_app, "resume")
def run_resume(
    run: shared.Run,
    source: Annotated[
        str | None,
        typer.Option("--from", help="checkpoint name [default: the newest]", metavar="CHECKPOINT"),
    ] = None,
) -> None:
    """Resume a run from a checkpoint on a NATS server that does not have the run.

    Then start aggregators and learners as usual; data continues where the checkpoint was taken.
    """
    from diloco.operate.change import resume

    with working("beginning a tape from the checkpoint"):
        resumed = asyncio.run(resume(run, source))
    say(
        f"resumed from checkpoint [bold]{resumed.checkpoint}[/] as epoch {resumed.epoch}: "
        f"versions {_vector(resumed.versions)}"
    )


@command(run_app, "rollback")
def run_rollback(
    run: shared.Run,
    to: Annotated[
        str,
        typer.Option(
            help="a version, one version per fragment (12,12,11), a checkpoint name, a time "
            "(2026-01-31T12:00:00Z) or an age (90m, 2h, 1d)",
            metavar="VERSIONS|TIME",
        ),
    ],
    yes: Yes = False,
) -> None:
    """Roll back: publish earlier contents as each fragment's next version.

    Updates based on later versions are rejected, learners adopt the earlier parameters, and the
    global step goes back; data positions do not. Nothing is deleted: a rollback can be rolled back.
    """
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


@command(run_app, "gc", logs="warning")
def run_gc(
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
    from diloco.operate.run_garbage import collect, status, table, timed

    with working("looking for garbage" if dry_run else "collecting garbage"):
        found = asyncio.run(timed(run, lambda: collect(run, dry_run=dry_run), timer))
    Console().print(table(found, dry_run=dry_run))
    return asyncio.run(status(run, timer))


@command(host, "units")
def host_units(options: UnitOptions) -> None:
    """Write the systemd units of aggregator, learners, NATS server and timers; start nothing.

    Run it again to update them, one unit at a time if you name them. Drop-ins of your own stay, and
    edited units are named, not overwritten. docs/systemd.md describes the next steps.
    """
    from diloco.operate.units import install_units

    files, copies = install_units(options)
    for path in files:
        say(f"{'would write' if options.dry_run else 'wrote'} {path}")
    for path, copy in copies.items():
        say(f"{path} was edited: its text {'would be' if options.dry_run else 'is'} in {copy}")
    if not options.dry_run:
        say(
            "now: systemd-sysusers; systemd-tmpfiles --create; systemctl daemon-reload; "
            "systemctl enable --now UNIT ..."
        )


def _vector(versions: Sequence[int]) -> str:
    return ",".join(str(version) for version in versions)
