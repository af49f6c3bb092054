"""Simulate many seeds: `python tests/sim/run_sim.py --seeds 1000 --minutes 2`; see `make sim`.

Ends with 1 after the first seed that breaks something, with its minimal trace.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from simrun import KINDS, Outcome, Trial, simulate_alone
from simshrink import commit, explain, shrink

REPORT_S = 10.0


def main() -> int:
    """The exit code."""
    arguments = _parse()
    plans = [
        Trial(
            seed=seed,
            minutes=arguments.minutes,
            learners=arguments.learners,
            fragments=arguments.fragments,
            kinds=tuple(arguments.kinds),
            intensity=arguments.intensity,
        )
        for seed in range(arguments.first, arguments.first + arguments.seeds)
    ]
    print(f"{len(plans)} seeds of {arguments.minutes:g} simulated minutes, commit {commit()}")
    outcomes, failed = _watch(_simulate_all(plans, arguments.jobs), len(plans))
    print(summary(outcomes))
    if failed is None:
        return 0
    print(explain(failed))
    print("\nshrinking ...", flush=True)
    print(explain(shrink(failed)))
    return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=2.0, help="simulated, of each seed")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS, help="of faults")
    parser.add_argument("--intensity", type=float, default=1.0, help="how often faults are")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return parser.parse_args()


def _simulate_all(plans: list[Trial], jobs: int) -> Iterator[Outcome]:
    if jobs == 1 or len(plans) == 1:
        yield from map(simulate_alone, plans)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(plans))) as pool:
        yield from pool.imap(simulate_alone, plans)


def _watch(outcomes: Iterable[Outcome], count: int) -> tuple[list[Outcome], Outcome | None]:
    """The outcomes up to the first failure, which comes by itself."""
    done: list[Outcome] = []
    reported_s = time.monotonic()
    for outcome in outcomes:
        if outcome.violation is not None:
            return done, outcome
        done.append(outcome)
        if time.monotonic() - reported_s > REPORT_S:
            reported_s = time.monotonic()
            print(f"  {len(done)} of {count}, up to seed {outcome.plan.seed}", flush=True)
    return done, None


def summary(outcomes: list[Outcome]) -> str:
    """What was simulated and survived."""
    fates: Counter[str] = Counter()
    injected: Counter[str] = Counter()
    for outcome in outcomes:
        fates.update(outcome.fates)
        injected.update(outcome.injected)
    simulated_s = sum(outcome.simulated_s for outcome in outcomes)
    cpu_s = sum(outcome.cpu_s for outcome in outcomes)
    events = sum(outcome.events for outcome in outcomes)
    kinds = "".join(f"\n  {kind:<18} {count:>10,}" for kind, count in injected.most_common())
    return (
        f"{len(outcomes)} seeds passed: {events:,} events in {simulated_s / 3600:.2f} simulated "
        f"hours, {cpu_s:.1f} s of CPU: {simulated_s / max(cpu_s, 1e-9):.0f} simulated seconds a "
        f"second\n"
        f"learner steps {fates['learner_steps']:,}, versions {fates['versions']:,}\n"
        f"updates sent {fates['sent']:,} = merged {fates['merged']:,} + rejected "
        f"{fates['rejected']:,} + in flight {fates['in_flight']:,} + lost with a server "
        f"{fates['abandoned']:,}\n"
        f"faults injected and survived, by kind:{kinds}"
    )


if __name__ == "__main__":
    sys.exit(main())
