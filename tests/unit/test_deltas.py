"""Deltas of versions: read whole or in parts, they say the same, and damage is noticed."""

from functools import cache, partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.common.protocol.codecs import CODECS, GREATEST_CODE, Codec, Encoded, decode_numpy
from diloco.common.protocol.errors import IntegrityError, ObjectMissingError, WireError
from diloco.common.protocol.shards import (
    CHUNK_BLOCKS,
    GAP_BYTES,
    HEADER,
    crc32c,
    delta_bytes,
    pack,
    pack_delta,
    read_blocks,
    unpack_delta,
)
from diloco.common.storage.store import MemoryStore
from diloco.learner.tensors.quantize_and_pack import encode

BLOCK = 16
BLOCKS = 9 * CHUNK_BLOCKS + 6  # The last chunk is short.
codecs = st.sampled_from(CODECS)
block_sets = st.lists(
    st.one_of(st.integers(0, BLOCKS - 1), st.integers(BLOCKS - 6, BLOCKS - 1)), max_size=40
).map(lambda found: np.unique(np.asarray(found, np.int64)))


@cache
def delta(codec: Codec, blocks: int = BLOCKS) -> tuple[Encoded, bytes]:
    values = np.random.default_rng(0).standard_normal(blocks * BLOCK).astype(np.float32)
    encoded = encode(codec, values, BLOCK)
    return encoded, pack_delta(codec, encoded, BLOCK)


def read(data: bytes, codec: Codec, blocks: np.ndarray) -> Encoded:
    store = MemoryStore()
    store.put("delta", data)
    return read_blocks(
        partial(store.get_range, "delta"),
        codec=codec,
        count=BLOCKS * BLOCK,
        block=BLOCK,
        blocks=blocks,
    )


def rows(encoded: Encoded, blocks: np.ndarray) -> Encoded:
    """Blocks of a whole vector."""
    scales, codes = np.asarray(encoded.scales), np.asarray(encoded.codes)
    return Encoded(scales[blocks] if scales.size else scales, codes.reshape(BLOCKS, -1)[blocks])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("blocks", [1, CHUNK_BLOCKS, CHUNK_BLOCKS + 1, BLOCKS])
def test_a_delta_is_a_shard_with_checksums_at_its_end(codec, blocks):
    encoded, data = delta(codec, blocks)
    shard = pack(codec, encoded, BLOCK)
    assert len(data) == delta_bytes(codec, blocks * BLOCK, BLOCK)
    assert data[: len(shard)] == shard
    *chunks, own = np.frombuffer(data[len(shard) :], "<u4").tolist()
    scales, codes = np.asarray(encoded.scales), np.asarray(encoded.codes).reshape(blocks, -1)
    assert chunks == [
        crc32c(
            scales[start : start + CHUNK_BLOCKS].tobytes()
            + codes[start : start + CHUNK_BLOCKS].tobytes()
        )
        for start in range(0, blocks, CHUNK_BLOCKS)
    ]
    assert own == crc32c(shard[: HEADER.size] + data[len(shard) : -4])


@pytest.mark.parametrize("codec", CODECS)
def test_a_whole_delta_comes_back_without_a_copy(codec):
    encoded, data = delta(codec)
    again = unpack_delta(data, codec=codec, count=BLOCKS * BLOCK, block=BLOCK)
    assert again.scales.tobytes() == np.asarray(encoded.scales).tobytes()
    assert again.codes.tobytes() == np.asarray(encoded.codes).tobytes()
    address = np.frombuffer(data, np.uint8).ctypes.data
    assert again.codes.ctypes.data == address + HEADER.size + again.scales.nbytes


@pytest.mark.parametrize("codec", CODECS)
def test_a_shard_is_no_delta(codec):
    encoded, data = delta(codec)
    for other, reason in (
        (pack(codec, encoded, BLOCK), "truncated"),
        (data[:-1], "truncated"),
        (data + b"\0", "oversize"),
        (b"DLS1" + data[4:], "bad_magic"),
    ):
        with pytest.raises(WireError) as caught:
            unpack_delta(other, codec=codec, count=BLOCKS * BLOCK, block=BLOCK)
        assert caught.value.reason == reason


@settings(max_examples=80)
@given(codecs, block_sets)
def test_parts_of_a_delta_are_those_of_the_whole(codec, blocks):
    encoded, data = delta(codec)
    part, expected = read(data, codec, blocks), rows(encoded, blocks)
    assert part.scales.tobytes() == expected.scales.tobytes()
    assert part.codes.tobytes() == expected.codes.tobytes()
    assert (part.scales.dtype, part.codes.dtype) == (expected.scales.dtype, expected.codes.dtype)
    assert part.codes.ndim == 1


@settings(max_examples=40)
@given(codecs, block_sets)
def test_parts_of_a_delta_decode_to_parts_of_the_vector(codec, blocks):
    encoded, data = delta(codec)
    whole_BxL = decode_numpy(codec, encoded, BLOCK).reshape(-1, BLOCK)
    part = decode_numpy(codec, read(data, codec, blocks), BLOCK)
    assert part.tobytes() == whole_BxL[blocks].tobytes()


@settings(max_examples=150)
@given(codecs, block_sets.filter(len), st.data())
def test_a_byte_that_was_damaged_is_noticed_by_whoever_uses_it(codec, blocks, data):
    _, right = delta(codec)
    first = data.draw(st.sampled_from(blocks.tolist())) // CHUNK_BLOCKS * CHUNK_BLOCKS
    last = min(first + CHUNK_BLOCKS, BLOCKS)
    scales_at, codes_at, checksums_at = HEADER.size, *starts(codec)
    scale, code = (codes_at - scales_at) // BLOCKS, (checksums_at - codes_at) // BLOCKS
    used = [
        range(scales_at + first * scale, scales_at + last * scale),
        range(codes_at + first * code, codes_at + last * code),
        range(checksums_at, len(right)),
    ]
    place = data.draw(st.sampled_from([part for part in used if part]))
    wrong = bytearray(right)
    wrong[data.draw(st.sampled_from(place))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IntegrityError, match="checksum"):
        read(bytes(wrong), codec, blocks)


def starts(codec: Codec) -> tuple[int, int]:
    """Of codes and of checksums."""
    scales, codes = (np.asarray(part).nbytes for part in delta(codec)[0])
    return HEADER.size + scales, HEADER.size + scales + codes


@pytest.mark.parametrize("codec", CODECS)
def test_damage_elsewhere_is_no_concern(codec):
    encoded, right = delta(codec)
    wrong = bytearray(right)
    wrong[starts(codec)[0]] ^= 1  # Of block 0.
    blocks = np.asarray([CHUNK_BLOCKS, BLOCKS - 1])
    part = read(bytes(wrong), codec, blocks)
    assert part.codes.tobytes() == rows(encoded, blocks).codes.tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("blocks", [[0], [5, BLOCKS - 1], [*range(BLOCKS)]])
def test_an_object_of_another_kind_is_noticed(codec, blocks):
    encoded, right = delta(codec)
    wanted = np.asarray(blocks)
    for other in (right[:-1], pack(codec, encoded, BLOCK), b""):
        with pytest.raises(IntegrityError) as caught:
            read(other, codec, wanted)
        assert "digest-mismatch" in (caught.value.hint or "")
    for wrong in set(CODECS) - {codec}:
        with pytest.raises(IntegrityError):
            read(right, wrong, wanted)


def test_a_store_that_has_no_such_object_says_so():
    with pytest.raises(ObjectMissingError):
        read_blocks(
            partial(MemoryStore().get_range, "o"),
            codec="int4",
            count=BLOCKS * BLOCK,
            block=BLOCK,
            blocks=np.asarray([3]),
        )


@pytest.mark.parametrize("codec", CODECS)
def test_what_no_encoder_gives_is_refused_also_in_parts(codec):
    encoded, _ = delta(codec)
    scales, codes = (np.array(part) for part in encoded)
    (scales if codec in GREATEST_CODE else codes)[20] = np.nan
    wrong = pack_delta(codec, Encoded(scales, codes), BLOCK)
    place = 20 if codec in GREATEST_CODE else 20 // BLOCK
    with pytest.raises(WireError) as caught:
        read(wrong, codec, np.asarray([place]))
    assert caught.value.reason == ("bad_scale" if codec in GREATEST_CODE else "non_finite")
    read(wrong, codec, np.asarray([place + 1]))


@pytest.mark.parametrize(("codec", "code"), [("int4", 0x08), ("int8", -128)])
def test_codes_that_no_encoder_gives_are_refused_also_in_parts(codec, code):
    encoded, _ = delta(codec)
    codes = np.array(encoded.codes)
    codes[-1] = code
    with pytest.raises(WireError) as caught:
        read(
            pack_delta(codec, encoded._replace(codes=codes), BLOCK), codec, np.asarray([BLOCKS - 1])
        )
    assert caught.value.reason == "bad_code"


# --- Which ranges are read


WIDE = 256  # A chunk of int4 codes is then half as long as the least gap that is not read through.
CHUNKS = 12
CHUNK_BYTES = CHUNK_BLOCKS * WIDE // 2
CODES_AT = HEADER.size + 2 * CHUNKS * CHUNK_BLOCKS
CHECKSUMS_AT = CODES_AT + CHUNKS * CHUNK_BYTES
SIZE = CHECKSUMS_AT + 4 * (CHUNKS + 1)


@cache
def wide() -> bytes:
    blocks = CHUNKS * CHUNK_BLOCKS
    scales = np.ones(blocks, ml_dtypes.bfloat16)
    return pack_delta("int4", Encoded(scales, np.full(blocks * WIDE // 2, 0x99, np.uint8)), WIDE)


def scales_of(first: int, last: int) -> tuple[int, int]:
    return HEADER.size + 2 * first * CHUNK_BLOCKS, HEADER.size + 2 * last * CHUNK_BLOCKS


def codes_of(first: int, last: int) -> tuple[int, int]:
    return CODES_AT + first * CHUNK_BYTES, CODES_AT + last * CHUNK_BYTES


CHECKSUMS = (CHECKSUMS_AT, SIZE)
READ = {
    "none": ([], []),
    "one": ([5], [scales_of(5, 6), codes_of(5, 6), CHECKSUMS]),
    "neighbours": ([5, 6], [scales_of(5, 7), codes_of(5, 7), CHECKSUMS]),
    "a short gap": ([4, 6], [scales_of(4, 7), codes_of(4, 7), CHECKSUMS]),
    "a gap": ([3, 6], [scales_of(3, 7), codes_of(3, 4), codes_of(6, 7), CHECKSUMS]),
    "the first": ([0], [(HEADER.size, codes_of(0, 1)[1]), CHECKSUMS]),
    "the last": ([11], [scales_of(11, 12), (codes_of(11, 12)[0], SIZE)]),
    "3/4": ([*range(3, 12)], [scales_of(3, 12), (codes_of(3, 12)[0], SIZE)]),
    "more than 3/4": ([0, 1, *range(4, 12)], [(0, SIZE)]),
}


@pytest.mark.parametrize("case", READ)
def test_few_ranges_are_read(case):
    assert SIZE == len(wide()) == delta_bytes("int4", CHUNKS * CHUNK_BLOCKS * WIDE, WIDE)
    assert CHUNK_BYTES < GAP_BYTES == 2 * CHUNK_BYTES
    chunks, ranges = READ[case]
    stored = MemoryStore()
    stored.put("delta", wide())
    found: list[tuple[int, int]] = []

    def read_and_note(start: int, stop: int) -> bytes:
        found.append((start, stop))
        return stored.get_range("delta", start, stop)

    blocks = np.asarray(chunks, np.int64) * CHUNK_BLOCKS + 7
    count = CHUNKS * CHUNK_BLOCKS * WIDE
    part = read_blocks(read_and_note, codec="int4", count=count, block=WIDE, blocks=blocks)
    assert part.codes.size == len(chunks) * WIDE // 2
    assert found == ranges
