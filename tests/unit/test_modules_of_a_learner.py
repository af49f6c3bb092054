"""A learner that holds some modules of a task has these alone, or a sentence says why it cannot."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.common.process.config import SyncSection, make_config
from diloco.common.protocol.errors import ConfigError, TaskError
from diloco.common.protocol.layout import TensorHint
from diloco.learner.dry_run import dry_run
from diloco.learner.island import Island
from diloco.learner.load_and_check_task import held_by
from diloco.learner.member import Member
from diloco.learner.task import Task, Variables
from diloco.learner.tensors import tree
from diloco.learner.tensors.send_and_adopt_kernels import vector_of
from diloco.learner.try_task import tried

WIDTH, ROWS = 16, 4
HEADS = ("plus", "minus")


def build(*, steps=10, seed=0, held=("trunk", "plus"), needs=()) -> Task:
    """A trunk and two heads over frozen inputs; the loss needs the heads `needs`."""
    del steps, seed

    def init(key):
        heads = {name: jnp.ones((WIDTH, 1)) for name in HEADS}
        trunk = jax.random.normal(key, (WIDTH, WIDTH))
        frozen = {name: jnp.ones(WIDTH) for name in HEADS}
        return Variables({"trunk": trunk, "heads": heads}, frozen)

    def loss(variables, batch, key):
        del key
        hidden, heads = batch @ variables.trained["trunk"], variables.trained["heads"]
        found = [
            jnp.mean((hidden * variables.frozen[name] @ head) ** 2)
            for name, head in heads.items()
            if head is not None or name in needs
        ]
        return sum(found) / len(found), {}

    def batches(learner, position):
        del learner, position
        while True:
            yield np.ones((ROWS, WIDTH), np.float32)

    def hint(name, shape):
        del shape
        return TensorHint(module=name.rpartition("/")[2])

    return Task(
        init=init,
        loss=loss,
        batches=batches,
        evaluate=lambda variables: loss(variables, jnp.ones((1, WIDTH)), None)[0],
        tokens_per_batch=ROWS,
        optimizer=optax.adam(0.01),
        hint=hint,
        holds=None if held is None else lambda learner: held,
    )


def config_of(**options):
    sys.modules["task_of_modules"] = sys.modules[__name__]
    return make_config(
        {
            "run": {"name": "r", "steps": 10},
            "task": {"build": "task_of_modules:build", "options": options},
            "sync": {"fragments": 3, "block": 16},
            "store": {"url": "unused"},
        },
        source="test",
    )


def test_a_learner_has_the_leaves_and_fragments_of_its_modules_alone():
    island = Island(config_of(), "a", jax.devices()[:1])
    assert island.holds == ("plus", "trunk")
    assert (
        island.layout.digest == tree.task_layout(build(), SyncSection(fragments=3, block=16)).digest
    )
    assert {fragment.module for fragment in island.fragments} == {"trunk", "plus"}
    held = {"trained/trunk", "trained/heads/plus", "frozen/plus"}
    assert tree.by_name(island.shapes).keys() == held
    mu, nu = (tree.by_name(moments) for moments in island.state[0][1:])
    assert mu.keys() == nu.keys() == {"trunk", "heads/plus"}

    leaves = tree.by_name(jax.jit(build().init)(jax.random.key(0)))
    views = [vector_of(island.layout, one.index, leaves) for one in island.fragments]
    with island.context():
        replica = island.replica(views)
        replica.warm_up()
        assert tree.by_name(replica.trained).keys() == held - {"frozen/plus"}
        for one in island.fragments:
            replica.send(one.index)
        assert tree.by_name(replica.unsent().ahead).keys() == held - {"frozen/plus"}

    member = Member.of(
        island.whole, learner="a", anchor="device", tokens_per_step=ROWS, hint=island.hint,
        holds=island.holds,
    )  # fmt: skip
    assert member.layout(3, 16) == island.layout
    assert tree.by_name(member.synced(island.layout)).keys() == held - {"frozen/plus"}
    assert tree.by_name(member.frozen_shapes(island.layout)).keys() == {"frozen/plus"}


def test_a_dry_run_counts_what_is_held():
    every = dry_run(config_of(held=None), "a", devices=jax.devices()[:1])
    some = dry_run(config_of(), "a", devices=jax.devices()[:1])
    assert (every.holds, some.holds) == ((), ("plus", "trunk"))
    assert every.parameters - some.parameters == WIDTH
    assert every.frozen_parameters - some.frozen_parameters == WIDTH
    # A head, and frozen numbers; two moments of the head.
    assert every.memory.parameters - some.memory.parameters == 4 * 2 * WIDTH
    assert every.memory.optimizer - some.memory.optimizer == 4 * 2 * WIDTH
    assert every.memory.anchor - some.memory.anchor == 4 * WIDTH
    assert len(every.fragments) - len(some.fragments) == 1
    assert every.traffic[0].objects_up - some.traffic[0].objects_up == 1


def test_a_trial_trains_what_is_held_and_scores_the_whole():
    trial = tried(config_of(), "a", 3, lambda *_: None)
    assert not trial.refused
    facts = dict(trial.facts)
    assert facts["holds"].startswith("plus, trunk")
    assert facts["trained"] == f"{WIDTH * WIDTH + WIDTH} parameters in 2 fragments"
    assert "held-out, before training" in facts


def test_frozen_leaves_that_a_learner_loads_are_those_of_its_modules():
    loads = dataclasses.replace(
        build(), load_frozen=lambda: {name: np.ones(WIDTH, np.float32) for name in HEADS}
    )
    part, _ = held_by(loads, "a", tree.task_layout(loads, SyncSection(fragments=3, block=16)))
    assert tree.loaded_frozen(part).keys() == {"frozen/plus"}


WRONG = {
    "a name": ("trunk", "must return names of modules, but it returned a str"),
    "a number": (3, "must return names of modules, but it returned a int"),
    "nothing": ((), "no module; the modules of the run's tensors are: 'minus', 'plus', 'trunk'"),
    "a typo": (("trunk", "pluss"), "the module 'pluss'; the modules of the run's tensors are"),
}


@pytest.mark.parametrize(("held", "said"), WRONG.values(), ids=WRONG)
def test_what_is_not_a_part_of_the_task_is_refused(held, said):
    with pytest.raises(TaskError) as caught:
        Island(config_of(held=held), "a", jax.devices()[:1])
    assert said in caught.value.message


def test_a_loss_that_needs_more_than_is_held_is_refused():
    with pytest.raises(TaskError) as caught:
        Island(config_of(needs=("minus",)), "a", jax.devices()[:1])
    assert "'a' holds the modules plus, trunk" in caught.value.message
    trial = tried(config_of(needs=("minus",)), "a", 3, lambda *_: None)
    assert [error.message for error in trial.refused] == [caught.value.message]


def test_a_holds_that_fails_is_named():
    fails = dataclasses.replace(build(), holds=lambda learner: {"b": HEADS}[learner])
    with pytest.raises(TaskError, match=r"Task.holds\('a'\) failed: KeyError"):
        held_by(fails, "a", tree.task_layout(fails, SyncSection(fragments=3, block=16)))


def test_a_learner_that_holds_all_is_as_one_of_a_task_without_holds():
    island = Island(config_of(held=("plus", "minus", "trunk")), "a", jax.devices()[:1])
    assert island.holds == ()


def test_a_learner_of_several_hosts_holds_all(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="'a' has several hosts, and holds 2 of 3 modules"):
        Island(config_of(), "a", jax.devices()[:1])
