"""The Task contract: what keeps it is accepted, what breaks it is refused in a clear sentence."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.common.protocol.errors import TaskError
from diloco.common.protocol.layout import TensorHint
from diloco.learner.load_and_check_task import check_task, load_task
from diloco.learner.task import Task, held_out_loss, is_floating, params_shapes
from diloco.learner.tensors.inner_step import make_inner_step
from diloco.learner.tensors.tree import named_leaves

STEPS = 10


def batches(learner, position):
    while True:
        yield np.full(4, position, np.float32)
        position += 1


GOOD = Task(
    init=lambda key: {"w": jax.random.normal(key, (4,)), "count": 3, "on": True},
    loss=lambda params, batch, key: (jnp.mean((params["w"] - batch) ** 2), {}),
    batches=batches,
    evaluate=lambda params: 0.0,
    tokens_per_batch=4,
    optimizer=optax.scale_by_adam(),
    schedule=lambda step: 0.1,
)


def alternating():
    widths = iter(range(1, 100))
    return lambda key: {"w": jnp.zeros(next(widths))}


def unseeded(learner, position):
    rng = np.random.default_rng()
    while True:
        yield rng.random(4, np.float32)


def always_from_the_start(learner, position):
    return batches(learner, 0)


def of_jax_arrays(learner, position):
    return map(jnp.asarray, batches(learner, position))


def fails(*_):
    raise ValueError("the user's own trouble")


BROKEN = {
    "schedule cannot be traced": (
        {"schedule": lambda step: 0.1 if step < 5 else 0.01},
        "Task.schedule must be a function that JAX can trace",
    ),
    "init is no function": ({"init": {"w": 1}}, "Task.init must be a function"),
    "schedule is no function": ({"schedule": 0.1}, "Task.schedule must be a function"),
    "no tokens": ({"tokens_per_batch": 0}, "tokens_per_batch must be an int of at least 1"),
    "tokens as a float": ({"tokens_per_batch": 4.0}, "tokens_per_batch must be an int"),
    "optimizer is a rate": ({"optimizer": 0.1}, "must be an optax.GradientTransformation"),
    "init fails": ({"init": fails}, "the user's own trouble"),
    "init changes": ({"init": alternating()}, "same structure, shapes and dtypes"),
    "nothing to train": ({"init": lambda key: {"n": 3}}, "at least one floating leaf"),
    "no parameters": ({"init": lambda key: {}}, "it gave no leaves"),
    "complex": ({"init": lambda key: jnp.zeros(4, complex)}, "is complex64"),
    "a key": ({"init": lambda key: {"w": jnp.zeros(4), "key": key}}, "'key' is key<"),
    "equal names": ({"init": lambda key: {"w": jnp.ones(4), "a b": 1.0, "a_b": 1.0}}, "'a_b'"),
    "loss fails": ({"loss": fails}, "ValueError: the user's own trouble"),
    "loss per item": ({"loss": lambda p, b, k: (p["w"] - b, {})}, r"it returned .*float32\[4\]"),
    "loss with more": ({"loss": lambda p, b, k: (jnp.sum(p["w"]), 1)}, r"return \(loss, metrics\)"),
    "loss without a key": ({"loss": lambda p, b: jnp.sum(p["w"])}, "2 positional arguments but 3"),
    "loss alone": ({"loss": lambda p, b, k: jnp.sum(p["w"])}, r"return \(loss, metrics\)"),
    "integer loss": ({"loss": lambda p, b, k: (jnp.sum(p["count"]), {})}, "one floating scalar"),
    "loss leaves JAX": ({"loss": lambda p, b, k: (float(p["w"][0]), {})}, "traceable by jax.jit"),
    "unseeded": ({"batches": unseeded}, "begin with batch number n"),
    "position ignored": ({"batches": always_from_the_start}, "begin with batch number n"),
    "batches end": ({"batches": lambda name, n: iter([np.ones(4)])}, "ended before"),
    "a list": ({"batches": lambda name, n: [np.ones(4)] * 9}, "return an iterator"),
    "batches on device": ({"batches": of_jax_arrays}, "pytree of numpy arrays"),
    "negative rate": ({"schedule": lambda step: -0.1}, "at global step 0 it gave -0.1"),
    "rate is lost": ({"schedule": lambda step: jnp.where(step < STEPS, 1.0, jnp.nan)}, "step 10"),
    "sample is a text": ({"sample": "def "}, "Task.sample must be a function or None"),
    "hint is a word": ({"hint": lambda name, shape: "rda"}, "must return a TensorHint"),
    "hint too deep": ({"hint": lambda n, s: TensorHint(norm_axes=2)}, "'count' of shape"),
}


def test_a_task_that_keeps_the_rules_is_accepted():
    check_task(GOOD, steps=STEPS)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_named(case):
    change, message = BROKEN[case]
    with pytest.raises(TaskError, match=message) as caught:
        check_task(dataclasses.replace(GOOD, **change), steps=STEPS)
    assert caught.value.hint


def test_shapes_need_no_memory():
    huge = dataclasses.replace(GOOD, init=lambda key: {"w": jnp.zeros((1 << 20, 1 << 20))})
    assert params_shapes(huge)["w"].shape == (1 << 20, 1 << 20)


def test_names_are_readable_and_keep_every_kind_of_leaf():
    params = {"decoder": {"layers": [{"qkv!": np.ones(2)}, 7]}, "on": True, "scale": 1.5, "": 0}
    assert named_leaves(params) == [
        ("_", 0),
        ("decoder/layers/0/qkv_", params["decoder"]["layers"][0]["qkv!"]),
        ("decoder/layers/1", 7),
        ("on", True),
        ("scale", 1.5),
    ]
    trained = [name for name, leaf in named_leaves(params) if is_floating(leaf)]
    assert trained == ["decoder/layers/0/qkv_", "scale"]


def test_names_cannot_climb_folders():
    assert [name for name, _ in named_leaves({"..": {"a/../b": 1}})] == ["__/a/__/b"]


def test_a_tree_of_one_leaf_has_a_name():
    assert named_leaves(3.0) == [("params", 3.0)]


def test_trees_of_one_structure_have_its_names_and_their_own_leaves():
    first, second = {"a": [1, 2], "b": 3}, {"a": [4, 5], "b": 6}
    assert named_leaves(first) == [("a/0", 1), ("a/1", 2), ("b", 3)]
    assert named_leaves(second) == [("a/0", 4), ("a/1", 5), ("b", 6)]
    assert named_leaves({"a": [4], "b": 6}) == [("a/0", 4), ("b", 6)]
    assert named_leaves({"a": 4, "c": 6}) == [("a", 4), ("c", 6)]
    assert named_leaves({"a": (4, None), "b": 6}) == [("a/0", 4), ("b", 6)]


def test_a_tree_of_which_two_leaves_have_one_name_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(TaskError, match="both called 'a_b'"):
            named_leaves({"a b": 1, "a:b": 2})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current directory with modules of a user; they are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


USER_MODULE = """
import dataclasses
from tests_task_base import GOOD
def build(*, steps, seed, width=4, fail=False):
    if fail:
        raise TypeError("raised inside build")
    return dataclasses.replace(GOOD, tokens_per_batch=width)
def nothing(*, steps, seed):
    pass
def no_seed(*, steps):
    return GOOD
a_number = 3
"""


@pytest.fixture
def user_module(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tests_task_base", sys.modules[__name__])
    (folder / "mine").mkdir()
    (folder / "mine" / "model.py").write_text(USER_MODULE)
    (folder / "needy.py").write_text("import not_installed_anywhere")


@pytest.mark.usefixtures("user_module")
def test_load_builds_with_the_options():
    task = load_task("mine.model:build", steps=STEPS, seed=0, options={"width": 8})
    assert task.tokens_per_batch == 8


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        ("mine.model", {}, "package.module:function"),
        (":build", {}, "package.module:function"),
        ("yours.model:build", {}, "no module named 'yours'"),
        ("mine.modle:build", {}, "no module named 'mine.modle'"),
        ("needy:build", {}, "needy itself imports 'not_installed_anywhere'"),
        ("mine.model:biuld", {}, "no function 'biuld'"),
        ("mine.model:a_number", {}, "no function 'a_number'"),
        ("mine.model:build", {"widht": 8}, "its options are: width, fail"),
        ("mine.model:build", {"seed": 1}, "the run gives them"),
        ("mine.model:no_seed", {}, "must take steps and seed"),
        ("mine.model:nothing", {}, "must return a diloco.Task"),
        ("mine.model:build", {"width": 0}, "tokens_per_batch"),
    ],
)
def test_load_says_what_is_wrong(build, options, message):
    with pytest.raises(TaskError, match=message):
        load_task(build, steps=STEPS, seed=0, options=options)


# Names of our folders that a user's files may have


USERS_OWN = "learner.model:build"
OWN_TASK = """
import dataclasses
from common.shapes import WIDTH
from tests_task_base import GOOD
def build(*, steps, seed):
    return dataclasses.replace(GOOD, tokens_per_batch=WIDTH)
"""


@pytest.fixture
def crowded(folder, monkeypatch, request):
    """A folder whose files are called as our folders are, which a user's Python does not see."""
    root = str(request.config.rootpath)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", root)])
    monkeypatch.setitem(sys.modules, "tests_task_base", sys.modules[__name__])
    for name in ("common", "learner", "aggregator", "runbooks"):
        (folder / name).mkdir()
    (folder / "common" / "shapes.py").write_text("WIDTH = 24")
    (folder / "learner" / "model.py").write_text(OWN_TASK)
    (folder / "infra.py").write_text("raise RuntimeError('nobody imports this')")
    return folder


@pytest.mark.usefixtures("crowded")
def test_a_users_files_may_have_any_names():
    assert load_task(USERS_OWN, steps=STEPS, seed=0, options={}).tokens_per_batch == 24


def test_a_users_files_are_in_nobodys_way(crowded):
    done = subprocess.run(
        [sys.executable, "-m", "diloco", "learner", "--help"],
        cwd=crowded, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("user_module")
def test_what_the_users_function_raises_passes_through():
    with pytest.raises(TypeError, match="raised inside build"):
        load_task("mine.model:build", steps=STEPS, seed=0, options={"fail": True})


def test_the_example_learns_to_read_digits(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    task = load_task("examples.digits:build", steps=150, seed=0, options={})
    params = task.init(jax.random.key(0))
    state = task.optimizer.init(params)
    before, inner_step = held_out_loss(task, params), make_inner_step(task)
    for step, batch in zip(range(150), task.batches("a", 0), strict=False):
        params, state, _ = inner_step(params, state, batch, np.int32(step))
    assert before > 2.0
    assert held_out_loss(task, params) < 0.6
