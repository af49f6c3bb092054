"""Folders of tokens as a task reads them: checked by their manifest, mixed, shared, and never whole."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_lab import checked, command, make_texts, make_tokenizer, prepared

from diloco.common.protocol.errors import DataError, TaskError
from diloco.learner.load_and_check_task import build_task, load_task
from diloco.learner.select_examples import GrainData
from diloco.models.data.weighted_sources import WeightedSources
from diloco.models.decoders.token_windows import TokenWindows
from diloco.models.decoders.tokens import TokenFolders
from tests.models.cases import LLAMA

VOCAB = 1 << 16


def numbered(folder, first, rows, length=4):
    """A folder whose row i begins with token first + i, as files that nobody prepared."""
    folder.mkdir()
    tokens = np.repeat(np.arange(first, first + rows + 1, dtype=np.uint16), length)
    half = (rows // 2) * length + 1
    np.save(folder / "train-0.npy", tokens[:half])
    np.save(folder / "train-1.npy", tokens[half - 1 : rows * length + 1])
    np.save(folder / "held_out.npy", tokens[: rows * length + 1])
    return str(folder)


# Mixtures


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 1.0)), min_size=1, max_size=5),
    st.integers(0, 5),
)
def test_an_epoch_of_a_mixture_has_each_row_once_at_most(parts, epoch):
    lengths, weights = zip(*parts, strict=True)
    try:
        mixture = WeightedSources(lengths, weights)
    except ValueError:
        return
    size = len(mixture)
    found = [mixture[index] for index in range(epoch * size, (epoch + 1) * size)]
    assert len(set(found)) == size == sum(mixture.parts)
    for source, (length, weight) in enumerate(parts):
        numbers = [number for one, number in found if one == source]
        assert len(numbers) == mixture.parts[source]
        assert all(0 <= number < length for number in numbers)
        assert len(numbers) <= min(n / w for n, w in parts) * weight + 1e-6
    # One of them is whole.
    assert any(part == length for part, length in zip(mixture.parts, lengths, strict=True))


def test_epochs_of_a_mixture_go_through_each_source_before_a_row_comes_again():
    mixture = WeightedSources([100, 30], [0.5, 0.5])
    assert mixture.parts == (30, 30)
    found = [mixture[index] for index in range(10 * len(mixture))]
    first = [number for source, number in found if source == 0]
    assert first[:100] == list(range(100))
    assert sorted(first[100:200]) == list(range(100))


def test_a_mixture_has_the_proportions_of_its_weights(tmp_path):
    data = {
        numbered(tmp_path / "a", 0, 700): 0.7,
        numbered(tmp_path / "b", 1_000, 5_000): 0.2,
        numbered(tmp_path / "c", 10_000, 400): 0.1,
    }
    folders = TokenFolders(data, length=4, vocab=VOCAB)
    reading = GrainData(folders.train(seed=1), batch=10, seed=1)
    assert reading.batches_per_epoch == 100
    for _ in range(2):
        rows = np.concatenate([next(reading.batches("x", batch))[:, 0] for batch in range(100)])
        counts = np.histogram(rows, [0, 1_000, 10_000, VOCAB])[0]
        np.testing.assert_array_equal(counts, [700, 200, 100])
        assert len(set(rows)) == 1_000
    # From the start on, and not one source after the other.
    assert 40 < np.sum(rows[:100] < 1_000) < 95
    held = folders.held_out(100)
    assert [
        sum(lo <= row[0, 0] < hi for row in held) for lo, hi in ((0, 1_000), (1_000, 9_999))
    ] == [70, 20]


def test_a_source_without_a_row_in_an_epoch_is_refused(tmp_path):
    data = {numbered(tmp_path / "a", 0, 10): 1.0, numbered(tmp_path / "b", 50, 10): 1e-3}
    with pytest.raises(DataError, match="b' would have less than one row"):
        TokenFolders(data, length=4, vocab=VOCAB).train(seed=0)


# Who reads what


@pytest.mark.parametrize("mixed", [False, True])
def test_shares_of_learners_do_not_overlap_and_make_the_epoch(tmp_path, mixed):
    data = {numbered(tmp_path / "a", 0, 120): 0.75, numbered(tmp_path / "b", 500, 40): 0.25}
    given = data if mixed else next(iter(data))
    dataset = TokenFolders(given, length=4, vocab=VOCAB).train(seed=3)
    reading = GrainData(dataset, batch=5, seed=3, shares=["x", "y", "z", "w"])
    seen = {
        name: [
            int(row[0])
            for batch in range(reading.batches_per_epoch)
            for row in next(reading.batches(name, batch))
        ]
        for name in ("x", "y", "z", "w")
    }
    together = [row for rows in seen.values() for row in rows]
    assert len(set(together)) == len(together) == 4 * reading.batches_per_epoch * 5
    assert len(together) > len(dataset) - 4 * 5


def test_each_host_reads_its_rows_and_no_others(tmp_path, monkeypatch):
    folders = TokenFolders(numbered(tmp_path / "a", 0, 100), length=4, vocab=VOCAB)
    reading = GrainData(folders.train(seed=0), batch=8, seed=0, shares=2)
    whole = next(reading.batches("x", 3))
    read, take = [], TokenWindows.__getitem__
    monkeypatch.setattr(
        TokenWindows, "__getitem__", lambda self, index: read.append(index) or take(self, index)
    )
    np.testing.assert_array_equal(next(reading.rows("x", 3, 2, 5)), whole[2:5])
    assert len(read) == 3


def test_processes_that_read_a_mixture_give_the_same_batches(tmp_path):
    data = {numbered(tmp_path / "a", 0, 120): 0.75, numbered(tmp_path / "b", 500, 40): 0.25}
    dataset = TokenFolders(data, length=4, vocab=VOCAB).train(seed=3)
    drawn = {}
    for workers in (0, 1):
        batches = GrainData(dataset, batch=5, seed=3, shares=2, workers=workers).batches("x", 7)
        drawn[workers] = np.stack([next(batches) for _ in range(5)])
        batches.close()
    np.testing.assert_array_equal(drawn[0], drawn[1])


def test_the_order_is_of_the_whole_and_another_in_each_epoch(tmp_path):
    folders = TokenFolders(numbered(tmp_path / "a", 0, 400), length=4, vocab=VOCAB)
    reading = GrainData(folders.train(seed=0), batch=100, seed=0)
    first, second = (
        np.concatenate([next(reading.batches("x", 4 * epoch + n))[:, 0] for n in range(4)])
        for epoch in (0, 1)
    )
    assert sorted(first) == sorted(second) == list(range(400))
    assert list(first) != list(second)
    # Rows of both files from the first batch on.
    assert 20 < np.sum(first[:100] < 200) < 80


# A terabyte

TERABYTE = textwrap.dedent("""
    import sys
    from pathlib import Path
    import jax, numpy as np, psutil
    from diloco.models.decoders.tokens import TokenFolders
    from diloco.learner.select_examples import GrainData, require_grain
    require_grain()
    jax.config.update("jax_platforms", "cpu")
    process = psutil.Process()
    import grain
    warm = GrainData(grain.MapDataset.source([np.zeros(2049, np.int32)] * 64), batch=8, seed=0)
    next(warm.batches("x", 0))
    before = process.memory_info().rss
    folders = TokenFolders(sys.argv[1], length=2048, vocab=1 << 16)
    data = GrainData(folders.train(seed=0), batch=8, seed=0, shares=4)
    batches = data.batches("x", 12_345)
    drawn = [next(batches) for _ in range(64)]
    assert all(batch.shape == (8, 2049) for batch in drawn)
    print(len(data._dataset), process.memory_info().rss - before)
""")


def sparse(path, tokens):
    """A file of so many tokens that takes no room on the disk."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
        )
        end = file.tell() + 2 * tokens
        file.truncate(end)
    return end


def test_a_terabyte_of_tokens_takes_no_memory(tmp_path):
    size = sum(sparse(tmp_path / f"train-{number}.npy", 1 << 37) for number in range(4))
    assert size > 10**12
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 1 << 20
    done = subprocess.run(
        [sys.executable, "-c", TERABYTE, tmp_path], check=True, capture_output=True, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    rows, grown = map(int, done.stdout.split())
    assert rows == 4 * ((1 << 37) // 2048 - 1)
    # 64 batches and what reads ahead are 6 MB.
    assert grown < 64 << 20


# What a manifest says


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model's folder with a tokenizer, and prepared data beside."""
    folder = tmp_path_factory.mktemp("prepared")
    tokenizer = make_tokenizer(folder / "model")
    texts = make_texts(folder / "texts", 12)
    prepared(texts, "--tokenizer", tokenizer, "--held-out", 0.3, "--out", folder / "data")
    return folder


@pytest.fixture
def place(whole, tmp_path):
    """A copy, which a test may spoil."""
    done = command("copy", whole / "data", tmp_path / "data")
    assert done.exit_code == 0
    return tmp_path / "data"


def opened(place, vocab=400, model=None):
    return TokenFolders(str(place), length=16, vocab=vocab, model=model)


def test_prepared_data_is_read_by_its_manifest(whole, place):
    folders = opened(place, model=whole / "model")
    assert folders.end == 1
    assert len(folders.train(seed=0)) > 100
    assert folders.held_out(4)[0].shape == (1, 17)


def test_a_tokenizer_larger_than_the_model_is_refused(place):
    with pytest.raises(DataError, match="tokenizer has 320 tokens, but the model has 300") as told:
        opened(place, vocab=300)
    assert "tokens.json" in told.value.message
    assert "diloco data prepare" in told.value.hint


def test_a_token_that_the_models_own_tokenizer_has_beyond_the_model_may_be_unused(whole, place):
    # As an image's of Gemma 3.
    manifest = json.loads((place / "tokens.json").read_text())
    manifest["tokenizer"]["vocabulary"] = 401
    (place / "tokens.json").write_text(json.dumps(manifest))
    opened(place, model=whole / "model")
    with pytest.raises(DataError, match="401"):
        opened(place)


def test_data_of_another_tokenizer_than_the_models_is_refused(place, tmp_path):
    other = make_tokenizer(tmp_path / "other", normalizer={"type": "Lowercase"})
    with pytest.raises(DataError, match="another tokenizer than that of"):
        opened(place, model=other)
    (other / "tokenizer.json").write_text("[")
    with pytest.raises(DataError, match="not a tokenizer"):
        opened(place, model=other)


def test_a_missing_shard_one_of_another_size_and_one_too_many(place):
    shard = min(place.glob("train*.npy"))
    data = shard.read_bytes()
    shard.unlink()
    with pytest.raises(DataError, match=rf"{shard.name}' is missing") as told:
        opened(place)
    assert "diloco data copy" in told.value.hint
    shard.write_bytes(data[:-2])
    with pytest.raises(
        DataError, match=rf"{shard.name}' has {len(data) - 2} bytes, but {len(data)}"
    ):
        opened(place)
    shard.write_bytes(data)
    opened(place)
    (place / "train-extra.npy").write_bytes(data)
    with pytest.raises(DataError, match=r"train-extra.npy' is not in tokens.json"):
        opened(place)


def test_a_folder_that_is_not_whole_is_refused(place):
    (place / "tokens.json").unlink()
    (place / ".prepare").mkdir()
    with pytest.raises(DataError, match="is not whole"):
        opened(place)


def test_a_run_that_names_its_data_takes_no_other(whole, place, tmp_path):
    said = checked(place).stdout
    digest = hashlib.sha256((place / "tokens.json").read_bytes()).hexdigest()
    assert f"tokens.json: sha256 {digest}" in said
    TokenFolders(str(place), length=16, vocab=400, digests=[digest])
    given = ["--tokenizer", whole / "model", "--held-out", 0.2, "--out", tmp_path / "other"]
    prepared(whole / "texts", *given)
    data = {str(place): 1, str(tmp_path / "other"): 1}
    with pytest.raises(DataError, match=rf"other/tokens.json' has .*, but the run .* {digest}"):
        TokenFolders(data, length=16, vocab=400, digests=[digest])
    with pytest.raises(DataError, match="has no digest"):
        TokenFolders(numbered(tmp_path / "a", 0, 9), length=4, vocab=VOCAB, digests=[digest])


def test_the_task_takes_the_ends_of_documents_from_the_manifest(whole, place):
    config = LLAMA | {"vocab_size": 320, "num_hidden_layers": 1}
    (whole / "model" / "config.json").write_text(json.dumps(config))
    losses = {}
    for name, more in {"manifest": {}, "said": {"end": 1}, "not": {"end": -1}}.items():
        options = {"model": str(whole / "model"), "data": {str(place): 2}, "fresh": True}
        options |= {"length": 256, "batch": 2, "eval_batches": 8} | more
        task = build_task("diloco.models.decoders:build", steps=9, seed=0, options=options)
        losses[name] = task.evaluate(task.init(jax.random.key(0)))
    assert losses["manifest"] == losses["said"] != losses["not"]


def test_a_manifest_that_is_none_is_refused(place):
    manifest = json.loads((place / "tokens.json").read_text())
    manifest["shards"][0]["name"] = "../model/tokenizer.json"
    for text in ("{", json.dumps(manifest), json.dumps(manifest | {"format": 2})):
        (place / "tokens.json").write_text(text)
        with pytest.raises(DataError, match=r"tokens.json is not a manifest"):
            opened(place)


def test_a_shard_that_is_cut_short_while_it_is_read(place):
    train = opened(place).train(seed=0)
    for shard in place.glob("train*.npy"):
        shard.chmod(0o644)
        os.truncate(shard, 200)
    with pytest.raises(TaskError, match="cut short"):
        train[len(train) - 1]


def test_folders_of_a_mixture_are_of_one_tokenizer_and_one_end(whole, place, tmp_path):
    texts = whole / "texts"
    given = ["--held-out", 0.3, "--out"]
    other = make_tokenizer(tmp_path / "other", normalizer={"type": "Lowercase"})
    prepared(texts, "--tokenizer", other, *given, tmp_path / "lower")
    prepared(texts, "--tokenizer", whole / "model", "--end", 0, *given, tmp_path / "end")
    for name, what in (("lower", "another tokenizer"), ("end", "end in token 0, not 1")):
        with pytest.raises(DataError, match=what):
            TokenFolders({str(place): 1, str(tmp_path / name): 1}, length=16, vocab=400)


def test_data_without_a_held_out_side_says_so(whole, tmp_path):
    given = ["--tokenizer", whole / "model", "--held-out", 0, "--out", tmp_path / "data"]
    prepared(whole / "texts", *given)
    folders = opened(tmp_path / "data")
    folders.train(seed=0)
    with pytest.raises(DataError, match="no held_out shards"):
        folders.held_out(2)


@pytest.mark.parametrize("data", [{}, {"/a": 0}, {"/a": "b"}, {"/a": True}, {"": 1}, [], ""])
def test_other_things_than_folders_and_weights_are_refused(data):
    options = {"model": "qwen3-0.6b", "data": data}
    with pytest.raises(TaskError, match=r"'data\.(path|weights)"):
        load_task("diloco.models.decoders:build", steps=2, seed=0, options=options)


@pytest.mark.parametrize("digests", ["a" * 64, ["b"], [7]])
def test_other_things_than_digests_are_refused(digests):
    options = {"model": "qwen3-0.6b", "data": "/a", "digests": digests}
    with pytest.raises(TaskError, match="'digests"):
        load_task("diloco.models.decoders:build", steps=2, seed=0, options=options)


# Copies and checks


def test_a_copy_is_checked_and_damage_is_found(whole, place):
    assert checked(place).exit_code == 0
    shards = sorted(place.glob("*.npy"))
    for shard in shards:
        shard.chmod(0o644)
    data = bytearray(shards[0].read_bytes())
    data[-1] ^= 1
    shards[0].write_bytes(data)
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    done = checked(place)
    assert done.exit_code == 74
    assert f"{shards[0].name} has the sha256" in done.stdout
    assert f"{shards[1].name} has" in done.stdout
    shards[1].unlink()
    assert f"{shards[1].name} is missing" in checked(place).stdout


def test_a_copy_of_damaged_data_stops_and_continues_when_it_is_repaired(place, tmp_path):
    shard = min(place.glob("train*.npy"))
    data = shard.read_bytes()
    shard.chmod(0o644)
    shard.write_bytes(data[:-1] + b"\xff")
    error = command("copy", place, tmp_path / "other").exception
    assert isinstance(error, DataError)
    assert shard.name in error.message
    with pytest.raises(DataError, match="is not whole"):
        opened(tmp_path / "other")
    shard.write_bytes(data)
    assert command("copy", place, tmp_path / "other").exit_code == 0
    assert checked(tmp_path / "other").exit_code == 0
    assert not (tmp_path / "other" / ".prepare").exists()


def test_a_shard_that_was_cut_in_the_copy_is_copied_again(whole, place):
    shard = min(place.glob("train*.npy"))
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-2])
    done = command("copy", whole / "data", place)
    assert done.exit_code == 0, done.output
    assert shard.read_bytes() == (whole / "data" / shard.relative_to(place)).read_bytes()


def test_a_copy_takes_no_folder_that_has_something_else(whole, place, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("")
    assert "it has 'x'" in str(command("copy", place, tmp_path / "other").exception)
    given = ["--tokenizer", whole / "model", "--held-out", 0, "--out", tmp_path / "else"]
    prepared(whole / "texts", *given)
    assert "other prepared data" in str(command("copy", place, tmp_path / "else").exception)
