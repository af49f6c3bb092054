"""Garbage collection around its plan: a real aggregator, a bus and a store in memory."""

import asyncio
from types import SimpleNamespace

import pytest
from runlab import RUN, SNAPSHOT_EVERY, Lab
from structlog.testing import capture_logs

from diloco.aggregator.checkpoint import mark
from diloco.aggregator.context import Context
from diloco.aggregator.core import garbage, memory
from diloco.aggregator.core.garbage import Announcers, Ledger
from diloco.aggregator.core.members import Member, Members
from diloco.aggregator.core.state import State, Storing
from diloco.aggregator.core.updates import MergedUpdates, Resolved, UpdateId, WaitingUpdates
from diloco.aggregator.owner import garbage_collector
from diloco.aggregator.owner.garbage_collector import (
    Collector,
    ShardListing,
    fleet_of,
    read_on,
    read_retained,
)
from diloco.aggregator.owner.recovery import recover
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import BusUnavailableError, StoreUnavailableError
from diloco.common.storage.checkpoint_files import checkpoints, load_file
from diloco.common.storage.store import MemoryStore
from diloco.common.storage.tape import data_position
from diloco.common.storage.views import load_view


async def collected_to(lab: Lab, floor: int, fragment: int = 0) -> None:
    """Wait until a version is the oldest on the tape."""

    async def there() -> bool:
        return (await lab.records(fragment))[0].record.version >= floor

    await lab.until(there, f"fragment {fragment} collected up to {floor}")


def test_an_aggregator_collects_after_each_snapshot(run_async):
    async def scenario() -> None:
        lab = Lab(fragments=2, replay_window_s=0)
        await lab.create()
        async with lab.aggregating():
            await lab.join("a")
            await lab.join("a")
            for _ in range(8 * SNAPSHOT_EVERY + 1):
                await asyncio.gather(lab.send("a", 0), lab.send("a", 1))
            for fragment in range(2):
                await collected_to(lab, 7 * SNAPSHOT_EVERY, fragment)

            async def trimmed() -> bool:
                return len(await lab.on_tape(names.join(RUN, "a"))) == 1

            await lab.until(trimmed, "joins trimmed")
        for fragment in range(2):
            await check_bounded(lab, fragment)
            assert (await recover(lab.context, fragment)).record.version == 8 * SNAPSHOT_EVERY + 1
            await load_view(lab.context, fragment)

    run_async(scenario())


async def check_bounded(lab: Lab, fragment: int) -> None:
    """Checks that only objects of the two newest snapshots and later are left."""
    chain = [item.record for item in await lab.records(fragment)]
    assert chain[0].version == 7 * SNAPSHOT_EVERY
    assert len(lab.objects(names.updates_prefix(RUN, "a", fragment))) == len(chain) - 1
    states, deltas = 2 * 2, len(chain) - 1
    assert len(lab.objects(names.fragment_prefix(RUN, fragment))) == states + deltas
    manifests = await lab.on_tape(names.update(RUN, "a", fragment))
    assert len(manifests) <= len(chain) + 1


def test_nothing_younger_than_the_replay_window_goes(run_async):
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        with capture_logs() as logs:
            async with lab.aggregating():
                await lab.join("a")
                await lab.join("a")
                await lab.send_many("a", 4 * SNAPSHOT_EVERY)
                await lab.until(lambda: _has(logs, "collected"), "a collection")
        assert len(await lab.on_tape(names.join(RUN, "a"))) == 2
        assert {entry["floor"] for entry in logs if entry["event"] == "collected"} == {0}
        assert len(await lab.records()) == 4 * SNAPSHOT_EVERY + 1
        assert len(lab.objects(names.updates_prefix(RUN, "a", 0))) == 4 * SNAPSHOT_EVERY

    run_async(scenario())


async def _has(logs, event: str) -> bool:
    return any(entry["event"] == event for entry in logs)


def test_who_is_told_not_to_collect_does_not(run_async):
    async def scenario() -> None:
        lab = Lab(replay_window_s=0, enabled=False)
        await lab.create()
        async with lab.aggregating():
            await lab.join("a")
            await lab.send_many("a", 4 * SNAPSHOT_EVERY)
            await asyncio.sleep(0.2)
        assert len(await lab.records()) == 4 * SNAPSHOT_EVERY + 1

    run_async(scenario())


async def never_collected() -> tuple[Lab, State]:
    """A run with garbage, and the state of a machine that has begun to read its tape again."""
    lab = Lab(replay_window_s=0, enabled=False)
    await lab.create()
    async with lab.aggregating():
        await lab.join("a")
        await lab.send_many("a", 4 * SNAPSHOT_EVERY)
    record, record_seq = await lab.newest()
    return lab, memory.resume(record, record_seq, lab.context.runtime.clock())


def test_nothing_is_collected_before_the_tape_was_read_again(run_async):
    async def scenario() -> None:
        lab, begun = await never_collected()
        begun = begun._replace(known_seq=begun.seen_seq + 1)
        stored = len(lab.objects(""))
        await Collector(lab.context, 0, lambda: begun, ShardListing())._collect()
        assert len(lab.objects("")) == stored
        all_met = begun._replace(seen_seq=begun.known_seq)
        await Collector(lab.context, 0, lambda: all_met, ShardListing())._collect()
        assert len(lab.objects("")) < stored

    run_async(scenario())


def test_a_collection_waits_for_the_record_that_is_being_stored(run_async):
    """The newest snapshot may be the run's last: nothing wakes the collector again."""

    async def scenario() -> None:
        lab, stored = await never_collected()
        stored = stored._replace(known_seq=stored.seen_seq)
        states = iter([stored._replace(storing=Storing(True, ()))] * 2)
        await Collector(lab.context, 0, lambda: next(states, stored), ShardListing())._collect()
        assert (await lab.records())[0].record.version == 3 * SNAPSHOT_EVERY

    run_async(scenario())


def test_an_update_that_waits_for_its_announcement_keeps_its_shards(run_async):
    async def scenario() -> None:
        lab = Lab(replay_window_s=0)
        await lab.create()
        async with lab.aggregating():
            await lab.join("a")
            await lab.join("b")
            waiting = lab.upload("b")
            await lab.send_many("a", 4 * SNAPSHOT_EVERY)
            await collected_to(lab, 3 * SNAPSHOT_EVERY)
            await lab.announce(waiting)
            record = await lab.answered(waiting)
            assert "b" in {taken.learner for taken in record.inputs}

            # Its next life cannot announce what the one before has stored.
            lost = lab.upload("b")
            await lab.join("b")
            await lab.send_many("a", 2 * SNAPSHOT_EVERY)

            async def gone() -> bool:
                return lost.shards[0].name not in lab.objects()

            await lab.until(gone, "shards of an earlier life go")

    run_async(scenario())


def test_what_is_merged_while_the_tape_is_read_keeps_its_shards(run_async):
    """No record that the plan knows names it, and its life may announce nothing more."""

    async def scenario() -> None:
        lab = Lab(replay_window_s=0, enabled=False)
        await lab.create()
        async with lab.aggregating():
            await lab.join("a")
            await lab.join("b")
            sent = lab.upload("b")
            await lab.join("b")
            await lab.send_many("a", 4 * SNAPSHOT_EVERY)
        record, record_seq = await lab.newest()
        merged = memory.resume(record, record_seq, lab.context.runtime.clock())
        merged = merged._replace(known_seq=merged.seen_seq)
        update = UpdateId("b", sent.incarnation, sent.seq)
        waits = {update: SimpleNamespace(manifest=sent, fetching=True, passed=True)}
        states = iter([merged._replace(pending=WaitingUpdates(waits))])
        await Collector(lab.context, 0, lambda: next(states, merged), ShardListing())._collect()
        assert sent.shards[0].name in lab.objects()
        await Collector(lab.context, 0, lambda: merged, ShardListing())._collect()
        assert sent.shards[0].name not in lab.objects(), "nobody waits for it any more"

    run_async(scenario())


def test_checkpoints_keep_their_objects_and_the_oldest_go(run_async):
    async def scenario() -> None:
        lab = Lab(replay_window_s=0, keep_checkpoints=2)
        await lab.create()
        async with lab.aggregating():
            await lab.join("a")
            marked = []
            for _ in range(3):
                await lab.send_many("a", SNAPSHOT_EVERY + 1)
                marked.append(await mark(lab.context))
            newest = await lab.send_many("a", 4 * SNAPSHOT_EVERY)
            await collected_to(lab, newest.version - 2 * SNAPSHOT_EVERY)

            async def stale_is_gone() -> bool:
                files = lab.objects(names.checkpoint_prefix(RUN))
                return len(files) == 2

            await lab.until(stale_is_gone, "the oldest checkpoint goes")
        for at, stays in zip(marked, (False, True, True), strict=True):
            assert (names.checkpoint_object(RUN, at.name) in lab.objects()) == stays
            begin = names.version_object(RUN, 0, at.versions[0], "outer", "")
            assert any(name.startswith(begin) for name in lab.objects()) == stays
            if stays:
                data = lab.store.get(names.checkpoint_object(RUN, at.name))
                (record,) = wire.decode(wire.CheckpointFile, data).records
                lab.store.get(record.snapshot.name)
                lab.store.get(record.outer.name)

    run_async(scenario())


def test_checkpoints_of_earlier_tapes_keep_their_objects(run_async):
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        async with lab.aggregating():
            await lab.join("a")
            await lab.send_many("a", 2)
            marked = await mark(lab.context)
            await lab.send_many("a", 2)
        later = Lab()
        await later.create()
        data = lab.store.get(names.checkpoint_object(RUN, marked.name))
        later.store.put(names.checkpoint_object(RUN, marked.name), data)
        foreign = wire.Checkpoint(
            run=RUN, name="0000-000000000001", versions=(1, 2), record_seqs=(3, 4),
            created_at_s=0.0, by="test",
        )  # fmt: skip
        await later.bus.publish(names.checkpoint(RUN), wire.encode(foreign))
        retained = await read_retained(later.context, 1, later.context.logger)
        assert retained.versions == (marked.versions,)
        assert retained.stale == ()

        broken = names.checkpoint_object(RUN, "0000-999999999999")
        later.store.put(broken, b"no checkpoint")
        with capture_logs() as logs:
            retained = await read_retained(later.context, 2, later.context.logger)
        assert retained.versions == (marked.versions,)
        assert [entry["event"] for entry in logs] == ["unreadable"]

    run_async(scenario())


def test_checkpoints_in_the_making_keep_their_objects_behind_newer_ones():
    """Of several aggregators, whose checkpoints may take longer than another's."""
    whole, making = ["0000-1", "0000-2"], [f"0000-{number}" for number in range(3, 9)]
    pinned = garbage.pinned_checkpoints([*whole, *making], whole, 1)
    assert pinned == {"0000-2", *making}
    # Where no file can be stored, each attempt leaves a message.
    many = [f"0001-{number:04d}" for number in range(100)]
    pinned = garbage.pinned_checkpoints(many, whole, 1)
    assert "0000-2" in pinned
    assert len(pinned) < 20
    assert max(many) in pinned


async def goes_on(lab: Lab) -> None:
    """Makes versions, above which nothing needs the present one."""
    async with lab.aggregating():
        await lab.send_many("a", 4 * SNAPSHOT_EVERY)


def check_whole(lab: Lab, name: str) -> None:
    for record in load_file(lab.store, RUN, name).records:
        lab.store.get(record.snapshot.name)
        lab.store.get(record.outer.name)


def test_a_checkpoint_that_is_made_while_records_are_read_keeps_its_objects(run_async, monkeypatch):
    async def scenario() -> None:
        lab, begun = await never_collected()
        marked = []

        async def meanwhile(context: Context, ledger: Ledger) -> None:
            marked.append(await mark(lab.context))
            await goes_on(lab)
            await read_on(context, ledger)

        stored = len(lab.objects(""))
        with monkeypatch.context() as patched:
            patched.setattr(garbage_collector, "read_on", meanwhile)
            caught_up = begun._replace(seen_seq=begun.known_seq)
            await Collector(lab.context, 0, lambda: caught_up, ShardListing())._collect()
        assert len(lab.objects("")) < 2 * stored
        check_whole(lab, marked[0].name)

    run_async(scenario())


def test_a_checkpoint_that_newer_versions_overtake_is_made_of_these(run_async, monkeypatch):
    """A collection that looked for checkpoints before may remove what an older version needs."""

    async def scenario() -> None:
        lab, _ = await never_collected()
        publish = lab.bus.publish

        async def late(subject: str, payload: bytes, **options: object) -> int:
            if subject == names.checkpoint(RUN):
                monkeypatch.setattr(lab.bus, "publish", publish)
                await goes_on(lab)
            return await publish(subject, payload, **options)

        monkeypatch.setattr(lab.bus, "publish", late)
        with capture_logs() as logs:
            marked = await mark(lab.context)
        assert marked.versions == (8 * SNAPSHOT_EVERY,)
        assert await _has(logs, "checkpoint_overtaken")
        assert checkpoints(lab.store, RUN) == [marked.name]

    run_async(scenario())


def test_what_a_life_has_sent_last_stays_behind_a_message_of_one_that_outlived_it(run_async):
    async def scenario() -> None:
        lab = Lab(replay_window_s=0)
        await lab.create()
        async with lab.aggregating():
            for learner in ("a", "b"):
                await lab.join(learner)
            await lab.send_many("a", 2)
            stale = lab.upload("a").model_copy(update={"epoch": 7, "position": 4})
            await lab.bus.publish(names.update(RUN, "a", 0), wire.encode(stale))
            newest = await lab.send_many("b", 4 * SNAPSHOT_EVERY)
            await collected_to(lab, newest.version - 2 * SNAPSHOT_EVERY)
        assert len(await lab.on_tape(names.update(RUN, "a", 0))) == 2
        assert await data_position(lab.context, "a") == 16

    run_async(scenario())


def test_whatever_the_machine_has_not_committed_is_pending():
    def sent(learner: str, seq: int):
        return SimpleNamespace(manifest=SimpleNamespace(learner=learner, incarnation=4, seq=seq))

    waiting = SimpleNamespace(**vars(sent("a", 1)), fetching=True, passed=True)
    merged = SimpleNamespace(**vars(sent("a", 2)), announced_at_s=0.0)
    state = State(
        version=1, record_seq=1, view_digest="", seen_seq=1,
        members=Members({"a": Member(4), "b": Member(9, left=True)}),
        pending=WaitingUpdates({UpdateId("a", 4, 1): waiting}), admitted=MergedUpdates([merged]),
        rejected=Resolved([sent("b", 3)]),
    )  # fmt: skip
    pending = {UpdateId("a", 4, 1), UpdateId("a", 4, 2), UpdateId("b", 4, 3)}
    assert fleet_of(state) == Announcers({"a": 4, "b": 9}, pending)


def test_a_newer_epoch_is_left_alone(run_async):
    async def scenario() -> None:
        lab = Lab(replay_window_s=0)
        await lab.create()
        lab.store.put(names.epoch_object(RUN, 1), b"claimed")
        with capture_logs() as logs:
            async with lab.aggregating():
                await lab.join("a")
                await lab.send_many("a", 4 * SNAPSHOT_EVERY)
                await lab.until(lambda: _has(logs, "not_collected"), "a refusal")
        assert not await _has(logs, "collected")
        assert len(await lab.records()) == 4 * SNAPSHOT_EVERY + 1

    run_async(scenario())


@pytest.mark.parametrize("fault", ["list", "delete", "trim"])
def test_what_passes_is_tried_again_and_commits_go_on_meanwhile(run_async, monkeypatch, fault):
    failures = []

    def fails(*_arguments):
        failures.append(fault)
        raise StoreUnavailableError("away")

    async def fails_too(*_arguments):
        failures.append(fault)
        raise BusUnavailableError("away")

    async def scenario() -> None:
        lab = Lab(replay_window_s=0)
        await lab.create()
        where = lab.bus if fault == "trim" else lab.store
        async with lab.aggregating():
            await lab.join("a")
            with monkeypatch.context() as patched:
                patched.setattr(where, fault, fails_too if fault == "trim" else fails)
                await lab.send_many("a", 4 * SNAPSHOT_EVERY)
            assert failures
            await lab.send_many("a", SNAPSHOT_EVERY)
            await collected_to(lab, 4 * SNAPSHOT_EVERY)

    run_async(scenario())


def test_the_store_is_listed_once_for_all_learners_and_fragments(run_async):
    async def scenario() -> None:
        store = Counting()
        lab = Lab(fragments=2, store=store, replay_window_s=0, enabled=False)
        await lab.create()
        async with lab.aggregating():
            for learner in ("a", "b", "c"):
                await lab.join(learner)
            for _ in range(4 * SNAPSHOT_EVERY):
                await asyncio.gather(lab.send("a", 0), lab.send("b", 1))
            waiting = lab.upload("c", 0)
        states = [await begun(lab, fragment) for fragment in range(2)]
        shared = ShardListing()
        collectors = [Collector(lab.context, f, lambda f=f: states[f], shared) for f in range(2)]
        for collector in collectors:
            await collector._collect()
        for sent in ("a", 0), ("b", 1):
            assert len(lab.objects(names.updates_prefix(RUN, *sent))) <= 2 * SNAPSHOT_EVERY
        assert waiting.shards[0].name in lab.objects()

        store.listed.clear()
        for collector in (*collectors, *collectors):
            await collector._collect()
        learners = [prefix for prefix in store.listed if "/learner/" in prefix]
        assert learners == 2 * [names.learners_prefix(RUN)]

    run_async(scenario())


class Counting(MemoryStore):
    """Remembers what was listed."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[str] = []

    def walk(self, prefix: str):
        self.listed.append(prefix)
        return super().walk(prefix)


async def begun(lab: Lab, fragment: int) -> State:
    """Returns the state of a machine that has read the tape to its end."""
    record, record_seq = await lab.newest(fragment)
    state = memory.resume(record, record_seq, lab.context.runtime.clock())
    return state._replace(known_seq=state.seen_seq)


def test_a_bug_in_it_does_not_stop_the_fragment(run_async, monkeypatch):
    async def scenario() -> None:
        lab = Lab(replay_window_s=0)
        await lab.create()
        monkeypatch.setattr(lab.store, "list", lambda _prefix: [None])
        with capture_logs() as logs:
            async with lab.aggregating():
                await lab.join("a")
                await lab.send_many("a", 2 * SNAPSHOT_EVERY)
                await lab.until(lambda: _has(logs, "collection_failed"), "a failure")
                await lab.send_many("a", SNAPSHOT_EVERY)

    run_async(scenario())
