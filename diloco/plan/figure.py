"""The picture of a plan: the same chips, divided among more and more learners."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from diloco.common.errors import ConfigError
from diloco.figures import style
from diloco.plan.forecast import Bandwidth, Plan

# Utilization for which the right panel shows the links; it is one of `plan.UTILIZATIONS`.
SHOWN = 0.95


def draw(plans: list[Plan], asked: Plan, path: Path) -> None:
    """Goodput and uptime, and what a site's link must carry, over the number of learners.

    Args:
        plans: by ascending number of learners.
        asked: the plan in question; the number of its learners is marked.
        path: PNG or what else its suffix says.

    Raises:
        ConfigError: it cannot be written.
    """
    with style.look():
        figure, (left, right) = style.panels(2, 3.6)
        _shares(left, plans)
        _links(right, plans)
        for axes in (left, right):
            _learners(axes, plans, asked)
        shown = [axes.get_legend_handles_labels() for axes in (left, right)]
        named = {
            name: line for lines, names in shown for line, name in zip(lines, names, strict=True)
        }
        figure.legend(named.values(), named.keys(), loc="outside upper right", ncols=len(named))
        try:
            figure.savefig(path, dpi=150)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot write the figure {str(path)!r}: {error}",
                hint="give a file that ends in .png in a folder that exists",
            ) from error


def _shares(axes: Axes, plans: list[Plan]) -> None:
    counts = [plan.learners for plan in plans]
    looks = ((style.ORANGE, "-."), (style.VERMILLION, "--"), (style.BLUE, "-"))
    for index, (colour, dash) in enumerate(looks):
        systems = [plan.systems[index] for plan in plans]
        axes.plot(
            counts, [100 * system.goodput for system in systems],
            dash, color=colour, marker="o", ms=3.5, label=systems[0].name,
        )  # fmt: skip
    uptime = [100 * plan.systems[-1].uptime for plan in plans]
    axes.plot(counts, uptime, ":", color=style.SKY, label="its uptime")
    axes.set_ylim(0, 102)
    axes.set_ylabel("goodput (%)")
    axes.set_title(f"{plans[0].chips:,} chips under failures")


def _links(axes: Axes, plans: list[Plan]) -> None:
    needs: tuple[tuple[str, str, Any, Callable[[Bandwidth], float]], ...] = (
        ("data-parallel", style.ORANGE, "-.", lambda row: row.data_parallel),
        ("it, in lockstep", style.GREEN, (0, (4, 1)), lambda row: row.lockstep),
        ("this system", style.BLUE, "-", lambda row: row.decoupled),
    )
    for name, colour, dash, need in needs:
        found = [
            (plan.learners, need(row))
            for plan in plans
            for row in plan.bandwidth
            if row.utilization == SHOWN
        ]
        shown = [(count, gbit) for count, gbit in found if 0 < gbit < math.inf]
        if shown:
            axes.plot(*zip(*shown, strict=True), dash, color=colour, marker="o", ms=3.5, label=name)
    axes.set_yscale("log")
    axes.set_ylabel("Gbit/s of each site")
    axes.set_title(f"for a utilization of {100 * SHOWN:.0f} %")


def _learners(axes: Axes, plans: list[Plan], asked: Plan) -> None:
    counts = [plan.learners for plan in plans]
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learners")
    axes.axvline(asked.learners, color="#404040", lw=0.8, ls=":")
