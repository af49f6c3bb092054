"""Figures of each learner beside the others: loss, norm and agreement over the run."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.figures import style
from diloco.figures.binned import Column, binned
from diloco.report.figures_run import name_time
from diloco.report.numbers import Shown

# Points of a curve, and learners that have one of their own: those that stand out most.
POINTS = 60
LINES = 8


def beside(shown: Shown) -> Figure | None:
    """Each learner's loss, its norm relative to its round, and its cosine to the others."""
    inputs = shown.series.inputs
    if not len(inputs):
        return None
    norms = _to_the_round(inputs["round"], inputs["norm"])
    figure, (left, middle, right) = style.panels(3, 3.1)
    chosen = _most_apart(inputs["learner"], inputs["loss"], norms)
    for place, index in enumerate(chosen):
        mine = inputs["learner"] == index
        times, name = shown.since(inputs["time_s"][mine]), shown.series.learners[index]
        _line(left, place, times, inputs["loss"][mine], name)
        _line(middle, place, times, norms[mine], name)
        if shown.pairs is not None:
            own = np.asarray(shown.pairs.over_time(name), np.float64).reshape(-1, 2)
            colour = style.CYCLE[place % len(style.CYCLE)]
            right.plot(shown.since(own[:, 0]), own[:, 1], ".-", lw=1.0, color=colour)
    left.set(title="training loss", ylabel="loss", yscale="log")
    middle.set(title="norm to its round's median", ylabel="times", yscale="log")
    right.set(title="cosine to the others", ylabel="cosine", ylim=(-1, 1))
    right.axhline(0, color="black", lw=0.7)
    left.legend(loc="best", fontsize=7)
    for axes in (left, middle, right):
        name_time(shown, axes)
        axes.set_xlabel(f"time ({shown.unit.name})")
    return figure


def _line(axes: Axes, place: int, times: Column, values: Column, name: str) -> None:
    colour = style.CYCLE[place % len(style.CYCLE)]
    values = np.maximum(values, 1e-9)
    if len(values) > 4 * POINTS:
        found = binned(times, values, POINTS)
        times, values = found.centre, found.middle
    axes.plot(times, values, style.DASHES[place % 4], lw=1.3, color=colour, label=name)


def _to_the_round(rounds: Column, norms: Column) -> Column:
    """Each norm over the median of its round; rows of a round stand together."""
    found = np.empty_like(norms)
    edges = np.flatnonzero(np.diff(rounds)) + 1
    for part in np.split(np.arange(len(norms)), edges):
        usual = np.median(norms[part])
        found[part] = norms[part] / usual if usual > 0 else 1.0
    return found


def _most_apart(learner: Column, loss: Column, norms: Column) -> list[int]:
    """Learners whose loss or norm stands out most, in order of their indices."""
    indices = np.unique(learner).astype(int)
    usual = max(float(np.median(loss)), 1e-9)
    apart = {
        int(index): abs(np.log(max(np.median(loss[learner == index]), 1e-9) / usual))
        + abs(np.log(max(np.median(norms[learner == index]), 1e-9)))
        for index in indices
    }
    return sorted(sorted(apart, key=lambda index: -apart[index])[:LINES])
