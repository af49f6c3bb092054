"""NATS or the store away for a while: learners go on training, and nothing is lost."""

import time

import pytest
from audit import read_tape
from harness import ENDLESS, Process, World, eventually

LEARNERS = ("learner-0", "learner-1")
# Eight intervals: who waits for an answer takes one or two.
STEPS = 64


def wait_for_steps(world: World, count: int) -> None:
    """Until each learner has taken so many more steps, and versions with them."""
    wanted = {name: world.steps(name) + count for name in LEARNERS}
    for name, steps in wanted.items():
        eventually(lambda name=name, steps=steps: world.steps(name) >= steps, f"{name}: {steps}")


def noticed(world: World) -> int:
    """How many waits for NATS or the store the processes have told of."""
    return sum(len(process.events("waiting")) for process in world.processes)


def suffer(world: World, take_away, give_back, *, outage_s: float) -> None:
    """An outage in which each learner takes `STEPS` steps, however fast the machine is.

    It ends when somebody has noticed it, and no sooner than after `outage_s`. Not all must: a
    learner whose updates are all in flight has nothing to send, and an aggregator that nobody sends
    anything has nothing to do.
    """
    noticed_before = noticed(world)
    wait_for_steps(world, 25)
    take_away()
    # Calls that had begun may still get their answers.
    time.sleep(outage_s)
    wait_for_steps(world, STEPS)
    world.until(lambda: noticed(world) > noticed_before, "an outage that somebody noticed")
    give_back()


def outages(own_nats_server, new_world, *, outage_s: float) -> None:
    server = own_nats_server
    world = new_world(
        server=server,
        run=ENDLESS,
        task={"options": {"notes": "notes", "sleep_s": 0.02}},
        # At the end a busy machine may take long to send what an outage held back.
        quorum={"deadline_s": 60.0},
    )
    away = world.folder / "store-away"
    aggregator = world.aggregator()
    learners = [world.learner(name) for name in LEARNERS]
    suffer(world, server.kill, server.start, outage_s=outage_s)
    world.until(lambda: versions_are_made(world), "versions after NATS came back")
    suffer(
        world,
        lambda: world.store.rename(away),
        lambda: away.rename(world.store),
        outage_s=outage_s,
    )
    world.until(lambda: versions_are_made(world), "versions after the store came back")
    # Garbage collection, which nothing awaits, may still pause; a run that ends would end it so.
    for process in (aggregator, *learners):
        world.until(
            lambda process=process: every_wait_has_ended(process), "all that waited resumes"
        )
    world.stop()
    assert aggregator.wait() == 0
    assert [learner.wait() for learner in learners] == [0, 0]
    tape = read_tape(world)
    tape.check()  # each life's steps are all sent, and all that was sent is answered
    assert not tape.rejected()
    assert all(len(tape.lives(name)) == 1 for name in LEARNERS)
    for process in (aggregator, *learners):
        process.check_clean_log()
        assert every_wait_has_ended(process)


def every_wait_has_ended(process: Process) -> bool:
    return len(process.events("resumed")) == len(process.events("waiting"))


def versions_are_made(world: World) -> bool:
    versions = sum(read_tape(world).versions())
    time.sleep(0.5)
    return sum(read_tape(world).versions()) > versions


def test_learners_go_on_and_all_work_arrives(own_nats_server, new_world):
    outages(own_nats_server, new_world, outage_s=1.0)


@pytest.mark.slow
def test_twenty_seconds_without_nats_and_without_the_store(own_nats_server, new_world):
    outages(own_nats_server, new_world, outage_s=20.0)
