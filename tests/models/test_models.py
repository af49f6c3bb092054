"""Models beside transformers itself: `make test-models`, which names the oracle's Python."""

import functools
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco.common.protocol.errors import ConfigError
from diloco.learner.task import Variables
from diloco.learner.tensors import tree
from diloco.learner.tensors.inner_step import make_inner_step
from diloco.models.decoders import checkpoint, model
from diloco.models.decoders.config import parse_config
from diloco.models.decoders.image_text import OTHERS
from diloco.models.decoders.lora import EXPERTS, LoraOptions, read_lora, with_adapters
from diloco.run.model.load import load
from tests.models import tiny
from tests.models.cases import CASES, WHOLE
from tests.models.drawn import REFUSED, drawn
from tests.models.weights import GENERATED, PROMPT, tokens

ORACLE = os.environ.get("DILOCO_TEST_ORACLE")
HERE = Path(__file__).parent
TOLERANCE = 1e-5
ALL = CASES | drawn() | WHOLE
pytestmark = pytest.mark.skipif(not ORACLE, reason="needs transformers: make test-models")


def asked(*words):
    subprocess.run([ORACLE, HERE / "make_expected.py", *map(str, words)], cwd=HERE, check=True)


def started(*words):
    return subprocess.Popen([sys.executable, "-m", "diloco", *map(str, words)])


def diloco(*words):
    assert started(*words).wait() == 0


@pytest.fixture(scope="session")
def made(request, tmp_path_factory):
    """Checkpoints of the cases that are asked for."""
    folder = tmp_path_factory.mktemp("checkpoints")
    given = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    cases = {params["case"] for params in given if "case" in params} - set(REFUSED)
    asked("checkpoints", folder, "llama-3.1", *sorted(cases))
    return folder


# One of each family that differs in kind: the short form.
SIX = ("llama-3.1", "qwen3", "gemma2", "gemma3", "qwen3-moe", "mixtral")


def test_six_families_are_read_take_a_step_and_come_back(tmp_path):
    assert_come_back(tmp_path, *SIX)


@pytest.mark.long
@pytest.mark.timeout(3600)  # Minutes; a busy machine needed more than the default's 15.
def test_the_largest_gemma_4_comes_back_by_its_shape(tmp_path):
    """All 30 layers of 128 experts, whose files transformers wrote and loads again.

    In float64: of 12,000 choices of experts, rounding in float32 changes one.
    """
    assert_come_back(tmp_path, "gemma4-26b-a4b", dtype="float64")
    assert_others_are(tmp_path / "out" / "gemma4-26b-a4b", tmp_path / "gemma4-26b-a4b")


def assert_come_back(tmp_path, *cases, dtype="float32"):
    """Logits are transformers' as they begin, and those of the step's parameters as exported."""
    asked("checkpoints", tmp_path, *cases)
    found = {}
    for case in cases:
        config, _ = loaded(tmp_path / case)
        task = tiny.task_of(tmp_path, tmp_path / case)
        read = task.files.read(tmp_path / case)
        leaves = {name: jnp.asarray(np.asarray(values)) for name, values in read.items()}
        params = tree.from_names(task.shapes, leaves)
        seen, compute = tokens(case, config.vocab), model.Compute(dtype=dtype)
        measured = jax.jit(functools.partial(model.logits_of, config, compute=compute))

        def logits(params, seen, measured=measured):
            with jax.enable_x64(dtype == "float64"):
                whole = model.joined(*params[:2]) if isinstance(params, Variables) else params
                return measured(jax.tree.map(lambda leaf: leaf.astype(dtype), whole), seen)

        wanted = np.load(tmp_path / case / "expected.npz")["logits"]
        assert apart(logits(params, seen), wanted) <= 2 * TOLERANCE, case

        batch = next(task.batches("a", 0))
        state = task.optimizer.init(tree.division_of(task, task.shapes).trained_of(params))
        step = make_inner_step(task)
        params, *_ = step(params, state, batch, np.int32(9), np.uint32(0))
        task.files.write(tmp_path / "out" / case, tree.by_name(params), "float32")
        found[case] = logits(params, tokens("any", config.vocab))
        assert apart(logits(params, seen), wanted) > 1e-3  # it was moved
    asked("exported", *(tmp_path / "out" / case for case in cases))
    for case in cases:
        there = np.load(tmp_path / "out" / case / "logits.npz")["logits"]
        assert apart(found[case], there) <= 2 * TOLERANCE, case


def loaded(folder):
    config, rows = tiny.open_folder(folder)
    like = jax.eval_shape(lambda: model.init_params(config, jax.random.key(0)))
    leaves = {name: jnp.asarray(np.asarray(values)) for name, values in rows.items()}
    return config, tree.from_names(like, leaves)


def apart(found, wanted):
    # An expert that nothing is given to has no gradient.
    return np.abs(np.asarray(found) - wanted).max() / (np.abs(wanted).max() or 1)


@pytest.fixture
def _in_float64():
    """Rounding differs with the machine: in float32 a gradient of these is up to 1.1e-5 off."""
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("case", [case for case in ALL if case not in REFUSED])
@pytest.mark.usefixtures("_in_float64")
def test_logits_loss_and_gradient_are_those_of_transformers(made, case):
    config, params = loaded(made / case)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    given = parse_config(ALL[case], source=case)
    assert vars(config) | {"tokens": given.tokens} == vars(given)
    seen, compute = tokens(case, config.vocab), model.Compute(dtype="float64")

    @jax.jit
    def measured(params):
        found = model.forward(config, params, seen, compute=compute)
        logits = model.logits_of(config, params, seen, compute=compute)
        told = jax.nn.log_softmax(logits[0, :-1])
        loss = -jnp.take_along_axis(told, seen[0, 1:, None], 1).mean()
        if found.load is not None and ALL[case].get("output_router_logits"):
            loss += config.experts.balance * found.load.loss()
        return loss, logits

    (loss, logits), gradient = jax.value_and_grad(measured, has_aux=True)(params)
    wanted = dict(np.load(made / case / "expected.npz"))
    assert apart(logits, wanted["logits"]) <= TOLERANCE
    assert apart(loss, wanted["loss"]) <= TOLERANCE
    leaves = tree.by_name(gradient)
    for foreign, found in checkpoint.checkpoint_tensors(config, leaves, np.dtype(np.float64)):
        assert apart(found, wanted[f"gradient/{foreign}"]) <= TOLERANCE, foreign


def settings_of(checkpoint, folder, *more):
    """Of two learners on random tokens; the run is in `folder / "run"`."""
    data = folder / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    for side in ("train", "held_out"):
        np.save(data / f"{side}.npy", rng.integers(96, size=4_000).astype(np.uint16))
    options = {"model": checkpoint, "data": data}
    given = [f'task.options.{name}="{value}"' for name, value in options.items()]
    given += ["task.options.length=64", "task.options.batch=2", "task.options.learning_rate=1e-2"]
    given += ["sync.fragments=2", "sync.interval_steps=10", "sync.overlap_steps=2", *more]
    settings = [word for each in given for word in ("--set", each)]
    task = ["--task", "diloco.models.decoders:build", "--run-dir", folder / "run"]
    return [*task, "--cpu", "--learners", 2, "--kill", "none", *settings]


def train(checkpoint, folder, *more):
    diloco("local", "--steps", 40, *settings_of(checkpoint, folder, *more))


@pytest.mark.parametrize("case", [case for case in ALL if case not in REFUSED])
def test_what_is_written_again_is_what_was_read(made, case, tmp_path):
    """Each tensor, of experts too, however transformers saved it."""
    config, rows = tiny.open_folder(made / case)
    ours = {name: np.asarray(values) for name, values in rows.items()}
    checkpoint.write_checkpoint(tmp_path / "again", config, ours, beside=made / case)
    if (made / case / "fused").is_dir():
        fused = checkpoint.read_checkpoint(made / case / "fused", config)
        for name, values in fused.items():
            np.testing.assert_array_equal(np.asarray(values), ours[name])
    _, again = tiny.open_folder(tmp_path / "again")
    for name, values in again.items():
        np.testing.assert_array_equal(np.asarray(values), ours[name])
    assert_others_are(tmp_path / "again", made / case)


def assert_others_are(folder, source):
    """Each tensor that is not the text model's, bit for bit, and no other."""
    found, wanted = map(others, (folder, source))
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


def others(folder):
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {n: v for file in files for n, v in file.items() if n.startswith(OTHERS)}


@pytest.mark.parametrize("case", REFUSED)
def test_a_drawn_shape_that_is_not_computed_is_refused_by_name(case):
    with pytest.raises(ConfigError, match=REFUSED[case]) as caught:
        parse_config(ALL[case], source=case)
    assert caught.value.hint


EXPORTED = (
    "llama-3.1",
    "qwen3-layers",
    "gemma3-4b",
    "qwen3-moe",
    "mixtral",
    "gemma4-e2b",
    "gemma4-26b",
    "gemma4-whole",
)


@pytest.mark.parametrize("case", EXPORTED)
def test_what_a_run_exports_is_its_model_in_transformers(made, case, tmp_path):
    """From a folder over two learners, and back: the same logits as the run's global view."""
    train(made / case, tmp_path)
    diloco("export", tmp_path / "run", tmp_path / "out", "--format", "hf")
    asked("logits", tmp_path / "out", tmp_path / "logits.npz")
    assert_others_are(tmp_path / "out", made / case)
    config, params = loaded(tmp_path / "out")
    found = model.logits_of(config, params, tokens("any", config.vocab))
    wanted = np.load(tmp_path / "logits.npz")["logits"]
    assert apart(found, wanted) <= TOLERANCE
    _, first = loaded(made / case)
    assert apart(params["norm"], np.asarray(first["norm"])) > 1e-3  # it was trained
    told = tree.by_name(params)
    for name, leaf in tree.named_leaves(first):
        if name.endswith("/scale"):  # a buffer is not
            np.testing.assert_array_equal(leaf, told[name])
    asked("generate", tmp_path / "out")
    told = np.load(tmp_path / "out" / "generated.npz")["tokens"]
    np.testing.assert_array_equal(told, greedy(tmp_path / "out"))


def greedy(folder):
    """The tokens that our own model adds, one by one."""
    config, params = loaded(folder)
    seen = tokens("any", config.vocab)[:, :PROMPT]
    for _ in range(GENERATED):
        last = model.logits_of(config, params, seen)[:, -1]
        seen = np.concatenate([seen, np.argmax(last, -1)[:, None].astype(seen.dtype)], axis=1)
    return seen


def test_transformers_generates_with_each_version_that_a_follower_brings(made, tmp_path):
    """While the run goes on, before and after its model has changed."""
    run, to = tmp_path / "run", tmp_path / "to"
    generate = shlex.join([ORACLE, str(HERE / "make_expected.py"), "generate"])
    follows = ["follow", run, "--to", to, "--format", "hf", "--keep", 100, "--exec", generate]
    more = settings_of(made / "llama-3.1", tmp_path)
    with started("local", "--steps", 1_000_000, *more) as local:
        try:
            while started("status", run).wait():
                time.sleep(1.0)
            with started(*follows) as follower:
                while len(files := sorted(to.glob("*/generated.npz"))) < 3:
                    assert follower.poll() is None
                    time.sleep(0.1)
                follower.terminate()
        finally:
            local.terminate()
    told = [np.load(file)["tokens"] for file in files]
    for file, found in zip(files, told, strict=True):
        np.testing.assert_array_equal(found, greedy(file.parent))
    assert (told[0] != told[-1]).any()


DENSE, ATTENTION = ("q", "o", "up", "down"), ("q", "o")
GATE_UP, OUT = "expert_gate_up", "expert_down"


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("llama-3.1", DENSE),
        ("gemma3-4b", DENSE),
        ("mixtral", ATTENTION),
        ("mixtral", ("v", GATE_UP, OUT)),
        ("qwen3-moe", (GATE_UP,)),
        ("gemma4-31b", ("q", "k", "v", "down")),
        ("gemma4-e2b", ("k", "o", "per_layer_input_gate", "per_layer_projection")),
        ("gemma4-26b", ("v", "gate", GATE_UP, OUT)),
        ("gemma4-whole", DENSE),
    ],
)
def test_an_exported_adapter_is_the_runs_model_in_peft(made, case, names, tmp_path):
    """Beside its base in peft, and merged in transformers alone: the run's global view."""
    theirs = {name: module for module, name in EXPERTS.items()}
    targets = [theirs.get(n, n if "per_layer" in n else f"{n}_proj") for n in names]
    lora = {"rank": 4, "alpha": 6, "targets": targets}
    more = [f"task.options.lora.{name}={json.dumps(value)}" for name, value in lora.items()]
    train(made / case, tmp_path, *more)
    base, run = made / case, tmp_path / "run"
    diloco("export", run, tmp_path / "adapter", "--format", "hf")
    diloco("export", run, tmp_path / "merged", "--format", "hf", "--merge")
    asked("logits", base, tmp_path / "adapter.npz", tmp_path / "adapter")
    asked("logits", tmp_path / "merged", tmp_path / "merged.npz")

    views = load(run)
    assert all(name.startswith("trained/") for name in views)
    found, seen = adapted_logits(base, lora, views)
    for name in ("adapter", "merged"):
        assert apart(found, np.load(tmp_path / f"{name}.npz")["logits"]) <= TOLERANCE
    config, frozen = loaded(base)
    assert apart(found, model.logits_of(config, frozen, seen)) > 1e-3  # it was trained


def adapted_logits(base, lora, views):
    """Logits of a base with adapters, by their leaves' names; and the tokens that it is given."""
    config, frozen = loaded(base)
    halves = {name.removeprefix("trained/"): jnp.asarray(leaf) for name, leaf in views.items()}
    variables = Variables(trained=tree.nested(halves), frozen=frozen)
    params, beside = with_adapters(read_lora(LoraOptions(**lora), config), variables, None)
    seen = tokens("any", config.vocab)
    return model.logits_of(config, params, seen, **beside._asdict()), seen


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        ("llama-3.1", ("q_proj", "v_proj", "down_proj")),
        ("qwen3-moe", ("q_proj", "experts.gate_up_proj", "experts.down_proj")),
        ("mixtral", ("experts.down_proj",)),
        ("gemma4-31b", ("q_proj", "v_proj", "up_proj")),
        ("gemma4-e2b", ("k_proj", "per_layer_projection")),
        ("gemma4-26b", ("k_proj", "experts.gate_up_proj", "experts.down_proj")),
        ("gemma4-whole", ("q_proj", "down_proj")),
    ],
)
def test_an_adapter_that_peft_wrote_is_read(made, case, targets, tmp_path):
    """With `target_parameters` for experts."""
    asked("adapter", made / case, tmp_path / "adapter", *targets)
    lora = {"rank": 4, "alpha": 6.0, "targets": list(targets)}
    task = tiny.task_of(tmp_path, made / case, lora=lora)
    found, seen = adapted_logits(made / case, lora, task.files.read(tmp_path / "adapter"))
    assert apart(found, np.load(tmp_path / "adapter" / "logits.npz")["logits"]) <= TOLERANCE
    config, base = loaded(made / case)
    assert apart(found, model.logits_of(config, base, seen)) > 1e-2


@pytest.mark.parametrize("case", ["qwen3-moe"])
def test_a_run_trains_experts_alone_on_two_learners(made, case, tmp_path):
    """All other tensors come back bit by bit, and transformers computes what was exported."""
    train(made / case, tmp_path, 'task.options.trained=["*/expert_*"]')
    diloco("export", tmp_path / "run", tmp_path / "out", "--format", "hf")
    config, params = loaded(tmp_path / "out")
    _, first = loaded(made / case)
    moved = tree.by_name(params)
    for name, leaf in tree.named_leaves(first):
        assert np.array_equal(leaf, moved[name]) != ("expert_" in name), name
    asked("logits", tmp_path / "out", tmp_path / "logits.npz")
    found = model.logits_of(config, params, tokens("any", config.vocab))
    assert apart(found, np.load(tmp_path / "logits.npz")["logits"]) <= TOLERANCE
