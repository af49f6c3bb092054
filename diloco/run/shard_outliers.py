"""Finds learners whose updates point elsewhere than the others', or differ in some tensors.

The figures come from the updates' shards. Pure.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import median

from diloco.run.comparison import (
    FEWEST,
    LOSS_SPIKE,
    OTHERS,
    RATIO_FLOOR,
    Comparison,
    climbed,
    highest_loss,
    of_gap,
    of_loss,
    tail,
)
from diloco.run.state import Finding, LearnerStatus, Severity

COSINE_FLOOR = 0.05
# A learner is far if its cosine is below this part of the median of the others' cosines; it points
# against them below minus this part.
APART = 0.3
# From this cosine towards zero on, a decay outweighs the gradient. The second holds for a learner
# whose loss is far above the others', since wrong labels shrink parameters too.
TO_ZERO, MOSTLY_TO_ZERO = 0.5, 0.75
# A learner that points elsewhere has other targets if its loss is HIGHER times the others', and may
# have from NOT_LOWER times on.
HIGHER, NOT_LOWER = 1.2, 1.05
# Once the others' losses are below LEARNT times their highest values, directions scatter: then a
# cosine of LEARNT_APART times the others' median or more is a note, and no warning.
LEARNT, LEARNT_APART = 0.05, 0.1
# Lone elements are reported if at least FEW_LONE updates have them, and if the probability of that,
# at the rate of the others' updates (plus one update), is at most CHANCE. Elements HUGE times the
# usual size cannot come from a flipped bit of a mantissa.
FEW_LONE, CHANCE, HUGE = 3, 1e-4, 4096.0
# The number of tensors that a finding names.
NAMED = 5
SIGN = "look at the sign of its loss, gradient and update"


def explained(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields findings with a known cause: overflow, too much weight decay, or a wrong sign.

    Such a cause also explains a learner's other differences, which need no findings then.
    """
    assert one.shards is not None
    if one.shards.factor >= HUGE:
        yield from lone(one, others)
    own, *theirs = (each.shards.to_zero or 0.0 for each in (one, *others) if each.shards)
    pulls = Comparison(own, theirs)
    least = TO_ZERO if _above(one) < math.log(HIGHER) else MOSTLY_TO_ZERO
    if own >= least and own - pulls.middle >= TO_ZERO and own > -_cosine(one):
        yield one.told(
            f"its updates take its parameters to zero, cosine to that direction {own:.2f}, the "
            f"others' {pulls.middle:.2f}: its weight decay outweighs its gradient",
            "compare its weight decay, and the learning rate that it is multiplied by, with the "
            "others'",
            LOSS_SPIKE,
            evidence=f"cosine to zero {pulls}, to the others' updates {_cosine(one):.2f}",
        )
    cosines = Comparison(_cosine(one), [_cosine(other) for other in others])
    if _is_against(cosines) and climbed(one):
        yield one.told(
            f"its loss has climbed to {of_loss(one):.4g}, and its updates point against the "
            f"others', cosine to theirs {cosines.own:.2f}, where the others have "
            f"{cosines.middle:.2f}: a sign is wrong",
            SIGN,
            LOSS_SPIKE,
            evidence=f"cosine {cosines}",
        )


def _above(one: LearnerStatus) -> float:
    return of_gap(one) if len(one.beside) >= FEWEST else 0.0


def _is_against(cosines: Comparison) -> bool:
    """Returns whether a learner points against the others, while those agree."""
    return cosines.own <= -APART * cosines.middle < 0 and cosines.far(COSINE_FLOOR) < 0


def direction(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields the finding on updates that point elsewhere than the others', while those agree."""
    assert one.shards is not None
    cosines = Comparison(_cosine(one), [_cosine(other) for other in others])
    middle = cosines.middle
    if middle <= 0 or cosines.own >= APART * middle or not cosines.far(COSINE_FLOOR):
        return
    far, against = _above(one), _is_against(cosines)
    severity: Severity = "warning"
    where = "against the others'" if against else "elsewhere"
    advice = "compare its batches and its targets with the others'"
    if far >= math.log(HIGHER):
        cause = (
            "its loss is above theirs as well: it trains on other data or labels, or on shifted "
            "targets"
        )
    elif far <= -math.log(HIGHER):
        cause = "its loss is below theirs: it trains on the same few batches over and over"
    elif not against and _is_slow(one, others):
        cause, severity = "its optimizer has come less far, or it trains on other data", "note"
    elif not against and cosines.own >= LEARNT_APART * middle and _is_learnt(others):
        cause, severity = "there is little left to learn, or it trains on other data", "note"
    elif not against:
        cause = "it may train on other data or labels"
    elif far >= math.log(NOT_LOWER):
        cause = "its loss is above theirs as well: it trains on other data or labels, or a sign is"
        cause, advice = f"{cause} wrong", f"{advice}; {SIGN}"
    else:
        decay = ", or a decay outweighs its gradient" if one.shards.to_zero is None else ""
        cause, advice = f"a sign is wrong{decay}", SIGN
    if far:
        losses = Comparison(of_loss(one), [of_loss(o) for o in others if o.beside] or [0.0])
    sentence = (
        f"its updates point {where}, cosine to theirs {cosines.own:.2f}, where the others have "
        f"{middle:.2f}: {cause}"
    )
    figures = f"cosine {cosines}{f', loss {losses}' if far else ''}"
    yield one.told(sentence, advice, LOSS_SPIKE, severity=severity, evidence=figures)


def _is_slow(one: LearnerStatus, others: Sequence[LearnerStatus]) -> bool:
    """Returns whether a learner's credited tokens a second are under half the others' median."""
    own, *theirs = (each.trend[-1].tokens_per_s if each.trend else 0.0 for each in (one, *others))
    return 0 < 2 * own < median(theirs)


def _is_learnt(learners: Sequence[LearnerStatus]) -> bool:
    """Returns whether the losses of most learners are a small part of what they were."""
    known = [one for one in learners if one.beside and highest_loss(one) > 0]
    left = [of_loss(one) / highest_loss(one) for one in known]
    return bool(left) and 0 <= median(left) < LEARNT


def _cosine(one: LearnerStatus) -> float:
    return one.shards.cosine if one.shards is not None else 0.0


def still(one: LearnerStatus) -> Iterator[Finding]:
    """Yields the finding on tensors that this learner never changes, and the others do."""
    if one.shards is not None and one.shards.still:
        yield one.told(
            f"its updates are zero in {', '.join(one.shards.still[:NAMED])}, where the others' are "
            "not: that part is frozen or masked, or its data never uses it",
            "look for a mask, a stopped gradient, or an optimizer that leaves that part out",
            LOSS_SPIKE,
            evidence=f"in each of {one.shards.updates} updates",
        )


def lone(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields the finding on updates with single elements far larger than in others' updates.

    Yields nothing if the number of such updates may be chance.
    """
    own = one.shards
    assert own is not None
    theirs = [other.shards for other in others if other.shards is not None]
    found, updates = sum(each.lone for each in theirs), sum(each.updates for each in theirs)
    if own.lone < FEW_LONE or tail(own.lone, own.updates, (found + 1) / updates) > CHANCE:
        return
    huge = own.factor >= HUGE
    cause = (
        "its gradients overflow, or its memory has errors"
        if huge
        else "its memory has errors: bits of parameters turn over"
    )
    yield one.told(
        f"single elements of its updates are {'huge' if huge else 'far'} beyond all others, up to "
        f"{own.factor:.2g} times, such as in {own.tensor}: {cause}",
        "test its memory and read its machine's log for errors of memory and accelerator"
        + ("; look at its loss scale and clip its gradients" if huge else ""),
        LOSS_SPIKE,
        evidence=f"in {own.lone} of {own.updates} updates, the others' in {found} of {updates}",
    )


def tensors(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields the finding on the tensor where the norm of a learner's updates is farthest off.

    Yields nothing if the norm is far from the others' in no tensor, or in most.
    """
    far: dict[str, Comparison] = {}
    for tensor, own in one.shards.norms.items() if one.shards is not None else ():
        theirs = [o.shards.norms[tensor] for o in others if o.shards and tensor in o.shards.norms]
        if len(theirs) >= OTHERS and (norms := Comparison(own, theirs)).far(RATIO_FLOOR):
            far[tensor] = norms
    # If most tensors differ, the whole update is longer: another finding says so.
    if one.shards is None or not far or 2 * len(far) > len(one.shards.norms):
        return
    worst = max(far, key=lambda tensor: abs(far[tensor].own))
    ratio = math.exp(far[worst].own - far[worst].middle)
    yield one.told(
        f"in {worst} its updates are {ratio:.2g} times as long as the others', elsewhere they are "
        "not: the learning rate, a scale or a mask of that part differs",
        "compare that part's optimizer, initialisation and masks with the others'",
        LOSS_SPIKE,
        evidence=f"so in {len(far)} of {len(one.shards.norms)} tensors; the others within "
        f"{math.exp(far[worst].spread):.2g} times",
    )
