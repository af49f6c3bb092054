"""A task whose learners want opposite things of one head, so that each needs a head of its own."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco import Task, TensorHint

WIDTH, HIDDEN, ROWS = 8, 4, 16


def wanted(learner: str) -> float:
    """What each learner's rows are multiplied by."""
    return 1.0 if learner == "a" else -1.0


def build(*, steps: int, seed: int, sleep_s: float = 0.0) -> Task:
    del steps

    def init(key):
        body, head = jax.random.split(key)
        return {
            "body": jax.random.normal(body, (WIDTH, HIDDEN)) / 2,
            "head": jax.random.normal(head, (HIDDEN, 1)) / 2,
        }

    def loss(params, batch, key):
        del key
        error = batch["x"] @ params["body"] @ params["head"] - batch["y"]
        return jnp.mean(error**2), {}

    def batches(learner, position):
        while True:
            time.sleep(sleep_s)
            x = np.random.default_rng([seed, position]).normal(size=(ROWS, WIDTH))
            y = wanted(learner) * x.sum(1, keepdims=True)
            yield {"x": x.astype(np.float32), "y": y.astype(np.float32)}
            position += 1

    def evaluate(params):
        return jnp.mean((params["body"] @ params["head"] - 1.0) ** 2)

    def hint(name, shape):
        del shape
        return TensorHint(kind="private" if name == "head" else "trained")

    return Task(
        init=init,
        loss=loss,
        batches=batches,
        evaluate=evaluate,
        tokens_per_batch=ROWS,
        optimizer=optax.adam(0.02),
        hint=hint,
    )
