"""What the figures of a run show, as numbers: drawn by `figures_*.py`, served by the live page."""

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from diloco.cli import units
from diloco.common import wire
from diloco.figures.binned import Binned, Column, binned
from diloco.projections.agreement import Pairs
from diloco.projections.timeseries import TimeSeries
from diloco.report.lanes import Lane

# Points of a curve, beyond which values are summed up.
POINTS = 300
# Lanes that are shown one by one.
LANES = 40
PHASES = ("wait", "open", "grace", "merge", "publish")


@dataclass
class Shown:
    """Everything that the figures show; `copied`: of a file, which its maker may have written."""

    series: TimeSeries
    lanes: list[Lane]
    scores: list[wire.Score] = field(default_factory=list)
    pairs: Pairs | None = None
    copied: bool = False

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

    @property
    def since_what(self) -> str:
        """What a time axis says."""
        since = "oldest message" if self.series.trimmed else "first learner joined"
        return f"time since the {since} ({self.unit.name})"

    def since(self, times_s: Column) -> Column:
        """Times on a time axis."""
        return (times_s - self.begin_s) / self.unit.scale

    def edges(self) -> Column:
        """Edges of bins for rates: each long enough for some updates of every learner."""
        steps = [lane.step_s for lane in self.lanes if lane.step_s]
        interval = self.series.settings.sync.interval_steps / self.series.fragments
        width_s = 4 * interval * max(steps, default=0.0)
        count = int(np.clip(self.span_s / max(width_s, 1e-9), 8, 160))
        return np.linspace(self.begin_s, self.begin_s + self.span_s, count + 1)


class Rates(NamedTuple):
    """Two rates in the same bins, whose edges are times."""

    edges_s: Column
    first: Column
    second: Column


class Losses(NamedTuple):
    """Training loss in bins along x, and the scores' places there."""

    training: Binned
    scored: Column


def tokens_at(series: TimeSeries, times_s: Column) -> Column:
    """Tokens merged by then, on average over fragments."""
    stored_s, tokens = series.inputs["time_s"], series.inputs["tokens"]
    summed = np.concatenate([[0.0], np.cumsum(tokens)]) / max(series.fragments, 1)
    trimmed = max(series.tokens_merged() - summed[-1], 0.0)
    return np.asarray(summed[np.searchsorted(stored_s, times_s, side="right")] + trimmed)


def losses_over_tokens(shown: Shown, unit: units.Unit) -> Losses:
    """Loss of updates along the tokens merged by then."""
    inputs = shown.series.inputs
    tokens = tokens_at(shown.series, inputs["time_s"]) / unit.scale
    scored = np.asarray([score.tokens for score in shown.scores]) / unit.scale
    return Losses(binned(tokens, inputs["loss"], POINTS // 2), scored)


def losses_over_time(shown: Shown) -> Losses:
    """Loss of updates along the time axis; NaN for scores that have no place there."""
    series = shown.series
    scored_s = np.asarray([score.at_s for score in shown.scores], np.float64)
    # Version 0 was there before anybody joined; what is before a trimmed tape has no place.
    places_s = np.maximum(scored_s, shown.begin_s)
    if series.trimmed:
        places_s[scored_s < shown.begin_s] = np.nan
    times = shown.since(series.inputs["time_s"])
    return Losses(binned(times, series.inputs["loss"], POINTS // 2), shown.since(places_s))


def throughput(shown: Shown) -> Rates:
    """Tokens a second: trained, and merged."""
    series, edges_s = shown.series, shown.edges()
    trained = rate(series.updates["time_s"], series.updates["tokens"], edges_s)
    merged = rate(series.inputs["time_s"], series.inputs["tokens"], edges_s)
    return Rates(edges_s, trained / series.fragments, merged / series.fragments)


def traffic(shown: Shown) -> Rates:
    """Bytes a second of all learners: up, and down."""
    series, edges_s, rounds = shown.series, shown.edges(), shown.series.rounds
    up = rate(series.updates["time_s"], series.updates["bytes"], edges_s)
    down = rate(rounds["stored_s"], rounds["down_bytes"] * rounds["live"], edges_s)
    return Rates(edges_s, up, down)


def rate(times_s: Column, amounts: Column, edges_s: Column) -> Column:
    """Amounts a second in each bin."""
    sums, _ = np.histogram(times_s, bins=edges_s, weights=amounts)
    return np.asarray(sums / np.diff(edges_s))


def staleness(shown: Shown) -> Binned:
    """Versions between an update's base and the one it went into, along the time axis."""
    inputs = shown.series.inputs
    return binned(shown.since(inputs["time_s"]), inputs["staleness"], POINTS // 2)


def phases(shown: Shown) -> dict[str, Column]:
    """Seconds of each round in each of `PHASES`, float64 [rounds]; NaN where unknown."""
    rounds = shown.series.rounds
    closed_s, opened_s = rounds["closed_s"], rounds["opened_s"]
    quorum_s = np.where(rounds["quorum_s"] > 0, rounds["quorum_s"], closed_s)
    quorum_s = np.clip(quorum_s, opened_s, closed_s)
    before_s = np.full(len(rounds), np.nan)
    fragment, stored_s = rounds["fragment"], rounds["stored_s"]
    for index in range(shown.series.fragments):
        (mine,) = np.nonzero(fragment == index)
        before_s[mine[1:]] = stored_s[mine[:-1]]
    edges = (before_s, opened_s, quorum_s, closed_s, rounds["merged_s"], stored_s)
    # Clocks of aggregator and server differ a little.
    lengths = [np.maximum(after - before, 0.0) for before, after in itertools.pairwise(edges)]
    return dict(zip(PHASES, lengths, strict=True))


def phases_over_time(shown: Shown, lengths: dict[str, Column]) -> tuple[Column, dict[str, Column]]:
    """Edges of bins on the time axis, and mean seconds from opening to the record in each."""
    closed = shown.since(shown.series.rounds["closed_s"])
    edges = np.linspace(0, shown.span_s / shown.unit.scale, min(60, 2 + len(closed) // 8) + 1)
    place = np.clip(np.digitize(closed, edges) - 1, 0, len(edges) - 2)
    counts = np.maximum(np.bincount(place, minlength=len(edges) - 1), 1)
    means = {
        name: np.bincount(place, lengths[name], minlength=len(edges) - 1) / counts
        for name in PHASES[1:]
    }
    return edges, means


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
    inputs, names = shown.series.inputs, shown.series.learners
    sums = np.bincount(inputs["learner"].astype(np.int64), inputs["steps"], len(names))
    steps = dict(zip(names, sums.tolist(), strict=True))
    found = {}
    for lane in shown.lanes:
        merged = steps[lane.learner] / shown.series.fragments * lane.step_s
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


def most_troubled(lanes: list[Lane]) -> list[Lane]:
    """Those to be shown: all, or those who trained least, in order of name."""
    chosen = sorted(lanes, key=lambda lane: lane.seconds("training"))[:LANES]
    return sorted(chosen, key=lambda lane: lane.learner)
