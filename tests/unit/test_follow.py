"""A follower of a run: whole versions, catching up, damage, rollbacks, the end."""

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest
from runlab import RUN, SNAPSHOT_EVERY, Lab
from structlog.testing import capture_logs

from diloco.aggregator.rollback import find_versions, roll_back
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import ConfigError, IntegrityError
from diloco.common.storage.store import MemoryStore
from diloco.run.model.follower import MOST_BEHIND, Advance, Follower
from diloco.run.model.whole import FollowRules, HeardRecord, check_rules, choose_whole

BOTH = FollowRules((0, 1))


class CountingStore(MemoryStore):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, name: str, *how, **named) -> bytes:
        self.read.append(name)
        return super().get(name, *how, **named)


@contextlib.asynccontextmanager
async def lab_of(fragments: int = 2, **gc):
    lab = Lab(fragments=fragments, store=CountingStore(), **gc)
    await lab.create()
    await lab.join("a")
    async with lab.aggregating():
        yield lab


async def all_send(lab: Lab, versions: int = 1) -> None:
    for _ in range(versions):
        for fragment in range(len(lab.context.layout.fragments)):
            await lab.send("a", fragment)


async def end(lab: Lab) -> None:
    await lab.bus.publish(
        names.end(RUN), wire.encode(wire.End(run=RUN, versions=(), record_seqs=()))
    )


async def soon(follower: Follower) -> Advance:
    found = await asyncio.wait_for(follower.advance(), 60)
    assert found is not None
    return found


async def nothing_more(follower: Follower) -> None:
    """Nothing is handed out of what was read: so far this is known by what it is asked for next."""
    asked = asyncio.ensure_future(follower.advance())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not asked.done()
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked


def versions(found: Advance) -> list[int]:
    return [record.version for record in found.records]


def check_view(follower: Follower, found: Advance) -> None:
    for record in found.records:
        assert shards.digest(follower.view(record.fragment)) == record.view_digest


def test_versions_come_whole_and_verified_as_they_are_made(run_async):
    async def scenario() -> None:
        async with lab_of() as lab, Follower(lab.context, BOTH) as follower:
            first = await soon(follower)
            assert versions(first) == [0, 0]
            for version in (1, 2, 3):
                await lab.send("a", 0)
                await nothing_more(follower)
                await lab.send("a", 1)
                found = await soon(follower)
                assert versions(found) == [version, version]
                assert not found.rolled_back
                check_view(follower, found)
            assert follower.lag() == (0, 0.0)

    run_async(scenario())


def test_a_fragment_that_runs_ahead_is_shown_as_it_was_at_the_whole_version(run_async):
    async def scenario() -> None:
        async with lab_of() as lab:
            await all_send(lab)
            await lab.send_many("a", 3, 0)
            async with Follower(lab.context, BOTH) as follower:
                found = await soon(follower)
                assert versions(found) == [1, 1]
                check_view(follower, found)
                await lab.send_many("a", 2, 1)
                found = await soon(follower)
                assert versions(found) == [3, 3]
                check_view(follower, found)

    run_async(scenario())


def test_fragment_by_fragment_every_delta_is_handed_out_in_its_order(run_async):
    async def scenario() -> None:
        rules = BOTH._replace(whole=False)
        async with lab_of() as lab, Follower(lab.context, rules) as follower:
            assert [versions(await soon(follower)) for _ in range(2)] == [[0], [0]]
            await all_send(lab, 2)
            found = [await soon(follower) for _ in range(4)]
            assert [(one.records[0].fragment, *versions(one)) for one in found] == [
                (0, 1), (1, 1), (0, 2), (1, 2),
            ]  # fmt: skip
            assert all(one.encoded is not None for one in found)
            check_view(follower, found[-1])

    run_async(scenario())


def test_who_was_away_reads_a_stored_view_where_that_is_cheaper(run_async):
    async def scenario() -> None:
        async with lab_of(1) as lab, Follower(lab.context, FollowRules((0,))) as follower:
            await soon(follower)
            await all_send(lab, 2 * SNAPSHOT_EVERY)
            lab.store.read.clear()
            found = await soon(follower)
            assert versions(found)[0] <= 2 * SNAPSHOT_EVERY
            while versions(found) != [2 * SNAPSHOT_EVERY]:
                found = await soon(follower)
            check_view(follower, found)
            newest, _ = await lab.newest()
            assert newest.snapshot.name in lab.store.read

    run_async(scenario())


def test_between_two_that_are_handed_out_are_so_many_versions(run_async):
    async def scenario() -> None:
        rules = BOTH._replace(every=3)
        async with lab_of() as lab, Follower(lab.context, rules) as follower:
            await soon(follower)
            await all_send(lab, 2)
            await nothing_more(follower)
            assert follower.lag().versions == 2
            await all_send(lab, 1)
            assert versions(await soon(follower)) == [3, 3]
            assert follower.lag().versions == 0

    run_async(scenario())


@pytest.mark.parametrize("made", [1, 4])
def test_it_stays_at_a_version_whether_that_is_past_or_to_come(run_async, made):
    async def scenario() -> None:
        async with lab_of() as lab:
            await all_send(lab, made)
            async with Follower(lab.context, BOTH._replace(stay_at=2)) as follower:
                if made < 2:
                    assert versions(await soon(follower)) == [1, 1]
                    await all_send(lab, 3)
                found = await soon(follower)
                assert versions(found) == [2, 2]
                check_view(follower, found)
                assert await follower.advance() is None

    run_async(scenario())


def test_a_past_version_stays_the_one_however_late_it_is_asked_for(run_async):
    async def scenario() -> None:
        async with lab_of(1) as lab:
            await all_send(lab, 4)
            async with Follower(lab.context, FollowRules((0,), stay_at=2)) as follower:
                for _ in range(50):
                    await asyncio.sleep(0)
                found = await soon(follower)
                assert versions(found) == [2]
                check_view(follower, found)
                assert await follower.advance() is None

    run_async(scenario())


def test_a_rollback_is_told_and_its_views_follow(run_async):
    async def scenario() -> None:
        async with lab_of() as lab, Follower(lab.context, BOTH) as follower:
            await all_send(lab, 3)
            while versions(await soon(follower)) != [3, 3]:
                pass
            await lab.send("a", 0)
            before = [record.view_digest for record in await newest(lab, 1)]
            await roll_back(lab.context, await find_versions(lab.context, {0: 1, 1: 1}))
            found = await soon(follower)
            assert found.rolled_back
            assert versions(found) == [5, 4]
            assert [record.view_digest for record in found.records] == before
            check_view(follower, found)
            await all_send(lab, 1)
            found = await soon(follower)
            assert versions(found) == [6, 5]
            assert not found.rolled_back

    async def newest(lab: Lab, version: int) -> list[wire.Record]:
        found = await find_versions(lab.context, {0: version, 1: version})
        return [found[fragment].record for fragment in (0, 1)]

    run_async(scenario())


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_version_that_cannot_be_had_is_passed_over_and_never_handed_out(run_async, how):
    async def scenario() -> None:
        async with lab_of() as lab, Follower(lab.context, BOTH) as follower:
            await all_send(lab, SNAPSHOT_EVERY)
            while versions(await soon(follower)) != [SNAPSHOT_EVERY] * 2:
                pass
            first = await lab.send("a", 0)
            await lab.send("a", 1)
            lab.remove([first.delta]) if how == "gone" else lab.damage(first.delta)
            asked = asyncio.ensure_future(follower.advance())
            with capture_logs() as logs:
                await lab.until(told(logs), "the warning")
                assert not asked.done()
                await all_send(lab, SNAPSHOT_EVERY - 1)
                found = await asyncio.wait_for(asked, 60)
            assert versions(found) == [2 * SNAPSHOT_EVERY] * 2
            check_view(follower, found)

    def told(logs):
        async def look() -> bool:
            return any(entry["event"] == "version_skipped" for entry in logs)

        return look

    run_async(scenario())


def test_a_last_version_that_is_damaged_ends_with_its_runbook(run_async):
    async def scenario() -> None:
        async with lab_of() as lab:
            record = await lab.send("a", 0)
            await lab.send("a", 1)
            lab.damage(record.delta)
            await end(lab)
            async with Follower(lab.context, BOTH) as follower:
                with pytest.raises(IntegrityError) as caught:
                    await follower.advance()
                assert caught.value.hint == "runbooks/digest-mismatch.md"

    run_async(scenario())


def test_of_an_ended_run_it_hands_out_the_newest_of_each_fragment_and_ends(run_async):
    async def scenario() -> None:
        async with lab_of() as lab:
            await all_send(lab, 2)
            await lab.send("a", 0)
            await end(lab)
            async with Follower(lab.context, BOTH) as follower:
                assert versions(await soon(follower)) == [3, 2]
                assert await follower.advance() is None
                assert follower.ended

    run_async(scenario())


def test_the_end_of_the_run_ends_who_waits(run_async):
    async def scenario() -> None:
        async with lab_of() as lab, Follower(lab.context, BOTH) as follower:
            await soon(follower)
            asked = asyncio.ensure_future(follower.advance())
            await end(lab)
            assert await asyncio.wait_for(asked, 60) is None

    run_async(scenario())


def test_who_is_slower_than_the_run_reads_what_collection_has_left(run_async):
    async def scenario() -> None:
        async with (
            lab_of(replay_window_s=0.0) as lab,
            Follower(lab.context, BOTH._replace(fragments=(1,))) as follower,
        ):
            await soon(follower)
            for _ in range(4 * SNAPSHOT_EVERY):
                await all_send(lab)
            newest, _ = await lab.newest(1)

            async def collected() -> bool:
                first = (await lab.records(1))[0].record.version
                return first >= newest.version - 2 * SNAPSHOT_EVERY

            await lab.until(collected, "a collection")
            found = await soon(follower)
            while versions(found) != [newest.version]:
                found = await soon(follower)
            check_view(follower, found)

    run_async(scenario())


class SlowBus:
    """A bus whose readers get a message only when they are let."""

    def __init__(self, bus) -> None:
        self._bus = bus
        self.let = asyncio.Semaphore(0)
        self.given = 0

    def __getattr__(self, name: str):
        return getattr(self._bus, name)

    async def read(self, stream: str, subjects: list[str], start_seq: int):
        async with contextlib.aclosing(self._bus.read(stream, subjects, start_seq)) as messages:
            async for message in messages:
                if len(subjects) > 1:  # One who follows, and no single message.
                    await self.let.acquire()
                    self.given += 1
                yield message


@pytest.mark.parametrize("between", ["versions", "a rollback"])
def test_who_reads_more_slowly_than_records_are_made_goes_on_from_the_newest(run_async, between):
    async def scenario() -> None:
        async with lab_of() as lab:
            slow = SlowBus(lab.bus)
            context = dataclasses.replace(lab.context, bus=slow)
            async with Follower(context, BOTH) as follower:
                await soon(follower)
                await all_send(lab, 20)
                if between == "a rollback":
                    targets = await find_versions(lab.context, {0: 3, 1: 3})
                    await roll_back(lab.context, targets)
                    await lab.join("a")
                await all_send(lab, 40)
                for _ in range(MOST_BEHIND):
                    slow.let.release()
                found = await soon(follower)
                while versions(found)[-1] <= MOST_BEHIND:  # What it has heard so far.
                    found = await soon(follower)
                newest = [(await lab.newest(fragment))[0].version for fragment in (0, 1)]
                assert versions(found) == newest
                assert found.rolled_back == (between == "a rollback")
                assert slow.given == MOST_BEHIND
                check_view(follower, found)
                await all_send(lab)
                for _ in range(3):  # One of them it has heard.
                    slow.let.release()
                assert versions(await soon(follower)) == [version + 1 for version in newest]

    run_async(scenario())


def test_a_changed_interval_changes_when_versions_are_whole(run_async):
    async def scenario() -> None:
        async with lab_of() as lab:
            await all_send(lab)
            settings = lab.context.settings
            sync = settings.sync.model_copy(update={"interval_steps": 4, "min_steps": 1})
            changed = settings.model_copy(update={"sync": sync})
            said = wire.Settings(
                run=RUN, settings=changed.model_dump(mode="json"), by="a test", changed=()
            )
            await lab.bus.publish(names.settings(RUN), wire.encode(said))
            async with Follower(lab.context, BOTH) as follower:
                found = await soon(follower)
                for _ in range(4):
                    await all_send(lab)
                while found.records[-1].version != 4:
                    found = await soon(follower)
                    check_view(follower, found)
                    clocks = [record.global_step for record in found.records]
                    assert max(clocks) - min(clocks) < 8

    run_async(scenario())


def test_nothing_is_written_to_the_tape(run_async):
    async def scenario() -> None:
        async with lab_of() as lab:
            await all_send(lab)
            before = await lab.bus.last_sequence(lab.context.tape)
            async with Follower(lab.context, BOTH) as follower:
                await soon(follower)
            assert await lab.bus.last_sequence(lab.context.tape) == before

    run_async(scenario())


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (FollowRules(()), "the run has 0 to 1"),
        (FollowRules((2,)), "the run has 0 to 1"),
        (FollowRules((0,), every=0), "at least 1 version"),
        (FollowRules((0,), stay_at=-1), "expected a version"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules, says):
    with pytest.raises(ConfigError, match=says):
        check_rules(rules, 2)


def test_a_set_is_whole_only_once_nothing_of_it_can_come(run_async):
    """Every prefix of a run's records gives a whole version or none: never numbers that differ."""

    async def scenario() -> None:
        async with lab_of(3) as lab:
            rng = np.random.default_rng(0)
            for fragment in rng.integers(0, 3, 40):
                await lab.send("a", int(fragment))
            known = [item for fragment in range(3) for item in (await lab.records(fragment))]
            known.sort(key=lambda item: item.record_seq)
            histories: list[list[HeardRecord]] = [[], [], []]
            seen = set()
            for item in known:
                heard = HeardRecord(item.record_seq, item.stored_at_s, item.record)
                histories[item.record.fragment].append(heard)
                found = choose_whole(histories, lab.context.settings, ended=False)
                if found is not None:
                    numbers = {one.record.version for one in found}
                    assert len(numbers) == 1
                    seen |= numbers
            lowest = min(history[-1].record.version for history in histories)
            assert seen == {*range(lowest + 1)}

    run_async(scenario())


def test_sets_of_the_runs_last_step_are_whole_only_at_its_end(run_async):
    """Clocks do not go beyond the run: there a fragment may have any number of versions."""

    async def scenario() -> None:
        async with lab_of(3) as lab:
            await all_send(lab, 4)
            await lab.send_many("a", 2, 1)
            known = [item for fragment in range(3) for item in (await lab.records(fragment))]
            known.sort(key=lambda item: item.record_seq)
            steps = next(one.record for one in known if one.record.version == 3).global_step
            settings = lab.context.settings
            settings = settings.model_copy(
                update={"run": settings.run.model_copy(update={"steps": steps})}
            )
            histories: list[list[HeardRecord]] = [[], [], []]
            for item in known:
                record = item.record
                record = record.model_copy(update={"global_step": min(steps, record.global_step)})
                heard = HeardRecord(item.record_seq, item.stored_at_s, record)
                histories[record.fragment].append(heard)
                found = choose_whole(histories, settings, ended=False)
                assert found is None or len({one.record.version for one in found}) == 1
            assert choose_whole(histories, settings, ended=True) == tuple(h[-1] for h in histories)

    run_async(scenario())


def test_without_its_account_of_senders_a_record_leads_to_the_same_view(run_async):
    async def scenario() -> None:
        async with lab_of(1) as lab, Follower(lab.context, FollowRules((0,))) as follower:
            await lab.send("a")
            while versions(await soon(follower)) != [1]:
                pass
            (slim,) = follower.standing().values()
            whole, _ = await lab.newest()
            assert slim.record == wire.word_of(whole)

    run_async(scenario())
