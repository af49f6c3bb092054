"""How many files an update passes through, from a learner's leaf to the parameters that adopt it.

A reader follows this path to understand the system, so its length is held. It is traced on a real
learner and a real aggregator while they exchange updates and versions: all that runs beside the
path in that time (heartbeats, health, leases) is counted too.
"""

import os
import signal
from pathlib import Path

from audit import read_tape
from harness import ROOT, Process, World

BY_CLOCK_OR_FAULT = {
    "aggregator/compare_and_swap.py",
    "aggregator/core/ownership_division.py",
    "aggregator/core/garbage.py",
    "aggregator/leases.py",
    "aggregator/owner/garbage_collector.py",
    "aggregator/owner/liveness.py",
    "common/process/health.py",
    "common/process/retry.py",
    "common/protocol/errors.py",
    "common/storage/data_share_allocation.py",
    "learner/wire/incarnation.py",
}

# Seen in each of several runs.
MOST_FILES = 55


def files_of(world: World, process: Process) -> set[str]:
    """Files of the project whose functions the process has called since SIGUSR1."""
    path = world.folder / f"traced-{process.pid}.txt"
    process.signal(signal.SIGUSR2)
    world.until(path.exists, "the trace is written")
    found = (os.path.realpath(line) for line in path.read_text().splitlines())
    inside = {Path(name).relative_to(ROOT) for name in found if name.startswith(f"{ROOT}/")}
    return {str(path) for path in inside if path.parts[0] in ("aggregator", "common", "learner")}


def test_an_update_and_its_version_pass_through_few_files(new_world):
    world = new_world(run={"steps": 100_000})
    traced = [
        world.aggregator(program=("traced",)),
        world.learner("a", program=("traced",)),
    ]

    def merged(more: int) -> None:
        there = len(read_tape(world).merged())
        world.until(lambda: len(read_tape(world).merged()) >= there + more, "updates are merged")

    merged(6)
    for process in traced:
        process.signal(signal.SIGUSR1)
    merged(4)
    owner, learner = (files_of(world, process) for process in traced)
    world.stop()
    path = (owner | learner) - BY_CLOCK_OR_FAULT
    assert len(path) <= MOST_FILES, sorted(path)
