"""Makes this machine join a run: installs a release and the run's files, and starts a unit.

    python3 join RELEASE --run run.toml --credentials NAME.toml [--ca ca.pem] [--url URL]

`make release` writes this program as one file next to the release. It runs as root, needs only
Python 3.10 and its standard library, and fetches nothing. The credentials state the name and the
role, learner or aggregator, with which the machine joins.

Run the program again for a newer release or other files: files that are up to date are not written
again, and if a new release does not start, the machine returns to the previous one.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from diloco.infra.install_release import (
    ReleaseRefused,
    Releases,
    Run,
    digest_of,
    manifest_of,
    run_command,
    say,
    write,
)

# Files that show that a machine has accelerators, and the devices that learners' units must allow.
_DRIVERS = {"cuda": ("dev/nvidiactl",), "tpu": ("dev/accel0", "dev/vfio/vfio")}
_NVIDIA = """[Service]
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidia-caps rw
"""
# As in `diloco.common.protocol.names`, which this file cannot import. A name is checked because
# root writes a file of that name.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_FIELD = re.compile(r'^(\w+) = "([^"]*)"$', re.MULTILINE)


class JoinRequest(NamedTuple):
    """The files and settings with which a machine joins a run.

    Attributes:
        release: the release's archive.
        run_file: the run's file.
        credentials: the credentials of a learner or an aggregator.
        authority: certificate of the run's authority, if NATS uses TLS.
        environment: environment variables of the daemon, such as DILOCO_BUS_URL, by name.
    """

    release: Path
    run_file: Path
    credentials: Path
    authority: Path | None
    environment: Mapping[str, str]


class JoiningMachine:
    """The machine that joins the run.

    Args:
        run: runs a command, and returns its output; raises if the command fails.
        root: root of the machine's file system.
    """

    def __init__(self, run: Run = run_command, root: Path = Path("/")) -> None:
        self._run = run
        self._root = root
        self._releases = Releases(run, root / "opt")

    def join(self, wanted: JoinRequest) -> bool:
        """Joins the run.

        Returns:
            True if the machine now runs this release; False if the release's unit does not start
            and the machine is back on the previous release.

        Raises:
            ReleaseRefused: the release or the credentials do not suit this machine; nothing has
                changed.
        """
        name, role = identity(wanted.credentials)
        unit = (
            "diloco-aggregator.service"
            if role == "aggregator"
            else f"diloco-learner@{name}.service"
        )
        before = self._releases.used
        home = self._unpack(wanted.release)
        self._releases.install(home)
        changed = self._write(wanted, name, role)
        self._run(["systemctl", "enable", unit])
        verb = "restart" if changed or home != before else "start"
        self._run(["systemctl", verb, "--no-block", unit])
        say(f"{role} {name}: journalctl -fu {unit}")
        return self._releases.settle(home, before, [unit]) == home

    def _unpack(self, release: Path) -> Path:
        kind = manifest_of(release).kind
        drivers = _DRIVERS.get(kind, ())
        if drivers and not any((self._root / path).exists() for path in drivers):
            raise ReleaseRefused(
                f"the release is for {kind}, and there is no /{' or /'.join(drivers)} here"
            )
        digest = digest_of(release)
        home = self._releases.home(digest)
        if not home.exists():
            home.parent.mkdir(parents=True, exist_ok=True)
            self._releases.unpack(release, digest, kind)
        if kind == "cuda":
            drop_in = "etc/systemd/system/diloco-learner@.service.d/30-nvidia.conf"
            write(self._root / drop_in, _NVIDIA.encode(), 0o644)
        return home

    def _write(self, wanted: JoinRequest, name: str, role: str) -> bool:
        etc = self._root / "etc/diloco"
        who = "aggregator" if role == "aggregator" else f"learner-{name}"
        file = "aggregator" if role == "aggregator" else name
        environment = dict(wanted.environment)
        changed = [
            write(etc / "run.toml", wanted.run_file.read_bytes(), 0o644),
            write(etc / f"credentials/{file}.toml", wanted.credentials.read_bytes(), 0o600),
        ]
        if wanted.authority is not None:
            environment.setdefault("DILOCO_BUS_TLS_CA", "/etc/diloco/ca.pem")
            changed.append(write(etc / "ca.pem", wanted.authority.read_bytes(), 0o644))
        lines = "".join(f"{key}={value}\n" for key, value in environment.items())
        return any([*changed, write(etc / f"{who}.env", lines.encode(), 0o644)])


def identity(credentials: Path) -> tuple[str, str]:
    """Returns (name, role) from a credentials file of `diloco auth`.

    Raises:
        ReleaseRefused: the file is not such a file, or its role is neither learner nor aggregator.
    """
    fields = dict(_FIELD.findall(credentials.read_text()))
    if fields.get("role") not in ("learner", "aggregator") or not fields.get("identity"):
        raise ReleaseRefused(
            f"{credentials} is no credentials file of a learner or an aggregator; make one with: "
            "diloco auth add-learner DIR NAME"
        )
    if not _NAME.fullmatch(fields["identity"]):
        raise ReleaseRefused(
            f"{credentials} is of {fields['identity']!r}, which is no name of a {fields['role']}"
        )
    return fields["identity"], fields["role"]


def parse(words: Sequence[str]) -> JoinRequest:
    """Parses the arguments of the command line; exits with an error if they are invalid."""
    parser = argparse.ArgumentParser(prog="join", description="Have this machine join a run.")
    parser.add_argument("release", type=Path, help="the archive from make release")
    parser.add_argument("--run", type=Path, required=True, help="the run's file")
    parser.add_argument("--credentials", type=Path, required=True, help="the file from diloco auth")
    parser.add_argument("--ca", type=Path, help="certificate of the run's authority: tls/ca.pem")
    parser.add_argument("--url", help="address of NATS, if not that of the run's file")
    more = "for the daemon's environment, such as DILOCO_METRICS_PORT=9465"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=more)
    given = parser.parse_args(words)
    pairs = [*([f"DILOCO_BUS_URL={given.url}"] if given.url else []), *given.set]
    if wrong := [pair for pair in pairs if not re.fullmatch(r"\w+=[^\n]*", pair)]:
        parser.error(f"--set {wrong[0]!r} is no KEY=VALUE")
    environment = dict(pair.split("=", 1) for pair in pairs)
    return JoinRequest(given.release, given.run, given.credentials, given.ca, environment)


def main() -> None:
    """Joins the run, or prints why not."""
    try:
        joined = JoiningMachine().join(parse(sys.argv[1:]))
    except (ReleaseRefused, OSError) as error:
        sys.exit(f"error: {error}")
    sys.exit(0 if joined else 1)


if __name__ == "__main__":
    main()
