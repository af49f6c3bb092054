"""The inner optimizer's direction and the learning rate's schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.common.errors import TaskError
from diloco.common.layout import TensorHint
from diloco.learner.optimizer import adamw, warmup_cosine


def first_update(params, gradients, **options):
    optimizer = adamw(**options)
    return optimizer.update(gradients, optimizer.init(params), params)[0]


def test_the_direction_is_adams_and_carries_no_learning_rate():
    gradients = {"w": jnp.asarray([0.3, -0.001])}
    update = first_update({"w": jnp.zeros(2)}, gradients, weight_decay=0.0)
    np.testing.assert_allclose(update["w"], [1, -1], rtol=1e-3)  # the first step is the sign


def test_it_equals_optax_adamw_on_matrices():
    params, ours, theirs = (
        jnp.ones((3, 2)),
        adamw(clip=1e9),
        optax.adamw(1.0, b2=0.95, weight_decay=0.1),
    )
    state, their_state = ours.init(params), theirs.init(params)
    for seed in range(3):
        gradient = jax.random.normal(jax.random.key(seed), (3, 2))
        update, state = ours.update(gradient, state, params)
        their_update, their_state = theirs.update(gradient, their_state, params)
        np.testing.assert_allclose(update, -their_update, rtol=1e-6)
        params -= 0.1 * update


def test_only_matrices_decay_and_a_stack_of_vectors_is_none():
    params = {"layers": {"norm": jnp.ones((3, 4)), "w": jnp.ones((3, 4, 4))}, "b": jnp.ones(4)}

    def hint(name, shape):
        return TensorHint(norm_axes=int(name.startswith("layers/")))

    update = first_update(params, jax.tree.map(jnp.zeros_like, params), weight_decay=0.5, hint=hint)
    decayed = jax.tree.map(lambda leaf: float(leaf.max()), update)
    assert decayed == {"layers": {"norm": 0.0, "w": 0.5}, "b": 0.0}


def test_a_long_gradient_is_clipped_as_a_whole():
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    optimizer = adamw(clip=0.5, b1=0.0)
    _, state = optimizer.update({"a": jnp.asarray([3.0]), "b": jnp.asarray([4.0])},
                                optimizer.init(params), params)  # fmt: skip
    moments = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose([moments["a"][0], moments["b"][0]], [0.3, 0.4], rtol=1e-6)


def test_the_schedule_at_its_corners():
    schedule = warmup_cosine(steps=110, peak=2.0, warmup_steps=10, final_fraction=0.1)
    rates = schedule(jnp.asarray([0, 5, 10, 60, 110, 10_000]))
    np.testing.assert_allclose(rates, [2 / 11, 12 / 11, 2.0, 1.1, 0.2, 0.2], rtol=1e-6)
    assert rates.dtype == jnp.float32
    np.testing.assert_allclose(schedule(60), jax.jit(schedule)(60), rtol=1e-6)


def test_without_warmup_the_schedule_starts_at_its_peak():
    assert float(warmup_cosine(steps=1, peak=3.0, warmup_steps=0)(0)) == 3.0


@pytest.mark.parametrize("warmup_steps", [-1, 10, 11])
def test_a_warmup_as_long_as_the_run_is_refused(warmup_steps):
    with pytest.raises(TaskError, match="warm-up must end before"):
        warmup_cosine(steps=10, peak=1.0, warmup_steps=warmup_steps)
