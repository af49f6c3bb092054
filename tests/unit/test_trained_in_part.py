"""Decoders of which some tensors are trained, and travel, while the others stay as they began."""

import jax
import numpy as np
import pytest
import tomli_w
from typer.testing import CliRunner

from diloco.common.process.config import SyncSection
from diloco.common.protocol.errors import TaskError
from diloco.learner.tensors import tree
from diloco.learner.tensors.inner_step import make_inner_step
from diloco.models.decoders import checkpoint
from diloco.models.decoders.config import parse_config
from diloco.models.decoders.task import build
from diloco.models.decoders.tensor_names_and_shapes import buffers_of, table
from diloco.program import app
from tests.models.cases import GEMMA4, QWEN3_MOE

EXPERTS = {"layers/expert_gate", "layers/expert_up", "layers/expert_down"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a small mixture."""
    return written(tmp_path_factory.mktemp("mixture"), QWEN3_MOE)


def written(place, document):
    config, rng = parse_config(document, source=""), np.random.default_rng(0)
    leaves = {
        name: np.float32(0.1) * rng.standard_normal(entry.shape, np.float32)
        for name, entry in table(config).items()
    }
    checkpoint.write_checkpoint(place / "model", config, leaves)
    for side in ("train", "held_out"):
        np.save(place / f"{side}.npy", rng.integers(96, size=400).astype(np.uint16))
    return place


def task_of(folder, **options):
    small = {"length": 8, "batch": 2, "remat": False, "learning_rate": 1e-2}
    model, data = str(folder / "model"), str(folder)
    return build(steps=10, seed=0, model=model, data=data, **small, **options)


def travelling(task):
    return {tensor.name for tensor in tree.task_layout(task, SyncSection()).tensors}


@pytest.mark.long
def test_experts_alone_are_trained_and_travel(folder):
    task = task_of(folder, trained=["*/expert_*"])
    assert travelling(task) == {f"trained/{name}" for name in EXPERTS}
    read = task.files.read(folder / "model")
    params = tree.from_names(task.shapes, {name: np.asarray(rows) for name, rows in read.items()})
    state = task.optimizer.init(params.trained)
    windows = np.random.default_rng(1).integers(96, size=(2, 9)).astype(np.int32)
    step = make_inner_step(task)
    after, _, outcome = step(jax.tree.map(np.copy, params), state, windows, 0)
    assert np.isfinite(outcome.loss)
    assert outcome.metrics.keys() == {"experts_busiest", "experts_loss"}
    assert 1 <= float(outcome.metrics["experts_busiest"]) <= 3  # of six experts, each token has two
    moved = {
        name
        for name, leaf in tree.named_leaves(after)
        if not np.array_equal(leaf, np.asarray(read[name]))
    }
    assert moved == {f"trained/{name}" for name in EXPERTS}


def test_a_model_in_part_is_written_whole(folder, tmp_path):
    task = task_of(folder, frozen=["*/expert_*"])
    assert not travelling(task) & {f"trained/{name}" for name in EXPERTS}
    leaves = {name: np.asarray(rows) for name, rows in task.files.read(folder / "model").items()}
    task.files.write(tmp_path / "out", leaves, "float32")
    config = parse_config(QWEN3_MOE, source="")
    written = checkpoint.read_checkpoint(tmp_path / "out", config)
    for name, rows in checkpoint.read_checkpoint(folder / "model", config).items():
        np.testing.assert_array_equal(np.asarray(written[name]), np.asarray(rows))


def test_what_is_not_trained_is_kept_in_the_dtype_of_products(folder):
    """It takes half the memory then, and computes the same."""
    task = task_of(folder, trained=["*/expert_*"], dtype="bfloat16")
    first = jax.jit(task.init)(jax.random.key(0))
    read = task.files.read(folder / "model")
    for name, leaf in tree.named_leaves(first):
        wide = name.startswith("trained/") or name.endswith("norm")
        assert leaf.dtype == read[name].dtype == ("float32" if wide else "bfloat16"), name
    params = tree.from_names(task.shapes, {name: np.asarray(rows) for name, rows in read.items()})
    wide = task_of(folder, trained=["*/expert_*"]).files.read(folder / "model")
    wide = tree.from_names(task.shapes, {name: np.asarray(rows) for name, rows in wide.items()})
    windows = np.random.default_rng(1).integers(96, size=(2, 9)).astype(np.int32)
    loss = jax.jit(lambda params: task.loss(params, windows, jax.random.key(0))[0])
    assert float(loss(params)) == float(loss(wide))


def test_what_is_not_trained_costs_no_gradient(folder):
    whole, experts = task_of(folder), task_of(folder, trained=["*/expert_*"])
    assert experts.flops_per_token < whole.flops_per_token
    assert experts.active_parameters == whole.active_parameters


def test_buffers_never_travel_and_no_one_is_warned_of_them(tmp_path):
    """Transformers has no gradient for them either; in bfloat16 they stay as they were read."""
    written(tmp_path, GEMMA4)
    options = {"model": str(tmp_path / "model"), "data": str(tmp_path), "length": 8, "batch": 2}
    document = {
        "run": {"name": "r", "steps": 100},
        "store": {"url": "unused"},
        "task": {"build": "diloco.models.decoders:build", "options": options},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(document))
    done = CliRunner().invoke(app, ["check", str(tmp_path / "run.toml")])
    assert (done.exit_code, "would take it" in done.output) == (0, True), done.output
    assert "no gradient" not in done.output

    config = parse_config(GEMMA4, source="")
    assert buffers_of(config) == ("layers/sliding/scale", "layers/full/scale")
    task = task_of(tmp_path, dtype="bfloat16")
    assert travelling(task) == {
        f"trained/{name}" for name in {*table(config)} - {*buffers_of(config)}
    }
    leaves = {name: np.asarray(rows) for name, rows in task.files.read(tmp_path / "model").items()}
    task.files.write(tmp_path / "out", leaves, "float32")
    again = checkpoint.read_checkpoint(tmp_path / "out", config)
    for name, rows in checkpoint.read_checkpoint(tmp_path / "model", config).items():
        np.testing.assert_array_equal(np.asarray(again[name]), np.asarray(rows))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"trained": ["*expertz*"]}, "names no parameter"),
        ({"frozen": ["*"]}, "leave no parameter"),
        ({"trained": ["*/expert_*"], "lora": {"rank": 2}}, "adapters are trained alone"),
    ],
)
def test_choices_that_do_not_fit_are_refused(folder, options, word):
    with pytest.raises(TaskError, match=word) as caught:
        task_of(folder, **options)
    assert caught.value.hint
