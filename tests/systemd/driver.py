#!/usr/bin/python3
"""Runs inside the container, as root: installs the units and tries them. Prints a line a check."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

BIN = "/opt/diloco/bin/diloco"
RUN = "/etc/diloco/run.toml"
AGGREGATOR, LEARNER = "diloco-aggregator.service", "diloco-learner@a.service"
UNITS = Path("/etc/systemd/system")
CONFIG = """
[run]
name = "demo"
steps = 1000000
seed = 7
[task]
build = "hanging_task:build"
[sync]
interval_steps = 8
fragments = 3
block = 16
shard_elements = 1024
min_steps = 3
snapshot_interval_versions = 3
reannounce_timeout_s = 3.0
[quorum]
deadline_s = 8.0
liveness_timeout_s = 4.0
[bus]
url = "tls://localhost:4222"
tls_ca = "/etc/diloco/ca.pem"
[store]
url = "/srv/store"
[learner]
watchdog_timeout_s = 15.0
"""
# A folder as store is shared by all, who therefore are one user here.
SHARED = "[Service]\nUser=diloco\nReadWritePaths=/srv/store\n"
# The test need not wait for a minute.
QUICK = "[Service]\nWatchdogSec=3\nTimeoutAbortSec=3\nRestartSec=1\n"


def run(*command, check=True, env=None):
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    if check and done.returncode:
        raise AssertionError(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def show(unit, name):
    return run("systemctl", "show", "--value", "-p", name, unit).strip()


def until(condition, what, within_s=120):
    end = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(0.3)
    return found


def status():
    operator = {**os.environ, "DILOCO_BUS_CREDENTIALS": "/etc/diloco/credentials/operator.toml"}
    return json.loads(run(BIN, "status", RUN, "--json", env=operator))


def versions():
    return sum(fragment["version"] for fragment in status()["fragments"])


def active(unit):
    return show(unit, "ActiveState") == "active"


def restarted(unit, before):
    return lambda: int(show(unit, "NRestarts")) > before and active(unit)


def check(text):
    print(f"ok {text}", flush=True)


def install():
    wrote = run(BIN, "install-units", "--programs", "/opt/diloco/bin")
    assert str(UNITS / AGGREGATOR) in wrote
    run("systemd-sysusers")
    for unit in ("diloco-aggregator", "diloco-learner@", "diloco-gc", "diloco-checkpoint"):
        folder = UNITS / f"{unit}.service.d"
        folder.mkdir(exist_ok=True)
        (folder / "90-test.conf").write_text(SHARED + (QUICK if unit[7] in "al" else ""))
    run("systemctl", "daemon-reload")
    files = [str(path) for path in UNITS.iterdir() if path.name.startswith(("diloco", "nats"))]
    files = [path for path in files if path.endswith((".service", ".timer"))]
    files = [path.replace("@", "@a") for path in files]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.stdout + done.stderr).strip() == "", done.stdout + done.stderr
    check("install-units writes units of which systemd-analyze verify has nothing to say")


def prepare():
    Path("/etc/hosts").write_text("127.0.0.1 localhost\n")
    run(
        BIN, "auth", "init", "/etc/nats", "--run", "demo", "--streams-at", "/var/lib/nats/jetstream"
    )
    run(BIN, "auth", "add-aggregator", "/etc/nats", "aggregator")
    run(BIN, "auth", "add-learner", "/etc/nats", "a")
    Path("/etc/nats/nats.conf").symlink_to("nats-1.conf")
    Path("/etc/diloco").mkdir()
    shutil.move("/etc/nats/credentials", "/etc/diloco/credentials")
    shutil.copy("/etc/nats/tls/ca.pem", "/etc/diloco/ca.pem")
    Path("/etc/diloco/ca.pem").chmod(0o644)
    run("chown", "-R", "nats:", "/etc/nats")
    Path(RUN).write_text(CONFIG)
    Path("/srv/store").mkdir()
    Path("/srv/store").chmod(0o1777)
    create = UNITS / "create.service"
    create.write_text(
        "[Service]\nType=oneshot\nDynamicUser=yes\nUser=diloco\nReadWritePaths=/srv/store\n"
        f"UMask=0077\nExecStart={BIN} run create --config {RUN}\n"
        "LoadCredential=bus.toml:/etc/diloco/credentials/operator.toml\n"
        "Environment=DILOCO_BUS_CREDENTIALS=/run/credentials/%n/bus.toml\n"
    )
    run("systemctl", "daemon-reload")


def start():
    run("systemctl", "start", "nats-server.service")
    until(lambda: "Server is ready" in journal("nats-server.service"), "nats is ready")
    run("systemctl", "start", "create.service")
    # With Type=notify these return once the daemons have said READY=1.
    run("systemctl", "start", AGGREGATOR)
    assert active(AGGREGATOR)
    assert actions(AGGREGATOR) >= {"started"}
    run("systemctl", "start", LEARNER)
    assert active(LEARNER)
    assert actions(LEARNER) >= {"started"}
    check("systemctl start returns once a daemon says that it is ready")
    until(lambda: versions() >= 6, "versions are made")
    assert "owns 3 of 3 fragments" in show(AGGREGATOR, "StatusText")
    assert show(LEARNER, "StatusText").startswith("training: step")
    check("with credentials handed over by systemd they make versions, and say what they do")
    for unit in (AGGREGATOR, LEARNER):
        pid = show(unit, "MainPID")
        fields = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert int(fields["Uid"].split()[0]) >= 61184, fields["Uid"]
        assert int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"
    check("they run as a user that is nobody else's, without capabilities")


def journal(unit):
    return run("journalctl", "-q", "-o", "cat", "-u", unit, check=False)


def actions(unit):
    found = set()
    for line in journal(unit).splitlines():
        if line.startswith("{"):
            found.add(json.loads(line)["action"])
    return found


def reload():
    """A learner that is added is known after two reloads; nobody else notices."""
    pid = show("nats-server.service", "MainPID")
    run(BIN, "auth", "add-learner", "/etc/nats", "b")
    run("chown", "-R", "nats:", "/etc/nats")
    for _ in range(2):
        run("systemctl", "reload", "nats-server.service")
        time.sleep(1)
    assert "Reloaded" in journal("nats-server.service")
    assert show("nats-server.service", "MainPID") == pid
    check("systemctl reload: nats-server reads its accounts again")


def killed():
    for unit in (AGGREGATOR, LEARNER, "nats-server.service"):
        before, made = int(show(unit, "NRestarts")), versions()
        os.kill(int(show(unit, "MainPID")), 9)
        until(restarted(unit, before), f"{unit} is started again")
        until(lambda made=made: try_versions() > made, "versions go on")
        check(f"SIGKILL of {unit}: it comes back, and versions go on")


def try_versions():
    try:
        return versions()
    except AssertionError:
        return -1


def watchdog():
    before = int(show(LEARNER, "NRestarts"))
    Path("/run/slow").touch()
    steps = [status()["learners"][0]["local_step"]]
    until(lambda: status()["learners"][0]["local_step"] >= steps[0] + 3, "slow steps are taken")
    assert int(show(LEARNER, "NRestarts")) == before
    Path("/run/slow").unlink()
    check("steps twice as slow as the watchdog's interval are no reason to start a learner again")

    Path("/run/hang").touch()
    until(lambda: "watchdog" in journal_of_systemd(LEARNER), "the watchdog ends it")
    Path("/run/hang").unlink()
    assert "hanging_task.py" in journal(LEARNER), "where it hung is not in the journal"
    made = versions()
    until(restarted(LEARNER, before), "it is started again")
    until(lambda: versions() > made, "versions go on")
    check("a training loop that hangs is ended, says where it was, and is started again")

    before = int(show(AGGREGATOR, "NRestarts"))
    os.kill(int(show(AGGREGATOR, "MainPID")), 19)
    until(restarted(AGGREGATOR, before), "it is started again")
    assert "watchdog" in journal_of_systemd(AGGREGATOR)
    made = versions()
    until(lambda: versions() > made, "versions go on")
    check("an aggregator whose event loop stands still is started again")


def journal_of_systemd(unit):
    return run("journalctl", "-q", "-o", "cat", f"UNIT={unit}", check=False).lower()


def timers():
    for timer in ("diloco-gc.timer", "diloco-checkpoint.timer"):
        run("systemctl", "enable", "--now", timer)
        assert show(timer, "NextElapseUSecRealtime")
    for service in ("diloco-checkpoint.service", "diloco-gc.service"):
        run("systemctl", "start", service)
        assert show(service, "Result") == "success"
    assert "checkpoint 0000-" in journal("diloco-checkpoint.service")
    check("timers are set, and what they start does its work")


def upgrade():
    made = versions()
    run(BIN, "install-units", "--programs", "/opt/diloco/bin")
    run("systemctl", "daemon-reload")
    for unit in (AGGREGATOR, LEARNER):
        run("systemctl", "restart", unit)
        assert active(unit)
    until(lambda: versions() > made, "versions go on")
    check("units written anew and daemons restarted one by one: the run goes on")


def stop():
    for unit, last in ((LEARNER, "left"), (AGGREGATOR, "stopped")):
        run("systemctl", "stop", unit)
        assert show(unit, "ActiveState") == "inactive", show(unit, "ActiveState")
        assert show(unit, "Result") == "success", show(unit, "Result")
        assert last in actions(unit)
        assert "left_silently" not in actions(unit)
    run("systemctl", "stop", "nats-server.service")
    assert show("nats-server.service", "Result") == "success"
    check("systemctl stop ends each of them cleanly and in time")


def main():
    try:
        for part in (install, prepare, start, reload, killed, watchdog, timers, upgrade, stop):
            part()
        print("all passed", flush=True)
    except BaseException as error:
        print(f"FAILED: {error!r}", flush=True)
        for unit in (
            AGGREGATOR,
            LEARNER,
            "nats-server.service",
            "create.service",
            "diloco-gc.service",
            "diloco-checkpoint.service",
        ):
            print(f"--- {unit}: {show(unit, 'StatusText')}")
            print("\n".join(journal(unit).splitlines()[-25:]))
            print("\n".join(journal_of_systemd(unit).splitlines()[-8:]))
        sys.exit(1)


main()
