"""`diloco host units`: installs the systemd units of `infra/systemd` on a machine.

Each file begins with a line that has a digest of the rest. By that an edited file is recognized: it
is named to the operator, and not overwritten. Drop-ins with other names are not touched.
"""

import hashlib
import stat
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from diloco.common.protocol import errors
from diloco.common.protocol.errors import ConfigError
from diloco.run.cli.folders import make_folder

SYSTEMD = Path("/etc/systemd/system")
# Files that are not units go into these folders, by the end of their names.
BESIDE = {"-sysusers.conf": Path("/etc/sysusers.d"), "-tmpfiles.conf": Path("/etc/tmpfiles.d")}
# Units with ProtectHome= cannot see files below these folders.
HOMES = ("/home", "/root", "/run/user")
# Suffix of the copy of an edited file, which systemd does not read.
KEPT = ".edited"
OURS = "# Written by diloco host units; to change it: systemctl edit. "
# The folder of programs in the units' templates; that of this machine replaces it.
PROGRAMS = Path("/opt/diloco/bin")
# Exit statuses of systemd itself (systemd.exec(5)): no program, no such group, no such user.
SYSTEMD_FINAL = (203, 216, 217)
# From version 254 on systemd has RestartSteps= for growing pauses, but that counts all restarts of
# a unit, even of years.
PAUSES = r"""# Before each restart 5 s more, up to a minute; after a life of ten minutes
# from the beginning. (A program with "+" runs as root.)
[Service]
ExecStartPre=+/bin/sh -c '\
  eval "$$(systemctl show -p NRestarts -p ExecMainStartTimestampMonotonic \
    -p ExecMainExitTimestampMonotonic %n)"; \
  lived=$$(((ExecMainExitTimestampMonotonic - ExecMainStartTimestampMonotonic) / 1000000)); \
  pause=$$((NRestarts < 12 ? 5 * NRestarts - 5 : 55)); \
  if [ $$pause -gt 0 ] && [ $$lived -lt 600 ]; then \
    echo "waits for $$pause s before restart $$NRestarts: what ended it stands above"; \
    exec sleep $$pause; \
  fi'
"""
RESTARTED = (
    "diloco-aggregator.service",
    "diloco-follow.service",
    "diloco-learner@.service",
    "diloco-watch.service",
    "nats-server.service",
)
USES_STORE = (
    "diloco-aggregator.service",
    "diloco-checkpoint.service",
    "diloco-follow.service",
    "diloco-gc.service",
    "diloco-learner@.service",
    "diloco-watch.service",
)
# A folder has one owner, but with DynamicUser= systemd would make another user for each daemon.
STORE_SYSUSERS = """# For systemd-sysusers: owner of the store's folder, and the daemons' user.
u diloco - "diloco daemons"
"""
STORE_TMPFILES = """# For systemd-tmpfiles: the store's folder, made where it is missing.
d {folder} 2750 diloco diloco
"""
# The group `diloco` can read objects, for operators who are its members. A disk that is not mounted
# yet makes no unit fail (as RequiresMountsFor= would): the daemons wait for it themselves.
STORE = """[Unit]
After=remote-fs.target

[Service]
User=diloco
UMask=0027
ReadWritePaths={folder}
"""


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """Options of `diloco host units`.

    Attributes:
        units: write only these, with or without `.service`; for an instance (`a@b`) its template.
        folder: systemd's folder of units.
        programs: folder that has `diloco` and `nats-server`; None for this program's folder.
        credentials: whether NATS requires credentials.
        store_folder: the folder that is the run's store, as whose owner the daemons run; None:
            the store is not a folder.
        overwrite: overwrite edited files too, after making a copy of each.
        dry_run: write nothing.
    """

    units: Annotated[
        list[str] | None,
        typer.Argument(metavar="[UNIT]...", help="units to write [default: all]"),
    ] = None
    folder: Annotated[Path, typer.Option("--to", help="folder of systemd units", metavar="DIR")] = (
        SYSTEMD
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


def install_units(wanted: UnitOptions) -> tuple[list[Path], dict[Path, Path]]:
    """Writes the units; with `dry_run` only returns what it would write.

    Returns:
        The files written, and for each edited file that was overwritten its copy.

    Raises:
        ConfigError: programs that units cannot start, edited files, no such unit, or a folder that
            cannot be written.
    """
    programs = _check_programs(wanted.programs or Path(sysconfig.get_path("scripts")))
    _check_store_folder(wanted.store_folder)
    chosen = choose(render(wanted, programs), wanted.units or ())
    files = {_place(wanted.folder, name): text for name, text in chosen.items()}
    edited = _edited(files)
    if edited and not wanted.overwrite:
        raise ConfigError(
            "edited since diloco host units wrote them, or not written by it: "
            + ", ".join(map(str, edited)),
            hint="move the changes into a drop-in (systemctl edit UNIT), then repeat this with "
            "--overwrite; nothing was written",
        )
    copies = {path: path.with_name(f"{path.name}{KEPT}") for path in edited}
    if not wanted.dry_run:
        for path, copy in copies.items():
            _write(copy, path.read_text())
        for path, text in files.items():
            _write(path, marked(text))
    return [*files], copies


def marked(text: str) -> str:
    """Returns a file's text below a line with its digest, by which `is_edited` judges the file."""
    return f"{OURS}{_digest(text)}\n{text}"


def is_edited(text: str) -> bool:
    """True if the text of a file was edited since this program wrote it, or is by someone else."""
    first, _, rest = text.partition("\n")
    return first != f"{OURS}{_digest(rest)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _place(folder: Path, name: str) -> Path:
    if folder == SYSTEMD:
        for ending, beside in BESIDE.items():
            if name.endswith(ending):
                return beside / name
    return folder / name


def _edited(files: Mapping[Path, str]) -> list[Path]:
    """Returns the existing files that were edited, or written, by hand."""
    edited = []
    for path, text in files.items():
        try:
            there = path.read_text()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
        if there != text and is_edited(there):
            edited.append(path)
    return edited


def _check_programs(folder: Path) -> Path:
    """Returns the folder of programs without symbolic links, which may be changed later.

    Raises:
        ConfigError: it has no `diloco`, or the units could not see it.
    """
    program = folder / "diloco"
    if not program.is_file() or not program.stat().st_mode & stat.S_IXUSR:
        raise ConfigError(
            f"there is no program {str(program)!r}",
            hint="name the folder of the diloco program: --programs /opt/diloco/bin",
        )
    for path in (program.resolve(), (folder / "python").resolve()):
        if str(path).startswith(HOMES):
            raise ConfigError(
                f"{str(path)!r} is below a home folder, which the units do not see (ProtectHome)",
                hint="install diloco and its Python for all users, such as in /opt/diloco",
            )
    return folder.resolve()


def _check_store_folder(folder: Path | None) -> None:
    if folder is None:
        return
    if not folder.is_absolute() or any(letter.isspace() for letter in str(folder)):
        raise ConfigError(
            f"the store's folder {str(folder)!r} is not an absolute path without spaces",
            hint="such as --store-folder /srv/diloco, the same as store.url in the run's file",
        )
    if str(folder).startswith((*HOMES, "/tmp", "/var/tmp")):  # noqa: S108 - refused, not used
        raise ConfigError(
            f"the units do not see the store's folder {str(folder)!r} (ProtectHome, PrivateTmp)",
            hint="put the store below /srv, or on a disk of its own",
        )


def _write(path: Path, text: str) -> None:
    try:
        make_folder(path.parent)
        path.write_text(text)
        path.chmod(0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror}",
            hint="run it as root, or name another folder: --to DIR",
        ) from error


# The files' contents


def render(options: UnitOptions, programs: Path) -> dict[str, str]:
    """Returns the text of every file, by its name, such as `nats-server.service`. Pure."""
    files = {}
    for item in resources.files("diloco.infra.systemd").iterdir():
        if item.name.endswith((".service", ".timer", ".conf")):
            text = _with_statuses(item.read_text())
            text = text.replace(f"{PROGRAMS}/", f"{programs}/")
            files[item.name] = text if options.credentials else _without_credentials(text)
    files |= {f"{unit}.d/10-pauses.conf": PAUSES for unit in RESTARTED}
    if options.store_folder is not None:
        files |= _store_files(options.store_folder)
    return dict(sorted(files.items()))


def _store_files(folder: Path) -> dict[str, str]:
    files = {f"{unit}.d/20-store.conf": STORE.format(folder=folder) for unit in USES_STORE}
    files["diloco-store-sysusers.conf"] = STORE_SYSUSERS
    files["diloco-store-tmpfiles.conf"] = STORE_TMPFILES.format(folder=folder)
    return files


def choose(files: Mapping[str, str], units: Sequence[str]) -> dict[str, str]:
    """Returns the files of the named units (all without names), and those that belong to no unit.

    Raises:
        ConfigError: there is no unit of such a name.
    """
    if not units:
        return dict(files)
    known = {_stem(name) for name in files if not name.endswith((".conf",)) or ".d/" in name}
    wanted = {_stem(unit) for unit in units}
    if unknown := sorted(wanted - known):
        raise ConfigError(
            f"there is no unit {unknown[0]!r}", hint=f"the units are: {', '.join(sorted(known))}"
        )
    return {n: text for n, text in files.items() if _stem(n) in wanted or _stem(n) not in known}


def _stem(name: str) -> str:
    """Returns the name that a unit's file shares with its timer and drop-ins, without suffix.

    Of an instance it is the name of its template, up to "@".
    """
    before, at, _ = name.partition("@")
    return before + at if at else name.partition(".")[0]


def _without_credentials(text: str) -> str:
    lines = text.splitlines(keepends=True)
    unwanted = (
        "LoadCredential=",
        "SetCredential=",
        "Environment=DILOCO_BUS_CREDENTIALS=",
        "# Not %d",
        "# Where there is no such file",
    )
    return "".join(line for line in lines if not line.startswith(unwanted))


def _with_statuses(text: str) -> str:
    """Returns a unit's text with the exit statuses after which systemd does not restart it."""
    statuses = " ".join(str(int(status)) for status in (*errors.final(), *SYSTEMD_FINAL))
    setting = "RestartPreventExitStatus="
    return text.replace(f"{setting}\n", f"{setting}{statuses}\n")
