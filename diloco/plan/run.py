"""Predicts a fleet: from options to a plan, printed and drawn."""

import json as jsonlib

from rich.console import Console

from diloco.plan import inputs
from diloco.plan.costs import compare
from diloco.plan.forecast import make_plan, over_learners
from diloco.plan.options import PlanOptions
from diloco.plan.prices import read_prices
from diloco.plan.tables import as_json, cost_table, costs_as_json, tables

# Numbers of learners that a picture shows, beside the one that was asked for.
COUNTS = (1, 2, 4, 8, 16, 32)


def run_plan(options: PlanOptions) -> None:
    """Print the plan, and draw it if that was asked for.

    Raises:
        ConfigError: an option or the file cannot be understood, or the picture not be written.
    """
    settings = inputs.read_settings(options)
    model = inputs.read_model(options, settings)
    fleet = inputs.read_fleet(options, model.step_tokens)
    tokens = inputs.read_tokens(options, settings, fleet)
    prices = read_prices(options.prices)
    regions = inputs.read_regions(options, prices)
    made = make_plan(
        settings, fleet, model.parameters, model.sizes, tokens=tokens, seed=options.seed
    )
    costs = compare(prices, regions, made)
    if options.plot is not None:
        counts = sorted({n for n in COUNTS if n <= fleet.chips} | {made.learners})
        others = over_learners(
            settings, fleet, model.parameters, model.sizes, counts, seed=options.seed
        )
        from diloco.plan.figure import draw

        draw(others, made, options.plot)
    if options.json:
        document = as_json(made, model.parameters, tokens)
        document["costs"] = costs_as_json(costs, prices, regions, made)
        print(jsonlib.dumps(document, allow_nan=False))  # noqa: T201
        return
    console = Console()
    found = tables(settings, fleet, made, model.parameters, tokens)
    for table in [*found, cost_table(costs, prices, regions, made)]:
        console.print(table)
        console.print()
