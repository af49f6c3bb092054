"""The learner as a library: loops of a user's own in a run, in this process."""

import asyncio
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import structlog
from audit import read_items, read_tape
from harness import ENDLESS, World, eventually
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import diloco
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    ConfigError,
    DilocoError,
    DivergedError,
    Exit,
    RunMismatchError,
    TaskError,
)
from diloco.run.cli.opening import open_run
from diloco.run.state import RunStatus
from diloco.run.watch import Watch

TRUTH = np.random.default_rng(3).normal(size=(12, 3)).astype(np.float32)
OPTIMIZER = optax.adam(0.01)
SYNC = {
    "interval_steps": 8,
    "fragments": 3,
    "block": 16,
    "min_steps": 3,
    "codec": "float32",
    "delta_codec": "float32",
}


def initial():
    rng = np.random.default_rng(0)
    return {
        "first": jnp.asarray(rng.normal(size=(12, 96)), jnp.float32) / 4,
        "out": {"bias": jnp.zeros(96), "second": jnp.asarray(rng.normal(size=(96, 3)) / 16)},
        "shift": jnp.asarray([3, -1, 4], jnp.int32),
    }


def loss_of(params, batch):
    inputs, targets = batch
    hidden = jnp.tanh(inputs @ params["first"] + params["out"]["bias"])
    return jnp.square(hidden @ params["out"]["second"] + 0.01 * params["shift"] - targets).mean()


def batch_at(position):
    inputs = np.random.default_rng([5, position]).normal(size=(8, 12)).astype(np.float32)
    return inputs, np.tanh(inputs @ TRUTH)


def optimizer_init(params):
    return OPTIMIZER.init({key: params[key] for key in ("first", "out")})


@jax.jit
def train_step(params, state, batch):
    trained, constant = {key: params[key] for key in ("first", "out")}, {"shift": params["shift"]}
    loss, gradient = jax.value_and_grad(lambda part: loss_of({**part, **constant}, batch))(trained)
    moves, state = OPTIMIZER.update(gradient, state, trained)
    return {**optax.apply_updates(trained, moves), **constant}, state, loss


def train(island, steps=None):
    """The loop of the documentation; the positions it trained at."""
    params, seen = island.params, []
    state = island.restore(optimizer_init(params))
    while not island.done and (steps is None or len(seen) < steps):
        seen.append(island.position)
        params, state, loss = train_step(params, state, batch_at(island.position))
        params = island.step(params, loss=loss, save=state)
    return seen, params, state


@pytest.fixture
def own_run(new_world, request):
    """A run without a task, created from parameters; nothing aggregates."""

    def make(learner=None, **changes):
        run = {**ENDLESS, "tokens_per_step": 8}
        learner = {"heartbeat_interval_s": 0.25, "drain_timeout_s": 1.0, **(learner or {})}
        world = new_world(create=False, run=run, learner=learner)
        del world.document["task"]
        world.document["sync"] = {**SYNC, **changes.get("sync", {})}
        world.document["quorum"] = changes.get("quorum", {})
        world.variant("run", {})
        asyncio.run(in_a_notebook(world))
        return world

    async def in_a_notebook(world):
        diloco.create(world.config_path, initial())

    return make


def said(world, learner):
    """Kinds of what a learner has on the tape, in order."""
    found = [names.parse_subject(item.subject) for item in read_items(world)]
    return [one.kind for one in found if one is not None and one.learner == learner]


def test_two_loops_train_one_model(own_run, tmp_path):
    kept = str(tmp_path / "checkpoints")
    world = own_run({"checkpoint_dir": kept, "drain_timeout_s": 60.0})
    aggregator = world.aggregator()
    before = float(loss_of(initial(), batch_at(10**6)))
    with diloco.join(world.config_path, learner="a", like=initial()) as island:
        assert island.position == island.global_step == 0
        seen, _, _ = train(island, 40)
        assert seen == list(range(40))
        with pytest.raises(DilocoError, match="after the first step"):
            island.restore(())
    merged = eventually(lambda: diloco.load(world.config_path), "it can be loaded")
    assert sorted(merged) == ["first", "out/bias", "out/second", "shift"]
    np.testing.assert_array_equal(merged["shift"], [3, -1, 4])

    def learned():
        params = diloco.load(world.config_path, like=initial())
        return float(loss_of(params, batch_at(10**6))) < 0.8 * before

    eventually(learned, "the global model has what the loop learned")
    tape = read_tape(world)
    assert {update.learner for update in tape.merged()} == {"a"}
    with diloco.join(world.config_path, learner="a", like=initial()) as island:
        seen, _, state = train(island, 3)
    assert seen == [40, 41, 42]
    assert int(state[0].count) == 43
    with diloco.join(world.config_path, learner="b", like=initial()) as island:
        train(island, 2)
        world.stop()
        params = island.params
        while not island.done:
            params = island.step(params, loss=1.0)
        assert island.done
        with pytest.raises(DilocoError, match="after `done`"):
            island.step(params, loss=0.0)
    assert aggregator.wait() == 0
    read_tape(world).check()


def test_a_loop_over_host_arrays_trains_in_place(own_run):
    """Names and the order of axes are the loop's own; other learners see the run's."""
    world = own_run({"drain_timeout_s": 60.0})
    table = {"in": diloco.Leaf("first", (1, 0)), "up": "out/second", "out.bias": "out/bias"}
    tensors = {
        "in": np.zeros((96, 12), np.float32),
        "up": np.zeros((96, 3), np.float32),
        "out.bias": np.zeros(96, np.float32),
        "shift": np.zeros(3, np.int32),
    }
    first, same = np.asarray(initial()["first"]), dict(tensors)
    world.aggregator()
    with diloco.join_tensors(
        world.config_path, learner="a", tensors=tensors, table=table
    ) as island:
        np.testing.assert_array_equal(tensors["in"], first.T)
        np.testing.assert_array_equal(tensors["shift"], [3, -1, 4])
        for batch in island.reading(iter(range(40))):
            assert batch == island.position
            tensors["in"] *= 0.9
            island.step(loss=float(np.abs(tensors["in"]).mean()))
            time.sleep(0.01)
    assert all(tensors[name] is same[name] for name in tensors)

    def learned():
        diloco.load_tensors(world.config_path, tensors, table=table)
        return np.abs(tensors["in"]).mean() < 0.8 * np.abs(first).mean()

    eventually(learned, "the global model has what the loop did")
    assert all(tensors[name] is same[name] for name in tensors)


class OwnError(Exception):
    """Of a user's own program."""


def test_a_run_is_made_from_a_file_of_parameters_without_a_task(new_world, tmp_path):
    world = new_world(create=False, run={**ENDLESS, "tokens_per_step": 8})
    del world.document["task"]
    world.variant("run", {})
    params = {"a/w": np.ones((64, 16), np.float32), "b": np.arange(48, dtype=np.float32)}
    save_file(params, tmp_path / "first.safetensors")
    source = str(tmp_path / "first.safetensors")
    create = world.start(
        "create", "run", "create", "--config", str(world.config_path), "--from", source
    )
    assert create.wait() == 0, create.log()
    found = diloco.load(world.config_path, like={"a": {"w": 0}, "b": 0})
    np.testing.assert_array_equal(found["a"]["w"], params["a/w"])
    np.testing.assert_array_equal(found["b"], params["b"])


def run_loop(world, body, learner="a"):
    with diloco.join(world.config_path, learner=learner, like=initial()) as island:
        body(island)


def stop_by(error, steps=2):
    def body(island):
        train(island, steps)
        raise error

    return body


def step_over(*losses, after_s):
    def body(island):
        params = island.params
        for loss in losses:
            params = island.step(params, loss=loss)
        time.sleep(after_s)

    return body


def test_an_exception_sends_nothing_further_and_is_raised_again(own_run):
    world = own_run()
    with pytest.raises(OwnError):
        # No fragment is due yet: what is, may be on its way before an exception comes.
        run_loop(world, stop_by(OwnError(), steps=1))
    assert said(world, "a") == ["join"]


@pytest.mark.parametrize("losses", [(jnp.nan, 1.0), (1.0, jnp.inf)], ids=["amid", "last"])
def test_a_loss_that_is_no_number_ends_the_loop_before_anything_of_it_is_sent(own_run, losses):
    """An update that is due behind such a step waits for its loss, however slow the loop is."""
    world = own_run()
    with pytest.raises(DivergedError, match=r"the training loss is (nan|inf)"):
        run_loop(world, step_over(*losses, after_s=1.0))
    assert said(world, "a") == ["join"]


def test_an_update_says_the_mean_loss_of_the_steps_that_it_covers(own_run):
    world = own_run({"drain_timeout_s": 60.0})
    aggregator = world.aggregator()
    with diloco.join(world.config_path, learner="a", like=initial()) as island:
        params = island.params
        for step in range(1, 21):
            params = island.step(params, loss=jnp.float32(step))
    found = [update for _, update in read_tape(world).manifests]
    assert len(found) > 2
    for update in found:
        covered = range(update.position - update.steps + 1, update.position + 1)
        assert update.loss == pytest.approx(sum(covered) / update.steps)
    aggregator.kill()


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4"])
def test_parameters_that_are_no_number_end_the_loop_before_they_are_sent(own_run, codec):
    """Though the loss is one: where it is clipped, or of other tensors."""
    world = own_run(sync={"codec": codec})
    spoil = lambda params: {**params, "first": params["first"].at[3, 5].set(jnp.inf)}  # noqa: E731

    def body(island):
        params = island.params
        for step in range(400):
            params = island.step(spoil(params) if step == 1 else params, loss=1.0)
            time.sleep(0.01)  # It comes from beside the loop, when the codes are there.

    words = r"infinite or not a number, in .* fragment \d: .*first"
    with pytest.raises(DivergedError, match=words):
        run_loop(world, body)
    # Its rows lie in several fragments: of the one that has them nothing is on the tape.
    bodies = [getattr(one, "body", None) for one in read_items(world)]
    (spoiled,) = (
        fragment.index
        for fragment in read_tape(world).layout.fragments
        for piece in fragment.pieces
        if piece.tensor == "first" and piece.start <= 3 < piece.start + piece.shape[0]
    )
    assert spoiled not in {one.fragment for one in bodies if isinstance(one, wire.Manifest)}
    assert "leave" not in said(world, "a")


def test_a_loop_that_saves_now_and_then_is_refused_where_snapshots_are_made(own_run, tmp_path):
    """The snapshot of a step without a state would take the place of one with it."""
    learner = {"snapshot_steps": 1, "checkpoint_dir": str(tmp_path), "checkpoint_keep": 1}
    world = own_run(learner)

    def sometimes(island):
        save = {"moment": jnp.ones(2)}
        while True:
            island.step(island.params, loss=1.0, save=save)
            save = None
            time.sleep(0.01)

    with pytest.raises(DilocoError, match="the snapshot would have no optimizer"):
        run_loop(world, sometimes)
    with diloco.join(world.config_path, learner="a", like=initial()) as island:
        found = island.restore({"moment": jnp.zeros(2)})
        assert found["moment"][0] == 1
        island.step(island.params, loss=1.0, save=found)


def test_an_interrupt_is_a_leave(own_run):
    world = own_run()
    with pytest.raises(KeyboardInterrupt):
        run_loop(world, stop_by(KeyboardInterrupt()))
    assert said(world, "a") == ["join", "update", "update", "update", "leave"]


def test_parameters_that_a_step_took_and_did_not_give_back_are_not_sent(own_run):
    world = own_run()
    take = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf + 1, params), donate_argnums=0)
    with diloco.join(world.config_path, learner="a", like=initial()) as island:
        _, params, _ = train(island, 1)
        take(params)
    assert said(world, "a") == ["join", "leave"]


def test_a_loop_that_nobody_answers_says_so_and_trains_on(own_run):
    """A run without an aggregator: once, though its updates are announced again and again."""
    world = own_run(sync={"reannounce_timeout_s": 0.2}, quorum={"deadline_s": 0.5})
    joining = diloco.join(world.config_path, learner="a", like=initial())
    with structlog.testing.capture_logs() as lines, joining as island:
        told = lambda: [one for one in lines if one["event"] == "unanswered"]  # noqa: E731
        params = island.params
        while not told() or island.position < 50:
            params = island.step(params, loss=1.0)
            time.sleep(0.02)
        (line,) = told()
        assert line["waited_s"] >= 0
        assert "diloco aggregator --config" in line["advice"]
        status = asyncio.run(_look(world))
        assert any("no version and no verdict" in one.sentence for one in status.alerts)
        # And once there is one, that too.
        world.aggregator()
        while not any(one["event"] == "answered" for one in lines):
            params = island.step(params, loss=1.0)
            time.sleep(0.02)
    assert len(told()) == 1


def test_signals_ask_the_loop_to_end_and_are_put_back(own_run):
    world, heard = own_run(), []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        installed = signal.getsignal(signal.SIGTERM)
        with diloco.join(world.config_path, learner="a", like=initial()) as island:
            params = island.step(island.params, loss=1.0)
            assert not island.done
            os.kill(os.getpid(), signal.SIGTERM)
            island.step(params, loss=1.0)
            assert island.done
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is installed
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said(world, "a")[-1] == "leave"


def test_a_loop_on_another_thread_takes_no_signals(own_run):
    world, handlers = own_run(), [signal.getsignal(signal.SIGINT)]

    def loop():
        with diloco.join(world.config_path, learner="a", like=initial()) as island:
            handlers.append(signal.getsignal(signal.SIGINT))
            train(island, 2)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert handlers[0] is handlers[1]
    assert said(world, "a")[-1] == "leave"


def test_parameters_of_another_model_are_refused_by_name(own_run):
    world = own_run()
    other = {**initial(), "first": jnp.zeros((12, 95))}
    joining = diloco.join(world.config_path, learner="a", like=other)
    words = r"first: float32\[12, 95\] here, float32\[12, 96\] in the run"
    with pytest.raises(RunMismatchError, match=words), joining:
        pass
    with pytest.raises(RunMismatchError, match="missing or unknown: first"):
        diloco.load(world.config_path, like={"out": other["out"], "shift": other["shift"]})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": jnp.ones(3)}, r"the loss of a step must be one number, and is an array of shape"),
        ({"loss": (1.0, {})}, r"the loss of a step must be one number, and is \(1.0, \{\}\)"),
        ({"loss": 1.0, "metrics": 0.5}, r"figures must come by name, and are 0.5"),
        ({"loss": 1.0, "metrics": {"top": jnp.ones(2)}}, r"'top' must be one number"),
    ],
    ids=["vector", "aux", "metric", "named"],
)
def test_what_is_no_figure_is_refused_by_name(own_run, given, said):
    with pytest.raises(DilocoError, match=said):
        run_loop(own_run(), lambda island: [island.step(island.params, **given) for _ in "abc"])


def test_other_parameters_than_the_loops_are_refused_at_the_step(own_run):
    world = own_run()
    cut = lambda island: {**island.params, "first": island.params["first"][:1]}  # noqa: E731
    words = r"first: float32\[1, 96\] given, float32\[12, 96\] expected"
    with pytest.raises(RunMismatchError, match=words):
        run_loop(world, lambda island: [island.step(cut(island), loss=1.0) for _ in range(9)])
    half = lambda island: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), island.params)  # noqa: E731
    words = r"first: bfloat16\[12, 96\] given, float32\[12, 96\] expected"
    with pytest.raises(TypeError, match=words):
        run_loop(world, lambda island: [island.step(half(island), loss=1.0) for _ in range(9)])
    with pytest.raises(RunMismatchError, match="shift: none given"):
        run_loop(world, lambda island: [island.step({"x": 1}, loss=1.0) for _ in range(9)])


def test_a_step_after_the_block_is_refused(own_run):
    with diloco.join(own_run().config_path, learner="a", like=initial()) as island:
        pass
    with pytest.raises(DilocoError, match="a step came after `done`"):
        island.step(island.params, loss=1.0)


def test_what_is_no_array_is_no_parameter(own_run):
    world = own_run()
    for use in (diloco.create, lambda file, like: run_join(file, like)):
        with pytest.raises(
            TaskError, match=r"the leaf 'scale' of the parameters must be an array, but is 1.0"
        ):
            use(world.config_path, {**initial(), "scale": 1.0})


def run_join(file, like):
    with diloco.join(file, learner="a", like=like):
        pass


def test_tokens_are_the_specifications(own_run):
    world = own_run()
    joining = diloco.join(world.config_path, learner="a", like=initial(), tokens_per_step=9)
    with pytest.raises(ConfigError, match="says 9 tokens a step, the run's file 8"), joining:
        pass


def lying(params):
    """The parameters over a mesh of the user's own, cut where fragments would have them whole."""
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), devices=jax.devices()[:4], axis_types=kinds)
    cuts = {
        "first": PartitionSpec("rows", "columns"),
        "out": {"bias": PartitionSpec("columns"), "second": PartitionSpec("rows")},
        "shift": PartitionSpec(),
    }
    shardings = jax.tree.map(lambda cut: NamedSharding(mesh, cut), cuts)
    return jax.device_put(params, shardings)


@pytest.mark.parametrize("form", ["one device", "mesh", "host"])
def test_parameters_come_as_the_caller_has_them(own_run, form):
    """And are sent the same, whichever way they lie."""
    world = own_run()
    world.aggregator()
    like = lying(initial()) if form == "mesh" else initial()
    if form == "host":
        like = jax.tree.map(np.asarray, like)

    def check(params):
        for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(like), strict=True):
            assert type(found) is type(wanted) or isinstance(wanted, jax.Array)
            if isinstance(wanted, jax.Array) and jnp.issubdtype(wanted.dtype, jnp.floating):
                assert found.sharding == wanted.sharding

    with diloco.join(world.config_path, learner="a", like=like) as island:
        params = island.params
        check(params)
        for _ in range(10):
            params = jax.tree.map(
                lambda leaf: leaf + 0.5 if leaf.dtype == np.float32 else leaf, params
            )
            params = island.step(params, loss=1.0)
            check(params)

    def merged():
        found = diloco.load(world.config_path)
        moved = found["first"] - np.asarray(initial()["first"])
        return np.abs(moved).min() > 0.1

    eventually(merged, "what was sent is merged")
    found = diloco.load(world.config_path)
    moved = found["first"] - np.asarray(initial()["first"])  # its rows lie in several fragments
    np.testing.assert_allclose(moved, np.broadcast_to(moved[:, :1], moved.shape), rtol=1e-3)
    moved = found["out/bias"]
    np.testing.assert_allclose(moved, moved[0], rtol=1e-3)


def test_a_task_whose_optimizer_goes_uphill_ends_before_anything_is_sent(new_world):
    world = new_world(task={"build": "tiny_task:build", "options": {"uphill": True}})
    learner = world.learner("a")
    assert learner.wait() == Exit.TASK
    assert "go uphill" in learner.log()
    assert said(world, "a") == ["join"]
    # Nobody has to ask for its log: the run knows why it is gone.
    status = asyncio.run(_look(world))
    (alert,) = (one for one in status.alerts if one.about == "learner a")
    assert "an error has ended it: the inner optimizer's first steps go uphill" in alert.sentence
    assert [one.state for one in status.learners] == ["failed"]


def test_data_that_ends_before_the_run_is_an_error_and_no_leave(new_world):
    world = new_world(task={"build": "tiny_task:build", "options": {"few": 5}})
    learner = world.learner("a")
    assert learner.wait() == Exit.TASK
    assert "ended before batch number 5" in learner.log()
    assert "next epoch" in learner.log()


async def _look(world: World) -> RunStatus:
    async with open_run(world.config_path, reads=True) as opened:
        return await Watch(opened.context).begin()
