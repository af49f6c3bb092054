"""Learners whose figures lie far from the others': how far, since which version, and likely causes.

A figure is held against the others' by their median and their spread: 1.4826 times the median
absolute deviation, and no less than a floor, within which small and honestly unequal fleets stay.
What lies below is told of as well as what lies above. Pure.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from diloco.run.state import RECENT, Finding, LearnerStatus, MergedPoint, Throughput

LAGGING_LEARNER = "runbooks/lagging-learner.md"
LOSS_SPIKE = "runbooks/loss-spike.md"
UPGRADE = "runbooks/upgrade.md"
# Spreads from the others' median at which a figure is far.
FAR = 4.0
# Losses and norms less than so many times apart are honest: data differ, and so do machines.
TIMES = 4.0
RATIO_FLOOR = math.log(TIMES) / FAR
COSINE_FLOOR = 0.05
# Of fewer updates that were merged together with others' nothing is said. While losses fall fast,
# one that covers other steps is honestly above the others.
FEWEST = RECENT
# One other has no spread, and of two nobody can tell which is the odd one.
OTHERS = 2
# Beside the others' agreement with each other a learner's is less than this part of it, or against
# them by more than that.
APART = 0.3
# Cosine to zero from which a decay outweighs the gradient; of one whose loss is far above the
# others' as well, since labels that are wrong shrink parameters too.
TO_ZERO, MOSTLY_TO_ZERO = 0.5, 0.75
# Who points elsewhere and has a loss so many times the others' has other targets; from the second
# on it may have.
HIGHER, NOT_LOWER = 1.2, 1.05
# Lone elements in so many updates, and in such a share of them more than the others have, are no
# accident; from so many times the usual size on they are no bit of a mantissa.
FEW_LONE, LONE_SHARE, HUGE = 3, 0.08, 4096.0
# A shorter upload or adoption is no trouble, whatever the others' take.
UPLOAD_S, ADOPTION_S = 0.5, 1.0
# Tensors that a finding names.
NAMED = 5
# From so many learners on only those are compared whose figures are not near the middle anyway.
MANY = 64
TINY = 1e-12
SIGN = "look at the sign of its loss, gradient and update"


class Comparison(NamedTuple):
    """A learner's figure, and those of the others."""

    own: float
    others: Sequence[float]

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
        spreads = (self.own - self.middle) / max(self.spread, floor)
        return spreads if abs(spreads) >= FAR else 0.0

    def __str__(self) -> str:
        """The evidence, in figures."""
        return f"{self.own:.3g} beside {self.middle:.3g} ± {self.spread:.2g}"


def gap(loss: float, others: float) -> float:
    """How far two losses are apart: the logarithm of their ratio; more across zero."""
    least = max(min(abs(loss), abs(others)), TINY)
    return math.copysign(math.log1p(abs(loss - others) / least), loss - others)


def outliers(learners: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """The findings on learners whose losses, norms or directions are far from the others'."""
    known = [one for one in learners if len(one.beside) >= FEWEST]
    if len(known) == OTHERS:
        yield from _of_two(*known)
    if len(known) <= OTHERS:
        known = []
    compared = [*_each(learners, lambda one: one.shards is not None)]
    explained = {one.name: found for one, others in compared for found in _explained(one, others)}
    yield from explained.values()
    for one in _worth_comparing(known, (_of_gap, _of_norm)):
        others = [other for other in known if other.name != one.name]
        if one.name not in explained:
            norms = [*_norm(one, others)]
            # The loss of one that diverges by the length of its steps follows from that.
            yield from norms if norms and _climbed(one) else (*_loss(one, others), *norms)
    for one, others in compared:
        if one.name in explained:
            continue
        # Where steps are far too long or too short, that is why they point elsewhere.
        if one not in known or not [*_norm(one, [other for other in known if other != one])]:
            yield from _direction(one, others)
            yield from _tensors(one, others)
        yield from _still(one)
        yield from _lone(one, others)
    for one, others in _each(learners, lambda one: one.upload_s is not None, _uploaded):
        yield from _upload(one, others)
    for one, others in _each(learners, lambda one: one.adoption is not None, _adopted):
        yield from _adoption(one, others)
    for one, others in _each(learners, _takes_part, *map(_of_throughput, range(4))):
        yield from _throughput(one, others)
    for one, others in _each(learners, lambda one: any(one.release)):
        yield from _release(one, others)


def _each(
    learners: Sequence[LearnerStatus],
    known: Callable[[LearnerStatus], bool],
    *figures: Callable[[LearnerStatus], float],
) -> Iterator[tuple[LearnerStatus, list[LearnerStatus]]]:
    """Each learner of whom something is known, and the others; nobody where they are too few."""
    found = [one for one in learners if known(one)]
    for one in _worth_comparing(found, figures) if len(found) > OTHERS else ():
        yield one, [other for other in found if other.name != one.name]


def _worth_comparing(
    learners: Sequence[LearnerStatus], figures: Sequence[Callable[[LearnerStatus], float]]
) -> list[LearnerStatus]:
    """Those who may be far: of a large fleet not all are held against all others.

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


def _uploaded(one: LearnerStatus) -> float:
    return math.log(max(one.upload_s or 0.0, TINY))


def _adopted(one: LearnerStatus) -> float:
    return math.log(max(one.adoption.mean_s if one.adoption else 0.0, TINY))


def _of_throughput(index: int) -> Callable[[LearnerStatus], float]:
    return lambda one: math.log(max(one.throughput[index] if one.throughput else 1.0, TINY))


def _of_two(one: LearnerStatus, other: LearnerStatus) -> Iterator[Finding]:
    """Two that are far apart: either may be the odd one."""
    said = []
    # In the same rounds, both ways: medians over other rounds differ while losses fall.
    if min(abs(_of_gap(one)), abs(_of_gap(other))) >= math.log(TIMES):
        said.append(f"losses {_of_loss(one):.4g} and {_of_loss(other):.4g}")
    if abs(_of_norm(one) - _of_norm(other)) >= math.log(TIMES):
        said.append(f"norms as {math.exp(_of_norm(one)):.2g} to {math.exp(_of_norm(other)):.2g}")
    if said:
        yield Finding(
            severity="warning",
            about=f"learners {one.name} and {other.name}",
            sentence=f"far apart in the same rounds: {', '.join(said)}; of two, figures do not "
            "say which one is wrong",
            advice="look at the data, the learning rate and the machine of both",
            runbook=LOSS_SPIKE,
        )


def _of_loss(one: LearnerStatus) -> float:
    return median(answer.loss for answer in one.beside)


def _of_gap(one: LearnerStatus) -> float:
    return median(gap(answer.loss, answer.others_loss or 0.0) for answer in one.beside)


def _of_norm(one: LearnerStatus) -> float:
    """Logarithm of the norm, which is in parts of the median of its round."""
    return math.log(max(median(answer.norm for answer in one.beside), TINY))


def _warning(
    one: LearnerStatus,
    sentence: str,
    advice: str,
    evidence: str,
    first: MergedPoint | None,
    runbook: str = LOSS_SPIKE,
) -> Finding:
    return Finding(
        severity="warning",
        about=f"learner {one.name}",
        sentence=sentence,
        advice=advice,
        runbook=runbook,
        evidence=evidence,
        since=first.version if first else None,
        since_s=first.at_s if first else None,
    )


def began(points: Sequence[MergedPoint], off: Callable[[MergedPoint], bool]) -> MergedPoint | None:
    """The first point from which on at least two of three are off; None if there is none."""
    first, so_far = None, 0
    for count, point in enumerate(reversed(points), 1):
        so_far += off(point)
        if off(point) and 3 * so_far >= 2 * count:
            first = point
    return first


def _loss(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """A loss far above the others' in the same rounds, or far below."""
    gaps = Comparison(_of_gap(one), [_of_gap(other) for other in others])
    far = gaps.far(RATIO_FLOOR)
    if not far or far * gaps.own < 0 or abs(gaps.own) < math.log(TIMES):
        return
    losses = Comparison(_of_loss(one), [_of_loss(other) for other in others])
    middle = losses.middle
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
    yield _warning(one, f"{figures}: {cause}", advice, f"loss {losses}", first)


def _norm(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Updates far longer than the others' in the same rounds, or far shorter."""
    norms = Comparison(_of_norm(one), [_of_norm(other) for other in others])
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
    yield _warning(one, sentence, advice, evidence, first)


def _explained(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Updates that lead to zero, up the learner's own loss, or overflow: all else follows."""
    assert one.shards is not None
    if one.shards.factor >= HUGE:
        yield from _lone(one, others)
    own, *theirs = (each.shards.to_zero or 0.0 for each in (one, *others) if each.shards)
    pulls = Comparison(own, theirs)
    least = TO_ZERO if _above(one) < math.log(HIGHER) else MOSTLY_TO_ZERO
    if own >= least and own - pulls.middle >= TO_ZERO and own > -_cosine(one):
        yield _warning(
            one,
            f"its updates take its parameters to zero, cosine to that direction {own:.2f}, the "
            f"others' {pulls.middle:.2f}: its weight decay outweighs its gradient",
            "compare its weight decay, and the learning rate that it is multiplied by, with the "
            "others'",
            f"cosine to zero {pulls}, to the others' updates {_cosine(one):.2f}",
            None,
        )
    cosines = Comparison(_cosine(one), [_cosine(other) for other in others])
    if _is_against(cosines) and _climbed(one):
        yield _warning(
            one,
            f"its loss has climbed to {_of_loss(one):.4g}, and its updates point against the "
            f"others', cosine to theirs {cosines.own:.2f}, where the others have "
            f"{cosines.middle:.2f}: a sign is wrong",
            SIGN,
            f"cosine {cosines}",
            None,
        )


def _climbed(one: LearnerStatus) -> bool:
    """Whether its loss has become far worse than it was."""
    if len(one.beside) < FEWEST or not one.trend:
        return False
    return gap(_of_loss(one), min(point.loss for point in one.trend)) >= math.log(TIMES)


def _above(one: LearnerStatus) -> float:
    return _of_gap(one) if len(one.beside) >= FEWEST else 0.0


def _is_against(cosines: Comparison) -> bool:
    """Whether one points against the others, who agree."""
    return cosines.own <= -APART * cosines.middle < 0 and cosines.far(COSINE_FLOOR) < 0


def _direction(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Updates that point elsewhere, where the others agree."""
    assert one.shards is not None
    cosines = Comparison(_cosine(one), [_cosine(other) for other in others])
    middle = cosines.middle
    if middle <= 0 or cosines.own >= APART * middle or not cosines.far(COSINE_FLOOR):
        return
    far, against = _above(one), _is_against(cosines)
    where = "against the others'" if against else "elsewhere"
    advice = "compare its batches and its targets with the others'"
    if far >= math.log(HIGHER):
        cause = (
            "its loss is above theirs as well: it trains on other data or labels, or on shifted "
            "targets"
        )
    elif far <= -math.log(HIGHER):
        cause = "its loss is below theirs: it trains on the same few batches over and over"
    elif not against:
        cause = "it may train on other data or labels"
    elif far >= math.log(NOT_LOWER):
        cause = "its loss is above theirs as well: it trains on other data or labels, or a sign is"
        cause, advice = f"{cause} wrong", f"{advice}; {SIGN}"
    else:
        decay = ", or a decay outweighs its gradient" if one.shards.to_zero is None else ""
        cause, advice = f"a sign is wrong{decay}", SIGN
    if far:
        losses = Comparison(_of_loss(one), [_of_loss(o) for o in others if o.beside] or [0.0])
    sentence = (
        f"its updates point {where}, cosine to theirs {cosines.own:.2f}, where the others have "
        f"{middle:.2f}: {cause}"
    )
    figures = f"cosine {cosines}{f', loss {losses}' if far else ''}"
    yield _warning(one, sentence, advice, figures, None)


def _cosine(one: LearnerStatus) -> float:
    return one.shards.cosine if one.shards is not None else 0.0


def _still(one: LearnerStatus) -> Iterator[Finding]:
    """Tensors in which a learner does nothing, and the others do."""
    if one.shards is not None and one.shards.still:
        yield _warning(
            one,
            f"its updates are zero in {', '.join(one.shards.still[:NAMED])}, where the others' are "
            "not: that part is frozen or masked, or its data never uses it",
            "look for a mask, a stopped gradient, or an optimizer that leaves that part out",
            f"in each of {one.shards.updates} updates",
            None,
        )


def _lone(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """A few elements far beyond the others'."""
    own = one.shards
    assert own is not None
    theirs = [other.shards for other in others if other.shards is not None]
    usual = median(other.lone / other.updates for other in theirs)
    if own.lone < FEW_LONE or own.lone / own.updates < LONE_SHARE + 2 * usual:
        return
    huge = own.factor >= HUGE
    cause = (
        "its gradients overflow, or its memory has errors"
        if huge
        else "its memory has errors: bits of parameters turn over"
    )
    yield _warning(
        one,
        f"single elements of its updates are {'huge' if huge else 'far'} beyond all others, up to "
        f"{own.factor:.2g} times, such as in {own.tensor}: {cause}",
        "test its memory and read its machine's log for errors of memory and accelerator"
        + ("; look at its loss scale and clip its gradients" if huge else ""),
        f"in {own.lone} of {own.updates} updates, the others' median {usual * own.updates:.2g}",
        None,
    )


def _upload(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Updates that take far longer to store than the others'."""
    own = one.upload_s or 0.0
    times = Comparison(
        math.log(max(own, TINY)), [math.log(max(other.upload_s or 0.0, TINY)) for other in others]
    )
    middle_s = math.exp(times.middle)
    if own < UPLOAD_S or times.far(RATIO_FLOOR) <= 0:
        return
    yield _warning(
        one,
        f"its updates take {own:.2g} s to be stored, the others' {middle_s:.2g} s: its link to the "
        "store is slow, or its machine has no time for it",
        "compare its bandwidth to the store with the others', and what else uses it",
        f"upload {own:.3g} s beside {middle_s:.3g} s, the others within "
        f"{math.exp(times.spread):.2g} times",
        None,
        LAGGING_LEARNER,
    )


def _adoption(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Versions that reach a learner far later than the others, in seconds and in its steps."""

    def late(figure: Callable[[LearnerStatus], float]) -> Comparison:
        own, *theirs = (math.log(max(figure(each), TINY)) for each in (one, *others))
        return Comparison(own, theirs)

    # Who is slow takes as many steps as the others, and who is fast as many seconds.
    in_s = late(lambda each: each.adoption.mean_s if each.adoption else 0.0)
    steps = late(lambda each: each.adoption.mean_steps if each.adoption else 0.0)
    own_s, middle_s = math.exp(in_s.own), math.exp(in_s.middle)
    if own_s < ADOPTION_S or in_s.far(RATIO_FLOOR) <= 0 or steps.far(RATIO_FLOOR) <= 0:
        return
    yield _warning(
        one,
        f"versions reach it {own_s:.2g} s after they are made, the others after {middle_s:.2g} s: "
        "its link from the store or the bus is slow, or its machine has no time for it",
        "compare its bandwidth from the store with the others', and what else uses it",
        f"{math.exp(steps.own):.3g} of its steps, the others' {math.exp(steps.middle):.3g}",
        None,
        LAGGING_LEARNER,
    )


def _takes_part(one: LearnerStatus) -> bool:
    here = one.finished or not (one.left or one.failed or one.silent)
    return here and one.throughput is not None


def _throughput(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Work that comes far slower than it did; and, as no more than a fact, than the others'."""

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
            yield _warning(one, told, advice, share, None, LAGGING_LEARNER)
            return
    for level, what in (
        (compared(lambda each: each.tokens_per_s), "tokens/s are credited to it"),
        (compared(lambda each: 60 * each.updates_per_s), "of its updates are merged a minute"),
    ):
        if level.far(RATIO_FLOOR):
            own, middle = math.exp(level.own), math.exp(level.middle)
            told = f"{own:.3g} {what}, {middle:.3g} to the others: machines may be so unequal"
            fact = _warning(one, told, "", share, None, LAGGING_LEARNER)
            yield replace(fact, severity="note", runbook=None)
            return


def _tensors(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """The tensor in which a learner's updates are far longer than the others', or far shorter."""
    far: dict[str, Comparison] = {}
    for tensor, own in one.shards.norms.items() if one.shards is not None else ():
        theirs = [o.shards.norms[tensor] for o in others if o.shards and tensor in o.shards.norms]
        if len(theirs) >= OTHERS and (norms := Comparison(own, theirs)).far(RATIO_FLOOR):
            far[tensor] = norms
    # Where it is so in most of them, that is no matter of one part.
    if one.shards is None or not far or 2 * len(far) > len(one.shards.norms):
        return
    worst = max(far, key=lambda tensor: abs(far[tensor].own))
    ratio = math.exp(far[worst].own - far[worst].middle)
    yield _warning(
        one,
        f"in {worst} its updates are {ratio:.2g} times as long as the others', elsewhere they are "
        "not: the learning rate, a scale or a mask of that part differs",
        "compare that part's optimizer, initialisation and masks with the others'",
        f"so in {len(far)} of {len(one.shards.norms)} tensors; the others within "
        f"{math.exp(far[worst].spread):.2g} times",
        None,
    )


def _release(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Another program or other packages than all others have."""
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
