"""The training loop of `diloco learner`, around a task: a client of `library.py`, top to bottom.

inner step  ->  learner.step: adopt what has arrived, send what is due
"""

import time
from typing import Any

import jax
import numpy as np

from diloco.common import log
from diloco.common.errors import TaskError
from diloco.learner import tree
from diloco.learner.inner_step import InnerStep
from diloco.learner.island import Island
from diloco.learner.library import Learner
from diloco.learner.task import Params

# After so many steps without a gradient a leaf is warned of.
STILL_STEPS = 50


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
        inner_step = island.inner_step()
        state, batch = island.init_state(params), next(island.feed(0))
        jax.block_until_ready(inner_step(params, state, batch, np.int32(0), np.uint32(0)))
        self._compiled.append(inner_step)

    def train(self, learner: Learner, speed: float = 1.0) -> None:
        """Train until the run stops or somebody asks this learner to leave.

        Args:
            learner: its place in the run.
            speed: share of full speed.
        """
        island, (inner_step,) = self._island, self._compiled
        params, state, judged = _restored(island, learner)
        shared = island.task.shared
        holder = None if shared is None else learner.divide(shared)
        batches = learner.reading(island.feed(learner.position, holder))
        watch = Watch(island)
        while not learner.done and (batch := next(batches, None)) is not None:
            began_s = time.perf_counter()
            params, state, outcome = inner_step(
                params,
                state,
                batch,
                np.int32(learner.global_step),
                np.uint32(learner.position),
            )
            judged = judged or _judge(float(outcome.descent))
            watch.look(outcome.still)
            params = learner.step(
                params,
                loss=outcome.loss,
                metrics=outcome.metrics,
                save=_saved(island, params, state),
            )
            if speed < 1:
                _slow_down(params, began_s, speed)


class Watch:
    """Warns of trained leaves whose gradient is zero for long: the loss does not use them.

    Args:
        island: whose parameters they are.
    """

    def __init__(self, island: Island) -> None:
        trained, _ = tree.split(island.shapes, island.division.trained)
        self._names = list(tree.by_name(trained))
        self._logger = log.get(run=island.settings.run.name, learner=island.learner)
        self._seen: list[jax.Array] = []
        self._warned: set[str] = set()

    def look(self, still: jax.Array) -> None:
        """A step's word; it is read with that of the others, once there are `STILL_STEPS`."""
        self._seen.append(still)
        if len(self._seen) < STILL_STEPS:
            return
        always = np.all(jax.device_get(self._seen), axis=0)
        self._seen = []
        found = [name for name, zero in zip(self._names, always, strict=True) if zero]
        if new := [name for name in found if name not in self._warned]:
            self._warned.update(new)
            self._logger.warning("no_gradient", leaves=new, steps=STILL_STEPS)


def _restored(island: Island, learner: Learner) -> tuple[Params, Any, bool]:
    """Parameters, the optimizer's state, and whether both go on from a checkpoint."""
    like = island.state_lying()
    keeps = any(island.division.local)
    if not keeps:
        state = learner.restore(like)
        fresh = state is like
        return learner.params, island.init_state(learner.params) if fresh else state, not fresh
    # State that this learner keeps is nowhere but in its checkpoints.
    local, others = tree.split(learner.params, island.division.local)
    saved = learner.restore((like, local))
    if saved[0] is like:
        return learner.params, island.init_state(learner.params), False
    return tree.join(saved[1], others), saved[0], True


def _saved(island: Island, params: Params, state: Any) -> Any:
    """What a checkpoint holds."""
    if not any(island.division.local):
        return state
    return state, tree.split(params, island.division.local)[0]


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


def _slow_down(params: Params, began_s: float, speed: float) -> None:
    """Sleep so that the step takes 1 / speed of its time, as a slower machine would."""
    jax.block_until_ready(params)
    time.sleep((time.perf_counter() - began_s) * (1 / speed - 1))
