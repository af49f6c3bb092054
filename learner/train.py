"""The training loop of `diloco learner`, around a task: a client of `library.py`, top to bottom.

inner step  ->  learner.step: adopt what has arrived, send what is due
"""

import time

import jax
import numpy as np

from diloco.common.errors import TaskError
from diloco.learner import tree
from diloco.learner.inner_step import InnerStep
from diloco.learner.island import Island
from diloco.learner.library import Learner
from diloco.learner.task import Params


class Program:
    """A task's program on one host, compiled while the learner joins.

    Args:
        island: what it computes with.
    """

    def __init__(self, island: Island) -> None:
        self._island = island
        self._compiled: list[InnerStep] = []

    def warm_up(self, params: Params) -> None:
        """Compile the inner step, on parameters that it may donate."""
        island = self._island
        trained, constants = tree.split(params)
        inner_step = island.inner_step(constants)
        state, batch = island.init_state(trained), next(island.feed(0))
        jax.block_until_ready(inner_step(trained, state, batch, np.int32(0)))
        self._compiled.append(inner_step)

    def train(self, learner: Learner, speed: float = 1.0) -> None:
        """Train until the run stops or somebody asks this learner to leave.

        Args:
            learner: its place in the run.
            speed: share of full speed.
        """
        island, (inner_step,) = self._island, self._compiled
        shapes = island.state_lying()
        state = learner.restore(shapes)
        trained, constants = tree.split(learner.params)
        batches = learner.reading(island.feed(learner.position))
        judged = state is not shapes
        if not judged:
            state = island.init_state(trained)
        while not learner.done:
            began_s = time.perf_counter()
            trained, state, outcome = inner_step(
                trained, state, next(batches), np.int32(learner.global_step)
            )
            judged = judged or _judge(float(outcome.descent))
            params = learner.step(tree.join(trained, constants), loss=outcome.loss, save=state)
            trained, _ = tree.split(params)
            if speed < 1:
                _slow_down(trained, began_s, speed)


def _judge(descent: float) -> bool:
    """Whether a fresh optimizer's step moved anything; then it went downhill.

    Raises:
        TaskError: it went uphill.
    """
    if descent < 0:
        raise TaskError(
            "the inner optimizer's first step goes uphill, along the gradient: its updates have"
            " the wrong sign",
            hint="Task.optimizer gives a direction that the learner subtracts, times"
            " schedule(step): optax.scale_by_adam(). To use an ordinary optimizer, such as"
            " optax.adam(rate), leave Task.schedule out",
        )
    return descent != 0


def _slow_down(trained: Params, began_s: float, speed: float) -> None:
    """Sleep so that the step takes 1 / speed of its time, as a slower machine would."""
    jax.block_until_ready(trained)
    time.sleep((time.perf_counter() - began_s) * (1 / speed - 1))
