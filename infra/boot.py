#!/usr/bin/env python3
"""The boot program of a machine of infra/terraform: installs a release and starts its units.

It runs as root at each boot, and needs Python 3.10 and a service account alone. The instance's
metadata state what to do (`Parameters`), and contain no secret: secrets come from Secret Manager
into files of mode 0600. All other programs come in one release (docs/release.md) from the bucket.
Steps may be repeated: files that are up to date are not written again. For new secrets, a new
configuration or a new release, run this program again on the running machine:
google_metadata_script_runner startup.

Files on the machine:
    /opt/diloco             link to the release in use, /opt/diloco-DIGEST
    /opt/diloco-before      link to the previous release, to which it can go back
    /etc/diloco/run.toml    and other files of the bucket of configurations
    /etc/diloco/credentials/NAME.toml, /etc/nats/tls/NAME.key   secrets
    /var/lib/diloco-data/tokens   on a learner's machine: prepared data, copied by a unit
    /var/lib/nats/jetstream   on a NATS server: the disk of the streams
    /usr/local/lib/diloco   this program, written by infra/terraform/startup.py.tftpl at each boot
"""

import fcntl
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diloco.infra.cloud import DNS, Google
from diloco.infra.ended import DROP_IN
from diloco.infra.google_units import ACCELERATORS, CACHE, KEEPER, LIVEZ, LOGS, UNITS, data_units
from diloco.infra.install_release import ReleaseRefused, Releases, Run, run_command, say, write

_AGAIN_S = 60.0
_PEERS = "DILOCO_LEARNER_PEERS"
# The metadata entry with a host's number within its slice, which JAX reads too.
_WORKER = "attributes/agent-worker-number"
# The end of a line of /etc/hosts that this program writes.
_OURS = "# diloco"
# Seconds for which a resolver may remember a host's address, as in infra/terraform/modules/learner.
_NAME_S = 5
# Units that are started in addition to LOGS, by role; they need no release.
_ALSO_STARTED = {"learner": (LIVEZ,), "keeper": (KEEPER,)}
_INSTALL_NGINX = (
    "command -v nginx || { apt-get update -q && DEBIAN_FRONTEND=noninteractive "
    "apt-get install -q -y --no-install-recommends nginx-light; }"
)


class Parameters(NamedTuple):
    """The metadata attribute `diloco`, written by Terraform.

    Attributes:
        role: "nats", "aggregator", "learner", "keeper", or "cache".
        name: name of the server, aggregator, learner or cache.
        bucket: the bucket with the release and the files.
        release: {"object": name, "sha256": hexadecimal digest} of the release's archive; {}: none,
            for a cache, and a keeper that only keeps groups.
        files: path on the machine -> object.
        secrets: path on the machine -> resource name of a secret's version.
        environment: the content of the unit's environment file.
        units: the units to enable and start.
        kind: kind of the release: "cpu", "cuda" or "tpu".
        groups: for the keeper: the fields of a `keeper.GroupSpec` for each group of learners.
        stop_at: for the keeper: the time (RFC 3339) after which no learner has machines; "": never.
        budget: for the keeper: {"dollars": when these are spent, no learner has machines,
            "dollars_hour": what all but learners costs, "uncounted": names of what has no price};
            None: no budget.
        disk: {"device": the disk of NATS's streams, "folder": its mount point}; None: the machine
            has no such disk.
        data: URL of a folder of prepared data in a bucket, which a learner's machine copies; "":
            none.
        slice: for a learner of several slices: {"number": which slice the machine is of, "hosts":
            how many hosts each slice has, "names": path of the DNS zone of all hosts' names}; None:
            the learner has one slice.
    """

    role: str
    name: str
    bucket: str
    release: Mapping[str, str]
    files: Mapping[str, str]
    secrets: Mapping[str, str]
    environment: Mapping[str, str]
    units: Sequence[str]
    kind: str
    groups: Sequence[Mapping[str, object]] = ()
    stop_at: str = ""
    budget: Mapping[str, object] | None = None
    disk: Mapping[str, str] | None = None
    data: str = ""
    slice: Mapping[str, Any] | None = None


class Boot:
    """Boots a machine.

    Args:
        google: gives parameters, files and secrets.
        run: runs a command, and returns its output; raises if the command fails.
        root: root of the file system.
    """

    def __init__(self, google: Google, run: Run, root: Path = Path("/")) -> None:
        self._google = google
        self._run = run
        self._root = root
        self._releases = Releases(run, root / "opt")

    def boot(self) -> bool:
        """Installs the release, writes files and secrets, and starts the units, in this order.

        First waits for another boot that is in progress: a person may have started one by hand.

        Returns:
            True if the machine now runs the release of its parameters; False if it runs the
            previous release, as the new one is unusable or its units do not start.
        """
        path = self._root / "run/diloco-boot.lock"
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._boot()

    def _boot(self) -> bool:
        parameters = Parameters(**self._google.parameters())
        if parameters.slice is not None:
            host = self._take_name(parameters.slice, parameters.environment[_PEERS].split(","))
            place = {"DILOCO_LEARNER_HOST": str(host)}
            parameters = parameters._replace(environment={**parameters.environment, **place})
        say(
            f"{parameters.role} {parameters.name}: {parameters.release.get('object', 'no release')}"
        )
        self.start_units(LOGS, *_ALSO_STARTED.get(parameters.role, ()))
        if parameters.role == "cache":
            self._cache(parameters)
            return True
        if not parameters.release:
            return True
        if parameters.role == "learner":
            self._prepare(parameters.kind, parameters.data)
        before = self._releases.used
        home = self._fetch(parameters, before)
        self._releases.install(home)
        if parameters.disk:
            self._mount(parameters.disk["device"], self._at(parameters.disk["folder"]))
        changed = self._write_files(parameters)
        if parameters.role == "nats":
            self._own()
        self._start(parameters, home != before, changed)
        home = self._releases.settle(home, before, parameters.units)
        return home == self._releases.home(parameters.release["sha256"])

    def start_units(self, *units: str) -> None:
        """Writes, enables and starts units of `google_units.UNITS`, which need no release."""
        for unit in units:
            write(self._root / "etc/systemd/system" / unit, UNITS[unit].encode(), 0o644)
        self._run(["systemctl", "daemon-reload"])
        self._run(["systemctl", "enable", "--now", *units])

    def _cache(self, parameters: Parameters) -> None:
        """Installs Debian's nginx, and starts the region's cache."""
        changed = self._write_files(parameters)
        # Debian's own unit must not start what the cache's unit runs.
        self._run(["systemctl", "mask", "nginx.service"])
        self._run(["sh", "-c", _INSTALL_NGINX])
        self.start_units(CACHE)
        if changed:
            self._run(["systemctl", "restart", "--no-block", CACHE])

    def _prepare(self, kind: str, data: str) -> None:
        """Writes drop-ins for the learner's unit that only machines of infra/terraform need."""
        drop_in = self._root / "etc/systemd/system/diloco-learner@.service.d/40-ended.conf"
        write(drop_in, DROP_IN.encode(), 0o644)
        for path, text in data_units(data).items() if data else ():
            write(self._root / path, text.encode(), 0o644)
        if kind == "tpu":
            for path, text in ACCELERATORS.items():
                write(self._root / path, text.encode(), 0o644)
            self._run(["systemd-sysusers"])
            self._run(["udevadm", "control", "--reload"])
            self._run(["udevadm", "trigger", "--settle", "-s", "vfio", "-s", "accel"])

    def _take_name(self, mine: Mapping[str, Any], peers: Sequence[str]) -> int:
        """Gives the name of this host this machine's address; returns the host's number.

        Names stay when machines are replaced. This machine itself finds the address in /etc/hosts,
        as resolvers may still have the address of the machine before.

        Args:
            mine: `Parameters.slice`.
            peers: the names of all hosts, each with a port, slice by slice.
        """
        # The platform numbers the hosts of a slice, as the TPU's runtime knows them.
        place = int(self._google.about_me(_WORKER)) if mine["hosts"] > 1 else 0
        host = int(mine["number"]) * int(mine["hosts"]) + place
        name = peers[host].rpartition(":")[0]
        address = self._google.about_me("network-interfaces/0/ip").decode()
        table = self._at("/etc/hosts")
        lines = table.read_text().splitlines() if table.exists() else []
        kept = [line for line in lines if not line.endswith(_OURS)]
        text = "".join(f"{line}\n" for line in [*kept, f"{address} {name} {_OURS}"])
        write(table, text.encode(), 0o644)
        record = {"name": f"{name}.", "type": "A", "ttl": _NAME_S, "rrdatas": [address]}
        self._google.change(f"{DNS}{mine['names']}/rrsets/{name}./A", record)
        say(f"host {host}: {name} is {address}")
        return host

    # The release

    def _fetch(self, parameters: Parameters, before: Path | None) -> Path:
        """Downloads and unpacks the release of the parameters; returns its folder.

        If the release is unusable: returns `before`, the folder of the release in use.

        Raises:
            ReleaseRefused: the release is unusable, and `before` is None.
        """
        digest = parameters.release["sha256"]
        home = self._releases.home(digest)
        if home.exists():
            return home
        archive = self._releases.archive(digest)
        try:
            found = self._google.save(parameters.bucket, parameters.release["object"], archive)
            if found != digest:
                raise ReleaseRefused(f"{parameters.release['object']} has sha256 {found}")
            return self._releases.unpack(archive, digest, parameters.kind)
        except ReleaseRefused as error:
            say(f"refused: {error}")
            if before is None:
                raise
            return before
        finally:
            archive.unlink(missing_ok=True)

    # The disk

    def _mount(self, device: str, folder: Path) -> None:
        """Mounts the disk of the streams; makes a file system on it if there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        line = f"{device} {folder} ext4 defaults,nofail,noatime 0 2\n"
        table = self._root / "etc/fstab"
        if line not in table.read_text():
            # blkid's status 2 means an empty disk; only then is a file system made.
            kind = self._run(["sh", "-c", f"blkid -p -s TYPE -o value {device} || [ $? = 2 ]"])
            if not kind.strip():
                self._run(["mkfs.ext4", "-q", "-m", "0", device])
            with table.open("a") as file:
                file.write(line)
        # Without its disk a server would begin an empty store in the mount point's folder.
        unit = self._root / "etc/systemd/system/nats-server.service.d/10-streams.conf"
        write(unit, f"[Unit]\nRequiresMountsFor={folder}\n".encode(), 0o644)
        self._run(["systemctl", "daemon-reload"])
        self._run(["sh", "-c", f"mountpoint -q {folder} || mount {folder}"])

    def _own(self) -> None:
        """Makes the user `nats` the owner of the server's TLS key and of its folder.

        The streams inside the folder belong to that user already.
        """
        folder = self._at("/var/lib/nats")
        self._run(["chown", "nats:nats", str(folder), str(folder / "jetstream")])
        self._run(["chown", "-R", "nats:nats", str(self._at("/etc/nats/tls"))])

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    # Files and secrets

    def _write_files(self, parameters: Parameters) -> set[str]:
        """Writes files, secrets and the environment file; returns the paths that changed."""
        contents = {
            path: (self._google.object(parameters.bucket, name), 0o644)
            for path, name in parameters.files.items()
        }
        for path, version in parameters.secrets.items():
            contents[path] = (self._google.secret(version), 0o600)
        if parameters.role in ("aggregator", "learner"):
            unit = "aggregator" if parameters.role == "aggregator" else f"learner-{parameters.name}"
            lines = "".join(f"{key}={value}\n" for key, value in parameters.environment.items())
            contents[f"/etc/diloco/{unit}.env"] = (lines.encode(), 0o644)
        return {
            path for path, (data, mode) in contents.items() if write(self._at(path), data, mode)
        }

    # The units

    def _start(self, parameters: Parameters, released: bool, changed: set[str]) -> None:
        """Enables the units; restarts them if release or files changed, else starts them.

        NATS only reloads if nothing but its accounts changed. Does not wait until units have
        started, as daemons wait for each other.

        Args:
            parameters: the machine's parameters.
            released: whether the release has changed.
            changed: paths of the files that have changed.
        """
        units = parameters.units
        self._run(["systemctl", "enable", *units])
        if parameters.role == "nats" and changed == {"/etc/nats/accounts.conf"} and not released:
            # The first reload makes new accounts, the second connects them with the run's account.
            self._run(["systemctl", "reload", *units])
            self._run(["sleep", "1"])
            self._run(["systemctl", "reload", *units])
        else:
            verb = "restart" if released or changed else "start"
            self._run(["systemctl", verb, "--no-block", *units])


def main() -> None:
    """Boots, and retries after any error: new permissions take minutes to take effect."""
    while True:
        try:
            told = Boot(Google(), run_command).boot()
        except Exception:  # noqa: BLE001, PERF203 - nobody else is there to try again
            traceback.print_exc()
            say(f"failed; again in {_AGAIN_S:g} s")
            time.sleep(_AGAIN_S)
        else:
            sys.exit(0 if told else 1)


if __name__ == "__main__":
    main()
