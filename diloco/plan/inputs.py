"""Reads the options of `diloco plan` into settings, model and fleet."""

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from diloco.common.process.config import LearnerSection, RunSettings, explain, load_config
from diloco.common.protocol.errors import ConfigError
from diloco.plan import traffic as plan_traffic
from diloco.plan.costs import Prices
from diloco.plan.forecast import Fleet, PlannedIsland
from diloco.plan.options import PlanOptions
from diloco.plan.outages import Outages, Spread
from diloco.plan.traffic import RoundTraffic
from diloco.run.cli.settings import assign, parse_assigned

T = TypeVar("T")

_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_TIMES_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0}
US_REGIONS = ["us-central1", "us-east1", "us-east4", "us-west1"]


@dataclass(frozen=True, slots=True)
class Model:
    """The model to plan for.

    Attributes:
        parameters: the number of parameters.
        sizes_of: returns the bytes and objects of a round of all its fragments under a run's
            settings.
        step_tokens: tokens of one learner's inner step; 0 if no task gives them.
        active_parameters: parameters that one token passes, in a mixture of experts; None: all.
    """

    parameters: int
    sizes_of: Callable[[RunSettings], RoundTraffic]
    step_tokens: int
    active_parameters: int | None = None


def read_settings(options: PlanOptions) -> RunSettings:
    """Returns the run's settings: the file's, or the defaults, changed by --set."""
    document: dict[str, Any] = {"run": {"name": "plan", "steps": 1}}
    if options.config is not None:
        document = load_config(options.config, connects=False).settings().model_dump()
    for assignment in options.settings:
        assign(document, assignment)
    return parse_assigned(document)


def read_model(options: PlanOptions, settings: RunSettings) -> Model:
    """Returns the model: of --parameters, else of the file's task, else of 5 billion parameters."""
    if options.parameters is None and options.config is not None:
        from diloco.learner.load_and_check_task import model_of
        from diloco.learner.tensors.tree import task_layout

        task = model_of(settings)

        def of_task(settings: RunSettings) -> RoundTraffic:
            fragments = task_layout(task, settings.sync).fragments
            return plan_traffic.sizes(settings, [fragment.size for fragment in fragments])

        fragments = task_layout(task, settings.sync).fragments
        elements = sum(fragment.elements for fragment in fragments)
        return Model(elements, of_task, task.tokens_per_batch, task.active_parameters)
    parameters = _count("--parameters", options.parameters or "5B")

    def of_parameters(settings: RunSettings) -> RoundTraffic:
        return plan_traffic.sizes(settings, plan_traffic.equal_fragments(settings, parameters))

    return Model(parameters, of_parameters, 0)


def read_fleet(options: PlanOptions, step_tokens: int) -> Fleet:
    """Reads the fleet from the options.

    Args:
        options: the options as typed.
        step_tokens: tokens of an inner step by the task, if --step-tokens is not given; 0: no task.

    Raises:
        ConfigError: a value is invalid, or a list has not one value for each learner.
    """
    count = options.learners
    chips = _chips(options.chips or str(count), count)
    tokens = [step_tokens or 1] * count
    if options.step_tokens is not None:
        tokens = _each("--step-tokens", options.step_tokens, count, _count)
    gbits = [math.inf] * count
    if options.gbit is not None:
        gbits = _each("--gbit", options.gbit, count, _positive)
    steps_s = _each("--step-s", options.step_s, count, _positive)
    rtts_ms = _each("--rtt-ms", options.rtt_ms, count, _rtt)
    islands = tuple(
        PlannedIsland(chips=each, step_s=step, step_tokens=over, gbit=gbit, rtt_s=rtt / 1000)
        for each, step, over, gbit, rtt in zip(chips, steps_s, tokens, gbits, rtts_ms, strict=True)
    )
    learner = LearnerSection()
    if options.config is not None:
        learner = load_config(options.config, connects=False).learner
    return Fleet(
        islands=islands,
        outages=_outages(options),
        slices=learner.slices,
        snapshot_steps=learner.snapshot_steps,
        elastic=options.elastic,
        learner_restart_s=options.learner_restart_s,
        aggregator_gbit=options.aggregator_gbit,
        gradient_bits=options.gradient_bits,
        hidden=options.hidden,
    )


def _outages(options: PlanOptions) -> Outages | None:
    if options.mtbi == "never":
        return None
    merged = options.merge_failures
    return Outages(
        mtbi_s=_time_s("--mtbi", options.mtbi),
        slice_chips=options.slice_chips,
        return_s=_time_s("--return", options.return_time),
        spread=_spread(options.spread),
        hold_s=options.hold_s,
        reconfigure_s=options.reconfigure_s,
        restart_s=options.restart_s,
        checkpoint_every_s=options.checkpoint_every_s,
        spares=options.spares,
        merge_s=0.0 if merged == "never" else _time_s("--merge-failures", merged),
    )


def _spread(text: str) -> Spread:
    known: dict[str, Spread] = {name: name for name in get_args(Spread)}
    if text not in known:
        raise ConfigError(f"--spread {text!r}: expected {', '.join(known)}")
    return known[text]


def read_tokens(options: PlanOptions, settings: RunSettings, fleet: Fleet, step_tokens: int) -> int:
    """Returns the token budget: --tokens, else the file's tokens or steps; 0 without either.

    Raises:
        ConfigError: --tokens is given, but neither a task nor --step-tokens gives the tokens of a
            step.
    """
    if options.tokens is not None:
        budget = _count("--tokens", options.tokens)
        if not (step_tokens or options.step_tokens):
            raise ConfigError(
                f"--tokens {options.tokens}: how long they take depends on the tokens of a step",
                hint="give them, for one learner: --step-tokens 262144; or the run's file, whose "
                "task says them",
            )
        return budget
    if options.config is None:
        return 0
    return settings.run.tokens or settings.run.steps * fleet.step_tokens


def read_prices(path: Path | None) -> Prices:
    """Returns the prices of a file with the keys of prices.toml; of prices.toml if `path` is None.

    Raises:
        ConfigError: the file cannot be read, or lacks a price.
    """
    source = resources.files("diloco.plan").joinpath("prices.toml") if path is None else path
    try:
        return Prices.model_validate(tomllib.loads(source.read_text("utf-8")))
    except (OSError, ValueError) as error:
        why = explain(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(
            f"--prices {path}: {why}", hint="copy diloco/plan/prices.toml and change its numbers"
        ) from error


def read_regions(options: PlanOptions, prices: Prices) -> tuple[str, ...]:
    """Returns a region for each learner; a list of --regions shorter than the fleet is repeated.

    Raises:
        ConfigError: `prices` have no continent for a region.
    """
    named = [name.strip() for name in options.regions.split(",")] if options.regions else US_REGIONS
    for name in named:
        if not prices.continent(name):
            raise ConfigError(
                f"--regions {options.regions!r}: the prices know no continent of {name!r}",
                hint=f"a region's name begins with one of {', '.join(sorted(prices.continents))}",
            )
    return tuple(named[number % len(named)] for number in range(options.learners))


def _each(option: str, text: str, count: int, parse: Callable[[str, str], T]) -> list[T]:
    """Parses a list of one value for each of `count` learners; a single value is for all."""
    values = [parse(option, part) for part in text.split(",")]
    if len(values) not in {1, count}:
        raise ConfigError(
            f"{option} {text!r}: {len(values)} values for {count} learners",
            hint=f"give one for all, or {count} joined by commas",
        )
    return values if len(values) == count else values * count


def _chips(text: str, count: int) -> list[int]:
    """Returns the chips of each learner, from a list or from the number of the whole fleet."""
    chips = _each("--chips", text, count, _count)
    if "," in text:
        return chips
    if chips[0] < count:
        raise ConfigError(
            f"--chips {text!r}: fewer than the {count} learners",
            hint="--chips is the number of the whole fleet, which the learners share",
        )
    return [chips[0] // count] * count


def _rtt(option: str, text: str) -> float:
    return _number(option, text, {"": 1.0}, (0, 1e6), "milliseconds from 0 to 1000000")


def _positive(option: str, text: str) -> float:
    return _number(option, text, {"": 1.0}, (1e-3, 1e6), "a number from 0.001 to 1000000")


def _count(option: str, text: str) -> int:
    expected = "a number from 1 to 1e18, such as 5000, 1.2M or 5B"
    return round(_number(option, text, _COUNTS, (1, 1e18), expected))


def _time_s(option: str, text: str) -> float:
    return _number(option, text, _TIMES_S, (1e-3, 1e12), "a time, such as 300s, 20m, 6h, 90d or 1y")


def _number(
    option: str,
    text: str,
    units: Mapping[str, float],
    bounds: tuple[float, float],
    expected: str,
) -> float:
    """Parses a number with an optional unit after it, a key of `units`; `bounds` are inclusive.

    Raises:
        ConfigError: the text is not such a number within the bounds.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]?)", text.strip())
    if found and found[2] in units:
        value = float(found[1]) * units[found[2]]
        if bounds[0] <= value <= bounds[1]:
            return value
    raise ConfigError(f"{option} {text!r}: expected {expected}")
