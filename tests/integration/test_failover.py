"""Several aggregators for one run: shares, death, a pause longer than the lease, a clean end."""

import os
import signal

import pytest
from audit import Tape, read_tape
from harness import ENDLESS, Process, World

# So long that nobody is late with a renewal, however busy the machine is.
LEASE_S = 8.0
SETTINGS = {
    "run": ENDLESS,
    "task": {"options": {"notes": "notes", "sleep_s": 0.06}},
    "sync": {"interval_steps": 4, "fragments": 6, "min_steps": 3},
    "aggregator": {"lease_ttl_s": LEASE_S},
}
LEARNERS = ("learner-0", "learner-1")


def aggregator(world: World, name: str, *arguments: str) -> Process:
    path = str(world.config_path)
    return world.start(name, "aggregator", "--config", path, "--name", name, *arguments)


def owners(tape: Tape) -> dict[int, str]:
    """Returns the aggregator that made the newest record of each fragment."""
    return {fragment: chain[-1][1].aggregator for fragment, chain in tape.records.items()}


def until_owned(world: World, wanted: dict[str, int | set[int]]) -> dict[int, str]:
    """Waits until each name owns so many fragments, or just these; returns the owners."""

    def asked() -> dict[int, str] | None:
        made = owners(read_tape(world))
        for name, share in wanted.items():
            own = {fragment for fragment, owner in made.items() if owner == name}
            if (own if isinstance(share, set) else len(own)) != share:
                return None
        return made

    return world.until(asked, f"ownership {wanted}")


def finish(world: World, processes: list[Process]) -> Tape:
    world.stop()
    assert [process.wait() for process in processes] == [0] * len(processes)
    tape = read_tape(world)
    tape.check()
    assert not tape.rejected()
    for process in processes:
        process.check_clean_log()
    return tape


@pytest.mark.long
def test_aggregators_share_and_take_over_from_the_dead_and_the_paused(new_world):
    world = new_world(**SETTINGS)
    learners = [world.learner(name) for name in LEARNERS]
    one, two = aggregator(world, "one"), aggregator(world, "two")
    until_owned(world, {"one": 3, "two": 3})

    two.kill()
    until_owned(world, {"one": 6})

    three = aggregator(world, "three")
    until_owned(world, {"one": 3, "three": 3})
    os.kill(one.pid, signal.SIGSTOP)
    until_owned(world, {"three": 6})
    # What it still believes to own is another's by now.
    os.kill(one.pid, signal.SIGCONT)
    (fenced,) = world.until(lambda: one.events("fenced"), "the paused one notices")
    assert len(fenced["fragments"]) == 3
    # It stands by, and takes its share again.
    until_owned(world, {"one": 3, "three": 3})
    three.kill()
    until_owned(world, {"one": 6})
    finish(world, [*learners, one])
    assert len(one.events("fenced")) == 1


def test_a_clean_stop_hands_over_at_once(new_world):
    # Longer than anything here waits for.
    lease = {"aggregator": {"lease_ttl_s": 600.0}}
    world = new_world(**{**SETTINGS, **lease})
    learners = [world.learner(name) for name in LEARNERS]
    one = aggregator(world, "one")
    until_owned(world, {"one": 6})
    two = aggregator(world, "two")
    until_owned(world, {"one": 3, "two": 3})
    one.terminate()
    assert one.wait() == 0
    until_owned(world, {"two": 6})
    finish(world, [*learners, two])


@pytest.mark.long
def test_fragments_can_be_pinned(new_world):
    world = new_world(**SETTINGS)
    learners = [world.learner(name) for name in LEARNERS]
    rest = aggregator(world, "rest")
    until_owned(world, {"rest": 6})
    first = aggregator(world, "first", "--fragments", "0-1,4")
    until_owned(world, {"first": {0, 1, 4}, "rest": {2, 3, 5}})
    standby = aggregator(world, "standby", "--fragments", "0,1,4")
    first.kill()
    until_owned(world, {"standby": {0, 1, 4}, "rest": {2, 3, 5}})
    finish(world, [*learners, rest, standby])
    assert not rest.events("fenced")
