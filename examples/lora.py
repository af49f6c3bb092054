"""Low-rank adapters (LoRA) over a frozen base; only adapters are sent. Task: examples.lora:build.

python examples/lora.py base.npz           # makes a base, trained on the digits 0 to 4
"""

import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from diloco import Task, Variables

IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES = (IMAGES / 16).astype(np.float32)  # 1797 images of 64 pixels
WIDTH, RANK = 512, 2
SIZES = {"hidden": (64, WIDTH), "output": (WIDTH, 10)}


def build(*, steps: int, seed: int, base: str, store: bool = True) -> Task:
    def load():
        return dict(np.load(base))

    def init(key):
        frozen = {name: jnp.zeros(shape) for name, shape in SIZES.items()}
        return Variables(trained=new_adapters(key), frozen=load() if store else frozen)

    def loss(variables, batch, key):
        return measured(variables.frozen, variables.trained, batch)

    def batches(learner, position):
        while True:
            rng = np.random.default_rng([seed, zlib.crc32(learner.encode()), position])
            picked = rng.integers(1500, size=32)
            yield IMAGES[picked], LABELS[picked]
            position += 1

    def evaluate(variables):
        held_out = IMAGES[1500:], LABELS[1500:]
        loss, metrics = measured(variables.frozen, variables.trained, held_out)
        return {"loss": loss, **metrics}

    return Task(init=init, loss=loss, batches=batches, evaluate=evaluate, tokens_per_batch=32,
                optimizer=optax.adam(optax.cosine_decay_schedule(0.01, steps)),
                load_frozen=None if store else load)  # fmt: skip


def new_adapters(key):
    return {
        name: {
            "down": jax.random.normal(jax.random.fold_in(key, number), (inputs, RANK)) / 8,
            "up": jnp.zeros((RANK, outputs)),
        }
        for number, (name, (inputs, outputs)) in enumerate(SIZES.items())
    }


def measured(base, adapters, batch):
    def layer(name, inputs):
        low = inputs @ adapters[name]["down"] @ adapters[name]["up"]
        return inputs @ base[name] + low

    images, labels = batch
    logits = layer("output", jax.nn.relu(layer("hidden", images)))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": (logits.argmax(-1) == labels).mean()}


def make_base(path):
    rng, optimizer = np.random.default_rng(0), optax.adam(0.003)
    base = {name: rng.normal(size=shape).astype(np.float32) / shape[0] ** 0.5
            for name, shape in SIZES.items()}  # fmt: skip
    adapters, state = new_adapters(jax.random.key(0)), optimizer.init(base)
    few = LABELS[:1500] < 5
    batch = IMAGES[:1500][few], LABELS[:1500][few]
    gradient = jax.jit(jax.grad(lambda base: measured(base, adapters, batch)[0]))
    for _ in range(50):
        moves, state = optimizer.update(gradient(base), state)
        base = optax.apply_updates(base, moves)
    np.savez(Path(path), **base)


if __name__ == "__main__":
    make_base(sys.argv[1])
