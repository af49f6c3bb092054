"""The codecs of quantized vectors: codes, scales, sizes, checks, and decoding with NumPy.

Nothing here needs JAX; `quantize_and_pack.py` encodes vectors, and decodes them on devices. `FORMS`
has a row for each codec, which docs/protocol.md shows; only `Codec` lists the codecs' names.

Shapes: N elements of a vector, B = N / block blocks; G any leading axes of an array of blocks.

A block of elements shares one bfloat16 scale within [2^-64, 2^40]; a value is code x scale. The
product of a code (7 bits) and a scale (8 bits) is exact in float32, and stays exact when it is
multiplied by a bfloat16 coefficient, so fused and unfused arithmetic agree
(docs/design/design.md, "Same bits everywhere"). Every codec sends values smaller than half the
least scale as zero. So adding a decoded vector to a normal one never gives a denormal number,
which some machines flush to zero and others keep.

Byte j of a block's int4 codes holds element j of the block in its low nibble and element j + b / 2
in its high nibble. A block's codes are whole bytes, so blocks can be cut out, reordered and joined
by copying bytes; and neighbouring elements of either half of a block come from neighbouring bytes.

int2 is ternary: its scale is about 1.5 mean magnitudes, which for normally distributed values has
nearly the least mean squared error, and values beyond it are cut; error feedback sends the rest
later (docs/adr/0109-two-bits.md). Item j of a block's codes holds elements j, j + b / 16, ...
"""

import math
from typing import Any, Final, Literal, NamedTuple, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.common.protocol.errors import WireError
from diloco.common.protocol.reasons import Reason

Codec = Literal["float32", "bfloat16", "int8", "int4", "int2"]
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)
LEAST_SCALE: Final = 2.0**-64
GREATEST_SCALE: Final = 2.0**40
# The float codecs send no value beyond the range of the widest integer codec.
GREATEST_VALUE: Final = 128 * GREATEST_SCALE
# The bits of the least scale, less one: in this order zero, which wraps, is the greatest integer.
_LEAST_BITS: Final = np.float32(LEAST_SCALE).view(np.uint32) - np.uint32(1)
# Elements that the checks read at a time, so that temporaries stay in cache.
_CHUNK: Final = 1 << 18


class Form(NamedTuple):
    """The form of a codec's codes and scales in a shard.

    Attributes:
        number: the codec's number in a shard's header.
        dtype: the codes' dtype.
        codes: a description of a block's codes, which docs/protocol.md prints.
        scale: a description of a block's scale, which docs/protocol.md prints.
        greatest: the greatest code; 0 for float codecs, whose blocks have no scale.
        elements: the number of elements in one item of the codes' array.
    """

    number: int
    dtype: np.dtype[Any]
    codes: str
    scale: str = "none"
    greatest: int = 0
    elements: int = 1


FORMS: Final[dict[Codec, Form]] = {
    "float32": Form(1, np.dtype(np.float32), "float32 [block]"),
    "bfloat16": Form(2, np.dtype(ml_dtypes.bfloat16), "bfloat16 [block], rounded to nearest"),
    "int8": Form(3, np.dtype(np.int8), "int8 [block], -127 to 127", "absmax / 127", greatest=127),
    "int4": Form(
        4,
        np.dtype(np.uint8),
        "uint8 [block / 2]. Byte j holds element j in the low and element j + block / 2 in the"
        " high nibble, as code + 8; codes are -7 to 7",
        "absmax / 7",
        greatest=7,
        elements=2,
    ),
    "int2": Form(
        5,
        np.dtype(np.uint32),
        "uint32 [block / 16]. Bits 2 k and 2 k + 1 of item j hold element j + k x block / 16, as"
        " code + 2; codes are -1, 0 and 1",
        "1.5 x the mean magnitude, or absmax / 4 if that is greater",
        greatest=1,
        elements=16,
    ),
}
# The scale of int2: so many mean magnitudes of a block, but at least this share of the greatest.
# The mean is of integers: each magnitude in units of 2^-14 of the greatest one's power of two,
# rounded down, so that the order of the sum does not matter.
INT2_MEANS: Final = 1.5
INT2_LEAST: Final = 0.25
INT2_UNIT_BITS: Final = 14
GREATEST_CODE: Final = {codec: form.greatest for codec, form in FORMS.items() if form.greatest}


class Encoded(NamedTuple):
    """A quantized vector or array of blocks, as JAX or NumPy arrays.

    Attributes:
        scales: bfloat16 [B] for a vector, [*G] for an array of blocks; float codecs have none, so
            the shape is [0] or [*G, 0].
        codes: items of `code_dtype`; [`code_count`] for a vector, [*G, items per block] for blocks.
    """

    scales: Any
    codes: Any


def code_dtype(codec: Codec) -> np.dtype[Any]:
    """Returns the NumPy dtype of a codec's codes."""
    return FORMS[codec].dtype


def code_count(codec: Codec, size: int) -> int:
    """Returns the number of array items that the codes of `size` elements take."""
    return size // FORMS[codec].elements


def scale_count(codec: Codec, size: int, block: int) -> int:
    """Returns the number of scales of `size` elements."""
    return size // block if codec in GREATEST_CODE else 0


def encoded_bytes(codec: Codec, size: int, block: int) -> int:
    """Returns the size in bytes of the scales and codes of `size` elements."""
    scales_bytes = 2 * scale_count(codec, size, block)
    return scales_bytes + code_count(codec, size) * code_dtype(codec).itemsize


def decode_numpy(codec: Codec, encoded: Encoded, block: int) -> npt.NDArray[np.float32]:
    """Decodes a quantized vector to float32 [N] without JAX.

    The result equals that of `decode_blocks` in `quantize_and_pack.py` bit for bit.

    Args:
        codec: the vector's codec.
        encoded: the vector's scales and codes.
        block: number of elements that share one scale.
    """
    codes = np.asarray(encoded.codes)
    if codec not in GREATEST_CODE:
        return codes.astype(np.float32)
    if codec == "int4":
        pairs_Bxh = codes.reshape(-1, block // 2)
        codes = np.concatenate([pairs_Bxh & 15, pairs_Bxh >> 4], axis=1).astype(np.int8)
        codes -= np.int8(8)
    if codec == "int2":
        items_Bxi = codes.reshape(-1, block // 16)
        parts = [(items_Bxi >> np.uint32(2 * k)) & 3 for k in range(16)]
        codes = np.concatenate(parts, axis=1).astype(np.int8) - np.int8(2)
    values_Bxb = codes.reshape(-1, block).astype(np.float32)
    values_Bxb *= np.asarray(encoded.scales).astype(np.float32)[:, None]
    return values_Bxb.reshape(-1)


def check_codes(codec: Codec, codes: npt.NDArray[Any]) -> None:
    """Refuses codes that no encoder produces.

    Raises:
        WireError: "bad_code": a code that no encoder produces; "non_finite": a value of a float
            codec is infinite or NaN.
    """
    for start in range(0, codes.size, _CHUNK):
        chunk = codes[start : start + _CHUNK]
        if codec == "int4":
            bad = chunk.min() < 16 or np.bitwise_and(chunk, 15).min() == 0
        elif codec == "int2":
            # A pair of bits is 0 if neither of them is set.
            bad = ((chunk | chunk >> np.uint32(1)) & 0x55555555).min() != 0x55555555
        elif codec in GREATEST_CODE:
            bad = chunk.min() < -GREATEST_CODE[codec] or chunk.max() > GREATEST_CODE[codec]
        else:
            bad = _check_values(chunk.astype(np.float32))
        if bad:
            raise WireError(Reason.BAD_CODE, f"a code of the shard is not a valid {codec} code")


def _check_values(values: npt.NDArray[np.float32]) -> bool:
    """True if a magnitude is greater than `GREATEST_VALUE`, or less than `LEAST_SCALE` and not 0.

    Raises:
        WireError: a value is infinite or NaN.
    """
    magnitudes = np.abs(values)
    greatest = magnitudes.max()
    if not math.isfinite(greatest):
        raise WireError(Reason.NON_FINITE, "a value of the shard is infinite or not a number")
    # The bits of zero, less one, wrap to the greatest integer.
    least_bits = (magnitudes.view(np.uint32) - np.uint32(1)).min()
    return bool(greatest > GREATEST_VALUE or least_bits < _LEAST_BITS)


def aligned_zeros(size: int) -> npt.NDArray[np.float32]:
    """Returns float32 zeros [size] at a 64-byte boundary, which JAX on CPU reads without a copy."""
    raw = np.zeros(size + 16, np.float32)
    start = -raw.ctypes.data % 64 // 4
    return raw[start : start + size]


def aligned_empty(size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns an uninitialized vector of `size` elements at a 64-byte boundary."""
    raw = np.empty(size * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * dtype.itemsize].view(dtype)


def canonical(values_N: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns a copy, float32 [N], with denormal numbers set to zero, as in every view.

    Some machines flush denormal numbers to zero, and others keep them.
    """
    return np.where(np.abs(values_N) < np.finfo(np.float32).tiny, np.float32(0), values_N)
