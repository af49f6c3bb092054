"""`diloco doctor` and the audit: a healthy run is healthy, and each thing that is wrong is found."""

import asyncio
import copy
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from audit import Tape, read_items, read_tape
from harness import World, environment, make_world

from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import Exit
from diloco.common.storage.store import open_store
from diloco.judge.audit import audit
from diloco.judge.doctor import Report, examine
from diloco.judge.objects import check_objects, list_now
from diloco.judge.remake_and_compare import remake
from diloco.run.state import Finding

STEPS = 64


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A run of two learners, from beginning to end, as the folder of a local run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with NatsServer(folder / "nats") as server:
        # So short a run ends well only with short outer steps, whatever rounds it happens to have.
        world = make_world(
            "finished", folder, server.url,
            run={"steps": STEPS}, outer={"learning_rate": 0.4, "momentum": 0.6},
        )  # fmt: skip
        world.create()
        processes = [world.aggregator(), world.learner("learner-0"), world.learner("learner-1")]
        assert [process.wait() for process in processes] == [0, 0, 0]
    return world


@pytest.fixture(scope="module")
def tape(finished: World) -> Tape:
    """Its tape; tests change copies."""
    return read_tape(finished)


def findings(report: Report, severity: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity == severity]


def test_a_finished_run_is_healthy(finished: World) -> None:
    report = asyncio.run(examine(str(finished.folder), deep=True))
    assert report.healthy, report.findings
    assert not findings(report, "warning"), report.findings
    account = report.account
    assert account is not None
    assert account.sent == account.merged + account.rejected > 20
    assert account.tokens_sent == account.tokens_merged + account.tokens_rejected > 0
    sentences = " ".join(finding.sentence for finding in report.findings)
    assert "made again to the bit" in sentences
    assert "took part to the end" in sentences
    assert not [*(finished.store / finished.name).glob("doctor/*")], "the probe was left behind"


def doctor(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "diloco", "doctor", *arguments],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip


def test_the_command_tells_and_its_status_says_whether_it_is_well(
    finished: World,
) -> None:
    well = doctor(str(finished.folder), "--json")
    assert well.returncode == 0, well.stderr
    document = json.loads(well.stdout)
    assert document["healthy"]
    assert {finding["severity"] for finding in document["findings"]} <= {"ok", "note"}

    ill = doctor(str(finished.variant("ill", {"outer": {"momentum": 0.5}})))
    assert ill.returncode == 1, ill.stdout
    assert "not healthy" in ill.stdout
    assert "runbooks/nats-away.md" in ill.stdout


def examined(world: World, path: Path) -> Report:
    """The report of a file, while the run's server is there."""
    with NatsServer(world.folder / "nats", port=int(world.url.rpartition(":")[2])):
        return asyncio.run(examine(str(path)))


def test_a_file_that_is_not_the_runs(finished: World) -> None:
    changed = finished.variant("changed", {"sync": {"codec": "int8"}, "outer": {"momentum": 0.5}})
    report = examined(finished, changed)
    errors = findings(report, "error")
    assert {error.runbook for error in errors} == {"runbooks/run-mismatch.md"}
    assert "sync.codec: 'int8' here, 'int4' in the run" in {error.sentence for error in errors}


def test_a_configuration_without_a_run(finished: World) -> None:
    planned = finished.variant(
        "planned", {"run": {"name": "planned"}, "quorum": {"pace": 0.0, "grace_fraction": 0.0}}
    )
    report = examined(finished, planned)
    assert (report.exists, report.healthy) == (False, False)
    assert any("does not exist yet" in note.sentence for note in findings(report, "note"))
    assert {warning.runbook for warning in findings(report, "warning")} == {
        "runbooks/bad-configuration.md"
    }


def test_a_run_whose_tape_is_lost_is_no_run_that_does_not_exist_yet(
    finished: World, tmp_path: Path
) -> None:
    with NatsServer(tmp_path / "nats") as empty:
        path = finished.variant("elsewhere", {"bus": {"url": empty.url}})
        report = asyncio.run(examine(str(path)))
    (error,) = findings(report, "error")
    assert "its tape is lost, or on another server" in error.sentence
    assert error.runbook == "runbooks/restore-from-bucket.md"
    assert (report.exists, report.healthy) == (True, False)


def test_who_only_reads_makes_no_folder_for_a_store(finished: World, tmp_path: Path) -> None:
    """An empty one in the place of one that is not mounted would hide that."""
    nowhere = tmp_path / "not" / "mounted"
    here = finished.variant("here", {"store": {"url": str(nowhere)}})
    planned = finished.variant("soon", {"run": {"name": "soon"}, "store": {"url": str(nowhere)}})
    (error,) = findings(examined(finished, here), "error")
    assert f"there is no store in the folder {str(nowhere)!r}" in error.sentence
    report = examined(finished, planned)
    assert not findings(report, "error")
    assert not report.exists
    with NatsServer(finished.folder / "nats", port=int(finished.url.rpartition(":")[2])):
        for command, *once in (["status", "--once"], ["status", "--learners"], ["report"]):
            done = subprocess.run(
                [sys.executable, "-m", "diloco", command, str(here), *once],
                capture_output=True, text=True, env=environment(), check=False,
            )  # fmt: skip
            assert done.returncode == Exit.PASSING, done.stdout + done.stderr
    assert not nowhere.exists()


def test_a_task_that_cannot_be_built_here(finished: World) -> None:
    path = finished.variant("elsewhere", {"task": {"build": "nowhere:build"}})
    report = examined(finished, path)
    assert any("cannot be built here" in note.sentence for note in findings(report, "note"))


def test_another_store_and_no_bus(finished: World, tmp_path: Path) -> None:
    other = finished.variant("other", {"store": {"url": str(tmp_path / "empty")}})
    (error,) = findings(examined(finished, other), "error")
    assert error.runbook == "runbooks/store-away.md"
    alone = asyncio.run(examine(str(other)))
    (error,) = findings(alone, "error")
    assert error.runbook == "runbooks/nats-away.md"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_that_may_not_be_written(finished: World, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished.store, store)
    (store / ".tmp").chmod(0o555)
    path = finished.variant("readonly", {"store": {"url": str(store)}})
    (error,) = findings(examined(finished, path), "error")
    assert error.runbook == "runbooks/permissions.md"


def test_a_bus_on_which_the_operator_may_only_read(finished: World) -> None:
    may_not = 'publish: {deny: ["diloco.*.rejected.>"]}'
    users = f"authorization {{users: [{{user: eve, password: eve, permissions: {{{may_not}}}}}]}}"
    with NatsServer(finished.folder / "nats", extra_config=users) as server:
        url = server.url.replace("nats://", "nats://eve:eve@")
        report = asyncio.run(examine(str(finished.variant("eve", {"bus": {"url": url}}))))
    (error,) = findings(report, "error")
    assert error.runbook == "runbooks/permissions.md"
    assert "not permitted" in error.sentence


@pytest.mark.long
def test_a_run_under_way_and_what_goes_wrong_with_it(
    own_nats_server: NatsServer, new_world: Callable[..., World]
) -> None:
    """Healthy while all work; then a silent learner, and fragments that nobody owns."""
    world = new_world(
        server=own_nats_server,
        run={"steps": 1_000_000},
        # A slow learner, since a deep examination reads every update that there is.
        task={"options": {"notes": "notes", "sleep_s": 0.1}},
        quorum={"deadline_s": 1.0, "liveness_timeout_s": 3.0},
        sync={"reannounce_timeout_s": 1.0},
        aggregator={"lease_ttl_s": 1.0},
    )
    aggregator, learners = world.aggregator(), [world.learner(f"learner-{i}") for i in range(2)]
    world.until(lambda: min(read_tape(world).versions()) > 3, "versions")
    report = asyncio.run(examine(str(world.config_path), deep=True))
    assert report.healthy, report.findings
    assert not findings(report, "warning"), report.findings
    assert any("owned by aggregator 3" in finding.sentence for finding in report.findings)

    aggregator.kill()
    learners[1].kill()

    def ill() -> Report | None:
        report = asyncio.run(examine(str(world.config_path)))
        told = {(finding.runbook, finding.about) for finding in report.findings}
        silent = ("runbooks/lagging-learner.md", "learner learner-1")
        stopped = any(runbook == "runbooks/fragment-stopped.md" for runbook, _ in told)
        return report if stopped and silent in told else None

    report = world.until(ill, "findings")
    stopped = {error.about for error in findings(report, "error")}
    assert stopped <= {f"fragment {fragment}" for fragment in range(3)}
    warnings = {warning.about for warning in findings(report, "warning")}
    # The one that is left says itself that nobody answers, once a round's time is over.
    assert warnings - {"learner learner-0"} == {"learner learner-1", "owners"}


# The audit, on copies of a good tape


def rules(tape: Tape) -> set[str]:
    found = audit(tape)
    return {breach.rule for breach in found.breaches}


def change(tape: Tape, fragment: int, index: int, **fields: Any) -> None:
    seq, record = tape.records[fragment][index]
    tape.records[fragment][index] = (seq, record.model_copy(update=fields))


def say(tape: Tape, seq: int, **fields: Any) -> None:
    """Another message in place of the one at a sequence."""
    tape.entries = [
        one._replace(body=one.body.model_copy(update=fields)) if one.seq == seq else one
        for one in tape.entries
    ]


def drop_a_record(tape: Tape) -> None:
    del tape.records[0][3]


def fork(tape: Tape) -> None:
    seq, record = tape.records[0][3]
    tape.records[0].insert(4, (seq + 1, record))


def merge_twice(tape: Tape) -> None:
    _, before = tape.records[0][3]
    _, record = tape.records[0][4]
    change(tape, 0, 4, inputs=(*record.inputs, before.inputs[0]))


def forget_an_update(tape: Tape) -> None:
    _, record = tape.records[0][4]
    change(tape, 0, 4, inputs=record.inputs[1:])


def run_ahead(tape: Tape) -> None:
    seq, _ = tape.records[0][-1]
    for index, (_, record) in enumerate(tape.records[0]):
        if index >= 2:
            change(tape, 0, index, position=max(record.position, seq))


def count_wrongly(tape: Tape) -> None:
    _, record = tape.records[1][4]
    totals = record.totals.model_copy(update={"tokens_merged": record.totals.tokens_merged + 1})
    change(tape, 1, 4, totals=totals)


def say_another_weight(tape: Tape) -> None:
    _, record = tape.records[1][4]
    first, *others = record.inputs
    wrong = first.model_copy(update={"steps": first.steps + 1})
    change(tape, 1, 4, inputs=(wrong, *others))


def train_again(tape: Tape) -> None:
    # On a busy machine one of the two may send next to nothing.
    sent = Counter(manifest.incarnation for _, manifest in tape.manifests)
    ((life, _),) = sent.most_common(1)
    for seq, manifest in tape.manifests:
        if manifest.incarnation == life and manifest.seq > 1:
            say(tape, seq, position=manifest.position - 1)


def end_elsewhere(tape: Tape) -> None:
    assert tape.end is not None
    seq, end = tape.end
    say(tape, seq, versions=tuple(version + 1 for version in end.versions))


TAMPERED: dict[Callable[[Tape], None], str] = {
    drop_a_record: "chain",
    fork: "chain",
    merge_twice: "once",
    forget_an_update: "position",
    run_ahead: "position",
    count_wrongly: "totals",
    say_another_weight: "admission",
    train_again: "data",
    end_elsewhere: "end",
}


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_a_tape_that_was_tampered_with(tape: Tape, tamper: Callable[[Tape], None]) -> None:
    changed = copy.copy(tape)
    changed.records = {f: [*chain] for f, chain in tape.records.items()}
    assert not rules(changed)
    tamper(changed)
    assert TAMPERED[tamper] in rules(changed)


@pytest.mark.parametrize("before", [0.3, 0.6, 0.9])
def test_a_trimmed_tape_is_sound(finished: World, tape: Tape, before: float) -> None:
    """As garbage collection leaves it: the last message of every subject, and the newer ones."""
    trim_at = int(before * tape.last_seq)
    items = read_items(finished)
    last = {item.subject: item.seq for item in items}
    kept = [item for item in items if item.seq >= trim_at or last[item.subject] == item.seq]
    assert len(kept) < len(items)
    trimmed = Tape(tape.specification, tape.settings, tape.layout, tape.store)
    for item in kept:
        trimmed.take(item)
    assert trimmed.trimmed
    found = audit(trimmed)
    assert not found.breaches
    account = found.account
    assert account.sent == account.merged + account.rejected + account.in_flight
    objects = check_objects(trimmed)
    remake(trimmed, objects)
    assert not objects.breaches


# Objects, in a copy of the store


@pytest.fixture
def copied(finished: World, tmp_path: Path, unique: str) -> World:
    """The finished run with a store of its own, which a test may spoil."""
    store = tmp_path / "store"
    shutil.copytree(finished.store, store)
    world = World(tmp_path, {**finished.document, "store": {"url": str(store)}})
    shutil.copytree(finished.folder / "nats", tmp_path / "nats")
    world.config_path.write_text(tomli_w.dumps(world.document))
    return world


def newest(tape: Tape) -> wire.Record:
    return tape.records[0][-1][1]


def found_in(world: World) -> set[str | None]:
    report = asyncio.run(examine(str(world.folder), deep=True))
    return {finding.runbook for finding in findings(report, "error")}


def test_an_object_that_is_needed_is_gone(copied: World, tape: Tape) -> None:
    (copied.store / newest(tape).snapshot.name).unlink()
    assert "runbooks/missing-object.md" in found_in(copied)


def test_an_object_is_shorter(copied: World, tape: Tape) -> None:
    path = copied.store / newest(tape).outer.name
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    assert "runbooks/missing-object.md" in found_in(copied)


def test_a_bit_of_an_old_update_is_flipped(copied: World, tape: Tape) -> None:
    _, record = tape.records[1][3]
    for path in copied.files_of(record.inputs[0].shards[0].name):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
    assert found_in(copied) == {"runbooks/digest-mismatch.md"}


def test_an_orphan_is_a_note(copied: World) -> None:
    orphan = copied.store / names.version_object(copied.name, 0, 1, "delta", "0" * 32)
    orphan.write_bytes(b"orphan")
    assert found_in(copied) == set()
    report = asyncio.run(examine(str(copied.folder)))
    assert "runbooks/orphaned-objects.md" in {note.runbook for note in findings(report, "note")}


def test_objects_of_a_life_that_nobody_began_name_their_learner(copied: World) -> None:
    store = open_store(str(copied.store))
    for seq in (1, 2):
        store.put(names.shards_prefix(copied.name, "learner-1", 0, 0, 10**15, seq) + "0", b"")
    report = asyncio.run(examine(str(copied.folder)))
    told = [(one.about, one.sentence) for one in findings(report, "warning")]
    assert [(about, "2 objects" in sentence) for about, sentence in told] == [
        ("learner learner-1", True)
    ]


def test_what_is_stored_while_the_tape_is_read_is_no_orphan(copied: World, tape: Tape) -> None:
    beside = copy.copy(tape)
    beside.store = open_store(str(copied.store))
    before = list_now(beside.store, copied.name)
    late = names.version_object(copied.name, 0, 1, "delta", "0" * 32)
    (copied.store / late).write_bytes(b"late")
    assert set(check_objects(beside).orphans) == {late}
    assert not check_objects(beside, before=before).orphans


def test_an_object_of_a_version_that_the_tape_does_not_have_shows_that_it_was_cut(
    copied: World,
) -> None:
    late = copied.store / names.version_object(copied.name, 0, 10**6, "delta", "0" * 32)
    late.write_bytes(b"late")
    assert found_in(copied) == {"runbooks/debug-with-replay.md"}


def test_what_garbage_collection_would_not_have_taken_yet_was_deleted(
    copied: World, tape: Tape
) -> None:
    """Shards that recovery needs no more, of records that stand: somebody else deleted them."""
    covered = {f: chain[-1][1].outer_seq or chain[-1][0] for f, chain in tape.records.items()}
    for fragment, chain in tape.records.items():
        for seq, record in chain:
            for taken in record.inputs if seq <= covered[fragment] else ():
                for shard in taken.shards:
                    for path in copied.files_of(shard.name):
                        path.unlink()
    assert found_in(copied) == {"runbooks/missing-object.md"}
