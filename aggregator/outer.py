"""Merging of updates and the outer step: pure functions of arrays, the same bits everywhere.

Shapes: N elements of a fragment's vector, B = N / block blocks, S segments.

A round in this order: `segment_norms` of an update, its `coefficients`, `Accumulator.add`; and at
the end `factors` and `close_round`. To merge again what a record says, only the last of these and
`add` are called, with the recorded coefficients and factors: no norm is computed twice.

Why the bits are the same on every machine:
  - a coefficient is a bfloat16, so code x scale x coefficient is exact in float32 and it does not
    matter whether a compiler fuses the product with the sum (float32 updates, whose product is
    rounded, form it in a kernel of its own);
  - inputs are added in the order of the record;
  - the outer step is NumPy arithmetic, one rounding per operation, with float32 constants. It is
    elementwise, so cutting it in chunks for cache and threads changes nothing.

Sources: Decoupled DiLoCo (arXiv 2604.21428), App. D.2 (radial-directional averaging); DiLoCo
(2311.08105) for the outer Nesterov; Async Local-SGD (2401.09135) for Delayed Nesterov.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from common.layout import Fragment
from common.quantize import (
    GREATEST_CODE,
    Codec,
    Encoded,
    decode_numpy,
    encode_difference,
)
from common.shards import shard_ranges

Vector = npt.NDArray[np.float32]
State = dict[str, npt.NDArray[Any]]
OuterName = Literal["sgd", "momentum", "nesterov", "delayed_nesterov"]

LEAST_COEFFICIENT: Final = 2.0**-60
GREATEST_COEFFICIENT: Final = 2.0**60
# Directions whose weighted sum is this much shorter than the sum of their lengths cancel.
CANCELLING: Final = 1e-6
# Elements of a chunk of the outer step: its three or four vectors stay within a core's L2 cache.
CHUNK: Final = 1 << 15
WORKERS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """How a fragment's vector divides into shards, blocks and segments.

    Attributes:
        size: N.
        block: elements that share a scale.
        ranges: [start, stop) of each shard of an update.
        lengths_S: blocks of each segment, int64 [S].
        radial_S: whether a segment is merged by RDA, bool [S].
    """

    size: int
    block: int
    ranges: tuple[tuple[int, int], ...]
    lengths_S: npt.NDArray[np.int64]
    radial_S: npt.NDArray[np.bool_]

    def per_block(self, values_S: npt.NDArray[Any]) -> Vector:
        """Each segment's value for each of its blocks, float32 [B]."""
        return np.repeat(values_S.astype(np.float32), self.lengths_S)

    def per_segment(self, values_B: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sums of the blocks' values over each segment, float64 [S]."""
        starts_S = np.cumsum(self.lengths_S) - self.lengths_S
        return np.add.reduceat(values_B, starts_S)


def make_grid(
    fragment: Fragment, block: int, shard_elements: int, merge: Literal["rda", "average"] = "rda"
) -> Grid:
    """The grid of a fragment.

    Args:
        fragment: of the layout.
        block: the layout's.
        shard_elements: `sync.shard_elements`.
        merge: "average" averages every segment, whatever the layout says.
    """
    rules = fragment.segment_rules()
    segment_of_block_B = fragment.segment_of_block(block)
    return Grid(
        size=fragment.size,
        block=block,
        ranges=tuple(shard_ranges(fragment.size, block, shard_elements)),
        lengths_S=np.bincount(segment_of_block_B, minlength=len(rules)).astype(np.int64),
        radial_S=np.asarray([merge == "rda" and rule == "rda" for rule in rules]),
    )


# --- An update's norms and coefficients


def segment_norms(grid: Grid, codec: Codec, shards: Sequence[Encoded]) -> npt.NDArray[np.float64]:
    """L2 norm of each segment of an update, float64 [S].

    Sums of squared codes are exact integers for int4 and int8; the rest is float64.
    """
    squares_B = np.concatenate([_block_squares(codec, shard, grid.block) for shard in shards])
    return np.sqrt(grid.per_segment(squares_B))


def coefficients(
    grid: Grid, norms_S: npt.NDArray[np.float64], *, weight: float, discount: float
) -> npt.NDArray[Any]:
    """What each code x scale of an update is multiplied by in the sum; bfloat16 [S].

    A plain average takes w S; RDA takes w S / |v|, the update's direction. A clip factor does not
    change a direction: it belongs to `clipped_weight` of an average and to the magnitudes in
    `factors`.
    """
    raise NotImplementedError
