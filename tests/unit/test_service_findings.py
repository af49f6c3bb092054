"""Findings on lives, checkpoints, and what the store has and whose it is."""

import asyncio
import dataclasses
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import structlog
from records import DIGEST, make_record
from runlab import RUN, Lab

from diloco.aggregator.checkpoint_and_score_watch import CheckpointWatch
from diloco.common.process import log
from diloco.common.protocol import names, wire
from diloco.common.protocol.shards import crc32c
from diloco.common.storage.store import DirectoryStore, MemoryStore
from diloco.common.storage.tape import last_record, load_specification
from diloco.judge import service_findings
from diloco.run.health_findings import CHECKPOINTS_FAIL, judged
from diloco.run.history import History, read_history
from diloco.run.newest_objects import BytesRead, deleted, newest_first
from diloco.run.observed import HOUR_S, Observed
from diloco.run.state import Finding
from diloco.run.watch import Watch

NOBODY = 65534
GAUGE = "diloco_run_checkpoint_timestamp_seconds"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def observed(lab: Lab) -> Observed:
    return Observed(RUN, 0, lab.context.settings)


def ask(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 300))


async def joined(lab: Lab, lives: int, *, leaving: bool) -> History:
    """The history of a run that a learner has joined so often."""
    await lab.create()
    for _ in range(lives):
        life = await lab.join("fast")
        if leaving:
            leave = wire.Leave(run=RUN, learner="fast", incarnation=life, position=0, fragments=())
            await lab.bus.publish(names.leave(RUN, "fast"), wire.encode(leave))
    return await read_history(lab.context)


@pytest.mark.parametrize(
    ("lives", "leaving", "found"), [(3, False, 0), (4, False, 1), (4, True, 0)]
)
def test_a_learner_that_restarts_again_and_again(lives: int, *, leaving: bool, found: int) -> None:
    lab = Lab()
    seen = observed(lab)

    async def run() -> None:
        await joined(lab, lives, leaving=leaving)
        await read_history(lab.context, seen.take)

    ask(run())

    def told(later_s: float) -> list[str]:
        all_said = judged(seen.run(seen.extent.last_s + later_s), seen.settings)
        return [one.severity for one in all_said if "started again 3 times" in one.sentence]

    assert told(0.0) == ["error"] * found
    assert told(HOUR_S + 1) == []


def marked(name: str, at_s: float) -> History:
    async def run() -> History:
        lab = Lab()
        await lab.create()
        mark = wire.Checkpoint(
            run=RUN, name=name, versions=(0,), record_seqs=(2,), created_at_s=at_s, by="test"
        )
        await lab.bus.publish(names.checkpoint(RUN), wire.encode(mark))
        return await read_history(lab.context)

    return ask(run())


def test_checkpoints_that_fail_or_are_old() -> None:
    history = marked("0000-000000000007", at_s=1000.0)
    name = "0000-000000000007"

    def told(made: tuple[str, float] | None, now_s: float) -> list[str]:
        return [one.severity for one in service_findings.checkpoints(history, made, now_s)]

    assert told(None, 1000.0 + service_findings.MAKING_S) == []
    assert told(None, 1001.0 + service_findings.MAKING_S) == ["error"]
    assert told(("0000-000000000003", 500.0), 1001.0 + service_findings.MAKING_S) == ["error"]
    assert told((name, 1000.0), 1001.0 + service_findings.MAKING_S) == ["ok"]
    assert told((name, 1000.0), 1001.0 + service_findings.CHECKPOINT_S) == ["warning"]


def test_a_run_without_any_checkpoint() -> None:
    history = ask(joined(Lab(), 1, leaving=False))
    created_s = history.specification.created_at_s
    assert not [
        *service_findings.checkpoints(history, None, created_s + service_findings.CHECKPOINT_S)
    ]
    (found,) = service_findings.checkpoints(
        history, None, created_s + service_findings.CHECKPOINT_S + 1
    )
    assert found.severity == "warning"
    assert "diloco run checkpoint RUN" in found.advice


def test_the_age_of_a_run_without_any_checkpoint_counts_from_its_creation() -> None:
    async def look() -> tuple[float, float]:
        lab = Lab()
        await lab.create()
        specification = await load_specification(lab.bus, RUN)
        await CheckpointWatch(lab.context, 0.0).look()
        exposed = lab.context.metrics.exposition().decode()
        (line,) = [one for one in exposed.splitlines() if one.startswith(GAUGE)]
        return float(line.rpartition(" ")[2]), specification.created_at_s

    found, created_at_s = ask(look())
    assert found == created_at_s > 0


def test_an_aggregator_makes_checkpoints_of_what_has_changed_and_tells_a_failure_once() -> None:
    async def look(lab: Lab) -> list[int]:
        watch = CheckpointWatch(lab.context, 1e-6)
        counts = []

        async def looked() -> None:
            await watch.look()
            counts.append(len(await lab.on_tape(names.checkpoint(RUN))))

        async with lab.aggregating():
            await lab.join("a")
            await lab.send("a")
            await looked()
            await looked()  # nothing has changed
            watch._took_s = 0.0
            await lab.send("a")
            await looked()
            watch._took_s = 1e6  # it took long
            await lab.send("a")
            await looked()
        return counts

    lab = Lab()
    ask(lab.create())
    assert ask(look(lab)) == [1, 1, 2, 2]
    lab.store.put(names.checkpoint_object(RUN, "0000-999999999999"), b"rubbish")
    with structlog.testing.capture_logs() as logged:
        watch = CheckpointWatch(dataclasses.replace(lab.context, logger=log.get()), 1e-6)
        ask(watch.look())
        ask(watch.look())
    assert [entry["event"] for entry in logged] == ["checkpoint_failed"]


@as_root
def test_roots_objects_belong_to_the_folders_owner(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    store = DirectoryStore(tmp_path)
    store.put("demo/checkpoint/one", b"bytes")
    assert {path.stat().st_uid for path in tmp_path.rglob("*")} == {NOBODY}
    assert not [*service_findings.store_owner(store)]
    assert f"folder belongs to user {NOBODY}," in service_findings.accepts(store, "file:///s")
    os.chown(tmp_path / "demo" / "checkpoint", 0, 0)
    (found,) = service_findings.store_owner(store)
    assert str(tmp_path / "demo" / "checkpoint") in found.sentence
    assert "chown -R --reference" in found.advice


def test_a_folder_beside_credentials_is_no_fence(tmp_path: Path) -> None:
    (found,) = service_findings.store_fence(DirectoryStore(tmp_path), credentials=True)
    assert found.severity == "warning"
    assert "delete the objects of all others" in found.sentence
    assert not [*service_findings.store_fence(DirectoryStore(tmp_path), credentials=False)]


def test_of_other_stores_nothing_is_said() -> None:
    assert not [*service_findings.store_fence(MemoryStore(), credentials=True)]
    assert service_findings.accepts(MemoryStore(), "mem://s") == "mem://s accepts objects"
    assert not [*service_findings.store_owner(MemoryStore())]


def test_what_a_learner_says_of_itself() -> None:
    async def run() -> tuple[Observed, int]:
        lab = Lab()
        await lab.create()
        return observed(lab), await lab.join("a")

    seen, life = ask(run())
    heartbeat = wire.Heartbeat(
        learner="a", incarnation=life, local_step=8, global_step=8, tokens=80, loss=1.0,
        tokens_per_s=10.0, step_time_s=0.1, stall_s=0.0, run_s=1.0, bytes_up=0, bytes_down=0,
        updates_sent=1, state="training", trouble="checkpoints fail: disk full",
    )  # fmt: skip
    seen.hear(heartbeat, 0.0)

    def said() -> list[tuple[str, str, str | None]]:
        found = judged(seen.run(0.0), seen.settings)
        return [
            (one.severity, one.sentence, one.runbook) for one in found if one.about == "learner a"
        ]

    assert said() == [("warning", "says: checkpoints fail: disk full", CHECKPOINTS_FAIL)]
    seen.known["a"].left = life
    assert [severity for severity, *_ in said()] == ["note"]


def tampered(act: Callable[[Lab, wire.Record, wire.Record], None]) -> list[Finding]:
    """Returns the findings of a follower whose newest version's objects were damaged."""
    lab = Lab()

    async def play() -> list[Finding]:
        await lab.create()
        records = []
        async with lab.aggregating():
            await lab.join("one")
            for _ in range(4):
                await lab.send("one")
                records.append((await last_record(lab.context, 0))[0])
        act(lab, records[-2], records[-1])
        return [*(await Watch(lab.context).begin()).stored]

    return [*ask(play())]


def overwrite(lab: Lab, name: str, data: bytes) -> None:
    lab.store.delete(name)
    lab.store.put(name, data)


def test_a_store_that_is_as_it_was_left_is_not_spoken_of() -> None:
    assert tampered(lambda *_: None) == []


def test_objects_of_new_versions_that_are_other_bytes_or_gone_are_named() -> None:
    def damage(lab: Lab, _before: wire.Record, newest: wire.Record) -> None:
        assert newest.delta is not None
        overwrite(lab, newest.delta.name, b"x" * newest.delta.size_bytes)

    def remove(lab: Lab, _before: wire.Record, newest: wire.Record) -> None:
        lab.store.delete(newest.snapshot.name)

    (damaged,) = tampered(damage)
    assert (damaged.severity, damaged.about) == ("error", "store: bytes")
    assert damaged.sentence.startswith("version 4 of fragment 0: ")
    assert "has damaged bytes" in damaged.sentence
    (gone,) = tampered(remove)
    assert (gone.severity, gone.about) == ("error", "store: objects")
    assert gone.sentence.startswith("the newest versions lack ")


def test_bytes_of_an_earlier_version_are_named_as_such() -> None:
    lab = Lab()
    records = [
        make_record(version=version, delta=wire.ObjectRef(
            name=names.version_object(RUN, 0, version, "delta", DIGEST), size_bytes=1,
            crc32c=crc32c(str(version).encode()),
        ))
        for version in (1, 2, 3)
    ]  # fmt: skip
    for record in records:
        assert record.delta is not None
        lab.store.put(record.delta.name, b"1" if record.version == 3 else b"2")
    reading = BytesRead(lab.store, lambda: newest_first(RUN, [records[::-1]]))
    told = [what.partition(" has ")[2] for _, what in reading.wrong(100)]
    assert told == ["the bytes of version 1", "the bytes of version 2"]
    assert reading.read == 3
    assert [*reading.wrong(1)] == [*reading.wrong(100)][:1]


def test_files_that_only_a_folders_copies_answer_for_are_named(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    name = names.shard(RUN, "one", 0, 0, 1, 1, 0)
    store.put(name, b"data")
    store.keep(name, 100)
    assert [*deleted(store, RUN)] == []
    (tmp_path / name).unlink()
    (found,) = deleted(store, RUN)
    assert (found.severity, found.about) == ("warning", "learner one")
