"""A task with a trunk and two heads, each a module: a learner trains the heads that it holds."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco import Task, TensorHint, Variables

WIDTH, HIDDEN, ROWS = 8, 4, 16
SIGNS = {"plus": 1.0, "minus": -1.0}


def build(
    *, steps: int, seed: int, sleep_s: float = 0.0, heads: tuple[str, ...] | None = None
) -> Task:
    """`heads` are those that a learner holds; None: all."""
    del steps

    def init(key):
        first, second = jax.random.split(key)
        weights = jax.random.normal(first, (2, HIDDEN, 1)) / 2
        return Variables(
            trained={
                "trunk": {"w": jax.random.normal(second, (WIDTH, HIDDEN)) / 2, "own": jnp.zeros(1)},
                "heads": dict(zip(SIGNS, weights, strict=True)),
            },
            frozen=dict.fromkeys(SIGNS, jnp.ones(1)),
        )

    def errors(variables, x):
        trained = variables.trained
        hidden = x @ trained["trunk"]["w"]
        return [
            jnp.mean(
                (hidden @ head * variables.frozen[name] - SIGNS[name] * x.sum(1)[:, None]) ** 2
            )
            for name, head in trained["heads"].items()
            if head is not None
        ]

    def loss(variables, batch, key):
        del key
        found = errors(variables, batch)
        own = jnp.sum((variables.trained["trunk"]["own"] - 1.0) ** 2)
        return sum(found) / len(found) + own, {"heads": jnp.float32(len(found))}

    def batches(learner, position):
        del learner
        while True:
            time.sleep(sleep_s)
            rng = np.random.default_rng([seed, position])
            yield rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
            position += 1

    def evaluate(variables):
        return sum(errors(variables, jnp.eye(WIDTH))) / len(SIGNS)

    def hint(name, shape):
        del shape
        module = name.rpartition("/")[2] if name.startswith(("heads", "frozen")) else "trunk"
        return TensorHint(module=module, kind="private" if name == "trunk/own" else "trained")

    return Task(
        init=init,
        loss=loss,
        batches=batches,
        evaluate=evaluate,
        tokens_per_batch=ROWS,
        optimizer=optax.adam(0.02),
        hint=hint,
        holds=None if heads is None else lambda learner: ["trunk", *heads],
    )
