"""The transformer: sizes, causality, options, and that it learns."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.common.protocol.errors import TaskError
from diloco.common.protocol.layout import TensorHint
from diloco.learner.load_and_check_task import check_task
from diloco.learner.task import hint_of_decoder, params_shapes
from diloco.learner.tensors.tree import named_leaves
from diloco.models.bytes_lm.model import (
    MUON_RATE,
    PRESETS,
    Decoder,
    ModelConfig,
    build,
    matrices,
    rotary,
    rotate,
)

SMALL = ModelConfig(layers=2, width=32, heads=2)
TOKENS_BxL = np.random.default_rng(0).integers(256, size=(2, 12)).astype(np.int32)
UNITS = {"m": 1e6, "b": 1e9}


@pytest.fixture(scope="module")
def params():
    return init(SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    for number in range(4):
        (path / f"{number}.txt").write_text("the cat sat on the mat. " * 50)
    return str(path)


@functools.partial(jax.jit, static_argnums=0)
def apply(config, params, tokens_BxL):
    return Decoder(config).apply(params, tokens_BxL)


def init(config):
    return jax.jit(Decoder(config).init)(jax.random.key(0))


def logits(config, params, tokens_BxL=TOKENS_BxL):
    return np.asarray(apply(config, params, tokens_BxL))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_its_name_without_embedding_and_head(name):
    preset = PRESETS[name]
    model = Decoder(ModelConfig(layers=preset.layers, width=preset.width, heads=preset.heads))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    count = sum(math.prod(leaf.shape) for name, leaf in named_leaves(shapes) if name != "embed")
    assert count == pytest.approx(float(name[:-1]) * UNITS[name[-1]], rel=0.15)
    assert preset.width % preset.heads == 0
    assert preset.width // preset.heads % 2 == 0


def test_the_task_writes_text(folder):
    task = build(steps=10, seed=0, corpus=folder, length=16)
    params = task.init(jax.random.key(0))
    pieces = task.sample(params, "the cat", jax.random.key(0), 0.7)
    assert all(isinstance(piece, str) for piece in itertools.islice(pieces, 20))


def test_a_token_changes_no_logits_before_it(params):
    before = logits(SMALL, params)
    for position in range(12):
        changed_BxL = TOKENS_BxL.copy()
        changed_BxL[0, position] = (changed_BxL[0, position] + 1) % 256
        after = logits(SMALL, params, changed_BxL)
        np.testing.assert_array_equal(after[0, :position], before[0, :position])
        np.testing.assert_array_equal(after[1], before[1])
        assert np.all(np.any(after[0, position:] != before[0, position:], axis=-1))


def test_the_order_of_earlier_tokens_matters():
    config = dataclasses.replace(SMALL, layers=1)  # a second layer would see it without positions
    params = init(config)
    swapped_BxL = TOKENS_BxL[:, [1, 0, *range(2, 12)]]
    difference = logits(config, params)[:, -1] - logits(config, params, swapped_BxL)[:, -1]
    assert np.abs(difference).max() > 1e-3


def test_rotary_positions_are_relative():
    """Products of equal queries and keys depend on the distance of their positions alone."""
    q_K, k_K = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    angles_LxK2 = rotary(10, 16)
    q_LxK = rotate(np.broadcast_to(q_K, (1, 1, 10, 16)), angles_LxK2)[0, 0]
    k_LxK = rotate(np.broadcast_to(k_K, (1, 1, 10, 16)), angles_LxK2)[0, 0]
    products_LxL = np.asarray(q_LxK @ k_LxK.T)
    np.testing.assert_allclose(products_LxL[1:, 1:], products_LxL[:-1, :-1], rtol=1e-4, atol=1e-4)
    assert np.ptp(products_LxL[0]) > 1


def test_remat_changes_no_gradient(params):
    def gradient(config):
        def total(params):
            return jnp.sum(Decoder(config).apply(params, TOKENS_BxL) ** 2)

        return jax.jit(jax.grad(total))(params)

    kept = gradient(dataclasses.replace(SMALL, remat=False))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4),
                 gradient(SMALL), kept)  # fmt: skip


def test_bfloat16_computes_near_float32_with_float32_parameters(params):
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    low = logits(config, params)
    assert low.dtype == np.float32
    assert 0 < np.abs(low - logits(SMALL, params)).max() < 0.1
    assert {leaf.dtype for _, leaf in named_leaves(init(config))} == {jnp.dtype(jnp.float32)}


def test_an_untied_head_and_a_gelu_mlp_are_other_parameters():
    config = dataclasses.replace(SMALL, tied=False, mlp="gelu", vocab=300)
    params = init(config)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params)}
    assert shapes["head"] == (32, 300)
    assert shapes["layers/mlp/up"] == (2, 32, 128)
    assert "layers/mlp/gate" not in shapes
    assert logits(config, params).shape == (2, 12, 300)


def test_layers_are_stacked_and_hinted_so():
    shapes = params_shapes(build(steps=10, seed=0))
    hints = {name: hint_of_decoder(name, leaf.shape) for name, leaf in named_leaves(shapes)}
    assert {name for name, h in hints.items() if h.norm_axes} == {
        "layers/attn/norm", "layers/attn/qkv", "layers/attn/out",
        "layers/mlp/norm", "layers/mlp/up", "layers/mlp/gate", "layers/mlp/down",
    }  # fmt: skip
    assert all(leaf.shape[0] == 3 for name, leaf in named_leaves(shapes) if hints[name].norm_axes)
    assert hints["embed"] == TensorHint(merge="average", alone=True)
    assert hints["norm"] == TensorHint()


def test_the_task_keeps_the_contract_at_any_size(folder):
    check_task(build(steps=10, seed=0), steps=10)
    check_task(build(steps=10, seed=0, preset="12b", corpus=folder, dtype="bfloat16"), steps=10)


def test_muon_orthogonalizes_the_matrices_of_layers_with_q_k_and_v_apart():
    shapes = params_shapes(build(steps=10, seed=0))
    found = {name: matrices(name, leaf.shape, heads=4) for name, leaf in named_leaves(shapes)}
    assert {name for name, apart in found.items() if apart} == {
        "layers/attn/qkv", "layers/attn/out",
        "layers/mlp/up", "layers/mlp/gate", "layers/mlp/down",
    }  # fmt: skip
    assert found["layers/attn/qkv"].shape == (3, 160, 4, 3, 40)
    assert matrices("head", (160, 256), heads=4) is None


def test_muon_learns_at_a_rate_of_its_own(folder):
    options = {"steps": 10, "seed": 0, "corpus": folder}
    adamw, muon = (build(**options, optimizer=name) for name in ("adamw", "muon"))
    assert muon.schedule(1) == pytest.approx(MUON_RATE * adamw.schedule(1))
    given = build(**options, optimizer="muon", learning_rate=1e-3, warmup_steps=0)
    assert given.schedule(0) == pytest.approx(1e-3)


def test_what_is_held_out_may_be_another_folder(folder, tmp_path):
    (tmp_path / "other.txt").write_bytes(b"\xff" * 500)
    task = build(steps=10, seed=0, corpus=folder, held_out=str(tmp_path), length=32)
    params = jax.jit(task.init)(jax.random.key(0))
    params["embed"] = params["embed"].at[0xFF].set(10.0)
    assert task.evaluate(params) < 1  # this model writes 0xff after 0xff, and nothing else is asked
    assert 0xFF not in next(task.batches("a", 0))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_task_learns(folder, optimizer):
    task = build(
        steps=30,
        seed=0,
        corpus=folder,
        batch=4,
        length=32,
        eval_batches=2,
        optimizer=optimizer,
    )
    params = jax.jit(task.init)(jax.random.key(0))
    before = task.evaluate(params)
    assert before == pytest.approx(math.log(256), abs=0.3)
    assert before == task.evaluate(params)
    state = task.optimizer.init(params)

    @jax.jit
    def train_step(params, state, batch, step):
        gradients, _ = jax.grad(task.loss, has_aux=True)(params, batch, jax.random.key(0))
        direction, state = task.optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, d: p - task.schedule(step) * d, params, direction), state

    for step, batch in zip(range(30), task.batches("a", 0), strict=False):
        params, state = train_step(params, state, batch, step)
    assert task.evaluate(params) < 2.0


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"preset": "2m"}, "'preset'.*1m, 4m"),
        ({"batch": 0}, "'batch' must be at least 1, got 0"),
        ({"batch": "8"}, "'batch' must be a whole number, got '8'"),
        ({"length": True}, "'length' must be a whole number, got True"),
        ({"eval_batches": 0}, "'eval_batches' must be at least 1"),
        ({"vocab": 255}, "'vocab' must be at least 256"),
        ({"learning_rate": 0}, "'learning_rate'.*greater than 0"),
        ({"learning_rate": math.nan}, "'learning_rate'.*finite"),
        ({"clip": -1.0}, "'clip'.*greater than 0"),
        ({"weight_decay": -0.1}, "'weight_decay' must be at least 0"),
        ({"final_fraction": 1.5}, "'final_fraction' must be at most 1"),
        ({"warmup_steps": -1}, "'warmup_steps' must be at least 0"),
        ({"warmup_steps": 10}, "warm-up must end"),
        ({"dtype": "float16"}, "'dtype'.*'float32' or 'bfloat16'"),
        ({"mlp": "relu"}, "'mlp'.*'swiglu' or 'gelu'"),
        ({"optimizer": "sgd"}, "'optimizer'.*'adamw' or 'muon'"),
        ({"tied": 1}, "'tied' must be true or false, got 1"),
        ({"remat": "yes"}, "'remat' must be true or false, got 'yes'"),
        ({"corpus": 3}, "'corpus' must be text, got 3"),
        ({"seed": -1}, "'seed' must be at least 0"),
        ({"steps": 0}, "'steps' must be at least 1"),
    ],
)
def test_a_wrong_option_is_named(option, expected):
    with pytest.raises(TaskError, match=expected):
        build(**{"steps": 10, "seed": 0, **option})


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"held_out": "no/such/folder"}, "it is missing"),
        ({"corpus": "no/such/folder"}, "it is missing"),
        ({"length": 10_000_000}, "more than length=10000000 bytes"),
    ],
)
def test_texts_are_wanted_by_whoever_reads_them(option, expected):
    """Exporting or sampling does not need the held-out texts."""
    task = build(**{"steps": 10, "seed": 0, **option})

    def read_all():
        next(iter(task.batches("a", 0)))
        task.evaluate(jax.jit(task.init)(jax.random.key(0)))

    with pytest.raises(TaskError, match=expected):
        read_all()
