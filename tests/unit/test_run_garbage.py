"""`diloco run gc` on a run in memory: what it finds, and that nothing more is found afterwards."""

from dataclasses import replace

from runlab import RUN, SNAPSHOT_EVERY, Lab

from diloco.aggregator.checkpoint import mark
from diloco.aggregator.core.garbage import Ledger
from diloco.aggregator.owner.garbage_collector import delete, read_on, trim_tape
from diloco.aggregator.owner.recovery import recover
from diloco.common.process.config import GcSection
from diloco.common.protocol import names, wire
from diloco.common.storage.checkpoint_files import load_file
from diloco.common.storage.store import ObjectInfo
from diloco.common.storage.tape import RunContext
from diloco.common.storage.views import load_view
from diloco.operate import run_garbage
from diloco.operate.run_garbage import GarbageFound, find, table

NOW = GcSection(replay_window_s=0, keep_checkpoints=1)


def kinds(found: GarbageFound) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in found.objects:
        counts[item.kind] = counts.get(item.kind, 0) + 1
    return counts


async def stored(lab: Lab, versions: int) -> None:
    """A run whose aggregator collects nothing."""
    await lab.create()
    async with lab.aggregating():
        await lab.join("a")
        await lab.join("a")
        await lab.send_many("a", versions)


def test_it_finds_what_an_aggregator_would_and_strangers_shards(run_async):
    async def scenario() -> None:
        lab = Lab(enabled=False)
        await stored(lab, 4 * SNAPSHOT_EVERY)
        stranger = names.shard(RUN, "nobody", 0, 0, 3, 1, 0)
        checkpoint = names.checkpoint_object(RUN, "0000-000000000001")
        for name in (stranger, checkpoint):
            lab.store.put(name, b"12345")
        lab.store.put(names.checkpoint_object(RUN, "0000-000000000002"), b"newer")
        found = await find(lab.context, NOW)
        gone = 3 * SNAPSHOT_EVERY
        # Shards and deltas up to the floor, the states of versions 0, 3 and 6, and the strangers'.
        assert kinds(found) == {
            "shard": gone + 1,
            "delta": gone,
            "view": 3,
            "outer": 3,
            "checkpoint": 1,
        }
        assert {stranger, checkpoint} <= {item.name for item in found.objects}
        sizes = {info.name: info.size_bytes for info in lab.store.list("")}
        assert all(sizes[item.name] == item.size_bytes for item in found.objects)
        before = await count(lab)
        await trim_tape(lab.context, found.trims)
        await delete(lab.context, [item.name for item in found.objects])
        assert before - await count(lab) == found.messages == 2 * gone + 1

        again = await find(lab.context, NOW)
        assert (again.objects, again.messages) == ([], 0)
        assert (await recover(lab.context, 0)).record.version == 4 * SNAPSHOT_EVERY
        await load_view(lab.context, 0)

    run_async(scenario())


def test_a_checkpoint_that_is_made_meanwhile_keeps_its_objects(run_async, monkeypatch):
    async def scenario() -> None:
        lab = Lab(enabled=False)
        await stored(lab, 4 * SNAPSHOT_EVERY)
        marked = []

        async def meanwhile(context: RunContext, ledger: Ledger) -> None:
            marked.append(await mark(lab.context))
            async with lab.aggregating():
                await lab.send_many("a", 4 * SNAPSHOT_EVERY)
            await read_on(context, ledger)

        monkeypatch.setattr(run_garbage, "read_on", meanwhile)
        found = {item.name for item in (await find(lab.context, NOW)).objects}
        (record,) = load_file(lab.store, RUN, marked[0].name).records
        assert found
        assert not found & {record.snapshot.name, record.outer.name}

    run_async(scenario())


def test_the_body_of_a_record_that_is_not_on_the_tape_yet_stays(run_async):
    """Nothing names it while its pointer is being published, of a version or of verdicts."""

    async def scenario() -> None:
        lab = Lab(enabled=False)
        lab.context = replace(lab.context, record_bytes=1)
        await lab.create()
        publish, kept = lab.bus.publish, []

        async def looked_before(subject: str, payload: bytes, **options: object) -> int:
            if subject == names.record(RUN, 0):
                pointer = wire.decode_record(payload)
                found = {item.name for item in (await find(lab.context, NOW)).objects}
                kept.append((pointer.word.what, pointer.body.name not in found))
            return await publish(subject, payload, **options)

        lab.bus.publish = looked_before
        async with lab.aggregating():
            await lab.join("a")
            await lab.send_many("a", SNAPSHOT_EVERY)
            damaged = lab.upload("a")
            for shard in damaged.shards:
                lab.damage(shard)
            await lab.announce(damaged)
            await lab.answered(damaged)
        assert set(kept) == {("version", True), ("verdict", True)}

    run_async(scenario())


async def count(lab: Lab) -> int:
    subjects = [names.record(RUN, 0), names.update(RUN, "a", 0), names.join(RUN, "a")]
    return sum([len(await lab.on_tape(subject)) for subject in subjects])


def test_what_is_announced_and_not_answered_is_pending(run_async):
    async def scenario() -> None:
        lab = Lab(enabled=False)
        await stored(lab, 4 * SNAPSHOT_EVERY)
        await lab.join("b")
        announced, lost = lab.upload("b"), None
        await lab.announce(announced)
        await lab.join("b")
        lost = lab.upload("b")
        await lab.join("b")
        ready = lab.upload("b")
        found = {item.name for item in (await find(lab.context, NOW)).objects}
        assert announced.shards[0].name not in found
        assert lost.shards[0].name in found
        assert ready.shards[0].name not in found

    run_async(scenario())


def test_a_join_that_cannot_be_read_begins_no_life(run_async):
    async def scenario() -> None:
        lab = Lab(enabled=False)
        await stored(lab, 4 * SNAPSHOT_EVERY)
        ready = lab.upload("a")
        await lab.bus.publish(names.join(RUN, "a"), b"garbage")
        found = {item.name for item in (await find(lab.context, NOW)).objects}
        assert ready.shards[0].name not in found

    run_async(scenario())


def test_the_replay_window_of_the_file_holds(run_async):
    async def scenario() -> None:
        lab = Lab(enabled=False)
        await stored(lab, 4 * SNAPSHOT_EVERY)
        found = await find(lab.context, GcSection())
        assert (found.objects, found.messages) == ([], 0)

    run_async(scenario())


def test_the_table_has_a_row_for_each_kind(capsys):
    from rich.console import Console

    from diloco.aggregator.core.garbage import GarbageObject

    objects = [
        GarbageObject("shard", *ObjectInfo("x", 1500)),
        GarbageObject("view", *ObjectInfo("y", 20)),
    ]
    Console(width=60).print(table(GarbageFound(objects=objects, messages=7), dry_run=True))
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert "would be removed" in shown
    for row in (["shard", "1", "1,500"], ["view", "1", "20"], ["message", "7"]):
        assert row in rows
    assert ["objects", "2", "1,520"] in rows
