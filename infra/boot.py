#!/usr/bin/env python3
"""What a machine of infra/terraform runs at each boot, as root: from an empty disk to units.

It needs no more than Python 3.10 and a service account. The instance's metadata say what to do
(`Parameters`), and hold no secret: secrets come from Secret Manager into files of mode 0600.
Programs come in one bundle of the bucket (infra/bundle.py), and from nowhere else. All steps may be
repeated; what is there already stays. Run it again on a machine that is up, for new secrets,
configuration or a new release: google_metadata_script_runner startup.

Files on the machine:
    /opt/diloco             link to the release that is used, /opt/diloco-DIGEST
    /opt/diloco-before      link to the one before, to which it goes back
    /etc/diloco/run.toml    and other files of the bucket of configurations
    /etc/diloco/credentials/NAME.toml, /etc/nats/tls/NAME.key   secrets
    /var/lib/nats/jetstream   on a NATS server: the disk of the streams
    /usr/local/lib/diloco   this program, by infra/terraform/startup.py.tftpl at each boot
"""

import base64
import hashlib
import json
import sys
import time
import traceback
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from diloco.infra.release import Refused, Releases, Run, run_command, say, write

METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/"
STORAGE = "https://storage.googleapis.com/storage/v1/"
SECRETS = "https://secretmanager.googleapis.com/v1/"
_AGAIN_S = 60.0
# Where Google's health checks ask whether the machine lives, as infra/terraform has it. Its daemon
# is not asked: it may compile, wait, have failed or ended, and a new machine helps none of that.
LIVEZ_PORT = 9463
LIVEZ = "diloco-livez.service"
_PROGRAM = "/usr/local/lib/diloco"
_LIVEZ_UNIT = f"""[Unit]
Description=Answers health checks of this machine

[Service]
WorkingDirectory={_PROGRAM}
ExecStart=/usr/bin/python3 -m diloco.infra.boot livez
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


class Parameters(NamedTuple):
    """The metadata attribute `diloco`, written by Terraform.

    Attributes:
        role: "nats", "aggregator" or "learner".
        name: of the server, aggregator or learner.
        bucket: holds the release and the files.
        release: {"object": name, "sha256": hexadecimal digest} of the bundle.
        files: path -> object.
        secrets: path -> resource name of a secret's version.
        environment: what the unit's environment file holds.
        units: what is enabled and started.
        kind: of the bundle: "cpu", "cuda" or "tpu".
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
    kind: str
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
        return self._get(self._media(bucket, name))

    def save(self, bucket: str, name: str, path: Path) -> str:
        """Write an object to a file, which may be larger than memory; its sha256."""
        digest = hashlib.sha256()
        with (
            _open(self._media(bucket, name), self._authorized()) as answer,
            path.open("wb") as file,
        ):
            while data := answer.read(1 << 20):
                digest.update(data)
                file.write(data)
        return digest.hexdigest()

    def secret(self, version: str) -> bytes:
        """The bytes of a secret."""
        answer = json.loads(self._get(f"{self._secrets}{version}:access"))
        return base64.b64decode(answer["payload"]["data"])

    def _media(self, bucket: str, name: str) -> str:
        return f"{self._storage}b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"

    def _get(self, url: str) -> bytes:
        return _fetch(url, self._authorized())

    def _authorized(self) -> dict[str, str]:
        token = json.loads(self._about_me("service-accounts/default/token"))["access_token"]
        return {"Authorization": f"Bearer {token}"}

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
        self._releases = Releases(run, root / "opt")

    def boot(self) -> bool:
        """All steps, in an order that starts nothing before what it needs is there.

        Returns:
            Whether the machine runs the release that it was told, and not the one before.
        """
        parameters = self._google.parameters()
        say(f"{parameters.role} {parameters.name}: release {parameters.release['object']}")
        if parameters.role == "learner":
            self.answer_health_checks()
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

    def answer_health_checks(self) -> None:
        """Have the machine say that it lives, before and whatever else happens on it."""
        write(self._root / "etc/systemd/system" / LIVEZ, _LIVEZ_UNIT.encode(), 0o644)
        self._run(["systemctl", "daemon-reload"])
        self._run(["systemctl", "enable", "--now", LIVEZ])

    # The release

    def _fetch(self, parameters: Parameters, before: Path | None) -> Path:
        """The release that the machine is told, or the one before where that cannot be used."""
        digest = parameters.release["sha256"]
        home = self._releases.home(digest)
        if home.exists():
            return home
        archive = self._releases.archive(digest)
        try:
            found = self._google.save(parameters.bucket, parameters.release["object"], archive)
            if found != digest:
                raise Refused(f"{parameters.release['object']} has sha256 {found}")
            return self._releases.unpack(archive, digest, parameters.kind)
        except Refused as error:
            say(f"refused: {error}")
            if before is None:
                raise
            return before
        finally:
            archive.unlink(missing_ok=True)

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
        self._run(["systemctl", "daemon-reload"])
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


def _open(url: str, headers: Mapping[str, str]) -> HTTPResponse:
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 - none but Google's
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=60)  # noqa: S310 - as above
    return answer


def _fetch(url: str, headers: Mapping[str, str]) -> bytes:
    with _open(url, headers) as answer:
        return answer.read()


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
            told = Boot(Google(), run_command).boot()
        except Exception:  # noqa: BLE001 - nobody else is there to try again
            traceback.print_exc()
            say(f"failed; again in {_AGAIN_S:g} s")
            time.sleep(_AGAIN_S)
        else:
            sys.exit(0 if told else 1)


if __name__ == "__main__":
    main()
