"""`diloco replay --blame`: what each update did to the model, by merging each round without it.

From the base of every round, as it was, the round is merged again without each of its inputs, and
with each of them alone, and every model is scored on held-out data. What comes out is exact and
on-policy: learners had trained on that very base, and nothing after the round is touched. It says
what an update did within its round; what learners would have sent after another, nobody knows.

Without one of many that agree little changes, so a learner is judged by what its updates do alone,
beside what those of the others in the same rounds do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from itertools import chain
from math import exp, fsum, inf, lgamma, log, log1p
from operator import attrgetter
from statistics import median
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.arrays.merge import Vector
from diloco.aggregator.shard_reader import read_input, read_payload
from diloco.check.remake import Progress
from diloco.common import wire
from diloco.common.averaged import settings_of
from diloco.common.layout import Fragment
from diloco.projections.history import Chain, History, in_order
from diloco.replay.effects import Column, Effect, Effects, Judged
from diloco.replay.rounds import admitted_again, copy_arrays, load_arrays, settings_at

# Updates whose harm is looked into tensor by tensor.
BY_TENSOR = 6
# A learner whose updates do less than this share of what the others' do is of no use; if they do so
# much harm, it is harmful. One update proves nothing.
USELESS = 0.2
FEWEST = 3
# What scatters about the others is nobody's fault. It is no accident so many standard errors away,
# or to be the worst of the round so often that chance would have it with this probability.
SURE = 4.0
CHANCE, CHANCE_TELLING = 1e-4, 1e-3
# Rounds tell who is of no use while their updates do this share of the most that any did.
MUCH = 0.03

# Of updates, in a table of effects.
Places = npt.NDArray[np.intp]

# Held-out loss of the model with these views, of all fragments in order.
Evaluate = Callable[[Sequence[Vector]], float]


# "unclear": in sum it made the loss worse, by no more than the others' updates may by chance.
Word = Literal["harmful", "useless", "unclear", "helpful"]
AGAINST: tuple[Word, ...] = ("harmful", "useless")


class TensorEffect(NamedTuple):
    """What the part of an update in one tensor did."""

    effect: Effect
    tensor: str
    did: float


class Sentence(NamedTuple):
    """What is held against a learner, or for it.

    Attributes:
        total: sum of what its updates did; `worse` of its `updates` made the loss worse.
        alone: what its updates do alone on average, from `since` on or all of them; `others`: what
            those of the others in the same rounds do.
        since: the first update that a word against a learner is about, or None.
    """

    learner: str
    word: Word
    total: float
    worse: int
    updates: int
    alone: float
    others: float
    since: Effect | None


@dataclass
class Blame:
    """Every update's effect in order of time, and those of the worst by tensor."""

    effects: Effects = field(default_factory=Effects)
    tensors: list[TensorEffect] = field(default_factory=list)
    _worst: list[Effect] = field(default_factory=list)

    def add(self, effect: Effect) -> bool:
        """The next one; whether it is among the worst so far."""
        self.effects.append(effect)
        if effect.did <= 0:
            return False
        self._worst = nlargest(BY_TENSOR, [*self._worst, effect], key=attrgetter("did"))
        return any(one is effect for one in self._worst)

    def worst(self) -> list[Effect]:
        """The updates that did most harm so far, the worst first."""
        return self._worst


def blame(
    history: History,
    chains: Mapping[int, Chain],
    evaluate: Evaluate,
    progress: Progress | None = None,
) -> Blame:
    """Every round once more, without each of its inputs.

    Args:
        history: the tape.
        chains: of every fragment, from a record with a stored state on; no input is missing.
        evaluate: scores a model.
        progress: hears how many of how many rounds are done.

    Raises:
        IntegrityError: a round does not come out as it was recorded.
        StoreUnavailableError: the store is away.
    """
    found = Blame()
    models = {fragment: load_arrays(history, chain[0][1]) for fragment, chain in chains.items()}
    count = sum(len(chain) - 1 for chain in chains.values())
    line = in_order(chain[1:] for chain in chains.values())
    before = evaluate(_views(models))
    for done, (seq, record) in enumerate(line):
        if record.what == "restore":
            models[record.fragment] = load_arrays(history, record)
            before = evaluate(_views(models))
        elif record.what == "version":
            judged = _Round(history, models, seq, record, before)
            for effect, without in judged.effects(evaluate):
                if found.add(effect):
                    found.tensors += judged.by_tensor(effect, without, evaluate)
            before = judged.loss
        if progress is not None:
            progress(done + 1, count)
    worst = found.worst()
    found.tensors = [one for one in found.tensors if one.effect in worst]
    return found


def _views(models: Mapping[int, FragmentArrays]) -> list[Vector]:
    return [models[fragment].view for fragment in sorted(models)]


class _Round:
    """One round, as it was and without each of its inputs.

    Attributes:
        loss: of the model after it.
    """

    def __init__(
        self,
        history: History,
        models: dict[int, FragmentArrays],
        seq: int,
        record: wire.Record,
        loss_before: float,
    ) -> None:
        self.loss = loss_before
        self._before = loss_before
        self._history = history
        self._models = models
        self._seq = seq
        self._record = record

    def effects(self, evaluate: Evaluate) -> Iterator[tuple[Effect, Vector]]:
        """What each input did, with the view that there is without it; `models` moves on."""
        record, models = self._record, self._models
        base = copy_arrays(models[record.fragment])
        arrays = models[record.fragment]
        arrays.merge_again(record, partial(read_input, self._history.store, arrays.grid))
        self.loss = evaluate(_views(models))
        for index, taken in enumerate(record.inputs):
            others = [*record.inputs[:index], *record.inputs[index + 1 :]]
            without = self._merged(copy_arrays(base), others)
            loss = evaluate(self._with(without))
            alone = evaluate(self._with(self._merged(copy_arrays(base), [taken])))
            yield (
                Effect(
                    record.fragment, record.version, self._seq, record.global_step,
                    record.closed_at_s, Judged.of(taken), self.loss - loss, alone - self._before,
                    self._before, self.loss, loss,
                ),
                without,
            )  # fmt: skip

    def _with(self, view: Vector) -> list[Vector]:
        views = {fragment: arrays.view for fragment, arrays in self._models.items()}
        views[self._record.fragment] = view
        return [views[fragment] for fragment in sorted(views)]

    def _merged(self, arrays: FragmentArrays, inputs: Sequence[wire.Input]) -> Vector:
        """The view after the round with some of its inputs; with none it stays as it was."""
        record, history = self._record, self._history
        in_force = settings_at(history, record.policy.settings_seq)
        settings = settings_of(in_force, history.layout, record.fragment)
        arrays.settings = settings
        admitted = [admitted_again(record, taken, settings) for taken in inputs]
        for one in admitted:
            arrays.merge(read_payload(history.store, one.manifest, arrays.grid), one)
        if admitted:
            arrays.close_round(admitted, record.learning_rate / settings.outer.learning_rate)
        return arrays.view

    def by_tensor(
        self, effect: Effect, without: Vector, evaluate: Evaluate
    ) -> Iterator[TensorEffect]:
        """What an update did in each of its fragment's tensors, the others being as they were."""
        view = self._models[effect.fragment].view
        for name, where in tensor_ranges(self._history.layout.fragments[effect.fragment]):
            mixed = view.copy()
            for begin, end in where:
                mixed[begin:end] = without[begin:end]
            yield TensorEffect(effect, name, self.loss - evaluate(self._with(mixed)))


def tensor_ranges(fragment: Fragment) -> list[tuple[str, list[tuple[int, int]]]]:
    """Where each tensor of a fragment lies in its vector, in order."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for piece in fragment.pieces:
        found[piece.tensor].append((piece.offset, piece.offset + piece.groups * piece.group_stride))
    return list(found.items())


# Judging


class _Beside:
    """Every update and what the others of its round do alone, in columns.

    Attributes:
        did, alone: of each update.
        telling: updates of its round still do much, as those of its fragment go. Rounds are chosen
            by all alike, so that it favours no learner.
    """

    def __init__(self, effects: Effects) -> None:
        self.did, self.alone = effects.column("did"), effects.column("alone")
        self._learner, seq = effects.column("learner"), effects.column("record_seq")
        begins = np.append(True, seq[1:] != seq[:-1])
        self._round = np.cumsum(begins) - 1
        self._edges = np.append(np.flatnonzero(begins), len(seq))
        self.telling = self._telling(effects.column("fragment")[begins])

    def own(self, learner: int) -> Places:
        """A learner's updates, in order."""
        return np.flatnonzero(self._learner == learner)

    def others(self, place: int) -> list[float]:
        """What the other learners' updates in the round of an update do alone."""
        within = slice(*self._edges[self._round[place] :][:2])
        mine = self._learner[within] == self._learner[place]
        return [float(value) for value in self.alone[within][~mine]]

    def all_others(self, places: Places) -> Column:
        """The same of many updates, one after another."""
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


def judge(effects: Effects) -> list[Sentence]:
    """What is held against each learner, the worst first."""
    if not effects:
        return []
    beside = _Beside(effects)
    found = [
        _judge(learner, effects, beside, beside.own(place))
        for place, learner in enumerate(effects.learners)
    ]
    order = get_args(Word)
    return sorted(found, key=lambda one: (order.index(one.word), -one.total))


def _judge(learner: str, effects: Effects, beside: _Beside, own: Places) -> Sentence:
    begin = _turn(beside, own)
    late = own[begin:] if len(own) - begin >= FEWEST else own
    # All of them show who does harm; who is of no use shows only where the others are of some.
    told = late if _is_sure(beside, late, CHANCE) else late[beside.telling[late]]
    sure = told is late or _is_worst(beside, told, CHANCE_TELLING)
    alone, usual = _means(beside, told if sure else late)
    did = beside.did[own]
    total = float(did.sum())
    word = _word(alone, usual) if sure else "helpful"
    if word == "helpful" and total > 0:
        word = "unclear"
    return Sentence(
        learner, word, total, int((did > 0).sum()), len(own), alone, usual,
        effects[int(late[0])] if word in AGAINST else None,
    )  # fmt: skip


def _means(beside: _Beside, own: Places) -> tuple[float, float]:
    others = beside.all_others(own)
    return float(beside.alone[own].mean()), float(others.mean()) if others.size else 0.0


def _is_sure(beside: _Beside, own: Places, chance: float) -> bool:
    """Whether it is no accident that a learner's updates lie where they do."""
    if _is_worst(beside, own, chance):
        return True
    others = beside.all_others(own)
    if len(own) < FEWEST or others.size < FEWEST:
        return False
    alone, usual = _means(beside, own)
    return bool(alone - usual > SURE * float(others.std()) / len(own) ** 0.5)


def _is_worst(beside: _Beside, own: Places, chance: float) -> bool:
    """Whether a learner is the worst of its rounds too often for chance."""
    if len(own) < FEWEST:
        return False
    share = 1 / (1 + beside.all_others(own).size / len(own))
    worst = sum(beside.alone[place] > max(beside.others(place), default=inf) for place in own)
    return _tail(int(worst), len(own), share) < chance


def _word(alone: float, usual: float) -> Word:
    """What a learner is whose updates do `alone` on average, where the others' do `usual`."""
    if alone > max(0.0, -USELESS * usual):
        return "harmful"
    return "useless" if alone > USELESS * min(usual, 0.0) else "helpful"


def _tail(hits: int, trials: int, chance: float) -> float:
    """Probability of so many hits or more; in logarithms, since trials may be very many."""
    if chance >= 1:
        return 1.0
    hit, miss = log(chance), log1p(-chance)
    ways = lgamma(trials + 1)
    return fsum(
        exp(ways - lgamma(k + 1) - lgamma(trials - k + 1) + k * hit + (trials - k) * miss)
        for k in range(hits, trials + 1)
    )


def _turn(beside: _Beside, own: Places) -> int:
    """Index of the update from which on a learner did most worse than half of what others did."""
    best, at, summed = 0.0, len(own), 0.0
    for index in range(len(own) - 1, -1, -1):
        usual = median(beside.others(own[index]) or [0.0])
        summed += float(beside.alone[own[index]]) - min(usual, 0.0) / 2
        if summed > best:
            best, at = summed, index
    return at
