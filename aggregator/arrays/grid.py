"""The division of a fragment's vector into blocks, segments, shards and pieces; without JAX.

A block has one quantization scale. A segment is a run of blocks that one norm is computed over: a
tensor, a layer of a stacked tensor, or a part of a split tensor. A shard is the run of blocks that
one object of an update has. A piece is a run of blocks within one segment and one shard, the unit
of work of the kernels.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from diloco.common.protocol.layout import Fragment
from diloco.common.protocol.shards import shard_ranges

Merge = Literal["rda", "average", "centered_clipping"]

# The most blocks of a piece.
PIECE_BLOCKS: Final = 1024
# The fewest pieces that are worth starting a thread for: about a million elements.
LEAST_PIECES: Final = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


class PieceRun(NamedTuple):
    """Neighboring pieces of one shard, on which one thread works.

    A piece has at most `PIECE_BLOCKS` blocks, and lies in one segment and one shard.

    Attributes:
        edges_P1: first block of each piece, and the end of the last piece; int64 [P + 1].
        segment_P: index of each piece's segment, int64 [P].
        at: the shard's first block.
        shard: the shard's index.
        first: index of the first piece among all pieces of the vector.
    """

    edges_P1: npt.NDArray[np.int64]  # noqa: N815 - shapes live in names of arrays
    segment_P: npt.NDArray[np.int64]  # noqa: N815 - as above
    at: int
    shard: int
    first: int

    def of(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns this run's slice of `values`, which has a value for each piece of the vector."""
        return values[self.first : self.first + len(self.segment_P)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The division of a fragment's vector into shards, blocks and segments.

    Attributes:
        size: number of elements, N.
        block: number of elements that share a scale.
        ranges: [start, stop) of each shard of an update, in elements.
        lengths: number of blocks of each segment, int64 [S].
        radial: True for segments merged by RDA, bool [S].
        averaged: True if the fragment has averaged state (`TensorHint.kind`) and no parameters.
        centered: True if the fragment is merged by centered clipping.
    """

    size: int
    block: int
    ranges: tuple[tuple[int, int], ...]
    lengths: npt.NDArray[np.int64]
    radial: npt.NDArray[np.bool_]
    averaged: bool = False
    centered: bool = False

    def runs(self, threads: int) -> list[PieceRun]:
        """Returns runs that cover all pieces, about four per thread: a slow one delays few."""
        edges, segment_P = self._edges(), self.segments()
        longest = max(LEAST_PIECES, -(-len(segment_P) // (4 * threads)))
        runs: list[PieceRun] = []
        for shard, (start, stop) in enumerate(self.ranges):
            begin, end = start // self.block, stop // self.block
            low, high = (int(index) for index in np.searchsorted(edges, [begin, end]))
            for first in range(low, high, longest):
                last = min(first + longest, high)
                pieces = edges[first : last + 1], segment_P[first:last]
                runs.append(PieceRun(*pieces, begin, shard, first))
        return runs

    def segments(self) -> npt.NDArray[np.int64]:
        """Returns the index of each piece's segment, int64 [P]."""
        ends_S = np.cumsum(self.lengths)
        return np.searchsorted(ends_S, self._edges()[:-1], side="right").astype(np.int64)

    def per_segment(self, values_P: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the sum over the pieces of each segment, in their order; float64 [S]."""
        sums_S = np.bincount(self.segments(), values_P, minlength=len(self.lengths))
        return sums_S.astype(np.float64)

    def _edges(self) -> npt.NDArray[np.int64]:
        """Returns the boundaries of all pieces in blocks, int64 [P + 1]."""
        ends_S = np.cumsum(self.lengths)
        cuts = [stop // self.block for _, stop in self.ranges]
        edges = np.unique(np.r_[0, np.arange(0, ends_S[-1], PIECE_BLOCKS), ends_S, cuts])
        return edges.astype(np.int64)

    def per_block(self, values_S: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Returns each segment's value for each of its blocks, float32 [B]."""
        return np.repeat(values_S.astype(np.float32), self.lengths)


def make_grid(fragment: Fragment, block: int, shard_elements: int, merge: Merge = "rda") -> Grid:
    """Returns the grid of a fragment.

    Args:
        fragment: the layout's fragment.
        block: the layout's block size.
        shard_elements: the run's `sync.shard_elements`.
        merge: the run's merge rule. With "rda" each segment has the layout's rule; any other rule
            applies to all segments.
    """
    rules = fragment.segment_rules()
    segment_of_block_B = fragment.segment_of_block(block)
    return Grid(
        size=fragment.size,
        block=block,
        ranges=tuple(shard_ranges(fragment.size, block, shard_elements)),
        lengths=np.bincount(segment_of_block_B, minlength=len(rules)).astype(np.int64),
        radial=np.asarray([merge == "rda" and rule == "rda" for rule in rules]),
        averaged=fragment.averaged,
        centered=merge == "centered_clipping" and not fragment.averaged,
    )


def share_out(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """Calls `work` on each item, on up to `threads` threads; returns the results in order."""
    if threads == 1 or len(items) == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(work, items))
