"""The inner optimizer's direction and the learning rate's schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.common.protocol.errors import TaskError
from diloco.common.protocol.layout import TensorHint
from diloco.learner.tensors.optimizer import Matrices, adamw, muon, warmup_cosine


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


def random(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def moved(params, gradients, **options):
    optimizer = muon(weight_decay=0.0, clip=1e9, **options)
    # Compiled as a whole, as a learner does; operation by operation takes several times as long.
    update = jax.jit(
        lambda gradients, params: optimizer.update(gradients, optimizer.init(params), params)[0]
    )
    return update(gradients, params)


def singular(matrix):
    return np.linalg.svd(np.asarray(matrix), compute_uv=False)


def stacked(name, shape):
    del name
    return TensorHint(norm_axes=max(0, len(shape) - 2))


def test_muon_moves_each_matrix_of_a_stack_by_itself_along_an_orthogonal_one():
    gradient = random((2, 3, 8, 16)) * jnp.asarray([1.0, 1e-3])[:, None, None, None]
    update = moved({"w": jnp.zeros_like(gradient)}, {"w": gradient}, hint=stacked)["w"]
    for layer in range(2):
        for expert in range(3):
            one = moved({"w": jnp.zeros((8, 16))}, {"w": gradient[layer, expert]})["w"]
            np.testing.assert_allclose(update[layer, expert], one, atol=2e-3)
            # Five iterations leave singular values between 0.5 and 1.5 of the scale.
            assert np.all(np.abs(singular(one) / (0.2 * 16**0.5) - 1) < 0.6)


def test_an_entry_of_muons_direction_is_as_large_as_one_of_adams_at_any_shape():
    for shape in [(64, 64), (64, 256), (512, 64)]:
        update = moved({"w": jnp.zeros(shape)}, {"w": random(shape)})["w"]
        assert float(jnp.sqrt(jnp.mean(update**2))) == pytest.approx(0.2, rel=0.25)


def test_vectors_and_what_is_averaged_move_by_adam():
    def hint(name, shape):
        average = "average" if name == "embed" else "rda"
        return TensorHint(merge=average, norm_axes=int(name == "norms") * (len(shape) - 1))

    params = {"embed": jnp.zeros((9, 4)), "norms": jnp.zeros((3, 4)), "b": jnp.zeros(4)}
    gradients = jax.tree.map(lambda leaf: random(leaf.shape), params)
    ours, theirs = muon(weight_decay=0.0, hint=hint), adamw(weight_decay=0.0, hint=hint)
    state, their_state = ours.init(params), theirs.init(params)
    update, _ = ours.update(gradients, state, params)
    expected, _ = theirs.update(gradients, their_state, params)
    jax.tree.map(np.testing.assert_array_equal, update, expected)


def test_parts_of_one_tensor_are_orthogonalized_apart():
    """As q, k and v of heads that lie side by side."""
    heads, width, part = 2, 8, 4

    def apart(name, shape):
        del name, shape
        return Matrices((width, heads, 3, part), inputs=(0,), outputs=(1, 3))

    gradient = random((width, heads, 3, part))
    flat = gradient.reshape(width, -1)
    update = moved({"w": jnp.zeros_like(flat)}, {"w": flat}, matrices=apart)["w"]
    for index in range(3):
        one = gradient[:, :, index].reshape(width, -1)
        expected = moved({"w": jnp.zeros_like(one)}, {"w": one})["w"]
        found = update.reshape(gradient.shape)[:, :, index].reshape(width, -1)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_muons_momentum_has_the_shape_and_dtype_of_its_tensor():
    params = {"w": jnp.zeros((2, 8, 16), jnp.bfloat16), "b": jnp.zeros(4)}
    optimizer = muon(hint=stacked)
    state = optimizer.init(params)
    gradients = jax.tree.map(jnp.ones_like, params)
    _, after = optimizer.update(gradients, state, params)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state, after))
    assert shapes[0] == shapes[1]
    kept = optax.tree_utils.tree_get_all_with_path(state, "mu")
    assert {leaf.shape for _, tree in kept for leaf in jax.tree.leaves(tree)} == {(2, 8, 16), (4,)}


def test_matrices_that_are_not_the_tensors_elements_are_refused():
    def apart(name, shape):
        del name, shape
        return Matrices((2, 2), inputs=(0,), outputs=(1,))

    with pytest.raises(TaskError, match="matrices of 'w' must be"):
        moved({"w": jnp.zeros((3, 3))}, {"w": jnp.ones((3, 3))}, matrices=apart)


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
