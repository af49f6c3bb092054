"""A learner that goes on sending what cannot be merged is shut out, and one that floods is held."""

import asyncio
import json
import secrets
import time

import pytest
from audit import read_tape
from harness import ENDLESS, World
from mallory import Mallory

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import Exit
from diloco.common.storage.bus import Bus
from diloco.run.history import Sent

RATE = 5.0
OFFENCES = 3
# Made-up lives and updates of the flood, of each of two fragments.
FLOOD = 600


def reasons(world: World, learner: str) -> dict[tuple[int, int, int], str]:
    """Why the updates (incarnation, fragment, seq) of a learner were rejected."""
    return {
        (sent.incarnation, sent.fragment, sent.seq): taken.reason
        for sent, taken in read_tape(world).rejected().items()
        if sent.learner == learner
    }


def told(world: World, *options: str) -> str:
    """Returns the output of `diloco status --learners`."""
    return said(world, "status", str(world.config_path), "--learners", *options)


def said(world: World, *words: str) -> str:
    """Returns the output of a command."""
    process = world.start("said", *words)
    assert process.wait() == 0, process.log()
    return process.log()


def looked_at(world: World, learner: str) -> dict[str, object]:
    """Returns the JSON of `diloco status --learners` on a learner."""
    (shown,) = [one for one in json.loads(told(world, "--json")) if one["name"] == learner]
    return shown


def send(world: World, mallory: Mallory, learner: str, **changes: object) -> Sent:
    """A whole update, with `changes`; nobody waits for its verdict."""
    mallory.tape = read_tape(world)
    fragment = changes.get("fragment", 0)
    manifest = mallory.manifest(learner, mallory.payloads(fragment), **changes)
    world.ask(lambda bus: mallory.publish(bus, manifest))
    return Sent(learner, manifest.incarnation, fragment, manifest.seq)


def answer(world: World, sent: Sent) -> str:
    """Returns the fate of an update: "merged", or the reason for which it was rejected."""

    def resolved() -> str | None:
        tape = read_tape(world)
        if sent in tape.merged():
            return "merged"
        taken = tape.rejected().get(sent)
        return taken.reason if taken else None

    return world.until(resolved, f"a verdict on {sent}", every_s=0.1)


@pytest.mark.long
def test_a_broken_learner_is_shut_out_until_an_operator_releases_it(new_world):
    world = new_world(
        run=ENDLESS,
        task={"options": {"notes": "notes", "sleep_s": 0.02}},
        bounds={"quarantine_offences": OFFENCES},
    )
    aggregator = world.aggregator()
    honest = world.learner("honest")
    mallory = Mallory(world, read_tape(world))
    world.ask(lambda bus: mallory.join(bus, "broken"))
    for seq in range(1, OFFENCES + 1):
        assert answer(world, send(world, mallory, "broken", seq=seq, layout="0" * 32)) == "layout"
    word, *_ = world.until(
        lambda: [
            one.body for one in read_tape(world).entries if isinstance(one.body, wire.Quarantine)
        ],
        "a quarantine",
    )
    assert (word.learner, word.active, word.by) == ("broken", True, "aggregator")
    assert "'layout'" in word.reason
    # In all fragments, and in another life.
    assert answer(world, send(world, mallory, "broken", seq=1, fragment=1)) == "quarantined"
    world.ask(lambda bus: mallory.join(bus, "broken"))
    assert answer(world, send(world, mallory, "broken", seq=1)) == "quarantined"
    shown = looked_at(world, "broken")
    assert (shown["state"], shown["lives"]) == ("quarantined", 2)
    assert shown["reasons"] == {"layout": OFFENCES, "quarantined": 2}
    # Who takes the aggregator's place knows.
    aggregator.kill()
    aggregator = world.aggregator()
    assert answer(world, send(world, mallory, "broken", seq=2)) == "quarantined"
    assert "is quarantined" in told(world)
    assert "released" in said(world, "run", "release", str(world.config_path), "broken")
    assert answer(world, send(world, mallory, "broken", seq=3)) == "merged"
    assert looked_at(world, "broken")["state"] != "quarantined"
    nobody = world.start("nobody", "run", "release", str(world.config_path), "nobody")
    assert nobody.wait() == Exit.MISMATCH
    assert "no learner 'nobody'" in nobody.log()
    world.ask(mallory.leave)
    world.stop()
    assert [honest.wait(), aggregator.wait()] == [0, 0]
    assert not [sent for sent in read_tape(world).rejected() if sent.learner == "honest"]
    read_tape(world).check(hostile=["broken"])


async def flood(mallory: Mallory, bus: Bus) -> None:
    """Garbage, one update again and again, and updates of lives that never were."""
    run = mallory.world.name
    first = mallory.manifest("flooder")
    for number in range(FLOOD):
        again = first.model_copy(update={"attempt": number, "layout": "0" * 32})
        ghost = {"incarnation": 10**9 + number}
        ghosts = [mallory.manifest("flooder", fragment=f).model_copy(update=ghost) for f in (0, 1)]
        await asyncio.gather(
            bus.publish(names.update(run, "flooder", 0), secrets.token_bytes(64)),
            *(mallory.publish(bus, manifest) for manifest in (again, *ghosts)),
        )
        if number % 20 == 0:
            await asyncio.sleep(0.01)


@pytest.mark.long
def test_a_flood_is_not_answered_beyond_its_rate_and_versions_go_on(new_world):
    world = new_world(
        run=ENDLESS,
        task={"options": {"notes": "notes", "sleep_s": 0.02}},
        bounds={"max_updates_per_s": RATE, "quarantine_offences": 0},
    )
    aggregator, honest = world.aggregator(), world.learner("honest")
    world.until(lambda: min(read_tape(world).versions()) >= 1, "a version")
    mallory = Mallory(world, read_tape(world))
    world.ask(lambda bus: mallory.join(bus, "flooder"))
    began_s = time.time()
    world.ask(lambda bus: flood(mallory, bus))
    reached = max(read_tape(world).versions()) + 2
    world.until(lambda: min(read_tape(world).versions()) >= reached, "versions after the flood")
    took_s = time.time() - began_s
    found = reasons(world, "flooder")
    for fragment in (0, 1):
        answered = sum(at == fragment for _, at, _ in found)
        assert 0 < answered <= RATE * (10.0 + took_s)
        assert answered < FLOOD
    events = aggregator.events("ignored")
    # Lines are few, and count what they do not show.
    assert len(events) < 200
    counts = {event["reason"]: event["count"] for event in events}
    assert {"rate", "undecodable"} <= counts.keys()
    world.ask(mallory.leave)
    world.stop()
    assert [honest.wait(), aggregator.wait()] == [0, 0]
    assert not [sent for sent in read_tape(world).rejected() if sent.learner == "honest"]
