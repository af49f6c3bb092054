"""Computes the numbers that the figures of a run show. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from diloco.common.protocol import wire
from diloco.run.agreement import Pairs
from diloco.run.cli import format_numbers
from diloco.run.timeseries import Column, TimeSeries
from diloco.show.page.lanes import Lane

# The most points of a curve, beyond which values are binned; and the fewest values of a quantile.
POINTS = 150
FEWEST = 12
# The most lanes that are shown one by one.
LANES = 40
# The most fragments, or learners, that a figure shows as separate lines.
LINES = 8
PHASES = ("wait", "open", "grace", "merge", "publish")


class Binned(NamedTuple):
    """Values y in bins along x; each column is float64 [bins], without empty bins.

    Attributes:
        centre: mean x of the bin's values.
        low, middle, high: 10 %, 50 % and 90 % quantiles of the bin's values.
        mean: mean of the bin's values.
    """

    centre: Column
    low: Column
    middle: Column
    high: Column
    mean: Column


def binned(x: Column, y: Column, bins: int = POINTS) -> Binned:
    """Returns quantiles and means of `y` in bins along `x`, each with about as many values.

    There are at most `bins` bins, and fewer if a bin would have less than `FEWEST` values.
    """
    order = np.argsort(x, kind="stable")
    count = int(np.clip(len(order) // FEWEST, 1, bins))
    parts = [part for part in np.array_split(order, count) if part.size]
    quantiles = np.asarray([np.quantile(y[part], (0.1, 0.5, 0.9)) for part in parts])
    centre = np.asarray([x[part].mean() for part in parts])
    quantiles = quantiles.reshape(-1, 3)
    mean = np.asarray([y[part].mean() for part in parts])
    return Binned(centre, quantiles[:, 0], quantiles[:, 1], quantiles[:, 2], mean)


def grouped(keys: Column, values: Column, count: int) -> list[Column]:
    """Returns the values with key 0, those with key 1, ... up to `count` - 1, each in order.

    Args:
        keys: the key of each value.
        values: the values.
        count: the number of keys, and of groups.
    """
    order = np.argsort(keys, kind="stable")
    return np.split(values[order], np.searchsorted(keys[order], np.arange(1, count)))


@dataclass
class Shown:
    """The numbers of a run that its figures show.

    Attributes:
        series: the run's tape.
        lanes: each learner's states over time.
        scores: scores on held-out data, in order of time.
        pairs: cosines between learners' updates; None: not computed.
        copied: whether the run is read from a bundle, whose maker may have altered it.
    """

    series: TimeSeries
    lanes: list[Lane]
    scores: list[wire.Score] = field(default_factory=list)
    pairs: Pairs | None = None
    copied: bool = False

    @cached_property
    def begin_s(self) -> float:
        """When time axes begin, in seconds since the epoch."""
        return self.series.begins_s

    @cached_property
    def span_s(self) -> float:
        """The length of time axes in seconds."""
        return max(self.series.ends_s - self.begin_s, 1e-3)

    @property
    def unit(self) -> format_numbers.Unit:
        """The unit of time axes."""
        return format_numbers.time_unit(self.span_s)

    @property
    def since_what(self) -> str:
        """The label of a time axis."""
        since = "oldest message" if self.series.trimmed else "first learner joined"
        return f"time since the {since} ({self.unit.name})"

    def since(self, times_s: Column) -> Column:
        """Converts seconds since the epoch to the time axis: since its beginning, in its unit."""
        return (times_s - self.begin_s) / self.unit.scale

    def edges(self) -> Column:
        """Returns the edges of bins for rates, in seconds since the epoch.

        There are 8 to 160 bins of equal length, of four update intervals of the slowest learner
        where the run is long enough.
        """
        steps = [lane.step_s for lane in self.lanes if lane.step_s]
        interval = self.series.settings.sync.interval_steps / self.series.fragments
        width_s = 4 * interval * max(steps, default=0.0)
        count = int(np.clip(self.span_s / max(width_s, 1e-9), 8, 160))
        return np.linspace(self.begin_s, self.begin_s + self.span_s, count + 1)


def tokens_at(series: TimeSeries, times_s: Column) -> Column:
    """Returns the tokens credited to the model up to each of these times (mean over fragments)."""
    stored_s, tokens = series.inputs["time_s"], series.inputs["tokens"]
    summed = np.concatenate([[0.0], np.cumsum(tokens)]) / max(series.fragments, 1)
    trimmed = max(series.tokens_merged() - summed[-1], 0.0)
    return np.asarray(summed[np.searchsorted(stored_s, times_s, side="right")] + trimmed)


def rate(times_s: Column, amounts: Column, edges_s: Column) -> Column:
    """Returns the sum of amounts in each bin divided by the bin's seconds, float64 [bins].

    Args:
        times_s: the time of each amount.
        amounts: the amounts.
        edges_s: the edges of the bins, one more than bins.
    """
    sums, _ = np.histogram(times_s, bins=edges_s, weights=amounts)
    return np.asarray(sums / np.diff(edges_s))


def phases(shown: Shown) -> dict[str, Column]:
    """Returns the seconds of each round by phase of `PHASES`, float64 [rounds]; NaN: unknown."""
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


@dataclass(frozen=True)
class TimeShares:
    """A learner's time in seconds, by use.

    Attributes:
        merged: time whose work is in the model.
        other: time of other work: catching up, or steps that were not merged.
        stalled, down: time in this state (`lanes.py`).
    """

    merged: float
    other: float
    stalled: float
    down: float

    @property
    def total(self) -> float:
        """Seconds since the learner's first join, less the time it was away."""
        return self.merged + self.other + self.stalled + self.down


def spent(shown: Shown) -> dict[str, TimeShares]:
    """Returns each learner's time by use, by the learner's name."""
    inputs, names = shown.series.inputs, shown.series.learners
    sums = np.bincount(inputs["learner"].astype(np.int64), inputs["steps"], len(names))
    steps = dict(zip(names, sums.tolist(), strict=True))
    found, fragments = {}, shown.series.fragments_of()
    for lane in shown.lanes:
        merged = steps[lane.learner] / fragments[lane.learner] * lane.step_s
        worked = lane.seconds("training") + lane.seconds("catching up")
        merged = min(merged, worked)
        found[lane.learner] = TimeShares(
            merged, worked - merged, lane.seconds("stalled"), lane.seconds("down")
        )
    return found


def goodput(times: dict[str, TimeShares]) -> float:
    """Returns the share of all learners' time whose work is in the model, 0 to 1."""
    total = sum(time.total for time in times.values())
    return sum(time.merged for time in times.values()) / total if total else 0.0


def most_troubled(lanes: Sequence[Lane]) -> list[Lane]:
    """Returns the lanes to show, in order of name: the `LANES` of those that trained least."""
    chosen = sorted(lanes, key=lambda lane: lane.seconds("training"))[:LANES]
    return sorted(chosen, key=lambda lane: lane.learner)


def to_the_round(of: Column, norms: Column) -> Column:
    """Returns each norm divided by the median norm of its round.

    Args:
        of: the round of each norm; the rows of a round must be adjacent.
        norms: the norms.
    """
    found = np.empty_like(norms)
    edges = np.flatnonzero(np.diff(of)) + 1
    for part in np.split(np.arange(len(norms)), edges):
        usual = np.median(norms[part])
        found[part] = norms[part] / usual if usual > 0 else 1.0
    return found


def standing_out(shown: Shown) -> list[int]:
    """Returns the indices of the learners whose loss and norm stand out most, ascending.

    These are at most `LINES` learners. How far one stands out is the sum of two distances on a
    logarithmic scale: of its loss from the run's median, of its norms from their rounds' medians.
    """
    inputs = shown.series.inputs
    if not len(inputs):
        return []
    norms = to_the_round(inputs["round"], inputs["norm"])
    learner, losses = inputs["learner"], inputs["loss"]
    usual, count = max(float(np.median(losses)), 1e-9), int(learner.max()) + 1
    pairs = zip(*(grouped(learner, each, count) for each in (losses, norms)), strict=True)
    apart = {
        index: abs(np.log(max(np.median(own), 1e-9) / usual))
        + abs(np.log(max(np.median(lengths), 1e-9)))
        for index, (own, lengths) in enumerate(pairs)
        if own.size
    }
    return sorted(sorted(apart, key=lambda index: -apart[index])[:LINES])
