"""A run of real processes with everything in it that a replay must reproduce, and its replay."""

import io
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from audit import read_tape
from forged import messages_in, write_tape
from harness import ENDLESS, World, make_world
from rich.console import Console
from safetensors.numpy import load_file
from test_operations import LEARNERS, SLOWER, ask, until_versions

from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import BusError, ConfigError
from diloco.common.storage.store import open_store
from diloco.operate import change as operate
from diloco.replay import modes as replay
from diloco.replay.bundle import run_bundle
from diloco.replay.options import BundleOptions, Options
from diloco.replay.restore import run_restore
from diloco.run.cli.opening import RunLocation, use_place
from diloco.run.model.files import run_export


@pytest.fixture(autouse=True)
def _places(eventful):
    use_place(RunLocation(None, str(eventful.store)))
    yield
    use_place(RunLocation())


@pytest.fixture(scope="module")
def eventful(made_once):
    """A local run that has ended: fail-over, a rejection, changed settings, a rollback."""
    folder = made_once("replayed", _make_eventful)
    world = World(folder, tomllib.loads((folder / "run.toml").read_text()))
    # Most is asked of the file: no server need be started for it.
    world.tape_file = folder / "run.tape"
    use_place(RunLocation(None, str(world.store)))
    world.tape = read_tape(world, world.tape_file)
    return world


def _make_eventful(folder: Path) -> None:
    with NatsServer(folder / "nats") as server:
        world = make_world("replayed", folder, server.url, run=ENDLESS, task=SLOWER)
        try:
            world.create()
            _live(world)
        finally:
            world.end()
    run_bundle(str(folder), folder / "run.tape", BundleOptions(objects=False))


def _live(world: World) -> None:
    target = str(world.config_path)
    processes = [world.aggregator(), *(world.learner(name) for name in LEARNERS)]
    until_versions(world, [2, 2, 2])
    send_what_is_not_there(world)
    # Its refusal takes several fetches: a rollback before the last one would be the reason instead.
    world.until(lambda: "missing" in _refusals(world), "a refusal of the stranger")
    ask(operate.change(target, ["outer.learning_rate=0.5", "quorum.min_learners=2"]))
    until_versions(world, [3, 3, 3])
    processes[0].kill()
    processes[0] = world.aggregator()
    until_versions(world, [5, 5, 5])
    moves = ask(operate.plan_rollback(target, "3"))
    ask(operate.roll_back(target, moves))
    until_versions(world, [7, 7, 7])
    world.stop()
    assert [process.wait() for process in processes] == [0] * len(processes)


def _refusals(world: World) -> set[str]:
    return {refused.reason for refused in read_tape(world).rejected().values()}


def send_what_is_not_there(world: World) -> None:
    """A learner's hand announces an update whose shards nobody has stored."""
    (_, manifest), *_ = read_tape(world).manifests

    async def announce(bus):
        join = wire.Join(run=world.name, learner="ghost", layout=manifest.layout, host="")
        life = await bus.publish(names.join(world.name, "ghost"), wire.encode(join))
        shards = tuple(
            shard.model_copy(
                update={"name": names.shard(world.name, "ghost", manifest.fragment, 0, life, 1, i)}
            )
            for i, shard in enumerate(manifest.shards)
        )
        ghostly = manifest.model_copy(
            update={"learner": "ghost", "incarnation": life, "seq": 1, "shards": shards}
        )
        subject = names.update(world.name, "ghost", manifest.fragment)
        await bus.publish(subject, wire.encode(ghostly))

    world.ask(announce)


def run_replay(target: Path, **options) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200, soft_wrap=True)
    status = replay.run_replay(str(target), Options(**options), console)
    return status, console.file.getvalue()


def test_every_version_is_made_again_and_every_decision_is_made_again(eventful):
    status, text = run_replay(eventful.folder)
    tape = eventful.tape
    made = sum(record.what == "version" and record.version > 0 for record in tape.all_records())
    assert (status, f"{made} versions of 3 fragments" in text) == (0, True), text

    status, text = run_replay(eventful.folder, decide=True)
    decided = sum(
        record.what in ("version", "verdict") and bool(record.base_seq)
        for record in tape.all_records()
    )
    assert status == 0
    assert f"{decided} decisions are as recorded, 0 differ, 0 could not" in text, text


def test_a_tape_in_a_file_is_the_same_tape(eventful, tmp_path, own_nats_server):
    one, other = eventful.tape_file, tmp_path / "other.tape"
    use_place(RunLocation(own_nats_server.url, str(eventful.store)))
    with pytest.raises(ConfigError, match="exists already"):
        run_bundle(str(eventful.folder), one, BundleOptions(objects=False))
    # From the file alone, beside the store.
    for decide in (False, True):
        assert run_replay(one, decide=decide)[0] == 0
    # On another server, where the run is known by its name.
    run_restore(one, None, objects=False)
    with pytest.raises(BusError, match="exists already"):
        run_restore(one, None, objects=False)
    for decide in (False, True):
        status, text = run_replay(eventful.name, decide=decide)
        assert (status, "0 could not" in text or not decide) == (0, True)
    run_bundle(eventful.name, other, BundleOptions(objects=False))
    assert messages_in(one) == messages_in(other)
    with pytest.raises(ConfigError, match="was made with --no-objects"):
        run_restore(one, None, objects=True)
    with pytest.raises(ConfigError, match="needs the run on a server"):
        ask(operate.make_checkpoint(str(one)))


def test_the_model_as_it_was(eventful, tmp_path):
    remade, stored = tmp_path / "remade", tmp_path / "stored"
    assert run_replay(eventful.tape_file, until="5", export=remade)[0] == 0
    run_export(str(eventful.tape_file), stored, "safetensors", "5")
    one, other = load_file(remade / "model.safetensors"), load_file(stored / "model.safetensors")
    assert one.keys() == other.keys() == {"first", "bias", "second"}
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert (remade / "about.json").read_text() == (stored / "about.json").read_text()

    run_export(str(eventful.tape_file), tmp_path / "newest", "orbax", None)
    with pytest.raises(ConfigError, match="already exists"):
        run_export(str(eventful.tape_file), stored, "safetensors", None)
    with pytest.raises(ConfigError, match="no record of version 1000"):
        run_export(str(eventful.tape_file), tmp_path / "future", "safetensors", "1000")


def test_what_was_verified_is_not_verified_again(eventful, tmp_path):
    memory = tmp_path / "memory.json"
    first = run_replay(eventful.tape_file, resume=memory)
    again = run_replay(eventful.tape_file, resume=memory)
    assert (first[0], again[0]) == (0, 0)
    assert records_of(again[1]) < records_of(first[1]) / 2
    later = run_replay(eventful.tape_file, first=6, fragments="1")[1]
    assert "of 1 fragments" in later
    # Of this fragment alone, and not from its beginning: how many it has, the tape says.
    assert records_of(later) < len(eventful.tape.records[1])
    memory.write_text("{}")
    with pytest.raises(ConfigError, match="is not a progress file"):
        run_replay(eventful.tape_file, resume=memory)


def records_of(text: str) -> int:
    return int(text.split(" again from ")[1].split(maxsplit=1)[0])


def test_a_turned_bit_is_found(eventful, tmp_path):
    """In each kind of object; and the report says where to look."""
    store = tmp_path / "store"
    shutil.copytree(eventful.store, store)
    use_place(RunLocation(None, str(store)))
    tape = eventful.tape
    _, record = tape.records[1][3]
    assert record.what == "version"
    _, stored = next(at for at in tape.records[2] if at[1].version == 3)
    for name in (record.inputs[0].shards[0].name, record.delta.name, stored.outer.name):
        with turned(store, name):
            status, text = run_replay(eventful.tape_file)
            assert status == 1
            assert name in text
            assert "input        learner-" in text
            assert "differences" in text
    assert run_replay(eventful.tape_file)[0] == 0


def test_a_record_that_says_something_else_is_found(eventful, tmp_path):
    """Of the same tape, with one record changed."""
    seq, record = eventful.tape.records[0][2]

    def decided_with(**changes) -> str:
        path = tmp_path / f"{'-'.join(changes)}.tape"
        changed = {"record": record.model_copy(update=changes), "seq": seq}
        rewrite(eventful.tape_file, path, eventful.name, changed)
        verified, decided = run_replay(path), run_replay(path, decide=True)
        assert verified[0] or decided[0]
        return verified[1] + decided[1]

    taken = record.inputs[0]
    heavier = taken.model_copy(update={"weight": taken.weight * 2})
    assert "inputs[0].weight" in decided_with(inputs=(heavier, *record.inputs[1:]))
    assert "closed_at_s" in decided_with(closed_at_s=record.closed_at_s + 1)
    assert "position" in decided_with(position=record.position - 1)
    assert "digests of view" in decided_with(learning_rate=record.learning_rate / 2)


def rewrite(source: Path, target: Path, run: str, changed) -> None:
    messages = messages_in(source)
    payload = wire.encode(changed["record"])
    write_tape(
        target,
        run,
        [m._replace(payload=payload) if m.seq == changed["seq"] else m for m in messages],
    )


class turned:  # noqa: N801 - reads as a word
    """One bit of an object is another one for as long as the block lasts."""

    def __init__(self, store: Path, name: str) -> None:
        self.store, self.name = open_store(str(store)), name
        self.data = self.store.get(name)

    def _put(self, data: bytes) -> None:
        self.store.delete(self.name)
        self.store.put(self.name, data)

    def __enter__(self) -> None:
        changed = bytearray(self.data)
        changed[len(changed) // 2] ^= 1
        self._put(bytes(changed))

    def __exit__(self, *_: object) -> None:
        self._put(self.data)


def test_what_if(eventful, tmp_path):
    asked = {"settings": ("outer.learning_rate=0.4",), "points": 2, "plot": tmp_path / "if.html"}
    status, text = run_replay(eventful.tape_file, **asked, export=tmp_path / "model")
    assert status == 0
    assert "learners do not react" in text
    assert "outer.learning_rate: 0.9 -> 0.4" in text
    assert (tmp_path / "if.html").read_text().startswith("<!doctype html>")
    assert "learning_rate = 0.4" in (tmp_path / "model" / "settings.toml").read_text()
    # What was is evaluated beside it: the numbers of the newest version are the run's own.
    run_export(str(eventful.tape_file), tmp_path / "newest", "safetensors", None)
    newest = load_file(tmp_path / "newest" / "model.safetensors")
    other = load_file(tmp_path / "model" / "model.safetensors")
    assert newest.keys() == other.keys()
    assert not all(np.array_equal(newest[name], other[name]) for name in newest)

    asked["settings"] = ("quorum.min_learners=1", "bounds.norm_clip=50")
    status, text = run_replay(eventful.tape_file, **asked)
    assert (status, "an estimate" in text) == (0, True)
    with pytest.raises(ConfigError, match="excludes --resume"):
        run_replay(eventful.tape_file, **asked, resume=tmp_path / "memory")
