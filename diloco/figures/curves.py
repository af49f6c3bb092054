"""A figure of curves over a run's clock, drawn in a process of its own: who draws has JAX loaded.

What is drawn comes as plain numbers, and matplotlib is loaded in the other process alone.
"""

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diloco.cli.beside import apart
from diloco.common.errors import ConfigError


@dataclass(frozen=True)
class Curve:
    """Values at steps.

    Attributes:
        form: matplotlib's, of line and markers.
        holds: a value holds until the next one.
    """

    steps: npt.ArrayLike
    values: npt.ArrayLike
    label: str = ""
    form: str = "-"
    holds: bool = False


@dataclass(frozen=True)
class Curves:
    """A figure's curves and words; with `zero` a line at zero."""

    title: str
    ylabel: str
    curves: Sequence[Curve]
    zero: bool = False


def draw(shown: Curves, path: Path) -> None:
    """Write the figure.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        apart(_draw, shown, path)
    except (OSError, ValueError, BrokenProcessPool) as error:
        raise ConfigError(f"cannot write the figure {str(path)!r}: {error}") from error


def _draw(shown: Curves, path: Path) -> None:
    """As `draw`, in this process, which loads matplotlib."""
    from matplotlib.figure import Figure

    from diloco.figures import style

    with style.look():
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        for index, curve in enumerate(shown.curves):
            drawstyle = "steps-post" if curve.holds else "default"
            axes.plot(
                np.asarray(curve.steps), np.asarray(curve.values), curve.form, label=curve.label,
                color=style.CYCLE[index % len(style.CYCLE)], drawstyle=drawstyle,
            )  # fmt: skip
        if shown.zero:
            axes.axhline(0, color=style.BLACK, lw=0.6)
        axes.set_xlabel("global step")
        axes.set_ylabel(shown.ylabel)
        axes.set_title(shown.title)
        if any(curve.label for curve in shown.curves):
            axes.legend()
        figure.savefig(path, dpi=150)
