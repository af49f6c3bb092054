"""The number of cores that this process may use."""

import os
from functools import cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@cache
def available() -> int:
    """Number of cores for the process: those it is bound to, or its control group's share."""
    return max(1, min(_bound(), _granted(CGROUP)))


def _bound() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _granted(cgroup: Path) -> int:
    """The quota of a control group as whole cores; no limit where it cannot be read.

    As a container sees it, at the root of what is mounted; a quota of more than n - 1 cores is n.
    """
    unlimited = 1 << 16
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return unlimited
    return unlimited if quota == "max" else -(-int(quota) // int(period))
