"""A learner's life on the tape: it joins once, and ends when another process takes its name."""

import asyncio

import pytest
from test_publish import make_context

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    BusUnavailableError,
    Exit,
    ExpiredError,
    NewTapeError,
    SupersededError,
    SwapLostError,
)
from diloco.common.storage.bus import MemoryBus, StreamLimits
from diloco.common.storage.data_share_allocation import EXPIRY
from diloco.learner.wire.incarnation import end_when_superseded, join
from diloco.learner.wire.resume_position import place_after_join

SUBJECT = names.join("r", "learner-0")


class Flaky(MemoryBus):
    """Joins go wrong as `script` says, one after the other; then they work.

    "lost": nothing happens. "stored": it happens, its answer is lost, and the server forgets its
    id before the next try. "late": an error comes, and it happens once `arrive` is called.
    """

    def __init__(self, *script: str) -> None:
        super().__init__()
        self.script = list(script)
        self.late = []

    async def publish(self, subject, payload, **how):
        if not payload or not self.script:  # an empty one asks for the last sequence
            return await super().publish(subject, payload, **how)
        match self.script.pop(0):
            case "stored":
                await super().publish(subject, payload, **how)
                self.broker.stream("diloco-r")._ids.clear()
            case "late":
                self.late.append((subject, payload, how))
        raise BusUnavailableError("no answer")

    async def arrive(self):
        """Stores the late message, unless the server refuses it."""
        for subject, payload, how in self.late:
            with pytest.raises(SwapLostError):
                await super().publish(subject, payload, **how)


def joins(bus):
    log = bus.broker.stream("diloco-r").log.values()
    return [message for message in log if message.subject == SUBJECT]


async def made(bus):
    await bus.create_stream("diloco-r", names.tape_subjects("r"), StreamLimits())
    return make_context(bus)


def specification(context):
    return wire.Specification(
        run="r", epoch=0, positions={}, layout="0" * 32, settings=context.settings.model_dump(),
        constants=None, created_at_s=1.0, positions_object=None,
    )  # fmt: skip


def test_a_process_of_a_lost_tape_does_not_join_on_the_next(run_async):
    """It had tried to join while the server was away: its join would end a newer process's life."""

    async def scenario():
        bus = Flaky()
        context = await made(bus)
        resumed = specification(context).model_copy(update={"epoch": 1})
        await bus.publish(names.spec("r"), wire.encode(resumed))
        bus.script = ["lost"]
        with pytest.raises(NewTapeError) as found:
            await join(context, "here")
        return found.value.status, len(joins(bus))

    assert run_async(scenario()) == (Exit.PASSING, 0)


async def ends(context, life):
    """Whether this life ends by itself, given all the time it needs."""
    watch = asyncio.ensure_future(end_when_superseded(context, life))
    await asyncio.wait([watch], timeout=0.05)
    if watch.cancel():
        return None
    return watch.exception()


SCRIPTS = [
    (), ("lost",), ("stored",), ("late",), ("lost", "stored"), ("stored", "lost"), ("late", "lost"),
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids="-".join)
@pytest.mark.parametrize("earlier", [False, True], ids=["first", "again"])
def test_a_join_that_is_tried_again_stands_once_and_supersedes_nobody(run_async, script, earlier):
    async def scenario():
        bus = Flaky()
        context = await made(bus)
        before = [await join(context, "here")] if earlier else []
        bus.script = list(script)
        life = await join(context, "here")
        await bus.arrive()
        assert [message.seq for message in joins(bus)] == [
            *(one.incarnation for one in before),
            life.incarnation,
        ]
        assert await ends(context, life) is None

    run_async(scenario())


def test_a_join_that_lost_its_place_to_another_is_tried_on_top_of_it(run_async):
    async def scenario():
        bus = Flaky()
        context, other = await made(bus), make_context(bus)

        class Overtaken(MemoryBus):
            async def publish(self, subject, payload, **how):
                if payload and not overtaking:
                    overtaking.append(await join(other, "elsewhere"))
                return await super().publish(subject, payload, **how)

        overtaking = []
        life = await join(make_context(Overtaken(bus.broker)), "here")
        first, second = joins(bus)
        assert (first.seq, second.seq) == (overtaking[0].incarnation, life.incarnation)
        # Who came first is the one that ends.
        assert isinstance(await ends(context, overtaking[0]), SupersededError)
        assert await ends(context, life) is None

    run_async(scenario())


def test_another_process_under_this_name_ends_a_life_and_the_error_says_where_it_is(run_async):
    async def scenario():
        context = await made(Flaky())
        life = await join(context, "here")
        await context.bus.publish(SUBJECT, b"garbage", msg_id="join-0")
        assert await ends(context, life) is None
        await join(context, "the-other-machine")
        error = await ends(context, life)
        assert isinstance(error, SupersededError)
        assert error.status == Exit.SUPERSEDED
        assert "on 'the-other-machine', has joined run 'r' as 'learner-0'" in error.message
        assert "\n" not in error.message

    run_async(scenario())


def test_a_life_that_an_aggregator_has_ended_may_begin_again(run_async):
    async def scenario():
        context = await made(Flaky())
        life = await join(context, "here")
        word = wire.Join(
            run="r", learner="learner-0", layout=context.layout.digest, host="aggregator one"
        )
        await context.bus.publish(SUBJECT, wire.encode(word), msg_id=f"{EXPIRY}0")
        error = await ends(context, life)
        assert isinstance(error, ExpiredError)
        assert error.status.restart
        assert "aggregator one has ended this life of 'learner-0'" in error.message

    run_async(scenario())


SHARD = wire.Shard(
    name="shard", size_bytes=8, crc32c=1, slices=(wire.Slice(start=0, shape=(2,), strides=(1,)),)
)


def manifest(life, *, position):
    return wire.Manifest(
        run="r", learner="learner-0", epoch=0, incarnation=life.incarnation, seq=1, fragment=0,
        base_version=0, base_digest="0" * 32, layout="0" * 32, codec="float32",
        shards=(SHARD,), tokens=8, steps=8, position=position, local_step=8, loss=1.0, step_time_s=1.0,
        encode_s=0.0, upload_s=0.0, attempt=0, final=False,
    )  # fmt: skip


@pytest.mark.parametrize("late", [16, 32])
def test_what_a_superseded_life_sends_late_moves_no_data_position(run_async, late):
    """The first life was cut off while the second one got further, which has died since."""

    async def scenario():
        bus = Flaky()
        context = await made(bus)
        await bus.publish(names.spec("r"), wire.encode(specification(context)))
        subject = names.update("r", "learner-0", 0)
        first = await join(context, "here")
        await bus.publish(subject, wire.encode(manifest(first, position=8)))
        second = await join(context, "there")
        assert (await place_after_join(context, 1 << 40)).position == 8
        await bus.publish(subject, wire.encode(manifest(second, position=24)))
        # Nor forward: it will be rejected, and somebody has to train on these batches.
        await bus.publish(subject, wire.encode(manifest(first, position=late)))
        await join(context, "there")
        return (await place_after_join(context, 1 << 40)).position

    assert run_async(scenario()) == 24


def test_a_replica_that_is_behind_takes_no_data_position_back(run_async):
    class Behind(MemoryBus):
        """Its `last` misses the newest update."""

        async def last(self, stream, subject):
            found = await super().last(stream, subject)
            if found is None or subject != names.update("r", "learner-0", 0):
                return found
            return self.broker.stream(stream).log[sent[0]]

    sent = []

    async def scenario():
        bus = Behind()
        context = await made(bus)
        await bus.publish(names.spec("r"), wire.encode(specification(context)))
        life = await join(context, "here")
        for position in (8, 16):
            announced = wire.encode(manifest(life, position=position))
            sent.append(await bus.publish(names.update("r", "learner-0", 0), announced))
        await join(context, "here")
        return (await place_after_join(context, 1 << 40)).position

    assert run_async(scenario()) == 16
