"""The order in which a learner's DataLoader reads examples: another order for each learner."""

import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from diloco.common.protocol.errors import ConfigError


class LearnerOrder(Sampler):  # type: ignore[misc] # torch is not there for mypy
    """A sampler of a learner's own order of examples, which resumes at the learner's position.

    The order is endless: epoch after epoch, each a permutation that follows from the seed, the
    learner's name and the epoch's number. Each pass (each call of `iter`) yields as many indices as
    there are examples, from the learner's position on.

    Args:
        examples: the number of examples.
        learner: the learner's name.
        step: the number of examples of one step, of all ranks together.
        steps: the number of steps in an epoch.
        position: returns the number of steps that are done.
        skipped: the first pass begins this number of steps before `position`, since its reader
            skips as many.
        seed: the seed; equal seeds and names give equal orders.
        part: (this rank's number r, the number of ranks n): a pass yields each n-th index from the
            r-th on. If n does not divide the examples, some are repeated at the pass's end.
    """

    def __init__(
        self,
        examples: int,
        *,
        learner: str,
        step: int,
        steps: int,
        position: Callable[[], int],
        skipped: int = 0,
        seed: int = 0,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self._examples, self._step, self._steps = examples, step, steps
        self._position, self._skipped = position, skipped
        self._seeds = (seed, zlib.crc32(learner.encode()))
        self._rank, self._ranks = part

    def __len__(self) -> int:
        return math.ceil(self._examples / self._ranks)

    def __iter__(self) -> Iterator[int]:
        whole = self._pass()
        for place in range(self._rank, len(self) * self._ranks, self._ranks):
            yield whole[place % self._examples]

    def _pass(self) -> list[int]:
        epoch, step = divmod(self._position(), self._steps)
        first = epoch * self._examples + min(step * self._step, self._examples)
        epoch, first = divmod(first - self._skipped * self._step, self._examples)
        self._skipped = 0
        return self._epoch(epoch)[first:] + self._epoch(epoch + 1)[:first]

    def _epoch(self, number: int) -> list[int]:
        # The number may be -1: a trainer may skip steps that the run has not counted.
        rng = np.random.default_rng([*self._seeds, number + 1])
        order: list[int] = rng.permutation(self._examples).tolist()
        return order


def give_order(
    loader: Any,
    *,
    learner: str,
    accumulated: int,
    position: Callable[[], int],
    batches: int | None = None,
    trained: int = 0,
    seed: int = 0,
) -> None:
    """Replaces the sampler of a trainer's shuffled DataLoader by the learner's `LearnerOrder`.

    Args:
        loader: the trainer's DataLoader, or accelerate's or Lightning's wrapper of one.
        learner: the learner's name.
        accumulated: the number of batches whose gradients make one step.
        position: returns the number of steps that are done.
        batches: the number of batches in an epoch; None: all batches of the loader.
        trained: the number of steps that the trainer has counted before; it will skip those of the
            epoch in which it resumes.
        seed: the seed of the order.

    Raises:
        ConfigError: the loader does not shuffle all its examples.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    ranks = 1
    if hasattr(sampler, "num_processes"):  # accelerate's: each rank gets batches, or parts
        ranks = 1 if sampler.split_batches else sampler.num_processes
        sampler = sampler.batch_sampler
    order: Any = getattr(sampler, "sampler", None)
    part = (0, 1)
    if isinstance(order, DistributedSampler):  # Lightning's: each rank gets examples
        ranks, part = order.num_replicas, (order.rank, order.num_replicas)
        shuffles = order.shuffle and order.dataset is loader.dataset
    else:
        shuffles = isinstance(order, RandomSampler) and not order.replacement
        shuffles = shuffles and len(order) == len(loader.dataset)
    if not shuffles:
        kind = type(loader if order is None else order).__name__
        raise ConfigError(
            f"every learner would train on the same batches: the order of this data is"
            f" {kind}'s, which knows no learners",
            hint="shuffle all of it; or give each learner data of its own, and say so by"
            " DilocoCallback(..., own_data=True)",
        )
    steps = max(1, -(-(batches or len(loader)) // accumulated))
    sampler.sampler = LearnerOrder(
        len(loader.dataset),
        learner=learner,
        step=sampler.batch_size * accumulated * ranks,
        steps=steps,
        position=position,
        skipped=trained % steps,
        seed=seed,
        part=part,
    )


def check_workers(loader: Any) -> None:
    """Checks that a DataLoader does not fork its worker processes, since JAX has threads.

    Raises:
        ConfigError: the loader is set to fork its workers.
    """
    context = loader.multiprocessing_context if isinstance(loader, DataLoader) else None
    if context is not None and context.get_start_method() == "fork":
        raise ConfigError(
            "the data's workers would be forked, and hang in locks that JAX's threads held",
            hint='leave multiprocessing_context out, or set it to "spawn" or "forkserver"',
        )
