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
from math import comb, inf
from operator import attrgetter
from statistics import fmean, median, pstdev
from typing import Literal, NamedTuple, get_args

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.arrays.merge import Vector
from diloco.aggregator.shard_reader import read_input, read_payload
from diloco.check.remake import Progress
from diloco.common import wire
from diloco.common.averaged import settings_of
from diloco.common.layout import Fragment
from diloco.projections.history import Chain, History, in_order
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

# Held-out loss of the model with these views, of all fragments in order.
Evaluate = Callable[[Sequence[Vector]], float]


# "unclear": in sum it made the loss worse, by no more than the others' updates may by chance.
Word = Literal["harmful", "useless", "unclear", "helpful"]
AGAINST: tuple[Word, ...] = ("harmful", "useless")


class Judged(NamedTuple):
    """An update that is judged, in short: there may be very many."""

    learner: str
    incarnation: int
    seq: int
    norm: float
    loss: float
    weight: float
    staleness: int
    clip: float

    @classmethod
    def of(cls, taken: wire.Input) -> "Judged":
        """As a record has it."""
        return cls(
            taken.learner, taken.incarnation, taken.seq, taken.norm, taken.loss, taken.weight,
            taken.staleness, taken.clip,
        )  # fmt: skip


class Effect(NamedTuple):
    """What one update did to the held-out loss, within its round.

    Attributes:
        did: the loss after the round less the loss without this update: above 0 it did harm.
        alone: the loss had the round been this update alone, less the loss before.
        loss, loss_without: of the model after the round.
    """

    fragment: int
    version: int
    record_seq: int
    global_step: int
    at_s: float
    update: Judged
    did: float
    alone: float
    loss_before: float
    loss: float
    loss_without: float


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

    effects: list[Effect] = field(default_factory=list)
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


class _Own(NamedTuple):
    """An update of a learner, and what the others of its round do alone.

    `telling`: updates of the round still do much, as those of its fragment go.
    """

    effect: Effect
    others: list[float]
    telling: bool


def judge(effects: Sequence[Effect]) -> list[Sentence]:
    """What is held against each learner, the worst first."""
    rounds: dict[int, list[Effect]] = defaultdict(list)
    for effect in effects:
        rounds[effect.record_seq].append(effect)
    telling = _telling(rounds)
    own: dict[str, list[_Own]] = defaultdict(list)
    for seq, inputs in rounds.items():
        for one in inputs:
            others = [o.alone for o in inputs if o.update.learner != one.update.learner]
            own[one.update.learner].append(_Own(one, others, seq in telling))
    found = [_judge(learner, mine) for learner, mine in own.items()]
    order = get_args(Word)
    return sorted(found, key=lambda one: (order.index(one.word), -one.total))


def _telling(rounds: Mapping[int, Sequence[Effect]]) -> set[int]:
    """Rounds whose updates help much; chosen by all alike, so that it favours no learner."""
    usual = {seq: median(one.alone for one in inputs) for seq, inputs in rounds.items()}
    most: dict[int, float] = defaultdict(float)
    for seq, inputs in rounds.items():
        most[inputs[0].fragment] = min(most[inputs[0].fragment], usual[seq])
    return {
        seq for seq, inputs in rounds.items() if usual[seq] < MUCH * most[inputs[0].fragment] < 0
    }


def _judge(learner: str, own: Sequence[_Own]) -> Sentence:
    begin = _turn(own)
    late = own[begin:] if len(own) - begin >= FEWEST else own
    # All of them show who does harm; who is of no use shows only where the others are of some.
    told = late if _is_sure(late, CHANCE) else [one for one in late if one.telling]
    sure = told is late or _is_worst(told, CHANCE_TELLING)
    alone, usual = _means(told if sure else late)
    total = sum(one.effect.did for one in own)
    word = _word(alone, usual) if sure else "helpful"
    if word == "helpful" and total > 0:
        word = "unclear"
    return Sentence(
        learner, word, total, sum(one.effect.did > 0 for one in own), len(own), alone, usual,
        late[0].effect if word in AGAINST else None,
    )  # fmt: skip


def _means(own: Sequence[_Own]) -> tuple[float, float]:
    beside = [did for one in own for did in one.others]
    return fmean(one.effect.alone for one in own), fmean(beside) if beside else 0.0


def _is_sure(own: Sequence[_Own], chance: float) -> bool:
    """Whether it is no accident that a learner's updates lie where they do."""
    alone, usual = _means(own)
    spread = _spread([did for one in own for did in one.others])
    return _is_worst(own, chance) or (
        len(own) >= FEWEST and alone - usual > SURE * spread / len(own) ** 0.5
    )


def _is_worst(own: Sequence[_Own], chance: float) -> bool:
    """Whether a learner is the worst of its rounds too often for chance."""
    if len(own) < FEWEST:
        return False
    share = 1 / (1 + fmean(len(one.others) for one in own))
    worst = sum(one.effect.alone > max(one.others, default=inf) for one in own)
    return _tail(worst, len(own), share) < chance


def _word(alone: float, usual: float) -> Word:
    """What a learner is whose updates do `alone` on average, where the others' do `usual`."""
    if alone > max(0.0, -USELESS * usual):
        return "harmful"
    return "useless" if alone > USELESS * min(usual, 0.0) else "helpful"


def _spread(values: Sequence[float]) -> float:
    return pstdev(values) if len(values) >= FEWEST else inf


def _tail(hits: int, trials: int, chance: float) -> float:
    """Probability of so many hits or more."""
    return sum(
        comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(hits, trials + 1)
    )


def _turn(own: Sequence[_Own]) -> int:
    """Index of the update from which on a learner did most worse than half of what others did."""
    best, at, summed = 0.0, len(own), 0.0
    for index in range(len(own) - 1, -1, -1):
        usual = median(own[index].others or [0.0])
        summed += own[index].effect.alone - min(usual, 0.0) / 2
        if summed > best:
            best, at = summed, index
    return at
