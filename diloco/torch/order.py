"""The order in which a learner reads examples: its own order, from its position on."""

import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from diloco.common.protocol.errors import ConfigError


class LearnerOrder(Sampler):  # type: ignore[misc] # torch is not there for mypy
    """Endless epochs, each a permutation that follows from seed, learner and the epoch's number.

    Each pass yields the examples of as many steps as an epoch has, from `position` on.

    Args:
        examples: the number of examples.
        learner: name of the learner whose order it is.
        step: examples that a step trains on.
        steps: steps in an epoch.
        position: returns the number of steps that are done.
        skipped: steps before `position` that the first pass yields, since its reader skips them.
        seed: equal seeds give equal orders.
        part: this rank's number and the number of ranks: each pass yields the examples of this rank
            in turn, and repeats some at its end if they do not divide evenly.
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
        # A reader may skip steps of its first epoch that the run never got.
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
    """Makes a trainer's shuffled loader read in the learner's own order.

    Args:
        loader: the trainer's loader.
        learner: as in `LearnerOrder`.
        accumulated: batches in a step.
        position: as in `LearnerOrder`.
        batches: batches in an epoch; None: all that the loader has.
        trained: steps done by the trainer's own count; the trainer skips the steps already
            done in the epoch where it resumes.
        seed: as in `LearnerOrder`.

    Raises:
        ConfigError: the loader's order is not a shuffled one of all its examples.
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
    """Refuses a loader that forks its workers under JAX's threads.

    Raises:
        ConfigError: the loader forks its workers.
    """
    context = loader.multiprocessing_context if isinstance(loader, DataLoader) else None
    if context is not None and context.get_start_method() == "fork":
        raise ConfigError(
            "the data's workers would be forked, and hang in locks that JAX's threads held",
            hint='leave multiprocessing_context out, or set it to "spawn" or "forkserver"',
        )
