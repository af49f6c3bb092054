"""The inner optimizer: AdamW or Muon without learning rate, and a learning-rate schedule.

Direction and learning rate are separate because the run's global step, not a learner's own step
count, sets the learning rate, also for a learner that is slow or joined late.

Shapes: [G, I, O] are the G matrices of a tensor, each with I inputs and O outputs.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import PartitionSpec

from diloco.common.protocol.errors import TaskError
from diloco.common.protocol.layout import Hint, default_hint
from diloco.learner.task import Params
from diloco.learner.tensors.mesh import constrain, parts_along
from diloco.learner.tensors.tree import named_leaves

# Root mean square of the entries of Muon's direction. AdamW's direction has about the same, so that
# one peak rate and one weight decay fit both (arXiv 2502.16982, section 2.2).
MUON_RMS = 0.2


class Matrices(NamedTuple):
    """The division of a tensor into the matrices that Muon orthogonalizes, one by one.

    Attributes:
        shape: the shape to which the tensor is reshaped first.
        inputs: the axes of `shape` over which a matrix product sums.
        outputs: the axes of `shape` that remain after a matrix product. All axes that are neither
            inputs nor outputs count matrices: layers, experts, or q, k and v.
    """

    shape: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


# (tensor's name, shape) -> the tensor's matrices; None: Adam moves the tensor instead.
MatrixHint = Callable[[str, tuple[int, ...]], Matrices | None]


def adamw(
    *,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    hint: Hint = default_hint,
) -> optax.GradientTransformation:
    """Returns AdamW (arXiv 1711.05101) without learning rate: callers multiply by minus the rate.

    The update is Adam's direction of the clipped gradient plus weight_decay * θ, so that the
    decay is scaled by the learning rate too. Only matrices decay: tensors with at least two axes
    besides the leading axes that `hint` says stack layers. The state is two moments with the shapes
    and dtypes of the parameters, and a count.

    Args:
        weight_decay: the factor of θ in the update.
        clip: largest global norm of the gradient; a larger one is scaled down to it.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        hint: the task's hint; `TensorHint.norm_axes` is the number of leading axes that stack
            layers.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        _decay_of_matrices(weight_decay, hint),
    )


def muon(
    *,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    beta: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    hint: Hint = default_hint,
    matrices: MatrixHint | None = None,
) -> optax.GradientTransformation:
    """Returns Muon (arXiv 2502.16982) without learning rate: callers multiply by minus the rate.

    The direction of a matrix is the orthogonal matrix that is nearest to its momentum, scaled so
    that the root mean square of the entries is that of AdamW's direction. Tensors without matrices
    (embedding, head, vectors) have Adam's direction. Clipping and decay are those of `adamw`. The
    state is one moment for each tensor with matrices, and two for each other tensor, with the
    shapes and dtypes of the parameters.

    Args:
        weight_decay: the factor of θ in the update.
        clip: largest global norm of the gradient; a larger one is scaled down to it.
        beta: decay of the momentum, which is Nesterov's.
        b1: decay of Adam's first moment.
        b2: decay of Adam's second moment.
        eps: added to the root of Adam's second moment.
        hint: the task's hint; `TensorHint.norm_axes` is the number of leading axes that stack
            layers.
        matrices: (tensor's name, shape) -> the tensor's matrices, or None if it has none; without
            this argument, `matrices_by_hint(hint)`.
    """
    apart = matrices or matrices_by_hint(hint)

    def labels(params: Params) -> Params:
        return _by_name(
            params, lambda name, leaf: "muon" if apart(name, leaf.shape) is not None else "adam"
        )

    rules = {"muon": _orthogonal(apart, beta), "adam": optax.scale_by_adam(b1=b1, b2=b2, eps=eps)}
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.partition(rules, labels),
        _decay_of_matrices(weight_decay, hint),
    )


Optimizer = Literal["adamw", "muon"]


def direction_by(
    optimizer: Optimizer, *, weight_decay: float, clip: float, hint: Hint, matrices: MatrixHint
) -> optax.GradientTransformation:
    """Returns `adamw` or `muon`, by the name `optimizer`; `matrices` is for `muon` only."""
    if optimizer == "adamw":
        return adamw(weight_decay=weight_decay, clip=clip, hint=hint)
    return muon(weight_decay=weight_decay, clip=clip, hint=hint, matrices=matrices)


def matrices_by_hint(hint: Hint) -> MatrixHint:
    """Returns a `MatrixHint` for a task's hint, in which layers' tensors of two axes are matrices.

    Leading axes that stack layers (`TensorHint.norm_axes`) count matrices. Tensors that are merged
    by average have no matrices: they are embeddings, whose rows learn independently.
    """

    def matrices(name: str, shape: tuple[int, ...]) -> Matrices | None:
        said = hint(name, shape)
        if said.merge == "average" or len(shape) - said.norm_axes != 2:
            return None
        return Matrices(shape, (len(shape) - 2,), (len(shape) - 1,))

    return matrices


def _by_name(params: Params, of: Callable[[str, Any], Any]) -> Params:
    """Returns a tree like `params` whose leaves are `of(name, leaf)` for each leaf."""
    found = [of(name, leaf) for name, leaf in named_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def _decay_of_matrices(weight_decay: float, hint: Hint) -> optax.GradientTransformation:
    def is_matrix(params: Params) -> Params:
        return _by_name(
            params, lambda name, leaf: leaf.ndim - hint(name, leaf.shape).norm_axes >= 2
        )

    return optax.add_decayed_weights(weight_decay, mask=is_matrix)


def _orthogonal(apart: MatrixHint, beta: float) -> optax.GradientTransformation:
    """Returns optax's Muon, applied to each matrix of each tensor.

    The momentum has the shapes of the tensors, not of the matrices, so that momentum and tensors
    have the same shardings, and a checkpoint shows which tensor a momentum belongs to.
    """
    core = optax.contrib.scale_by_muon(beta=beta)

    def update(gradient: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        del params
        moment = optax.tree.update_moment(gradient, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        ahead = optax.tree.bias_correction(moment, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(gradient, beta, count)

        def direction(name: str, leaf: jax.Array) -> jax.Array:
            matrices = _asked(apart, name, leaf)
            pieces_GxIxO = orthogonalized(_taken_apart(leaf, matrices), state.ns_coeffs)
            scale = MUON_RMS * math.sqrt(max(pieces_GxIxO.shape[1:]))
            return _put_together(scale * pieces_GxIxO, leaf, matrices)

        looked = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        return _by_name(looked, direction), state._replace(count=count, mu=moment)

    return optax.GradientTransformation(core.init, update)


def _asked(apart: MatrixHint, name: str, leaf: jax.Array) -> Matrices:
    found = apart(name, leaf.shape)
    assert found is not None, name
    if math.prod(found.shape) != leaf.size or set(found.inputs) & set(found.outputs):
        raise TaskError(
            f"the matrices of {name!r} must be its {leaf.shape} by other axes, each an input, an "
            f"output or neither, but they are {found}",
            hint="split or keep axes, in their order; None gives the tensor to Adam",
        )
    return found


def _order(matrices: Matrices) -> tuple[int, ...]:
    """Returns all axes of `matrices.shape`: first those that count matrices, inputs, outputs."""
    own = {*matrices.inputs, *matrices.outputs}
    count = tuple(axis for axis in range(len(matrices.shape)) if axis not in own)
    return count + matrices.inputs + matrices.outputs


def _taken_apart(leaf: jax.Array, matrices: Matrices) -> jax.Array:
    """Returns the matrices of the tensor `leaf`, [G, I, O]."""
    shape = matrices.shape
    inputs = math.prod(shape[axis] for axis in matrices.inputs)
    outputs = math.prod(shape[axis] for axis in matrices.outputs)
    return leaf.reshape(shape).transpose(_order(matrices)).reshape(-1, inputs, outputs)


def _put_together(pieces_GxIxO: jax.Array, leaf: jax.Array, matrices: Matrices) -> jax.Array:
    """Returns a tensor of the shape and dtype of `leaf` from its matrices, [G, I, O]."""
    order = _order(matrices)
    back = tuple(order.index(axis) for axis in range(len(order)))
    shape = tuple(matrices.shape[axis] for axis in order)
    values = pieces_GxIxO.reshape(shape).transpose(back).reshape(leaf.shape)
    return values.astype(leaf.dtype)


def warmup_cosine(
    *, steps: int, peak: float, warmup_steps: int | None = None, final_fraction: float = 0.1
) -> Callable[[jax.Array | int], jax.Array]:
    """Returns a learning-rate schedule: a linear warm-up, then half a cosine, then constant.

    Args:
        steps: length of the run in global steps.
        peak: the learning rate at the end of the warm-up.
        warmup_steps: length of the warm-up in global steps. The rate at its step s is
            peak * (s + 1) / (warmup_steps + 1), so that the first step already learns. None: a
            tenth of the run, at most 100.
        final_fraction: the rate from step `steps` on, as a share of `peak`.

    Returns:
        Global step (an int, or an integer array of any shape) -> learning rate, float32.

    Raises:
        TaskError: the warm-up does not end before the run does.
    """
    if warmup_steps is None:
        warmup_steps = min(100, steps // 10)
    if not 0 <= warmup_steps < steps:
        raise TaskError(
            f"the warm-up must end before the run does, but warmup_steps={warmup_steps} "
            f"and steps={steps}",
            hint="choose warmup_steps from 0 to steps - 1",
        )

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warm = (step + 1) / (warmup_steps + 1)
        progress = jnp.clip((step - warmup_steps) / (steps - warmup_steps), 0, 1)
        cosine = final_fraction + (1 - final_fraction) * (1 + jnp.cos(jnp.pi * progress)) / 2
        return peak * jnp.where(step < warmup_steps, warm, cosine)

    return schedule


# --- Muon's orthogonalization, over the devices of a learner and its memory


# The most bytes of matrices that a device works on at a time; a larger matrix is taken alone.
AT_ONCE_BYTES = 1 << 28
# Axes of the mesh over which whole matrices are distributed, in the order of resharding.
SPREAD = ("fsdp", "tensor", "data", "expert")
STEPS = 5
EPS = 1e-8


def orthogonalized(
    matrices_GxIxO: jax.Array, coefficients: jax.Array, *, at_once_bytes: int = AT_ONCE_BYTES
) -> jax.Array:
    """Returns for each matrix approximately the nearest orthogonal matrix: [G, I, O].

    Args:
        matrices_GxIxO: the matrices, of a floating dtype.
        coefficients: the coefficients a, b, c of the Newton-Schulz iteration, [3].
        at_once_bytes: the most bytes of matrices that a device works on at a time; at least one
            matrix is taken.
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
    """Applies `function` to matrices that are distributed over the devices, each on one device.

    The matrices are resharded over one axis of the mesh after the other, which the compiler does
    by exchanges; for several axes at once it would gather all matrices on each device.
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
    """Returns a matrix after `STEPS` steps of x -> a x + b (x x') x + c (x x')² x.

    They bring the singular values close to 1.
    """
    a, b, c = coefficients.astype(matrix_IxO.dtype)
    wide = matrix_IxO.shape[0] <= matrix_IxO.shape[1]
    x: jax.Array = matrix_IxO if wide else matrix_IxO.T
    x /= jnp.linalg.norm(x, ord="fro") + EPS
    for _ in range(STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.T
