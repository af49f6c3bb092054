"""The inner step: gradient, inner optimizer, parameters moved; one compiled program."""

from collections.abc import Callable
from typing import Any

import jax

from diloco.learner import tree
from diloco.learner.task import Batch, Params, Task

InnerStep = Callable[[Params, Any, Batch, Any], tuple[Params, Any, jax.Array]]


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
    ) -> tuple[Params, Any, jax.Array]:
        def loss_of(trained: Params) -> jax.Array:
            return task.loss(tree.join(trained, constants), batch)

        loss, gradient = jax.value_and_grad(loss_of)(trained)
        direction, optimizer_state = task.optimizer.update(gradient, optimizer_state, trained)
        learning_rate = task.schedule(global_step)
        trained = jax.tree.map(
            lambda leaf, step: (leaf - learning_rate * step).astype(leaf.dtype), trained, direction
        )
        return trained, optimizer_state, loss

    options: dict[str, Any] = {"donate_argnums": (0, 1)}
    if compiler_options:
        options["compiler_options"] = compiler_options
    if shardings is not None:
        options["out_shardings"] = (*shardings, None)
    return jax.jit(inner_step, **options)
