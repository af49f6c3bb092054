"""The inner step: whose clock the learning rate follows, and what goes uphill."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import diloco
from diloco.common.process.config import MeshSection
from diloco.common.protocol.errors import TaskError
from diloco.learner.collectives import exchanges
from diloco.learner.task import Task
from diloco.learner.tensors.inner_step import by_clock, key_of, make_inner_step
from diloco.learner.tensors.mesh import make_mesh, within
from diloco.learner.train import SignCheck

RATE = optax.linear_schedule(0.0, 1.0, 100)
AFTER = 40


def task_of(optimizer, schedule=None):
    return Task(
        init=lambda key: {"w": jnp.ones(4)},
        loss=lambda params, batch, key: (jnp.square(params["w"] * batch).sum(), {}),
        batches=lambda learner, position: iter(()),
        evaluate=lambda params: 0.0,
        tokens_per_batch=1,
        optimizer=optimizer,
        schedule=schedule,
    )


def steps(task, numbers):
    """The parameters after steps at these points of the run, and the last outcome."""
    trained = task.init(jax.random.key(0))
    inner_step, state = make_inner_step(task), task.optimizer.init(trained)
    for number in numbers:
        batch = np.ones(4, np.float32)
        trained, state, outcome = inner_step(trained, state, batch, np.int32(number))
    return np.asarray(trained["w"]), state, outcome


ORDINARY = {
    "a schedule": optax.sgd(RATE),
    "a schedule within a chain": optax.chain(optax.clip(9.0), optax.sgd(RATE)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=RATE),
    "masked": optax.masked(optax.sgd(RATE), {"w": True}),
}


@pytest.mark.parametrize("optimizer", ORDINARY.values(), ids=ORDINARY.keys())
def test_a_late_joiners_rate_is_that_of_its_fleet(optimizer):
    """Its first step at the run's step 40 moves as far as anybody's there."""
    late, _, _ = steps(task_of(optimizer), [AFTER])
    expected = 1.0 - float(RATE(AFTER)) * 2.0  # the gradient of a square at 1
    np.testing.assert_allclose(late, expected, rtol=1e-6)


def test_adams_own_count_stays_its_own():
    _, state, _ = steps(task_of(optax.adam(RATE)), [AFTER, AFTER + 1])
    adam, scheduled = state
    assert (int(adam.count), int(scheduled.count)) == (2, AFTER + 2)
    assert int(by_clock(state, 7)[1].count) == 7


def test_an_ordinary_optimizer_moves_as_its_direction_and_schedule_do():
    ordinary, _, _ = steps(task_of(optax.adam(RATE)), range(5, 9))
    apart, _, _ = steps(task_of(optax.scale_by_adam(), RATE), range(5, 9))
    np.testing.assert_allclose(ordinary, apart, rtol=1e-6)


def test_an_ordinary_optimizer_beside_a_schedule_goes_uphill_and_is_found():
    _, _, outcome = steps(task_of(optax.adam(1e-3), RATE), [AFTER])
    with pytest.raises(TaskError, match="go uphill"):
        SignCheck().look(float(outcome.descent))


@pytest.mark.parametrize("schedule", [None, RATE], ids=["ordinary", "apart"])
def test_what_goes_downhill_is_judged_over_three_steps_that_move(schedule):
    optimizer = optax.adam(RATE) if schedule is None else optax.scale_by_adam()
    _, _, outcome = steps(task_of(optimizer, schedule), [AFTER])
    _, _, still = steps(task_of(optax.adam(RATE)), [0])
    assert float(still.descent) == 0
    judge = SignCheck()
    for down in (still, outcome, still, outcome, still):
        judge.look(float(down.descent))
        assert not judge.done
    judge.look(float(outcome.descent))
    assert judge.done


def test_a_later_step_may_go_up_for_once_but_not_the_first_three_together():
    judge = SignCheck()
    for descent in (2.0, -1.0, 0.5):
        judge.look(descent)
    assert judge.done
    judge = SignCheck()
    judge.look(2.0)
    with pytest.raises(TaskError, match="wrong sign"):
        judge.look(-3.0)
    assert SignCheck(done=True).done


def test_a_loop_of_ones_own_has_its_schedules_follow_the_clock_of_the_run():
    optimizer = optax.sgd(optax.piecewise_constant_schedule(1.0, {10: 0.5}))
    params = {"w": jnp.ones(2)}
    state = optimizer.init(params)
    for step, rate in ((3, 1.0), (12, 0.5), (3, 1.0)):
        update = jax.jit(lambda g, s, n: optimizer.update(g, diloco.by_clock(s, n)))
        moves, state = update(params, state, np.int32(step))
        assert float(moves["w"][0]) == -rate


def test_learners_of_a_run_have_the_same_program_and_draw_otherwise():
    task = dataclasses.replace(
        task_of(optax.sgd(RATE)),
        loss=lambda params, batch, key: (
            jnp.vdot(params["w"], jax.random.normal(key, batch.shape)),
            {},
        ),
    )
    params, batch = task.init(jax.random.key(0)), np.ones(4, np.float32)
    keys = [key_of(0, name) for name in ("a", "b")]
    given = [params, task.optimizer.init(params), batch, np.int32(0), np.uint32(0)]
    texts = {make_inner_step(task).lower(*given, key).as_text() for key in keys}
    assert len(texts) == 1
    losses = {
        float(make_inner_step(task)(*jax.tree.map(jnp.copy, given), key)[2].loss) for key in keys
    }
    assert len(losses) == 2


def test_judging_gathers_nothing():
    """On a mesh each device judges its own part, and one number goes round."""
    mesh = make_mesh(MeshSection(data=1, fsdp=8))
    cut = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    task = dataclasses.replace(
        task_of(optax.sgd(RATE)),
        init=lambda key: {"w": jnp.ones((4, 64, 8))},
        loss=lambda params, batch, key: (jnp.square(params["w"] * batch).sum(), {}),
    )
    shape = jax.ShapeDtypeStruct((4, 64, 8), jnp.float32, sharding=cut)
    with within(mesh):
        lowered = make_inner_step(task).lower(
            {"w": shape}, task.optimizer.init({"w": shape}), shape, np.int32(0)
        )
    assert max(one.received for one in exchanges(lowered.compile().as_text())) < 64
