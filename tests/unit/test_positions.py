"""Where data goes on after a resume, for more learners than a map of a message holds."""

import dataclasses

import pytest
from runlab import RUN, SNAPSHOT_EVERY, Lab

from diloco.aggregator import checkpoint
from diloco.aggregator.compare_and_swap import swap
from diloco.aggregator.context import Context
from diloco.aggregator.core.garbage import Trim
from diloco.aggregator.owner.garbage_collector import trim_tape
from diloco.aggregator.owner.liveness import reached_before
from diloco.common.process.config import BusSection
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import ObjectMissingError, RunMismatchError, WireError
from diloco.common.storage import checkpoint_files
from diloco.common.storage.bus import MemoryBus, Message
from diloco.common.storage.store import MemoryStore
from diloco.common.storage.tape import (
    data_position,
    entries,
    first_sequence,
    load_specification,
    read_positions,
    read_tape,
    store_positions,
)
from diloco.judge.audit import audit
from diloco.operate.make_streams import make_streams
from diloco.replay.redact import Redactor, names_in
from diloco.run.history import read_history

# More than `wire.MAX_KEYS`.
MANY = {f"learner-{index:04d}": 7 * index for index in range(5000)}


async def resumed(lab: Lab, file: wire.CheckpointFile, bus: MemoryBus | None = None) -> Context:
    """A new tape for a lab's run, on a new bus."""
    bus = MemoryBus() if bus is None else bus
    epoch = await checkpoint.next_epoch(bus, lab.store, file)
    await make_streams(bus, RUN, BusSection(), epoch)
    context = dataclasses.replace(lab.context, bus=bus, epoch=epoch)
    await checkpoint.check_begun(context, file)
    await checkpoint.check_objects(context, file.records)
    await checkpoint.begin_epoch(context, file)
    await checkpoint.begin_fragments(context, file.records)
    return context


def test_a_message_cannot_hold_the_positions_of_5000():
    assert len(MANY) > wire.MAX_KEYS
    with pytest.raises(WireError):
        wire.encode(wire.Specification(
            run=RUN, epoch=1, positions=MANY, layout="0" * 32, settings={}, constants=None,
            created_at_s=0.0, positions_object=None,
        ))  # fmt: skip


@pytest.mark.parametrize("left_by", ["create", "resume", "resume, beside an old process"])
def test_a_new_tape_has_its_epochs_sequences_whatever_stream_is_there(run_async, left_by):
    """An interrupted command has made it, and said nothing on it."""

    async def scenario() -> None:
        lab, bus = Lab(), MemoryBus()
        file = await marked_run(lab)
        epoch = 0
        if left_by != "create":
            epoch = await checkpoint.next_epoch(bus, lab.store, file)
        await make_streams(bus, RUN, BusSection(), epoch)
        if "beside" in left_by:
            await bus.publish(names.leave(RUN, "a"), b"of the tape before")
        context = await resumed(lab, file, bus)
        items = [item async for item in read_tape(context)]
        assert context.epoch == 1
        assert items[0].seq == first_sequence(1)

    run_async(scenario())


def test_a_stream_that_says_not_what_run_it_is_is_left_alone(run_async):
    async def scenario() -> None:
        lab, bus = Lab(), MemoryBus()
        file = await marked_run(lab)
        await make_streams(bus, RUN, BusSection())
        seq = await bus.publish(names.leave(RUN, "a"), b"?")
        with pytest.raises(RunMismatchError, match="has messages"):
            await checkpoint.next_epoch(bus, lab.store, file)
        assert await bus.last_sequence(names.tape_stream(RUN)) == seq

    run_async(scenario())


def test_a_tape_that_began_with_one_checkpoint_goes_on_with_no_other(run_async):
    async def scenario() -> None:
        lab, bus = Lab(), MemoryBus()
        first = await marked_run(lab)
        async with lab.aggregating():
            await lab.send("a")
            made = await checkpoint.mark(lab.context)
        second = checkpoint_files.load_file(lab.store, RUN, made.name)
        await resumed(lab, first, bus)
        with pytest.raises(RunMismatchError, match="began with another checkpoint"):
            await resumed(lab, second, bus)
        # Of equal data positions, as after a rollback, the fragments tell; of equal versions these.
        elsewhere = first.specification.model_copy(update={"positions": {"a": 99}})
        for alike in (
            second.model_copy(update={"specification": first.specification}),
            first.model_copy(update={"specification": elsewhere}),
        ):
            with pytest.raises(RunMismatchError, match="began with another checkpoint"):
                await resumed(lab, alike, bus)
        assert (await resumed(lab, first, bus)).epoch == 1

    run_async(scenario())


def test_nothing_begins_with_a_checkpoint_that_lacks_an_object(run_async):
    async def scenario() -> None:
        lab, bus = Lab(), MemoryBus()
        file = await marked_run(lab)
        lab.remove([file.records[0].outer])
        with pytest.raises(ObjectMissingError):
            await resumed(lab, file, bus)
        assert await bus.last_sequence(names.tape_stream(RUN)) == first_sequence(1) - 1

    run_async(scenario())


def test_a_store_that_is_used_gets_no_streams(run_async):
    async def scenario() -> None:
        lab = Lab()
        await marked_run(lab)
        lab.bus = MemoryBus()
        with pytest.raises(RunMismatchError, match="resume it"):
            await lab.create()
        assert await lab.bus.streams() == []

    run_async(scenario())


def test_a_run_with_5000_learners_is_resumed_twice(run_async):
    async def scenario() -> None:
        lab = Lab()
        file = await marked_run(lab)
        assert (file.specification.positions, file.data_positions) == ({"a": 16}, ())

        # As `mark` leaves them, had they all been there.
        crowd = {"a": 16, **MANY}
        bare = file.specification.model_copy(update={"positions": {}})
        file = file.model_copy(update={"specification": bare, "data_positions": entries(crowd)})
        context = await resumed(lab, wire.decode(wire.CheckpointFile, wire.encode(file)))
        specification = await load_specification(context.bus, RUN)
        assert specification.positions == {}
        assert read_positions(lab.store, specification) == crowd
        assert await data_position(context, "learner-4999") == 7 * 4999
        assert await data_position(context, "newcomer") == 0
        assert audit(await read_history(context), deep=True).breaches == []

        marked = await checkpoint.mark(context)
        again = checkpoint_files.load_file(lab.store, RUN, marked.name)
        context = await resumed(lab, again)
        assert context.epoch == 2
        assert await data_position(context, "a") == 16
        assert read_positions(lab.store, await load_specification(context.bus, RUN)) == crowd

    run_async(scenario())


def test_a_process_that_outlived_its_tape_does_not_send_its_learner_back(run_async):
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        await lab.join("a")
        for _ in range(3):
            await lab.announce(lab.upload("a"))
        # Stored last, by a life of another epoch that no join of this tape follows.
        stale = lab.upload("a").model_copy(update={"epoch": 7, "incarnation": 99})
        for position in (4, 400):  # What it covers nobody has merged.
            late = stale.model_copy(update={"position": position})
            await lab.bus.publish(names.update(RUN, "a", 0), wire.encode(late))
            assert await data_position(lab.context, "a") == 24

    run_async(scenario())


async def marked_run(lab: Lab) -> wire.CheckpointFile:
    """A checkpoint of a lab's run, which has two versions by then."""
    await lab.create()
    async with lab.aggregating():
        await lab.join("a")
        await lab.send_many("a", 2)
        made = await checkpoint.mark(lab.context)
    return checkpoint_files.load_file(lab.store, RUN, made.name)


async def outlived(lab: Lab) -> tuple[Context, Context]:
    """A lab's run on the tape that is lost, and on the one that came in its place."""
    now = await resumed(lab, await marked_run(lab))
    # Its connection finds the new server under the old address.
    return dataclasses.replace(lab.context, bus=now.bus), now


def test_two_tapes_of_a_run_share_no_sequence(run_async):
    async def scenario() -> None:
        lab = Lab()
        before, now = await outlived(lab)
        last_seq = await lab.bus.last_sequence(now.tape)
        items = [item async for item in read_tape(now)]
        assert last_seq < items[0].seq == first_sequence(1)
        history = await read_history(now)
        assert (history.trimmed, history.whole_from) == (False, 1)
        # What was decided on the lost tape takes nothing of this one, and is built on nothing here.
        await trim_tape(before, [Trim(names.record(RUN, 0), last_seq)])
        assert [item async for item in read_tape(now)] == items
        marked = await checkpoint.mark(now)
        assert marked.name == f"0001-{items[-1].seq - first_sequence(1) + 1:012d}"

    run_async(scenario())


def test_who_outlived_its_tape_says_no_first_word_on_the_next(run_async):
    """A message of a run's life (stop, end) is tried again for as long as a server is away."""

    async def scenario() -> None:
        before, now = await outlived(Lab())
        subject = names.stop(RUN)
        stop = wire.encode(wire.Stop(run=RUN, global_step=9, reason="steps", by="test"))
        with pytest.raises(RunMismatchError, match="resumed as epoch 1, this is epoch 0"):
            await swap(before, subject, stop, "late", 0)
        assert await now.bus.last(now.tape, subject) is None
        assert await swap(now, subject, stop, "ours", 0) > first_sequence(1)

    run_async(scenario())


def test_a_leave_of_another_tapes_life_says_nothing_of_data(run_async):
    async def scenario() -> None:
        lab = Lab()
        _, now = await outlived(lab)
        leave = wire.Leave(run=RUN, learner="a", incarnation=7, position=400, fragments=(0,))
        await now.bus.publish(names.leave(RUN, "a"), wire.encode(leave))
        assert await data_position(now, "a") == 16
        join = wire.Join(run=RUN, learner="a", layout=now.layout.digest, host="")
        joined = await now.bus.publish(names.join(RUN, "a"), wire.encode(join))
        assert await reached_before(now, "a", joined, 16) == {None: 16}
        lab.context, lab.bus = now, now.bus
        sent = lab.upload("a").model_copy(
            update={"epoch": now.epoch, "incarnation": joined, "seq": 1, "position": 24, "steps": 8}
        )
        await now.bus.publish(names.update(RUN, "a", 0), wire.encode(sent))
        assert audit(await read_history(now), deep=True).breaches == []

    run_async(scenario())


def test_few_learners_become_more_than_fit(run_async):
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        lab.context = dataclasses.replace(lab.context, most_positions=1)
        async with lab.aggregating():
            for learner in ("a", "b"):
                await lab.join(learner)
            await lab.send_many("a", 2)
            await lab.send_many("b", 1)
            marked = await checkpoint.mark(lab.context)
        file = checkpoint_files.load_file(lab.store, RUN, marked.name)
        assert file.data_positions == entries({"a": 16, "b": 8})
        context = await resumed(lab, file)
        assert [await data_position(context, learner) for learner in ("a", "b")] == [16, 8]

        specification = await load_specification(context.bus, RUN)
        assert specification.positions_object is not None
        lab.store.delete(specification.positions_object.name)
        (breach,) = audit(await read_history(context), deep=True).breaches
        assert (breach.rule, breach.where) == ("data", "the specification")
        assert names.positions_object(RUN, 1, "") in breach.what

    run_async(scenario())


def test_who_hides_names_hides_those_of_the_object_too():
    listed = entries({"alice": 3, "learner": 5})
    store = MemoryStore()
    ref = store_positions(store, RUN, 1, listed)
    specification = wire.Specification(
        run=RUN, epoch=1, positions={}, layout="0" * 32, settings={}, constants=None,
        created_at_s=0.0, positions_object=ref,
    )  # fmt: skip
    redactor = Redactor(RUN, {*names_in(store.get(ref.name))})
    name, data = redactor.positions(ref.name, store.get(ref.name))
    assert b"alice" not in data
    message = Message(names.spec(RUN), 1, 0.0, wire.encode(specification), "")
    told, _ = redactor.message(message)
    other = MemoryStore()
    other.put(name, data)
    hidden = read_positions(other, wire.decode(wire.Specification, told.payload))
    assert hidden == {redactor.name(one.learner): one.position for one in listed}


def test_collection_keeps_a_position_when_a_superseded_life_is_rejected_late(run_async):
    async def scenario() -> None:
        lab = Lab(replay_window_s=0)
        await lab.create()
        async with lab.aggregating():
            await lab.join("b")
            first = await lab.join("a")
            await lab.send_many("a", 2)
            second = await lab.join("a")
            lab.lives["a"] = first
            late = lab.upload("a")
            await lab.announce(late)
            await lab.answered(late)
            lab.lives["a"] = second
            newest = await lab.send_many("b", 5 * SNAPSHOT_EVERY)

            async def collected() -> bool:
                first = (await lab.records())[0]
                return first.record.version >= newest.version - 2 * SNAPSHOT_EVERY

            await lab.until(collected, "a collection")
            await lab.join("a")
            assert await data_position(lab.context, "a") == 16

    run_async(scenario())


def test_collection_keeps_a_position_though_newer_lives_have_sent_nothing(run_async):
    """A late update of a superseded life is rejected; its position counted once the join was gone."""

    async def scenario() -> None:
        lab = Lab(replay_window_s=0)
        await lab.create()
        async with lab.aggregating():
            await lab.join("b")
            first = await lab.join("a")
            await lab.send_many("a", 2)
            await lab.join("a")
            lab.lives["a"] = first
            late = lab.upload("a")
            await lab.announce(late)
            await lab.answered(late)
            await lab.join("a")
            newest = await lab.send_many("b", 5 * SNAPSHOT_EVERY)

            async def collected() -> bool:
                first = (await lab.records())[0]
                return first.record.version >= newest.version - 2 * SNAPSHOT_EVERY

            await lab.until(collected, "a collection")
            await lab.join("a")
            assert await data_position(lab.context, "a") == 16

    run_async(scenario())
