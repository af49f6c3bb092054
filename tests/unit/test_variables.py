"""A task's trained, frozen and local variables; keys, metrics, parts of a batch."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.common.process.config import SyncSection
from diloco.common.protocol.errors import ConfigError, DilocoError, TaskError
from diloco.common.protocol.layout import TensorHint
from diloco.learner.background import TrafficCounts
from diloco.learner.load_and_check_task import check_task, refusals
from diloco.learner.synchronizer import EMA, Meter
from diloco.learner.task import Task, Variables, params_shapes, scores
from diloco.learner.tensors.inner_step import make_inner_step
from diloco.learner.tensors.tree import Division, division_of, loaded_frozen, task_layout

ROWS, WIDTH = 8, 4


def init(key):
    return Variables(
        trained={"w": jax.random.normal(key, (WIDTH, 3)), "unused": jnp.ones(2)},
        frozen={"base": jnp.full((WIDTH, 3), 0.5)},
        state={"mean": jnp.zeros(WIDTH), "seen": jnp.int32(0)},
    )


def loss(variables, batch, key):
    outputs = batch @ (variables.trained["w"] + variables.frozen["base"])
    state = {
        "mean": 0.9 * variables.state["mean"] + 0.1 * batch.mean(0),
        "seen": variables.state["seen"] + 1,
    }
    noise = jax.random.uniform(key)
    return jnp.mean(outputs**2), {"noise": noise, "largest": outputs.max()}, state


def batches(learner, position):
    while True:
        yield np.random.default_rng(position).normal(size=(ROWS, WIDTH)).astype(np.float32)
        position += 1


def hint(name, shape):
    return TensorHint(kind="averaged" if name == "state/mean" else "trained")


TASK = Task(
    init=init,
    loss=loss,
    batches=batches,
    evaluate=lambda variables: {"loss": 1.0, "accuracy": 0.5},
    tokens_per_batch=ROWS,
    optimizer=optax.sgd(0.1),
    hint=hint,
)


def taken(task, position=0, dtype=None):
    params = task.init(jax.random.key(1))
    state = task.optimizer.init(division_of(task, params_shapes(task)).trained_of(params))
    batch = next(task.batches("a", position))
    return make_inner_step(task)(params, state, batch, np.int32(0), np.uint32(position))


def test_the_task_keeps_the_rules():
    check_task(TASK, steps=10)


def test_the_optimizer_moves_what_is_trained_alone():
    before = init(jax.random.key(1))
    after, _, outcome = taken(TASK)
    assert not np.array_equal(after.trained["w"], before.trained["w"])
    np.testing.assert_array_equal(after.trained["unused"], before.trained["unused"])
    np.testing.assert_array_equal(after.frozen["base"], before.frozen["base"])
    assert int(after.state["seen"]) == 1
    np.testing.assert_allclose(after.state["mean"], 0.1 * next(batches("a", 0)).mean(0), rtol=1e-6)
    assert set(outcome.metrics) == {"noise", "largest"}
    assert outcome.still.tolist() == [True, False]  # "unused", "w"


def test_the_key_follows_the_position():
    noise = [float(taken(TASK, position)[2].metrics["noise"]) for position in (3, 3, 4)]
    assert noise[0] == noise[1] != noise[2]


def test_the_gradient_of_parts_is_that_of_the_whole():
    whole, _, of_whole = taken(TASK)
    parts, _, of_parts = taken(dataclasses.replace(TASK, accumulate=4))
    np.testing.assert_allclose(parts.trained["w"], whole.trained["w"], rtol=1e-5, atol=1e-6)
    assert float(of_parts.loss) == pytest.approx(float(of_whole.loss), rel=1e-5)
    assert int(parts.state["seen"]) == 4


def test_a_loss_in_bfloat16_moves_a_master_in_float32():
    seen = []

    def watched(variables, batch, key):
        seen.append(variables.trained["w"].dtype)
        return loss(variables, batch, key)

    small = dataclasses.replace(
        TASK, loss=watched, compute_dtype="bfloat16", optimizer=optax.sgd(1e-5)
    )
    before = init(jax.random.key(1)).trained["w"]
    after, _, _ = taken(small)
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert after.trained["w"].dtype == jnp.float32
    moved = np.abs(np.asarray(after.trained["w"] - before))
    # Less than bfloat16 could tell of these parameters.
    assert 0 < moved.max() < 2**-9 * np.abs(before).max()


def test_what_becomes_of_each_leaf():
    shapes = params_shapes(TASK)
    names = ["trained/unused", "trained/w", "frozen/base", "state/mean", "state/seen"]
    assert division_of(TASK, shapes) == Division(
        trained=tuple(name.startswith("trained") for name in names),
        synced=tuple(name.startswith("trained") or name == "state/mean" for name in names),
        own=tuple(name == "state/seen" for name in names),
    )
    layout = task_layout(TASK, SyncSection(fragments=2, block=16))
    assert [tensor.name for tensor in layout.constants] == ["frozen/base", "state/seen"]
    assert [fragment.averaged for fragment in layout.fragments] == [False, True]
    assert [piece.tensor for piece in layout.fragments[1].pieces] == ["state/mean"]


def test_averaged_state_needs_a_fragment_of_its_own():
    with pytest.raises(ConfigError, match="averaged state needs a fragment of its own"):
        task_layout(TASK, SyncSection(fragments=1, block=16))


def without_state(variables, batch, key):
    return loss(variables, batch, key)[:2]


BROKEN = {
    "no state": ({"loss": without_state}, "must return the state as `init` gives it"),
    "other state": (
        {"loss": lambda v, b, key: (jnp.mean(v.trained["w"]), {}, {"mean": jnp.zeros(2)})},
        "must return the state as `init` gives it",
    ),
    "a metric of rows": (
        {"loss": lambda v, b, key: (jnp.mean(v.trained["w"]), {"rows": b}, v.state)},
        "'rows' of Task.loss must be a scalar",
    ),
    "a metric's name": (
        {"loss": lambda v, b, key: (jnp.mean(v.trained["w"]), {"a b": 1.0}, v.state)},
        "a metric of Task.loss is called 'a b'",
    ),
    "parts": ({"accumulate": 3}, "Task.accumulate is 3, but a batch has 8 rows"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_named(case):
    change, message = BROKEN[case]
    with pytest.raises(TaskError, match=message):
        check_task(dataclasses.replace(TASK, **change), steps=10)


def test_all_broken_rules_are_told_at_once():
    changes = {"accumulate": 3, "schedule": lambda step: -1.0, "loss": without_state}
    found = [error.message for error in refusals(dataclasses.replace(TASK, **changes), steps=10)]
    assert len(found) == 3


@pytest.mark.parametrize("change", [{"accumulate": 0}, {"compute_dtype": "float16"}])
def test_a_field_of_another_kind_is_refused(change):
    with pytest.raises(TaskError, match=f"Task.{next(iter(change))} must be"):
        dataclasses.replace(TASK, **change)


def test_frozen_leaves_that_learners_load_have_the_shapes_of_init():
    own = dataclasses.replace(TASK, load_frozen=lambda: {"base": np.ones((WIDTH, 3), np.float32)})
    assert list(loaded_frozen(own)) == ["frozen/base"]
    other = dataclasses.replace(TASK, load_frozen=lambda: {"base": np.ones(3, np.float32)})
    with pytest.raises(TaskError, match="as `init` shapes them"):
        loaded_frozen(other)


def test_what_evaluate_says_has_a_loss():
    assert scores(0.5) == ({"loss": 0.5}, {})
    assert scores(TASK.evaluate(None)).figures == {"loss": 1.0, "accuracy": 0.5}
    for said in (jnp.ones(3), {"loss": 1.0, "accuracy": jnp.ones(3)}):
        with pytest.raises(TaskError, match=r"Task\.evaluate must return a number"):
            scores(said)
    with pytest.raises(TaskError, match="no loss, but accuracy"):
        scores({"accuracy": 1.0})


def test_slices_of_the_held_out_data_have_a_loss_and_metrics_of_their_own():
    said = scores({"loss": 1.0, "slices": {"en": 0.5, "de": {"loss": jnp.float32(2), "exact": 0}}})
    assert said.slices == {"en": {"loss": 0.5}, "de": {"loss": 2.0, "exact": 0.0}}
    assert said.losses() == {"": 1.0, "en": 0.5, "de": 2.0}
    diverged = scores({"loss": math.nan, "slices": {"en": math.nan}})
    assert math.isnan(diverged.slices["en"]["loss"])


@pytest.mark.parametrize(
    ("slices", "sentence"),
    [
        ({"en": math.nan}, "the loss nan for the slice 'en', where that of all held-out data is 1"),
        ({"en": {}}, "no loss for the slice 'en', but nothing"),
        ({"en": {"loss": 1.0, "exact": "yes"}}, "exact for the slice 'en' is not one: ValueError"),
        (
            {"en": {"loss": 1.0, "top-1": 1.0}},
            "2 figures for the slice 'en', and calls one 'top-1'",
        ),
        ({"": 1.0}, "names a slice ''"),
        ({0: 1.0}, "names a slice 0"),
        ([1.0], r"a dictionary of at most 64 names, but it returned a list"),
    ],
)
def test_a_slice_that_says_nothing_is_refused_by_its_name(slices, sentence):
    with pytest.raises(TaskError, match=sentence):
        scores({"loss": 1.0, "slices": slices})


def test_metrics_are_averaged_and_held_out_figures_shown_as_they_are():
    meter = Meter("a", TrafficCounts())
    for accuracy in (0.0, 1.0):
        meter.measured({"accuracy": np.float32(accuracy), "other": jnp.float32(2.0)})
    meter.show({"held_out_loss": 0.25, "held_out_wrong": float("nan")})
    beat = meter.heartbeat(1)
    assert beat.metrics == pytest.approx({"accuracy": EMA, "other": 2.0, "held_out_loss": 0.25})
    meter.local_step = 7
    with pytest.raises(DilocoError, match="at step 7, the figure 'top' must be one number"):
        meter.measured({"top": "many"})
    with pytest.raises(DilocoError, match="cannot hold the metrics held out"):
        meter.show({"held out": 1.0})
    with pytest.raises(DilocoError, match="cannot hold the metrics 67"):
        meter.show({f"m{number}": 1.0 for number in range(64)})
