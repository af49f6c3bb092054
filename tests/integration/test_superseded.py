"""Two processes with one learner's name: the first ends and says so, on all of its hosts."""

import pytest
from audit import read_tape
from harness import ENDLESS, Process, World
from test_unequal_slices import start, until_merged

from diloco.common.protocol.errors import Exit

# The tape keeps every life's messages, to be looked at afterwards.
WHOLE = {"enabled": False}


def ended_as_superseded(world: World, process: Process) -> None:
    """With one line that says where the other is, another with what to do, and no trace."""
    assert process.wait() == Exit.SUPERSEDED, process.log()
    said = [line for line in process.log().splitlines() if line.startswith(("error:", "hint:"))]
    assert len(said) == 2, process.log()
    assert f"has joined run '{world.name}' as 'a'" in said[0]
    assert "Traceback" not in process.log()
    world.processes.remove(process)


@pytest.mark.long
def test_the_first_of_two_processes_ends_and_rounds_of_all_wait_for_nobody(new_world):
    """Also once the second has died: the first does not count as live beside it."""
    world = new_world(
        run=ENDLESS,
        gc=WHOLE,
        task={"options": {"notes": "notes", "sleep_s": 0.02}},
        quorum={"min_learners": 2, "deadline_s": 120.0, "liveness_timeout_s": 2.0},
    )
    aggregator, first, other = world.aggregator(), world.learner("a"), world.learner("b")
    for name in ("a", "b"):
        until_merged(world, name, 2)
    second = world.learner("a")
    ended_as_superseded(world, first)
    until_merged(world, "a", 2)
    second.kill()
    reached = max(read_tape(world).versions()) + 3
    world.until(lambda: max(read_tape(world).versions()) >= reached, "versions without a")
    world.stop()
    assert [other.wait(), aggregator.wait()] == [0, 0]
    read_tape(world).check()
    # Who comes when the run has ended has nothing to do, and that is a good end.
    late = world.learner("c")
    assert late.wait() == Exit.ENDED, late.log()


@pytest.mark.slow
def test_all_hosts_of_a_superseded_learner_end_alike(new_world):
    world = new_world(run=ENDLESS, gc=WHOLE)
    aggregator = world.aggregator()
    hosts = start(world, "a", hosts=2, devices=1)
    until_merged(world, "a", 2)
    (second,) = start(world, "a", hosts=1, devices=1)
    for host in hosts:
        ended_as_superseded(world, host)
    until_merged(world, "a", 2)
    world.stop()
    assert [second.wait(), aggregator.wait()] == [0, 0]
    read_tape(world).check()
