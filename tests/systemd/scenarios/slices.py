#!/usr/bin/python3
"""A learner of two slices under units: systemd starts a lost host again, and the learner takes it back."""

import os
import shutil
import socket
import sys
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    AGGREGATOR,
    UNITS,
    A,
    begin,
    check,
    follow_page,
    install_as_the_page_says,
    make_quick,
    restarted,
    restarts,
    run,
    scenario,
    show,
    status,
    status_text,
    until,
    versions_go_on,
    write_run_file,
)

# A machine has one host of a learner: here the other one has a unit, a state and a cache of its own.
SECOND = "diloco-second@island-a.service"
GIVEN = """
DILOCO_LEARNER_SLICES=2
DILOCO_LEARNER_PEERS=127.0.0.1:8470,127.0.0.1:8471
DILOCO_LEARNER_SNAPSHOT_STEPS=2
"""


def present():
    """Returns how many slices the run sees."""
    (learner,) = [one for one in status()["learners"] if one["name"] == "island-a"]
    return learner["slices"]["present"]


def until_both_train(what):
    until(lambda: status_text(A).startswith("2 of 2 slices: training"), what, within_s=240)
    until(lambda: present() == 2, f"{what}, for who looks")
    versions_go_on()


def together():
    install_as_the_page_says()
    # Processes on CPUs call each other by the machine's name.
    with Path("/etc/hosts").open("a") as hosts:
        hosts.write(f"127.0.0.1 {socket.gethostname()}\n")
    write_run_file()
    follow_page("create")
    unit = (UNITS / "diloco-learner@.service").read_text()
    second = unit.replace("diloco-learner-%i", "diloco-second-%i").replace(
        "learner-%i.env", "second-%i.env"
    )
    (UNITS / "diloco-second@.service").write_text(second)
    for host, name in enumerate(("learner", "second")):
        own = f"DILOCO_LEARNER_HOST={host}\nDILOCO_METRICS_PORT={9470 + host}\n"
        Path(f"/etc/diloco/{name}-island-a.env").write_text(GIVEN + own)
    make_quick()
    shutil.copytree(UNITS / "diloco-learner@.service.d", UNITS / "diloco-second@.service.d")
    run("systemctl", "daemon-reload")
    for unit in (AGGREGATOR, A, SECOND):
        begin(unit)
    until_both_train("two slices train")
    check("a learner of two slices trains under its units")


def lost():
    before, others = restarts(SECOND), restarts(A)
    os.kill(int(show(SECOND, "MainPID")), 9)
    until(restarted(SECOND, before), "systemd starts the lost host again")
    until_both_train("the learner takes it back")
    assert restarts(A) == others
    check("a host that is killed is started again and taken back; the other's unit goes on")


def stopped():
    others = restarts(A)
    run("systemctl", "stop", SECOND)
    assert show(SECOND, "Result") == "success"
    until(
        lambda: status_text(A).startswith("1 of 2 slices: training"),
        "one slice trains",
        within_s=240,
    )
    versions_go_on()
    run("systemctl", "start", SECOND)
    until_both_train("it is back")
    assert restarts(A) == others
    check("a host that is stopped and started again leaves and comes back")


scenario(together, lost, stopped, units=(SECOND,))
