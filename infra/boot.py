#!/usr/bin/env python3
"""What a machine of infra/terraform runs at each boot, as root: from an empty disk to units.

It needs no more than Python 3.10 and a service account. The instance's metadata say what to do
(`Parameters`), and hold no secret: secrets come from Secret Manager into files of mode 0600. All
steps may be repeated; what is there already stays. Run it again on a machine that is up, for new
secrets, configuration or a new release: google_metadata_script_runner startup.

Files on the machine:
    /opt/diloco             link to the virtual environment of the newest release
    /etc/diloco/run.toml    and other files of the bucket of configurations
    /etc/diloco/credentials/NAME.toml, /etc/nats/tls/NAME.key   secrets
    /var/lib/nats/jetstream   on a NATS server: the disk of the streams
    /usr/local/lib/diloco/boot.py   on a learner's: this program, which answers health checks
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/"
STORAGE = "https://storage.googleapis.com/storage/v1/"
SECRETS = "https://secretmanager.googleapis.com/v1/"
# Older ones cannot run the project; for those uv brings one.
_PYTHONS = ("python3.13", "python3.12", "python3.11")
_BROUGHT = "3.12"
_AGAIN_S = 60.0
# Of the release: what the user's task needs besides, with hashes.
TASKS = "locks/task.lock"
# Where Google's health checks ask whether the machine lives, as infra/terraform has it. Its daemon
# is not asked: it may compile, wait, have failed or ended, and a new machine helps none of that.
LIVEZ_PORT = 9463
LIVEZ = "diloco-livez.service"
_OWN = "/usr/local/lib/diloco/boot.py"
_LIVEZ_UNIT = f"""[Unit]
Description=Answers health checks of this machine

[Service]
ExecStart=/usr/bin/python3 {_OWN} livez
Restart=always
RestartSec=5
OOMScoreAdjust=-500

DynamicUser=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
ProcSubset=pid
PrivateTmp=yes
PrivateDevices=yes
PrivateUsers=yes
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
MemoryMax=256M
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM
RestrictAddressFamilies=AF_INET AF_INET6

[Install]
WantedBy=multi-user.target
"""

Run = Callable[[Sequence[str]], str]


class Parameters(NamedTuple):
    """The metadata attribute `diloco`, written by Terraform.

    Attributes:
        role: "nats", "aggregator" or "learner".
        name: of the server, aggregator or learner.
        bucket: holds the release and the files.
        release: {"object": name, "sha256": hexadecimal digest}.
        files: path -> object.
        secrets: path -> resource name of a secret's version.
        environment: what the unit's environment file holds.
        units: what is enabled and started.
        accelerator: whether JAX needs its part for TPUs.
        disk: {"device": of the streams, "folder": where they are}; None: no disk of its own.
    """

    role: str
    name: str
    bucket: str
    release: Mapping[str, str]
    files: Mapping[str, str]
    secrets: Mapping[str, str]
    environment: Mapping[str, str]
    units: Sequence[str]
    accelerator: bool
    disk: Mapping[str, str] | None = None


class Google:
    """What the machine's service account reads of Google Cloud."""

    def __init__(
        self, metadata: str = METADATA, storage: str = STORAGE, secrets: str = SECRETS
    ) -> None:
        self._metadata = metadata
        self._storage = storage
        self._secrets = secrets

    def parameters(self) -> Parameters:
        """What this machine is to be."""
        return Parameters(**json.loads(self._about_me("attributes/diloco")))

    def object(self, bucket: str, name: str) -> bytes:
        """The bytes of an object."""
        quoted = urllib.parse.quote(name, safe="")
        return self._get(f"{self._storage}b/{bucket}/o/{quoted}?alt=media")

    def secret(self, version: str) -> bytes:
        """The bytes of a secret."""
        answer = json.loads(self._get(f"{self._secrets}{version}:access"))
        return base64.b64decode(answer["payload"]["data"])

    def _get(self, url: str) -> bytes:
        token = json.loads(self._about_me("service-accounts/default/token"))["access_token"]
        return _fetch(url, {"Authorization": f"Bearer {token}"})

    def _about_me(self, path: str) -> bytes:
        return _fetch(self._metadata + path, {"Metadata-Flavor": "Google"})


class Boot:
    """The steps.

    Args:
        google: where parameters, files and secrets come from.
        run: runs a command, and returns what it says; raises if it fails.
        root: of the file system.
    """

    def __init__(self, google: Google, run: Run, root: Path = Path("/")) -> None:
        self._google = google
        self._run = run
        self._root = root

    def boot(self) -> None:
        """All steps, in an order that starts nothing before what it needs is there."""
        parameters = self._google.parameters()
        _say(f"{parameters.role} {parameters.name}: release {parameters.release['object']}")
        if parameters.role == "learner":
            self.answer_health_checks()
        released = self._install(parameters)
        programs = str(self._root / "opt/diloco/bin")
        # Who has edited a unit here finds the text beside it; nobody is there to be asked.
        self._run([f"{programs}/diloco", "install-units", "--programs", programs, "--overwrite"])
        self._run(["systemd-sysusers"])
        if parameters.disk:
            self._mount(parameters.disk["device"], self._at(parameters.disk["folder"]))
        self._run(["systemctl", "daemon-reload"])
        changed = self._write_files(parameters)
        if parameters.role == "nats":
            self._own()
        self._start(parameters, released, changed)
        _say("done")

    def answer_health_checks(self) -> None:
        """Have the machine say that it lives, before and whatever else happens on it."""
        write(self._at(_OWN), Path(__file__).read_bytes(), 0o644)
        write(self._root / "etc/systemd/system" / LIVEZ, _LIVEZ_UNIT.encode(), 0o644)
        self._run(["systemctl", "daemon-reload"])
        self._run(["systemctl", "enable", "--now", LIVEZ])

    # The release

    def _install(self, parameters: Parameters) -> bool:
        """Make the release's environment; whether it is another than before."""
        digest = parameters.release["sha256"]
        home = self._root / f"opt/diloco-{digest[:16]}"
        link = self._root / "opt/diloco"
        if not (home / "complete").exists():
            shutil.rmtree(home, ignore_errors=True)
            source = self._unpack(parameters, home)
            self._make_environment(home, source, parameters.accelerator)
            (home / "complete").touch()
        if link.is_symlink() and link.readlink() == Path(home.name):
            return False
        part = link.with_name("diloco.part")
        part.unlink(missing_ok=True)
        part.symlink_to(home.name)
        part.replace(link)
        return True

    def _unpack(self, parameters: Parameters, home: Path) -> Path:
        data = self._google.object(parameters.bucket, parameters.release["object"])
        found = hashlib.sha256(data).hexdigest()
        if found != parameters.release["sha256"]:
            raise ValueError(f"{parameters.release['object']} has sha256 {found}")
        source = home / "source"
        source.mkdir(parents=True)
        archive = home / "release.tar.gz"
        archive.write_bytes(data)
        self._run(["tar", "-xzf", str(archive), "-C", str(source), "--strip-components=1"])
        archive.unlink()
        return source

    def _make_environment(self, home: Path, source: Path, accelerator: bool) -> None:
        self._run(["apt-get", "update"])
        self._run(["apt-get", "install", "-y", "--no-install-recommends", "python3-venv"])
        pip = [str(home / "bin/python"), "-m", "pip", "install", "--quiet"]
        self._run([self._python(source), "-m", "venv", str(home)])
        self._run([*pip, "--require-hashes", "-r", str(source / "requirements.lock")])
        self._run([*pip, "--no-deps", "--no-build-isolation", str(source)])
        if accelerator:
            self._run([*pip, "--require-hashes", "-r", str(source / "locks/tpu.lock")])
        if (source / TASKS).exists():
            self._run([*pip, "--require-hashes", "-r", str(source / TASKS)])

    def _python(self, source: Path) -> str:
        """A Python that can run the project; where the system has none, uv fetches one."""
        for name in _PYTHONS:
            if shutil.which(name):
                return name
        home = self._root / "opt/diloco-python"
        if not (home / "bin/uv").exists():
            pin = self._root / "opt/diloco-uv.txt"
            pin.write_text(pinned(source / "requirements.lock", "uv").text)
            self._run(["python3", "-m", "venv", str(home)])
            pip = [str(home / "bin/python"), "-m", "pip", "install", "--quiet"]
            self._run([*pip, "--require-hashes", "-r", str(pin)])
        uv = [str(home / "bin/uv"), "python"]
        place = ["--install-dir", str(home / "pythons")]
        self._run([*uv, "install", *place, "--no-bin", _BROUGHT])
        found = sorted((home / "pythons").glob(f"cpython-{_BROUGHT}.*/bin/python{_BROUGHT}"))
        return str(found[-1])

    # The disk

    def _mount(self, device: str, folder: Path) -> None:
        """Mount the disk of the streams, and make a file system on it if there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        line = f"{device} {folder} ext4 defaults,nofail,noatime 0 2\n"
        table = self._root / "etc/fstab"
        if line not in table.read_text():
            # It answers with status 2 where there is nothing; else nothing is ever made there.
            kind = self._run(["sh", "-c", f"blkid -p -s TYPE -o value {device} || [ $? = 2 ]"])
            if not kind.strip():
                self._run(["mkfs.ext4", "-q", "-m", "0", device])
            with table.open("a") as file:
                file.write(line)
        # Without its disk a server would begin an empty store in the folder below.
        unit = self._root / "etc/systemd/system/nats-server.service.d/10-streams.conf"
        write(unit, f"[Unit]\nRequiresMountsFor={folder}\n".encode(), 0o644)
        self._run(["sh", "-c", f"mountpoint -q {folder} || mount {folder}"])

    def _own(self) -> None:
        """Give a NATS server its key and its folder; what is in its streams it has made itself."""
        folder = self._at("/var/lib/nats")
        self._run(["chown", "nats:nats", str(folder), str(folder / "jetstream")])
        self._run(["chown", "-R", "nats:nats", str(self._at("/etc/nats/tls"))])

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    # Files and secrets

    def _write_files(self, parameters: Parameters) -> set[str]:
        """Bring all files up to date; the paths of those that were not."""
        contents = {
            path: (self._google.object(parameters.bucket, name), 0o644)
            for path, name in parameters.files.items()
        }
        for path, version in parameters.secrets.items():
            contents[path] = (self._google.secret(version), 0o600)
        if parameters.role != "nats":
            unit = "aggregator" if parameters.role == "aggregator" else f"learner-{parameters.name}"
            lines = "".join(f"{key}={value}\n" for key, value in parameters.environment.items())
            contents[f"/etc/diloco/{unit}.env"] = (lines.encode(), 0o644)
        return {
            path for path, (data, mode) in contents.items() if write(self._at(path), data, mode)
        }

    # The units

    def _start(self, parameters: Parameters, released: bool, changed: set[str]) -> None:
        """Enable the units, and start what does not run with what is there now.

        Nothing is waited for: daemons wait for each other themselves.
        """
        units = parameters.units
        self._run(["systemctl", "enable", *units])
        if parameters.role == "nats" and changed == {"/etc/nats/accounts.conf"} and not released:
            # The first reload makes new accounts, the second connects them with the run's.
            self._run(["systemctl", "reload", *units])
            self._run(["sleep", "1"])
            self._run(["systemctl", "reload", *units])
        else:
            verb = "restart" if released or changed else "start"
            self._run(["systemctl", verb, "--no-block", *units])


class Pin(NamedTuple):
    """A package of a requirements file with hashes."""

    version: str
    text: str


def pinned(lock: Path, package: str) -> Pin:
    """The lines of a package.

    Raises:
        ValueError: it is not there.
    """
    lines = lock.read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith(f"{package}==")]
    if not starts:
        raise ValueError(f"{lock} does not pin {package}")
    end = starts[0]
    while lines[end].endswith("\\"):
        end += 1
    version = lines[starts[0]].removeprefix(f"{package}==").split()[0]
    return Pin(version, "\n".join(lines[starts[0] : end + 1]) + "\n")


def write(path: Path, data: bytes, mode: int) -> bool:
    """Write a file whole or not at all, never open to more than `mode`; whether it was another."""
    if path.exists() and path.read_bytes() == data and path.stat().st_mode & 0o777 == mode:
        return False
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755 if mode == 0o644 else 0o700)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
    part.replace(path)
    return True


def _fetch(url: str, headers: Mapping[str, str]) -> bytes:
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 - none but Google's
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - as above
        data: bytes = response.read()
    return data


def _run(command: Sequence[str]) -> str:
    """Run a command; what it says on stderr goes where this program's goes."""
    _say(" ".join(command))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return done.stdout


def _say(text: str) -> None:
    sys.stdout.write(f"diloco boot: {text}\n")
    sys.stdout.flush()


class _Livez(BaseHTTPRequestHandler):
    timeout = 10.0

    def do_GET(self) -> None:
        lives = self.path.partition("?")[0] == "/livez"
        self.send_response(HTTPStatus.OK if lives else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Health checks are no events."""


def livez_server(address: str = "", port: int = LIVEZ_PORT) -> ThreadingHTTPServer:
    """What answers health checks: that it can is the answer."""
    return ThreadingHTTPServer((address, port), _Livez)


def main() -> None:
    """Boot, and try again for as long as something is missing: rights take minutes to arrive."""
    if sys.argv[1:] == ["livez"]:
        livez_server().serve_forever()
    while True:
        try:
            Boot(Google(), _run).boot()
        except Exception:  # noqa: BLE001 - nobody else is there to try again
            traceback.print_exc()
            _say(f"failed; again in {_AGAIN_S:g} s")
            time.sleep(_AGAIN_S)
        else:
            return


if __name__ == "__main__":
    main()
