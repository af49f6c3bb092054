"""Readers beside garbage collection, and of stores from which something is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import jax
import numpy as np
import pytest
from runlab import RUN, SNAPSHOT_EVERY, Lab
from structlog.testing import capture_logs

from diloco.aggregator import checkpoint
from diloco.aggregator.context import Context
from diloco.aggregator.owner.recovery import Recovered, rebuild, recover
from diloco.aggregator.rollback import find_versions, roll_back
from diloco.common.process.config import BusSection
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import (
    ConfigError,
    IntegrityError,
    ObjectMissingError,
    RunMismatchError,
)
from diloco.common.storage.bus import MemoryBus, Message
from diloco.common.storage.catchup import Adopted, UnfetchedRecord, next_move
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.tape import records_of
from diloco.common.storage.views import load_view
from diloco.learner.background import Context as LearnerContext
from diloco.learner.background import NoOtherHosts
from diloco.learner.core.events import (
    Event,
    Ready,
    Start,
)
from diloco.learner.core.handover import NOTHING, Decoded
from diloco.learner.tensors.send_and_adopt import Delta, PendingView, Replica
from diloco.learner.wire.fetch_versions import WAITING_VIEWS, Receiver, VersionFetcher, start_at
from diloco.learner.wire.fetch_versions import load as load_newest
from diloco.operate.make_streams import make_streams

ODD = 3 * SNAPSHOT_EVERY + 1  # one version after its third snapshot


async def made(versions: int, **gc) -> Lab:
    """A run of so many versions, with nobody at work."""
    lab = Lab(**gc)
    await lab.create()
    await lab.join("a")
    await more(lab, versions)
    return lab


async def more(lab: Lab, versions: int) -> None:
    async with lab.aggregating():
        await lab.send_many("a", versions)
        floor = lab.context.gc.replay_window_s == 0.0
        newest, _ = await lab.newest()

        async def collected() -> bool:
            first = (await lab.records())[0].record.version
            return not floor or first >= newest.version - 2 * SNAPSHOT_EVERY

        await lab.until(collected, "a collection")


class StaleBus:
    """A bus whose first answer to `last` is one that somebody had before."""

    def __init__(self, lab: Lab, stale: Message, answers_to: str = "") -> None:
        self._bus, self._stale, self._answers_to = lab.bus, [stale], answers_to

    def __getattr__(self, name: str):
        return getattr(self._bus, name)

    async def last(self, stream: str, subject: str):
        asked = not self._answers_to or subject == self._answers_to
        return self._stale.pop() if self._stale and asked else await self._bus.last(stream, subject)


def stale_context(lab: Lab, stale: Message):
    return replace(lab.context, bus=StaleBus(lab, stale))


@pytest.mark.parametrize("loss", ["gone", "damaged"])
def test_a_view_whose_snapshot_is_lost_is_had_from_the_one_before(run_async, loss):
    async def scenario() -> None:
        lab = await made(ODD)
        record, _ = await lab.newest()
        lose(lab, record.snapshot, loss)
        with capture_logs() as logs:
            loaded = await load_view(lab.context, 0)
        assert shards.digest(loaded.view) == record.view_digest
        assert loaded.record == wire.word_of(record)
        (skipped,) = [entry for entry in logs if entry["event"] == "snapshot_skipped"]
        assert (skipped["version"], skipped["instead"]) == (9, 6)

    run_async(scenario())


@pytest.mark.parametrize("loss", ["gone", "damaged"])
@pytest.mark.parametrize("part", ["snapshot", "outer"])
@pytest.mark.parametrize(("record", "helps"), [(3, True), (8, False)])
def test_a_record_that_is_lost_too_costs_what_stands_before_it(
    run_async, monkeypatch, record, helps, part, loss
):
    monkeypatch.setattr(wire, "RECORD_BYTES", 100)
    read = load_view if part == "snapshot" else recover

    async def scenario() -> None:
        lab = await made(ODD)
        newest, _ = await lab.newest()
        lose(lab, next(r.body for r in await lab.records() if r.record.version == record), loss)
        lose(lab, getattr(newest, part), "gone")
        if helps:
            assert wire.word_of((await read(lab.context, 0)).record) == wire.word_of(newest)
        else:
            with pytest.raises(IntegrityError, match=getattr(newest, part).name):
                await read(lab.context, 0)

    run_async(scenario())


def lose(lab: Lab, ref: wire.ObjectRef, how: str) -> None:
    if how == "gone":
        lab.remove([ref])
    else:
        lab.damage(ref)


@pytest.mark.parametrize("loss", ["gone", "damaged"])
@pytest.mark.parametrize("part", ["snapshot", "outer"])
def test_an_outer_state_that_is_lost_is_made_again_from_the_one_before(run_async, loss, part):
    async def scenario() -> None:
        lab = await made(ODD, replay_window_s=0)
        record, _ = await lab.newest()
        lose(lab, getattr(record, part), loss)
        with capture_logs() as logs:
            recovered = await recover(lab.context, 0)
        assert recovered.merged_again == SNAPSHOT_EVERY + 1
        assert shards.digest(recovered.arrays.view) == record.view_digest
        assert recovered.arrays.outer_digest() == record.outer_digest
        assert [entry["event"] for entry in logs] == ["state_skipped"]
        await more(lab, 2 * SNAPSHOT_EVERY)

    run_async(scenario())


@pytest.mark.parametrize("moves_on", [True, False])
def test_a_checkpoint_that_collection_overtakes_is_one_of_newer_versions(
    run_async, monkeypatch, moves_on
):
    async def scenario() -> None:
        lab = await made(ODD, replay_window_s=0)
        record, _ = await lab.newest()
        publish, slowly = lab.bus.publish, iter([True])

        async def published(subject, payload, **how):
            seq = await publish(subject, payload, **how)
            if subject == names.checkpoint(RUN) and next(slowly, False):
                # What this version is made of goes before it is stored itself.
                if moves_on:
                    await more(lab, 2 * SNAPSHOT_EVERY)
                else:
                    lab.remove([shard for one in record.inputs for shard in one.shards])
            return seq

        monkeypatch.setattr(lab.bus, "publish", published)
        if moves_on:
            with capture_logs() as logs:
                marked = await checkpoint.mark(lab.context)
            assert marked.versions == (ODD + 2 * SNAPSHOT_EVERY,)
            assert [e["event"] for e in logs if e["log_level"] == "warning"] == [
                "checkpoint_overtaken"
            ]
        else:
            with pytest.raises(IntegrityError, match="cannot be recomputed"):
                await checkpoint.mark(lab.context)

    run_async(scenario())


def test_what_cannot_be_had_is_named_with_its_runbook(run_async):
    async def scenario() -> None:
        lab = await made(ODD)
        record, _ = await lab.newest()
        lab.remove(record.deltas)
        with pytest.raises(IntegrityError, match=record.deltas[0].name) as caught:
            await load_view(lab.context, 0)
        assert caught.value.hint == "runbooks/missing-object.md"

        lab = await made(ODD, replay_window_s=0)
        for item in await lab.records():
            lab.remove([item.record.outer])
        with pytest.raises(IntegrityError, match="-outer-") as caught:
            await recover(lab.context, 0)
        assert caught.value.hint == "runbooks/missing-object.md"

    run_async(scenario())


def test_nothing_is_rolled_back_behind_the_last_version(run_async, monkeypatch):
    """The run may stop while an operator's command is paused."""

    async def scenario() -> None:
        lab = await made(ODD)
        newest, newest_seq = await lab.newest()

        async def last(_context, _fragment):
            return newest.model_copy(update={"final": True}), newest_seq

        monkeypatch.setattr("diloco.aggregator.rollback.last_record", last)
        found = await find_versions(lab.context, {0: 4})
        with pytest.raises(RunMismatchError, match="has stopped meanwhile"):
            await roll_back(lab.context, found)
        assert (await lab.newest())[1] == newest_seq

    run_async(scenario())


def test_nothing_is_rolled_back_once_the_run_has_stopped_meanwhile(run_async, monkeypatch):
    """The run would end with the earlier version, and could not be rolled back any more."""

    async def scenario() -> None:
        lab = await made(6)
        targets = await find_versions(lab.context, {0: 4})

        async def slow(context: Context, record: wire.Record, record_seq: int) -> Recovered:
            stop = wire.Stop(run=RUN, global_step=1, reason="steps", by="test")
            await lab.bus.publish(names.stop(RUN), wire.encode(stop))
            return await rebuild(context, record, record_seq)

        monkeypatch.setattr("diloco.aggregator.rollback.rebuild", slow)
        with pytest.raises(RunMismatchError, match="stop"):
            await roll_back(lab.context, targets)
        assert (await lab.newest())[0].version == 6

    run_async(scenario())


@pytest.mark.parametrize("kept", [0, 1], ids=["its record too", "all but its record"])
def test_a_rollback_whose_target_is_collected_meanwhile_says_so(run_async, kept):
    """Merged over the gap, the version before it has another digest, which nothing is wrong with."""

    async def scenario() -> None:
        lab = await made(ODD)
        found = await find_versions(lab.context, {0: SNAPSHOT_EVERY + 2})
        below = found[0].record_seq + 1 - kept
        await lab.bus.trim(lab.context.tape, names.record(RUN, 0), below)
        with pytest.raises(ConfigError, match="cannot be recomputed: the tape has no record") as no:
            await roll_back(lab.context, found)
        assert "choose a later version" in no.value.hint

    run_async(scenario())


def test_a_snapshot_after_a_rollback_has_none_before_it(run_async):
    async def scenario() -> None:
        lab = await made(ODD)
        await roll_back(lab.context, await find_versions(lab.context, {0: 4}))
        record, _ = await lab.newest()
        assert record.what == "restore"
        lab.remove([record.snapshot])
        for load in (load_view, recover):
            with pytest.raises(IntegrityError, match=record.snapshot.name):
                await load(lab.context, 0)

    run_async(scenario())


def test_a_rollback_that_is_asked_for_again_is_not_made_again(run_async):
    async def scenario() -> None:
        lab = await made(6)
        targets = await find_versions(lab.context, {0: 4})
        first = await roll_back(lab.context, targets)
        assert first[0].restored_version == 4
        assert await roll_back(lab.context, targets) == first
        assert (await lab.newest())[0] == first[0]

    run_async(scenario())


def test_the_first_record_of_a_tape_has_none_before_it(run_async):
    async def scenario() -> None:
        lab = await made(1)
        first = (await lab.records())[0]
        lab.remove([first.record.outer])
        empty = MemoryBus()
        await make_streams(empty, RUN, BusSection())
        with pytest.raises(ObjectMissingError, match=first.record.outer.name):
            await rebuild(replace(lab.context, bus=empty), first.record, 1)

    run_async(scenario())


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("load", [load_view, recover])
def test_who_read_a_record_before_a_collection_reads_the_newest(
    run_async, monkeypatch, load, large
):
    if large:
        monkeypatch.setattr(wire, "RECORD_BYTES", 100)

    async def scenario() -> None:
        lab = await made(1, replay_window_s=0)
        stale = await lab.bus.last(lab.context.tape, names.record(RUN, 0))
        await more(lab, ODD)
        loaded = await load(stale_context(lab, stale), 0)
        assert loaded.record.version == ODD + 1

    run_async(scenario())


def test_records_that_are_collected_while_they_are_read_are_passed_over(run_async, monkeypatch):
    monkeypatch.setattr(wire, "RECORD_BYTES", 100)

    async def scenario() -> None:
        lab = await made(1, replay_window_s=0)
        # The next message may be on its way to the reader while it is trimmed from the tape.
        follows = lab.bus.read
        held = [m async for m in some(follows(lab.context.tape, [names.record(RUN, 0)], 1), 2)]
        await more(lab, ODD)

        async def late(stream, subjects, start):
            for message in held:
                yield message
            async for message in follows(stream, subjects, start):
                yield message

        reads = iter([late, follows, follows])
        monkeypatch.setattr(lab.bus, "read", lambda *at: next(reads)(*at))
        found = [item.record.version async for item in records_of(lab.context, 0)]
        assert found == [6, 7, 8, 9, 10, 11]

    run_async(scenario())


async def some(messages, count: int):
    async for message in messages:
        yield message
        count -= 1
        if not count:
            break


def test_a_body_that_is_lost_from_the_midst_of_the_tape_is_an_error(run_async, monkeypatch):
    monkeypatch.setattr(wire, "RECORD_BYTES", 100)

    async def scenario() -> None:
        lab = await made(4)
        third = (await lab.records())[2]
        lab.remove([third.body])
        with pytest.raises(ObjectMissingError, match=third.body.name):
            await lab.records()

    run_async(scenario())


class Followed:
    """The changes that a learner's receiver hands over."""

    def __init__(self, lab: Lab, bus=None, of: "Followed | None" = None) -> None:
        context = lab.context
        self.incarnation = lab.lives["a"]
        self.adopts = True
        self.readies: list[tuple[Ready, Decoded]] = []
        self.context = LearnerContext(
            learner="a",
            settings=context.settings,
            layout=context.layout,
            epoch=0,
            bus=bus or context.bus,
            store=context.store,
            runtime=context.runtime,
            logger=context.logger,
            # The lab sends updates in its name, of which each may be on the tape at any time.
            announced=dict.fromkeys(range(len(context.layout.fragments)), wire.GREATEST),
        )
        if of is not None:
            self._begin(of.replica, of.starts)

    async def load(self, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        """Load the newest views one by one; `meanwhile` is done after each."""
        layout, loaded = self.context.layout, []
        for each in layout.fragments:
            loaded.append(await load_newest(self.context, each.index))
            if meanwhile is not None:
                await meanwhile()
        like = {t.name: np.zeros(t.shape, t.dtype) for t in layout.tensors}
        replica = Replica(self.context.settings.sync, layout, like, [one.view for one in loaded])
        self._begin(replica, [start_at(one) for one in loaded])

    def _begin(self, replica: Replica, starts: list[Start]) -> None:
        self.replica, self.starts = replica, starts
        fetcher, life = VersionFetcher(self.context, replica), self.incarnation
        self.receiver = Receiver(self.context, self.post, fetcher, NoOtherHosts(), starts, life)

    def post(self, event: Event, payload: Decoded = NOTHING) -> None:
        if isinstance(event, Ready):
            self.readies.append((event, payload))
            if self.adopts:
                payload.release()

    async def follow_to(self, lab: Lab, version: int) -> list[tuple[int, type]]:
        """Versions handed over on the way, and how."""
        work = asyncio.ensure_future(self.receiver.follow())

        async def there() -> bool:
            if work.done():
                work.result()
            return bool(self.readies) and self.readies[-1][0].version >= version

        try:
            await lab.until(there, f"version {version}")
        finally:
            await cancel(work)
        return [(ready.version, type(payload.tensors)) for ready, payload in self.readies]


class PausedBus:
    """A bus whose readers get no message of records behind `until_seq`, until it is moved."""

    def __init__(self, bus) -> None:
        self._bus = bus
        self.until_seq = 0
        self.moved = asyncio.Event()

    def __getattr__(self, name: str):
        return getattr(self._bus, name)

    async def read(self, stream, subjects, start):
        async for message in self._bus.read(stream, subjects, start):
            while ".record." in message.subject and message.seq > self.until_seq:
                self.moved.clear()
                await self.moved.wait()
            yield message


class ClockAheadBus(PausedBus):
    """A bus whose server's clock is two hours ahead; its records take `took_s` to a reader."""

    def __init__(self, bus) -> None:
        super().__init__(bus)
        self.read_count = 0
        self.took_s = 0.5

    async def read(self, stream, subjects, start):
        async for message in self._bus.read(stream, subjects, start):
            self.read_count += 1
            yield message._replace(time_s=7200.0 + self.read_count)

    def clock(self) -> float:
        return self.read_count + self.took_s


def test_a_learner_knows_when_a_version_was_made_whatever_the_servers_clock_says(run_async):
    async def scenario() -> None:
        lab = await made(1)
        bus = ClockAheadBus(lab.bus)
        followed = Followed(lab, bus)
        runtime = replace(lab.context.runtime, clock=bus.clock)
        followed.context = replace(followed.context, runtime=runtime)
        await followed.load()
        for version, took_s in ((2, 0.5), (3, 4.0)):
            bus.took_s = took_s
            await more(lab, 1)
            await followed.follow_to(lab, version)
            ready, _ = followed.readies[-1]
            # The quickest message tells how far the clocks are apart.
            assert bus.clock() - ready.made_at_s == took_s - 0.5

    run_async(scenario())


def test_a_version_that_is_made_while_another_fragment_is_loaded_is_adopted(run_async):
    async def scenario() -> None:
        lab = await made(1, fragments=2)
        followed = Followed(lab)

        async def one_of_each() -> None:
            if lab.sent["a", lab.lives["a"], 0] == 1:
                async with lab.aggregating():
                    await lab.send("a", 0)
                    await lab.send("a", 1)

        await followed.load(meanwhile=one_of_each)
        assert [start.version for start in followed.starts] == [1, 1]
        assert followed.starts[0].record_seq < followed.starts[1].record_seq
        assert await followed.follow_to(lab, 2) == [(2, Delta)]

    run_async(scenario())


@pytest.mark.parametrize("loss", ["delta gone", "delta damaged", "body gone"])
def test_a_learner_that_misses_an_object_goes_on_with_the_newest_view(run_async, monkeypatch, loss):
    """The learner had read no further than the record whose object is lost."""
    if loss == "body gone":
        monkeypatch.setattr(wire, "RECORD_BYTES", 100)

    async def scenario() -> None:
        lab = await made(1)
        held = PausedBus(lab.bus)
        followed = Followed(lab, held)
        await followed.load()
        await more(lab, SNAPSHOT_EVERY)  # versions 2 to 4, with the snapshot 3
        second = (await lab.records())[2]
        held.until_seq = second.record_seq
        if loss == "body gone":
            lab.remove([second.body])
        else:
            lose(lab, second.record.delta, loss.removeprefix("delta "))
        with capture_logs() as logs:
            assert await followed.follow_to(lab, 4) == [(4, PendingView)]
        assert [entry["event"] for entry in logs if entry["event"] == "reloading"]

    run_async(scenario())


def test_records_that_a_reload_has_passed_are_not_handled_again(run_async):
    async def scenario() -> None:
        # Three deltas of half a byte each are less than a snapshot.
        lab = await made(1, sections={"sync": {"delta_codec": "int4"}})
        followed = Followed(lab)
        await followed.load()
        await more(lab, SNAPSHOT_EVERY)  # versions 2 to 4, with the snapshot 3
        second, _, newest = (at.record for at in (await lab.records())[-3:])
        lose(lab, second.delta, "gone")
        following = asyncio.ensure_future(followed.follow_to(lab, newest.version + 1))

        async def is_reloaded() -> bool:
            return bool(followed.readies)

        await lab.until(is_reloaded, "a reload")
        await more(lab, 1)
        assert await following == [(newest.version, PendingView), (newest.version + 1, Delta)]

    run_async(scenario())


def test_a_record_that_cannot_be_read_is_jumped_over(run_async, monkeypatch):
    monkeypatch.setattr(wire, "RECORD_BYTES", 100)

    async def scenario() -> None:
        lab = await made(1)
        followed = Followed(lab)
        await followed.load()
        await more(lab, SNAPSHOT_EVERY)
        lab.remove([(await lab.records())[3].body])
        assert await followed.follow_to(lab, 4) == [(4, PendingView)]

    run_async(scenario())


def test_a_reload_of_the_view_that_is_adopted_brings_nothing(run_async, monkeypatch):
    """Where views overwrite, what was trained since would be gone, and be counted all the same."""
    monkeypatch.setattr(wire, "RECORD_BYTES", 100)

    async def scenario() -> None:
        lab = await made(1)
        held = PausedBus(lab.bus)
        followed = Followed(lab, held)
        await followed.load()
        async with lab.aggregating():
            for _ in range(2):
                lie = lab.upload("a").model_copy(update={"layout": "0" * 32})
                await lab.announce(lie)
                await lab.answered(lie)
        first, second = (await lab.records())[-2:]
        assert {first.record.what, second.record.what} == {"verdict"}
        held.until_seq = first.record_seq
        lab.remove([first.body])
        with capture_logs() as logs:
            assert await followed.follow_to(lab, 1) == [(1, type(None))]
        assert [entry["event"] for entry in logs if entry["event"] == "reloading"]

    run_async(scenario())


def test_a_reload_takes_nothing_older_than_the_record_that_called_for_it(run_async):
    """A replica that is behind answers first: with the version that the learner has already."""

    async def scenario() -> None:
        lab = await made(1)
        stale = await lab.bus.last(lab.context.tape, names.record(RUN, 0))
        held = PausedBus(StaleBus(lab, stale, answers_to=names.record(RUN, 0)))
        followed = Followed(lab)
        await followed.load()
        followed = Followed(lab, held, of=followed)
        await more(lab, SNAPSHOT_EVERY)
        second = (await lab.records())[2]
        held.until_seq = second.record_seq
        lab.remove([second.record.delta])
        assert await followed.follow_to(lab, 4) == [(4, PendingView)]

    run_async(scenario())


def test_a_learner_that_slept_across_collections_jumps_to_the_newest_view(run_async):
    async def scenario() -> None:
        lab = await made(1, replay_window_s=0)
        followed = Followed(lab)
        await followed.load()
        await more(lab, ODD)
        assert await followed.follow_to(lab, ODD + 1) == [(ODD + 1, PendingView)]

    run_async(scenario())


def test_a_paused_learner_fetches_no_more_than_a_jump_needs(run_async):
    """Every record is read, since it may resolve an update; of the objects only the last few."""

    async def scenario() -> None:
        lab = await made(1)
        followed = Followed(lab)
        await followed.load()
        before = followed.context.traffic.bytes_down
        await more(lab, ODD)
        newest, _ = await lab.newest()
        assert await followed.follow_to(lab, newest.version) == [(newest.version, PendingView)]
        jump = [newest.snapshot, *newest.deltas]
        fetched = followed.context.traffic.bytes_down - before
        assert fetched == sum(ref.size_bytes for ref in jump)
        (ready, _) = followed.readies[0]
        assert (ready.resolved_seq, ready.merged_seq) == (ODD + 1, ODD + 1)

    run_async(scenario())


def test_a_jump_over_the_record_that_merged_an_update_says_so(run_async):
    """Another learner's version follows it, with a snapshot that the jump is to."""

    async def scenario() -> None:
        lab = await made(1, sections={"quorum": {"deadline_s": 0.05}})
        followed = Followed(lab)
        await followed.load()
        async with lab.aggregating():
            await lab.send("a")
            await lab.join("b")
            newest = await lab.send("b")
        assert newest.version == SNAPSHOT_EVERY
        assert "a" not in {taken.learner for taken in newest.inputs}
        assert await followed.follow_to(lab, newest.version) == [(newest.version, PendingView)]
        ((ready, _),) = followed.readies
        assert (ready.resolved_seq, ready.merged_seq) == (2, 2)

    run_async(scenario())


def test_a_learner_that_is_a_little_behind_fetches_the_deltas(run_async):
    async def scenario() -> None:
        lab = await made(SNAPSHOT_EVERY)
        followed = Followed(lab)
        await followed.load()
        await more(lab, 2)  # two deltas; the jump would be the snapshot and two deltas
        newest, _ = await lab.newest()
        first = newest.version - 1
        found = await followed.follow_to(lab, newest.version)
        assert found == [(first, Delta), (newest.version, Delta)]

    run_async(scenario())


def test_a_delta_leads_on_only_from_the_view_that_it_was_made_from(run_async):
    """Codes carry what quantization lost: upon any other view they give other bits."""

    async def scenario() -> None:
        lab = await made(SNAPSHOT_EVERY + 2)
        records = [(at.record_seq, at.record) for at in await lab.records()]
        (base_seq, base), *later = records[SNAPSHOT_EVERY:]
        waiting = [UnfetchedRecord(seq, wire.word_of(record)) for seq, record in later]
        adopted = Adopted(base_seq, base.version, base.view_digest)
        step, newest = next_move(adopted, waiting), later[-1][1]
        assert step is not None
        assert (step.covers, step.change.snapshot, step.change.deltas) == (
            1,
            None,
            (later[0][1].delta,),
        )
        for elsewhere, left in (
            (adopted._replace(view_digest="0" * 32), waiting),  # a view that no record has
            (adopted._replace(version=0), waiting),  # its digest, and another number
            (adopted, waiting[1:]),  # the record between was lost
        ):
            jump = next_move(elsewhere, left)
            assert jump is not None
            assert (jump.covers, jump.change.snapshot) == (len(left), newest.snapshot)

    run_async(scenario())


def test_what_is_decoded_and_not_adopted_stays_within_its_bound(run_async):
    """A slow learner adopts nothing while twelve versions come; then it goes on with a jump."""

    async def scenario() -> None:
        lab = await made(1)
        followed = Followed(lab)
        await followed.load()
        followed.adopts = False
        view_bytes = 4 * lab.context.layout.fragments[0].size
        work = asyncio.ensure_future(followed.receiver.follow())
        try:
            await more(lab, 12)
            newest, _ = await lab.newest()
            waiting = [payload for _, payload in followed.readies]
            before = len(waiting)
            assert 1 <= len(waiting) <= WAITING_VIEWS
            assert sum(held_bytes(payload) for payload in waiting) <= WAITING_VIEWS * view_bytes

            async def settled() -> bool:
                # As the training loop does it at each boundary.
                while waiting:
                    waiting.pop().release()
                return followed.readies[-1][0].version == newest.version

            await lab.until(settled, "the newest version")
            kinds = [type(payload.tensors) for _, payload in followed.readies[before:]]
            assert kinds[0] is PendingView
        finally:
            await cancel(work)

    run_async(scenario())


def held_bytes(payload: Decoded) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(payload.tensors))


def test_objects_that_were_lost_take_no_room_from_later_versions(run_async):
    async def scenario() -> None:
        lab = await made(1)
        held = PausedBus(lab.bus)
        followed = Followed(lab, held)
        await followed.load()
        newest = 1
        for _ in range(WAITING_VIEWS + 2):
            await more(lab, SNAPSHOT_EVERY)
            (lost,) = [one for one in await lab.records() if one.record.version == newest + 1]
            held.until_seq = lost.record_seq
            lab.remove([lost.record.delta])
            newest += SNAPSHOT_EVERY
            with capture_logs() as logs:
                assert (await followed.follow_to(lab, newest))[-1] == (newest, PendingView)
            # Later records, whose answers were read already, are jumped over.
            assert followed.readies[-1][0].resolved_seq == newest
            assert [entry["event"] for entry in logs if entry["event"] == "reloading"]

    run_async(scenario())


class ReadStore:
    """A store that notes which records' objects are read: whole, or a range of how many bytes."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.whole: list[str] = []
        self.ranges: list[int] = []

    def get(self, name, *limits):
        self.whole += [name] if "-record-" in name else []
        return self._store.get(name, *limits)

    def get_range(self, name, start, stop):
        self.ranges += [stop - start] if "-record-" in name else []
        return self._store.get_range(name, start, stop)


@pytest.mark.parametrize("waits", [True, False])
def test_a_learner_reads_of_an_object_its_own_answers_while_an_update_waits(
    run_async, monkeypatch, waits
):
    monkeypatch.setattr(wire, "RECORD_BYTES", 100)

    async def scenario() -> None:
        lab = await made(1)
        followed, store = Followed(lab), ReadStore(lab.store)
        followed.context = replace(followed.context, store=store)
        await followed.load()
        assert (store.whole, store.ranges) == ([], [])
        await more(lab, 1)
        if not waits:
            followed.context.announced.clear()
        assert await followed.follow_to(lab, 2) == [(2, Delta)]
        assert store.whole == []
        assert store.ranges == [64 + 4] * waits
        ((ready, _),) = followed.readies
        assert (ready.resolved_seq, ready.merged_seq) == ((2, 2) if waits else (0, 0))

    run_async(scenario())


def test_an_answer_whose_object_is_gone_comes_with_the_next_record(run_async, monkeypatch):
    monkeypatch.setattr(wire, "RECORD_BYTES", 100)

    async def scenario() -> None:
        lab = await made(SNAPSHOT_EVERY)
        held = PausedBus(lab.bus)
        followed = Followed(lab, held)
        await followed.load()
        await more(lab, 2)
        first, second = (await lab.records())[-2:]
        lab.remove([first.body])
        held.until_seq = second.record_seq
        await followed.follow_to(lab, second.record.version)
        assert followed.readies[-1][0].resolved_seq == second.record.version

    run_async(scenario())


def test_an_aggregator_begins_although_a_body_is_gone_that_nobody_needs(run_async, monkeypatch):
    monkeypatch.setattr(wire, "RECORD_BYTES", 100)

    async def scenario() -> None:
        lab = Lab(fragments=2)
        await lab.create()
        await lab.join("a")
        async with lab.aggregating():
            await lab.send_many("a", 2 * SNAPSHOT_EVERY, 0)
        # Fragment 1 stands at its beginning: who watches all records reads all of fragment 0.
        lab.remove([(await lab.records(0))[1].body])
        async with lab.aggregating():
            await lab.send_many("a", 2, 0)
            await lab.send_many("a", 2, 1)

    run_async(scenario())


def test_a_rollback_that_is_jumped_over_is_adopted_all_the_same(run_async):
    """The next record is a later version; the floor tells that a rollback lies between."""

    async def scenario() -> None:
        lab = await made(3)
        followed = Followed(lab)
        await followed.load()
        await roll_back(lab.context, await find_versions(lab.context, {0: 1}))
        await more(lab, 2)
        assert await followed.follow_to(lab, 6) == [(6, PendingView)]
        ((ready, _),) = followed.readies
        assert ready.rolled_back

    run_async(scenario())
