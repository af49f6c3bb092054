"""The `diloco` command; `diloco --help` lists its subcommands.

Each package declares its commands in `command.py`, and imports what a command needs when the
command runs. So `--help` and wrong options are answered at once, and only commands that compute
load JAX.
"""

import os
import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import diloco
from diloco.check_file import app as trying
from diloco.common.protocol.errors import DilocoError, Exit
from diloco.infra.provision.command import app as provision
from diloco.models.data.command import app as data
from diloco.operate.auth.command import app as auth
from diloco.operate.command import app as operate
from diloco.operate.daemons.command import app as daemons
from diloco.operate.local.command import app as local
from diloco.plan.command import app as plan
from diloco.replay.command import app as replay
from diloco.run.cli.help import Parted, host
from diloco.run.model.command import app as model
from diloco.show.alerts.command import app as alerts
from diloco.show.page.command import app as page
from diloco.show.status.command import app as run
from diloco.show.trackers.command import app as trackers


class Program(Parted):
    """The group of all commands, with the titles and the order of `diloco --help`."""

    parts = {  # noqa: RUF012 - declared there
        "A day": (
            "local", "run", "aggregator", "learner", "status", "report", "why", "doctor", "replay",
        ),
        "A run and its model": (
            "dashboard", "show", "export", "follow", "evaluate", "sample", "bundle", "restore",
        ),
        "Before a run, and beside it": (
            "check", "data", "plan", "watch", "track", "auth", "host",
        ),
    }  # fmt: skip


app = typer.Typer(
    name="diloco",
    no_args_is_help=True,
    cls=Program,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for room in (
    local, trying, data, plan, daemons, operate, run, page, alerts, trackers,
    model, replay, auth, provision,
):  # fmt: skip
    app.add_typer(room)
app.add_typer(host, name="host")


def _show_version(wanted: bool) -> None:
    if wanted:
        Console().print(f"diloco {diloco.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    bus: Annotated[
        str | None,
        typer.Option(
            help="NATS [default: DILOCO_BUS_URL, else 127.0.0.1:4222]",
            metavar="URL",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="store, also a bundle's [default: DILOCO_STORE_URL]",
            metavar="URL",
        ),
    ] = None,
    version: Annotated[  # noqa: ARG001 - the callback has answered
        bool,
        typer.Option(
            "--version", help="print the version and exit", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train one model on islands of accelerators, far apart, unequal and unreliable."""
    if context.invoked_subcommand != "learner":
        from diloco.common.process.config import keep_off_accelerators

        keep_off_accelerators()
    if bus is not None or store is not None:
        from diloco.run.cli.opening import RunLocation, use_place

        use_place(RunLocation(bus, store))


def main() -> None:
    """Runs the command; prints a `DilocoError` as a sentence, other exceptions with traceback.

    Exits with the command's status, or with that of the error.
    """
    try:
        app()
    except DilocoError as error:
        _fail(error)
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed the pipe.
        _silence()
        sys.exit(Exit.FAILED)
    except Exception as error:  # noqa: BLE001 - a bug: told with its trace
        from diloco.run.cli.failing import full_output, tell_bug

        if (failure := full_output(error)) is not None:
            _silence()
            _fail(failure)
        tell_bug(error)
        sys.exit(Exit.FAILED)


def _fail(error: DilocoError) -> NoReturn:
    from diloco.run.cli.failing import tell_failure

    tell_failure(error)
    sys.exit(error.status)


def _silence() -> None:
    """Discards further writes to standard output, which is closed or on a full disk."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
