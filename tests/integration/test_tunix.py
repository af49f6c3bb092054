"""Modules of google-tunix as they are, trained by the task of flax.nnx: `make test-extras`."""

import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if importlib.util.find_spec("tunix") is None:
    pytest.skip("needs google-tunix: make test-extras", allow_module_level=True)

from flax import nnx

import diloco.models.nnx
from diloco.learner.load_and_check_task import load_task
from diloco.learner.tensors import tree
from diloco.learner.tensors.inner_step import make_inner_step
from tests.integration import tunix_models
from tests.integration.test_examples import task_world
from tests.integration.tunix_models import LENGTH, VOCAB, llama, loss

# What its libraries say is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
MODELS, BUILD = "tests.integration.tunix_models", "diloco.models.nnx:build"


@pytest.fixture
def options(tmp_path):
    """Tokens that count up: the next one follows from the last."""
    data = tmp_path / "tokens"
    data.mkdir()
    for side in ("train", "held_out"):
        np.save(data / f"{side}.npy", (np.arange(2_000) % VOCAB).astype(np.uint16))
    given = {"data": str(data), "vocab": VOCAB, "length": LENGTH, "batch": 8}
    return given | {"loss": f"{MODELS}:loss", "learning_rate": 0.01}


@pytest.mark.parametrize("name", ["llama", "mixture", "gemma"])
def test_loss_and_gradient_are_those_of_tunix_and_reach_every_parameter(options, name):
    task = load_task(BUILD, steps=40, seed=3, options=options | {"module": f"{MODELS}:{name}"})
    variables, batch = task.shapes, next(task.batches("a", 0))
    assert variables.frozen is None
    assert variables.state is None
    model = nnx.eval_shape(lambda: getattr(tunix_models, name)(nnx.Rngs(0)))
    # Drawn: tunix begins its MLPs as zeros, which have no gradient, and loads their weights.
    state, rng = nnx.state(model, nnx.Param), np.random.default_rng(0)
    for _, leaf in nnx.to_flat_state(state):
        drawn = rng.normal(0, 0.3, leaf.shape)
        leaf.set_value(jnp.asarray(drawn, jnp.float32))
    nnx.update(model, state)
    variables = variables._replace(trained=nnx.to_pure_dict(state))
    wanted, theirs = nnx.jit(nnx.value_and_grad(loss))(model, batch)

    def of_task(trained):
        return task.loss(variables._replace(trained=trained), batch, jax.random.key(0))[0]

    found, ours = jax.jit(jax.value_and_grad(of_task))(variables.trained)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    gradients = tree.by_name(ours)
    for path, values in nnx.to_flat_state(theirs):
        leaf = gradients.pop("/".join(map(str, path)))
        np.testing.assert_allclose(leaf, values.get_value(), rtol=1e-4, atol=1e-6)
        assert np.abs(leaf).max() > 0, path
    assert not gradients


def test_a_model_of_tunix_is_checked_takes_steps_and_comes_back(new_world, options):
    world = task_world(new_world, BUILD, module=f"{MODELS}:llama", **options)
    check = [sys.executable, "-m", "diloco", "check", world.config_path, "--steps", "2"]
    assert not subprocess.run(check, check=False).returncode

    # Version 0 of the run, in a model of tunix.
    model = diloco.models.nnx.load_model(world.config_path, llama)
    task = load_task(BUILD, steps=40, seed=7, options=world.document["task"]["options"])
    variables = task.shapes._replace(trained=nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    rows = np.arange(4 * (LENGTH + 1)).reshape(4, -1) % VOCAB
    measured = nnx.jit(loss)
    first = measured(model, rows)
    state, step = task.optimizer.init(variables.trained), make_inner_step(task)
    for number in range(40):
        batch = next(task.batches("a", number))
        variables, state, _ = step(variables, state, batch, np.int32(number))
    nnx.update(model, nnx.State(variables.trained))
    assert measured(model, rows) < 0.5 * first
