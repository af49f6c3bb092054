"""`diloco replay --blame`: what each update did to the model, by merging each round without it.

From the base of every round, as it was, the round is merged again without each of its inputs, and
with each of them alone, and every model is scored on held-out data. What comes out is exact and
on-policy: learners had trained on that very base, and nothing after the round is touched. It says
what an update did within its round; what learners would have sent after another, nobody knows.

What that holds against each learner is in `blame_learners.py`.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter
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

# Updates whose harm is looked into tensor by tensor.
BY_TENSOR = 6
# Rounds of which it is told why they do not come out.
TOLD = 3

# Held-out losses of the model with these views, of all fragments in order: of all the data, under
# `WHOLE`, and of its slices.
Losses = dict[str, float]
Evaluate = Callable[[Sequence[Vector]], Losses]


class TensorEffect(NamedTuple):
    """The effect of the part of an update that lies in one tensor."""

    effect: Effect
    tensor: str
    did: float


# What became of a round. Early ones come before the first stored version that is whole. A damaged
# one lacks an object, or is not as recorded; those behind it come before the fragment's next stored
# version. Beside: another fragment's view was unknown. Unreadable: the record is. Later: there was
# no time for it, or not for all of it.
Fate = Literal["judged", "early", "damaged", "behind", "beside", "unreadable", "later"]


@dataclass
class BlamedRounds:
    """The fate of every round; and the reason, for the first rounds that are damaged."""

    fates: Counter[Fate] = field(default_factory=Counter)
    why: list[str] = field(default_factory=list)

    def count(self, fate: Fate, why: str = "", rounds: int = 1) -> None:
        """Count rounds of one fate."""
        self.fates[fate] += rounds
        if why and len(self.why) < TOLD:
            self.why.append(why)

    @property
    def left_out(self) -> int:
        """The number of rounds that were not judged."""
        return self.fates.total() - self.fates["judged"]


@dataclass
class Blame:
    """The effects of updates in order of time, the worst also by tensor; and what is left out.

    `slices` has the same effects on the loss of each slice of the held-out data.
    """

    rounds: BlamedRounds = field(default_factory=BlamedRounds)
    effects: Effects = field(default_factory=lambda: Effects(Effect))
    slices: dict[str, Effects] = field(default_factory=dict)
    tensors: list[TensorEffect] = field(default_factory=list)
    _worst: list[Effect] = field(default_factory=list)

    def add(self, by_slice: Mapping[str, Effect]) -> bool:
        """Add an update's effect, by slice; returns whether it is among the worst so far."""
        effect = by_slice[WHOLE]
        self.effects.append(effect)
        for name in by_slice.keys() - {WHOLE}:
            self.slices.setdefault(name, Effects(Effect)).append(by_slice[name])
        if effect.did <= 0:
            return False
        self._worst = nlargest(BY_TENSOR, [*self._worst, effect], key=attrgetter("did"))
        return any(one is effect for one in self._worst)

    def worst(self) -> list[Effect]:
        """The updates that did most harm so far, the worst first."""
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
    """Merge every round again without each of its inputs, to find the effect of each update.

    Behind a round that does not come out as recorded it goes on at the fragment's next stored
    version; rounds that are left out are counted.

    Args:
        context: of the run.
        history: the tape.
        chains: of every fragment.
        evaluate: scores a model.
        progress: hears how many of how many records are done.
        told: hears after each round what is found so far.
        enough: whether to leave it at what is found so far, of which none is looked into by tensor.

    Raises:
        ConfigError: no version of a fragment is stored.
        StoreUnavailableError: the store is away.
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
    """Goes over a run's rounds with the model as it was.

    A fragment's round is merged from its arrays, and scored beside the others' views. Where arrays
    are lost its stored deltas still lead its view on, so that rounds of the others are judged.
    """

    def __init__(
        self,
        context: RunContext,
        history: History,
        chains: Mapping[int, Chain],
        evaluate: Evaluate,
        enough: Enough | None,
    ) -> None:
        self.found = Blame()
        self._enough = enough
        self._context = context
        self._history = history
        self._evaluate = evaluate
        self._remakers = {
            fragment: FragmentRemaker(history, fragment, compare=False) for fragment in chains
        }
        self._begun: set[int] = set()
        # Until a fragment begins, its first view stands beside the others'.
        self._views: dict[int, Vector | None] = {
            fragment: _first_view(history, fragment, chain) for fragment, chain in chains.items()
        }
        # Of the model as it stands; None: not evaluated yet.
        self._loss: Losses | None = None

    def take(self, seq: int, record: wire.Record) -> None:
        """The next record that made a version."""
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
        """Go on from what the record has stored, if it has."""
        remaker = self._remakers[record.fragment]
        if remaker.arrays is None and is_stored(record):
            with contextlib.suppress(IntegrityError):
                remaker.load(seq, record)
        if remaker.arrays is not None:
            self._begun.add(record.fragment)
            self._see(record.fragment, remaker.view)

    def _follow(self, record: wire.Record) -> None:
        """The view after a round that cannot be merged, by its delta, if that can be had."""
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
        """Judge a round that came out as recorded, from the arrays and the loss before it."""
        rounds = self.found.rounds
        if before is None:
            rounds.count("beside")
            return
        try:
            rounds.count(self._judge(seq, record, base, before))
        except (IntegrityError, ObjectMissingError, WireError) as error:
            rounds.count("damaged", _why(record, error.message))

    def _loss_now(self) -> Losses | None:
        """Of the model as it stands; None if the view of a fragment is unknown."""
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


def _first_view(history: History, fragment: int, chain: Chain) -> Vector:
    """The first stored view of a chain that is whole.

    Raises:
        ConfigError: there is none.
    """
    for _, record in chain:
        if is_stored(record):
            with contextlib.suppress(IntegrityError, ObjectMissingError):
                return load_arrays(history, record).view
    raise ConfigError(
        f"fragment {fragment}: no version can be merged again, none is stored whole",
        hint="garbage collection keeps what gc.replay_window_s says; see diloco replay RUN",
    )


class _MergedRound:
    """One round that was merged, and without each of its inputs.

    Args:
        history: the tape.
        views: of the model after it.
        base: the fragment's arrays before it.
        seq: of its record.
        record: of it.
        losses: of the model before it and after, by slice.
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
        """The effect of each input by slice, with the view that there is without it."""
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
        """The view after the round with some of its inputs; with none it stays as it was."""
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
        """The effect of an update in each of its fragment's tensors, the others unchanged."""
        view = self._views[effect.fragment]
        for name, where in tensor_ranges(self._history.layout.fragments[effect.fragment]):
            mixed = view.copy()
            for begin, end in where:
                mixed[begin:end] = without[begin:end]
            did = self._loss[WHOLE] - evaluate(self._with(mixed))[WHOLE]
            yield TensorEffect(effect, name, did)
