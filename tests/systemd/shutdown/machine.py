#!/usr/bin/python3
"""One boot of a machine that is powered off again: what the last shutdown lost, then the next."""

import sys
import time
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    AGGREGATOR,
    NATS,
    A,
    B,
    actions,
    active,
    events,
    follow_page,
    install_as_the_page_says,
    journal,
    run,
    scenario,
    try_versions,
    until,
    versions_go_on,
    write_run_file,
)

LAST = Path("/var/lib/last-boot")


def boot():
    if not LAST.exists():
        Path("/var/log/journal").mkdir(parents=True, exist_ok=True)
        run("journalctl", "--flush")
        install_as_the_page_says()
        write_run_file()
        follow_page("create")
        follow_page("start")
    else:
        look_back(LAST.read_text())
    for unit in (NATS, AGGREGATOR, A, B):
        until(lambda unit=unit: active(unit), f"{unit} is started by the boot", 240)
    until(lambda: try_versions() > 0, "versions are there")
    versions_go_on()
    LAST.write_text(Path("/proc/sys/kernel/random/boot_id").read_text())


def look_back(boot_id):
    """Checks the journal of the last shutdown: learners left, with nothing unsent."""
    of_boot = ("-b", boot_id.strip().replace("-", ""))
    for unit in (A, B):
        said = actions(unit, *of_boot)
        assert "left" in said, journal(unit, *of_boot)[-2000:]
        unsent = [event for event in events(unit, *of_boot) if event["action"] == "left_unsent"]
        print(f"{unit}: left_unsent {sum(event['steps'] for event in unsent)}", flush=True)
        assert not unsent, unsent
        assert "left_silently" not in said
    assert "stopped" in actions(AGGREGATOR, *of_boot)


def power_off():
    """In order, as `poweroff` does it; what runs this would cut it short at its own end."""
    folder = Path("/run/systemd/system/driver.service.d")
    folder.mkdir(parents=True)
    (folder / "in-order.conf").write_text("[Service]\nExecStopPost=\n")
    run("systemctl", "daemon-reload")


scenario(boot, power_off)
run("systemctl", "poweroff")
time.sleep(600)
