#!/usr/bin/python3
"""A slice of sixteen hosts loses its machines and their disks at once, and trains on from the store.

Each host is a unit with an environment, credentials and disk of its own, as on its own machine.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    AGGREGATOR,
    active,
    check,
    diloco,
    drop_in,
    events,
    install_as_the_page_says,
    run,
    scenario,
    status,
    until,
    versions,
    write_run_file,
)

HOSTS = 16
UNITS = [f"diloco-learner@host-{host}.service" for host in range(HOSTS)]
LEARNER = "island-a"
ETC = Path("/etc/diloco")
# Sixteen processes share the cores of one machine.
WITHIN_S = 600
ONE_LEARNER = f"""[Service]
ExecStart=
ExecStart=/opt/diloco/bin/diloco learner --config {ETC}/run.toml --learner {LEARNER}
"""


def start():
    install_as_the_page_says()
    with Path("/etc/hosts").open("a") as hosts:
        hosts.write(f"127.0.0.1 {run('hostname').strip()}\n")
    write_run_file(**{
        'build = "hanging_task:build"': f'build = "hanging_task:build"\noptions = {{ rows = {HOSTS} }}',
        "watchdog_timeout_s = 20.0": "watchdog_timeout_s = 300.0",
        "liveness_timeout_s = 4.0": "liveness_timeout_s = 60.0",
        "lease_ttl_s = 3.0": "lease_ttl_s = 10.0",
    })  # fmt: skip
    for host in range(HOSTS):
        shutil.copy(ETC / f"credentials/{LEARNER}.toml", ETC / f"credentials/host-{host}.toml")
        own = {
            "HOST": host,
            "HOSTS": HOSTS,
            "COORDINATOR": "127.0.0.1:8476",
            "CHECKPOINT_UPLOAD": "true",
        }
        (ETC / f"learner-host-{host}.env").write_text(
            "".join(f"DILOCO_LEARNER_{key}={value}\n" for key, value in own.items())
        )
    drop_in("diloco-learner@.service", ONE_LEARNER)
    run("systemctl", "daemon-reload")
    diloco("run", "create", "--config", f"{ETC}/run.toml")
    run("systemctl", "enable", "--now", AGGREGATOR)
    run("systemctl", "enable", "--now", "--no-block", *UNITS)
    until(lambda: all(active(unit) for unit in UNITS), "all hosts train", WITHIN_S)
    until(lambda: versions() >= 6, "versions are made", WITHIN_S)
    (learner,) = status()["learners"]
    assert learner["state"] == "training", learner
    check("a learner of sixteen hosts makes versions")


def stored(unit):
    return [event for event in events(unit) if event["action"] == "checkpoint_uploaded"]


def its_machines_are_gone():
    until(lambda: all(stored(unit)[1:] for unit in UNITS), "each host has stored two", WITHIN_S)
    # All at once: a host that is left would end by itself.
    run("systemctl", "kill", "--signal=SIGSTOP", *UNITS)
    run("systemctl", "kill", "--signal=SIGKILL", *UNITS)
    for host in range(HOSTS):
        for disk in ("/var/lib", "/var/cache"):
            run("find", f"{disk}/diloco-learner-host-{host}/", "-mindepth", "1", "-delete")
    check("all hosts are killed, and their disks are gone")


def restored(unit):
    return [event for event in events(unit) if event["action"] == "checkpoint_restored"]


def it_trains_again():
    """No command from here on: systemd starts what was killed, and the hosts find each other."""
    before = versions()
    until(lambda: all(restored(unit) for unit in UNITS), "each host goes on", WITHIN_S)
    found = [restored(unit)[0] for unit in UNITS]
    assert {one["where"] for one in found} == {"store"}, found
    (step,) = {one["local_step"] for one in found}
    assert step > 0
    until(lambda: versions() > before + 3, "versions go on", WITHIN_S)
    print(f"   all hosts went on from step {step:,}", flush=True)
    check("it trains again with its optimizer, of one and the same step on all hosts")


scenario(start, its_machines_are_gone, it_trains_again)
