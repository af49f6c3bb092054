"""Muon's orthogonalization of many matrices, over the devices of a learner and its memory.

A matrix must be whole where it is orthogonalized. So each device is given whole matrices, as many
as every other, and none computes what another does: parts of them go round once before and once
after, as in distributed Muon (arXiv 2502.16982, section 2.3). Where a device has several, no more
are worked on at a time than its memory should give.

Shapes: G matrices, I inputs, O outputs of one; N devices.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diloco.learner.mesh import constrain, parts_along

# Bytes of matrices that a device works on at a time, but for one that is larger.
AT_ONCE_BYTES = 1 << 28
# Axes of the mesh over which whole matrices are dealt out, in the order in which they move.
SPREAD = ("fsdp", "tensor", "data")
STEPS = 5
EPS = 1e-8


def orthogonalized(
    matrices_GxIxO: jax.Array, coefficients: jax.Array, *, at_once_bytes: int = AT_ONCE_BYTES
) -> jax.Array:
    """The nearest orthogonal matrix to each, about: [G, I, O].

    Args:
        matrices_GxIxO: floating.
        coefficients: of the iteration, [3].
        at_once_bytes: of matrices that a device works on at a time, at least one.
    """
    count, inputs, outputs = matrices_GxIxO.shape
    matrix_bytes = inputs * outputs * matrices_GxIxO.dtype.itemsize
    devices = math.prod(map(parts_along, SPREAD))
    each = max(1, at_once_bytes // matrix_bytes)
    turns = math.ceil(count / (each * devices))
    at_once = math.ceil(count / (turns * devices)) * devices
    padded_GxIxO = jnp.pad(matrices_GxIxO, ((0, turns * at_once - count), (0, 0), (0, 0)))

    def turn(some_NxIxO: jax.Array) -> jax.Array:
        return _each_on_a_device(
            jax.vmap(lambda one: _newton_schulz(one, coefficients)), some_NxIxO
        )

    if turns == 1:
        return turn(padded_GxIxO)[:count]
    found: jax.Array = jax.lax.map(turn, padded_GxIxO.reshape(turns, at_once, inputs, outputs))
    return found.reshape(-1, inputs, outputs)[:count]


def _each_on_a_device(
    function: Callable[[jax.Array], jax.Array], matrices_NxIxO: jax.Array
) -> jax.Array:
    """Of matrices that are whole where they are looked at, and cut again as who reads them wants.

    One axis of the mesh moves at a time, which the compiler knows how to do: several at once it
    would gather.
    """
    free = PartitionSpec.UNCONSTRAINED
    steps = [SPREAD[:count] for count in range(1, len(SPREAD))]
    for axes in steps:
        matrices_NxIxO = constrain(matrices_NxIxO, axes, free, free)
    found_NxIxO = function(constrain(matrices_NxIxO, SPREAD, None, None))
    for axes in reversed(steps):
        found_NxIxO = constrain(found_NxIxO, axes, free, free)
    return constrain(found_NxIxO, None, free, free)


def _newton_schulz(matrix_IxO: jax.Array, coefficients: jax.Array) -> jax.Array:
    """Five steps of x -> a x + b (x x') x + c (x x')² x, which draw singular values to about 1."""
    a, b, c = coefficients.astype(matrix_IxO.dtype)
    wide = matrix_IxO.shape[0] <= matrix_IxO.shape[1]
    x: jax.Array = matrix_IxO if wide else matrix_IxO.T
    x /= jnp.linalg.norm(x, ord="fro") + EPS
    for _ in range(STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.T
