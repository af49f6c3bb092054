"""Loops over the blocks of a fragment, compiled by Numba: the merge and the outer step in cache.

Shapes: B blocks of b elements, h = b / 2, P pieces of neighbouring blocks, S segments, U updates.

Each operation on floats is rounded by itself, in the order in which it stands here: Numba neither
fuses nor reorders them unless it is told to ("fastmath"), on any processor, and leaves denormal
numbers as they are. So the bits are those of NumPy's operations, one after the other
(docs/adr/0053-compiled-loops.md).

A kernel works on pieces [first, last), which threads share; no piece crosses a segment or a shard
(`Grid.pieces`), and what is summed over a piece is summed within it. It holds no interpreter lock.

Why the loops look as they do, which makes the difference between vectors and single elements:
  - how many elements a loop has is the length of a tuple (`lanes`), and so known when compiled;
  - a loop writes to few arrays, since the compiler must see that they do not overlap;
  - numbers of blocks are unsigned, which need no care for negative ones.
"""

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from numba.extending import overload

from diloco.common.codec import GREATEST_SCALE, GREATEST_VALUE, LEAST_SCALE

f32, i16, i32, u16, u32, u64 = np.float32, np.int16, np.int32, np.uint16, np.uint32, np.uint64

# What is added to a sum is zero or not below this: then all that is added, and so the sum, is a
# whole multiple of 2^-126, and no sum is a denormal number, which some machines flush.
LEAST_PRODUCT: Final = f32(2.0**-100)
# Scale x coefficient of a block that has anything but zeros is far below this.
GREATEST_PRODUCT: Final = f32(2.0**100)
# Updates that are added in one pass over the sum.
MOST_UPDATES: Final = 8
# Blocks that all updates are added to while they are in the nearest cache.
_TILE: Final = u64(8)


def lanes(count: int) -> tuple[int, ...]:
    """A tuple whose length tells the compiler how many elements a loop has."""
    return (0,) * count


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel, compiled at its first call with arrays of some types, and kept on disk."""
    try:
        kernel: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", cache=True)(
            function
        )
    except RuntimeError:
        # Neither this package's folder nor the user's cache can be written.
        kernel = numba.njit(nogil=True, error_model="numpy")(function)
    return kernel


@compiled
def _wide(bits: Any) -> Any:
    """A bfloat16, given by its bits, as float32."""
    return u32(u32(bits) << u32(16)).view(np.float32)


@compiled
def _normal(product: Any) -> Any:
    """A product, or zero for what is too small."""
    return f32(0) if abs(product) < LEAST_PRODUCT else product


@compiled
def _low(pair: Any) -> Any:
    return f32(i32(i32(u32(pair) & u32(15)) - i32(8)))


@compiled
def _high(pair: Any) -> Any:
    return f32(i32(i32(u32(pair) >> u32(4)) - i32(8)))


@compiled
def _step_of(scale: Any, coefficient: Any) -> Any:
    # Only a block of zeros may reach the limit, and must not become a NaN.
    return min(_normal(_wide(scale) * coefficient), GREATEST_PRODUCT)


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


def _squares_int4(
    start: Any, stop: Any, items: Any, scales: Any, codes: Any, squares: Any
) -> Any:
    total = 0.0
    for b in range(start, stop):
        whole = i32(0)
        for j in range(len(items)):
            low = i16(i16(codes[b, j] & 15) - i16(8))
            high = i16(i16(codes[b, j] >> 4) - i16(8))
            whole = i32(whole + i32(i16(i16(low * low) + i16(high * high))))
        scale = np.float64(_wide(scales[b]))
        total += whole * (scale * scale)
    return total


def _squares_int8(
    start: Any, stop: Any, items: Any, scales: Any, codes: Any, squares: Any
) -> Any:
    total = 0.0
    for b in range(start, stop):
        whole = i32(0)
        for j in range(len(items)):
            code = i32(codes[b, j])
            whole = i32(whole + i32(code * code))
        scale = np.float64(_wide(scales[b]))
        total += whole * (scale * scale)
    return total


def _squares_bfloat16(
    start: Any, stop: Any, items: Any, scales: Any, codes: Any, squares: Any
) -> Any:
    squares[:] = 0
    for b in range(start, stop):
        for j in range(len(items)):
            value = np.float64(_wide(codes[b, j]))
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
        count: of the updates; a multiple of 4 for int4, whose coefficients may be zeros.
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


@compiled
def _add_four(
    start: Any, stop: Any, at: Any, items: Any, first: Any, scales: Any, codes: Any, factors: Any,
    total_Bxb: Any,
) -> None:  # fmt: skip
    """Four int4 updates: the sum is read and written once for them."""
    second, third, fourth = first + u64(1), first + u64(2), first + u64(3)
    c0, c1, c2, c3 = codes[first], codes[second], codes[third], codes[fourth]
    s0, s1, s2, s3 = scales[first], scales[second], scales[third], scales[fourth]
    high = len(items)
    for b in range(start, stop):
        own = b - at
        p0, p1 = _step_of(s0[own], factors[first]), _step_of(s1[own], factors[second])
        p2, p3 = _step_of(s2[own], factors[third]), _step_of(s3[own], factors[fourth])
        for j in range(len(items)):
            value = total_Bxb[b, j] + _low(c0[own, j]) * p0
            value += _low(c1[own, j]) * p1
            value += _low(c2[own, j]) * p2
            value += _low(c3[own, j]) * p3
            total_Bxb[b, j] = value
        for j in range(len(items)):
            value = total_Bxb[b, high + j] + _high(c0[own, j]) * p0
            value += _high(c1[own, j]) * p1
            value += _high(c2[own, j]) * p2
            value += _high(c3[own, j]) * p3
            total_Bxb[b, high + j] = value


def _add_int4(
    start: Any, stop: Any, at: Any, items: Any, count: Any, scales: Any, codes: Any, factors: Any,
    total_Bxb: Any,
) -> None:  # fmt: skip
    first = u64(0)
    while first < u64(count):
        _add_four(start, stop, at, items, first, scales, codes, factors, total_Bxb)
        first += u64(4)


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
                total_Bxb[b, j] += _normal(_wide(own_codes[b - at, j]) * factor)


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


# --- The outer step

SGD, MOMENTUM, NESTEROV, DELAYED_NESTEROV, DELAYED_NESTEROV_NTH = range(5)


@compiled
def advance(
    edges_P1: Any,
    segment_P: Any,
    first: Any,
    last: Any,
    rule: Any,
    constants: Any,
    elements: Any,
    items: Any,
    factors_S: Any,
    total_Bxb: Any,
    kept_S: Any,
    center_Bxb: Any,
    theta_Bxb: Any,
    momentum_Bxb: Any,
    delayed_Bxb: Any,
    view_Bxb: Any,
    scales: Any,
    codes: Any,
) -> None:
    """Take the outer step, quantize what the view is behind, and move the view by that.

    Args:
        edges_P1: where pieces begin and end, in blocks.
        segment_P: each piece's.
        first: piece.
        last: piece, and one.
        rule: of the outer optimizer, one of the above.
        constants: learning rate, momentum, 1 / delay, what multiplies the carried momentum.
        elements: as many `lanes` as a block has elements.
        items: as many `lanes` as a block has codes.
        factors_S: float32.
        total_Bxb: the sum; left as it is.
        kept_S: share of the center that is added to the gradient; empty for none.
        center_Bxb: the merged gradient before, in whose place this one is put; empty for none.
        theta_Bxb: master parameters.
        momentum_Bxb: empty where the rule has none.
        delayed_Bxb: empty where the rule has none.
        view_Bxb: the view.
        scales: takes the delta's: bits of bfloat16s.
        codes: takes the delta's, [blocks, items]; uint16 are bits of bfloat16s.
    """
    g, spare = np.empty(len(elements), np.float32), np.empty(len(elements), np.float32)
    for piece in range(u64(first), u64(last)):
        segment = segment_P[piece]
        factor = factors_S[segment]
        for b in range(u64(edges_P1[piece]), u64(edges_P1[piece + u64(1)])):
            for j in range(len(elements)):
                g[j] = total_Bxb[b, j] * factor
            if kept_S.size:
                _recenter(kept_S[segment], elements, g, center_Bxb[b])
            if rule == SGD:
                for j in range(len(elements)):
                    g[j] = g[j] * constants[0]
            elif rule == MOMENTUM:
                _momentum(constants, elements, g, momentum_Bxb, b)
            elif rule == NESTEROV:
                _nesterov(constants, elements, g, momentum_Bxb, b)
            else:
                _delayed(rule, constants, elements, g, momentum_Bxb[b], delayed_Bxb[b])
            for j in range(len(elements)):
                moved = theta_Bxb[b, j] - g[j]
                theta_Bxb[b, j] = moved
                spare[j] = moved - view_Bxb[b, j]
            _quantize(b, elements, items, spare, scales, codes)
            for j in range(len(elements)):
                view_Bxb[b, j] += spare[j]


@compiled
def _recenter(kept: Any, elements: Any, g: Any, center: Any) -> None:
    """Add what stays of the merge before, and put the new one in its place."""
    for j in range(len(elements)):
        merged = g[j] + center[j] * kept
        g[j] = merged
        center[j] = merged


@compiled
def _momentum(k: Any, elements: Any, g: Any, momentum_Bxb: Any, b: Any) -> None:
    for j in range(len(elements)):
        m = momentum_Bxb[b, j] * k[1] + g[j]
        momentum_Bxb[b, j] = m
        g[j] = m * k[0]


@compiled
def _nesterov(k: Any, elements: Any, g: Any, momentum_Bxb: Any, b: Any) -> None:
    for j in range(len(elements)):
        m = momentum_Bxb[b, j] * k[1] + g[j]
        momentum_Bxb[b, j] = m
        g[j] = (g[j] + m * k[1]) * k[0]


@compiled
def _delayed(rule: Any, k: Any, elements: Any, g: Any, m: Any, delayed: Any) -> None:
    for j in range(len(elements)):
        delayed[j] += g[j]
    if rule == DELAYED_NESTEROV_NTH:
        for j in range(len(elements)):
            m[j] = m[j] * k[1] + delayed[j] * k[2]
            delayed[j] = 0
    for j in range(len(elements)):
        g[j] = (g[j] * k[2] + m[j] * k[3]) * k[0]


# --- Quantization, bit for bit that of `diloco.common.quantize`

_GREATEST_VALUE: Final = f32(GREATEST_VALUE)
_LEAST_SCALE: Final = f32(LEAST_SCALE)
_GREATEST_SCALE: Final = f32(GREATEST_SCALE)
_INT4: Final = f32(1 / 7)
_INT8: Final = f32(1 / 127)
_MAGNITUDE: Final = u32(0x7FFFFFFF)
_INFINITY: Final = u32(0x7F800000)
_NAN_SCALE: Final = u32(0x7FC0)
# Adding 1.5 x 2^23 to a small float32 rounds it, half to even, into the low bits of the sum.
_ROUND: Final = f32(1.5 * 2.0**23)


def _quantize(
    b: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> None:  # pragma: no cover - one of those below
    raise NotImplementedError


@overload(_quantize)
def _quantize_by_codes(
    b: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> Any:
    return _QUANTIZE[str(codes.dtype)]


@compiled
def _scale_bits(elements: Any, values: Any, inverse_of_greatest: Any) -> Any:
    """Of the block's greatest magnitude; a bfloat16's bits, those of a NaN if it is not finite."""
    greatest = u32(0)
    for j in range(len(elements)):
        greatest = max(greatest, u32(f32(values[j]).view(np.uint32) & _MAGNITUDE))
    if greatest >= _INFINITY:
        return _NAN_SCALE
    wanted = u32(greatest).view(np.float32) * inverse_of_greatest
    bits = f32(min(max(wanted, _LEAST_SCALE), _GREATEST_SCALE)).view(np.uint32)
    return u32((bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16))


@compiled
def _rounded(value: Any, inverse: Any, most: Any) -> Any:
    """The nearest code, as a whole float32; of a NaN no matter what."""
    return (min(max(value * inverse, -most), most) + _ROUND) - _ROUND


def _quantize_int4(
    b: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> None:
    bits = _scale_bits(elements, values, _INT4)
    scale = _wide(bits)
    if bits == _NAN_SCALE:
        scales[b], codes[b] = bits, 0
        values[:] = scale
        return
    inverse, high = f32(1) / scale, len(items)
    scales[b] = bits
    for j in range(len(elements)):
        values[j] = _rounded(values[j], inverse, f32(7))
    for j in range(len(items)):
        low_code, high_code = i32(values[j]) + i32(8), i32(values[high + j]) + i32(8)
        codes[b, j] = np.uint8(i32(low_code | i32(high_code << i32(4))))
    for j in range(len(elements)):
        values[j] = values[j] * scale


def _quantize_int8(
    b: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> None:
    bits = _scale_bits(elements, values, _INT8)
    scale = _wide(bits)
    if bits == _NAN_SCALE:
        scales[b], codes[b] = bits, 0
        values[:] = scale
        return
    inverse = f32(1) / scale
    scales[b] = bits
    for j in range(len(elements)):
        code = _rounded(values[j], inverse, f32(127))
        codes[b, j] = np.int8(i32(code))
        values[j] = code * scale


@compiled
def _bounded(value: Any) -> Any:
    """Zero for what is too small, the greatest value for what is too large; NaN and inf stay."""
    if abs(value) < _LEAST_SCALE:
        return f32(0)
    if np.isinf(value):
        return value
    return min(max(value, -_GREATEST_VALUE), _GREATEST_VALUE)


def _quantize_bfloat16(
    b: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> None:
    for j in range(len(elements)):
        bits = f32(_bounded(values[j])).view(np.uint32)
        rounded = u32((bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16))
        rounded = _NAN_SCALE if np.isnan(values[j]) else rounded
        codes[b, j] = np.uint16(rounded)
        values[j] = _wide(rounded)


def _quantize_float32(
    b: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> None:
    for j in range(len(elements)):
        values[j] = _bounded(values[j])
        codes[b, j] = values[j]


_QUANTIZE: Final = {
    "uint8": _quantize_int4,
    "int8": _quantize_int8,
    "uint16": _quantize_bfloat16,
    "float32": _quantize_float32,
}
