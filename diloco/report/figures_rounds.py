"""Figures of rounds: how stale and how heavy updates are, traffic, where time goes, agreement."""

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.cli import units
from diloco.figures import style
from diloco.figures.binned import Column, binned
from diloco.report import numbers
from diloco.report.figures_run import name_time
from diloco.report.numbers import PHASES, POINTS, Shown

# Fragments that a figure tells apart by lines; more become an image.
LINES = 8


def staleness(shown: Shown) -> Figure | None:
    """Distributions of staleness, of updates in a round, and of weight."""
    series = shown.series
    if not len(series.inputs):
        return None
    figure, (left, middle, right) = style.panels(3, 3.0, width_ratios=(1, 1, 1.3))
    style.share_bars(left, series.inputs["staleness"], style.SKY)
    left.set(title="staleness", xlabel="versions behind", ylabel="share of updates (%)")
    style.share_bars(middle, series.rounds["inputs"], style.GREEN, most=16)
    middle.set(title="size of a round", xlabel="updates merged", ylabel="share of rounds (%)")
    _weights(shown, right)
    return figure


def _weights(shown: Shown, axes: Axes) -> None:
    """How much of its round an update decides, by learner."""
    inputs, series = shown.series.inputs, shown.series
    share = inputs["weight"] * inputs["discount"]
    row = inputs["round"].astype(np.int64)
    percent = 100 * share / np.bincount(row, share)[row]
    learner = inputs["learner"]
    axes.set(title="weight in its round", xlabel="share of the round's weight (%)")
    names = sorted(series.learners)
    if len(names) <= numbers.LANES // 2:
        index = {name: place for place, name in enumerate(series.learners)}
        style.quantile_bars(axes, [(name, percent[learner == index[name]]) for name in names])
    else:
        axes.hist(percent, bins=40, color=style.BLUE, edgecolor="white", lw=0.4)
        axes.set_ylabel("updates")
    axes.set_xlim(0, min(100, 1.2 * float(np.quantile(percent, 0.99))))


def traffic(shown: Shown) -> Figure | None:
    """Bytes a second, up and down."""
    series = shown.series
    if not len(series.updates):
        return None
    edges, up, down = numbers.traffic(shown)
    figure, (axes,) = style.panels(1, 2.9)
    unit = units.byte_unit(max(float(up.max()), float(down.max())))
    looks = (
        (up, style.BLUE, "-", "up: all learners' updates"),
        (down, style.VERMILLION, "--", "down: versions, read by every live learner"),
    )
    for rate, colour, dash, label in looks:
        style.steps(axes, shown.since(edges), rate / unit.scale, colour, dash, label)
    name_time(shown, axes)
    axes.set_ylabel(f"{unit.name} per second")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper right", ncols=2)
    return figure


_PHASE_LOOKS = {
    "wait": ("#D9D9D9", ""),
    "open": (style.SKY, ""),
    "grace": (style.YELLOW, "////"),
    "merge": (style.BLUE, ""),
    "publish": (style.ORANGE, "...."),
}


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms"


def anatomy(shown: Shown) -> Figure | None:
    """Where the time of a round goes."""
    if not len(shown.series.rounds):
        return None
    figure, (left, right) = style.panels(2, 3.1, width_ratios=(1, 1.4))
    lengths = numbers.phases(shown)
    rows = []
    for name, values in lengths.items():
        known = values[np.isfinite(values)]
        rows.append((name, np.maximum(known, 1e-4)))
    style.quantile_bars(left, rows)
    left.set_xscale("log")
    left.xaxis.set_major_formatter(lambda value, _: _seconds(value))
    left.set(title="length of each phase")
    edges, means = numbers.phases_over_time(shown, lengths)
    base = np.zeros(len(edges) - 1)
    for name in PHASES[1:]:
        top = base + means[name]
        colour, hatch = _PHASE_LOOKS[name]
        with mpl.rc_context({"hatch.color": "#303030"}):
            right.stairs(
                top, edges, baseline=base, fill=True, facecolor=colour, hatch=hatch or None,
                edgecolor="#303030", lw=0.0, label=name,
            )  # fmt: skip
        base = top
    right.set(title="from opening to the record, mean", ylabel="seconds")
    name_time(shown, right)
    right.set_ylim(bottom=0)
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper right", ncols=4)
    return figure


def agreement(shown: Shown) -> Figure | None:
    """Cosines between updates of a round, over time and by pairs of learners."""
    cosines = shown.series.cosines
    matrix = shown.pairs.mean() if shown.pairs and shown.pairs.rounds else None
    if not len(cosines) and matrix is None:
        return None
    figure, (left, right) = style.panels(2, 3.3, width_ratios=(1.5, 1))
    if len(cosines):
        values = binned(shown.since(cosines["time_s"]), cosines["cosine"], POINTS // 5)
        style.band(left, values, style.BLUE, "mean cosine in a round")
    else:
        left.text(0.5, 0.5, "no round by radial averaging\nhad two updates", ha="center",
                  transform=left.transAxes)  # fmt: skip
    left.axhline(0, color="black", lw=0.7)
    left.set(title="over time", ylabel="cosine")
    left.set_ylim(min(-0.05, *cosines["cosine"], 0) - 0.05 if len(cosines) else -1, 1)
    name_time(shown, left)
    if matrix is None:
        right.set_axis_off()
        right.text(0.5, 0.5, "not compared: shards are gone\nfrom the store, or large",
                   ha="center", transform=right.transAxes)  # fmt: skip
    else:
        _pairs(shown, figure, right, matrix)
    return figure


def _pairs(shown: Shown, figure: Figure, axes: Axes, matrix: Column) -> None:
    names = shown.series.learners
    order = np.argsort(names)[: numbers.LANES]
    shown_matrix = matrix[np.ix_(order, order)]
    image = axes.imshow(shown_matrix, vmin=0, vmax=1, cmap="cividis")
    axes.set_title("between learners")
    axes.grid(visible=False)
    labels = [names[place] for place in order]
    axes.set_yticks(range(len(order)), labels)
    axes.set_xticks(range(len(order)), labels, rotation=45, ha="right", rotation_mode="anchor")
    if len(order) <= LINES:
        for (row, column), value in np.ndenumerate(shown_matrix):
            if np.isfinite(value):
                colour = "black" if value > 0.55 else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour,
                          size=8)  # fmt: skip
    figure.colorbar(image, ax=axes, label="cosine", fraction=0.05)


def fragments(shown: Shown) -> Figure | None:
    """Of each fragment: how far learners agree, and how long its updates are."""
    series = shown.series
    if not len(series.inputs):
        return None
    figure, (left, right) = style.panels(2, 3.2, width_ratios=(1, 1.6))
    of, cosines = series.cosines["fragment"], series.cosines["cosine"]
    names = range(series.fragments)
    if series.fragments <= numbers.LANES // 2:
        style.quantile_bars(left, [(str(index), cosines[of == index]) for index in names])
        left.set_ylabel("fragment")
        left.axvline(0, color="black", lw=0.7)
    else:
        left.plot(names, [np.median(cosines[of == index]) for index in names], "o", ms=3)
        left.set_xlabel("fragment")
    left.set(title="cosine between its updates", xlabel="cosine")
    _norms(shown, figure, right)
    return figure


def _norms(shown: Shown, figure: Figure, axes: Axes) -> None:
    inputs, count = shown.series.inputs, shown.series.fragments
    norms = inputs["norm"] / inputs["steps"]
    fragment, times = inputs["fragment"], shown.since(inputs["time_s"])
    axes.set_title("norm of its updates, per step")
    name_time(shown, axes)
    if count <= LINES:
        for index in range(count):
            mine = fragment == index
            values = binned(times[mine], norms[mine], POINTS // 5)
            axes.plot(values.centre, values.middle, style.DASHES[index % 4], lw=1.3,
                      color=style.CYCLE[index % len(style.CYCLE)], label=str(index))  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylabel("L2 norm")
        axes.legend(title="fragment", loc="center left", bbox_to_anchor=(1.0, 0.5))
        return
    cells = int(np.clip(len(shown.series.rounds) / count / 4, 4, 120))
    edges = np.linspace(0, shown.span_s / shown.unit.scale, cells + 1)
    place = np.arange(-0.5, count)
    sums, *_ = np.histogram2d(fragment, times, (place, edges), weights=norms)
    counts, *_ = np.histogram2d(fragment, times, (place, edges))
    with np.errstate(invalid="ignore"):
        image = axes.pcolormesh(edges, place, sums / np.where(counts, counts, np.nan),
                                norm="log", cmap="cividis", rasterized=True)  # fmt: skip
    axes.set_ylabel("fragment")
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label="L2 norm")


def rejected(shown: Shown) -> Figure | None:
    """Rejected updates by reason, over time and by learner."""
    series = shown.series
    if not len(series.refusals):
        return None
    reasons: dict[str, int] = {}
    for (reason, _), count in series.refusal_reasons.items():
        reasons[reason] = reasons.get(reason, 0) + count
    rows = sorted(reasons.items(), key=lambda item: -item[1])[: numbers.LANES]
    figure, (left, right) = style.panels(2, 1.9 + 0.22 * len(rows), width_ratios=(1, 1.4))
    left.barh(range(len(rows)), [count for _, count in rows], 0.6, color=style.VERMILLION)
    for place, (_, count) in enumerate(rows):
        left.annotate(f"{count:,}", (count, place), (4, 0), textcoords="offset points", va="center")
    left.set_yticks(range(len(rows)), [reason for reason, _ in rows])
    left.set_ylim(len(rows) - 0.4, -0.6)
    left.margins(x=0.15)
    left.set(title="by reason", xlabel="updates rejected")
    left.grid(visible=False, axis="y")
    edges = shown.edges()
    sums, _ = np.histogram(series.refusals["time_s"], edges)
    right.stairs(sums, shown.since(edges), fill=True, color=style.VERMILLION, alpha=0.8)
    right.set(title="over time", ylabel="updates rejected")
    right.set_ylim(bottom=0)
    name_time(shown, right)
    return figure
