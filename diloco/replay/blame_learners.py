"""Judgement of each learner, by what its updates did beside those of the others.

Without one of many that agree little changes, so a learner is judged by what its updates do alone,
beside what those of the others in the same rounds do: on all the held-out data, and on each slice
of it that most others make better. Who has other data than they may do harm there and be honest,
and is then ahead of them on a slice of its own by as much.
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

# A learner whose updates do less than this share of what the others' do is of no use; if they do so
# much harm, it is harmful. One update proves nothing.
USELESS = 0.2
FEWEST = 3
# What scatters is nobody's fault: updates differ from the others' by so many of their own standard
# errors, and lie so many beyond what is said of nobody; to a slice harm is also done so often that
# chance would have it with this probability.
SURE, CLEAR = 4.0, 2.0
CHANCE = 1e-4
# Nor is harm that is less than this part of the loss: near the end it shows whose updates are
# longer or older, as those of honest machines are.
MATERIAL = 0.01
# Rounds tell who is of no use while their updates do this share of the most that any did.
MUCH = 0.03
# Harm is said to be a slice's where it is so many times as much there as on all the data.
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
        training_loss: that its learner said of it.
        did: the loss after the round less the loss without this update: above 0 it did harm.
        alone: the loss had the round been this update alone, less the loss before.
        loss, loss_without: of the model after the round.
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
        total: sum of what its updates did; `worse` of its `updates` made the loss worse.
        alone: what its updates do alone on average, from `since` on or all of them; `others`: what
            those of the others in the same rounds do.
        since: the first update that a word against a learner is about, or None.
        slice: of the held-out data, the one that all of this is about; empty: all of it.
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
    """Every update and what the others of its round do alone, in columns.

    Args:
        effects: of the updates.
        sign: -1 for a table in which the best updates stand as the worst.

    Attributes:
        did, alone: of each update.
        telling: updates of its round still do much, as those of its fragment go. Rounds are chosen
            by all alike, so that it favours no learner.
    """

    def __init__(self, effects: Effects, sign: int = 1) -> None:
        self.did, self.alone = sign * effects.column("did"), sign * effects.column("alone")
        self._learner, seq = effects.column("learner"), effects.column("record_seq")
        begins = np.append(True, seq[1:] != seq[:-1])
        self._round = np.cumsum(begins) - 1
        self._edges = np.append(np.flatnonzero(begins), len(seq))
        self.telling = self._telling(effects.column("fragment")[begins])

    def own(self, learner: int) -> Places:
        """A learner's updates, in order."""
        return np.flatnonzero(self._learner == learner)

    def others(self, place: int) -> list[float]:
        """The effects, each alone, of the other learners' updates in the round of an update."""
        within = slice(*self._edges[self._round[place] :][:2])
        mine = self._learner[within] == self._learner[place]
        return [float(value) for value in self.alone[within][~mine]]

    def beyond(self, places: Places, bound: Callable[[float], float]) -> float:
        """Mean distance of updates above a bound, in standard errors of their own scatter.

        In parts of the largest effect in their round, since effects shrink while a model converges.
        By Student's t, as the normal deviate that is as improbable (Wallace 1959), so that of few
        it takes more.

        Args:
            places: of updates; those that were alone in their round do not count.
            bound: of the mean effect of the others in the round.
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
        """The values of `others` of many updates, one after another."""
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


def judge(effects: Effects, slices: Mapping[str, Effects] | None = None) -> list[Sentence]:
    """Judge each learner; the worst comes first.

    Args:
        effects: of all updates, in order.
        slices: the same on the loss of each slice of the held-out data.
    """
    if not effects:
        return []
    beside = _UpdateColumns(effects)
    found = [
        _judge(learner, effects, beside, beside.own(place))
        for place, learner in enumerate(effects.texts)
    ]
    if slices:
        found = _judge_slices(found, slices)
    order = get_args(Word)
    return sorted(found, key=lambda one: (order.index(one.word), -one.total))


def _judge_slices(found: list[Sentence], slices: Mapping[str, Effects]) -> list[Sentence]:
    """The sentences; of who does harm to a slice that most others make better, on that slice."""
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
    """The sentence on a learner by all of its updates: of many slices one is bad for a while."""
    beside = _UpdateColumns(effects)
    did = beside.did[own]
    alone, usual = _means(beside, own)
    # Nearly every round would have been better there without it.
    always = tail(int((did > 0).sum()), len(own), 0.5) < chance
    word = _word(alone, usual) if always else "helpful"
    since = effects[int(own[min(_turn(beside, own), len(own) - 1)])]
    return whole._replace(
        word=word, total=float(did.sum()), worse=int((did > 0).sum()), alone=alone, others=usual,
        since=since, slice=name,
    )  # fmt: skip


def _harm(one: Sentence) -> float:
    """By which harm on a slice is told, and not that on all the data."""
    return 0.0 if one.word != "harmful" else one.alone if one.slice else OF_A_SLICE * one.alone


def _judge(learner: str, effects: Effects, beside: _UpdateColumns, own: Places) -> Sentence:
    begin = _turn(beside, own)
    late = own[begin:] if len(own) - begin >= FEWEST else own
    # All of them show who does harm; who is of no use shows only where the others are of some.
    told, word = late, _word(*_means(beside, late))
    if word == "useless" and not _is_sure(beside, late, _some_use):
        told = late[beside.telling[late]]
        word = _word(*_means(beside, told))
    bound = _no_harm if word == "harmful" else _some_use
    # Without it its rounds would have been worse: where steps are too long or batches small an
    # update alone may do harm, and be one that the average needs.
    needed = float(beside.did[told].sum()) < MATERIAL * abs(effects[int(own[-1])].loss_before)
    if needed or not _is_sure(beside, told, bound):
        word = "helpful"
    did = beside.did[own]
    total = float(did.sum())
    # The stretch in which it did worst is evidence of nothing where nothing is held against it.
    alone, usual = _means(beside, told if word in AGAINST else own)
    if word == "helpful" and total > 0:
        word = "unclear"
    return Sentence(
        learner, word, total, int((did > 0).sum()), len(own), alone, usual,
        effects[int(late[0])] if word in AGAINST else None,
    )  # fmt: skip


def _means(beside: _UpdateColumns, own: Places) -> tuple[float, float]:
    if not len(own):
        return 0.0, 0.0  # None of them tells anything.
    others = beside.all_others(own)
    return float(beside.alone[own].mean()), float(others.mean()) if others.size else 0.0


def _is_sure(beside: _UpdateColumns, places: Places, bound: Callable[[float], float]) -> bool:
    """Whether updates are worse than the others' and beyond a bound, and not by accident."""
    return beside.beyond(places, _usual) > SURE and beside.beyond(places, bound) > CLEAR


def _usual(usual: float) -> float:
    return usual


def _no_harm(usual: float) -> float:
    """The effect of an update, beside which the others' is `usual`, that is no harm yet."""
    return max(0.0, -USELESS * usual)


def _some_use(usual: float) -> float:
    """The effect up to which it is of some use."""
    return USELESS * min(usual, 0.0)


def _word(alone: float, usual: float) -> Word:
    """The verdict on a learner whose updates change the loss by `alone`, the others' by `usual`."""
    if alone > _no_harm(usual):
        return "harmful"
    return "useless" if alone > _some_use(usual) else "helpful"


def _turn(beside: _UpdateColumns, own: Places) -> int:
    """Index of the update from which on a learner did most worse than half of what others did."""
    best, at, summed = 0.0, len(own), 0.0
    for index in range(len(own) - 1, -1, -1):
        usual = median(beside.others(own[index]) or [0.0])
        summed += float(beside.alone[own[index]]) - min(usual, 0.0) / 2
        if summed > best:
            best, at = summed, index
    return at
