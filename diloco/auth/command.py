"""The parts of `diloco auth`, as the command line has them."""

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from diloco.common import log

auth_app = typer.Typer(help="Credentials and permissions on NATS.", no_args_is_help=True)

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="the folder of credentials; keep it to yourself")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME")]


@auth_app.command("init")
def auth_init(
    folder: FolderArgument,
    run: Annotated[str, typer.Option("--run", help="the run it is for", metavar="RUN")],
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            help="name or address of the NATS server; three times for a cluster of three "
            "[default: localhost]",
            metavar="HOST",
        ),
    ] = None,
    installed_at: Annotated[
        Path | None,
        typer.Option(
            "--installed-at",
            help="where the servers' machines will have the folder [default: where it is]",
            metavar="PATH",
        ),
    ] = None,
    streams_at: Annotated[
        Path | None,
        typer.Option(
            "--streams-at",
            help="where these machines keep the streams [default: jetstream in that folder]",
            metavar="PATH",
        ),
    ] = None,
    max_file_gib: Annotated[
        float, typer.Option(help="most that the run's streams may take on disk, GiB", min=0.1)
    ] = 10.0,
) -> None:
    """Make the NATS servers' configuration, an authority for TLS, and the operator."""
    log.configure("error")
    from diloco.auth import files as auth

    made = auth.init(
        folder,
        run,
        hosts or ["localhost"],
        installed_at=installed_at,
        streams_at=streams_at,
        max_file_bytes=int(max_file_gib * (1 << 30)),
    )
    url = ",".join(f"tls://{host}:4222" for host in hosts or ["localhost"])
    for server in made.servers:
        _say(f"server configuration: {server}; start it with: nats-server -c {server}")
    _say("in the run's TOML file:")
    _say(f'  [bus]\n  url = "{url}"\n  tls_ca = "{folder.absolute() / "tls" / "ca.pem"}"')
    _say(f'  credentials = "{made.credentials}"  # each party its own')


@auth_app.command("add-learner")
def auth_add_learner(folder: FolderArgument, name: NameArgument) -> None:
    """Make credentials for a learner."""
    log.configure("error")
    from diloco.auth import files as auth

    _tell_added(folder, auth.add(folder, name, "learner").credentials)


@auth_app.command("add-aggregator")
def auth_add_aggregator(folder: FolderArgument, name: NameArgument) -> None:
    """Make credentials for an aggregator."""
    log.configure("error")
    from diloco.auth import files as auth

    _tell_added(folder, auth.add(folder, name, "aggregator").credentials)


@auth_app.command("revoke")
def auth_revoke(folder: FolderArgument, name: NameArgument) -> None:
    """End an identity; the others, the run and the servers go on."""
    log.configure("error")
    from diloco.auth import files as auth

    auth.revoke(folder, name)
    _say(f"{name} is cut off once the servers have reloaded:")
    _tell_reload(folder, times=1)


@auth_app.command("list")
def auth_list(folder: FolderArgument) -> None:
    """Show who has credentials."""
    log.configure("error")
    from diloco.auth import files as auth

    for one in auth.identities(folder):
        _say(f"{one.role:<10} {one.name:<40} {one.public_key}")


@auth_app.command("guard")
def auth_guard(
    folder: FolderArgument,
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="the run's TOML file, with the operator's key")
    ],
    most_per_s: Annotated[
        float,
        typer.Option(
            "--max-rate", help="messages a second of one learner, over ten seconds", min=0.1
        ),
    ] = 100.0,
    reload: Annotated[
        str | None,
        typer.Option(
            help="command that brings accounts.conf to every server and has it reload "
            "[default: a signal to the server that runs from DIR]",
            metavar="COMMAND",
        ),
    ] = None,
) -> None:
    """Revoke whoever floods the tape, before it is full; runs until it is stopped.

    Run it where DIR is. Logs are JSON lines on standard error.
    """
    log.configure("info")
    from diloco.auth import guard

    command = guard.reload_command(folder, reload)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(guard.guard(folder, run, most_per_s=most_per_s, reload=command))


def _tell_added(folder: Path, credentials: Path | None) -> None:
    _say(f"credentials: {credentials} (secret; move it to its owner's machine, mode 0600)")
    _say("known to the servers once they have reloaded, twice: the first time makes the account,")
    _say("the second one connects it with the run's:")
    _tell_reload(folder, times=2)


def _tell_reload(folder: Path, *, times: int) -> None:
    _say(f"  copy {folder / 'accounts.conf'} beside each server's configuration, then there:")
    command = f"nats-server --signal reload={folder.absolute() / 'nats-server.pid'}"
    _say("  " + " && sleep 1 && ".join([command] * times))


def _say(text: str) -> None:
    Console().print(text, soft_wrap=True, highlight=False, markup=False)
