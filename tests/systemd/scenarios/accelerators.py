#!/usr/bin/python3
"""A learner's made-up user opens a chip that belongs to the group, and to no other without it."""

import os
import stat
import sys
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    UNITS,
    A,
    check,
    drop_in,
    install_as_the_page_says,
    journal,
    lay_out_boot,
    run,
    scenario,
    show,
)

CHIP = Path("/dev/vfio/7")
LAY_OUT = """
from diloco.infra.google_units import ACCELERATORS
from diloco.infra.install_release import write
from pathlib import Path

for path, text in ACCELERATORS.items():
    write(Path("/") / path, text.encode(), 0o644)
"""
# In place of the learner, as its user and with its rights.
PROBE = f"""[Service]
Type=oneshot
Restart=no
ExecStart=
ExecStart=/bin/sh -c 'exec 3<>{CHIP} && echo opened; id'
"""


def a_chip():
    install_as_the_page_says()
    run("python3", "-c", LAY_OUT, cwd=lay_out_boot())
    run("systemd-sysusers")
    CHIP.parent.mkdir()
    # No chip, but a device that DevicePolicy=closed lets in, and that the kernel gives to root.
    os.mknod(CHIP, 0o660 | stat.S_IFCHR, os.makedev(1, 3))
    run("chgrp", "diloco-accelerators", str(CHIP))
    CHIP.chmod(0o660)
    drop_in("diloco-learner@.service", PROBE)
    run("systemctl", "daemon-reload")


def with_the_group():
    run("systemctl", "start", A)
    assert "opened" in journal(A), journal(A)
    check("with the group the made-up user opens it")


def without_it():
    (UNITS / "diloco-learner@.service.d/30-accelerators.conf").unlink()
    run("systemctl", "daemon-reload")
    run("systemctl", "start", A, check=False)
    assert show(A, "Result") == "exit-code"
    assert "Permission denied" in journal(A), journal(A)
    check("without it the kernel refuses")


scenario(a_chip, with_the_group, without_it)
