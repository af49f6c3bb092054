"""`diloco replay` says how much its verdict is about, and never that all is well when it is not."""

import io
import json
import shutil
from math import inf
from pathlib import Path

import msgpack
import pytest
import spoiled
from forged import messages_in, write_tape
from rich.console import Console
from runlab import Lab

from diloco.common.process.config import GcSection
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import IntegrityError
from diloco.common.storage.store import open_store
from diloco.common.storage.tape import decode
from diloco.judge.evidence import newer_objects
from diloco.judge.objects import read_listing
from diloco.operate.run_garbage import find
from diloco.replay.coverage import Versions, sentences, tape_of
from diloco.replay.modes import run_replay
from diloco.replay.options import Options
from diloco.run.cli.opening import RunLocation, use_place
from diloco.run.history import read_history


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return spoiled.make_run(tmp_path_factory.mktemp("honest"), versions=7)


@pytest.fixture
def copy(honest, tmp_path):
    """The run in a folder of its own, to be damaged."""
    shutil.copytree(honest.store, tmp_path / "store")
    use_place(RunLocation(None, str(tmp_path / "store")))
    yield spoiled.Run(honest.name, honest.tape, tmp_path / "store")
    use_place(RunLocation())


def replay(tape: Path, **options) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=300)
    return run_replay(str(tape), Options(**options), console), console.file.getvalue()


def rewritten(run: spoiled.Run, path: Path, change) -> Path:
    """The tape with each message as `change` has it; None drops it."""
    changed = (change(message) for message in messages_in(run.tape))
    return write_tape(path, run.name, (message for message in changed if message is not None))


def records(run: spoiled.Run) -> list[tuple[int, wire.Record]]:
    bodies = [(m.seq, decode(m.subject, m.payload)) for m in messages_in(run.tape)]
    return [(seq, body) for seq, body in bodies if isinstance(body, wire.Record)]


def test_a_whole_tape_is_verified_and_says_what_it_covers(copy, capsys):
    status, text = replay(copy.tape)
    assert status == 0, text
    assert "no end message; 0 unreadable" in text
    assert "14 made again, 2 begun with as stored" in text
    status, _ = replay(copy.tape, json=True)
    found = json.loads(capsys.readouterr().out)
    assert (status, found["verdict"], found["status"]) == (0, "verified", 0)
    assert found["versions"]["again"] == 14
    assert found["tape"]["last_seq"] == 77


def test_a_tape_that_was_cut_is_incomplete(copy, tmp_path):
    cut = rewritten(copy, tmp_path / "cut.tape", lambda m: m if m.seq <= 40 else None)
    status, text = replay(cut)
    assert status == 2, text
    assert "the tape ends before its objects" in text
    assert "incomplete" in text


def test_a_copy_that_lacks_the_last_version_of_each_fragment_is_incomplete(copy, tmp_path):
    last = min(seq for seq, record in records(copy) if record.version == 7)
    status, text = replay(
        rewritten(copy, tmp_path / "cut.tape", lambda m: m if m.seq < last else None)
    )
    assert status == 2, text
    assert "12 made again" in text
    assert "the tape ends before its objects" in text


def test_a_version_after_an_unreadable_record_is_not_held_against_anybody(copy, tmp_path):
    seq, _ = records(copy)[7]

    def spoil(message):
        payload = message.payload[:-1]
        return message._replace(payload=payload) if message.seq == seq else message

    status, text = replay(rewritten(copy, tmp_path / "spoiled.tape", spoil))
    assert status == 1, text
    assert f"unreadable: record {seq} of fragment" in text
    assert "cannot be recomputed" not in text
    assert "behind one that is wrong, gone or unreadable" in text


def test_a_score_that_cannot_be_is_not_put_down_to_collection(copy):
    store = open_store(str(copy.store))
    record = next(record for _, record in records(copy) if record.version == 4)
    data = bytearray(store.get(record.delta.name))
    data[len(data) // 2] ^= 1
    store.delete(record.delta.name)
    store.put(record.delta.name, bytes(data))
    status, text = replay(copy.tape, score=True)
    assert status == 0, text
    assert "have no score: what is stored does not give the recorded digest" in text
    assert "are gone" not in text


def test_a_version_that_is_being_made_is_told_of(run_async):
    async def work():
        lab = Lab()
        await lab.create()
        async with lab.aggregating():
            await lab.join("a")
            await lab.send_many("a", 2)
        lab.store.put("lab/global/0/00000003-view-" + "0" * 32, b"stored before its record")
        listing = await read_listing(lab.context)
        history = await read_history(lab.context)
        own, copied = (
            tape_of(history, listing, window_s=window_s, now_s=0.0) for window_s in (inf, 60.0)
        )
        assert (len(own.under_way), len(own.newer)) == (1, 0)
        assert (len(copied.under_way), len(copied.newer)) == (0, 1)
        assert "was being made when the tape ended" in sentences(own, Versions(again=2))[-1]

    run_async(work())


def test_messages_from_the_midst_that_are_gone_are_wrong(copy, tmp_path):
    gone = rewritten(copy, tmp_path / "hole.tape", lambda m: None if m.seq in (30, 31) else m)
    status, text = replay(gone)
    assert status == 1, text
    assert "2 messages are gone, 30 to 31" in text


def test_a_record_that_was_changed_does_not_fit_the_next_one(copy, tmp_path):
    """In a field that merging again does not look at."""
    seq, record = next(at for at in records(copy) if at[1].version == 3)
    after, _ = next(at for at in records(copy) if at[1].base_seq == seq)
    other = wire.encode(record.model_copy(update={"quorum_at_s": record.quorum_at_s + 1}))
    changed = rewritten(
        copy, tmp_path / "changed.tape", lambda m: m._replace(payload=other) if m.seq == seq else m
    )
    status, text = replay(changed)
    assert status == 1, text
    assert f"fragment {record.fragment} version 4, message {after}: versions are 0, 1, 2" in text
    assert "previous: expected" in text


def test_objects_that_somebody_deleted_are_missing_and_not_collected(copy):
    store, (seq, record) = open_store(str(copy.store)), records(copy)[4]
    for taken in record.inputs:
        store.delete(taken.shards[0].name)
    status, text = replay(copy.tape)
    assert status == 1, text
    first = f"{record.inputs[0].shards[0].name} of record {seq}"
    assert "4 objects are missing, and no collection takes them while" in text
    assert f"the first: {first}" in text
    assert "1 MISSING" in text


def test_a_bad_shard_does_not_end_its_fragment(copy):
    """Remaking goes on at the next stored state, three versions on at most."""
    store, (_, record) = open_store(str(copy.store)), records(copy)[4]
    name = record.inputs[0].shards[0].name
    data = bytearray(store.get(name))
    data[len(data) // 2] ^= 1
    store.delete(name)
    store.put(name, bytes(data))
    assert record.version == 2
    status, text = replay(copy.tape)
    assert status == 1, text
    # Version 2 is wrong, 3 is stored, and 4 to 7 follow from it.
    assert "12 made again, 3 begun with as stored, 1 WRONG" in text


@pytest.mark.parametrize("was", [{"schema": 7}, {"norms": ()}], ids=["schema", "fields"])
def test_a_tape_that_this_release_cannot_read_is_told_in_a_sentence(copy, tmp_path, was):
    def other(message):
        if not message.subject.startswith(names.record(copy.name, "")):
            return message
        fields = msgpack.unpackb(message.payload) | was
        return message._replace(payload=msgpack.packb(fields))

    tape = rewritten(copy, tmp_path / "other.tape", other)
    with pytest.raises(IntegrityError, match="no record of fragment 0 can be read by release"):
        replay(tape)


def test_what_if_of_the_settings_that_were_differs_nowhere(copy, tmp_path):
    """Also one round after the other: the models are compared at ends of rounds alone."""
    for assigned in ("outer.learning_rate=0.5", "outer.learning_rate=0.5000000001"):
        status, text = replay(
            copy.tape, settings=[assigned], points=100, plot=tmp_path / "figure.html"
        )
        rows = [line for line in text.splitlines() if line.startswith("20")]
        assert status == 0
        assert len(rows) == 15
        assert all("+0.0000" in row for row in rows), text


def test_garbage_is_not_collected_where_the_tape_ends_before_its_objects(run_async):
    async def work():
        lab = Lab()
        await lab.create()
        async with lab.aggregating():
            await lab.join("a")
            await lab.send_many("a", 2)
        assert (await find(lab.context, GcSection())).objects == []
        view = "lab/global/0/00000003-view-" + "0" * 32
        lab.store.put(view, b"of a version that may be under way")
        # What a learner stores under its own prefix proves nothing: whatever life it speaks of.
        shard = names.shard("lab", "a", 0, 0, 1 << 40, 1, 0)
        lab.store.put(shard, b"")
        await find(lab.context, GcSection())
        listing, history = await read_listing(lab.context), await read_history(lab.context)
        assert [*newer_objects(history, listing.picked)] == []
        later = "lab/global/0/00000004-view-" + "0" * 32
        lab.store.put(later, b"of a version that the tape has not come to")
        with pytest.raises(IntegrityError, match=f"ends before its objects.*{later}"):
            await find(lab.context, GcSection())

    run_async(work())
