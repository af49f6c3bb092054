"""Compares a learner's figures with those of the other learners.

A figure's distance from the others' median is measured in spreads. The spread is 1.4826 times the
others' median absolute deviation, but at least a floor, so that small fleets of unequal machines
raise no findings. Figures far above and far below the median both count as far. Pure.
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
    """A learner's figure, and the same figure of the other learners.

    Attributes:
        own: the learner's figure.
        others: the figures of the other learners.
        error: standard error of `own` if that is a median of several values, else 0.
    """

    own: float
    others: Sequence[float]
    error: float = 0.0

    @property
    def middle(self) -> float:
        """The median of `others`."""
        return median(self.others)

    @property
    def spread(self) -> float:
        """The spread of `others` around their median, as a standard deviation."""
        return 1.4826 * median(abs(value - self.middle) for value in self.others)

    def far(self, floor: float) -> float:
        """Returns the distance of `own` from the others' median in spreads; 0 if not far.

        It is negative if `own` is below the median; `FAR` spreads or more are far. The spread is
        taken to be at least `floor` and at least `error`.
        """
        spreads = (self.own - self.middle) / max(self.spread, floor, self.error)
        return spreads if abs(spreads) >= FAR else 0.0

    def __str__(self) -> str:
        """Returns the comparison as a finding's evidence: `own`, the others' median ± spread."""
        return f"{self.own:.3g} beside {self.middle:.3g} ± {self.spread:.2g}"


def gap(loss: float, others: float) -> float:
    """Returns how far a loss is above another one, on a logarithmic scale; negative if below.

    It is log(1 + |difference| / smaller absolute value) with the sign of the difference. For losses
    above 0 that is the logarithm of their ratio; losses may be negative too.
    """
    least = max(min(abs(loss), abs(others)), TINY)
    return math.copysign(math.log1p(abs(loss - others) / least), loss - others)


def learners_with_others(
    learners: Sequence[LearnerStatus],
    known: Callable[[LearnerStatus], bool],
    *figures: Callable[[LearnerStatus], float],
) -> Iterator[tuple[LearnerStatus, list[LearnerStatus]]]:
    """Yields (learner, other learners) for each learner that may be far from the others.

    Yields nothing if a learner would have fewer than `OTHERS` others.

    Args:
        learners: the fleet.
        known: whether a learner has the figures; learners without them take no part.
        figures: as in `worth_comparing`.
    """
    found = [one for one in learners if known(one)]
    for one in worth_comparing(found, figures) if len(found) > OTHERS else ():
        yield one, [other for other in found if other.name != one.name]


def worth_comparing(
    learners: Sequence[LearnerStatus], figures: Sequence[Callable[[LearnerStatus], float]]
) -> list[LearnerStatus]:
    """Returns the learners that may be far from the others, to save time in a large fleet.

    Args:
        learners: the fleet; if it is smaller than `MANY`, all are returned.
        figures: functions that return the logarithm of a learner's figure; a learner is returned
            if one of its figures is not near the fleet's median. If empty, all are returned.
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
    """Returns the median training loss of a learner's last updates (`LearnerStatus.beside`)."""
    return median(answer.loss for answer in one.beside)


def highest_loss(one: LearnerStatus) -> float:
    """Returns the highest training loss among the points of a learner's `trend`."""
    return max(point.loss for point in one.trend)


def of_gap(one: LearnerStatus) -> float:
    """Returns the median `gap` of a learner's loss to the other learners' in the same rounds."""
    return median(gaps_of(one))


def gaps_of(one: LearnerStatus) -> list[float]:
    """Returns the `gap` of a learner's loss to the other learners' in each of its last rounds."""
    return [gap(answer.loss, answer.others_loss or 0.0) for answer in one.beside]


def of_norm(one: LearnerStatus) -> float:
    """Returns the logarithm of a learner's median norm, relative to the medians of the rounds."""
    return math.log(max(median(answer.norm for answer in one.beside), TINY))


def climbed(one: LearnerStatus) -> bool:
    """Returns whether a learner's loss is now at least `TIMES` times its lowest loss."""
    if len(one.beside) < FEWEST or not one.trend:
        return False
    return gap(of_loss(one), min(point.loss for point in one.trend)) >= math.log(TIMES)


def tail(hits: int, trials: int, chance: float) -> float:
    """Returns the probability of `hits` or more successes in `trials` trials of given `chance`."""
    if chance >= 1:
        return 1.0
    hit, miss = math.log(chance), math.log1p(-chance)

    def at(hits: int) -> float:
        misses = trials - hits
        ways = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(misses + 1)
        return math.exp(ways + hits * hit + misses * miss)

    return math.fsum(map(at, range(hits, trials + 1)))
