"""A learner's figures beside the others'.

A figure is held against the others' by their median and their spread: 1.4826 times the median
absolute deviation, and no less than a floor, within which small and honestly unequal fleets stay.
What lies below is told of as well as what lies above. Pure.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from diloco.run.state import RECENT, LearnerStatus

LAGGING_LEARNER = "runbooks/lagging-learner.md"
LOSS_SPIKE = "runbooks/loss-spike.md"
# Spreads from the others' median at which a figure is far.
FAR = 4.0
# Losses and norms less than so many times apart are honest: data differ, and so do machines.
TIMES = 4.0
RATIO_FLOOR = math.log(TIMES) / FAR
# Of fewer updates that were merged together with others' nothing is said. While losses fall fast,
# one that covers other steps is honestly above the others.
FEWEST = RECENT
# One other has no spread, and of two nobody can tell which is the odd one.
OTHERS = 2
# From so many learners on only those are compared whose figures are not near the middle anyway.
MANY = 64
TINY = 1e-12


class Comparison(NamedTuple):
    """A learner's figure, and those of the others.

    Attributes:
        error: standard error of its own, where it is a median of figures that scatter.
    """

    own: float
    others: Sequence[float]
    error: float = 0.0

    @property
    def middle(self) -> float:
        """Median of the others."""
        return median(self.others)

    @property
    def spread(self) -> float:
        """Spread of the others around it, as a standard deviation."""
        return 1.4826 * median(abs(value - self.middle) for value in self.others)

    def far(self, floor: float) -> float:
        """Spreads that it lies above the others' median; negative below; 0 if it is not far."""
        spreads = (self.own - self.middle) / max(self.spread, floor, self.error)
        return spreads if abs(spreads) >= FAR else 0.0

    def __str__(self) -> str:
        """The evidence, in figures."""
        return f"{self.own:.3g} beside {self.middle:.3g} ± {self.spread:.2g}"


def gap(loss: float, others: float) -> float:
    """Returns the logarithm of the ratio of a loss to the others', signed.

    More exactly: of 1 + |difference| / the smaller size, which also holds for losses below 0.
    """
    least = max(min(abs(loss), abs(others)), TINY)
    return math.copysign(math.log1p(abs(loss - others) / least), loss - others)


def each(
    learners: Sequence[LearnerStatus],
    known: Callable[[LearnerStatus], bool],
    *figures: Callable[[LearnerStatus], float],
) -> Iterator[tuple[LearnerStatus, list[LearnerStatus]]]:
    """Each learner's figure compared with the others'; empty where the others are too few."""
    found = [one for one in learners if known(one)]
    for one in worth_comparing(found, figures) if len(found) > OTHERS else ():
        yield one, [other for other in found if other.name != one.name]


def worth_comparing(
    learners: Sequence[LearnerStatus], figures: Sequence[Callable[[LearnerStatus], float]]
) -> list[LearnerStatus]:
    """The learners that may be far from others: a large fleet is not compared in full.

    Args:
        learners: the fleet.
        figures: logarithms that it is compared by; none: everybody is worth it.
    """
    if len(learners) < MANY or not figures:
        return [*learners]
    near = 0.5 * FAR * RATIO_FLOOR
    found: set[str] = set()
    for figure in figures:
        values = [figure(one) for one in learners]
        middle = median(values)
        found |= {
            one.name
            for one, value in zip(learners, values, strict=True)
            if abs(value - middle) > near
        }
    return [one for one in learners if one.name in found]


def error_of(values: Sequence[float]) -> float:
    """Standard error of their median, as of values that scatter normally: by their spread."""
    middle = median(values)
    return float(1.2533 * Comparison(middle, values).spread / len(values) ** 0.5)


def of_loss(one: LearnerStatus) -> float:
    """A learner's median training loss."""
    return median(answer.loss for answer in one.beside)


def of_gap(one: LearnerStatus) -> float:
    """The median of a learner's losses above the others' in the same rounds."""
    return median(gaps_of(one))


def gaps_of(one: LearnerStatus) -> list[float]:
    """A learner's losses above the others', round by round."""
    return [gap(answer.loss, answer.others_loss or 0.0) for answer in one.beside]


def of_norm(one: LearnerStatus) -> float:
    """Logarithm of the norm, which is in parts of the median of its round."""
    return math.log(max(median(answer.norm for answer in one.beside), TINY))


def climbed(one: LearnerStatus) -> bool:
    """Whether a learner's loss has become far worse than it was."""
    if len(one.beside) < FEWEST or not one.trend:
        return False
    return gap(of_loss(one), min(point.loss for point in one.trend)) >= math.log(TIMES)


def tail(hits: int, trials: int, chance: float) -> float:
    """Probability of this number of hits or more; in logarithms, since there may be many trials."""
    if chance >= 1:
        return 1.0
    hit, miss = math.log(chance), math.log1p(-chance)

    def at(hits: int) -> float:
        misses = trials - hits
        ways = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(misses + 1)
        return math.exp(ways + hits * hit + misses * miss)

    return math.fsum(map(at, range(hits, trials + 1)))
