"""What `diloco plan` forecasts for the fleets of the headline benches, beside what they did.

    .venv/bin/python -m bench.plan_calibrate [--goodput FILE] [--link FILE]

The files are `--out` of `bench.headline_goodput` and of `bench.headline_link`. Goodput has two
forecasts: the planner's own, which knows how often machines fail on average, and one that is given
the very schedule. Both take from the row what a user would measure first: how long a process of
either system needs to start.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.headline_goodput import Conditions, make_schedule
from bench.streaming import table
from diloco.common.config import RunSettings, parse_settings
from diloco.plan import outages as plan_outages
from diloco.plan import rounds as plan_rounds
from diloco.plan import traffic as plan_traffic
from diloco.plan.forecast import Fleet, Island, System, make_plan
from diloco.plan.outages import Outages
from diloco.plan.owner import Aggregator
from diloco.plan.rounds import Worker

# Of the model, which is small enough that its bytes cost no time.
PARAMETERS = 100_000
# Of the runs of `bench.headline_goodput`, and of `bench.headline_link`.
GOODPUT = {"interval_steps": 4, "fragments": 4, "min_steps": 1}
LINK = {"interval_steps": 24, "fragments": 8}
# From a message to what happens on it; between processes of one busy machine.
MESSAGE_S = 0.05
AT_ONCE = Aggregator(read_s=0.0, make_s=0.0, store_s=0.0, message_s=MESSAGE_S)


def settings(**sync: Any) -> RunSettings:
    """Of a bench's runs, as far as the forecast depends on them."""
    return parse_settings({"run": {"name": "calibrate", "steps": 1}, "sync": sync})


def fleet_of(row: dict[str, Any], start_s: float, restart_s: float) -> Fleet:
    """The planner's words for a row of the bench."""
    outages = Outages(
        mtbi_s=row["mtbf_s"],
        slice_chips=1,
        return_s=row["return_s"],
        spread="uniform",
        restart_s=restart_s,
        checkpoint_every_s=row["data_parallel_checkpoint_steps"] * row["step_s"],
        spares=False,
    )
    islands = (Island(step_s=row["step_s"]),) * row["machines"]
    return Fleet(islands=islands, outages=outages, learner_restart_s=start_s)


def expected(fleet: Fleet) -> tuple[float, float]:
    """Goodput of (ours, data-parallel) as `diloco plan` says it."""
    run = settings(**GOODPUT)
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, PARAMETERS))
    systems: tuple[System, ...] = make_plan(run, fleet, PARAMETERS, sized).systems
    return systems[2].goodput, systems[0].goodput


def scheduled(row: dict[str, Any], fleet: Fleet) -> tuple[float, float]:
    """The same, of this schedule and this length."""
    assert fleet.outages is not None
    assert fleet.learner_restart_s is not None
    fields = {name: row[name] for name in Conditions._fields}
    schedule = make_schedule(Conditions(**fields))
    horizon_s, step_s = row["seconds"], row["step_s"]
    job = plan_outages.scheduled(
        fleet.outages, [(o.at_s, o.back_s) for o in schedule], horizon_s, step_s=step_s
    )
    own = replace(fleet.outages, restart_s=fleet.learner_restart_s, checkpoint_every_s=0.0)
    traces = [
        plan_outages.scheduled(
            own,
            [(o.at_s, o.back_s) for o in schedule if o.machine == machine],
            horizon_s,
            step_s=step_s,
        )
        for machine in range(row["machines"])
    ]
    workers = [
        Worker(step_s=step_s, step_tokens=1, upload_s=MESSAGE_S, download_s=MESSAGE_S, trace=trace)
        for trace in traces
    ]
    rounds = plan_rounds.simulate(
        settings(**GOODPUT), workers, aggregator=AT_ONCE, horizon_s=horizon_s,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return statistics.mean(trace.goodput for trace in traces) * rounds.kept, job.goodput


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return float(statistics.mean(value for row in rows for value in row[key]))


def compare(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The printed table: for each system of each row with failures what it did, and forecasts."""
    calm = next(row for row in rows if not row["mtbf_s"])
    lines = []
    for row in (row for row in rows if row["mtbf_s"]):
        # A row in which nobody started again says nothing of starts.
        start_s = _mean([row] if row["ours_start_s"] else rows, "ours_start_s")
        restarts = [row] if row["data_parallel_restart_s"] else rows
        restart_s = _mean(restarts, "data_parallel_restart_s")
        fleet = fleet_of(row, start_s, restart_s)
        forecasts = zip(expected(fleet), scheduled(row, fleet), strict=True)
        names = (("ours", start_s), ("data_parallel", restart_s))
        for (system, took_s), (mean, exact) in zip(names, forecasts, strict=True):
            full = calm[f"{system}_steps"] * row["seconds"] / calm["seconds"]
            did = row[f"{system}_steps"] / full
            cells = [f"{100 * share:.1f}" for share in (did, exact, mean)]
            error = f"{100 * (exact - did):+.1f}"
            lines.append([f"{row['mtbf_s']:.0f}", system, f"{took_s:.1f}", *cells, error])
    return lines


def link_shares(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The printed table: share of the time on the link in which devices work, and its forecast."""
    lines = []
    for row in rows:
        run = settings(**LINK)
        elements = row["parameters"]
        sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, elements))
        island = Island(step_s=row["step_s"], gbit=row["mbit"] / 1000, rtt_s=row["rtt_ms"] / 1000)
        fleet = Fleet(
            islands=(island,) * row["islands"],
            gradient_bits=16 if "bfloat16" in row["system"] else 32,
        )
        made = make_plan(run, fleet, elements, sized, updates=100)
        system = made.systems[2 if row["system"] == "ours" else 0]
        share = 100 * row["link"]["steps_per_s"] * row["step_s"] / row["islands"]
        forecast = 100 * system.utilization
        cells = [f"{share:.1f}", f"{forecast:.1f}", f"{forecast - share:+.1f}"]
        lines.append([row["system"], str(row["islands"]), *cells])
    return lines


LINK_HEADING = ["system", "islands", "measured, %", "forecast, %", "error, points"]
HEADING = [
    "a machine fails every, s", "system", "start, s", "measured, %", "forecast of the schedule, %",
    "of the rate, %", "error, points",
]  # fmt: skip


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--goodput", type=Path, help="--out of bench.headline_goodput")
    parser.add_argument("--link", type=Path, help="--out of bench.headline_link")
    args = parser.parse_args()
    if args.goodput:
        print(table([HEADING, *compare(json.loads(args.goodput.read_text()))]))
    if args.link:
        print(table([LINK_HEADING, *link_shares(json.loads(args.link.read_text()))]))


if __name__ == "__main__":
    main()
