"""The division of a fragment's vector, also among threads; without JAX."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from diloco.common.protocol.layout import Fragment
from diloco.common.protocol.shards import shard_ranges

Merge = Literal["rda", "average", "centered_clipping"]

# Blocks that one thread works on at a time.
PIECE_BLOCKS: Final = 1024
# Pieces that are not worth a thread's start: a million elements at most.
LEAST_PIECES: Final = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


class PieceRun(NamedTuple):
    """Neighbouring pieces of one shard's range, which one thread works on.

    A piece has at most `PIECE_BLOCKS` and crosses no segment and no shard.

    Attributes:
        edges_P1: where the pieces begin, and the last one ends, in blocks; int64 [P + 1].
        segment_P: each piece's segment, int64 [P].
        at: block that the shard begins with.
        shard: its index.
        first: index of the first piece among all of the vector.
    """

    edges_P1: npt.NDArray[np.int64]  # noqa: N815 - shapes live in names of arrays
    segment_P: npt.NDArray[np.int64]  # noqa: N815 - as above
    at: int
    shard: int
    first: int

    def of(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The run's part of an array that has one value for each piece of the vector."""
        return values[self.first : self.first + len(self.segment_P)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The division of a fragment's vector into shards, blocks and segments.

    Attributes:
        size: N.
        block: elements that share a scale.
        ranges: [start, stop) of each shard of an update.
        lengths: blocks of each segment, int64 [S].
        radial: whether a segment is merged by RDA, bool [S].
        averaged: the fragment holds averaged state and no parameters.
        centered: the fragment is merged by centered clipping.
    """

    size: int
    block: int
    ranges: tuple[tuple[int, int], ...]
    lengths: npt.NDArray[np.int64]
    radial: npt.NDArray[np.bool_]
    averaged: bool = False
    centered: bool = False

    def runs(self, threads: int) -> list[PieceRun]:
        """Runs that cover all pieces; several to a thread, so that one slow run delays few."""
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
        """Each piece's segment, int64 [P]."""
        ends_S = np.cumsum(self.lengths)
        return np.searchsorted(ends_S, self._edges()[:-1], side="right").astype(np.int64)

    def per_segment(self, values_P: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sums over the pieces of each segment, in their order; float64 [S]."""
        sums_S = np.bincount(self.segments(), values_P, minlength=len(self.lengths))
        return sums_S.astype(np.float64)

    def _edges(self) -> npt.NDArray[np.int64]:
        """Begin and end of each piece, in blocks."""
        ends_S = np.cumsum(self.lengths)
        cuts = [stop // self.block for _, stop in self.ranges]
        edges = np.unique(np.r_[0, np.arange(0, ends_S[-1], PIECE_BLOCKS), ends_S, cuts])
        return edges.astype(np.int64)

    def per_block(self, values_S: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Each segment's value for each of its blocks, float32 [B]."""
        return np.repeat(values_S.astype(np.float32), self.lengths)


def make_grid(fragment: Fragment, block: int, shard_elements: int, merge: Merge = "rda") -> Grid:
    """The grid of a fragment.

    Args:
        fragment: of the layout.
        block: the layout's.
        shard_elements: the run's `sync.shard_elements`.
        merge: "rda" as the layout says; the others hold for every segment, whatever it says.
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
    """Call `work` on each item, on some threads; returns the results in the items' order."""
    if threads == 1 or len(items) == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(work, items))
