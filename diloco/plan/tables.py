"""Formats a plan: tables and a figure for people, JSON for programs."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from diloco.common.process.config import RunSettings
from diloco.plan.costs import (
    AGGREGATOR_CLASS,
    BUS_NODES,
    DailyCost,
    Lever,
    Prices,
    aggregators,
    at_interval,
)
from diloco.plan.forecast import DAY_S, Bandwidth, Fleet, Plan
from diloco.plan.intervals import MEASURED_AT, Interval, advice
from diloco.run.cli import format_numbers
from diloco.run.cli.screen import plain_table
from diloco.show.page.html_page import write_figure
from diloco.show.page.svg import DASHES, Axis, Column, Panel, PlotMark, line, points, rules


def as_json(made: Plan, possible: list[Interval], parameters: int, tokens: int) -> dict[str, Any]:
    """Returns the plan as a dictionary for JSON; infinite numbers become None.

    Args:
        made: the plan.
        possible: the forecasts for each H.
        parameters: the number of the model's parameters.
        tokens: the token budget; 0 for none.
    """
    fields = asdict(made) | {
        "parameters": parameters,
        "tokens": tokens,
        "systems": [system._asdict() for system in made.systems],
        "bandwidth": [row._asdict() for row in made.bandwidth],
        "daily": made.daily._asdict(),
        "intervals": [row._asdict() | {"carried": row.carried} for row in possible],
    }
    finite: dict[str, Any] = _finite(fields)
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tables(
    settings: RunSettings,
    fleet: Fleet,
    made: Plan,
    possible: list[Interval],
    parameters: int,
    tokens: int,
    cost: DailyCost,
) -> list[Table]:
    """Returns four tables: ways of training, bandwidth, rounds and traffic, values of H.

    Args:
        settings: settings of the run.
        fleet: the machines.
        made: the plan.
        possible: the forecasts for each H.
        parameters: the number of the model's parameters.
        tokens: the token budget; 0 for none.
        cost: dollars a day at the run's own H, for the cheapest place of the bucket.
    """
    return [
        _systems(fleet, made, tokens),
        _bandwidth(made, parameters),
        _needs(settings, made),
        _intervals(possible, settings.sync.interval_steps, cost),
    ]


def _systems(fleet: Fleet, made: Plan, tokens: int) -> Table:
    named = fleet.step_tokens > made.learners
    chips = f"{made.chips:,} chips" if made.chips > 1 else "1 chip"
    learners = "1 learner" if made.learners == 1 else f"{made.learners} learners"
    columns = ["", "goodput %", "uptime %", "links %"]
    columns += ["tokens/s"] if named else []
    columns += [f"time to {_short(tokens)} tokens"] if tokens else []
    table = plain_table(*columns, title=f"{learners}, {chips}: what to expect", wraps=True)
    ends = [system.days * DAY_S for system in made.systems if system.days is not None]
    unit = format_numbers.time_unit(max((end for end in ends if math.isfinite(end)), default=0.0))
    for system in made.systems:
        cells = [f"{100 * share:.1f}" for share in system[1:4]]
        cells += [_short(system.tokens_per_s)] if named else []
        cells += [_time(system.days, unit)] if tokens else []
        table.add_row(system.name, *cells)
    if fleet.stops_whole:
        table.caption = (
            "a learner stops while a part of it is out, and starts again; with learner.slices in"
            " the run's file it continues with its other slices"
        )
    return table


def _time(days: float | None, unit: format_numbers.Unit) -> str:
    if days is None or not math.isfinite(days):
        return "never"
    return f"{days * DAY_S / unit.scale:,.1f} {unit.name}"


def _bandwidth(made: Plan, parameters: int) -> Table:
    table = plain_table(
        "utilization %", "data-parallel", "lockstep", "this system",
        title=f"{_short(parameters)} parameters: Gbit/s that each site needs", wraps=True,
    )  # fmt: skip
    for row in made.bandwidth:
        cells = (row.data_parallel, row.lockstep, row.decoupled)
        table.add_row(f"{100 * row.utilization:.0f}", *(_gbit(cell) for cell in cells))
    table.caption = "this system waits for no link: with less, versions come later than every H"
    return table


def _gbit(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "no link is enough"


def _late(made: Plan, times_s: tuple[float, float]) -> str:
    mean_s, worst_s = times_s
    steps = f"{mean_s / made.fastest_s:.1f} / {worst_s / made.fastest_s:.1f} steps of the fastest"
    return f"{steps} ({mean_s:.2f} / {worst_s:.2f} s)"


def _needs(settings: RunSettings, made: Plan) -> Table:
    run = settings.sync
    sized, daily = made.sizes, made.daily
    table = plain_table("", " ", title="Rounds, traffic and the aggregator", wraps=True)
    objects = f"{_short(daily.objects_written)} / {_short(daily.objects_read)}"
    apart = _time(made.interval_s / DAY_S, format_numbers.time_unit(made.interval_s))
    rounds = f"{run.interval_steps}, {run.fragments}, {run.codec} / {run.delta_codec}"
    rows = [
        ("H, P, codecs up / down", rounds),
        ("up, each learner, a round of all fragments", _bytes(sized.update_bytes)),
        ("down, each learner, a round of all fragments", _bytes(sized.delta_bytes)),
        ("time between versions of a fragment", apart),
        ("updates in a version", f"{made.participants:.1f} of {made.learners}"),
        ("mean staleness", f"{made.staleness:.2f} versions"),
        ("an update's wait for its round, mean / worst", _late(made, made.wait_s)),
        ("a version's wait for its adoption, mean / worst", _late(made, made.adoption_s)),
        ("late updates", f"{100 * made.late_share:.1f} %"),
        ("work lost with learners that died", f"{100 * (1 - made.kept):.2f} %"),
        ("objects written / read a day", objects),
        ("requests that read a day", _short(daily.gets)),
        ("written to the store a day", _bytes(daily.bytes_written)),
        ("egress: read from the store a day", _bytes(daily.bytes_read)),
        ("kept in the store", _bytes(made.retained_bytes)),
        ("records on the tape a day", _short(daily.records)),
        ("bytes on the tape a day", _bytes(daily.tape_bytes)),
        ("bytes of records that learners read a day", _bytes(daily.record_reads)),
        ("aggregator's cores (half busy)", f"{made.cores}, {made.busy_cores:.2g} busy"),
        ("aggregator's memory, at least", _bytes(made.memory_bytes)),
        ("aggregator's link", f"{made.aggregator_gbit:.3g} Gbit/s"),
        ("from a round's close to its record", f"{made.close_s:.3g} s"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _intervals(found: list[Interval], current: int, cost: DailyCost) -> Table:
    table = plain_table(
        "H", "Gbit/s up", "Gbit/s down", "link full, %", "versions every", "loss, %", "$ a day",
        title="H: what it needs, and the loss expected", wraps=True,
    )  # fmt: skip
    for row in found:
        least, most = row.loss
        table.add_row(
            f"{row.steps}{'' if row.carried else ': too short'}",
            _gbit(row.gbit_up),
            _gbit(row.gbit_down),
            f"{100 * row.full:.0f}",
            f"{row.apart:.3g} steps" if math.isfinite(row.apart) else "never",
            f"{least:+.1f} to {most:+.1f}" if row.steps != MEASURED_AT else "0",
            _dollars(at_interval(cost, current, row.steps)),
        )
    table.caption = (
        f"{advice(found, current)}.\nThe loss is over that of H = {MEASURED_AT}, fitted to this"
        " project's sweep of two small tasks with AdamW inside"
    )
    return table


def cost_table(costs: list[DailyCost], prices: Prices, regions: Sequence[str], made: Plan) -> Table:
    """Returns a table of dollars a day, with a column for each of `costs`.

    Its last row is the whole run's dollars, if the plan has a token budget.
    """
    run = made.systems[-1].days
    columns = ["$ a day", *(cost.name for cost in costs)]
    table = plain_table(*columns, title="What it costs", wraps=True)
    for part in DailyCost._fields[1:]:
        table.add_row(part, *(_dollars(getattr(cost, part)) for cost in costs))
    table.add_row("a day", *(_dollars(cost.total) for cost in costs))
    if run is not None and math.isfinite(run):
        table.add_row("the run", *(_dollars(cost.total * run) for cost in costs))
    table.caption = _assumed(costs, prices, regions, made)
    return table


def lever_table(found: list[Lever], interval: int) -> Table:
    """Returns a table of cheaper ways to run with H = `interval`, and names the cheapest."""
    table = plain_table(
        "", "$ a day", "if uploads are free", "loss, %", title="Cheaper, with H as it is",
        wraps=True,
    )  # fmt: skip
    for one in found:
        least, most = one.loss
        loss = f"{least:+.1f} to {most:+.1f}" if most else "0"
        table.add_row(one.name, _dollars(one.cost.total), _dollars(one.uploads_free), loss)
    same, best = (
        min(ways, key=lambda one: one.cost.total).name
        for ways in ([one for one in found if not any(one.loss)], found)
    )
    table.caption = (
        f"Cheapest with H = {interval}: at no loss {same}; of all {best}.\n"
        "6 h of replay: gc.replay_window_s, for which updates are kept; caches: `caches` of the"
        " fleet;\none aggregator: no versions while its machine is away, and learners train on;\n"
        "one learner away in each region: the bucket's region has all others.\n"
        "2 bits: sync.codec and sync.delta_codec = int2; its loss was measured on one small task,"
        " over that of 4"
    )
    return table


def levers_as_json(found: list[Lever]) -> list[dict[str, Any]]:
    """Returns the cheaper ways as dictionaries for JSON."""
    return [
        {
            "name": one.name, "loss": list(one.loss),
            "total": one.cost.total, "uploads_free": one.uploads_free,
        }
        for one in found
    ]  # fmt: skip


def costs_as_json(
    costs: list[DailyCost], prices: Prices, regions: Sequence[str], made: Plan
) -> dict[str, Any]:
    """Returns the costs as a dictionary for JSON, in the order of `costs`: the cheapest first.

    `run`, the dollars of the whole run, is None if the plan has no token budget.
    """
    run = made.systems[-1].days
    days = run if run is not None and math.isfinite(run) else None
    return {
        "as_of": prices.as_of,
        "regions": list(regions),
        "assumed": _assumed(costs, prices, regions, made),
        "a_day": [cost._asdict() | {"total": cost.total} for cost in costs],
        "run": None if days is None else [cost.total * days for cost in costs],
    }


def _assumed(costs: list[DailyCost], prices: Prices, regions: Sequence[str], made: Plan) -> str:
    counts = ", ".join(f"{count} in {name}" for name, count in sorted(Counter(regions).items()))
    uploads = "charged as downloads" if prices.uploads_charged else "free"
    those = aggregators(prices, made)
    return (
        f"Cheapest: {costs[0].name}.\n"
        f"Assumed: learners {counts}; list prices of {prices.as_of};\n"
        f"uploads into another region {uploads}; {those.machines} aggregators of "
        f"{AGGREGATOR_CLASS}-{those.cores},\n"
        f"{BUS_NODES} servers of the bus, a keeper. The learners' own machines are not counted:\n"
        "diloco host provision counts a fleet's."
    )


def _dollars(value: float) -> str:
    return f"{value:,.2f}"


def _short(value: float) -> str:
    unit = format_numbers.count_unit(value)
    return f"{value / unit.scale:.4g}{' ' if unit.name else ''}{unit.name}"


def _bytes(value: float) -> str:
    unit = format_numbers.byte_unit(value)
    return f"{value / unit.scale:.4g} {unit.name}"


# Utilization for which the right panel shows the links; it is one of `forecast.UTILIZATIONS`.
SHOWN = 0.95


def draw(plans: list[Plan], asked: Plan, path: Path) -> None:
    """Draws goodput and uptime, and the Gbit/s of a site's link, over the number of learners.

    Args:
        plans: plans by ascending number of learners.
        asked: the plan that was asked for; a vertical line marks its number of learners.
        path: path of the HTML page to write.

    Raises:
        ConfigError: the page cannot be written.
    """
    counts = np.asarray([plan.learners for plan in plans], np.float64)
    at = np.asarray([asked.learners], np.float64)
    x = Axis(label="learners", log=True)
    shares = [*_shares(counts, plans), rules(at, 0 * at, 0 * at + 100)]
    links = _links(counts, plans)
    known = np.concatenate([mark.y[np.isfinite(mark.y)] for mark in links])
    links.append(rules(at, 0 * at + known.min(), 0 * at + known.max()))
    title = f"{plans[0].chips:,} chips under failures"
    panels = [
        Panel(marks=shares, title=title, x=x, y=Axis(label="goodput (%)", low=0, high=102)),
        Panel(
            marks=links, title=f"for a utilization of {100 * SHOWN:.0f} %", x=x,
            y=Axis(label="Gbit/s of each site", log=True),
        ),
    ]  # fmt: skip
    write_figure("The plan", panels, path)


def _shares(counts: Column, plans: Sequence[Plan]) -> list[PlotMark]:
    marks = []
    looks = (("orange", DASHES[2]), ("red", DASHES[1]), ("blue", ""))
    for index, (look, dash) in enumerate(looks):
        systems = [plan.systems[index] for plan in plans]
        goodput = np.asarray([100 * system.goodput for system in systems])
        marks += [line(counts, goodput, look, systems[0].name, dash), points(counts, goodput, look)]
    uptime = np.asarray([100 * plan.systems[-1].uptime for plan in plans])
    return [*marks, line(counts, uptime, "sky", "its uptime", DASHES[3])]


def _links(counts: Column, plans: Sequence[Plan]) -> list[PlotMark]:
    needs: tuple[tuple[str, str, str, Callable[[Bandwidth], float]], ...] = (
        ("data-parallel", "orange", DASHES[2], lambda row: row.data_parallel),
        ("it, in lockstep", "green", DASHES[1], lambda row: row.lockstep),
        ("this system", "blue", "", lambda row: row.decoupled),
    )
    marks = []
    for name, look, dash, need in needs:
        rows = [next(row for row in plan.bandwidth if row.utilization == SHOWN) for plan in plans]
        gbit = np.asarray([need(row) for row in rows], np.float64)
        gbit = np.where(np.isfinite(gbit) & (gbit > 0), gbit, np.nan)
        marks += [line(counts, gbit, look, name, dash), points(counts, gbit, look)]
    return marks
