"""A task so small that a whole run takes a second: a student learns a teacher from noisy examples.

Both are a layer of tanh and a linear one. The loss cannot fall below `NOISE` squared, a quarter,
as a language model's cannot fall below the entropy of text; above that little differs from run to
run, so that differences are seen which a language model of the same cost hides.

Shapes: B batch, I inputs and outputs, H hidden.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from diloco.learner.optimizer import adamw, muon, warmup_cosine
from diloco.learner.task import Batch, Params, Task

BATCH, INPUTS, HIDDEN, NOISE = 8, 16, 32, 0.5
POOL, HELD_OUT = 1 << 15, 1 << 12
RATE = 1e-2


def predict(params: Params, x_BxI: jax.Array) -> jax.Array:
    """float32[B, I] -> float32[B, I]."""
    y_BxI: jax.Array = jnp.tanh(x_BxI @ params["in"]) @ params["out"]
    return y_BxI


def initial(key: jax.Array) -> Params:
    """Random parameters, of student or teacher."""
    one, other = jax.random.split(key)
    return {
        "in": jax.random.normal(one, (INPUTS, HIDDEN)) / INPUTS**0.5,
        "out": jax.random.normal(other, (HIDDEN, INPUTS)) / HIDDEN**0.5,
    }


def loss(params: Params, batch: Batch) -> jax.Array:
    """Mean squared error, float32[]."""
    return jnp.mean(jnp.square(predict(params, batch["x"]) - batch["y"]))


@functools.cache
def examples(seed: int, count: int) -> Batch:
    """Inputs and the teacher's noisy outputs."""
    rng = np.random.default_rng(seed)
    x_BxI = rng.normal(size=(count, INPUTS)).astype(np.float32)
    noise_BxI = NOISE * rng.normal(size=(count, INPUTS)).astype(np.float32)
    taught_BxI = np.asarray(predict(initial(jax.random.key(7)), jnp.asarray(x_BxI)))
    return {"x": x_BxI, "y": taught_BxI + noise_BxI}


def build(
    *, steps: int, seed: int, optimizer: str = "adamw", learning_rate: float | None = None
) -> Task:
    """The task; a seed draws the batches, and by the run's `init` the student."""
    pool, held_out = examples(0, POOL), examples(1, HELD_OUT)
    held_out_loss = jax.jit(loss)

    def batches(learner: str, position: int) -> Iterator[Batch]:
        number = int(learner.rpartition("-")[2])
        while True:
            rng = np.random.default_rng([seed, number, position])
            chosen = rng.integers(0, POOL, BATCH)
            yield {name: values[chosen] for name, values in pool.items()}
            position += 1

    return Task(
        init=initial,
        loss=loss,
        batches=batches,
        evaluate=lambda params: float(held_out_loss(params, held_out)),
        tokens_per_batch=BATCH,
        optimizer=(muon if optimizer == "muon" else adamw)(weight_decay=0.0),
        schedule=warmup_cosine(steps=steps, peak=learning_rate or RATE, warmup_steps=steps // 10),
    )
