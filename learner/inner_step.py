"""The inner step: gradient, inner optimizer, parameters moved; one compiled program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from diloco.learner import tree
from diloco.learner.task import Batch, Params, Task


class Outcome(NamedTuple):
    """What a step tells of itself.

    Attributes:
        loss: of its batch, before it.
        descent: minus the inner product of gradient and move, as far as the optimizer alone
            decides it: negative for one that goes uphill, 0 where nothing moved.
    """

    loss: jax.Array
    descent: jax.Array


InnerStep = Callable[[Params, Any, Batch, Any], tuple[Params, Any, Outcome]]
# States of optax that count an optimizer's own updates, by which it looks up its schedule. By name:
# one of them is not public.
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
    constants: Params,
    *,
    shardings: tuple[Params, Any] | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """The jitted inner step, an `InnerStep`; parameters and optimizer state are donated.

    Its last argument is the run's global step, which the learning rate follows: a learner that
    is slow or joined late is where the run is.

    Args:
        task: the run's.
        constants: leaves that are not trained.
        shardings: of the parameters and of the optimizer's state, which stay as they are.
        compiler_options: of XLA.
    """

    def inner_step(
        trained: Params, optimizer_state: Any, batch: Batch, global_step: jax.Array
    ) -> tuple[Params, Any, Outcome]:
        def loss_of(trained: Params) -> jax.Array:
            return task.loss(tree.join(trained, constants), batch)

        loss, gradient = jax.value_and_grad(loss_of)(trained)
        if task.schedule is None:
            clocked = by_clock(optimizer_state, global_step)
            moves, optimizer_state = task.optimizer.update(gradient, clocked, trained)
            trained = optax.apply_updates(trained, moves)
            return trained, optimizer_state, Outcome(loss, -_product(gradient, moves))
        direction, optimizer_state = task.optimizer.update(gradient, optimizer_state, trained)
        learning_rate = task.schedule(global_step)
        trained = jax.tree.map(
            lambda leaf, step: (leaf - learning_rate * step).astype(leaf.dtype), trained, direction
        )
        return trained, optimizer_state, Outcome(loss, _product(gradient, direction))

    options: dict[str, Any] = {"donate_argnums": (0, 1)}
    if compiler_options:
        options["compiler_options"] = compiler_options
    if shardings is not None:
        options["out_shardings"] = (*shardings, None)
    return jax.jit(inner_step, **options)


def by_clock(state: Any, global_step: Any) -> Any:
    """An optimizer's state whose schedules stand at the run's step, whatever it has counted.

    The count of Adam's bias correction and its like are the optimizer's own, and stay.
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
    """The inner product of two trees, float32."""
    products = jax.tree.map(
        lambda a, b: jnp.vdot(a.astype(jnp.float32), b.astype(jnp.float32)), one, other
    )
    return jnp.asarray(sum(jax.tree.leaves(products)))
