"""Tasks of the headline benches, on emulated devices.

An island's device works for a fixed time on each step while the core of its host is free, so that
many islands fit on few cores and a step takes what it takes whatever else the machine does. The
arithmetic of the step is done for real, within that time; a step lasts the longer of the two. Both
systems draw their batches from here and are paced alike.

    --task bench.devices:build --set task.options.step_s=0.5
"""

import dataclasses
import time
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench import tasks
from diloco.learner.task import Batch, Params, Task

MATRICES = 32
WIDTH = 1024


class Device:
    """An island's device: it is busy for `step_s` seconds from each `begin` on."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._began_s = 0.0

    def begin(self) -> None:
        """Take the next step; a device that idled has nothing to catch up."""
        self._began_s = time.monotonic()

    def wait(self, share: float = 1.0) -> None:
        """Until that share of the step's time has passed; not at all before the first step."""
        time.sleep(max(0.0, self._began_s + share * self.step_s - time.monotonic()))


def plain(*, steps: int, seed: int, matrices: int = 0, **options: Any) -> Task:
    """The task with no pace.

    Args:
        steps: length of the run in global steps.
        seed: of the batches.
        matrices: so many parameters in matrices that are pushed up and down at random, where only
            the size of gradients and parameters counts: a step costs a pass or two over them. 0 for
            a transformer.
        options: of the transformer, as of `bench.tasks:build`.
    """
    if matrices:
        return _matrices(seed, matrices)
    return tasks.build(steps=steps, seed=seed, **options)


def build(*, steps: int, seed: int, step_s: float, **options: Any) -> Task:
    """The task on an emulated device: whoever draws a batch waits for the step before.

    Args:
        steps: length of the run in global steps.
        seed: decides which windows are drawn.
        step_s: seconds a step.
        options: further ones of `plain`.
    """
    task = plain(steps=steps, seed=seed, **options)

    def batches(learner: str, position: int) -> Iterator[Batch]:
        device = Device(step_s)
        for batch in task.batches(learner, position):
            device.wait()
            device.begin()
            yield batch

    return dataclasses.replace(task, batches=batches)


def _matrices(seed: int, parameters: int) -> Task:
    shape = (WIDTH, parameters // MATRICES // WIDTH)

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, MATRICES)
        return {f"w{i:02}": jax.random.normal(keys[i], shape) for i in range(MATRICES)}

    def loss(params: Params, batch: Batch) -> jax.Array:
        means = jnp.stack([w.mean() for w in jax.tree.leaves(params)])
        return jnp.mean(means) * jnp.mean(batch)

    def batches(learner: str, position: int) -> Iterator[Batch]:
        while True:
            rng = np.random.default_rng([seed, zlib.crc32(learner.encode()), position])
            yield rng.standard_normal(1, dtype=np.float32)
            position += 1

    return Task(
        init=init,
        loss=loss,
        batches=batches,
        evaluate=lambda params: float(loss(params, np.zeros(1, np.float32))),
        tokens_per_batch=1,
        optimizer=optax.identity(),
        schedule=lambda _: 1.0,
    )
