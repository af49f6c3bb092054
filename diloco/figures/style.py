"""How figures look: black on white, few lines, colours that the colour-blind tell apart.

The palette is Okabe and Ito's; whatever colours say, line styles, hatches or markers say too, so
that a copy in grey can be read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.figures.binned import Binned

Column = npt.NDArray[np.float64]

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, "#7F7F7F")
DASHES = ("-", "--", "-.", ":")
WIDTH_IN = 9.6

_RULES: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#404040",
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "path.simplify": True,
    "svg.hashsalt": "diloco",
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}


@contextmanager
def look() -> Iterator[None]:
    """The style, for as long as the block lasts; figures are made and saved within it."""
    with mpl.rc_context(_RULES):
        yield


def panels(count: int, height_in: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels side by side."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    made = figure.subplots(1, count, squeeze=False, **options)
    return figure, list(made[0])


def band(axes: Axes, values: Binned, colour: str, label: str, style: str = "-") -> None:
    """A line of medians with a light band from the 10 % to the 90 % quantile."""
    axes.fill_between(values.centre, values.low, values.high, color=colour, alpha=0.16, lw=0)
    axes.plot(values.centre, values.middle, style, color=colour, label=label)


def steps(axes: Axes, edges: Column, values: Column, colour: str, dash: str, label: str) -> None:
    """A line of steps, one for each bin."""
    axes.stairs(values, edges, baseline=None, color=colour, ls=dash, lw=1.6, label=label)


def quantile_bars(axes: Axes, rows: list[tuple[str, Column]], colour: str = BLUE) -> None:
    """For each named row a thin bar (5-95 %), a thick one (25-75 %) and a dot at the median."""
    for place, (_, values) in enumerate(rows):
        if values.size:
            low, left, middle, right, high = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95))
            axes.plot([low, high], [place, place], "-", color=colour, lw=1.0)
            axes.plot([left, right], [place, place], "-", color=colour, lw=4.5, alpha=0.45)
            axes.plot([middle], [place], "o", color=BLACK, ms=4)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def share_bars(axes: Axes, values: Column, colour: str, most: int = 12) -> None:
    """Bars of how often each whole number occurs, in percent; `most` and above in the last.

    Where nearly all are greater, bars of ranges.
    """
    if np.quantile(values, 0.5) >= most:
        weights = np.full(values.size, 100 / values.size)
        axes.hist(values, bins=most, weights=weights, color=colour, edgecolor="white", lw=0.5)
        return
    numbers, counts = np.unique(np.minimum(values, most), return_counts=True)
    percent = 100 * counts / max(values.size, 1)
    axes.bar(numbers, percent, color=colour, width=0.8, edgecolor="white", lw=0.5)
    for number, part in zip(numbers, percent, strict=True):
        text = f"{part:.0f}" if part >= 1 else "<1"
        axes.annotate(text, (number, part), (0, 2), textcoords="offset points", ha="center", size=8)
    ticks = np.arange(int(numbers.min()), int(numbers.max()) + 1)
    axes.set_xticks(ticks, [f"{tick}+" if tick == most else str(tick) for tick in ticks])
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
