"""The merge: sums of updates, radial-directional or plain, the same bits everywhere.

Shapes: N elements of a fragment's vector, b of a block, h = b / 2, B = N / b blocks, S segments.

A round in this order: of each update its `segment_norms`, its `coefficients` and
`Accumulator.add`; at the end `factors`, and the outer step (`outer.py`). To merge again what a
record says, only `add` and the outer step are called, with the recorded coefficients and
factors: no norm is computed twice.

Why the bits are the same on every machine:
  - a coefficient is a bfloat16, so code x scale x coefficient is exact in float32, and it does
    not matter whether a compiler fuses the product with the sum (a float32 update, whose product
    is rounded, forms it in a kernel of its own);
  - what is added is zero or at least 2^-100, so that no sum is a denormal number;
  - inputs are added in the order of the record.

Weights are measured in a unit of 2^k, k recorded with each input: only their ratios count, and
so they fit whatever learners claim (docs/adr/0029-units-of-weight.md).

Source: Decoupled DiLoCo (arXiv 2604.21428), App. D.2 (radial-directional averaging, RDA).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.aggregator.arrays.grid import Grid
from diloco.common.codec import GREATEST_CODE, Codec, Encoded, code_count
from diloco.common.quantize import fold, lanes_of, reduce_to_lanes

Vector = npt.NDArray[np.float32]
Norms = npt.NDArray[np.float64]

# The least bfloat16 that no machine takes for zero.
LEAST_COEFFICIENT: Final = 2.0**-126
# What is added to a sum is zero or not below this: then all that is added, and so the sum, is a
# whole multiple of 2^-126, and no sum is a denormal number, which some machines flush.
LEAST_PRODUCT: Final = 2.0**-100
# Scale x coefficient of a block that has anything but zeros is far below this.
GREATEST_PRODUCT: Final = 2.0**100
# Powers of two that a weight may exceed the round's unit by before the unit is raised.
HEADROOM: Final = 32
# Directions whose weighted sum is this much shorter than the sum of their lengths cancel.
CANCELLING: Final = 1e-6
# Squares of scales 2^-64 to 2^40 times this, and a block's sum of them, are normal float32s.
_UNIT: Final = np.float32(256)
# Elements that one thread works on at a time, so that an operation finds them in its cache.
CHUNK: Final = 1 << 16


# --- The merge rule


class Contribution(NamedTuple):
    """What the merge must know of one update, besides its codes.

    Attributes:
        norms: `segment_norms` of the codes as they came, float64 [S].
        weight: w > 0, tokens^2 / steps.
        discount: S in (0, 1], for staleness.
        clip: c in (0, 1], by which the update is shortened.
        unit: k: its coefficients hold w / 2^k.
        pull: c of centered clipping, float64 [S] (`centering.py`).
    """

    norms: Norms
    weight: float
    discount: float = 1.0
    clip: float = 1.0
    unit: int = 0
    pull: Norms | float = 1.0


def share_of(weight: float, unit: int) -> float:
    """A weight in units of 2^unit."""
    return math.ldexp(weight, -unit)


def unit_after(unit: int | None, weight: float) -> int:
    """The unit k for the next input of a round, given that of the one before it, if any.

    The first input's own power of two; later the same, unless an input is so much heavier that
    its coefficients might leave their range.
    """
    own = math.frexp(weight)[1] - 1
    return own if unit is None or own - unit >= HEADROOM else unit


def segment_norms(grid: Grid, codec: Codec, shards: Sequence[Encoded]) -> Norms:
    """L2 norm of each segment of an update, float64 [S].

    Sums of squared integer codes are exact in each block; all else has float32's precision.
    """
    if codec in GREATEST_CODE:
        return _code_norms(grid, codec, shards)
    spans = (
        (start + offset, np.asarray(encoded.codes[offset : offset + CHUNK]).astype(np.float32))
        for (start, stop), encoded in zip(grid.ranges, shards, strict=True)
        for offset in range(0, stop - start, CHUNK)
    )
    return _vector_norms(grid, spans)


def coefficients(grid: Grid, update: Contribution) -> npt.NDArray[Any]:
    """What each code x scale of an update is multiplied by; bfloat16 [S], to be recorded.

    With u = w / 2^unit: u S c for an average, times its pull where that is centered, and u S / |v|
    for RDA, which adds directions: a clip changes none, and enters by the magnitudes in `factors`.
    A zero segment has no direction: 0. None is too large: u < 2^32 and |v| >= 2^-64. One that is
    too small for a bfloat16 is 0.
    """
    share = share_of(update.weight, update.unit) * update.discount
    nonzero_S = np.where(update.norms > 0, update.norms, np.inf)
    wanted_S = np.where(grid.radial, share / nonzero_S, share * update.clip * update.pull)
    return np.where(wanted_S >= LEAST_COEFFICIENT, wanted_S, 0.0).astype(ml_dtypes.bfloat16)


def factors(grid: Grid, accumulator: "Accumulator", updates: Sequence[Contribution]) -> Vector:
    """What the accumulated sum is multiplied by to give the merged outer gradient.

    float32 [S], to be recorded. With A the accumulated sum of a segment, in the last unit:

        average   2^unit / sum w, each w rounded as in its coefficient: shares sum to one
        RDA       (sum w S c |v| / sum w) / |A|,   0 if the directions cancel

    The denominators hold w without its discount, so that a stale update that is alone in its
    round is discounted all the same (docs/design/design.md, "A round and its merge").
    """
    unit = updates[-1].unit
    weights = [share_of(update.weight, unit) for update in updates]
    average = 1 / sum(float(ml_dtypes.bfloat16(weight)) for weight in weights)
    if not grid.radial.any():
        return np.full(len(grid.radial), average, np.float32)
    total = sum(weights)
    magnitude_S = np.zeros(len(grid.radial))
    reach_S = np.zeros(len(grid.radial))
    for update, weight in zip(updates, weights, strict=True):
        share = weight * update.discount
        magnitude_S += share * update.clip / total * update.norms
        reach_S += share * (update.norms > 0)
    length_S = _vector_norms(grid, accumulator.spans())
    cancels_S = length_S <= CANCELLING * reach_S
    turned_S = np.where(cancels_S, 0.0, magnitude_S / np.where(cancels_S, 1.0, length_S))
    return np.where(grid.radial, turned_S, average).astype(np.float32)


def _code_norms(grid: Grid, codec: Codec, shards: Sequence[Encoded]) -> Norms:
    starts_S = np.cumsum(grid.lengths) - grid.lengths
    squares = []
    for scales_B, codes in shards:
        rows = _square_lanes(codes, codec=codec, block=grid.block)
        squares.append(np.asarray(_block_squares(rows, scales_B)))
    whole_B = squares[0] if len(squares) == 1 else np.concatenate(squares)
    return np.sqrt(np.add.reduceat(whole_B, starts_S, dtype=np.float64)) / _UNIT


@partial(jax.jit, static_argnames=("codec", "block"))
def _square_lanes(codes: jax.Array, *, codec: Codec, block: int) -> jax.Array:
    """Sums of squared codes of each block; int32 [B, lanes], int16 for int4."""
    if codec == "int8":
        squares = jnp.square(codes.astype(jnp.int32))
    else:
        # At most 512 squares of codes -7..7 add up to less than 2^15.
        low_H, high_H = (half.astype(jnp.int16) - 8 for half in (codes & 15, codes >> 4))
        squares = jnp.square(low_H) + jnp.square(high_H)
    rows = squares.reshape(-1, code_count(codec, block))
    return reduce_to_lanes(rows, jax.lax.add, lanes_of(block))


@jax.jit
def _block_squares(rows: jax.Array, scales_B: jax.Array) -> jax.Array:
    """Sum of squares of each block times `_UNIT` squared, float32 [B]."""
    sums_B = fold(rows, jax.lax.add).astype(jnp.float32)
    return sums_B * jnp.square(scales_B.astype(jnp.float32) * _UNIT)


def _vector_norms(grid: Grid, spans: Iterable[tuple[int, Vector]]) -> Norms:
    """L2 norm of each segment of a float32 vector that is given in parts."""
    ends_S = np.cumsum(grid.lengths) * grid.block
    squares_S = np.zeros(len(ends_S))
    for start, values in spans:
        done = 0
        while done < values.size:
            segment = int(np.searchsorted(ends_S, start + done, side="right"))
            stop = min(done + CHUNK, values.size, int(ends_S[segment]) - start)
            squares_S[segment] += _square(values[done:stop])
            done = stop
    return np.sqrt(squares_S)


def _square(values: Vector) -> float:
    """Sum of squares; in float64 where float32 would leave its range."""
    with np.errstate(over="ignore"):
        total = float(np.dot(values, values))
    if not 1e-20 < total < 1e30:
        exact = values.astype(np.float64)
        total = float(np.dot(exact, exact))
    return total


# --- The sum


class Accumulator:
    """Sum of coefficient x update over the inputs of a round, added as they arrive.

    It is held as the halves of the blocks of each shard's range, [B, 2, h], as int4's nibbles are,
    in buffers that each addition donates and gets back: nothing is allocated after the first, and
    the memory is that of one float32 vector whatever the number of inputs.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._sums = [
            jnp.zeros(((stop - start) // grid.block, 2, grid.block // 2))
            for start, stop in grid.ranges
        ]
        self.inputs = 0
        self._unit = 0

    def add(
        self,
        codec: Codec,
        shards: Sequence[Encoded],
        coefficients_S: npt.NDArray[Any],
        unit: int = 0,
    ) -> None:
        """Add an update, all of whose shards have been verified.

        Args:
            codec: of the update.
            shards: one for each of the grid's ranges, in order.
            coefficients_S: of `coefficients` or of the record, bfloat16 [S].
            unit: that these are in; the sum is brought to it first.
        """
        if self.inputs and unit > self._unit:
            # In two steps, each of which is a power of two that a float32 has.
            half = (unit - self._unit) // 2
            steps = np.ldexp(np.float32(1), (-half, half + self._unit - unit))
            self._sums = [_scaled_down(each, steps) for each in self._sums]
        self._unit = unit
        block = self._grid.block
        whole_B = self._grid.per_block(coefficients_S)
        parts = zip(self._grid.ranges, shards, strict=True)
        for index, ((start, stop), (scales, codes)) in enumerate(parts):
            coefficient_B = whole_B[start // block : stop // block]
            addends = _products(codes, coefficient_B) if codec == "float32" else codes
            self._sums[index] = _add(
                self._sums[index], self.inputs > 0, scales, addends, coefficient_B, codec=codec
            )
        # Not before the codes have been read may the caller let go of the update, or fetch more.
        jax.block_until_ready(self._sums)
        self.inputs += 1

    def reset(self) -> None:
        """Empty the sum for another round; the buffers are kept."""
        self.inputs = 0

    def spans(self) -> Iterator[tuple[int, Vector]]:
        """The sum in contiguous parts: first element and read-only float32 values of each."""
        for (start, _), sum_Bx2xh in zip(self._grid.ranges, self._sums, strict=True):
            yield start, np.asarray(sum_Bx2xh).reshape(-1)


@partial(jax.jit, static_argnames="codec", donate_argnames="sum_Bx2xh")
def _add(
    sum_Bx2xh: jax.Array,
    keep: jax.Array,
    scales_B: jax.Array,
    codes: jax.Array,
    coefficient_B: jax.Array,
    *,
    codec: Codec,
) -> jax.Array:
    """The sum of a range plus an input's; in place of it unless `keep`.

    An axis of its own for the halves makes what is done in the innermost loop the same for all
    its elements, so that every processor's vectors are used.
    """
    kept = jnp.where(keep, sum_Bx2xh, np.float32(0))
    if codec == "float32":
        return kept + codes.reshape(kept.shape)
    if codec == "bfloat16":
        values = codes.reshape(kept.shape).astype(jnp.float32)
        return kept + _normal(values * coefficient_B[:, None, None])
    if codec == "int4":
        pairs_Bx1xh = codes.reshape(kept.shape[0], 1, -1).astype(jnp.int32)
        shifts = 4 * jax.lax.broadcasted_iota(jnp.int32, kept.shape, 1)
        values = (((pairs_Bx1xh >> shifts) & 15) - 8).astype(jnp.float32)
    else:
        values = codes.reshape(kept.shape).astype(jnp.float32)
    # Only a block of zeros may reach the limit, and must not become a NaN.
    step_B = _normal(scales_B.astype(jnp.float32) * coefficient_B)
    step_B = jnp.minimum(step_B, np.float32(GREATEST_PRODUCT))
    return kept + values * step_B[:, None, None]


@jax.jit
def _products(values_N: jax.Array, coefficient_B: jax.Array) -> jax.Array:
    """Rounded products, in a kernel without additions; float32 [N]."""
    rows = values_N.reshape(coefficient_B.shape[0], -1)
    return _normal(rows * coefficient_B[:, None]).reshape(-1)


@partial(jax.jit, donate_argnames="sum_Bx2xh")
def _scaled_down(sum_Bx2xh: jax.Array, steps: jax.Array) -> jax.Array:
    return _normal(sum_Bx2xh * steps[0] * steps[1])


def _normal(products: jax.Array) -> jax.Array:
    """Products with zero for what is too small; traced into a kernel."""
    return jnp.where(jnp.abs(products) < np.float32(LEAST_PRODUCT), np.float32(0), products)
