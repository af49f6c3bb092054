"""Text files of your own, read with grain. Its name is examples.own_files:build.

A training example is a window of bytes. Each epoch has `shares`, which learners claim.
"""

from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco import GrainData, Task

CONTEXT, WIDTH, BATCH = 16, 64, 64


class Windows:
    """Windows of CONTEXT + 1 bytes, read from files on disk."""

    def __init__(self, folder: str) -> None:
        self.files = [np.memmap(path, np.uint8, "r") for path in sorted(Path(folder).glob("*.txt"))]
        self.begins = np.cumsum([0, *(len(file) // (CONTEXT + 1) for file in self.files)])

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        file = int(np.searchsorted(self.begins, index, "right")) - 1
        first = (index - self.begins[file]) * (CONTEXT + 1)
        return np.array(self.files[file][first : first + CONTEXT + 1], np.int32)


def build(*, steps: int, seed: int, folder: str, shares: int = 8, workers: int = 0) -> Task:
    windows = grain.MapDataset.source(Windows(folder))
    held = len(windows) // 10  # the first ones are held out, the others train
    data = GrainData(windows[held:], batch=BATCH, seed=seed, shares=shares, workers=workers)
    held_out = np.stack([windows[index] for index in range(held)])

    def init(key):
        keys = jax.random.split(key, 3)
        shapes = {"embed": (256, 8), "hidden": (CONTEXT * 8, WIDTH), "output": (WIDTH, 256)}
        return {name: jax.random.normal(key, shape) / shape[0] ** 0.5
                for key, (name, shape) in zip(keys, shapes.items(), strict=True)}  # fmt: skip

    def loss(params, batch, key):
        context = params["embed"][batch[:, :CONTEXT]].reshape(len(batch), -1)
        logits = jax.nn.relu(context @ params["hidden"]) @ params["output"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, CONTEXT])
        return losses.mean(), {"bits_per_byte": losses.mean() / jnp.log(2)}

    return Task(init=init, loss=loss, batches=data.batches, rows=data.rows, shared=data.shared,
                tokens_per_batch=BATCH,
                evaluate=lambda params: float(loss(params, held_out, None)[0]),
                optimizer=optax.adam(optax.cosine_decay_schedule(0.01, steps)))  # fmt: skip
