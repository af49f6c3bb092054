#!/usr/bin/python3
"""A cloud's machine answers health checks by itself, on the system's own Python."""

import os
import sys
import urllib.error
import urllib.request

sys.path.insert(0, "/opt/src/tests/systemd")
sys.path.insert(0, "/opt/src/infra")

import boot
from rig import UNITS, active, check, restarted, restarts, run, scenario, show, until

URL = f"http://127.0.0.1:{boot.LIVEZ_PORT}/livez"


def answers():
    try:
        with urllib.request.urlopen(URL, timeout=5) as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


def installed():
    boot.Boot(boot.Google(), lambda command: run(*command)).answer_health_checks()
    assert run("bash", "-c", f"systemd-analyze verify --man=no {UNITS / boot.LIVEZ} 2>&1") == ""
    until(answers, "it answers")
    check("a machine answers health checks before anything else is installed on it")


def killed():
    before = restarts(boot.LIVEZ)
    os.kill(int(show(boot.LIVEZ, "MainPID")), 9)
    until(restarted(boot.LIVEZ, before), "it is started again")
    until(answers, "it answers again")
    boot.Boot(boot.Google(), lambda command: run(*command)).answer_health_checks()
    assert active(boot.LIVEZ)
    assert run("systemctl", "is-enabled", boot.LIVEZ).strip() == "enabled"
    check("it is started again when it ends, and with each boot")


scenario(installed, killed)
