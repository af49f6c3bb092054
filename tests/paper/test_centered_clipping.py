"""Claims of centered clipping (Karimireddy et al., arXiv 2012.10333) that numbers alone can check."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_merge_claims import BLOCK, SIZE, grid_of

from diloco.aggregator.arrays import centering
from diloco.aggregator.arrays.merge import (
    Accumulator,
    Contribution,
    coefficients,
    factors,
    segment_norms,
)
from diloco.learner.tensors.quantize_and_pack import encode

GRID = grid_of("centered_clipping")


def merged(vectors, center, radius, times=1.0, codec="float32", weights=None) -> np.ndarray:
    """The merge of a round, as the aggregator forms it."""
    accumulator, contributions, found = Accumulator(GRID), [], {}
    radius_S = np.full(1, radius, np.float32)
    for index, vector in enumerate(vectors):
        shards = [encode(codec, vector.astype(np.float32), BLOCK)]
        weight = 1.0 if weights is None else weights[index]
        one = Contribution(segment_norms(GRID, codec, shards), weight)
        away_S = centering.distances(GRID, codec, shards, one, center, radius_S)
        found[str(index)] = away_S
        one = one._replace(pull=centering.pulls(away_S, radius_S, times))
        accumulator.add(codec, shards, coefficients(GRID, one))
        contributions.append(one)
    total = accumulator.total().copy()
    factors_S = centering.scaled(factors(GRID, accumulator, contributions), radius_S, found)
    summed = total * GRID.per_block(factors_S).repeat(BLOCK)
    return summed + center * centering.center_share(contributions, radius_S)[0]


def drawn(seed: int, count: int, spread: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """A mean, and so many vectors about it."""
    rng = np.random.default_rng(seed)
    mean = rng.standard_normal(SIZE).astype(np.float32)
    return mean, [
        mean + spread * rng.standard_normal(SIZE).astype(np.float32) for _ in range(count)
    ]


def test_within_the_radius_it_is_the_average():
    mean, vectors = drawn(0, 4, 0.1)
    got = merged(vectors, mean, radius=1e6, weights=[1.0, 2.0, 3.0, 2.0])
    np.testing.assert_allclose(got, np.average(vectors, axis=0, weights=[1, 2, 3, 2]), atol=1e-4)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    length=st.sampled_from([1e-3, 1.0, 1e3, 1e6]),
    times=st.sampled_from([0.25, 0.5, 1.0]),
    codec=st.sampled_from(["float32", "int4"]),
)
def test_no_update_moves_the_merge_further_than_its_share_of_the_radius(seed, length, times, codec):
    """Whatever a liar sends: it moves the merge by at most twice w kappa r / sum w."""
    mean, vectors = drawn(seed, 4, 0.3)
    lie = length * np.random.default_rng(seed + 1).standard_normal(SIZE).astype(np.float32)
    radius = 10.0
    honest = merged([*vectors[:3], mean], mean, radius, times, codec)
    lied = merged([*vectors[:3], lie], mean, radius, times, codec)
    # A coefficient is rounded to 8 bits, and int4 codes to a seventh of their block's greatest.
    slack = 1.02 * times * radius / 4 + (0.02 if codec == "float32" else 0.1) * np.linalg.norm(mean)
    assert np.linalg.norm(lied - honest) <= slack


def test_its_mistake_does_not_grow_with_the_lie_where_an_average_has_none_to_stop_it():
    """§5: with one liar of ten, the error is of the order of the learners' own spread."""
    mean, vectors = drawn(3, 9, 0.5)
    spread = float(np.linalg.norm(vectors[0] - mean))
    for length in (1.0, 100.0, 10_000.0):
        got = merged([*vectors, -length * mean], mean, radius=spread)
        assert np.linalg.norm(got - mean) < spread / 2
    average = np.mean([*vectors, -100.0 * mean], axis=0)
    assert np.linalg.norm(average - mean) > 5 * spread


def test_before_a_radius_is_known_directions_are_merged():
    """No update's length counts for more than the median's."""
    mean, vectors = drawn(7, 3, 0.2)
    got = merged([*vectors, -1e6 * mean], 0 * mean, radius=0.0)
    lengths = sorted(float(np.linalg.norm(vector)) for vector in vectors)
    wanted = [vector / np.linalg.norm(vector) for vector in (*vectors, -mean)]
    np.testing.assert_allclose(got, lengths[1] * np.mean(wanted, axis=0), rtol=0.02, atol=0.02)


def test_a_center_that_is_wrong_is_left_behind_in_some_rounds():
    """§6: clipping about the last aggregate converges from anywhere, a radius each round."""
    mean, vectors = drawn(5, 4, 0.1)
    center = mean + 3 * np.random.default_rng(6).standard_normal(SIZE).astype(np.float32)
    away = [float(np.linalg.norm(center - mean))]
    for _ in range(8):
        center = merged(vectors, center, radius=away[-1], times=0.8)
        away.append(float(np.linalg.norm(center - mean)))
    assert away[-1] < 0.1 * away[0]


def test_the_radius_is_a_median_that_one_learner_moves_nowhere():
    found = {
        name: np.asarray([value]) for name, value in zip("abcd", (1.0, 1.2, 1.1, 1e9), strict=True)
    }
    (radius,) = centering.radius_after(np.zeros(1, np.float32), found)
    assert radius == pytest.approx(1.1)
    found["d"] = np.zeros(1)
    (radius,) = centering.radius_after(np.zeros(1, np.float32), found)
    assert radius == pytest.approx(1.0)
    two = {name: found[name] for name in "ab"}
    assert centering.radius_after(np.asarray([7.0], np.float32), two)[0] == 7.0
