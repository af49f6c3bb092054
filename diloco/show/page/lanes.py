"""Each learner's states over time, from the tape: training, stalled, down, catching up, or away.

The tape has joins and leaves, and each update states the learner's data position. So the steps
between two updates of a life (an incarnation) are known. The learner's usual pace is one step in
the median step time that its updates state. Time is cut into short stretches:

- *training*: steps at half the usual pace or more.
- *stalled*: fewer steps, though the learner is alive: a pause, or a machine busy with other work.
- *down*: a life ended without a leave, and no other has joined since.
- *catching up*: alive, but no update of this life is merged yet.
- *away*: left in order, or not joined yet.

Updates that could not be announced in an outage arrive late and all at once: steps beyond those
that fit into a stretch are attributed to the stretches before it.
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
    """A span of time in one state of `STATES`, in seconds since the epoch.

    Attributes:
        present: the share of its slices with which the learner lives then; 1 without several.
    """

    begin_s: float
    end_s: float
    state: str
    present: float = 1.0


@dataclass
class Lane:
    """One learner's states over time; times are seconds since the epoch.

    Attributes:
        spans: the spans in order, without overlap; the learner was away between these.
        kills: when lives ended without a leave.
        joins: when lives joined, if within the time shown; `lives`: number of all lives.
        step_s: usual seconds of a step; 0: unknown.
        steps: inner steps that the updates of all lives cover.
        slices: how many of its slices its newest life has, as text such as "3 of 4"; "": it does
            not have several.
    """

    learner: str
    spans: list[StateSpan]
    kills: list[float]
    joins: list[float]
    lives: int
    step_s: float
    steps: float
    slices: str = ""

    def seconds(self, state: str) -> float:
        """Returns the seconds spent in one of `STATES`."""
        return sum(span.end_s - span.begin_s for span in self.spans if span.state == state)


@dataclass
class _Updates:
    """A learner's updates, in order of time: columns of `TimeSeries.updates`."""

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
    lanes, fragments = [], series.fragments_of()
    for learner, begin, end in zip(series.learners, edges[:-1], edges[1:], strict=True):
        updates = _Updates(**{name: values[begin:end] for name, values in columns.items()})
        lanes.append(_lane(series, learner, lives[learner], updates, fragments[learner]))
    return sorted(lanes, key=lambda lane: lane.learner)


def _lane(
    series: TimeSeries,
    learner: str,
    known_lives: list[Incarnation],
    updates: _Updates,
    fragments: float,
) -> Lane:
    joins = [life.joined_s for life in known_lives if life.joined_s >= series.begins_s]
    lives = [_shown(series, life) for life in known_lives]
    known = updates.step_time_s[updates.step_time_s > 0]
    step_s = float(np.median(known)) if known.size else 0.0
    steps = float(updates.steps.sum()) / fragments
    lane = Lane(learner, [], [], joins, len(lives), step_s, steps)
    for index, life in enumerate(lives):
        following = lives[index + 1] if index + 1 < len(lives) else None
        mine = updates.incarnation == life.incarnation
        ends_s = _end_of(series, life, updates.time_s[mine], following)
        present = 1.0
        if (some := life.slices) is not None:
            present, lane.slices = some.present / some.given, f"{some.present} of {some.given}"
        spans = _alive(life, updates, mine, ends_s, step_s)
        lane.spans += [span._replace(present=present) for span in spans]
        if life.left_s is None and (following or ends_s < series.ends_s):
            lane.kills.append(ends_s)
            until_s = following.joined_s if following else series.ends_s
            lane.spans.append(StateSpan(ends_s, until_s, "down"))
    return lane


def _shown(series: TimeSeries, life: Incarnation) -> Incarnation:
    """Returns a life as if it had joined where the time series begins, if it joined before that.

    If an update of the life was merged at all, the life counts as caught up from there on.
    """
    begins_s = series.begins_s
    if life.joined_s >= begins_s:
        return life
    left_s = None if life.left_s is None else max(life.left_s, begins_s)
    merged_s = None if life.merged_s is None else begins_s
    return replace(life, joined_s=begins_s, left_s=left_s, merged_s=merged_s)


def _end_of(
    series: TimeSeries, life: Incarnation, times_s: Column, following: Incarnation | None
) -> float:
    """Returns when a life ended (seconds since the epoch).

    It is the time of its leave; else that of its last message; or the end of the series, if the
    life is alive.

    Args:
        series: the run's tape.
        life: the life.
        times_s: when each of the life's updates was announced.
        following: the learner's next life; None: there is none.
    """
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
    """Returns the spans of a life from its join to its end.

    Args:
        life: the life.
        updates: the learner's updates.
        mine: which of these updates are the life's, bool [updates].
        ends_s: when the life ended.
        step_s: usual seconds of a step; 0: unknown.
    """
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
    """Returns the life's data position, in batches, at the times `edges_s`.

    It is interpolated between updates; after the last update, the life's mean pace is assumed.
    """
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
    """Returns the share of each stretch that was worked, 0 to 1.

    Args:
        worked_s: seconds of work that were attributed to each stretch; what exceeds the stretch
            moves to the stretches before it.
        length_s: seconds of each stretch.
    """
    share, surplus_s = np.zeros_like(worked_s), 0.0
    for index in range(len(worked_s) - 1, -1, -1):
        here_s = worked_s[index] + surplus_s
        surplus_s = max(0.0, here_s - length_s[index])
        share[index] = (here_s - surplus_s) / length_s[index]
    return share


def _joined(spans: list[StateSpan]) -> list[StateSpan]:
    """Returns the spans, with adjacent spans of equal state joined."""
    found: list[StateSpan] = []
    for span in spans:
        if found and found[-1].state == span.state:
            found[-1] = StateSpan(found[-1].begin_s, span.end_s, span.state)
        else:
            found.append(span)
    return found
