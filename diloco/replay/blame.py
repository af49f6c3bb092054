"""`diloco replay --blame`: measures each update's effect by merging its round without it.

Each round is merged again from its recorded base version: without each of its inputs, and with each
of them alone. Every resulting model is scored on held-out data. The effects are exact within one
round, since the learners had trained from that base. Later rounds are not repeated: which updates
the learners would have sent after another merge is unknown.

`blame_learners.py` judges the learners by these effects.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from statistics import median
from typing import Literal, NamedTuple

from diloco.aggregator.arrays.codec_kernels import Vector
from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.common.process.config import settings_of
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError, IntegrityError, ObjectMissingError, WireError
from diloco.common.protocol.wire import WHOLE
from diloco.common.storage.catchup import delta_of
from diloco.common.storage.tape import RunContext
from diloco.common.storage.views import take_step
from diloco.judge.remake_and_compare import (
    FragmentRemaker,
    Progress,
    admitted_again,
    copy_arrays,
    is_stored,
    load_arrays,
    merge_round,
)
from diloco.replay.blame_learners import Effect, Effects
from diloco.run.agreement import tensor_ranges
from diloco.run.history import Chain, History, in_order

# For this number of the worst updates the effect is also measured tensor by tensor.
BY_TENSOR = 6
# The number of damaged rounds whose reasons are reported.
TOLD = 3
# The learners' first losses are those in this many first rounds, of all fragments together.
FIRST_ROUNDS = 256

# Held-out losses of a model: on all the data under the key `WHOLE`, and on each of its slices.
Losses = dict[str, float]
Evaluate = Callable[[Sequence[Vector]], Losses]


class TensorEffect(NamedTuple):
    """The effect of one update within one tensor.

    Attributes:
        effect: the effect of the whole update.
        tensor: the tensor's name.
        did: the loss after the round, less the loss if only this tensor lacked the update.
    """

    effect: Effect
    tensor: str
    did: float


# The outcome of a round:
# judged: the effects of its updates are known;
# early: it is before the fragment's first version that is stored whole;
# damaged: an object is missing, or the merge does not give the recorded result;
# behind: it is between a damaged round and the fragment's next version that is stored whole;
# beside: the view of another fragment is unknown, so the model cannot be scored;
# unreadable: its record cannot be decoded;
# later: `enough` stopped the work before all of its updates were judged.
Fate = Literal["judged", "early", "damaged", "behind", "beside", "unreadable", "later"]


@dataclass
class BlamedRounds:
    """Counts of rounds by outcome, and the reasons for the first damaged ones."""

    fates: Counter[Fate] = field(default_factory=Counter)
    why: list[str] = field(default_factory=list)

    def count(self, fate: Fate, why: str = "", rounds: int = 1) -> None:
        """Adds `rounds` rounds with the outcome `fate`, and `why` to the first reasons."""
        self.fates[fate] += rounds
        if why and len(self.why) < TOLD:
            self.why.append(why)

    @property
    def left_out(self) -> int:
        """The number of rounds that were not judged."""
        return self.fates.total() - self.fates["judged"]


@dataclass
class Blame:
    """The measured effects of a run's updates.

    Attributes:
        began: median of the learners' first training losses.
        rounds: counts of rounds by outcome.
        effects: the effect of each update on the held-out loss, in order of time.
        slices: by slice of the held-out data, the effects of the same updates on its loss.
        tensors: the effects of the worst updates, tensor by tensor.
    """

    began: float = 0.0
    rounds: BlamedRounds = field(default_factory=BlamedRounds)
    effects: Effects = field(default_factory=lambda: Effects(Effect))
    slices: dict[str, Effects] = field(default_factory=dict)
    tensors: list[TensorEffect] = field(default_factory=list)
    _worst: list[Effect] = field(default_factory=list)

    def add(self, by_slice: Mapping[str, Effect]) -> bool:
        """Adds one update's effect, given by slice and under `WHOLE`.

        Returns:
            Whether the update is among the worst so far.
        """
        effect = by_slice[WHOLE]
        self.effects.append(effect)
        for name in by_slice.keys() - {WHOLE}:
            self.slices.setdefault(name, Effects(Effect)).append(by_slice[name])
        if effect.did <= 0:
            return False
        self._worst = nlargest(BY_TENSOR, [*self._worst, effect], key=attrgetter("did"))
        return any(one is effect for one in self._worst)

    def worst(self) -> list[Effect]:
        """Returns the updates that did most harm so far, the worst first."""
        return self._worst


Enough = Callable[[Blame], bool]


def blame(
    context: RunContext,
    history: History,
    chains: Mapping[int, Chain],
    evaluate: Evaluate,
    progress: Progress | None = None,
    enough: Enough | None = None,
    told: Callable[[Blame], None] | None = None,
) -> Blame:
    """Merges every round again without each of its inputs, to find the effect of each update.

    After a round whose merge does not give the recorded result, the fragment continues from its
    next stored version; the rounds in between are counted, not judged.

    Args:
        context: the run's context.
        history: the tape.
        chains: by fragment, its records.
        evaluate: scores a model, given the views of all fragments in order.
        progress: called with the number of records done and of all records.
        enough: returns True to stop with the results so far; None: to the end. If it is given, no
            effect is measured by tensor.
        told: called after each round with the results so far.

    Raises:
        ConfigError: no version of a fragment is stored whole.
        StoreUnavailableError: the store cannot be reached.
    """
    walk = _Walk(context, history, chains, evaluate, enough)
    count = sum(len(chain) for chain in chains.values())
    for done, (seq, record) in enumerate(in_order(chains.values())):
        if enough is not None and enough(walk.found):
            walk.found.rounds.count("later", rounds=bool(record.inputs))
        elif record.what != "verdict":
            walk.take(seq, record)
            if told is not None:
                told(walk.found)
        if progress is not None:
            progress(done + 1, count)
    found = walk.found
    worst = found.worst()
    found.tensors = [one for one in found.tensors if one.effect in worst]
    return found


class _Walk:
    """Passes through a run's rounds in order, and rebuilds the model as it was at each.

    A fragment's round is merged from its arrays, and scored together with the other fragments'
    views. While the arrays of a fragment are unavailable, stored deltas still update its view, so
    that the rounds of other fragments can be judged.
    """

    def __init__(
        self,
        context: RunContext,
        history: History,
        chains: Mapping[int, Chain],
        evaluate: Evaluate,
        enough: Enough | None,
    ) -> None:
        self.found = Blame(first_loss(history.records))
        self._enough = enough
        self._context = context
        self._history = history
        self._evaluate = evaluate
        self._remakers = {
            fragment: FragmentRemaker(history, fragment, compare=False) for fragment in chains
        }
        self._begun: set[int] = set()
        # A fragment has its first stored view until its own rounds can be merged.
        self._views: dict[int, Vector | None] = {
            fragment: _first_view(history, fragment, chain) for fragment, chain in chains.items()
        }
        # Losses of the current model; None: not evaluated yet.
        self._loss: Losses | None = None

    def take(self, seq: int, record: wire.Record) -> None:
        """Takes the next record that made a version, at stream sequence `seq`."""
        fragment, remaker = record.fragment, self._remakers[record.fragment]
        merges = record.what == "version" and bool(record.inputs)
        base, remade, before, why = None, remaker.remade, None, ""
        if merges and remaker.arrays is not None:
            base, before = copy_arrays(remaker.arrays), self._loss_now()
        try:
            remaker.take(seq, record)
        except IntegrityError as error:
            why = error.message
        if base is not None and remaker.remade > remade:
            self._see(fragment, remaker.view)
            self._round(seq, record, base, before)
            return
        if base is not None:
            self.found.rounds.count("damaged", _why(record, why or remaker.missing))
        elif merges:
            self.found.rounds.count("behind" if fragment in self._begun else "early")
        if merges:
            self._follow(record)
        else:
            self._see(fragment, None if fragment in self._begun else self._views[fragment])
        self._begin(seq, record)

    def _see(self, fragment: int, view: Vector | None) -> None:
        self._views[fragment], self._loss = view, None

    def _begin(self, seq: int, record: wire.Record) -> None:
        """Loads the arrays that the record names as stored, if none are loaded."""
        remaker = self._remakers[record.fragment]
        if remaker.arrays is None and is_stored(record):
            with contextlib.suppress(IntegrityError):
                remaker.load(seq, record)
        if remaker.arrays is not None:
            self._begun.add(record.fragment)
            self._see(record.fragment, remaker.view)

    def _follow(self, record: wire.Record) -> None:
        """Updates the view by a round's stored delta, since the round cannot be merged."""
        fragment, view = record.fragment, self._views[record.fragment]
        if fragment not in self._begun:
            return
        moved = None
        if view is not None and record.delta is not None:
            with contextlib.suppress(IntegrityError, ObjectMissingError, WireError):
                moved = take_step(self._context, view, delta_of(record, 0)).view
        self._see(fragment, moved)

    def _round(
        self, seq: int, record: wire.Record, base: FragmentArrays, before: Losses | None
    ) -> None:
        """Judges a round whose merge gave the recorded result.

        `base` are the fragment's arrays before it, `before` the losses before it; None: unknown.
        """
        rounds = self.found.rounds
        if before is None:
            rounds.count("beside")
            return
        try:
            rounds.count(self._judge(seq, record, base, before))
        except (IntegrityError, ObjectMissingError, WireError) as error:
            rounds.count("damaged", _why(record, error.message))

    def _loss_now(self) -> Losses | None:
        """Returns the losses of the current model; None if the view of a fragment is unknown."""
        views = self._known_views()
        if views is not None and self._loss is None:
            self._loss = self._evaluate([views[fragment] for fragment in sorted(views)])
        return None if views is None else self._loss

    def _known_views(self) -> dict[int, Vector] | None:
        known = {fragment: view for fragment, view in self._views.items() if view is not None}
        return known if len(known) == len(self._views) else None

    def _judge(self, seq: int, record: wire.Record, base: FragmentArrays, before: Losses) -> Fate:
        after, views = self._loss_now(), self._known_views()
        assert after is not None
        assert views is not None
        judged = _MergedRound(self._history, views, base, seq, record, (before, after))
        for by_slice, without in judged.effects(self._evaluate):
            if self.found.add(by_slice) and self._enough is None:
                self.found.tensors += judged.by_tensor(by_slice[WHOLE], without, self._evaluate)
            if self._enough is not None and self._enough(self.found):
                return "later"
        return "judged"


def _why(record: wire.Record, error: str) -> str:
    return f"{record.fragment}@{record.version}: {error}"


def first_loss(records: Mapping[int, Chain]) -> float:
    """Returns the median of the learners' first training losses; 0 if there are none.

    Each learner counts once. Otherwise a liar whose updates are alone in the first rounds, with a
    huge loss, would make all later harm look small.

    Args:
        records: by fragment, its records in order.
    """
    first: dict[str, float] = {}
    for _, record in islice(in_order(records.values()), FIRST_ROUNDS):
        for one in record.inputs:
            first.setdefault(one.learner, one.loss)
    return median(first.values() or [0.0])


def _first_view(history: History, fragment: int, chain: Chain) -> Vector:
    """Returns a fragment's first stored view whose version is stored whole.

    Raises:
        ConfigError: there is none.
    """
    for _, record in chain:
        if is_stored(record):
            with contextlib.suppress(IntegrityError, ObjectMissingError):
                return load_arrays(history, record).view
    raise ConfigError(
        f"fragment {fragment}: no version can be merged again, as none is stored complete",
        hint="garbage collection keeps what gc.replay_window_s says; see diloco replay RUN",
    )


class _MergedRound:
    """One round, to be merged again without each of its inputs.

    Args:
        history: the tape.
        views: by fragment, its view after the round.
        base: the fragment's arrays before the round.
        seq: stream sequence of its record.
        record: its record.
        losses: losses of the model before and after the round, by slice.
    """

    def __init__(
        self,
        history: History,
        views: Mapping[int, Vector],
        base: FragmentArrays,
        seq: int,
        record: wire.Record,
        losses: tuple[Losses, Losses],
    ) -> None:
        self._before, self._loss = losses
        self._history = history
        self._views = views
        self._base = base
        self._seq = seq
        self._record = record

    def effects(self, evaluate: Evaluate) -> Iterator[tuple[dict[str, Effect], Vector]]:
        """Yields, for each input, its effects by slice, and the view after the round without it."""
        record, base = self._record, self._base
        for index, taken in enumerate(record.inputs):
            others = [*record.inputs[:index], *record.inputs[index + 1 :]]
            without = self._merged(copy_arrays(base), others)
            losses = evaluate(self._with(without))
            alone = evaluate(self._with(self._merged(copy_arrays(base), [taken])))
            by_slice = {
                name: Effect(
                    record.fragment, record.version, self._seq, record.global_step,
                    record.closed_at_s, taken.learner, taken.incarnation, taken.seq, taken.norm,
                    taken.loss, taken.weight, taken.staleness, taken.clip, loss - losses[name],
                    alone[name] - self._before[name], self._before[name], loss, losses[name],
                )
                for name, loss in self._loss.items()
            }  # fmt: skip
            yield by_slice, without

    def _with(self, view: Vector) -> list[Vector]:
        views = {**self._views, self._record.fragment: view}
        return [views[fragment] for fragment in sorted(views)]

    def _merged(self, arrays: FragmentArrays, inputs: Sequence[wire.Input]) -> Vector:
        """Returns the view after a round with these inputs only; advances `arrays` to this round.

        Without inputs nothing changes.
        """
        record, history = self._record, self._history
        in_force = history.settings_at(record.policy.settings_seq)
        settings = settings_of(in_force, history.layout, record.fragment)
        admitted = [admitted_again(record, taken, settings) for taken in inputs]
        share = record.learning_rate / settings.outer.learning_rate
        merge_round(history.store, arrays, settings, admitted, share)
        return arrays.view

    def by_tensor(
        self, effect: Effect, without: Vector, evaluate: Evaluate
    ) -> Iterator[TensorEffect]:
        """Yields, for each tensor, the effect of leaving the update out of this tensor alone.

        Args:
            effect: the effect of the whole update.
            without: the fragment's view after the round without the update.
            evaluate: scores a model.
        """
        view = self._views[effect.fragment]
        for name, where in tensor_ranges(self._history.layout.fragments[effect.fragment]):
            mixed = view.copy()
            for begin, end in where:
                mixed[begin:end] = without[begin:end]
            did = self._loss[WHOLE] - evaluate(self._with(mixed))[WHOLE]
            yield TensorEffect(effect, name, did)
