"""Lets a training loop of another framework, such as PyTorch, join a run as a learner.

At most step boundaries no tensor is copied. A fragment's tensors are read when its update is sent,
and written in place when a version is adopted, so that the framework's optimizer keeps the same
tensor objects.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.layout import Hint, default_hint
from diloco.learner import library
from diloco.learner.task import Batch, Shared
from diloco.models.frameworks.tensors import HostTensors, LazyLeaf, Table, Tensors, leaves_of
from diloco.operate.create import create
from diloco.run.model.load import load

Save = Callable[[], Any]


class TensorLearner:
    """A learner whose training loop is of another framework; `join_tensors` yields it.

    A leaf is a tensor of the run's parameters. Each of the loop's tensors is one leaf, perhaps with
    another name and order of axes.

    Args:
        learner: the learner that JAX loops use, to which all calls are passed.
        leaves: the loop's tensors as leaves, by the leaves' names.
    """

    def __init__(self, learner: library.Learner, leaves: Mapping[str, LazyLeaf]) -> None:
        self._learner = learner
        self._leaves = dict(leaves)
        self._unbroken = library.Unbroken()
        self._settle(learner.params)

    @property
    def done(self) -> bool:
        """True if the loop is to end: the run has ended, or this learner leaves."""
        return self._learner.done

    @property
    def global_step(self) -> int:
        """The run's clock at this learner's next inner step, for learning-rate schedules."""
        return self._learner.global_step

    @property
    def position(self) -> int:
        """The number of this learner's batches that are done: where the loop's data resumes."""
        return self._learner.position

    def restore(self, state: Any) -> Any:
        """Returns the state that this learner saved (`step`) before it was restarted.

        Args:
            state: a tree with the structure and shapes of the saved state; returned if there is no
                checkpoint.

        Raises:
            DilocoError: training has begun already.
        """
        return self._learner.restore(state)

    def step(
        self, *, loss: Any, metrics: Mapping[str, Any] | None = None, save: Save | None = None
    ) -> None:
        """Takes a step boundary: adopts versions that have arrived, sends updates that are due.

        Args:
            loss: loss of the loop's step: a float, or a scalar that `float` reads a step later.
            metrics: further scalars of that step by name.
            save: called when a checkpoint is due; returns its contents, a tree of arrays.

        Raises:
            DivergedError: the loss is infinite or not a number.
            DilocoError: another error that ends this learner; or the loop continued after `done`.
        """
        given = dict(self._leaves)
        after = self._learner.step(given, loss=loss, metrics=metrics, save=save)
        with self._unbroken:
            if after is not given:
                self._settle(after)

    @contextlib.contextmanager
    def viewed(self) -> Iterator[None]:
        """Sets the tensors to the adopted global parameters within the block, to evaluate or save.

        The loop must take no step in the block. After it the tensors have their former values.
        """
        own = self.values()
        self.show()
        try:
            yield
        finally:
            self.take(own)

    def show(self) -> None:
        """Sets the tensors to the global parameters that were adopted last."""
        for given in self._learner.viewed():
            self.take(given)

    def values(self) -> dict[str, np.ndarray]:
        """Returns copies of the loop's tensors, by the leaves' names.

        Of a tensor that is divided among processes: a copy of this process's part.
        """
        return {name: np.array(leaf) for name, leaf in self._leaves.items()}

    def take(self, values: Mapping[str, Any]) -> None:
        """Copies `values`, by the leaves' names, into the loop's tensors."""
        for name, given in values.items():
            if given is not self._leaves[name]:
                self._leaves[name].take(given)

    def _settle(self, params: Mapping[str, Any]) -> None:
        """Copies `params` into the tensors, and frees the arrays of `params`."""
        self.take(params)
        self._learner.settle(dict(self._leaves))
        for name, given in params.items():
            if given is not self._leaves[name] and isinstance(given, jax.Array):
                given.delete()

    def reading(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields `batches`; time that the loop waits for them counts as waiting for data."""
        return self._learner.reading(batches)

    def claimed(self, data: Shared) -> Iterator[Batch]:
        """Yields batches of the shares of `data` that this learner claims, from `position` on.

        Ends if `done` becomes true while the loop waits for a share.
        """
        return self._learner.claimed(data)

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """Reports the loop's measurements on held-out data, by name, in this learner's heartbeats.

        Raises:
            DilocoError: a name or a figure is invalid, or there are too many.
        """
        self._learner.evaluated(figures)

    def leave(self) -> None:
        """Asks this learner to leave the run; `done` becomes true."""
        self._learner.leave()


Kind = TypeVar("Kind", bound=TensorLearner)


@contextlib.contextmanager
def join_tensors(
    file: str | Path,
    *,
    learner: str,
    tensors: Mapping[str, Any] | Tensors,
    table: Table | None = None,
    tokens_per_step: int | None = None,
    kind: type[Kind] = TensorLearner,  # type: ignore[assignment] # what it is if nobody says
) -> Iterator[Kind]:
    """Joins a run with tensors of another framework, for as long as the block lasts.

    Args:
        file: the run's TOML file.
        learner: name of this learner in the run.
        tensors: NumPy arrays or DLPack tensors in host memory, by name; changed in place.
        table: the run's leaf for each tensor whose name or order of axes differs in the run.
        tokens_per_step: tokens of a step, of all hosts together; None: `run.tokens_per_step` of the
            run's file.
        kind: the class of the object that is yielded.

    Yields:
        The learner, of class `kind`.

    Raises:
        ConfigError: the table does not fit the tensors, or a tensor is read-only.
        DilocoError: another error that ends this learner.
    """
    check_on_cpu()
    leaves = leaves_of(_tensors(tensors), table or {})
    joining = library.join(file, learner=learner, like=leaves, tokens_per_step=tokens_per_step)
    with joining as island:
        yield kind(island, leaves)


def create_tensors(
    file: str | Path,
    tensors: Mapping[str, Any] | Tensors,
    *,
    table: Table | None = None,
    hint: Hint = default_hint,
) -> None:
    """Creates the run of a TOML file, as `diloco.create` does; version 0 has these tensors.

    Args:
        file: the run's TOML file.
        tensors: NumPy arrays or DLPack tensors in host memory, by name.
        table: the run's leaf for each tensor whose name or order of axes differs in the run.
        hint: how the aggregator merges each leaf.

    Raises:
        ConfigError: the table does not fit the tensors, or a tensor is read-only.
    """
    leaves = leaves_of(_tensors(tensors), table or {})
    create(file, {name: np.asarray(leaf) for name, leaf in leaves.items()}, hint=hint)


def load_tensors(
    run: str | Path, tensors: Mapping[str, Any] | Tensors, *, table: Table | None = None
) -> None:
    """Copies the newest global parameters of a run into tensors, in place.

    Args:
        run: the run's TOML file, the folder of a local run, a run's name, or a bundle.
        tensors: NumPy arrays or DLPack tensors in host memory, by name.
        table: the run's leaf for each tensor whose name or order of axes differs in the run.

    Raises:
        RunMismatchError: the tensors are another model's.
        DilocoError: there is no such run, bus or store is unreachable, or an object is damaged.
    """
    leaves = leaves_of(_tensors(tensors), table or {})
    for name, values in load(run, like=leaves).items():
        leaves[name].take(values)


def check_on_cpu() -> None:
    """Checks that JAX uses the CPU, since accelerators belong to the other framework.

    Raises:
        ConfigError: JAX's default backend is not the CPU.
    """
    if jax.default_backend() != "cpu":
        raise ConfigError(
            f"JAX has started on {jax.default_backend()} in a process whose accelerators are"
            " another framework's",
            hint="set JAX_PLATFORMS=cpu, or import diloco.torch before JAX is used",
        )


def _tensors(given: Mapping[str, Any] | Tensors) -> Tensors:
    return HostTensors(given) if isinstance(given, Mapping) else given
