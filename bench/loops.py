"""Baselines as plain loops in one process: alone, data-parallel, synchronous DiLoCo.

They share the task, its inner step and its schedule with the system, and nothing else of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco.learner.inner_step import InnerStep, make_inner_step
from diloco.learner.task import Batch, Params, Task, held_out_loss


def learner_names(count: int) -> list[str]:
    """The names that `diloco local` gives, so that the same batches are drawn."""
    return [f"learner-{index}" for index in range(count)]


class Start(NamedTuple):
    """Where every loop begins: parameters as the run's creation makes them, and the inner step."""

    params: Params
    inner_step: InnerStep


def start(task: Task, seed: int) -> Start:
    """The task's first parameters from a seed."""
    return Start(jax.jit(task.init)(jax.random.key(seed)), make_inner_step(task))


def copy(params: Params) -> Params:
    """A copy, since the inner step donates what it is given."""
    return jax.tree.map(jnp.copy, params)


def together(iterators: list[Iterator[Batch]]) -> Iterator[Batch]:
    """The learners' batches in one."""
    while True:
        batches = [next(iterator) for iterator in iterators]
        yield jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


# Asked between two steps whether to leave the rest for later.
Pause = Callable[[], bool]


def never() -> bool:
    """No pause."""
    return False


@dataclass
class DataParallel:
    """The learners' batches in one, to `steps`; a look at the held-out loss each `look_steps`."""

    task: Task
    began: Start
    learners: int
    steps: int
    look_steps: int = 0
    step: int = 0
    state: tuple[Params, Any] | None = None
    looks: list[tuple[int, float]] = field(default_factory=list)

    def run(self, pause: Pause = never) -> float | None:
        """Held-out loss at the end; None if it has paused before, and is to go on."""
        names, task = learner_names(self.learners), self.task
        batches = together([task.batches(name, self.step) for name in names])
        trained, state = self.state or (self.began.params, task.optimizer.init(self.began.params))
        while self.step < self.steps and not pause():
            trained, state, _ = self.began.inner_step(
                trained, state, next(batches), np.int32(self.step)
            )
            self.state, self.step = (trained, state), self.step + 1
            if self.look_steps and self.step % self.look_steps == 0:
                self.looks.append((self.step * self.learners, self._loss(trained)))
        return self._loss(trained) if self.step == self.steps else None

    def _loss(self, trained: Params) -> float:
        return held_out_loss(self.task, trained)


def data_parallel(
    task: Task, *, steps: int, seed: int, learners: int, began: Start | None = None
) -> float:
    """Held-out loss after `steps` with the learners' batches in one; one learner trains alone.

    `began`: where it begins, if not where the task's seed says.
    """
    loss = DataParallel(task, began or start(task, seed), learners, steps).run()
    assert loss is not None
    return loss


class Nesterov(NamedTuple):
    """DiLoCo's outer optimizer (arXiv 2311.08105)."""

    learning_rate: float
    momentum: float


@partial(jax.jit, donate_argnums=(0, 1))
def _outer_step(
    theta: Params, moment: Params, learners: list[Params], learning_rate: float, momentum: float
) -> tuple[Params, Params]:
    """Plain average of the learners' outer gradients, and one Nesterov step."""

    def gradient(old: jax.Array, *new: jax.Array) -> jax.Array:
        return old - sum(new[1:], new[0]) / len(new)

    merged = jax.tree.map(gradient, theta, *learners)
    moment = jax.tree.map(lambda m, g: momentum * m + g, moment, merged)
    theta = jax.tree.map(
        lambda old, g, m: old - learning_rate * (g + momentum * m), theta, merged, moment
    )
    return theta, moment


def synchronous(
    task: Task, *, steps: int, seed: int, learners: int, interval: int, outer: Nesterov
) -> float:
    """Held-out loss of synchronous DiLoCo: float32, one fragment, no overlap, no staleness."""
    began = start(task, seed)
    theta, moment = began.params, jax.tree.map(jnp.zeros_like, began.params)
    states = [task.optimizer.init(theta) for _ in range(learners)]
    batches = [task.batches(name, 0) for name in learner_names(learners)]
    step = 0
    while step < steps:
        until = min(step + interval, steps)
        replicas = []
        for index in range(learners):
            run = _rounds(began.inner_step, batches[index])
            replica, states[index] = run(copy(theta), states[index], step, until)
            replicas.append(replica)
        theta, moment = _outer_step(theta, moment, replicas, *outer)
        step = until
    return held_out_loss(task, theta)


def _rounds(
    inner_step: InnerStep, batches: Iterator[Batch]
) -> Callable[[Params, Any, int, int], tuple[Params, Any]]:
    """A function that trains a replica from one step to another."""

    def run(trained: Params, state: Any, first: int, until: int) -> tuple[Params, Any]:
        for step in range(first, until):
            trained, state, _ = inner_step(trained, state, next(batches), np.int32(step))
        return trained, state

    return run
