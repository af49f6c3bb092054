"""Leaves that each learner trains for itself: never sent, kept through a lost machine, exported."""

import shutil

import numpy as np
import pytest
import tomli_w
from audit import read_tape
from harness import ENDLESS, Process, World
from safetensors.numpy import load_file

SLEEP_S = 0.01
# After so many steps each head fits its learner's data.
STEPS = 400


def steps_of(process: Process) -> int:
    """The steps of a learner's newest checkpoint."""
    return max((saved["local_step"] for saved in process.events("checkpoint_saved")), default=0)


def export(world: World, name: str, *words: str, config: str = "") -> dict[str, np.ndarray]:
    """The leaves that a process of its own exports."""
    process = world.start(name, "export", config or str(world.config_path), name, *words)
    assert process.wait() == 0, process.log()
    return load_file(world.folder / name / "model.safetensors")


@pytest.mark.long
def test_each_learner_keeps_its_own_head_beside_one_body(new_world):
    key = "0123456789abcdef" * 4
    world = new_world(
        run=ENDLESS,
        task={"build": "private_task:build", "options": {"sleep_s": SLEEP_S}},
        outer={"optimizer": "sgd", "learning_rate": 1.0},
        sync={"codec": "float32", "delta_codec": "float32", "fragments": 1},
        learner={
            "checkpoint_dir": "checkpoints",
            "checkpoint_interval_s": 0.2,
            "checkpoint_upload": True,
            "checkpoint_key": "key",
        },
    )
    (world.folder / "key").write_text(key + "\n")
    (world.folder / "key").chmod(0o600)
    aggregator, b = world.aggregator(), world.learner("b")
    a = world.learner("a")
    world.until(lambda: len(a.events("checkpoint_uploaded")) > 5, "checkpoints are uploaded")
    a.kill()
    (folder,) = (world.folder / "checkpoints").glob("*/a")
    shutil.rmtree(folder)
    a = world.learner("a")
    (restored,) = world.until(lambda: a.events("checkpoint_restored"), "a restores its head")
    assert restored["where"] == "store"
    assert restored["local_step"] > 0
    for process in (a, b):
        world.until(lambda p=process: steps_of(p) >= STEPS, "both have trained")
    world.stop()
    assert [process.wait() for process in (a, b, aggregator)] == [0, 0, 0]

    # Only the body is on the tape.
    layout = read_tape(world).layout
    assert [tensor.name for tensor in layout.tensors] == ["body"]
    assert [tensor.name for tensor in layout.constants] == ["head"]

    whole, of_a, of_b = (
        export(world, "whole"),
        export(world, "of-a", "--learner", "a"),
        export(world, "of-b", "--learner", "b"),
    )
    for own, sign in ((of_a, 1.0), (of_b, -1.0)):
        np.testing.assert_array_equal(own["body"], whole["body"])
        np.testing.assert_allclose(own["body"] @ own["head"], sign, atol=0.2)
    assert np.abs(whole["head"] - of_a["head"]).max() > 0.01
    # The first head is public, as all first values are; what was trained can nowhere be read.
    stored = b"".join(
        path.read_bytes() for path in (world.folder / "store").rglob("*") if path.is_file()
    )
    assert whole["head"].tobytes() in stored
    assert of_a["head"].tobytes() not in stored

    # On another machine, with another key.
    shutil.rmtree(world.folder / "checkpoints")
    same = export(world, "again", "--learner", "a")
    assert sorted(same) == ["body", "head"]
    (world.folder / "key").write_text("f" * 64)
    refused = world.start("refused", "export", str(world.config_path), "refused", "--learner", "a")
    assert refused.wait() == 2
    assert "learner.checkpoint_key does not open it" in refused.log()

    forgetful = world.folder / "forgetful.toml"
    document = {name: keys for name, keys in world.document.items() if name != "learner"}
    forgetful.write_text(tomli_w.dumps(document))
    refused = world.start("c", "learner", "--config", str(forgetful), "--learner", "c", "--dry-run")
    assert refused.wait() == 2
    assert "the task has private leaves" in refused.log()
    assert "set learner.checkpoint_dir" in refused.log()
