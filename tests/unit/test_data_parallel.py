"""The baseline takes the learner's own step, over a batch that is everybody's."""

import jax
import numpy as np
import pytest

from bench import tasks
from bench.data_parallel import first_state, make_step
from diloco.learner.task import Params, Task
from diloco.learner.tensors.inner_step import make_inner_step


def task_of() -> Task:
    return tasks.plain(steps=9, seed=3, preset="sweep", batch=2, eval_batches=1)


@pytest.fixture(scope="module")
def alone() -> Params:
    """The parameters after a learner's step from the first ones."""
    task = task_of()
    params, state = first_state(task, 3)
    batch = next(task.batches("learner-0", 0))
    return make_inner_step(task)(params, state, batch, np.int32(4))[0]


@pytest.mark.parametrize(("gradient", "off"), [("float32", 0.0), ("bfloat16", 2**-8)])
def test_a_step_alone_is_a_learner_s_step(alone: Params, gradient: str, off: float) -> None:
    task = task_of()
    batch = next(task.batches("learner-0", 0))
    params, state = first_state(task, 3)
    mesh = jax.make_mesh((1,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everybody_s = jax.device_put(batch, split)
    job, _, _ = make_step(task, mesh, gradient)(params, state, everybody_s, np.int32(4))
    rate = float(task.schedule(4))
    for one, two in zip(jax.tree.leaves(alone), jax.tree.leaves(job), strict=True):
        # Adam's first step is of the size of the rate, whatever the gradient's.
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6 + 4 * off * rate)
