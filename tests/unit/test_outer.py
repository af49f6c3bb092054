"""Merging and the outer step: against plain formulas, and to the bit against other machines."""

import math
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import advance_view, grid_of, take_step

from diloco.aggregator.arrays import grid as grids
from diloco.aggregator.arrays import outer
from diloco.aggregator.arrays.grid import Grid, make_grid
from diloco.aggregator.arrays.merge import (
    MOST_WAITING,
    Accumulator,
    Contribution,
    coefficients,
    factors,
    segment_norms,
)
from diloco.aggregator.arrays.outer import (
    close_round,
    make_outer,
    participation,
)
from diloco.common.protocol.codecs import CODECS, Encoded, decode_numpy, encoded_bytes
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.common.protocol.shards import shard_ranges
from diloco.learner.tensors.quantize_and_pack import encode

BLOCK = 16
OPTIMIZERS = ("sgd", "momentum", "nesterov", "delayed_nesterov")
codecs = st.sampled_from(CODECS)


def small_grid(shard_elements: int = 128, merge: str = "rda") -> Grid:
    """Segments: a matrix by RDA, three stacked layers by RDA, an embedding by average, a scalar."""
    hints = {
        "layers": TensorHint(norm_axes=1),
        "embedding": TensorHint(merge="average"),
    }
    layout = make_layout(
        [
            Tensor(name="matrix", shape=(7, 9), dtype="float32"),
            Tensor(name="layers", shape=(3, 5, 5), dtype="float32"),
            Tensor(name="embedding", shape=(11, 4), dtype="float32"),
            Tensor(name="scalar", shape=(), dtype="float32"),
        ],
        fragments=1,
        block=BLOCK,
        hint=lambda name, _shape: hints.get(name, TensorHint()),
    )
    return make_grid(layout.fragments[0], BLOCK, shard_elements, merge)


GRID = small_grid()
RADIAL = GRID.radial


def update_of(codec: str, values: np.ndarray, grid: Grid = GRID) -> list[Encoded]:
    return [encode(codec, values[start:stop], grid.block) for start, stop in grid.ranges]


def decoded(codec: str, shards: list[Encoded]) -> np.ndarray:
    return np.concatenate([decode_numpy(codec, shard, BLOCK) for shard in shards])


def by_segment(values: np.ndarray, grid: Grid = GRID) -> list[np.ndarray]:
    return np.split(values, np.cumsum(grid.lengths[:-1]) * grid.block)


def sum_of(accumulator: Accumulator, grid: Grid = GRID) -> np.ndarray:
    total = accumulator.total()
    assert total.shape == (grid.size,)
    return total.copy()


def random_updates(codec: str, count: int, seed: int) -> list[tuple[list[Encoded], Contribution]]:
    rng = np.random.default_rng(seed)
    updates = []
    for _ in range(count):
        shards = update_of(codec, rng.standard_normal(GRID.size).astype(np.float32))
        contribution = Contribution(
            segment_norms(GRID, codec, shards),
            weight=rng.uniform(1, 1e6),
            discount=rng.uniform(0.1, 1),
            clip=rng.uniform(0.5, 1),
        )
        updates.append((shards, contribution))
    return updates


def accumulated(codec: str, updates: list[tuple[list[Encoded], Contribution]]) -> Accumulator:
    accumulator = Accumulator(GRID)
    for shards, contribution in updates:
        accumulator.add(codec, shards, coefficients(GRID, contribution))
    return accumulator


# --- Grid


def test_a_grid_divides_the_whole_vector():
    assert GRID.lengths.tolist() == [4, 2, 2, 2, 3, 1]
    assert GRID.lengths.sum() * BLOCK == GRID.size
    assert RADIAL.tolist() == [True, True, True, True, False, True]
    assert not small_grid(merge="average").radial.any()
    assert GRID.ranges == tuple(shard_ranges(GRID.size, BLOCK, 128))
    assert len(GRID.ranges) == 2


# --- Norms, coefficients, factors


@settings(max_examples=30)
@given(codecs, st.integers(0, 2**32 - 1), st.integers(-55, 35))
def test_segment_norms_are_those_of_the_decoded_update(codec, seed, exponent):
    values = np.random.default_rng(seed).standard_normal(GRID.size) * 2.0**exponent
    values[: 4 * BLOCK] *= seed % 2  # Half of the time a zero segment.
    shards = update_of(codec, values.astype(np.float32))
    exact = [np.linalg.norm(part.astype(np.float64)) for part in by_segment(decoded(codec, shards))]
    np.testing.assert_allclose(segment_norms(GRID, codec, shards), exact, rtol=1e-6)


@pytest.mark.parametrize("codec", ["int4", "int8"])
@pytest.mark.parametrize("block", [16, 64, 512])
def test_norms_of_the_greatest_codes_do_not_overflow(codec, block):
    layout = make_layout(
        [Tensor(name="x", shape=(4 * block,), dtype="float32")], fragments=1, block=block
    )
    grid = make_grid(layout.fragments[0], block, 1 << 20)
    for sign in (1, -1):
        ones = encode(codec, np.full(4 * block, sign, np.float32), block)
        value = float(decode_numpy(codec, ones, block)[0])
        norm = segment_norms(grid, codec, [ones])
        np.testing.assert_allclose(norm, [abs(value) * np.sqrt(4 * block)], rtol=1e-6)


@pytest.mark.parametrize("block", [16, 64, 128, 256, 512])
def test_each_block_is_measured_with_its_own_scale(block):
    """With scales that are powers of two the sum of squares is exact, in whatever order."""
    count = 37  # Two groups that are measured together, and some blocks more.
    layout = make_layout(
        [Tensor(name="x", shape=(count * block,), dtype="float32")], fragments=1, block=block
    )
    grid = make_grid(layout.fragments[0], block, 1 << 20)
    pairs_Bxh = np.random.default_rng(block).integers(0, 256, (count, block // 2), dtype=np.uint8)
    pairs_Bxh[[0, 20, 36]] = 0  # Both codes are -8.
    powers_B = np.arange(count) % 13 - 6
    update = Encoded((2.0**powers_B).astype(ml_dtypes.bfloat16), pairs_Bxh.reshape(-1))
    codes_Bxb = np.concatenate([pairs_Bxh & 15, pairs_Bxh >> 4], axis=1).astype(np.int64) - 8
    squares = float(np.square(codes_Bxb).sum(axis=1) @ 4.0**powers_B)
    assert segment_norms(grid, "int4", [update]).tolist() == [math.sqrt(squares)]


def test_coefficients_are_bfloat16_of_the_rule():
    norms = np.array([2.0, 4.0, 8.0, 0.0, 3.0, 5.0])
    got = coefficients(GRID, Contribution(norms, weight=96.0, discount=0.5, clip=0.25))
    assert got.dtype == ml_dtypes.bfloat16
    expected = [48 / 2, 48 / 4, 48 / 8, 0, 48 * 0.25, 48 / 5]
    assert got.tolist() == np.array(expected).astype(ml_dtypes.bfloat16).tolist()


@pytest.mark.parametrize(
    ("norm", "weight", "unit", "expected"),
    [
        (2.0**-64, 2.0**131, 100, 2.0**95),
        (2.0**63, 2.0**-63, 0, 2.0**-126),
        (2.0**63, 2.0**-64, 0, 0.0),
    ],
)
def test_coefficients_hold_the_extremes_of_weights_and_norms(norm, weight, unit, expected):
    got = coefficients(GRID, Contribution(np.full(6, norm), weight, unit=unit))
    assert set(got[RADIAL].astype(float)) == {expected}


@settings(max_examples=40)
@given(codecs, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_merge_is_the_formula_of_the_paper(codec, count, seed):
    """docs/design/paper.md §1, with w S in the numerators and w in the denominators."""
    updates = random_updates(codec, count, seed)
    accumulator = accumulated(codec, updates)
    factor_S = factors(GRID, accumulator, [contribution for _, contribution in updates])
    merged = sum_of(accumulator) * GRID.per_block(factor_S).repeat(BLOCK)
    weight = sum(c.weight for _, c in updates)
    for segment, part in enumerate(by_segment(merged)):
        vectors = [
            (c, by_segment(decoded(codec, shards))[segment].astype(np.float64))
            for shards, c in updates
        ]
        shares = [c.weight * c.discount for c, _ in vectors]
        if RADIAL[segment]:
            norms = [c.clip * np.linalg.norm(v) for c, v in vectors]
            length = sum(s * n for s, n in zip(shares, norms, strict=True)) / weight
            turn = sum(s * v / np.linalg.norm(v) for s, (_, v) in zip(shares, vectors, strict=True))
            expected = length * turn / np.linalg.norm(turn)
        else:
            expected = sum(s * c.clip * v for s, (c, v) in zip(shares, vectors, strict=True))
            expected = expected / weight
        # Coefficients carry 8 bits, so directions are right to about 2^-8.
        tolerance = 2.0**-7 * np.abs(expected).max()
        np.testing.assert_allclose(part, expected, atol=tolerance, rtol=0)
        if RADIAL[segment]:
            np.testing.assert_allclose(np.linalg.norm(part), np.linalg.norm(expected), rtol=1e-5)


def test_a_round_of_average_segments_alone_needs_no_norm():
    grid = small_grid(merge="average")
    shards = update_of("int4", np.ones(grid.size, np.float32), grid)
    contribution = Contribution(segment_norms(grid, "int4", shards), weight=8.0)
    assert set(factors(grid, Accumulator(grid), [contribution, contribution])) == {1 / 16}


def test_cancelling_directions_and_zero_updates_give_no_step():
    ones = np.ones(GRID.size, np.float32)
    updates = []
    for sign in (1, -1, 0):
        shards = update_of("int4", sign * ones)
        updates.append((shards, Contribution(segment_norms(GRID, "int4", shards), 4.0)))
    accumulator = accumulated("int4", updates)
    factor_S = factors(GRID, accumulator, [contribution for _, contribution in updates])
    assert not factor_S[RADIAL].any()
    assert not (sum_of(accumulator) * GRID.per_block(factor_S).repeat(BLOCK)).any()


def test_participation_scales_rate_and_momentum():
    assert participation(0.8, 0.81, 0.5) == (0.4, 0.9)
    assert participation(0.8, 0.9, 1.0) == (0.8, 0.9)


# --- The sum


@settings(max_examples=30)
@given(codecs, st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_sum_is_that_of_rounded_products_in_order(codec, count, seed):
    updates = random_updates(codec, count, seed)
    expected = np.zeros(GRID.size, np.float32)
    for shards, contribution in updates:
        coefficient_N = GRID.per_block(coefficients(GRID, contribution)).repeat(BLOCK)
        expected += decoded(codec, shards) * coefficient_N
    assert sum_of(accumulated(codec, updates)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_shards_change_nothing_for_the_sum(codec):
    values = np.random.default_rng(3).standard_normal(GRID.size).astype(np.float32)
    sums = []
    for shard_elements in (16, 80, 128, 1 << 20):
        grid = small_grid(shard_elements)
        shards = update_of(codec, values, grid)
        contribution = Contribution(segment_norms(grid, codec, shards), 3.0)
        accumulator = Accumulator(grid)
        accumulator.add(codec, shards, coefficients(grid, contribution))
        sums.append(sum_of(accumulator, grid).tobytes())
    assert len(set(sums)) == 1


@settings(max_examples=40)
@given(codecs, st.integers(1, 19), st.integers(0, 2**32 - 1), st.sampled_from([16, 80, 1 << 20]))
def test_updates_added_in_one_pass_give_the_bits_of_one_by_one(codec, count, seed, shard_elements):
    grid, rng = small_grid(shard_elements), np.random.default_rng(seed)
    together, single = Accumulator(grid, 3), Accumulator(grid)
    unit = 0
    for _ in range(count):
        values = rng.standard_normal(grid.size) * 2.0 ** rng.integers(-70, 40)
        shards = update_of(codec, values.astype(np.float32), grid)
        coefficient_S = rng.uniform(0, 4, 6).astype(ml_dtypes.bfloat16)
        unit += int(rng.choice([0, 0, 0, 0, 40]))
        for accumulator in (together, single):
            accumulator.add(codec, shards, coefficient_S, unit)
        single.total()
    assert together.inputs == single.inputs == count
    assert together.total().tobytes() == single.total().tobytes()
    assert together.norms().tobytes() == single.norms().tobytes()
    exact = [np.linalg.norm(part.astype(np.float64)) for part in by_segment(together.total(), grid)]
    np.testing.assert_allclose(together.norms(), exact, rtol=1e-12)


@pytest.mark.parametrize("codec", CODECS)
def test_norms_are_the_same_for_any_number_of_threads(codec, monkeypatch):
    monkeypatch.setattr(grids, "PIECE_BLOCKS", 1)
    monkeypatch.setattr(grids, "LEAST_PIECES", 1)
    updates = random_updates(codec, 3, seed=6)
    found = []
    for threads in (1, 2, 16):
        accumulator = Accumulator(GRID, threads)
        for shards, contribution in updates:
            accumulator.add(codec, shards, coefficients(GRID, contribution))
        each = [segment_norms(GRID, codec, shards, threads).tobytes() for shards, _ in updates]
        found.append([*each, accumulator.norms().tobytes(), accumulator.total().tobytes()])
    assert found[0] == found[1] == found[2]


def test_an_update_that_waits_with_others_takes_no_more_than_four_bytes_a_parameter():
    for codec, most in MOST_WAITING.items():
        assert most * encoded_bytes(codec, 1 << 20, 64) / 2**20 < 4.3


def test_a_reset_sum_starts_from_zero_in_the_same_memory():
    updates = random_updates("int4", 2, seed=5)
    accumulator = accumulated("int4", updates)
    places = accumulator.total().ctypes.data
    accumulator.reset()
    for shards, contribution in updates[1:]:
        accumulator.add("int4", shards, coefficients(GRID, contribution))
    assert sum_of(accumulator).tobytes() == sum_of(accumulated("int4", updates[1:])).tobytes()
    assert accumulator.total().ctypes.data == places


def test_an_update_of_the_wrong_number_of_shards_is_an_error():
    shards = update_of("int4", np.ones(GRID.size, np.float32))
    with pytest.raises(ValueError, match="zip"):
        Accumulator(GRID).add("int4", shards[:1], np.ones(6, ml_dtypes.bfloat16))


# --- Outer optimizers


def reference_step(
    name: str,
    theta: np.ndarray,
    g: np.ndarray,
    state: dict,
    rate: float,
    mu: float,
    delay: int,
    c: float,
) -> np.ndarray:
    """docs/design/paper.md §3 word for word, whole vectors at a time, one float32 rounding per operation."""
    f = np.float32
    rate, mu_ = f(rate), f(mu)
    if name == "sgd":
        return theta - g * rate
    state["m"] = state.get("m", np.zeros_like(theta))
    if name == "delayed_nesterov":
        state["t"] = state.get("t", 0) + 1
        state["D"] = state.get("D", np.zeros_like(theta)) + g
        nth = state["t"] % delay == 0
        if nth:
            state["m"] = state["m"] * mu_ + state["D"] * f(1 / delay)
            state["D"] = np.zeros_like(theta)
        carried = f(((1 - c * delay + c) if nth else c) * mu)
        return theta - (g * f(1 / delay) + state["m"] * carried) * rate
    state["m"] = state["m"] * mu_ + g
    step = state["m"] if name == "momentum" else g + state["m"] * mu_
    return theta - step * rate


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shard_elements", [48, 1 << 17])
def test_outer_steps_are_their_formulas_to_the_bit(name, shard_elements):
    rng = np.random.default_rng(1)
    size, block = 32 * 24, 16
    theta = rng.standard_normal(size).astype(np.float32)
    optimizer = make_outer(name, delay=3, delay_fraction=0.2)
    state, expected, expected_state = optimizer.init(size), theta.copy(), {}
    for step in range(7):
        raw = rng.standard_normal(size).astype(np.float32)
        factor_B = rng.choice([0.5, 0.75, 1.25], size // block).astype(np.float32)
        rate, mu = 0.7 - 0.1 * step, 0.9 - 0.05 * step
        take_step(
            optimizer, theta, raw, state, learning_rate=rate, momentum=mu, factors_S=factor_B,
            grid=grid_of(size, block, shard_elements),
        )  # fmt: skip
        g = raw * factor_B.repeat(block)
        expected = reference_step(name, expected, g, expected_state, rate, mu, 3, 0.2)
        assert theta.tobytes() == expected.tobytes()
    assert (
        sum(array.size for array in state.values())
        == ({"sgd": 0, "momentum": size, "nesterov": size, "delayed_nesterov": 2 * size + 1}[name])
    )


def test_the_merged_sum_is_not_changed_by_a_step():
    accumulator = accumulated("int4", random_updates("int4", 2, seed=1))
    before = sum_of(accumulator).tobytes()
    fragment = _Fragment(np.zeros(GRID.size, np.float32), make_outer("sgd"))
    fragment.close(accumulator, np.ones(6, np.float32), "int4")
    assert sum_of(accumulator).tobytes() == before


# --- Closing and merging again


@settings(max_examples=40)
@given(codecs, codecs, st.sampled_from(OPTIMIZERS), st.integers(0, 2**32 - 1))
def test_merging_again_from_the_record_gives_the_same_bits(codec, delta_codec, name, seed):
    optimizer = make_outer(name, delay=2)
    start = np.random.default_rng(seed).standard_normal(GRID.size).astype(np.float32)
    first = _Fragment(start, optimizer)
    again = _Fragment(start, optimizer)
    for round_ in range(3):
        updates = random_updates(codec, 1 + round_, seed + round_)
        accumulator = accumulated(codec, updates)
        factor_S = factors(GRID, accumulator, [c for _, c in updates])
        recorded = factor_S.tobytes(), [coefficients(GRID, c).tobytes() for _, c in updates]
        first.close(accumulator, factor_S, delta_codec)
        accumulator.reset()
        for (shards, _), coefficient in zip(updates, recorded[1], strict=True):
            read = np.frombuffer(coefficient, ml_dtypes.bfloat16)
            accumulator.add(codec, shards, read)
        again.close(accumulator, np.frombuffer(recorded[0], np.float32), delta_codec)
        assert first.bits() == again.bits()


@pytest.mark.parametrize("codec", CODECS)
def test_the_view_follows_theta_and_readers_follow_the_view(codec):
    """Quantization's error is carried: view + remainder = theta; the remainder goes out."""
    rng = np.random.default_rng(2)
    theta = rng.standard_normal(GRID.size).astype(np.float32)
    view = np.zeros(GRID.size, np.float32)
    reader = view.copy()
    thin = codec == "int2"  # A block's small values wait until its large ones are sent.
    for _ in range(50 if thin else 12):
        whole = encode(codec, theta - view, BLOCK)
        delta = advance_view(theta, view, codec, BLOCK)
        assert delta.codes.tobytes() == np.asarray(whole.codes).tobytes()
        assert delta.scales.tobytes() == np.asarray(whole.scales).tobytes()
        reader += decode_numpy(codec, delta, BLOCK)
        assert reader.tobytes() == view.tobytes()
    np.testing.assert_allclose(view, theta, rtol=1e-6, atol=1e-6 if thin else 1e-9)


@settings(max_examples=60)
@given(codecs, st.integers(0, 2**32 - 1), st.sampled_from([16, 64]))
def test_the_delta_is_encoded_as_learners_would(codec, seed, block):
    """Of any magnitude, half way between two codes, zeros, denormal numbers and what is no number."""
    rng = np.random.default_rng(seed)
    theta = rng.integers(-14, 15, 8 * block) * np.float32(0.5)
    theta *= 2.0 ** rng.integers(-150, 100, theta.size // block).repeat(block)
    theta = (theta * rng.choice([1.0, 1.0, 1 + 2**-20], theta.size)).astype(np.float32)
    theta[:block] *= np.float32(rng.integers(0, 2))
    if seed % 3 == 0:
        theta[-1] = rng.choice([np.inf, -np.inf, np.nan])
    view = np.zeros_like(theta)
    expected = encode(codec, theta, block)
    delta = advance_view(theta, view, codec, block)
    assert delta.scales.tobytes() == np.asarray(expected.scales).tobytes()
    assert delta.codes.tobytes() == np.asarray(expected.codes).tobytes()
    with np.errstate(invalid="ignore"):
        moved = decode_numpy(codec, delta, block) + np.float32(0)
    np.testing.assert_array_equal(view, moved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_momentum_that_fades_away_stays_numpys_to_the_last_denormal_number(name):
    theta, optimizer = np.ones(32, np.float32), make_outer(name, delay=2)
    state, expected, expected_state = optimizer.init(32), theta.copy(), {}
    for step in range(400):
        gradient = np.full(32, 2.0**-99 if step == 0 else 0, np.float32)
        take_step(optimizer, theta, gradient, state, learning_rate=0.7, momentum=0.9)
        expected = reference_step(name, expected, gradient, expected_state, 0.7, 0.9, 2, 0.0)
        if "m" in expected_state:
            assert state["momentum"].tobytes() == expected_state["m"].tobytes()
    assert theta.tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_the_number_of_threads_changes_no_bit(codec, monkeypatch):
    monkeypatch.setattr(grids, "PIECE_BLOCKS", 1)
    monkeypatch.setattr(grids, "LEAST_PIECES", 1)
    accumulator = accumulated(codec, random_updates(codec, 3, seed=4))
    factor_S = np.random.default_rng(4).uniform(0.1, 1, 6).astype(np.float32)
    start = np.random.default_rng(5).standard_normal(GRID.size).astype(np.float32)
    found, readers = [], []
    for threads in (1, 2, 16):
        fragment, reader = _Fragment(start, make_outer("nesterov")), start.copy()
        for _ in range(3):
            delta = fragment.close(accumulator, factor_S, codec, threads)
            reader += decode_numpy(codec, delta, BLOCK)
        found.append(fragment.bits())
        readers.append(reader.tobytes())
    assert found[0] == found[1] == found[2]
    assert readers == [found[0][1]] * 3


class _Fragment:
    def __init__(self, start: np.ndarray, optimizer: outer.OuterOptimizer) -> None:
        self.theta, self.view = start.copy(), start.copy()
        self.optimizer, self.state = optimizer, optimizer.init(start.size)

    def close(
        self, accumulator: Accumulator, factor_S: np.ndarray, codec: str, threads: int = 2
    ) -> Encoded:
        return close_round(
            GRID,
            accumulator,
            factor_S,
            theta_N=self.theta,
            view_N=self.view,
            state=self.state,
            optimizer=self.optimizer,
            learning_rate=0.7,
            momentum=0.9,
            delta_codec=codec,
            threads=threads,
        )

    def bits(self) -> list[bytes]:
        return [array.tobytes() for array in (self.theta, self.view, *self.state.values())]


# --- Same bits everywhere


OLD = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "", "OPENBLAS_CORETYPE": "Nehalem"}
SSE = ("SSE4_2", OLD | {"OPENBLAS_NUM_THREADS": "1"})
AVX2 = ("AVX2", {"OPENBLAS_NUM_THREADS": "2"})


@pytest.mark.long
def test_every_instruction_set_gives_the_same_bits():
    """Encode, merge by both rules, distances, outer step, version delta, a learner's apply."""
    others = [
        subprocess.Popen(
            [sys.executable, same_bits.__file__, *CODECS],
            env={**os.environ, "XLA_FLAGS": f"--xla_cpu_max_isa={isa}", **kernels},
            stdout=subprocess.PIPE,
            text=True,
        )
        for isa, kernels in (SSE, AVX2)
    ]
    expected = same_bits.digests(CODECS)
    assert len(set(expected)) == len(CODECS)
    for other in others:
        printed, _ = other.communicate(timeout=300)
        assert printed.splitlines() == expected
