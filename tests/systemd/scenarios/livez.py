#!/usr/bin/python3
"""A cloud's machine answers health checks by itself, on the system's own Python."""

import os
import sys
import urllib.error
import urllib.request

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import UNITS, active, check, lay_out_boot, restarted, restarts, run, scenario, show, until

URL = "http://127.0.0.1:9463/livez"
LIVEZ = "diloco-livez.service"
START = f"""
from diloco.infra.boot import Boot
from diloco.infra.cloud import Google
from diloco.infra.install_release import run_command

Boot(Google(), run_command).start_units({LIVEZ!r})
"""


def answers():
    try:
        with urllib.request.urlopen(URL, timeout=5) as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


def installed():
    run("python3", "-c", START, cwd=lay_out_boot())
    assert run("bash", "-c", f"systemd-analyze verify --man=no {UNITS / LIVEZ} 2>&1") == ""
    until(answers, "it answers")
    check("a machine answers health checks before anything else is installed on it")


def killed():
    before = restarts(LIVEZ)
    os.kill(int(show(LIVEZ, "MainPID")), 9)
    until(restarted(LIVEZ, before), "it is started again")
    until(answers, "it answers again")
    run("python3", "-c", START, cwd=lay_out_boot())
    assert active(LIVEZ)
    assert run("systemctl", "is-enabled", LIVEZ).strip() == "enabled"
    check("it is started again when it ends, and with each boot")


scenario(installed, killed)
