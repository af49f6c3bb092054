"""The parts of `diloco auth`, and `diloco host guard`."""

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer

from diloco.common.protocol.errors import ConfigError
from diloco.run.cli.command import command, group
from diloco.run.cli.help import host
from diloco.run.cli.screen import say_plainly

app = group()
auth_app = group("Manage credentials and permissions on NATS.")
app.add_typer(auth_app, name="auth")

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="folder of credentials and keys; keep it secret")
]
ReloadOption = Annotated[
    str | None,
    typer.Option(
        help="command that copies accounts.conf to every server and reloads it "
        "[default: signal the server that runs from DIR]",
        metavar="COMMAND",
    ),
]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="name of the learner, aggregator or reader in the run")
]


@command(auth_app, "init")
def auth_init(
    folder: FolderArgument,
    run: Annotated[str, typer.Option("--run", help="name of the run", metavar="RUN")],
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            help="host name or address of a NATS server; repeat for each server of a cluster "
            "[default: localhost]",
            metavar="HOST",
        ),
    ] = None,
    installed_at: Annotated[
        Path | None,
        typer.Option(
            "--installed-at",
            help="path of the folder on the servers [default: its path here]",
            metavar="PATH",
        ),
    ] = None,
    streams_at: Annotated[
        Path | None,
        typer.Option(
            "--streams-at",
            help="folder of the streams on the servers [default: jetstream in that folder]",
            metavar="PATH",
        ),
    ] = None,
    max_file_gib: Annotated[
        float, typer.Option(help="disk limit of the run's streams, GiB", min=0.1)
    ] = 10.0,
) -> None:
    """Create the NATS server configuration, a TLS authority, and operator credentials."""
    from diloco.operate.auth import nats_config_and_credentials as auth

    credentials, servers = auth.init(
        folder,
        run,
        hosts or ["localhost"],
        installed_at=installed_at,
        streams_at=streams_at,
        max_file_bytes=int(max_file_gib * (1 << 30)),
    )
    url = ",".join(f"tls://{host}:4222" for host in hosts or ["localhost"])
    for server in servers:
        say_plainly(f"server configuration: {server}; start it with: nats-server -c {server}")
    say_plainly("in the run's TOML file:")
    say_plainly(f'  [bus]\n  url = "{url}"\n  tls_ca = "{folder.absolute() / "tls" / "ca.pem"}"')
    say_plainly(f'  credentials = "{credentials}"  # each party its own')


@command(auth_app, "add-learner")
def auth_add_learner(
    folder: FolderArgument,
    name: NameArgument,
    holds: Annotated[
        list[str] | None,
        typer.Option(
            "--holds",
            help="a module of the run of which it may send updates, with --run; repeat for each "
            "[default: all]",
            metavar="MODULE",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="TOML file of the run, with the operator's credentials; it must have been created",
            metavar="RUN",
        ),
    ] = None,
) -> None:
    """Create credentials for a learner."""
    from diloco.operate.auth import nats_config_and_credentials as auth

    if bool(holds) != bool(run):
        raise ConfigError(
            "--holds and --run belong together: the run says which fragments a module has",
            hint="give both, or neither: then the learner may send updates of all modules",
        )
    fragments = asyncio.run(auth.fragments_of(run, holds)) if run and holds else ()
    _tell_added(folder, auth.add(folder, name, "learner", fragments=fragments))


@command(auth_app, "add-aggregator")
def auth_add_aggregator(folder: FolderArgument, name: NameArgument) -> None:
    """Create credentials for an aggregator."""
    from diloco.operate.auth import nats_config_and_credentials as auth

    _tell_added(folder, auth.add(folder, name, "aggregator"))


@command(auth_app, "add-reader")
def auth_add_reader(
    folder: FolderArgument,
    name: NameArgument,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", help="processes that may use them at once [default: 4]", min=1, max=1000
        ),
    ] = None,
) -> None:
    """Create credentials that read the run and publish nothing: followers, page, report, track."""
    from diloco.common.process.credentials import PROCESSES
    from diloco.operate.auth import nats_config_and_credentials as auth

    _tell_added(folder, auth.add(folder, name, "reader", processes or PROCESSES))


@command(auth_app, "revoke")
def auth_revoke(
    folder: FolderArgument,
    name: NameArgument,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="TOML file of the run, with the operator's credentials: have the servers reload, "
            "and remove what they keep for NAME's reading",
            metavar="RUN",
        ),
    ] = None,
    reload: ReloadOption = None,
) -> None:
    """Revoke the credentials of a name; nothing else is interrupted."""
    from diloco.operate.auth import guard
    from diloco.operate.auth import nats_config_and_credentials as auth

    if run is None:
        auth.revoke(folder, name)
        say_plainly(f"{name} is cut off once the servers have reloaded:")
        _tell_reload(folder, times=1)
        return
    asyncio.run(guard.revoke(folder, run, name, guard.reload_command(folder, reload)))
    say_plainly(f"{name} is cut off, and the servers keep nothing for it")


@command(auth_app, "list")
def auth_list(folder: FolderArgument) -> None:
    """List all credentials."""
    from diloco.operate.auth import nats_config_and_credentials as auth

    for one in auth.identities(folder):
        only = f"  fragments {', '.join(map(str, one.fragments))} alone" if one.fragments else ""
        say_plainly(f"{one.role:<10} {one.name:<40} {one.public_key}{only}")


@command(host, "guard", logs="info")
def host_guard(
    folder: FolderArgument,
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="TOML file of the run, with the operator's credentials"),
    ],
    most_per_s: Annotated[
        float,
        typer.Option("--max-rate", help="messages per second of one learner, over 10 s", min=0.1),
    ] = 100.0,
    most_bytes_per_s: Annotated[
        float,
        typer.Option(
            "--max-bytes", help="bytes per second of one learner on the tape, over 10 s", min=1000
        ),
    ] = 1e6,
    reload: ReloadOption = None,
    monitors: Annotated[
        list[str] | None,
        typer.Option(
            "--monitor",
            help="address of a NATS server's monitoring, to see what each connection sends; "
            "repeat for each server",
            metavar="URL",
        ),
    ] = None,
) -> None:
    """Watch the tape, consumers and connections, and revoke parties that flood; runs until stopped.

    Run it on the machine that has DIR. Logs are JSON lines on stderr.
    """
    from diloco.operate.auth import guard

    command = guard.reload_command(folder, reload)
    with contextlib.suppress(KeyboardInterrupt):
        rates = guard.Rates(most_per_s, most_bytes_per_s)
        asyncio.run(
            guard.guard(folder, run, rates=rates, reload=command, monitors=tuple(monitors or ()))
        )


def _tell_added(folder: Path, credentials: Path) -> None:
    say_plainly(f"credentials: {credentials} (secret; move it to its owner's machine, mode 0600)")
    say_plainly("the servers know it after two reloads: the first creates the account, the second")
    say_plainly("connects it to the run:")
    _tell_reload(folder, times=2)


def _tell_reload(folder: Path, *, times: int) -> None:
    accounts = folder / "accounts.conf"
    say_plainly(f"  copy {accounts} next to each server's configuration, then run there:")
    of_folder = f"nats-server --signal reload={folder.absolute() / 'nats-server.pid'}"
    # The unit has its server keep its process's id in /run, and knows where.
    for reload in ("systemctl reload nats-server", of_folder):
        say_plainly("  " + " && sleep 1 && ".join([reload] * times))
    say_plainly("  (the first where the unit runs it, the second where it was started by hand)")
