"""Claims of the papers on merging and on outer optimizers that can be checked with numbers alone.

Each test names its section of docs/design/paper.md.
"""

import numpy as np
import pytest
from steps import take_step

from diloco.aggregator.arrays.grid import Grid, make_grid
from diloco.aggregator.arrays.merge import (
    Accumulator,
    Contribution,
    coefficients,
    factors,
    segment_norms,
)
from diloco.aggregator.arrays.outer import make_outer
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.learner.tensors.quantize_and_pack import encode

SIZE = 1 << 14
BLOCK = 64


def grid_of(merge: str, segments: int = 1) -> Grid:
    layout = make_layout(
        [Tensor(name="x", shape=(segments, SIZE // segments), dtype="float32")],
        fragments=1,
        block=BLOCK,
        hint=lambda *_: TensorHint(norm_axes=1),
    )
    return make_grid(layout.fragments[0], BLOCK, SIZE, merge)


def merged(
    grid: Grid, vectors: list[np.ndarray], *, codec: str = "float32", **of_each: list[float]
) -> np.ndarray:
    """The merged outer gradient of `vectors`, as the aggregator forms it."""
    accumulator, contributions = Accumulator(grid), []
    for index, vector in enumerate(vectors):
        shards = [encode(codec, vector.astype(np.float32), BLOCK)]
        terms = {name: values[index] for name, values in of_each.items()}
        contribution = Contribution(segment_norms(grid, codec, shards), **{"weight": 1.0, **terms})
        accumulator.add(codec, shards, coefficients(grid, contribution))
        contributions.append(contribution)
    total = accumulator.total().copy()
    return total * grid.per_block(factors(grid, accumulator, contributions)).repeat(BLOCK)


def orthogonal(count: int, norm: float, seed: int = 0) -> list[np.ndarray]:
    rows = np.random.default_rng(seed).standard_normal((SIZE, count))
    return list(norm * np.linalg.qr(rows)[0].T)


@pytest.mark.parametrize("codec", ["float32", "int4"])
@pytest.mark.parametrize("learners", [2, 4, 8, 16])
def test_mean_of_orthogonal_gradients_shrinks_and_rda_keeps_the_norm(learners, codec):
    """§1, RDA: a plain mean of M orthogonal norm-R vectors has norm R / sqrt(M)."""
    vectors = orthogonal(learners, norm=3.0)
    mean = np.linalg.norm(merged(grid_of("average"), vectors, codec=codec))
    radial = np.linalg.norm(merged(grid_of("rda"), vectors, codec=codec))
    tolerance = 0.03 if codec == "int4" else 1e-5
    np.testing.assert_allclose(mean, 3 / np.sqrt(learners), rtol=tolerance)
    np.testing.assert_allclose(radial, 3.0, rtol=tolerance)


def test_rda_of_equal_directions_is_the_mean():
    """§1, RDA: where directions agree there is nothing to restore."""
    direction = orthogonal(1, norm=1.0)[0]
    vectors = [2 * direction, 4 * direction]
    expected = (1.0 * 2 + 3.0 * 4) / 4 * direction
    for rule in ("rda", "average"):
        got = merged(grid_of(rule), vectors, weight=[1.0, 3.0])
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-9)


def test_rda_lets_no_learner_set_the_direction_by_its_length():
    """§1, RDA: phi(v) of each counts by its weight alone."""
    short, long = orthogonal(2, norm=1.0)
    got = merged(grid_of("rda"), [short, 100 * long])
    np.testing.assert_allclose(got @ short, got @ long, rtol=2.0**-7)


def test_rda_is_taken_of_each_segment_by_itself():
    """App. D.2 leaves the granularity open; here a layer of a stacked tensor has its own norm."""
    grid = grid_of("rda", segments=4)
    vectors = orthogonal(3, norm=5.0)
    got = merged(grid, vectors).reshape(4, -1)
    norms = np.mean([np.linalg.norm(v.reshape(4, -1), axis=1) for v in vectors], axis=0)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), norms, rtol=1e-5)


def test_cancelling_and_zero_gradients_are_handled():
    """§1: zero vectors and cancelling directions are undefined in the paper; here they give 0."""
    vector = orthogonal(1, norm=1.0)[0]
    assert not merged(grid_of("rda"), [vector, -vector]).any()
    assert not merged(grid_of("rda"), [0 * vector]).any()
    lonely = merged(grid_of("rda"), [vector, 0 * vector])
    np.testing.assert_allclose(lonely, vector / 2, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("rule", ["rda", "average"])
@pytest.mark.parametrize("discount", [1.0, 0.5, 1 / np.sqrt(10)])
def test_a_stale_update_alone_in_its_round_is_discounted(rule, discount):
    """DESIGN, "A round and its merge": numerators use w S, denominators the sum of w."""
    vector = orthogonal(1, norm=2.0)[0]
    got = merged(grid_of(rule), [vector], weight=[7.0], discount=[discount])
    np.testing.assert_allclose(np.linalg.norm(got), 2 * discount, rtol=2.0**-8)


@pytest.mark.parametrize("rule", ["rda", "average"])
def test_a_discount_shrinks_an_updates_share_too(rule):
    fresh, stale = orthogonal(2, norm=1.0)
    got = merged(grid_of(rule), [fresh, stale], discount=[1.0, 0.25])
    np.testing.assert_allclose(got @ stale / (got @ fresh), 0.25, rtol=2.0**-7)


@pytest.mark.parametrize("rule", ["rda", "average"])
def test_a_clip_shortens_an_update_and_leaves_its_direction(rule):
    vector = orthogonal(1, norm=8.0)[0]
    got = merged(grid_of(rule), [vector], clip=[0.25])
    np.testing.assert_allclose(got, vector / 4, rtol=2.0**-8, atol=1e-9)


def test_weights_are_relative():
    vectors = orthogonal(3, norm=1.0)
    small = merged(grid_of("rda"), vectors, weight=[1.0, 2.0, 4.0])
    large = merged(grid_of("rda"), vectors, weight=[2.0**40, 2.0**41, 2.0**42])
    np.testing.assert_allclose(small, large, rtol=1e-6, atol=1e-12)


def test_the_mean_of_equals_is_exact_though_weights_are_rounded():
    """DESIGN, invariant 7: in lockstep the system equals synchronous DiLoCo."""
    vector = orthogonal(1, norm=1.0)[0].astype(np.float32)
    got = merged(grid_of("average"), [vector] * 4, weight=[1000003.0] * 4)
    np.testing.assert_allclose(got, vector, rtol=1e-6)


# --- Outer optimizers


def trajectory(
    name: str, gradients: list[np.ndarray], rate: float = 0.7, momentum: float = 0.9, **options
) -> list[np.ndarray]:
    theta = np.zeros(gradients[0].size, np.float32)
    optimizer = make_outer(name, **options)
    state, path = optimizer.init(theta.size), []
    for gradient in gradients:
        take_step(optimizer, theta, gradient, state, learning_rate=rate, momentum=momentum)
        path.append(theta.copy())
    return path


def random_gradients(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(256).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_delayed_nesterov_of_one_arrival_is_nesterov(fraction):
    """§3, Async Local-SGD: N = 1; bit for bit, whatever c is."""
    gradients = random_gradients(6)
    delayed = trajectory("delayed_nesterov", gradients, delay=1, delay_fraction=fraction)
    for a, b in zip(delayed, trajectory("nesterov", gradients), strict=True):
        assert a.tobytes() == b.tobytes()


def test_delayed_nesterov_moves_by_plain_gradients_between_refreshments():
    """§3: theta <- theta - eps (c beta m + g / N), with c = 0."""
    gradients = random_gradients(3)
    path = trajectory("delayed_nesterov", gradients, delay=4)
    np.testing.assert_allclose(path[-1], -0.7 * sum(gradients) / 4, rtol=1e-5, atol=1e-6)


def test_delayed_nesterov_refreshes_momentum_with_the_mean_of_its_arrivals():
    """§3: N arrivals of one gradient g take N plain steps of g / N, and beta m once."""
    gradient = random_gradients(1)[0]
    path = trajectory("delayed_nesterov", [gradient] * 4, delay=4)
    np.testing.assert_allclose(path[-1], -0.7 * (1 + 0.9) * gradient, rtol=1e-5)


def test_momentum_taken_at_every_arrival_multiplies_the_step():
    """§3: why momentum hurts when outer gradients are applied one by one.

    A run of equal gradients takes 1 / (1 - momentum) times its plain steps in the end.
    """
    gradient = np.ones(256, np.float32)
    path = trajectory("nesterov", [gradient] * 200)
    np.testing.assert_allclose(path[-1] - path[-2], -0.7 * gradient / (1 - 0.9), rtol=1e-3)


def test_without_momentum_every_optimizer_is_sgd():
    gradients = random_gradients(5)
    plain = trajectory("sgd", gradients)
    for name in ("momentum", "nesterov", "delayed_nesterov"):
        for a, b in zip(trajectory(name, gradients, momentum=0.0), plain, strict=True):
            assert a.tobytes() == b.tobytes()
