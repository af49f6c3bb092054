"""The number of CPU cores that this process may use."""

import os
from functools import cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@cache
def available() -> int:
    """Returns the number of cores that this process is bound to, or its control group's share."""
    return max(1, min(_bound(), _granted(CGROUP)))


def _bound() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _granted(cgroup: Path) -> int:
    """Returns a control group's quota in cores, rounded up; a very large number if it has none.

    The quota's file is read at the root of the mounted hierarchy, where a container sees it.
    """
    unlimited = 1 << 16
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return unlimited
    return unlimited if quota == "max" else -(-int(quota) // int(period))
