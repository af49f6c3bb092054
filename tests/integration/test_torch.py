"""PyTorch and JAX train one model in one run. In an environment with torch: `make test-extras`."""

import threading

import jax
import numpy as np
import pytest
from audit import read_tape
from flax import nnx

import diloco

torch = pytest.importorskip("torch")

import diloco.torch  # noqa: E402
from diloco.common.protocol.errors import ConfigError  # noqa: E402
from diloco.models.frameworks.tensors import leaves_of  # noqa: E402
from diloco.torch.tensors import ModuleTensors, begun, state_of  # noqa: E402
from examples import own_loop, own_loop_torch  # noqa: E402

RUN = {"steps": 240, "tokens_per_step": 32}
SYNC = {"interval_steps": 8, "fragments": 3, "block": 16, "min_steps": 3}


@pytest.fixture
def world(new_world):
    world = new_world(create=False, run=RUN, outer={"optimizer": "sgd", "learning_rate": 0.5})
    del world.document["task"]
    world.document["sync"] = SYNC
    world.variant("run", {})
    return world


def logits_of_both(params, images):
    """Returns the logits of both frameworks for the same parameters."""
    graph, _ = own_loop.model()
    of_jax = nnx.merge(graph, nnx.State(params))(images)
    module = own_loop_torch.model()
    for name, leaf in leaves_of(ModuleTensors(module), own_loop_torch.TABLE).items():
        folder, last = name.split("/")
        leaf.take(np.asarray(params[folder][last]))
    with torch.no_grad():
        of_torch = module(torch.from_numpy(images)).numpy()
    return np.asarray(of_jax), of_torch


def test_a_version_has_the_same_logits_in_both_frameworks():
    _, params = own_loop.model()
    of_jax, of_torch = logits_of_both(params, own_loop.IMAGES[:200])
    assert np.abs(of_jax - of_torch).max() < 1e-5 * np.abs(of_jax).max()


def test_learners_of_both_frameworks_train_one_model(world):
    diloco.create(world.config_path, own_loop.model()[1])
    world.aggregator()
    failed = []

    def of_jax():
        try:
            own_loop.train(world.config_path, "a")
        except Exception as error:
            failed.append(error)

    other = threading.Thread(target=of_jax)
    other.start()
    own_loop_torch.train(world.config_path, "b")
    other.join()
    assert not failed
    assert jax.default_backend() == "cpu"
    accuracy = own_loop_torch.accuracy(world.config_path)
    assert accuracy > 0.8
    assert own_loop.accuracy(world.config_path) == pytest.approx(accuracy, abs=0.004)
    sent = read_tape(world).manifests
    assert {manifest.learner for _, manifest in sent} == {"a", "b"}


def test_an_optimizer_goes_on_from_its_state():
    def stepped(optimizer, module):
        module(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    modules = [torch.nn.Linear(3, 2) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    first, second = (torch.optim.Adam(module.parameters(), lr=0.1) for module in modules)
    before = modules[1].weight.detach().clone()
    with begun(second) as (like, _):
        assert set(like) == {f"{n}/{k}" for n in (0, 1) for k in ("step", "exp_avg", "exp_avg_sq")}
    assert not second.state
    assert torch.equal(modules[1].weight, before)
    stepped(first, modules[0])
    with begun(second) as (_, take):
        take(state_of(first))
    modules[1].load_state_dict(modules[0].state_dict())
    for optimizer, module in zip((first, second), modules, strict=True):
        stepped(optimizer, module)
    assert torch.equal(modules[0].weight, modules[1].weight)


def test_bfloat16_goes_there_and_back():
    module = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    tensors = ModuleTensors(module)
    values = tensors.read("weight").copy()
    assert values.dtype.name == "bfloat16"
    with torch.no_grad():
        module.weight.zero_()
    tensors.write("weight", values)
    np.testing.assert_array_equal(module.weight.float().detach().numpy(), values.astype(np.float32))


def test_an_integer_parameter_is_refused():
    module = torch.nn.Linear(3, 2)
    module.weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="and no float"):
        ModuleTensors(module)
