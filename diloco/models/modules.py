"""Tasks of other libraries' models: data, loss and optimizer around what a model computes.

A `Network` says how a library's model begins and what it computes; `nnx` and `keras` have one each.

Shapes: B rows of a batch, L tokens of a row, V vocabulary.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field

from diloco.common.protocol.errors import RunMismatchError, TaskError
from diloco.common.protocol.layout import Hint, TensorHint
from diloco.learner.batch_order import GrainData, require_grain
from diloco.learner.contract import function_of
from diloco.learner.task import (
    AtLeastOne,
    Batch,
    Evaluated,
    Natural,
    NotNegative,
    Params,
    Task,
    Variables,
    checked_options,
)
from diloco.learner.tensors.optimizer import adamw, warmup_cosine
from diloco.models.decoders.task import learned_of, tokens_of
from diloco.models.decoders.tokens import Data, TokenFolders
from diloco.run.model.load import load

# "package.module:function", as a task is named.
Named = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Patterns = Sequence[Annotated[str, Field(min_length=1)]]
# (model, batch) -> loss, or (loss, further scalars by name).
Loss = Callable[[Any, Batch], Any]
Logits = Callable[[Any, jax.Array], jax.Array]


class Network(Protocol):
    """A library's model, as functions of its variables."""

    def init(self, key: jax.Array) -> Variables:
        """As `Task.init`; leaves by their paths in the model."""

    def load_frozen(self) -> Params:
        """The frozen leaves, as the model's maker gives them on this machine."""

    def measure(self, variables: Variables, batch: Batch, key: jax.Array | None) -> Evaluated:
        """The loss of the model with these variables; without a key as it is evaluated."""

    def is_mean(self, name: str) -> bool:
        """Whether a leaf of the state is a mean over batches, which learners average."""


class Chosen(NamedTuple):
    """Parameters that are trained: those that a pattern names and that no pattern freezes."""

    trained: Patterns
    frozen: Patterns

    def __call__(self, name: str) -> bool:
        """Whether the parameter of this name is trained."""
        return _matched(name, self.trained) and not _matched(name, self.frozen)

    def check(self, names: Iterable[str]) -> None:
        """Refuse patterns that name no parameter, or leave none to train.

        Raises:
            TaskError: one does.
        """
        known = sorted(names)
        some = f"parameters are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
        for pattern in (*self.trained, *self.frozen):
            if not fnmatch.filter(known, pattern):
                raise TaskError(f"the pattern {pattern!r} names no parameter", hint=some)
        if not any(self(name) for name in known):
            raise TaskError("the options trained and frozen leave no parameter to train", hint=some)


def _matched(name: str, patterns: Patterns) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class _Columns:
    """Examples that are rows of arrays: a tree of arrays with one first axis."""

    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays
        lengths = {len(leaf) for leaf in jax.tree.leaves(arrays)}
        if len(lengths) != 1:
            raise TaskError(
                f"the option data gives arrays of {sorted(lengths)} rows",
                hint="arrays of one side have one row for each example",
            )
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[place], self._arrays)


class _Sides(NamedTuple):
    """Examples to train on, a dataset of grain; held-out batches; the token behind a document."""

    train: Any
    held_out: list[Batch]
    end: int | None = None


def _examples(name: str, batch: int, eval_batches: int) -> _Sides:
    """The examples of a user's function."""
    import grain

    given = function_of(name)()
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TaskError(
            f"{name} must return (examples to train on, held-out examples), not"
            f" {type(given).__name__}",
            hint="each a tree of arrays, or a sequence of examples, such as a source of grain",
        )
    columns = (tuple, dict, np.ndarray)
    train, held_out = (_Columns(one) if isinstance(one, columns) else one for one in given)
    batches = min(eval_batches, len(held_out) // batch)
    if not batches:
        raise TaskError(
            f"{name} holds out {len(held_out)} examples, less than a batch of {batch}",
            hint="hold out more, or choose a smaller batch",
        )
    rows = [[held_out[n * batch + row] for row in range(batch)] for n in range(batches)]
    stacked = [jax.tree.map(lambda *leaves: np.stack(leaves), *examples) for examples in rows]
    return _Sides(grain.MapDataset.source(train), stacked)


def _folders(data: Data, vocab: int | None, length: int, seed: int, rows: int) -> _Sides:
    """Rows of folders of tokens: int[L + 1] each, of which ~t is a token t that is not learned."""
    if vocab is None:
        raise TaskError(
            "folders of tokens need the option vocab",
            hint="give the size of the model's vocabulary",
        )
    folders = TokenFolders(data, length=length, vocab=vocab)
    return _Sides(folders.train(seed), folders.held_out(rows), folders.end)


class Opening(NamedTuple):
    """The arguments of a library's network.

    Attributes:
        make: makes the model.
        seed: of its first weights.
        chosen: the parameters that are trained.
        loss: of the model and a batch.
        batch: one of held-out examples.
    """

    make: Callable[..., Any]
    seed: int
    chosen: Chosen
    loss: Loss
    batch: Batch

    def measured(self, model: Any, batch: Batch) -> Evaluated:
        """The loss in one form."""
        told = self.loss(model, batch)
        value, metrics = told if isinstance(told, tuple) else (told, {})
        return Evaluated(value, metrics)


def _next_token(logits: Logits, end: int | None) -> Loss:
    """Mean cross entropy of the tokens that are trained on, in nats."""

    def loss(model: Any, windows_BxL1: jax.Array) -> jax.Array:
        tokens_BxL1, learned_BxL = tokens_of(windows_BxL1), learned_of(windows_BxL1, end)
        logits_BxLxV = logits(model, tokens_BxL1[:, :-1]).astype(jnp.float32)
        losses_BxL = optax.softmax_cross_entropy_with_integer_labels(
            logits_BxLxV, tokens_BxL1[:, 1:]
        )
        return jnp.sum(losses_BxL * learned_BxL) / jnp.maximum(1, jnp.sum(learned_BxL))

    return loss


def _trained_on(network: Network) -> Callable[..., Any]:
    """As `Task.loss`."""

    def loss(variables: Variables, batch: Batch, key: jax.Array) -> Any:
        found = network.measure(variables, batch, key)
        return found[:2] if variables.state is None else found

    return loss


def _evaluate(network: Network, held_out: Sequence[Batch]) -> Callable[[Variables], Any]:
    """As `Task.evaluate`: means over batches."""

    @jax.jit
    def measured(variables: Variables, batch: Batch) -> Mapping[str, Any]:
        found = network.measure(variables, batch, None)
        return {"loss": found.loss, **found.metrics}

    def evaluate(variables: Variables) -> Mapping[str, Any]:
        found = [measured(variables, batch) for batch in held_out]
        return {name: sum(float(one[name]) for one in found) / len(found) for name in found[0]}

    return evaluate


def _hint(network: Network, averaged: Patterns) -> Hint:
    """As `Task.hint`."""

    def hint(name: str, shape: tuple[int, ...]) -> TensorHint:  # noqa: ARG001 - a `Hint`
        if name.startswith("state/"):
            return TensorHint(kind="averaged" if network.is_mean(name) else "trained")
        return TensorHint(merge="average" if _matched(name, averaged) else "rda")

    return hint


class _Moved(NamedTuple):
    """An optimizer's name, or None for AdamW; the run's length; AdamW's peak rate."""

    optimizer: str | None
    steps: int
    peak: float


def _around(
    network: Network,
    sides: _Sides,
    read: GrainData,
    averaged: Patterns,
    units: int,
    moved: _Moved,
) -> Task:
    """The task of a network and its data; `units` of work in a batch."""
    hint = _hint(network, averaged)
    return Task(
        init=network.init,
        loss=_trained_on(network),
        batches=read.batches,
        rows=read.rows,
        shared=read.shared,
        evaluate=_evaluate(network, sides.held_out),
        tokens_per_batch=units,
        optimizer=function_of(moved.optimizer)(moved.steps)
        if moved.optimizer
        else adamw(hint=hint),
        schedule=None if moved.optimizer else warmup_cosine(steps=moved.steps, peak=moved.peak),
        hint=hint,
    )


def newest(run: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The newest global variables of a run whose task is of this file, by their paths in the model.

    Args:
        run: as of `diloco.load`.
        shapes: of the model's variables, by their paths.

    Raises:
        RunMismatchError: the run has others.
        DilocoError: as `diloco.load`.
    """
    found = {name.partition("/")[2]: values for name, values in load(run).items()}
    other = [name for name, values in found.items() if shapes.get(name) != values.shape]
    if other:
        raise RunMismatchError(
            f"the model has no {other[0]!r} of shape {list(found[other[0]].shape)}, as the run has",
            hint="make the model as the run's option module makes it",
        )
    return found


def task_of(library: str, opened: Callable[[Opening], Network], logits: Logits) -> Any:
    """The `build` of a library: its options, and the task of what they name.

    Args:
        library: its name in errors.
        opened: gives the network.
        logits: of the token behind each, [B, L, V], by the model for tokens [B, L].
    """

    @checked_options(library, "docs/models.md has all options")
    def build(
        *,
        steps: AtLeastOne,
        seed: Natural,
        module: Named,
        data: Named | Data,
        loss: Named | None = None,
        vocab: AtLeastOne | None = None,
        length: AtLeastOne = 1024,
        batch: AtLeastOne = 8,
        trained: Patterns = ("*",),
        frozen: Patterns = (),
        load: bool = False,
        averaged: Patterns = ("*embed*",),
        optimizer: Named | None = None,
        learning_rate: NotNegative = 1e-3,
        eval_batches: AtLeastOne = 16,
        accumulate: AtLeastOne = 1,
        shares: Natural = 0,
        workers: Natural = 0,
    ) -> Task:
        """Train a model of another library as it is.

        Args:
            steps: length of the run in global steps.
            seed: decides the order of the data and the first parameters.
            module: the function that makes the model, such as "mine:make", with its weights if it
                loads any.
            data: the function that gives (examples to train on, held-out examples), each a tree of
                arrays or a sequence of examples, such as "mine:data"; or folders of tokens, as of
                `diloco.models.decoders:build`.
            loss: the function of (model, batch) that gives the batch's mean loss, or (loss, further
                scalars by name). None: that of the next token.
            vocab: size of the vocabulary, which folders of tokens need.
            length: tokens that a row of such a folder predicts.
            batch: examples in a batch.
            trained: patterns of the parameters that are trained, such as "*lora*".
            frozen: patterns of those that are not trained all the same, such as "backbone/*".
            load: each learner takes frozen parameters from `module`; the run stores their digests.
            averaged: patterns of the parameters that are merged by their plain mean.
            optimizer: the function that gives, for a number of steps, an ordinary optimizer of
                optax, such as "mine:optimizer". None: AdamW with warm-up and cosine.
            learning_rate: the peak, of AdamW.
            eval_batches: held-out batches, at most.
            accumulate: parts of a batch, one after the other.
            shares: in how many shares each epoch is divided, which learners claim; 0: each reads
                all.
            workers: processes that read.

        Raises:
            TaskError: an option has a wrong type or value, or names what is not there.
        """
        require_grain()
        own = isinstance(data, str) and ":" in data
        if own:
            sides = _examples(str(data), batch, eval_batches)
        else:
            sides = _folders(data, vocab, length, seed, batch * eval_batches)
        measured = function_of(loss) if loss else _next_token(logits, sides.end)
        chosen = Chosen(trained, frozen)
        network = opened(Opening(function_of(module), seed, chosen, measured, sides.held_out[0]))
        read = GrainData(sides.train, batch=batch, seed=seed, shares=shares, workers=workers)
        moved = _Moved(optimizer, steps, learning_rate)
        task = _around(network, sides, read, averaged, batch * (1 if own else length), moved)
        loaded = network.load_frozen if load else None
        return dataclasses.replace(task, accumulate=accumulate, load_frozen=loaded)

    return build
