"""Simulate many seeds: `python tests/sim/run_sim.py --seeds 1000`; see `make sim`.

Ends with 1 after the first seed that breaks something, with its minimal trace.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from simpieces import NOTHING, Results, Sums, pieces, sums
from simrun import simulate_alone
from simshrink import commit, explain, shrink
from simtrial import FULL, KINDS, Outcome, Trial

REPORT_S = 10.0
Simulate = Callable[[Iterable[Trial]], Iterator[Outcome]]


def main() -> int:
    """Run the program; returns the exit status."""
    try:
        return simulate_all(_parse())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def simulate_all(arguments: argparse.Namespace) -> int:
    """Simulate all seeds; returns the exit status.

    Raises:
        ValueError: options that cannot be simulated, or an invalid file of results.
    """
    plans = [
        Trial(
            seed=seed,
            minutes=arguments.minutes,
            learners=arguments.learners,
            fragments=arguments.fragments,
            kinds=tuple(arguments.kinds) or (FULL if arguments.full else KINDS),
            intensity=arguments.intensity,
        )
        for seed in range(arguments.first, arguments.first + arguments.seeds)
    ]
    print(f"{len(plans)} seeds of {arguments.minutes:g} simulated minutes, commit {commit()}")
    total, failed = _run(plans, arguments)
    print(summary(total))
    if failed is None:
        return 0
    print(explain(failed))
    print("\nshrinking ...", flush=True)
    print(explain(shrink(failed)))
    return 1


def _run(plans: Sequence[Trial], arguments: argparse.Namespace) -> tuple[Sums, Outcome | None]:
    """Returns the sums over the seeds that passed, and the first failure."""
    results = Results(arguments.results, commit()) if arguments.results else None
    total, begun_s = NOTHING, time.monotonic()
    with ExitStack() as stack:
        simulate = _simulator(stack, min(arguments.jobs, len(plans)))
        for piece in pieces(plans):
            found = results.find(piece) if results else None
            if found is None:
                if arguments.seconds and time.monotonic() - begun_s > arguments.seconds:
                    break
                done, failed = _watch(simulate(piece), total.seeds, len(plans))
                found = sums(done)
                if failed is not None:
                    return total.plus(found), failed
                if results:
                    results.add(piece, found)
            total = total.plus(found)
    return total, None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=2.0, help="simulated, of each seed")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="full worlds, not light ones")
    parser.add_argument("--kinds", nargs="*", default=(), choices=FULL, help="of faults, only")
    parser.add_argument(
        "--results",
        type=Path,
        help="add a line of JSON to this file; seeds that it has for this commit are left out",
    )
    parser.add_argument("--seconds", type=float, help="begin no seed after so long")
    parser.add_argument("--intensity", type=float, default=1.0, help="how often faults are")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return parser.parse_args()


def _simulator(stack: ExitStack, jobs: int) -> Simulate:
    if jobs == 1:
        return lambda plans: map(simulate_alone, plans)
    pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs))
    return lambda plans: pool.imap(simulate_alone, plans)


def _watch(
    outcomes: Iterable[Outcome], before: int, count: int
) -> tuple[list[Outcome], Outcome | None]:
    """Reports progress; returns the outcomes before the first failure, and the failure."""
    done: list[Outcome] = []
    reported_s = time.monotonic()
    for outcome in outcomes:
        if outcome.violation is not None:
            return done, outcome
        done.append(outcome)
        if time.monotonic() - reported_s > REPORT_S:
            reported_s = time.monotonic()
            print(f"  {before + len(done)} of {count}, up to seed {outcome.plan.seed}", flush=True)
    return done, None


def summary(total: Sums) -> str:
    """Returns a summary of the simulated run and of the faults that it survived."""
    fates, cpu_s, simulated_s = total.fates, max(total.cpu_s, 1e-9), total.simulated_s
    kinds = "".join(f"\n  {kind:<18} {count:>10,}" for kind, count in total.injected.most_common())
    return (
        f"{total.seeds} seeds passed: {total.events:,} events in {simulated_s / 3600:.2f} "
        f"simulated hours, {cpu_s:.1f} s of CPU: {simulated_s / cpu_s:.0f} simulated seconds a "
        f"second, {cpu_s / max(total.seeds, 1):.3f} s a seed\n"
        f"learner steps {fates['learner_steps']:,}, versions {fates['versions']:,}\n"
        f"updates sent {fates['sent']:,} = merged {fates['merged']:,} + rejected "
        f"{fates['rejected']:,} + in flight {fates['in_flight']:,} + lost with a server "
        f"{fates['abandoned']:,}\n"
        f"steps let go by an overwrite or a blend {fates['let_go']:,}\n"
        f"faults injected and survived, by kind:{kinds}"
    )


if __name__ == "__main__":
    sys.exit(main())
