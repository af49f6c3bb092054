"""Decoders of checkpoints that people have: held against what transformers computed of them."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco.common.protocol.errors import ConfigError
from diloco.learner.tensors import tree
from diloco.models.decoders import checkpoint, model
from diloco.models.decoders.causal_lm import CausalLM
from diloco.models.decoders.config import config_document, parse_config, read_config
from diloco.models.decoders.files import HuggingFace
from diloco.models.decoders.tensor_names_and_shapes import table
from tests.models import tiny
from tests.models.cases import CASES, GEMMA2, GEMMA3, GEMMA4, LLAMA, LLAMA3, MISTRAL, QWEN2, QWEN3
from tests.models.weights import ROWS, STRIDE, tokens, weight

EXPECTED = Path(__file__).parents[1] / "models" / "expected.npz"
# Of the largest magnitude.
TOLERANCE = 1e-5
# One of each family; the others compile for ten seconds each.
PLAINEST = ("llama-3.1", "qwen3", "gemma3")
PLAIN = model.Compute(remat=False)  # compiles faster


@functools.cache
def expected():
    with np.load(EXPECTED) as stored:
        return dict(stored)


def arrays_of(case, config):
    """A case's tensors by their names here."""
    found = {}
    for name, entry in table(config).items():
        each = [
            weight(case, foreign, entry.checkpoint_shape) for foreign in entry.checkpoint_names()
        ]
        found[name] = np.stack(list(map(entry.from_checkpoint, each))).reshape(entry.shape)
    return found


def params_of(config, arrays):
    like = jax.eval_shape(functools.partial(model.init_params, config), jax.random.key(0))
    return tree.from_names(like, {name: jnp.asarray(values) for name, values in arrays.items()})


@functools.partial(jax.jit, static_argnums=0)
def measured(config, params, seen):
    def loss(params):
        logits = CausalLM(HuggingFace(config, None, fresh=True), PLAIN).logits(params, seen)
        told = jax.nn.log_softmax(logits[0, :-1])
        loss = -jnp.take_along_axis(told, seen[0, 1:, None], 1).mean()
        if config.experts is not None:
            load = model.forward(config, params, seen, compute=PLAIN).load
            loss += config.experts.balance * load.loss()
        return loss, logits

    return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.parametrize(
    "case",
    [case if case in PLAINEST else pytest.param(case, marks=pytest.mark.long) for case in CASES],
)
def test_a_decoder_computes_what_transformers_does(case):
    config = parse_config(CASES[case], source=case)
    params = params_of(config, arrays_of(case, config))
    (loss, logits), gradient = measured(config, params, tokens(case, config.vocab))
    want = expected()
    wanted = want[f"{case}/logits"]
    assert np.abs(logits[0, ::ROWS] - wanted).max() <= TOLERANCE * np.abs(wanted).max()
    assert loss == pytest.approx(want[f"{case}/loss"], rel=TOLERANCE)
    samples = samples_of(config, gradient)
    apart = np.abs(np.concatenate(samples) - want[f"{case}/gradient"])
    largest = np.repeat(want[f"{case}/largest"], [len(each) for each in samples])
    # An expert that nothing is given to has no gradient.
    assert (apart / np.where(largest, largest, 1)).max() <= TOLERANCE


def samples_of(config, gradient):
    """Returns the samples of a gradient that the fixture has, in the order of the file's names."""
    tensors = checkpoint.checkpoint_tensors(config, tree.by_name(gradient), np.dtype(np.float32))
    return [values.reshape(-1)[::STRIDE] for _, values in sorted(tensors)]


def packed(config, params, rows, segments):
    return np.asarray(model.logits_of(config, params, jnp.asarray(rows), jnp.asarray(segments)))


@pytest.mark.parametrize(
    "case", ["llama-3.1", "gemma3", pytest.param("gemma4-e2b", marks=pytest.mark.long)]
)
def test_a_packed_document_sees_itself_alone(case):
    config = parse_config(CASES[case], source=case)
    params = params_of(config, arrays_of(case, config))
    seen = tokens(case, config.vocab)[:, :120]
    segments = np.repeat([[1, 2, 0]], [50, 60, 10], axis=1).astype(np.int32)
    together = packed(config, params, seen, segments)
    for start, stop in ((0, 50), (50, 110)):
        alone = packed(config, params, seen[:, start:stop], np.ones((1, stop - start), np.int32))
        np.testing.assert_allclose(together[:, start:stop], alone, atol=1e-4)


# --- Folders


def written(tmp_path, case="gemma3", **options):
    config = parse_config(CASES[case], source=case)
    folder = tmp_path / "model"
    checkpoint.write_checkpoint(folder, config, arrays_of(case, config), **options)
    return folder, config


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_read_back(tmp_path, case):
    folder, config = written(tmp_path, case, file_bytes=20_000)
    again, rows = tiny.open_folder(folder)
    assert again == config
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    for name, values in arrays_of(case, config).items():
        np.testing.assert_array_equal(np.asarray(rows[name]), values)
        np.testing.assert_array_equal(rows[name][1:3], values[1:3])


@pytest.mark.parametrize("case", CASES)
def test_an_export_of_the_same_model_may_be_the_beginning(tmp_path, case):
    config = parse_config(CASES[case], source=case)
    first = tmp_path / "first"
    HuggingFace(config, None, fresh=True).write(first, arrays_of(case, config), "float32")
    exported = HuggingFace(read_config(first), first, fresh=False)
    exported.write(tmp_path / "second", arrays_of(case, config), "bfloat16")
    for folder in (first, tmp_path / "second"):
        for files in (HuggingFace(config, None, fresh=True), exported):
            assert files.read(folder).keys() == table(config).keys()


@pytest.mark.parametrize(
    ("case", "change", "word"),
    [
        ("llama-3.1", {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}, "rope"),
        ("llama-3.1", {"hidden_act": "gelu"}, "activation"),
        ("llama-3.1", {"rms_norm_eps": 0.1}, "norm_eps"),
        ("gemma3", {"query_pre_attn_scalar": 7}, "query_scale"),
        ("gemma3", {"sliding_window": 3}, "window"),
        ("mixtral", {"num_experts_per_tok": 1}, "experts"),
        ("llama-3.1", {"residual_multiplier": 0.5}, "residual_multiplier"),
    ],
)
def test_a_folder_that_describes_another_function_is_refused(tmp_path, case, change, word):
    folder, config = written(tmp_path, case)
    document = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(document))
    message = refused(lambda: HuggingFace(config, None, fresh=True).read(folder))
    assert word in message.replace(str(folder), "")


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama-3.1", {"eos_token_id": [3, 4], "dtype": "bfloat16", "max_position_embeddings": 7}),
        ("mixtral", {"router_aux_loss_coef": 0.5}),
    ],
)
def test_a_folder_may_differ_in_what_changes_no_function(tmp_path, case, change):
    folder, config = written(tmp_path, case)
    document = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(document))
    assert HuggingFace(config, None, fresh=True).read(folder).keys() == table(config).keys()


def test_a_folder_of_tensors_alone_may_be_the_beginning(tmp_path):
    folder, config = written(tmp_path)
    (folder / "config.json").unlink()
    assert HuggingFace(config, None, fresh=True).read(folder).keys() == table(config).keys()


def test_a_scalar_of_scores_that_is_not_whole_survives_an_export(tmp_path):
    for number in range(40):
        document = GEMMA3 | {"query_pre_attn_scalar": 5.1 + number / 7}
        config = parse_config(document, source="")
        folder = tmp_path / str(number)
        arrays = arrays_of("gemma3", config)
        checkpoint.write_checkpoint(folder, config, arrays)
        HuggingFace(config, None, fresh=True).read(folder)


def test_keys_of_layers_that_take_others_are_left_out(tmp_path):
    """Published files have them, and transformers reads none."""
    folder, config = written(tmp_path, "gemma4-e2b")
    tensors = load_file(folder / "model.safetensors")
    unused = {f"model.layers.3.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")}
    assert not unused & tensors.keys()
    more = tensors | {name: np.zeros(3, np.float32) for name in unused}
    save_file(more, folder / "model.safetensors")
    assert checkpoint.read_checkpoint(folder, config).keys() == table(config).keys()


def test_a_file_of_mixed_dtypes_is_read(tmp_path):
    folder, config = written(tmp_path, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32) + 1 / 1024
    save_file(tensors, folder / "model.safetensors")
    rows = checkpoint.read_checkpoint(folder, config)
    np.testing.assert_array_equal(rows["norm"][:], tensors["model.norm.weight"])
    embed = arrays_of("gemma3", config)["embed"]
    np.testing.assert_allclose(rows["embed"][:], embed, rtol=2**-8)


def test_the_tokenizer_is_taken_along(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    folder, _ = written(tmp_path, beside=tmp_path / "from")
    assert (folder / "tokenizer.json").read_text() == "{}"


def refused(action):
    with pytest.raises(ConfigError) as caught:
        action()
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize(
    ("document", "key"),
    [
        (MISTRAL | {"attention_bias": True}, "attention_bias"),
        (QWEN3 | {"mlp_bias": True}, "mlp_bias"),
        (LLAMA | {"attention_dropout": 0.1}, "attention_dropout"),
        (LLAMA | {"residual_multiplier": 0.5}, "residual_multiplier"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"compression_config": {}}, "compression_config says that its tensors"),
        (LLAMA | {"hidden_act": "xielu"}, "hidden_act"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"rope_type": "yarn"}}, "yarn"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"attention_factor": 2.0}}, "attention_factor"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA | {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        (QWEN3 | {"use_sliding_window": "false"}, "use_sliding_window"),
        (
            LLAMA
            | {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
            },
            "rope_scaling",
        ),
        (GEMMA3 | {"_sliding_window_pattern": 3}, "_sliding_window_pattern"),
        (LLAMA | {"vocab_size": "many"}, "vocab_size"),
        (LLAMA | {"layer_types": ["full_attention"] * 3}, "layer_types"),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        (QWEN3 | {"model_type": "deepseek_v3"}, "deepseek_v3"),
        (QWEN2 | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        (GEMMA2 | {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3 | {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        (GEMMA4 | {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        (GEMMA4 | {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        (
            GEMMA4 | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
            "rope_parameters",
        ),
        (
            GEMMA4 | {"rope_parameters": {"full_attention": {"rope_theta": 10_000.0}}},
            "sliding_attention",
        ),
        (GEMMA4 | {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        (GEMMA4 | {"per_layer_config": {n: {"mlp": 8} for n in "25"}}, "per_layer_config"),
        (GEMMA4 | {"global_head_dim": 23}, "full_attention"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (GEMMA4 | {"rope_theta": 1000.0}, "rope_theta"),
        (
            GEMMA4 | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 90},
            "vocab_size_per_layer_input",
        ),
        (GEMMA4 | {"enable_moe_block": True, "num_experts": 4}, "top_k_experts"),
    ],
)
def test_a_key_that_is_not_honoured_is_refused_by_name(document, key):
    assert key in refused(lambda: parse_config(document, source="model"))


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    assert "config.json" in refused(lambda: read_config(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refused(lambda: read_config(tmp_path))


def test_a_missing_shard_is_refused(tmp_path):
    folder, config = written(tmp_path, file_bytes=20_000)
    name = sorted(folder.glob("model-*"))[1]
    name.unlink()
    assert name.name in refused(lambda: checkpoint.read_checkpoint(folder, config))


def test_a_shard_that_is_cut_short_is_refused(tmp_path):
    folder, config = written(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "model.safetensors" in refused(lambda: checkpoint.read_checkpoint(folder, config))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model.norm.weight": np.zeros(31, np.float32)}, "shape"),
        ({"model.norm.weight": np.zeros(32, np.int8)}, "I8, as in quantized"),
        ({"model.norm.weight": np.zeros(32, np.float64)}, "F64; float32"),
        ({"model.norm.weight": None}, "lacks"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros(3, np.float32)}, "lora_A"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path, change, word):
    folder, config = written(tmp_path)
    tensors = load_file(folder / "model.safetensors") | change
    kept = {name: values for name, values in tensors.items() if values is not None}
    save_file(kept, folder / "model.safetensors")
    assert word in refused(lambda: checkpoint.read_checkpoint(folder, config))


@pytest.mark.parametrize(
    "quantized",
    [
        {"qweight": np.zeros((4, 32), np.int32), "scales": np.ones((1, 32), np.float16)},  # GPTQ
        {"weight": np.zeros((512, 1), np.uint8), "weight.absmax": np.ones(16, np.float32)},  # NF4
        {"weight": np.zeros((32, 32), np.int8), "SCB": np.ones(32, np.float32)},  # 8 bits
    ],
)
def test_a_quantized_checkpoint_is_called_so(tmp_path, quantized):
    """Where its config.json does not say it."""
    folder, config = written(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    module = "model.layers.1.self_attn.q_proj."
    del tensors[f"{module}weight"]
    tensors |= {module + name: values for name, values in quantized.items()}
    save_file(tensors, folder / "model.safetensors")
    message = refused(lambda: checkpoint.read_checkpoint(folder, config))
    assert f"{module}{next(iter(quantized))} is" in message
    assert "as in quantized checkpoints" in message


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_what_is_no_number_is_refused_where_it_is_read(tmp_path, name, value):
    folder, config = written(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][7, 5] = value
    save_file(tensors, folder / "model.safetensors")
    rows = checkpoint.read_checkpoint(folder, config)

    def read():
        for values in rows.values():
            np.asarray(values)

    message = refused(read)
    assert f"{name} has 1 number(s)" in message
    assert str(value) in message


def test_a_tensor_of_two_files_is_refused(tmp_path):
    folder, config = written(tmp_path, file_bytes=20_000)
    one, other = sorted(folder.glob("*.safetensors"))[:2]
    name = next(iter(load_file(one)))
    save_file(load_file(other) | {name: load_file(one)[name]}, other)
    message = refused(lambda: checkpoint.read_checkpoint(folder, config))
    assert f"{name!r} is there twice" in message


def test_an_index_may_name_a_file_in_two_ways(tmp_path):
    folder, config = written(tmp_path, file_bytes=20_000)
    index = folder / checkpoint.INDEX
    document = json.loads(index.read_text())
    name, file = next(iter(document["weight_map"].items()))
    document["weight_map"][name] = f"./{file}"
    index.write_text(json.dumps(document))
    assert checkpoint.read_checkpoint(folder, config).keys() == table(config).keys()


@pytest.mark.parametrize("fits", [True, False])
def test_a_head_of_its_own_is_refused_where_the_embeddings_are_the_head(tmp_path, fits):
    """transformers computes with such a head, and ties it only where both are equal."""
    folder, config = written(tmp_path)
    tied = dataclasses.replace(config, tied=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1] += 0 if fits else 1
    save_file(tensors, folder / "model.safetensors")
    if fits:
        assert "head" not in checkpoint.read_checkpoint(folder, tied)
    else:
        message = refused(lambda: checkpoint.read_checkpoint(folder, tied))
        assert "lm_head.weight differs from model.embed_tokens.weight" in message


def test_a_single_file_beside_an_index_is_refused(tmp_path):
    folder, config = written(tmp_path, file_bytes=20_000)
    save_file({"model.norm.weight": np.zeros(32, np.float32)}, folder / "model.safetensors")
    message = refused(lambda: checkpoint.read_checkpoint(folder, config))
    assert "both model.safetensors and model.safetensors.index.json" in message


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "gemma4-31b"])
def test_a_window_that_no_layer_has_is_written_as_a_number(case):
    """transformers cannot load Gemma's files without one."""
    document = CASES[case] | {"layer_types": ["full_attention"] * CASES[case]["num_hidden_layers"]}
    config = parse_config(document, source="")
    assert config.window is None
    assert config_document(config, "float32")["sliding_window"] > 0


def test_nothing_half_written_is_left(tmp_path):
    config = parse_config(CASES["llama-3"], source="")
    arrays = arrays_of("llama-3", config)
    del arrays["layers/down"]
    with pytest.raises(KeyError):
        checkpoint.write_checkpoint(tmp_path / "model", config, arrays)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    config = parse_config(CASES["llama-3"], source="")
    message = refused(
        lambda: checkpoint.write_checkpoint(
            tmp_path / "file" / "model", config, arrays_of("llama-3", config)
        )
    )
    assert "file" in message


def test_what_is_written_is_plain_json(tmp_path):
    folder, _ = written(tmp_path, file_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {(folder / file).is_file() for file in index["weight_map"].values()} == {True}
