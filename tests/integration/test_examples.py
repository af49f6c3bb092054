"""The examples of loops of one's own train, in a real run."""

import jax
import numpy as np
import pytest
from audit import judged, read_tape

import diloco
from diloco import load_task
from diloco.learner.task import scores

RUN = {"steps": 240, "tokens_per_step": 32}
SYNC = {"interval_steps": 8, "fragments": 3, "block": 16, "min_steps": 3}
OUTER = {"optimizer": "sgd", "learning_rate": 0.5}


@pytest.fixture
def world(new_world):
    """A run whose file names no task."""
    world = new_world(create=False, run=RUN, outer=OUTER)
    del world.document["task"]
    world.document["sync"] = SYNC
    world.variant("run", {})
    return world


@pytest.mark.long
def test_an_own_loop_around_an_nnx_model_learns_digits(world):
    # Not at import, where every worker of the tests would wait for flax and scikit-learn.
    from examples import own_loop

    diloco.create(world.config_path, own_loop.model()[1])
    world.aggregator()
    own_loop.train(world.config_path, "a")
    assert own_loop.accuracy(world.config_path) > 0.8
    read_tape(world).check(ended=False)


def task_world(new_world, build, **options):
    """A run of a task of the examples."""
    world = new_world(create=False, run={"steps": 240, "tokens_per_step": 0}, outer=OUTER)
    world.document |= {"task": {"build": build, "options": options}, "sync": SYNC}
    world.variant("run", {})
    world.create()
    return world


def learn(world, *learners, together=False):
    """Train to the end; the global model's figures on held-out data.

    Together: the first round of each fragment has an update of each learner, however busy the
    machine is, since the aggregator begins behind them.
    """
    if not together:
        world.aggregator()
    processes = [world.learner(name) for name in learners]
    if together:
        due = len(learners) * len(read_tape(world).layout.fragments)
        world.until(
            lambda: len(updates(world)) == due, "an update of each fragment of each learner"
        )
        world.aggregator()
    for process in processes:
        assert process.wait() == 0, process.log()
        process.check_clean_log()
    task = load_task(
        world.document["task"]["build"], steps=240, seed=7,
        options=world.document["task"]["options"],
    )  # fmt: skip
    like = task.init(jax.random.key(0))
    if task.load_frozen is not None:
        like = like._replace(frozen=task.load_frozen())
    return task, scores(task.evaluate(diloco.load(world.config_path, like=like))).figures


def updates(world):
    return {(sent.learner, sent.fragment) for _, sent in read_tape(world).manifests}


def killed_once(world, learner):
    """Kill a learner that has sent something, before there is an aggregator."""
    process = world.learner(learner)
    world.until(lambda: read_tape(world).manifests, "an update of the learner")
    process.kill()


@pytest.mark.long
def test_a_module_of_nnx_learns_digits_as_it_is_through_a_killed_learner(new_world):
    from diloco.models.nnx import load_model
    from examples import nnx_module

    named = {name: f"examples.nnx_module:{name}" for name in ("data", "loss")}
    options = {"module": "examples.nnx_module:make", "batch": 32, "learning_rate": 0.01}
    world = task_world(new_world, "diloco.models.nnx:build", **named, **options)
    killed_once(world, "b")
    _, figures = learn(world, "a", "b")
    assert figures["accuracy"] > 0.8
    net = load_model(world.config_path, nnx_module.make)
    net.eval()
    _, metrics = nnx_module.loss(net, nnx_module.data()[1])
    np.testing.assert_allclose(metrics["accuracy"], figures["accuracy"], atol=0.02)


@pytest.mark.long
@pytest.mark.parametrize(
    "store",
    [
        pytest.param(True, id="base-in-the-run"),
        pytest.param(False, id="base-loaded-here", marks=pytest.mark.slow),
    ],
)
def test_of_adapters_over_a_frozen_base_only_the_adapters_travel(new_world, tmp_path, store):
    from examples import lora

    base = tmp_path / "base.npz"
    lora.make_base(base)
    world = task_world(new_world, "examples.lora:build", base=str(base), store=store)
    task, found = learn(world, "a")
    variables = task.init(jax.random.key(0))._replace(frozen=dict(np.load(base)))
    assert found["accuracy"] > scores(task.evaluate(variables)).figures["accuracy"] + 0.2
    sent = [manifest for _, manifest in read_tape(world).manifests]
    elements = sum(leaf.size for leaf in jax.tree.leaves(variables.trained))
    frozen = sum(leaf.size for leaf in variables.frozen.values())
    largest = max(sum(shard.size_bytes for shard in manifest.shards) for manifest in sent)
    assert largest < 4 * elements < frozen
    tiles = list(world.store.rglob("tile-*"))
    assert sum(path.stat().st_size for path in tiles) == (4 * frozen if store else 0)


@pytest.mark.long
def test_batch_statistics_are_averaged_over_two_learners(new_world):
    world = task_world(new_world, "examples.batch_norm:build")
    _, found = learn(world, "a", "b", together=True)
    assert found["accuracy"] > 0.85
    tape = read_tape(world)
    tape.check()
    state = [fragment.index for fragment in tape.layout.fragments if fragment.averaged]
    assert [piece.tensor for piece in tape.layout.fragments[state[0]].pieces] == [
        "state/norm/mean",
        "state/norm/var",
    ]
    versions = [record for _, record in tape.records[state[0]] if record.inputs]
    assert {taken.codec for record in versions for taken in record.inputs} == {"float32"}
    # An average, without momentum; who is alone in a round moves it by its share.
    assert {record.momentum for record in versions} == {0.0}
    together = {record.learning_rate for record in versions if len(record.inputs) > 1}
    assert together == {1.0}
    assert all(0 < record.learning_rate <= 1 for record in versions)
    assert not (findings := judged(world).findings), findings


@pytest.mark.slow
def test_statistics_that_learners_keep_are_in_their_checkpoints(new_world, tmp_path):
    world = task_world(new_world, "examples.batch_norm:build", average=False)
    layout = {tensor.name for tensor in read_tape(world).layout.tensors}
    assert not any(name.startswith("state/") for name in layout)
    folder = {"learner": {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_interval_s": 0.1}}
    world.variant("run", folder)
    world.aggregator()
    first = world.learner("a")
    world.until(lambda: first.events("checkpoint_saved"), "a checkpoint")
    first.terminate()
    assert first.wait() == 0
    second = world.learner("a")
    world.until(lambda: second.events("checkpoint_restored"), "a checkpoint to go on from")
    world.stop()
    assert second.wait() == 0
