"""The kernel of the outer step, the version delta and the view (`compiled.py`).

Shapes: B blocks of b elements, P pieces of neighbouring blocks, S segments.
"""

from typing import Any, Final

import numpy as np
from numba.extending import overload

from diloco.aggregator.arrays.compiled import compiled, fetch, wide
from diloco.common.codec import GREATEST_SCALE, GREATEST_VALUE, LEAST_SCALE

f32, i32 = np.float32, np.int32
u8, u32, u64 = np.uint8, np.uint32, np.uint64

# Blocks that each part of the work is done with in turn: a block's scale takes the processor many
# steps that wait for each other, and meanwhile it goes on with the next.
_TILE: Final = u64(8)
# Bytes ahead that vectors are fetched: an eighth of the time was waiting for them.
_AHEAD: Final = u64(4096)
# Bytes that a processor fetches at a time; on those that fetch more, some are asked for twice.
_LINE: Final = u64(64)

SGD, MOMENTUM, NESTEROV, DELAYED_NESTEROV, DELAYED_NESTEROV_NTH = range(5)


@compiled
def advance(  # noqa: C901 - in parts it would be slower
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
    row = u64(4) * u64(len(elements))
    g = np.empty(len(elements), np.float32)
    behind = np.empty((_TILE, len(elements)), np.float32)
    for piece in range(u64(first), u64(last)):
        segment = segment_P[piece]
        factor = factors_S[segment]
        start, end = u64(edges_P1[piece]), u64(edges_P1[piece + u64(1)])
        while start < end:
            count = min(_TILE, end - start)
            for k in range(count):
                b = start + k
                for line in range(row * b + _AHEAD, row * (b + u64(1)) + _AHEAD, _LINE):
                    fetch(total_Bxb, line)
                    fetch(theta_Bxb, line)
                    fetch(momentum_Bxb, line)
                    fetch(view_Bxb, line)
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
                    behind[k, j] = moved - view_Bxb[b, j]
            _quantize(start, count, elements, items, behind, scales, codes)
            for k in range(count):
                for j in range(len(elements)):
                    view_Bxb[start + k, j] += behind[k, j]
            start += count


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
_BIASED: Final = f32(1.5 * 2.0**23 + 8)


def _quantize(
    start: Any, count: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> None:  # pragma: no cover - one of those below
    raise NotImplementedError


@overload(_quantize)
def _quantize_by_codes(
    start: Any, count: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
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


@compiled
def _nibble(code: Any) -> Any:
    """A whole number -7..7 plus 8: the low bits of what is as large as 1.5 x 2^23."""
    return u32(f32(code + _BIASED).view(np.uint32) & u32(15))


def _quantize_int4(
    start: Any, count: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> None:
    high = len(items)
    for k in range(count):
        scales[start + k] = _scale_bits(elements, values[k], _INT4)
    for k in range(count):
        b = start + k
        scale = wide(scales[b])
        if scales[b] == _NAN_SCALE:
            codes[b] = 0
            values[k] = scale
            continue
        inverse = f32(1) / scale
        for j in range(len(elements)):
            values[k, j] = _rounded(values[k, j], inverse, f32(7))
        for j in range(len(items)):
            low, top = _nibble(values[k, j]), _nibble(values[k, high + j])
            codes[b, j] = u8(low | u32(top << u32(4)))
        for j in range(len(elements)):
            values[k, j] = values[k, j] * scale


def _quantize_int8(
    start: Any, count: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> None:
    for k in range(count):
        scales[start + k] = _scale_bits(elements, values[k], _INT8)
    for k in range(count):
        b = start + k
        scale = wide(scales[b])
        if scales[b] == _NAN_SCALE:
            codes[b] = 0
            values[k] = scale
            continue
        inverse = f32(1) / scale
        for j in range(len(elements)):
            code = _rounded(values[k, j], inverse, f32(127))
            codes[b, j] = np.int8(i32(code))
            values[k, j] = code * scale


@compiled
def _bounded(value: Any) -> Any:
    """Zero for what is too small, the greatest value for what is too large; NaN and inf stay."""
    if abs(value) < _LEAST_SCALE:
        return f32(0)
    if np.isinf(value):
        return value
    return min(max(value, -_GREATEST_VALUE), _GREATEST_VALUE)


def _quantize_bfloat16(
    start: Any, count: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> None:
    for k in range(count):
        for j in range(len(elements)):
            bits = f32(_bounded(values[k, j])).view(np.uint32)
            rounded = u32((bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16))
            rounded = _NAN_SCALE if np.isnan(values[k, j]) else rounded
            codes[start + k, j] = np.uint16(rounded)
            values[k, j] = wide(rounded)


def _quantize_float32(
    start: Any, count: Any, elements: Any, items: Any, values: Any, scales: Any, codes: Any
) -> None:
    for k in range(count):
        for j in range(len(elements)):
            values[k, j] = _bounded(values[k, j])
            codes[start + k, j] = values[k, j]


_QUANTIZE: Final = {
    "uint8": _quantize_int4,
    "int8": _quantize_int8,
    "uint16": _quantize_bfloat16,
    "float32": _quantize_float32,
}
