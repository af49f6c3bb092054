"""`diloco replay --score` and `--bisect`: the held-out loss of a run's versions, and where it rose.

A moment is the model after one record: the newest version of every fragment by then. Scores are
kept beside the run, and none is computed twice.
"""

import itertools
import json as json_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from diloco.common import wire
from diloco.common.errors import ConfigError, IntegrityError, ObjectMissingError, StoreError
from diloco.common.tape import RunContext
from diloco.model.scores import Scorer, all_kept
from diloco.model.scores import keep as keep_score
from diloco.projections.history import Chain, History
from diloco.replay.bar import progress_bar
from diloco.replay.options import Options
from diloco.replay.verify import is_stored

RISES = 5


class Moment(NamedTuple):
    """The model after a record, which made a version: of each fragment its record and sequence."""

    record: wire.Record
    record_seq: int
    stored: bool
    records: tuple[wire.Record, ...]
    seqs: tuple[int, ...]


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
    line = sorted(
        (
            (seq, record)
            for chain in chains.values()
            for seq, record in chain
            if record.what != "verdict"
        ),
        key=lambda at: at[0],
    )
    newest: dict[int, tuple[int, wire.Record]] = {}
    found = []
    for seq, record in line:
        newest[record.fragment] = (seq, record)
        if len(newest) == len(chains):
            at = [newest[fragment] for fragment in sorted(newest)]
            records, seqs = tuple(one for _, one in at), tuple(number for number, _ in at)
            found.append(Moment(record, seq, is_stored(record), records, seqs))
    return found


class _Scores:
    """Scores moments, from what was kept or anew; a moment whose objects are gone has none."""

    def __init__(self, context: RunContext, scorer: Scorer, kept: list[wire.Score]) -> None:
        self._context = context
        self._scorer = scorer
        self._kept = {score.record_seqs: score.loss for score in kept}
        self._keeps = True
        self.gone = 0

    async def of(self, moment: Moment) -> float | None:
        """The held-out loss at a moment."""
        if moment.seqs in self._kept:
            return self._kept[moment.seqs]
        try:
            score = await self._scorer.of(moment.records, moment.seqs)
        except (ObjectMissingError, IntegrityError):
            self.gone += 1
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
    scores = _Scores(context, await Scorer.of_run(context), await all_kept(context))
    with progress_bar(console, "scoring") as hear:
        find = _bisected if options.bisect else _all
        found = await find(every, scores, hear)
    if not found.losses:
        raise ConfigError(
            "no version can be scored: their objects are gone",
            hint="garbage collection keeps what gc.replay_window_s says",
        )
    if options.json:
        tell_json(history.run, found)
        return 0
    console.print(table(found))
    for line in sentences(found, scores.gone):
        console.print(line, soft_wrap=True, highlight=False)
    if options.plot is not None:
        draw(history.run, found, options.plot)
        console.print(f"the figure is {options.plot}", soft_wrap=True)
    return 0


Hear = Callable[[int, int], None]


async def _all(every: list[Moment], scores: _Scores, hear: Hear) -> Scored:
    found = Scored(every, {})
    for index, moment in enumerate(every):
        loss = await scores.of(moment)
        if loss is not None:
            found.losses[index] = loss
        hear(index + 1, len(every))
    return found


async def _bisected(every: list[Moment], scores: _Scores, hear: Hear) -> Scored:
    """Stored moments first; then the half of the largest rise that rises more, down to a round."""
    found = Scored(every, {})
    first = [index for index, moment in enumerate(every) if moment.stored]
    wanted = sorted({*first, 0, len(every) - 1})
    for done, index in enumerate(wanted):
        loss = await scores.of(every[index])
        if loss is not None:
            found.losses[index] = loss
        hear(done + 1, len(wanted))
    while (rises := found.rises()) and rises[0][2] > rises[0][1] + 1:
        _, low, high = rises[0]
        middle = (low + high) // 2
        loss = await scores.of(every[middle])
        if loss is None:
            break
        found.losses[middle] = loss
    return found


# Telling


def sentences(found: Scored, gone: int) -> list[str]:
    """The largest rises with their rounds."""
    told = []
    for rise, before, after in found.rises()[:RISES]:
        if rise <= 0:
            break
        moment = found.moments[after]
        record = moment.record
        who = ", ".join(taken.learner for taken in record.inputs) or record.what
        where = f"fragment {record.fragment}, version {record.version}, record {moment.record_seq}"
        between = "" if after == before + 1 else f" within {after - before} versions up to"
        told.append(f"+{rise:.4f}{between} {where} (step {record.global_step}): {who}")
    if not told:
        told.append("the loss never rose from one scored version to the next")
    if gone:
        told.append(f"{gone} versions have no score: their objects are gone")
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
            record = moment.record
            place = f"{record.fragment}@{record.version}"
            rows.add_row(f"{record.global_step}", place, f"{moment.record_seq}", f"{loss:.4f}")
    rows.caption = f"{len(points)} of {len(found.moments)} versions are scored"
    return rows


def tell_json(run: str, found: Scored) -> None:
    """Every score and the largest rises, for scripts."""
    points = [
        {
            "fragment": moment.record.fragment, "version": moment.record.version,
            "record_seq": moment.record_seq, "global_step": moment.record.global_step,
            "at_s": moment.record.closed_at_s, "loss": loss,
        }
        for _, moment, loss in found.points()
    ]  # fmt: skip
    rises = [
        {"rise": rise, "after_seq": found.moments[i].record_seq, "record_seq": at.record_seq,
         "fragment": at.record.fragment, "version": at.record.version,
         "learners": [taken.learner for taken in at.record.inputs]}
        for rise, i, j in found.rises()[:RISES]
        for at in [found.moments[j]]
    ]  # fmt: skip
    document = {"run": run, "scores": points, "rises": rises}
    print(json_module.dumps(document), flush=True)  # noqa: T201 - the result itself


def draw(run: str, found: Scored, path: Path) -> None:
    """The held-out loss over the run's clock, as a picture.

    Raises:
        ConfigError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    points: Sequence[tuple[int, Moment, float]] = found.points()
    axes.plot([m.record.global_step for _, m, _ in points], [loss for _, _, loss in points], ".-")
    axes.set_xlabel("global step")
    axes.set_ylabel("held-out loss")
    axes.set_title(f"{run}: every scored version", fontsize=10)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the figure {str(path)!r}: {error}") from error
