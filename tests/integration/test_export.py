"""Checkpoints of others' format from a run that goes on: of now, of a version, of a checkpoint."""

import asyncio
import json

import numpy as np
import pytest
from audit import read_tape
from harness import ENDLESS, PATIENCE_S, World

from diloco.common.protocol import shards
from diloco.learner.tensors.send_and_adopt_kernels import vector_of
from diloco.operate import change as operate
from tests.models import tiny
from tests.models.tiny import write_tiny


@pytest.fixture
def options(tmp_path):
    """Of a task that goes on with a tiny checkpoint on some tokens."""
    folders = write_tiny(tmp_path, ("train", "held_out"), 40_000)
    return folders | {"batch": 2, "length": 32, "learning_rate": 1e-2}


def export(world: World, name: str, *words: str) -> dict:
    """Export by a process of its own; what it says of the versions."""
    process = world.start("export", "export", str(world.config_path), name, *words)
    assert process.wait() == 0, process.log()
    return json.loads((world.folder / name / "about.json").read_text())


def digests(world: World, name: str) -> list[str]:
    """Of the fragments' views, of the tensors that stand in an exported folder."""
    _, rows = tiny.open_folder(world.folder / name)
    leaves = {name: np.asarray(rows[name]) for name in rows}
    layout = read_tape(world).layout
    return [
        shards.digest(vector_of(layout, fragment.index, leaves)) for fragment in layout.fragments
    ]


@pytest.mark.long
def test_a_run_that_goes_on_is_exported_as_it_is_and_as_it_was(new_world, options):
    task = {"build": "diloco.models.decoders:build", "options": options}
    # Slow, so that what matters here, the exports, have the machine's cores.
    learner = {"speed": {"learner-0": 0.2, "learner-1": 0.2}}
    world = new_world(run=ENDLESS, task=task, learner=learner)
    processes = [world.aggregator(), world.learner("learner-0"), world.learner("learner-1")]

    def versions_after(least: list[int]) -> list[int]:
        def reached() -> list[int] | None:
            have = read_tape(world).versions()
            return have if all(a >= b for a, b in zip(have, least, strict=True)) else None

        return world.until(reached, f"versions {least}")

    before = versions_after([3, 3, 3])
    marked = asyncio.run(
        asyncio.wait_for(operate.make_checkpoint(str(world.config_path)), PATIENCE_S)
    )
    now = export(world, "now", "--format", "hf")
    later = versions_after([version + 3 for version in now["versions"]])
    old = export(world, "old", "--format", "hf", "--version", "2")
    kept = export(world, "kept", "--format", "hf", "--version", marked.name)
    half = export(world, "half", "--format", "hf", "--dtype", "bfloat16", "--version", marked.name)
    went_on = versions_after([version + 1 for version in later])

    world.stop()
    assert [process.wait() for process in processes] == [0, 0, 0]
    tape = read_tape(world)
    made = {
        (fragment, record.version): record.view_digest
        for fragment, chain in tape.records.items()
        for _, record in chain
    }
    # Each fragment counts the work of all the steps that its updates cover.
    credited = [
        record.totals.tokens_credited
        for fragment, chain in sorted(tape.records.items())
        for _, record in chain
        if record.version == now["versions"][fragment]
    ]
    assert min(credited) <= now["tokens"] <= max(credited)
    assert all(a <= b for a, b in zip(before, now["versions"], strict=True))
    assert all(a < b for a, b in zip(now["versions"], went_on, strict=True))
    assert old["versions"] == [2, 2, 2]
    assert kept["versions"] == half["versions"] == list(marked.versions)
    for name, about in {"now": now, "old": old, "kept": kept}.items():
        wanted = [made[each] for each in enumerate(about["versions"])]
        assert about["view_digests"] == wanted
        assert digests(world, name) == wanted
    exact, rounded = (tiny.open_folder(world.folder / name)[1] for name in ("kept", "half"))
    np.testing.assert_allclose(rounded["layers/q"], exact["layers/q"], rtol=2**-8)
    assert np.any(np.asarray(rounded["layers/q"]) != np.asarray(exact["layers/q"]))
