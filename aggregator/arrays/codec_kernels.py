"""The operations of each codec in the loops of merge and outer step, compiled by Numba.

A codec has three operations on blocks, in the table `OPERATIONS`: add the squares of a block's
values, add a block's values times a factor, and encode blocks. The kernels that apply them to a
fragment are `measure_update` and `add_updates` of `merge.py` and `advance_blocks` of `outer.py`:
each does all of its work on a block while the block is in the processor's nearest cache. A kernel
works on a run of pieces (`grid.py`); threads share the runs, and no sum over a piece is divided
among threads. Kernels release Python's lock. Compiled kernels are cached on disk, and compiled
again when a file of this folder changes (`kernel_cache.py`).

Why the bits are the same everywhere: each floating-point operation is rounded by itself, in the
order of the code. Numba neither fuses nor reorders operations unless told to ("fastmath"), on any
processor, and leaves denormal numbers as they are (docs/adr/0053-compiled-loops.md).

Why the loops have this form, which lets the compiler vectorize them and saves tuple look-ups:
  - arrays are taken out of their tuples at a kernel's beginning;
  - a loop's number of elements is the length of a tuple (`lanes`), so it is known when compiled;
  - a loop writes to few arrays, since the compiler must see that they do not overlap;
  - block numbers are unsigned, so that no code for negative indices is needed;
  - data of later blocks is prefetched (`prefetch.py`).

Shapes: B blocks of b elements, K blocks that are encoded together, P pieces of a run, S segments,
U updates. Arrays of bfloat16 are given as their bits, uint16.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import overload

from diloco.aggregator.arrays.prefetch import NEAR, fetch
from diloco.aggregator.kernel_cache import compiled
from diloco.common.protocol.codecs import (
    GREATEST_SCALE,
    GREATEST_VALUE,
    INT2_LEAST,
    INT2_MEANS,
    INT2_UNIT_BITS,
    LEAST_SCALE,
)

f32, i8, i16, i32 = np.float32, np.int8, np.int16, np.int32
u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64

Vector = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]
# A tuple with as many zeros as a block has elements.
Lanes = tuple[int, ...]

# Values added to a sum are zero or at least this. So all of them, and the sum, are whole multiples
# of 2^-126, and no sum is a denormal number, which some machines flush to zero.
LEAST_PRODUCT: Final = f32(2.0**-100)
# Scale x coefficient is far below this, except for blocks of zeros.
GREATEST_PRODUCT: Final = f32(2.0**100)


def lanes(block: int) -> Lanes:
    """Returns a tuple whose length tells the compiler the number of elements of a loop."""
    return (0,) * block


# --- Operations on blocks: int4


@compiled
def _wide(bits: Any) -> Any:
    """Returns a bfloat16, given by its bits, as float32."""
    return u32(u32(bits) << u32(16)).view(np.float32)


@compiled
def _step(scale: Any, factor: Any) -> Any:
    """Returns scale x factor, by which a block's codes are multiplied; 0 below `LEAST_PRODUCT`."""
    product = _wide(scale) * factor
    normal = f32(0) if abs(product) < LEAST_PRODUCT else product
    # Only a block of zeros can reach the limit; without it 0 x infinity would be NaN.
    return min(normal, GREATEST_PRODUCT)


@compiled
def _scaled(whole: Any, scale: Any) -> Any:
    """Returns a sum of squares of codes times the square of their scale, exactly."""
    wide = np.float64(_wide(scale))
    return whole * (wide * wide)


def _square_int4(elements: Lanes, scales: Bits, codes: Any, b: Any, squares_b: Any) -> None:
    # At most 256 pairs of at most 2 x 8^2 each.
    whole = u16(0)
    for j in range(len(elements) // 2):
        low = i16(i16(codes[b, j] & 15) - i16(8))
        high = i16(i16(codes[b, j] >> 4) - i16(8))
        whole = u16(whole + u16(i16(low * low) + i16(high * high)))
    squares_b[0] += _scaled(whole, scales[b])


def _add_int4(
    elements: Lanes, scales: Bits, codes: Any, b: Any, factor: Any, total_b: Vector
) -> None:
    fetch(codes, b + NEAR, u64(0))
    step = _step(scales[b], factor)
    half = len(elements) // 2
    for j in range(half):
        low, high = codes[b, j] & u8(15), codes[b, j] >> u8(4)
        total_b[j] += f32(i8(low - u8(8))) * step
        total_b[half + j] += f32(i8(high - u8(8))) * step


def _encode_int4(
    elements: Lanes, scales: Bits, codes: Any, first: Any, count: Any, values_Kxb: Vector
) -> None:
    half = len(elements) // 2
    for k in range(count):
        scales[first + k] = _scale_bits(elements, values_Kxb[k], _INT4)
    for k in range(count):
        b = first + k
        scale = _wide(scales[b])
        if scales[b] == _NAN_SCALE:
            codes[b] = 0
            values_Kxb[k] = scale
            continue
        inverse = f32(1) / scale
        for j in range(len(elements)):
            values_Kxb[k, j] = _rounded(values_Kxb[k, j], inverse, f32(7))
        for j in range(half):
            low, high = _nibble(values_Kxb[k, j]), _nibble(values_Kxb[k, half + j])
            codes[b, j] = u8(low | u32(high << u32(4)))
        for j in range(len(elements)):
            values_Kxb[k, j] = values_Kxb[k, j] * scale


# --- int8


def _square_int8(elements: Lanes, scales: Bits, codes: Any, b: Any, squares_b: Any) -> None:
    whole = i32(0)
    for j in range(len(elements)):
        code = i16(codes[b, j])
        whole = i32(whole + i32(i16(code * code)))
    squares_b[0] += _scaled(whole, scales[b])


def _add_int8(
    elements: Lanes, scales: Bits, codes: Any, b: Any, factor: Any, total_b: Vector
) -> None:
    step = _step(scales[b], factor)
    fetch(codes, b + NEAR, u64(0))
    for j in range(len(elements)):
        total_b[j] += f32(codes[b, j]) * step


def _encode_int8(
    elements: Lanes, scales: Bits, codes: Any, first: Any, count: Any, values_Kxb: Vector
) -> None:
    for k in range(count):
        scales[first + k] = _scale_bits(elements, values_Kxb[k], _INT8)
    for k in range(count):
        b = first + k
        scale = _wide(scales[b])
        if scales[b] == _NAN_SCALE:
            codes[b] = 0
            values_Kxb[k] = scale
            continue
        inverse = f32(1) / scale
        for j in range(len(elements)):
            code = _rounded(values_Kxb[k, j], inverse, f32(127))
            codes[b, j] = i8(i32(code))
            values_Kxb[k, j] = code * scale


# --- int2


def _square_int2(elements: Lanes, scales: Bits, codes: Any, b: Any, squares_b: Any) -> None:
    # The square of a code is its low bit, as it is stored; an item's bits are added in parallel.
    whole = u32(0)
    for j in range(len(elements) // 16):
        bits = codes[b, j] & u32(0x55555555)
        pairs = (bits & u32(0x33333333)) + ((bits >> u32(2)) & u32(0x33333333))
        nibbles = (pairs + (pairs >> u32(4))) & u32(0x0F0F0F0F)
        whole += u32(nibbles * u32(0x01010101)) >> u32(24)
    squares_b[0] += _scaled(whole, scales[b])


def _add_int2(
    elements: Lanes, scales: Bits, codes: Any, b: Any, factor: Any, total_b: Vector
) -> None:
    fetch(codes, b + NEAR, u64(0))
    step, items = _step(scales[b], factor), len(elements) // 16
    for k in range(16):
        for j in range(items):
            code = i32((codes[b, j] >> u32(2 * k)) & u32(3)) - i32(2)
            total_b[k * items + j] += f32(code) * step


def _encode_int2(
    elements: Lanes, scales: Bits, codes: Any, first: Any, count: Any, values_Kxb: Vector
) -> None:
    items = len(elements) // 16
    for k in range(count):
        scales[first + k] = _int2_scale_bits(elements, values_Kxb[k])
    for k in range(count):
        b = first + k
        scale = _wide(scales[b])
        if scales[b] == _NAN_SCALE:
            codes[b] = _INT2_ZEROS
            values_Kxb[k] = scale
            continue
        codes[b] = 0
        inverse = f32(1) / scale
        for part in range(16):
            for j in range(items):
                code = _rounded(values_Kxb[k, part * items + j], inverse, f32(1))
                codes[b, j] |= u32(i32(code) + i32(2)) << u32(2 * part)
                values_Kxb[k, part * items + j] = code * scale


# --- bfloat16


def _square_bfloat16(elements: Lanes, scales: Bits, codes: Any, b: Any, squares_b: Any) -> None:
    for j in range(len(elements)):
        value = np.float64(_wide(codes[b, j]))
        squares_b[j] += value * value


def _add_bfloat16(
    elements: Lanes, scales: Bits, codes: Any, b: Any, factor: Any, total_b: Vector
) -> None:
    for j in range(len(elements)):
        total_b[j] += _product(_wide(codes[b, j]), factor)


def _encode_bfloat16(
    elements: Lanes, scales: Bits, codes: Any, first: Any, count: Any, values_Kxb: Vector
) -> None:
    for k in range(count):
        for j in range(len(elements)):
            rounded = _bfloat16_bits(_bounded(values_Kxb[k, j]))
            rounded = _NAN_SCALE if np.isnan(values_Kxb[k, j]) else rounded
            codes[first + k, j] = u16(rounded)
            values_Kxb[k, j] = _wide(rounded)


# --- float32


def _square_float32(elements: Lanes, scales: Bits, codes: Any, b: Any, squares_b: Any) -> None:
    for j in range(len(elements)):
        value = np.float64(codes[b, j])
        squares_b[j] += value * value


def _add_float32(
    elements: Lanes, scales: Bits, codes: Any, b: Any, factor: Any, total_b: Vector
) -> None:
    for j in range(len(elements)):
        total_b[j] += _product(codes[b, j], factor)


def _encode_float32(
    elements: Lanes, scales: Bits, codes: Any, first: Any, count: Any, values_Kxb: Vector
) -> None:
    for k in range(count):
        for j in range(len(elements)):
            values_Kxb[k, j] = _bounded(values_Kxb[k, j])
            codes[first + k, j] = values_Kxb[k, j]


# --- Numbers, bit for bit those of `diloco.learner.tensors.quantize_and_pack`

_GREATEST_VALUE: Final = f32(GREATEST_VALUE)
_LEAST_SCALE: Final = f32(LEAST_SCALE)
_LEAST_BITS: Final = u32(f32(LEAST_SCALE).view(np.uint32))
_GREATEST_SCALE: Final = f32(GREATEST_SCALE)
_INT4: Final = f32(1 / 7)
_INT8: Final = f32(1 / 127)
_INT2_ZEROS: Final = u32(0xAAAAAAAA)  # sixteen codes of zero
_MAGNITUDE: Final = u32(0x7FFFFFFF)
_INFINITY: Final = u32(0x7F800000)
_NAN_SCALE: Final = u32(0x7FC0)
# Adding 1.5 x 2^23 to a small float32 rounds it, half to even, into the low bits of the sum.
_ROUND: Final = f32(1.5 * 2.0**23)
_BIASED: Final = f32(1.5 * 2.0**23 + 8)


@compiled
def _product(value: Any, factor: Any) -> Any:
    """Returns the rounded product; 0 if it is below `LEAST_PRODUCT`; NaN stays NaN."""
    product = value * factor
    return f32(0) if abs(product) < LEAST_PRODUCT else product


@compiled
def _bfloat16_bits(value: Any) -> Any:
    """Returns the bits of the nearest bfloat16, ties to even."""
    bits = f32(value).view(np.uint32)
    return u32((bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16))


@compiled
def _scale_bits(elements: Lanes, values_b: Vector, inverse_of_greatest: Any) -> Any:
    """Returns the bfloat16 bits of a block's scale: greatest magnitude x `inverse_of_greatest`.

    The bits are those of NaN if a value of the block is not finite.
    """
    greatest = u32(0)
    for j in range(len(elements)):
        greatest = max(greatest, u32(f32(values_b[j]).view(np.uint32) & _MAGNITUDE))
    return _rounded_scale(greatest, u32(greatest).view(np.float32) * inverse_of_greatest)


@compiled
def _int2_scale_bits(elements: Lanes, values_b: Vector) -> Any:
    """Returns the bfloat16 bits of a block's scale of int2; of NaN if a value is not finite."""
    greatest = u32(0)
    for j in range(len(elements)):
        greatest = max(greatest, u32(f32(values_b[j]).view(np.uint32) & _MAGNITUDE))
    exponent = u32(max(greatest, _LEAST_BITS) >> u32(23)) - u32(INT2_UNIT_BITS)
    unit = u32(exponent << u32(23)).view(np.float32)
    inverse = u32((u32(254) - exponent) << u32(23)).view(np.float32)
    whole = i32(0)
    if greatest < _INFINITY:
        for j in range(len(elements)):
            whole += i32(abs(values_b[j]) * inverse)
    mean = f32(whole) * f32(INT2_MEANS / len(elements)) * unit
    return _rounded_scale(greatest, max(mean, u32(greatest).view(np.float32) * f32(INT2_LEAST)))


@compiled
def _rounded_scale(greatest: Any, wanted: Any) -> Any:
    """Returns the bits of a scale that is wanted; `greatest` has those of a block's absmax."""
    if greatest >= _INFINITY:
        return _NAN_SCALE
    return _bfloat16_bits(min(max(wanted, _LEAST_SCALE), _GREATEST_SCALE))


@compiled
def _rounded(value: Any, inverse: Any, most: Any) -> Any:
    """Returns the code of a value, a float32 integer in -most..most; any number for NaN."""
    return (min(max(value * inverse, -most), most) + _ROUND) - _ROUND


@compiled
def _nibble(code: Any) -> Any:
    """Returns code + 8 for a code of -7..7: the low bits of a float near 1.5 x 2^23."""
    return u32(f32(code + _BIASED).view(np.uint32) & u32(15))


@compiled
def _bounded(value: Any) -> Any:
    """Returns the value limited to the codec's range; 0 if too small; NaN and infinity stay."""
    if abs(value) < _LEAST_SCALE:
        return f32(0)
    if np.isinf(value):
        return value
    return min(max(value, -_GREATEST_VALUE), _GREATEST_VALUE)


# --- The table


class Operations(NamedTuple):
    """A codec's operations on blocks.

    Attributes:
        square: adds the squares of a block's values to float64 [b]; only the sum over b counts.
        add: adds a block's values, times a factor, to float32 [b].
        encode: encodes K blocks of values into a delta, and replaces the values by what the codes
            decode to.
    """

    square: Callable[..., None]
    add: Callable[..., None]
    encode: Callable[..., None]


# By the dtype of the codes in kernels.
OPERATIONS: Final = {
    "uint8": Operations(_square_int4, _add_int4, _encode_int4),
    "int8": Operations(_square_int8, _add_int8, _encode_int8),
    "uint32": Operations(_square_int2, _add_int2, _encode_int2),
    "uint16": Operations(_square_bfloat16, _add_bfloat16, _encode_bfloat16),
    "float32": Operations(_square_float32, _add_float32, _encode_float32),
}


def _chosen(name: str) -> Any:
    """Returns an operation for kernels; Numba selects the codec by the codes' dtype."""
    like = getattr(OPERATIONS["float32"], name)

    @wraps(like)
    def stand_in(*_: Any) -> None:
        raise NotImplementedError

    @overload(stand_in)
    @wraps(like)
    def choose(*types: Any) -> Any:
        return getattr(OPERATIONS[str(types[2].dtype)], name)

    return stand_in


square, add, encode = map(_chosen, Operations._fields)
