"""The examples of loops of one's own train, in a real run."""

import jax
import numpy as np
import pytest
from audit import read_tape

import diloco
from examples import batch_norm, lora, own_loop

RUN = {"steps": 240, "tokens_per_step": 32}
SYNC = {"interval_steps": 8, "fragments": 3, "block": 16, "min_steps": 3}
OUTER = {"optimizer": "sgd", "learning_rate": 0.5}


@pytest.fixture
def world(new_world):
    """A run whose file names no task."""
    world = new_world(create=False, run=RUN, outer=OUTER)
    del world.document["task"]
    world.document["sync"] = SYNC
    world.variant("run", {})
    return world


def test_an_own_loop_around_an_nnx_model_learns_digits(world):
    diloco.create(world.config_path, own_loop.model()[1])
    world.aggregator()
    own_loop.train(world.config_path, "a")
    assert own_loop.accuracy(world.config_path) > 0.8
    read_tape(world).check(ended=False)


def test_of_adapters_over_a_frozen_base_only_the_adapters_travel(world, tmp_path):
    base = tmp_path / "base.npz"
    lora.make_base(base)
    diloco.create(world.config_path, lora.new_adapters())
    world.aggregator()
    before = lora.accuracy(lora.new_adapters(), base)
    lora.train(world.config_path, "a", base)
    adapters = diloco.load(world.config_path, like=lora.new_adapters())
    assert lora.accuracy(adapters, base) > before + 0.2
    sent = [manifest for _, manifest in read_tape(world).manifests]
    elements = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    frozen = sum(leaf.size for leaf in dict(np.load(base)).values())
    largest = max(sum(shard.size_bytes for shard in manifest.shards) for manifest in sent)
    assert largest < 4 * elements < frozen


def test_a_model_with_batch_norm_learns_with_statistics_of_its_own(world):
    diloco.create(world.config_path, batch_norm.PARAMS)
    world.aggregator()
    batch_norm.train(world.config_path, "a")
    assert sorted(diloco.load(world.config_path)) == [
        "conv/bias", "conv/kernel", "norm/bias", "norm/scale", "output/bias", "output/kernel",
    ]  # fmt: skip
    assert batch_norm.accuracy(world.config_path) > 0.8
