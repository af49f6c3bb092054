"""Membership of another framework's training loop in a run, such as PyTorch's.

At most step boundaries no tensor is copied. The tensors of a fragment are read when it is sent, and
written in place when a version is adopted, so that the framework's optimizer keeps its tensors.
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
    """The membership in a run of another framework's training loop, made by `join_tensors`.

    Args:
        learner: the `Learner` of JAX's loops, which does the work.
        leaves: the loop's tensors as leaves of the run's parameters, by the leaves' names.
    """

    def __init__(self, learner: library.Learner, leaves: Mapping[str, LazyLeaf]) -> None:
        self._learner = learner
        self._leaves = dict(leaves)
        self._settle(learner.params)

    @property
    def done(self) -> bool:
        """True if the loop is to end; as `diloco.Learner.done`."""
        return self._learner.done

    @property
    def global_step(self) -> int:
        """The run's clock at this learner's next inner step, for learning-rate schedules."""
        return self._learner.global_step

    @property
    def position(self) -> int:
        """The number of this learner's batches that are done; the loop's data resumes there."""
        return self._learner.position

    def restore(self, state: Any) -> Any:
        """Returns the state that an earlier life saved, or `state`; as `diloco.Learner.restore`."""
        return self._learner.restore(state)

    def step(
        self, *, loss: Any, metrics: Mapping[str, Any] | None = None, save: Save | None = None
    ) -> None:
        """Takes a step boundary: adopts versions that have arrived, sends updates that are due.

        Args:
            loss: loss of the loop's step: a float, or a scalar that `float` reads a step later.
            metrics: further scalars of that step by name.
            save: returns the contents of a checkpoint, a tree of arrays, when one is due.

        Raises:
            DilocoError: as `diloco.Learner.step`.
        """
        given = dict(self._leaves)
        after = self._learner.step(given, loss=loss, metrics=metrics, save=save)
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
        """Returns copies of the loop's tensors, by leaf; of each only this process's part."""
        return {name: np.array(leaf) for name, leaf in self._leaves.items()}

    def take(self, values: Mapping[str, Any]) -> None:
        """Copies values, by the names of the run's leaves, into the loop's tensors."""
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
        """Yields batches of the shares that this learner claims; as `diloco.Learner.claimed`."""
        return self._learner.claimed(data)

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """Reports the loop's measurements on held-out data, by name; as `diloco.Learner`."""
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
        tokens_per_step: as in `diloco.join`.
        kind: the class of the object that is yielded.

    Yields:
        The loop's `TensorLearner`.

    Raises:
        DilocoError: as `diloco.join`; or the table does not fit, or a tensor is read-only.
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
    """Creates the run of a TOML file; version 0 has these tensors. As `diloco.create`."""
    leaves = leaves_of(_tensors(tensors), table or {})
    create(file, {name: np.asarray(leaf) for name, leaf in leaves.items()}, hint=hint)


def load_tensors(
    run: str | Path, tensors: Mapping[str, Any] | Tensors, *, table: Table | None = None
) -> None:
    """Copies the newest global parameters of a run into tensors; `run` as in `diloco.load`."""
    leaves = leaves_of(_tensors(tensors), table or {})
    for name, values in load(run, like=leaves).items():
        leaves[name].take(values)


def check_on_cpu() -> None:
    """Refuses to run if JAX uses accelerators: they belong to the other framework.

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
