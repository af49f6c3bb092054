"""`diloco status` on a terminal, or as JSON: a run, its learners, its history, a bus's runs."""

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from statistics import fmean

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from diloco.common.process.tasks import cancel
from diloco.run.cli.format_numbers import age, human_bytes
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import SEVERITY_STYLES, STATE_STYLES, plain_table, say, say_json
from diloco.run.health_findings import grouped
from diloco.run.history import Event, happened
from diloco.run.state import Delays, Finding, FragmentStatus, LearnerStatus, RunStatus
from diloco.run.watch import Watch, bus_section, read_runs

REFRESH_S = 1.0
# The most fragments that have a line each; of more, those longest without a version.
LINES = 16
# The most learners of a large fleet that are shown, and the most alerts.
MOST = 50
# The most reasons that are shown of each learner.
REASONS = 3
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 16
# A norm this many times its round's median is written with an exponent.
MUCH = 1000.0
# The width at which a table is measured.
WIDE = 10_000


def show_status(target: str, *, once: bool, json: bool) -> None:
    """Shows RUN until it ends or Ctrl-C; with `once` or `json`, prints its present state once.

    Raises:
        DilocoError: no such run; bus or store are unreachable.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_show(target, once=once, json=json))


async def _show(target: str, *, once: bool, json: bool) -> None:
    console = Console()
    async with open_run(target, name="status", reads=True) as opened:
        watch = Watch(opened.context)
        run = await watch.begin()
        if json:
            say_json(asdict(run))
        elif once or opened.bundle or not console.is_terminal or run.state == "ended":
            console.print(picture(run))
        else:
            await _follow(watch, run, console)


async def _follow(watch: Watch, run: RunStatus, console: Console) -> None:
    following = asyncio.ensure_future(watch.follow(store=True))
    try:
        with Live(picture(run), console=console, auto_refresh=False) as live:
            while not following.done():
                await asyncio.sleep(REFRESH_S)
                live.update(picture(await watch.now()), refresh=True)
        following.result()
    finally:
        await cancel(following)


def picture(run: RunStatus) -> RenderableType:
    """Renders the run's status for a terminal."""
    parts: list[RenderableType] = [_alerts(run.alerts), Text()] if run.alerts else []
    parts += [_summary(run), Text()]
    learners = _worth_a_look(run.learners)
    if learners:
        parts += [_learners(learners, len(run.learners)), *_metrics(learners), Text()]
    if any(one.trend for one in learners):
        parts += [trends(learners, "lately"), Text()]
    parts.append(_fragments(run.fragments))
    return Panel(Group(*parts), title=f"[bold]diloco[/] · run {run.run} · {run.state}")


def _summary(run: RunStatus) -> RenderableType:
    tape = human_bytes(run.tape_bytes)
    if run.tape_limit_bytes:
        tape += f" of {human_bytes(run.tape_limit_bytes)}"
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        f"step [bold]{run.global_step:,}[/] of {run.steps:,}",
        f"{run.versions:,} versions{'' if run.state == 'ended' else f', {run.pace}'}",
    )
    grid.add_row(
        f"{run.tokens_per_s:,.0f} tokens/s trained",
        f"{run.tokens_merged:,} tokens merged",
    )
    grid.add_row(
        f"up {human_bytes(run.bytes_up_per_s)}/s, tape {tape}",
        f"{run.updates_merged:,} updates merged, {run.updates_rejected:,} rejected",
    )
    if run.wait is not None:
        grid.add_row(_delays("updates wait", run.wait), _delays("answers after", run.delay))
    if run.adoption is not None:
        grid.add_row(_delays("versions adopted after", run.adoption))
    return grid


def _delays(what: str, found: Delays | None) -> str:
    return "" if found is None else f"{what} {found.said}"


def _worth_a_look(learners: Sequence[LearnerStatus]) -> Sequence[LearnerStatus]:
    """Returns all learners in order of name, or of a large fleet the `MOST` with most problems."""
    if len(learners) <= MOST:
        return learners

    def well(one: LearnerStatus) -> tuple[bool, int, float, float]:
        far = (one.staleness or 0.0, one.loss or 0.0)
        return one.state == "training", -one.rejected, -far[0], -far[1]

    return tuple(sorted(sorted(learners, key=well)[:MOST], key=lambda one: one.name))


def _learners(learners: Sequence[LearnerStatus], of: int) -> "Fitted":
    several = _of_slices(learners)
    titles = (
        "learner", "state", *several, "heard", "step", "loss", "tokens/s", "data", "stall", "stale",
        "wait", "rej.", "up",
    )  # fmt: skip
    rows: list[tuple[RenderableType, ...]] = [
        (
            one.name,
            _state(one),
            *(one.slices_said for _ in several),
            "never" if one.heard_s is None else age(one.heard_s),
            f"{one.local_step:,}",
            "-" if one.loss is None else f"{one.loss:.4g}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.data_fraction:.0%}",
            f"{one.stall_fraction:.0%}",
            "-" if one.staleness is None else f"{one.staleness:.1f}",
            "-" if one.wait is None else f"{one.wait.mean_steps:.1f}",
            str(one.rejected),
            human_bytes(one.bytes_up),
        )
        for one in learners
    ]
    cut = f"{len(learners)} of {of:,} learners: silent, rejected, stale or far off"
    return Fitted(
        titles, rows, words=("state",), spare=("up", "data", "heard", "stale", "stall"),
        caption=cut if len(learners) < of else None,
    )  # fmt: skip


class Fitted:
    """A table that omits columns if the terminal is too narrow, rather than cut numbers.

    Args:
        titles: titles of the columns.
        rows: a cell for each column.
        words: titles of the columns that have text, which is aligned left.
        spare: titles of the columns that may be omitted, in the order of omission.
        caption: text below the table; None: none.
    """

    def __init__(
        self,
        titles: Sequence[str],
        rows: Sequence[Sequence[RenderableType]],
        *,
        words: Sequence[str],
        spare: Sequence[str],
        caption: str | None = None,
    ) -> None:
        self._titles, self._rows, self._words, self._spare = titles, rows, words, spare
        self._caption = caption

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders the table with as many of its columns as fit."""
        wide = options.update(width=WIDE)
        tables = (self._table(self._spare[:count]) for count in range(len(self._spare) + 1))
        made = next(tables)
        while Measurement.get(console, wide, made).maximum > options.max_width:
            narrower = next(tables, None)
            if narrower is None:
                break
            made = narrower
        yield made

    def _table(self, without: Sequence[str]) -> Table:
        kept = [index for index, title in enumerate(self._titles) if title not in without]
        table = plain_table(*(self._titles[index] for index in kept), words=self._words)
        for row in self._rows:
            table.add_row(*(row[index] for index in kept))
        table.caption = self._caption
        return table


def _of_slices(learners: Sequence[LearnerStatus]) -> list[str]:
    """Returns the title of the column of slices, if any learner has several."""
    return ["slices"] if any(one.slices for one in learners) else []


def _state(one: LearnerStatus) -> Text:
    return Text(one.state, style=STATE_STYLES.get(one.state, "red"))


def _metrics(learners: Sequence[LearnerStatus]) -> list[Text]:
    """Returns a line with the task's metrics for each learner that reports some."""
    return [
        Text(
            f"{one.name}: " + ", ".join(f"{key} {value:.4g}" for key, value in one.metrics.items()),
            style="dim",
        )
        for one in learners[:LINES]
        if one.metrics
    ]


def _fragments(fragments: Sequence[FragmentStatus]) -> Fitted:
    shown = fragments
    if len(fragments) > LINES:
        oldest = sorted(fragments, key=lambda one: -one.version_s)[:LINES]
        shown = tuple(sorted(oldest, key=lambda one: one.fragment))
    rows = [
        (
            str(one.fragment),
            f"{one.version:,}",
            f"{one.global_step:,}",
            one.owner or Text("nobody", style="dim"),
            age(one.version_s),
            f"{one.round_updates} of {one.live_learners}",
            f"{one.round_s:.2f} s",
            str(one.waiting),
        )
        for one in shown
    ]
    cut = f"{LINES} of {len(fragments)} fragments: the longest without a version"
    return Fitted(
        ("fragment", "version", "step", "owner", "last", "merged", "round", "waiting"), rows,
        words=("owner",), spare=("round", "step"), caption=cut if len(fragments) > LINES else None,
    )  # fmt: skip


def _alerts(alerts: Sequence[Finding]) -> Table:
    grid = Table.grid(padding=(0, 2))
    groups = grouped(alerts)
    for found in groups[:MOST]:
        colour = SEVERITY_STYLES.get(found.severity, "")
        where = f" [dim]{found.runbook}[/]" if found.runbook else ""
        grid.add_row(
            Text(found.severity, style=colour),
            escape(found.about),
            f"{escape(found.sentence)}{where}",
        )
    if len(groups) > MOST:
        grid.add_row("", "", f"... and {len(groups) - MOST:,} more: --json has all")
    return grid


# Learners


def show_learners(target: str, *, json: bool) -> None:
    """Prints each learner's figures from the whole tape; errors as `show_status`."""
    found = asyncio.run(look_at_learners(target))
    if json:
        say_json([asdict(one) for one in found])
        return
    if not found:
        say("no learner has joined yet")
        return
    console = Console()
    console.print(learners_table(found))
    if any(one.trend for one in found):
        console.print()
        console.print(trends(found, "over the run"))
    for one in found:
        if refusals := _refusals(one):
            say(f"[bold]{one.name}[/]: {refusals}")
        if one.why:
            say(f"[bold]{one.name}[/] is quarantined: {escape(one.why)}")


async def look_at_learners(target: str) -> Sequence[LearnerStatus]:
    """Reads RUN's whole tape and newest shards; returns its learners in order of name.

    Raises:
        DilocoError: no such run; bus or store are unreachable.
    """
    async with open_run(target, name="status", reads=True) as opened:
        watch = Watch(opened.context)
        return (await watch.begin(1)).learners


def learners_table(learners: Sequence[LearnerStatus]) -> "Fitted":
    """Returns a table of what became of learners' updates, with the columns that fit."""
    several = _of_slices(learners)
    titles = (
        "learner", "state", *several, "heard", "lives", "merged", "rej.", "offences", "tokens",
        "loss", "norm",
    )  # fmt: skip
    rows: list[tuple[RenderableType, ...]] = [
        (
            one.name,
            _state(one),
            *(one.slices_said for _ in several),
            "never" if one.heard_s is None else age(one.heard_s),
            f"{one.lives}",
            f"{one.merged:,}",
            f"{one.rejected:,}",
            f"{one.offences:,}",
            f"{one.tokens:,}",
            "-" if one.merged_loss is None else f"{one.merged_loss:.4g}",
            "-" if one.norm is None else _norm(one.norm),
        )
        for one in learners
    ]
    return Fitted(titles, rows, words=("state",), spare=("heard", "offences", "tokens"))


def _refusals(one: LearnerStatus) -> str:
    """Returns as text why a learner's updates were rejected or counted less, with numbers."""
    most = Counter(one.reasons).most_common(REASONS)
    less = Counter(one.less).most_common()
    told = [f"rejected for {reason} x {count}" for reason, count in most]
    return ", ".join([*told, *(f"counted less by {what} x {count}" for what, count in less)])


def _norm(norm: float) -> str:
    """Returns a norm, relative to its round's median, as short text even if it is huge."""
    return f"{norm:.2f}" if norm < MUCH else f"{norm:.2g}"


def spark(values: Sequence[float], width: int = WIDTH) -> str:
    """Returns a curve of values as `width` characters at most, each a bar of eight heights.

    A bar is the mean of neighbouring values, between the least and the greatest of the means.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    edges = [round(index * len(finite) / width) for index in range(width + 1)]
    means = [fmean(finite[begin:end]) for begin, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def trends(learners: Sequence[LearnerStatus], title: str) -> Fitted:
    """Returns a table of learners' loss and norm over time, as last value and curve.

    The norm is relative to the median of its round. The table has a column of cosines to the other
    learners' updates if shards were read. `title` is the title of the column of names.
    """
    known = any(one.shards is not None for one in learners)
    cosine = ["cosine to others"] if known else []
    rows = []
    for one in learners:
        if one.trend:
            losses = [point.loss for point in one.trend]
            norms = [point.norm for point in one.trend]
            row = [one.name, f"{losses[-1]:.4g}", spark(losses), _norm(norms[-1]), spark(norms)]
            shown = "-" if one.shards is None else f"{one.shards.cosine:+.2f}"
            rows.append([*row, *([shown] if known else [])])
    curves = ("  ", " ")
    titles = (title, "loss", " ", "norm", "  ", *cosine)
    return Fitted(titles, rows, words=(*curves, *cosine), spare=curves)


# Acts on a run, and the runs of a bus


def show_history(target: str, *, everything: bool, json: bool) -> None:
    """Prints the acts on RUN, with `everything` also learners' joins and leaves.

    Raises:
        DilocoError: as `show_status`.
    """
    events = asyncio.run(look_back(target, everything=everything))
    if json:
        say_json([asdict(event) for event in events])
        return
    table = plain_table("when", "who", "what", words=("who", "what"), wraps=True)
    for event in events:
        table.add_row(_time(event.at_s), escape(event.by), escape(event.what))
    Console().print(table)


async def look_back(target: str, *, everything: bool) -> list[Event]:
    """Returns the acts on RUN, oldest first; with `everything` also joins and leaves.

    Raises:
        DilocoError: no such run; bus or store are unreachable.
    """
    async with open_run(target, name="status", reads=True) as opened:
        created_at_s = opened.specification.created_at_s
        return await happened(opened.context, created_at_s, everything=everything)


def show_runs(target: str | None, *, json: bool) -> None:
    """Prints the runs of a bus, given by its URL or by a run's file; None: the default bus.

    Raises:
        DilocoError: the bus is unreachable, or does not permit this; the file is invalid.
    """
    runs = asyncio.run(read_runs(bus_section(target)))
    if json:
        say_json([asdict(one) for one in runs])
        return
    console = Console()
    console.print(_runs(runs) if runs else "there are no runs on this bus")


def _runs(runs: Sequence[RunStatus]) -> Table:
    table = plain_table(
        "run", "state", "step", "versions", "tape", "newest version",
        words=("state", "newest version"), wraps=True,
    )  # fmt: skip
    for one in runs:
        newest_s = min((fragment.version_s for fragment in one.fragments), default=one.quiet_s)
        table.add_row(
            one.run,
            one.state if not one.epoch else f"{one.state}, epoch {one.epoch}",
            f"{one.global_step:,} of {one.steps:,}",
            f"{one.versions:,}",
            human_bytes(one.tape_bytes),
            _time(one.as_of_s - newest_s).rpartition(":")[0],
        )
    return table


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
