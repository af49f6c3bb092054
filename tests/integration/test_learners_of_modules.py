"""Learners that hold parts of a model: killed, back with other parts, one run at the end."""

import asyncio
import time

import jax
import numpy as np
import pytest
import tomli_w
from audit import Tape, read_tape
from harness import ENDLESS, World
from safetensors.numpy import load_file

import diloco
from diloco import TensorHint
from diloco.common.protocol.errors import DilocoError
from diloco.operate.auth.nats_config_and_credentials import fragments_of

TASK = {"build": "modular_task:build", "options": {"sleep_s": 0.02}}
# The tape keeps every life's messages, to be looked at afterwards.
WHOLE = {"enabled": False}


def holding(world: World, **heads: list[str]) -> None:
    """Writes into the run's file which heads each learner holds."""
    islands = {name: {"options": {"heads": held}} for name, held in heads.items()}
    learner = {**world.document["learner"], "islands": islands}
    world.config_path.write_text(tomli_w.dumps({**world.document, "learner": learner}))


def sent(tape: Tape, life: int) -> set[str]:
    """The modules of which a life sent updates."""
    modules = [fragment.module for fragment in tape.layout.fragments]
    return {modules[one.fragment] for _, one in tape.manifests if one.incarnation == life}


def until_sent(world: World, learner: str, modules: set[str], lives: int = 1) -> int:
    """Waits for updates of each of these modules; returns the life that sent them."""

    def found() -> int | None:
        tape = read_tape(world)
        known = tape.lives(learner)
        if len(known) < lives or not modules <= sent(tape, known[-1]):
            return None
        return known[-1]

    return world.until(found, f"{learner} sends updates of {modules}")


@pytest.mark.long
def test_a_learner_comes_back_with_another_module(own_nats_server, new_world):
    world = new_world(
        server=own_nats_server,
        run=ENDLESS,
        task=TASK,
        gc=WHOLE,
        outer={"optimizer": "sgd", "learning_rate": 1.0},
        sync={"codec": "float32", "delta_codec": "float32", "fragments": 4},
        learner={
            "heartbeat_interval_s": 0.25,
            "checkpoint_dir": "checkpoints",
            "checkpoint_interval_s": 0.2,
        },
    )
    holding(world, a=["plus"], b=["minus"])
    aggregator = world.aggregator()
    a, b, both = world.learner("a"), world.learner("b"), world.learner("c")
    first = until_sent(world, "a", {"trunk", "plus"})
    until_sent(world, "b", {"trunk", "minus"})
    until_sent(world, "c", {"trunk", "plus", "minus"})
    world.until(lambda: a.events("checkpoint_saved"), "a makes a checkpoint")

    a.kill()
    holding(world, a=["minus"], b=["minus"])
    a = world.learner("a")
    second = until_sent(world, "a", {"trunk", "minus"}, lives=2)
    # The leaf that it keeps for itself is in the checkpoint of the life before.
    (restored,) = a.events("checkpoint_restored")
    assert restored["local_step"] > 0
    assert not a.events("checkpoint_skipped")

    world.stop()
    assert [process.wait() for process in (a, b, both, aggregator)] == [0, 0, 0, 0]
    tape = read_tape(world)
    assert {fragment.module for fragment in tape.layout.fragments} == {"trunk", "plus", "minus"}
    holds = {seq: join.holds for seq, join in tape.joins}
    assert (holds[first], holds[second]) == (("trunk", "plus"), ("trunk", "minus"))
    assert sent(tape, first) == {"trunk", "plus"}
    assert sent(tape, second) == {"trunk", "minus"}
    tape.check()
    assert not tape.rejected()
    exported = world.start("of-a", "export", str(world.config_path), "of-a", "--learner", "a")
    assert exported.wait() == 0, exported.log()
    assert load_file(world.folder / "of-a" / "model.safetensors")["trained/trunk/own"] > 0
    for process in (aggregator, a, b, both):
        process.check_clean_log()


HEADS = {
    "trunk": np.ones((8, 8), np.float32),
    "plus": np.ones((8, 4), np.float32),
    "minus": np.ones((8, 4), np.float32),
    "kept": np.full(4, 3, np.float32),
}


def by_leaf(name: str, shape: tuple[int, ...]) -> TensorHint:
    """Each leaf is a module; `kept` is local, and a head's."""
    del shape
    return TensorHint(module="plus", kind="local") if name == "kept" else TensorHint(module=name)


def test_a_loop_of_ones_own_holds_some_modules(own_nats_server, new_world):
    world = new_world(create=False, server=own_nats_server, run={**ENDLESS, "tokens_per_step": 8})
    del world.document["task"]
    world.document["sync"] = {"interval_steps": 8, "fragments": 3, "block": 16, "min_steps": 3}
    kept = str(world.folder / "checkpoints")
    world.document["learner"] = {"checkpoint_dir": kept, "heartbeat_interval_s": 0.25}
    world.variant("run", {})
    diloco.create(world.config_path, HEADS, hint=by_leaf)
    aggregator = world.aggregator()
    granted = asyncio.run(fragments_of(str(world.config_path), ["plus"]))
    assert [read_tape(world).layout.fragments[number].module for number in granted] == ["plus"]

    def loop(holds, learner="a", saved=0, hint=by_leaf):
        with diloco.join(
            world.config_path, learner=learner, like=HEADS, hint=hint, holds=holds
        ) as island:
            params = island.params
            count = island.restore(np.zeros((), np.int64))
            assert count == saved
            for _ in range(20):
                params = jax.tree.map(lambda leaf: leaf * 0.9, params)
                count = count + 1
                params = island.step(params, loss=1.0, save=count)
                time.sleep(0.01)
            return {name for name, leaf in params.items() if leaf is not None}

    assert loop(["plus", "trunk"]) == {"trunk", "plus", "kept"}
    assert loop(["trunk"], saved=20) == {"trunk"}
    assert loop(None, learner="b") == set(HEADS)
    tape = read_tape(world)
    first, second = tape.lives("a")
    assert sent(tape, first) == {"trunk", "plus"}
    assert sent(tape, second) == {"trunk"}
    for holds, what in {
        ("trunk", "plsu"): "holds the module 'plsu'; the modules of the run's tensors are",
        (): "must be names of modules, but it is ",
        "trunk": "must be names of modules, but it is 'trunk'",
    }.items():
        with pytest.raises(DilocoError, match=what):
            loop(holds)
    assert loop(["minus", "plus", "trunk"], learner="c", hint=None) == set(HEADS)
    world.stop()
    assert aggregator.wait() == 0
    tape = read_tape(world)
    assert dict(tape.joins)[tape.lives("c")[0]].holds == ()
    tape.check()
    assert not tape.rejected()
