"""The task of decoders that people have: its contract, its data, its first parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.common.protocol.errors import ConfigError, TaskError
from diloco.common.protocol.layout import make_layout
from diloco.learner.load_and_check_task import load_task
from diloco.learner.task import params_shapes
from diloco.learner.tensors import tree
from diloco.learner.tensors.send_and_adopt_kernels import vector_of
from diloco.models.decoders import model
from diloco.models.decoders.causal_lm import CausalLM
from diloco.models.decoders.config import parse_config
from diloco.models.decoders.sizes import SIZES, size_named
from diloco.models.decoders.task import loss_sums, matrices
from diloco.operate.create import _flatten, _folder
from tests.models import tiny
from tests.models.cases import CASES, LLAMA
from tests.models.tiny import write_tiny

BUILD = "diloco.models.decoders:build"
END = 3
# As the model cards count them; Gemma 4's text models as transformers does.
COUNTS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gemma-4-e2b": 4_628_569_379,
    "gemma-4-e4b": 7_463_013_418,
    "gemma-4-31b": 30_697_345_340,
    "gemma-4-26b-a4b": 25_233_141_790,
}


@pytest.fixture
def folders(tmp_path):
    """A tiny model's folder with tensors, and one of tokens; their paths."""
    write_tiny(tmp_path, ("train-0", "train-1", "held_out"), 2_000)
    return tmp_path


def loaded(folders, **options):
    options = {"batch": 4, "length": 16, "end": END, "eval_batches": 2} | options
    given = {"model": str(folders / "model"), "data": str(folders / "data")} | options
    return load_task(BUILD, steps=20, seed=0, options=given)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "muon", "dtype": "bfloat16", "accumulate": 2},
        {"shares": 4, "remat": False},
    ],
)
def test_it_keeps_the_contract(folders, options):
    task = loaded(folders, **options)
    batch = next(task.batches("a", 0))
    assert batch.shape == (4, 17)
    np.testing.assert_array_equal(next(task.rows("a", 0, 1, 3)), batch[1:3])


def test_the_parts_for_a_task_of_ones_own_are_those_of_the_shipped_one(folders):
    task, parts = loaded(folders), CausalLM.of(folders / "model")
    assert parts.files == task.files
    for name, leaf in tree.named_leaves(params_shapes(task)):
        shape = leaf.shape
        assert parts.partition(name, shape) == task.partition(name, shape)
        assert parts.hint(name, shape) == task.hint(name, shape)
        assert parts.matrices(name, shape) == matrices(name, shape)


@pytest.mark.parametrize(
    ("source", "word"),
    [({"model_type": "mamba"}, "the mapping: model_type is 'mamba'"), ("nowhere", "config.json")],
)
def test_parts_of_what_is_no_decoder_are_refused(source, word):
    with pytest.raises(ConfigError, match=word):
        CausalLM.of(source)


def test_random_parameters_predict_nothing(folders):
    task = loaded(folders)
    loss = task.evaluate(task.init(jax.random.key(0)))
    assert loss == pytest.approx(np.log(96), rel=0.1)


def test_a_document_does_not_predict_the_next_and_does_not_see_it():
    config = parse_config(LLAMA, source="")
    params = jax.jit(functools.partial(model.init_params, config))(jax.random.key(0))
    one, two = np.arange(4, 12), np.arange(40, 52)
    row = np.concatenate([one, [END], two])[None]

    @functools.partial(jax.jit, static_argnums=1)
    def loss_of(row, end):
        return loss_sums(config, params, row, compute=model.DEFAULT, end=end).mean()

    alone = loss_of(np.append(one, END)[None], None), loss_of(two[None], None)
    weights = [8, 11]
    assert loss_of(row, END) == pytest.approx(np.average(alone, weights=weights), rel=1e-5)
    assert loss_of(row, None) != pytest.approx(np.average(alone, weights=weights), rel=1e-3)


@pytest.mark.parametrize("size", COUNTS)
def test_published_sizes_have_their_parameters(size):
    assert tiny.parameter_count(size_named(size)) == COUNTS[size]


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_are_shaped_without_memory(size, tmp_path):
    config = size_named(size)
    shapes = jax.eval_shape(lambda key: model.init_params(config, key), jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert count == tiny.parameter_count(config)


def test_version_0_is_read_slice_by_slice(folders):
    task = loaded(folders)
    assert task.files is not None
    rows = task.files.read(folders / "model")
    layout = make_layout(
        tree.tensors_of(params_shapes(task)), fragments=5, block=128, hint=task.hint
    )
    whole = {name: jnp.asarray(np.asarray(leaf)) for name, leaf in rows.items()}
    for fragment in layout.fragments:
        wanted = {piece.tensor: whole[piece.tensor] for piece in fragment.pieces}
        np.testing.assert_array_equal(
            _flatten(layout, fragment.index, rows), vector_of(layout, fragment.index, wanted)
        )


def test_a_run_begins_with_the_folder_that_its_task_names(folders):
    assert _folder(loaded(folders), None) == folders / "model"
    assert _folder(loaded(folders), folders / "data") == folders / "data"
    assert _folder(loaded(folders, fresh=True), None) is None
    assert _folder(loaded(folders, model="qwen3-0.6b", length=8), None) is None


def test_a_folder_without_tensors_is_no_beginning(folders):
    for path in (folders / "model").glob("model*"):
        path.unlink()
    with pytest.raises(TaskError, match="no safetensors"):
        _folder(loaded(folders), None)


def test_a_task_that_reads_no_folder_refuses_one(tmp_path):
    task = load_task("diloco.models.bytes_lm:build", steps=20, seed=0, options={})
    with pytest.raises(ConfigError, match="is a folder"):
        _folder(task, tmp_path)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch": 0}, "batch"),
        ({"dtype": "float16"}, "dtype"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"remat": 1}, "remat"),
        ({"data": "nowhere"}, "nowhere"),
        ({"length": 5_000}, "no window"),
    ],
)
def test_options_of_other_kinds_are_refused(folders, options, word):
    with pytest.raises(TaskError, match=word):
        loaded(folders, **options)


@pytest.mark.parametrize(
    ("tokens", "word"),
    [
        (np.full(2_000, 96, np.uint16), "the model has 96"),
        (np.zeros((2, 1_000), np.uint16), "one axis"),
        (np.zeros(2_000, np.float32), "integers"),
        (np.zeros(0, np.uint16), "no window"),
    ],
)
def test_tokens_that_are_no_tokens_of_the_model_are_refused(folders, tokens, word):
    for name in ("train-0", "train-1"):
        np.save(folders / "data" / f"{name}.npy", tokens)
    with pytest.raises(TaskError, match=word):
        loaded(folders)


def test_a_token_file_that_is_cut_short_is_refused(folders):
    path = folders / "data" / "train-1.npy"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TaskError, match=r"train-1.npy.*cannot be read"):
        loaded(folders)


def test_every_matrix_of_layers_is_muons():
    for document in CASES.values():
        config = parse_config(document, source="")
        shapes = jax.eval_shape(lambda key, c=config: model.init_params(c, key), jax.random.key(0))
        apart = {name for name, leaf in tree.named_leaves(shapes) if matrices(name, leaf.shape)}
        vectors = {"scale", "router_scale", "router_gain"}
        assert apart == {
            name
            for name, _ in tree.named_leaves(shapes)
            if name.startswith("layers/")
            and not name.endswith(("norm", "_bias"))
            and name.rpartition("/")[2] not in vectors
        }
