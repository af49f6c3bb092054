"""Seven sources of data that people have become the same rows; files of tokens that are wrong."""

import json
import struct

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from token_lab import command, make_tokenizer, prepared
from tokenizers import Tokenizer

from diloco.common.protocol.errors import DataError
from diloco.models.decoders.tokens import TokenFolders

TEXTS = [f"document {number}: {'words and ' * (number % 7)}the end" for number in range(60)]
NUMBER_OF_END = 1


@pytest.fixture
def tokenizer(tmp_path):
    folder = make_tokenizer(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    return folder


def tokens_of(tokenizer):
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return [library.encode(text, add_special_tokens=False).ids for text in TEXTS]


def write_megatron(path, documents, dtype="<u2", code=8):
    """As its tools write it: each document one sequence, with the token that ends it."""
    lengths = np.asarray([len(one) for one in documents], "<i4")
    places = np.cumsum([0, *lengths[:-1]]).astype("<i8") * np.dtype(dtype).itemsize
    np.concatenate([np.asarray(one, dtype) for one in documents]).tofile(path)
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(documents), len(documents) + 1)
    index += lengths.tobytes() + places.tobytes()
    path.with_suffix(".idx").write_bytes(
        index + np.arange(len(documents) + 1, dtype="<i8").tobytes()
    )


def write_sources(folder, tokenizer):
    """One file or folder of each kind, with the same documents; what `prepare` is told beside."""
    datasets = pytest.importorskip("datasets")
    ended = [[*tokens, NUMBER_OF_END] for tokens in tokens_of(tokenizer)]
    flat = np.concatenate([np.asarray(one, "<u2") for one in ended])
    (folder / "lines.txt").write_text("\n".join(TEXTS))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    parquet.write_table(pa.table({"text": TEXTS}), folder / "a.parquet")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "saved"))
    flat.tofile(folder / "train.bin")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(flat)
    (folder / "fineweb.bin").write_bytes(header.tobytes() + flat.tobytes())
    write_megatron(folder / "a_text_document.bin", ended)
    chats = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": one}]
             for one in TEXTS]  # fmt: skip
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    return {"lines.txt": ["--documents", "line"], "a.jsonl": [], "a.parquet": [], "saved": [],
            "train.bin": [], "fineweb.bin": [], "a_text_document.bin": [],
            "chats.jsonl": ["--chats"]}  # fmt: skip


def test_every_source_gives_the_same_batch(tmp_path, tokenizer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        sources = write_sources(tmp_path, tokenizer)
    batches = {}
    for name, told in sources.items():
        out = tmp_path / f"of-{name}"
        given = ["--tokenizer", tokenizer, "--held-out", 0, "--out", out, *told]
        prepared(tmp_path / name, *given)
        rows = TokenFolders(str(out), length=32, vocab=400, model=tokenizer).train(seed=0)
        batches[name] = np.stack([rows[index] for index in range(len(rows))])
    # Behind a chat stands a token that is no answer, and so not trained on.
    chats = batches.pop("chats.jsonl")
    assert set(chats[chats < 0]) == {~NUMBER_OF_END}
    batches["chats.jsonl"] = np.where(chats < 0, ~chats, chats)
    wanted = np.concatenate([[*one, NUMBER_OF_END] for one in tokens_of(tokenizer)])
    for name, batch in batches.items():
        assert batch.shape == ((len(wanted) - 1) // 32, 33), name
        np.testing.assert_array_equal(batch[:, :-1].ravel(), wanted[: batch[:, :-1].size], name)


def test_a_file_of_tokens_continues_where_it_was_ended(tmp_path, tokenizer):
    documents = [[*tokens, NUMBER_OF_END] for tokens in tokens_of(tokenizer)]
    np.concatenate(documents).astype("<u2").tofile(tmp_path / "train.bin")
    write_megatron(tmp_path / "a.bin", documents)
    for name in ("train.bin", "a.idx"):
        given = [tmp_path / name, "--tokenizer", tokenizer, "--held-out", 0.2, "--out"]
        prepared(*given, tmp_path / f"whole-{name}", "--shard-bytes", 100)
        manifest = json.loads((tmp_path / f"whole-{name}" / "tokens.json").read_text())
        source = manifest["sources"][0]
        assert source["train"]["documents"] + source["held_out"]["documents"] == len(TEXTS)
        assert len(manifest["shards"]) > 10
    texts = [json.loads((tmp_path / f"whole-{name}" / "tokens.json").read_text())["shards"]
             for name in ("train.bin", "a.idx")]  # fmt: skip
    held_out = [[one["tokens"] for one in shards if one["side"] == "held_out"] for shards in texts]
    assert sum(held_out[0]) == sum(held_out[1])


def refused(tmp_path, tokenizer, name, *more):
    given = ["--tokenizer", tokenizer, "--out", tmp_path / "out", *more]
    error = command("prepare", tmp_path / name, *given).exception
    assert isinstance(error, DataError), repr(error)
    assert error.hint
    assert not (tmp_path / "out").exists()
    return error.message


def test_files_of_tokens_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path, tokenizer
):
    right = np.asarray([5, 6, NUMBER_OF_END, 7, NUMBER_OF_END], "<u2")

    def bin_of(data):
        (tmp_path / "a.bin").write_bytes(data)
        return refused(tmp_path, tokenizer, "a.bin")

    assert "not a multiple of 2" in bin_of(right.tobytes() + b"x")
    assert "numbers of 32 bits" in bin_of(right.astype("<u4").tobytes())
    assert "the token 999, read as uint16, but the tokenizer has 320" in (
        bin_of(np.asarray([999, NUMBER_OF_END], "<u2").tobytes())
    )
    assert "no document of" in bin_of(right[:2].tobytes())
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 9
    assert "has 5 tokens, but 9 by its header" in bin_of(header.tobytes() + right.tobytes())
    assert "has no chats" in refused(tmp_path, tokenizer, "a.bin", "--chats")


def test_an_index_of_other_tokens_is_refused(tmp_path, tokenizer):
    write_megatron(tmp_path / "a.bin", [[5, 6, 1], [7, 1]])
    index = (tmp_path / "a.idx").read_bytes()
    no_documents = index[:26] + bytes(8) + index[34:]
    for wrong in (index[:50], b"other" + index[5:], index[:17] + b"\6" + index[18:], no_documents):
        (tmp_path / "a.idx").write_bytes(wrong)
        assert "is not an index of Megatron's" in refused(tmp_path, tokenizer, "a.bin")
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(b"\5\0")
    assert "has 1 tokens of uint16, but" in refused(tmp_path, tokenizer, "a.bin")
    write_megatron(tmp_path / "a.bin", [[5, -6, 1]], "<i4", 4)
    assert "the token -6, read as int32" in refused(tmp_path, tokenizer, "a.bin")
