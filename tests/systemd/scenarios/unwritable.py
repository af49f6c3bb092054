#!/usr/bin/python3
"""Disks that are full and folders that are another user's: who says so, and what goes on."""

import contextlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    AGGREGATOR,
    CHECKPOINT,
    RUN,
    A,
    B,
    active,
    begin,
    begin_alone,
    check,
    diloco,
    drop_in,
    error_of,
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
    follow_page("create")
    for unit in (AGGREGATOR, A):
        run("systemctl", "start", unit)


def full_disk():
    begin(B)
    until(lambda: active(B), "it is ready")
    until(lambda: "checkpoint_saved" in {event["action"] for event in events(B)}, "checkpoints")
    with contextlib.suppress(OSError), Path("/run/small/full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
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
        told = until(lambda unit=unit: error_of(unit), f"{unit} says what is wrong")
        assert "Permission denied" in told, told
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
    diloco("run", "checkpoint", RUN)
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


def a_late_disk():
    """The disk of the store is mounted when the daemons have been started."""
    run("systemctl", "stop", A, B, AGGREGATOR)
    Path("/run/disk").mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", "/run/disk")
    run("cp", "-a", "/srv/diloco/.", "/run/disk")
    run("find", "/srv/diloco", "-mindepth", "1", "-delete")
    for unit in (AGGREGATOR, A):
        begin_alone(unit)
    for unit in (AGGREGATOR, A):
        until(lambda unit=unit: "waits: " in status_text(unit), f"{unit} waits for the disk")
    pids = {unit: show(unit, "MainPID") for unit in (AGGREGATOR, A)}
    run("mount", "--bind", "/run/disk", "/srv/diloco")
    for unit, pid in pids.items():
        until(lambda unit=unit: active(unit), f"{unit} goes on")
        assert show(unit, "MainPID") == pid
    versions_go_on()
    check("a store whose disk is mounted late: its daemons wait, and go on with it")


scenario(install, full_disk, a_loop, no_rights, checkpoints_in_the_way, a_late_disk)
