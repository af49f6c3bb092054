"""The steps of a machine at boot, against a server in place of Google's; commands are recorded."""

import ast
import base64
import hashlib
import itertools
import json
import re
import stat
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from small_release import archive_of

from diloco.common.process.config import placed_config
from diloco.infra import boot, google_units, install_release, livez
from diloco.infra.cloud import Google
from diloco.infra.provision.places import SUPERVISOR_PORT

ROOT = Path(__file__).parents[2]
SEED = b'seed = "SU-of-central"\n'


class Cloud:
    """Metadata, objects and secrets over HTTP, for whoever has the token."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.secrets: dict[str, bytes] = {}
        self.parameters: dict[str, Any] = {}
        self.machine = {"network-interfaces/0/ip": b"10.64.16.7"}
        self.changes: list[tuple[str, Any]] = []
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = cloud.answer(self.path, self.headers)
                self.send_response(403 if data is None else 200)
                self.end_headers()
                self.wfile.write(data or b"")

            def do_PATCH(self) -> None:
                fields = self.rfile.read(int(self.headers["Content-Length"]))
                trusted = self.headers.get("Authorization") == "Bearer let-me-in"
                if trusted:
                    cloud.changes.append((self.path, json.loads(fields)))
                self.send_response(200 if trusted else 403)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.google = Google(self.url + "m/", self.url + "o/", self.url + "s/")

    def release(self, version: str, **manifest: Any) -> str:
        """Have machines be told a release; the name of its folder on them."""
        with tempfile.TemporaryDirectory() as folder:
            path = archive_of(Path(folder) / "b.tar.gz", "bin/diloco", version=version, **manifest)
            data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        self.objects[f"common/{version}.tar.gz"] = data
        self.parameters["release"] = {"object": f"common/{version}.tar.gz", "sha256": digest}
        return f"diloco-{digest[:16]}"

    def answer(self, path: str, headers: Mapping[str, str]) -> bytes | None:
        what, _, rest = urllib.parse.urlsplit(path).path[1:].partition("/")
        if what == "m" and headers.get("Metadata-Flavor") == "Google":
            return {
                **self.machine,
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
    """A file system below a folder, on which no command does anything but `tar`.

    Attributes:
        dead: programs of a release on trial that cannot be run.
        states: of the units, one after the other, as `systemctl show` says them.
    """

    def __init__(self, root: Path, cloud: Cloud) -> None:
        self.root = root
        self.commands: list[str] = []
        self.disk = ""
        self.dead: set[str] = set()
        self.states: list[str] = []
        self.boots = boot.Boot(cloud.google, self.run, root)
        (root / "opt").mkdir()
        (root / "etc").mkdir()
        (root / "etc/fstab").write_text("# nothing\n")

    def run(self, command: Sequence[str]) -> str:
        self.commands.append(" ".join(command).replace(str(self.root), ""))
        if command[0] == "tar":
            subprocess.run(command, check=True)
        if ".part/" in command[0] and self.dead & {Path(command[0]).name, command[-1]}:
            raise subprocess.CalledProcessError(127, command)
        if command[:2] == ["systemctl", "show"]:
            return self.states.pop(0) if self.states else "ActiveState=active\n"
        return self.disk if "blkid" in command[-1] else ""

    def boot(self) -> list[str]:
        self.commands.clear()
        self.as_told = self.boots.boot()
        return list(self.commands)

    @property
    def used(self) -> str:
        """The release that is used."""
        return (self.root / "opt/diloco").resolve().name

    @property
    def kept(self) -> set[str]:
        return {path.name for path in (self.root / "opt").iterdir() if not path.is_symlink()}


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = Cloud()
    cloud.objects = {"common/run.toml": b"[run]\n"}
    cloud.secrets = {"projects/p/secrets/central/versions/latest": SEED}
    cloud.parameters = {
        "role": "learner",
        "name": "central",
        "bucket": "configuration",
        "files": {"/etc/diloco/run.toml": "common/run.toml"},
        "secrets": {
            "/etc/diloco/credentials/central.toml": "projects/p/secrets/central/versions/latest"
        },
        "environment": {"DILOCO_LEARNER_CHECKPOINT_UPLOAD": "true"},
        "units": ["diloco-learner@central.service"],
        "kind": "cpu",
    }
    cloud.release("first")
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
    home = f"/opt/{machine.used}"
    assert machine.as_told
    assert machine.kept == {machine.used}
    programs = f"{home}/bin"
    assert commands[-5:] == [
        f"{programs}/diloco host units --programs {programs} --overwrite",
        "systemd-sysusers",
        "systemctl daemon-reload",
        "systemctl enable diloco-learner@central.service",
        "systemctl restart --no-block diloco-learner@central.service",
    ]


def test_a_learner_waits_for_its_data_which_its_machine_copies(
    machine: Machine, cloud: Cloud
) -> None:
    machine.boot()
    units = machine.root / "etc/systemd/system"
    assert not (units / google_units.DATA_UNIT).exists()
    cloud.parameters["data"] = "gs://my-data/tokens"
    machine.boot()
    unit = (units / google_units.DATA_UNIT).read_text()
    assert f"/opt/diloco/bin/diloco data copy gs://my-data/tokens {google_units.DATA};" in unit
    after = (units / "diloco-learner@.service.d/50-data.conf").read_text()
    assert after == "[Unit]\nRequires=diloco-data.service\nAfter=diloco-data.service\n"


def of_a_slice(cloud: Cloud, hosts: int, **more: Any) -> None:
    """Have machines be told that they are of slice 1 of 2, as infra/terraform tells them."""
    domain = "central.demo.diloco.internal:9466"
    peers = [f"s{number}-h{host}.{domain}" for number in range(2) for host in range(hosts)]
    zone = "projects/my-project/managedZones/diloco-demo-central"
    cloud.parameters["slice"] = {"number": 1, "hosts": hosts, "names": zone}
    cloud.parameters["environment"] |= {"DILOCO_LEARNER_PEERS": ",".join(peers)}


@pytest.mark.parametrize(("hosts", "worker", "host"), [(1, None, 1), (4, b"2", 6)])
def test_a_host_of_several_slices_takes_its_name_before_its_learner_starts(
    machine: Machine,
    cloud: Cloud,
    monkeypatch: pytest.MonkeyPatch,
    hosts: int,
    worker: bytes | None,
    host: int,
) -> None:
    monkeypatch.setattr(boot, "DNS", f"{cloud.url}dns/")
    of_a_slice(cloud, hosts)
    if worker is not None:
        cloud.machine["attributes/agent-worker-number"] = worker
    table = machine.root / "etc/hosts"
    table.write_text("127.0.0.1 localhost\n")
    machine.boot()
    name = f"s1-h{host - hosts}.central.demo.diloco.internal"
    path = "/dns/projects/my-project/managedZones/diloco-demo-central/rrsets/"
    record = {"name": f"{name}.", "type": "A", "ttl": 5, "rrdatas": ["10.64.16.7"]}
    assert cloud.changes == [(f"{path}{name}./A", record)]
    lines = (machine.root / "etc/diloco/learner-central.env").read_text().splitlines()
    assert f"DILOCO_LEARNER_HOST={host}" in lines
    assert table.read_text() == f"127.0.0.1 localhost\n10.64.16.7 {name} # diloco\n"
    # The machine that replaces it has another address, and the same name.
    cloud.machine["network-interfaces/0/ip"] = b"10.64.16.9"
    assert machine.boot()[-1].startswith("systemctl start ")
    assert cloud.changes[-1][1]["rrdatas"] == ["10.64.16.9"]
    assert table.read_text() == f"127.0.0.1 localhost\n10.64.16.9 {name} # diloco\n"


def test_what_terraform_tells_a_host_is_a_configuration_of_a_supervisor(
    machine: Machine, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot, "DNS", f"{cloud.url}dns/")
    of_a_slice(cloud, 1)
    cloud.parameters["environment"]["DILOCO_LEARNER_SLICES"] = "2"
    machine.boot()
    lines = (machine.root / "etc/diloco/learner-central.env").read_text().splitlines()
    environment = dict(line.split("=", 1) for line in lines)
    environment["DILOCO_LEARNER_CHECKPOINT_DIR"] = "/var/lib/diloco-learner-central"
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    section = placed_config(
        {"run": {"name": "demo", "steps": 1}, "store": {"url": "gs://bucket"}}
    ).learner
    assert (section.slices, section.slice_hosts, section.host) == (2, 1, 1)
    assert section.peers[section.host] == "s1-h0.central.demo.diloco.internal:9466"


def test_the_keepers_machine_watches_the_run_too(machine: Machine, cloud: Cloud) -> None:
    webhook = "projects/p/secrets/webhook/versions/latest"
    cloud.secrets[webhook] = b"DILOCO_WEBHOOK_URL=https://hooks.example.org/s3cr3t\n"
    cloud.parameters |= {
        "role": "keeper", "name": "keeper", "environment": {}, "units": ["diloco-watch.service"],
        "secrets": {"/etc/diloco/watch.env": webhook}, "groups": [], "stop_at": "",
        "budget": {"dollars": 5.0, "dollars_hour": 1.0, "uncounted": []},
    }  # fmt: skip
    commands = machine.boot()
    # The keeper needs no release, and begins before there is one.
    keeps = f"systemctl enable --now {google_units.LOGS} {google_units.KEEPER}"
    assert commands[:2] == ["systemctl daemon-reload", keeps]
    assert commands[-2:] == [
        "systemctl enable diloco-watch.service",
        "systemctl restart --no-block diloco-watch.service",
    ]
    etc = machine.root / "etc/diloco"
    assert (etc / "watch.env").read_bytes() == cloud.secrets[webhook]
    assert mode(etc / "watch.env") == 0o600
    assert sorted(path.name for path in etc.iterdir()) == ["run.toml", "watch.env"]
    cloud.parameters["release"] = {}
    assert machine.boot() == commands[:2]


def test_of_two_boots_at_once_the_second_waits(machine: Machine) -> None:
    """Each would else start a unit whose files the other is about to write."""
    order: list[int] = []
    entered = threading.Event()

    def run(command: Sequence[str]) -> str:
        me = threading.get_ident()
        if order and order[0] != me:
            entered.set()
        order.append(me)
        if len(order) == 1:
            entered.wait(1.0)  # the other one has time to come between
        return machine.run(command)

    boots = [boot.Boot(machine.boots._google, run, machine.root) for _ in range(2)]
    threads = [threading.Thread(target=one.boot) for one in boots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([one for one, _ in itertools.groupby(order)]) == 2


@pytest.mark.parametrize("word", ["pip", "apt", "uv ", "curl", "http"])
def test_nothing_is_fetched_but_the_release(machine: Machine, word: str) -> None:
    assert not any(word in command for command in machine.boot())


def test_a_learners_machine_answers_health_checks_first(machine: Machine, cloud: Cloud) -> None:
    commands = machine.boot()
    units = f"{google_units.LOGS} {google_units.LIVEZ}"
    assert commands[:2] == ["systemctl daemon-reload", f"systemctl enable --now {units}"]
    unit = (machine.root / "etc/systemd/system" / google_units.LIVEZ).read_text()
    (folder,) = re.findall(r"^WorkingDirectory=(\S+)$", unit, re.MULTILINE)
    template = (ROOT / "infra/terraform/startup.py.tftpl").read_text()
    assert f'home = pathlib.Path("{folder}")' in template
    cloud.parameters |= {"role": "aggregator", "units": ["diloco-aggregator.service"]}
    said = " ".join(machine.boot())
    assert google_units.LIVEZ not in said
    assert google_units.LOGS in said


def test_the_answer_to_health_checks() -> None:
    server = livez.livez_server("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    with urllib.request.urlopen(f"{url}/livez", timeout=300) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(f"{url}/metrics", timeout=300)
    caught.value.close()
    server.shutdown()
    thread.join()
    server.server_close()


def test_terraform_asks_where_machines_answer() -> None:
    text = (ROOT / "infra/terraform/main.tf").read_text()
    assert re.findall(r"livez_port\s+= (\d+)", text) == [str(livez.LIVEZ_PORT)]
    assert re.findall(r"supervisor_port\s+= (\d+)", text) == [str(SUPERVISOR_PORT)]


def test_a_second_boot_installs_nothing_and_disturbs_nobody(machine: Machine) -> None:
    machine.boot()
    commands = machine.boot()
    assert not any(command.startswith("tar ") for command in commands)
    assert commands[-1] == "systemctl start --no-block diloco-learner@central.service"
    assert machine.as_told


def test_a_new_secret_restarts_its_unit(machine: Machine, cloud: Cloud) -> None:
    machine.boot()
    cloud.secrets["projects/p/secrets/central/versions/latest"] = b"another"
    assert machine.boot()[-1] == "systemctl restart --no-block diloco-learner@central.service"
    assert (machine.root / "etc/diloco/credentials/central.toml").read_bytes() == b"another"


def test_a_new_release_takes_the_place_of_the_old_one_and_two_are_kept(
    machine: Machine, cloud: Cloud
) -> None:
    names = []
    for version in ("first", "second", "third"):
        names.append(cloud.release(version))
        machine.boot()
        assert machine.used == names[-1]
        assert machine.as_told
    assert machine.kept == set(names[1:])
    assert (machine.root / "opt/diloco-before").readlink() == Path(names[1])


@pytest.mark.parametrize(
    "state", ["ActiveState=failed", "ActiveState=activating\nSubState=auto-restart"]
)
def test_a_release_that_does_not_start_gives_way_to_the_one_before(
    machine: Machine, cloud: Cloud, state: str
) -> None:
    machine.boot()
    old, new = machine.used, cloud.release("second")
    machine.states = ["ActiveState=activating\nSubState=start", state]
    commands = machine.boot()
    assert machine.used == old
    assert not machine.as_told
    programs = f"/opt/{old}/bin"
    assert commands[-4:] == [
        f"{programs}/diloco host units --programs {programs} --overwrite",
        "systemd-sysusers",
        "systemctl daemon-reload",
        "systemctl restart --no-block diloco-learner@central.service",
    ]
    # The next boot tries again, without unpacking it again: what it lacked may be there now.
    commands = machine.boot()
    assert machine.used == new
    assert not any(command.startswith("tar ") for command in commands)


def test_a_unit_that_waits_is_no_failure(machine: Machine, cloud: Cloud) -> None:
    machine.boot()
    new = cloud.release("second")
    machine.states = ["ActiveState=activating\nSubState=start"] * 30
    machine.boot()
    assert machine.used == new


def test_the_first_release_is_not_watched(machine: Machine) -> None:
    assert not any(command.startswith("systemctl show") for command in machine.boot())


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        ({"kind": "tpu"}, "the release is for tpu, and this machine is of kind cpu"),
        ({"architecture": "s390x"}, "the release is for s390x, and this machine is"),
        ({"glibc": "2.999"}, "the release needs glibc 2.999, and this machine has"),
        ({"unpacked_bytes": 1 << 60}, "give the machine a larger one"),
        ({"format": 99}, "is no release of format 1"),
        ({"python": None}, "is no release"),
    ],
)
def test_a_release_that_does_not_fit_is_refused_with_a_sentence_and_the_old_one_stays(
    machine: Machine, cloud: Cloud, manifest: dict[str, Any], sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    machine.boot()
    old = machine.used
    cloud.release("second", **manifest)
    commands = machine.boot()
    assert machine.used == old
    assert machine.kept == {old}
    assert not machine.as_told
    assert commands[-1] == "systemctl start --no-block diloco-learner@central.service"
    (said,) = re.findall(r"refused: (.*)", capsys.readouterr().out)
    assert sentence in said


def test_a_first_release_that_does_not_fit_starts_nothing(machine: Machine, cloud: Cloud) -> None:
    cloud.release("first", architecture="s390x")
    with pytest.raises(install_release.ReleaseRefused, match="is for s390x"):
        machine.boot()
    assert machine.kept == set()
    assert not (machine.root / "opt/diloco").is_symlink()


@pytest.mark.parametrize(
    "program", ["diloco", "nats-server", "import jax, nats, google.cloud.storage"]
)
def test_programs_that_do_not_run_here_are_never_switched_to(
    machine: Machine, cloud: Cloud, program: str
) -> None:
    machine.boot()
    old = machine.used
    cloud.release("second")
    machine.dead = {program}
    machine.boot()
    assert machine.used == old
    assert not machine.as_told
    assert machine.kept == {old}


def test_a_release_with_other_bytes_is_refused(machine: Machine, cloud: Cloud) -> None:
    cloud.objects["common/first.tar.gz"] += b"\0"
    with pytest.raises(install_release.ReleaseRefused, match="has sha256"):
        machine.boot()
    assert not (machine.root / "opt/diloco").is_symlink()
    assert not any(command.startswith("tar ") for command in machine.commands)


def test_what_was_interrupted_is_made_again(machine: Machine) -> None:
    def breaks(command: Sequence[str]) -> str:
        if command[0] == "tar":
            raise OSError("no route to host")
        return machine.run(command)

    broken = boot.Boot(machine.boots._google, breaks, machine.root)
    with pytest.raises(OSError, match="no route"):
        broken.boot()
    assert machine.kept == set()
    assert any(command.startswith("tar ") for command in machine.boot())


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


def test_a_cache_has_nginx_of_debian_and_a_unit_of_its_own(cloud: Cloud, tmp_path: Path) -> None:
    cloud.objects["common/cache-us-east5.conf"] = b"events {}"
    cloud.parameters = {
        "role": "cache", "name": "cache-us-east5", "bucket": "configuration", "kind": "cpu",
        "release": {}, "secrets": {}, "environment": {}, "units": [],
        "files": {"/etc/diloco/cache.conf": "common/cache-us-east5.conf"},
    }  # fmt: skip
    machine = Machine(tmp_path, cloud)
    commands = machine.boot()
    masked = commands.index("systemctl mask nginx.service")
    installed = next(at for at, one in enumerate(commands) if "nginx-light" in one)
    started = commands.index(f"systemctl enable --now {google_units.CACHE}")
    assert masked < installed < started
    assert f"systemctl restart --no-block {google_units.CACHE}" in commands
    assert (tmp_path / "etc/diloco/cache.conf").read_bytes() == b"events {}"
    assert not list((tmp_path / "etc/diloco").glob("*.env"))
    # Again, with nothing new: what serves is left alone.
    assert not any("restart" in one for one in machine.boot())


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


# What came with Python 3.11: TPU machines have 3.10 of their own.
LATER = {"UTC", "tomllib", "StrEnum", "Self", "file_digest", "TaskGroup", "ExceptionGroup"}


@pytest.mark.parametrize(
    "name",
    [
        "boot",
        "cache",
        "cloud",
        "ended",
        "join",
        "keeper",
        "livez",
        "logs",
        "install_release",
        "google_units",
    ],
)
def test_what_runs_before_a_release_is_there_needs_no_later_python_and_no_package(
    name: str,
) -> None:
    tree = ast.parse((ROOT / f"infra/{name}.py").read_text(), feature_version=(3, 10))
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
            words |= {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    assert not words & LATER
    ours = {module for module in modules if module.startswith("diloco.")}
    assert all(module.startswith("diloco.infra.") for module in ours)
    assert {module.partition(".")[0] for module in modules - ours} <= sys.stdlib_module_names
