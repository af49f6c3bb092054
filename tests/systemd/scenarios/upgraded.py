#!/usr/bin/python3
"""A release after another, one unit at a time, and back; what an operator changed stays."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    AGGREGATOR,
    NATS,
    UNITS,
    A,
    B,
    active,
    check,
    follow_page,
    install_as_the_page_says,
    make_quick,
    restarted,
    restarts,
    run,
    scenario,
    show,
    until,
    versions,
    versions_go_on,
    write_run_file,
)

OLD, NEW = "/opt/diloco-0.1.0", "/opt/diloco-0.2.0"


def start():
    install_as_the_page_says()
    make_quick()
    write_run_file()
    follow_page("create")
    follow_page("start")
    until(lambda: versions() >= 3, "versions are made")


def release(unit):
    """The release that a unit's process runs from."""
    command = Path(f"/proc/{show(unit, 'MainPID')}/cmdline").read_bytes().split(b"\0")
    return command[0].decode().partition("/bin/")[0]


def one_unit_at_a_time():
    mine = UNITS / "diloco-aggregator.service.d" / "mine.conf"
    mine.write_text("[Service]\nNice=3\n")
    nats = show(NATS, "MainPID")
    follow_page("upgrade")
    assert release(AGGREGATOR) == NEW
    assert [release(unit) for unit in (A, B, NATS)] == [OLD, OLD, OLD]
    assert show(AGGREGATOR, "Nice") == "3"
    assert show(AGGREGATOR, "User") == "diloco"
    before = restarts(A)
    os.kill(int(show(A, "MainPID")), signal.SIGKILL)
    until(restarted(A, before), "it is started again")
    assert release(A) == OLD
    versions_go_on()
    check("the aggregator runs from the new release, all else from the old one, also after a kill")
    follow_page("upgrade-learners")
    assert [release(unit) for unit in (AGGREGATOR, A, B)] == [NEW, NEW, NEW]
    assert show(NATS, "MainPID") == nats
    versions_go_on()
    check("then the learners; NATS was not touched, and drop-ins are as they were")


def back():
    follow_page("back")
    assert release(AGGREGATOR) == OLD
    assert active(AGGREGATOR)
    versions_go_on()
    check("and back again")


def edited():
    unit = UNITS / "diloco-gc.service"
    text = unit.read_text() + "CPUQuota=50%\n"
    unit.write_text(text)
    told = run("bash", "-c", f"{NEW}/bin/diloco host units 2>&1; echo status $?")
    assert str(unit) in told, told
    assert "status 2" in told, told
    assert unit.read_text() == text
    assert OLD in (UNITS / "diloco-checkpoint.service").read_text()
    told = run(f"{NEW}/bin/diloco", "host", "units", "--overwrite")
    assert f"{unit} was edited" in told, told
    assert Path(f"{unit}.edited").read_text() == text
    assert "CPUQuota" not in unit.read_text()
    check("a unit that was edited by hand is named, and nothing is written without --overwrite")


scenario(start, one_unit_at_a_time, back, edited)
