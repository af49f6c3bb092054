"""Followers of runs of real processes: outages, SIGKILL, a new tape, a folder, engines, wrong input."""

import asyncio
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from audit import read_tape
from harness import ENDLESS, World, eventually, open_world
from safetensors.numpy import load_file

import diloco
from diloco.common.process.credentials import Credentials, render_credentials
from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol import shards
from diloco.common.protocol.errors import ConfigError, DilocoError, Exit
from diloco.operate import change as operate
from diloco.run.model.follow import Following, ModelChange
from diloco.run.model.load import piece_values
from diloco.run.model.serving import FolderRules, ServedFolder

SLOWER = {"options": {"notes": "notes", "sleep_s": 0.06}}
ODD = {"options": {"notes": "notes", "sleep_s": 0.06, "odd": True}}
LEARNERS = ("learner-0", "learner-1")


def start(world: World) -> list:
    return [world.aggregator(), *(world.learner(name) for name in LEARNERS)]


def digests(world: World) -> dict[tuple[int, int], str]:
    """By fragment and version, as the tape has them."""
    chains = read_tape(world).records
    return {
        (fragment, record.version): record.view_digest
        for fragment, chain in chains.items()
        for _, record in chain
    }


def check_change(model: Following, change: ModelChange, world: World) -> None:
    known = digests(world)
    for part in change.fragments:
        assert part.digest == known[part.fragment, part.version]
        assert shards.digest(model.view(part.fragment)) == part.digest


def check_folder(folder: Path) -> int:
    """Checks that `latest` is whole: a set of one version, readable by safetensors."""
    latest = (folder / "latest").resolve()
    about = json.loads((latest / "about.json").read_text())
    assert load_file(latest / "model.safetensors")
    return max(about["versions"])


def until_version(model: Following, version: int) -> ModelChange:
    while (change := next(model)).version < version:
        pass
    return change


@pytest.mark.long
def test_through_outages_and_kills_every_change_is_the_records(
    own_nats_server, new_world, tmp_path
):
    world = new_world(
        server=own_nats_server, run=ENDLESS, task=SLOWER, quorum={"deadline_s": 60.0},
        gc={"enabled": False},
    )  # fmt: skip
    aggregator, *learners = start(world)
    folder, rng = tmp_path / "served", random.Random(0)
    follows = ("follow", str(world.config_path), "--to", str(folder), "--keep", "2")
    served = world.start("served", *follows)
    with diloco.follow(world.config_path) as model:
        check_change(model, until_version(model, 2), world)
        own_nats_server.kill()
        model.take(within_s=2.0)
        own_nats_server.start()
        check_change(model, until_version(model, model.standing()[0].record.version + 2), world)
        away = world.folder / "store-away"
        world.store.rename(away)
        change = model.take(within_s=1.0)
        away.rename(world.store)
        if change is not None:
            check_change(model, change, world)
        for _ in range(4):
            check_change(model, until_version(model, model.standing()[0].record.version + 1), world)
            eventually(lambda: (folder / "latest").exists(), "a version in the folder")
            served.kill()
            check_folder(folder)
            served = world.start("served", *follows)
            if rng.random() < 0.5:
                eventually(lambda now=served: now.events("served"), "a version that is served")
        world.stop()
        for change in model:
            check_change(model, change, world)
        assert model.ended
        assert model.behind == (0, 0.0)
    assert served.wait() == 0
    assert [process.wait() for process in (aggregator, *learners)] == [0, 0, 0]
    last = read_tape(world)
    assert check_folder(folder) == max(chain[-1][1].version for chain in last.records.values())
    assert len([path for path in folder.glob("*-*") if path.is_dir()]) <= 2
    assert not [*folder.glob("*.part")]
    about = json.loads(((folder / "latest").resolve() / "about.json").read_text())
    assert about["view_digests"] == [
        last.records[fragment][-1][1].view_digest for fragment in sorted(last.records)
    ]
    final = load_file((folder / "latest").resolve() / "model.safetensors")
    for name, leaf in diloco.load(world.config_path).items():
        np.testing.assert_array_equal(final[name], leaf)
    # Started again after the end, it has the last version, and ends.
    again = world.start("again", "follow", str(world.config_path), "--to", str(tmp_path / "late"))
    assert again.wait() == 0
    assert again.events("run_over")
    check_folder(tmp_path / "late")


@pytest.mark.long
def test_a_new_tape_is_followed_by_itself(own_nats_server, unique, tmp_path):
    with open_world(unique, tmp_path / "run", own_nats_server.url, run=ENDLESS, task=ODD) as world:
        processes = start(world)
        with diloco.follow(world.config_path) as model:
            until_version(model, 3)
            check_codes_lead_to_the_views(world)
            marked = asyncio.run(operate.make_checkpoint(str(world.config_path)))
            until_version(model, max(marked.versions) + 1)
            for process in processes:
                process.kill()
            own_nats_server.kill()
            shutil.rmtree(own_nats_server.folder)
            with NatsServer(tmp_path / "fresh", port=own_nats_server.port):
                model.take(within_s=1.0)
                asyncio.run(operate.resume(str(world.config_path), None))
                # Its checkpoint has fragments at different clocks: there is no whole version yet.
                start(world)
                change = next(model)
                while change.event != "epoch":
                    change = next(model)
                assert change.epoch == 1
                check_change(model, until_version(model, max(marked.versions) + 2), world)
                world.end()


class StandIn:
    """An engine with the four calls of vLLM's weight transfer; no vLLM runs here."""

    def __init__(self, order: list) -> None:
        self.order, self.leaves, self.serves, self.paused = order, {}, None, False

    def init(self, layout) -> None:
        self.leaves = {t.name: np.zeros(t.shape, np.float32) for t in layout.tensors}

    def start(self, version: int) -> None:
        assert not self.paused
        self.paused = True
        self.order.append("start")

    def update(self, leaf) -> None:
        assert self.paused
        self.leaves[leaf.name][leaf.rows] = leaf.values
        self.order.append("update")

    def finish(self, version: int) -> None:
        self.paused, self.serves = False, version
        self.order.append("finish")


@pytest.fixture
def ended(new_world) -> World:
    options = {"notes": "notes", "writes": True}
    world = new_world(run={"steps": 32}, task={"options": options})
    processes = start(world)
    assert [process.wait() for process in processes] == [0, 0, 0]
    return world


def test_of_an_ended_run_python_engines_and_folder_have_the_same(ended, tmp_path, run_async):
    loaded = diloco.load(ended.config_path)
    order: list[str] = []
    engines = [StandIn(order), StandIn(order)]
    with diloco.follow(ended.config_path) as model:
        (change,) = diloco.feed(model, engines)
        with pytest.raises(ConfigError, match="later change was asked for"):
            next(change.leaves)
    for engine in engines:
        assert engine.serves == change.version
        for name, leaf in loaded.items():
            np.testing.assert_array_equal(engine.leaves[name], leaf)
    # No engine serves before all have everything.
    assert order == sorted(order, key=["start", "update", "finish"].index)

    async def in_asyncio() -> dict[str, np.ndarray]:
        found = {}
        async with diloco.follow(ended.config_path, form="bfloat16") as model:
            async for change in model:
                found |= {(leaf.name, str(leaf.rows)): leaf for leaf in change.leaves}
        return found

    for (name, _), leaf in run_async(in_asyncio()).items():
        assert leaf.values.dtype.name == "bfloat16"
        np.testing.assert_array_equal(
            leaf.values, loaded[name][leaf.rows].astype(leaf.values.dtype)
        )
    check_samples(ended, loaded)
    check_hf_is_refused(ended, tmp_path)
    check_wrong_input(ended, tmp_path)


def check_codes_lead_to_the_views(world: World) -> None:
    """Each stored delta leads from the values before to the view, bit for bit."""
    held: dict[str, np.ndarray] = {}
    added = set()
    with diloco.follow(world.config_path, whole=False, form="codes") as model:
        while added != {tensor.name for tensor in model.run.context.layout.tensors}:
            change = next(model)
            pieces = model.pieces(change.fragment)
            for piece, leaf in zip(pieces, change.leaves, strict=True):
                rows = held.setdefault(leaf.name, np.zeros(leaf.shape, np.float32))
                if leaf.codes is None:
                    rows[leaf.rows] = leaf.values
                else:
                    rows[leaf.rows] += leaf.codes.decode()
                    added.add(leaf.name)
                wanted = piece_values(piece, model.view(change.fragment))
                np.testing.assert_array_equal(rows[leaf.rows], wanted)


def check_samples(world: World, loaded: dict[str, np.ndarray]) -> None:
    process = world.start(
        "sample", "sample", str(world.config_path), "--prompt", "bias ", "--follow"
    )
    assert process.wait() == 0
    version, text = process.log().splitlines()
    assert version.startswith("--- version ")
    assert text == f"bias {loaded['bias'][0]:.6f}"


def check_hf_is_refused(world: World, tmp_path: Path) -> None:
    process = world.start(
        "hf", "follow", str(world.config_path), "--to", str(tmp_path / "hf"), "--format", "hf"
    )
    assert process.wait() == Exit.CONFIG
    assert "writes no format of others" in process.log()
    world.processes.remove(process)


def check_wrong_input(world: World, tmp_path: Path) -> None:
    def opened(target=world.config_path, **how) -> None:
        with diloco.follow(target, **how):
            pass

    learners = tmp_path / "learner.toml"
    learners.touch(mode=0o600)
    learners.write_text(
        render_credentials(Credentials(run="x", identity="a", role="learner", seed="S"))
    )
    for says, how in {
        "no synchronized leaf 'head'": {"leaves": ["head"]},
        "credentials of learner 'a'": {"credentials": learners},
        "expected float32, bfloat16, codes": {"form": "float8"},
        "whole=False": {"form": "codes"},
        "at least 1 version": {"every": 0},
        "neither a configuration file": {"target": tmp_path / "nothing.toml"},
        "there is no run": {"target": world.variant("other", {"run": {"name": "nobodys"}})},
    }.items():
        with pytest.raises(DilocoError) as caught:
            opened(**how)
        assert says in str(caught.value), caught.value
    model = diloco.follow(world.config_path, leaves="w*")
    for unopened in (model.take, lambda: next(model), lambda: model.run):
        with pytest.raises(ConfigError, match="within its block"):
            unopened()


def test_a_folder_is_told_of_and_old_versions_go(ended, tmp_path, run_async):
    told = tmp_path / "told"
    command = f"sh -c 'echo $0 >> {told}; exit 3'"

    others = [tmp_path / "to" / "another-folder", tmp_path / "to" / "a-file.part"]
    for path in others:
        path.mkdir(parents=True)

    async def follow(times: int) -> None:
        for _ in range(times):
            async with diloco.follow(ended.config_path) as model:
                folder = ServedFolder(
                    model, FolderRules(tmp_path / "to", "safetensors", 1, command)
                )
                (tmp_path / "to" / "0-000000000000.part").mkdir()
                async for change in model:
                    await folder.take(change)

    run_async(follow(2))
    # At least once for each: a version that was written is told of again after a restart.
    lines = told.read_text().split()
    assert lines == [str((tmp_path / "to" / "latest").resolve())] * 2
    assert all(path.exists() for path in others)
    # The run's last set may have the number of one before it: both keep a name.
    latest = (tmp_path / "to" / "latest").resolve()
    about = json.loads((latest / "about.json").read_text())
    (latest / "about.json").write_text(json.dumps(about | {"view_digests": ["another"]}))
    run_async(follow(1))
    assert (tmp_path / "to" / "latest").readlink() == Path(f"{latest.name}-last")
    assert told.read_text().split()[2:] == [f"{latest}-last"]
    for command in ("", "echo 'a"):
        with pytest.raises(ConfigError, match="--exec"):
            ServedFolder(
                diloco.follow(ended.config_path), FolderRules(tmp_path, "hf", command=command)
            )
    with pytest.raises(ConfigError, match="expected hf, safetensors"):
        ServedFolder(diloco.follow(ended.config_path), FolderRules(tmp_path, "gguf"))
