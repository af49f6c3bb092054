"""Codecs: error bounds, exact bits, and what happens to values that no code can hold."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.common.protocol.codecs import (
    CODECS,
    GREATEST_CODE,
    GREATEST_SCALE,
    GREATEST_VALUE,
    LEAST_SCALE,
    Encoded,
    canonical,
    code_count,
    code_dtype,
    decode_numpy,
    encoded_bytes,
    scale_count,
)
from diloco.learner.tensors.quantize_and_pack import decode_blocks, encode, encode_blocks

BLOCKS = (16, 64, 512)
INTEGER = tuple(GREATEST_CODE)
# Codecs that send a block's greatest value whole.
WHOLE = ("int8", "int4")
codecs = st.sampled_from(CODECS)
blocks = st.sampled_from(BLOCKS)


def decode(codec, encoded, block):
    """Values of a vector's codes, float32 [N]."""
    codes = jnp.asarray(encoded.codes).reshape(-1, code_count(codec, block))
    return decode_blocks(codec, Encoded(encoded.scales, codes), block).reshape(-1)


@st.composite
def vectors(draw, block: int) -> np.ndarray:
    """Six blocks of values whose sizes differ wildly, some blocks and values zero, some tied."""
    seed, kind = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(["normal", "tied", "flat"]))
    exponents = draw(st.lists(st.integers(-70, 42), min_size=6, max_size=6))
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((6, block))
    if kind == "tied":  # Multiples of half a code, so that many quotients are exact ties.
        values = rng.integers(-14, 15, (6, block)) / 2.0
        values[:, 0] = 7.0
    if kind == "flat":
        values = np.ones((6, block))
    values *= 2.0 ** np.array(exponents)[:, None]
    values[rng.integers(6)] = 0
    values[:, rng.integers(block)] = 0
    return values.astype(np.float32).reshape(-1)


def reference(codec: str, values: np.ndarray, block: int) -> Encoded:
    """The definition, in plain NumPy: what every machine must give, bit for bit."""
    if codec not in GREATEST_CODE:
        clipped = np.clip(values, -GREATEST_VALUE, GREATEST_VALUE)
        clipped = np.where(np.abs(values) < LEAST_SCALE, 0, clipped).astype(np.float32)
        return Encoded(np.zeros(0, ml_dtypes.bfloat16), clipped.astype(code_dtype(codec)))
    greatest = GREATEST_CODE[codec]
    rows = values.reshape(-1, block)
    wanted = np.abs(rows).max(axis=1) * np.float32(1 / greatest)
    if codec == "int2":
        absmax = np.maximum(np.abs(rows).max(axis=1), np.float32(LEAST_SCALE)).astype(np.float64)
        units = 2.0 ** (np.floor(np.log2(absmax)) - 14)
        whole = np.floor(np.abs(rows) / units[:, None]).sum(axis=1)
        mean = whole.astype(np.float32) * np.float32(1.5 / block) * units.astype(np.float32)
        wanted = np.maximum(mean, np.abs(rows).max(axis=1) * np.float32(0.25))
    scales = np.clip(wanted, np.float32(LEAST_SCALE), np.float32(GREATEST_SCALE))
    scales = scales.astype(ml_dtypes.bfloat16)
    inverse = np.float32(1) / scales.astype(np.float32)
    codes = np.rint(np.clip(rows * inverse[:, None], -greatest, greatest)).astype(np.int8)
    if codec == "int4":
        biased = (codes + 8).astype(np.uint8)
        codes = biased[:, : block // 2] | (biased[:, block // 2 :] << 4)
    if codec == "int2":
        parts = (codes + 2).astype(np.uint32).reshape(len(codes), 16, block // 16)
        codes = sum(parts[:, k] << np.uint32(2 * k) for k in range(16))
    return Encoded(scales, codes.reshape(-1))


def bits(encoded: Encoded) -> tuple[bytes, bytes]:
    return np.asarray(encoded.scales).tobytes(), np.asarray(encoded.codes).tobytes()


@settings(max_examples=60)
@given(st.data(), codecs, blocks)
def test_encode_gives_the_bits_of_its_definition(data, codec, block):
    values = data.draw(vectors(block))
    assert bits(encode(codec, values, block)) == bits(reference(codec, values, block))


@pytest.mark.parametrize("codec", CODECS)
def test_encode_inside_another_kernel_gives_the_same_bits(codec):
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    inside = jax.jit(lambda v: encode(codec, v, 64))(values)
    assert bits(inside) == bits(encode(codec, values, 64))


@settings(max_examples=60)
@given(st.data(), codecs, blocks)
def test_decode_gives_the_same_bits_with_and_without_jax(data, codec, block):
    encoded = encode(codec, data.draw(vectors(block)), block)
    assert np.asarray(decode(codec, encoded, block)).tobytes() == (
        decode_numpy(codec, encoded, block).tobytes()
    )


@settings(max_examples=60)
@given(st.data(), blocks, st.sampled_from(WHOLE))
def test_error_is_at_most_half_a_scale(data, block, codec):
    values = data.draw(vectors(block))
    encoded = encode(codec, values, block)
    scales = np.asarray(encoded.scales).astype(np.float64)
    error = np.abs(decode_numpy(codec, encoded, block).astype(np.float64) - values)
    clipped = scales == GREATEST_SCALE
    assert (error.reshape(-1, block).max(axis=1) <= 0.5000002 * scales)[~clipped].all()


@settings(max_examples=60)
@given(st.data(), blocks)
def test_int2_cuts_values_beyond_one_and_a_half_scales(data, block):
    values = data.draw(vectors(block))
    encoded = encode("int2", values, block)
    scales = np.repeat(np.asarray(encoded.scales).astype(np.float64), block)
    found, sizes = decode_numpy("int2", encoded, block).astype(np.float64), np.abs(values)
    assert (np.abs(found - values) <= np.maximum(0.5000002 * scales, sizes - scales)).all()
    means = np.abs(values.reshape(-1, block)).mean(axis=1, dtype=np.float64).repeat(block)
    absmax = np.abs(values.reshape(-1, block)).max(axis=1).repeat(block)
    wanted = np.clip(np.maximum(1.5 * means, absmax / 4), LEAST_SCALE, GREATEST_SCALE)
    np.testing.assert_allclose(scales, wanted, rtol=2.0**-8)


@pytest.mark.parametrize("spread", ["normal", "laplace", "one"])
def test_what_int2_leaves_is_sent_later(spread):
    """Error feedback: what is sent together comes near to what should have been sent."""
    rng, block = np.random.default_rng(0), 64
    values = np.zeros(block * 40, np.float32)
    values[::block] = 1
    if spread != "one":
        values = getattr(rng, spread)(size=block * 40).astype(np.float32)
    sent = np.zeros_like(values)
    for _ in range(20):
        sent += decode_numpy("int2", encode("int2", values - sent, block), block)
    assert np.linalg.norm(values - sent) < 0.01 * np.linalg.norm(values)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([*WHOLE, "float32", "bfloat16"]), blocks)
def test_a_decoded_vector_encodes_to_the_same_codes(data, codec, block):
    first = encode(codec, data.draw(vectors(block)), block)
    second = encode(codec, decode(codec, first, block), block)
    assert bits(first) == bits(second)


@settings(max_examples=30)
@given(st.data(), codecs, blocks)
def test_the_difference_is_encoded_as_if_it_had_been_stored(data, codec, block):
    new, old = data.draw(vectors(block)), data.draw(vectors(block))
    (found,) = encode_blocks(codec, (new.reshape(-1, block),), (old.reshape(-1, block),))
    found = found._replace(codes=found.codes.reshape(-1))
    assert bits(found) == bits(encode(codec, new - old, block))


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=10)
@given(data=st.data(), groups=st.sampled_from([(6,), (3, 2), (1, 6, 1), (2, 1, 3), (0,)]))
def test_arrays_of_blocks_are_encoded_and_decoded_as_vectors_are(data, codec, groups):
    """Two arrays at once, of blocks of different sizes."""
    new, old = [], []
    for block in (16, 64):
        shape = (*groups, block)
        new.append(data.draw(vectors(block))[: np.prod(shape)].reshape(shape))
        old.append(data.draw(vectors(block))[: np.prod(shape)].reshape(shape))
    decoder = jax.jit(decode_blocks, static_argnums=(0, 2))
    encoded = encode_blocks(codec, tuple(new), tuple(old))
    for block, one, a, b in zip((16, 64), encoded, new, old, strict=True):
        expected = reference(codec, (a - b).reshape(-1), block)
        assert bits(one) == bits(expected)
        assert one.codes.shape == (*groups, code_count(codec, block))
        assert one.scales.shape == ((*groups, 0) if codec not in INTEGER else groups)
        values = decoder(codec, one, block)
        assert values.shape == a.shape
        assert np.asarray(values).tobytes() == decode_numpy(codec, expected, block).tobytes()


@settings(max_examples=30)
@given(st.data(), codecs, blocks, st.permutations(range(6)), st.integers(1, 6))
def test_blocks_are_cut_out_and_put_together_by_copying_bytes(data, codec, block, order, count):
    values, chosen = data.draw(vectors(block)), list(order[:count])
    whole = encode(codec, values, block)
    codes = np.asarray(whole.codes).reshape(6, -1)[chosen]
    scales = np.asarray(whole.scales).reshape(6, -1)[chosen]
    assert bits(encode(codec, values.reshape(6, -1)[chosen].reshape(-1), block)) == (
        scales.tobytes(),
        codes.tobytes(),
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("block", BLOCKS)
def test_sizes(codec, block):
    size = 6 * block
    encoded = encode(codec, np.ones(size, np.float32), block)
    scales, codes = np.asarray(encoded.scales), np.asarray(encoded.codes)
    assert scales.dtype == ml_dtypes.bfloat16
    assert scales.shape == (scale_count(codec, size, block),)
    assert codes.dtype == code_dtype(codec)
    assert codes.shape == (code_count(codec, size),)
    assert encoded_bytes(codec, size, block) == scales.nbytes + codes.nbytes


def test_int4_keeps_the_halves_of_a_block_in_the_nibbles_of_its_bytes():
    values = np.zeros(64, np.float32)
    values[16 + 3], values[16 + 8 + 3] = 7, -7
    codes = np.asarray(encode("int4", values, 16).codes)
    assert codes[8 + 3] == (7 + 8) | (-7 + 8) << 4
    assert set(np.delete(codes, 8 + 3)) == {8 | 8 << 4}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 2.0**-66, -(2.0**-66)])
def test_zeros_and_values_too_small_are_sent_as_zero(codec, tiny):
    encoded = encode(codec, np.full(32, tiny, np.float32), 16)
    assert not decode_numpy(codec, encoded, 16).any()
    assert (np.asarray(encoded.scales).astype(np.float64) == LEAST_SCALE).all()


@pytest.mark.parametrize("codec", CODECS)
def test_values_too_large_are_sent_as_the_greatest(codec):
    sent = decode_numpy(codec, encode(codec, np.full(32, -3e38, np.float32), 16), 16)
    greatest = {c: most * GREATEST_SCALE for c, most in GREATEST_CODE.items()}
    assert (sent == -np.float32(greatest.get(codec, GREATEST_VALUE))).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 17, 31])
def test_what_is_not_finite_shows_in_what_is_sent(codec, bad, position):
    values = np.ones(32, np.float32)
    values[position] = bad
    encoded = encode(codec, values, 16)
    shown = np.asarray(encoded.scales if codec in INTEGER else encoded.codes).astype(np.float32)
    assert np.isfinite(shown).sum() == shown.size - 1


@settings(max_examples=40)
@given(st.data(), codecs)
def test_a_canonical_view_stays_the_same_in_jax_and_numpy(data, codec):
    """Denormals are the one thing on which they differ; no sum of these has any."""
    start = data.draw(vectors(64)) * np.float32(2.0**-60)
    view = canonical(start)
    in_jax = jnp.asarray(view)
    for _ in range(3):
        encoded = encode(codec, data.draw(vectors(64)), 64)
        view = view + decode_numpy(codec, encoded, 64)
        in_jax = in_jax + decode(codec, encoded, 64)
        assert np.asarray(in_jax).tobytes() == view.tobytes()


def test_canonical_sets_denormals_to_zero_and_nothing_else():
    values = np.array([1e-40, -1e-40, 2.0**-126, -(2.0**-126), 1, 0], np.float32)
    assert canonical(values).tolist() == [0, 0, 2.0**-126, -(2.0**-126), 1, 0]
