"""Makes the facts, warnings and tables of a run's page. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from diloco.run.cli.format_numbers import age, human_bytes, human_count, human_time
from diloco.run.learner_status import told_adoption
from diloco.run.state import LearnerStatus
from diloco.run.timeseries import TimeSeries
from diloco.show.page.lanes import Lane
from diloco.show.page.numbers import Shown, TimeShares, goodput, grouped, spent

# The number of last updates that medians cover; the factor between losses that are far apart.
RECENT = 16
FAR = 2.0
# Rows of a table that can grow with the run.
ROWS = 100
# The most characters of a run's text that are shown.
TEXT = 2000


@dataclass(frozen=True)
class Fact:
    """One fact on a run, as text; `note` is printed smaller below the value."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class SummaryTable:
    """A table.

    Attributes:
        columns: titles of the columns.
        rows: a cell for each column.
        text: titles of the columns that are aligned left; the other columns are numbers.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: frozenset[str] = frozenset()


def subtitle(shown: Shown) -> str:
    """Returns a line on the run's time span and main settings."""
    series = shown.series
    sync, outer = series.settings.sync, series.settings.outer
    state = "ended" if series.ended_s else "newest message"
    return (
        f"Created {_day(series.created_s)}, {state} {_day(series.ends_s)}. "
        f"{series.fragments} fragments, H = {sync.interval_steps}, {sync.codec} up, "
        f"{sync.delta_codec} down, outer {outer.optimizer} at {outer.learning_rate:g}."
    )


def warnings(shown: Shown) -> list[str]:
    """Returns sentences on what is missing from the numbers, or cannot be trusted."""
    series = shown.series
    found = []
    if series.trimmed:
        found.append(
            "Garbage collection has trimmed the tape: figures begin at "
            f"{_day(series.begins_s)}. Versions and merged tokens are of the whole run."
        )
    if series.unreadable:
        found.append(
            f"{series.unreadable} record(s) could not be read: their bodies are gone or "
            "damaged. diloco doctor says more."
        )
    if series.garbage:
        found.append(f"{series.garbage} message(s) of the tape are none of the protocol.")
    if shown.copied:
        found.append(
            "This run was read from a file: what its learners said of themselves, and held-out "
            "losses that came with it, are the word of the file's maker. diloco replay "
            "verifies the tape and the objects."
        )
    return found


def facts(shown: Shown) -> list[Fact]:
    """Returns the run's main facts, such as duration, global step, losses and goodput."""
    series = shown.series
    merged = sum(totals.updates_merged for totals in series.totals.values())
    rejected = sum(totals.updates_rejected for totals in series.totals.values())
    trained = series.updates["tokens"].sum() / max(series.fragments, 1)
    delivered = series.tokens_merged()
    times = spent(shown)
    steps = series.settings.run.steps
    return [
        Fact("duration", human_time(shown.span_s), _whole(shown)),
        Fact("global step", f"{series.global_step:,}", f"of {steps:,}"),
        Fact("tokens merged", human_count(delivered),
             "" if series.trimmed else f"of {human_count(trained)} trained and sent"),
        Fact("versions", f"{_versions(series):,}", f"of {series.fragments} fragments"),
        *_losses(shown),
        Fact("goodput", f"{goodput(times):.0%}", "of the learners' time is in the model"),
        Fact("learners", f"{len(series.learners)}", _lives(shown)),
        Fact("updates merged", f"{merged:,}", _lateness(series)),
        *_adoption(series),
        Fact("updates rejected", f"{rejected:,}", _reasons(series)),
    ]  # fmt: skip


def _whole(shown: Shown) -> str:
    series = shown.series
    so_far = "" if series.ended_s else "and going on"
    if not series.trimmed:
        return so_far
    whole = human_time(series.ends_s - series.created_s)
    return f"the last of {whole} {so_far}".rstrip()


def _lateness(series: TimeSeries) -> str:
    inputs = series.inputs
    if not len(inputs):
        return ""
    stale, wait_s = (
        np.average(inputs[name], weights=inputs["updates"]) for name in ("staleness", "wait_s")
    )
    worst_s = inputs["worst_wait_s"].max()
    return f"staleness {stale:.2f}, wait {wait_s:.2f} s on average, {worst_s:.2f} s at worst"


def _versions(series: TimeSeries) -> int:
    """Returns the sum of the fragments' newest version numbers."""
    rounds = series.rounds
    of, version = rounds["fragment"], rounds["version"]
    return int(sum(version[of == index].max(initial=0) for index in range(series.fragments)))


def _losses(shown: Shown) -> list[Fact]:
    losses = shown.series.inputs["loss"]
    found = []
    if losses.size:
        width = max(1, losses.size // 50)
        first, last = float(np.median(losses[:width])), float(np.median(losses[-width:]))
        found.append(Fact("training loss", f"{last:.3f}", _spread(shown) or f"from {first:.3f}"))
    if shown.scores:
        first, last = shown.scores[0].loss, shown.scores[-1].loss
        note = f"from {first:.3f}" if len(shown.scores) > 1 else ""
        found.append(Fact("held-out loss", f"{last:.3f}", note))
    return found


def recent(series: TimeSeries, column: str) -> dict[str, float]:
    """Returns by learner the median of a column of `TimeSeries.inputs` over the newest updates.

    Learners without a merged update are left out.
    """
    inputs = series.inputs
    of_each = grouped(inputs["learner"], inputs[column], len(series.learners))
    pairs = zip(series.learners, of_each, strict=False)
    return {name: float(np.median(found[-RECENT:])) for name, found in pairs if found.size}


def _spread(shown: Shown) -> str:
    """Returns as text the learners with the lowest and the highest loss; "" if these are near."""
    series = shown.series
    losses = sorted((loss, name) for name, loss in recent(series, "loss").items())
    if len(losses) < 2 or not 0 < FAR * losses[0][0] < losses[-1][0]:
        return ""
    (low, best), (high, worst) = losses[0], losses[-1]
    return f"{worst} {high:.3g}, {best} {low:.3g}"


def _adoption(series: TimeSeries) -> list[Fact]:
    found = told_adoption(beat.heartbeat for beat in series.beats.values())
    if found is None:
        return []
    return [Fact("adoption", f"{found.mean_steps:.1f} steps", f"after the version: {found.said}")]


def _lives(shown: Shown) -> str:
    kills = sum(len(lane.kills) for lane in shown.lanes)
    restarts = sum(max(lane.lives - 1, 0) for lane in shown.lanes)
    return f"{restarts} restart{'s' * (restarts != 1)}, {kills} unclean end{'s' * (kills != 1)}"


def _reasons(series: TimeSeries) -> str:
    most = series.rejected_for().most_common(3)
    return ", ".join(f"{reason} {count:,}" for reason, count in most)


def learners(shown: Shown, statuses: Sequence[LearnerStatus]) -> SummaryTable:
    """Returns a table with a row for each learner, in order of name.

    Learners that neither train nor have left come first, so that the first page of a large fleet's
    table has them.
    """
    now = {one.name: one for one in statuses}
    lanes, times = {lane.learner: lane for lane in shown.lanes}, spent(shown)
    hosts = {life.learner: life.host for life in shown.series.lives}
    sums = _sums(shown.series)
    names = sorted(
        now.keys() | lanes.keys(),
        key=lambda name: (name not in now or now[name].state in ("training", "left"), name),
    )
    several = ["slices"] if any(one.slices for one in statuses) else []
    rows = [
        (
            name, hosts.get(name, "-"),
            *(now[name].slices_said if name in now else "-" for _ in several), *_now(now.get(name)),
            *_life(lanes.get(name), times.get(name)), *sums.get(name, ("-",) * len(_SUMS)),
        )
        for name in names
    ]  # fmt: skip
    columns = ("learner", "host", *several, *_NOW, *_LIFE, *_SUMS)
    return SummaryTable(columns, tuple(rows), frozenset({"learner", "host", "state"}))


_NOW = ("state", "heard", "tokens/s", "bytes down", "sync stall", "data wait", "adopts after")
_LIFE = ("lives", "step time", "goodput", "time down")
_SUMS = ("tokens", "sent", "merged", "rejected", "staleness", "wait", "loss", "norm", "bytes up")


def _now(one: LearnerStatus | None) -> tuple[str, ...]:
    """Returns a learner's cells of the columns `_NOW`: its state, and claims of its heartbeat."""
    if one is None:
        return ("-",) * len(_NOW)
    heard = "never" if one.heard_s is None else age(one.heard_s)
    late = "-" if one.adoption is None else one.adoption.said
    parts = (f"{one.stall_fraction:.2%}", f"{one.data_fraction:.2%}", late)
    return one.state, heard, human_count(one.tokens_per_s), human_bytes(one.bytes_down), *parts


def _life(lane: Lane | None, time: TimeShares | None) -> tuple[str, ...]:
    """Returns a learner's cells of the columns `_LIFE`."""
    if lane is None or time is None:
        return ("-",) * len(_LIFE)
    step = f"{lane.step_s:.3g} s" if lane.step_s else "-"
    goodput_of = f"{time.merged / time.total:.0%}" if time.total else "-"
    return f"{lane.lives}", step, goodput_of, human_time(time.down) if time.down else "-"


def _sums(series: TimeSeries) -> dict[str, tuple[str, ...]]:
    """Returns each learner's cells of the columns `_SUMS`, by the learner's name."""
    count, updates, inputs = len(series.learners), series.updates, series.inputs
    sent_by, merged_by = updates["learner"].astype(int), inputs["learner"].astype(int)
    sent, tokens, sizes = (
        np.bincount(sent_by, updates[name], count) for name in ("updates", "tokens", "bytes")
    )
    merged = np.bincount(merged_by, inputs["updates"], count)
    stale, waits_s = (
        np.bincount(merged_by, inputs[name] * inputs["updates"], count) / np.maximum(merged, 1)
        for name in ("staleness", "wait_s")
    )
    refused = np.bincount(series.refusals["learner"].astype(int), minlength=count)
    losses, norms = recent(series, "loss"), recent(series, "norm")
    fragments = series.fragments_of()
    return {
        name: (
            human_count(tokens[at] / fragments[name]), f"{sent[at]:,.0f}", f"{merged[at]:,.0f}",
            f"{refused[at]:,}", f"{stale[at]:.2f}" if merged[at] else "-",
            f"{waits_s[at]:.2f} s" if merged[at] else "-",
            _number(losses.get(name)), _number(norms.get(name)), human_bytes(sizes[at]),
        )
        for at, name in enumerate(series.learners)
    }  # fmt: skip


def metrics(shown: Shown) -> SummaryTable | None:
    """Returns a table of the metrics of tasks; None if there are none.

    There is a row for each learner, for the global model, and for each slice of held-out data. The
    global model's metrics are of the newest score that has each, since not every version is scored
    by `--lm-eval`.
    """
    beats = shown.series.beats
    by_row = {
        name: beats[name].heartbeat.metrics for name in shown.series.learners if name in beats
    }
    if shown.scores:
        newest = shown.scores[-1]
        by_row["global model"] = {
            name: value for score in shown.scores for name, value in score.metrics.items()
        }
        by_row |= {f"slice {name}": figures for name, figures in newest.slices.items()}
    found = {row: figures for row, figures in by_row.items() if figures}
    if not found:
        return None
    names = sorted({name for figures in found.values() for name in figures})
    rows = tuple(
        (row, *(_number(figures.get(name)) for name in names)) for row, figures in found.items()
    )
    return SummaryTable(("learner", *names), rows, frozenset({"learner"}))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def refusals(shown: Shown) -> SummaryTable:
    """Returns a table of the newest rejected updates, the newest first."""
    newest = list(shown.series.refused)[-ROWS:][::-1]
    rows = tuple(
        (_day(item.at_s), item.learner, str(item.fragment), item.reason, item.detail)
        for item in newest
    )
    columns = ("time", "learner", "fragment", "reason", "detail")
    return SummaryTable(columns, rows, frozenset({"time", "learner", "reason", "detail"}))


def events(shown: Shown) -> SummaryTable:
    """Returns a table of the newest joins, leaves, unclean ends and acts, the newest first."""
    series = shown.series
    happened = [
        (event.at_s, f"{event.what}, by {event.by}" if event.by else event.what)
        for event in series.events
    ]
    happened += [
        (at_s, f"{lane.learner} was heard of for the last time")
        for lane in shown.lanes
        for at_s in lane.kills
    ]
    rows = tuple(
        (
            _day(at_s),
            f"{(at_s - shown.begin_s) / shown.unit.scale:.1f} {shown.unit.name}",
            what[:TEXT],
        )
        for at_s, what in sorted(happened, reverse=True)[:ROWS]
    )
    return SummaryTable(
        ("time", "since the beginning", "event"), rows, frozenset({"time", "event"})
    )


def settings(shown: Shown) -> SummaryTable:
    """Returns a table of the run's present settings, with values as JSON."""
    rows = tuple(
        (f"{section}.{key}", json.dumps(value, ensure_ascii=False))
        for section, keys in shown.series.settings.model_dump(mode="json").items()
        for key, value in keys.items()
    )
    return SummaryTable(("setting", "value"), rows, frozenset({"setting", "value"}))


def _day(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
