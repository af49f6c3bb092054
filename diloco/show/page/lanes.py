"""Each learner's states over time, from the tape: training, stalled, down, catching up, or away.

The tape has joins, leaves, and with every update the learner's place in its data. So a life's
progress is known between its updates, and its usual pace is the median of the updates' step times.

- *training*: progress at half the usual pace or better.
- *stalled*: slower, though alive; a pause, or a machine that is busy with something else.
- *down*: a life ended without a leave; until the next one joins, or the run ends.
- *catching up*: alive, but no update of this life is merged yet.
- *away*: left cleanly, or not joined yet.

Updates that could not be announced in an outage come late and at once: progress beyond what fits
into a stretch of time is attributed to the stretches before it.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.run.timeseries import Column, Incarnation, TimeSeries

# The most stretches of a life: more than a page has points for.
STRETCHES = 200
# A share of the usual pace below which a learner is stalled.
STALLED = 0.5
# Seconds without a heartbeat after which a learner counts as down.
SILENT_S = 30.0

STATES = ("training", "catching up", "stalled", "down")


class StateSpan(NamedTuple):
    """A stretch of time in one state of `STATES`."""

    begin_s: float
    end_s: float
    state: str


@dataclass
class Lane:
    """One learner's time.

    Attributes:
        spans: in order, without overlap; the learner was away between them.
        kills: when lives ended without a leave.
        joins: when lives began, if within the time shown; `lives` counts all.
        step_s: usual time of a step, 0 if unknown.
        steps: steps whose work was announced, over all lives.
    """

    learner: str
    spans: list[StateSpan]
    kills: list[float]
    joins: list[float]
    lives: int
    step_s: float
    steps: float

    def seconds(self, state: str) -> float:
        """Returns the seconds spent in a state."""
        return sum(span.end_s - span.begin_s for span in self.spans if span.state == state)


@dataclass
class _Updates:
    """A learner's updates, in order of time."""

    incarnation: Column
    time_s: Column
    position: Column
    steps: Column
    step_time_s: Column


def make_lanes(series: TimeSeries) -> list[Lane]:
    """Returns a lane for each learner, in order of name."""
    table = series.updates
    owner = table["learner"]
    order = np.argsort(owner, kind="stable")
    columns = {
        name: table[name][order]
        for name in ("incarnation", "time_s", "position", "steps", "step_time_s")
    }
    edges = np.searchsorted(owner[order], np.arange(len(series.learners) + 1))
    lives: dict[str, list[Incarnation]] = {name: [] for name in series.learners}
    for life in series.lives:
        lives[life.learner].append(life)
    lanes = []
    for learner, begin, end in zip(series.learners, edges[:-1], edges[1:], strict=True):
        updates = _Updates(**{name: values[begin:end] for name, values in columns.items()})
        lanes.append(_lane(series, learner, lives[learner], updates))
    return sorted(lanes, key=lambda lane: lane.learner)


def _lane(
    series: TimeSeries, learner: str, known_lives: list[Incarnation], updates: _Updates
) -> Lane:
    joins = [life.joined_s for life in known_lives if life.joined_s >= series.begins_s]
    lives = [_shown(series, life) for life in known_lives]
    known = updates.step_time_s[updates.step_time_s > 0]
    step_s = float(np.median(known)) if known.size else 0.0
    steps = float(updates.steps.sum()) / max(series.fragments, 1)
    lane = Lane(learner, [], [], joins, len(lives), step_s, steps)
    for index, life in enumerate(lives):
        following = lives[index + 1] if index + 1 < len(lives) else None
        mine = updates.incarnation == life.incarnation
        ends_s = _end_of(series, life, updates.time_s[mine], following)
        lane.spans += _alive(life, updates, mine, ends_s, step_s)
        if life.left_s is None and (following or ends_s < series.ends_s):
            lane.kills.append(ends_s)
            until_s = following.joined_s if following else series.ends_s
            lane.spans.append(StateSpan(ends_s, until_s, "down"))
    return lane


def _shown(series: TimeSeries, life: Incarnation) -> Incarnation:
    """Returns the part of a life that the tape still has; before it, it counts as caught up."""
    begins_s = series.begins_s
    if life.joined_s >= begins_s:
        return life
    left_s = None if life.left_s is None else max(life.left_s, begins_s)
    merged_s = None if life.merged_s is None else begins_s
    return replace(life, joined_s=begins_s, left_s=left_s, merged_s=merged_s)


def _end_of(
    series: TimeSeries, life: Incarnation, times_s: Column, following: Incarnation | None
) -> float:
    """Returns when a life was last heard of; now, if it is alive."""
    if life.left_s is not None:
        return min(life.left_s, following.joined_s) if following else life.left_s
    last_s = max(life.joined_s, float(times_s.max(initial=0.0)))
    beat = series.beats.get(life.learner)
    if beat is not None and beat.heartbeat.incarnation == life.incarnation:
        last_s = max(last_s, beat.heard_at_s)
    if following:
        return min(last_s, following.joined_s)
    return last_s if series.ends_s - last_s > SILENT_S else series.ends_s


def _alive(
    life: Incarnation,
    updates: _Updates,
    mine: npt.NDArray[np.bool_],
    ends_s: float,
    step_s: float,
) -> list[StateSpan]:
    """Returns the spans of a life from its join on; `step_s`: usual time of a step."""
    width_s = ends_s - life.joined_s
    if width_s <= 0:
        return []
    merged_s = ends_s if life.merged_s is None else min(life.merged_s, ends_s)
    spans = [StateSpan(life.joined_s, merged_s, "catching up")] if merged_s > life.joined_s else []
    if not mine.any() or not step_s:
        return [*spans, StateSpan(merged_s, ends_s, "training")] if merged_s < ends_s else spans
    pace = width_s / STRETCHES
    # Steps come one at a time: a stretch of fewer than ten says little.
    count = max(1, int(width_s / max(pace, 10 * step_s)))
    edges_s = np.linspace(life.joined_s, ends_s, count + 1)
    worked_s = np.diff(_progress(life, updates, mine, edges_s, ends_s)) * step_s
    share = _carry_back(worked_s, np.diff(edges_s))
    for (begin_s, end_s), part in zip(itertools.pairwise(edges_s.tolist()), share, strict=True):
        if end_s > merged_s:
            state = "stalled" if part < STALLED else "training"
            spans.append(StateSpan(max(begin_s, merged_s), end_s, state))
    return _joined(spans)


def _progress(
    life: Incarnation,
    updates: _Updates,
    mine: npt.NDArray[np.bool_],
    edges_s: Column,
    ends_s: float,
) -> Column:
    """Returns the data positions at the edges' times, in batches; interpolated between updates."""
    times_s, positions = updates.time_s[mine], np.maximum.accumulate(updates.position[mine])
    first = float((updates.position[mine] - updates.steps[mine]).min())
    times_s = np.concatenate([[life.joined_s], times_s])
    positions = np.concatenate([[first], positions])
    if life.left_s is not None and life.position >= positions[-1]:
        times_s, positions = np.append(times_s, ends_s), np.append(positions, life.position)
    known = np.interp(edges_s, times_s, positions)
    # After its last update it is taken to continue at the same pace, until it was last heard of.
    after = edges_s > times_s[-1]
    if after.any() and times_s[-1] > life.joined_s:
        pace = (positions[-1] - first) / (times_s[-1] - life.joined_s)
        known[after] = positions[-1] + pace * (edges_s[after] - times_s[-1])
    return np.asarray(known)


def _carry_back(worked_s: Column, length_s: Column) -> Column:
    """Returns the share of each stretch that was worked; a surplus moves to earlier stretches."""
    share, surplus_s = np.zeros_like(worked_s), 0.0
    for index in range(len(worked_s) - 1, -1, -1):
        here_s = worked_s[index] + surplus_s
        surplus_s = max(0.0, here_s - length_s[index])
        share[index] = (here_s - surplus_s) / length_s[index]
    return share


def _joined(spans: list[StateSpan]) -> list[StateSpan]:
    """Returns the spans, with neighbours in the same state joined."""
    found: list[StateSpan] = []
    for span in spans:
        if found and found[-1].state == span.state:
            found[-1] = StateSpan(found[-1].begin_s, span.end_s, span.state)
        else:
            found.append(span)
    return found
