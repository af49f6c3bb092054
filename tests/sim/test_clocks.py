"""Clocks that are set forward or back, by minutes or hours: the run keeps its pace."""

import asyncio
import itertools
from itertools import pairwise

import pytest
from simchain import Violation
from simlearner import SimLearner
from simtensors import Light
from test_run_in_virtual_time import finished, make_world, run_fleet

from diloco.common.protocol import names

STEPS_S = (-7200.0, -300.0, 300.0, 7200.0)
# The machines with a clock.
MACHINES = ("aggregator", "learner-0", "learner-1", "learner-2")


def test_a_world_in_which_time_stands_still_is_a_violation():
    async def spin():
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(Violation, match="turns at 0"):
        make_world().run(spin)


def run(world, prepare):
    """Runs three learners to the end, with the coroutine `prepare` beside them."""

    async def scenario():
        learners = [SimLearner(world, index) for index in range(3)]
        beside = asyncio.ensure_future(prepare(world, learners))
        await run_fleet(world, learners)
        beside.cancel()

    world.run(scenario)
    finished(world)
    return world


async def nothing(_world, _learners):
    """Changes no clock: the run to compare with."""


def records(world):
    """Returns the run's records without the times, which are by its aggregator's clock."""
    return [
        record.model_dump(include={"version", "inputs", "reason", "view_digest", "rejected"})
        for fragment in (0, 1)
        for _, record in world.records(fragment)
    ]


@pytest.mark.parametrize("by_s", STEPS_S)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_clock_set_under_a_process_changes_nothing(machine, by_s):
    async def set_clock(world, _learners):
        await asyncio.sleep(21.0)
        world.set_by_s[machine] += by_s

    as_it_was = run(make_world(tensors=Light(32)), nothing)
    stepped = run(make_world(tensors=Light(32)), set_clock)
    assert records(stepped) == records(as_it_was)
    assert stepped.loop.now_s == as_it_was.loop.now_s


@pytest.mark.parametrize("by_s", STEPS_S)
def test_a_clock_that_differs_from_the_servers_by_hours_changes_little(by_s):
    """Rounds end by messages of the tape too, whose times are the server's."""

    async def be_unsteady(world, learners):
        await asyncio.sleep(13.0)
        for learner in learners[1:]:
            learner.leave_asked = True
            await asyncio.sleep(11.0)

    def fleet(offset_s):
        world = make_world(tensors=Light(32), quorum={"min_learners": 2})
        world.set_by_s["aggregator"] = offset_s
        return run(world, be_unsteady)

    right, wrong = fleet(0.0), fleet(by_s)
    assert wrong.loop.now_s == pytest.approx(right.loop.now_s, abs=2.0)
    assert len(wrong.digests()[0]) == pytest.approx(len(right.digests()[0]), abs=1)


@pytest.mark.parametrize("by_s", STEPS_S)
def test_who_comes_back_with_another_time_goes_on_at_once(by_s):
    """The aggregator finds times of the future, or of long ago, in the newest record."""

    async def restart(world, _learners):
        await asyncio.sleep(24.0)
        world.set_by_s["aggregator"] += by_s
        next(actor for actor in world.actors if actor.name == "aggregator").kill()

    world = run(make_world(tensors=Light(32), steps=80), restart)
    made_s = stored_at_s(world)
    pauses_s = [after - before for before, after in pairwise(made_s)]
    # H is 8 steps of a second.
    assert max(pauses_s) < 20.0


def stored_at_s(world):
    """Returns the times at which the first fragment's records were stored, by the server's clock."""
    stream = world.broker.stream(names.tape_stream(world.run_name))
    subject = names.record(world.run_name, 0)
    return [m.time_s for m in stream.log.values() if m.subject == subject]
