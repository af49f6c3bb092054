"""Finds learners whose figures are far from the others': how far, since when, and likely causes.

This module compares losses, norms, times and releases; `shard_outliers.py` compares figures of the
updates' shards. Pure.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from diloco.run.comparison import (
    FEWEST,
    LAGGING_LEARNER,
    LOSS_SPIKE,
    OTHERS,
    RATIO_FLOOR,
    TIMES,
    TINY,
    Comparison,
    climbed,
    error_of,
    gap,
    gaps_of,
    highest_loss,
    learners_with_others,
    of_gap,
    of_loss,
    of_norm,
    worth_comparing,
)
from diloco.run.shard_outliers import direction, explained, lone, still, tensors
from diloco.run.state import Finding, LearnerStatus, MergedPoint, Throughput

UPGRADE = "runbooks/upgrade.md"
# Losses that differ by less than this part of the fall of the others' losses are no finding: the
# first steps of a new life may raise a loss by as much, and once a run has memorized its data, the
# ratio of two losses varies by chance.
MATERIAL = 0.15
# A shorter upload or adoption is no trouble, whatever the others' take.
UPLOAD_S, ADOPTION_S = 0.5, 1.0


def outliers(learners: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields findings on learners whose figures are far from the others'.

    The figures are losses, norms and directions of updates, times of uploads and adoptions, rates
    and releases.
    """
    known = [one for one in learners if len(one.beside) >= FEWEST]
    if len(known) == OTHERS:
        yield from _of_two(*known)
    if len(known) <= OTHERS:
        known = []
    compared = [*learners_with_others(learners, lambda one: one.shards is not None)]
    known_why = {one.name: found for one, others in compared for found in explained(one, others)}
    yield from known_why.values()
    for one in worth_comparing(known, (of_gap, of_norm)):
        others = [other for other in known if other.name != one.name]
        if one.name not in known_why:
            norms = [*_norm(one, others)]
            # Steps of another length explain a loss that climbs.
            yield from norms if norms and climbed(one) else (*_loss(one, others), *norms)
    for one, others in compared:
        if one.name in known_why:
            continue
        # Steps of another length explain another direction.
        if one not in known or not [*_norm(one, [other for other in known if other != one])]:
            yield from direction(one, others)
            yield from tensors(one, others)
        yield from still(one)
        yield from lone(one, others)
    for one, others in learners_with_others(
        learners, lambda one: one.upload_s is not None, _uploaded
    ):
        yield from _upload(one, others)
    for one, others in learners_with_others(
        learners, lambda one: one.adoption is not None, _adopted
    ):
        yield from _adoption(one, others)
    for one, others in learners_with_others(learners, _takes_part, *map(_of_throughput, range(4))):
        yield from _throughput(one, others)
    for one, others in learners_with_others(learners, lambda one: any(one.release)):
        yield from _release(one, others)


def _uploaded(one: LearnerStatus) -> float:
    return math.log(max(one.upload_s or 0.0, TINY))


def _adopted(one: LearnerStatus) -> float:
    return math.log(max(one.adoption.mean_s if one.adoption else 0.0, TINY))


def _of_throughput(index: int) -> Callable[[LearnerStatus], float]:
    return lambda one: math.log(max(one.throughput[index] if one.throughput else 1.0, TINY))


def _of_two(one: LearnerStatus, other: LearnerStatus) -> Iterator[Finding]:
    """Yields the finding on two learners that are far apart: either may be the outlier."""
    said = []
    # In the same rounds, seen from both: while losses fall, medians over other rounds differ.
    if min(abs(of_gap(one)), abs(of_gap(other))) >= math.log(TIMES):
        said.append(f"losses {of_loss(one):.4g} and {of_loss(other):.4g}")
    if abs(of_norm(one) - of_norm(other)) >= math.log(TIMES):
        said.append(f"norms as {math.exp(of_norm(one)):.2g} to {math.exp(of_norm(other)):.2g}")
    if said:
        yield Finding(
            severity="warning",
            about=f"learners {one.name} and {other.name}",
            sentence=f"far apart in the same rounds: {', '.join(said)}; of two, figures do not "
            "say which one is wrong",
            advice="look at the data, the learning rate and the machine of both",
            runbook=LOSS_SPIKE,
        )


def began(points: Sequence[MergedPoint], off: Callable[[MergedPoint], bool]) -> MergedPoint | None:
    """Returns the earliest off point from which on at least two thirds of the points are off.

    Args:
        points: a learner's merged updates, the oldest first.
        off: whether a point's figure is far from the usual one.

    Returns:
        None if no point is off.
    """
    first, so_far = None, 0
    for count, point in enumerate(reversed(points), 1):
        so_far += off(point)
        if off(point) and 3 * so_far >= 2 * count:
            first = point
    return first


def _loss(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields the finding on a loss far above the others' in the same rounds, or far below."""
    gaps = Comparison(of_gap(one), [of_gap(other) for other in others], error_of(gaps_of(one)))
    far = gaps.far(RATIO_FLOOR)
    if not far or far * gaps.own < 0 or abs(gaps.own) < math.log(TIMES):
        return
    losses = Comparison(of_loss(one), [of_loss(other) for other in others])
    middle = losses.middle
    # The gap may be large since another learner of the same rounds is the outlier.
    if math.copysign(1, far) * (losses.own - middle) <= MATERIAL * _learnt(others):
        return
    first = began(
        one.trend,
        lambda point: (
            point.others_loss is not None
            and gap(point.loss, point.others_loss) * math.copysign(1, far) >= math.log(TIMES) / 2
        ),
    )
    figures = f"its loss is {losses.own:.4g}, the others' in the same rounds {middle:.4g}"
    if losses.own < 0 < middle:
        cause = "a sign in its loss is wrong, or it is another loss"
        advice = "compare its loss function with the others'"
    elif far < 0:
        cause = "it trains on the same few batches over and over, on held-out or on easier data"
        advice = "compare the batches that it reads, and where they come from, with the others'"
    else:
        cause = "it trains on other data or labels, or on shifted targets, or it diverges"
        advice = "compare its batches, its targets and its learning rate with the others'"
    yield one.told(
        f"{figures}: {cause}", advice, LOSS_SPIKE, evidence=f"loss {losses}", first=first
    )


def _learnt(learners: Sequence[LearnerStatus]) -> float:
    """Returns the median fall of these learners' losses: highest loss less present loss."""
    return median(highest_loss(one) - of_loss(one) for one in learners)


def _norm(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields the finding on updates far longer than the others' in the same rounds, or shorter."""
    error = error_of([math.log(max(answer.norm, TINY)) for answer in one.beside])
    norms = Comparison(of_norm(one), [of_norm(other) for other in others], error)
    far = norms.far(RATIO_FLOOR)
    if not far:
        return
    middle = math.exp(norms.middle)
    ratio = math.exp(norms.own) / middle
    first = began(
        one.trend,
        lambda point: (
            math.log(max(point.norm, TINY) / middle) * math.copysign(1, far) >= math.log(TIMES) / 2
        ),
    )
    if far > 0:
        cause = "its learning rate is too high or grows, or its data is another"
        advice = "compare its schedule, its learning rate and its data with the others'"
    else:
        cause = "its gradients are lost or rounded away, or its learning rate is tiny"
        cause = f"they hardly do anything: {cause}"
        advice = "look at its learning rate, its dtypes, and for a mask or a part that is frozen"
    sentence = f"its updates are {ratio:.2g} times as long as the others': {cause}"
    within = math.exp(norms.spread)
    evidence = f"norm {ratio:.3g} times the others' median, the others within {within:.2g} times"
    yield one.told(sentence, advice, LOSS_SPIKE, evidence=evidence, first=first)


def _upload(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields the finding on updates that take far longer to store than the others'."""
    own = one.upload_s or 0.0
    times = Comparison(
        math.log(max(own, TINY)), [math.log(max(other.upload_s or 0.0, TINY)) for other in others]
    )
    middle_s = math.exp(times.middle)
    if own < UPLOAD_S or times.far(RATIO_FLOOR) <= 0:
        return
    yield one.told(
        f"its updates take {own:.2g} s to be stored, the others' {middle_s:.2g} s: its link to the "
        "store is slow, or its machine has no time for it",
        "compare its bandwidth to the store with the others', and what else uses it",
        LAGGING_LEARNER,
        evidence=f"upload {own:.3g} s beside {middle_s:.3g} s, the others within "
        f"{math.exp(times.spread):.2g} times",
    )


def _adoption(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields the finding on versions that reach a learner far later than the others."""

    def late(figure: Callable[[LearnerStatus], float]) -> Comparison:
        own, *theirs = (math.log(max(figure(each), TINY)) for each in (one, *others))
        return Comparison(own, theirs)

    # It must be late in both units: a slow machine has few steps, a fast one few seconds.
    in_s = late(lambda each: each.adoption.mean_s if each.adoption else 0.0)
    steps = late(lambda each: each.adoption.mean_steps if each.adoption else 0.0)
    own_s, middle_s = math.exp(in_s.own), math.exp(in_s.middle)
    if own_s < ADOPTION_S or in_s.far(RATIO_FLOOR) <= 0 or steps.far(RATIO_FLOOR) <= 0:
        return
    yield one.told(
        f"versions reach it {own_s:.2g} s after they are made, the others after {middle_s:.2g} s: "
        "its link from the store or the bus is slow, or its machine has no time for it",
        "compare its bandwidth from the store with the others', and what else uses it",
        LAGGING_LEARNER,
        evidence=f"{math.exp(steps.own):.3g} of its steps, the others' "
        f"{math.exp(steps.middle):.3g}",
    )


def _takes_part(one: LearnerStatus) -> bool:
    here = one.finished or not (one.left or one.failed or one.silent)
    return here and one.throughput is not None


def _throughput(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields a warning if a learner became far slower, a note if it is slower than the others."""

    def compared(figure: Callable[[Throughput], float]) -> Comparison:
        known = (each.throughput for each in (one, *others))
        own, *theirs = (math.log(max(figure(each), TINY)) for each in known if each is not None)
        return Comparison(own, theirs)

    share = f"data takes {one.data_fraction:.0%} of its time, waiting {one.stall_fraction:.0%}"
    for change, sentence, advice in (
        (
            compared(lambda each: each.tokens_change),
            "it trains {:.2g} times as slowly as it did, and the others do not",
            "look at its machine's load, clocks and temperature, and at how its data comes",
        ),
        (
            compared(lambda each: each.updates_change),
            "its updates are merged {:.2g} times as seldom as they were, and the others' are not",
            "look in its log for what its updates wait for, and at its link",
        ),
    ):
        if change.own <= -math.log(TIMES) and change.far(RATIO_FLOOR) < 0:
            told = sentence.format(math.exp(-change.own))
            yield one.told(told, advice, LAGGING_LEARNER, evidence=share)
            return
    for level, what in (
        (compared(lambda each: each.tokens_per_s), "tokens/s are credited to it"),
        (compared(lambda each: 60 * each.updates_per_s), "of its updates are merged a minute"),
    ):
        if level.far(RATIO_FLOOR):
            own, middle = math.exp(level.own), math.exp(level.middle)
            told = f"{own:.3g} {what}, {middle:.3g} to the others: machines may be so unequal"
            yield one.told(told, severity="note", evidence=share)
            return


def _release(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields the note that a learner runs another release or other packages than all others."""
    theirs = {other.release[:2] for other in others}
    if len(theirs) > 1 or one.release[:2] in theirs:
        return
    (release, lock), (usual, packages) = one.release[:2], *theirs
    yield Finding(
        severity="note",
        about=f"learner {one.name}",
        sentence=f"it runs release {release} with packages {lock[:8]}, all others {usual} with "
        f"{packages[:8]}",
        advice="where its figures differ from the others' as well, give it the same release",
        runbook=UPGRADE,
        evidence=f"on {one.release[2]}" if one.release[2] else "",
    )
