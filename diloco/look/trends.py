"""Each learner's loss, norm and agreement over the run, in a line."""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.table import Table

from diloco.projections.trend import Point

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 16


def spark(values: Sequence[float], width: int = WIDTH) -> str:
    """A curve in so many characters, from its least to its most value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    edges = [round(index * len(finite) / width) for index in range(width + 1)]
    means = [fmean(finite[begin:end]) for begin, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def table(
    trends: Mapping[str, Sequence[Point]],
    cosines: Mapping[str, Sequence[float]] | None = None,
    *,
    title: str = "over the run",
) -> Table:
    """Beginning to now; of the norm, 1 is the round's median.

    Args:
        trends: of each learner.
        cosines: of each learner's newest updates to those of the others in their rounds.
        title: what time it is about.
    """
    shown = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    shown.add_column(title, no_wrap=True)
    for name in ("loss", "", "norm", ""):
        shown.add_column(name, no_wrap=True, justify="right" if name else "left")
    if cosines:
        shown.add_column("cosine to others", no_wrap=True)
    for name, points in sorted(trends.items()):
        if not points:
            continue
        losses, norms = [one.loss for one in points], [one.norm for one in points]
        row = [name, f"{losses[-1]:.4g}", spark(losses), f"{norms[-1]:.2f}", spark(norms)]
        own = (cosines or {}).get(name)
        shown.add_row(*row, *([f"{fmean(own):+.2f}" if own else "-"] if cosines else []))
    return shown
