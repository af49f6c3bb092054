"""The learner's outbound side: in which order its manifests come to stand on the tape."""

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest
import structlog

from diloco.common.process.config import RunSettings, SyncSection
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import BusUnavailableError, StoreUnavailableError
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.common.storage.bus import MemoryBus, StreamLimits
from diloco.common.storage.store import MemoryStore
from diloco.learner.background import Context, NoOtherHosts
from diloco.learner.core.events import (
    Republish,
    Send,
)
from diloco.learner.core.handover import Done, Outgoing
from diloco.learner.tensors.send_and_adopt import Replica
from diloco.learner.wire.incarnation import join
from diloco.learner.wire.publish import Publisher, Uploader

NAMES = ("w", "v")
TENSORS = [Tensor(name=name, shape=(32,), dtype="float32") for name in NAMES]
LAYOUT = make_layout(TENSORS, fragments=2, block=16)
LIKE = {name: np.zeros(32, np.float32) for name in NAMES}
VIEWS = [np.zeros(32, np.float32)] * 2


class PausedBus(MemoryBus):
    """Manifests wait in `held` until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.held = []
        self.waits = asyncio.Event()

    async def publish(self, subject, payload, **how):
        if ".update." in subject:
            self.held.append(asyncio.get_running_loop().create_future())
            self.waits.set()
            await self.held[-1]
        return await super().publish(subject, payload, **how)


def make_context(bus):
    settings = RunSettings.model_validate(
        {
            "run": {"name": "r", "steps": 9},
            "sync": {"fragments": 2, "codec": "float32", "block": 16},
        }
    )
    return Context(
        settings=settings, layout=LAYOUT, epoch=0, bus=bus, store=MemoryStore(), runtime=Runtime(),
        logger=structlog.get_logger(), learner="learner-0",
    )  # fmt: skip


async def make_publisher(bus, context=None):
    context = context or make_context(bus)
    uploader = Uploader(context, Replica(context.settings.sync, LAYOUT, LIKE, VIEWS))
    life = await join(context, "here")
    return Publisher(context, lambda event, payload=None: None, uploader, NoOtherHosts(), life)


def outgoing(seq, fragment=0):
    section = SyncSection(codec="float32", block=16)
    codes = Replica(section, LAYOUT, LIKE, VIEWS).send(fragment)
    return Outgoing(
        send=Send(fragment, seq, 0, "0" * 32, 8, 800, final=False), codes=codes, position=8 * seq,
        local_step=8 * seq, loss=lambda: 2.5, step_time_s=1.0, dispatched_at_s=0.0,
    )  # fmt: skip


class HeardBus(MemoryBus):
    """Notes the ids of messages; the first of each kind is lost on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[str, list[str]] = {}

    async def publish(self, subject, payload, *, msg_id=None, **how):
        known = self.ids.setdefault(subject.split(".")[2], [])
        if msg_id is not None:
            known.append(msg_id)
            if len(known) == 1:
                await super().publish(subject, payload, msg_id=msg_id, **how)
                raise BusUnavailableError("the answer is lost")
        return await super().publish(subject, payload, msg_id=msg_id, **how)


def test_an_update_waits_for_its_answer_before_its_manifest_can_be_on_the_tape(run_async):
    """So that no record which answers it is taken for one that does not concern the learner."""

    async def scenario() -> None:
        bus = PausedBus()
        await bus.create_stream(names.tape_stream("r"), ["diloco.r.>"], StreamLimits())
        context = make_context(bus)
        publisher = await make_publisher(bus, context)
        sending = asyncio.ensure_future(publisher.send(outgoing(1, 1)))
        await bus.waits.wait()
        assert context.announced == {1: 1}
        bus.held[0].set_result(None)
        await sending

    run_async(scenario())


def test_no_id_of_a_message_tells_that_of_another(run_async):
    """A message that is sent again, since its answer was lost, keeps its bytes and its id."""

    async def scenario() -> None:
        bus = HeardBus()
        await bus.create_stream(names.tape_stream("r"), ["diloco.r.>"], StreamLimits())
        publisher = await make_publisher(bus)
        for seq in (1, 2):
            await publisher.send(outgoing(seq))
        await publisher.leave(8)
        assert [len(bus.ids[kind]) for kind in ("join", "update", "leave")] == [1, 3, 2]
        assert bus.ids["update"][0] == bus.ids["update"][1]
        drawn = {msg_id for known in bus.ids.values() for msg_id in known}
        assert len(drawn) == 4
        parts = [msg_id[at : at + 6] for msg_id in drawn for at in range(len(msg_id) - 5)]
        assert len({*parts}) == len(parts) == 4 * 27

    run_async(scenario())


class Elsewhere(Replica):
    """A host none of whose blocks is its own to send."""

    def owned(self, fragment):
        return super().owned(fragment)[:0]


def test_a_host_with_nothing_to_send_stores_nothing(run_async):
    context = make_context(MemoryBus())
    section = context.settings.sync
    uploader = Uploader(context, Elsewhere(section, LAYOUT, LIKE, VIEWS), host=1, hosts=2)
    update = outgoing(1)
    stored = run_async(uploader.store(7, update.send, update.codes))
    assert stored.shards == ()
    assert not [*context.store.list("")]


class Failing(MemoryStore):
    """The first attempts to store anything fail."""

    failures = 1

    def put(self, name, data):
        if self.failures:
            self.failures -= 1
            raise StoreUnavailableError(f"cannot store {name}")
        super().put(name, data)


class Collecting(Replica):
    """Counts how often an update is taken from the devices."""

    collected = 0

    def collect(self, fragment, codes):
        self.collected += 1
        return super().collect(fragment, codes)


@pytest.mark.parametrize("shard_elements", [32, 16])
def test_an_update_that_meets_a_fault_is_packed_once_and_stored_whole(run_async, shard_elements):
    base = make_context(MemoryBus())
    section = base.settings.sync.model_copy(update={"shard_elements": shard_elements})
    store = Failing()
    context = dataclasses.replace(
        base, store=store, settings=base.settings.model_copy(update={"sync": section})
    )
    tensors = Collecting(section, LAYOUT, LIKE, VIEWS)
    update = outgoing(1)
    stored = run_async(Uploader(context, tensors).store(7, update.send, update.codes))
    assert tensors.collected == 1
    assert len(stored.shards) == 32 // shard_elements
    assert [store.get(shard.name) for shard in stored.shards]
    assert {shard.name for shard in stored.shards} == {info.name for info in store.list("")}
    assert context.traffic.bytes_up == sum(shard.size_bytes for shard in stored.shards)
    # It was waited out as every fault of the store is, and counted.
    assert sum(context.runtime.retries.faults.values()) == 1
    assert context.runtime.retries.now() == ()


async def settle(*tasks):
    for _ in range(200):
        await asyncio.sleep(0.001)
        if all(task.done() for task in tasks):
            return


def test_no_manifest_comes_behind_a_newer_one_of_its_fragment(run_async):
    async def scenario():
        bus = PausedBus()
        await bus.create_stream("diloco-r", names.tape_subjects("r"), StreamLimits())
        publisher = await make_publisher(bus)
        first = asyncio.ensure_future(publisher.send(outgoing(1)))
        await settle(first)
        bus.held.pop().set_result(None)
        await first
        # Announced again, and while that is on its way the next update is sent.
        again = asyncio.ensure_future(publisher.republish(Republish(0, 1, 1)))
        await settle(again)
        newer = asyncio.ensure_future(publisher.send(outgoing(2)))
        third = asyncio.ensure_future(publisher.republish(Republish(0, 2, 1)))
        while not (again.done() and newer.done()):
            await settle(again, newer)
            with contextlib.suppress(IndexError):
                bus.held.pop().set_result(None)  # what was published last arrives first
        await asyncio.wait([third], timeout=300)
        found = bus.broker.stream("diloco-r").log.values()
        return [wire.decode(wire.Manifest, m.payload) for m in found if ".update." in m.subject]

    manifests = run_async(scenario())
    assert [manifest.seq for manifest in manifests] == [1, 1, 2]
    assert [manifest.position for manifest in manifests] == [8, 8, 16]


def test_an_update_is_announced_again_though_another_fragment_has_sent_since(run_async):
    async def scenario():
        bus = MemoryBus()
        await bus.create_stream("diloco-r", names.tape_subjects("r"), StreamLimits())
        publisher = await make_publisher(bus)
        for fragment in range(2):
            await publisher.send(outgoing(1, fragment))
        for fragment in range(2):
            await publisher.republish(Republish(fragment, 1, 1))
        found = bus.broker.stream("diloco-r").log.values()
        return [wire.decode(wire.Manifest, m.payload) for m in found if ".update." in m.subject]

    manifests = run_async(scenario())
    announced = [(manifest.fragment, manifest.attempt) for manifest in manifests]
    assert announced == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("fragments", [(), (0,), (1,), (0, 1)])
def test_a_leave_says_which_fragments_it_ends(run_async, fragments):
    """Without any it ends the life; one that names them leaves the life to the others."""

    async def scenario():
        bus = MemoryBus()
        await bus.create_stream("diloco-r", names.tape_subjects("r"), StreamLimits())
        await (await make_publisher(bus)).say(Done(8, fragments))
        last = await bus.last("diloco-r", names.leave("r", "learner-0"))
        return wire.decode(wire.Leave, last.payload)

    said = run_async(scenario())
    assert (said.position, said.fragments) == (8, fragments)
