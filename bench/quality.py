"""Held-out loss at equal steps per learner: alone, the whole system, data-parallel, synchronous.

    .venv/bin/python -m bench.quality [--steps 400] [--learners 4] [--preset 1m] [--seeds 0]
        [--set KEY=VALUE] [--speed 1,1,0.5,1] [--rows a,b,c,d,e]

    a  one learner alone
    b  the learners through the whole system: processes, NATS, store, int4 both ways
    c  data-parallel: the learners' batches in one, same optimizer and schedule
    d  synchronous DiLoCo: a plain loop in float32, outer Nesterov 0.7 / 0.9, same H
    e  the same as b in virtual time (`bench/emulate.py`)

All of a seed begin with the same parameters and draw the same batches. (b) must beat (a).
"""

import argparse
import json
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bench import emulate, loops, tasks
from bench.system import run_local
from diloco.common.config import RunSettings, make_config
from diloco.learner.task import Task

DILOCO = loops.Nesterov(0.7, 0.9)
LABELS = {
    "a": "alone",
    "b": "system, int4",
    "c": "data-parallel",
    "d": "synchronous DiLoCo",
    "e": "virtual time",
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared; `settings` are of `--set`, `speeds` shares of full speed."""

    steps: int
    preset: str
    settings: tuple[str, ...]
    speeds: tuple[float, ...]

    @property
    def learners(self) -> int:
        """How many train."""
        return len(self.speeds)

    def task(self, seed: int) -> Task:
        """The task of a seed."""
        return tasks.build(steps=self.steps, seed=seed, preset=self.preset, **self._options())

    def run_settings(self, seed: int) -> RunSettings:
        """Settings of a run, as `diloco local` would make them."""
        document: dict[str, Any] = {"store": {"url": "/nowhere"}}
        for key, value in self._assignments():
            section, _, name = key.partition(".")
            if section != "task":
                document.setdefault(section, {})[name] = value
        document["run"] = {"name": "bench", "steps": self.steps, "seed": seed}
        return make_config(document, source="the options").settings()

    def _assignments(self) -> list[tuple[str, Any]]:
        return [_assignment(text) for text in self.settings]

    def _options(self) -> dict[str, Any]:
        prefix = "task.options."
        return {k.removeprefix(prefix): v for k, v in self._assignments() if k.startswith(prefix)}


def _assignment(text: str) -> tuple[str, Any]:
    """ "section.key=value", the value as TOML or plain text, as `diloco local` reads it."""
    key, _, value = text.partition("=")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def alone(plan: Comparison, seed: int) -> float:
    """(a)."""
    return loops.data_parallel(plan.task(seed), steps=plan.steps, seed=seed, learners=1)


def data_parallel(plan: Comparison, seed: int) -> float:
    """(c)."""
    return loops.data_parallel(plan.task(seed), steps=plan.steps, seed=seed, learners=plan.learners)


def synchronous(plan: Comparison, seed: int) -> float:
    """(d)."""
    return loops.synchronous(
        plan.task(seed),
        steps=plan.steps,
        seed=seed,
        learners=plan.learners,
        interval=plan.run_settings(seed).sync.interval_steps,
        outer=DILOCO,
    )


def virtual(plan: Comparison, seed: int) -> float:
    """(e)."""
    settings = plan.run_settings(seed)
    start = emulate.begin(settings, plan.task(seed))
    outcome = emulate.emulate(settings, start, emulate.Weather(plan.speeds))
    print(f"  virtual time: {outcome}")
    return outcome.loss


def system(plan: Comparison, seed: int) -> float:
    """(b)."""
    settings = [f"run.seed={seed}", f'task.options.preset="{plan.preset}"', *plan.settings]
    with tempfile.TemporaryDirectory(prefix="bench-quality-") as folder:
        summary = run_local(
            Path(folder) / "run",
            learners=plan.learners,
            steps=plan.steps,
            settings=settings,
            speed=",".join(map(str, plan.speeds)),
        )
    tokens = plan.task(seed).tokens_per_batch
    print(f"  system: {summary['tokens'] / tokens / plan.learners:.0f} steps a learner, {summary}")
    return float(summary["eval_loss_last"])


ROWS: dict[str, Callable[[Comparison, int], float]] = {
    "a": alone,
    "b": system,
    "c": data_parallel,
    "d": synchronous,
    "e": virtual,
}


def show(losses: dict[str, list[float]], seeds: list[int]) -> None:
    """Print the table: losses, and their ratios to data-parallel and to one learner alone."""
    columns = "".join(f"{f'seed {seed}':>10}" for seed in seeds)
    print(f"{'':22}{columns}{'mean':>10}{'/ (c)':>9}{'/ (a)':>9}")
    for row, values in losses.items():
        cells = "".join(f"{value:10.4f}" for value in values)
        ratios = "".join(
            f"{mean(values) / mean(losses[base]):9.4f}" if base in losses else f"{'':9}"
            for base in ("c", "a")
        )
        print(f"{f'({row}) {LABELS[row]}':22}{cells}{mean(values):10.4f}{ratios}")
    if "a" in losses and "b" in losses:
        beats = mean(losses["b"]) < mean(losses["a"])
        print("(b) beats (a)" if beats else "(b) DOES NOT BEAT (a)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--preset", default="1m", help="of the built-in task, or tiny")
    parser.add_argument("--seeds", default="0", help="joined by commas")
    parser.add_argument("--speed", default=None, help="shares of full speed, joined by commas")
    parser.add_argument("--rows", default="a,b,c,d", help="which of a to e")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    speeds = [float(s) for s in options.speed.split(",")] if options.speed else None
    plan = Comparison(
        steps=options.steps,
        preset=options.preset,
        settings=tuple(options.settings),
        speeds=tuple(speeds or [1.0] * options.learners),
    )
    seeds = [int(seed) for seed in options.seeds.split(",")]
    losses: dict[str, list[float]] = {}
    for row in options.rows.split(","):
        losses[row] = [ROWS[row](plan, seed) for seed in seeds]
        print(f"({row}) {LABELS[row]}: {json.dumps(losses[row])}", flush=True)
    show(losses, seeds)


if __name__ == "__main__":
    main()
