"""A machine of one's own that joins a run: what is written, what is refused; commands are written down."""

import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_release import archive_of

from diloco.infra import join
from diloco.infra.install_release import ReleaseRefused
from diloco.infra.make_release import write_join

LEARNER = '# Secret.\nrun = "demo"\nidentity = "cellar"\nrole = "learner"\nseed = "SU"\n'
UNIT = "diloco-learner@cellar.service"


class Machine:
    """A file system below a folder, and the operator's files on it; no command does anything."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commands: list[str] = []
        self.files = root / "root"
        self.files.mkdir()
        (self.files / "run.toml").write_text("[run]\n")
        (self.files / "ca.pem").write_text("CERTIFICATE")
        (self.files / "who.toml").write_text(LEARNER)
        self.release = archive_of(self.files / "b.tar.gz", "bin/diloco")
        self.host = join.JoiningMachine(self.run, root)

    def run(self, command: Sequence[str]) -> str:
        self.commands.append(" ".join(command).replace(str(self.root), ""))
        if command[0] == "tar":
            Path(command[4]).joinpath("bin").mkdir()
        return ""

    def join(self, *words: str) -> bool:
        self.commands.clear()
        files = [str(self.release), "--run", str(self.files / "run.toml"),
                 "--credentials", str(self.files / "who.toml")]  # fmt: skip
        return self.host.join(join.parse([*files, *words]))

    def text(self, path: str) -> str:
        return (self.root / path).read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_one_command_makes_a_learner_of_a_machine(machine: Machine) -> None:
    ca = str(machine.files / "ca.pem")
    assert machine.join("--ca", ca, "--url", "tls://nats:4222", "--set", "DILOCO_METRICS_PORT=9465")
    assert machine.text("etc/diloco/run.toml") == "[run]\n"
    assert machine.text("etc/diloco/ca.pem") == "CERTIFICATE"
    secret = machine.root / "etc/diloco/credentials/cellar.toml"
    assert secret.read_text() == LEARNER
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert machine.text("etc/diloco/learner-cellar.env").splitlines() == [
        "DILOCO_BUS_URL=tls://nats:4222",
        "DILOCO_METRICS_PORT=9465",
        "DILOCO_BUS_TLS_CA=/etc/diloco/ca.pem",
    ]
    assert machine.commands[-2:] == [
        f"systemctl enable {UNIT}",
        f"systemctl restart --no-block {UNIT}",
    ]
    assert machine.release.exists()


def test_joining_again_disturbs_nobody(machine: Machine) -> None:
    machine.join()
    assert machine.join()
    assert machine.commands[-1] == f"systemctl start --no-block {UNIT}"
    assert not any(command.startswith("tar ") for command in machine.commands)


def test_an_aggregators_credentials_make_an_aggregator(machine: Machine) -> None:
    (machine.files / "who.toml").write_text(LEARNER.replace('"learner"', '"aggregator"'))
    machine.join()
    assert (machine.root / "etc/diloco/credentials/aggregator.toml").exists()
    assert (machine.root / "etc/diloco/aggregator.env").exists()
    assert machine.commands[-1] == "systemctl restart --no-block diloco-aggregator.service"


@pytest.mark.parametrize("text", ["", LEARNER.replace('"learner"', '"operator"')])
def test_credentials_of_nobody_who_has_a_unit_are_refused(machine: Machine, text: str) -> None:
    (machine.files / "who.toml").write_text(text)
    with pytest.raises(ReleaseRefused, match="is no credentials file of a learner"):
        machine.join()
    assert machine.commands == []


def test_a_release_for_gpus_wants_a_driver_and_lets_them_in(machine: Machine) -> None:
    archive_of(machine.release, "bin/diloco", kind="cuda")
    with pytest.raises(ReleaseRefused, match="there is no /dev/nvidiactl here"):
        machine.join()
    assert machine.commands == []
    (machine.root / "dev").mkdir()
    (machine.root / "dev/nvidiactl").touch()
    assert machine.join()
    drop_in = machine.text("etc/systemd/system/diloco-learner@.service.d/30-nvidia.conf")
    assert "DeviceAllow=char-nvidia rw" in drop_in


def test_a_wrong_word_for_the_environment_is_refused(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        machine.join("--set", "NOTHING")
    assert "is no KEY=VALUE" in capsys.readouterr().err


def test_the_program_is_one_file_of_the_standard_library(tmp_path: Path) -> None:
    write_join(tmp_path / "join")
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "join"), str(tmp_path), "--run", "/none",
         "--credentials", "/none"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "name", ["../../cron.d/x", "/etc/x", "a b", "A", "a.service", "-a", "a" * 41]
)
def test_a_file_says_by_no_name_where_root_writes(machine: Machine, name: str) -> None:
    """Whoever makes a credentials file chooses the name in it."""
    (machine.files / "who.toml").write_text(LEARNER.replace("cellar", name))
    before = {*machine.root.rglob("*")}
    with pytest.raises(ReleaseRefused, match="which is no name of a learner"):
        machine.join()
    assert machine.commands == []
    assert {*machine.root.rglob("*")} == before
