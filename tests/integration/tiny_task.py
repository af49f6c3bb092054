"""A task of some thousand parameters whose steps take as long as a test likes.

Every batch that a learner draws is noted in `notes/{learner}`: process, iterator, time, position.
So a test reads from outside what the learner trained on and how fast.
"""

import itertools
import os
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco.learner.task import Task

FEATURES = 12
HIDDEN = 384  # three fragments of several shards each
BATCH = 8


def build(
    *, steps, seed, notes="", sleep_s=0.0, odd=False, uphill=False, few=0, writes=False, rows=BATCH
):
    """`odd` adds a scalar, an integer and a bool leaf; `uphill` has an optimizer of wrong sign.

    Data of `few` batches ends there. What `writes` samples the first number of its bias.
    """
    truth = np.random.default_rng(seed).normal(size=(FEATURES, 3)).astype(np.float32)

    def init(key):
        first, second = jax.random.split(key)
        params = {
            "first": jax.random.normal(first, (FEATURES, HIDDEN)) / 4,
            "bias": jnp.zeros(HIDDEN),
            "second": jax.random.normal(second, (HIDDEN, 3)) / 16,
        }
        if odd:
            params["gain"] = jnp.float32(1.5)
            params["shift"] = jnp.asarray([3, -1, 4], jnp.int32)
            params["mask"] = jnp.asarray([True, False, True])
        return params

    def error(params, batch):
        inputs, targets = batch
        outputs = jnp.tanh(inputs @ params["first"] + params["bias"]) @ params["second"]
        if odd:
            outputs = outputs * params["gain"] + 0.01 * params["shift"] * params["mask"]
        return jnp.square(outputs - targets).mean()

    def batch_at(learner, position):
        rng = np.random.default_rng([seed, zlib.crc32(learner.encode()), position])
        inputs = rng.normal(size=(rows, FEATURES)).astype(np.float32)
        return inputs, np.tanh(inputs @ truth)

    iterators = itertools.count()

    def batches(learner, position):
        iterator = next(iterators)
        while not few or position < few:
            if notes and learner != "probe":
                note(Path(notes) / learner, iterator, position)
                # Iterators before the training's own are drawn from once, to check and compile.
                time.sleep(sleep_s)
            yield batch_at(learner, position)
            position += 1

    def evaluate(params):
        parts = [batch_at("held-out", position) for position in range(8)]
        return float(np.mean([error(params, part) for part in parts]))

    def sample(params, prompt, key, temperature):
        yield f"{float(params['bias'][0]):.6f}"

    return Task(
        init=init,
        loss=lambda params, batch, key: (error(params, batch), {}),
        batches=batches,
        evaluate=evaluate,
        sample=sample if writes else None,
        tokens_per_batch=rows,
        optimizer=optax.adam(0.01) if uphill else optax.scale_by_adam(),
        schedule=optax.constant_schedule(0.01),
    )


def note(path, iterator, position):
    line = f"{os.getpid()} {iterator} {time.monotonic()} {position}\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
