"""PyTorch: a custom training loop of a module takes part in a run.

    with diloco.torch.join("run.toml", learner="a", module=model, table=TABLE) as island:
        island.restore(optimizer)
        while not island.done:
            loss = train_step(batch_at(island.position))
            island.step(loss=loss, save=optimizer)

JAX uses only the CPU in this process. It synchronizes copies of the module's parameters.

Of the other rooms it may import `common/protocol`, `common/process`, `learner` and `diloco/models`
alone.
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
        check: raises a ParametersError if the module has other parameter tensors than when it
            joined, or they are sharded differently.
    """

    check: Callable[[], None] = staticmethod(lambda: None)

    def restore(self, state: torch.optim.Optimizer) -> None:
        """Loads this learner's last checkpoint, if there is one, into the optimizer `state`.

        Raises:
            DilocoError: training has begun already.
        """
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
        """Takes a step boundary: adopts versions that have arrived, sends updates that are due.

        To be called after each step of the optimizer. The module's parameters may be changed.

        Args:
            loss: loss of the step, a number or a tensor of one element. A tensor may still be
                computing: it is read a step later.
            metrics: further scalars of that step by name.
            save: the optimizer, whose state is saved when a checkpoint is due.

        Raises:
            DivergedError: the loss is infinite or not a number.
            ParametersError: the module has other parameters than when it joined.
            DilocoError: an error that ends this learner; or the loop continued after `done`.
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
    """Joins a run with a module's parameters, for as long as the block lasts, as `diloco.join`.

    Within the block, the worker processes of a DataLoader are spawned: forked processes would
    inherit locks that JAX's threads hold.

    Args:
        file: the run's TOML file.
        learner: name of this learner in the run.
        module: the module; its parameters that require gradients are the run's parameters, and are
            changed in place. In a process group all ranks join, each with the module wrapped by
            `fully_shard` or in DistributedDataParallel.
        table: the run's leaf for each parameter whose name or order of axes differs in the run, by
            the parameter's name in the module.
        tokens_per_step: tokens of one step, of all ranks together; None: `run.tokens_per_step` of
            the run's file.
        replicated: the module is wrapped in neither way, and the caller keeps the parameters of all
            ranks equal.

    Yields:
        The loop's `TorchLearner`.

    Raises:
        DilocoError: as `diloco.join`; or the module, the table or the ranks do not fit the run.
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
    """Creates the run of a TOML file, with a module's parameters as version 0; as `diloco.create`.

    Args:
        file: the run's TOML file.
        module: the module; its parameters that require gradients are the run's parameters.
        table: as in `join`.
        hint: (leaf's name, shape) -> `TensorHint`: how the aggregator merges that leaf.
    """
    create_tensors(file, ModuleTensors(module), table=table, hint=hint)


def load(run: str | Path, module: torch.nn.Module, *, table: Table | None = None) -> None:
    """Copies the newest global parameters of a run into a module; `run` is as in `diloco.load`."""
    load_tensors(run, ModuleTensors(module), table=table)
