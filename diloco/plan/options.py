"""The options of `diloco plan`."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diloco.run.cli.options import Json, Settings

# Panels of --help.
_fleet = partial(typer.Option, rich_help_panel="Fleet")
_failures = partial(typer.Option, rich_help_panel="Failures")
_baseline = partial(typer.Option, rich_help_panel="Data-parallel baseline")
_costs = partial(typer.Option, rich_help_panel="Costs")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The options of `diloco plan` as typed; None for those not given."""

    config: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="the run's TOML file [default: options only]"),
    ] = None
    settings: Settings = field(default_factory=list)
    parameters: Annotated[
        str | None,
        _fleet(help="model size, such as 5B [default: from the file's task, else 5B]"),
    ] = None
    learners: Annotated[int, _fleet(help="number of learners", min=1, max=100_000)] = 8
    chips: Annotated[str | None, _fleet(help="total chips, or a list [default: 1 per learner]")] = (
        None
    )
    step_s: Annotated[str, _fleet(help="seconds per inner step; one value, or a list")] = "1"
    step_tokens: Annotated[
        str | None, _fleet(help="tokens per step; one value, or a list [default: from the task]")
    ] = None
    gbit: Annotated[
        str | None,
        _fleet(help="link bandwidth in Gbit/s; one value, or a list [default: unlimited]"),
    ] = None
    rtt_ms: Annotated[str, _fleet(help="link round-trip time in ms; one value, or a list")] = "10"
    aggregator_gbit: Annotated[
        float, _fleet(help="bandwidth from the aggregator to the store, Gbit/s", min=0.001)
    ] = 10.0
    mtbi: Annotated[
        str, _failures(help="mean time between interruptions of one chip, or never")
    ] = "1y"
    slice_chips: Annotated[
        int, _failures(help="chips per slice; a slice fails as a whole", min=1)
    ] = 128
    return_time: Annotated[
        str, _failures("--return", help="mean time to replace a failed slice")
    ] = "20m"
    spread: Annotated[
        str,
        _failures(help="its distribution: exponential, uniform (0.5 to 1.5 of the mean) or fixed"),
    ] = "exponential"
    hold_s: Annotated[
        float, _failures(help="seconds a returning slice waits for others", min=0)
    ] = 10.0
    reconfigure_s: Annotated[
        float, _failures(help="seconds an elastic job pauses when slices leave or join", min=0)
    ] = 15.0
    restart_s: Annotated[float, _failures(help="seconds to restart a data-parallel job", min=0)] = (
        85.0
    )
    learner_restart_s: Annotated[
        float | None, _failures(help="seconds to restart a learner [default: --restart-s]", min=0)
    ] = None
    checkpoint_every_s: Annotated[
        float,
        _baseline(
            help="checkpoint interval of data-parallel training; 0: a failure loses only the "
            "current step",
            min=0,
        ),
    ] = 0.0
    spares: Annotated[
        bool, _failures(help="whether non-elastic data-parallel training has spare slices")
    ] = True
    elastic: Annotated[
        bool,
        _failures(
            "--elastic",
            help="plan for learners that continue without a failed slice and lose nothing, as the "
            "paper's; ours do so with learner.slices, and lose what was not sent",
        ),
    ] = False
    gradient_bits: Annotated[
        int,
        _baseline(help="bits per gradient element in data-parallel training", min=1, max=64),
    ] = 16
    hidden: Annotated[
        float,
        _baseline(
            help="share of a step that overlaps data-parallel communication",
            min=0,
            max=1,
            show_default="2/3",
        ),
    ] = 2 / 3
    tokens: Annotated[
        str | None, _fleet(help="token budget, such as 1T [default: from the file]")
    ] = None
    seed: Annotated[int, _failures(help="seed of the simulated failures", min=0)] = 0
    merge_failures: Annotated[
        str,
        _failures(help="failures within this time count as one; never: each counts"),
    ] = "8s"
    regions: Annotated[
        str | None,
        _costs(
            help="cloud regions of the learners, joined by commas, taken in turn",
            show_default="four in the US",
        ),
    ] = None
    prices: Annotated[
        Path | None,
        _costs(metavar="FILE", help="table of prices to use instead of the packaged one"),
    ] = None
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="put the smallest H that the links carry into FILE, with the fragments and"
            " min_steps that fit it",
        ),
    ] = False
    json: Json = False
    plot: Annotated[
        Path | None,
        typer.Option(
            help="write a page with a figure over the number of learners", metavar="FILE.html"
        ),
    ] = None
