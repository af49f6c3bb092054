"""Code that the benches share: memory bandwidth, tables, runs as an operator starts them.

Every ratio of the array benchmarks is to the bandwidth that is measured in the same run, between
the repeats of what it is compared with, as the machines are shared and their speed changes.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from diloco.operate.local.fleet import LocalDaemons


@partial(jax.jit, donate_argnums=0)
def _increment(values_N: jax.Array) -> jax.Array:
    return values_N + 1


class Stream:
    """A vector of float32 values, as long as the one it is compared with."""

    def __init__(self, size: int) -> None:
        self._values_N = _increment(jnp.zeros(size))
        self._bytes = 8 * size

    def bytes_per_s(self) -> float:
        """Bytes read and written in a second, by the faster of two passes."""
        return self._bytes / min(seconds(self._pass) for _ in range(2))

    def _pass(self) -> None:
        self._values_N = _increment(self._values_N)
        self._values_N.block_until_ready()


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call, with whatever JAX arrays it returns."""
    began_s = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began_s


def table(rows: list[list[str]]) -> str:
    """Rows in columns; the first row is the heading, the first column is words."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def median(values: list[float]) -> float:
    """Median of repeats."""
    return statistics.median(values)


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


def create(fleet: LocalDaemons, config_path: Path) -> None:
    """`diloco run create`; ends this program if that fails."""
    creation = fleet.start("create", ["run", "create", "--config", str(config_path)])
    while (status := creation.status) is None:
        time.sleep(0.05)
    if status:
        sys.exit(f"`diloco run create` failed:\n{fleet.tail(creation)}")
    del fleet.daemons["create"]


def run_part(parts: dict[str, Callable[[], None]]) -> None:
    """Run the part that the command line's first word names; without one, the first part."""
    named = len(sys.argv) > 1 and sys.argv[1] in parts
    parts[sys.argv.pop(1) if named else next(iter(parts))]()
