"""Scores a run's global model on its task's held-out data: at the newest version or at others.

Scores are stored in the run's store, so that a report has the scores of versions whose views
garbage collection has deleted.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from diloco.common.process import log
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import ConfigError, IntegrityError, ObjectMissingError, WireError
from diloco.common.storage.catchup import delta_of
from diloco.common.storage.tape import RunContext, first_message, read_record
from diloco.common.storage.views import load_version, load_view, take_step
from diloco.run.cli.format_numbers import human_count
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import plain_table, say_json, working
from diloco.run.cli.versions import find_targets
from diloco.run.model.follower import Follower
from diloco.run.model.lm_eval import LmEval, beside, require_decoder
from diloco.run.model.whole import FollowRules
from diloco.run.timeseries import TimeSeries

if TYPE_CHECKING:
    from diloco.learner.task import Task, TaskScores
    from diloco.run.model.view import GlobalModel

# The number of stored scores that are read, evenly over the run.
KEPT = 400
# The text that is sampled with a score, if the task can: its pieces, and how it is drawn.
PIECES, TEMPERATURE = 240, 0.7
MOST_TEXT = 2000


class Pace(NamedTuple):
    """The pace at which a run in progress is scored.

    Attributes:
        every_s: shortest time between the beginnings of two scores.
        share: largest share of the time that scoring takes.
    """

    every_s: float
    share: float = 1.0


class Scorer:
    """Computes scores (`wire.Score`) of a run's global model from the views of all fragments.

    Args:
        context: the run's context.
        task: the run's task.
        model: builds the task's parameters from views.
        lm_eval: also scores each model by lm_eval; None: not.
    """

    def __init__(
        self,
        context: RunContext,
        task: "Task",
        model: "GlobalModel",
        lm_eval: LmEval | None = None,
    ) -> None:
        self._context = context
        self._task = task
        self._model = model
        self._lm_eval = lm_eval
        # The last view of each fragment: the next version is one delta away.
        self._views: dict[int, tuple[str, np.ndarray]] = {}

    @classmethod
    async def of_run(cls, context: RunContext, lm_eval: LmEval | None = None) -> "Scorer":
        """Returns a scorer with the run's task; arguments as the class.

        Raises:
            DilocoError: the task cannot be built here, or a leaf of the run cannot be read; lm_eval
                is to score a task that writes no folder of transformers.
            ModuleNotFoundError: JAX is not installed.
        """
        # Reading stored scores needs no JAX.
        from diloco.learner.load_and_check_task import model_of
        from diloco.run.model.view import GlobalModel

        task = await asyncio.to_thread(model_of, context.settings)
        if lm_eval is not None:
            require_decoder(context, task)
        return cls(context, task, await GlobalModel.of_run(context, task), lm_eval)

    async def newest(self) -> wire.Score:
        """Scores the newest view of every fragment.

        Raises:
            DilocoError: bus or store are unreachable; objects of a view are missing or damaged.
        """
        fragments = range(len(self._context.layout.fragments))
        loaded = [await load_view(self._context, fragment) for fragment in fragments]
        records, seqs = [item.record for item in loaded], [item.record_seq for item in loaded]
        return await self._score(records, seqs, [item.view for item in loaded])

    async def of(self, records: Sequence[wire.AnyRecord], seqs: Sequence[int]) -> wire.Score:
        """Scores the views that records made.

        Args:
            records: a record of each fragment, in order of fragments.
            seqs: stream sequences of the records.

        Raises:
            ObjectMissingError: garbage collection has deleted an object of a view.
            IntegrityError: the stored objects do not give the recorded digest.
        """
        views = [await self._view(record) for record in records]
        return await self._score(records, seqs, views)

    async def _view(self, record: wire.AnyRecord) -> np.ndarray:
        """Returns the view that a record made, float32 [elements]; errors as `of`."""
        digest, view = self._views.get(record.fragment, ("", np.empty(0, np.float32)))
        if digest != record.view_digest:
            found = None
            if record.delta is not None and digest == record.base_digest:
                with contextlib.suppress(ObjectMissingError, IntegrityError):
                    change = delta_of(record, 0)
                    step = await self._context.runtime.call(take_step, self._context, view, change)
                    found = step.view
            view = await load_version(self._context, record) if found is None else found
            self._views[record.fragment] = (record.view_digest, view)
        return view

    async def _score(
        self, records: Sequence[wire.AnyRecord], seqs: Sequence[int], views: Sequence[np.ndarray]
    ) -> wire.Score:
        (figures, slices), text = await asyncio.to_thread(self._evaluate, views)
        if self._lm_eval is not None:
            found = await self._lm_eval.measure(self._context, self._task, views, records)
            figures = beside(figures, found)
        merged = sum(record.totals.tokens_credited for record in records)
        return wire.Score(
            run=self._context.run,
            epoch=self._context.epoch,
            versions=tuple(record.version for record in records),
            record_seqs=tuple(seqs),
            global_step=max(record.global_step for record in records),
            tokens=merged // len(records),
            at_s=max(record.closed_at_s for record in records),
            loss=figures.pop("loss"),
            metrics=figures,
            slices=slices,
            text=text,
        )

    def _evaluate(self, views: Sequence[np.ndarray]) -> tuple["TaskScores", str]:
        import jax

        from diloco.learner.task import scores

        params, write = self._model.params(views), self._task.sample
        found = scores(self._task.evaluate(params))
        if write is None:
            return found, ""
        # The same prompt and the same key each time: only the model differs.
        pieces = write(params, "", jax.random.key(0), TEMPERATURE)
        return found, "".join(itertools.islice(pieces, PIECES))[:MOST_TEXT]

    async def follow(self, tell: Callable[[wire.Score], Awaitable[None]], pace: Pace) -> None:
        """Scores the newest whole version, and later ones at this pace; returns at the run's end.

        Args:
            tell: awaited with each score.
            pace: the pace of scoring.

        Raises:
            DilocoError: as `Follower.advance`, or raised by `tell`.
        """
        fragments = tuple(range(len(self._context.layout.fragments)))
        async with Follower(self._context, FollowRules(fragments)) as follower:
            while await follower.advance() is not None:
                began_s = time.monotonic()
                at = [follower.standing()[fragment] for fragment in fragments]
                views = [follower.view(fragment) for fragment in fragments]
                records, seqs = [one.record for one in at], [one.record_seq for one in at]
                await tell(await self._score(records, seqs, views))
                rest_s = max(pace.every_s, (time.monotonic() - began_s) / pace.share)
                await follower.rest(began_s + rest_s - time.monotonic())


async def keep(context: RunContext, score: wire.Score) -> None:
    """Puts a score into the run's store; to do so twice stores one object.

    Raises:
        StoreError: the store is unreachable, or does not permit it.
    """
    data = wire.encode(score)
    name = names.score_object(context.run, score.epoch, score.global_step, shards.digest(data))
    await context.runtime.call(context.store.put, name, data)


async def read_scores(
    context: RunContext, known: dict[str, wire.Score] | None = None, *, thinned: bool = False
) -> list[wire.Score]:
    """Returns the stored scores of this epoch, in order of the time of their versions.

    Of a version that was scored more than once, such as without and with lm_eval, one score has
    the metrics of all.

    Args:
        context: the run's context.
        known: scores that were read before, by object's name; new ones are added to it.
        thinned: whether to read only about `KEPT` scores, evenly over the run.

    Raises:
        StoreError: the store is unreachable.
    """
    reading = _read_stored(context, thinned=thinned, known=known)
    found: dict[tuple[int, ...], wire.Score] = {}
    async for score in reading:
        before = found.get(score.record_seqs, score)
        both = {"metrics": before.metrics | score.metrics}
        found[score.record_seqs] = score.model_copy(update=both)
    return sorted(found.values(), key=lambda score: score.at_s)


async def read_losses(context: RunContext) -> dict[tuple[int, ...], float]:
    """Returns the held-out losses of all stored scores of this epoch.

    The key is the stream sequences of the records that were scored, in order of fragments.

    Raises:
        StoreError: the store is unreachable.
    """
    return {score.record_seqs: score.loss async for score in _read_stored(context)}


async def _read_stored(
    context: RunContext, *, thinned: bool = False, known: dict[str, wire.Score] | None = None
) -> AsyncIterator[wire.Score]:
    listed = await context.runtime.call(context.store.list, names.scores_prefix(context.run))
    for info in listed[:: 1 + len(listed) // KEPT if thinned else 1]:
        with contextlib.suppress(ObjectMissingError, WireError):
            score = None if known is None else known.get(info.name)
            if score is None:
                data = await context.runtime.call(context.store.get, info.name)
                if not info.name.endswith(f"-{shards.digest(data)}"):
                    continue  # Edited or damaged: it can be recomputed.
                score = wire.decode(wire.Score, data)
            if known is not None:
                known[info.name] = score
            if (score.run, score.epoch) == (context.run, context.epoch):
                yield score


async def scores_of(context: RunContext, series: TimeSeries, points: int) -> list[wire.Score]:
    """Returns scores spread over a run: the stored ones, and new ones of views that still exist.

    Args:
        context: the run's context.
        series: the run's tape as a time series.
        points: the number of scores to have; no score is computed near a stored one.

    Raises:
        DilocoError: as `Scorer.of_run`; the store is unreachable.
    """
    scores = await read_scores(context, thinned=True)
    made = await score_at(context, unscored(series, scores, points))
    return sorted([*scores, *made], key=lambda score: score.at_s)


def unscored(
    series: TimeSeries, scores: Sequence[wire.Score], points: int
) -> list[tuple[int, ...]]:
    """Returns versions spread over a run that have no score nearby.

    Each is given as the stream sequences of its records, in order of fragments.

    Args:
        series: the run's tape as a time series.
        scores: the stored scores.
        points: the number of scores to have.
    """
    known = {score.record_seqs for score in scores}
    standing = (_standing(series, at_s) for at_s in _missing(series, scores, points))
    return [seqs for seqs in dict.fromkeys(standing) if seqs is not None and seqs not in known]


async def score_at(
    context: RunContext,
    versions: Sequence[tuple[int, ...]],
    hear: Callable[[int, int], None] | None = None,
) -> list[wire.Score]:
    """Returns the scores of those versions that the store still has; none without JAX.

    Args:
        context: the run's context.
        versions: each as stream sequences of its records, in order of fragments.
        hear: called with the number of versions done, and the number in all.

    Raises:
        DilocoError: as `Scorer.of_run`; the store is unreachable.
    """
    if not versions:
        return []
    try:
        scorer = await Scorer.of_run(context)
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        return []  # Without JAX there are only the stored scores.
    made = []
    for done, seqs in enumerate(versions, 1):
        with contextlib.suppress(ObjectMissingError, IntegrityError):
            records = [await record_at(context, f, seq) for f, seq in enumerate(seqs)]
            made.append(await scorer.of(records, seqs))
        if hear is not None:
            hear(done, len(versions))
    return made


def _missing(series: TimeSeries, scores: Sequence[wire.Score], points: int) -> list[float]:
    """Returns evenly spread times of versions without a score nearby (seconds since the epoch)."""
    times_s = series.versions["time_s"]
    # There is no view until all fragments have a version.
    first, last = min(series.fragments, times_s.size) - 1, times_s.size - 1
    points = min(points, int(times_s.size))
    wanted = np.linspace(first, last, points) if points > 1 else np.full(points, float(last))
    near = 0.5 * (last - first) / max(points - 1, 1)
    have = np.searchsorted(times_s, [score.at_s for score in scores])
    return [
        float(times_s[int(row)])
        for row in wanted
        if row >= 0 and all(abs(row - other) > near for other in have)
    ]


def _standing(series: TimeSeries, at_s: float) -> tuple[int, ...] | None:
    """Returns the stream sequence of each fragment's newest version at a time.

    None: some fragment had no version yet.
    """
    table = series.versions
    fragment, seq = table["fragment"], table["seq"]
    old = table["time_s"] <= at_s + 1e-6
    found = []
    for index in range(series.fragments):
        mine = seq[old & (fragment == index)]
        if not mine.size:
            return None
        found.append(int(mine[-1]))
    return tuple(found)


async def record_at(context: RunContext, fragment: int, seq: int) -> wire.Record:
    """Reads the record of a fragment at a stream sequence.

    Raises:
        ObjectMissingError: garbage collection has deleted the record, or its body in the store.
        RunMismatchError: the record is of another run or epoch.
        IntegrityError: the record is damaged, or of another layout.
    """
    message = await first_message(context, names.record(context.run, fragment), seq)
    if message.seq != seq:
        raise ObjectMissingError(f"record {seq} of fragment {fragment} is no longer on the tape")
    return await read_record(context, message)


# `diloco evaluate`


async def run_evaluate(
    target: str,
    *,
    version: str | None = None,
    pace: Pace | None = None,
    keeps: bool,
    json: bool,
    lm_eval: LmEval | None = None,
) -> None:
    """Scores RUN's model and prints the score; arguments as the options of `diloco evaluate`.

    Raises:
        DilocoError: no such run; bus or store are unreachable; the task cannot be built.
    """
    if pace is not None and version is not None:
        raise ConfigError("--follow scores new versions, --version an earlier one: give only one")
    console = Console(soft_wrap=True, highlight=False)
    async with open_run(target, name="evaluate", reads=True) as run:

        async def tell(score: wire.Score) -> None:
            if keeps and not run.alone:
                await keep(run.context, score)
            if json:
                say_json(score.model_dump())
            else:
                console.print(sentence(score))
                if score.slices:
                    console.print(by_slice(score))

        from diloco.learner.compilation_cache import keep_programs

        logger = log.get(run=run.context.run)
        keep_programs(run.config.learner.compilation_cache_dir, logger)
        with working("loading the task and its held-out data"):
            scorer = await Scorer.of_run(run.context, lm_eval)
        if version is not None:
            with working("evaluating"):
                score = await _of_version(scorer, run.context, version)
            await tell(score)
        elif pace is not None:
            logger.info("started", every_s=pace.every_s)
            if keeps and not await read_scores(run.context, thinned=True):
                # The curve begins with the run, if its first version is still stored.
                with contextlib.suppress(ConfigError, ObjectMissingError):
                    await tell(await _of_version(scorer, run.context, "0"))
            await scorer.follow(tell, pace)
        else:
            with working("evaluating"):
                score = await scorer.newest()
            await tell(score)


async def _of_version(scorer: Scorer, context: RunContext, version: str) -> wire.Score:
    at = await find_targets(context, version, option="--version")
    found = [at[fragment] for fragment in sorted(at)]
    return await scorer.of([one.record for one in found], [one.record_seq for one in found])


def sentence(score: wire.Score) -> str:
    """Returns a score as one line of text, with rich's markup."""
    low, high = min(score.versions), max(score.versions)
    versions = str(low) if low == high else f"{low}-{high}"
    return (
        f"step {score.global_step:>7,}  versions {versions:>9}  "
        f"tokens {human_count(score.tokens):>7}  held-out loss [bold]{score.loss:.4f}[/]"
        + "".join(f"  {name} {value:.4g}" for name, value in score.metrics.items())
    )


def by_slice(score: wire.Score) -> Table:
    """Returns a table of a score's figures for each named part of the held-out data."""
    names = [*dict.fromkeys(name for part in score.slices.values() for name in part)]
    shown = plain_table("slice", *names)
    for slice_name, part in score.slices.items():
        shown.add_row(slice_name, *(f"{part[one]:.4g}" if one in part else "-" for one in names))
    return shown
