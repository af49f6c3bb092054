"""Runs `diloco plan`: reads the options, makes the plan, prints it and draws it."""

import json as jsonlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import rich.markup
from rich.console import Console

from diloco.common.process.config import RunSettings, warnings
from diloco.common.protocol.errors import ConfigError
from diloco.plan import inputs
from diloco.plan.costs import at_interval, compare, levers
from diloco.plan.forecast import make_plan, over_learners
from diloco.plan.intervals import Interval, advice, intervals, with_interval
from diloco.plan.options import PlanOptions
from diloco.plan.tables import (
    as_json,
    cost_table,
    costs_as_json,
    lever_table,
    levers_as_json,
    tables,
)

_SYNC: Final = re.compile(r"(?m)^\s*\[\s*sync\s*\][^\n]*")
_SECTION: Final = re.compile(r"(?m)^\s*\[")
KEYS: Final = ("interval_steps", "fragments", "min_steps")


def write_interval(path: Path, settings: RunSettings, found: list[Interval]) -> str:
    """Sets H in the file to the smallest that the links carry; returns a sentence on the changes.

    Args:
        path: the run's TOML file.
        settings: the settings that were planned.
        found: the forecast for each H, by ascending H.

    Raises:
        ConfigError: the links carry none of these H, or the file cannot be changed line by line.
    """
    carried = next((interval.steps for interval in found if interval.carried), None)
    if carried is None:
        raise ConfigError(
            f"{path} is as it was: {advice(found, settings.sync.interval_steps)}",
            hint="name faster links, or set sync.interval_steps yourself",
        )
    before, after = settings.sync, with_interval(settings, carried).sync
    values = {key: getattr(after, key) for key in KEYS}
    text = path.read_text()
    changed = _with_keys(text, values)
    expected = tomllib.loads(text)
    expected["sync"] = expected.get("sync", {}) | values
    if not _says(changed, expected):
        said = ", ".join(f"sync.{key} = {value}" for key, value in values.items())
        raise ConfigError(
            f"{path} is as it was: its [sync] is not written with a line for each key",
            hint=f"set {said} yourself",
        )
    path.write_text(changed)
    said = ", ".join(
        f"{key} = {value} (was {getattr(before, key)})" for key, value in values.items()
    )
    return f"{path}, [sync]: {said}"


def _says(text: str, expected: Mapping[str, object]) -> bool:
    try:
        return tomllib.loads(text) == expected
    except tomllib.TOMLDecodeError:
        return False


def _with_keys(text: str, values: Mapping[str, int]) -> str:
    """Returns a run's TOML text with the keys of [sync] set to `values`; comments are kept."""
    if _SYNC.search(text) is None:
        text = f"{text}\n[sync]\n" if text else "[sync]\n"
    header = _SYNC.search(text)
    assert header is not None
    after = _SECTION.search(text, header.end())
    ends = after.start() if after else len(text)
    body, missing = text[header.end() : ends], ""
    for key, value in values.items():
        body, there = re.subn(rf"(?m)^(\s*{key}\s*=\s*)\S+", rf"\g<1>{value}", body)
        missing += "" if there else f"\n{key} = {value}"
    return text[: header.end()] + missing + body + text[ends:]


# Numbers of learners that the figure shows, besides the planned number.
COUNTS = (1, 2, 4, 8, 16, 32)


def run_plan(options: PlanOptions) -> None:
    """Prints the plan, and draws it (--plot) or writes H into the file (--write) if asked.

    Raises:
        ConfigError: an option or the file is invalid, or an output cannot be written.
    """
    if options.plot is not None:
        from diloco.show.page.html_page import check_name

        check_name(options.plot)
    settings = inputs.read_settings(options)
    model = inputs.read_model(options, settings)
    fleet = inputs.read_fleet(options, model.step_tokens)
    tokens = inputs.read_tokens(options, settings, fleet, model.step_tokens)
    sized = model.sizes_of(settings)
    prices = inputs.read_prices(options.prices)
    regions = inputs.read_regions(options, prices)
    made = make_plan(settings, fleet, model.parameters, sized, tokens=tokens, seed=options.seed)
    costs = compare(prices, regions, made)
    cheaper = levers(prices, regions, made, settings.sync.block)
    possible = intervals(settings, fleet, model.parameters, model.sizes_of, seed=options.seed)
    # Without a file the run's length is unknown, on which the warning of momentum depends.
    warned = warnings(settings) if options.config else []
    if options.plot is not None:
        counts = sorted({n for n in COUNTS if n <= fleet.chips} | {made.learners})
        others = over_learners(settings, fleet, model.parameters, sized, counts, seed=options.seed)
        from diloco.plan.tables import draw

        draw(others, made, options.plot)
    written = _write(options, settings, possible) if options.write else None
    if options.json:
        document = as_json(made, possible, model.parameters, tokens) | {"warnings": warned}
        document["costs"] = costs_as_json(costs, prices, regions, made)
        document["costs"]["levers"] = levers_as_json(cheaper)
        asked = settings.sync.interval_steps
        document["costs"]["a_day_by_interval"] = {
            one.steps: at_interval(costs[0], asked, one.steps) for one in possible
        }
        document |= {"written": written, "active_parameters": model.active_parameters}
        print(jsonlib.dumps(document, allow_nan=False))  # noqa: T201
        return
    console = Console()
    if model.active_parameters is not None:
        active = f"{model.active_parameters:,} of {model.parameters:,} parameters"
        console.print(f"a token passes {active}; all of them travel\n", soft_wrap=True)
    found = tables(settings, fleet, made, possible, model.parameters, tokens, costs[0])
    found.append(cost_table(costs, prices, regions, made))
    for table in [*found, lever_table(cheaper, settings.sync.interval_steps)]:
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
