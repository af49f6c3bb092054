"""Cross entropy over parts of a vocabulary: what the logits of all of it give."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from diloco.common.process.config import MeshSection
from diloco.learner.tensors.mesh import make_mesh, within
from diloco.models.decoders.config import parse_config
from diloco.models.decoders.model import DEFAULT, capped, token_losses
from tests.models.cases import LLAMA

CONFIG = parse_config(LLAMA, source="")
MESHES = {
    "one device": MeshSection(data=1, fsdp=1),
    "cut by width": MeshSection(data=1, fsdp=4, tensor=1),
    "cut by rows": MeshSection(data=1, fsdp=2, tensor=2),
}


def losses_of(config, most_rows):
    def mean(head, hidden, targets):
        return token_losses(
            config, head, hidden, targets, compute=DEFAULT, most_rows=most_rows
        ).mean()

    return jax.jit(jax.value_and_grad(mean, (0, 1)))


def plain(config):
    def mean(head, hidden, targets):
        logits = capped(config, hidden @ head.T)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return jax.jit(jax.value_and_grad(mean, (0, 1)))


@pytest.mark.parametrize(
    ("most_rows", "cap"), [(100, None), (24, None), (7, None), (7, 2.0), (1, 2.0)]
)
@pytest.mark.parametrize("mesh", MESHES)
def test_parts_give_what_the_whole_gives(mesh, most_rows, cap):
    config = dataclasses.replace(CONFIG, logit_cap=cap)
    section = MESHES[mesh]
    made = make_mesh(section, jax.devices()[: section.fsdp * section.tensor])
    key = jax.random.key(0)
    head = jax.random.normal(jax.random.fold_in(key, 1), (50, 16))
    hidden = jax.random.normal(jax.random.fold_in(key, 2), (4, 6, 16))
    targets = np.random.default_rng(0).integers(50, size=(4, 6))
    targets[0, :4] = 0, 24, 25, 49  # first and last rows of cuts
    wanted, (of_head, of_hidden) = plain(config)(head, hidden, targets)
    with within(made):
        head = jax.device_put(head, NamedSharding(made, PartitionSpec("tensor", "fsdp")))
        hidden = jax.device_put(hidden, NamedSharding(made, PartitionSpec("fsdp")))
        found, gradient = losses_of(config, most_rows)(head, hidden, jnp.asarray(targets))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradient[0], of_head, atol=1e-6)
    np.testing.assert_allclose(gradient[1], of_hidden, atol=1e-6)
