"""What a machine does at boot, against a server in place of Google's; commands are written down."""

import base64
import hashlib
import io
import json
import re
import stat
import tarfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from diloco.infra import boot

ROOT = Path(__file__).parents[2]
SEED = b'seed = "SU-of-central"\n'


class Cloud:
    """Metadata, objects and secrets over HTTP, for whoever has the token."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.secrets: dict[str, bytes] = {}
        self.parameters: dict[str, Any] = {}
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = cloud.answer(self.path, self.headers)
                self.send_response(403 if data is None else 200)
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.google = boot.Google(self.url + "m/", self.url + "o/", self.url + "s/")

    def answer(self, path: str, headers: Mapping[str, str]) -> bytes | None:
        what, _, rest = urllib.parse.urlsplit(path).path[1:].partition("/")
        if what == "m" and headers.get("Metadata-Flavor") == "Google":
            return {
                "attributes/diloco": json.dumps(self.parameters).encode(),
                "service-accounts/default/token": b'{"access_token": "let-me-in"}',
            }.get(rest)
        if headers.get("Authorization") != "Bearer let-me-in":
            return None
        if what == "o" and rest.startswith("b/configuration/o/"):
            return self.objects.get(urllib.parse.unquote(rest.removeprefix("b/configuration/o/")))
        if what == "s" and rest.endswith(":access") and rest[:-7] in self.secrets:
            encoded = base64.b64encode(self.secrets[rest[:-7]]).decode()
            return json.dumps({"payload": {"data": encoded}}).encode()
        return None


class Machine:
    """A file system below a folder, on which no command does anything."""

    def __init__(self, root: Path, cloud: Cloud) -> None:
        self.root = root
        self.commands: list[str] = []
        self.disk = ""
        self.boots = boot.Boot(cloud.google, self.run, root)
        (root / "opt").mkdir()
        (root / "etc").mkdir()
        (root / "etc/fstab").write_text("# nothing\n")

    def run(self, command: Sequence[str]) -> str:
        self.commands.append(" ".join(command).replace(str(self.root), ""))
        if command[0] == "tar":
            with tarfile.open(command[2]) as archive:
                for name in archive.getnames():
                    file = archive.extractfile(name)
                    assert file is not None
                    path = Path(command[4]) / name.removeprefix("diloco/")
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(file.read())
        return self.disk if "blkid" in command[-1] else ""

    def boot(self) -> list[str]:
        self.commands.clear()
        self.boots.boot()
        return list(self.commands)


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path in ("requirements.lock", "locks/tpu.lock"):
            tar.add(ROOT / path, f"diloco/{path}")
        # What the user's own task needs.
        tar.add(ROOT / "locks/cuda.lock", "diloco/locks/task.lock")
    return buffer.getvalue()


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = Cloud()
    release = archive()
    cloud.objects = {"common/diloco.tar.gz": release, "common/run.toml": b"[run]\n"}
    cloud.secrets = {"projects/p/secrets/central/versions/latest": SEED}
    cloud.parameters = {
        "role": "learner",
        "name": "central",
        "bucket": "configuration",
        "release": {
            "object": "common/diloco.tar.gz",
            "sha256": hashlib.sha256(release).hexdigest(),
        },
        "files": {"/etc/diloco/run.toml": "common/run.toml"},
        "secrets": {
            "/etc/diloco/credentials/central.toml": "projects/p/secrets/central/versions/latest"
        },
        "environment": {"DILOCO_LEARNER_CHECKPOINT_UPLOAD": "true"},
        "units": ["diloco-learner@central.service"],
        "accelerator": True,
    }
    thread = threading.Thread(target=cloud.server.serve_forever, args=[0.01])
    thread.start()
    yield cloud
    cloud.server.shutdown()
    thread.join()
    cloud.server.server_close()


@pytest.fixture
def machine(tmp_path: Path, cloud: Cloud) -> Machine:
    return Machine(tmp_path, cloud)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_from_an_empty_disk_to_a_started_unit(machine: Machine, cloud: Cloud) -> None:
    commands = machine.boot()
    etc = machine.root / "etc"
    assert (etc / "diloco/run.toml").read_bytes() == b"[run]\n"
    assert (etc / "diloco/learner-central.env").read_text() == (
        "DILOCO_LEARNER_CHECKPOINT_UPLOAD=true\n"
    )
    secret = etc / "diloco/credentials/central.toml"
    assert secret.read_bytes() == SEED
    assert mode(secret) == 0o600
    assert mode(secret.parent) == 0o700
    home = f"/opt/diloco-{cloud.parameters['release']['sha256'][:16]}"
    assert (machine.root / "opt/diloco").resolve() == machine.root / home[1:]
    pip = f"{home}/bin/python -m pip install --quiet"
    assert f"{pip} --require-hashes -r {home}/source/requirements.lock" in commands
    for lock in ("tpu", "task"):
        assert f"{pip} --require-hashes -r {home}/source/locks/{lock}.lock" in commands
    assert commands[-5:] == [
        "/opt/diloco/bin/diloco install-units --programs /opt/diloco/bin --overwrite",
        "systemd-sysusers",
        "systemctl daemon-reload",
        "systemctl enable diloco-learner@central.service",
        "systemctl restart --no-block diloco-learner@central.service",
    ]


def test_a_learners_machine_answers_health_checks_first(machine: Machine, cloud: Cloud) -> None:
    commands = machine.boot()
    assert commands[:2] == ["systemctl daemon-reload", f"systemctl enable --now {boot.LIVEZ}"]
    unit = (machine.root / "etc/systemd/system" / boot.LIVEZ).read_text()
    (program,) = re.findall(r"^ExecStart=/usr/bin/python3 (\S+) livez$", unit, re.MULTILINE)
    assert (machine.root / program[1:]).read_bytes() == Path(boot.__file__).read_bytes()
    cloud.parameters |= {"role": "aggregator", "units": ["diloco-aggregator.service"]}
    assert boot.LIVEZ not in " ".join(machine.boot())


def test_the_answer_to_health_checks() -> None:
    server = boot.livez_server("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    with urllib.request.urlopen(f"{url}/livez", timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(f"{url}/metrics", timeout=10)
    caught.value.close()
    server.shutdown()
    thread.join()
    server.server_close()


def test_terraform_asks_where_machines_answer() -> None:
    text = (ROOT / "infra/terraform/main.tf").read_text()
    assert re.findall(r"livez_port\s+= (\d+)", text) == [str(boot.LIVEZ_PORT)]


def test_a_second_boot_installs_nothing_and_disturbs_nobody(machine: Machine) -> None:
    machine.boot()
    commands = machine.boot()
    assert not any("pip" in command or command.startswith("tar ") for command in commands)
    assert commands[-1] == "systemctl start --no-block diloco-learner@central.service"


def test_a_new_secret_restarts_its_unit(machine: Machine, cloud: Cloud) -> None:
    machine.boot()
    cloud.secrets["projects/p/secrets/central/versions/latest"] = b"another"
    assert machine.boot()[-1] == "systemctl restart --no-block diloco-learner@central.service"
    assert (machine.root / "etc/diloco/credentials/central.toml").read_bytes() == b"another"


def test_a_new_release_takes_the_place_of_the_old_one(machine: Machine, cloud: Cloud) -> None:
    machine.boot()
    before = (machine.root / "opt/diloco").resolve()
    release = archive() + b"\0"
    cloud.objects["common/new.tar.gz"] = release
    cloud.parameters["release"] = {
        "object": "common/new.tar.gz",
        "sha256": hashlib.sha256(release).hexdigest(),
    }
    assert "restart" in machine.boot()[-1]
    assert (machine.root / "opt/diloco").resolve() != before


def test_a_release_with_other_bytes_is_refused(machine: Machine, cloud: Cloud) -> None:
    cloud.objects["common/diloco.tar.gz"] += b"\0"
    with pytest.raises(ValueError, match="has sha256"):
        machine.boot()
    assert not (machine.root / "opt/diloco").is_symlink()
    assert not any("pip" in command for command in machine.commands)


def test_a_system_with_an_old_python_gets_one(
    machine: Machine, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot.shutil, "which", lambda name: None)
    brought = machine.root / "opt/diloco-python/pythons/cpython-3.12.7-linux/bin/python3.12"
    brought.parent.mkdir(parents=True)
    brought.touch()
    commands = machine.boot()
    assert any(command.endswith("--require-hashes -r /opt/diloco-uv.txt") for command in commands)
    assert (machine.root / "opt/diloco-uv.txt").read_text().startswith("uv==")
    home = f"/opt/diloco-{cloud.parameters['release']['sha256'][:16]}"
    assert f"/{brought.relative_to(machine.root)} -m venv {home}" in commands


def test_what_was_interrupted_is_made_again(machine: Machine) -> None:
    def breaks(command: Sequence[str]) -> str:
        if "pip" in command:
            raise OSError("no route to host")
        return machine.run(command)

    broken = boot.Boot(machine.boots._google, breaks, machine.root)
    with pytest.raises(OSError, match="no route"):
        broken.boot()
    assert any("--require-hashes" in command for command in machine.boot())


def test_nothing_starts_before_its_secret_is_there(machine: Machine, cloud: Cloud) -> None:
    cloud.secrets.clear()
    with pytest.raises(urllib.error.HTTPError, match="403"):
        machine.boot()
    assert not any("diloco-learner" in command for command in machine.commands)


@pytest.fixture
def server(machine: Machine, cloud: Cloud) -> Machine:
    """A machine that is to be a NATS server."""
    cloud.objects |= {
        "nats/accounts.conf": b"one {}\n",
        "nats/nats-1.conf": b"server_name: nats-1\n",
    }
    cloud.parameters |= {
        "role": "nats",
        "name": "nats-1",
        "files": {
            "/etc/nats/nats.conf": "nats/nats-1.conf",
            "/etc/nats/accounts.conf": "nats/accounts.conf",
        },
        "secrets": {"/etc/nats/tls/nats-1.key": "projects/p/secrets/central/versions/latest"},
        "environment": {},
        "units": ["nats-server.service"],
        "accelerator": False,
        "disk": {"device": "/dev/disk/by-id/google-streams", "folder": "/var/lib/nats/jetstream"},
    }
    return machine


def test_a_server_reloads_new_accounts_twice_and_goes_on(server: Machine, cloud: Cloud) -> None:
    server.boot()
    cloud.objects["nats/accounts.conf"] = b"two {}\n"
    assert server.boot()[-3:] == [
        "systemctl reload nats-server.service",
        "sleep 1",
        "systemctl reload nats-server.service",
    ]
    cloud.objects["nats/nats-1.conf"] = b"server_name: nats-1 # changed\n"
    assert server.boot()[-1] == "systemctl restart --no-block nats-server.service"


def test_a_servers_key_is_its_own(server: Machine) -> None:
    assert "chown -R nats:nats /etc/nats/tls" in server.boot()
    assert mode(server.root / "etc/nats/tls/nats-1.key") == 0o600


def test_a_disk_gets_a_file_system_only_if_it_has_none(server: Machine) -> None:
    commands = server.boot()
    made = commands.index("mkfs.ext4 -q -m 0 /dev/disk/by-id/google-streams")
    mounted = commands.index(
        "sh -c mountpoint -q /var/lib/nats/jetstream || mount /var/lib/nats/jetstream"
    )
    assert made < mounted
    assert not any("mkfs" in command for command in server.boot())
    table = (server.root / "etc/fstab").read_text()
    assert table.count("google-streams") == 1
    unit = server.root / "etc/systemd/system/nats-server.service.d/10-streams.conf"
    assert unit.read_text() == f"[Unit]\nRequiresMountsFor={server.root}/var/lib/nats/jetstream\n"


def test_a_disk_of_an_earlier_machine_keeps_what_is_on_it(server: Machine) -> None:
    server.disk = "ext4\n"
    assert not any("mkfs" in command for command in server.boot())


def test_a_file_is_never_open_to_more_than_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o644)
    assert boot.write(path, b"old", 0o600)
    assert mode(path) == 0o600
    assert not boot.write(path, b"old", 0o600)


@pytest.mark.parametrize("package", ["jax", "uv"])
def test_the_pins_that_boot_takes_from_the_lock_file_are_there(package: str) -> None:
    pin = boot.pinned(ROOT / "requirements.lock", package)
    assert pin.text.startswith(f"{package}=={pin.version} \\\n")
    assert pin.text.count("--hash=sha256:") == len(pin.text.splitlines()) - 1


def test_a_package_that_is_not_pinned_is_named() -> None:
    with pytest.raises(ValueError, match="does not pin nonesuch"):
        boot.pinned(ROOT / "requirements.lock", "nonesuch")
