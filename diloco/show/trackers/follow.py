"""Follows a run, and passes its figures to trackers such as TensorBoard.

Every figure has a global step. A manifest does not state the global step, so its figures get that
of the newest record before it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import ConfigError, StreamMissingError
from diloco.common.storage.tape import Entry, Item, RunContext, last_record, messages_of
from diloco.run.cli.opening import open_run
from diloco.run.model.evaluate import read_scores
from diloco.run.state import share
from diloco.run.watch import Watch, heartbeat


class MetricsPoint(NamedTuple):
    """Figures by name, at global step `step` and time `at_s` (seconds since the epoch)."""

    step: int
    at_s: float
    values: dict[str, float]


class Sink(Protocol):
    """The interface of a tracker."""

    def write(self, point: MetricsPoint) -> None:
        """Stores a point."""

    def close(self) -> None:
        """Flushes all points that are not stored yet."""


class TensorBoard:
    """Writes TensorBoard's event files to a folder, for `tensorboard --logdir`.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise _missing("tensorboard", error) from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, point: MetricsPoint) -> None:
        """Stores a point."""
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, point.step, point.at_s)

    def close(self) -> None:
        """Flushes all points that are not stored yet."""
        self._writer.close()


class Wandb:
    """Writes to a run of Weights & Biases (W&B).

    Args:
        project: the project of W&B in which the run appears.
        run: the run's name.
        settings: the run's settings, which W&B shows as its configuration.
        offline: whether to write to a folder `wandb`, for `wandb sync`, and not to the service.

    Raises:
        ConfigError: wandb is not installed, or W&B refuses.
    """

    def __init__(self, project: str, run: str, settings: dict[str, Any], *, offline: bool) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise _missing("wandb", error) from error
        mode: Any = "offline" if offline else "online"
        try:
            self._run: Any = wandb.init(project=project, name=run, config=settings, mode=mode)
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases refuses: {error}", hint="log in with `wandb login`, or --offline"
            ) from error
        # Learners' messages overtake each other, but W&B's own step must increase.
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def write(self, point: MetricsPoint) -> None:
        """Stores a point."""
        self._run.log({**point.values, "global_step": point.step})

    def close(self) -> None:
        """Flushes all points that are not stored yet."""
        self._run.finish()


def _missing(extra: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(
        f"{error.name} is not installed here", hint=f"install diloco[{extra}]: docs/watch.md"
    )


# Seconds between two reads of stored scores.
SCORES_S = 30.0


async def track(target: str, make: Callable[[RunContext], list[Sink]], *, once: bool) -> int:
    """Passes a run's figures to trackers until the run ends; returns the number of points.

    Args:
        target: RUN, as `diloco.run.cli.opening` defines it.
        make: returns the trackers, once the run is open.
        once: whether to stop at the newest message instead of the run's end.

    Raises:
        DilocoError: no such run; bus or store are unreachable.
    """
    async with open_run(target, name="track", reads=True) as opened:
        tracker = Tracker(opened.context, make(opened.context))
        try:
            await tracker.follow(once=once)
        finally:
            await asyncio.to_thread(tracker.close)
        return tracker.written


class Tracker:
    """Passes a run's figures to trackers.

    Args:
        context: the run's context.
        sinks: the trackers.

    Attributes:
        written: the number of points passed so far.
    """

    def __init__(self, context: RunContext, sinks: list[Sink]) -> None:
        self._context = context
        self._sinks = sinks
        self._points = Points()
        self._watch = Watch(context, self._take, self._hear)
        self._scored: set[tuple[int, ...]] = set()
        self.written = 0

    async def follow(self, *, once: bool) -> None:
        """Reads the whole tape until the run's end; with `once`, up to its newest message.

        Scores on held-out data are read at intervals, and at the end.
        """
        for fragment in range(len(self._context.layout.fragments)):
            record, _ = await last_record(self._context, fragment)
            self._points.reached(record.global_step)
        if once:
            await self._watch.begin(1)
            await self._hear_all()
        else:
            scoring = asyncio.ensure_future(self._score())
            try:
                await self._watch.follow(1)
            finally:
                await cancel(scoring)
        await self._scores()

    def close(self) -> None:
        """Flushes all points that are not stored yet."""
        for sink in self._sinks:
            sink.close()

    async def _hear_all(self) -> None:
        stream = names.ops_stream(self._context.run)
        subjects = [names.heartbeat(self._context.run, "*")]
        # A tape without its objects has no scores either.
        with contextlib.suppress(StreamMissingError):
            async for message in messages_of(self._context.bus, stream, subjects, 1):
                if (beat := heartbeat(message)) is not None:
                    self._hear(beat, message.time_s)

    def _take(self, item: Item) -> None:
        if isinstance(item, Entry):
            for point in self._points.of_entry(item):
                self._write(point)

    def _hear(self, beat: wire.Heartbeat, at_s: float) -> None:
        self._write(self._points.of_heartbeat(beat, at_s))

    async def _score(self) -> None:
        while True:
            await self._scores()
            await asyncio.sleep(SCORES_S)

    async def _scores(self) -> None:
        for score in await read_scores(self._context):
            if score.record_seqs not in self._scored:
                self._scored.add(score.record_seqs)
                self._write(self._points.of_score(score))

    def _write(self, point: MetricsPoint) -> None:
        self.written += 1
        for sink in self._sinks:
            sink.write(point)


class Points:
    """Makes points from the messages of a run, which must come in their order."""

    def __init__(self) -> None:
        self._step = 0
        self._furthest: int | None = None
        self._tokens: dict[int, int] = {}

    def reached(self, step: int) -> None:
        """Notes the global step of a record; no heartbeat's point gets a greater one."""
        self._furthest = max(step, self._furthest or 0)

    def of_entry(self, entry: Entry) -> Iterator[MetricsPoint]:
        """Yields the point of a message of the tape: of a round's record, an update or a join."""
        match entry.body:
            case wire.Record() as record if record.inputs:
                self._step = max(self._step, record.global_step)
                self.reached(self._step)
                self._tokens[record.fragment] = record.totals.tokens_credited
                yield MetricsPoint(self._step, entry.time_s, self._of_round(record))
            case wire.Manifest() as manifest if not manifest.attempt:
                own = {"loss": manifest.loss, "step_seconds": manifest.step_time_s}
                yield MetricsPoint(self._step, entry.time_s, _named(manifest.learner, own))
            case wire.Join(slices=wire.LearnerSlices() as some) as join:
                own = {"slices": float(some.present)}
                yield MetricsPoint(self._step, entry.time_s, _named(join.learner, own))

    def of_heartbeat(self, beat: wire.Heartbeat, at_s: float) -> MetricsPoint:
        """Returns the point of a heartbeat that was stored at `at_s` (seconds since the epoch)."""
        figures = {"tokens_per_second": beat.tokens_per_s, **beat.metrics}
        if beat.run_s:
            figures["stall_share"] = share(beat.stall_s, beat.run_s)
            figures["data_wait_share"] = share(beat.data_s, beat.run_s)
        # A false step of a learner would become the end of every tracker's axis.
        step = beat.global_step if self._furthest is None else min(beat.global_step, self._furthest)
        return MetricsPoint(step, at_s, _named(beat.learner, figures))

    def of_score(self, score: wire.Score) -> MetricsPoint:
        """Returns the point of a score on held-out data."""
        parts = {"": {"loss": score.loss, **score.metrics}}
        parts |= {f"{name}/": figures for name, figures in score.slices.items()}
        values = {
            f"held_out/{part}{name}": value
            for part, figures in parts.items()
            for name, value in figures.items()
        }
        return MetricsPoint(score.global_step, score.at_s, values)

    def _of_round(self, record: wire.Record) -> dict[str, float]:
        inputs = record.inputs
        weight = sum(one.weight for one in inputs)
        return {
            "train/loss": sum(one.loss * one.weight for one in inputs) / weight,
            "train/tokens": sum(self._tokens.values()) / len(self._tokens),
            "round/updates": len(inputs),
            "round/rejected": len(record.rejected),
            "round/staleness": sum(one.staleness for one in inputs) / len(inputs),
            "round/seconds": record.closed_at_s - record.opened_at_s,
        }


def _named(learner: str, figures: dict[str, float]) -> dict[str, float]:
    return {f"learners/{learner}/{name}": value for name, value in figures.items()}
