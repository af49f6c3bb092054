"""Judges each learner by the effects of its updates, compared with those of the others.

Leaving out one of many updates that agree changes little. So a learner is judged by the effect that
each of its updates has as the only input of its round. That is compared with the same effect of the
others' updates in these rounds, on all held-out data, and on each slice that most others improve.
An honest learner with other data may do harm on such a slice. Then it is better than the others by
as much on another slice, and is called uneven.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from math import log1p, sqrt
from statistics import fmean, median, variance
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from diloco.common.protocol.wire import WHOLE
from diloco.replay.columns import Column, TupleColumns
from diloco.run.comparison import TINY, tail

# A learner is useless if its updates improve the loss by less than the share USELESS of the others'
# improvement, and harmful if they worsen it by more than that. FEWEST is the least number of
# updates for a judgement.
USELESS = 0.2
FEWEST = 3
# A judgement needs a difference from the others of SURE standard errors, and a distance of CLEAR
# standard errors from the bound of the verdict. Harm to a slice must also be so frequent that its
# probability by chance is at most CHANCE.
SURE, CLEAR = 4.0, 2.0
CHANCE = 1e-4
# Harm that in sum is less than this part of the loss is not judged: near the end of a run it shows
# which updates are longer or older, as those of honest machines may be.
MATERIAL = 0.01
# Nor is harm of less than EACH_OF_LEARNT of the run's improvement by each update alone and of less
# than ALL_OF_LEARNT by all of them. The improvement counts as at most MOST_LEARNT times the present
# loss, since the loss at the beginning is a claim of learners.
EACH_OF_LEARNT, ALL_OF_LEARNT, MOST_LEARNT = 0.01, 0.05, 10.0
# Which learner is useless is judged by the rounds whose median effect improves the loss by more
# than this share of the best median effect of their fragment's rounds.
MUCH = 0.03
# Harm is attributed to a slice if it is at least this many times as large there as on all the data.
OF_A_SLICE = 2.0

# Indices of updates in a table of effects.
Places = npt.NDArray[np.intp]

# "unclear": in sum the learner made the loss worse, by no more than chance explains.
# "uneven": the learner improves one slice more than the others do, and makes another one worse.
Conclusion = Literal["harmful", "useless", "uneven", "unclear", "helpful"]
AGAINST: tuple[Conclusion, ...] = ("harmful", "useless")


class Effect(NamedTuple):
    """The effect of one update on the held-out loss, within its round.

    The fields up to `clip` are those of the update and of its round's record.

    Attributes:
        record_seq: stream sequence of the round's record.
        at_s: when the round closed, in seconds since the epoch.
        training_loss: the training loss that its learner reported.
        did: the loss after the round, less the loss without this update; above 0: harm.
        alone: the loss after a round with this update only, less the loss before the round.
        loss_before: the model's loss before the round.
        loss: the model's loss after the round, `loss_without` that without this update.
    """

    fragment: int
    version: int
    record_seq: int
    global_step: int
    at_s: float
    learner: str
    incarnation: int
    seq: int
    norm: float
    training_loss: float
    weight: float
    staleness: int
    clip: float
    did: float
    alone: float
    loss_before: float
    loss: float
    loss_without: float


# Rows are in the order in which they were added; those of one round are neighbours.
Effects = TupleColumns[Effect]


class LearnerJudgement(NamedTuple):
    """The judgement of one learner.

    Attributes:
        conclusion: whether the learner helps or harms the model.
        total: sum of `did` over its updates.
        worse: number of its updates that made the loss worse, of `updates` in all.
        alone: mean of `alone` over its updates; of a harmful or useless learner over those that it
            is blamed for.
        others: the same mean over the others' updates in these rounds.
        since: the first update that it is blamed for; None: it is not blamed.
        slice: the slice of the held-out data to which this applies; empty: all data.
    """

    learner: str
    conclusion: Conclusion
    total: float
    worse: int
    updates: int
    alone: float
    others: float
    since: Effect | None
    slice: str = WHOLE


class _UpdateColumns:
    """The effects of all updates as columns, grouped by round.

    Args:
        effects: effects of the updates.
        sign: -1 reverses the effects, so that the best updates count as the worst.

    Attributes:
        did, alone: these effects of each update, float64 [updates].
        telling: bool [updates]: whether the update's round had large effects, compared with its
            fragment's other rounds. It depends on all updates of a round, so it favours no learner.
    """

    def __init__(self, effects: Effects, sign: int = 1) -> None:
        self.did, self.alone = sign * effects.column("did"), sign * effects.column("alone")
        self._learner, seq = effects.column("learner"), effects.column("record_seq")
        begins = np.append(True, seq[1:] != seq[:-1])
        self._round = np.cumsum(begins) - 1
        self._edges = np.append(np.flatnonzero(begins), len(seq))
        self.telling = self._telling(effects.column("fragment")[begins])

    def own(self, learner: int) -> Places:
        """Returns the indices of a learner's updates; `learner` is its index in `Effects.texts`."""
        return np.flatnonzero(self._learner == learner)

    def others(self, place: int) -> list[float]:
        """Returns `alone` of the other learners' updates in the round of update `place`."""
        within = slice(*self._edges[self._round[place] :][:2])
        mine = self._learner[within] == self._learner[place]
        return [float(value) for value in self.alone[within][~mine]]

    def beyond(self, places: Places, bound: Callable[[float], float]) -> float:
        """Returns by how many standard errors updates' effects are above a bound.

        It is 0 if their mean is below the bound, or they are fewer than `FEWEST`. For each update,
        `alone` less the bound is divided by the largest effect in its round, since effects shrink
        while a model converges. The mean of these is tested. Student's t is converted to the normal
        deviate of equal probability (Wallace 1959), so that few updates need a larger distance.

        Args:
            places: indices of updates; those without others in their round do not count.
            bound: returns the bound, given the mean effect of the others in the round.
        """
        found = []
        for place in places:
            own, others = float(self.alone[place]), self.others(place)
            most = max(abs(effect) for effect in (own, *others))
            if others and most > 0:
                found.append((own - bound(fmean(others))) / most)
        free, mean = len(found) - 1, fmean(found or [0.0])
        if free + 1 < FEWEST or mean <= 0:
            return 0.0
        t_squared = (free + 1) * mean**2 / max(variance(found), TINY)
        return (8 * free + 1) / (8 * free + 3) * sqrt(free * log1p(t_squared / free))

    def all_others(self, places: Places) -> Column:
        """Returns the values of `others` for all updates at `places`, joined, float64."""
        return np.fromiter(
            chain.from_iterable(self.others(place) for place in places), dtype=np.float64
        )

    def _telling(self, fragments: Column) -> npt.NDArray[np.bool_]:
        rounds = np.split(self.alone, self._edges[1:-1])
        usual = np.asarray([median(alone.tolist()) for alone in rounds])
        most = np.zeros_like(usual)
        for fragment in np.unique(fragments):
            most[fragments == fragment] = min(0.0, usual[fragments == fragment].min())
        telling = (usual < MUCH * most) & (most < 0)
        of_each: npt.NDArray[np.bool_] = telling[self._round]
        return of_each


def judge(
    effects: Effects, slices: Mapping[str, Effects] | None = None, began: float = 0.0
) -> list[LearnerJudgement]:
    """Judges each learner; the worst comes first.

    Args:
        effects: of all updates, in order of time, on the whole held-out loss.
        slices: by slice of the held-out data, the effects of the same updates on its loss.
        began: the run's loss at its beginning, as learners reported it.
    """
    if not effects:
        return []
    beside = _UpdateColumns(effects)
    found = [
        _judge(learner, effects, beside, beside.own(place), began)
        for place, learner in enumerate(effects.texts)
    ]
    if slices:
        found = _judge_slices(found, slices)
    order = get_args(Conclusion)
    return sorted(found, key=lambda one: (order.index(one.conclusion), -one.total))


def _judge_slices(
    found: list[LearnerJudgement], slices: Mapping[str, Effects]
) -> list[LearnerJudgement]:
    """Returns the judgements `found`, some of them replaced by judgements on a slice.

    These are of learners that harm a slice which most others improve.
    """
    worst, ahead = list(found), [0.0] * len(found)
    for name, effects in slices.items():
        beside, turned = _UpdateColumns(effects), _UpdateColumns(effects, -1)
        of_each = [beside.own(place) for place in range(len(found))]
        means = [float(beside.alone[own].mean()) for own in of_each]
        for place, own in enumerate(of_each):
            if turned.beyond(own, _usual) > SURE:
                alone, usual = _means(beside, own)
                ahead[place] = max(ahead[place], usual - alone)
            others = means[:place] + means[place + 1 :]
            agreed = 2 * sum(mean < 0 for mean in others) > len(others)
            if agreed and _is_sure(beside, own, _no_harm):
                one = _of_slice(name, found[place], effects, own, CHANCE / len(slices))
                worst[place] = max(worst[place], one, key=_harm)
    return [
        one._replace(conclusion="uneven", since=None)
        if one.slice and ahead[place] >= one.alone - one.others
        else one
        for place, one in enumerate(worst)
    ]


def _of_slice(
    name: str, whole: LearnerJudgement, effects: Effects, own: Places, chance: float
) -> LearnerJudgement:
    """Judges a learner on one slice by all its updates.

    A part of them does not suffice: of many slices, some look bad for a while.

    Args:
        name: the slice.
        whole: its judgement on all data.
        effects: effects of all learners' updates on the slice.
        own: indices of its updates.
        chance: the probability below which harm in so many rounds is no accident.
    """
    beside = _UpdateColumns(effects)
    did = beside.did[own]
    alone, usual = _means(beside, own)
    # Nearly every round would have been better on the slice without this learner.
    always = tail(int((did > 0).sum()), len(own), 0.5) < chance
    word = _conclude(alone, usual) if always else "helpful"
    since = effects[int(own[min(_turn(beside, own), len(own) - 1)])]
    return whole._replace(
        conclusion=word, total=float(did.sum()), worse=int((did > 0).sum()), alone=alone,
        others=usual, since=since, slice=name,
    )  # fmt: skip


def _harm(one: LearnerJudgement) -> float:
    """Returns the key by which the worst of a learner's judgements is chosen.

    Harm to all data counts `OF_A_SLICE` times, harm to a slice once.
    """
    return (
        0.0 if one.conclusion != "harmful" else one.alone if one.slice else OF_A_SLICE * one.alone
    )


def _judge(
    learner: str, effects: Effects, beside: _UpdateColumns, own: Places, began: float
) -> LearnerJudgement:
    begin = _turn(beside, own)
    late = own[begin:] if len(own) - begin >= FEWEST else own
    # Harm is judged by all late updates; uselessness only by rounds in which the others are of use.
    told, word = late, _conclude(*_means(beside, late))
    if word == "useless" and not _is_sure(beside, late, _some_use):
        told = late[beside.telling[late]]
        word = _conclude(*_means(beside, told))
    bound = _no_harm if word == "harmful" else _some_use
    # `needed`: without the learner its rounds would have been worse, or hardly better. Where steps
    # are too long or batches small, an update may do harm alone and good in the average.
    loss = effects[int(own[-1])].loss_before
    did_told = float(beside.did[told].sum())
    needed = did_told < MATERIAL * abs(loss)
    learnt = min(began - loss, MOST_LEARNT * abs(loss))
    little = (
        word == "harmful"
        and _means(beside, told)[0] < EACH_OF_LEARNT * learnt
        and did_told < ALL_OF_LEARNT * learnt
    )
    if needed or little or not _is_sure(beside, told, bound):
        word = "helpful"
    did = beside.did[own]
    total = float(did.sum())
    # Without a verdict against it, report the means over all updates, not over the worst stretch.
    alone, usual = _means(beside, told if word in AGAINST else own)
    if word == "helpful" and total > 0:
        word = "unclear"
    return LearnerJudgement(
        learner, word, total, int((did > 0).sum()), len(own), alone, usual,
        effects[int(late[0])] if word in AGAINST else None,
    )  # fmt: skip


def _means(beside: _UpdateColumns, own: Places) -> tuple[float, float]:
    if not len(own):
        return 0.0, 0.0  # No round had large effects.
    others = beside.all_others(own)
    return float(beside.alone[own].mean()), float(others.mean()) if others.size else 0.0


def _is_sure(beside: _UpdateColumns, places: Places, bound: Callable[[float], float]) -> bool:
    """Returns whether updates are worse than the others' by SURE, and beyond the bound by CLEAR."""
    return beside.beyond(places, _usual) > SURE and beside.beyond(places, bound) > CLEAR


def _usual(usual: float) -> float:
    return usual


def _no_harm(usual: float) -> float:
    """Returns the largest effect that is no harm, given the others' mean effect `usual`."""
    return max(0.0, -USELESS * usual)


def _some_use(usual: float) -> float:
    """Returns the largest effect that is of some use, given the others' mean effect `usual`."""
    return USELESS * min(usual, 0.0)


def _conclude(alone: float, usual: float) -> Conclusion:
    """Returns the verdict on mean effects: `alone` of a learner, `usual` of the others."""
    if alone > _no_harm(usual):
        return "harmful"
    return "useless" if alone > _some_use(usual) else "helpful"


def _turn(beside: _UpdateColumns, own: Places) -> int:
    """Returns the index in `own` from which on a learner's effects are worst in sum.

    It is `len(own)` if they are nowhere worse than usual.
    """
    best, at, summed = 0.0, len(own), 0.0
    for index in range(len(own) - 1, -1, -1):
        usual = median(beside.others(own[index]) or [0.0])
        summed += float(beside.alone[own[index]]) - min(usual, 0.0) / 2
        if summed > best:
            best, at = summed, index
    return at
