"""A task of your own: scikit-learn's handwritten digits. Its name is examples.digits:build."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from diloco import Task


def build(*, steps: int, seed: int) -> Task:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)  # 1797 images of 64 pixels

    def init(key):
        hidden, output = jax.random.split(key)
        return {"hidden": jax.random.normal(hidden, (64, 32)) / 8, "bias": jnp.zeros(32),
                "output": jax.random.normal(output, (32, 10)) / 6}  # fmt: skip

    def loss(params, batch, key):  # the key is for dropout and the like
        images, labels = batch
        logits = jax.nn.relu(images @ params["hidden"] + params["bias"]) @ params["output"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), {"accuracy": (logits.argmax(-1) == labels).mean()}

    def batches(learner, position):  # a batch depends only on its number, so that restarts resume
        while True:
            rng = np.random.default_rng([seed, zlib.crc32(learner.encode()), position])
            picked = rng.integers(1500, size=32)
            yield images[picked], labels[picked]
            position += 1

    held_out = images[1500:], labels[1500:]
    return Task(init=init, loss=loss, batches=batches, tokens_per_batch=32,
                evaluate=lambda params: float(loss(params, held_out, None)[0]),
                optimizer=optax.adam(optax.cosine_decay_schedule(0.01, steps)))  # fmt: skip
