"""Kernels of the merge: an update's squares, and the sum of updates (`compiled.py`).

Shapes: B blocks of b elements, P pieces of neighbouring blocks, S segments, U updates.
"""

from typing import Any, Final

import numpy as np
from numba.extending import overload

from diloco.aggregator.arrays import vectors
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
_GROUP: Final = u64(vectors.GROUP)
# Bytes that a processor fetches at a time.
_LINE: Final = u64(64)
# Blocks whose whole numbers are summed before their scales are looked at: compilers make better
# vectors of a loop that has nothing else in it.
_STAGED: Final = u64(16)
# Bytes ahead that codes are fetched which are read once: half of the time of norms was waiting.
_AHEAD: Final = u64(2048)
# The same, of codes that more is done with.
_NEAR: Final = u64(512)


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
    kind = str(codes.dtype)
    if kind == "uint8" and items.count % vectors.STRIDE == 0:
        return _squares_groups
    return _SQUARES[kind]


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


_squares_singly = compiled(_squares_int4)


def _squares_groups(
    start: Any, stop: Any, items: Any, scales: Any, codes: Any, squares: Any
) -> Any:
    total = 0.0
    while start + _GROUP <= stop:
        for line in range(u64(0), _GROUP * u64(len(items)), _LINE):
            fetch(codes, start * u64(len(items)) + line + _AHEAD)
        vectors.measure(codes, scales, start, items, squares)
        for k in range(_GROUP):
            total += squares[k]
        start += _GROUP
    return total + _squares_singly(start, stop, items, scales, codes, squares)


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
    half: Any,
    width: Any,
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
        half: as many `lanes` as half a block has elements.
        width: as many of those as are added at a time (`vectors.py`).
        count: of the updates.
        scales: bits of bfloat16s of each of `MOST_UPDATES`.
        codes: [blocks, items] of each; uint16 are bits of bfloat16s.
        coefficients_UxS: float32.
        keep: whether there is a sum before.
        total_Bxb: the sum.
        out_P: takes the sums of its squares.
    """
    each = np.zeros(2 * len(width))
    factors = np.zeros(MOST_UPDATES, np.float32)
    for piece in range(u64(first), u64(last)):
        factors[:] = coefficients_UxS[:, segment_P[piece]]
        squares = vectors.no_squares(width)
        for b in range(u64(edges_P1[piece]), u64(edges_P1[piece + u64(1)])):
            own = b - u64(at)
            for start in range(u64(0), u64(len(half)), u64(len(width))):
                if keep:
                    total = vectors.load(total_Bxb, b, start, half, width)
                else:
                    total = vectors.zeros(width)
                for update in range(u64(count)):
                    step = _step(codes[update], scales[update], own, factors[update])
                    fetch(codes[update], own * u64(codes[update].strides[0]) + _NEAR)
                    total = vectors.add_codes(
                        total, codes[update], own, start, half, step, LEAST_PRODUCT
                    )
                vectors.store(total_Bxb, b, start, half, total)
                squares = vectors.add_squares(squares, total)
        vectors.put(squares, each)
        out_P[piece] = each.sum()


def _step(
    codes: Any, scales: Any, b: Any, factor: Any
) -> Any:  # pragma: no cover - one of those below
    raise NotImplementedError


@overload(_step)
def _step_by_codes(codes: Any, scales: Any, b: Any, factor: Any) -> Any:
    """What a block's codes are multiplied by."""
    return _step_scaled if str(codes.dtype) in ("uint8", "int8") else _step_alone


def _step_scaled(codes: Any, scales: Any, b: Any, factor: Any) -> Any:
    product = wide(scales[b]) * factor
    normal = f32(0) if abs(product) < LEAST_PRODUCT else product
    # Only a block of zeros may reach the limit, and must not become a NaN.
    return min(normal, GREATEST_PRODUCT)


def _step_alone(codes: Any, scales: Any, b: Any, factor: Any) -> Any:
    return factor
