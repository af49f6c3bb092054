"""The tiny task, and what makes a learner of it do harm: an option of that learner's own.

"labels": it trains on the targets of other inputs; "rate": its learning rate is fifty times the
others'; "noise": it takes steps as long as its honest ones, in directions of their own, once the
learner has looked at where its first steps go.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny_task

from diloco.learner.task import Task

RATE = 0.3
HONEST_STEPS = 8


def build(*, steps, seed, notes="", sleep_s=0.0, spoiled=""):
    honest = optax.clip_by_global_norm(1.0)
    task = dataclasses.replace(
        tiny_task.build(steps=steps, seed=seed, notes=notes, sleep_s=sleep_s),
        optimizer=honest,
        schedule=optax.constant_schedule(RATE),
    )
    changes = {
        "": {},
        "labels": {"batches": shifted(task)},
        "rate": {"schedule": optax.constant_schedule(50 * RATE)},
        "noise": {"optimizer": optax.chain(honest, as_noise(seed))},
    }
    return dataclasses.replace(task, **changes[spoiled])


def shifted(task: Task):
    """Batches whose targets are those of other inputs, with the other sign."""

    def batches(learner, position):
        for inputs, targets in task.batches(learner, position):
            yield inputs, -np.roll(targets, 1, axis=-1)

    return batches


def as_noise(seed: int) -> optax.GradientTransformation:
    """Steps of the same length for each tensor, which say nothing of the loss."""

    def init(_params):
        return jax.random.key_data(jax.random.key(seed)), jnp.zeros((), jnp.int32)

    def update(updates, state, params=None):
        data, taken = state
        leaves, form = jax.tree.flatten(updates)
        key, *keys = jax.random.split(jax.random.wrap_key_data(data), 1 + len(leaves))
        noise = [jax.random.normal(one, leaf.shape) for one, leaf in zip(keys, leaves, strict=True)]
        found = [
            jnp.where(
                taken < HONEST_STEPS, leaf, each * jnp.linalg.norm(leaf) / jnp.linalg.norm(each)
            )
            for each, leaf in zip(noise, leaves, strict=True)
        ]
        return jax.tree.unflatten(form, found), (jax.random.key_data(key), taken + 1)

    return optax.GradientTransformation(init, update)
