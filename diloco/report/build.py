"""`diloco report`: a run as one HTML file and a picture of each figure."""

import asyncio
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from diloco.cli.beside import Hear, beside_heard
from diloco.cli.folders import make_folder
from diloco.cli.opening import Place, open_run, place, use_place
from diloco.common import log, wire
from diloco.common.config import keep_off_accelerators
from diloco.common.errors import ConfigError, IntegrityError, ObjectMissingError
from diloco.common.tape import RunContext
from diloco.figures import style
from diloco.model.scores import kept, record_at, score_at, unscored
from diloco.projections.agreement import Pairs, pair_cosines
from diloco.projections.timeseries import TimeSeries, read_time_series
from diloco.report import figures_learners, figures_rounds, figures_run
from diloco.report.lanes import make_lanes
from diloco.report.numbers import Shown
from diloco.report.page import Page, Section, render
from diloco.report.summary import (
    events,
    facts,
    learners,
    metrics,
    refusals,
    settings,
    subtitle,
    warnings,
)

# Rounds whose updates are compared pair by pair, and bytes of shards that are read for it.
SAMPLE_ROUNDS = 24
SAMPLE_BYTES = 256 << 20
PNG_DPI = 130

Stage = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Drawing:
    """A figure of the report: what it shows, in words, and how it is drawn.

    `nothing` is said in its place when there is nothing to draw.
    """

    key: str
    title: str
    caption: str
    draw: Callable[[Shown], Figure | None]
    nothing: str = "The tape has nothing of it."


DRAWINGS = (
    Drawing(
        "loss", "Is it learning?",
        "Loss of the updates that learners sent (median, and the middle 80 % as a band), and of "
        "the global model on held-out data.",
        figures_run.loss,
    ),
    Drawing(
        "timeline", "What each learner did",
        "A lane for each learner; a small tick in it is one of its updates merged, a triangle a "
        "life that begins, a cross one that ended without leaving. The first lane has a mark for "
        "each new version of a fragment.",
        figures_run.timeline,
    ),
    Drawing(
        "time", "Where the learners' time went",
        "The share of each learner's time whose work is in the model is its goodput.",
        figures_run.time_spent,
    ),
    Drawing(
        "throughput", "Tokens per second",
        "Trained, as updates announce it, and merged into the model. What is trained and not "
        "merged was rejected, lost with a learner, or is on its way.",
        figures_run.throughput,
    ),
    Drawing(
        "staleness", "How stale and how heavy updates are",
        "Staleness is how many versions came between the one an update was made on and the one "
        "it went into. Right: dot median, thick bar half of its updates, thin bar nine tenths.",
        figures_rounds.staleness,
    ),
    Drawing(
        "rounds", "Anatomy of a round",
        "wait: no update is in, or the pace does not allow it yet; open: until the quorum; grace: "
        "for those that are slower; merge: the outer step; publish: storing the version and "
        "committing its record.",
        figures_rounds.anatomy,
    ),
    Drawing(
        "traffic", "Bytes per second",
        "Of all learners together. Up by the sizes of shards; down as each live learner reads "
        "each record and delta once, without first views of those that join.",
        figures_rounds.traffic,
    ),
    Drawing(
        "agreement", "Do learners agree?",
        "Cosine between the updates that were merged in one round: 1 when they point the same "
        "way, 0 when they have nothing in common.",
        figures_rounds.agreement, "No round merged two updates.",
    ),
    Drawing(
        "beside", "Is a learner apart from the others?",
        "The eight learners that stand out most by loss and norm. A learner whose loss or norm is "
        "several times the others', or whose updates point elsewhere, is looked into with `diloco "
        "replay RUN --blame`.",
        figures_learners.beside,
    ),
    Drawing(
        "fragments", "Fragment by fragment",
        "Left: cosines as above; fragments that are averaged plainly, such as the embedding, have "
        "none. Right: how far an update moves its fragment in one inner step.",
        figures_rounds.fragments,
    ),
    Drawing(
        "rejected", "Rejected updates",
        "Updates that the aggregator did not merge, and why.",
        figures_rounds.rejected, "No update was rejected.",
    ),
)  # fmt: skip


def run_report(target: str, *, out: Path | None, evaluations: int) -> Path:
    """Write the report of RUN; the HTML file.

    Args:
        target: RUN, as `diloco.cli.opening` has it.
        out: folder of the files; None for `report` in a local run's folder, else `report-{run}`.
        evaluations: views to score on held-out data, spread over the run, where no score was kept;
            0 for none.

    Raises:
        DilocoError: no such run; bus or store are away; the folder cannot be written.
    """
    with staging() as stage:
        shown = gather(target, evaluations, stage)
        folder = out or _folder(target, shown.series.run)
        return write(shown, folder, stage)


@contextmanager
def staging() -> Iterator[Stage]:
    """Show on a terminal how far a report has come."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("opening the run", total=None)

        def stage(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield stage


def _folder(target: str, run: str) -> Path:
    return Path(target) / "report" if Path(target).is_dir() else Path(f"report-{run}")


def gather(target: str, evaluations: int, stage: Stage, *, pairs: bool = True) -> Shown:
    """Everything that the report shows; arguments and errors as `run_report`.

    Without `pairs` no updates are compared.
    """
    shown = asyncio.run(_read(target, stage, pairs=pairs))
    if missing := unscored(shown.series, shown.scores, evaluations):
        scoring = partial(stage, "evaluating views on held-out data")
        scoring(0, len(missing))
        made = beside_heard(scoring, score_versions, target, place(), missing)
        shown.scores = sorted([*shown.scores, *made], key=lambda score: score.at_s)
    return shown


def score_versions(
    hear: Hear, target: str, at: Place, versions: Sequence[tuple[int, ...]]
) -> list[wire.Score]:
    """As `score_at`, in a process that has yet to open the run, and loads JAX and the task."""
    log.configure("error")
    keep_off_accelerators()
    use_place(at)

    async def score() -> list[wire.Score]:
        async with open_run(target, name="report", reads=True) as run:
            return await score_at(run.context, versions, hear)

    return asyncio.run(score())


async def _read(target: str, stage: Stage, *, pairs: bool) -> Shown:
    async with open_run(target, name="report", reads=True) as run:
        context = run.context
        series = await read_time_series(
            context,
            run.specification.created_at_s,
            lambda done, total: stage("reading the tape", done, total),
        )
        shown = Shown(series, make_lanes(series), copied=run.kept is not None)
        if pairs:
            shown.pairs = await sample_pairs(context, series, stage)
        shown.scores = await kept(context)
    return shown


async def sample_pairs(context: RunContext, series: TimeSeries, stage: Stage) -> Pairs:
    """Cosines between learners' updates, of rounds spread over what the store still has."""
    pairs = Pairs(series.learners)
    rounds = series.rounds
    seqs, of = rounds["seq"], rounds["fragment"]
    several = np.nonzero(rounds["inputs"] > 1)[0]
    spread = np.linspace(0, len(several) - 1, min(SAMPLE_ROUNDS, len(several)))
    picked = several[np.unique(spread.astype(np.int64))]
    read_bytes = 0
    for count, row in enumerate(picked[::-1]):  # The newest are there for longest.
        stage("comparing updates", count, len(picked))
        try:
            record = await record_at(context, int(of[row]), int(seqs[row]))
        except (ObjectMissingError, IntegrityError):
            continue
        read_bytes += sum(shard.size_bytes for taken in record.inputs for shard in taken.shards)
        if read_bytes > SAMPLE_BYTES:
            break
        cosines = await context.runtime.call(
            pair_cosines, context.layout, context.settings.sync, context.store, record
        )
        if cosines is not None:
            pairs.add(record, cosines)
    return pairs


def write(shown: Shown, folder: Path, stage: Stage) -> Path:
    """Draw the figures and write the files; the HTML file.

    Raises:
        ConfigError: the folder cannot be written.
    """
    sections = []
    with writing(folder), style.look():
        for count, drawing in enumerate(DRAWINGS):
            stage("drawing", count, len(DRAWINGS))
            words = Section(drawing.key, drawing.title, drawing.caption)
            sections.append(drawn(words, drawing.draw(shown), drawing.nothing, folder))
        page = Page(
            title=f"Run {shown.series.run}",
            subtitle=subtitle(shown),
            facts=facts(shown),
            sections=[*sections, *_tables(shown)],
            footer=footer(),
            warnings=warnings(shown),
        )
        path = folder / "report.html"
        path.write_text(render(page), encoding="utf-8")
    return path


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A folder that is there, for files that the block writes into it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        make_folder(folder)
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write the report to {str(folder)!r}: {error}",
            hint="give another folder with --out",
        ) from error


def drawn(words: Section, figure: Figure | None, nothing: str, folder: Path) -> Section:
    """A section with its figure, which becomes a picture in a file of its own too."""
    picture = folder / f"{words.key}.png"
    if figure is None:
        picture.unlink(missing_ok=True)
        return replace(words, caption=nothing)
    figure.savefig(picture, dpi=PNG_DPI)
    data = io.BytesIO()
    figure.savefig(data, format="svg", metadata={"Date": None})
    return replace(words, figure=data.getvalue())


def _tables(shown: Shown) -> list[Section]:
    sections = [
        Section(
            "learners", "Learners",
            "Step time is the median. Sync stall: share of its time that synchronization took from "
            "training, as the newest life's heartbeats say.",
            table=learners(shown),
        )
    ]  # fmt: skip
    if measured := metrics(shown):
        sections.append(
            Section(
                "metrics", "Metrics",
                "What losses say beside themselves: moving averages, as the newest heartbeats have "
                "them. Global model: on held-out data, the newest.",
                table=measured,
            )
        )  # fmt: skip
    if shown.series.refused:
        sections.append(
            Section("refused", "Rejected, word for word", "The newest.", table=refusals(shown))
        )
    sections.append(Section("events", "What happened", "The newest.", table=events(shown)))
    note = "All of them, as they are now: those of the run's creation, with every change since."
    sections.append(Section("settings", "Settings", note, table=settings(shown)))
    return sections


def footer() -> str:
    """When the report was written."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Written by diloco report, {now}. What each figure means: docs/report.md."
