"""Predicts a fleet: from options to a plan, printed and drawn."""

import json as jsonlib

import rich.markup
from rich.console import Console

from diloco.common.config import RunSettings, warnings
from diloco.common.errors import ConfigError
from diloco.plan import inputs
from diloco.plan.costs import compare
from diloco.plan.forecast import make_plan, over_learners
from diloco.plan.intervals import Interval, intervals
from diloco.plan.options import PlanOptions
from diloco.plan.prices import read_prices
from diloco.plan.tables import as_json, cost_table, costs_as_json, tables
from diloco.plan.writing import write_interval

# Numbers of learners that a picture shows, beside the one that was asked for.
COUNTS = (1, 2, 4, 8, 16, 32)


def run_plan(options: PlanOptions) -> None:
    """Print the plan, and draw it if that was asked for.

    Raises:
        ConfigError: an option or the file cannot be understood, or the picture or the file not be
            written.
    """
    settings = inputs.read_settings(options)
    model = inputs.read_model(options, settings)
    fleet = inputs.read_fleet(options, model.step_tokens)
    tokens = inputs.read_tokens(options, settings, fleet, model.step_tokens)
    sized = model.sizes_of(settings)
    prices = read_prices(options.prices)
    regions = inputs.read_regions(options, prices)
    made = make_plan(settings, fleet, model.parameters, sized, tokens=tokens, seed=options.seed)
    costs = compare(prices, regions, made)
    possible = intervals(settings, fleet, model.parameters, model.sizes_of, seed=options.seed)
    # Without a file the run's length, by which momentum is judged, is not known.
    warned = warnings(settings) if options.config else []
    if options.plot is not None:
        counts = sorted({n for n in COUNTS if n <= fleet.chips} | {made.learners})
        others = over_learners(settings, fleet, model.parameters, sized, counts, seed=options.seed)
        from diloco.plan.figure import draw

        draw(others, made, options.plot)
    written = _write(options, settings, possible) if options.write else None
    if options.json:
        document = as_json(made, possible, model.parameters, tokens) | {"warnings": warned}
        document["costs"] = costs_as_json(costs, prices, regions, made)
        document["written"] = written
        print(jsonlib.dumps(document, allow_nan=False))  # noqa: T201
        return
    console = Console()
    found = tables(settings, fleet, made, possible, model.parameters, tokens)
    for table in [*found, cost_table(costs, prices, regions, made)]:
        console.print(table)
        console.print()
    for sentence in warned:
        console.print(f"[yellow]warning:[/] {sentence}", soft_wrap=True)
    if written is not None:
        console.print(f"[green]written:[/] {rich.markup.escape(written)}", soft_wrap=True)


def _write(options: PlanOptions, settings: RunSettings, possible: list[Interval]) -> str:
    if options.config is None:
        raise ConfigError(
            "--write needs FILE, the run's file", hint="diloco plan run.toml --write ..."
        )
    return write_interval(options.config, settings, possible)
