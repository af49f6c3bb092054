"""The planner against what it cannot know: the paper's figures, and a design that is not built.

    python -m bench.planner [fit] [--at merge_s=0 restart_s=75 hold_s=30]

Fit the planner's constants to Table 1 of Decoupled DiLoCo (arXiv 2604.21428). Goodput and uptime of
jobs alone, without rounds (which lose nothing there): the best constants of a grid, or those of
`--at` over the defaults, with the mean and the greatest error in points, and what they make of a
column that the fit does not see: data-parallel training on 2.4M chips, where the paper has 18.

    python -m bench.planner levels [--learners 64,1000] [--parameters 1e9] [--steps 24]

One level of learners against two: a combiner in each region is one learner upstream.
With one level each learner sends its updates to one aggregator. With two, the learners of a region
send them to a combiner with a bucket and a bus of its own, and the sum that it makes in each of its
rounds is one update of the run. Either way learners adopt the run's versions, which a region reads
once (a cache). Both are planned by what `diloco plan` uses: rounds of the real machines in virtual
time, and its table of prices; a combiner is priced as a whole run of its region. An aggregator's
machine has 80 cores and moves 32 Gbit/s; as many share the fragments as are needed, though of one
fragment there is one owner. Nothing fails. docs/adr/0110-two-levels.md says what the second level
would have to keep.
"""

import argparse
import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bench.harness import run_part, table
from diloco.common.process.config import RunSettings, parse_settings
from diloco.plan import inputs, traffic
from diloco.plan import outages as plan_outages
from diloco.plan.costs import CACHE_DISK_GIB, CACHE_MACHINE, DISK, Prices, levers
from diloco.plan.forecast import Fleet, Plan, PlannedIsland, make_plan
from diloco.plan.outages import Outages

# --- Constants by the paper's table

YEAR_S = 365.25 * 86400
CHIPS = (150_000, 300_000, 600_000, 1_200_000)
# (learners, elastic) -> goodput and uptime in %, by chips.
TABLE = {
    (1, False): ((72, 72), (57, 57), (38, 38), (27, 27)),
    (1, True): ((88, 88), (80, 81), (69, 69), (58, 59)),
    (2, True): ((94, 100), (88, 97), (80, 96), (70, 90)),
    (4, True): ((96, 100), (93, 100), (89, 99), (82, 99)),
    (8, True): ((98, 100), (96, 100), (94, 100), (88, 100)),
}
GRID = {
    "merge_s": (0.0, 5.0, 8.0),
    "hold_s": (0.0, 10.0, 30.0),
    "reconfigure_s": (12.0, 15.0),
    "restart_s": (75.0, 80.0, 85.0, 90.0),
}


def errors(outages: Outages, failures: int, seed: int) -> np.ndarray:
    """Points by which each figure of the table is missed."""
    found = []
    for (learners, elastic), row in TABLE.items():
        for chips, published in zip(CHIPS, row, strict=True):
            rng = np.random.default_rng(seed)
            horizon_s = failures * outages.mtbi_s / chips
            traces = [
                plan_outages.simulate(outages, chips // learners, horizon_s, rng, elastic=elastic)
                for _ in range(learners)
            ]
            goodput = float(np.mean([trace.goodput for trace in traces]))
            planned = (100 * goodput, 100 * plan_outages.anyone_up(traces))
            found.append(np.abs(np.subtract(planned, published)))
    return np.concatenate(found)


def held_out(outages: Outages, failures: int, seed: int) -> float:
    """Goodput in % of data-parallel training on twice the chips of the last column."""
    chips = 2 * CHIPS[-1]
    rng = np.random.default_rng(seed)
    horizon_s = failures * outages.mtbi_s / chips
    return 100 * plan_outages.simulate(outages, chips, horizon_s, rng, elastic=False).goodput


def said(outages: Outages, failures: int, seed: int) -> tuple[float, float, float]:
    """Mean error, greatest error, and the column that is held out."""
    missed = errors(outages, failures, seed)
    return float(missed.mean()), float(missed.max()), held_out(outages, failures, seed)


def fit() -> None:
    """Print the best constants, or what those of `--at` come to."""
    parser = argparse.ArgumentParser(description=fit.__doc__)
    parser.add_argument("--failures", type=int, default=10_000, help="of each figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=10, help="so many of the best")
    parser.add_argument("--at", nargs="*", metavar="NAME=VALUE", help="these constants alone")
    arguments = parser.parse_args()
    if arguments.at is not None:
        constants = {name: float(value) for name, value in (one.split("=") for one in arguments.at)}
        outages = Outages(mtbi_s=YEAR_S, **constants)  # type: ignore[arg-type]
        mean, most, held = said(outages, arguments.failures, arguments.seed)
        print(f"mean {mean:.2f}, greatest {most:.2f}, held out {held:.1f}: {constants}")
        return
    fits = []
    for values in itertools.product(*GRID.values()):
        constants = dict(zip(GRID, values, strict=True))
        outages = Outages(mtbi_s=YEAR_S, **constants)  # type: ignore[arg-type]
        fits.append((*said(outages, arguments.failures, arguments.seed), constants))
    fits.sort(key=lambda fit: fit[:2])
    unmerged = next(fit for fit in fits if not fit[3]["merge_s"])
    for mean, most, held, constants in [*fits[: arguments.show], unmerged]:
        shown = ", ".join(f"{name} {value:g}" for name, value in constants.items())
        print(f"mean {mean:.2f}, greatest {most:.2f}, held out {held:.1f}: {shown}")


# --- Two levels


REGIONS = (
    "us-central1", "us-east1", "us-east4", "us-west1",
    "europe-west4", "europe-west1", "asia-east1", "asia-northeast1",
)  # fmt: skip
CORES, GBIT = 80, 32.0
STEP_S = 6.0
TB = 1e12
UPDATES = 200


class Levels(NamedTuple):
    """One row: a way to join learners.

    Attributes:
        dollars: a day, without the learners' machines.
        uploads: dollars of these for updates that leave a region.
        across_tb: TB a day between regions.
        cores: cores that are busy at the top, and those of one region's combiner.
        gbit: Gbit/s that the top reads.
        machines: aggregators' machines at work, at the top and in all regions.
        delay_steps: mean steps from an update's announcement to the adoption of its version.
    """

    dollars: float
    uploads: float
    across_tb: float
    cores: tuple[float, float]
    gbit: float
    machines: int
    delay_steps: float


def _machines(made: Plan) -> int:
    return math.ceil(max(made.cores / CORES, made.aggregator_gbit / GBIT))


def plan(settings: RunSettings, parameters: int, learners: int) -> Plan:
    """Returns the plan of so many learners, whose aggregators have as many machines as it takes."""
    sized = traffic.sizes(settings, traffic.equal_fragments(settings, parameters))
    fleet = Fleet(islands=(PlannedIsland(step_s=STEP_S, rtt_s=0.1, gbit=10.0),) * learners)

    def planned(gbit: float) -> Plan:
        given = replace(fleet, aggregator_gbit=gbit)
        return make_plan(settings, given, parameters, sized, updates=UPDATES)

    made = planned(GBIT)
    made = planned(GBIT * _machines(made))
    # What a machine cannot move takes another, whose cores idle.
    return replace(made, cores=max(made.cores, CORES * (_machines(made) - 1) + 1))


def _across_tb(made: Plan, away: float, readers: int) -> float:
    """Returns TB a day between regions: updates of `away` learners, versions for `readers`."""
    merged = made.daily.bytes_merged
    read = made.daily.bytes_read - merged
    return (merged * away + read * readers) / made.learners / TB


def one_level(prices: Prices, settings: RunSettings, parameters: int, learners: int) -> Levels:
    """Returns what all learners cost under one aggregator, with a cache in each region."""
    made = plan(settings, parameters, learners)
    regions = [REGIONS[index % len(REGIONS)] for index in range(learners)]
    _, cached, *_ = levers(prices, regions, made, settings.sync.block)
    away = learners * (1 - 1 / len(REGIONS))
    return Levels(
        cached.cost.total,
        cached.cost.uploads,
        _across_tb(made, away, len(REGIONS) - 1),
        (made.busy_cores, 0.0),
        made.aggregator_gbit,
        _machines(made),
        (made.wait_s[0] + made.adoption_s[0]) / STEP_S,
    )


def two_levels(prices: Prices, settings: RunSettings, parameters: int, learners: int) -> Levels:
    """Returns what they cost with a combiner in each region, which has a cache too."""
    below = plan(settings, parameters, learners // len(REGIONS))
    top = plan(settings, parameters, len(REGIONS))
    dollars, block = 0.0, settings.sync.block
    for region in REGIONS:
        as_it_is, *_ = levers(prices, [region] * below.learners, below, block)
        dollars += as_it_is.cost.total
    shared, *_ = levers(prices, REGIONS, top, block)
    caches = (len(REGIONS) - 1) * (
        24 * prices.machines[CACHE_MACHINE] + prices.disk_day(DISK, CACHE_DISK_GIB)
    )
    away = len(REGIONS) - 1
    delay_s = below.wait_s[0] + below.close_s + top.wait_s[0] + top.adoption_s[0]
    return Levels(
        dollars + shared.cost.total + caches,
        shared.cost.uploads,
        _across_tb(top, away, away),
        (top.busy_cores, below.busy_cores),
        top.aggregator_gbit,
        _machines(top) + len(REGIONS) * _machines(below),
        delay_s / STEP_S,
    )


def _cells(name: str, row: Levels) -> list[str]:
    free = row.dollars - row.uploads
    top, combiner = row.cores
    cells = [f"{row.dollars:,.0f}", f"{free:,.0f}", f"{row.across_tb:,.1f}", f"{top:,.1f}"]
    cells += [f"{combiner:,.1f}", f"{row.gbit:,.1f}", str(row.machines), f"{row.delay_steps:.1f}"]
    return [name, *cells]


HEADING = [
    "learners", "$ a day", "uploads free", "TB across", "top's cores", "a region's", "Gbit/s",
    "machines", "delay, steps",
]  # fmt: skip


def compare_levels() -> None:
    """Print what one level and two cost, move and delay."""
    parser = argparse.ArgumentParser(description=compare_levels.__doc__)
    parser.add_argument("--learners", default="64,1000,10000,100000")
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=24, help="H")
    args = parser.parse_args()
    settings = parse_settings(
        {
            "run": {"name": "levels", "steps": 1},
            "task": {"build": "m:b"},
            "sync": {"fragments": 24, "interval_steps": args.steps},
        }
    )
    prices = inputs.read_prices(None)
    rows = [HEADING]
    for learners in map(int, args.learners.split(",")):
        for name, way in (("one level", one_level), ("two", two_levels)):
            row = way(prices, settings, int(args.parameters), learners)
            rows.append(_cells(f"{learners:,}, {name}", row))
    print(table(rows))


if __name__ == "__main__":
    run_part({"fit": fit, "levels": compare_levels})
