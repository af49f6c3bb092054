"""The files of `diloco install-units`: those of `infra/systemd`, for one machine. Pure text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from diloco.common import exits
from diloco.common.errors import ConfigError

# What the units say; another program takes its place.
PROGRAMS = Path("/opt/diloco/bin")
# Of systemd's own, in systemd.exec(5): no program, no such group, no such user.
SYSTEMD_FINAL = (203, 216, 217)
# systemd itself does so from 254 on (RestartSteps), but then counts restarts of years.
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
RESTARTED = ("diloco-aggregator.service", "diloco-learner@.service", "nats-server.service")
USES_STORE = (
    "diloco-aggregator.service",
    "diloco-checkpoint.service",
    "diloco-gc.service",
    "diloco-learner@.service",
)
# A folder belongs to one user, and each daemon would else have one that systemd makes up.
STORE_SYSUSERS = """# For systemd-sysusers: owner of the store's folder, and the daemons' user.
u diloco - "diloco daemons"
"""
STORE_TMPFILES = """# For systemd-tmpfiles: the store's folder, made where it is missing.
d {folder} 2750 diloco diloco
"""
# Objects are for the group to read: operators who are members of `diloco`. Of a disk that cannot be
# mounted yet no unit fails (RequiresMountsFor=): daemons wait for it within the process.
STORE = """[Unit]
After=remote-fs.target

[Service]
User=diloco
UMask=0027
ReadWritePaths={folder}
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the files depend on.

    Attributes:
        programs: folder of `diloco` and `nats-server`.
        credentials: whether NATS asks for them.
        store_folder: the store, if it is a folder of this machine.
    """

    programs: Path
    credentials: bool = True
    store_folder: Path | None = None


def render(options: Options) -> dict[str, str]:
    """Every file, by its name below systemd's folder."""
    files = {}
    for item in resources.files("diloco.infra.systemd").iterdir():
        if item.name.endswith((".service", ".timer", ".conf")):
            text = _with_statuses(item.read_text())
            text = text.replace(f"{PROGRAMS}/", f"{options.programs}/")
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
    """Of the files, those of the units that are named, and what is of no unit.

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
    """What a unit, its timer and its drop-ins are named after; an instance, after its template."""
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
    """The unit with the statuses after which it is not started again, and is listed as failed."""
    statuses = " ".join(str(int(status)) for status in (*exits.final(), *SYSTEMD_FINAL))
    setting = "RestartPreventExitStatus="
    return text.replace(f"{setting}\n", f"{setting}{statuses}\n")
