"""Rounds over everything that could break them, by the planner's simulation of the real machines.

    .venv/bin/python -m bench.rounds [--rounds 60] [--json FILE] [--against FILE]

Each cell: updates in a version, interval in steps of the fastest learner, mean staleness, and reads
for each merged update, once the first ten versions are made. `--against` shows the cells that a
file of another commit has beside them, and fails where this one is worse.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diloco.common.config import RunSettings, parse_settings
from diloco.plan import rounds as plan_rounds
from diloco.plan.outages import Trace, always
from diloco.plan.owner import Aggregator, Rounds
from diloco.plan.rounds import Worker

INTERVAL = 24
STEP_S = 0.25
# Versions that are made before anything is counted: averages settle, learners fall into phase.
SETTLE = 10
SLOWEST = 1.5
# Reads a step of the fastest learner. Five: 12 B in 24 fragments at 10 Gbit/s, scaled.
READS = {"fast": 200.0, "slow": 5.0}
# What a cell may be worse by: in one of 50 versions the last update may miss it.
MARGIN = 0.02


class Case(NamedTuple):
    """One cell's fleet and settings; `store_steps` that storing a delta takes."""

    learners: int
    least: int = 1
    min_steps: int = 6
    phases: str = "together"
    reads: str = "slow"
    speeds: str = "equal"
    store_steps: float = 0.08


class Cell(NamedTuple):
    """What came of a case."""

    merged: float
    interval: float
    staleness: float
    reads: float


def cases() -> list[Case]:
    """The table of the scale, then every combination for 16 learners."""
    scale = [Case(learners) for learners in (8, 16, 32, 64)] + [Case(8, store_steps=1.6)]
    choices = product(
        (1, 8, 16), (6, INTERVAL), ("together", "spread"), READS, ("equal", "unequal")
    )
    return [*scale, *(Case(16, *chosen) for chosen in choices)]


def settings_of(case: Case) -> RunSettings:
    """Of the run."""
    return parse_settings(
        {
            "run": {"name": "rounds", "steps": 1},
            "sync": {"interval_steps": INTERVAL, "min_steps": case.min_steps},
            "quorum": {"min_learners": case.least},
        }
    )


def workers_of(case: Case, horizon_s: float) -> list[Worker]:
    """The fleet; where phases are spread, learners begin one after another within H steps."""
    found = []
    for number in range(case.learners):
        share = number / case.learners
        slower = 1 + (SLOWEST - 1) * share if case.speeds == "unequal" else 1.0
        trace = always(horizon_s)
        if case.phases == "spread" and number:
            begins_s = share * INTERVAL * STEP_S
            trace = Trace(horizon_s, np.asarray([0.0, begins_s]), np.asarray([0.0, 1.0]), (), ())
        worker = Worker(
            step_s=STEP_S * slower, step_tokens=100, upload_s=0.1 * STEP_S,
            download_s=0.1 * STEP_S, trace=trace,
        )  # fmt: skip
        found.append(worker)
    return found


def simulated(case: Case, workers: list[Worker], horizon_s: float) -> Rounds:
    """The rounds of a case."""
    aggregator = Aggregator(
        read_s=STEP_S / READS[case.reads], make_s=0.02 * STEP_S,
        store_s=case.store_steps * STEP_S, message_s=0.005,
    )  # fmt: skip
    return plan_rounds.simulate(
        settings_of(case), workers, aggregator=aggregator, horizon_s=horizon_s,
        rng=np.random.default_rng(0),
    )  # fmt: skip


def cell(case: Case, rounds: int) -> Cell:
    """What comes of a case, after the first versions."""
    horizon_s = rounds * INTERVAL * STEP_S
    found = simulated(case, workers_of(case, horizon_s), horizon_s)
    merged = found.merged[SETTLE:]
    times_s = found.committed_s[SETTLE:]
    staleness = found.staleness[sum(found.merged[:SETTLE]) :]
    return Cell(
        float(np.mean(merged)),
        float(np.mean(np.diff(times_s))) / STEP_S,
        float(np.mean(staleness)),
        found.reads / len(found.staleness),
    )


def worse(before: Cell, after: Cell) -> bool:
    """Whether versions hold fewer updates, or come further from every H steps."""
    fewer = after.merged < before.merged * (1 - MARGIN)
    off = abs(after.interval - INTERVAL) > abs(before.interval - INTERVAL) + MARGIN * INTERVAL
    return fewer or off


def main() -> None:
    """Measure, print, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the cells to this file")
    parser.add_argument("--against", type=Path, help="cells of another commit")
    options = parser.parse_args()
    before = _read(options.against) if options.against else {}
    print("| " + " | ".join((*Case._fields, *Cell._fields, "before")) + " |")
    found: list[tuple[Case, Cell]] = []
    for case in cases():
        found.append((case, cell(case, options.rounds)))
        print(_row(*found[-1], before.get(case)), flush=True)
    if options.json:
        document: list[Any] = [[list(case), list(found_cell)] for case, found_cell in found]
        options.json.write_text(json.dumps(document))
    bad = [case for case, after in found if case in before and worse(before[case], after)]
    for case in bad:
        print(f"worse than before: {case}")
    sys.exit(1 if bad else 0)


def _read(path: Path) -> dict[Case, Cell]:
    return {Case(*case): Cell(*found) for case, found in json.loads(path.read_text())}


def _row(case: Case, after: Cell, before: Cell | None) -> str:
    cells = [str(field) for field in case] + _figures(after)
    cells.append(", ".join(_figures(before)) if before else "")
    return "| " + " | ".join(cells) + " |"


def _figures(found: Cell) -> list[str]:
    merged, interval, staleness, reads = found
    return [f"{merged:.2f}", f"{interval:.1f}", f"{staleness:.2f}", f"{reads:.2f}"]


if __name__ == "__main__":
    main()
