"""The inner step as one compiled program: gradient, inner optimizer, new parameters."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco.learner.task import (
    Batch,
    Evaluated,
    Params,
    Task,
    Variables,
    is_floating,
)
from diloco.learner.tensors.tree import Division, division_of


class StepOutcome(NamedTuple):
    """The results of one inner step.

    Attributes:
        loss: the mean loss of the step's batch, before the step changes the parameters.
        descent: minus the inner product of the gradient and the change of the parameters: negative
            if the optimizer goes uphill, 0 if nothing changed. With `Task.schedule` the learning
            rate is left out.
        metrics: further scalars that `Task.loss` returned, by name.
        still: for each trained leaf, whether its gradient is zero; bool [leaves].
    """

    loss: jax.Array
    descent: jax.Array
    metrics: dict[str, jax.Array]
    still: jax.Array


# (parameters, optimizer's state, batch, the run's global step, the learner's data position, the
# learner's PRNG key data) -> (parameters, optimizer's state, outcome).
InnerStep = Callable[..., tuple[Params, Any, StepOutcome]]
# The classes of optax's states with a count of updates from which a schedule computes the learning
# rate. They are given by name, since one class is not public.
_COUNTING = frozenset(
    {
        "InjectHyperparamsState",
        "InjectStatefulHyperparamsState",
        "ScaleByScheduleState",
        "WrappedScheduleState",
    }
)


def make_inner_step(
    task: Task,
    *,
    shardings: tuple[Params, Any] | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> InnerStep:
    """Returns the jitted inner step, an `InnerStep`; parameters and optimizer state are donated.

    The learning rate follows the run's global step, also for a learner that is slow or joined late.
    The PRNG key of `Task.loss` follows from the data position, so that a restart draws the same
    numbers. All that differs between learners is an argument of the step, so that learners with
    equal tasks and meshes compile the same program.

    Args:
        task: the run's task.
        shardings: (shardings of the parameters, shardings of the optimizer's state), which the step
            preserves; None: JAX chooses.
        compiler_options: options of XLA.
    """
    division = division_of(task, task.shapes)

    def inner_step(
        params: Params,
        optimizer_state: Any,
        batch: Batch,
        global_step: jax.Array,
        position: Any = 0,
        key: Any = None,
    ) -> tuple[Params, Any, StepOutcome]:
        own = jax.random.key(0) if key is None else jax.random.wrap_key_data(key)
        drawn = jax.random.fold_in(own, position)
        said, gradient = _gradient(task, division, params, batch, drawn)
        trained = division.trained_of(params)
        if task.schedule is None:
            clocked = by_clock(optimizer_state, global_step)
            moves, optimizer_state = task.optimizer.update(gradient, clocked, trained)
            moved = optax.apply_updates(trained, moves)
            down = jax.tree.map(jnp.negative, moves)
        else:
            direction, optimizer_state = task.optimizer.update(gradient, optimizer_state, trained)
            rate = task.schedule(global_step)
            moved = jax.tree.map(
                lambda leaf, step: (leaf - rate * step).astype(leaf.dtype), trained, direction
            )
            down = direction
        params = _with_state(division.with_trained(params, moved), said.state)
        descent, metrics = _product(gradient, down), dict(said.metrics)
        outcome = StepOutcome(said.loss, descent, metrics, _still(gradient))
        return params, optimizer_state, outcome

    options: dict[str, Any] = {"donate_argnums": (0, 1)}
    if compiler_options:
        options["compiler_options"] = compiler_options
    if shardings is not None:
        options["out_shardings"] = (*shardings, None)
    return jax.jit(inner_step, **options)


def key_of(seed: int, learner: str) -> np.ndarray:
    """Returns the PRNG key data, uint32, from which each step of a learner derives its key."""
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(learner.encode()))
    return np.asarray(jax.random.key_data(key))


# --- The gradient of a batch


def _gradient(
    task: Task, division: Division, params: Params, batch: Batch, key: jax.Array
) -> tuple[Evaluated, Params]:
    """Returns the loss of a batch, and the gradient, a tree of the trained leaves.

    With `Task.accumulate` both are means over the parts of the batch.
    """
    if task.accumulate == 1:
        return _gradient_of_part(task, division, params, batch, key)
    parts = jax.tree.map(lambda leaf: _in_parts(leaf, task.accumulate), batch)

    def part_of(index: jax.Array) -> Batch:
        return jax.tree.map(lambda leaf: leaf[:, index] if leaf.ndim else leaf, parts)

    numbers_P = jnp.arange(task.accumulate)
    weights_P = jnp.ones(task.accumulate)
    if task.weigh is not None:
        said_P = jax.lax.map(lambda index: task.weigh(part_of(index)), numbers_P)
        weights_P = said_P * task.accumulate / jnp.maximum(1, said_P.sum())

    def add(carried: tuple[Params, Params], index: jax.Array) -> tuple[Any, Any]:
        params, summed = carried
        said, gradient = _gradient_of_part(
            task, division, params, part_of(index), jax.random.fold_in(key, index)
        )
        weight = weights_P[index]
        summed = jax.tree.map(
            lambda one, other: one + (other * weight).astype(other.dtype), summed, gradient
        )
        figures = jax.tree.map(lambda leaf: leaf * weight, (said.loss, dict(said.metrics)))
        return (_with_state(params, said.state), summed), figures

    zeros = jax.tree.map(jnp.zeros_like, division.trained_of(params))
    (after, summed), (losses, metrics) = jax.lax.scan(add, (params, zeros), numbers_P)
    gradient = jax.tree.map(lambda leaf: (leaf / task.accumulate).astype(leaf.dtype), summed)
    state = after.state if isinstance(after, Variables) else None
    return Evaluated(losses.mean(), jax.tree.map(jnp.mean, metrics), state), gradient


def _in_parts(leaf: Any, parts: int) -> jax.Array:
    """Reshapes rows [B, ...] to [B / parts, parts, ...]. A scalar stays as it is.

    Part i is [:, i], so that each part has rows on every device.
    """
    rows = jnp.asarray(leaf)
    return jnp.reshape(rows, (-1, parts, *rows.shape[1:])) if rows.ndim else rows


def _gradient_of_part(
    task: Task, division: Division, params: Params, batch: Batch, key: jax.Array
) -> tuple[Evaluated, Params]:
    def loss_of(trained: Params) -> tuple[jax.Array, Evaluated]:
        seen = division.with_trained(params, _rounded(trained, task.compute_dtype))
        said = task.evaluated(seen, batch, key)
        return said.loss, said._replace(metrics=dict(said.metrics))

    (_, said), gradient = jax.value_and_grad(loss_of, has_aux=True)(division.trained_of(params))
    return said, gradient


def _rounded(trained: Params, dtype: str | None) -> Params:
    """Returns the trained leaves rounded to `dtype`; unchanged if `dtype` is None."""
    if dtype is None:
        return trained
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_floating(leaf) else leaf, trained)


def _with_state(params: Params, state: Params) -> Params:
    return params._replace(state=state) if isinstance(params, Variables) else params


def _still(gradient: Params) -> jax.Array:
    return jnp.stack([jnp.logical_not(jnp.any(leaf)) for leaf in jax.tree.leaves(gradient)])


# --- The optimizer


def by_clock(state: Any, global_step: Any) -> Any:
    """Returns an optax state in which the counts of schedules are set to the run's global step.

    Call this before each `optimizer.update`, inside or outside of a jitted program, also for a
    restored state. Other counts, such as the count of Adam's bias correction, are not changed.
    """

    def counting(node: Any) -> bool:
        return type(node).__name__ in _COUNTING

    def set_to(node: Any) -> Any:
        if not counting(node):
            return node
        inner = {
            name: by_clock(value, global_step)
            for name, value in node._asdict().items()
            if name != "count"
        }
        return node._replace(count=jnp.asarray(global_step, node.count.dtype), **inner)

    return jax.tree.map(set_to, state, is_leaf=counting)


def _product(one: Params, other: Params) -> jax.Array:
    """Returns the inner product of two trees, float32."""
    # Not `vdot`: it flattens its arguments, for which a sharded tensor would be gathered.
    products = jax.tree.map(
        lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), one, other
    )
    return jnp.asarray(sum(jax.tree.leaves(products)))
