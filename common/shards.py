"""The bytes of one object: part of a quantized vector, self-describing and checked when read.

A shard covers the elements [start, stop) of a fragment's vector, both multiples of a block. Blocks
stand by themselves (`quantize.py`), so no reader needs another shard, and it is the same whether
the vector is cut before it is encoded or its scales and codes after.

    offset  size  field (little endian)
    0       4     magic "DLS2"
    4       1     codec: 1 float32, 2 bfloat16, 3 int8, 4 int4
    5       1     zero
    6       2     block: elements that share a scale
    8       8     count: elements
    16            scales: bfloat16 [count / block]; none for float32 and bfloat16
                  codes: see `quantize.py`

In CPython the payload of a large `bytes` object begins 48 bytes after a page, so what follows the
header is aligned to 64 and reaches JAX without a copy.
"""

import struct
from typing import Any, Final

import google_crc32c
import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from common.errors import WireError
from common.quantize import (
    GREATEST_SCALE,
    GREATEST_VALUE,
    LEAST_SCALE,
    Codec,
    Encoded,
    code_count,
    code_dtype,
    encoded_bytes,
    scale_count,
)

HEADER: Final = struct.Struct("<4sBBHQ")
MAGIC: Final = b"DLS2"
_CODEC_IDS: Final[dict[Codec, int]] = {"float32": 1, "bfloat16": 2, "int8": 3, "int4": 4}
# Elements of a chunk that the checks look at, so that their temporaries stay in cache.
_CHUNK: Final = 1 << 18


def shard_bytes(codec: Codec, count: int, block: int) -> int:
    """Size of the object that holds `count` elements."""
    return HEADER.size + encoded_bytes(codec, count, block)


def shard_ranges(size: int, block: int, shard_elements: int) -> list[tuple[int, int]]:
    """Cut a vector of `size` elements into [start, stop) ranges of at most `shard_elements`.

    All but the last are equally long, so that one compiled kernel serves them; a range is at
    least one block.
    """
    length = max(shard_elements // block, 1) * block
    return [(start, min(start + length, size)) for start in range(0, size, length)]


def pack(codec: Codec, encoded: Encoded, block: int) -> bytes:
    """Bytes of one shard, by one copy of its scales and codes."""
    scales = np.ascontiguousarray(encoded.scales)
    codes = np.ascontiguousarray(encoded.codes)
    count = codes.size * (2 if codec == "int4" else 1)
    header = HEADER.pack(MAGIC, _CODEC_IDS[codec], 0, block, count)
    return b"".join([header, scales.view(np.uint8).data, codes.view(np.uint8).data])


def unpack(data: bytes | memoryview, *, codec: Codec, count: int, block: int) -> Encoded:
    """Views of a shard's scales and codes, checked; nothing is copied.

    Args:
        data: an object of a peer's.
        codec: what its manifest says.
        count: elements it covers.
        block: the layout's.

    Raises:
        WireError: "truncated", "oversize", "bad_magic", "codec_mismatch" (codec, block or count),
            "bad_scale" (not finite or out of range), "non_finite" (a value of a float codec), or
            "bad_code" (a code that no encoder gives).
    """
    _check_size(data, shard_bytes(codec, count, block))
    _check_header(data, codec, count, block)
    scales = scale_count(codec, count, block)
    encoded = Encoded(
        np.frombuffer(data, ml_dtypes.bfloat16, scales, HEADER.size),
        np.frombuffer(data, code_dtype(codec), code_count(codec, count), HEADER.size + 2 * scales),
    )
    _check_scales(encoded.scales)
    _check_codes(codec, encoded.codes)
    return encoded


def crc32c(data: bytes | memoryview) -> int:
    """Castagnoli checksum, as object stores compute it."""
    return int(google_crc32c.value(bytes(data) if isinstance(data, memoryview) else data))


def digest(data: npt.NDArray[Any] | bytes) -> str:
    """xxh3-128 of the bytes, as 32 hex digits."""
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data)
    return str(xxhash.xxh3_128_hexdigest(raw.reshape(-1).view(np.uint8).data))


def _check_size(data: bytes | memoryview, expected: int) -> None:
    if len(data) < expected:
        raise WireError("truncated", f"a shard of {expected} bytes came with {len(data)}")
    if len(data) > expected:
        raise WireError("oversize", f"a shard of {expected} bytes came with {len(data)}")


def _check_header(data: bytes | memoryview, codec: Codec, count: int, block: int) -> None:
    magic, *fields = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError("bad_magic", f"a shard begins with {MAGIC!r}, this one with {magic!r}")
    expected = [_CODEC_IDS[codec], 0, block, count]
    if fields != expected:
        raise WireError(
            "codec_mismatch",
            f"codec, 0, block, count of the shard are {fields}, of its manifest {expected}",
        )


def _check_scales(scales_B: npt.NDArray[Any]) -> None:
    if not scales_B.size:
        return
    # Bits of positive bfloat16s order as integers do; a sign, infinity and NaN are above them.
    bits_B = scales_B.view(np.uint16)
    least, greatest = (
        int(np.asarray(bound, ml_dtypes.bfloat16).view(np.uint16))
        for bound in (LEAST_SCALE, GREATEST_SCALE)
    )
    if bits_B.min() < least or bits_B.max() > greatest:
        raise WireError("bad_scale", "a block's scale is not within 2^-64 and 2^40")


def _check_codes(codec: Codec, codes: npt.NDArray[Any]) -> None:
    for start in range(0, codes.size, _CHUNK):
        chunk = codes[start : start + _CHUNK]
        if codec == "int4":
            bad = chunk.min() < 16 or np.bitwise_and(chunk, 15).min() == 0
        elif codec == "int8":
            bad = chunk.min() == -128
        else:
            bad = _check_values(chunk.astype(np.float32))
        if bad:
            raise WireError("bad_code", f"a code of the shard is none that {codec} gives")


def _check_values(values: npt.NDArray[np.float32]) -> bool:
    """Whether a value is too large or too small but not zero.

    Raises:
        WireError: a value is infinite or NaN.
    """
    magnitudes = np.abs(values)
    greatest = magnitudes.max()
    if not np.isfinite(greatest):
        raise WireError("non_finite", "a value of the shard is infinite or not a number")
    # Bits of zero less one wrap to the greatest integer.
    least_bits = (magnitudes.view(np.uint32) - np.uint32(1)).min()
    return bool(
        greatest > GREATEST_VALUE
        or least_bits < np.float32(LEAST_SCALE).view(np.uint32) - np.uint32(1)
    )
