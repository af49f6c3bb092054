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
from functools import partial
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
Combine = Callable[[jax.Array, jax.Array], jax.Array]


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


def encode(codec: Codec, values_N: Array, block: int) -> Encoded:
    """Quantize a vector, in three compiled kernels that follow each other on the device.

    Args:
        codec: one of `CODECS`.
        values_N: float32 [N], N a multiple of two blocks.
        block: elements that share one scale, a power of two of at least 16.
    """
    return _encode(codec, values_N, None, block)


def encode_difference(codec: Codec, new_N: Array, old_N: Array, block: int) -> Encoded:
    """Same as `encode(codec, new_N - old_N, block)`; the difference is never stored."""
    return _encode(codec, new_N, old_N, block)


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


def aligned_zeros(size: int) -> npt.NDArray[np.float32]:
    """A vector at a 64-byte boundary, which JAX on CPU reads in place; NumPy's own are copied."""
    raw = np.zeros(size + 16, np.float32)
    start = -raw.ctypes.data % 64 // 4
    return raw[start : start + size]


def canonical(values_N: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A copy with denormal numbers set to zero, as views must be: machines differ on them."""
    return np.where(np.abs(values_N) < np.finfo(np.float32).tiny, np.float32(0), values_N)


def lanes_of(block: int) -> int:
    """Elements that the kernels first reduce a block to; the best measured."""
    return min(max(block // 8, 4), 16)


def fold(rows_BxL: jax.Array, combine: Combine) -> jax.Array:
    """Reduce the lanes of each block to one value, [B]; traced into the caller's kernel."""
    lanes = rows_BxL.shape[1]
    while lanes > 1:
        lanes //= 2
        rows_BxL = combine(rows_BxL[:, :lanes], rows_BxL[:, lanes:])
    return rows_BxL.reshape(-1)


def reduce_to_lanes(values_N: jax.Array, combine: Combine, block: int) -> jax.Array:
    """Reduce each block to a few lanes, [B, lanes]; traced into the caller's kernel.

    `combine` is over integers and leaves zero as it is. XLA on CPU reduces a row of memory one
    element after the other, but several rows to one, and halves of rows, in vectors. The two must
    be kernels of their own: fused into one, or into what uses them, they are slow again.
    """
    lanes = lanes_of(block)
    rows_BxRxL = values_N.reshape(-1, block // lanes, lanes)
    reduced: jax.Array = jax.lax.reduce(rows_BxRxL, np.zeros((), values_N.dtype), combine, (1,))
    return reduced


def _encode(codec: Codec, values_N: Array, less_N: Array | None, block: int) -> Encoded:
    if codec not in GREATEST_CODE:
        codes_N = _float_codes(values_N, less_N, codec=codec)
        return Encoded(jnp.zeros(0, jnp.bfloat16), codes_N)
    rows_BxL = _magnitudes(values_N, less_N, block=block)
    scales_B, inverse_B = _scales(rows_BxL, greatest=GREATEST_CODE[codec])
    pack = _codes_int4 if codec == "int4" else _codes_int8
    return Encoded(scales_B, pack(values_N, less_N, inverse_B, block=block))


def _bits_of(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _float_of(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _minus(values_N: jax.Array, less_N: jax.Array | None) -> jax.Array:
    return values_N if less_N is None else values_N - less_N


@partial(jax.jit, static_argnames="codec")
def _float_codes(values_N: jax.Array, less_N: jax.Array | None, *, codec: Codec) -> jax.Array:
    """Zero for what is too small, the greatest value for what is too large; NaN and inf stay."""
    values_N = _minus(values_N, less_N)
    limit = np.float32(GREATEST_VALUE)
    clipped_N = jnp.where(jnp.isinf(values_N), values_N, jnp.clip(values_N, -limit, limit))
    small_N = jnp.abs(values_N) < np.float32(LEAST_SCALE)
    return jnp.where(small_N, np.float32(0), clipped_N).astype(code_dtype(codec))


@partial(jax.jit, static_argnames="block")
def _magnitudes(values_N: jax.Array, less_N: jax.Array | None, *, block: int) -> jax.Array:
    """Bits of the greatest absolute values in each block, int32 [B, lanes].

    Bits of non-negative floats order as integers do, with infinity and NaN on top, so nothing
    depends on how a machine compares NaN or denormals.
    """
    bits_N = _bits_of(_minus(values_N, less_N)) & _ABS
    return reduce_to_lanes(bits_N, jax.lax.max, block)


@partial(jax.jit, static_argnames="greatest")
def _scales(rows_BxL: jax.Array, *, greatest: int) -> tuple[jax.Array, jax.Array]:
    """Scale of each block, bfloat16 [B], and its reciprocal, float32 [B].

    Rounded in integers: XLA may drop a conversion to bfloat16 and back.
    """
    absmax_B = fold(rows_BxL, jax.lax.max)
    wanted_B = _float_of(absmax_B) * np.float32(1 / greatest)
    bits_B = _bits_of(jnp.clip(wanted_B, np.float32(LEAST_SCALE), np.float32(GREATEST_SCALE)))
    bits_B = (bits_B + 0x7FFF + ((bits_B >> 16) & 1)) >> 16
    bits_B = jnp.where(absmax_B >= _INFINITY, _NAN_SCALE, bits_B)
    scales_B = jax.lax.bitcast_convert_type(bits_B.astype(jnp.uint16), jnp.bfloat16)
    return scales_B, 1 / _float_of(bits_B << 16)


@partial(jax.jit, static_argnames="block")
def _codes_int4(
    values_N: jax.Array, less_N: jax.Array | None, inverse_B: jax.Array, *, block: int
) -> jax.Array:
    """Codes of both halves, low nibbles and high; uint8 [H]."""
    values_N = _minus(values_N, less_N)
    half, blocks = values_N.shape[0] // 2, inverse_B.shape[0] // 2

    def rounded(values_H: jax.Array, inverse: jax.Array) -> jax.Array:
        # The clip also stands between product and sum, so that no machine fuses them.
        quotients = jnp.clip(values_H.reshape(-1, block) * inverse[:, None], -7, 7)
        return _bits_of(quotients + _ROUND_INT4) & 15

    low = rounded(values_N[:half], inverse_B[:blocks])
    high = rounded(values_N[half:], inverse_B[blocks:])
    return (low | (high << 4)).astype(jnp.uint8).reshape(-1)


@partial(jax.jit, static_argnames="block")
def _codes_int8(
    values_N: jax.Array, less_N: jax.Array | None, inverse_B: jax.Array, *, block: int
) -> jax.Array:
    """Codes, int8 [N]; 0 for NaN, whose block has no valid scale anyway."""
    quotients = _minus(values_N, less_N).reshape(-1, block) * inverse_B[:, None]
    finite = jnp.where(jnp.isnan(quotients), np.float32(0), jnp.clip(quotients, -127, 127))
    return jnp.rint(finite).astype(jnp.int8).reshape(-1)
