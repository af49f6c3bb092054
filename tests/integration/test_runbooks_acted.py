"""Runbooks, followed to the letter on runs that a test has broken: what a page says happens.

The commands are the pages' own (`night.py`): a page whose command changes or goes is found. `make
operators-hour` follows all of them, one after the other.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from audit import read_tape
from built import build_wheel, install, source_of_tree
from harness import ENDLESS, World, eventually
from night import Night
from small_disk import fill, small_disk
from test_unequal_slices import OFTEN, until_merged

from diloco.common.process import log
from diloco.common.process.nats_server import LOOPBACK, NatsServer, free_port
from diloco.common.process.release import release
from diloco.common.protocol.errors import Exit

SLOWER = {"options": {"notes": "notes", "sleep_s": 0.02}}


@pytest.fixture(autouse=True)
def _keep_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process, and must not change where it logs to."""
    monkeypatch.setattr(log, "configure", lambda _level: None)


@pytest.fixture
def night(new_world: Callable[..., World], own_nats_server: NatsServer) -> Night:
    """A run that goes on: an aggregator and learner-0."""
    found = Night(new_world(server=own_nats_server, run=ENDLESS, task=SLOWER), own_nats_server)
    begin(found)
    return found


def begin(night: Night, learner: str = "learner-0") -> None:
    """As start.md says, on machines whose server runs."""
    night.do("start", "systemctl enable --now diloco-aggregator")
    night.do("start", "systemctl enable --now diloco-learner@NAME", NAME=learner)
    until_grows(night)


def until_grows(night: Night, more: int = 2) -> None:
    """Until there are further versions of each fragment."""
    before = min(read_tape(night.world).versions())
    eventually(
        lambda: min(read_tape(night.world).versions()) >= before + more, "versions", every_s=0.5
    )


def told(night: Night, page: str, begins: str, *texts: str, **places: str) -> None:
    """The page's command says all of these, in time."""
    eventually(
        lambda: all(text in night.do(page, begins, **places) for text in texts),
        f"{begins} says {texts}",
        every_s=0.5,
    )


def is_well(night: Night, page: str, *, doctor: str = "diloco doctor RUN") -> None:
    """As pages have it under "Verify": the run trains, and the doctor finds no error.

    On a busy machine somebody may be silent just then.
    """
    told(night, "start", "diloco status RUN --once", "training")
    eventually(lambda: night.ask(page, doctor).status == 0, f"{doctor} is content", every_s=1.0)


@pytest.mark.long
def test_start(new_world, own_nats_server):
    world = new_world(server=own_nats_server, run=ENDLESS, task=SLOWER, create=False)
    night = Night(world, own_nats_server)
    own_nats_server.stop()
    night.do("start", "systemctl enable --now nats-server")
    # Not created: "ends with status 66".
    assert world.aggregator().wait() == Exit.NO_RUN
    assert "does not exist yet" in night.do("start", "diloco doctor RUN")
    assert "created run" in night.do("start", "diloco run create --config FILE")
    assert (
        "no learner has joined yet" in night.run(["status", night.places["RUN"], "--learners"]).text
    )
    begin(night)
    told(night, "start", "diloco status RUN --once", "training", "aggregator", "under way")
    is_well(night, "start")


def test_a_quarantined_learner(night):
    page = "quarantined-learner"
    told(night, page, "diloco run quarantine RUN NAME --reason", "learner-0 is quarantined")
    told(night, page, "diloco status RUN --learners", "is quarantined: why")
    eventually(lambda: read_tape(night.world).rejected(), "its updates are rejected", every_s=0.5)
    reasons = {taken.reason for taken in read_tape(night.world).rejected().values()}
    assert reasons == {"quarantined"}
    assert "released" in night.do(page, "diloco run release RUN NAME")
    until_grows(night)
    told(night, page, "diloco status RUN --learners", "training")
    assert "is quarantined" not in night.do(page, "diloco status RUN --learners")
    wrong = night.run(["run", "quarantine", night.places["RUN"], "nobody"])
    assert wrong.status == Exit.MISMATCH
    assert "no learner 'nobody'" in wrong.text


@pytest.mark.slow
def test_the_loss_rises_by_a_setting(night):
    page, run = "loss-spike", night.places["RUN"]
    asked = night.run(["run", "set", run, "outer.learning_rate=20"])
    assert asked.status != 0  # nobody has answered its question
    assert "outer.learning_rate" in asked.text
    assert night.run(["run", "set", run, "outer.learning_rate=20", "--yes"]).status == 0
    told(night, page, "diloco doctor RUN", "bad-configuration.md", "outer.learning_rate 20")
    assert "changed outer.learning_rate" in night.do(page, "diloco run set RUN outer.learning_rate")
    until_grows(night)
    newest = [chain[-1][1] for chain in read_tape(night.world).records.values()]
    assert {record.learning_rate for record in newest} == {0.7}
    assert "outer.learning_rate 20" not in night.do(page, "diloco doctor RUN")
    assert "checkpoint" in night.do(page, "diloco run checkpoint RUN")
    told(night, page, "diloco status RUN --once", "training")


@pytest.mark.slow
def test_add_and_remove_a_learner(night):
    page, run = "add-remove-learner", night.places["RUN"]
    assert "ok" in night.do(page, "diloco doctor FILE")
    made = night.run(["auth", "init", night.places["DIR"], "--run", "r", "--host", "127.0.0.1"])
    assert made.status == 0
    assert "learner-1" in night.do(page, "diloco auth add-learner DIR NAME", NAME="learner-1")
    assert "learner-1" in night.do(page, "diloco auth list DIR")
    night.do(page, "systemctl enable --now diloco-learner@NAME", NAME="learner-1")
    until_merged(night.world, "learner-1")
    told(night, page, "diloco status RUN --learners", "learner-1")
    night.do(page, "systemctl disable --now diloco-learner@NAME", NAME="learner-1")
    told(night, page, "diloco status RUN --learners", "left")
    until_grows(night)
    assert "cut off" in night.do(page, "diloco auth revoke DIR NAME", NAME="learner-1")
    assert night.run(["auth", "revoke", night.places["DIR"], "nobody"]).status == Exit.CONFIG
    assert "learner-0" in night.run(["status", run, "--learners"]).text


@pytest.mark.slow
def test_restore_from_the_bucket(night):
    page, run = "restore-from-bucket", night.places["RUN"]
    assert night.run(["run", "checkpoint", run]).status == 0
    assert night.run(["run", "resume", run]).status != 0  # "On a bus that still has the run"
    # The server is lost with its disk, and a new one comes in its place.
    night.server.kill()
    shutil.rmtree(night.server.folder)
    night.do(page, "systemctl stop diloco-learner@NAME")
    night.do(page, "systemctl stop diloco-aggregator")
    night.server.start()
    lost = night.run(["doctor", run])
    assert lost.status == Exit.FAILED
    assert "restore-from-bucket.md" in lost.text
    said = night.do(page, "diloco run resume RUN")
    assert "resumed from checkpoint" in said
    assert "as epoch 1" in said
    assert min(read_tape(night.world).versions()) >= 1
    begin(night)
    is_well(night, page)


def installed(version: str, folder: Path) -> Path:
    """The programs of a release that says of itself that it is this one."""
    source = source_of_tree(folder)
    project = source / "pyproject.toml"
    text, changed = re.subn(
        '^version = ".*"$', f'version = "{version}"', project.read_text(), flags=re.MULTILINE
    )
    assert changed == 1
    project.write_text(text)
    return install(build_wheel(source, folder), folder / "environment")


def until_made_by(night: Night, version: str) -> None:
    """Until the newest version of each fragment was made by that release."""

    def all_made() -> bool:
        newest = [chain[-1][1] for chain in read_tape(night.world).records.values()]
        return {record.release for record in newest} == {version}

    eventually(all_made, f"versions are made by {version}", every_s=0.5)


@pytest.mark.slow
def test_an_upgrade_without_stopping_the_run(night, tmp_path):
    page, new = "upgrade", "/opt/diloco-0.2.0"
    (tmp_path / "new").mkdir()
    night.programs[new] = installed("0.2.0", tmp_path / "new")
    is_well(night, page)
    assert "checkpoint" in night.do(page, "diloco run checkpoint RUN")
    until_made_by(night, release())

    night.do(page, f"{new}/bin/diloco host units diloco-aggregator")
    until_grows(night)
    until_made_by(night, release())  # "Nothing that runs notices."
    night.do(page, "systemctl restart diloco-aggregator")
    until_made_by(night, "0.2.0")
    until_grows(night)
    night.do(page, f"{new}/bin/diloco host units diloco-learner@")
    night.do(page, "systemctl restart diloco-learner@NAME")
    until_grows(night)
    assert len(read_tape(night.world).lives("learner-0")) == 2
    night.do(page, "systemctl restart nats-server")
    until_grows(night)
    is_well(night, page, doctor="diloco doctor RUN --deep")

    # "Back to the old version: the same commands, of the old folder."
    night.releases.clear()
    night.do(page, "systemctl restart diloco-aggregator")
    until_made_by(night, release())


@pytest.mark.slow
def test_no_learner_is_there(night):
    page = "no-learners"
    night.units["diloco-learner@learner-0"].kill()
    found = night.run(["doctor", night.places["RUN"]])
    eventually(
        lambda: "no learner is there" in night.run(["doctor", night.places["RUN"]]).text,
        f"the doctor says it: {found.text}",
        every_s=1.0,
    )
    night.do(page, "diloco run pause RUN")
    assert "no learner is there" not in night.do(page, "diloco status RUN --once")
    night.do(page, "diloco run continue RUN")
    night.do(page, "systemctl start diloco-learner@NAME")
    until_grows(night)
    # "With no learner there it ends with what was merged."
    night.units["diloco-learner@learner-0"].kill()
    assert night.run(["run", "end", night.places["RUN"], "--yes"]).status == 0
    assert night.units["diloco-aggregator"].wait() == 0
    told(night, page, "diloco status RUN --once", "ended")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_of_a_learner_is_lost(new_world, own_nats_server, lost):
    page, slice_ = "lost-host", "diloco-learner@learner-1"
    night = Night(
        new_world(server=own_nats_server, run=ENDLESS, task=SLOWER, learner=OFTEN), own_nats_server
    )
    address = f"{LOOPBACK}:{free_port()}"
    night.slices[slice_] = [
        ["--coordinator", address, "--hosts", "2", "--host", str(host)] for host in range(2)
    ]
    night.places["NAME"] = "learner-1"
    begin(night)
    night.do(page, "systemctl start diloco-learner@NAME")
    hosts = [night.units[f"{slice_}.{host}"] for host in range(2)]
    until_merged(night.world, "learner-1")
    for host in hosts:
        night.world.until(lambda host=host: host.events("checkpoint_saved")[1:], "checkpoints")

    hosts[lost].kill()
    other = night.units["diloco-learner@learner-0"]
    steps = night.world.steps("learner-0")
    assert hosts[1 - lost].wait() == Exit.PASSING
    # "The one that says why it ended is the one that failed; the others only say that it is gone."
    said = f"host {lost} of this learner is gone"
    assert said in hosts[1 - lost].log()
    assert said in night.do(page, "journalctl -u diloco-learner@NAME")
    # Host 0 speaks to the run, and can say why it ends.
    state = "silent" if lost == 0 else "failed"
    told(night, "start", "diloco status RUN --once", state, "training")
    eventually(lambda: night.world.steps("learner-0") > steps, "the other learner trains on")

    night.do(page, "systemctl start diloco-learner@NAME")
    night.world.processes.remove(hosts[1 - lost])  # It failed as it should.
    again = [night.units[f"{slice_}.{host}"] for host in range(2)]
    for host in again:
        night.world.until(lambda host=host: host.events("started"), "each host logs `started`")
        night.world.until(lambda host=host: host.events("checkpoint_restored"), "it goes on")
    first, second = (host.events("checkpoint_restored")[0]["local_step"] for host in again)
    assert first == second > 0
    until_merged(night.world, "learner-1")
    assert len(read_tape(night.world).lives("learner-1")) == 2
    is_well(night, page)

    # "Not now": it leaves, on all its hosts.
    night.do(page, "systemctl stop diloco-learner@NAME")
    assert [host.wait() for host in again] == [0, 0]
    until_grows(night)
    assert other.running
    assert len(read_tape(night.world).lives("learner-0")) == 1


@pytest.mark.slow
def test_the_disk_of_the_server_is_full(new_world, tmp_path):
    with small_disk(tmp_path / "disk", size="256m") as disk, NatsServer(disk / "nats") as server:
        night = Night(new_world(server=server, run=ENDLESS, task=SLOWER), server)
        begin(night)
        _follow_disk_full(night, disk / "filler")


def _follow_disk_full(night: Night, filler: Path) -> None:
    page, run = "disk-full", night.places["RUN"]
    aggregator, learner = night.units["diloco-aggregator"], night.units["diloco-learner@learner-0"]

    def said_by_the_doctor() -> bool:
        text = night.run(["doctor", run]).text
        return "disk-full.md" in text and "stores nothing" in text

    fill(filler)
    eventually(lambda: learner.events("heartbeats_lost"), "`heartbeats_lost`")
    eventually(
        lambda: any("no answer on" in event["error"] for event in learner.events("waiting")),
        "`waiting` with `no answer on`",
    )
    eventually(said_by_the_doctor, "NATS answers and stores nothing")
    steps = night.world.steps("learner-0")
    eventually(lambda: night.world.steps("learner-0") > steps, "training continues")
    known = read_tape(night.world).versions()
    filler.unlink()
    # "Room alone is not enough."
    assert said_by_the_doctor()
    assert not learner.events("heartbeats_resumed")

    night.do(page, "systemctl restart nats-server")
    eventually(lambda: learner.events("heartbeats_resumed"), "`heartbeats_resumed`")
    eventually(lambda: aggregator.events("resumed") + learner.events("resumed"), "`resumed`")
    until_grows(night)
    now = read_tape(night.world).versions()
    assert all(later >= earlier for later, earlier in zip(now, known, strict=True))
    assert aggregator.running
    assert learner.running
    night.do(page, "diloco run gc --dry-run RUN")
    is_well(night, page)
    said = night.do(page, "diloco doctor RUN --deep")
    for line in ("bus", "store"):
        assert re.search(rf"\bok +{line}\b", said), said
