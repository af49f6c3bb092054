"""A cluster of three NATS servers: each may die at any moment, and nothing acknowledged is lost."""

import asyncio
import shutil
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from audit import Tape, read_tape
from cluster import Cluster, Node, open_cluster
from harness import ENDLESS, Process, World, open_world

from diloco.common.protocol import names
from diloco.common.protocol.errors import BusUnavailableError, SwapLostError
from diloco.common.storage.bus import StreamLimits
from diloco.common.storage.bus.jetstream import NatsBus, connection

Run = Callable[[Coroutine[Any, Any, None]], None]
RUN = "triple"
LEARNERS = ["a", "b"]
TAPE, OPS = names.tape_stream(RUN), names.ops_stream(RUN)
# Where nobody else writes, and nobody is surprised by what stands there.
PLAIN, SWAPPED = names.rejected(RUN, "witness"), names.rejected(RUN, "swapper")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(tmp_path / "auth", RUN, LEARNERS) as made:
        yield made


@pytest.fixture
def world(cluster: Cluster, tmp_path: Path) -> Iterator[World]:
    # Near the 10 GiB that `diloco auth init` allows on each server, whatever the replicas.
    bus = {**cluster.section("operator"), "tape_max_bytes": 9 << 30}
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
            number = swapped = 0
            while not self._stopped.is_set():
                number += 1
                await self._publish(bus, PLAIN, f"witness-{number}", None)
                swapped = await self._publish(bus, SWAPPED, f"swap-{number}", swapped)
                if reading.done():
                    reading.result()
            reading.cancel()

    async def _publish(self, bus: NatsBus, subject: str, word: str, after: int | None) -> int:
        """As daemons do: the same message until there is an answer; its sequence."""
        while not self._stopped.is_set():
            try:
                seq = await bus.publish(subject, word.encode(), msg_id=word, expected_last=after)
            except BusUnavailableError:
                await asyncio.sleep(0.2)
            except SwapLostError:
                # Nobody else writes there: an earlier attempt has won, or is about to.
                with suppress(BusUnavailableError):
                    last = await bus.last(OPS, subject)
                    if last is not None and last.payload == word.encode():
                        return self._acknowledge(last.seq, word)
            else:
                await asyncio.sleep(0.02)
                return self._acknowledge(seq, word)
        return 0

    def _acknowledge(self, seq: int, word: str) -> int:
        assert seq not in self.acknowledged, (seq, word)
        self.acknowledged[seq] = word.encode()
        return seq

    async def _read(self, bus: NatsBus) -> None:
        async for message in bus.read(TAPE, names.tape_subjects(RUN), 1):
            assert message.seq not in self.read
            self.read[message.seq] = message.payload

    def check(self) -> None:
        """All that was acknowledged is there, once; all that was read is there still."""
        assert len(self.acknowledged) > 100
        found: dict[int, bytes] = {}
        for subject in (PLAIN, SWAPPED):
            kept = asyncio.run(self._all(OPS, [subject]))
            assert len(set(kept.values())) == len(kept)
            found |= kept
        assert {seq: found.get(seq) for seq in self.acknowledged} == self.acknowledged
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


@pytest.mark.slow
def test_the_leader_of_the_tape_dies_and_comes_back(world: World, cluster: Cluster) -> None:
    processes = start(world, cluster)
    until_versions_go_on(world, 1)
    leader = cluster.leader(TAPE)
    leader.kill()
    until_versions_go_on(world)
    leader.start()
    cluster.wait_healthy()
    finish(world, processes)


def test_without_a_majority_a_repeat_is_no_refusal(
    cluster: Cluster, run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader that is left says that the first attempt is in process; and so it is."""
    monkeypatch.setattr(connection, "CALL_TIMEOUT_S", 1.0)
    said: list[str] = []

    async def attempt(bus: NatsBus, what: str) -> int | None:
        try:
            return await bus.publish("kept", what.encode(), msg_id=what)
        except BusUnavailableError as error:
            said.append(error.message)
            await asyncio.sleep(0.2)
            return None

    async def scenario() -> None:
        async with cluster.enter("operator") as bus:
            await bus.create_stream("kept", ["kept"], StreamLimits(replicas=3))
            # A server may take a message before it knows who leads the new stream.
            while (stored := await attempt(bus, "first")) is None:
                pass
            assert stored == 1
            said.clear()
            leader = await asyncio.to_thread(cluster.leader, "kept")
            lost = [node for node in cluster.nodes if node is not leader]
            for node in lost:
                node.kill()
            while not any("in process" in message for message in said):
                assert await attempt(bus, "mine") is None
            for node in lost:
                node.start()
            while (stored := await attempt(bus, "mine")) is None:
                pass
            assert stored == await bus.last_sequence("kept") == 2

    run_async(scenario())


def each_in_turn(world: World, cluster: Cluster) -> None:
    for node in cluster.nodes:
        lose(world, cluster, node)
    for _ in range(2):
        lose(world, cluster, cluster.leader(TAPE))


def without_its_disk(world: World, cluster: Cluster) -> None:
    """Another one dies next, so that what the first has copied is needed."""
    lose(world, cluster, cluster.nodes[0], with_disk=True)
    lose(world, cluster, cluster.nodes[1])


def two_then_all(world: World, cluster: Cluster) -> None:
    for nodes in (cluster.nodes[:2], cluster.nodes):
        without_quorum(world, nodes)
        cluster.wait_healthy()
        until_versions_go_on(world)


def frozen(world: World, cluster: Cluster) -> None:
    """The tape's leader stands still with its connections open, and another takes over."""
    node = cluster.leader(TAPE)
    node.signal(signal.SIGSTOP)
    try:
        until_versions_go_on(world)
    finally:
        node.signal(signal.SIGCONT)
    cluster.wait_healthy()


@pytest.mark.slow
@pytest.mark.parametrize("suffer", [each_in_turn, without_its_disk, two_then_all, frozen])
def test_nothing_acknowledged_is_lost(
    world: World, cluster: Cluster, suffer: Callable[[World, Cluster], None]
) -> None:
    processes = start(world, cluster)
    until_versions_go_on(world, 1)
    with Witness(cluster) as witness:
        suffer(world, cluster)
    finish(world, processes)
    witness.check()


def lose(world: World, cluster: Cluster, node: Node, *, with_disk: bool = False) -> None:
    """Kill a server, let the run go on without it, bring it back on its folder or an empty one."""
    node.kill()
    until_versions_go_on(world)
    if with_disk:
        shutil.rmtree(node.store)
    node.start()
    cluster.wait_healthy()


def without_quorum(world: World, nodes: list[Node]) -> None:
    """Most servers away: nothing is stored, learners train on; it goes on when they are back."""
    for node in nodes:
        node.kill()
    steps = {name: world.steps(name) for name in LEARNERS}
    for name in LEARNERS:
        world.until(lambda name=name: world.steps(name) > steps[name] + 100, f"steps of {name}")
    for node in nodes:
        node.start()
