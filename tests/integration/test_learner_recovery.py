"""A learner's way back: its inner optimizer from a checkpoint, its data behind what it sent."""

import itertools
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from audit import read_tape
from harness import ENDLESS, Process, World

from diloco.aggregator.daemon import load_run
from diloco.common.process import log
from diloco.common.process.retry import Runtime
from diloco.common.storage.bus import Message
from diloco.common.storage.bus.jetstream import NatsBus
from diloco.common.storage.store import DirectoryStore, open_store
from diloco.learner.background import Context
from diloco.learner.wire.fetch_versions import load as load_newest

SLOWER = {"options": {"notes": "notes", "sleep_s": 0.02}}
# The tape keeps every life's messages, to be looked at afterwards.
WHOLE = {"enabled": False}
# Always at it, so that a kill falls into the middle of a save.
BUSY = {
    "heartbeat_interval_s": 0.25,
    "checkpoint_dir": "checkpoints",
    "checkpoint_interval_s": 0.01,
    "checkpoint_upload": True,
}


def until(world: World, process: Process, action: str, count: int) -> list[dict[str, Any]]:
    """A process's events of one kind, once there are so many."""
    found = world.until(lambda: process.events(action)[count - 1 :], f"{count} x {action}")
    assert found
    return process.events(action)


def kill_and_return(world: World, process: Process, **expected: object) -> Process:
    """SIGKILL in the middle of a save; the next life, which takes up a checkpoint."""
    uploaded = len(until(world, process, "checkpoint_uploaded", 3))
    until(world, process, "checkpoint_saved", uploaded + 1)
    saved = process.events("checkpoint_saved")
    process.kill()
    if expected["where"] == "store":
        shutil.rmtree(world.folder / "checkpoints")
    again = world.learner("a")
    (found,) = until(world, again, "checkpoint_restored", 1)
    assert {key: found[key] for key in expected} == expected
    # Its newest checkpoint or one before: never the beginning.
    assert found["local_step"] >= saved[-3]["local_step"] > 0
    return again


@pytest.mark.long
def test_a_learner_returns_with_its_optimizer(new_world):
    world = new_world(run=ENDLESS, task=SLOWER, learner=BUSY, gc=WHOLE)
    aggregator = world.aggregator()
    a = world.learner("a")
    lives = [a]
    for where in ("folder", "store", "folder"):
        a = kill_and_return(world, a, where=where, of="a")
        lives.append(a)

    # Killed before the end of a save: the newest folder is not whole.
    until(world, a, "checkpoint_saved", 3)
    a.kill()
    numbers = sorted(
        (int(path.name) for path in (world.folder / "checkpoints").glob("*/a/*") if path.name.isdecimal()),
        reverse=True,
    )  # fmt: skip
    (newest,) = (world.folder / "checkpoints").glob(f"*/a/{numbers[0]}")
    shutil.rmtree(newest / "state")
    a = world.learner("a")
    (restored,) = until(world, a, "checkpoint_restored", 1)
    assert (restored["where"], restored["name"]) == ("folder", str(numbers[1]))
    assert [e["name"] for e in a.events("checkpoint_skipped")] == [str(numbers[0])]
    lives.append(a)

    # A new learner begins with what another one has learned of its gradients.
    warm = world.variant("warm", {"learner": {**BUSY, "warm_start": True}})
    newcomer = world.start("b", "learner", "--config", str(warm), "--learner", "b")
    (restored,) = until(world, newcomer, "checkpoint_restored", 1)
    assert (restored["where"], restored["of"]) == ("warm_start", "a")
    until(world, newcomer, "checkpoint_saved", 1)

    a.terminate()
    assert a.wait() == 0
    (left,) = a.events("left")
    assert a.events("checkpoint_saved")[-1]["local_step"] == left["local_step"]
    world.stop()
    assert [newcomer.wait(), aggregator.wait()] == [0, 0]
    tape = read_tape(world)
    tape.check()
    check_data_goes_on(world, "a")
    for process in (*lives, newcomer, aggregator):
        process.check_clean_log()


def check_data_goes_on(world: World, learner: str) -> None:
    """Each life trains on from the highest position in the manifests of those before."""
    tape = read_tape(world)
    lives = tape.lives(learner)
    notes = world.notes(learner)
    drawn = [
        [note.position for note in group]
        for _, group in itertools.groupby(notes, lambda note: note.pid)
    ]
    assert len(drawn) == len(lives)
    for index, positions in enumerate(drawn):
        before = [
            manifest.position
            for _, manifest in tape.manifests
            if manifest.learner == learner and manifest.incarnation in lives[:index]
        ]
        assert positions == [*range(max(before, default=0), positions[-1] + 1)]


class CountingStore(DirectoryStore):
    """Knows which objects were read."""

    def __init__(self, store: DirectoryStore) -> None:
        super().__init__(store.root)
        self.read: list[str] = []

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        self.read.append(name)
        return super().get(name, limit_bytes, within_s)


class CountingBus:
    """A bus that knows how often it was asked for what."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self.asked: Counter[str] = Counter()

    async def last(self, stream: str, subject: str) -> Message | None:
        self.asked["last"] += 1
        return await self._bus.last(stream, subject)

    def read(self, stream: str, subjects: Sequence[str], start: int) -> AsyncIterator[Message]:
        self.asked["read"] += 1
        return self._bus.read(stream, subjects, start)


def test_who_returns_after_many_versions_catches_up_in_one_pass(new_world):
    """One message and one snapshot with its deltas for each fragment, however much was missed."""
    world = new_world(run=ENDLESS)
    aggregator, learner = world.aggregator(), world.learner("a")
    world.until(lambda: min(read_tape(world).versions()) >= 20, "20 versions of every fragment")

    async def load(bus: NatsBus) -> tuple[list[int], list[str], Counter[str]]:
        store, counting = CountingStore(open_store(str(world.store))), CountingBus(bus)
        layout, epoch = await load_run(world.config, bus, store, Runtime())
        store.read.clear()
        context = Context(
            settings=world.config.settings(), layout=layout, epoch=epoch, bus=counting,
            store=store, runtime=Runtime(), logger=log.get(), learner="b",
        )  # fmt: skip
        loaded = [await load_newest(context, each.index) for each in layout.fragments]
        return [item.record.version for item in loaded], store.read, counting.asked

    versions, read, asked = world.ask(load)
    every = world.config.sync.snapshot_interval_versions
    assert min(versions) >= 20
    assert asked == {"last": len(versions)}
    assert len(read) == sum(1 + version % every for version in versions)
    assert len(read) <= every * len(versions)
    world.stop()
    assert [learner.wait(), aggregator.wait()] == [0, 0]


@pytest.mark.long
def test_what_was_not_sent_outlives_a_killed_process(new_world):
    """Of each fragment a life's first update begins where the last of the life before ended."""
    snapshots = {"checkpoint_dir": "checkpoints", "snapshot_steps": 2}
    world = new_world(run=ENDLESS, task=SLOWER, learner=snapshots, gc=WHOLE)
    world.aggregator()
    lives = [world.learner("a")]
    for kill in range(4):
        until(world, lives[-1], "sent", 7 + kill)
        lives[-1].kill()
        lives.append(world.learner("a"))
        until(world, lives[-1], "work_carried", 1)
    until(world, lives[-1], "sent", 7)
    world.stop()
    assert lives[-1].wait() == 0
    tape = read_tape(world)
    tape.check()
    ends: dict[int, int] = {}
    counted: Counter[int] = Counter()
    for _, sent in tape.manifests:
        if sent.attempt:
            continue
        assert sent.position - sent.steps == ends.get(sent.fragment, 0)
        ends[sent.fragment] = sent.position
        counted[sent.fragment] += sent.tokens
    assert set(counted) == {0, 1, 2}
    # Each life trains on from its snapshot: only what came after that is trained again.
    drawn = [
        [note.position for note in group]
        for _, group in itertools.groupby(world.notes("a"), lambda note: note.pid)
    ]
    for life, positions in zip(lives[1:], drawn[1:], strict=True):
        (carried,) = life.events("work_carried")
        assert positions[0] == carried["position"]
        assert not life.events("work_lost")


@pytest.mark.long
def test_what_was_not_sent_outlives_a_polite_end_while_nobody_answers(new_world):
    """Each fragment has an update in flight, and all steps behind it wait."""
    keeps = {"checkpoint_dir": "checkpoints", "snapshot_steps": 2, "drain_timeout_s": 1.0}
    world = new_world(run=ENDLESS, task=SLOWER, learner=keeps, gc=WHOLE)
    aggregator, first = world.aggregator(), world.learner("a")
    until(world, first, "sent", 6)
    aggregator.kill()
    trained = world.steps("a")
    world.until(lambda: world.steps("a") > trained + 30, "it trains on")
    first.terminate()
    assert first.wait() == 0
    (left,) = first.events("left_unsent")
    assert left["fragments"] == 3
    second = world.learner("a")
    until(world, second, "work_carried", 1)
    (carried,) = second.events("work_carried")
    assert sum(carried["steps"]) == left["steps"]
    world.aggregator()
    until(world, second, "sent", 6)
    world.stop()
    assert second.wait() == 0
    read_tape(world).check()
