"""The number of CPU cores that this process may use."""

import os
from functools import cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@cache
def available() -> int:
    """Returns the cores of this process's CPU affinity, or its control group's quota if lower."""
    return max(1, min(_bound(), _granted(CGROUP)))


def _bound() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _granted(cgroup: Path) -> int:
    """Returns a control group's CPU quota in cores, rounded up; 65536 if it has no quota.

    The quota is read from the file `cpu.max` in the folder `cgroup`. In a container, the root of
    the mounted hierarchy shows the container's own control group.
    """
    unlimited = 1 << 16
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return unlimited
    return unlimited if quota == "max" else -(-int(quota) // int(period))
