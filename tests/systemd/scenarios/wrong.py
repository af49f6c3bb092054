#!/usr/bin/python3
"""Faults show in `systemctl status`, in `--failed`, in the journal, and to the doctor."""

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
    A,
    active,
    begin,
    begin_alone,
    check,
    diloco,
    drop_in,
    error_of,
    events,
    failed,
    follow_page,
    install_as_the_page_says,
    journal,
    restarts,
    run,
    scenario,
    show,
    status_text,
    until,
    write_run_file,
)

CREDENTIALS = Path("/etc/diloco/credentials")


def install():
    install_as_the_page_says()
    for unit in ("diloco-aggregator.service", "diloco-learner@.service"):
        drop_in(unit, "[Service]\nRestartSec=1\nTimeoutAbortSec=3\n")
    run("systemctl", "daemon-reload")
    write_run_file()


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


def before_the_run():
    """Daemons that start before `run create` say so, and serve once there is a run."""
    for unit in (AGGREGATOR, A):
        begin(unit)
    told = until(lambda: error_of(AGGREGATOR), "it says what is missing")
    assert "there is no run 'demo'" in told, told
    assert "diloco run create" in told, told
    until(lambda: restarts(AGGREGATOR) >= 3, "it tries again")
    assert "waits for 5 s before restart 2" in journal(AGGREGATOR)
    until(lambda: "waits: reading the run" in status_text(A), "it says what it waits for")
    assert any("create the run" in (event.get("hint") or "") for event in events(A)), journal(A)
    follow_page("create")
    for unit in (AGGREGATOR, A):
        until(lambda unit=unit: active(unit), f"{unit} is ready")
        reset(unit)
    check("started before the run is created: said, tried again with longer pauses, and ready")


def without_nats():
    """All wait within the process, and say so."""
    run("systemctl", "stop", NATS)
    for unit in (AGGREGATOR, CHECKPOINT, A):
        begin_alone(unit)
    for unit in (AGGREGATOR, A, CHECKPOINT):
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
    """A daemon that is not READY after a minute is ended, and starts again."""
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


scenario(install, mistyped, no_credentials, before_the_run, without_nats, stopped_while_starting)
