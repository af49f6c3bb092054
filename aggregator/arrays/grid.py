"""How a fragment's vector divides; without JAX, for those who only look at updates."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from diloco.common.layout import Fragment
from diloco.common.shards import shard_ranges

Merge = Literal["rda", "average", "centered_clipping"]


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
