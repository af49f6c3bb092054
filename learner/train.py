"""The training loop of `diloco learner`: trains a task, by the interface of `library.py`.

Each turn takes an inner step and calls `learner.step`, which adopts versions and sends updates.
"""

import time
from typing import Any

import jax
import numpy as np

from diloco.common.process import log
from diloco.common.protocol.errors import TaskError
from diloco.learner import load_and_check_task
from diloco.learner.island import Island
from diloco.learner.library import Learner
from diloco.learner.task import Params
from diloco.learner.tensors import tree

# A warning names the leaves whose gradient was zero for this number of steps.
STILL_STEPS = 50
# The number of steps that change parameters and whose direction is checked.
JUDGED_STEPS = 3


class TaskProgram:
    """Trains a task on one host of a learner: compiles the inner step, and runs the training loop.

    Args:
        island: the learner's task on its mesh.
    """

    def __init__(self, island: Island) -> None:
        self._island = island
        self._step: Any = None
        self._key = island.key()

    def compile(self) -> None:
        """Compiles the inner step from shapes, without parameters; further calls do nothing."""
        if self._step is not None:
            return
        island, numbers = self._island, (np.int32(0), np.uint32(0), self._key)
        arguments = island.sharded_params(), island.sharded_state(), island.sharded_batch()
        with island.context():
            step: Any = island.inner_step()
            self._step = step.lower(*arguments, *numbers).compile()

    def train(self, learner: Learner, speed: float = 1.0) -> None:
        """Trains until the run stops or this learner is asked to leave.

        Args:
            learner: the membership in the run.
            speed: share of full speed; below 1 the loop sleeps after each step.
        """
        island = self._island
        params, state, restored = _restored(island, learner)
        judge = SignCheck(done=restored)
        shared = island.task.shared
        holder = None if shared is None else learner.divide(shared)
        batches = learner.reading(island.feed(learner.position, holder))
        watch = GradientWatch(island)
        while not learner.done:
            batch = next(batches, None)
            if batch is None:  # claimed shares end with the run; other data has no end
                if shared is None:
                    raise load_and_check_task.batches_ended(f"batch number {learner.position}")
                break
            began_s = time.perf_counter()
            params, state, outcome = self._step(
                params,
                state,
                batch,
                np.int32(learner.global_step),
                np.uint32(learner.position),
                self._key,
            )
            if not judge.done:
                judge.look(float(outcome.descent))
            watch.look(outcome.still)
            params = learner.step(
                params,
                loss=outcome.loss,
                metrics=outcome.metrics,
                save=_saved(island, params, state),
            )
            if speed < 1:
                _slow_down(params, began_s, speed)


class SignCheck:
    """Finds an optimizer whose updates have the wrong sign, by its first `JUDGED_STEPS` steps.

    A step's descent is minus the inner product of its gradient and the optimizer's move: positive
    if the step goes downhill. A fresh optimizer's first step follows from one gradient alone, so
    its descent must not be negative. Momentum and a batch's noise may turn a single later step
    uphill, so after later steps the sum of all descents is checked.

    Args:
        done: nothing is to be checked, since the optimizer resumes from a checkpoint.

    Attributes:
        done: no further step is to be checked.
    """

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        self._steps = 0
        self._sum = 0.0

    def look(self, descent: float) -> None:
        """Adds a step's descent; 0 for a step that changed no parameter, which does not count.

        Raises:
            TaskError: the sum of the descents is negative.
        """
        self._steps += descent != 0
        self._sum += descent
        self.done = self._steps >= JUDGED_STEPS
        if self._sum < 0:
            raise TaskError(
                "the inner optimizer's first steps go uphill, along the gradient: its updates have"
                " the wrong sign",
                hint="an ordinary optimizer, such as optax.adam(rate), goes without"
                " Task.schedule; a direction, such as optax.scale_by_adam(), needs one: the learner"
                " subtracts it, times schedule(step)",
            )


class GradientWatch:
    """Warns of trained leaves whose gradient stays zero: the loss does not use them.

    Args:
        island: the learner's task on its mesh.
    """

    def __init__(self, island: Island) -> None:
        trained, _ = tree.split(island.shapes, island.division.trained)
        self._names = list(tree.by_name(trained))
        self._logger = log.get(run=island.settings.run.name, learner=island.learner)
        self._seen: list[jax.Array] = []
        self._warned: set[str] = set()

    def look(self, still: jax.Array) -> None:
        """Takes a step's flags; each `STILL_STEPS` steps, warns of leaves that had no gradient.

        The flags are read from the device only then.

        Args:
            still: for each trained leaf, whether its gradient was zero; bool [leaves].
        """
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
    """Returns the parameters, the optimizer's state, and whether a checkpoint had that state.

    The learner's own leaves, which are local state or private, come from the checkpoint too.
    """
    like, keeps = island.sharded_state(), any(island.division.own)
    # They are nowhere but in this learner's checkpoints.
    own, others = tree.split(learner.params, island.division.own)
    saved = learner.restore((like, own) if keeps else like)
    state, own = saved if keeps else (saved, own)
    params = tree.join(own, others)
    # Of a life that held other modules, moments would be of other ages than the count of steps.
    partial = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    if state is like or partial:
        return params, island.init_state(params), False
    return params, state, True


def _saved(island: Island, params: Params, state: Any) -> Any:
    """Returns the contents of a checkpoint: the optimizer's state, or (that state, own leaves).

    Own leaves are local state and private leaves.
    """
    if not any(island.division.own):
        return state
    return state, tree.split(params, island.division.own)[0]


def _slow_down(params: Params, began_s: float, speed: float) -> None:
    """Sleeps so that the step takes 1 / `speed` of its time, as on a slower machine."""
    jax.block_until_ready(params)
    time.sleep((time.perf_counter() - began_s) * (1 / speed - 1))
