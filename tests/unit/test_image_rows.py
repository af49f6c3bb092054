"""Rows of text with images, and the vision tower that they are for; bad ones are refused."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w
from jax.sharding import PartitionSpec
from typer.testing import CliRunner

from diloco.common.protocol.errors import ConfigError, DataError, TaskError
from diloco.learner.tensors.tree import nested
from diloco.models.decoders.attention import make_attention
from diloco.models.decoders.config import parse_config
from diloco.models.decoders.image_rows import ImageRows
from diloco.models.decoders.model import Compute, init_params, logits_of
from diloco.models.decoders.soft_tokens import SoftTokens, in_place, marked, runs
from diloco.models.decoders.task import partition_of
from diloco.models.decoders.tensor_names_and_shapes import buffers_of, multiplied, table
from diloco.models.decoders.tokens import TokenFolders
from diloco.models.decoders.vision import ImageOptions, soft_tokens, with_tower
from diloco.program import app
from tests.models.cases import GEMMA4_WHOLE, LLAMA
from tests.models.weights import SHOWN, pictured, weight

TEXT = parse_config(GEMMA4_WHOLE, source="")
CONFIG = with_tower(TEXT, GEMMA4_WHOLE, "")
OPTIONS = ImageOptions(row=3, patches=32)
ROW = pictured(patch=4, side=2, image=90)
# The row's images have 24 and 16 patches: 6 and 4 tokens.
TOKENS = ROW["input_ids"][0]
LENGTH = len(TOKENS) + 2


def read(folder, **changes):
    given = {name: values for name, values in (ROW | changes).items() if values is not None}
    np.savez(folder / "train-0.npz", **given)
    rows = ImageRows([folder / "train-0.npz"], length=LENGTH, config=CONFIG, images=OPTIONS)
    return rows[0]


def test_a_row_is_what_a_processor_gives(tmp_path):
    """Tokens of images are told and not predicted; the rest is padded."""
    labels = np.where(np.arange(len(TOKENS)) < 4, -100, TOKENS)[None]
    row = read(tmp_path, labels=labels)
    wanted = np.where((TOKENS == 90) | (labels[0] == -100), ~TOKENS, TOKENS)
    np.testing.assert_array_equal(row.windows, [*wanted, ~0, ~0, ~0])
    assert row.patches.shape == (3, 32, 48)
    assert [(one >= 0).all(-1).sum() for one in row.positions] == [24, 16, 0]
    np.testing.assert_array_equal(row.patches[1, :16], ROW["pixel_values"][1, :16])
    padded = np.pad(TOKENS, (5, 0))[None]
    again = read(tmp_path, input_ids=padded, attention_mask=padded > 0, mm_token_type_ids=None)
    np.testing.assert_array_equal(again.windows, [*np.where(TOKENS == 90, ~90, TOKENS), ~0, ~0, ~0])


def test_rows_of_text_alone_mix_with_rows_that_have_images(tmp_path):
    for name in ("pictures", "text"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "text" / "train.npy", np.arange(80, dtype=np.uint16))
    read(tmp_path / "pictures")
    weights = {str(tmp_path / "pictures"): 0.5, str(tmp_path / "text"): 0.5}
    told = {"length": LENGTH, "vocab": CONFIG.vocab}
    rows = TokenFolders(weights, **told, images=(OPTIONS, CONFIG)).train(seed=0)
    shown = [int((one.positions >= 0).any()) for one in (rows[0], rows[1])]
    assert sorted(shown) == [0, 1]
    with pytest.raises(TaskError) as caught:
        TokenFolders(str(tmp_path / "pictures"), **told).train(seed=0)
    assert "images" in caught.value.hint


@pytest.mark.parametrize(
    ("side", "word"), [("train", "train-1.npy, which would not"), ("held_out", "no held_out*.npz")]
)
def test_a_folder_of_rows_with_images_has_both_sides_and_nothing_else(tmp_path, side, word):
    np.save(tmp_path / "train-1.npy", np.arange(80, dtype=np.uint16))
    read(tmp_path)
    folders = TokenFolders(
        str(tmp_path), length=LENGTH, vocab=CONFIG.vocab, images=(OPTIONS, CONFIG)
    )
    with pytest.raises(DataError) as caught:
        folders.train(seed=0) if side == "train" else folders.held_out(1)
    assert word in caught.value.message
    assert "npz" in caught.value.hint or "weights" in caught.value.hint


def test_rows_with_images_beside_text_are_refused_where_no_image_is_read(tmp_path):
    np.save(tmp_path / "train-1.npy", np.arange(80, dtype=np.uint16))
    read(tmp_path)
    with pytest.raises(TaskError) as caught:
        TokenFolders(str(tmp_path), length=LENGTH, vocab=CONFIG.vocab).train(seed=0)
    assert "train*.npz" in caught.value.message
    assert "images" in caught.value.hint


def moved(axis, by):
    places = ROW["image_position_ids"].copy()
    places[0, 0, axis] += by
    return places


def thin():
    """Three patches of height, which are no whole squares of two."""
    place = np.stack(np.meshgrid(np.arange(9), np.arange(3)), -1).reshape(1, 27, 2)
    return np.concatenate([place, place])


def large():
    """36 patches in each image."""
    place = np.stack(np.meshgrid(np.arange(6), np.arange(6)), -1).reshape(1, 36, 2)
    return {
        "pixel_values": np.full((2, 36, 48), 0.5),
        "image_position_ids": np.concatenate([place, place]),
    }


def swapped():
    return {name: ROW[name][::-1] for name in ("pixel_values", "image_position_ids")}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"pixel_values": None, "image_position_ids": None}, "10 tokens 90"),
        ({"image_position_ids": ROW["image_position_ids"][..., ::-1]}, "(0, 1) is too early"),
        ({"input_ids": np.pad(TOKENS, (1, 0))}, "begins or ends with token 0, the padding"),
        ({"input_ids": np.pad(TOKENS, (0, 2))}, "begins or ends with token 0, the padding"),
        (swapped(), "images of [4, 6] tokens, but runs of [6, 4]"),
        (large(), "an image of 36 patches, but images have 32 at most"),
        ({"pixel_values": ROW["pixel_values"] / 255}, "divided by 255 twice"),
        ({"pixel_values": 2 * ROW["pixel_values"] - 1}, "pixels from -1 to"),
        ({"pixel_values": ROW["pixel_values"].astype("U4")}, "<U4[2, 28, 48]"),
        ({"attention_mask": np.arange(len(TOKENS)) != 3}, "zeros between tokens"),
        ({"labels": np.append(TOKENS[1:], -100)}, "at place 0, where input_ids has"),
        ({"input_ids": np.append(TOKENS, 90)}, "11 tokens 90"),
        ({"pixel_values": ROW["pixel_values"][:1], "image_position_ids": moved(0, 0)[:1]}, "of 6"),
        ({"image_position_ids": None}, "only one"),
        ({"image_position_ids": moved(0, 1)}, "rectangle"),
        ({"image_position_ids": moved(1, 16)}, "rectangle"),
        ({"image_position_ids": moved(0, 1 << 40)}, "rectangle"),
        ({"image_position_ids": moved(1, -2)}, "rectangle"),
        ({"pixel_values": ROW["pixel_values"][:, :27], "image_position_ids": thin()}, "rectangle"),
        ({"image_position_ids": moved(0, 0) * 1.0}, "float64"),
        ({"pixel_values": ROW["pixel_values"][..., :47]}, "47"),
        ({"pixel_values": ROW["pixel_values"] * 255}, "pixels from"),
        ({"pixel_values": ROW["pixel_values"] * np.nan}, "nan"),
        ({"pixel_values": np.tile(ROW["pixel_values"], (2, 1, 1)),
          "image_position_ids": np.tile(moved(0, 0), (2, 1, 1))}, "4 images"),
        ({"input_ids": np.append(TOKENS, 92)}, "92, which stands for a sound"),
        ({"input_ids": np.append(TOKENS, 96)}, "96"),
        ({"input_ids": np.append(TOKENS, [1] * 4)}, "54 tokens"),
        ({"input_ids": TOKENS * 1.0}, "float64"),
        ({"input_ids": np.stack([TOKENS, TOKENS])}, "[2, 50]"),
        ({"input_ids": None}, "no input_ids"),
        ({"labels": TOKENS + 1}, "labels"),
        ({"labels": TOKENS[1:]}, "labels"),
        ({"input_features": np.zeros((3, 4))}, "input_features"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_one_is_refused_by_name(tmp_path, changes, word):
    with pytest.raises(TaskError) as caught:
        read(tmp_path, **changes)
    assert word in caught.value.message
    assert "train-0.npz" in caught.value.message
    assert caught.value.hint


def test_check_reads_rows_that_no_learner_would_reach_for_long(tmp_path):
    """Two of forty are bad: each is told by its name."""
    bad = {
        "train-07": {"pixel_values": ROW["pixel_values"] * np.nan},
        "train-31": {"pixel_values": ROW["pixel_values"][..., :47]},
    }
    for name in ("held_out", *(f"train-{number:02}" for number in range(40))):
        np.savez(tmp_path / f"{name}.npz", **ROW | bad.get(name, {}))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(GEMMA4_WHOLE))
    options = {"model": str(tmp_path / "model"), "data": str(tmp_path), "fresh": True}
    options |= {"length": LENGTH, "batch": 1, "images": dict(OPTIONS), "eval_batches": 1}
    document = {
        "run": {"name": "r", "steps": 100},
        "store": {"url": "unused"},
        "task": {"build": "diloco.models.decoders:build", "options": options},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(document))
    done = CliRunner().invoke(app, ["check", str(tmp_path / "run.toml"), "--steps", "2"])
    assert done.exit_code == 1, done.output
    assert "41 of 41 read, 2 of no use" in done.output
    told = [line for line in done.output.splitlines() if line.startswith("refused:")]
    assert ["train-07.npz" in told[0], "train-31.npz" in told[1]] == [True, True], told
    assert len(told) == 2


def test_a_dark_picture_is_none_that_was_divided_twice(tmp_path):
    """Of 8 bits, its pixels are 0 and 1, and divided once."""
    dark = (ROW["pixel_values"] > 0.9).astype(np.float32) / 255
    np.testing.assert_array_equal(read(tmp_path, pixel_values=dark).patches[1, :16], dark[1, :16])
    assert not read(tmp_path, pixel_values=0 * dark).patches.any()


def test_padding_that_labels_leave_untrained_may_end_a_row(tmp_path):
    labels = np.pad(TOKENS, (0, 2), constant_values=-100)
    row = read(tmp_path, input_ids=np.pad(TOKENS, (0, 2)), labels=labels, mm_token_type_ids=None)
    np.testing.assert_array_equal(row.windows, read(tmp_path).windows)


def test_images_side_by_side_are_one_run_of_tokens(tmp_path):
    """Both are put in their places, as in transformers."""
    beside = np.concatenate([TOKENS[TOKENS != 90], TOKENS[TOKENS == 90]])
    assert (read(tmp_path, input_ids=beside).positions >= 0).any(axis=(1, 2)).sum() == 2


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    read(tmp_path)
    whole = (tmp_path / "train-0.npz").read_bytes()
    (tmp_path / "train-0.npz").write_bytes(whole[:-100])
    rows = ImageRows([tmp_path / "train-0.npz"], length=9, config=CONFIG, images=OPTIONS)
    with pytest.raises(TaskError, match="cannot be read"):
        rows[0]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"pooling": "largest"}, "pooling"),
        ({"head_dim": 6}, "head_dim"),
        ({"patch_size": 0}, "patch_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_activation": "mish"}, "mish"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_parameters": {"factor": 2.0}}, "factor"),
        (None, "no vision_config"),
    ],
)
def test_a_tower_that_is_not_computed_is_refused_by_name(changes, word):
    vision = None if changes is None else GEMMA4_WHOLE["vision_config"] | changes
    with pytest.raises(ConfigError) as caught:
        with_tower(TEXT, GEMMA4_WHOLE | {"vision_config": vision}, "model")
    assert word in caught.value.message
    assert caught.value.hint


def test_a_towers_tensors_have_partitions_and_are_no_tokens_operations():
    more = table(CONFIG).keys() - table(TEXT).keys()
    assert all(name.startswith("tower/") for name in more)
    assert len(buffers_of(CONFIG)) == len(buffers_of(TEXT)) + 7 * 4 + 2
    assert multiplied(CONFIG) == multiplied(TEXT)

    def cut(name):
        return partition_of(CONFIG, None, name, table(CONFIG)[name].shape)

    text = partition_of(CONFIG, None, "layers/full/q", table(CONFIG)["layers/full/q"].shape)
    assert cut("tower/layers/q") == text
    assert cut("tower/layers/q_input_min") == cut("tower/layers/attn_norm") == PartitionSpec()
    assert cut("tower/positions") == PartitionSpec(None, None, "fsdp")


def test_an_images_tokens_attend_both_ways_within_the_window():
    """Uniform attention shows which tokens are seen."""
    own = dataclasses.replace(parse_config(LLAMA, source=""), sliding=(True,), window=3)
    length = 8
    blocks = jnp.asarray([[0, 1, 1, 1, 0, 2, 2, 0]])
    near = make_attention(own, jnp.ones((1, length), int), "plain", blocks)
    q = jnp.zeros((1, length, 1, length))
    seen = np.asarray(near(jnp.asarray(True), q, q, jnp.eye(length)[None, :, None])[0, :, 0]) > 0
    wanted = np.tril(np.ones((length, length), bool))
    wanted[1:4, 1:4] = wanted[5:7, 5:7] = True
    wanted &= np.subtract.outer(np.arange(length), np.arange(length)) < 3
    np.testing.assert_array_equal(seen, wanted)


def test_embeddings_take_the_places_of_their_tokens_in_order():
    """Of images with two and three tokens, of three embeddings each."""
    soft = SoftTokens(jnp.arange(6.0).reshape(1, 6, 1), jnp.asarray([[2, 3]]))
    marks = jnp.asarray([[0, 1, 1, 0, 1, 1, 1, 0]]) > 0
    found = in_place(soft, marks, jnp.full((1, 8, 1), -1.0))
    np.testing.assert_array_equal(found[0, :, 0], [-1, 0, 1, -1, 3, 4, 5, -1])
    np.testing.assert_array_equal(runs(marks)[0], [0, 1, 1, 0, 2, 2, 2, 0])


@pytest.mark.long
def test_an_image_token_of_a_row_of_text_is_what_it_is_without_images():
    """In a document that names it; in the second row, behind the tokens of an image."""
    params = init_params(TEXT, jax.random.key(0))
    tokens = jnp.asarray([[3, 90, 90, 5, 90, 7, 8, 9], [90, 90, 4, 5, 6, 90, 90, 9]])
    counts = jnp.asarray([[0, 0], [2, 0]])
    soft = SoftTokens(jax.random.normal(jax.random.key(1), (2, 8, TEXT.width)), counts)
    logits = jax.jit(partial(logits_of, TEXT, compute=Compute(remat=False)))
    plain, shown = logits(params, tokens), logits(params, tokens, images=soft)
    np.testing.assert_allclose(shown[0], plain[0], atol=1e-6)
    assert np.abs(shown[1, 0] - plain[1, 0]).max() > 1e-3
    np.testing.assert_array_equal(
        marked(TEXT.image_text, soft, tokens)[1], [True] * 2 + [False] * 6
    )


def tower_of(case):
    leaves = {}
    for name, entry in table(CONFIG).items():
        if name.startswith("tower/"):
            drawn = [weight(case, one, entry.checkpoint_shape) for one in entry.checkpoint_names()]
            each = [entry.from_checkpoint(values) for values in drawn]
            leaves[name] = np.stack(each) if entry.stacked else each[0]
    return nested(leaves)


def test_embeddings_are_those_of_transformers_in_any_order_of_patches(tmp_path):
    """And whatever stands in patches that are padding."""
    row = jax.tree.map(lambda one: one[None], read(tmp_path))
    order = np.random.default_rng(0).permutation(32)
    row = row._replace(patches=row.patches[:, :, order], positions=row.positions[:, :, order])
    row.patches[(row.positions < 0).any(-1)] = 0.7
    params = tower_of("gemma4-whole")
    soft = jax.jit(partial(soft_tokens, CONFIG, compute=Compute(remat=False)))(params, row)
    np.testing.assert_array_equal(soft.counts, [[6, 4, 0]])
    found = np.concatenate([soft.rows[0, :6], soft.rows[0, 8:12]])
    np.testing.assert_allclose(found.reshape(-1)[::31], SHOWN, atol=2e-5)
