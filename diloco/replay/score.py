"""`diloco replay --score` and `--bisect`: the held-out loss of a run's versions, and where it rose.

A moment is the model after one record: the newest version of every fragment by then. Scores are
kept beside the run, and none is computed twice.
"""

import itertools
import json as json_module
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from diloco.common import wire
from diloco.common.errors import ConfigError, IntegrityError, ObjectMissingError, StoreError
from diloco.common.tape import RunContext
from diloco.figures import curves
from diloco.figures.curves import Curve, Curves
from diloco.model.scores import Scorer, kept_losses
from diloco.model.scores import keep as keep_score
from diloco.projections.history import Chain, History, in_order, up_to
from diloco.replay.bar import progress_bar
from diloco.replay.options import Options
from diloco.replay.verify import is_stored

RISES = 5


class Moment(NamedTuple):
    """The model after a record, which made a version, in short: there may be very many."""

    fragment: int
    version: int
    record_seq: int
    global_step: int
    at_s: float
    stored: bool


@dataclass
class Scored:
    """Moments that have a score, in order of time."""

    moments: list[Moment]
    losses: dict[int, float]

    def points(self) -> list[tuple[int, Moment, float]]:
        """(index, moment, loss), in order."""
        return [(index, self.moments[index], self.losses[index]) for index in sorted(self.losses)]

    def rises(self) -> list[tuple[float, int, int]]:
        """(rise, index before, index after) between neighbours, the largest first."""
        points = self.points()
        found = [
            (loss - before, i, j) for (i, _, before), (j, _, loss) in itertools.pairwise(points)
        ]
        return sorted(found, reverse=True)


def moments(chains: Mapping[int, Chain]) -> list[Moment]:
    """Every model that a run has had, from when all its fragments had a version."""
    seen: set[int] = set()
    found = []
    for seq, record in in_order(chains.values()):
        if record.what == "verdict":
            continue
        seen.add(record.fragment)
        if len(seen) == len(chains):
            found.append(
                Moment(
                    record.fragment, record.version, seq, record.global_step, record.closed_at_s,
                    is_stored(record),
                )
            )  # fmt: skip
    return found


def models(chains: Mapping[int, Chain]) -> Iterator[list[tuple[int, wire.Record]]]:
    """Of every moment, in order, the (sequence, record) of each fragment that made its model."""
    newest: dict[int, tuple[int, wire.Record]] = {}
    for seq, record in in_order(chains.values()):
        if record.what != "verdict":
            newest[record.fragment] = (seq, record)
            if len(newest) == len(chains):
                yield [newest[fragment] for fragment in sorted(newest)]


def model_at(chains: Mapping[int, Chain], moment: Moment) -> list[tuple[int, wire.Record]]:
    """As `models`, of one moment."""
    return [_newest(chains[fragment], moment.record_seq) for fragment in sorted(chains)]


def _newest(chain: Chain, seq: int) -> tuple[int, wire.Record]:
    """The last version of a fragment up to a sequence."""
    earlier = up_to(chain, seq)
    return next(at for at in (earlier[i] for i in range(len(earlier) - 1, -1, -1))
                if at[1].what != "verdict")  # fmt: skip


class _Scores:
    """Scores moments, from what was kept or anew; a moment whose objects are gone has none."""

    def __init__(self, context: RunContext, scorer: Scorer, kept: dict[int, float]) -> None:
        self._context = context
        self._scorer = scorer
        self._kept = kept
        self._keeps = True
        self.gone = self.damaged = 0

    async def of(self, at: Sequence[tuple[int, wire.Record]]) -> float | None:
        """The held-out loss of a model."""
        seqs, records = [seq for seq, _ in at], [record for _, record in at]
        if (known := self._kept.get(hash(tuple(seqs)))) is not None:
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
                self._keeps = False  # A store that may only be read.
        return score.loss


async def run_score(
    context: RunContext,
    history: History,
    chosen: Mapping[int, Chain],
    options: Options,
    console: Console,
) -> int:
    """Score and tell; the exit status.

    Raises:
        ConfigError: there is nothing to score.
        DilocoError: the task cannot be built; bus or store are away.
    """
    every = moments(chosen)
    if not every:
        raise ConfigError("no version of every fragment is on the tape: nothing can be scored")
    scores = _Scores(context, await Scorer.of_run(context), await kept_losses(context))
    with progress_bar(console, "scoring") as hear:
        find = _bisected if options.bisect else _all
        found = await find(chosen, every, scores, hear)
    if not found.losses:
        raise ConfigError(
            "no version can be scored: their objects are gone, or not what their records say",
            hint="garbage collection keeps what gc.replay_window_s says; see diloco replay RUN",
        )
    if options.json:
        tell_json(history, found)
        return 0
    console.print(table(found))
    for line in sentences(history, found, scores.gone, scores.damaged):
        console.print(line, soft_wrap=True, highlight=False)
    if options.plot is not None:
        draw(history.run, found, options.plot)
        console.print(f"the figure is {options.plot}", soft_wrap=True)
    return 0


Hear = Callable[[int, int], None]


async def score_all(
    context: RunContext, scorer: Scorer, chains: Mapping[int, Chain]
) -> dict[int, float]:
    """The loss at every moment, by the sequence of its record; those that are new are kept.

    Raises:
        StoreError: the store is away.
    """
    scores = _Scores(context, scorer, await kept_losses(context))
    every = moments(chains)
    found = await _all(chains, every, scores, lambda *_: None)
    return {every[index].record_seq: loss for index, loss in found.losses.items()}


async def _all(
    chains: Mapping[int, Chain], every: list[Moment], scores: _Scores, hear: Hear
) -> Scored:
    found = Scored(every, {})
    for index, at in enumerate(models(chains)):
        loss = await scores.of(at)
        if loss is not None:
            found.losses[index] = loss
        hear(index + 1, len(every))
    return found


async def _bisected(
    chains: Mapping[int, Chain], every: list[Moment], scores: _Scores, hear: Hear
) -> Scored:
    """Stored moments first; then the half of the largest rise that rises more, down to a round."""
    found = Scored(every, {})
    first = [index for index, moment in enumerate(every) if moment.stored]
    wanted = sorted({*first, 0, len(every) - 1})
    for done, index in enumerate(wanted):
        loss = await scores.of(model_at(chains, every[index]))
        if loss is not None:
            found.losses[index] = loss
        hear(done + 1, len(wanted))
    while (rises := found.rises()) and rises[0][2] > rises[0][1] + 1:
        _, low, high = rises[0]
        middle = (low + high) // 2
        loss = await scores.of(model_at(chains, every[middle]))
        if loss is None:
            break
        found.losses[middle] = loss
    return found


# Telling


def learners_of(history: History, moment: Moment) -> list[str]:
    """Who was merged in the round that led to a moment."""
    chain = history.records[moment.fragment]
    index = bisect_left(chain, moment.record_seq, key=itemgetter(0))
    return [taken.learner for taken in chain[index][1].inputs]


def sentences(history: History, found: Scored, gone: int, damaged: int) -> list[str]:
    """The largest rises with their rounds."""
    told = []
    for rise, before, after in found.rises()[:RISES]:
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
    """Scores over the run, at most some 20, and the largest rise."""
    points = found.points()
    every = 1 + len(points) // 20
    kept = {points[0][0], points[-1][0], *(index for index, _, _ in points[::every])}
    for rise, before, after in found.rises()[:1]:
        kept |= {before, after} if rise > 0 else set()
    rows = Table("step", "fragment@version", "record", "held-out loss", title="held-out loss")
    for index, moment, loss in points:
        if index in kept:
            place = f"{moment.fragment}@{moment.version}"
            rows.add_row(f"{moment.global_step}", place, f"{moment.record_seq}", f"{loss:.4f}")
    rows.caption = f"{len(points)} of {len(found.moments)} versions are scored"
    return rows


def tell_json(history: History, found: Scored) -> None:
    """Every score and the largest rises, for scripts."""
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
        for rise, i, j in found.rises()[:RISES]
        for at in [found.moments[j]]
    ]  # fmt: skip
    document = {"run": history.run, "scores": points, "rises": rises}
    print(json_module.dumps(document), flush=True)  # noqa: T201 - the result itself


def draw(run: str, found: Scored, path: Path) -> None:
    """The held-out loss over the run's clock, as a picture.

    Raises:
        ConfigError: it cannot be written.
    """
    points = found.points()
    steps = np.asarray([moment.global_step for _, moment, _ in points])
    losses = Curve(steps, np.asarray([loss for _, _, loss in points]), form=".-")
    curves.draw(Curves(f"{run}: every scored version", "held-out loss", [losses]), path)
