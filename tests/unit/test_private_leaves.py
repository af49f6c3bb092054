"""Private leaves of a task, and the encryption of the checkpoints that hold them."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.process.config import LearnerSection, SyncSection
from diloco.common.protocol.errors import CheckpointError, ConfigError, TaskError
from diloco.common.protocol.layout import TensorHint
from diloco.learner.task import Task, Variables
from diloco.learner.tensors import checkpoint_encryption as encryption
from diloco.learner.tensors.inner_step import make_inner_step
from diloco.learner.tensors.tree import division_of, task_layout
from diloco.models.chosen import with_private

KEY = bytes(range(32))


def task(private=("head",), *, apart=False):
    def init(key):
        trained = {"body": jax.random.normal(key, (8, 4)), "head": jax.random.normal(key, (4, 1))}
        return Variables(trained, {"base": jax.numpy.ones(4)}) if apart else trained

    def loss(params, batch, key):
        trained = params.trained if apart else params
        return ((batch @ trained["body"] @ trained["head"]) ** 2).mean(), {}

    plain = Task(
        init=init,
        loss=loss,
        batches=lambda learner, position: iter([np.ones((2, 8), np.float32)]),
        evaluate=lambda params: 0.0,
        tokens_per_batch=2,
        optimizer=optax.sgd(0.1),
    )
    return with_private(plain, private)


@pytest.mark.parametrize("apart", [False, True], ids=["one tree", "variables"])
def test_a_private_leaf_is_trained_and_in_no_fragment(apart):
    own = task(apart=apart)
    layout = task_layout(own, SyncSection(fragments=1))
    place = "trained/" if apart else ""
    assert [tensor.name for tensor in layout.tensors] == [f"{place}body"]
    assert f"{place}head" in {tensor.name for tensor in layout.constants}
    division = division_of(own, own.shapes)
    assert division.private
    params = own.init(jax.random.key(0))
    before = jax.device_get(params)
    state = own.optimizer.init(division.trained_of(params))
    batch = next(own.batches("a", 0))
    after, _, _ = make_inner_step(own)(params, state, batch, np.int32(0), np.uint32(0))
    moved = jax.tree.map(lambda one, other: not np.array_equal(one, other), before, after)
    assert moved == (
        Variables({"body": True, "head": True}, {"base": False})
        if apart
        else {"body": True, "head": True}
    )


def test_the_run_of_another_choice_has_another_layout():
    sync = SyncSection(fragments=1)
    assert task_layout(task(), sync).digest != task_layout(task(()), sync).digest


def test_other_leaves_of_a_learner_are_not_private():
    plain = task(())
    assert not division_of(plain, plain.shapes).private
    state = dataclasses.replace(plain, hint=lambda name, shape: TensorHint(kind="local"))
    assert not division_of(state, state.shapes).private


def test_a_pattern_that_names_nothing_is_refused():
    with pytest.raises(TaskError, match=r"'tail\*' names no parameter"):
        task(("tail*",))


def test_all_private_leaves_nothing_to_train_together():
    with pytest.raises(ConfigError, match="no floating-point parameter to train"):
        task_layout(task(("*",)), SyncSection(fragments=1))


def test_a_key_without_uploads_is_refused():
    with pytest.raises(ValueError, match="checkpoint_key encrypts what checkpoint_upload uploads"):
        LearnerSection(checkpoint_dir="here", checkpoint_key="key")


@pytest.mark.parametrize("text", ["", "12", "g" * 64, "0" * 66, "ü" * 64])
def test_a_file_that_is_no_key_is_named(tmp_path, text):
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"key' must hold 64 hexadecimal digits"):
        encryption.read_key(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        encryption.read_key(str(tmp_path / "none"))


def test_a_key_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY.hex() + "\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 0644: others can read it") as caught:
        encryption.read_key(str(path))
    assert "chmod 600" in caught.value.hint
    path.chmod(0o600)
    assert encryption.read_key(str(path)) == KEY


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(encryption, "CHUNK_BYTES", 7)


SMALL = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 14, 30])
@SMALL
def test_what_is_sealed_is_opened(size):
    data = bytes(range(size))
    sealed = bytes(encryption.seal(KEY, data, "a"))
    assert len(sealed) == encryption.sealed_bytes(size)
    assert encryption.opened(KEY, sealed, "a") == data
    assert encryption.seal(KEY, data, "a") != sealed


@given(size=st.integers(0, 200), where=st.integers(0, 1 << 30), flip=st.integers(1, 255))
def test_no_changed_byte_is_opened(size, where, flip):
    sealed = bytearray(bytes(encryption.seal(KEY, bytes(size), "a")))
    sealed[where % len(sealed)] ^= flip
    with pytest.raises(CheckpointError):
        encryption.opened(KEY, bytes(sealed), "a")


@SMALL
def test_no_chunk_is_left_out_moved_or_repeated():
    sealed = bytes(encryption.seal(KEY, bytes(range(21)), "a"))
    head, body = sealed[: len(encryption.MAGIC)], sealed[len(encryption.MAGIC) :]
    step = len(body) // 3
    first, second, third = (body[index * step : (index + 1) * step] for index in range(3))
    assert encryption.opened(KEY, head + first + second + third, "a") == bytes(range(21))
    for lie in (
        first + second,
        second + third,
        second + first + third,
        first + second + third + third,
        first + second + third[:-1],
        b"",
    ):
        with pytest.raises(CheckpointError, match="does not open it"):
            encryption.opened(KEY, head + lie, "a")


def test_another_key_another_name_or_no_key_opens_nothing():
    sealed = bytes(encryption.seal(KEY, b"weights", encryption.about("run", "a", 7, "")))
    for key, about, why in (
        (bytes(32), "run a 7 ", "does not open it"),
        (KEY, "run b 7 ", "does not open it"),
        (KEY, "run a 8 ", "does not open it"),
        (None, "run a 7 ", "is not set"),
    ):
        with pytest.raises(CheckpointError, match=why):
            encryption.opened(key, sealed, about)
    assert encryption.opened(KEY, sealed, "run a 7 ") == b"weights"
    assert encryption.opened(None, b"plain", "run a 7 ") == b"plain"
    with pytest.raises(CheckpointError, match="it is not encrypted"):
        encryption.opened(KEY, b"plain", "run a 7 ")
