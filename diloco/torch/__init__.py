"""PyTorch: a module trains in a custom loop, and takes part in a run.

    with diloco.torch.join("run.toml", learner="a", module=model, table=TABLE) as island:
        island.restore(optimizer)
        while not island.done:
            loss = train_step(batch_at(island.position))
            island.step(loss=loss, save=optimizer)

JAX stays on the CPU of this process, and synchronizes the values of the module's tensors.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco.common.process.config import keep_off_accelerators

keep_off_accelerators()  # before anything below starts JAX

import torch  # noqa: E402

from diloco.common.protocol.layout import Hint, default_hint  # noqa: E402
from diloco.models.frameworks.loop import (  # noqa: E402
    TensorLearner,
    create_tensors,
    join_tensors,
    load_tensors,
)
from diloco.models.frameworks.tensors import Leaf, Table  # noqa: E402
from diloco.torch.tensors import ModuleTensors, begun, state_of  # noqa: E402

__all__ = ["Leaf", "TorchLearner", "create", "join", "load"]


class TorchLearner(TensorLearner):
    """A PyTorch loop's membership in a run, made by `join`.

    Attributes:
        check: raises a ParametersError if the module's parameters are not those that joined.
    """

    check: Callable[[], None] = staticmethod(lambda: None)

    def restore(self, state: torch.optim.Optimizer) -> None:
        """Loads the optimizer's state from the last checkpoint, if there is one."""
        with begun(state) as (like, take):
            found = super().restore(like)
            if found is not like:
                take(found)

    def step(
        self,
        *,
        loss: Any,
        metrics: Mapping[str, Any] | None = None,
        save: torch.optim.Optimizer | None = None,
    ) -> None:
        """Takes a step boundary; as `diloco.models.frameworks.loop.TensorLearner`.

        Args:
            loss: loss of the step, a tensor that may still be computing: it is read a step later.
            metrics: further scalars of that step by name.
            save: the optimizer, of whose state checkpoints are made.
        """
        self.check()
        loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        state = None if save is None else lambda: state_of(save)
        super().step(loss=loss, metrics=metrics, save=state)


@contextlib.contextmanager
def join(
    file: str | Path,
    *,
    learner: str,
    module: torch.nn.Module,
    table: Table | None = None,
    tokens_per_step: int | None = None,
    replicated: bool = False,
) -> Iterator[TorchLearner]:
    """Joins a run with a module's parameters; as `diloco.join`.

    Within the block, the worker processes of a DataLoader are spawned: forked ones would inherit
    locks that JAX's threads hold.

    Args:
        file: the run's TOML file.
        learner: name of this learner in the run.
        module: its parameters that require gradients are the run's; they are changed in place. In a
            process group each rank joins, with a module wrapped by `fully_shard` or in
            DistributedDataParallel.
        table: the run's leaf for each parameter, by the parameter's name in the module.
        tokens_per_step: as in `diloco.join`.
        replicated: ranks keep the whole module equal by other means than these two.
    """
    tensors = _tensors_of(module, replicated)
    joining = join_tensors(
        file,
        learner=learner,
        tensors=tensors,
        table=table,
        tokens_per_step=tokens_per_step,
        kind=TorchLearner,
    )
    with _spawning(), joining as island:
        island.check = tensors.check
        yield island


def _tensors_of(module: torch.nn.Module, replicated: bool) -> ModuleTensors:
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not ranks or torch.distributed.get_world_size() == 1:
        return ModuleTensors(module)
    from diloco.torch.ranks import RankTensors

    return RankTensors(module, replicated=replicated)


@contextlib.contextmanager
def _spawning() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def create(
    file: str | Path,
    module: torch.nn.Module,
    *,
    table: Table | None = None,
    hint: Hint = default_hint,
) -> None:
    """Creates the run of a TOML file, which begins with a module's parameters."""
    create_tensors(file, ModuleTensors(module), table=table, hint=hint)


def load(run: str | Path, module: torch.nn.Module, *, table: Table | None = None) -> None:
    """Copies the newest global parameters of a run into a module."""
    load_tensors(run, ModuleTensors(module), table=table)
