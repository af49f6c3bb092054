"""Image-and-text checkpoints: the text model is read, and what else a folder has is kept."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco.common.protocol.errors import ConfigError
from diloco.learner.tensors.tree import named_leaves
from diloco.models.decoders import checkpoint, model
from diloco.models.decoders.config import parse_config, read_config
from diloco.models.decoders.files import HuggingFace
from diloco.models.decoders.tensor_names_and_shapes import table
from diloco.models.decoders.vision import with_tower
from tests.models.cases import GEMMA4, GEMMA4_WHOLE

BFLOAT16 = checkpoint.DTYPES["bfloat16"]
OTHERS = {
    "model.vision_tower.std_bias": np.arange(24, dtype=np.float32),
    "model.vision_tower.encoder.layers.0.mlp.up_proj.input_max": np.float32([0.5]).reshape(()),
    "model.embed_vision.embedding_projection.weight": np.full((32, 24), 1 / 3, BFLOAT16),
    "model.audio_tower.output_proj.bias": np.arange(20, dtype=np.float16),
    "model.embed_audio.embedding_projection.weight": np.full((32, 20), 0.1, np.float32),
}


@pytest.fixture(scope="module")
def arrays():
    params = model.init_params(parse_config(GEMMA4_WHOLE, source=""), jax.random.key(3))
    return {name: np.asarray(leaf) for name, leaf in named_leaves(params)}


def make(folder, arrays, document=GEMMA4_WHOLE, others=OTHERS):
    """A checkpoint such as transformers writes; its path."""
    folder.mkdir()
    config = parse_config(GEMMA4_WHOLE, source="")
    tensors = checkpoint.checkpoint_tensors(config, arrays, np.dtype(np.float32))
    save_file(dict(tensors) | others, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def test_an_export_has_all_tensors_and_the_folders_configuration(tmp_path, arrays):
    source = make(tmp_path / "source", arrays)
    (source / "processor_config.json").write_text("{}")
    config = read_config(source)
    rows = checkpoint.read_checkpoint(source, config)
    assert rows.keys() == table(config).keys()
    out = tmp_path / "out"
    read = {name: np.asarray(values) for name, values in rows.items()}
    checkpoint.write_checkpoint(
        out, config, read, dtype="bfloat16", beside=source, file_bytes=20_000
    )
    files = [load_file(file) for file in out.glob("*.safetensors")]
    found = {name: values for file in files for name, values in file.items()}
    assert found.keys() == load_file(source / "model.safetensors").keys()
    for name, values in OTHERS.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    assert found["model.language_model.norm.weight"].dtype == BFLOAT16
    document = json.loads((out / "config.json").read_text())
    assert document["text_config"] == GEMMA4_WHOLE["text_config"] | {"dtype": "bfloat16"}
    for key in ("vision_config", "audio_config", "image_token_id", "model_type"):
        assert document[key] == GEMMA4_WHOLE[key]
    assert (out / "processor_config.json").exists()
    assert vars(read_config(out)) == vars(config)


def test_the_text_model_of_another_folder_is_read(tmp_path, arrays):
    """Of text alone, in whose names there is no module around it."""
    config = parse_config(GEMMA4_WHOLE, source="")
    alone = parse_config(GEMMA4_WHOLE["text_config"], source="")
    checkpoint.write_checkpoint(tmp_path / "alone", alone, arrays)
    rows = HuggingFace(config, None, fresh=True).read(tmp_path / "alone")
    np.testing.assert_array_equal(rows["layers/full/q"][:], arrays["layers/full/q"])


def test_an_export_of_the_same_checkpoint_may_be_the_beginning(tmp_path, arrays):
    source = make(tmp_path / "source", arrays)
    files = HuggingFace(read_config(source), source, fresh=False)
    files.write(tmp_path / "out", arrays, "float32")
    assert files.read(tmp_path / "out").keys() == arrays.keys()
    document = json.loads((source / "config.json").read_text())
    document["text_config"]["rms_norm_eps"] = 0.1
    (source / "config.json").write_text(json.dumps(document))
    assert "norm_eps" in refused(lambda: files.read(source))


def test_numbers_of_layers_are_read_as_transformers_pads_them():
    """As it writes those of ten layers and more."""
    kinds = ["sliding_attention", "full_attention"] * 6
    text = GEMMA4 | {"num_hidden_layers": 12, "layer_types": kinds}
    each = {f"{layer:02}": {"head_dim": 8} for layer in range(1, 12, 2)}
    config = parse_config(text | {"per_layer_config": each}, source="")
    assert config == parse_config(text | {"global_head_dim": 8}, source="")


def refused(action):
    with pytest.raises(ConfigError) as caught:
        action()
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config": {"model_type": "llama"}}, "llama"),
        ({"query_images_by": "sound"}, "query_images_by"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"text_config": GEMMA4_WHOLE["text_config"] | {"router_noise": 1}}, "router_noise"),
    ],
)
def test_a_configuration_that_is_not_honoured_is_refused_by_name(changed, word):
    assert word in refused(lambda: parse_config(GEMMA4_WHOLE | changed, source="model"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model.language_model.norm.weight": np.zeros(31, np.float32)}, "shape"),
        ({"model.norm.weight": np.zeros(32, np.float32)}, "twice"),
        ({"model.language_model.norm.weight": np.zeros(32, np.int8)}, "I8"),
        ({"model.language_model.norm.weight": None}, "model.norm.weight"),
        ({"model.speech_tower.bias": np.zeros(3, np.float32)}, "speech_tower"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path, arrays, change, word):
    folder = make(tmp_path / "source", arrays)
    tensors = load_file(folder / "model.safetensors") | change
    kept = {name: values for name, values in tensors.items() if values is not None}
    save_file(kept, folder / "model.safetensors")
    assert word in refused(lambda: checkpoint.read_checkpoint(folder, read_config(folder)))


def test_bounds_of_a_tower_may_be_infinite_and_no_other_tensor(tmp_path):
    """transformers' own first values of them."""
    config = with_tower(parse_config(GEMMA4_WHOLE, source=""), GEMMA4_WHOLE, "")
    arrays = {name: np.zeros(entry.shape, np.float32) for name, entry in table(config).items()}
    unbounded = {name for name in arrays if name.endswith("_max")}
    arrays |= {name: arrays[name] + np.inf for name in unbounded}
    file = tmp_path / "model.safetensors"
    save_file(dict(checkpoint.checkpoint_tensors(config, arrays, BFLOAT16)), file)
    rows = checkpoint.read_checkpoint(tmp_path, config)
    assert unbounded
    assert all(np.isinf(rows[name][:]).all() for name in unbounded)
    tensors = load_file(file)
    tensors["model.vision_tower.std_bias"][:] = np.inf
    save_file(tensors, file)
    assert "std_bias" in refused(lambda: np.asarray(rows["tower/std_bias"]))


def test_an_export_without_a_tower_is_refused_and_leaves_nothing(tmp_path, arrays):
    config = parse_config(GEMMA4_WHOLE, source="")
    part = {name: one for name, one in OTHERS.items() if "audio_tower" not in name}
    source = make(tmp_path / "source", arrays, others=part)

    def write(beside):
        checkpoint.write_checkpoint(tmp_path / "out", config, arrays, beside=beside)

    assert "model.audio_tower." in refused(lambda: write(source))
    assert "model.audio_tower." in refused(lambda: HuggingFace(config, source, fresh=False).first)
    (source / "model.safetensors").unlink()
    assert "source" in refused(lambda: write(source))
    assert list(tmp_path.iterdir()) == [source]
