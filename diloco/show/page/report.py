"""`diloco report`: writes the page of a run, or a page that compares runs, as one HTML file."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from diloco.common.process import log
from diloco.common.process.config import keep_off_accelerators
from diloco.common.protocol import wire
from diloco.common.protocol.errors import IntegrityError, ObjectMissingError
from diloco.common.storage.tape import RunContext
from diloco.run.agreement import Pairs, compare_round
from diloco.run.cli.opening import RunLocation, open_run, place, use_place
from diloco.run.cli.screen import Hear
from diloco.run.cli.subprocess import call_isolated_heard
from diloco.run.model.evaluate import read_scores, record_at, score_at, unscored
from diloco.run.state import RunStatus
from diloco.run.timeseries import TimeSeries, read_time_series
from diloco.run.watch import Watch
from diloco.show.page import figures, html_page, html_sections, summary
from diloco.show.page.lanes import make_lanes
from diloco.show.page.numbers import Shown
from diloco.show.page.summary import Fact, SummaryTable
from diloco.show.page.svg import Markup, element

# The most rounds whose updates are compared pair by pair, and the most bytes read for it.
SAMPLE_ROUNDS = 24
SAMPLE_BYTES = 256 << 20

Stage = Callable[[str, int, int], None]


def run_report(targets: Sequence[str], *, out: Path | None, evaluations: int) -> Path:
    """Writes the page of a run, or a page that compares several; returns the file's path.

    Args:
        targets: RUN of each run, as `diloco.run.cli.opening` defines it.
        out: the file; None: `report.html` in a local run's folder, else `report-{run}.html`; for
            several runs `comparison.html`.
        evaluations: number of versions to have scores of, spread over the run; versions without a
            stored score are scored now. 0: none is.

    Raises:
        DilocoError: no such run; bus or store are unreachable; the file cannot be written.
    """
    html_page.check_name(out)
    alone = len(targets) == 1
    with staging() as stage:
        found = [gather(target, evaluations, stage, pairs=alone) for target in targets]
        stage("drawing", 0, 0)
        if not alone:
            runs = named(targets, [shown for shown, _ in found])
            return html_page.write(out or Path("comparison.html"), comparison(runs))
        ((shown, status),), folder = found, Path(targets[0])
        name = (
            folder / "report.html" if folder.is_dir() else Path(f"report-{shown.series.run}.html")
        )
        return html_page.write(out or name, report(shown, status))


@contextmanager
def staging() -> Iterator[Stage]:
    """Shows a report's progress on the terminal, if standard error is one.

    Yields a function that takes the stage of the work, the amount done, and the amount in all.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("opening the run", total=None)

        def stage(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield stage


def report(shown: Shown, status: RunStatus) -> str:
    """Returns the page of a run as HTML."""
    parts = html_sections.now(status, shown.series, served=False) | html_sections.figures(shown)
    table = summary.learners(shown, status.learners)
    parts["learners"] = html_sections.learners(table)
    about = Markup(parts.pop("progress") + parts.pop("about"))
    order = [parts[key] for key in html_sections.ORDER if key in parts]
    return html_page.saved_page(f"Run {shown.series.run}", about, [*order, _footer()])


def _footer() -> Markup:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    said = f"Written by diloco report, {now}. What each figure means: docs/watch.md."
    return element("footer", {}, said)


def gather(
    target: str, evaluations: int, stage: Stage, *, pairs: bool = True
) -> tuple[Shown, RunStatus]:
    """Reads a run's tape, scores and status for its page; errors as `run_report`.

    Args:
        target: RUN.
        evaluations: as in `run_report`.
        stage: called with the progress, as `staging` yields it.
        pairs: whether to compare learners' updates with each other, which reads shards.
    """
    shown, status = asyncio.run(_read(target, stage, pairs=pairs))
    if missing := unscored(shown.series, shown.scores, evaluations):
        scoring = partial(stage, "evaluating views on held-out data")
        scoring(0, len(missing))
        made = call_isolated_heard(scoring, score_versions, target, place(), missing)
        shown.scores = sorted([*shown.scores, *made], key=lambda score: score.at_s)
    return shown, status


def score_versions(
    hear: Hear, target: str, at: RunLocation, versions: Sequence[tuple[int, ...]]
) -> list[wire.Score]:
    """Opens a run and scores versions of it; made for a process of its own, which loads JAX.

    Args:
        hear: called with the number of versions done, and the number in all.
        target: RUN.
        at: bus and store of the command line, for a run given by name.
        versions: as in `score_at`.
    """
    log.configure("error")
    keep_off_accelerators()
    use_place(at)

    async def score() -> list[wire.Score]:
        async with open_run(target, name="report", reads=True) as run:
            return await score_at(run.context, versions, hear)

    return asyncio.run(score())


async def _read(target: str, stage: Stage, *, pairs: bool) -> tuple[Shown, RunStatus]:
    async with open_run(target, name="report", reads=True) as run:
        context = run.context
        series = await read_time_series(
            context,
            run.specification.created_at_s,
            lambda done, total: stage("reading the tape", done, total),
        )
        shown = Shown(series, make_lanes(series), copied=run.bundle is not None)
        if pairs:
            shown.pairs = await sample_pairs(context, series, stage)
        shown.scores = await read_scores(context, thinned=True)
        return shown, await Watch(context).begin()


async def sample_pairs(context: RunContext, series: TimeSeries, stage: Stage) -> Pairs:
    """Compares learners' updates in at most `SAMPLE_ROUNDS` rounds, spread over the run.

    Rounds whose updates are no longer stored are skipped.

    Args:
        context: the run's context.
        series: the run's tape.
        stage: called with the progress, as `staging` yields it.
    """
    pairs = Pairs(series.learners)
    rounds = series.rounds
    seqs, of = rounds["seq"], rounds["fragment"]
    several = np.nonzero(rounds["inputs"] > 1)[0]
    spread = np.linspace(0, len(several) - 1, min(SAMPLE_ROUNDS, len(several)))
    picked = several[np.unique(spread.astype(np.int64))]
    read_bytes = 0
    for count, row in enumerate(picked[::-1]):  # The newest rounds' objects are collected last.
        stage("comparing updates", count, len(picked))
        try:
            record = await record_at(context, int(of[row]), int(seqs[row]))
        except (ObjectMissingError, IntegrityError):
            continue
        read_bytes += sum(shard.size_bytes for taken in record.inputs for shard in taken.shards)
        if read_bytes > SAMPLE_BYTES:
            break
        compared = await context.runtime.call(
            compare_round, context.layout, context.settings.sync, context.store, record
        )
        if compared is not None:
            pairs.add(record, compared.cosines)
    return pairs


def named(targets: Sequence[str], found: Sequence[Shown]) -> dict[str, Shown]:
    """Returns the runs by name; if two names are equal, by `targets`, as the user gave them."""
    names = [shown.series.run for shown in found]
    if len(set(names)) < len(names):
        names = [*targets]
    return dict(zip(names, found, strict=True))


def comparison(runs: Mapping[str, Shown]) -> str:
    """Returns a page as HTML that compares runs: facts, figures, and settings that differ.

    Args:
        runs: the runs by name.
    """
    subtitle = "Times and tokens are counted from each run's own beginning."
    about = [element("p", {"class": "note"}, subtitle)]
    about += [
        element("p", {"class": "warning"}, f"{name}: {text}")
        for name, run in runs.items()
        for text in summary.warnings(run)
    ]
    note = "As at the head of each report."
    loss = "Training loss (median of the updates) and, with markers, loss on held-out data."
    parts = [
        html_page.section("short", "In short", note, table=in_short(runs)),
        html_page.section("loss", "Do they learn?", loss, panels=figures.losses(runs)),
        html_page.section(
            "throughput", "Tokens per second", "Merged.", panels=figures.throughputs(runs)
        ),
        html_page.section("settings", "Settings that differ", table=differing(runs)),
    ]
    header = element("div", {"id": "about"}, *about)
    return html_page.saved_page(f"Runs {', '.join(runs)}", header, [*parts, _footer()])


def in_short(runs: Mapping[str, Shown]) -> SummaryTable:
    """Returns a table of the runs' facts, with a column for each run."""
    told = [{fact.name: _with_note(fact) for fact in summary.facts(run)} for run in runs.values()]
    order = dict.fromkeys(name for one in told for name in one)
    rows = tuple((name, *(one.get(name, "-") for one in told)) for name in order)
    columns = ("", *runs)
    return SummaryTable(columns, rows, frozenset(columns))


def _with_note(fact: Fact) -> str:
    return f"{fact.value} ({fact.note})" if fact.note else fact.value


def differing(runs: Mapping[str, Shown]) -> SummaryTable:
    """Returns a table of the settings that differ between runs, with a column for each run."""
    told = [{row[0]: row[1] for row in summary.settings(run).rows} for run in runs.values()]
    rows = [(key, *(one[key] for one in told)) for key in told[0]]
    columns = ("setting", *runs)
    return SummaryTable(
        columns, tuple(row for row in rows if len({*row[1:]}) > 1), frozenset(columns)
    )
