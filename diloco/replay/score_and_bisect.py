"""`diloco replay --score` and `--bisect`: the held-out loss of a run's versions, and where it rose.

A *moment* is the model after a record that made a version: each fragment's newest version by then.
Scores are stored in the run's store, and none is computed twice.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from diloco.common.protocol import wire
from diloco.common.protocol.errors import (
    ConfigError,
    IntegrityError,
    ObjectMissingError,
    StoreError,
)
from diloco.common.storage.bundle import BundleBus
from diloco.common.storage.tape import RunContext
from diloco.judge.remake_and_compare import is_stored
from diloco.replay.columns import TupleColumns
from diloco.replay.options import Options
from diloco.run.cli.screen import Hear, plain_table, progress, say_json
from diloco.run.history import Chain, History, in_order, up_to
from diloco.run.model.evaluate import Scorer, read_losses
from diloco.run.model.evaluate import keep as keep_score
from diloco.show.page.html_page import write_curves
from diloco.show.page.svg import points, step_line

RISES = 5


class Moment(NamedTuple):
    """The model after a record that made a version.

    Attributes:
        fragment, version, record_seq, global_step: of that record; `record_seq` is its sequence.
        at_s: when its round closed, in seconds since the epoch.
        stored: whether the record names a view of its own version.
    """

    fragment: int
    version: int
    record_seq: int
    global_step: int
    at_s: float
    stored: bool


Moments = TupleColumns[Moment]


class Rise(NamedTuple):
    """A rise of the loss, by `by`, between two scored moments in a row.

    Attributes:
        before, after: the indices of the two moments.
    """

    by: float
    before: int
    after: int


class Scored:
    """The losses of a run's moments, as far as they are scored.

    Args:
        moments: the run's moments, in order of time.
    """

    def __init__(self, moments: Moments) -> None:
        self.moments = moments
        self._losses = np.zeros(len(moments))
        self._has = np.zeros(len(moments), bool)

    def put(self, index: int, loss: float) -> None:
        """Stores the loss of the moment at an index."""
        self._losses[index], self._has[index] = loss, True

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """Indices of the moments that have a loss."""
        return np.flatnonzero(self._has)

    @property
    def losses(self) -> npt.NDArray[np.float64]:
        """The losses of the scored moments, in order of `indices`."""
        found: npt.NDArray[np.float64] = self._losses[self._has]
        return found

    def points(self) -> Iterator[tuple[int, Moment, float]]:
        """Yields (index, moment, loss) of the scored moments, in order."""
        for index in self.indices.tolist():
            yield index, self.moments[index], float(self._losses[index])

    def rises(self, count: int) -> list[Rise]:
        """Returns the `count` largest rises between scored moments in a row, the largest first.

        A fall is a rise below 0. A change to NaN counts as an infinite rise.
        """
        indices, losses = self.indices, self.losses
        with np.errstate(invalid="ignore"):
            by = np.diff(losses)
        broke = np.isnan(losses[1:]) & ~np.isnan(losses[:-1])
        by = np.where(np.isnan(by), np.where(broke, np.inf, -np.inf), by)
        return [
            Rise(float(by[i]), int(indices[i]), int(indices[i + 1]))
            for i in np.argsort(by, kind="stable")[::-1][:count]
        ]


def moments(chains: Mapping[int, Chain]) -> Moments:
    """Returns every moment of a run, from when all its fragments had a version."""
    return Moments(Moment, _moments(chains))


def _moments(chains: Mapping[int, Chain]) -> Iterator[Moment]:
    seen: set[int] = set()
    for seq, record in in_order(chains.values()):
        if record.what == "verdict":
            continue
        seen.add(record.fragment)
        if len(seen) == len(chains):
            yield Moment(
                record.fragment, record.version, seq, record.global_step, record.closed_at_s,
                is_stored(record),
            )  # fmt: skip


def models(chains: Mapping[int, Chain]) -> Iterator[list[tuple[int, wire.Record]]]:
    """Yields, for every moment in order, each fragment's version as (stream sequence, record)."""
    newest: dict[int, tuple[int, wire.Record]] = {}
    for seq, record in in_order(chains.values()):
        if record.what != "verdict":
            newest[record.fragment] = (seq, record)
            if len(newest) == len(chains):
                yield [newest[fragment] for fragment in sorted(newest)]


def model_at(chains: Mapping[int, Chain], moment: Moment) -> list[tuple[int, wire.Record]]:
    """Returns, for one moment, each fragment's version as (stream sequence, record)."""
    return [_newest(chains[fragment], moment.record_seq) for fragment in sorted(chains)]


def _newest(chain: Chain, seq: int) -> tuple[int, wire.Record]:
    """Returns a fragment's last version up to stream sequence `seq`, as (sequence, record)."""
    earlier = up_to(chain, seq)
    return next(at for at in (earlier[i] for i in range(len(earlier) - 1, -1, -1))
                if at[1].what != "verdict")  # fmt: skip


class _Scores:
    """Scores models, or takes their stored scores.

    Attributes:
        gone: number of models without a score, as objects are missing.
        damaged: number of models without a score, as objects do not match their records.
        believed: number of scores that were stored before.
    """

    def __init__(
        self, context: RunContext, scorer: Scorer, kept: Mapping[tuple[int, ...], float]
    ) -> None:
        self._context = context
        self._scorer = scorer
        self._kept = kept
        self._keeps = True
        self.gone = self.damaged = self.believed = 0

    async def of(self, at: Sequence[tuple[int, wire.Record]]) -> float | None:
        """Returns the held-out loss of a model, as `models` yields it; None if it has no score."""
        seqs, records = [seq for seq, _ in at], [record for _, record in at]
        if (known := self._kept.get(tuple(seqs))) is not None:
            self.believed += 1
            return known
        try:
            score = await self._scorer.of(records, seqs)
        except ObjectMissingError:
            self.gone += 1
            return None
        except IntegrityError:
            self.damaged += 1
            return None
        if self._keeps:
            try:
                await keep_score(self._context, score)
            except StoreError:
                self._keeps = False  # The store is read-only.
        return score.loss


async def run_score(
    context: RunContext,
    history: History,
    chosen: Mapping[int, Chain],
    options: Options,
    console: Console,
) -> int:
    """Scores the run's moments and prints the result; returns the exit status, 0.

    Raises:
        ConfigError: there is nothing to score.
        DilocoError: the task cannot be built; bus or store are unreachable.
    """
    every = moments(chosen)
    if not every:
        raise ConfigError("a fragment has no version among these: nothing can be scored")
    scores = _Scores(context, await Scorer.of_run(context), await read_losses(context))
    with progress("scoring") as hear:
        find = _bisected if options.bisect else _all
        found = await find(chosen, every, scores, hear)
    if not found.indices.size:
        raise ConfigError(
            "no version can be scored: their objects are gone, or not what their records say",
            hint="garbage collection keeps what gc.replay_window_s says; see diloco replay RUN",
        )
    if options.json:
        tell_json(history, found, scores.believed)
        return 0
    console.print(table(found), soft_wrap=False)
    for line in sentences(history, found, scores.gone, scores.damaged):
        console.print(line)
    if scores.believed and isinstance(context.bus, BundleBus):
        console.print(came_along(scores.believed))
    if options.plot is not None:
        draw(history.run, found, options.plot)
        console.print(f"the figure is {options.plot}")
    return 0


async def score_all(
    context: RunContext, scorer: Scorer, chains: Mapping[int, Chain]
) -> dict[int, float]:
    """Returns the loss at every moment that can be scored, by the stream sequence of its record.

    New scores are stored.

    Raises:
        StoreError: the store is unreachable.
    """
    scores = _Scores(context, scorer, await read_losses(context))
    every = moments(chains)
    found = await _all(chains, every, scores, lambda *_: None)
    return {moment.record_seq: loss for _, moment, loss in found.points()}


async def _all(chains: Mapping[int, Chain], every: Moments, scores: _Scores, hear: Hear) -> Scored:
    found = Scored(every)
    for index, at in enumerate(models(chains)):
        loss = await scores.of(at)
        if loss is not None:
            found.put(index, loss)
        hear(index + 1, len(every))
    return found


async def _bisected(
    chains: Mapping[int, Chain], every: Moments, scores: _Scores, hear: Hear
) -> Scored:
    """Scores moments with stored views first, then halves the largest rise down to one round."""
    found = Scored(every)
    wanted = sorted({*np.flatnonzero(every.column("stored")).tolist(), 0, len(every) - 1})
    for done, index in enumerate(wanted):
        loss = await scores.of(model_at(chains, every[index]))
        if loss is not None:
            found.put(index, loss)
        hear(done + 1, len(wanted))
    while (rises := found.rises(1)) and rises[0].after > rises[0].before + 1:
        middle = (rises[0].before + rises[0].after) // 2
        loss = await scores.of(model_at(chains, every[middle]))
        if loss is None:
            break
        found.put(middle, loss)
    return found


# Telling


def learners_of(history: History, moment: Moment) -> list[str]:
    """Returns the learners whose updates the round of a moment merged."""
    chain = history.records[moment.fragment]
    index = bisect_left(chain, moment.record_seq, key=itemgetter(0))
    return [taken.learner for taken in chain[index][1].inputs]


def sentences(history: History, found: Scored, gone: int, damaged: int) -> list[str]:
    """Returns sentences on the largest rises of the loss, and on models without a score."""
    told = []
    for rise, before, after in found.rises(RISES):
        if rise <= 0:
            break
        moment = found.moments[after]
        who = ", ".join(learners_of(history, moment)) or "restore"
        where = f"fragment {moment.fragment}, version {moment.version}, record {moment.record_seq}"
        between = "" if after == before + 1 else f" within {after - before} versions up to"
        told.append(f"+{rise:.4f}{between} {where} (step {moment.global_step}): {who}")
    if not told:
        told.append("the loss never rose from one scored version to the next")
    if gone:
        told.append(f"{gone} versions have no score: their objects are gone")
    if damaged:
        told.append(
            f"{damaged} versions have no score: what is stored does not give the recorded digest "
            "(diloco replay RUN verifies all of it)"
        )
    return told


def table(found: Scored) -> Table:
    """Returns a table of about 20 scores over the run, and of the two at the largest rise."""
    indices = found.indices.tolist()
    kept = {indices[0], indices[-1], *indices[:: 1 + len(indices) // 20]}
    for rise, before, after in found.rises(1):
        kept |= {before, after} if rise > 0 else set()
    rows = plain_table("step", "fragment@version", "record", "held-out loss")
    for index, moment, loss in found.points():
        if index in kept:
            place = f"{moment.fragment}@{moment.version}"
            rows.add_row(f"{moment.global_step}", place, f"{moment.record_seq}", f"{loss:.4f}")
    rows.caption = f"{len(indices)} of {len(found.moments)} versions are scored"
    return rows


def came_along(count: int) -> str:
    """Returns the sentence that `count` losses were in the bundle, and were not computed again."""
    return (
        f"{count} of the losses came with the file: nothing here has made them again "
        "(diloco evaluate RUN --version VERSION does)"
    )


def tell_json(history: History, found: Scored, kept: int) -> None:
    """Prints every score, how many were stored before (`kept`), and the largest rises, as JSON."""
    points = [
        {
            **{key: value for key, value in moment._asdict().items() if key != "stored"},
            "loss": loss,
        }
        for _, moment, loss in found.points()
    ]  # fmt: skip
    rises = [
        {"rise": rise, "after_seq": found.moments[i].record_seq, "record_seq": at.record_seq,
         "fragment": at.fragment, "version": at.version, "learners": learners_of(history, at)}
        for rise, i, j in found.rises(RISES)
        for at in [found.moments[j]]
    ]  # fmt: skip
    document = {"run": history.run, "kept": kept, "scores": points, "rises": rises}
    say_json(document)


def draw(run: str, found: Scored, path: Path) -> None:
    """Writes a page with the held-out loss over the global step.

    Raises:
        ConfigError: the page cannot be written.
    """
    at = found.moments.column("global_step")[found.indices].astype(np.float64)
    losses = np.asarray(found.losses, np.float64)
    marks = [step_line(at, losses, "blue", "held-out loss"), points(at, losses, "blue")]
    write_curves(f"{run}: every scored version", marks, "held-out loss", path)
