"""Compares a learner's figures with those of the others.

A figure's distance from the others' median is measured in spreads. The spread is 1.4826 times their
median absolute deviation, and at least a floor, so that small fleets of unequal machines raise no
findings. Distances count in both directions. Pure.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from diloco.run.state import RECENT, LearnerStatus

LAGGING_LEARNER = "runbooks/lagging-learner.md"
LOSS_SPIKE = "runbooks/loss-spike.md"
# A figure is far if it lies this many spreads from the others' median.
FAR = 4.0
# A ratio of losses or norms below this is normal, since data and machines differ.
TIMES = 4.0
RATIO_FLOOR = math.log(TIMES) / FAR
# The fewest updates, merged together with others', by which a learner is judged: while losses fall
# fast, a single update that covers earlier steps has a higher loss.
FEWEST = RECENT
# The fewest others: of two learners that differ, either may be the outlier.
OTHERS = 2
# From this many learners on, those near the median of all are not compared.
MANY = 64
TINY = 1e-12


class Comparison(NamedTuple):
    """A learner's figure, and those of the others.

    Attributes:
        error: standard error of `own`, if it is a median of several values.
    """

    own: float
    others: Sequence[float]
    error: float = 0.0

    @property
    def middle(self) -> float:
        """The median of the others."""
        return median(self.others)

    @property
    def spread(self) -> float:
        """The spread of the others around their median, as a standard deviation."""
        return 1.4826 * median(abs(value - self.middle) for value in self.others)

    def far(self, floor: float) -> float:
        """Returns the distance from the others' median in spreads, negative below; 0 if not far."""
        spreads = (self.own - self.middle) / max(self.spread, floor, self.error)
        return spreads if abs(spreads) >= FAR else 0.0

    def __str__(self) -> str:
        """Returns the comparison as a finding's evidence: own, median ± spread."""
        return f"{self.own:.3g} beside {self.middle:.3g} ± {self.spread:.2g}"


def gap(loss: float, others: float) -> float:
    """Returns log(1 + |difference| / smaller absolute value), with the sign of the difference.

    For losses above 0 that is the logarithm of their ratio; losses may be negative too.
    """
    least = max(min(abs(loss), abs(others)), TINY)
    return math.copysign(math.log1p(abs(loss - others) / least), loss - others)


def each(
    learners: Sequence[LearnerStatus],
    known: Callable[[LearnerStatus], bool],
    *figures: Callable[[LearnerStatus], float],
) -> Iterator[tuple[LearnerStatus, list[LearnerStatus]]]:
    """Yields each learner with the others to compare it with; none if those are too few."""
    found = [one for one in learners if known(one)]
    for one in worth_comparing(found, figures) if len(found) > OTHERS else ():
        yield one, [other for other in found if other.name != one.name]


def worth_comparing(
    learners: Sequence[LearnerStatus], figures: Sequence[Callable[[LearnerStatus], float]]
) -> list[LearnerStatus]:
    """Returns the learners that may be far from the others, to save time in a large fleet.

    Args:
        learners: the fleet.
        figures: the logarithms by which learners are compared; if none, all are returned.
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
    """Returns the standard error of the values' median, as if they were normally distributed."""
    middle = median(values)
    return float(1.2533 * Comparison(middle, values).spread / len(values) ** 0.5)


def of_loss(one: LearnerStatus) -> float:
    """Returns a learner's median training loss."""
    return median(answer.loss for answer in one.beside)


def highest_loss(one: LearnerStatus) -> float:
    """Returns the highest of a learner's training losses, over all that was read."""
    return max(point.loss for point in one.trend)


def of_gap(one: LearnerStatus) -> float:
    """Returns the median of `gaps_of`."""
    return median(gaps_of(one))


def gaps_of(one: LearnerStatus) -> list[float]:
    """Returns the `gap` of a learner's loss to the others' in each round."""
    return [gap(answer.loss, answer.others_loss or 0.0) for answer in one.beside]


def of_norm(one: LearnerStatus) -> float:
    """Returns the logarithm of a learner's norm relative to the median of its round."""
    return math.log(max(median(answer.norm for answer in one.beside), TINY))


def climbed(one: LearnerStatus) -> bool:
    """Returns whether a learner's loss has become far worse than it was."""
    if len(one.beside) < FEWEST or not one.trend:
        return False
    return gap(of_loss(one), min(point.loss for point in one.trend)) >= math.log(TIMES)


def tail(hits: int, trials: int, chance: float) -> float:
    """Returns the probability of at least `hits` in `trials`, summed by logarithms."""
    if chance >= 1:
        return 1.0
    hit, miss = math.log(chance), math.log1p(-chance)

    def at(hits: int) -> float:
        misses = trials - hits
        ways = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(misses + 1)
        return math.exp(ways + hits * hit + misses * miss)

    return math.fsum(map(at, range(hits, trials + 1)))
