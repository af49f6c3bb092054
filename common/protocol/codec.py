"""What a quantized vector is: codecs, their codes and scales, sizes, and decoding with NumPy.

Nothing here needs JAX; `quantize.py` encodes, and decodes on devices.

Shapes: N elements of a vector, B = N / block blocks; G any leading axes of an array of blocks.

A block of elements shares one bfloat16 scale within [2^-64, 2^40]; a value is code x scale. The
product of a code (7 bits) and a scale (8 bits) is exact in float32, and stays exact when a
bfloat16 coefficient multiplies it too, so fused and unfused arithmetic agree
(docs/design/design.md, "Same bits everywhere"). What is smaller than half the least scale is sent
as zero by every codec, so that adding a decoded vector to a normal one never gives a denormal
number, which some machines flush and others keep.

    codec     codes of a block of b elements                  its scale
    int4      uint8 [b / 2]: code + 8 in -7..7, two a byte    absmax / 7
    int8      int8 [b]: -127..127                             absmax / 127
    bfloat16  bfloat16 [b]: the rounded values                none
    float32   float32 [b]: the values                         none

Byte j of a block's int4 codes holds its element j in the low and its element j + b / 2 in the high
nibble. So a block stands by itself: codes of any blocks can be cut out, put in another order and
put together by copying bytes; and what adds to a vector finds neighbours in neighbouring bytes.

Four bits are the least that train well: Decoupled DiLoCo (arXiv 2604.21428), Table 10.
"""

from typing import Any, Final, Literal, NamedTuple

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


class Encoded(NamedTuple):
    """A quantized vector or array of blocks, in JAX or NumPy arrays.

    Attributes:
        scales: bfloat16 [B], [0] for the float codecs; of blocks [*G], and [*G, 0].
        codes: items of `code_dtype`, [`code_count`]; of blocks [*G, items of a block].
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


def decode_numpy(codec: Codec, encoded: Encoded, block: int) -> npt.NDArray[np.float32]:
    """Same as `decode`, bit for bit, without JAX; float32 [N]."""
    codes = np.asarray(encoded.codes)
    if codec not in GREATEST_CODE:
        return codes.astype(np.float32)
    if codec == "int4":
        pairs_Bxh = codes.reshape(-1, block // 2)
        codes = np.concatenate([pairs_Bxh & 15, pairs_Bxh >> 4], axis=1).astype(np.int8)
        codes -= np.int8(8)
    values_Bxb = codes.reshape(-1, block).astype(np.float32)
    values_Bxb *= np.asarray(encoded.scales).astype(np.float32)[:, None]
    return values_Bxb.reshape(-1)


def aligned_zeros(size: int) -> npt.NDArray[np.float32]:
    """A vector at a 64-byte boundary, which JAX on CPU reads in place; NumPy's own are copied."""
    raw = np.zeros(size + 16, np.float32)
    start = -raw.ctypes.data % 64 // 4
    return raw[start : start + size]


def aligned_empty(size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """As `aligned_zeros`, of any type and any content."""
    raw = np.empty(size * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * dtype.itemsize].view(dtype)


def canonical(values_N: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A copy with denormal numbers set to zero, as views must be: machines differ on them."""
    return np.where(np.abs(values_N) < np.finfo(np.float32).tiny, np.float32(0), values_N)
