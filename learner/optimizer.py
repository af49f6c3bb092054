"""The inner optimizer: AdamW as a direction, and the learning rate as a function of the run's step.

They are apart because the run's clock, not a learner's own step count, sets the learning rate: a
learner that is slow or joined late is where the run is.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from diloco.common.errors import TaskError
from diloco.common.layout import Hint, default_hint
from diloco.learner.task import Params, named_leaves


def adamw(
    *,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    hint: Hint = default_hint,
) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) without learning rate: the caller multiplies by -learning rate.

    The update is Adam's direction of the clipped gradient plus weight_decay * θ, so that the
    decay is scaled by the learning rate too. Only matrices decay: a tensor with at least two
    axes besides those that `hint` says are stacked over layers. State: two tensors like the
    parameters, of their dtypes, and a count.

    Args:
        weight_decay: share of a matrix that one unit of learning rate takes away.
        clip: largest global norm of the gradient; a larger one is scaled down to it.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        hint: the task's hint; its `norm_axes` tells a stack of vectors from a matrix.
    """

    def is_matrix(params: Params) -> Params:
        leaves = [
            leaf.ndim - hint(name, leaf.shape).norm_axes for name, leaf in named_leaves(params)
        ]
        return jax.tree.unflatten(jax.tree.structure(params), [axes >= 2 for axes in leaves])

    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay, mask=is_matrix),
    )


def warmup_cosine(
    *, steps: int, peak: float, warmup_steps: int, final_fraction: float = 0.1
) -> Callable[[jax.Array | int], jax.Array]:
    """Linear warm-up, then half a cosine down to `final_fraction` * `peak`; constant after `steps`.

    Args:
        steps: length of the run in global steps.
        peak: the learning rate at the end of the warm-up.
        warmup_steps: the rate at step s of the warm-up is peak * (s + 1) / (warmup_steps + 1), so
            that the first step already learns.
        final_fraction: the last rate as a share of `peak`.

    Returns:
        Global step (an int, or an integer array of any shape) -> learning rate, float32.

    Raises:
        TaskError: the warm-up does not end before the run does.
    """
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
