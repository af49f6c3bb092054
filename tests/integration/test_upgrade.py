"""Parts of a run are replaced by another release's, one after the other, while it goes on."""

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from audit import Tape, read_tape
from harness import ENDLESS, World

from diloco.common.protocol import names
from diloco.common.protocol.errors import Exit
from diloco.common.protocol.wire import encoding
from diloco.common.storage.bus.jetstream import NatsBus

# Two releases in a row: the later one writes a schema that the earlier one can read already.
EARLIER = ("other_release", "1", "1,2")
LATER = ("other_release", "2", "1,2")
SLOWER = {"options": {"notes": "notes", "sleep_s": 0.02}}
WHOLE = {"enabled": False}
NewWorld = Callable[..., World]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test read what both releases write."""
    monkeypatch.setattr(encoding, "READABLE", frozenset({1, 2}))


def until_merged(world: World, *learners: str) -> None:
    """Until a version made from now on has an update of each of the learners."""

    def merged(tape: Tape, learner: str) -> int:
        return sum(update.learner == learner for update in tape.merged())

    before = read_tape(world)
    wanted = {learner: merged(before, learner) + 1 for learner in learners}

    def enough() -> bool:
        tape = read_tape(world)
        return all(merged(tape, learner) >= count for learner, count in wanted.items())

    world.until(enough, f"updates of {learners} are merged")


def schemas(world: World) -> dict[str, set[int]]:
    """By the kind of a message, the schemas in which the tape has it."""

    async def read(bus: NatsBus) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        stream = names.tape_stream(world.name)
        last = await bus.last_sequence(stream)
        async for message in bus.read(stream, [f"diloco.{world.name}.>"], 1):
            said: dict[str, Any] = msgpack.unpackb(message.payload)
            found.setdefault(said["kind"], set()).add(said["schema"])
            if message.seq >= last:
                break
        return found

    return world.ask(read)


@pytest.mark.slow
@pytest.mark.usefixtures("both")
def test_two_releases_in_a_row_work_side_by_side(new_world: NewWorld) -> None:
    world = new_world(run=ENDLESS, task=SLOWER, gc=WHOLE)
    old = world.aggregator(program=EARLIER)
    first = world.learner("first", program=EARLIER)
    second = world.learner("second", program=LATER)
    until_merged(world, "first", "second")

    new = world.aggregator(program=LATER)
    world.until(lambda: new.events("started"), "the later aggregator starts")
    old.terminate()
    first.terminate()
    assert [old.wait(), first.wait()] == [0, 0]
    again = world.learner("first", program=LATER)
    until_merged(world, "first", "second")
    world.stop()
    assert [process.wait() for process in (second, again, new)] == [0, 0, 0]

    assert {kind: schemas(world)[kind] for kind in ("record", "update", "join")} == {
        "record": {1, 2},
        "update": {1, 2},
        "join": {1, 2},
    }
    tape = read_tape(world)
    tape.check()
    assert not tape.rejected()
    for process in world.processes:
        process.check_clean_log()


@pytest.mark.slow
@pytest.mark.usefixtures("both")
def test_who_cannot_read_the_run_says_so_and_harms_nothing(new_world: NewWorld) -> None:
    world = new_world(run=ENDLESS, task=SLOWER, gc=WHOLE)
    aggregator = world.aggregator(program=LATER)
    learner = world.learner("first", program=LATER)
    until_merged(world, "first")
    strangers = [world.aggregator(), world.learner("second")]
    for stranger in strangers:
        assert stranger.wait() == Exit.MISMATCH
        assert "message of schema 2; this program reads [1]" in stranger.log()
        assert "upgrade the older side" in stranger.log()
        world.processes.remove(stranger)
    until_merged(world, "first")
    world.stop()
    assert [learner.wait(), aggregator.wait()] == [0, 0]
    tape = read_tape(world)
    tape.check()
    assert not tape.rejected()
