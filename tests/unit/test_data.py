"""The corpus: what is held out never trains, and a batch depends on its number alone."""

import itertools

import numpy as np
import pytest

from diloco.common.protocol.errors import TaskError
from diloco.models.bytes_lm.corpus import (
    STDLIB_MAX_BYTES,
    Corpus,
    batches,
    eval_windows,
    held_out_names,
    load_corpus,
    require_length,
)

FILES = {f"folder/{i:03}.txt": bytes([i]) * 50 for i in range(200)}
CORPUS = Corpus.of_files(FILES)


def draw(count, *, corpus=CORPUS, seed=0, learner="a", position=0):
    stream = batches(corpus, seed=seed, learner=learner, position=position, batch=4, length=16)
    return list(itertools.islice(stream, count))


def test_held_out_files_never_appear_in_training_bytes():
    train, held_out = set(CORPUS.train.tolist()), set(CORPUS.held_out.tolist())
    assert train.isdisjoint(held_out)
    assert train | held_out == set(range(200))
    assert 5 < len(held_out) < 40  # about a tenth of 200


def test_a_file_keeps_its_side_when_others_come_and_go():
    half = list(FILES)[::2]
    assert held_out_names(half) == held_out_names(FILES) & set(half)


@pytest.mark.parametrize("count", range(2, 12))
def test_both_sides_have_a_file(count):
    for start in range(100):
        names = [f"{i}" for i in range(start, start + count)]
        assert 0 < len(held_out_names(names)) < count


def test_when_all_files_hash_to_the_held_out_side_one_trains():
    names = sorted(held_out_names(FILES))[:3]
    assert len(held_out_names(names)) == 2


def test_a_lone_file_is_cut_in_two():
    corpus = Corpus.of_files({"a": bytes(range(100))})
    assert corpus.train.tolist() == list(range(90))
    assert corpus.held_out.tolist() == list(range(90, 100))


def test_windows_are_runs_of_training_bytes():
    text = CORPUS.train.tobytes()
    for batch in draw(5):
        assert batch.shape == (4, 17)
        assert batch.dtype == np.int32
        for window in batch:
            assert window.astype(np.uint8).tobytes() in text


def test_batches_resume_at_any_position():
    for position, batch in enumerate(draw(6)):
        np.testing.assert_array_equal(draw(1, position=position)[0], batch)


def test_batches_are_the_same_in_every_process():
    corpus = Corpus(train=np.arange(256, dtype=np.uint8), held_out=np.zeros(1, np.uint8))
    assert [int(batch[0, 0]) for batch in draw(3, corpus=corpus, seed=1)] == [21, 1, 52]


@pytest.mark.parametrize("other", [{"seed": 1}, {"learner": "b"}, {"position": 1}])
def test_seed_learner_and_position_each_change_the_batch(other):
    assert not np.array_equal(draw(1)[0], draw(1, **other)[0])


def test_every_training_window_can_be_drawn():
    corpus = Corpus(train=np.arange(18, dtype=np.uint8), held_out=np.zeros(1, np.uint8))
    starts = {int(window[0]) for batch in draw(20, corpus=corpus) for window in batch}
    assert starts == {0, 1}


def test_eval_windows_are_fixed_and_reach_both_ends():
    corpus = Corpus(train=np.zeros(1, np.uint8), held_out=np.arange(200, dtype=np.uint8))
    windows = np.concatenate(eval_windows(corpus, count=3, batch=4, length=16))
    assert windows.shape == (12, 17)
    assert (windows[0, 0], windows[-1, -1]) == (0, 199)


def test_a_folder_is_read_without_its_hidden_files(tmp_path):
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    (tmp_path / "deep" / ".git" / "secret").write_bytes(b"s" * 10)
    (tmp_path / ".hidden").write_bytes(b"h" * 10)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "deep" / "a.txt").write_text("ä" * 10, encoding="utf-8")
    (tmp_path / "b.bin").write_bytes(b"\xff" * 10)
    corpus = load_corpus(str(tmp_path))
    sides = sorted([corpus.train.tobytes(), corpus.held_out.tobytes()])
    assert sides == ["ä".encode() * 10, b"\xff" * 10]


def test_the_standard_library_is_a_corpus():
    corpus = load_corpus("stdlib")
    total = len(corpus.train) + len(corpus.held_out)
    assert 1_000_000 < total <= STDLIB_MAX_BYTES
    assert 0.03 < len(corpus.held_out) / total < 0.25
    assert corpus is load_corpus("stdlib")


def test_a_bad_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "file": "it is a file",
        "no": "it is missing",
        "empty": "any bytes",
    }.items():
        with pytest.raises(TaskError, match=message):
            load_corpus(str(tmp_path / name))


def test_a_corpus_shorter_than_a_window_is_refused():
    with pytest.raises(TaskError, match="its held-out side has 10"):
        require_length(Corpus.of_files({"a": bytes(100)}), 10)
    require_length(Corpus.of_files({"a": bytes(100)}), 9)
