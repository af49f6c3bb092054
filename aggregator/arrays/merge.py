"""The merge: sums of updates, radial-directional or plain, the same bits everywhere.

Shapes: N elements of a fragment's vector, b of a block, h = b / 2, B = N / b blocks, S segments.

The calls of a round, in order: for each update `segment_norms`, `coefficients` and
`Accumulator.add`; at the end `factors`, and the outer step (`outer.py`). To merge a recorded
version again, only `add` and the outer step are called, with the recorded coefficients and factors:
no norm is computed again.

Why the bits are the same on every machine:
  - a coefficient is a bfloat16, so code x scale x coefficient is exact in float32, whether or not
    a compiler fuses the product with the sum (Numba does not fuse them: for a float32 update, whose
    product is rounded, it would matter);
  - values added are zero or at least 2^-100, so that no sum is a denormal number;
  - inputs are added in the order of the record.

Weights are measured in units of 2^k, where k is recorded with each input. Only their ratios count,
so any weights that learners claim fit (docs/adr/0029-units-of-weight.md).

Source: Decoupled DiLoCo (arXiv 2604.21428), App. D.2 (radial-directional averaging, RDA).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.aggregator.arrays.codec_kernels import (
    LEAST_PRODUCT,
    Bits,
    Lanes,
    Vector,
    add,
    lanes,
    square,
)
from diloco.aggregator.arrays.grid import Grid, PieceRun, share_out
from diloco.aggregator.arrays.prefetch import FAR, NEAR, fetch, fetch_row
from diloco.aggregator.kernel_cache import compiled
from diloco.common.protocol.codecs import (
    FORMS,
    Codec,
    Encoded,
    aligned_zeros,
    code_count,
    scale_count,
)

Norms = npt.NDArray[np.float64]

# The least normal bfloat16, which no machine flushes to zero.
LEAST_COEFFICIENT: Final = 2.0**-126
# The unit is raised for a weight that exceeds it by 2 to this power.
HEADROOM: Final = 32
# Directions count as cancelling if their sum is shorter than this share of their summed lengths.
CANCELLING: Final = 1e-6
# The most updates that are added in one pass over the sum.
MOST_UPDATES: Final = 8
# The most updates that wait to be added in one pass: together about 4 bytes per parameter.
MOST_WAITING: Final[dict[Codec, int]] = {
    codec: min(4 * form.elements // form.dtype.itemsize, MOST_UPDATES)
    for codec, form in FORMS.items()
}
# The elements that one thread works on at a time, so that they stay in its cache.
CHUNK: Final = 1 << 16


# --- The merge rule


class Contribution(NamedTuple):
    """One update's norms, weight and discounts, which the merge needs in addition to its codes.

    Attributes:
        norms: result of `segment_norms` for the codes as received, float64 [S].
        weight: w > 0, tokens^2 / steps.
        discount: S in (0, 1], for staleness.
        clip: c in (0, 1], by which the update is shortened.
        unit: k; the coefficients contain w / 2^k.
        pull: c of centered clipping, float64 [S] (`centering.py`).
    """

    norms: Norms
    weight: float
    discount: float = 1.0
    clip: float = 1.0
    unit: int = 0
    pull: Norms | float = 1.0


def share_of(weight: float, unit: int) -> float:
    """Returns `weight` divided by 2^`unit`."""
    return math.ldexp(weight, -unit)


def unit_after(unit: int | None, weight: float) -> int:
    """Returns the k of the unit 2^k in which the weight of a round's next input is measured.

    An input's own k is floor(log2(weight)). The first input of a round gets its own k. A later
    input gets the k of the input before it, unless its own k is greater by `HEADROOM` or more: then
    its coefficients might exceed their range, and it gets its own k.

    Args:
        unit: k of the previous input; None for the first input.
        weight: weight of the next input.
    """
    own = math.frexp(weight)[1] - 1
    return own if unit is None or own - unit >= HEADROOM else unit


def segment_norms(grid: Grid, codec: Codec, shards: Sequence[Encoded], threads: int = 1) -> Norms:
    """Returns the L2 norm of each segment of an update, float64 [S]; `threads` changes no bit."""
    squares_P = np.zeros(len(grid.segments()))
    parts = _as_parts(grid, codec, shards)

    def measure(run: PieceRun) -> None:
        measure_update(run, lanes(grid.block), parts[run.shard], run.of(squares_P))

    share_out(measure, grid.runs(threads), threads)
    return np.sqrt(grid.per_segment(squares_P))


def coefficients(grid: Grid, update: Contribution) -> npt.NDArray[Any]:
    """Returns an update's coefficient for each segment, by which its values are multiplied.

    bfloat16 [S], stored in the record. With u = w / 2^unit, the coefficient is

        average   u S c, times the pull in centered clipping
        RDA       u S / |v|, as directions are added; the clip is part of `factors`

    It is 0 for a segment of zeros, which has no direction, and if it is too small for a bfloat16.
    It cannot overflow, since u < 2^32 and |v| >= 2^-64.
    """
    share = share_of(update.weight, update.unit) * update.discount
    nonzero_S = np.where(update.norms > 0, update.norms, np.inf)
    wanted_S = np.where(grid.radial, share / nonzero_S, share * update.clip * update.pull)
    return np.where(wanted_S >= LEAST_COEFFICIENT, wanted_S, 0.0).astype(ml_dtypes.bfloat16)


def factors(grid: Grid, accumulator: "Accumulator", updates: Sequence[Contribution]) -> Vector:
    """Returns the factors that turn the accumulated sum into the merged outer gradient.

    float32 [S], to be recorded. With A the accumulated sum of a segment, and weights w in the last
    input's unit:

        average   2^unit / sum w, each w rounded as in its coefficient: shares sum to one
        RDA       (sum w S c |v| / sum w) / |A|,   0 if the directions cancel

    The denominators contain w without its discount, so that a stale update alone in its round is
    discounted too (docs/design/design.md, "A round and its merge").
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
    length_S = accumulator.norms()
    cancels_S = length_S <= CANCELLING * reach_S
    turned_S = np.where(cancels_S, 0.0, magnitude_S / np.where(cancels_S, 1.0, length_S))
    return np.where(grid.radial, turned_S, average).astype(np.float32)


# --- The sum


class _Waiting(NamedTuple):
    codec: Codec
    shards: tuple[Encoded, ...]
    coefficients_S: Vector  # noqa: N815 - shapes live in names of arrays
    unit: int


class Accumulator:
    """The sum of coefficient x update over the inputs of a round, in the order of adding.

    Up to `MOST_WAITING` updates wait, and are then added in one pass over the sum, block by block
    while the block is in cache; adding them one after the other gives the same bits. `total` and
    `norms` add the waiting updates first. The memory is one float32 vector and the waiting updates.

    Args:
        grid: the fragment's grid.
        threads: the number of threads that share a pass; it changes no bit.
    """

    def __init__(self, grid: Grid, threads: int = 1) -> None:
        self._grid = grid
        self._threads = threads
        self._sum_N = aligned_zeros(grid.size)
        self._squares_P = np.zeros(len(grid.segments()))
        self._waiting: list[_Waiting] = []
        self._added = 0
        self._unit = 0

    @property
    def inputs(self) -> int:
        """The number of updates in the sum, waiting ones included."""
        return self._added + len(self._waiting)

    def add(
        self,
        codec: Codec,
        shards: Sequence[Encoded],
        coefficients_S: npt.NDArray[Any],
        unit: int = 0,
    ) -> None:
        """Adds an update whose shards are all verified; their arrays must not change afterwards.

        Args:
            codec: the update's codec.
            shards: one for each of the grid's ranges, in order.
            coefficients_S: from `coefficients` or from the record, bfloat16 [S].
            unit: the unit of the coefficients; the sum is converted to it first.

        Raises:
            ValueError: number or lengths of the shards differ from those of the ranges.
        """
        parts = _as_parts(self._grid, codec, shards)
        if self._waiting and (codec, unit) != (self._waiting[0].codec, self._waiting[0].unit):
            self._add_waiting()
        self._waiting.append(_Waiting(codec, parts, coefficients_S.astype(np.float32), unit))
        if len(self._waiting) == MOST_WAITING[codec]:
            self._add_waiting()

    def reset(self) -> None:
        """Empties the sum for another round; its memory is reused."""
        self._waiting, self._added = [], 0

    def total(self) -> Vector:
        """Returns the sum, float32 [N], not a copy: the caller must not change it."""
        if self._waiting:
            self._add_waiting()
        if not self._added:
            self._sum_N[:] = 0
            self._squares_P[:] = 0
        return self._sum_N

    def norms(self) -> Norms:
        """Returns the L2 norm of each segment of the sum, float64 [S]."""
        self.total()
        return np.sqrt(self._grid.per_segment(self._squares_P))

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        unit = waiting[0].unit
        if self._added and unit > self._unit:
            _scale_down(self._sum_N, unit - self._unit)
        self._unit = unit
        work = partial(self._add_pieces, waiting)
        share_out(work, self._grid.runs(self._threads), self._threads)
        self._added += len(waiting)

    def _add_pieces(self, waiting: Sequence[_Waiting], run: PieceRun) -> None:
        # The kernel always takes MOST_UPDATES updates, and reads those that have coefficients.
        spare = [waiting[0]] * (MOST_UPDATES - len(waiting))
        shards = [one.shards[run.shard] for one in (*waiting, *spare)]
        add_updates(
            run,
            lanes(self._grid.block),
            tuple(shard.scales for shard in shards),
            tuple(shard.codes for shard in shards),
            np.stack([one.coefficients_S for one in waiting]),
            self._added > 0,
            self._sum_N.reshape(-1, self._grid.block),
            run.of(self._squares_P),
        )


def _as_parts(grid: Grid, codec: Codec, shards: Sequence[Encoded]) -> tuple[Encoded, ...]:
    """Returns an update's shards in the form that kernels take.

    Raises:
        ValueError: number or lengths of the shards differ from those of the grid's ranges.
    """
    return tuple(
        _as_blocks(codec, shard, stop - start, grid.block)
        for (start, stop), shard in zip(grid.ranges, shards, strict=True)
    )


def _as_blocks(codec: Codec, shard: Encoded, size: int, block: int) -> Encoded:
    """Returns scales and codes in the form of kernels: read-only blocks, bfloat16s as bits.

    Raises:
        ValueError: the number of blocks or of scales differs from that of `size` elements.
    """
    codes = np.asarray(shard.codes).reshape(-1, code_count(codec, block))
    scales = as_bits(np.asarray(shard.scales)).view()
    if len(codes) != size // block or scales.size != scale_count(codec, size, block):
        raise ValueError(f"{len(codes)} blocks and {scales.size} scales for {size // block} blocks")
    codes = as_bits(codes).view()
    codes.flags.writeable = scales.flags.writeable = False
    return Encoded(scales, codes)


def as_bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns bfloat16s as uint16 bits, for kernels; other arrays unchanged."""
    return values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values


def _scale_down(sum_N: Vector, rise: int) -> None:
    """Divides `sum_N` in place by 2^`rise`; values below `LEAST_PRODUCT` become 0.

    In two steps, as float32 may not have 2^-`rise`.
    """
    for start in range(0, sum_N.size, CHUNK):
        part = sum_N[start : start + CHUNK]
        for step in (rise // 2, rise - rise // 2):
            part *= np.ldexp(np.float32(1), -step)
        part[np.abs(part) < LEAST_PRODUCT] = 0


# --- The kernels (codec_kernels.py says why they look so)


@compiled
def measure_update(
    run: PieceRun, elements: Lanes, update: Encoded, squares_P: npt.NDArray[Any]
) -> None:
    """Writes the sum of squares of an update's values in each piece to `squares_P`, float64 [P]."""
    scales, codes = update
    squares_b = np.zeros(len(elements))
    for piece in range(len(run.segment_P)):
        squares_b[:] = 0
        for b in range(np.uint64(run.edges_P1[piece]), np.uint64(run.edges_P1[piece + 1])):
            own = b - np.uint64(run.at)
            fetch(codes, own + FAR, np.uint64(0))
            square(elements, scales, codes, own, squares_b)
        squares_P[piece] = squares_b.sum()


@compiled
def add_updates(
    run: PieceRun,
    elements: Lanes,
    scales: tuple[Bits, ...],
    codes: tuple[Any, ...],
    coefficients_UxS: Vector,
    keep: bool,
    total_Bxb: Vector,
    squares_P: npt.NDArray[Any],
) -> None:
    """Adds updates to the sum, one after the other, and computes the squares of the result.

    Args:
        run: the pieces to work on.
        elements: `lanes` of a block.
        scales: scales of `MOST_UPDATES` updates; only those with coefficients are used.
        codes: codes of the same updates.
        coefficients_UxS: coefficients of the updates.
        keep: False if the sum is empty: the old values in `total_Bxb` are ignored.
        total_Bxb: the sum, changed in place.
        squares_P: receives the sum of squares of the result in each piece, float64 [P].
    """
    squares_b = np.zeros(len(elements))
    for piece in range(len(run.segment_P)):
        factors_U = coefficients_UxS[:, run.segment_P[piece]]
        squares_b[:] = 0
        for b in range(np.uint64(run.edges_P1[piece]), np.uint64(run.edges_P1[piece + 1])):
            total_b = total_Bxb[b]
            if not keep:
                total_b[:] = 0
            own, count = b - np.uint64(run.at), len(factors_U)
            fetch_row(total_Bxb, b + NEAR)
            # A constant index of a tuple is resolved when compiled; a variable one each time.
            add(elements, scales[0], codes[0], own, factors_U[0], total_b)
            if count > 1:
                add(elements, scales[1], codes[1], own, factors_U[1], total_b)
            if count > 2:
                add(elements, scales[2], codes[2], own, factors_U[2], total_b)
            if count > 3:
                add(elements, scales[3], codes[3], own, factors_U[3], total_b)
            if count > 4:
                add(elements, scales[4], codes[4], own, factors_U[4], total_b)
            if count > 5:
                add(elements, scales[5], codes[5], own, factors_U[5], total_b)
            if count > 6:
                add(elements, scales[6], codes[6], own, factors_U[6], total_b)
            if count > 7:
                add(elements, scales[7], codes[7], own, factors_U[7], total_b)
            for j in range(len(elements)):
                value = np.float64(total_b[j])
                squares_b[j] += value * value
        squares_P[piece] = squares_b.sum()
