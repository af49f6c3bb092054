"""Many matrices are orthogonalized in turns and over devices as they are all at once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from diloco.common.process.config import MeshSection
from diloco.learner.collectives import exchanges, received_by_kind
from diloco.learner.tensors.mesh import make_mesh, within
from diloco.learner.tensors.optimizer import orthogonalized

COEFFICIENTS = jnp.asarray([3.4445, -4.7750, 2.0315])
COUNT, INPUTS, OUTPUTS = 10, 16, 8


def stack():
    return jax.random.normal(jax.random.key(0), (COUNT, INPUTS, OUTPUTS))


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 100])
def test_in_turns(at_once):
    whole = orthogonalized(stack(), COEFFICIENTS)
    np.testing.assert_allclose(np.linalg.svd(whole, compute_uv=False), 1, atol=0.35)
    found = orthogonalized(stack(), COEFFICIENTS, at_once_bytes=at_once * INPUTS * OUTPUTS * 4)
    np.testing.assert_allclose(found, whole, atol=1e-6)


@pytest.mark.parametrize(("fsdp", "tensor"), [(8, 1), (4, 2), (4, 1)])
def test_over_devices_that_exchange_parts_of_matrices_alone(fsdp, tensor):
    """Each gets as many whole matrices as it had parts of: nothing is gathered."""
    section = MeshSection(data=1, fsdp=fsdp, tensor=tensor)
    mesh = make_mesh(section, jax.devices()[: fsdp * tensor])
    lying = NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
    with within(mesh):
        # What comes next reads it as it lay before.
        compiled = (
            jax.jit(orthogonalized, static_argnames="at_once_bytes", out_shardings=lying)
            .lower(jax.device_put(stack(), lying), COEFFICIENTS, at_once_bytes=1)
            .compile()
        )
        found = compiled(jax.device_put(stack(), lying), COEFFICIENTS)
    np.testing.assert_allclose(found, orthogonalized(stack(), COEFFICIENTS), atol=1e-6)
    matrices = math.ceil(COUNT / mesh.size)  # of a device
    moved = 2 * (1 if tensor == 1 else 2)  # there and back, an axis of the mesh at a time
    received = sum(received_by_kind(exchanges(compiled.as_text())).values())
    assert received <= moved * matrices * 4 * INPUTS * OUTPUTS
