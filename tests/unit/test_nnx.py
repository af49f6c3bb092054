"""Modules of flax.nnx as they are: what the adapter computes is what nnx computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco.common.protocol.errors import TaskError
from diloco.learner.load_and_check_task import load_task
from diloco.learner.task import hint_of
from diloco.learner.tensors import tree

HERE = "tests.unit.test_nnx"
ROWS = {"module": f"{HERE}:make", "data": f"{HERE}:data", "loss": f"{HERE}:loss", "batch": 32}


def task_of(**options):
    return load_task("diloco.models.nnx:build", steps=40, seed=3, options=options)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(6, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, rows):
        return self.dropout(self.norm(self.hidden(rows))).sum(-1)


def make(rngs):
    return Net(rngs)


def data():
    rng = np.random.default_rng(0)
    return tuple((rng.normal(size=(64, 6)).astype(np.float32), np.ones(64)) for _ in range(2))


def loss(net, batch):
    rows, targets = batch
    return ((net(rows) - targets) ** 2).mean(), {"largest": rows.max()}


class Tower(nnx.Module):
    """Tokens; the head is the embedding, and the base has a low-rank adapter beside it."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.layers = nnx.List([nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + self.dropout(nnx.relu(layer(hidden)))
        return self.embed.attend(hidden)


def still(rngs):
    """Nothing of it is dropped."""
    net = make(rngs)
    net.dropout.rate = 0.0
    return net


def tower(rngs):
    return Tower(rngs)


def no_module(rngs):
    return {"kernel": jnp.zeros(3)}


def uneven():
    return (np.zeros((40, 6), np.float32), np.zeros(39, np.int32)), data()[1]


def few():
    return data()[0], (np.zeros((3, 6), np.float32), np.zeros(3, np.int32))


def one_side():
    return np.zeros((40, 6), np.float32)


@pytest.fixture
def tokens(tmp_path):
    rng = np.random.default_rng(0)
    for side in ("train", "held_out"):
        np.save(tmp_path / f"{side}.npy", rng.integers(16, size=400).astype(np.uint16))
    return {"module": f"{HERE}:tower", "data": str(tmp_path), "vocab": 16, "length": 12, "batch": 4}


def test_loss_gradient_and_statistics_are_those_of_nnx_itself():
    task = task_of(**ROWS | {"module": f"{HERE}:still"})
    net, batch = still(nnx.Rngs(jax.random.key(5))), next(task.batches("a", 0))

    def of_net(net):
        return loss(net, batch)[0]

    wanted, gradient = nnx.jit(nnx.value_and_grad(of_net))(net)

    variables = task.init(jax.random.key(5))

    def of_task(trained):
        told, _, state = task.loss(variables._replace(trained=trained), batch, jax.random.key(0))
        return told, state

    measured = jax.jit(jax.value_and_grad(of_task, has_aux=True))
    (found, state), ours = measured(variables.trained)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7),
        ours,
        nnx.to_pure_dict(gradient),
    )
    np.testing.assert_allclose(state["norm"]["mean"], net.norm.mean.get_value(), rtol=1e-6)
    assert not np.array_equal(state["norm"]["mean"], variables.state["norm"]["mean"])


def test_dropout_follows_the_steps_key_and_leaves_an_evaluation_alone():
    task = task_of(**ROWS)
    variables, batch = task.init(jax.random.key(5)), next(task.batches("a", 0))
    measured = jax.jit(lambda key: task.loss(variables, batch, jax.random.key(key))[0])
    drawn = [float(measured(key)) for key in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert task.evaluate(variables) == task.evaluate(variables)
    assert not any("dropout" in name for name, _ in tree.named_leaves(variables))


def test_learners_average_the_statistics_of_batches():
    task = task_of(**ROWS)
    hint = hint_of(task, task.shapes)
    kinds = {name: hint(name, leaf.shape).kind for name, leaf in tree.named_leaves(task.shapes)}
    assert kinds["state/norm/mean"] == kinds["state/norm/var"] == "averaged"
    assert {kind for name, kind in kinds.items() if name.startswith("trained/")} == {"trained"}


def test_patterns_choose_what_is_trained(tokens):
    task = task_of(**tokens, trained=["*lora_?"], load=True)
    trained = [name for name, _ in tree.named_leaves(task.shapes.trained)]
    assert trained == [f"layers/{n}/lora/lora_{half}" for n in range(2) for half in "ab"]
    frozen = task.load_frozen()
    assert jax.tree.structure(frozen) == jax.tree.structure(task.shapes.frozen)
    np.testing.assert_array_equal(
        frozen["embed"]["embedding"],
        tower(nnx.Rngs(jax.random.key(3))).embed.embedding.get_value(),
    )
    rest = task_of(**tokens, frozen=["embed/*"]).shapes
    assert [name for name, _ in tree.named_leaves(rest.frozen)] == ["embed/embedding"]


def test_tokens_have_the_loss_of_the_next_one(tokens):
    task = task_of(**tokens)
    variables, rows = task.init(jax.random.key(1)), next(task.batches("a", 0))
    net = tower(nnx.Rngs(jax.random.key(1)))
    net.eval()
    told = jax.nn.log_softmax(net(rows[:, :-1]))
    wanted = -jnp.take_along_axis(told, rows[:, 1:, None], -1).mean()
    found = jnp.mean(
        jnp.array([task.loss(variables, rows, jax.random.key(n))[0] for n in range(9)])
    )
    assert rows.shape == (4, 13)
    assert abs(found - wanted) < 0.2 * wanted  # half of the layers' outputs are dropped
    assert task.tokens_per_batch == 48
    assert task.hint("embed/embedding", (16, 8)).merge == "average"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"module": "nowhere:make"}, "module 'nowhere' cannot be imported"),
        ({"module": f"{HERE}:made"}, "has no function 'made'"),
        ({"module": HERE}, "module"),
        ({"module": f"{HERE}:no_module"}, "must make a flax.nnx.Module, but it made a dict"),
        ({"frozen": ["hiden/*"]}, "pattern 'hiden/.' names no parameter"),
        ({"frozen": ["*"]}, "leave no parameter to train"),
        ({"data": f"{HERE}:uneven"}, "arrays of .39, 40. rows"),
        ({"data": f"{HERE}:few"}, "holds out 3 examples, less than a batch of 32"),
        ({"data": f"{HERE}:one_side"}, "must return .examples to train on, held-out examples."),
        ({"data": "/data/tokens"}, "need the option vocab"),
        ({"rate": 1.0}, "rate"),
    ],
)  # fmt: skip
def test_bad_options_are_told_by_name(changed, said):
    with pytest.raises(TaskError, match=said):
        task_of(**ROWS | changed)
