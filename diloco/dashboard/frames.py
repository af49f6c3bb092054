"""What a page is sent: a run's status and figures as small JSON documents. Pure.

None of them grows with the fleet or the run: what is long is cut, and says of how many. All text
comes from a run, whose learners are half trusted: the page takes it as text, never as markup.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from diloco.check.symptoms import Finding
from diloco.cli import units
from diloco.common import wire
from diloco.figures.binned import Binned, Column
from diloco.look.status import FragmentStatus, LearnerStatus, Status
from diloco.projections.timeseries import TimeSeries
from diloco.report import numbers
from diloco.report.lanes import STATES, Lane
from diloco.report.numbers import Rates, Shown
from diloco.report.summary import events, facts, subtitle, warnings

ALERTS, FRAGMENTS, EVENTS = 20, 24, 30
# Rounds of each fragment that its line shows.
ROUNDS = 12
PAGE = 40
# Of a lane: marks of a kind and spans; and its width, in which they are given.
MARKS, SPANS, WIDTH = 40, 400, 1000
# Settings and learners' strings are short; what is longer is not shown whole.
TEXT = 2000

Document = dict[str, Any]


class Learners(NamedTuple):
    """What pages of learners are made of."""

    statuses: tuple[LearnerStatus, ...] = ()
    lanes: Mapping[str, Lane] = {}
    begin_s: float = 0.0
    span_s: float = 1.0


def as_bytes(document: Document) -> bytes:
    """As JSON, which has no NaN."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def now(status: Status, series: TimeSeries) -> Document:
    """How a run fares at this moment, or did when the bus last told of it."""
    # The rounds of a run that has ended do not move away.
    until_s = series.ends_s if status.state == "ended" else status.as_of_s
    fragments = sorted(status.fragments, key=lambda one: -one.version_s)[:FRAGMENTS]
    fragments.sort(key=lambda one: one.fragment)
    return {
        "run": status.run,
        "state": status.state,
        "current": status.current,
        "as_of_s": status.as_of_s,
        "epoch": status.epoch,
        "step": status.global_step,
        "steps": status.steps,
        "tokens_per_s": _short(status.tokens_per_s),
        "versions_per_min": _short(60 * status.versions_per_s),
        "bytes_up_per_s": _short(status.bytes_up_per_s),
        "tape_bytes": status.tape_bytes,
        "tape_limit_bytes": status.tape_limit_bytes,
        "alerts": [_alert(found) for found in status.alerts[:ALERTS]],
        "alerts_of": len(status.alerts),
        "states": Counter(one.state for one in status.learners),
        "fragments": [_fragment(one) for one in fragments],
        "fragments_of": len(status.fragments),
        "rounds": _rounds(series, {one.fragment for one in fragments}, until_s),
    }


def _fragment(one: FragmentStatus) -> Document:
    times = {name: _short(getattr(one, name)) for name in ("version_s", "waiting_s", "round_s")}
    return asdict(one) | times


def _alert(found: Finding) -> Document:
    runbook = found.runbook.removeprefix("runbooks/") if found.runbook else None
    texts = {"about": found.about, "sentence": found.sentence, "advice": found.advice}
    cut = {key: text[:TEXT] for key, text in texts.items()}
    return {"severity": found.severity, "runbook": runbook, **cut}


def _rounds(series: TimeSeries, fragments: set[int], at_s: float) -> list[list[float]]:
    """Newest rounds: fragment, version, updates, and ages of opening, quorum, close and record."""
    rows = series.rounds.newest(ROUNDS * series.fragments)
    quorum_s = np.where(rows["quorum_s"] > 0, rows["quorum_s"], rows["closed_s"])
    ages = [at_s - times for times in (rows["opened_s"], quorum_s, rows["closed_s"])]
    columns = [rows["fragment"], rows["version"], rows["inputs"], *ages, at_s - rows["stored_s"]]
    found = np.stack(columns, axis=1)[np.isin(rows["fragment"], list(fragments))]
    return [[_short(value) for value in row] for row in found]


def figures(shown: Shown, at_s: float) -> Document:
    """A run's figures: those of its report."""
    series = shown.series
    return {
        "subtitle": subtitle(shown),
        "warnings": warnings(shown),
        "facts": [asdict(fact) for fact in facts(shown)],
        "since": shown.since_what,
        "unit": shown.unit.name,
        "span": _short(shown.span_s / shown.unit.scale),
        "loss": _losses(shown),
        "throughput": _rates(shown, numbers.throughput(shown), units.count_unit, "tokens/s"),
        "traffic": _rates(shown, numbers.traffic(shown), units.byte_unit, "/s"),
        "staleness": _band(numbers.staleness(shown)) if len(series.inputs) else None,
        "phases": _phases(shown) if len(series.rounds) else None,
        "events": [_event(row) for row in events(shown).rows[:EVENTS]],
        "events_of": len(events(shown).rows),
        "sample": _sample(shown.scores),
        "at_s": at_s,
    }


def _event(row: Sequence[str]) -> list[str]:
    return [row[0], row[2][:TEXT]]


def _losses(shown: Shown) -> Document | None:
    if not len(shown.series.inputs) and not shown.scores:
        return None
    scored = np.asarray([score.loss for score in shown.scores])
    found: Document = {}
    most = max((float(score.tokens) for score in shown.scores), default=0.0)
    unit = units.count_unit(max(most, shown.series.tokens_merged()))
    along = {"time": numbers.losses_over_time(shown)}
    if len(shown.series.inputs):
        along["tokens"] = numbers.losses_over_tokens(shown, unit)
    for name, losses in along.items():
        found[name] = _band(losses.training) | _points(losses.scored, scored)
    return found | {"tokens_unit": unit.name}


def _points(places: Column, values: Column) -> Document:
    """Points in order of x; those without a place are left out."""
    known = np.isfinite(places) & np.isfinite(values)
    order = np.argsort(places[known], kind="stable")
    x, y = places[known][order], values[known][order]
    # Of several at one place the newest stands.
    last = np.append(np.diff(x) > 0, True)[: len(x)]
    return {"scored_x": _list(x[last]), "scored": _list(y[last])}


def _band(found: Binned) -> Document:
    return {
        "x": _list(found.centre),
        "low": _list(found.low),
        "middle": _list(found.middle),
        "high": _list(found.high),
        "mean": _list(found.mean),
    }


def _rates(shown: Shown, rates: Rates, unit_of: Any, name: str) -> Document | None:
    if not len(shown.series.updates):
        return None
    greatest = max(float(rates.first.max()), float(rates.second.max()))
    unit = unit_of(greatest)
    return {
        "edges": _list(shown.since(rates.edges_s)),
        "first": _list(rates.first / unit.scale),
        "second": _list(rates.second / unit.scale),
        "unit": f"{unit.name} {name}".strip() if name[0] != "/" else f"{unit.name}{name}",
    }


def _phases(shown: Shown) -> Document:
    edges, means = numbers.phases_over_time(shown, numbers.phases(shown))
    return {"edges": _list(edges)} | {name: _list(values) for name, values in means.items()}


def _sample(scores: Sequence[wire.Score]) -> Document | None:
    written = [score for score in scores if score.text]
    if not written:
        return None
    newest = written[-1]
    return {"text": newest.text, "step": newest.global_step, "loss": _short(newest.loss)}


def learners(known: Learners, *, page: int, find: str) -> Document:
    """A page of learners with their lanes: those that something may be amiss with come first."""
    found = [one for one in known.statuses if find.casefold() in one.name.casefold()]
    found.sort(key=lambda one: (one.state in ("training", "left"), one.name))
    if len(found) <= PAGE:
        found.sort(key=lambda one: one.name)
    pages = max(1, math.ceil(len(found) / PAGE))
    page = min(max(page, 0), pages - 1)
    rows = found[page * PAGE : (page + 1) * PAGE]
    return {
        "of": len(known.statuses),
        "found": len(found),
        "page": page,
        "pages": pages,
        "rows": [_learner(one, known) for one in rows],
    }


def _learner(one: LearnerStatus, known: Learners) -> Document:
    lane = known.lanes.get(one.name)
    return {
        "name": one.name,
        "state": one.state,
        "heard_s": _short(one.heard_s),
        "step": one.local_step,
        "loss": _short(one.loss),
        "tokens_per_s": _short(one.tokens_per_s),
        "staleness": _short(one.staleness),
        "rejected": one.rejected,
        "up": one.bytes_up,
        "down": one.bytes_down,
        "stall": _short(one.stall_fraction),
        "lane": _lane(lane, known) if lane is not None else None,
    }


def _lane(lane: Lane, known: Learners) -> Document:
    def place(at_s: float) -> int:
        return round(WIDTH * min(max((at_s - known.begin_s) / known.span_s, 0.0), 1.0))

    spans = [(place(s.begin_s), place(s.end_s), STATES.index(s.state)) for s in lane.spans]
    total_s = sum(span.end_s - span.begin_s for span in lane.spans)
    return {
        "spans": [span for span in spans if span[1] > span[0]][-SPANS:],
        "joins": [place(at_s) for at_s in lane.joins[-MARKS:]],
        "kills": [place(at_s) for at_s in lane.kills[-MARKS:]],
        "lives": lane.lives,
        "shares": {state: _short(lane.seconds(state) / total_s) for state in STATES}
        if total_s
        else {},
    }


def _list(values: Column) -> list[float | None]:
    return [_short(value) for value in values.tolist()]


def _short(value: float | None) -> Any:
    """In five digits; None for what is no number."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
