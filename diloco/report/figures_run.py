"""Figures of a run as a whole: is it learning, what did each learner do, what came of the time."""

from dataclasses import dataclass, field

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from diloco.cli import units
from diloco.common import wire
from diloco.figures import style
from diloco.projections.agreement import Pairs
from diloco.projections.timeseries import Column, TimeSeries
from diloco.report.lanes import STATES, Lane

# Points of a curve, and marks of a lane, beyond which they are summed up.
POINTS = 300
MARKS = 400


@dataclass
class Shown:
    """Everything that the figures show."""

    series: TimeSeries
    lanes: list[Lane]
    scores: list[wire.Score] = field(default_factory=list)
    pairs: Pairs | None = None

    @property
    def begin_s(self) -> float:
        """Where time axes begin."""
        return self.series.begins_s

    @property
    def span_s(self) -> float:
        """How long they are."""
        return max(self.series.ends_s - self.begin_s, 1e-3)

    @property
    def unit(self) -> units.Unit:
        """Of time axes."""
        return units.time_unit(self.span_s)

    def since(self, times_s: Column) -> Column:
        """Times on a time axis."""
        return (times_s - self.begin_s) / self.unit.scale

    def name_time(self, axes: Axes) -> None:
        """Make a time axis of x."""
        since = "oldest message" if self.series.trimmed else "first learner joined"
        axes.set_xlabel(f"time since the {since} ({self.unit.name})")
        axes.set_xlim(0, self.span_s / self.unit.scale)

    def edges(self) -> Column:
        """Edges of bins for rates: each long enough for some updates of every learner."""
        steps = [lane.step_s for lane in self.lanes if lane.step_s]
        interval = self.series.settings.sync.interval_steps / self.series.fragments
        width_s = 4 * interval * max(steps, default=0.0)
        count = int(np.clip(self.span_s / max(width_s, 1e-9), 8, 160))
        return np.linspace(self.begin_s, self.begin_s + self.span_s, count + 1)


def tokens_at(series: TimeSeries, times_s: Column) -> Column:
    """Tokens merged by then, on average over fragments."""
    stored_s, tokens = series.inputs["time_s"], series.inputs["tokens"]
    summed = np.concatenate([[0.0], np.cumsum(tokens)]) / max(series.fragments, 1)
    trimmed = max(series.tokens_merged() - summed[-1], 0.0)
    return np.asarray(summed[np.searchsorted(stored_s, times_s, side="right")] + trimmed)


def loss(shown: Shown) -> Figure | None:
    """Training and evaluation loss over tokens and over time."""
    series = shown.series
    times_s, losses = series.inputs["time_s"], series.inputs["loss"]
    if not losses.size:
        return None
    figure, (left, right) = style.panels(2, 3.5, sharey=True)
    scored_s = np.asarray([score.at_s for score in shown.scores])
    scored = np.asarray([score.loss for score in shown.scores])
    # Version 0 was there before anybody joined; what is before a trimmed tape has no place.
    places_s = np.maximum(scored_s, shown.begin_s)
    if series.trimmed:
        places_s[scored_s < shown.begin_s] = np.nan
    tokens = tokens_at(series, times_s)
    unit = units.count_unit(float(tokens.max()))
    places = [
        (left, tokens / unit.scale, np.asarray([s.tokens for s in shown.scores]) / unit.scale),
        (right, shown.since(times_s), shown.since(places_s)),
    ]
    for axes, x, x_scored in places:
        style.band(axes, style.binned(x, losses, POINTS // 2), style.BLUE, "training (updates)")
        if scored.size:
            axes.plot(
                x_scored, scored, "--o", color=style.VERMILLION, ms=4, lw=1.2,
                label="held-out data", clip_on=False, zorder=3,
            )  # fmt: skip
    left.set_xlabel(f"tokens merged ({unit.name})" if unit.name else "tokens merged")
    left.set_ylabel("loss")
    left.set_xlim(left=0 if not series.trimmed else None)
    shown.name_time(right)
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
    lanes = _most_troubled(shown.lanes)
    figure, (axes,) = style.panels(1, 1.5 + 0.34 * len(lanes))
    _version_lane(shown, axes)
    merged_s = _merged_times(shown)
    for place, lane in enumerate(lanes, start=1):
        _draw_lane(shown, axes, place, lane)
        marks = merged_s.get(lane.learner, np.zeros(0))
        if marks.size <= MARKS:
            axes.vlines(shown.since(marks), place + 0.2, place + 0.36, color="black", lw=0.6)
    shown.name_time(axes)
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


def _most_troubled(lanes: list[Lane]) -> list[Lane]:
    """Those to be shown: all, or those who trained least, in order of name."""
    chosen = sorted(lanes, key=lambda lane: lane.seconds("training"))[: style.LANES]
    return sorted(chosen, key=lambda lane: lane.learner)


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
    edges = shown.edges()
    rates = [
        (_rate(series.updates["time_s"], series.updates["tokens"], edges), "trained"),
        (_rate(series.inputs["time_s"], series.inputs["tokens"], edges), "merged"),
    ]
    rates = [(rate / series.fragments, label) for rate, label in rates]
    unit = units.count_unit(max(float(rate.max()) for rate, _ in rates))
    looks = ((style.BLUE, "-"), (style.VERMILLION, "--"))
    for (rate, label), (colour, dash) in zip(rates, looks, strict=True):
        style.steps(axes, shown.since(edges), rate / unit.scale, colour, dash, label)
    shown.name_time(axes)
    axes.set_ylabel(f"tokens per second{f' ({unit.name})' if unit.name else ''}")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def _rate(times_s: Column, amounts: Column, edges_s: Column) -> Column:
    """Amounts a second in each bin."""
    sums, _ = np.histogram(times_s, bins=edges_s, weights=amounts)
    return np.asarray(sums / np.diff(edges_s))


@dataclass(frozen=True)
class Spent:
    """What came of a learner's time, in seconds; `merged` is in the model."""

    merged: float
    other: float
    stalled: float
    down: float

    @property
    def total(self) -> float:
        """Since its first join, less the time it was away."""
        return self.merged + self.other + self.stalled + self.down


def spent(shown: Shown) -> dict[str, Spent]:
    """What came of each learner's time."""
    inputs = shown.series.inputs
    learner, steps = inputs["learner"], inputs["steps"]
    found = {}
    for lane in shown.lanes:
        index = shown.series.learners.index(lane.learner)
        merged = float(steps[learner == index].sum()) / shown.series.fragments * lane.step_s
        worked = lane.seconds("training") + lane.seconds("catching up")
        merged = min(merged, worked)
        found[lane.learner] = Spent(
            merged, worked - merged, lane.seconds("stalled"), lane.seconds("down")
        )
    return found


def goodput(times: dict[str, Spent]) -> float:
    """Share of all learners' time whose work is in the model."""
    total = sum(time.total for time in times.values())
    return sum(time.merged for time in times.values()) / total if total else 0.0


def time_spent(shown: Shown) -> Figure | None:
    """What came of each learner's time."""
    times = spent(shown)
    if not times:
        return None
    names = [lane.learner for lane in _most_troubled(shown.lanes)]
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
