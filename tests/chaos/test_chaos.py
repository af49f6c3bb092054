"""A short run under faults from a fresh seed, in the default suite; `make chaos` for longer ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from chaos import AGGREGATORS, LEARNERS
from harness import all_gone, eventually
from schedule import KINDS, make_schedule

CHAOS = Path(__file__).parent / "chaos.py"
# With beginning, calm, recovery and audit it takes well under 90 s.
SECONDS = 25.0


@pytest.mark.long
def test_everything_survives_and_is_accounted_for() -> None:
    done = subprocess.run(
        [sys.executable, str(CHAOS), "--seconds", str(SECONDS)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    account = result["account"]
    assert account["sent"] == account["merged"] + account["rejected"] > 0
    assert account["in_flight"] == 0
    seen = {row["kind"].partition(" of ")[0] for row in result["recoveries"]}
    # The disk is filled only where a mount namespace may be made.
    assert seen | {"full disk"} == {*KINDS}


@pytest.mark.parametrize("disk", [True, False])
def test_a_schedule_follows_from_its_seed_and_has_every_kind(disk: bool) -> None:
    for seed in range(300):
        faults = make_schedule(seed, SECONDS, LEARNERS, AGGREGATORS, disk=disk)
        assert faults == make_schedule(seed, SECONDS, LEARNERS, AGGREGATORS, disk=disk)
        assert faults == sorted(faults)
        assert {fault.kind for fault in faults} == {*KINDS} - (set() if disk else {"full disk"})
        ends: dict[str, float] = {}
        for fault in faults:
            assert fault.at_s >= ends.get(fault.victim, 0.0)
            ends[fault.victim] = fault.at_s + fault.lasts_s
            assert ends[fault.victim] <= SECONDS


def test_no_process_is_left_behind_when_it_is_killed(tmp_path: Path) -> None:
    """However it ends: its own folder stands in the command line of all it starts."""
    process = subprocess.Popen(
        [sys.executable, str(CHAOS), "--folder", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ,
    )  # fmt: skip
    try:
        eventually(lambda: (tmp_path / "run" / "notes" / "learner-0").exists(), "training")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= len(LEARNERS) + len(AGGREGATORS) + 1
    finally:
        process.kill()
        process.wait()
    eventually(lambda: all_gone(children), f"all gone: {children}")
