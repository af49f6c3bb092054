"""What it costs where nobody lies that an update alone in its round takes only its share of a step.

    .venv/bin/python -m bench.lone [--task student] [--budget 360] [--seeds 0,1,2] [--fleets kills]

Runs of `bench/cases.py` in virtual time, under the rule and without it: held-out loss with the rule
over that without, in %, mean and standard error over the seeds; and the part of all rounds that
hold one update.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean, stdev
from typing import get_args
from unittest import mock

from bench import sweep
from bench.cases import Case, Fleet, Kind
from diloco.aggregator.core import rounds
from diloco.aggregator.core.state import State


class Rounds:
    """Stands in for the rule, and counts the rounds that it is asked about."""

    def __init__(self, *, shares: bool) -> None:
        self._shares = shares
        self.held: list[int] = []

    def step_share(self, state: State, *, participation: bool) -> float:
        """As `rounds.step_share`; without the rule, a whole step for whoever is alone."""
        self.held.append(len(state.admitted.senders))
        return rounds.share(state) if participation or (self._shares and self.alone) else 1.0

    @property
    def alone(self) -> bool:
        """Whether the newest round holds one update."""
        return self.held[-1] == 1


@contextmanager
def _ruled(*, shares: bool) -> Iterator[Rounds]:
    ruled = Rounds(shares=shares)
    with mock.patch.object(rounds, "step_share", ruled.step_share):
        yield ruled


def compare(case: Case) -> tuple[float, float]:
    """Loss with the rule over that without, less 1; and the part of rounds that hold one update."""
    with _ruled(shares=True) as ruled:
        loss = sweep.run(case)["loss"]
    with _ruled(shares=False):
        before = sweep.run(case)["loss"]
    return loss / before - 1, fmean(held == 1 for held in ruled.held)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.lone", description=__doc__)
    parser.add_argument("--task", default="student", choices=get_args(Kind))
    parser.add_argument("--budget", type=int, default=360, help="inner steps of a learner")
    parser.add_argument("--seeds", default="0,1,2,3,4,5", help="joined by commas")
    parser.add_argument("--fleets", default=",".join(get_args(Fleet)[:3]), help="likewise")
    options = parser.parse_args()
    print("| fleet | seeds | loss, % of that without the rule | rounds of one update, % |")
    print("|---|---|---|---|")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    for fleet in options.fleets.split(","):
        found = [
            compare(
                Case(
                    group="lone", name=fleet, budget=options.budget, seed=seed, fleet=fleet,
                    task=options.task,
                )
            )
            for seed in seeds
        ]  # fmt: skip
        losses, lone = ([100 * value for value in column] for column in zip(*found, strict=True))
        error = stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
        print(
            f"| {fleet} | {len(seeds)} | {fmean(losses):+.2f} ± {error:.2f} | {fmean(lone):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
