"""Makes tasks of models of other libraries: options, data, loss and optimizer.

A `Network` wraps a library's model as functions; `nnx.Nnx` and `keras.Keras` are the two kinds.

Shapes: B rows of a batch, L tokens of a row, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field

from diloco.common.protocol.errors import RunMismatchError, TaskError
from diloco.common.protocol.layout import Hint, TensorHint
from diloco.learner.load_and_check_task import function_of
from diloco.learner.select_examples import GrainData, require_grain
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
from diloco.models.chosen import Chosen, Patterns, matched, with_private
from diloco.models.decoders.task import learned_of, tokens_of
from diloco.models.decoders.tokens import Data, TokenFolders
from diloco.run.model.load import load

# "package.module:function", the form of the setting `task.build` too.
Named = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
# (model, batch) -> loss, or (loss, further scalars by name).
Loss = Callable[[Any, Batch], Any]
Logits = Callable[[Any, jax.Array], jax.Array]


class Network(Protocol):
    """A model of another library, as functions of its variables."""

    def init(self, key: jax.Array) -> Variables:
        """Returns the first variables, by path in the model; `key` is a typed PRNG key."""

    def load_frozen(self) -> Params:
        """Returns the frozen leaves, as the user's function makes them on this machine.

        None if nothing is frozen.
        """

    def measure(self, variables: Variables, batch: Batch, key: jax.Array | None) -> Evaluated:
        """Returns a batch's loss, metrics and new state.

        Args:
            variables: the variables, as `init` returns them.
            batch: the batch.
            key: the step's typed PRNG key; None: the model is evaluated, not trained.
        """

    def is_mean(self, name: str) -> bool:
        """Returns True if a leaf of the state is batch statistics, which the fleet averages.

        Args:
            name: the leaf's name: "state/" and the variable's path.
        """


class _Columns:
    """A sequence of examples, of which example i is row i of each array of a tree.

    Args:
        arrays: the tree; all arrays have equally many rows.

    Raises:
        TaskError: arrays have different numbers of rows.
    """

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
    """A task's training data and held-out data.

    Attributes:
        train: a `grain.MapDataset` of training examples.
        held_out: batches of held-out examples.
        end: the token that ends a document; None if there is none, or data is not text.
    """

    train: Any
    held_out: list[Batch]
    end: int | None = None


def _examples(name: str, batch: int, eval_batches: int) -> _Sides:
    """Returns the examples that the user's function gives; `end` is None.

    Args:
        name: the function, as "package.module:function".
        batch: examples in a batch.
        eval_batches: held-out batches, at most.

    Raises:
        TaskError: the function does not return a pair, or holds out less than a batch.
    """
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
    """Returns the examples of folders of tokens, int[L + 1] each.

    A number ~t, below 0, is a token t that is not trained on.

    Args:
        data: a folder, or folders with their weights.
        vocab: size of the vocabulary.
        length: L.
        seed: seed of the order of training examples.
        rows: held-out rows, one a batch.

    Raises:
        TaskError: `vocab` is None.
        DataError: a folder is missing or damaged.
    """
    if vocab is None:
        raise TaskError(
            "folders of tokens need the option vocab",
            hint="give the size of the model's vocabulary",
        )
    folders = TokenFolders(data, length=length, vocab=vocab)
    return _Sides(folders.train(seed), folders.held_out(rows), folders.end)


class NetworkOptions(NamedTuple):
    """The options that a library's `Network` is made from.

    Attributes:
        make: the user's function that makes the model.
        seed: seed of the model's first weights.
        chosen: selects the parameters that are trained.
        loss: (model, batch) -> mean loss of the batch; or (loss, further scalars by name).
        batch: a held-out batch, of which only shapes and dtypes are used.
    """

    make: Callable[..., Any]
    seed: int
    chosen: Chosen
    loss: Loss
    batch: Batch

    def measured(self, model: Any, batch: Batch) -> Evaluated:
        """Returns a batch's loss and further scalars ({} if `loss` returns none); no state."""
        told = self.loss(model, batch)
        value, metrics = told if isinstance(told, tuple) else (told, {})
        return Evaluated(value, metrics)


def _next_token(logits: Logits, end: int | None) -> Loss:
    """Returns a `Loss` on windows int [B, L + 1]: mean cross entropy, in nats.

    The mean is over tokens that are trained on.

    Args:
        logits: (model, tokens [B, L]) -> next-token logits [B, L, V].
        end: the token that ends a document, from which nothing is predicted; None: there is none.
    """

    def loss(model: Any, windows_BxL1: jax.Array) -> jax.Array:
        tokens_BxL1, learned_BxL = tokens_of(windows_BxL1), learned_of(windows_BxL1, end)
        logits_BxLxV = logits(model, tokens_BxL1[:, :-1]).astype(jnp.float32)
        losses_BxL = optax.softmax_cross_entropy_with_integer_labels(
            logits_BxLxV, tokens_BxL1[:, 1:]
        )
        return jnp.sum(losses_BxL * learned_BxL) / jnp.maximum(1, jnp.sum(learned_BxL))

    return loss


def _trained_on(network: Network) -> Callable[..., Any]:
    """Returns the network's training loss as a function that `Task.loss` takes."""

    def loss(variables: Variables, batch: Batch, key: jax.Array) -> Any:
        found = network.measure(variables, batch, key)
        return found[:2] if variables.state is None else found

    return loss


def _evaluate(network: Network, held_out: Sequence[Batch]) -> Callable[[Variables], Any]:
    """Returns a function that `Task.evaluate` takes: variables -> means over held-out batches."""

    @jax.jit
    def measured(variables: Variables, batch: Batch) -> Mapping[str, Any]:
        found = network.measure(variables, batch, None)
        return {"loss": found.loss, **found.metrics}

    def evaluate(variables: Variables) -> Mapping[str, Any]:
        found = [measured(variables, batch) for batch in held_out]
        return {name: sum(float(one[name]) for one in found) / len(found) for name in found[0]}

    return evaluate


def _hint(network: Network, averaged: Patterns) -> Hint:
    """Returns a function that `Task.hint` takes: how the aggregator merges each tensor.

    Args:
        network: says which leaves of the state are averaged.
        averaged: patterns of the parameters that are merged by their plain mean, not by RDA.
    """

    def hint(name: str, shape: tuple[int, ...]) -> TensorHint:  # noqa: ARG001 - a `Hint`
        if name.startswith("state/"):
            return TensorHint(kind="averaged" if network.is_mean(name) else "trained")
        return TensorHint(merge="average" if matched(name, averaged) else "rda")

    return hint


class _OptimizerChoice(NamedTuple):
    """The optimizer of a task.

    Attributes:
        optimizer: "module:function", which builds the optimizer for a number of steps; None: AdamW
            with warm-up and cosine decay.
        steps: the run's length in global steps.
        peak: AdamW's greatest learning rate.
    """

    optimizer: str | None
    steps: int
    peak: float


def _around(
    network: Network,
    sides: _Sides,
    read: GrainData,
    averaged: Patterns,
    units: int,
    choice: _OptimizerChoice,
) -> Task:
    """Returns the task of a network and its data.

    Args:
        network: the model.
        sides: training data and held-out data.
        read: reads batches of the training data.
        averaged: patterns of the parameters that are merged by their plain mean.
        units: the tokens, or examples, that a batch counts as.
        choice: the optimizer.
    """
    hint = _hint(network, averaged)
    return Task(
        init=network.init,
        loss=_trained_on(network),
        batches=read.batches,
        rows=read.rows,
        shared=read.shared,
        evaluate=_evaluate(network, sides.held_out),
        tokens_per_batch=units,
        optimizer=function_of(choice.optimizer)(choice.steps)
        if choice.optimizer
        else adamw(hint=hint),
        schedule=None if choice.optimizer else warmup_cosine(steps=choice.steps, peak=choice.peak),
        hint=hint,
    )


def newest(run: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Returns the newest global variables of a run of `nnx` or `keras`, by path in the model.

    Args:
        run: the run's TOML file, the folder of a local run, a run's name, or a bundle.
        shapes: shapes of the model's variables, by path.

    Raises:
        RunMismatchError: the model lacks a variable of the run, or has it in another shape.
        DilocoError: there is no such run, bus or store is unreachable, or an object is damaged.
    """
    found = {name.partition("/")[2]: values for name, values in load(run).items()}
    other = [name for name, values in found.items() if shapes.get(name) != values.shape]
    if other:
        raise RunMismatchError(
            f"the model has no {other[0]!r} of shape {list(found[other[0]].shape)}, as the run has",
            hint="make the model as the run's option module makes it",
        )
    return found


def task_of(library: str, opened: Callable[[NetworkOptions], Network], logits: Logits) -> Any:
    """Returns the function `build` of a library's tasks, for `task.build`.

    Args:
        library: the library's name in errors.
        opened: makes the library's network from the options.
        logits: (model, tokens [B, L]) -> next-token logits [B, L, V].
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
        private: Patterns = (),
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
            seed: seed of the data's order and of the first parameters.
            module: the function that makes the model, such as "mine:make"; it may load weights.
            data: the function that gives (examples to train on, held-out examples), each a tree of
                arrays or a sequence of examples, such as "mine:data"; or folders of tokens, as of
                `diloco.models.decoders:build`.
            loss: the function of (model, batch) that gives the batch's mean loss, or (loss, further
                scalars by name). None: next-token cross entropy, in nats.
            vocab: size of the vocabulary, which folders of tokens need.
            length: tokens that are predicted in a row of folders of tokens.
            batch: examples in a batch.
            trained: patterns of the parameters that are trained, such as "*lora*".
            frozen: patterns of parameters not to train among `trained`, such as "backbone/*".
            private: patterns of trained parameters of which each learner trains its own and sends
                nothing, such as "head/*".
            load: true: each learner takes frozen parameters from `module`, and the run stores their
                digests; false: the run stores the parameters.
            averaged: patterns of the parameters that are merged by their plain mean.
            optimizer: the function that gives, for a number of steps, an ordinary optimizer of
                optax, such as "mine:optimizer". None: AdamW with warm-up and cosine.
            learning_rate: peak learning rate of AdamW.
            eval_batches: held-out batches, at most.
            accumulate: parts of a batch whose gradients are accumulated.
            shares: shares of each epoch, which learners claim; 0: each learner reads all.
            workers: processes that read the data.

        Raises:
            TaskError: an option has a wrong type or value, or names something that does not exist.
        """
        require_grain()
        own = isinstance(data, str) and ":" in data
        if own:
            sides = _examples(str(data), batch, eval_batches)
        else:
            sides = _folders(data, vocab, length, seed, batch * eval_batches)
        measured = function_of(loss) if loss else _next_token(logits, sides.end)
        chosen = Chosen(trained, frozen)
        network = opened(
            NetworkOptions(function_of(module), seed, chosen, measured, sides.held_out[0])
        )
        read = GrainData(sides.train, batch=batch, seed=seed, shares=shares, workers=workers)
        choice = _OptimizerChoice(optimizer, steps, learning_rate)
        task = _around(network, sides, read, averaged, batch * (1 if own else length), choice)
        loaded = network.load_frozen if load else None
        task = dataclasses.replace(task, accumulate=accumulate, load_frozen=loaded)
        return with_private(task, private)

    return build
