#!/usr/bin/python3
"""The machine of a run's keeper, on the system's own Python: it looks, and its logs leave it."""

import sys
import time
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")
sys.path.insert(0, "/opt/src/tests/systemd/released")

from cloud import Cloud
from rig import UNITS, active, check, run, scenario, until

KEEPER, LOGS = "diloco-keeper.service", "diloco-logs.service"
SAYS = '[Service]\nType=oneshot\nExecStart=/bin/echo {"action": "%s", "step": 3}\n'
cloud = Cloud(Path("/srv"))


def booted():
    status, said = cloud.boot(
        role="keeper", name="keeper", bucket="", kind="cpu", release={}, files={}, secrets={},
        environment={}, units=[], groups=[],
    )  # fmt: skip
    assert status == 0, said
    files = " ".join(str(UNITS / unit) for unit in (KEEPER, LOGS))
    assert run("bash", "-c", f"systemd-analyze verify --man=no {files} 2>&1") == ""
    until(lambda: active(KEEPER) and active(LOGS), "both run")
    until(Path("/var/lib/diloco-keeper/groups.json").exists, "it has looked at the groups")
    check("the keeper looks at the groups that it is told")


def says(action):
    (UNITS / "diloco-says.service").write_text(SAYS.replace("%s", action).replace('"', '\\"'))
    run("systemctl", "daemon-reload")
    run("systemctl", "start", "diloco-says")


def logged():
    says("one")
    until(lambda: "one" in cloud.actions(), "a line leaves the machine")
    check("what a unit says leaves the machine, with its fields")
    run("systemctl", "stop", LOGS)
    says("two")
    run("systemctl", "start", LOGS)
    until(lambda: "two" in cloud.actions(), "a line of meanwhile leaves it")
    time.sleep(2)
    ones = [one for one in cloud.server.logged if one.get("jsonPayload", {}).get("action") == "one"]
    assert len({entry["insertId"] for entry in ones}) == 1
    check("it goes on where it was")


scenario(booted, logged)
