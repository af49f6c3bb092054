"""NATS or the store away for a while: learners keep their step rate, and nothing is lost.

(Issue 2, point 6, with shorter outages; `slow` has the 20 seconds of its text.)
"""

import time

import pytest
from audit import read_tape
from harness import ENDLESS, World, eventually

LEARNERS = ("learner-0", "learner-1")


def rate_between(world: World, learner: str, begin_s: float, end_s: float) -> float:
    """Steps per second that a learner took in a span of the monotonic clock."""
    taken = [note for note in world.notes(learner) if begin_s <= note.at_s < end_s]
    return len(taken) / (end_s - begin_s)


def wait_for_steps(world: World, count: int) -> None:
    """Until each learner has taken so many more steps, and versions with them."""
    wanted = {name: world.steps(name) + count for name in LEARNERS}
    for name, steps in wanted.items():
        eventually(lambda name=name, steps=steps: world.steps(name) >= steps, f"{name}: {steps}")


def noticed(world: World) -> int:
    """How many waits for NATS or the store the processes have told of."""
    return sum(len(process.events("waiting")) for process in world.processes)


def suffer(world: World, take_away, give_back, *, outage_s: float) -> dict[str, float]:
    """Step rates in an outage, each learner's as a multiple of its rate before.

    The outage ends when somebody has noticed it, and no sooner than after `outage_s`. Not all
    must: a learner whose updates are all in flight has nothing to send, and an aggregator that
    nobody sends anything has nothing to do.
    """
    noticed_before = noticed(world)
    wait_for_steps(world, 25)
    before_s = time.monotonic()
    time.sleep(1.5)
    began_s = time.monotonic()
    take_away()
    # Calls that had begun may still get their answers.
    gone_s = time.monotonic()
    time.sleep(outage_s)
    world.until(lambda: noticed(world) > noticed_before, "an outage that somebody noticed")
    over_s = time.monotonic()
    give_back()
    return {
        name: rate_between(world, name, gone_s, over_s)
        / rate_between(world, name, before_s, began_s)
        for name in LEARNERS
    }


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
    without_bus = suffer(world, server.kill, server.start, outage_s=outage_s)
    world.until(lambda: versions_are_made(world), "versions after NATS came back")
    without_store = suffer(
        world,
        lambda: world.store.rename(away),
        lambda: away.rename(world.store),
        outage_s=outage_s,
    )
    world.until(lambda: versions_are_made(world), "versions after the store came back")
    world.stop()
    assert aggregator.wait() == 0
    assert [learner.wait() for learner in learners] == [0, 0]
    assert min(without_bus.values()) > 0.5, without_bus
    assert min(without_store.values()) > 0.5, without_store
    tape = read_tape(world)
    tape.check()  # each life's steps are all sent, and all that was sent is answered
    assert not tape.rejected()
    assert all(len(tape.lives(name)) == 1 for name in LEARNERS)
    for process in (aggregator, *learners):
        process.check_clean_log()
        assert len(process.events("resumed")) == len(process.events("waiting"))


def versions_are_made(world: World) -> bool:
    versions = sum(read_tape(world).versions())
    time.sleep(0.5)
    return sum(read_tape(world).versions()) > versions


def test_learners_keep_their_pace_and_all_work_arrives(own_nats_server, new_world):
    outages(own_nats_server, new_world, outage_s=3.0)


@pytest.mark.slow
def test_twenty_seconds_without_nats_and_without_the_store(own_nats_server, new_world):
    outages(own_nats_server, new_world, outage_s=20.0)
