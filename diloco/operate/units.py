"""`diloco install-units`: the systemd units of `infra/systemd`, on a machine of one's own.

Each file begins with a line that holds a digest of the rest. So a file that somebody has edited
is known, and is named instead of overwritten; drop-ins of other names are never touched.
"""

import hashlib
import stat
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco.cli.folders import make_folder
from diloco.common.errors import ConfigError
from diloco.operate import unit_files
from diloco.operate.unit_files import Options

SYSTEMD = Path("/etc/systemd/system")
# Where files go that are not units, by how their names end.
BESIDE = {"-sysusers.conf": Path("/etc/sysusers.d"), "-tmpfiles.conf": Path("/etc/tmpfiles.d")}
# Units with ProtectHome= do not see what is below these.
HOMES = ("/home", "/root", "/run/user")
# How the copy of an edited file ends, which systemd does not read.
KEPT = ".edited"
OURS = "# Written by diloco install-units; to change it: systemctl edit. "


@dataclass(frozen=True, kw_only=True)
class Install:
    """What is asked for.

    Attributes:
        folder: where systemd looks for units.
        programs: folder that has `diloco` and `nats-server`; None for that of this very program.
        units: write only these, `.service` or not; an instance stands for its template. () is all.
        credentials: whether NATS asks for them.
        store_folder: the store is this folder; the daemons become its user.
        overwrite: also files that somebody has edited; a copy of each stays.
        dry_run: write nothing.
    """

    folder: Path = SYSTEMD
    programs: Path | None = None
    units: tuple[str, ...] = ()
    credentials: bool = True
    store_folder: Path | None = None
    overwrite: bool = False
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What was written, or would be.

    Attributes:
        files: all of them.
        kept: of those that somebody had edited, where the edited text is now.
    """

    files: list[Path]
    kept: Mapping[Path, Path]


def install_units(wanted: Install) -> Installed:
    """Write the units; which files were written, or would be.

    Raises:
        ConfigError: programs that units cannot start, files that somebody has edited, no such
            unit, or a folder that cannot be written.
    """
    programs = _check_programs(wanted.programs or Path(sysconfig.get_path("scripts")))
    options = Options(
        programs=programs,
        credentials=wanted.credentials,
        store_folder=_check_store_folder(wanted.store_folder),
    )
    chosen = unit_files.choose(unit_files.render(options), wanted.units)
    files = {_place(wanted.folder, name): text for name, text in chosen.items()}
    edited = _edited(files)
    if edited and not wanted.overwrite:
        raise ConfigError(
            "edited since install-units wrote them, or not written by it: "
            + ", ".join(map(str, edited)),
            hint="move the changes into a drop-in (systemctl edit UNIT), then repeat this with "
            "--overwrite; nothing was written",
        )
    kept = {path: path.with_name(f"{path.name}{KEPT}") for path in edited}
    if not wanted.dry_run:
        for path, copy in kept.items():
            _write(copy, path.read_text())
        for path, text in files.items():
            _write(path, marked(text))
    return Installed(files=[*files], kept=kept)


def marked(text: str) -> str:
    """The text below the line by which it is known."""
    return f"{OURS}{_digest(text)}\n{text}"


def is_edited(text: str) -> bool:
    """Whether somebody has changed a file since it was written, or has written it."""
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
    """Those of the files that somebody has changed, or written."""
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
    """The folder, its links followed: a unit stays with its release when a link moves on."""
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


def _check_store_folder(folder: Path | None) -> Path | None:
    if folder is None:
        return None
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
    return folder


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
