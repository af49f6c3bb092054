"""Figures of a run as a whole: is it learning, what did each learner do, what came of the time."""

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from diloco.cli import units
from diloco.figures import style
from diloco.figures.binned import Column
from diloco.report import numbers
from diloco.report.lanes import STATES, Lane
from diloco.report.numbers import Shown, Spent

# Marks of a lane, beyond which they are summed up.
MARKS = 400


def name_time(shown: Shown, axes: Axes) -> None:
    """Make a time axis of x."""
    axes.set_xlabel(shown.since_what)
    axes.set_xlim(0, shown.span_s / shown.unit.scale)


def loss(shown: Shown) -> Figure | None:
    """Training and evaluation loss over tokens and over time."""
    series = shown.series
    times_s, losses = series.inputs["time_s"], series.inputs["loss"]
    if not losses.size:
        return None
    figure, (left, right) = style.panels(2, 3.5, sharey=True)
    scored = np.asarray([score.loss for score in shown.scores])
    unit = units.count_unit(float(numbers.tokens_at(series, times_s).max()))
    places = (
        (left, numbers.losses_over_tokens(shown, unit)),
        (right, numbers.losses_over_time(shown)),
    )
    for axes, found in places:
        style.band(axes, found.training, style.BLUE, "training (updates)")
        if scored.size:
            axes.plot(
                found.scored, scored, "--o", color=style.VERMILLION, ms=4, lw=1.2,
                label="held-out data", clip_on=False, zorder=3,
            )  # fmt: skip
    left.set_xlabel(f"tokens merged ({unit.name})" if unit.name else "tokens merged")
    left.set_ylabel("loss")
    left.set_xlim(left=0 if not series.trimmed else None)
    name_time(shown, right)
    low, high = float(losses.min()), float(losses.max())
    if low > 0 and high > 30 * low:
        left.set_yscale("log")
    left.set_title("over tokens")
    right.set_title("over time")
    right.legend(loc="upper right")
    return figure


_LOOKS = {
    "training": {"facecolor": style.SKY},
    "catching up": {"facecolor": style.YELLOW, "hatch": "////"},
    "stalled": {"facecolor": style.ORANGE, "hatch": "...."},
    "down": {"facecolor": "white", "hatch": "xxxx"},
}


def timeline(shown: Shown) -> Figure | None:
    """A lane for each learner, with marks for versions."""
    if not shown.lanes:
        return None
    lanes = numbers.most_troubled(shown.lanes)
    figure, (axes,) = style.panels(1, 1.5 + 0.34 * len(lanes))
    _version_lane(shown, axes)
    merged_s = _merged_times(shown)
    for place, lane in enumerate(lanes, start=1):
        _draw_lane(shown, axes, place, lane)
        marks = merged_s.get(lane.learner, np.zeros(0))
        if marks.size <= MARKS:
            axes.vlines(shown.since(marks), place + 0.2, place + 0.36, color="black", lw=0.6)
    name_time(shown, axes)
    axes.set_ylim(len(lanes) + 0.5, -0.6)
    axes.set_yticks(range(len(lanes) + 1), ["versions", *(lane.learner for lane in lanes)])
    axes.tick_params(axis="y", length=0, pad=9)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    handles: list[Patch] = [
        Patch(label=state, edgecolor="#303030", lw=0.4, **_LOOKS[state])  # type: ignore[arg-type]
        for state in STATES
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(STATES))
    if len(lanes) < len(shown.lanes):
        axes.set_title(f"the {len(lanes)} of {len(shown.lanes)} learners that trained least")
    return figure


def _version_lane(shown: Shown, axes: Axes) -> None:
    times_s = shown.series.versions["time_s"]
    times_s = times_s[times_s >= shown.begin_s]
    if times_s.size <= MARKS:
        axes.vlines(shown.since(times_s), -0.36, 0.36, color="black", lw=0.7)
        return
    counts, edges = np.histogram(shown.since(times_s), bins=240)
    height = 0.72 * counts / counts.max()
    axes.stairs(0.36 - height, edges, baseline=0.36, fill=True, color="#404040")


def _merged_times(shown: Shown) -> dict[str, Column]:
    """When updates of each learner were merged, by any fragment."""
    inputs = shown.series.inputs
    learner, times_s = inputs["learner"], inputs["time_s"]
    names = shown.series.learners
    return {name: times_s[learner == index] for index, name in enumerate(names)}


def _draw_lane(shown: Shown, axes: Axes, place: int, lane: Lane) -> None:
    for state in STATES:
        spans = [
            (shown.since(np.asarray(span.begin_s)), (span.end_s - span.begin_s) / shown.unit.scale)
            for span in lane.spans
            if span.state == state
        ]
        # Hatches of many slivers are a blot: the colour alone then.
        looks = dict(_LOOKS[state]) if len(spans) <= MARKS else {"facecolor": "#606060"}
        axes.broken_barh(spans, (place - 0.36, 0.52), edgecolor="#303030", lw=0.4, **looks)  # type: ignore[arg-type]
    for when, marker in ((lane.kills, "x"), (lane.joins, 5)):
        axes.plot(
            shown.since(np.asarray(when)), [place - 0.1] * len(when), linestyle="none",
            marker=marker, color="black", ms=6, mew=1.6 if marker == "x" else 0, clip_on=False,
        )  # fmt: skip


def throughput(shown: Shown) -> Figure | None:
    """Tokens a second, trained and merged."""
    series = shown.series
    if not len(series.updates):
        return None
    figure, (axes,) = style.panels(1, 2.9)
    found = numbers.throughput(shown)
    rates = [(found.first, "trained"), (found.second, "merged")]
    unit = units.count_unit(max(float(rate.max()) for rate, _ in rates))
    looks = ((style.BLUE, "-"), (style.VERMILLION, "--"))
    for (rate, label), (colour, dash) in zip(rates, looks, strict=True):
        style.steps(axes, shown.since(found.edges_s), rate / unit.scale, colour, dash, label)
    name_time(shown, axes)
    axes.set_ylabel(f"tokens per second{f' ({unit.name})' if unit.name else ''}")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def time_spent(shown: Shown) -> Figure | None:
    """What came of each learner's time."""
    times = numbers.spent(shown)
    if not times:
        return None
    names = [lane.learner for lane in numbers.most_troubled(shown.lanes)]
    figure, (axes,) = style.panels(1, 1.3 + 0.3 * (len(names) + 1))
    every = [times[name] for name in names]
    whole = Spent(*(sum(getattr(t, part) for t in times.values()) for part in _PARTS))
    rows = [whole, *every]
    left = np.zeros(len(rows))
    for part, (label, looks) in _PARTS.items():
        widths = np.asarray([100 * getattr(t, part) / max(t.total, 1e-9) for t in rows])
        with mpl.rc_context({"hatch.color": "#303030"}):
            axes.barh(
                range(len(rows)), widths, 0.7, left, label=label, edgecolor="#303030", lw=0.4,
                **looks,  # type: ignore[arg-type]
            )  # fmt: skip
        left += widths
    for place, row in enumerate(rows):
        percent = 100 * row.merged / max(row.total, 1e-9)
        # Within its bar, if that is wide enough.
        at, side = (percent - 1, "right") if percent > 8 else (percent + 1, "left")
        axes.text(at, place, f"{percent:.0f} %", va="center", ha=side, size=8)
    axes.set_yticks(range(len(rows)), ["all", *names])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time since its first join, without time away (%)")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside upper right", ncols=4)
    return figure


_PARTS: dict[str, tuple[str, dict[str, str]]] = {
    "merged": ("in the model", {"facecolor": style.SKY}),
    "other": ("catching up, or not merged", _LOOKS["catching up"]),
    "stalled": ("stalled", _LOOKS["stalled"]),
    "down": ("down", _LOOKS["down"]),
}
