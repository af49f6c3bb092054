"""Blockwise quantization: float32 arrays to codes and back, the same bits on every machine.

Shapes: N elements of a vector, B = N / block blocks; G any leading axes of an array of blocks.

`codecs.py` says what codes and scales are. Error feedback is in `send_and_adopt_kernels.py`.

Values have two forms. A vector is [N] with flat codes, as stored objects have it. An array of
blocks is [*G, block] with scales [*G] and codes [*G, items], for values that are sharded over
devices: no axis of G is ever merged or split, so each device encodes its own blocks in place.

Scales are rounded to nearest. Of int8 and int4, absmax / scale is then 7 or 127 times 1 +- 2^-8 at
most, and rounds to 7 or 127: no code is out of range, the error of a value is at most half a scale,
and encoding a decoded vector gives the same codes. int2 cuts values beyond 1.5 scales. NaN or
infinity anywhere in a block makes the block's scale NaN (with the float codecs: the values
themselves stay NaN or infinite), which receivers refuse.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco.common.protocol.codecs import (
    GREATEST_CODE,
    GREATEST_SCALE,
    GREATEST_VALUE,
    INT2_LEAST,
    INT2_MEANS,
    INT2_UNIT_BITS,
    LEAST_SCALE,
    Codec,
    Encoded,
    code_dtype,
)

_NAN_SCALE = 0x7FC0  # bits of a bfloat16
_ABS = 0x7FFFFFFF
_INFINITY = 0x7F800000
# Adding 1.5 x 2^23 to a small float32 rounds that number, half to even, into the low bits of the
# sum. The 8 is the bias of int4 codes. So one addition does all, without a conversion, whose result
# for NaN would depend on the machine.
_ROUND_INT4 = np.float32(1.5 * 2.0**23 + 8)
# The bits by which the 16 codes in an item of int2 are shifted.
_SHIFTS = 2 * np.arange(16, dtype=np.uint32)

Array = jax.Array | npt.NDArray[Any]
Combine = Callable[[jax.Array, jax.Array], jax.Array]


def encode(codec: Codec, values_N: Array, block: int) -> Encoded:
    """Returns the scales and codes of a vector, which may still be computing on the device.

    Args:
        codec: one of `CODECS`.
        values_N: float32 [N], where N is a multiple of `block`.
        block: the number of elements that share one scale, a power of two of at least 16.
    """
    (found,) = encode_blocks(codec, (values_N.reshape(-1, block),))
    return Encoded(found.scales.reshape(-1), found.codes.reshape(-1))


def encode_blocks(
    codec: Codec, new: tuple[Array, ...], old: tuple[Array, ...] | None = None
) -> tuple[Encoded, ...]:
    """Returns the scales and codes of arrays of blocks, or of the differences of such arrays.

    All arrays share the same kernels. The result equals that of `encode` for vectors bit for bit.

    Args:
        codec: one of `CODECS`.
        new: arrays of float32 [*G, block]; G and block may differ from array to array.
        old: for each array of `new`, the array to subtract, with as many elements; None: nothing is
            subtracted.
    """
    before = old or (None,) * len(new)
    if codec not in GREATEST_CODE:
        found: tuple[Encoded, ...] = _float_codes(new, before, codec=codec)
        return found
    rows = _magnitudes(new, before)
    if codec == "int2":
        blocks = tuple(values.shape[-1] for values in new)
        scales, inverse = _int2_scales(rows, _sums(new, before, rows), blocks=blocks)
    else:
        scales, inverse = _scales(rows, greatest=GREATEST_CODE[codec])
    codes = _codes(new, before, inverse, codec=codec)
    return tuple(map(Encoded, scales, codes))


@partial(jax.jit, static_argnames=("codec", "block"))
def decode_blocks(codec: Codec, encoded: Encoded, block: int) -> jax.Array:
    """Returns the values of an array of blocks: code x scale, exact; float32 [*G, block]."""
    codes = jnp.asarray(encoded.codes)
    if codec not in GREATEST_CODE:
        return codes.astype(jnp.float32)
    if codec == "int4":
        # Padding and not concatenation, which XLA on CPU goes through element by element.
        half = block // 2
        codes = (_pad(codes & 15, 0, half) | _pad(codes >> 4, half, 0)).astype(jnp.int32) - 8
    if codec == "int2":
        parts = (codes[..., None, :] >> _SHIFTS[:, None]) & 3
        codes = parts.reshape(*codes.shape[:-1], block).astype(jnp.int32) - 2
    return codes.astype(jnp.float32) * jnp.asarray(encoded.scales).astype(jnp.float32)[..., None]


def _lanes_of(block: int) -> int:
    """Returns the number of elements (lanes) to which kernels first reduce a block.

    By measurement it is the fastest.
    """
    return min(max(block // 8, 4), 16)


def _fold(rows: jax.Array, combine: Combine) -> jax.Array:
    """Reduces the lanes of each block, [*G, lanes], to one value, [*G]; called in a kernel."""
    lanes = rows.shape[-1]
    while lanes > 1:
        lanes //= 2
        rows = combine(rows[..., :lanes], rows[..., lanes:])
    return rows[..., 0]


def _reduce_to_lanes(values: jax.Array, combine: Combine, lanes: int) -> jax.Array:
    """Reduces each block of [*G, block] to a few lanes, [*G, lanes]; called in a kernel.

    `combine` must be a function of non-negative integers whose neutral element is 0. XLA on CPU
    reduces a row of memory one element after the other, but uses vector instructions to reduce
    several rows to one (here) and halves of a row to one (`_fold`). The two reductions must be in
    two kernels: fused with each other, or with the code that uses the result, they are slow again.
    """
    *groups, block = values.shape
    rows = values.reshape(*groups, block // lanes, lanes)
    axis = (len(groups),)
    reduced: jax.Array = jax.lax.reduce(rows, np.zeros((), values.dtype), combine, axis)
    return reduced


# The kernels below take and return tuples with an item for each array, so that several arrays need
# no more dispatches than one. Arrays are [*G, block].


def _pad(values: jax.Array, before: int, after: int) -> jax.Array:
    """Adds `before` zeros at the start of the last axis, and `after` zeros at its end."""
    widths = [(0, 0, 0)] * (values.ndim - 1) + [(before, after, 0)]
    return jax.lax.pad(values, np.zeros((), values.dtype), widths)


def _bits_of(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _float_of(bits: jax.Array) -> jax.Array:
    """Returns the float32 values that have these bits."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _differences(new: tuple[jax.Array, ...], old: tuple[jax.Array | None, ...]) -> list[jax.Array]:
    """Returns each array of `new` minus its counterpart in `old`, if that is not None."""
    return [a if b is None else a - b.reshape(a.shape) for a, b in zip(new, old, strict=True)]


@partial(jax.jit, static_argnames="codec")
def _float_codes(
    new: tuple[jax.Array, ...], old: tuple[jax.Array | None, ...], *, codec: Codec
) -> tuple[Encoded, ...]:
    """Returns the codes of the float codecs: the values in the codec's dtype, without scales.

    Finite values are clipped to +-`GREATEST_VALUE`; values below `LEAST_SCALE` become 0. NaN and
    infinity stay.
    """
    limit = np.float32(GREATEST_VALUE)
    encoded = []
    for values in _differences(new, old):
        clipped = jnp.where(jnp.isinf(values), values, jnp.clip(values, -limit, limit))
        small = jnp.abs(values) < np.float32(LEAST_SCALE)
        codes = jnp.where(small, np.float32(0), clipped).astype(code_dtype(codec))
        encoded.append(Encoded(jnp.zeros((*values.shape[:-1], 0), jnp.bfloat16), codes))
    return tuple(encoded)


@jax.jit
def _magnitudes(
    new: tuple[jax.Array, ...], old: tuple[jax.Array | None, ...]
) -> tuple[jax.Array, ...]:
    """Returns the bits of the greatest absolute values in each block, int32 [*G, lanes].

    The bits of non-negative floats, read as integers, have the order of the floats, with infinity
    and NaN as the greatest. So nothing depends on how a machine compares NaN or denormals.
    """
    return tuple(
        _reduce_to_lanes(_absolute_bits(values), jax.lax.max, _lanes_of(values.shape[-1]))
        for values in _differences(new, old)
    )


@partial(jax.jit, static_argnames="greatest")
def _scales(
    rows: tuple[jax.Array, ...], *, greatest: int
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns the scales of the blocks, bfloat16 [*G], and their reciprocals, float32 [*G]."""
    pairs = [_scale(_fold(each, jax.lax.max), greatest) for each in rows]
    return tuple(scales for scales, _ in pairs), tuple(inverse for _, inverse in pairs)


def _scale(absmax: jax.Array, greatest: int) -> tuple[jax.Array, jax.Array]:
    return _rounded_scale(absmax, _float_of(absmax) * np.float32(1 / greatest))


@jax.jit
def _sums(
    new: tuple[jax.Array, ...], old: tuple[jax.Array | None, ...], rows: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Returns the sums of each block's magnitudes in units of `_unit`, int32 [*G, lanes].

    Args:
        new: arrays of float32 [*G, block].
        old: the arrays to subtract, or None.
        rows: the result of `_magnitudes`.
    """
    found = []
    for values, each in zip(_differences(new, old), rows, strict=True):
        inverse = _float_of((254 << 23) - _unit(_fold(each, jax.lax.max)))
        units = (jnp.abs(values) * inverse[..., None]).astype(jnp.int32)
        found.append(_reduce_to_lanes(units, jax.lax.add, _lanes_of(values.shape[-1])))
    return tuple(found)


def _unit(absmax: jax.Array) -> jax.Array:
    """Returns the bits of the unit in which a block's magnitudes are added, a power of two."""
    least = np.float32(LEAST_SCALE).view(np.int32)
    return ((jnp.maximum(absmax, least) >> 23) - INT2_UNIT_BITS) << 23


@partial(jax.jit, static_argnames="blocks")
def _int2_scales(
    rows: tuple[jax.Array, ...], sums: tuple[jax.Array, ...], *, blocks: tuple[int, ...]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns the scales of int2, bfloat16 [*G], and their reciprocals, float32 [*G]."""
    pairs = []
    for each, units, block in zip(rows, sums, blocks, strict=True):
        absmax = _fold(each, jax.lax.max)
        # The sum is exact in float32: of at most 512 numbers below 2^15.
        whole = _fold(units, jax.lax.add).astype(jnp.float32)
        mean = whole * np.float32(INT2_MEANS / block) * _float_of(_unit(absmax))
        wanted = jnp.maximum(mean, _float_of(absmax) * np.float32(INT2_LEAST))
        pairs.append(_rounded_scale(absmax, wanted))
    return tuple(scales for scales, _ in pairs), tuple(inverse for _, inverse in pairs)


def _absolute_bits(values: jax.Array) -> jax.Array:
    """Returns the bits of absolute values as int32, which have the order of the values.

    Infinity and NaN are the greatest.
    """
    return _bits_of(values) & _ABS


def _rounded_scale(absmax: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the blocks' scales, bfloat16, and their reciprocals, float32.

    Args:
        absmax: the bits of each block's greatest absolute value.
        wanted: the scales before they are rounded, float32.
    """
    # Rounded in integers, since XLA may drop a conversion to bfloat16 and back.
    bits = _bits_of(jnp.clip(wanted, np.float32(LEAST_SCALE), np.float32(GREATEST_SCALE)))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    bits = jnp.where(absmax >= _INFINITY, _NAN_SCALE, bits)
    scales = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return scales, 1 / _float_of(bits << 16)


@partial(jax.jit, static_argnames="codec")
def _codes(
    new: tuple[jax.Array, ...],
    old: tuple[jax.Array | None, ...],
    inverse: tuple[jax.Array, ...],
    *,
    codec: Codec,
) -> tuple[jax.Array, ...]:
    """Returns the codes of the integer codecs, [*G, items]."""
    packed = {"int4": _codes_int4, "int2": _codes_int2}
    codes_of = packed.get(codec) or partial(_rounded, codec=codec)
    return tuple(
        codes_of(values * each[..., None])
        for values, each in zip(_differences(new, old), inverse, strict=True)
    )


def _codes_int4(quotients: jax.Array) -> jax.Array:
    """Packs each block's first half into low nibbles, its second half into high nibbles.

    Returns uint8 [*G, block / 2].
    """
    codes = _round_int4(quotients)
    half = quotients.shape[-1] // 2
    return (codes[..., :half] | (codes[..., half:] << 4)).astype(jnp.uint8)


def _round_int4(quotients: jax.Array) -> jax.Array:
    """Returns the codes of int4 as they are stored, with 8 added; int32."""
    # The clip is between product and sum, so that no machine fuses the two.
    return _bits_of(jnp.clip(quotients, -7, 7) + _ROUND_INT4) & 15


def _codes_int2(quotients: jax.Array) -> jax.Array:
    """Packs sixteen codes, which lie a sixteenth of a block apart; uint32 [*G, block / 16]."""
    *groups, block = quotients.shape
    finite = jnp.where(jnp.isnan(quotients), np.float32(0), jnp.clip(quotients, -1, 1))
    codes = (jnp.rint(finite) + 2).astype(jnp.uint32).reshape(*groups, 16, block // 16)
    packed: jax.Array = jnp.sum(codes << _SHIFTS[:, None], axis=-2, dtype=jnp.uint32)
    return packed


def _rounded(quotients: jax.Array, *, codec: Codec) -> jax.Array:
    """Returns each element's code, [*G, block]; 0 for NaN, whose block has the scale NaN."""
    most = GREATEST_CODE[codec]
    finite = jnp.where(jnp.isnan(quotients), np.float32(0), jnp.clip(quotients, -most, most))
    return jnp.rint(finite).astype(code_dtype(codec))
