"""Text with images beside transformers itself: `make test-models`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.learner.tensors import tree
from diloco.models.decoders import checkpoint, model
from diloco.models.decoders.config import read_config, read_document
from diloco.models.decoders.task import loss_sums, tokens_of
from diloco.models.decoders.tokens import TokenFolders
from diloco.models.decoders.vision import ImageOptions, soft_tokens, with_tower
from tests.models.test_models import ORACLE, TOLERANCE, apart, asked, assert_others_are, diloco
from tests.models.weights import IMAGES, PATCHES, SHOWN, pictured

pytestmark = pytest.mark.skipif(not ORACLE, reason="needs transformers: make test-models")
CASE = "gemma4-whole"
OPTIONS = ImageOptions(row=len(IMAGES) + 1, patches=PATCHES + 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    asked("checkpoints", folder, CASE)
    asked("images", folder / CASE)
    return folder / CASE


def loaded(folder):
    config = with_tower(read_config(folder), read_document(folder), "")
    rows = checkpoint.read_checkpoint(folder, config)
    return config, tree.nested({name: jnp.asarray(np.asarray(rows[name])) for name in rows})


def write_rows(config, folder, train=1):
    """Files of a processor's rows, the first of which is held out."""
    folder.mkdir()
    patch = round((config.tower.patch_width / 3) ** 0.5)
    for number in range(train + 1):
        row = pictured(patch, config.tower.side, config.image_text.image, number)
        np.savez(folder / f"{'train' if number else 'held_out'}-{number}.npz", **row)
    return folder


def read_row(config, folder, length):
    """The row of `pictured`, as a task reads it."""
    images = (OPTIONS, config)
    folders = TokenFolders(str(folder), length=length, vocab=config.vocab, images=images)
    return folders.held_out(1)[0]


def logits_of(config, params, batch, dtype):
    compute = model.Compute(dtype=dtype)
    images = soft_tokens(config, params, batch, compute)
    told = {"compute": compute, "images": images}
    return model.logits_of(config, params, tokens_of(batch.windows), **told)


def test_logits_loss_and_gradients_are_those_of_transformers(made, tmp_path):
    """Of the tower too, bounds and shifts included, and with tokens that attend both ways."""
    config, params = loaded(made)
    wanted = dict(np.load(made / "images.npz"))
    length = wanted["logits"].shape[1]
    batch = read_row(config, write_rows(config, tmp_path / "data"), length + 3)
    single = jax.jit(partial(logits_of, config, dtype="float32"))(params, batch)
    np.testing.assert_allclose(wanted["features"].reshape(-1)[::31], SHOWN, atol=1e-5)
    assert apart(single[:, :length], wanted["logits"]) <= TOLERANCE
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)

        @jax.jit
        @jax.value_and_grad
        def loss(params):
            compute = model.Compute(dtype="float64")
            return loss_sums(config, params, batch, compute=compute, end=None).mean()

        found, gradient = loss(params)
        assert apart(found, wanted["loss"]) <= TOLERANCE
        leaves = tree.by_name(gradient)
        named = dict(checkpoint.checkpoint_tensors(config, leaves, np.dtype(np.float64)))
    for foreign, found in named.items():
        assert apart(found, wanted[f"gradient/{foreign}"]) <= TOLERANCE, foreign
    assert {name for name in wanted if "vision" in name} <= {f"gradient/{name}" for name in named}


@pytest.mark.parametrize("frozen", [None, []])
def test_what_a_run_with_images_exports_is_its_model_in_transformers(made, frozen, tmp_path):
    """Of two learners, the tower frozen and trained; and what it says to an image."""
    config, first = loaded(made)
    options = {"model": f'"{made}"', "length": 64, "batch": 2, "learning_rate": 1e-2}
    options |= {"data": f'"{write_rows(config, tmp_path / "data", train=12)}"'}
    options |= {f"images.{name}": value for name, value in dict(OPTIONS).items()}
    options |= {} if frozen is None else {"frozen": frozen}
    given = [f"task.options.{name}={value}" for name, value in options.items()]
    given += ["sync.fragments=2", "sync.interval_steps=10", "sync.overlap_steps=2"]
    settings = [word for each in given for word in ("--set", each)]
    task = ("--task", "diloco.models.decoders:build", "--run-dir", tmp_path / "run", "--steps", 30)
    diloco("local", *task, "--cpu", "--learners", 2, "--kill", "none", *settings)
    out = tmp_path / "out"
    diloco("export", tmp_path / "run", out, "--format", "hf")
    asked("images", out)
    config, params = loaded(out)
    wanted = np.load(out / "images.npz")
    batch = read_row(config, tmp_path / "data", 127)
    logits = jax.jit(partial(logits_of, config, dtype="float32"))
    length = wanted["logits"].shape[1]
    assert apart(logits(params, batch)[:, :length], wanted["logits"]) <= 2 * TOLERANCE
    windows = batch.windows.copy()
    for place in range(length, wanted["generated"].shape[1]):
        told = logits(params, batch._replace(windows=windows))
        windows[0, place] = np.argmax(told[0, place - 1])
    found = windows[:, length : wanted["generated"].shape[1]]
    np.testing.assert_array_equal(found, wanted["generated"][:, length:])

    moved = {
        name
        for name, leaf in tree.by_name(first).items()
        if (np.asarray(leaf) != np.asarray(tree.by_name(params)[name])).any()
    }
    bounds = {name for name in tree.by_name(params) if name.endswith(("_min", "_max"))}
    assert "norm" in moved
    assert not moved & bounds
    assert ("tower/layers/q" in moved) == ("tower/projection" in moved) == (frozen is not None)
    assert_others_are(out, made) if frozen is None else None
