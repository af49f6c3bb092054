"""Adapters in the task of decoders: what they compute, what travels, the folders they become."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco.common.protocol.errors import ConfigError, IntegrityError, TaskError
from diloco.common.protocol.frozen import Frozen, store_frozen
from diloco.learner.load_and_check_task import load_task
from diloco.learner.task import Variables
from diloco.learner.tensors import tree
from diloco.learner.tensors.tree import loaded_frozen, named_leaves
from diloco.models.decoders import checkpoint, model
from diloco.models.decoders.config import parse_config
from diloco.models.decoders.lora import LoraOptions, init_adapters, read_lora, with_adapters
from diloco.models.decoders.peft_config import check_adapter_config
from tests.models import tiny
from tests.models.cases import CASES, GEMMA3, LLAMA, QWEN3_MOE, WHOLE
from tests.models.weights import pictured

BUILD = "diloco.models.decoders:build"
LORA = {"rank": 4, "alpha": 6.0}


@pytest.fixture
def folders(tmp_path):
    return written(tmp_path, LLAMA)


def written(tmp_path, document):
    """A tiny model's folder with tensors, and one of tokens."""
    config = parse_config(document, source="")
    params = jax.jit(lambda key: model.init_params(config, key))(jax.random.key(3))
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(params)}
    checkpoint.write_checkpoint(tmp_path / "model", config, arrays, file_bytes=20_000)
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    for name in ("train", "held_out"):
        np.save(tmp_path / "data" / f"{name}.npy", rng.integers(96, size=2_000).astype(np.uint16))
    return tmp_path


def loaded(folders, lora=LORA, **options):
    given = {"model": str(folders / "model"), "data": str(folders / "data"), "lora": lora}
    given |= {"batch": 2, "length": 16, "eval_batches": 1} | options
    return load_task(BUILD, steps=20, seed=0, options=given)


def drawn(like):
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), like)


def variables_of(task, key=0):
    """Of the task, with adapters that do something, and the base that it loads."""
    trained = drawn(jax.eval_shape(task.init, jax.random.key(key)).trained)
    if task.load_frozen is None:
        base = jax.jit(task.init)(jax.random.key(key)).frozen
    else:
        base = jax.tree.map(np.asarray, task.load_frozen())
    return Variables(trained=trained, frozen=jax.tree.map(jnp.asarray, base))


def leaves_of(variables):
    return {name: np.asarray(leaf) for name, leaf in tree.by_name(variables).items()}


def logits_of(config, variables, tokens, lora=LORA):
    def logits(variables):
        params, beside = with_adapters(read_lora(LoraOptions(**lora), config), variables, None)
        return model.logits_of(config, params, tokens, **beside._asdict())

    return jax.jit(logits)(variables)


def plain_logits(config, params, tokens):
    return jax.jit(lambda params: model.logits_of(config, params, tokens))(params)


TOKENS = np.arange(4, 36, dtype=np.int32).reshape(2, 16)


@pytest.mark.parametrize(
    ("document", "targets"),
    [
        (LLAMA, None),
        pytest.param(GEMMA3, ["q_proj", "down_proj"], marks=pytest.mark.long),
    ],
)
def test_adapters_compute_what_the_merged_model_does(document, targets):
    config = parse_config(document, source="")
    given = LORA if targets is None else LORA | {"targets": targets}
    lora = read_lora(LoraOptions(**given), config)
    trained = drawn(jax.eval_shape(lambda: init_adapters(config, lora, jax.random.key(1))))
    base = jax.jit(lambda key: model.init_params(config, key))(jax.random.key(0))
    found = logits_of(config, Variables(trained=trained, frozen=base), TOKENS, given)
    merged = dict(base["layers"])
    for name in lora.targets:
        halves = trained["layers"][name]
        merged[name] = merged[name] + 1.5 * halves["a"] @ halves["b"]
    wanted = plain_logits(config, base | {"layers": merged}, TOKENS)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert np.abs(found - plain_logits(config, base, TOKENS)).max() > 0.1


def test_version_0_is_the_base(folders):
    task = loaded(folders)
    first = jax.jit(task.init)(jax.random.key(0))
    base = jax.tree.map(np.asarray, task.load_frozen())
    config, rows = tiny.open_folder(folders / "model")
    for name, leaf in tree.by_name(base).items():
        np.testing.assert_array_equal(leaf, np.asarray(rows[name]))
    given = Variables(trained=first.trained, frozen=base)
    np.testing.assert_allclose(
        logits_of(config, given, TOKENS), plain_logits(config, base, TOKENS), rtol=0, atol=0
    )


def test_only_adapters_travel(folders):
    task = loaded(folders)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    marks = tree.division_of(task, shapes)
    synced = {
        name for (name, _), is_it in zip(named_leaves(shapes), marks.synced, strict=True) if is_it
    }
    assert synced == {name for name, _ in named_leaves(shapes) if name.startswith("trained/")}
    assert len(synced) == 14


@pytest.mark.long
def test_a_base_in_the_dtype_of_products_computes_the_same(folders):
    task = loaded(folders, dtype="bfloat16")
    held = variables_of(task)
    assert held.frozen["layers"]["q"].dtype == "bfloat16"
    assert held.frozen["layers"]["attn_norm"].dtype == "float32"
    wide = held._replace(frozen=jax.tree.map(np.asarray, loaded(folders).load_frozen()))
    assert task.evaluate(held) == task.evaluate(wide)


def test_a_base_that_is_not_the_runs_is_refused(folders):
    task = loaded(folders)
    objects = {}
    leaves = loaded_frozen(task)
    name = store_frozen("r", objects.__setitem__, leaves, set(leaves))
    held = Frozen("r", objects.__getitem__, name)
    assert len(objects) == 1
    for leaf in leaves:
        held.check(leaf, leaves[leaf])
    config, rows = tiny.open_folder(folders / "model")
    arrays = {leaf: np.array(values) for leaf, values in rows.items()}
    arrays["layers/up"][2, 3, 5] += 1
    for path in (folders / "model").iterdir():
        path.unlink()
    checkpoint.write_checkpoint(folders / "model", config, arrays)
    others = loaded_frozen(loaded(folders))
    held.check("frozen/layers/q", others["frozen/layers/q"])
    with pytest.raises(IntegrityError, match="layers/up"):
        held.check("frozen/layers/up", others["frozen/layers/up"])


def test_parts_of_the_base_are_read_as_slices(folders):
    for leaf in loaded_frozen(loaded(folders)).values():
        whole = np.asarray(leaf)
        assert (whole.shape, whole.dtype) == (leaf.shape, leaf.dtype)
        index = tuple(slice(size // 3, size // 3 + 2) for size in leaf.shape)
        np.testing.assert_array_equal(leaf[index], whole[index])
        np.testing.assert_array_equal(leaf[1], whole[1])


def test_an_adapter_is_written_and_read(folders):
    task = loaded(folders)
    variables = variables_of(task)
    trained = {n: leaf for n, leaf in leaves_of(variables).items() if n.startswith("trained/")}
    task.files.write(folders / "out", trained, "float32")
    found = task.files.read(folders / "out")
    assert set(found) == set(trained)
    for name, leaf in trained.items():
        np.testing.assert_array_equal(found[name], leaf)
    document = json.loads((folders / "out" / "adapter_config.json").read_text())
    assert document["base_model_name_or_path"] == str(folders / "model")
    with pytest.raises(ConfigError, match="rank"):
        loaded(folders, {"rank": 2}).files.read(folders / "out")
    with pytest.raises(ConfigError, match="gate_proj"):
        loaded(folders, LORA | {"targets": ["q_proj"]}).files.read(folders / "out")


# What `LoraConfig(target_modules=["q_proj"]).save_pretrained` of peft 0.21.2 writes, and its field
# that is not written.
PEFT_DEFAULTS = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": False,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "runtime_config": {"ephemeral_gpu_offload": False},
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
PEFT_LORA = {"rank": 8, "alpha": 8.0, "targets": ["q_proj"]}


def check_document(tmp_path, document):
    config = parse_config(LLAMA, source="")
    (tmp_path / "adapter_config.json").write_text(json.dumps(document))
    check_adapter_config(tmp_path, read_lora(LoraOptions(**PEFT_LORA), config))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "default"},
        {"init_lora_weights": False},
        {"base_model_name_or_path": "some/base", "revision": "main", "task_type": "CAUSAL_LM"},
        {"inference_mode": True, "peft_version": "0.9", "lora_dropout": 0.1},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM"}, "runtime_config": None},
        {"merge_weights": False, "modules_to_save": [], "rank_pattern": None},
    ],
)
def test_keys_without_effect_on_an_adapter_are_accepted(tmp_path, change):
    check_document(tmp_path, PEFT_DEFAULTS | change)


def test_keys_that_an_adapter_leaves_out_have_the_defaults_of_peft(tmp_path):
    check_document(tmp_path, {})
    config = parse_config(LLAMA, source="")
    with pytest.raises(ConfigError, match="lora_alpha=8"):
        check_adapter_config(tmp_path, read_lora(LoraOptions(rank=8, alpha=16.0), config))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 4),
        ("lora_alpha", 16),
        ("bias", "lora_only"),
        ("peft_type", "ADALORA"),
        ("use_rslora", True),
        ("use_dora", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("lora_bias", True),
        ("alpha_pattern", {"q_proj": 64}),
        ("rank_pattern", {"q_proj": 2}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("megatron_config", {"tensor_model_parallel_size": 2}),
        ("trainable_token_indices", [5]),
        ("exclude_modules", ["k_proj"]),
        ("layers_to_transform", [0]),
        ("layers_pattern", "layers"),
        ("fan_in_fan_out", True),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1e-4}),
        ("velora_config", {"scale": 1.0}),
        ("monteclora_config", {"num_samples": 8}),
        ("modules_to_save", ["lm_head"]),
        ("ensure_weight_tying", True),
        ("a_key_of_a_later_version", 0),
    ],
)
def test_a_key_of_an_adapter_that_is_not_honoured_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(ConfigError) as caught:
        check_document(tmp_path, PEFT_DEFAULTS | {key: value})
    assert f"{key}={value!r}" in caught.value.message
    assert caught.value.hint


def test_hyperparameters_that_are_no_json_object_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="JSON object"):
        check_document(tmp_path, ["LORA"])


def test_an_adapter_of_another_function_is_refused_when_its_folder_is_read(folders):
    task = loaded(folders)
    task.files.write(folders / "out", leaves_of(variables_of(task)), "float32")
    path = folders / "out" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alpha_pattern": {"q_proj": 64}}))
    with pytest.raises(ConfigError, match="alpha_pattern"):
        task.files.read(folders / "out")


@pytest.mark.parametrize(
    ("case", "targets"),
    [(LLAMA, ["q_proj"]), (QWEN3_MOE, ["experts.gate_up_proj"])],
)
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_tensors_of_another_shape_or_dtype_are_refused_by_name(tmp_path, case, targets, half):
    folders = written(tmp_path, case | {"num_hidden_layers": 1})
    task = loaded(folders, LORA | {"targets": targets})
    task.files.write(folders / "out", leaves_of(variables_of(task)), "float32")
    path = folders / "out" / "adapter_model.safetensors"
    tensors = load_file(path)
    [name] = [each for each in tensors if half in each]
    shape = list(tensors[name].shape)
    axis = 0 if half == "lora_A" else 1
    twice = np.concatenate([tensors[name]] * 2, axis)
    save_file(tensors | {name: twice}, path)
    with pytest.raises(ConfigError) as caught:
        task.files.read(folders / "out")
    assert f"{name} of shape {list(twice.shape)}" in caught.value.message
    assert str(shape) in caught.value.message
    assert caught.value.hint
    save_file(tensors | {name: tensors[name].astype(np.int8)}, path)
    with pytest.raises(ConfigError, match=f"{name} as I8"):
        task.files.read(folders / "out")


def test_what_is_merged_is_a_checkpoint(folders):
    task = loaded(folders)
    variables = variables_of(task)
    task.files.write_merged(folders / "out", leaves_of(variables) | loaded_frozen(task), "float32")
    config, rows = tiny.open_folder(folders / "out")
    params = tree.from_names(variables.frozen, {n: np.asarray(leaf) for n, leaf in rows.items()})
    found, wanted = plain_logits(config, params, TOKENS), logits_of(config, variables, TOKENS)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_adapters_of_experts_travel_and_are_merged(tmp_path):
    """Gate and up are one matrix of each expert, as in peft."""
    folders = written(tmp_path, QWEN3_MOE | {"num_hidden_layers": 1})
    given = LORA | {"targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
    task = loaded(folders, given)
    variables = variables_of(task)
    assert variables.trained["layers"]["expert_gate_up"]["b"].shape == (1, 6, 4, 48)
    assert tuple(task.partition("layers/expert_down/a", ())) == (None, "expert", "tensor")
    task.files.write(folders / "out", leaves_of(variables), "float32")
    for name, leaf in task.files.read(folders / "out").items():
        np.testing.assert_array_equal(leaf, leaves_of(variables)[name])
    document = json.loads((folders / "out" / "adapter_config.json").read_text())
    assert document["target_modules"] == ["q_proj"]
    assert document["target_parameters"] == [f"mlp.{name}" for name in given["targets"][1:]]

    task.files.write_merged(folders / "merged", leaves_of(variables), "float32")
    config, rows = tiny.open_folder(folders / "merged")
    params = tree.from_names(variables.frozen, {n: np.asarray(leaf) for n, leaf in rows.items()})
    found, wanted = (
        plain_logits(config, params, TOKENS),
        logits_of(config, variables, TOKENS, given),
    )
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    base = plain_logits(config, variables.frozen, TOKENS)
    assert np.abs(wanted - base).max() > 0.01 * np.abs(base).max()
    with pytest.raises(TaskError, match="down_proj have none"):
        loaded(folders, {"rank": 4, "dropout": 0.1, "targets": ["experts.down_proj"]})


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "targets", "leaves"),
    [
        ("gemma4-31b", None, 2 * (7 + 6)),
        pytest.param("gemma4-e2b", None, 2 * (2 * 9 + 2 * 7), marks=pytest.mark.long),
        pytest.param(
            "gemma4-26b",
            ["v_proj", "o_proj", *EXPERTS],
            2 * (1 + 2 + 2 * 2),
            marks=pytest.mark.long,
        ),
    ],
)
def test_each_group_of_unlike_layers_has_its_adapters(tmp_path, case, targets, leaves):
    """Full layers have no matrix for values, and shared ones none for keys."""
    folders = written(tmp_path, CASES[case])
    given = LORA if targets is None else LORA | {"targets": targets}
    task = loaded(folders, given)
    variables = variables_of(task)
    trained = {n: leaf for n, leaf in leaves_of(variables).items() if n.startswith("trained/")}
    assert len(trained) == leaves
    for name, leaf in trained.items():
        cuts = task.partition(name.removeprefix("trained/"), leaf.shape)
        assert len(cuts) <= leaf.ndim
    task.files.write(folders / "out", trained, "float32")
    found = task.files.read(folders / "out")
    assert set(found) == set(trained)
    for name, leaf in trained.items():
        np.testing.assert_array_equal(found[name], leaf)

    task.files.write_merged(folders / "merged", leaves_of(variables), "float32")
    config, rows = tiny.open_folder(folders / "merged")
    params = tree.from_names(variables.frozen, {n: np.asarray(leaf) for n, leaf in rows.items()})
    lora = read_lora(LoraOptions(**given), config)
    found = logits_in_float64(config, params, None)
    wanted = logits_in_float64(config, variables, lora)
    # The merged tensors are rounded to float32: without that, the difference is 0.
    assert np.abs(found - wanted).max() < 3e-5 * np.abs(wanted).max()
    base = logits_in_float64(config, variables.frozen, None)
    assert np.abs(wanted - base).max() > 0.01 * np.abs(base).max()


def logits_in_float64(config, variables, lora):
    with jax.enable_x64(True):

        @jax.jit
        def logits(variables):
            params, beside = with_adapters(lora, variables, None)
            told = {"compute": model.Compute(dtype="float64"), **beside._asdict()}
            return model.logits_of(config, params, TOKENS, **told)

        return np.asarray(
            logits(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables))
        )


@pytest.mark.long
def test_dropout_in_unlike_layers_is_of_each_layer(tmp_path):
    folders = written(tmp_path, CASES["gemma4-31b"])
    task = loaded(folders, LORA | {"dropout": 0.5, "targets": ["q_proj"]})
    variables, batch = variables_of(task), next(task.batches("a", 0))

    @jax.jit
    def loss(number):
        return task.loss(variables, batch, jax.random.key(number))[0]

    assert loss(1) == loss(1) != loss(2)
    assert task.evaluate(variables) == loaded(folders, LORA | {"targets": ["q_proj"]}).evaluate(
        variables
    )


def test_dropout_follows_from_the_key(folders):
    task = loaded(folders, LORA | {"dropout": 0.5})
    variables, batch = variables_of(task), next(task.batches("a", 0))

    @jax.jit
    def loss(number):
        return task.loss(variables, batch, jax.random.key(number))[0]

    assert loss(1) == loss(1) != loss(2)
    assert task.evaluate(variables) == loaded(folders).evaluate(variables)


def test_every_half_is_cut_as_its_matrix(folders):
    task = loaded(folders)
    for name, leaf in named_leaves(jax.eval_shape(task.init, jax.random.key(0))):
        cuts = tuple(task.partition(name.removeprefix("trained/"), leaf.shape))
        if name == "trained/layers/o/a":
            assert cuts == (None, "tensor")
        if name == "trained/layers/o/b":
            assert cuts == (None, None, "fsdp")
        if name == "frozen/layers/o":
            assert cuts == (None, "tensor", "fsdp")


def test_an_adapter_of_random_parameters_has_no_folder_to_name(folders):
    task = loaded(folders, fresh=True)
    assert task.load_frozen is None
    leaves = leaves_of(variables_of(task))
    with pytest.raises(ConfigError, match="--merge"):
        task.files.write(folders / "out", leaves, "float32")
    task.files.write_merged(folders / "out", leaves, "float32")
    assert checkpoint.has_weights(folders / "out")


@pytest.mark.parametrize(
    ("lora", "word"),
    [
        ({}, "lora.rank"),
        ({"rank": 0}, "lora.rank"),
        ({"rank": 4, "alpha": 0}, "lora.alpha"),
        ({"rank": 4, "dropout": 1.0}, "lora.dropout"),
        ({"rank": 4, "targets": ["q"]}, "q_proj"),
        ({"rank": 4, "targets": []}, "lora.targets"),
        ({"rank": 4, "r": 4}, "unknown key 'lora.r'"),
        (16, "'lora' must be a table"),
    ],
)
def test_options_of_other_kinds_are_refused(folders, lora, word):
    with pytest.raises(TaskError, match=word):
        loaded(folders, lora)


def test_all_matrices_of_every_decoder_have_names():
    for document in CASES.values():
        config = parse_config(document, source="")
        beside = config.experts is None or config.experts.beside
        count = (7 if beside else 4) + (2 if config.fed_width else 0)
        assert len(read_lora(LoraOptions(**LORA), config).targets) == count


@pytest.mark.long
def test_adapters_are_trained_beside_a_frozen_vision_tower(tmp_path):
    for name in ("model", "rows"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(WHOLE["gemma4-whole"]))
    rows = {name: pictured(4, 2, 90, number) for number, name in enumerate(("train", "held_out"))}
    for name, row in rows.items():
        np.savez(tmp_path / "rows" / f"{name}-0.npz", **row)
    images = {"row": 2, "patches": 28}
    options = {"data": str(tmp_path / "rows"), "images": images, "length": 64, "batch": 1}
    task = loaded(tmp_path, LORA | {"targets": ["q_proj"]}, fresh=True, **options)
    variables, batch = variables_of(task), next(task.batches("a", 0))
    assert set(variables.frozen) >= {"tower", "layers"}
    assert list(variables.trained) == ["layers"]

    @jax.jit
    def gradient(trained, batch):
        given = variables._replace(trained=trained)
        return jax.grad(lambda one: task.loss(given._replace(trained=one), batch, None)[0])(trained)

    found = gradient(variables.trained, batch)
    other = gradient(variables.trained, batch._replace(patches=batch.patches * 0.5))
    for name, leaf in tree.by_name(found).items():
        assert np.abs(leaf).max() > 0, name
        assert not np.array_equal(leaf, tree.by_name(other)[name])  # the images are seen
