"""Processes that die and return, come late, leave, or are told to end twice."""

import itertools
import os
import random
import signal
import time

import pytest
from audit import Tape, read_tape
from harness import ENDLESS, Process, World, eventually

from diloco.common.process.nats_server import NatsServer

SLOWER = {"options": {"notes": "notes", "sleep_s": 0.06}}
# The tape keeps every life's messages, to be looked at afterwards.
WHOLE = {"enabled": False}


def updates(tape: Tape, learner: str, life: int | None = None) -> int:
    """How many updates of a learner, or of one life of it, stand in records."""
    return sum(
        update.learner == learner and life in (None, update.incarnation) for update in tape.merged()
    )


def until_merged(world: World, learner: str, count: int, life: int | None = None) -> Tape:
    """The tape once so many updates of a learner are merged."""

    def enough() -> Tape | None:
        tape = read_tape(world)
        return tape if updates(tape, learner, life) >= count else None

    return world.until(enough, f"{count} merged updates of {learner}")


def test_learners_die_return_come_late_and_leave(own_nats_server, new_world):
    world = new_world(server=own_nats_server, run=ENDLESS, task=SLOWER, gc=WHOLE)
    aggregator = world.aggregator()
    first, second = world.learner("learner-0"), world.learner("learner-1")
    until_merged(world, "learner-1", 3)
    until_merged(world, "learner-0", 3)

    second.kill()
    second = world.learner("learner-1")
    late = world.learner("late")
    until_merged(world, "late", 3)
    (second_life,) = world.until(lambda: read_tape(world).lives("learner-1")[1:], "a second life")
    until_merged(world, "learner-1", 3, second_life)

    first.terminate()
    assert first.wait() == 0
    tape = read_tape(world)
    assert tape.stop is None, "the run went on without the one who left"
    check_left(world, tape, "learner-0")

    check_second_signal_ends_at_once(own_nats_server, late)

    world.stop()
    assert [second.wait(), aggregator.wait()] == [0, 0]
    tape = read_tape(world)
    tape.check()
    check_returned(world, tape, "learner-1")
    assert not tape.rejected()
    for process in (aggregator, first, second, late):
        process.check_clean_log()


def check_returned(world: World, tape: Tape, learner: str) -> None:
    """A second life trained on from the highest position in the first one's manifests."""
    before, after = tape.lives(learner)
    sent = max(m.position for _, m in tape.manifests if m.incarnation == before)
    notes = world.notes(learner)
    old, new = (
        [note.position for note in group]
        for _, group in itertools.groupby(notes, lambda note: note.pid)
    )
    assert old == [*range(len(old))]
    assert new == [*range(sent, sent + len(new))]
    # What was trained and not sent is trained again: at most H steps and what was on its way.
    assert sent <= len(old)
    assert all(m.position > sent for _, m in tape.manifests if m.incarnation == after)


def check_left(world: World, tape: Tape, learner: str) -> None:
    """A leave with the position behind the last step, and every step sent before it."""
    (leave,) = [one for _, one in tape.leaves if one.learner == learner and not one.fragments]
    assert leave.position == world.steps(learner)
    for fragment in tape.records:
        own = [m for _, m in tape.manifests if m.learner == learner and m.fragment == fragment]
        assert max(m.position for m in own) == leave.position
        assert sum(m.steps for m in own if m.attempt == 0) == leave.position


def check_second_signal_ends_at_once(server: NatsServer, learner: Process) -> None:
    """While NATS does not answer nobody can announce a leave; a second signal ends the wait."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        learner.terminate()
        time.sleep(1.0)
        assert learner.running
        learner.signal(signal.SIGINT)
        assert learner.wait(15) == 128 + signal.SIGINT  # `learner.drain_timeout_s` is 20
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_what_was_merged_is_there_for_recovery_whatever_its_sender_deletes(new_world):
    sync = {"snapshot_interval_versions": 1000}
    world = new_world(run=ENDLESS, task=SLOWER, gc=WHOLE, sync=sync)
    aggregator, learner = world.aggregator(), world.learner("learner-0")
    until_merged(world, "learner-0", 6)
    aggregator.kill()
    tape = read_tape(world)
    for update, taken in tape.merged().items():
        for shard in taken.shards:
            (world.store / shard.name).unlink()
        assert update.learner == "learner-0"
    made = max(tape.versions())
    again = world.aggregator()
    world.until(lambda: min(read_tape(world).versions()) > made, "further versions")
    world.stop()
    assert [learner.wait(), again.wait()] == [0, 0]
    # Every version is made once more here, from the same shards.
    read_tape(world).check()
    again.check_clean_log()


def test_an_aggregator_dies_at_any_moment(new_world):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    check_aggregator_deaths(new_world(run=ENDLESS, task=SLOWER), random.Random(seed), 3)


@pytest.mark.slow
def test_an_aggregator_dies_many_times(new_world):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    check_aggregator_deaths(new_world(run=ENDLESS, task=SLOWER), random.Random(seed), 15)


def check_aggregator_deaths(world: World, rng: random.Random, deaths: int) -> None:
    learners = [world.learner(f"learner-{index}") for index in range(2)]
    aggregator = world.aggregator()
    recoveries = []
    for death in range(deaths):
        eventually(lambda a=aggregator: a.events("committed"), f"commits after death {death}")
        time.sleep(rng.uniform(0.0, 1.0))
        if death % 3 == 1:  # two at once: one of them is fenced off
            successor = world.aggregator()
            eventually(lambda s=successor: s.events("started"), "a second aggregator starts")
            time.sleep(rng.uniform(0.0, 1.0))
            aggregator.kill()
        elif death % 3 == 2:
            aggregator.terminate()
            assert aggregator.wait() == 0
            successor = world.aggregator()
        else:
            aggregator.kill()
            successor = world.aggregator()
        recoveries.append(successor)
        aggregator = successor
    eventually(lambda: aggregator.events("committed"), "commits after the last death")
    world.stop()
    assert aggregator.wait() == 0
    assert [learner.wait() for learner in learners] == [0, 0]
    tape = read_tape(world)
    tape.check()
    assert not tape.rejected()
    recovered = [event for process in recoveries for event in process.events("recovered")]
    assert any(event["version"] > 0 for event in recovered)
    assert any(event["merged_again"] for event in recovered)
    for process in (*recoveries, *learners):
        process.check_clean_log()
