"""Objects: what is packed comes back, and what is not a shard is refused for the right reason."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.common.protocol.codecs import CODECS, GREATEST_CODE, decode_numpy
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.shards import (
    HEADER,
    crc32c,
    digest,
    pack,
    shard_bytes,
    shard_ranges,
    unpack,
)
from diloco.learner.tensors.quantize_and_pack import encode

BLOCK = 16
COUNT = 8 * BLOCK
codecs = st.sampled_from(CODECS)


def packed(codec: str, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).standard_normal(COUNT).astype(np.float32)
    return pack(codec, encode(codec, values, BLOCK), BLOCK)


def refusal(data: bytes, codec: str, *, count: int = COUNT, block: int = BLOCK) -> str:
    with pytest.raises(WireError) as caught:
        unpack(data, codec=codec, count=count, block=block)
    return caught.value.reason


@settings(max_examples=40)
@given(codecs, st.integers(0, 2**32 - 1), st.integers(-90, 50))
def test_what_is_packed_comes_back(codec, seed, exponent):
    values = np.random.default_rng(seed).standard_normal(COUNT) * 2.0**exponent
    encoded = encode(codec, values.astype(np.float32), BLOCK)
    data = pack(codec, encoded, BLOCK)
    assert len(data) == shard_bytes(codec, COUNT, BLOCK)
    again = unpack(data, codec=codec, count=COUNT, block=BLOCK)
    assert again.scales.tobytes() == np.asarray(encoded.scales).tobytes()
    assert again.codes.tobytes() == np.asarray(encoded.codes).tobytes()


def test_what_is_unpacked_are_views_of_the_object():
    data = packed("int4")
    encoded = unpack(memoryview(data), codec="int4", count=COUNT, block=BLOCK)
    address = np.frombuffer(data, np.uint8).ctypes.data
    assert encoded.scales.ctypes.data == address + HEADER.size
    assert encoded.codes.ctypes.data == address + HEADER.size + 2 * COUNT // BLOCK


@given(st.sampled_from([16, 64, 512]), st.integers(1, 300), st.integers(1, 20_000))
def test_ranges_cover_a_vector_once_and_all_but_the_last_are_equal(block, count, shard_elements):
    size = block * count
    ranges = shard_ranges(size, block, shard_elements)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert len(set(lengths[:-1])) <= 1
    assert all(length % block == 0 and length > 0 for length in lengths)
    assert max(lengths) <= max(shard_elements, block)


@settings(max_examples=30)
@given(codecs, st.integers(0, 2**32 - 1), st.sampled_from([16, 64, 80, 1000]))
def test_shards_decode_to_the_same_vector_as_the_whole(codec, seed, shard_elements):
    values = np.random.default_rng(seed).standard_normal(COUNT).astype(np.float32)
    whole = decode_numpy(codec, encode(codec, values, BLOCK), BLOCK)
    parts = [
        decode_numpy(codec, encode(codec, values[start:stop], BLOCK), BLOCK)
        for start, stop in shard_ranges(COUNT, BLOCK, shard_elements)
    ]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_lengths_and_headers_are_refused(codec):
    data = packed(codec)
    other = CODECS[(CODECS.index(codec) + 1) % len(CODECS)]
    assert refusal(b"", codec) == "truncated"
    assert refusal(data[:-1], codec) == "truncated"
    assert refusal(data + b"\0", codec) == "oversize"
    assert refusal(b"DLS0" + data[4:], codec) == "bad_magic"
    assert refusal(data[:4] + packed(other)[4:5] + data[5:], codec) == "codec_mismatch"
    wrong_block = HEADER.pack(b"DLS2", data[4], 0, 2 * BLOCK, COUNT)
    assert refusal(wrong_block + data[HEADER.size :], codec) == "codec_mismatch"
    wrong_count = HEADER.pack(b"DLS2", data[4], 0, BLOCK, 2**63)
    assert refusal(wrong_count + data[HEADER.size :], codec) == "codec_mismatch"


@settings(max_examples=60)
@given(codecs, st.data())
def test_any_change_of_the_header_is_refused(codec, data):
    shard = bytearray(packed(codec))
    shard[data.draw(st.integers(0, HEADER.size - 1))] ^= data.draw(st.integers(1, 255))
    assert refusal(bytes(shard), codec) in ("bad_magic", "codec_mismatch")


@pytest.mark.parametrize("codec", list(GREATEST_CODE))
@pytest.mark.parametrize(
    "scale_bits",
    [0x7FC0, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0xBF80, 0x1F7F, 0x5381],
    ids=["nan", "inf", "-inf", "0", "-0", "denormal", "-1", "below", "above"],
)
def test_scales_out_of_range_are_refused(codec, scale_bits):
    shard = bytearray(packed(codec))
    shard[HEADER.size + 6 : HEADER.size + 8] = scale_bits.to_bytes(2, "little")
    assert refusal(bytes(shard), codec) == "bad_scale"


@pytest.mark.parametrize("codec", list(GREATEST_CODE))
@pytest.mark.parametrize("scale_bits", [0x1F80, 0x5380], ids=["least", "greatest"])
def test_the_least_and_the_greatest_scale_are_accepted(codec, scale_bits):
    shard = bytearray(packed(codec))
    shard[HEADER.size : HEADER.size + 2] = scale_bits.to_bytes(2, "little")
    unpack(bytes(shard), codec=codec, count=COUNT, block=BLOCK)


@pytest.mark.parametrize(("codec", "code"), [("int4", 0x80), ("int4", 0x08), ("int8", 0x80)])
@pytest.mark.parametrize("from_end", [1, 40])
def test_codes_that_no_encoder_gives_are_refused(codec, code, from_end):
    shard = bytearray(packed(codec))
    shard[-from_end] = code
    assert refusal(bytes(shard), codec) == "bad_code"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.nan, "non_finite"),
        (-np.inf, "non_finite"),
        (3e38, "bad_code"),
        (1e-30, "bad_code"),
        (-1e-39, "bad_code"),
    ],
)
@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_values_that_no_encoder_gives_are_refused(codec, value, reason):
    encoded = encode(codec, np.ones(COUNT, np.float32), BLOCK)
    codes = np.asarray(encoded.codes).copy()
    codes[5] = value
    assert refusal(pack(codec, encoded._replace(codes=codes), BLOCK), codec) == reason


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_was_not_finite_is_refused_by_the_receiver(codec, bad):
    values = np.ones(COUNT, np.float32)
    values[40] = bad
    reason = refusal(pack(codec, encode(codec, values, BLOCK), BLOCK), codec)
    assert reason == ("bad_scale" if codec in GREATEST_CODE else "non_finite")


def test_checksums():
    assert crc32c(b"123456789") == 0xE3069283  # The check value of CRC-32C.
    assert crc32c(memoryview(b"123456789")) == 0xE3069283
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"  # XXH3-128 of nothing.
    values = np.arange(6, dtype=np.float32)
    assert digest(values) == digest(values.tobytes()) == digest(values.reshape(2, 3))
    assert digest(values) != digest(values[::-1])


def test_the_bytes_of_a_shard_are_made_element_by_element():
    """`docs/protocol.md`, "The bytes of a shard", word for word and without the encoder's code."""
    values = np.random.default_rng(7).standard_normal(COUNT).astype(np.float32)
    scales, codes = b"", b""
    for start in range(0, COUNT, BLOCK):
        block = values[start : start + BLOCK]
        scale = (np.abs(block).max() * np.float32(1 / 7)).astype(ml_dtypes.bfloat16)
        scales += scale.tobytes()
        nearest = [round(float(value) / float(scale)) + 8 for value in block]
        for low, high in zip(nearest[: BLOCK // 2], nearest[BLOCK // 2 :], strict=True):
            codes += bytes([low + 16 * high])
    header = b"DLS2" + bytes([4, 0]) + BLOCK.to_bytes(2, "little") + COUNT.to_bytes(8, "little")
    assert pack("int4", encode("int4", values, BLOCK), BLOCK) == header + scales + codes
