"""Learners whose loss or updates are far from the fleet's: the doctor's and the status' sentences.

A learner is compared with those that were merged in the same rounds, so that neither the fragment
nor the time of the run matters. From records alone; `directions.py` looks into shards.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median, median_low
from typing import NamedTuple

from diloco.check.symptoms import RECENT, Finding
from diloco.common import wire

LOSS_SPIKE = "runbooks/loss-spike.md"
# Times the median of the others, over a learner's last updates. What learners say is a moving
# average: while losses fall fast, one that began later is honestly above the others.
FAR_LOSS = 4.0
FAR_NORM = 4.0
# Fewer updates than this say nothing.
FEWEST = RECENT
# A held-out loss is ruined once so much of what it fell by is lost, and by so much of its least.
FEWEST_SCORES = 3
LOST_SHARE, LOST_LEAST = 0.5, 0.1


class Beside(NamedTuple):
    """A learner's recent updates beside those of the others in their rounds, by medians.

    `norm_ratio` is of norms, the learner's to the median of the round.
    """

    loss: float
    others_loss: float
    norm_ratio: float
    updates: int


def beside_others(records: Iterable[wire.Record]) -> dict[str, Beside]:
    """Each learner's last updates that were merged together with somebody else's.

    Args:
        records: in order of time.
    """
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for record in records:
        # Of two the shorter: a long one must not make strangers of those beside it.
        norm = median_low([one.norm for one in record.inputs] or [1.0])
        beside = others_losses(record.inputs)
        for taken in record.inputs:
            loss = beside[taken.learner]
            if loss is not None:
                ratio = taken.norm / norm if norm > 0 else 1.0
                recent = found[taken.learner]
                recent.append((taken.loss, loss, ratio))
                del recent[:-RECENT]
    return {learner: _medians(recent) for learner, recent in found.items()}


def others_losses(inputs: Sequence[wire.Input]) -> dict[str, float | None]:
    """Of each learner the median of the others' losses in a round, if there are others."""
    order = sorted(range(len(inputs)), key=lambda index: inputs[index].loss)
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, index in enumerate(order):
        ranks[inputs[index].learner].append(rank)

    def beside(own: Sequence[int]) -> float | None:
        count = len(order) - len(own)
        if not count:
            return None
        found = 0.0
        for place in ((count - 1) // 2, count // 2):
            at = place
            for rank in own:
                at += rank <= at
            found += inputs[order[at]].loss / 2
        return found

    return {learner: beside(own) for learner, own in ranks.items()}


def _medians(recent: list[tuple[float, float, float]]) -> Beside:
    losses, others, ratios = zip(*recent, strict=True)
    return Beside(median(losses), median(others), median(ratios), len(recent))


def strangers(records: Iterable[wire.Record]) -> Iterator[Finding]:
    """Learners whose loss or norms are far from those of the others."""
    for name, one in sorted(beside_others(records).items()):
        if one.updates < FEWEST:
            continue
        if one.others_loss > 0 and one.loss > FAR_LOSS * one.others_loss:
            yield _warning(
                name,
                f"its loss is {one.loss:.4g}, the others' in the same rounds {one.others_loss:.4g}",
            )
        if not 1 / FAR_NORM <= one.norm_ratio <= FAR_NORM:
            yield _warning(
                name, f"its updates are {one.norm_ratio:.2g} times as long as the others'"
            )


def ruined(scores: Sequence[wire.Score]) -> Iterator[Finding]:
    """A held-out loss that has risen by much of what it had fallen, whoever did it.

    Args:
        scores: that were kept, in order of time.
    """
    if len(scores) < FEWEST_SCORES:
        return
    first, newest, best = scores[0], scores[-1], min(scores, key=lambda score: score.loss)
    worse = newest.loss - best.loss
    if worse > max(LOST_SHARE * (first.loss - best.loss), LOST_LEAST * abs(best.loss)):
        yield Finding(
            severity="warning",
            about="held-out loss",
            sentence=f"{newest.loss:.4g} at step {newest.global_step:,}; it was {best.loss:.4g} at "
            f"step {best.global_step:,}",
            advice="`diloco replay RUN --bisect` says at which version it rose, `--blame` by whom; "
            "if no learner did it, the outer step is too long: `diloco replay RUN --set "
            "outer.learning_rate=0.5`",
            runbook=LOSS_SPIKE,
        )


def _warning(name: str, sentence: str) -> Finding:
    return Finding(
        severity="warning",
        about=f"learner {name}",
        sentence=sentence,
        advice="look at its data, its learning rate and its machine; `diloco replay RUN --blame` "
        "says what its updates did",
        runbook=LOSS_SPIKE,
    )
