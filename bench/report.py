"""Time and memory of `diloco report` on the tape of a long run.

    .venv/bin/python -m bench.report [--versions 100000] [--learners 4] [--keep DIR]

The tape is made up, on a real nats-server: the demo's layout, an update of every learner in each
round, now and then a rejected one and a learner that is killed. The report is made by the command
itself, in a process of its own, whose time and peak memory are shown. Evaluation is left out: it
takes what the task takes.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w

from bench.forger import Forger
from diloco.cli.opening import open_run
from diloco.common.config import load_config
from diloco.common.nats_server import NatsServer
from diloco.operate.create import create

RUN = "bench"
GOAL_S, GOAL_GB = 60.0, 2.0


async def make_tape(run_dir: Path, versions: int, learners: int) -> None:
    async with open_run(run_dir) as run:
        await Forger(run.context, [f"learner-{i}" for i in range(learners)]).forge(versions)


def prepare(run_dir: Path, url: str) -> None:
    document = {
        "run": {"name": RUN, "steps": 1 << 30},
        "bus": {"url": url},
        "store": {"url": str(run_dir / "store")},
    }
    path = run_dir / "run.toml"
    path.write_text(tomli_w.dumps(document))
    create(load_config(path), None)


def measure(run_dir: Path, out: Path) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak gigabytes of the command."""
    command = [sys.executable, "-m", "diloco", "report", str(run_dir), "--evaluations", "0"]
    began_s = time.perf_counter()
    process = subprocess.Popen([*command, "--out", str(out)])
    _, status, usage = os.wait4(process.pid, 0)
    took_s = time.perf_counter() - began_s
    assert status == 0, f"diloco report ended with status {status}"
    # Linux counts in units of 1,024 bytes, macOS in bytes.
    peak_gb = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    return took_s, usage.ru_utime + usage.ru_stime, peak_gb


def main() -> None:
    parser = argparse.ArgumentParser(description="time and memory of diloco report")
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="folder that keeps the report")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        # Nobody cuts the power of a made-up tape.
        with NatsServer(run_dir / "nats", sync_interval="2m") as server:
            prepare(run_dir, server.url)
            began_s = time.perf_counter()
            asyncio.run(make_tape(run_dir, options.versions, options.learners))
            made_s = time.perf_counter() - began_s
            messages = options.versions * (options.learners + 1)
            print(f"tape of {options.versions:,} versions, {messages:,} messages: {made_s:.0f} s")
            took_s, used_s, peak_gb = measure(run_dir, options.keep or run_dir / "out")
    print(
        f"report: {took_s:.1f} s (goal {GOAL_S:.0f}), {used_s:.1f} s of processor time, "
        f"peak {peak_gb:.2f} GB (goal {GOAL_GB:g})"
    )


if __name__ == "__main__":
    main()
