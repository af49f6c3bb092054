"""`diloco report A B`: runs beside each other, in one HTML file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.cli import units
from diloco.figures import style
from diloco.report import numbers
from diloco.report.build import drawn, footer, gather, staging, writing
from diloco.report.numbers import Shown
from diloco.report.page import Fact, Page, Section, Table, render
from diloco.report.summary import facts, warnings


class Named(NamedTuple):
    """A run, and the word for it."""

    name: str
    shown: Shown


def run_comparison(targets: Sequence[str], *, out: Path, evaluations: int) -> Path:
    """Write a page that compares runs; the HTML file.

    Args:
        targets: RUN of each, as `diloco.cli.opening` has it.
        out: folder of the files.
        evaluations: as `run_report`.

    Raises:
        DilocoError: no such run; bus or store are away; the folder cannot be written.
    """
    with staging() as stage:
        found = [gather(target, evaluations, stage, pairs=False) for target in targets]
        return write(named(targets, found), out)


def named(targets: Sequence[str], found: Sequence[Shown]) -> list[Named]:
    """Runs by their names; by what they were given as, where names are alike."""
    names = [shown.series.run for shown in found]
    if len(set(names)) < len(names):
        names = list(targets)
    return [Named(name, shown) for name, shown in zip(names, found, strict=True)]


def write(runs: Sequence[Named], folder: Path) -> Path:
    """Draw the figures and write the files; the HTML file.

    Raises:
        ConfigError: the folder cannot be written.
    """
    with writing(folder), style.look():
        loss = Section(
            "loss", "Do they learn?",
            "Training loss (median of the updates) and, with markers, loss on held-out data.",
        )  # fmt: skip
        speed = Section("throughput", "Tokens per second", "Merged into the model.")
        page = Page(
            title=f"Runs {', '.join(run.name for run in runs)}",
            subtitle="Times and tokens are counted from each run's own beginning.",
            facts=[],
            sections=[
                Section(
                    "short", "In short", "As at the head of each report.", table=in_short(runs)
                ),
                drawn(loss, losses(runs), "Nothing was merged.", folder),
                drawn(speed, throughput(runs), "Nothing was sent.", folder),
                Section("settings", "Settings that differ", "", table=differing(runs)),
            ],
            footer=footer(),
            warnings=[f"{run.name}: {text}" for run in runs for text in warnings(run.shown)],
        )
        path = folder / "report.html"
        path.write_text(render(page), encoding="utf-8")
    return path


def in_short(runs: Sequence[Named]) -> Table:
    """The facts of each run in a column."""
    told = [{fact.name: fact for fact in facts(run.shown)} for run in runs]
    order = dict.fromkeys(name for one in told for name in one)
    cells = [{name: _with_note(fact) for name, fact in one.items()} for one in told]
    rows = tuple((name, *(one.get(name, "-") for one in cells)) for name in order)
    columns = ("", *(run.name for run in runs))
    return Table(columns, rows, frozenset(columns))


def _with_note(fact: Fact) -> str:
    return f"{fact.value} ({fact.note})" if fact.note else fact.value


def differing(runs: Sequence[Named]) -> Table:
    """Settings that are not the same in all."""
    documents = [run.shown.series.settings.model_dump(mode="json") for run in runs]
    rows = []
    for section, keys in documents[0].items():
        for key in keys:
            values = [json.dumps(one[section][key], ensure_ascii=False) for one in documents]
            if len(set(values)) > 1:
                rows.append((f"{section}.{key}", *values))
    columns = ("setting", *(run.name for run in runs))
    return Table(columns, tuple(rows), frozenset(columns))


def losses(runs: Sequence[Named]) -> Figure | None:
    """Loss of each run over tokens and over time."""
    known = [run for run in runs if len(run.shown.series.inputs)]
    if not known:
        return None
    figure, (left, right) = style.panels(2, 3.5, sharey=True)
    tokens = units.count_unit(max(run.shown.series.tokens_merged() for run in known))
    time = units.time_unit(max(run.shown.span_s for run in known))
    for place, run in enumerate(known):
        over_time = numbers.losses_over_time(run.shown)
        ratio = run.shown.unit.scale / time.scale
        _line(left, place, run, numbers.losses_over_tokens(run.shown, tokens), 1.0)
        _line(right, place, run, over_time, ratio)
    left.set(title="over tokens", ylabel="loss", xlabel=f"tokens merged ({tokens.name or '1'})")
    right.set(title="over time", xlabel=f"time ({time.name})")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper right", ncols=4)
    return figure


def _line(axes: Axes, place: int, run: Named, found: numbers.Losses, ratio: float) -> None:
    colour, dash = _look(place)
    training, scores = found.training, run.shown.scores
    axes.plot(training.centre * ratio, training.middle, dash, color=colour, label=run.name)
    if scores:
        losses_of = np.asarray([score.loss for score in scores])
        axes.plot(found.scored * ratio, losses_of, "o", color=colour, ms=4, clip_on=False)


def _look(place: int) -> tuple[str, str]:
    return style.CYCLE[place % len(style.CYCLE)], style.DASHES[place % len(style.DASHES)]


def throughput(runs: Sequence[Named]) -> Figure | None:
    """Tokens a second that each run merged."""
    known = [run for run in runs if len(run.shown.series.updates)]
    if not known:
        return None
    figure, (axes,) = style.panels(1, 2.9)
    rates = [numbers.throughput(run.shown) for run in known]
    unit = units.count_unit(max(float(rate.second.max()) for rate in rates))
    time = units.time_unit(max(run.shown.span_s for run in known))
    for place, (run, rate) in enumerate(zip(known, rates, strict=True)):
        edges = (rate.edges_s - run.shown.begin_s) / time.scale
        style.steps(axes, edges, rate.second / unit.scale, *_look(place), run.name)
    axes.set(xlabel=f"time ({time.name})", ylabel=f"tokens per second ({unit.name or '1'})")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper right", ncols=4)
    return figure
