#!/usr/bin/python3
"""What is wrong shows: in `systemctl status`, in `--failed`, in the journal, and to the doctor."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    AGGREGATOR,
    CHECKPOINT,
    NATS,
    RUN,
    A,
    B,
    active,
    check,
    diloco,
    drop_in,
    events,
    failed,
    findings,
    follow_page,
    install_as_the_page_says,
    journal,
    restarts,
    run,
    scenario,
    show,
    status_text,
    until,
    versions,
    versions_go_on,
    write_run_file,
)

CREDENTIALS = Path("/etc/diloco/credentials")


def install():
    install_as_the_page_says()
    for unit in ("diloco-aggregator.service", "diloco-learner@.service"):
        drop_in(unit, "[Service]\nRestartSec=1\nTimeoutAbortSec=3\n")
    # A learner's disk that can be filled.
    drop_in(
        B,
        "[Service]\nEnvironment=DILOCO_LEARNER_CHECKPOINT_DIR=/run/small\n"
        "ReadWritePaths=/run/small\n",
    )
    Path("/run/small").mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1m,mode=0777", "tmpfs", "/run/small")
    run("systemctl", "daemon-reload")
    write_run_file()


def begin(unit):
    run("systemctl", "start", "--no-block", unit)


def shown(unit):
    return run("systemctl", "status", "--no-pager", "-n", "30", unit, check=False)


def listed_as_failed(unit):
    return unit in run("systemctl", "--failed", "--no-legend", "--plain")


def reset(unit):
    run("systemctl", "stop", unit)
    run("systemctl", "reset-failed", unit, check=False)


def mistyped():
    """A key that there is not: the daemon fails once, and says which."""
    write_run_file(**{"interval_steps = 8": "interval_step = 8"})
    for unit in (AGGREGATOR, A):
        begin(unit)
        until(lambda unit=unit: failed(unit), f"{unit} fails")
        assert "interval_step" in status_text(unit), status_text(unit)
        assert "; hint: " in status_text(unit)
        assert listed_as_failed(unit)
        assert restarts(unit) == 0
        told = shown(unit)
        assert "error: " in told
        assert "hint: " in told
        warned = run("journalctl", "-q", "-o", "cat", "-p", "warning", "-u", unit)
        assert "interval_step" in warned, warned
        reset(unit)
    check("a mistyped key: failed, listed, and systemctl status says error and hint")
    write_run_file()


def no_credentials():
    (CREDENTIALS / "island-a.toml").rename(CREDENTIALS / "away")
    begin(A)
    until(lambda: failed(A), "it fails")
    assert "/etc/diloco/credentials/island-a.toml" in status_text(A), status_text(A)
    assert "runbooks/credentials.md" in status_text(A)
    assert listed_as_failed(A)
    reset(A)
    check("missing credentials: failed, listed, and the file is named")
    (CREDENTIALS / "away").rename(CREDENTIALS / "island-a.toml")
    diloco("auth", "init", "/root/other", "--run", "demo")
    diloco("auth", "add-learner", "/root/other", "island-a")
    right = (CREDENTIALS / "island-a.toml").read_text()
    other = Path("/root/other/credentials/island-a.toml").read_text()
    (CREDENTIALS / "island-a.toml").write_text(other)
    begin(A)
    until(lambda: failed(A), "it fails")
    assert "refused" in status_text(A), status_text(A)
    (CREDENTIALS / "island-a.toml").write_text(right)
    reset(A)
    check("wrong credentials: failed, listed, and the server's refusal is told")


def without_nats():
    """All wait within the process, and say so."""
    follow_page("create")
    run("systemctl", "stop", NATS)
    for unit in (AGGREGATOR, A, CHECKPOINT):
        begin(unit)
    for unit in (AGGREGATOR, A):
        until(lambda unit=unit: "waits: " in status_text(unit), f"{unit} says what it waits for")
    pids = {unit: show(unit, "MainPID") for unit in (AGGREGATOR, A, CHECKPOINT)}
    time.sleep(75)
    for unit, pid in pids.items():
        assert show(unit, "ActiveState") == "activating", unit
        assert show(unit, "MainPID") == pid, unit
        assert "waiting" in {event["action"] for event in events(unit)}, unit
    run("systemctl", "start", NATS)
    for unit in (AGGREGATOR, A):
        until(lambda unit=unit: active(unit), f"{unit} is ready")
        assert restarts(unit) == 0
    until(lambda: show(CHECKPOINT, "ActiveState") == "inactive", "the checkpoint is made")
    assert show(CHECKPOINT, "Result") == "success", journal(CHECKPOINT)
    check("without NATS aggregator, learner and checkpoint wait, say so, and go on with it")


def stopped_while_starting():
    """Who does not get on before READY is ended in a minute, and starts again."""
    run("systemctl", "stop", A)
    begin(A)
    until(lambda: status_text(A), "it has said something")
    pid = int(show(A, "MainPID"))
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: int(show(A, "MainPID")) not in (0, pid), "another takes its place", 200)
    print(f"   a start that hung was ended after {time.monotonic() - began:.0f} s")
    until(lambda: active(A), "it is ready")
    check("a learner that hangs while it starts is ended, and started again")


def full_disk():
    begin(B)
    until(lambda: active(B), "it is ready")
    until(lambda: "checkpoint_saved" in {event["action"] for event in events(B)}, "checkpoints")
    with Path("/run/small/full").open("wb") as file:
        try:
            while True:
                file.write(bytes(4096))
                file.flush()
        except OSError:
            pass
    until(lambda: "checkpoints fail: " in status_text(B), "its status says that its disk is full")
    assert "No space left" in status_text(B)
    assert active(B)
    until(lambda: any("checkpoints fail" in sentence for _, about, sentence in findings()
                      if about == "learner island-b"), "the doctor says so")  # fmt: skip
    Path("/run/small/full").unlink()
    until(lambda: "checkpoints fail" not in status_text(B), "it says that it works again")
    check("a full state disk: training goes on; status and doctor say that checkpoints fail")


def a_loop():
    for _ in range(4):
        before = restarts(A)
        os.kill(int(show(A, "MainPID")), signal.SIGKILL)
        until(lambda before=before: restarts(A) > before and active(A), "it starts again")
    severities = {one[0] for one in findings() if "started again" in one[2]}
    assert severities == {"error"}, findings()
    check("a learner that restarts again and again: the doctor says so")


def no_rights():
    """A store that the daemons may not write to is found before they say that they are ready."""
    run("systemctl", "stop", A, B, AGGREGATOR)
    run("chown", "-R", "root:", "/srv/diloco")
    for unit in (AGGREGATOR, A):
        begin(unit)
        until(lambda unit=unit: "error: " in status_text(unit), f"{unit} says what is wrong")
        assert "Permission denied" in status_text(unit), status_text(unit)
        assert not active(unit)
    run("chown", "diloco:", "/srv/diloco")
    told = [one for one in findings() if one[1] == "store" and one[0] == "error"]
    assert told, findings()
    run("chown", "-R", "--reference=/srv/diloco", "/srv/diloco")
    for unit in (AGGREGATOR, A):
        until(lambda unit=unit: active(unit), f"{unit} goes on by itself")
    versions_go_on()
    check("a store where no daemon can write: not ready, said, and the doctor sees it as root")


def checkpoints_in_the_way():
    """One operator's checkpoint as root does not stop the hourly ones; a root's folder is named."""
    diloco("checkpoint", RUN)
    run("systemctl", "start", CHECKPOINT)
    assert show(CHECKPOINT, "Result") == "success"
    made = versions()
    until(lambda: versions() > made, "versions go on")
    run("chown", "root:", "/srv/diloco/demo/checkpoint")
    run("systemctl", "start", CHECKPOINT, check=False)
    assert failed(CHECKPOINT)
    assert "Permission denied" in journal(CHECKPOINT)
    assert any("not of user" in sentence for _, _, sentence in findings()), findings()
    run("chown", "--reference=/srv/diloco", "/srv/diloco/demo/checkpoint")
    check("a checkpoint as root leaves the hourly ones alone; a folder in their way is named")


scenario(
    install,
    mistyped,
    no_credentials,
    without_nats,
    stopped_while_starting,
    full_disk,
    a_loop,
    no_rights,
    checkpoints_in_the_way,
)
