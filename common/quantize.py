"""Blockwise quantization: float32 vectors to codes and back, the same bits on every machine.

Shapes: N elements, H = N / 2, B = N / block blocks.

A block of elements shares one bfloat16 scale within [2^-64, 2^40]; a value is code x scale. The
product of a code (7 bits) and a scale (8 bits) is exact in float32, and stays exact when a
bfloat16 coefficient multiplies it too, so fused and unfused arithmetic agree (DESIGN.md, "Same
bits everywhere"). What is smaller than half the least scale is sent as zero by every codec, so
that adding a decoded vector to a normal one never gives a denormal number, which some machines
flush and others keep.

    codec     codes                                           scale of a block
    int4      uint8 [H]: code + 8 in -7..7, two a byte        absmax / 7
    int8      int8 [N]: -127..127                             absmax / 127
    bfloat16  bfloat16 [N]: the rounded values                none
    float32   float32 [N]: the values                         none

Two planes: byte j of int4 holds element j in its low nibble and element j + H in its high nibble,
so that each half of the vector is contiguous for whoever adds to it.

Scales are rounded to nearest. absmax / scale is then within 1 +- 2^-8 of 7 or 127, which rounds
to 7 or 127: no code leaves its range, the error of a value is at most half a scale, and encoding
a decoded vector gives the same codes. NaN or infinity anywhere in a block makes its scale NaN
(its values, for the float codecs), which every receiver refuses.

Four bits are the least that train well: Decoupled DiLoCo (arXiv 2604.21428), Table 10.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

Codec = Literal["float32", "bfloat16", "int8", "int4"]
CODECS: Final[tuple[Codec, ...]] = ("float32", "bfloat16", "int8", "int4")
LEAST_SCALE: Final = 2.0**-64
GREATEST_SCALE: Final = 2.0**40
# The float codecs send no value that the widest integer codec could not.
GREATEST_VALUE: Final = 128 * GREATEST_SCALE
GREATEST_CODE: Final = {"int4": 7, "int8": 127}

_DTYPES: Final[dict[Codec, np.dtype[Any]]] = {
    "int4": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
_NAN_SCALE = 0x7FC0  # bits of a bfloat16
_ABS = 0x7FFFFFFF
_INFINITY = 0x7F800000
# Adding 1.5 x 2^23 to a small float32 rounds it, half to even, into the low bits of the sum; the
# bias of the nibble rides along. One addition, and no conversion that NaN could upset.
_ROUND_INT4 = np.float32(1.5 * 2.0**23 + 8)

Array = jax.Array | npt.NDArray[Any]


class Encoded(NamedTuple):
    """A quantized vector, in JAX or NumPy arrays.

    Attributes:
        scales: bfloat16 [B]; [0] for the float codecs.
        codes: uint8 [H] (int4), int8 [N], bfloat16 [N] or float32 [N].
    """

    scales: Any
    codes: Any


def code_dtype(codec: Codec) -> np.dtype[Any]:
    """NumPy's dtype of a codec's codes."""
    return _DTYPES[codec]


def code_count(codec: Codec, size: int) -> int:
    """Items in the codes of `size` elements."""
    return size // 2 if codec == "int4" else size


def scale_count(codec: Codec, size: int, block: int) -> int:
    """Items in the scales of `size` elements."""
    return size // block if codec in GREATEST_CODE else 0


def encoded_bytes(codec: Codec, size: int, block: int) -> int:
    """Bytes of the scales and codes of `size` elements."""
    scales_bytes = 2 * scale_count(codec, size, block)
    return scales_bytes + code_count(codec, size) * code_dtype(codec).itemsize


@partial(jax.jit, static_argnames=("codec", "block"))
def encode(codec: Codec, values_N: Array, block: int) -> Encoded:
    """Quantize a vector.

    Args:
        codec: one of `CODECS`; static.
        values_N: float32 [N], N a multiple of two blocks.
        block: elements that share one scale, a power of two of at least 16; static.
    """
    values_N = jnp.asarray(values_N)
    if codec not in GREATEST_CODE:
        values_N = _in_range(values_N)
        codes_N = values_N.astype(jnp.bfloat16) if codec == "bfloat16" else values_N
        return Encoded(jnp.zeros(0, jnp.bfloat16), codes_N)
    greatest = GREATEST_CODE[codec]
    bits_B = _scale_bits(_absmax_bits(values_N, block), greatest)
    scales_B = jax.lax.bitcast_convert_type(bits_B.astype(jnp.uint16), jnp.bfloat16)
    # The barrier has each reciprocal divided once, not once for each element of its block.
    inverse_B = _barrier(1 / _float_of(bits_B << 16))
    pack = _codes_int4 if codec == "int4" else _codes_int8
    return Encoded(scales_B, pack(values_N, inverse_B, block))


@partial(jax.jit, static_argnames=("codec", "block"))
def encode_difference(codec: Codec, new_N: Array, old_N: Array, block: int) -> Encoded:
    """Quantize `new_N - old_N`, without a vector for the difference outside of the kernel."""
    encoded: Encoded = encode(codec, jnp.asarray(new_N) - jnp.asarray(old_N), block)
    return encoded


@partial(jax.jit, static_argnames=("codec", "block"))
def decode(codec: Codec, encoded: Encoded, block: int) -> jax.Array:
    """Values of `encoded`: the exact products of code and scale, float32 [N]."""
    codes = jnp.asarray(encoded.codes)
    if codec not in GREATEST_CODE:
        return codes.astype(jnp.float32)
    scales_B = jnp.asarray(encoded.scales).astype(jnp.float32)
    if codec == "int8":
        return (codes.reshape(-1, block) * scales_B[:, None]).reshape(-1)
    planes_2xH = codes[None, :] >> jnp.asarray([[0], [4]], jnp.uint8)
    codes_2xBxb = ((planes_2xH & 15).astype(jnp.int32) - 8).reshape(2, -1, block)
    return (codes_2xBxb.astype(jnp.float32) * scales_B.reshape(2, -1, 1)).reshape(-1)


def decode_numpy(codec: Codec, encoded: Encoded, block: int) -> npt.NDArray[np.float32]:
    """Same as `decode`, bit for bit, without JAX; float32 [N]."""
    codes = np.asarray(encoded.codes)
    if codec not in GREATEST_CODE:
        return codes.astype(np.float32)
    if codec == "int4":
        codes = np.concatenate([codes & 15, codes >> 4]).astype(np.int8) - np.int8(8)
    values_Bxb = codes.reshape(-1, block).astype(np.float32)
    values_Bxb *= np.asarray(encoded.scales).astype(np.float32)[:, None]
    return values_Bxb.reshape(-1)


def canonical(values_N: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A copy with denormal numbers set to zero, as views must be: machines differ on them."""
    return np.where(np.abs(values_N) < np.finfo(np.float32).tiny, np.float32(0), values_N)


def _barrier(values: jax.Array) -> jax.Array:
    """The same values, computed before and apart from whatever uses them."""
    kept: jax.Array = jax.lax.optimization_barrier(values)  # type: ignore[no-untyped-call]
    return kept


def _bits_of(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _float_of(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _in_range(values_N: jax.Array) -> jax.Array:
    """Zero for what is too small, the greatest value for what is too large; NaN and inf stay."""
    limit = np.float32(GREATEST_VALUE)
    clipped_N = jnp.where(jnp.isinf(values_N), values_N, jnp.clip(values_N, -limit, limit))
    return jnp.where(jnp.abs(values_N) < np.float32(LEAST_SCALE), np.float32(0), clipped_N)


def _absmax_bits(values_N: jax.Array, block: int) -> jax.Array:
    """Bits of the greatest absolute value of each block, int32 [B].

    Bits of non-negative floats order as integers do, with infinity and NaN on top, so nothing
    depends on how a machine compares NaN or denormals.
    """
    return _reduce_blocks(jnp.maximum, _bits_of(values_N) & _ABS, block)


def block_sums(values_N: jax.Array, block: int) -> jax.Array:
    """Sum of each block, [B] of the same dtype; traced into the caller's kernel."""
    return _reduce_blocks(jnp.add, values_N, block)


def _reduce_blocks(
    combine: Callable[[jax.Array, jax.Array], jax.Array], values_N: jax.Array, block: int
) -> jax.Array:
    """Reduce each block of a vector to one value.

    XLA reduces a row of memory one element after the other; halving rows of lanes is vectorized.
    """
    lanes = 16
    rows = values_N.reshape(-1, block // lanes, lanes)
    folded = reduce(combine, [rows[:, row] for row in range(block // lanes)])
    folded = _barrier(folded)
    while lanes > 1:
        lanes //= 2
        folded = combine(folded[:, :lanes], folded[:, lanes:])
    return _barrier(folded.reshape(-1))


def _scale_bits(absmax_B: jax.Array, greatest: int) -> jax.Array:
    """Bits of the bfloat16 scale of each block, int32 [B].

    Rounded in integers: XLA may drop a conversion to bfloat16 and back.
    """
    wanted_B = _float_of(absmax_B) * np.float32(1 / greatest)
    bits_B = _bits_of(jnp.clip(wanted_B, np.float32(LEAST_SCALE), np.float32(GREATEST_SCALE)))
    bits_B = (bits_B + 0x7FFF + ((bits_B >> 16) & 1)) >> 16
    return jnp.where(absmax_B >= _INFINITY, _NAN_SCALE, bits_B)


def _codes_int4(values_N: jax.Array, inverse_B: jax.Array, block: int) -> jax.Array:
    half = values_N.shape[0] // 2
    blocks = half // block

    def rounded(values_H: jax.Array, inverse: jax.Array) -> jax.Array:
        # The clip also stands between product and sum, so that no machine fuses them.
        quotients = jnp.clip(values_H.reshape(-1, block) * inverse[:, None], -7, 7)
        return _bits_of(quotients + _ROUND_INT4) & 15

    low = rounded(values_N[:half], inverse_B[:blocks])
    high = rounded(values_N[half:], inverse_B[blocks:])
    return (low | (high << 4)).astype(jnp.uint8).reshape(-1)


def _codes_int8(values_N: jax.Array, inverse_B: jax.Array, block: int) -> jax.Array:
    quotients = jnp.clip(values_N.reshape(-1, block) * inverse_B[:, None], -127, 127)
    finite = jnp.where(jnp.isnan(quotients), np.float32(0), quotients)
    return jnp.rint(finite).astype(jnp.int8).reshape(-1)
