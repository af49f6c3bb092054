"""Judges each learner by the effects of its updates, compared with those of the others.

Leaving out one of many updates that agree changes little. So a learner is judged by the effect that
its updates have alone, compared with that of the others' updates in the same rounds: on all
held-out data, and on each slice that most others improve. An honest learner with other data may do
harm on such a slice; it is then better than the others by as much on another slice.
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

# A learner is useless if its updates improve the loss by less than this share of what the others'
# do, and harmful if they worsen it by more. FEWEST is the least number of updates for a judgement.
USELESS = 0.2
FEWEST = 3
# A judgement needs a difference from the others of SURE standard errors, and a distance of CLEAR
# standard errors from the bound of the verdict. Harm to a slice must also be so frequent that
# chance would have it with at most the probability CHANCE.
SURE, CLEAR = 4.0, 2.0
CHANCE = 1e-4
# Nor is harm that in sum is less than this part of the loss: near the end it shows whose updates
# are longer or older, as those of honest machines are.
MATERIAL = 0.01
# Nor is harm of which each update alone does less than this part of what the run has learnt, and
# all of them less than that part. What was learnt counts as no more than so many times today's
# loss, as learners say the loss at the beginning.
EACH_OF_LEARNT, ALL_OF_LEARNT, MOST_LEARNT = 0.01, 0.05, 10.0
# Rounds tell who is of no use while their updates do this share of the most that any did.
MUCH = 0.03
# Harm is attributed to a slice if it is so many times as large there as on all the data.
OF_A_SLICE = 2.0

# Of updates, in a table of effects.
Places = npt.NDArray[np.intp]

# "unclear": in sum it made the loss worse, by no more than the others' updates may by chance.
# "uneven": it makes one slice better than the others do, and another worse.
Word = Literal["harmful", "useless", "uneven", "unclear", "helpful"]
AGAINST: tuple[Word, ...] = ("harmful", "useless")


class Effect(NamedTuple):
    """The effect of one update on the held-out loss, within its round.

    Attributes:
        training_loss: the training loss that its learner reported.
        did: the loss after the round, less the loss without this update; above 0: harm.
        alone: the loss after a round with this update only, less the loss before the round.
        loss, loss_without: losses of the model after the round, with and without this update.
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


# In the order they were added; those of one round are neighbours.
Effects = TupleColumns[Effect]


class Sentence(NamedTuple):
    """The judgement of one learner.

    Attributes:
        total: sum of `did` over its updates; `worse` of its `updates` made the loss worse.
        alone: mean of `alone` over its updates, from `since` on if that is known; `others`: the
            same mean over the others' updates in these rounds.
        since: the first update of the harmful or useless stretch, or None.
        slice: the slice of the held-out data to which this applies; empty: all data.
    """

    learner: str
    word: Word
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
        did, alone: these effects of each update.
        telling: whether an update's round had large effects, compared with its fragment's other
            rounds. This depends on all updates of a round, so that it favours no learner.
    """

    def __init__(self, effects: Effects, sign: int = 1) -> None:
        self.did, self.alone = sign * effects.column("did"), sign * effects.column("alone")
        self._learner, seq = effects.column("learner"), effects.column("record_seq")
        begins = np.append(True, seq[1:] != seq[:-1])
        self._round = np.cumsum(begins) - 1
        self._edges = np.append(np.flatnonzero(begins), len(seq))
        self.telling = self._telling(effects.column("fragment")[begins])

    def own(self, learner: int) -> Places:
        """Returns the places of a learner's updates, in order."""
        return np.flatnonzero(self._learner == learner)

    def others(self, place: int) -> list[float]:
        """Returns `alone` of the other learners' updates in the round of this update."""
        within = slice(*self._edges[self._round[place] :][:2])
        mine = self._learner[within] == self._learner[place]
        return [float(value) for value in self.alone[within][~mine]]

    def beyond(self, places: Places, bound: Callable[[float], float]) -> float:
        """Returns the mean distance of effects above a bound, in standard errors; 0 if below.

        Each distance is divided by the largest effect in its round, since effects shrink while a
        model converges. Student's t is converted to the normal deviate of equal probability
        (Wallace 1959), so that few updates need a larger distance.

        Args:
            places: places of updates; those without others in their round do not count.
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
        """Returns the values of `others` for all these updates, joined."""
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
) -> list[Sentence]:
    """Judge each learner; the worst comes first.

    Args:
        effects: of all updates, in order.
        slices: the same on the loss of each slice of the held-out data.
        began: the run's loss at its beginning.
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
    order = get_args(Word)
    return sorted(found, key=lambda one: (order.index(one.word), -one.total))


def _judge_slices(found: list[Sentence], slices: Mapping[str, Effects]) -> list[Sentence]:
    """Replaces a learner's judgement by that on a slice that it harms and most others improve."""
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
        one._replace(word="uneven", since=None)
        if one.slice and ahead[place] >= one.alone - one.others
        else one
        for place, one in enumerate(worst)
    ]


def _of_slice(name: str, whole: Sentence, effects: Effects, own: Places, chance: float) -> Sentence:
    """Judges a learner on a slice by all its updates: of many slices, some look bad for a while."""
    beside = _UpdateColumns(effects)
    did = beside.did[own]
    alone, usual = _means(beside, own)
    # Nearly every round would have been better on the slice without this learner.
    always = tail(int((did > 0).sum()), len(own), 0.5) < chance
    word = _word(alone, usual) if always else "helpful"
    since = effects[int(own[min(_turn(beside, own), len(own) - 1)])]
    return whole._replace(
        word=word, total=float(did.sum()), worse=int((did > 0).sum()), alone=alone, others=usual,
        since=since, slice=name,
    )  # fmt: skip


def _harm(one: Sentence) -> float:
    """Returns the key by which the worst of the judgements on slices and on all data is chosen."""
    return 0.0 if one.word != "harmful" else one.alone if one.slice else OF_A_SLICE * one.alone


def _judge(
    learner: str, effects: Effects, beside: _UpdateColumns, own: Places, began: float
) -> Sentence:
    begin = _turn(beside, own)
    late = own[begin:] if len(own) - begin >= FEWEST else own
    # Harm is judged by all late updates; uselessness only by rounds in which the others are of use.
    told, word = late, _word(*_means(beside, late))
    if word == "useless" and not _is_sure(beside, late, _some_use):
        told = late[beside.telling[late]]
        word = _word(*_means(beside, told))
    bound = _no_harm if word == "harmful" else _some_use
    # Without it its rounds would have been worse: where steps are too long or batches small an
    # update alone may do harm, and be one that the average needs.
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
    return Sentence(
        learner, word, total, int((did > 0).sum()), len(own), alone, usual,
        effects[int(late[0])] if word in AGAINST else None,
    )  # fmt: skip


def _means(beside: _UpdateColumns, own: Places) -> tuple[float, float]:
    if not len(own):
        return 0.0, 0.0  # No round had large effects.
    others = beside.all_others(own)
    return float(beside.alone[own].mean()), float(others.mean()) if others.size else 0.0


def _is_sure(beside: _UpdateColumns, places: Places, bound: Callable[[float], float]) -> bool:
    """Returns whether updates are significantly worse than the others', and beyond the bound."""
    return beside.beyond(places, _usual) > SURE and beside.beyond(places, bound) > CLEAR


def _usual(usual: float) -> float:
    return usual


def _no_harm(usual: float) -> float:
    """Returns the largest effect that is no harm, given the others' mean effect `usual`."""
    return max(0.0, -USELESS * usual)


def _some_use(usual: float) -> float:
    """Returns the largest effect that is of some use, given the others' mean effect `usual`."""
    return USELESS * min(usual, 0.0)


def _word(alone: float, usual: float) -> Word:
    """Returns the verdict on mean effects: `alone` of a learner, `usual` of the others."""
    if alone > _no_harm(usual):
        return "harmful"
    return "useless" if alone > _some_use(usual) else "helpful"


def _turn(beside: _UpdateColumns, own: Places) -> int:
    """Returns the index of the update from which on a learner's effects are worst in sum."""
    best, at, summed = 0.0, len(own), 0.0
    for index in range(len(own) - 1, -1, -1):
        usual = median(beside.others(own[index]) or [0.0])
        summed += float(beside.alone[own[index]]) - min(usual, 0.0) / 2
        if summed > best:
            best, at = summed, index
    return at
