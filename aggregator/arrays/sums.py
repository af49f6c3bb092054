"""Kernels of the merge: an update's squares, and the sum of updates (`compiled.py`).

Shapes: B blocks of b elements, P pieces of neighbouring blocks, S segments, U updates.
"""

from typing import Any, Final

import numpy as np
from numba.extending import overload

from diloco.aggregator.arrays.compiled import compiled, fetch, wide

f32, i8, i16, i32 = np.float32, np.int8, np.int16, np.int32
u16, u64 = np.uint16, np.uint64

# What is added to a sum is zero or not below this: then all that is added, and so the sum, is a
# whole multiple of 2^-126, and no sum is a denormal number, which some machines flush.
LEAST_PRODUCT: Final = f32(2.0**-100)
# Scale x coefficient of a block that has anything but zeros is far below this.
GREATEST_PRODUCT: Final = f32(2.0**100)
# Updates that are added in one pass over the sum.
MOST_UPDATES: Final = 8
# Blocks that all updates are added to while they are in the nearest cache.
_TILE: Final = u64(8)
# Blocks whose whole numbers are summed before their scales are looked at: compilers make better
# vectors of a loop that has nothing else in it.
_STAGED: Final = u64(16)
# Bytes ahead that codes are fetched which are read once: half of the time of norms was waiting.
_AHEAD: Final = u64(2048)


@compiled
def _normal(product: Any) -> Any:
    """A product, or zero for what is too small."""
    return f32(0) if abs(product) < LEAST_PRODUCT else product


@compiled
def _low(pair: Any) -> Any:
    return f32(i8(i8(pair & 15) - i8(8)))


@compiled
def _high(pair: Any) -> Any:
    return f32(i8(i8(pair >> 4) - i8(8)))


@compiled
def _step_of(scale: Any, coefficient: Any) -> Any:
    # Only a block of zeros may reach the limit, and must not become a NaN.
    return min(_normal(wide(scale) * coefficient), GREATEST_PRODUCT)


# --- Norms of an update


@compiled
def measure(
    edges_P1: Any, first: Any, last: Any, at: Any, items: Any, scales: Any, codes: Any, out_P: Any
) -> None:
    """Sum of squares of an update's values in each piece, float64.

    Args:
        edges_P1: where pieces begin and end, in blocks.
        first: piece.
        last: piece, and one.
        at: block of the fragment that the shard begins with.
        items: as many `lanes` as a block has codes.
        scales: bits of bfloat16s, of the shard.
        codes: [blocks, items] of the shard; uint16 are bits of bfloat16s.
        out_P: of all pieces.
    """
    squares = np.zeros(len(items))
    for piece in range(u64(first), u64(last)):
        out_P[piece] = _squares(
            u64(edges_P1[piece] - at), u64(edges_P1[piece + u64(1)] - at), items, scales, codes,
            squares,
        )  # fmt: skip


def _squares(
    start: Any, stop: Any, items: Any, scales: Any, codes: Any, squares: Any
) -> Any:  # pragma: no cover - one of those below
    raise NotImplementedError


@overload(_squares)
def _squares_by_codes(
    start: Any, stop: Any, items: Any, scales: Any, codes: Any, squares: Any
) -> Any:
    return _SQUARES[str(codes.dtype)]


def _squares_int4(start: Any, stop: Any, items: Any, scales: Any, codes: Any, squares: Any) -> Any:
    total = 0.0
    wholes = np.zeros(_STAGED, np.int32)
    while start < stop:
        count = min(_STAGED, stop - start)
        for k in range(count):
            fetch(codes, (start + k) * u64(len(items)) + _AHEAD)
            # At most 256 pairs of at most 2 x 8^2 each.
            whole = u16(0)
            for j in range(len(items)):
                low = i16(i16(codes[start + k, j] & 15) - i16(8))
                high = i16(i16(codes[start + k, j] >> 4) - i16(8))
                whole = u16(whole + u16(i16(low * low) + i16(high * high)))
            wholes[k] = whole
        total = _scaled(total, start, count, wholes, scales)
        start += count
    return total


def _squares_int8(start: Any, stop: Any, items: Any, scales: Any, codes: Any, squares: Any) -> Any:
    total = 0.0
    wholes = np.zeros(_STAGED, np.int32)
    while start < stop:
        count = min(_STAGED, stop - start)
        for k in range(count):
            fetch(codes, (start + k) * u64(len(items)) + _AHEAD)
            whole = i32(0)
            for j in range(len(items)):
                code = i16(codes[start + k, j])
                whole = i32(whole + i32(i16(code * code)))
            wholes[k] = whole
        total = _scaled(total, start, count, wholes, scales)
        start += count
    return total


@compiled
def _scaled(total: Any, start: Any, count: Any, wholes: Any, scales: Any) -> Any:
    """Add the squares of some blocks' whole numbers, each with its block's scale."""
    for k in range(count):
        scale = np.float64(wide(scales[start + k]))
        total += wholes[k] * (scale * scale)
    return total


def _squares_bfloat16(
    start: Any, stop: Any, items: Any, scales: Any, codes: Any, squares: Any
) -> Any:
    squares[:] = 0
    for b in range(start, stop):
        for j in range(len(items)):
            value = np.float64(wide(codes[b, j]))
            squares[j] += value * value
    return squares.sum()


def _squares_float32(
    start: Any, stop: Any, items: Any, scales: Any, codes: Any, squares: Any
) -> Any:
    squares[:] = 0
    for b in range(start, stop):
        for j in range(len(items)):
            value = np.float64(codes[b, j])
            squares[j] += value * value
    return squares.sum()


_SQUARES: Final = {
    "uint8": _squares_int4,
    "int8": _squares_int8,
    "uint16": _squares_bfloat16,
    "float32": _squares_float32,
}


# --- The sum


@compiled
def add(
    edges_P1: Any,
    segment_P: Any,
    first: Any,
    last: Any,
    at: Any,
    items: Any,
    elements: Any,
    count: Any,
    scales: Any,
    codes: Any,
    coefficients_UxS: Any,
    keep: Any,
    total_Bxb: Any,
    out_P: Any,
) -> None:
    """Add updates to the sum, one after the other, and measure it.

    Args:
        edges_P1: where pieces begin and end, in blocks.
        segment_P: each piece's.
        first: piece.
        last: piece, and one.
        at: block of the fragment that the shards begin with.
        items: as many `lanes` as a block has codes.
        elements: as many `lanes` as a block has elements.
        count: of the updates.
        scales: bits of bfloat16s of each of `MOST_UPDATES`.
        codes: [blocks, items] of each; uint16 are bits of bfloat16s.
        coefficients_UxS: float32.
        keep: whether there is a sum before.
        total_Bxb: the sum.
        out_P: takes the sums of its squares.
    """
    squares = np.zeros(len(elements))
    factors = np.zeros(MOST_UPDATES, np.float32)
    for piece in range(u64(first), u64(last)):
        factors[:] = coefficients_UxS[:, segment_P[piece]]
        squares[:] = 0
        start, end = u64(edges_P1[piece]), u64(edges_P1[piece + u64(1)])
        while start < end:
            stop = min(start + _TILE, end)
            if not keep:
                total_Bxb[start:stop] = 0
            _add_tile(start, stop, u64(at), items, count, scales, codes, factors, total_Bxb)
            for b in range(start, stop):
                for j in range(len(elements)):
                    value = np.float64(total_Bxb[b, j])
                    squares[j] += value * value
            start = stop
        out_P[piece] = squares.sum()


def _add_tile(
    start: Any, stop: Any, at: Any, items: Any, count: Any, scales: Any, codes: Any, factors: Any,
    total_Bxb: Any,
) -> None:  # fmt: skip # pragma: no cover - one of those below
    raise NotImplementedError


@overload(_add_tile)
def _add_by_codes(
    start: Any, stop: Any, at: Any, items: Any, count: Any, scales: Any, codes: Any, factors: Any,
    total_Bxb: Any,
) -> Any:  # fmt: skip
    return _ADD[str(codes.dtype.dtype)]


def _add_int4(
    start: Any, stop: Any, at: Any, items: Any, count: Any, scales: Any, codes: Any, factors: Any,
    total_Bxb: Any,
) -> None:  # fmt: skip
    high = len(items)
    for update in range(u64(count)):
        own_codes, own_scales = codes[update], scales[update]
        for b in range(start, stop):
            step = _step_of(own_scales[b - at], factors[update])
            for j in range(len(items)):
                pair = own_codes[b - at, j]
                total_Bxb[b, j] += _low(pair) * step
                total_Bxb[b, high + j] += _high(pair) * step


def _add_int8(
    start: Any, stop: Any, at: Any, items: Any, count: Any, scales: Any, codes: Any, factors: Any,
    total_Bxb: Any,
) -> None:  # fmt: skip
    for update in range(u64(count)):
        own_codes, own_scales = codes[update], scales[update]
        for b in range(start, stop):
            step = _step_of(own_scales[b - at], factors[update])
            for j in range(len(items)):
                total_Bxb[b, j] += f32(own_codes[b - at, j]) * step


def _add_bfloat16(
    start: Any, stop: Any, at: Any, items: Any, count: Any, scales: Any, codes: Any, factors: Any,
    total_Bxb: Any,
) -> None:  # fmt: skip
    for update in range(u64(count)):
        own_codes, factor = codes[update], factors[update]
        for b in range(start, stop):
            for j in range(len(items)):
                total_Bxb[b, j] += _normal(wide(own_codes[b - at, j]) * factor)


def _add_float32(
    start: Any, stop: Any, at: Any, items: Any, count: Any, scales: Any, codes: Any, factors: Any,
    total_Bxb: Any,
) -> None:  # fmt: skip
    for update in range(u64(count)):
        own_codes, factor = codes[update], factors[update]
        for b in range(start, stop):
            for j in range(len(items)):
                total_Bxb[b, j] += _normal(own_codes[b - at, j] * factor)


_ADD: Final = {
    "uint8": _add_int4,
    "int8": _add_int8,
    "uint16": _add_bfloat16,
    "float32": _add_float32,
}
