"""Learners that hold parts of a model: killed, back with other parts, one run at the end."""

import tomli_w
from audit import Tape, read_tape
from harness import ENDLESS, World
from safetensors.numpy import load_file

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
