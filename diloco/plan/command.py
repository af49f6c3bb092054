"""`diloco plan`: from a run's file or from options to what may be expected of a fleet."""

import json as jsonlib
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from rich.console import Console
from rich.table import Table

from diloco.cli.settings import assign, parse_assigned
from diloco.common.config import RunSettings, load_config
from diloco.common.errors import ConfigError
from diloco.common.guard_rails import warnings
from diloco.common.layout import Layout
from diloco.plan import traffic as plan_traffic
from diloco.plan.forecast import DAY_S, Fleet, Island, Plan, make_plan, over_learners
from diloco.plan.intervals import MEASURED_AT, Interval, advice, intervals
from diloco.plan.outages import Outages, Spread
from diloco.plan.traffic import Sizes
from diloco.report import style

T = TypeVar("T")

_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_TIMES_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
# Numbers of learners that a picture shows, beside the one that was asked for.
COUNTS = (1, 2, 4, 8, 16, 32)
MOST_LEARNERS = 4096
_DEFAULT_PARAMETERS = 5 * 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The command line; texts as they were typed, None for what was not given."""

    config: Path | None = None
    settings: tuple[str, ...] = ()
    parameters: str | None = None
    learners: int = 8
    chips: str | None = None
    step_s: str = "1"
    step_tokens: str | None = None
    gbit: str | None = None
    rtt_ms: str = "10"
    aggregator_gbit: float = 10.0
    mtbi: str = "1y"
    slice_chips: int = 128
    return_time: str = "20m"
    spread: str = "exponential"
    hold_s: float = 30.0
    reconfigure_s: float = 15.0
    restart_s: float = 75.0
    learner_restart_s: float | None = None
    checkpoint_every_s: float = 0.0
    spares: bool = True
    rigid: bool = False
    gradient_bits: int = 16
    hidden: float = 2 / 3
    tokens: str | None = None
    seed: int = 0
    json: bool = False
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class _Model:
    parameters: int
    sizes_of: Callable[[RunSettings], Sizes]
    step_tokens: int


def run_plan(options: PlanOptions) -> None:
    """Print the plan, and draw it if that was asked for.

    Raises:
        ConfigError: an option or the file cannot be understood, or the picture not be written.
    """
    settings = _settings(options)
    model = _model(options, settings)
    fleet = _fleet(options, model.step_tokens)
    tokens = _tokens(options, settings, fleet)
    sized = model.sizes_of(settings)
    made = make_plan(settings, fleet, model.parameters, sized, tokens=tokens, seed=options.seed)
    possible = intervals(settings, fleet, model.parameters, model.sizes_of, seed=options.seed)
    if options.plot is not None:
        counts = sorted({n for n in COUNTS if n <= fleet.chips} | {made.learners})
        others = over_learners(settings, fleet, model.parameters, sized, counts, seed=options.seed)
        from diloco.plan.figure import draw

        draw(others, made, options.plot)
    if options.json:
        document = as_json(made, model.parameters, tokens)
        document["intervals"] = [row._asdict() | {"carried": row.carried} for row in possible]
        document["warnings"] = warnings(settings) if options.config else []
        print(jsonlib.dumps(_finite(document), allow_nan=False))  # noqa: T201
        return
    console = Console()
    found = tables(settings, fleet, made, model.parameters, tokens)
    for table in [*found, _intervals(possible, settings.sync.interval_steps)]:
        console.print(table)
        console.print()
    # Without a file the run's length is not known, by which momentum is judged.
    for sentence in warnings(settings) if options.config else []:
        console.print(f"[yellow]warning:[/] {sentence}", soft_wrap=True)


# Reading options


def _settings(options: PlanOptions) -> RunSettings:
    document: dict[str, Any] = {"run": {"name": "plan", "steps": 1}}
    if options.config is not None:
        document = load_config(options.config).settings().model_dump()
    for assignment in options.settings:
        assign(document, assignment)
    return parse_assigned(document)


def _model(options: PlanOptions, settings: RunSettings) -> _Model:
    """Of the options, else of the file's task, else the paper's of five billion."""
    if options.parameters is None and options.config is not None:
        from diloco.learner.task import run_task
        from diloco.learner.tree import task_layout

        task = run_task(settings)

        def of_task(settings: RunSettings) -> Sizes:
            layout = task_layout(task, settings.sync)
            return plan_traffic.sizes(settings, plan_traffic.layout_fragments(layout))

        return _Model(_elements(task_layout(task, settings.sync)), of_task, task.tokens_per_batch)
    parameters = _DEFAULT_PARAMETERS
    if options.parameters is not None:
        parameters = _count("--parameters", options.parameters)

    def of_parameters(settings: RunSettings) -> Sizes:
        return plan_traffic.sizes(settings, plan_traffic.equal_fragments(settings, parameters))

    return _Model(parameters, of_parameters, 0)


def _elements(layout: Layout) -> int:
    return sum(fragment.elements for fragment in layout.fragments)


def _fleet(options: PlanOptions, step_tokens: int) -> Fleet:
    count = options.learners
    chips = _chips(options.chips or str(count), count)
    tokens = [step_tokens or 1] * count
    if options.step_tokens is not None:
        tokens = _each("--step-tokens", options.step_tokens, count, _count)
    gbits = [math.inf] * count
    if options.gbit is not None:
        gbits = _each("--gbit", options.gbit, count, _positive)
    steps_s = _each("--step-s", options.step_s, count, _positive)
    rtts_ms = _each("--rtt-ms", options.rtt_ms, count, _float)
    islands = tuple(
        Island(chips=each, step_s=step, step_tokens=over, gbit=gbit, rtt_s=rtt / 1000)
        for each, step, over, gbit, rtt in zip(chips, steps_s, tokens, gbits, rtts_ms, strict=True)
    )
    return Fleet(
        islands=islands,
        outages=_outages(options),
        rigid=options.rigid,
        learner_restart_s=options.learner_restart_s,
        aggregator_gbit=options.aggregator_gbit,
        gradient_bits=options.gradient_bits,
        hidden=options.hidden,
    )


def _outages(options: PlanOptions) -> Outages | None:
    if options.mtbi == "never":
        return None
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
    )


def _spread(text: str) -> Spread:
    known: dict[str, Spread] = {name: name for name in get_args(Spread)}
    if text not in known:
        raise ConfigError(f"--spread {text!r}: expected {', '.join(known)}")
    return known[text]


def _tokens(options: PlanOptions, settings: RunSettings, fleet: Fleet) -> int:
    """The budget: of the options, else of the file: its tokens, or its steps by all learners."""
    if options.tokens is not None:
        return _count("--tokens", options.tokens)
    if options.config is None:
        return 0
    return settings.run.tokens or settings.run.steps * fleet.step_tokens


def _each(option: str, text: str, count: int, parse: Callable[[str, str], T]) -> list[T]:
    """One value for each learner: one for all, or as many as there are."""
    values = [parse(option, part) for part in text.split(",")]
    if len(values) not in {1, count}:
        raise ConfigError(
            f"{option} {text!r}: {len(values)} values for {count} learners",
            hint=f"give one for all, or {count} joined by commas",
        )
    return values if len(values) == count else values * count


def _chips(text: str, count: int) -> list[int]:
    """Chips of each learner: the whole fleet's divided, or a list."""
    chips = _each("--chips", text, count, _count)
    if "," in text:
        return chips
    if chips[0] < count:
        raise ConfigError(
            f"--chips {text!r}: fewer than the {count} learners",
            hint="it is the whole fleet's number, which the learners share",
        )
    return [chips[0] // count] * count


def _float(option: str, text: str) -> float:
    if not re.fullmatch(_NUMBER, text.strip()):
        raise ConfigError(f"{option} {text!r}: expected a number such as 1.5")
    return float(text)


def _positive(option: str, text: str) -> float:
    value = _float(option, text)
    if not 1e-3 <= value <= 1e6:
        raise ConfigError(f"{option} {text!r}: expected a number from 0.001 to 1000000")
    return value


def _count(option: str, text: str) -> int:
    found = re.fullmatch(rf"({_NUMBER})\s*([kMGBT]?)", text.strip())
    value = float(found[1]) * _COUNTS[found[2]] if found else 0.0
    if not 1 <= value <= 1e18:
        raise ConfigError(
            f"{option} {text!r}: expected a number of 1 or more", hint="such as 5000, 1.2M or 5B"
        )
    return round(value)


def _time_s(option: str, text: str) -> float:
    found = re.fullmatch(rf"({_NUMBER})\s*([smhdy])", text.strip())
    value = float(found[1]) * _TIMES_S[found[2]] if found else 0.0
    if not 1e-3 <= value <= 1e12:
        raise ConfigError(
            f"{option} {text!r}: expected a time", hint="such as 300s, 20m, 6h, 90d or 1y"
        )
    return value


# Telling


def as_json(made: Plan, parameters: int, tokens: int) -> dict[str, Any]:
    """The plan for programs; what is infinite becomes null."""
    fields = asdict(made) | {
        "parameters": parameters,
        "tokens": tokens,
        "systems": [system._asdict() for system in made.systems],
        "bandwidth": [row._asdict() for row in made.bandwidth],
        "daily": made.daily._asdict(),
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
    settings: RunSettings, fleet: Fleet, made: Plan, parameters: int, tokens: int
) -> list[Table]:
    """The plan for people."""
    return [
        _systems(made, tokens, named=fleet.step_tokens > made.learners),
        _bandwidth(made, parameters),
        _needs(settings, made),
    ]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _systems(made: Plan, tokens: int, *, named: bool) -> Table:
    chips = f"{made.chips:,} chips" if made.chips > 1 else "1 chip"
    learners = "1 learner" if made.learners == 1 else f"{made.learners} learners"
    columns = ["", "goodput %", "uptime %", "links %"]
    columns += ["tokens/s"] if named else []
    columns += [f"time to {_short(tokens)} tokens"] if tokens else []
    table = _table(f"{learners}, {chips}: what to expect", *columns)
    ends = [system.days * DAY_S for system in made.systems if system.days is not None]
    unit = style.time_unit(max((end for end in ends if math.isfinite(end)), default=0.0))
    for system in made.systems:
        cells = [f"{100 * share:.1f}" for share in system[1:4]]
        cells += [_short(system.tokens_per_s)] if named else []
        cells += [_time(system.days, unit)] if tokens else []
        table.add_row(system.name, *cells)
    return table


def _time(days: float | None, unit: style.Unit) -> str:
    if days is None or not math.isfinite(days):
        return "never"
    return f"{days * DAY_S / unit.scale:,.1f} {unit.name}"


def _bandwidth(made: Plan, parameters: int) -> Table:
    table = _table(
        f"{_short(parameters)} parameters: Gbit/s that each site needs",
        "utilization %", "data-parallel", "lockstep", "this system",
    )  # fmt: skip
    for row in made.bandwidth:
        cells = (row.data_parallel, row.lockstep, row.decoupled)
        table.add_row(f"{100 * row.utilization:.0f}", *(_gbit(cell) for cell in cells))
    table.caption = "this system waits for no link: with less, versions come later than every H"
    table.caption_justify = "left"
    return table


def _gbit(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "no link is enough"


def _needs(settings: RunSettings, made: Plan) -> Table:
    run = settings.sync
    sized, daily = made.sizes, made.daily
    table = _table("Rounds, traffic and the aggregator", "", "")
    objects = f"{_short(daily.objects_written)} / {_short(daily.objects_read)}"
    apart = _time(made.interval_s / DAY_S, style.time_unit(made.interval_s))
    rounds = f"{run.interval_steps}, {run.fragments}, {run.codec} / {run.delta_codec}"
    rows = [
        ("H, P, codecs up / down", rounds),
        ("up, each learner, a round of all fragments", _bytes(sized.update_bytes)),
        ("down, each learner, a round of all fragments", _bytes(sized.delta_bytes)),
        ("time between versions of a fragment", apart),
        ("updates in a version", f"{made.participants:.1f} of {made.learners}"),
        ("mean staleness", f"{made.staleness:.2f} versions"),
        ("late updates", f"{100 * made.late_share:.1f} %"),
        ("work lost with learners that died", f"{100 * (1 - made.kept):.2f} %"),
        ("objects written / read a day", objects),
        ("written to the store a day", _bytes(daily.bytes_written)),
        ("egress: read from the store a day", _bytes(daily.bytes_read)),
        ("records on the tape a day", _short(daily.records)),
        ("aggregator's cores (half busy)", str(made.cores)),
        ("aggregator's memory, at least", _bytes(made.memory_bytes)),
        ("aggregator's link", f"{made.aggregator_gbit:.3g} Gbit/s"),
        ("from a round's close to its record", f"{made.close_s:.3g} s"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _intervals(found: list[Interval], current: int) -> Table:
    table = _table(
        "H: what it needs, and the loss expected",
        "H", "Gbit/s up", "Gbit/s down", "link full, %", "versions every", "loss, %",
    )  # fmt: skip
    for row in found:
        least, most = row.loss
        table.add_row(
            f"{row.steps}{'' if row.carried else ' (not carried)'}",
            _gbit(row.gbit_up),
            _gbit(row.gbit_down),
            f"{100 * row.full:.0f}",
            f"{row.apart:.3g} steps" if math.isfinite(row.apart) else "never",
            f"{least:+.1f} to {most:+.1f}" if row.steps != MEASURED_AT else "0",
        )
    table.caption = (
        f"{advice(found, current)}.\nThe loss is over that of H = {MEASURED_AT}, fitted to this"
        " project's sweep of two small tasks with AdamW inside"
    )
    table.caption_justify = "left"
    return table


def _short(value: float) -> str:
    unit = style.count_unit(value)
    return f"{value / unit.scale:.4g}{' ' if unit.name else ''}{unit.name}"


def _bytes(value: float) -> str:
    unit = style.byte_unit(value)
    return f"{value / unit.scale:.4g} {unit.name}"
