"""A run in TensorBoard and in Weights & Biases. With both installed: `make test-extras`."""

import os

import pytest

pytest.importorskip("tensorboardX")
wandb = pytest.importorskip("wandb")

from typer.testing import CliRunner  # noqa: E402

from diloco.program import app  # noqa: E402


@pytest.fixture
def ended(new_world):
    world = new_world(run={"steps": 24})
    world.aggregator()
    assert world.learner("a").wait() == 0
    return world


@pytest.mark.filterwarnings("ignore")  # their own
def test_a_run_is_kept_offline(ended, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "WANDB_SILENT", "true")
    options = ["--tensorboard", "boards", "--wandb", "trials", "--offline"]
    done = CliRunner().invoke(app, ["track", str(ended.config_path), *options])
    assert done.exit_code == 0, done.output
    events = list((tmp_path / "boards" / ended.name).glob("events.out.tfevents.*"))
    assert b"train/loss" in b"".join(path.read_bytes() for path in events)
    (offline,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"train/loss" in offline.read_bytes()
