#!/usr/bin/python3
"""A run that ends: its daemons stay ended, its timers stop, and nothing more is trained."""

import sys

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    AGGREGATOR,
    CHECKPOINT,
    GC,
    A,
    B,
    actions,
    active,
    check,
    events,
    follow_page,
    install_as_the_page_says,
    run,
    scenario,
    show,
    status_text,
    until,
    write_run_file,
)


def to_the_end():
    install_as_the_page_says()
    write_run_file(**{"steps = 1000000": "steps = 40"})
    follow_page("create")
    follow_page("start")
    for unit in (A, B, AGGREGATOR):
        until(lambda unit=unit: show(unit, "ActiveState") == "inactive", f"{unit} ends")
        assert show(unit, "Result") == "success", unit
        assert show(unit, "NRestarts") == "0"
    for unit in (A, B):
        assert status_text(unit) == "left: run ended", status_text(unit)
    assert "left_unsent" not in actions(A) | actions(B)
    check("the end of the run ends its daemons, with status 0 and for good")


def again():
    before = len([event for event in events(A) if event["action"] == "started"])
    run("systemctl", "start", A)
    until(lambda: show(A, "ActiveState") == "inactive", "it ends")
    assert show(A, "Result") == "success"
    assert status_text(A) == "left: run ended", status_text(A)
    assert len([event for event in events(A) if event["action"] == "started"]) == before
    check("a learner that is started after the end trains nothing, and has not failed")


def timers():
    for timer in ("diloco-checkpoint.timer", "diloco-gc.timer"):
        assert active(timer)
    for service in (CHECKPOINT, GC):
        run("systemctl", "start", service)
        assert show(service, "Result") == "success"
    for timer in ("diloco-checkpoint.timer", "diloco-gc.timer"):
        until(lambda timer=timer: not active(timer), f"{timer} stops")
    check("the timers' last work of an ended run stops them")


scenario(to_the_end, again, timers)
