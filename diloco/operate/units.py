"""`diloco install-units`: the systemd units of `infra/systemd`, on a machine of one's own."""

import re
import shutil
import stat
import subprocess
import sysconfig
from importlib import resources
from pathlib import Path

from diloco.cli.folders import make_folder
from diloco.common.errors import ConfigError

SYSTEMD = Path("/etc/systemd/system")
SYSUSERS = Path("/etc/sysusers.d")
# What the units say; another program takes its place.
PROGRAMS = Path("/opt/diloco/bin")
# Units with ProtectHome= do not see what is below these.
HOMES = ("/home", "/root", "/run/user")
# From this version on systemd waits longer and longer between restarts.
BACKOFF_VERSION = 254
BACKOFF = """[Service]
RestartSteps=6
RestartMaxDelaySec=60
"""
RESTARTED = ("diloco-aggregator.service", "diloco-learner@.service", "nats-server.service")


def install_units(
    folder: Path, programs: Path | None, *, credentials: bool, dry_run: bool
) -> list[Path]:
    """Write the units; the files that were written, or would be.

    Args:
        folder: where systemd looks for units.
        programs: folder that has `diloco` and `nats-server`; None for that of this very program.
        credentials: whether NATS asks for them.
        dry_run: write nothing.

    Raises:
        ConfigError: programs that units cannot start, or a folder that cannot be written.
    """
    programs = _check_programs(programs or Path(sysconfig.get_path("scripts")))
    files = render_units(programs, credentials=credentials, backoff=_has_backoff())
    sysusers = SYSUSERS if folder == SYSTEMD else folder
    written = []
    for name, text in files.items():
        path = (sysusers if name.endswith("-sysusers.conf") else folder) / name
        written.append(path)
        if not dry_run:
            _write(path, text)
    return written


def render_units(programs: Path, *, credentials: bool, backoff: bool) -> dict[str, str]:
    """Every file, by its name below systemd's folder."""
    files = {}
    for item in resources.files("diloco.infra.systemd").iterdir():
        if item.name.endswith((".service", ".timer", ".conf")):
            text = item.read_text().replace(f"{PROGRAMS}/", f"{programs}/")
            files[item.name] = text if credentials else _without_credentials(text)
    if backoff:
        files |= {f"{unit}.d/10-backoff.conf": BACKOFF for unit in RESTARTED}
    return dict(sorted(files.items()))


def _without_credentials(text: str) -> str:
    lines = text.splitlines(keepends=True)
    wanted = ("LoadCredential=", "Environment=DILOCO_BUS_CREDENTIALS=", "# Not %d")
    return "".join(line for line in lines if not line.startswith(wanted))


def _check_programs(folder: Path) -> Path:
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
    return folder


def _has_backoff() -> bool:
    """Whether this machine's systemd knows RestartSteps=."""
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return False
    done = subprocess.run(  # noqa: S603 - systemd's own command
        [systemctl, "--version"], capture_output=True, text=True, check=False
    )
    found = re.match(r"systemd (\d+)", done.stdout)
    return found is not None and int(found.group(1)) >= BACKOFF_VERSION


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
