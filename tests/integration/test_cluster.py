"""A cluster of three NATS servers: each may die at any moment, and nothing acknowledged is lost."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest
from audit import Tape, read_tape
from cluster import Cluster, Node, open_cluster
from harness import ENDLESS, Process, World, open_world

from common import names
from common.bus_nats import NatsBus
from common.errors import BusUnavailableError

RUN = "triple"
LEARNERS = ["a", "b"]
TAPE, OPS = names.tape_stream(RUN), names.ops_stream(RUN)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(tmp_path / "auth", RUN, LEARNERS) as made:
        yield made


@pytest.fixture
def world(cluster: Cluster, tmp_path: Path) -> Iterator[World]:
    bus = cluster.section("operator")
    task = {"options": {"notes": "notes", "sleep_s": 0.02}}
    with open_world(RUN, tmp_path / "run", cluster.url, run=ENDLESS, bus=bus, task=task) as made:
        yield made


def start(world: World, cluster: Cluster) -> list[Process]:
    """An aggregator and learners, each with its own credentials."""
    files = {
        name: str(world.variant(name, {"bus": cluster.section(name)}))
        for name in ("agg", *LEARNERS)
    }
    found = [world.start("agg", "aggregator", "--config", files["agg"])]
    for name in LEARNERS:
        found.append(world.start(name, "learner", "--config", files[name], "--learner", name))
        # One after the other, since the cache of compiled programs can be read half written.
        world.until(lambda name=name: world.steps(name) > 0, f"training of {name}")
    return found


def versions(world: World) -> list[int]:
    """The version of each fragment; waits out an election, in which no stream answers."""

    def asked() -> list[int] | None:
        with suppress(BusUnavailableError):
            return list(read_tape(world).versions())
        return None

    return world.until(asked, "an answer of the tape")


def until_versions_go_on(world: World, more: int = 2) -> None:
    """Until each fragment has so many more versions than now."""
    wanted = [version + more for version in versions(world)]
    world.until(
        lambda: all(map(int.__ge__, versions(world), wanted)),
        f"versions {wanted}",
    )


def finish(world: World, processes: list[Process]) -> Tape:
    """End the run; everything that must hold of its tape holds, and of what was told of it."""
    world.stop()
    assert [process.wait() for process in processes] == [0] * len(processes)
    tape = read_tape(world)
    tape.check()
    assert not tape.rejected()
    assert all(len(tape.lives(name)) == 1 for name in LEARNERS)
    told = {(event["fragment"], event["version"]) for event in processes[0].events("committed")}
    stored = {
        (fragment, record.version)
        for fragment, chain in tape.records.items()
        for _, record in chain
    }
    assert told <= stored, told - stored
    for process in processes:
        process.check_clean_log()
        assert "not permitted" not in process.log()
    return tape


@dataclass
class Witness:
    """Publishes without end beside the run, and keeps the sequence of each acknowledgement.

    It also reads the tape all along, and keeps what it was given.
    """

    cluster: Cluster
    acknowledged: dict[int, bytes] = field(default_factory=dict)
    read: dict[int, bytes] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _failed: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self._failed:
            raise self._failed[0]

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except BaseException as error:  # raised again where the test sees it
            self._failed.append(error)

    async def _watch(self) -> None:
        async with self.cluster.enter("operator") as bus:
            reading = asyncio.create_task(self._read(bus))
            number = 0
            while not self._stopped.is_set():
                number += 1
                await self._publish(bus, f"witness-{number}")
                if reading.done():
                    reading.result()
            reading.cancel()

    async def _publish(self, bus: NatsBus, word: str) -> None:
        subject = names.rejected(RUN, "witness")
        while not self._stopped.is_set():
            try:
                seq = await bus.publish(subject, word.encode(), msg_id=word)
            except BusUnavailableError:
                await asyncio.sleep(0.2)
            else:
                assert seq not in self.acknowledged, (seq, word)
                self.acknowledged[seq] = word.encode()
                await asyncio.sleep(0.02)
                return

    async def _read(self, bus: NatsBus) -> None:
        async for message in bus.read(TAPE, names.tape_subjects(RUN), 1):
            assert message.seq not in self.read
            self.read[message.seq] = message.payload

    def check(self) -> None:
        """All that was acknowledged is there, once; all that was read is there still."""
        assert len(self.acknowledged) > 100
        ops = asyncio.run(self._all(OPS, [names.rejected(RUN, "witness")]))
        assert {seq: ops.get(seq) for seq in self.acknowledged} == self.acknowledged
        assert len(set(ops.values())) == len(ops)
        tape = asyncio.run(self._all(TAPE, names.tape_subjects(RUN)))
        assert {seq: tape.get(seq) for seq in self.read} == self.read
        assert sorted(self.read) == [seq for seq in sorted(tape) if seq <= max(self.read)]

    async def _all(self, stream: str, subjects: list[str]) -> dict[int, bytes]:
        """Every message of a stream up to its present end."""
        found: dict[int, bytes] = {}
        async with self.cluster.enter("operator") as bus:
            marker = await bus.last(stream, subjects[0])
            end = marker.seq if stream == OPS and marker else await bus.last_sequence(stream)
            async with aclosing(bus.read(stream, subjects, 1)) as messages:
                async for message in messages:
                    found[message.seq] = message.payload
                    if message.seq >= end:
                        return found
        raise AssertionError("a read ends with its bus alone")


def test_the_leader_of_the_tape_dies_and_comes_back(world: World, cluster: Cluster) -> None:
    processes = start(world, cluster)
    until_versions_go_on(world, 1)
    leader = cluster.leader(TAPE)
    assert leader is not None
    leader.kill()
    until_versions_go_on(world)
    leader.start()
    cluster.wait_healthy()
    finish(world, processes)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_node_dies_in_turn_and_then_two_at_once(world: World, cluster: Cluster) -> None:
    processes = start(world, cluster)
    until_versions_go_on(world, 1)
    with Witness(cluster) as witness:
        for node in [*cluster.nodes, cluster.leader(TAPE)]:
            assert node is not None
            node.kill()
            until_versions_go_on(world)
            node.start()
            cluster.wait_healthy()
        without_quorum(world, cluster.nodes[:2])
        cluster.wait_healthy()
        until_versions_go_on(world)
    finish(world, processes)
    witness.check()


def without_quorum(world: World, nodes: list[Node]) -> None:
    """Two servers away: nothing is stored, learners train on; it goes on when they are back."""
    for node in nodes:
        node.kill()
    steps = {name: world.steps(name) for name in LEARNERS}
    for name in LEARNERS:
        world.until(lambda name=name: world.steps(name) > steps[name] + 100, f"steps of {name}")
    for node in nodes:
        node.start()
