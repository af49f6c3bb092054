"""Runs of the whole system for the benches, as an operator starts them: `diloco local --json`."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.local.fleet import Fleet


def run_local(
    run_dir: Path,
    *,
    learners: int,
    steps: int,
    settings: Sequence[str] = (),
    speed: str | None = None,
) -> dict[str, Any]:
    """The summary of a run over the benches' task, in which nobody is killed.

    Args:
        run_dir: an empty folder.
        learners: processes that train.
        steps: of the run's clock.
        settings: of `--set`, as "section.key=value".
        speed: of `--speed`.
    """
    command = [sys.executable, "-m", "diloco", "local", "--json", "--kill", "none"]
    command += ["--learners", str(learners), "--steps", str(steps), "--run-dir", str(run_dir)]
    command += ["--task", "bench.tasks:build"]
    if speed is not None:
        command += ["--speed", speed]
    for assignment in settings:
        command += ["--set", assignment]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def create(fleet: Fleet, config_path: Path) -> None:
    """`diloco run create`; ends this program if that fails."""
    creation = fleet.start("create", ["run", "create", "--config", str(config_path)])
    while (status := creation.status) is None:
        time.sleep(0.05)
    if status:
        sys.exit(f"`diloco run create` failed:\n{fleet.tail(creation)}")
    del fleet.daemons["create"]
