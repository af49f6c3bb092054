"""How a fragment's vector divides; without JAX, for those who only look at updates."""

import itertools
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.common.layout import Fragment
from diloco.common.shards import shard_ranges

Merge = Literal["rda", "average", "centered_clipping"]

# Blocks that one thread works on at a time.
PIECE_BLOCKS: Final = 1024


class Pieces(NamedTuple):
    """A vector in pieces of at most `PIECE_BLOCKS` that cross no segment and no shard.

    Attributes:
        edges_P1: where they begin, and the last one ends, in blocks; int64 [P + 1].
        segment_P: each piece's segment, int64 [P].
        of_ranges: first piece of each shard's range, and the one after its last.
    """

    edges_P1: npt.NDArray[np.int64]  # noqa: N815 - shapes live in names of arrays
    segment_P: npt.NDArray[np.int64]  # noqa: N815 - as above
    of_ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """How a fragment's vector divides into shards, blocks and segments.

    Attributes:
        size: N.
        block: elements that share a scale.
        ranges: [start, stop) of each shard of an update.
        lengths: blocks of each segment, int64 [S].
        radial: whether a segment is merged by RDA, bool [S].
        averaged: it is state, and no parameters.
        centered: whether it is merged by centered clipping.
    """

    size: int
    block: int
    ranges: tuple[tuple[int, int], ...]
    lengths: npt.NDArray[np.int64]
    radial: npt.NDArray[np.bool_]
    averaged: bool = False
    centered: bool = False

    def pieces(self) -> "Pieces":
        """What may be worked on at the same time."""
        ends_S = np.cumsum(self.lengths)
        cuts = [stop // self.block for _, stop in self.ranges]
        edges = np.unique(np.r_[0, np.arange(0, ends_S[-1], PIECE_BLOCKS), ends_S, cuts])
        segment_P = np.searchsorted(ends_S, edges[:-1], side="right")
        of_ranges = np.searchsorted(edges, [0, *cuts])
        return Pieces(
            edges.astype(np.int64),
            segment_P.astype(np.int64),
            tuple((int(a), int(b)) for a, b in itertools.pairwise(of_ranges)),
        )

    def per_segment(self, values_P: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sums over the pieces of each segment, in their order; float64 [S]."""
        sums_S = np.bincount(self.pieces().segment_P, values_P, minlength=len(self.lengths))
        return sums_S.astype(np.float64)

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
