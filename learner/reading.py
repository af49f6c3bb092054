"""A grain dataset as a task's data: batch number n of a learner, in order, read ahead.

Any `grain.MapDataset` of examples (pytrees of NumPy arrays of one shape) becomes the batches of a
`Task`, with what the contract asks for: batch n is the same whenever it is asked for, a learner
resumes by position alone, each host reads only its rows.

Rules:
  1. An epoch is one permutation of the dataset, the same for all learners of a run, divided into
     `shares` parts by the remainder of the index in it: parts do not overlap, whatever learners
     join, leave or fall behind.
  2. A batch lies in one epoch. What is left of a share behind its last whole batch is left out of
     that epoch; it is other examples in each.
  3. A learner resumes behind all that it has sent. So of one epoch, each example of its share is in
     at most one merged update of a fragment; what a crash loses is not read again.
"""

import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from diloco.common.config import keep_off_accelerators
from diloco.common.errors import TaskError
from diloco.learner.task import PROBE, Batch

if TYPE_CHECKING:
    import grain

# Whoever checks a task or compiles draws no more: for those no workers are started.
DRAWN_HERE = 2
ENDLESS = 1 << 62


class GrainData:
    """Batches of a grain dataset, for `Task.batches` and `Task.rows`.

    Args:
        dataset: of examples: pytrees of arrays or numbers, alike in shape. What is to be left out
            is left out already: each index has an example.
        batch: examples in a batch.
        seed: of the order; the run's.
        shares: the learners that divide each epoch among them, a share each. Without them every
            learner reads all of the dataset, in an order of its own.
        workers: processes that read; 0: threads of the learner do.
        ahead: batches that are read before they are asked for, by each process that reads.

    Raises:
        TaskError: a share is smaller than a batch, or grain is not installed.
    """

    def __init__(
        self,
        dataset: "grain.MapDataset[Any]",
        *,
        batch: int,
        seed: int,
        shares: Sequence[str] = (),
        workers: int = 0,
        ahead: int = 8,
    ) -> None:
        _require_grain()
        self._dataset = dataset
        self._batch = batch
        self._seed = seed
        self._shares = tuple(shares)
        self._workers = workers
        self._ahead = ahead
        if len(set(shares)) < len(shares):
            raise TaskError(
                f"shares must name each learner once, but they are {', '.join(shares)}",
                hint="a learner has one share of an epoch",
            )
        if len(dataset) // self.shares < batch:
            raise TaskError(
                f"{self.shares} share(s) of {len(dataset)} examples hold less than one batch of "
                f"{batch}",
                hint="give more data, fewer shares or a smaller batch",
            )

    @property
    def shares(self) -> int:
        """In how many parts an epoch is divided."""
        return max(1, len(self._shares))

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in a share."""
        return len(self._dataset) // self.shares // self._batch

    def batches(self, learner: str, position: int) -> Iterator[Batch]:
        """As `Task.batches`."""
        return self.rows(learner, position, 0, self._batch)

    def rows(self, learner: str, position: int, start: int, stop: int) -> Iterator[Batch]:
        """As `Task.rows`.

        Raises:
            TaskError: the learner has no share.
        """
        source = self._source(learner, position, range(start, stop))
        return self._read(source)

    def indices(self, learner: str, position: int) -> list[int]:
        """Which places of the endless order of epochs batch number `position` holds."""
        return self._source(learner, position, range(self._batch)).places(0)

    def _source(self, learner: str, position: int, rows: range) -> "_Batches":
        seed = f"{self._seed}/" if self._shares else f"{self._seed}/{learner}"
        return _Batches(
            examples=self._dataset.shuffle(seed=zlib.crc32(seed.encode())),
            first=position,
            rows=rows,
            batch=self._batch,
            share=self._share(learner),
            shares=self.shares,
        )

    def _share(self, learner: str) -> int:
        if not self._shares or learner == PROBE:
            return 0
        if learner not in self._shares:
            raise TaskError(
                f"{learner} has no share of the data: they belong to {', '.join(self._shares)}",
                hint="name all learners of the run in the task's shares when it is created",
            )
        return self._shares.index(learner)

    def _read(self, source: "_Batches") -> Iterator[Batch]:
        for index in range(DRAWN_HERE):
            yield source[index]
        import grain

        rest = grain.MapDataset.source(replace(source, first=source.first + DRAWN_HERE))
        options = grain.ReadOptions(
            num_threads=min(16, self._ahead), prefetch_buffer_size=self._ahead
        )
        read = rest.to_iter_dataset(options)
        if self._workers:
            workers = grain.MultiprocessingOptions(
                num_workers=self._workers, per_worker_buffer_size=self._ahead
            )
            read = read.mp_prefetch(workers, worker_init_fn=_begin_worker)
        yield from read


def _require_grain() -> None:
    try:
        import grain  # noqa: F401
        from absl import flags
    except ModuleNotFoundError as error:
        raise TaskError(
            "this task reads its data with grain, which is not installed",
            hint="pip install 'diloco[grain]'",
        ) from error
    if not flags.FLAGS.is_parsed():
        # grain looks for flags of its own there, and our command line is not absl's.
        flags.FLAGS.mark_as_parsed()


def _begin_worker(_index: int, _count: int) -> None:
    """A worker is no learner: it leaves accelerators alone."""
    keep_off_accelerators()
    if "jax" in sys.modules:
        jax.config.update("jax_platforms", "cpu")


@dataclass(frozen=True, kw_only=True)
class _Batches:
    """A source of grain: item i is batch number `first` + i of one share.

    Attributes:
        examples: shuffled, epoch after epoch.
        rows: of a batch, that are read.
        batch: all rows of one.
        share: which of `shares`.
    """

    examples: "grain.MapDataset[Any]"
    first: int
    rows: range
    batch: int
    share: int
    shares: int

    def __len__(self) -> int:
        return ENDLESS - self.first

    def __getitem__(self, index: int) -> Batch:
        examples = [self.examples[place] for place in self.places(index)]
        if any(example is None for example in examples):
            raise TaskError(
                "a dataset that trains has an example at each index, but one gave None",
                hint="filter before training: keep the indices that stay as a source of their own",
            )
        return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)

    def places(self, index: int) -> list[int]:
        """Where the rows of a batch stand in the order of all epochs, one after the other."""
        size = len(self.examples)
        epoch, number = divmod(self.first + index, size // self.shares // self.batch)
        first = number * self.batch
        return [epoch * size + self.share + self.shares * (first + row) for row in self.rows]
