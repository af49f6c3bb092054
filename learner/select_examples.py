"""Selects the examples of each batch of a learner from a grain dataset, and reads them ahead.

Any `grain.MapDataset` of examples (pytrees of NumPy arrays of one shape) becomes the batches of a
`Task`, as the contract requires: batch n is always the same, a learner resumes by position alone,
each host reads only its rows.

Rules:
  1. An epoch is one permutation of the dataset, the same for all learners of a run. It is divided
     into shares: share i has the examples whose index in the permutation has the remainder i when
     divided by the number of shares. So shares do not overlap, whatever learners join, leave or
     lag. A share belongs to a learner by name, or to the learner that claims the share on the run's
     tape (`common/storage/data_share_allocation.py`).
  2. All examples of a batch are of one epoch. The examples of a share after the last whole batch
     are left out of that epoch; each epoch leaves out different examples.
  3. A learner resumes after all batches that it has sent (`learner/wire/resume_position.py`). So of
     one epoch, each example of a share is in at most one merged update of a fragment; batches that
     a crash has lost are not read again.
"""

import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np

from diloco.common.process.config import keep_off_accelerators
from diloco.common.protocol.errors import TaskError
from diloco.common.storage.data_share_allocation import Holding, Sizes
from diloco.learner.task import PROBE, Batch, Holder

if TYPE_CHECKING:
    import grain

# The first batches are read without workers: checking a task or compiling needs no more of them.
DRAWN_HERE = 2
ENDLESS = 1 << 62


class GrainData:
    """Batches of a grain dataset, for `Task.batches` and `Task.rows`.

    Args:
        dataset: examples: pytrees of arrays or numbers, all of one shape. Each index must have an
            example, so filter the source before.
        batch: number of examples in a batch.
        seed: the run's seed; the order of examples follows from it.
        shares: the number of shares of an epoch, which learners claim as they come and go; or the
            names of the learners that divide each epoch, one fixed share each. Empty: every learner
            reads all of the dataset, in an order of its own.
        workers: number of processes that read examples; 0: threads of the learner's process read.
        ahead: number of batches that each reading process keeps ready.

    Raises:
        TaskError: a share is smaller than a batch, or grain is not installed.
    """

    def __init__(
        self,
        dataset: "grain.MapDataset[Any]",
        *,
        batch: int,
        seed: int,
        shares: int | Sequence[str] = (),
        workers: int = 0,
        ahead: int = 8,
    ) -> None:
        require_grain()
        self._dataset = dataset
        self._batch = batch
        self._seed = seed
        self._named = () if isinstance(shares, int) else tuple(shares)
        self._claimed = shares if isinstance(shares, int) else 0
        self._workers = workers
        self._ahead = ahead
        if len(set(self._named)) < len(self._named):
            raise TaskError(
                f"shares must name each learner once, but they are {', '.join(self._named)}",
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
        """The number of shares of an epoch."""
        return self._claimed or max(1, len(self._named))

    @property
    def batches_per_epoch(self) -> int:
        """The number of whole batches in one share of an epoch."""
        return len(self._dataset) // self.shares // self._batch

    @property
    def sizes(self) -> Sizes:
        """The number of shares in an epoch, and the number of batches in a share."""
        return Sizes(self.shares, self.batches_per_epoch)

    @property
    def shared(self) -> Self | None:
        """The value for `Task.shared`: this object if learners claim shares, else None."""
        return self if self._claimed else None

    def claimed(
        self, holder: Holder, position: int, start: int = 0, stop: int | None = None
    ) -> Iterator[Batch]:
        """Yields the batches of the shares that `holder` gives, as `Shared.claimed` in `task.py`.

        Args:
            holder: gives the learner's shares, and waits for them.
            position: the number of the first batch, counted over all shares of the learner.
            start: the first row of each batch to read.
            stop: the row after the last one to read; None: the end of the batch.
        """
        rows = range(start, self._batch if stop is None else stop)
        while (holding := holder.at(position)) is not None:
            number = holding.first + position - holding.position
            yield from self._read(self._part(holder.epoch, holding.share, number, rows))
            position += self.batches_per_epoch - number

    def batches(self, learner: str, position: int) -> Iterator[Batch]:
        """Returns the endless batches of a learner, number `position` first, for `Task.batches`.

        Raises:
            TaskError: shares are by name, and the learner has none.
        """
        return self.rows(learner, position, 0, self._batch)

    def rows(self, learner: str, position: int, start: int, stop: int) -> Iterator[Batch]:
        """Returns rows start:stop of the endless batches of a learner, for `Task.rows`.

        If learners claim shares, these are the batches of all shares, one after the other, which
        serve to check a task.

        Args:
            learner: the learner's name.
            position: the number of the first batch.
            start: the first row of each batch.
            stop: the row after the last one.

        Raises:
            TaskError: shares are by name, and the learner has none.
        """
        if self._claimed:
            return self.claimed(_Alone(self.batches_per_epoch), position, start, stop)
        return self._read(self._source(learner, position, range(start, stop)))

    def indices(self, learner: str, position: int) -> list[int]:
        """Returns the indices of a batch's examples, in the endless order of all epochs.

        Args:
            learner: the learner's name.
            position: the number of the batch.
        """
        return self._source(learner, position, range(self._batch)).places(0)

    def _source(self, learner: str, position: int, rows: range) -> "_Batches":
        order = "" if self._named else learner
        return self._batches(order, self._share(learner), position, ENDLESS, rows)

    def _part(self, tape_epoch: int, share: int, number: int, rows: range) -> "_Batches":
        """Returns the batches of a share, batch `number` of the share first.

        The order of examples depends on `tape_epoch`, the number of the run's tape.
        """
        epoch, place = divmod(share, self.shares)
        end = (epoch + 1) * self.batches_per_epoch
        first = epoch * self.batches_per_epoch + number
        return self._batches(f"tape {tape_epoch}", place, first, end, rows)

    def _batches(self, order: str, share: int, first: int, end: int, rows: range) -> "_Batches":
        seed = zlib.crc32(f"{self._seed}/{order}".encode())
        return _Batches(
            examples=self._dataset.shuffle(seed=seed),
            first=first,
            end=end,
            rows=rows,
            batch=self._batch,
            share=share,
            shares=self.shares,
        )

    def _share(self, learner: str) -> int:
        if not self._named or learner == PROBE:
            return 0
        if learner not in self._named:
            raise TaskError(
                f"{learner} has no share of the data: they belong to {', '.join(self._named)}",
                hint="name all learners of the run in the task's shares when it is created",
            )
        return self._named.index(learner)

    def _read(self, source: "_Batches") -> Iterator[Batch]:
        for index in range(min(DRAWN_HERE, len(source))):
            yield source[index]
        if len(source) <= DRAWN_HERE:
            return
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


def require_grain() -> None:
    """Checks that grain is installed, and prepares it for use.

    Raises:
        TaskError: grain is not installed.
    """
    try:
        import grain  # noqa: F401
        from absl import flags
    except ModuleNotFoundError as error:
        raise TaskError(
            "this task reads its data with grain, which is not installed",
            hint="pip install 'diloco[grain]'",
        ) from error
    if not flags.FLAGS.is_parsed():
        # grain needs parsed absl flags, and this program's command line has none.
        flags.FLAGS.mark_as_parsed()


def _begin_worker(_index: int, _count: int) -> None:
    """Keeps a reading process off the accelerators."""
    keep_off_accelerators()
    if "jax" in sys.modules:
        jax.config.update("jax_platforms", "cpu")


@dataclass(frozen=True)
class _Alone:
    """A `Holder` that has all shares, one after the other, without any claim.

    `batches` is the number of batches in a share.
    """

    batches: int
    epoch: int = 0

    def at(self, position: int) -> Holding:
        """Returns the holding with batch number `position`."""
        share, number = divmod(position, self.batches)
        return Holding(share, 0, position - number)


@dataclass(frozen=True, kw_only=True)
class _Batches:
    """A source for grain: item i is batch number `first` + i of a share.

    Batches of a share are numbered through all epochs.

    Attributes:
        examples: the shuffled examples, epoch after epoch.
        first: the number of the first batch.
        end: the number after the last batch.
        rows: the rows of a batch that are read.
        batch: the number of rows of a whole batch.
        share: the index of the share in each epoch.
        shares: the number of shares of an epoch.
    """

    examples: "grain.MapDataset[Any]"
    first: int
    end: int
    rows: range
    batch: int
    share: int
    shares: int

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, index: int) -> Batch:
        examples = [self.examples[place] for place in self.places(index)]
        if any(example is None for example in examples):
            raise TaskError(
                "a dataset that trains has an example at each index, but one gave None",
                hint="filter before training: keep the indices that stay as a source of their own",
            )
        return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)

    def places(self, index: int) -> list[int]:
        """Returns the indices of item `index`'s rows, in the endless order of all epochs."""
        size = len(self.examples)
        epoch, number = divmod(self.first + index, size // self.shares // self.batch)
        first = number * self.batch
        return [epoch * size + self.share + self.shares * (first + row) for row in self.rows]
