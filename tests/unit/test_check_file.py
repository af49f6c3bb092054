"""`diloco check` of a task: everything that is wrong with a task, at once, before anything depends on it."""

import os
import sys

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from diloco.common.protocol.errors import ConfigError
from diloco.program import app
from tests.models.tiny import write_tiny

TASKS = """
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import optax

from diloco import Task


def batches(learner, position):
    while True:
        yield np.full((4, 2), position + len(learner), np.float32)
        position += 1


GOOD = Task(
    init=lambda key: {"w": jnp.ones(2), "unused": jnp.ones(3)},
    loss=lambda params, batch, key: (jnp.mean((batch @ params["w"]) ** 2), {"size": 4.0}),
    batches=batches,
    evaluate=lambda params: {"loss": 1.5, "accuracy": 0.25},
    tokens_per_batch=4,
    optimizer=optax.sgd(1e-3),
)


def good(*, steps, seed):
    return GOOD


def bad(*, steps, seed):
    return dataclasses.replace(
        GOOD, accumulate=3, schedule=lambda step: -1.0, loss=lambda params, batch, key: (params["w"], {})
    )


def uphill(*, steps, seed):
    return dataclasses.replace(GOOD, schedule=optax.constant_schedule(1e-3))


def same(*, steps, seed):
    return dataclasses.replace(GOOD, batches=lambda learner, position: batches("x", position))


def ends(*, steps, seed):
    return dataclasses.replace(GOOD, batches=lambda learner, position: itertools.islice(batches(learner, position), 5))


def unscheduled(*, steps, seed):
    return dataclasses.replace(GOOD, optimizer=optax.scale_by_adam())


def fails(*, steps, seed):
    raise RuntimeError("the user's own trouble")
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "tried_tasks.py").write_text(TASKS)

    def run(build, **learner):
        document = {
            "run": {"name": "r", "steps": 100}, "task": {"build": f"tried_tasks:{build}"},
            "sync": {"fragments": 1}, "store": {"url": "unused"}, "learner": learner,
        }  # fmt: skip
        (tmp_path / "run.toml").write_text(tomli_w.dumps(document))
        return CliRunner().invoke(app, ["check", "run.toml"])

    yield run
    sys.modules.pop("tried_tasks", None)


def test_a_good_task_is_described(check):
    done = check("good")
    assert done.exit_code == 0, done.output
    for words in ("5 parameters in 1 fragment", "loss 1.5, accuracy 0.25", "would take it"):
        assert words in done.output
    assert "no gradient in 8 steps: unused" in done.output


def test_all_refusals_are_told_at_once(check):
    done = check("bad")
    assert done.exit_code == 1
    for words in ("accumulate is 3", "one floating scalar", "gave -1.0"):
        assert words in done.output


@pytest.mark.parametrize("wrong", ["uphill", "unscheduled"])
def test_a_task_that_trains_uphill_is_refused(check, wrong):
    done = check(wrong)
    assert done.exit_code == 1
    assert "go uphill" in done.output
    assert "without Task.schedule" in done.output
    assert "needs one" in done.output


def test_learners_that_do_the_same_work_are_a_warning(check):
    done = check("same")
    assert done.exit_code == 0
    assert "draw the same batch" in done.output


def test_batches_that_end_with_an_epoch_are_refused_with_the_way_to_the_next(check):
    done = check("ends")
    assert done.exit_code == 1
    assert "ended before batch number 5" in done.output
    assert "next epoch" in done.output


def test_what_the_task_itself_raises_is_told(check):
    done = check("fails")
    assert done.exit_code == 1
    assert "RuntimeError: the user's own trouble" in done.output


def test_a_task_is_named_without_a_file_of_a_run(check, tmp_path):
    check("good")
    (tmp_path / "alone.py").write_text("from tried_tasks import good as build\n")
    for name in ("alone.py", str(tmp_path / "alone.py"), "tried_tasks:good"):
        done = CliRunner().invoke(app, ["check", name])
        assert (done.exit_code, "would take it" in done.output) == (0, True), done.output
    sys.modules.pop("alone", None)


@pytest.mark.parametrize("place", ["", "def build(*, steps, seed):\n    "])
def test_a_task_that_ends_its_process_is_refused(check, tmp_path, place):
    name = "exits_built" if place else "exits"
    (tmp_path / f"{name}.py").write_text(f"import sys\n{place}sys.exit(0)\n")
    done = CliRunner().invoke(app, ["check", f"{name}.py"])
    assert (done.exit_code, "ends its process" in done.output) == (1, True), done.output


def test_what_is_no_file_of_a_person_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.toml")
    (tmp_path / "vast.toml").touch()
    os.truncate("vast.toml", 10 << 30)
    (tmp_path / "deep.toml").write_text("a=" + "[" * 50_000)
    (tmp_path / "my-task.py").write_text("")
    for name, said in {
        "pipe.toml": "is not a regular file", "vast.toml": "10,737,418,240 bytes", "deep.toml": "is not valid TOML",
        "my-task.py": "no run could import",
    }.items():  # fmt: skip
        done = CliRunner().invoke(app, ["check", name])
        assert isinstance(done.exception, ConfigError), name
        assert said in done.exception.message


@pytest.fixture
def check_mixture(tmp_path):
    """A published mixture of 47 billion parameters, beside a few tokens."""
    for side in ("train", "held_out"):
        np.save(tmp_path / f"{side}.npy", np.arange(2_000, dtype=np.uint16))

    def run(mesh):
        options = {"model": "mixtral-8x7b", "data": str(tmp_path), "length": 32, "batch": 32}
        document = {
            "run": {"name": "r", "steps": 100}, "store": {"url": "unused"}, "learner": {"mesh": mesh},
            "task": {"build": "diloco.models.decoders:build", "options": options},
        }  # fmt: skip
        (tmp_path / "run.toml").write_text(tomli_w.dumps(document))
        return CliRunner().invoke(app, ["check", str(tmp_path / "run.toml")])

    return run


def test_a_model_that_does_not_fit_here_is_not_tried(check_mixture):
    done = check_mixture("fsdp=4,expert=8")
    assert done.exit_code == 0, done.output
    assert "46,702,792,704 parameters" in done.output
    words = " ".join(done.output.split())
    assert "state take 747.2 GB" in words
    assert "--learner a --dry-run --devices 32 compiles" in words
    assert "would take it" not in words


def test_a_batch_that_the_slices_do_not_divide_is_refused(check):
    peers = [f"h:{port}" for port in (1, 2, 3)]
    given = {"slices": 3, "peers": peers, "checkpoint_dir": "here"}
    done = check("good", **given, min_slices=3)
    assert done.exit_code == 1
    assert "a batch of 4 rows cannot be divided over 3 of 3 slices" in done.output
    assert check("good", **given | {"slices": 2, "peers": peers[:2]}).exit_code == 0


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("fsdp=8,expert=3", "does not divide the 8 experts"),
        ("fsdp=64", "a batch of 32 rows cannot be cut"),
    ],
)
def test_a_mesh_that_does_not_fit_the_model_is_refused(check_mixture, mesh, said):
    done = check_mixture(mesh)
    assert (done.exit_code, said in " ".join(done.output.split())) == (1, True), done.output


def lose_a_file(folder):
    (folder / "model-00001-of-00007.safetensors").unlink()


def lose_a_tensor(folder):
    change_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))


def turn_a_tensor(folder):
    def turn(tensors):
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].T.copy()

    change_tensors(folder, turn)


def cut_short(folder):
    path = folder / "model-00001-of-00007.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def spoil_a_number(folder):
    def spoil(tensors):
        tensors["model.layers.2.mlp.down_proj.weight"][1, 2] = np.nan

    change_tensors(folder, spoil)


def change_tensors(folder, change):
    """Put all tensors into one file, changed."""
    parts = sorted(folder.glob("*.safetensors"))
    tensors = {name: values for path in parts for name, values in load_file(path).items()}
    for path in [*parts, folder / "model.safetensors.index.json"]:
        path.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def check_checkpoint(tmp_path):
    """A small checkpoint and its tokens; returns the outcome of checking a run that begins with it."""
    options = write_tiny(tmp_path, ["train", "held_out"], 4_000)

    def run(change, **more):
        change(tmp_path / "model")
        options.update({"length": 32, "batch": 2, "learning_rate": 1e-3} | more)
        document = {
            "run": {"name": "r", "steps": 100}, "store": {"url": "unused"},
            "task": {"build": "diloco.models.decoders:build", "options": options},
        }  # fmt: skip
        (tmp_path / "run.toml").write_text(tomli_w.dumps(document))
        done = CliRunner().invoke(app, ["check", str(tmp_path / "run.toml"), "--steps", "2"])
        return done, " ".join(done.output.split())

    return run


FAULTS = [
    (lose_a_file, "lacks model-00001-of-00007.safetensors, which its index names"),
    (lose_a_tensor, "lacks 1 tensor(s) that its config.json asks for: model.norm.weight"),
    (turn_a_tensor, "model.embed_tokens.weight is of shape [32, 96], but config.json makes it"),
    (cut_short, "cannot be read"),
    (
        spoil_a_number,
        "model.layers.2.mlp.down_proj.weight has 1 number(s) among 1,536 that are inf",
    ),
]


@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 2}}], ids=["all", "adapters"])
@pytest.mark.parametrize(("change", "said"), FAULTS)
def test_a_checkpoint_that_is_not_whole_is_refused_by_name(check_checkpoint, change, said, more):
    done, words = check_checkpoint(change, **more)
    assert (done.exit_code, said in words) == (1, True), done.output
    assert "would take it" not in words


def test_a_whole_checkpoint_is_taken(check_checkpoint):
    done, words = check_checkpoint(lambda folder: None)
    assert done.exit_code == 0, done.output
    assert "tensors of" in words
    assert "a learner would take it" in words


def test_a_learner_needs_no_tensors_of_the_first_version(check_checkpoint):
    def only_config(folder):
        for path in folder.glob("*.safetensors*"):
            path.unlink()

    done, words = check_checkpoint(only_config)
    assert done.exit_code == 0, done.output
    assert "learners need none, diloco run create does" in words
