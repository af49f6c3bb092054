"""A run in one file: what it holds, that all who read take it, and what becomes of a damaged one."""

import asyncio
import io
import json
import shutil

import numpy as np
import pytest
import spoiled
from rich.console import Console

import diloco
from diloco.common.protocol.errors import (
    BusError,
    ConfigError,
    IntegrityError,
    StoreError,
    TaskError,
)
from diloco.common.storage.bundle import BundleBus, BundleStore, open_bundle
from diloco.common.storage.tape import records_of
from diloco.judge.doctor import Report, examine
from diloco.replay import bundle
from diloco.replay.bundle import run_bundle
from diloco.replay.modes import run_replay
from diloco.replay.options import BundleOptions, Options
from diloco.replay.restore import run_unpack
from diloco.replay.show import run_show
from diloco.run.cli.opening import RunLocation, open_run, use_place
from diloco.run.state import RunStatus
from diloco.run.watch import Watch


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return spoiled.make_run(tmp_path_factory.mktemp("bundled"), "rate", versions=8)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    return made(run, tmp_path_factory.mktemp("whole") / "run.bundle")


def made(run, path, target=None, **wanted):
    """A bundle of a tape file and its store."""
    use_place(RunLocation(None, str(run.store)))
    try:
        run_bundle(str(target or run.tape), path, BundleOptions(**wanted))
    finally:
        use_place(RunLocation())
    return path


def replay(bundle, **options) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    return run_replay(str(bundle), Options(**options), console), console.file.getvalue()


def shown(capsys, bundle, what):
    capsys.readouterr()
    run_show(str(bundle), what)
    return capsys.readouterr().out


def test_its_parameters_are_loaded_also_where_an_event_loop_runs(whole):
    async def in_a_notebook():
        return diloco.load(whole)

    here, beside = diloco.load(whole), asyncio.run(in_a_notebook())
    assert here.keys() == beside.keys() != set()
    assert all(np.array_equal(here[name], beside[name]) for name in here)


def test_a_whole_run_is_verified_from_the_file_alone(whole):
    status, text = replay(whole)
    assert (status, "bit for bit" in text) == (0, True)
    assert replay(whole, decide=True)[0] == 0


def test_a_part_is_what_collection_would_have_left(run, tmp_path):
    part = made(run, tmp_path / "part.bundle", first=4, until="6")
    file = open_bundle(part)
    assert {name.split("/")[0] for name in file.objects} == {run.name}
    file.close()
    assert part.stat().st_size < made(run, tmp_path / "all.bundle").stat().st_size
    status, text = replay(part)
    assert (status, "before what garbage collection has left" in text) == (2, True), text
    assert "MISSING" not in text
    assert replay(part, decide=True)[0] in (0, 2)


def test_every_object_that_a_record_names_is_in_the_file(whole):
    async def records():
        async with open_run(str(whole), reads=True) as opened:
            return [found.record async for found in records_of(opened.context, 0)], opened.bundle

    made, file = asyncio.run(records())
    assert len(made) > 4
    for record in made:
        shards = [shard for taken in record.inputs for shard in taken.shards]
        refs = [record.snapshot, record.outer, *record.deltas, *shards]
        assert [ref.name for ref in refs if ref.name not in file.objects] == []


def test_a_version_before_all_that_is_stored_is_refused(whole, tmp_path):
    part = tmp_path / "later.bundle"
    run_bundle(str(whole), part, BundleOptions(first=4))
    with pytest.raises(ConfigError, match="no view is stored of version 1 or before"):
        run_bundle(str(part), tmp_path / "earlier.bundle", BundleOptions(first=1))


def test_objects_that_are_gone_are_missing_from_the_file_too(run, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    for path in run.store.rglob("*"):
        if path.is_file() and "/update/0/0-" not in str(path.relative_to(run.store))[:-1]:
            (store / path.relative_to(run.store)).parent.mkdir(parents=True, exist_ok=True)
            (store / path.relative_to(run.store)).write_bytes(path.read_bytes())
    damaged = spoiled.Run(run.name, run.tape, store)
    status, text = replay(made(damaged, tmp_path / "damaged.bundle"))
    assert (status, "MISSING" in text) == (1, True), text


def test_what_is_stored_while_the_tape_is_read_is_in_the_file_too(run, tmp_path, monkeypatch):
    """A run goes on while it is copied: the tape names objects that the list does not have yet."""
    store, later = tmp_path / "store", tmp_path / "later"
    shutil.copytree(run.store, store)
    held = sorted(path for path in store.rglob("*") if path.is_file() and "/update/" in str(path))
    # A folder keeps what was merged under a second name.
    late = {path.name for path in held[-3:]}
    for path in [path for path in held if path.name in late]:
        (later / path.relative_to(store)).parent.mkdir(parents=True, exist_ok=True)
        path.rename(later / path.relative_to(store))
    began = bundle._part

    async def stored_meanwhile(context, wanted):
        shutil.copytree(later, store, dirs_exist_ok=True)
        return await began(context, wanted)

    monkeypatch.setattr(bundle, "_part", stored_meanwhile)
    going_on = spoiled.Run(run.name, run.tape, store)
    status, text = replay(made(going_on, tmp_path / "run.bundle"))
    assert (status, "bit for bit" in text) == (0, True), text


def test_of_a_run_in_a_file_nobody_is_told_to_start_an_aggregator(whole):
    """A bundle has no leases, and its run may go on without it."""

    async def look() -> tuple[RunStatus, Report]:
        async with open_run(str(whole), name="test", reads=True) as opened:
            status = await Watch(opened.context).begin()
        return status, await examine(str(whole))

    status, report = asyncio.run(look())
    told = [*status.alerts, *report.findings]
    assert told
    assert {"owners", "learners"} & {one.about for one in told} == set()


def test_names_are_hashed_and_all_of_it_still_verified(run, tmp_path, capsys):
    log = tmp_path / "logs" / f"{spoiled.CULPRIT}.log"
    log.parent.mkdir()
    private = (
        "10.0.0.17", "2001:db8::17", "fe80::1:2", "anna.b@lab.example.org", "/home/anna",
        "/Users/berta", "spoiled:build", "spoiled.py",
    )  # fmt: skip
    log.write_text(
        f"joined run={run.name} learner={spoiled.CULPRIT} {' '.join(private)} [::1]:4222\n"
        'File "/home/anna/x.py" at 12:34:56, see std::b\n'
    )
    bundle = made(run, tmp_path / "hidden.bundle", redact=True, logs=[log.parent])
    data = bundle.read_bytes()
    for name in (*spoiled.LEARNERS, run.name, *private, "::1"):
        assert name.encode() not in data, name
    assert b"at 12:34:56, see std::b" in data
    for options in ({}, {"decide": True}):
        status, text = replay(bundle, **options)
        assert status == 0, text
    assert "n000" in shown(capsys, bundle, "0@7")
    with pytest.raises(TaskError, match=r"the task's module 'task_[0-9a-f]{8}' cannot be imported"):
        replay(bundle, blame=True)


def test_whatever_a_learner_sends_is_hidden_or_goes(run, tmp_path):
    """One byte is enough to be none of the protocol's maps."""
    from test_verdicts import rewritten

    joins = iter([b"\x01", b"\x90", b"spoiled by gustav", b""])

    def changed(message):
        if message.subject.startswith(f"diloco.{run.name}.join."):
            return message._replace(payload=next(joins, message.payload))
        return message

    tape = rewritten(run, tmp_path / "changed.tape", changed)
    bundle = made(run, tmp_path / "b.bundle", target=tape, redact=True)
    assert next(joins, b"") == b""
    assert b"gustav" not in bundle.read_bytes()
    assert replay(bundle)[0] == 0


def test_a_broken_chain_stays_broken_under_other_names(run, tmp_path):
    from test_verdicts import rewritten

    from diloco.common.protocol import names, wire

    def changed(message):
        if message.subject != names.record(run.name, 0):
            return message
        record = wire.decode(wire.Record, message.payload)
        if record.version != 5:
            return message
        later = record.model_copy(update={"merged_at_s": record.merged_at_s + 1.0})
        return message._replace(payload=wire.encode(later))

    tape = rewritten(run, tmp_path / "changed.tape", changed)
    bundle = made(run, tmp_path / "b.bundle", target=tape, redact=True)
    status, text = replay(bundle)
    assert (status, "previous" in text) == (1, True), text


def test_logs_and_packages_come_out_again(run, tmp_path):
    log = tmp_path / "aggregator.log"
    log.write_text("committed version=1\n")
    bundle = made(run, tmp_path / "run.bundle", logs=[log])
    again = tmp_path / "again.bundle"
    run_bundle(str(bundle), again, BundleOptions())
    run_unpack(again, tmp_path / "out")
    assert (tmp_path / "out/logs/aggregator.log").read_text() == log.read_text()
    assert "jax==" in (tmp_path / "out/packages.txt").read_text()
    about = json.loads((tmp_path / "out/about.json").read_text())
    assert (about["run"], about["redacted"]) == (run.name, False)
    with pytest.raises(ConfigError, match="exists already"):
        run_unpack(again, tmp_path / "out")
    with pytest.raises(ConfigError, match="there is no log"):
        run_bundle(str(bundle), tmp_path / "x.bundle", BundleOptions(logs=[tmp_path / "none.log"]))


@pytest.mark.parametrize("share", [0.3, 0.7, 0.999])
def test_what_is_left_of_a_cut_file_can_be_read(whole, tmp_path, share, capsys):
    data = whole.read_bytes()
    cut = tmp_path / "cut.bundle"
    cut.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(IntegrityError, match=r"cut short|damaged") as told:
        replay(cut)
    assert "--salvage" in told.value.hint
    again = tmp_path / "again.bundle"
    capsys.readouterr()
    run_bundle(str(cut), again, BundleOptions(salvage=True))
    assert "a part only" in capsys.readouterr().out
    status, text = replay(again)
    # The file is what is damaged: nothing says that the run was.
    assert (status, "bit for bit" in text, "MISSING" in text) == (2, False, False), text
    assert "what was left of a damaged file" in text


def test_a_turned_byte_costs_one_frame(whole, tmp_path):
    data = bytearray(whole.read_bytes())
    data[len(data) // 2] ^= 1
    bad = tmp_path / "bad.bundle"
    bad.write_bytes(data)
    with pytest.raises(IntegrityError, match="is damaged"):
        open_bundle(bad)
    before, after = open_bundle(whole), open_bundle(bad, salvage=True)
    messages = len(before.tape.seqs) - len(after.tape.seqs)
    assert messages + len(before.objects) - len(after.objects) == 1
    before.close()
    after.close()


def test_a_file_takes_nothing(whole):
    import asyncio

    file = open_bundle(whole)
    with pytest.raises(BusError, match="is a file"):
        asyncio.run(BundleBus(file).publish("diloco.x.end", b""))
    with pytest.raises(StoreError, match="is a file"):
        BundleStore(file).put("x/y", b"")
    file.close()


def test_decisions_are_told_to_scripts_too(run, whole, tmp_path, capsys):
    from test_verdicts import rewritten

    from diloco.common.protocol import names, wire

    capsys.readouterr()
    assert replay(whole, decide=True, json=True)[0] == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["status"], told["same"]) == ("verified", 0, 16)

    def changed(message):
        if message.subject != names.record(run.name, 0):
            return message
        record = wire.decode(wire.Record, message.payload)
        if record.version == 5:
            record = record.model_copy(update={"global_step": record.global_step + 1})
        return message._replace(payload=wire.encode(record))

    tape = rewritten(run, tmp_path / "changed.tape", changed)
    other = made(run, tmp_path / "other.bundle", target=tape)
    capsys.readouterr()
    status, _ = replay(other, decide=True, json=True)
    told = json.loads(capsys.readouterr().out)
    assert (status, told["verdict"], told["different"] > 0) == (1, "wrong", True)
    assert told["first_different"][0]["fields"][0]["field"] == "global_step"
