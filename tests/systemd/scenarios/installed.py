#!/usr/bin/python3
"""The page from its top to its end, then what happens to daemons that run: kills, hangs, stops."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    AGGREGATOR,
    CHECKPOINT,
    GC,
    NATS,
    UNITS,
    A,
    B,
    actions,
    active,
    check,
    diloco,
    follow_page,
    install_as_the_page_says,
    journal,
    journal_of_systemd,
    make_quick,
    restarted,
    restarts,
    run,
    scenario,
    show,
    status,
    status_text,
    until,
    versions,
    versions_go_on,
    write_run_file,
)


def install():
    install_as_the_page_says()
    make_quick()
    files = [str(path) for path in UNITS.iterdir() if path.name.startswith(("diloco", "nats"))]
    files = [path.replace("@", "@a") for path in files if path.endswith((".service", ".timer"))]
    assert run("bash", "-c", f"systemd-analyze verify --man=no {' '.join(files)} 2>&1") == ""
    check("the page's install writes units of which systemd-analyze verify has nothing to say")


def start():
    write_run_file()
    follow_page("ports")
    follow_page("create")
    # With Type=notify it returns once the daemons have said READY=1.
    follow_page("start")
    for unit in (AGGREGATOR, A, B):
        assert active(unit), unit
        assert "started" in actions(unit), unit
    check("the page's commands create the run as root and start the daemons")
    until(lambda: versions() >= 6, "versions are made")
    assert "owns 3 of 3 fragments" in status_text(AGGREGATOR)
    until(lambda: status_text(A).startswith("training: step"), "it says what it does")
    check("they make versions, and say what they do")
    told = follow_page("look")
    assert "run demo" in told, told
    assert "not healthy" not in told, told
    for port in (9464, 9465, 9466):
        assert "diloco_ready" in metrics(port)
    check("the page's look at them says so, and each has a metrics port")
    for unit in (AGGREGATOR, A):
        fields = of_process(show(unit, "MainPID"))
        assert int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"
        assert fields["Uid"].split()[0] == run("id", "-u", "diloco").strip()
    check("they run as the store's user, without capabilities")


def of_process(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def metrics(port):
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def operators():
    """Somebody who is not root looks at all of it, and can change nothing."""
    run("useradd", "alice")
    follow_page("operators")
    look = (
        "cd /opt/diloco-task; diloco status /etc/diloco/run.toml --once && diloco replay /etc/diloco/run.toml"
        " && journalctl -q -u diloco-aggregator -n 1"
    )
    told = run("runuser", "-u", "alice", "--", "bash", "-e", "-c", look)
    assert "bit for bit" in told, told
    refused = run("runuser", "-u", "alice", "--", "cat", "/etc/diloco/credentials/aggregator.toml",
                  check=False)  # fmt: skip
    assert refused == ""
    check("an operator who is not root reads journal, tape and store, and no daemon's credentials")


def reload():
    """A learner that is added is known after two reloads; nobody else notices."""
    pid = show(NATS, "MainPID")
    told = diloco("auth", "add-learner", "/root/demo", "island-c")
    assert "systemctl reload nats-server" in told, told
    run("cp", "/root/demo/accounts.conf", "/etc/nats/accounts.conf")
    for _ in range(2):
        run("systemctl", "reload", NATS)
        time.sleep(1)
    assert "Reloaded" in journal(NATS)
    assert show(NATS, "MainPID") == pid
    check("systemctl reload: nats-server reads its accounts again")


def killed():
    for unit in (AGGREGATOR, A, NATS):
        before = restarts(unit)
        os.kill(int(show(unit, "MainPID")), 9)
        until(restarted(unit, before), f"{unit} is started again")
        versions_go_on()
        check(f"SIGKILL of {unit}: it comes back, and versions go on")


def steps_of(learner):
    return {one["name"]: one["local_step"] for one in status()["learners"]}[learner]


def watchdog():
    before = restarts(A)
    Path("/run/slow").touch()
    begun = steps_of("island-a")
    until(lambda: steps_of("island-a") >= begun + 3, "slow steps are taken")
    assert restarts(A) == before
    Path("/run/slow").unlink()
    check("steps twice as slow as the watchdog's interval are no reason to start a learner again")

    Path("/run/hang").touch()
    until(lambda: "watchdog" in journal_of_systemd(A), "the watchdog ends it")
    Path("/run/hang").unlink()
    assert "hanging_task.py" in journal(A), "where it hung is not in the journal"
    until(restarted(A, before), "it is started again")
    versions_go_on()
    check("a training loop that hangs is ended, says where it was, and is started again")

    before = restarts(AGGREGATOR)
    os.kill(int(show(AGGREGATOR, "MainPID")), 19)
    until(restarted(AGGREGATOR, before), "it is started again")
    assert "watchdog" in journal_of_systemd(AGGREGATOR)
    versions_go_on()
    check("an aggregator whose event loop stands still is started again")


def timers():
    for timer in ("diloco-gc.timer", "diloco-checkpoint.timer"):
        assert show(timer, "NextElapseUSecRealtime")
    diloco("run", "checkpoint", "/etc/diloco/run.toml")
    for service in (CHECKPOINT, GC):
        run("systemctl", "start", service)
        assert show(service, "Result") == "success"
    assert "checkpoint 0000-" in journal(CHECKPOINT)
    check("a checkpoint as root leaves nothing in the way of those that the timers make")


def stop():
    for unit, last in ((A, "left"), (B, "left"), (AGGREGATOR, "stopped")):
        run("systemctl", "stop", unit)
        assert show(unit, "ActiveState") == "inactive", show(unit, "ActiveState")
        assert show(unit, "Result") == "success", show(unit, "Result")
        assert last in actions(unit)
        assert "left_silently" not in actions(unit)
    run("systemctl", "stop", NATS)
    assert show(NATS, "Result") == "success"
    check("systemctl stop ends each of them cleanly and in time")


scenario(install, start, operators, reload, killed, watchdog, timers, stop)
