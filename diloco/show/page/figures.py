"""Builds the figures of a run's page from its numbers. Pure.

A figure is a list of panels; a panel has marks (lines, bars, points) over two axes (`svg.py`). If
there is nothing to show, a figure is an empty list.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from diloco.run.cli import format_numbers
from diloco.run.timeseries import Columns, TimeSeries
from diloco.show.page import numbers
from diloco.show.page.lanes import STATES, Lane
from diloco.show.page.numbers import LANES, LINES, PHASES, POINTS, Binned, Shown, TimeShares, binned
from diloco.show.page.svg import (
    CYCLE,
    DASHES,
    Axis,
    Column,
    Panel,
    PlotMark,
    bars,
    line,
    points,
    rules,
)

# The most marks of a lane.
MARKS = 400
# Colours that are left beside those of the median and of held-out data.
OTHERS = tuple(look for look in CYCLE if look not in ("ink", "red"))
# The last bar of versions, or of updates in a round, stands for this number and all above.
MOST = 12
# The number of rounds that a fragment's line shows.
ROUNDS = 12
UnitOf = Callable[[float], format_numbers.Unit]
STATE_LOOKS = dict(zip(STATES, ("sky", "yellow", "orange", "paper"), strict=True))
PHASE_LOOKS = dict(zip(PHASES, ("grey", "sky", "yellow", "blue", "orange"), strict=True))
SPENT = {
    "merged": ("in the model", "sky"),
    "other": ("catching up, or not merged", "yellow"),
    "stalled": ("stalled", "orange"),
    "down": ("down", "paper"),
}


def loss(shown: Shown) -> list[Panel]:
    """Returns panels of the losses of updates and of held-out data, over time and over tokens."""
    return losses({"": shown})


def losses(runs: Mapping[str, Shown]) -> list[Panel]:
    """Returns panels of the losses of several runs, each counted from the run's beginning.

    Args:
        runs: the runs by name; a single run may have the name "".
    """
    runs = {key: run for key, run in runs.items() if len(run.series.inputs) or run.scores}
    if not runs:
        return []
    tokens = format_numbers.count_unit(max(run.series.tokens_merged() for run in runs.values()))
    time = format_numbers.time_unit(max(run.span_s for run in runs.values()))
    over_tokens, over_time = [], []
    for place, (name, run) in enumerate(runs.items()):
        at_s = run.series.inputs["time_s"]
        merged = numbers.tokens_at(run.series, at_s) / tokens.scale
        scored = np.asarray([score.tokens for score in run.scores]) / tokens.scale
        over_tokens += _losses(name, run, merged, scored, place)
        since = (at_s - run.begin_s) / time.scale
        scored = (_scored_s(run) - run.begin_s) / time.scale
        over_time += _losses(name, run, since, scored, place)
    known = np.concatenate([run.series.inputs["loss"] for run in runs.values()])
    wide = bool(known.size and known.min() > 0 and known.max() > 30 * known.min())
    y = Axis(label="loss", log=wide)
    x = Axis(label=f"tokens merged ({tokens.name or '1'})")
    panels = [
        Panel(marks=over_time, x=_clock(runs), y=y, title="over time"),
        Panel(marks=over_tokens, x=x, y=y, title="over tokens"),
    ]
    by_slice = _slices(*runs.values()) if len(runs) == 1 else []
    if by_slice:
        label = Axis(label="held-out loss")
        panels.append(Panel(marks=by_slice, x=_clock(runs), y=label, title="by slice"))
    return panels


def _slices(run: Shown) -> list[PlotMark]:
    """Returns a line for each slice of the held-out data, of the loss over time.

    Of many slices, those whose loss is furthest above its lowest have one.
    """
    losses = {
        name: np.asarray([one.slices.get(name, {}).get("loss", np.nan) for one in run.scores])
        for name in (run.scores[-1].slices if run.scores else {})
    }
    lost = {name: float(of[-1] - np.nanmin(of)) for name, of in losses.items()}
    since = (_scored_s(run) - run.begin_s) / run.unit.scale
    return [
        line(since, losses[name], CYCLE[place % len(CYCLE)], name, DASHES[place % len(DASHES)])
        for place, name in enumerate(sorted(losses, key=lambda one: -lost[one])[:LINES])
    ]


def _losses(name: str, run: Shown, along: Column, scored: Column, place: int) -> list[PlotMark]:
    """Returns the marks of a run's losses.

    Args:
        name: name of one of several runs; "": the run is alone, and shown in more detail.
        run: the run's numbers.
        along: x of each merged update.
        scored: x of each score.
        place: number of the run among several, which chooses its colour.
    """
    inputs = run.series.inputs
    found = binned(along, inputs["loss"])
    scores = np.asarray([score.loss for score in run.scores])
    if name:
        look, dash = CYCLE[place % len(CYCLE)], DASHES[place % len(DASHES)]
        return [
            line(found.centre, found.middle, look, name, dash),
            points(scored, scores, look),
        ]
    held_out = [
        line(scored, scores, "red", "held-out data", DASHES[1]),
        points(scored, scores, "red"),
    ]
    each = [
        _curve(place, along[mine], inputs["loss"][mine], run.series.learners[index], OTHERS)
        for place, index in enumerate(numbers.standing_out(run))
        if (mine := inputs["learner"] == index).any()
    ]
    training = [band(found), *each, line(found.centre, found.middle, "ink", "training")]
    return training + (held_out if scores.size else [])


def _clock(runs: Mapping[str, Shown]) -> Axis:
    """Returns a time axis as long as the longest run."""
    longest = max(runs.values(), key=lambda run: run.span_s)
    return (
        _time(longest)
        if len(runs) == 1
        else replace(_time(longest), label=f"time ({longest.unit.name})")
    )


def _scored_s(run: Shown) -> Column:
    """Returns when the scored versions were made, in seconds since the epoch; NaN: off the axis."""
    at_s = np.asarray([score.at_s for score in run.scores], np.float64)
    # Version 0 precedes the first join; times before a trimmed tape are not on the axis.
    early = at_s < run.begin_s
    return np.where(early, np.nan if run.series.trimmed else run.begin_s, at_s)


def _time(run: Shown) -> Axis:
    return Axis(label=run.since_what, low=0, high=run.span_s / run.unit.scale)


def timeline(shown: Shown) -> list[Panel]:
    """Returns a panel with a lane for each learner, and marks of versions and merged updates.

    A lane shows the learner's states over time (`lanes.py`). Of many learners, those that trained
    least have one.
    """
    lanes = numbers.most_troubled(shown.lanes)
    if not lanes:
        return []
    merged_s = _merged(shown)
    of_each = [merged_s.get(lane.learner, np.zeros(0)) for lane in lanes]
    at = shown.since(np.concatenate(of_each))
    row = np.repeat(np.arange(1.0, len(lanes) + 1), [at_s.size for at_s in of_each])
    merged = rules(at, row + 0.2, row + 0.36, "merged")
    some = f"{len(lanes)} of {len(shown.lanes)} learners" if len(lanes) < len(shown.lanes) else ""
    names = ["versions", *map(_name, lanes)]
    return [
        Panel(
            marks=[_versions(shown), *_lanes(shown, lanes), merged], title=some, x=_time(shown),
            y=Axis(names=names), width=960, height=90 + 22 * len(names),
        )
    ]  # fmt: skip


def lanes_of(shown: Shown, lanes: Sequence[Lane]) -> Panel:
    """Returns a panel with these lanes: learners' states over time."""
    names = ["", *map(_name, lanes)]
    return Panel(
        marks=_lanes(shown, lanes), x=_time(shown), y=Axis(names=names), width=960,
        height=90 + 22 * len(names),
    )  # fmt: skip


def _name(lane: Lane) -> str:
    return f"{lane.learner}, {lane.slices}" if lane.slices else lane.learner


def _lanes(shown: Shown, lanes: Sequence[Lane]) -> list[PlotMark]:
    """Returns the marks of lanes, one in each row from row 1 on; fewer slices have lower bars."""
    marks = []
    for state, look in STATE_LOOKS.items():
        spans = [
            (place + 0.16, 0.52 * span.present, span.begin_s, span.end_s)
            for place, lane in enumerate(lanes, 1)
            for span in lane.spans
            if span.state == state
        ]
        edge, height, begin_s, end_s = np.asarray(spans, np.float64).reshape(-1, 4).T
        edges = (shown.since(begin_s), shown.since(end_s))
        marks.append(bars(edges, (edge - height, edge), look, state))
    joins, kills = [lane.joins for lane in lanes], [lane.kills for lane in lanes]
    for name, shape, times_s in (
        ("joined", "start", joins), ("ended uncleanly", "cross", kills),
    ):  # fmt: skip
        ends = [(place - 0.1, at_s) for place, some in enumerate(times_s, 1) for at_s in some]
        y, at_s = np.asarray(ends, np.float64).reshape(-1, 2).T
        marks.append(points(shown.since(at_s), y, "ink", name, shape))
    return marks


def _versions(shown: Shown) -> PlotMark:
    at = shown.since(shown.series.versions["time_s"])
    at = at[at >= 0]
    if at.size <= MARKS:
        edge = np.full(at.size, 0.36)
        return rules(at, -edge, edge)
    counts, edges = np.histogram(at, bins=240)
    top = 0.36 - 0.72 * counts / counts.max()
    return bars((edges[:-1], edges[1:]), (np.full(counts.size, 0.36), top), "grey")


def _merged(shown: Shown) -> dict[str, Column]:
    """Returns when each learner's updates were merged (seconds since the epoch), by name.

    Learners with more than `MARKS` merged updates are left out.
    """
    inputs, names = shown.series.inputs, shown.series.learners
    of_each = numbers.grouped(inputs["learner"], inputs["time_s"], len(names))
    return {name: at_s for name, at_s in zip(names, of_each, strict=False) if at_s.size <= MARKS}


def time_spent(shown: Shown) -> list[Panel]:
    """Returns a panel of the shares of each learner's time, and of all learners', by use."""
    times = numbers.spent(shown)
    if not times:
        return []
    names = [lane.learner for lane in numbers.most_troubled(shown.lanes)]
    whole = TimeShares(*(sum(getattr(time, part) for time in times.values()) for part in SPENT))
    rows = [whole, *(times[name] for name in names)]
    at, marks = np.arange(float(len(rows))), []
    left = np.zeros(len(rows))
    for part, (label, look) in SPENT.items():
        widths = np.asarray([100 * getattr(row, part) / max(row.total, 1e-9) for row in rows])
        marks.append(bars((left, left + widths), (at - 0.35, at + 0.35), look, label))
        left = left + widths
    merged = marks[0].to
    texts = [f"{part:.0f} %" for part in merged]
    marks.append(PlotMark(kind="texts", x=np.maximum(merged - 3, 3), y=at, look="ink", texts=texts))
    label = "share of the time since its first join, without time away (%)"
    x, y = Axis(label=label, low=0, high=100), Axis(names=["all", *names])
    return [Panel(marks=marks, x=x, y=y, width=960, height=80 + 22 * len(rows))]


def throughput(shown: Shown) -> list[Panel]:
    """Returns a panel of tokens a second over time: trained, as updates state, and merged."""
    series = shown.series
    if not len(series.updates):
        return []
    found = {"trained": _tokens(shown, series.updates), "merged": _tokens(shown, series.inputs)}
    return _rates({"": shown}, found, format_numbers.count_unit, "tokens per second")


def throughputs(runs: Mapping[str, Shown]) -> list[Panel]:
    """Returns a panel of merged tokens a second over time, for several runs by name."""
    known = {name: run for name, run in runs.items() if len(run.series.updates)}
    found = {name: _tokens(run, run.series.inputs) for name, run in known.items()}
    return _rates(known, found, format_numbers.count_unit, "tokens per second") if known else []


def _tokens(shown: Shown, table: Columns) -> Column:
    rate = numbers.rate(table["time_s"], table["tokens"], shown.edges())
    return rate / shown.series.fragments


def traffic(shown: Shown) -> list[Panel]:
    """Returns a panel of bytes a second over time: up, of updates; down, of versions.

    A version counts once for each learner that was live when it was made.
    """
    series, edges_s, rounds_of = shown.series, shown.edges(), shown.series.rounds
    if not len(series.updates):
        return []
    up = numbers.rate(series.updates["time_s"], series.updates["bytes"], edges_s)
    down_bytes = rounds_of["down_bytes"] * rounds_of["live"]
    down = numbers.rate(rounds_of["stored_s"], down_bytes, edges_s)
    return _rates(
        {"": shown}, {"up": up, "down": down}, format_numbers.byte_unit, "bytes per second"
    )


def _rates(
    runs: Mapping[str, Shown], rates: Mapping[str, Column], unit_of: UnitOf, label: str
) -> list[Panel]:
    """Returns a panel of rates over time.

    Args:
        runs: the runs by name; a single run has the name "".
        rates: a rate in each bin of `Shown.edges`, by name of its run, or of the single run's rate.
        unit_of: chooses the unit by the greatest rate.
        label: label of the y axis.
    """
    unit = unit_of(max(float(values.max()) for values in rates.values()))
    x, marks = _clock(runs), []
    scale = max(runs.values(), key=lambda run: run.span_s).unit.scale
    for place, (name, values) in enumerate(rates.items()):
        run = runs.get(name) or runs[""]
        edges = (run.edges() - run.begin_s) / scale
        marks.append(
            PlotMark(kind="steps", x=edges[:-1], to=edges[1:], y=values / unit.scale, name=name,
                 look=CYCLE[place % len(CYCLE)], dash=DASHES[place % len(DASHES)])
        )  # fmt: skip
    return [Panel(marks=marks, x=x, y=Axis(label=f"{label} ({unit.name or '1'})", low=0))]


def staleness(shown: Shown) -> list[Panel]:
    """Returns panels on the updates that were merged.

    They show staleness over time, and the distributions of staleness, of the number of updates in
    a round, and of an update's share of its round's weight.
    """
    inputs = shown.series.inputs
    if not len(inputs):
        return []
    found = binned(shown.since(inputs["time_s"]), inputs["staleness"])
    over_time = [band(found), line(found.centre, found.mean, "blue", "mean staleness")]
    versions = Axis(label="versions behind", low=0)
    return [
        Panel(marks=over_time, x=_time(shown), y=versions, title="staleness over time"),
        _shares(inputs["staleness"], "staleness", f"versions behind ({MOST}: or more)"),
        _shares(shown.series.rounds["inputs"], "size of a round", f"updates ({MOST}: or more)"),
        _weights(shown),
    ]


def _shares(values: Column, title: str, label: str) -> Panel:
    """Returns a panel of the frequency of each whole number in `values`, in percent.

    The bar of `MOST` stands for all numbers from `MOST` on.
    """
    found, counts = np.unique(np.minimum(np.round(values), MOST), return_counts=True)
    percent = 100 * counts / max(values.size, 1)
    shares = bars((found - 0.4, found + 0.4), (0 * percent, percent), "sky")
    y = Axis(label="share (%)", low=0)
    return Panel(marks=[shares], title=title, x=Axis(label=label), y=y)


def _weights(shown: Shown) -> Panel:
    """Returns a panel of the updates' shares of their round's weight: by learner, or of all.

    Only a few learners have a row each.
    """
    inputs, learners = shown.series.inputs, shown.series.learners
    share = inputs["weight"] * inputs["discount"]
    row = inputs["round"].astype(np.int64)
    percent = 100 * share / np.bincount(row, share)[row]
    x = Axis(label="share of the round's weight (%)", low=0)
    title = "weight in its round"
    if len(learners) <= LANES // 2:
        of_each = numbers.grouped(inputs["learner"], percent, len(learners))
        return _quantiles(dict(sorted(zip(learners, of_each, strict=True))), title, x)
    counts, edges = np.histogram(percent, 40)
    shares = bars((edges[:-1], edges[1:]), (0 * counts, counts), "sky")
    return Panel(marks=[shares], title=title, x=x, y=Axis(label="updates", low=0))


def band(found: Binned) -> PlotMark:
    """Returns a band from the 10 % to the 90 % quantile of binned values."""
    return PlotMark(kind="band", x=found.centre, low=found.low, high=found.high)


def _quantiles(rows: dict[str, Column], title: str, x: Axis) -> Panel:
    """Returns a panel of distributions, one in each row: the values of `rows`, by the row's title.

    A row has a thin bar (5-95 %), a thick bar (25-75 %) and a dot at the median.
    """
    known = [(place, values) for place, values in enumerate(rows.values()) if values.size]
    at = np.asarray([place for place, _ in known], np.float64)
    quantiles = [np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95)) for _, values in known]
    low, left, middle, right, high = np.asarray(quantiles).reshape(-1, 5).T
    marks = [
        bars((low, high), (at - 0.04, at + 0.04), "blue", "5-95 %"),
        bars((left, right), (at - 0.17, at + 0.17), "sky", "25-75 %"),
        points(middle, at, "ink", "median"),
    ]
    return Panel(
        marks=marks, title=title, x=x, y=Axis(names=[*rows]), height=max(230, 80 + 16 * len(rows))
    )


def anatomy(shown: Shown) -> list[Panel]:
    """Returns panels of the seconds of a round's phases (`PHASES`): over time, and quantiles."""
    if not len(shown.series.rounds):
        return []
    lengths = numbers.phases(shown)
    rows = {name: np.maximum(values[np.isfinite(values)], 1e-4) for name, values in lengths.items()}
    closed = shown.since(shown.series.rounds["closed_s"])
    edges = np.linspace(0, shown.span_s / shown.unit.scale, min(60, 2 + len(closed) // 8) + 1)
    place = np.clip(np.digitize(closed, edges) - 1, 0, len(edges) - 2)
    counts = np.maximum(np.bincount(place, minlength=len(edges) - 1), 1)
    base, marks = np.zeros(len(edges) - 1), []
    for name in PHASES[1:]:
        top = base + np.bincount(place, lengths[name], minlength=len(edges) - 1) / counts
        marks.append(bars((edges[:-1], edges[1:]), (base, top), PHASE_LOOKS[name], name))
        base = top
    seconds = Axis(label="seconds", low=0)
    title = "from opening to the record, mean"
    return [
        Panel(marks=marks, x=_time(shown), y=seconds, title=title),
        _quantiles(rows, "length of each phase", Axis(label="seconds", log=True)),
    ]


def rounds(series: TimeSeries, fragments: Sequence[int], at_s: float) -> list[Panel]:
    """Returns a panel of the newest rounds of some fragments, with a bar for each phase.

    Args:
        series: the run's tape.
        fragments: indices of the fragments, ascending.
        at_s: the time at the right end of the axis, in seconds since the epoch.
    """
    rows = series.rounds.newest(ROUNDS * series.fragments)
    quorum_s = np.where(rows["quorum_s"] > 0, rows["quorum_s"], rows["closed_s"])
    known = np.isin(rows["fragment"], fragments)
    if not known.any():
        return []
    at = np.searchsorted(fragments, rows["fragment"][known]).astype(np.float64)
    edges = [rows["opened_s"], quorum_s, rows["closed_s"], rows["stored_s"]]
    edges = [edge[known] - at_s for edge in edges]
    names = {"open": "open", "grace": "grace", "publish": "merge and publish"}
    marks = [
        bars(pair, (at - 0.35, at + 0.35), PHASE_LOOKS[name], said)
        for pair, (name, said) in zip(itertools.pairwise(edges), names.items(), strict=True)
    ]
    stored = rules(edges[-1], at - 0.45, at + 0.45)
    y = Axis(names=[f"fragment {index}" for index in fragments])
    height = 70 + 18 * len(fragments)
    x = Axis(label="seconds from now", high=0)
    return [Panel(marks=[*marks, stored], x=x, y=y, width=960, height=height)]


def agreement(shown: Shown) -> list[Panel]:
    """Returns panels of the cosines between a round's updates: over time, and by two learners."""
    cosines, panels = shown.series.cosines, []
    if len(cosines):
        found = binned(shown.since(cosines["time_s"]), cosines["cosine"], POINTS // 2)
        mean = line(found.centre, found.middle, "blue", "mean cosine in a round")
        y = Axis(label="cosine", low=min(0.0, float(cosines["cosine"].min())), high=1)
        panels.append(Panel(marks=[band(found), mean], x=_time(shown), y=y, title="over time"))
    if shown.pairs is not None and shown.pairs.rounds:
        panels.append(_pairs(shown.series.learners, shown.pairs.mean()))
    return panels


def _pairs(learners: Sequence[str], cosines: Column) -> Panel:
    order = np.argsort(learners)[:LANES]
    names = [learners[place] for place in order]
    values = cosines[np.ix_(order, order)].ravel()
    row, column = (index.ravel().astype(np.float64) for index in np.indices(2 * [len(order)]))
    marks = [
        PlotMark(kind="boxes", x=column - 0.5, to=column + 0.5, low=row - 0.5, high=row + 0.5,
             shade=np.clip(values, 0, 1), look="sky", name="cosine, 0 to 1")
    ]  # fmt: skip
    if len(order) <= LINES:
        texts = [f"{value:.2f}" if np.isfinite(value) else "" for value in values]
        marks.append(PlotMark(kind="texts", x=column, y=row, texts=texts, look="ink"))
    axis = Axis(names=names)
    return Panel(marks=marks, title="between learners", x=axis, y=axis, height=330)


def learner_panels(shown: Shown) -> list[Panel]:
    """Returns panels of learners over time: loss, norm relative to the round's median, cosine.

    The cosine is that to the other learners' updates. Learners are those that stand out most.
    """
    inputs, learners = shown.series.inputs, shown.series.learners
    if not len(inputs):
        return []
    norms = numbers.to_the_round(inputs["round"], inputs["norm"])
    losses, apart, cosines = [], [], []
    for place, index in enumerate(numbers.standing_out(shown)):
        mine, name = inputs["learner"] == index, learners[index]
        times = shown.since(inputs["time_s"][mine])
        losses.append(_curve(place, times, inputs["loss"][mine], name))
        apart.append(_curve(place, times, norms[mine], name))
        if shown.pairs is not None and (points := shown.pairs.over_time(name)):
            at_s, values = np.asarray(points, np.float64).T
            cosines.append(_curve(place, shown.since(at_s), values, name))
    x, y = _time(shown), Axis(label="loss", log=True)
    panels = [
        Panel(marks=losses, x=x, y=y, title="training loss"),
        Panel(marks=apart, x=x, y=Axis(label="times", log=True),
              title="norm to its round's median"),
        Panel(marks=cosines, x=x, y=Axis(label="cosine", low=-1, high=1),
              title="cosine to the others"),
    ]  # fmt: skip
    return panels[: 3 if cosines else 2]


def _curve(
    place: int, along: Column, values: Column, name: str, looks: Sequence[str] = CYCLE
) -> PlotMark:
    found = binned(along, values, POINTS // 2)
    look, again = looks[place % len(looks)], place // len(looks)
    return line(found.centre, found.middle, look, name, DASHES[(place + again) % len(DASHES)])


def fragments(shown: Shown) -> list[Panel]:
    """Returns panels on each fragment: norms of its updates, and cosines between these."""
    series, count = shown.series, shown.series.fragments
    if not len(series.inputs):
        return []
    of, cosines = series.cosines["fragment"], series.cosines["cosine"]
    rows = {str(index): cosines[of == index] for index in range(count)}
    panels = [_norms(series, shown)]
    if len(cosines):
        panels.append(_quantiles(rows, "cosine between its updates", Axis(label="cosine", high=1)))
    return panels


def _norms(series: TimeSeries, shown: Shown) -> Panel:
    inputs, count = series.inputs, series.fragments
    norms, fragment = inputs["norm"] / inputs["steps"], inputs["fragment"]
    times, title = shown.since(inputs["time_s"]), "norm of its updates, per step"
    if count <= LINES:
        found = [(index, fragment == index) for index in range(count)]
        marks = [_curve(index, times[mine], norms[mine], str(index)) for index, mine in found]
        y = Axis(label="L2 norm", log=True)
        return Panel(marks=marks, x=_time(shown), y=y, title=title)
    cells = int(np.clip(len(series.rounds) / count / 4, 4, 120))
    edges = np.linspace(0, shown.span_s / shown.unit.scale, cells + 1)
    places = (np.arange(-0.5, count), edges)
    sums, *_ = np.histogram2d(fragment, times, places, weights=norms)
    counts, *_ = np.histogram2d(fragment, times, places)
    means = np.log10(sums / np.where(counts * sums > 0, counts, np.nan)).ravel()
    low, high = np.nanmin(means), np.nanmax(means)
    row, column = (index.ravel() for index in np.indices(counts.shape))
    marks = [
        PlotMark(kind="boxes", x=edges[column], to=edges[column + 1], low=row - 0.5, high=row + 0.5,
             shade=0.1 + 0.9 * (means - low) / max(high - low, 1e-9), look="blue",
             name=f"{10**low:.2g} to {10**high:.2g}")
    ]  # fmt: skip
    y = Axis(names=[str(index) for index in range(count)])
    height = min(600, 80 + 12 * count)
    return Panel(marks=marks, x=_time(shown), y=y, title=title, height=height)


def rejected(shown: Shown) -> list[Panel]:
    """Returns panels of rejected updates, by reason and over time."""
    series = shown.series
    if not len(series.refusals):
        return []
    rows = series.rejected_for().most_common(LANES)
    at, counts = np.arange(float(len(rows))), np.asarray([count for _, count in rows], np.float64)
    of_each = bars((0 * counts, counts), (at - 0.3, at + 0.3), "red")
    sums, edges = np.histogram(shown.since(series.refusals["time_s"]), shown.since(shown.edges()))
    over_time = bars((edges[:-1], edges[1:]), (0 * sums, sums), "red")
    label = "updates rejected"
    return [
        Panel(marks=[of_each], title="by reason", x=Axis(label=label, low=0),
              y=Axis(names=[f"{reason}: {count:,}" for reason, count in rows])),
        Panel(marks=[over_time], title="over time", x=_time(shown), y=Axis(label=label, low=0)),
    ]  # fmt: skip
