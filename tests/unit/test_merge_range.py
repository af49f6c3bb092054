"""Nothing that learners may claim leaves the range of the merge: against float64, to the extremes.

Legal are tokens and steps that a message can hold, with any `bounds.max_tokens_per_step`; values
that a codec can hold; any staleness.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.aggregator.arrays import merge
from diloco.aggregator.arrays.fragment import FragmentArrays, payload_of
from diloco.aggregator.arrays.grid import make_grid
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.updates import Admitted, UpdateCredit
from diloco.common.process.config import make_config
from diloco.common.protocol import slices, wire
from diloco.common.protocol.codecs import CODECS, Encoded, decode_numpy
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.learner.tensors.quantize_and_pack import encode

BLOCK = 16
LAYOUT = make_layout(
    [Tensor(name="layers", shape=(2, 64), dtype="float32"),
     Tensor(name="embedding", shape=(48,), dtype="float32")],
    fragments=1, block=BLOCK,
    hint=lambda name, _: TensorHint(merge="average") if name == "embedding" else
    TensorHint(norm_axes=1),
)  # fmt: skip
SIZE = LAYOUT.fragments[0].size
GREATEST_NORM = 2.0**47
MOST = 18014398509481984  # 2^54 tokens a step


def run_settings(codec):
    document = {
        "run": {"name": "demo", "steps": 1}, "store": {"url": "unused"},
        "sync": {"codec": codec, "delta_codec": "float32", "block": BLOCK, "shard_elements": 1024},
        "outer": {"optimizer": "sgd", "learning_rate": 1.0},
    }  # fmt: skip
    return make_config(document, source="a test").settings()


SHARD = wire.Shard(name="x", size_bytes=1, crc32c=0, slices=slices.of_range(0, BLOCK, BLOCK))


def manifest(codec, tokens, steps):
    return wire.Manifest(
        run="demo", learner="a", epoch=0, incarnation=1, seq=1, fragment=0, base_version=0,
        base_digest="0" * 32, layout=LAYOUT.digest, codec=codec, shards=(SHARD,), tokens=tokens,
        steps=steps, position=0, local_step=0, loss=0.0, step_time_s=0.0, encode_s=0.0,
        upload_s=0.0, attempt=0, final=False,
    )  # fmt: skip


def merged(codec, updates):
    """The merged outer gradient, as the aggregator forms it, and its arrays and payloads."""
    arrays = FragmentArrays.from_view(run_settings(codec), LAYOUT, 0, np.zeros(SIZE, np.float32))
    admitted, payloads = [], []
    for values, tokens, steps, discount in updates:
        parts = tuple(encode(codec, values[a:b], BLOCK) for a, b in arrays.grid.ranges)
        payload = payload_of(arrays.grid, codec, parts)
        credit = UpdateCredit(steps, tokens, formulas.weight(tokens, steps))
        one = Admitted(manifest(codec, tokens, steps), 1, credit, 0, discount, 1.0, payload.norm)
        arrays.merge(payload, one)
        admitted.append(one)
        payloads.append(payload)
    made = arrays.close_round(admitted, 1.0)
    return -arrays.theta, arrays, payloads, made


def exact(grid, codec, payloads, updates):
    """The formulas of docs/design/paper.md in float64, of the decoded updates; by segment."""
    ends = np.cumsum(grid.lengths[:-1]) * BLOCK
    vectors = [
        np.split(np.concatenate([decode_numpy(codec, p, BLOCK) for p in payload.parts]), ends)
        for payload in payloads
    ]
    weights = [formulas.weight(tokens, steps) for _, tokens, steps, _ in updates]
    total = sum(weights)
    for segment, radial in enumerate(grid.radial):
        these = [v[segment].astype(np.float64) for v in vectors]
        norms = [float(np.linalg.norm(v)) for v in these]
        shares = [w / total * s for w, (*_, s) in zip(weights, updates, strict=True)]
        if radial:
            turn = sum(s * v / n for s, v, n in zip(shares, these, norms, strict=True) if n)
            length = sum(s * n for s, n in zip(shares, norms, strict=True))
            turned = np.linalg.norm(turn)
            yield (length * turn / turned if turned else np.zeros_like(these[0])), norms
        else:
            yield sum(s * v for s, v in zip(shares, these, strict=True)), norms


def assert_exact(codec, updates):
    got, arrays, payloads, made = merged(codec, updates)
    assert np.isfinite(got).all()
    ends = np.cumsum(arrays.grid.lengths[:-1]) * BLOCK
    wanted = exact(arrays.grid, codec, payloads, updates)
    for part, (expected, norms) in zip(np.split(got, ends), wanted, strict=True):
        # Coefficients carry 8 bits. What is lost beside them is below 2^-100 of the heaviest
        # input's share, or 2^-62 of it where the norm is near the greatest that there is.
        lost = max(2.0**-100 * math.sqrt(part.size), 2.0**-62 * max(norms))
        off = np.linalg.norm(part.astype(np.float64) - expected)
        assert off <= 2.0**-6 * np.linalg.norm(expected) + lost
    return arrays, payloads, made


@st.composite
def claims(draw):
    """Tokens and steps as a message can hold them, under the bound of tokens a step."""
    steps = draw(st.one_of(st.integers(1, 1000), st.integers(0, 62).map(lambda e: 1 << e)))
    most = min(steps * MOST, wire.GREATEST)
    exponent = st.integers(0, most.bit_length() - 1).map(lambda e: 1 << e)
    return draw(st.one_of(exponent, st.just(most), st.integers(1, most))), steps


@st.composite
def updates(draw):
    made = []
    for _ in range(draw(st.integers(1, 4))):
        tokens, steps = draw(claims())
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        # Positive, so that directions do not cancel.
        values = np.float32(rng.uniform(0.5, 1, SIZE)) * np.float32(
            2.0 ** draw(st.integers(-63, 46))
        )
        values[: 64 * draw(st.integers(0, 2))] = 0
        made.append((values, tokens, steps, draw(st.sampled_from([1.0, 0.5, 2.0**-20]))))
    return made


def like(scale, tokens, steps):
    return np.full(SIZE, scale, np.float32), tokens, steps, 1.0


# 16.8 million tokens a step and weights as 9 to 1, with the norms of real runs.
NINE_TO_ONE = [
    (np.linspace(1e-4, 2e-4, SIZE, dtype=np.float32), 24 << 24, 24, 1.0),
    (np.linspace(2e-4, 1e-4, SIZE, dtype=np.float32), 8 << 24, 24, 1.0),
]
# The default bound of tokens a step.
AT_THE_BOUND = [
    (np.linspace(1e-4, 2e-4, SIZE, dtype=np.float32), 24 << 32, 24, 1.0),
    (np.linspace(2e-4, 1e-4, SIZE, dtype=np.float32), 24 << 31, 24, 1.0),
]
RISING = [
    like(1e-3, 1, 1 << 62),
    like(1e-3, 1, 1),
    like(1e-3, wire.GREATEST, 1 << 9),
    like(2.0**46, 1, 1),
]


@settings(max_examples=200)
@given(st.sampled_from(CODECS), updates())
@example("int4", NINE_TO_ONE)
@example("int4", AT_THE_BOUND)
@example("int4", RISING)
@example("float32", RISING[::-1])
def test_the_merge_is_exact_over_all_that_is_legal(codec, many):
    arrays, payloads, made = assert_exact(codec, many)
    # And merging the record again gives its bits.
    again = FragmentArrays.from_view(arrays.settings, LAYOUT, 0, np.zeros(SIZE, np.float32))
    total = again.arithmetic.accumulator(again.grid, 2)
    for payload, taken in zip(payloads, made.inputs, strict=True):
        recorded = np.frombuffer(taken.coefficients, ml_dtypes.bfloat16)
        total.add(codec, payload.parts, recorded, taken.weight_unit)
    units = [taken.weight_unit for taken in made.inputs]
    assert units == sorted(units)
    factors = merge.factors(
        again.grid, total,
        [merge.Contribution(payload.norms_S, taken.weight, taken.discount, taken.clip,
                            taken.weight_unit)
         for payload, taken in zip(payloads, made.inputs, strict=True)],
    )  # fmt: skip
    assert factors.tobytes() == made.factors


@pytest.mark.parametrize("codec", CODECS)
def test_a_discarded_sum_leaves_nothing_to_the_next(codec):
    grid, rng = make_grid(LAYOUT.fragments[0], BLOCK, 64), np.random.default_rng(0)
    ones = np.ones(len(grid.radial), ml_dtypes.bfloat16)
    many = []
    for _ in range(merge.MOST_WAITING[codec] + 1):
        values = rng.normal(size=SIZE).astype(np.float32)
        many.append([encode(codec, values[a:b], BLOCK) for a, b in grid.ranges])
    fresh = merge.Accumulator(grid)
    fresh.add(codec, many[0], ones)
    expected = fresh.total().tobytes()
    total = merge.Accumulator(grid)
    for discarded in range(1, len(many) + 1):
        for parts in many[:discarded]:
            total.add(codec, parts, ones)
        total.reset()
        assert total.inputs == 0
        total.add(codec, many[0], ones)
        assert total.total().tobytes() == expected
        total.reset()


def test_a_unit_is_the_first_weights_own_and_rises_when_a_later_one_is_far_heavier():
    assert merge.unit_after(None, 240000.0) == 17
    assert merge.unit_after(None, 0.75) == -1
    assert merge.unit_after(17, 1.0) == 17
    assert merge.unit_after(17, math.ldexp(1.99, 17 + 31)) == 17
    assert merge.unit_after(17, math.ldexp(1.0, 17 + 32)) == 17 + 32


@pytest.mark.parametrize("codec", ["int4", "int8"])
def test_zeros_with_the_greatest_scale_stay_zeros(codec):
    """A block's scale is the sender's: one of zeros may say 2^40 beside the least of norms."""
    grid = make_grid(LAYOUT.fragments[0], BLOCK, 1 << 20)
    (encoded,) = [encode(codec, np.zeros(SIZE, np.float32), BLOCK)]
    scales = np.full(SIZE // BLOCK, 2.0**40, ml_dtypes.bfloat16)
    total = merge.Accumulator(grid)
    coefficients = np.full(len(grid.radial), 2.0**96, ml_dtypes.bfloat16)
    total.add(codec, [Encoded(scales, np.asarray(encoded.codes))], coefficients)
    assert not total.total().copy().any()


def test_raising_the_unit_divides_the_sum_by_a_power_of_two():
    grid = make_grid(LAYOUT.fragments[0], BLOCK, 64)
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    parts = [encode("int4", values[a:b], BLOCK) for a, b in grid.ranges]
    ones = np.ones(len(grid.radial), ml_dtypes.bfloat16)
    zeros = np.zeros(len(grid.radial), ml_dtypes.bfloat16)
    for rise in (33, 90, 200):
        total = merge.Accumulator(grid)
        total.add("int4", parts, ones)
        before = total.total().copy()
        total.add("int4", parts, zeros, rise)
        after = total.total().copy()
        exactly = np.ldexp(before.astype(np.float64), -rise)
        expected = np.where(np.abs(exactly) < 2.0**-100, 0, exactly)
        np.testing.assert_array_equal(after, expected)
