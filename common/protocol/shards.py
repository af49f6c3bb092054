"""The bytes of a shard or a delta: part of a quantized vector, self-describing, checked when read.

A shard holds whole blocks of a fragment's vector; its manifest says which (`slices.py`). No block
depends on another (`quantize_and_pack.py`), so no reader needs another shard, and cutting a vector
before encoding gives the same bytes as cutting its scales and codes after.

    offset  size  field (little endian)
    0       4     magic "DLS2"
    4       1     number of the codec: `codecs.py`
    5       1     zero
    6       2     block: elements that share a scale
    8       8     count: elements
    16            scales: bfloat16 [count / block]; none for the float codecs
                  codes: see `codecs.py`

The delta of a version is one shard of the whole vector, followed by checksums for readers of parts
of it. Each chunk of 1024 blocks (the last may have fewer) has one:

    codes end     crc32c of the scales' bytes, then the codes' bytes of chunk 0; of chunk 1; ...
    4 before end  crc32c of the header, then the checksums of all chunks

In CPython the payload of a large `bytes` object begins 48 bytes after a page boundary, so the bytes
after the header are aligned to 64 and reach JAX without a copy.
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import google_crc32c
import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from diloco.common.protocol.codecs import (
    FORMS,
    GREATEST_SCALE,
    LEAST_SCALE,
    Codec,
    Encoded,
    check_codes,
    code_count,
    code_dtype,
    encoded_bytes,
    scale_count,
)
from diloco.common.protocol.errors import IntegrityError, ObjectRangeError, WireError
from diloco.common.protocol.reasons import Reason

HEADER: Final = struct.Struct("<4sBBHQ")
MAGIC: Final = b"DLS2"
CHUNK_BLOCKS: Final = 1024
# A gap between two wanted ranges that is shorter than this is read too: one request, not two.
GAP_BYTES: Final = 256 << 10
# The size of the pieces in which `Buffers` are stored and hashed.
PIECE_BYTES: Final = 1 << 20
_CHECKSUM: Final = np.dtype("<u4")

Read = Callable[[int, int], bytes]
Span = tuple[int, int]


def shard_bytes(codec: Codec, count: int, block: int) -> int:
    """Returns the size in bytes of a shard of `count` elements, header included."""
    return HEADER.size + encoded_bytes(codec, count, block)


def shard_ranges(size: int, block: int, shard_elements: int) -> list[tuple[int, int]]:
    """Cuts a vector of `size` elements into [start, stop) ranges of at most `shard_elements`.

    All ranges but the last are equally long, so that one compiled kernel serves them; a range has
    at least one block.
    """
    length = max(shard_elements // block, 1) * block
    return [(start, min(start + length, size)) for start in range(0, size, length)]


def delta_bytes(codec: Codec, count: int, block: int) -> int:
    """Returns the size in bytes of the delta of a vector of `count` elements."""
    return _DeltaForm(codec, count, block).size_bytes


def range_bytes(codec: Codec, count: int, block: int, blocks: npt.NDArray[np.int64]) -> int:
    """Returns how many bytes `read_blocks` reads for `blocks` of a vector of `count` elements."""
    form = _DeltaForm(codec, count, block)
    chunks = np.unique(blocks // CHUNK_BLOCKS).tolist()
    return sum(stop - start for start, stop in form.ranges_of(chunks)) if chunks else 0


def pack(codec: Codec, encoded: Encoded, block: int) -> bytes:
    """Returns the bytes of a shard with all of `encoded`; copies scales and codes once."""
    return b"".join(_pieces(codec, encoded, block))


def pack_delta(codec: Codec, encoded: Encoded, block: int) -> bytes:
    """Returns the bytes of a version's delta, checksums included; copies scales and codes once."""
    header, scales, codes = _pieces(codec, encoded, block)
    form = _DeltaForm(codec, HEADER.unpack(header)[-1], block)
    checksums = np.empty(form.chunks, _CHECKSUM)
    for chunk in range(form.chunks):
        (scales_start, scales_stop), (codes_start, codes_stop) = form.spans_of(chunk)
        checksums[chunk] = _chunk_checksum(
            bytes(scales[scales_start - form.scales_at : scales_stop - form.scales_at]),
            bytes(codes[codes_start - form.codes_at : codes_stop - form.codes_at]),
        )
    trailer = checksums.tobytes()
    own = crc32c(header + trailer).to_bytes(_CHECKSUM.itemsize, "little")
    return b"".join([header, scales, codes, trailer, own])


def unpack(data: bytes | memoryview, *, codec: Codec, count: int, block: int) -> Encoded:
    """Checks a shard and returns views of its scales and codes, without a copy.

    Args:
        data: the bytes of a peer's object.
        codec: the codec that the shard's manifest states.
        count: number of elements in the shard.
        block: the layout's block size.

    Raises:
        WireError: "truncated", "oversize", "bad_magic", "codec_mismatch" (codec, block or count),
            "bad_scale" (not finite or out of range), "non_finite" (a value of a float codec), or
            "bad_code" (a code that no encoder produces).
    """
    _check_size(data, shard_bytes(codec, count, block))
    _check_header(data, codec, count, block)
    scales = scale_count(codec, count, block)
    encoded = Encoded(
        np.frombuffer(data, ml_dtypes.bfloat16, scales, HEADER.size),
        np.frombuffer(data, code_dtype(codec), code_count(codec, count), HEADER.size + 2 * scales),
    )
    _check_scales(encoded.scales)
    check_codes(codec, encoded.codes)
    return encoded


def unpack_delta(data: bytes | memoryview, *, codec: Codec, count: int, block: int) -> Encoded:
    """Checks a delta as `unpack` does and returns views of its scales and codes, without a copy.

    The checksums at its end are not read: the caller has compared the checksum of the whole
    object with the one in the version's record.

    Raises:
        WireError: as `unpack`.
    """
    _check_size(data, delta_bytes(codec, count, block))
    shard = memoryview(data)[: shard_bytes(codec, count, block)]
    return unpack(shard, codec=codec, count=count, block=block)


def read_blocks(
    read: Read,
    *,
    codec: Codec,
    count: int,
    block: int,
    blocks: npt.NDArray[np.int64],
    read_checksums: Read | None = None,
) -> Encoded:
    """Reads some blocks of a version's delta, by a few ranges of its object, and checks them.

    Reads the chunks that hold the blocks, and short gaps between these chunks; the whole object if
    more than 3/4 of its chunks are needed. All bytes that were read are in memory at once.

    Args:
        read: returns the bytes [start, stop) of the object, like `ObjectStore.get_range`.
        codec: the codec of the run's deltas.
        count: number of elements of the vector.
        block: the layout's block size.
        blocks: int64 [n], ascending, within [0, count / block).
        read_checksums: like `read`, but of a source that is believed: reads the checksums, which
            all other bytes must fit. None: `read` reads them too.

    Returns:
        The n blocks one after another: scales bfloat16 [n], [0] for the float codecs; codes of
        n x block elements, flat.

    Raises:
        IntegrityError: the object is too short, has another codec, block or count, or its bytes do
            not fit its checksums.
        WireError: "bad_scale", "non_finite" or "bad_code", as `unpack`.
        DilocoError: as `read`.
    """
    form = _DeltaForm(codec, count, block)
    dtype, scaled = code_dtype(codec), form.scale_bytes > 0
    scales_n = np.empty(blocks.size if scaled else 0, ml_dtypes.bfloat16)
    codes_nxc = np.empty((blocks.size, code_count(codec, block)), dtype)
    chunks = np.unique(blocks // CHUNK_BLOCKS)
    for chunk, scales, codes in _read_chunks(read, read_checksums, form, chunks):
        first, last = np.searchsorted(blocks, [chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS])
        rows = blocks[first:last] - chunk * CHUNK_BLOCKS
        if scaled:
            scales_n[first:last] = np.frombuffer(scales, ml_dtypes.bfloat16)[rows]
        codes_nxc[first:last] = np.frombuffer(codes, dtype).reshape(-1, codes_nxc.shape[1])[rows]
    encoded = Encoded(scales_n, codes_nxc.reshape(-1))
    _check_scales(encoded.scales)
    check_codes(codec, encoded.codes)
    return encoded


class _DeltaForm:
    """Byte offsets of the parts of a delta's object."""

    def __init__(self, codec: Codec, count: int, block: int) -> None:
        self.header = HEADER.pack(MAGIC, FORMS[codec].number, 0, block, count)
        self.blocks = count // block
        self.chunks = -(-self.blocks // CHUNK_BLOCKS)
        self.scale_bytes = 2 * scale_count(codec, block, block)  # Per block, like code_bytes.
        self.code_bytes = code_count(codec, block) * code_dtype(codec).itemsize
        self.scales_at = HEADER.size
        self.codes_at = self.scales_at + self.blocks * self.scale_bytes
        self.checksums_at = self.codes_at + self.blocks * self.code_bytes
        self.size_bytes = self.checksums_at + (self.chunks + 1) * _CHECKSUM.itemsize

    def spans_of(self, chunk: int) -> tuple[Span, Span]:
        """Returns the byte spans of a chunk's scales and of its codes."""
        first = chunk * CHUNK_BLOCKS
        last = min(first + CHUNK_BLOCKS, self.blocks)
        return (
            (self.scales_at + first * self.scale_bytes, self.scales_at + last * self.scale_bytes),
            (self.codes_at + first * self.code_bytes, self.codes_at + last * self.code_bytes),
        )

    def ranges_of(self, chunks: list[int]) -> list[Span]:
        """Returns the byte ranges to read for `chunks` and all checksums, ascending."""
        if 4 * len(chunks) > 3 * self.chunks:
            return [(0, self.size_bytes)]
        scales, codes = zip(*map(self.spans_of, chunks), strict=True)
        checksums = (self.checksums_at, self.size_bytes)
        ranges: list[Span] = []
        for start, stop in (*(scales if self.scale_bytes else ()), *codes, checksums):
            if ranges and start - ranges[-1][1] < GAP_BYTES:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges


class _Ranges:
    """Byte ranges of an object, read when constructed.

    Raises:
        IntegrityError: the object is shorter than the ranges need.
    """

    def __init__(self, read: Read, spans: list[Span]) -> None:
        self._starts = [start for start, _ in spans]
        self._data = [self._read(read, *span) for span in spans]

    def bytes_of(self, span: Span) -> bytes:
        """Returns a copy of the bytes of a span, which lies within one of the ranges."""
        index = bisect_right(self._starts, span[0]) - 1
        start = self._starts[index]
        return self._data[index][span[0] - start : span[1] - start]

    @staticmethod
    def _read(read: Read, start: int, stop: int) -> bytes:
        try:
            data = read(start, stop)
        except ObjectRangeError as error:
            raise _damaged(error.message) from error
        if len(data) != stop - start:
            raise _damaged(f"bytes [{start}, {stop}) are {len(data)} bytes")
        return data


def _pieces(codec: Codec, encoded: Encoded, block: int) -> tuple[bytes, memoryview, memoryview]:
    """Returns the header, scales and codes of a shard."""
    scales = np.ascontiguousarray(encoded.scales)
    codes = np.ascontiguousarray(encoded.codes)
    form = FORMS[codec]
    header = HEADER.pack(MAGIC, form.number, 0, block, codes.size * form.elements)
    return header, scales.view(np.uint8).data, codes.view(np.uint8).data


def _chunk_checksum(scales: bytes, codes: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(scales), codes))


def _read_chunks(
    read: Read, read_checksums: Read | None, form: _DeltaForm, chunks: npt.NDArray[np.int64]
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields (number, scales, codes) of each chunk, once its bytes fit the chunk's checksum.

    Raises:
        IntegrityError: as `read_blocks`.
    """
    if not chunks.size:
        return
    spans, checksums_span = form.ranges_of(chunks.tolist()), (form.checksums_at, form.size_bytes)
    ranges = _Ranges(read, spans)
    believed = ranges if read_checksums is None else _Ranges(read_checksums, [checksums_span])
    trailer = believed.bytes_of(checksums_span)
    *_, own = checksums = np.frombuffer(trailer, _CHECKSUM)
    if crc32c(form.header + trailer[: -_CHECKSUM.itemsize]) != own:
        raise _damaged("its checksums are not those of a delta of this codec, block and count")
    for chunk in chunks.tolist():
        scales, codes = (ranges.bytes_of(span) for span in form.spans_of(chunk))
        if _chunk_checksum(scales, codes) != checksums[chunk]:
            raise _damaged(f"the blocks from {chunk * CHUNK_BLOCKS} on do not fit their checksum")
        yield chunk, scales, codes


def _damaged(what: str) -> IntegrityError:
    return IntegrityError(f"a version's delta: {what}", hint="runbooks/digest-mismatch.md")


def _check_size(data: bytes | memoryview, expected: int) -> None:
    if len(data) < expected:
        raise WireError(Reason.TRUNCATED, f"a shard of {expected} bytes came with {len(data)}")
    if len(data) > expected:
        raise WireError(Reason.OVERSIZE, f"a shard of {expected} bytes came with {len(data)}")


def _check_header(data: bytes | memoryview, codec: Codec, count: int, block: int) -> None:
    magic, *fields = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError(Reason.BAD_MAGIC, f"a shard begins with {MAGIC!r}, this one with {magic!r}")
    expected = [FORMS[codec].number, 0, block, count]
    if fields != expected:
        raise WireError(
            Reason.CODEC_MISMATCH,
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
        raise WireError(Reason.BAD_SCALE, "a block's scale is not within 2^-64 and 2^40")


# --- Bytes in several buffers, so that an object can be stored without joining them by a copy


class Buffers:
    """A sequence of buffers that stands for their joined bytes; the buffers must not change.

    Iterating yields pieces of at most `PIECE_BYTES` bytes; `bytes` returns a copy of all.

    Args:
        runs: the buffers, contiguous, of any format.
    """

    def __init__(self, *runs: bytes | memoryview) -> None:
        self._runs = tuple(memoryview(run).cast("B") for run in runs)

    def __len__(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def __iter__(self) -> Iterator[memoryview]:
        for run in self._runs:
            for start in range(0, run.nbytes, PIECE_BYTES):
                yield run[start : start + PIECE_BYTES]

    def __bytes__(self) -> bytes:
        return b"".join(self._runs)

    def __eq__(self, other: object) -> bool:
        """True if `other` holds the same bytes; they are compared piece by piece."""
        if not isinstance(other, bytes | memoryview | Buffers):
            return NotImplemented
        view, at = memoryview(bytes(other) if isinstance(other, Buffers) else other).cast("B"), 0
        if len(self) != view.nbytes:
            return False
        for piece in self:
            if view[at : at + piece.nbytes] != piece:
                return False
            at += piece.nbytes
        return True

    __hash__ = None  # type: ignore[assignment]

    def between(self, start: int, stop: int | None = None) -> "Buffers":
        """Returns the buffers from byte `start` on, to `stop` if that is given, without a copy."""
        found, stop = [], len(self) if stop is None else stop
        for run in self._runs:
            found.append(run[max(0, start) : max(0, stop)])
            start, stop = start - run.nbytes, stop - run.nbytes
        return Buffers(*found)


Data: TypeAlias = bytes | memoryview | Buffers


def parts_of(data: Data) -> Buffers:
    """Returns `data` as `Buffers`, a sequence of byte buffers, without a copy."""
    return data if isinstance(data, Buffers) else Buffers(data)


# --- Checksums


def crc32c(data: Data) -> int:
    """Returns the CRC-32C (Castagnoli) checksum of `data`, as object stores compute it."""
    if isinstance(data, bytes):
        return int(google_crc32c.value(data))
    value = 0
    for piece in parts_of(data):
        value = google_crc32c.extend(value, bytes(piece))  # It takes only `bytes`.
    return value


def digest(data: npt.NDArray[Any] | bytes | Buffers) -> str:
    """Returns xxh3-128 of the bytes, as 32 hex digits."""
    # Piece by piece, as a single call would hold the interpreter's lock until all is hashed.
    hashed = xxhash.xxh3_128()
    if isinstance(data, bytes):
        hashed.update(data)
    elif isinstance(data, Buffers):
        for piece in data:
            hashed.update(piece)
    else:
        hashed.update(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    return str(hashed.hexdigest())
