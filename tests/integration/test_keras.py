"""Models of Keras and keras-hub in a run, the real ones on JAX: `make test-extras`."""

import importlib.util
import sys

import jax
import numpy as np
import pytest

if importlib.util.find_spec("keras_hub") is None:
    pytest.skip("needs keras-hub: make test-extras", allow_module_level=True)

import diloco.models.keras  # noqa: I001 - before keras
import keras
import keras_hub

from diloco.common.protocol.errors import RunMismatchError, TaskError
from diloco.learner.load_and_check_task import load_task
from diloco.learner.tensors import tree
from examples import keras_module
from tests.integration.test_examples import killed_once, learn, task_world

# What its libraries say is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
HERE = "tests.integration.test_keras"
DIGITS = {"module": "examples.keras_module:make", "data": "examples.keras_module:data",
          "loss": "examples.keras_module:loss", "batch": 32, "learning_rate": 0.01}  # fmt: skip


def llama():
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=16, num_layers=2, num_query_heads=2, hidden_dim=8, intermediate_dim=12,
        num_key_value_heads=1, dropout=0.5,
    )  # fmt: skip
    backbone.enable_lora(2)
    return keras_hub.models.LlamaCausalLM(backbone=backbone)


def unbuilt():
    return keras.Sequential([keras.layers.Dense(3)])


def task_of(**options):
    return load_task("diloco.models.keras:build", steps=40, seed=3, options=options)


@pytest.fixture
def tokens(tmp_path):
    rng = np.random.default_rng(0)
    for side in ("train", "held_out"):
        np.save(tmp_path / f"{side}.npy", rng.integers(16, size=400).astype(np.uint16))
    return {"module": f"{HERE}:llama", "data": str(tmp_path), "vocab": 16, "length": 12, "batch": 4}


def test_a_killed_learner_of_a_model_of_keras_learns_digits(new_world):
    world = task_world(new_world, "diloco.models.keras:build", **DIGITS)
    killed_once(world, "b")
    _, figures = learn(world, "a", "b")
    assert figures["accuracy"] > 0.8
    model = diloco.models.keras.load_model(world.config_path, keras_module.make)
    rows = keras_module.data()[1]
    _, metrics = keras_module.loss(lambda images: model(images, training=False), rows)
    np.testing.assert_allclose(metrics["accuracy"], figures["accuracy"], atol=0.02)
    with pytest.raises(RunMismatchError, match="the model has no"):
        diloco.models.keras.load_model(world.config_path, llama)


def test_statistics_are_those_of_keras_and_seeds_follow_the_step():
    task = task_of(**DIGITS)
    variables, batch = task.init(jax.random.key(0)), next(task.batches("a", 0))
    names = {name for name, _ in tree.named_leaves(variables)}
    assert not any("seed" in name for name in names)
    assert {name.rpartition("/")[2] for name in names if name.startswith("state/")} == {
        "moving_mean", "moving_variance",
    }  # fmt: skip
    (one, _, state), (again, *_), (other, *_) = (
        task.loss(variables, batch, jax.random.key(key)) for key in (1, 1, 2)
    )
    assert one == again != other
    mean = next(name for name in state if name.endswith("moving_mean"))
    assert not np.array_equal(state[mean], variables.state[mean])
    # The same call by Keras itself, of a batch without dropout.
    model = diloco.models.keras._made(keras_module.make, 3)
    model(batch[0], training=True)
    named = {one.path: one.value for one in model.weights}
    np.testing.assert_allclose(state[mean], named[mean], rtol=1e-6)


def test_lora_of_keras_hub_is_trained_beside_frozen_weights(tokens):
    task = task_of(**tokens, load=True)
    assert "tensorflow" not in sys.modules
    trained = [name for name, _ in tree.named_leaves(task.shapes.trained)]
    assert any("lora" in name for name in trained)
    frozen = task.load_frozen()
    assert any(name.endswith("query/kernel") for name in frozen)
    assert task.shapes.state is None
    variables, rows = task.init(jax.random.key(0)), next(task.batches("a", 0))
    loss, _ = task.loss(variables, rows, jax.random.key(1))
    assert abs(float(loss) - np.log(16)) < 1


def test_a_model_that_is_not_built_is_refused():
    with pytest.raises(TaskError, match="that is built"):
        task_of(**DIGITS | {"module": f"{HERE}:unbuilt"})
