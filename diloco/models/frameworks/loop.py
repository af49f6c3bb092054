"""A loop of another framework in a run: its tensors are read and written as synchronization asks.

At most boundaries nothing is copied. A fragment that is sent is read, one that is adopted is
written, in place, so that the framework's optimizer keeps the tensors that it knows.
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
    """A foreign loop's place in a run; `join_tensors` makes it.

    Args:
        learner: the same place, for a loop of JAX.
        leaves: of the run, by name.
    """

    def __init__(self, learner: library.Learner, leaves: Mapping[str, LazyLeaf]) -> None:
        self._learner = learner
        self._leaves = dict(leaves)
        self._settle(learner.params)

    @property
    def done(self) -> bool:
        """As of `diloco.Learner`."""
        return self._learner.done

    @property
    def global_step(self) -> int:
        """The run's clock for the next step, which learning rates follow."""
        return self._learner.global_step

    @property
    def position(self) -> int:
        """Batches of this learner's data that are behind it."""
        return self._learner.position

    def restore(self, state: Any) -> Any:
        """The state that an earlier life's `step` got from `save`; as of `diloco.Learner`."""
        return self._learner.restore(state)

    def step(
        self, *, loss: Any, metrics: Mapping[str, Any] | None = None, save: Save | None = None
    ) -> None:
        """Take a step boundary: adopt versions that have arrived, send the fragments that are due.

        Args:
            loss: of the loop's step: a float, or what `float` makes one of, a step later.
            metrics: further scalars of that step by name.
            save: gives what a checkpoint holds, a tree of arrays, when one is due.
        """
        given = dict(self._leaves)
        after = self._learner.step(given, loss=loss, metrics=metrics, save=save)
        if after is not given:
            self._settle(after)

    @contextlib.contextmanager
    def viewed(self) -> Iterator[None]:
        """Within the block the tensors are the run's, as adopted last: to evaluate and to save.

        No step is taken in it. Behind it the tensors are what they were before.
        """
        own = self.values()
        self.show()
        try:
            yield
        finally:
            self.take(own)

    def show(self) -> None:
        """Set the tensors to the run's values, as adopted last."""
        for given in self._learner.viewed():
            self.take(given)

    def values(self) -> dict[str, np.ndarray]:
        """Copies of the loop's tensors, by the run's names; of each, the part of this process."""
        return {name: np.array(leaf) for name, leaf in self._leaves.items()}

    def take(self, values: Mapping[str, Any]) -> None:
        """Set tensors to values, by the run's names."""
        for name, given in values.items():
            if given is not self._leaves[name]:
                self._leaves[name].take(given)

    def _settle(self, params: Mapping[str, Any]) -> None:
        """Have the tensors take these, and nobody keep copies of them."""
        self.take(params)
        self._learner.settle(dict(self._leaves))
        for name, given in params.items():
            if given is not self._leaves[name] and isinstance(given, jax.Array):
                given.delete()

    def reading(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on; time that the loop waits for them counts as waiting for data."""
        return self._learner.reading(batches)

    def claimed(self, data: Shared) -> Iterator[Batch]:
        """Batches of the shares that this learner claims, as of `diloco.Learner`."""
        return self._learner.claimed(data)

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """Hand over what the loop has measured on held-out data."""
        self._learner.evaluated(figures)

    def leave(self) -> None:
        """Ask this learner to leave the run; `done` follows."""
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
    """Join a run with tensors of another framework, which are changed in place.

    Args:
        file: the run's TOML file.
        learner: name of this learner in the run.
        tensors: by the framework's names: NumPy arrays, or what speaks DLPack on the host.
        table: the run's leaf for each tensor, where the names or the order of axes differ.
        tokens_per_step: as of `diloco.join`.
        kind: the class of the object that the loop uses.

    Yields:
        What the loop uses.

    Raises:
        DilocoError: what is wrong, with what to do.
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
    """Create the run of a TOML file, which begins with these tensors; as `diloco.create`."""
    leaves = leaves_of(_tensors(tensors), table or {})
    create(file, {name: np.asarray(leaf) for name, leaf in leaves.items()}, hint=hint)


def load_tensors(
    run: str | Path, tensors: Mapping[str, Any] | Tensors, *, table: Table | None = None
) -> None:
    """Copy the newest global parameters of a run into tensors; `run` as of `diloco.load`."""
    leaves = leaves_of(_tensors(tensors), table or {})
    for name, values in load(run, like=leaves).items():
        leaves[name].take(values)


def check_on_cpu() -> None:
    """Refuse a JAX that has accelerators: they belong to the other framework.

    Raises:
        ConfigError: JAX has one.
    """
    if jax.default_backend() != "cpu":
        raise ConfigError(
            f"JAX has started on {jax.default_backend()} in a process whose accelerators are"
            " another framework's",
            hint="set JAX_PLATFORMS=cpu, or import diloco.torch before JAX is used",
        )


def _tensors(given: Mapping[str, Any] | Tensors) -> Tensors:
    return HostTensors(given) if isinstance(given, Mapping) else given
