"""`diloco data prepare`: what becomes of documents, and what is refused in which words."""

import bz2
import gzip
import json
import lzma
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from token_lab import (
    BEGIN,
    END,
    VOCABULARY,
    checked,
    command,
    contents,
    decoded,
    make_texts,
    make_tokenizer,
    prepared,
)
from tokenizers import Tokenizer

from diloco.common.protocol.errors import ConfigError, DataError
from diloco.models.data import documents
from diloco.models.data import tokenizer as tokenizer_module
from diloco.models.data.manifest import TokenManifest, parse_manifest
from diloco.models.data.prepare import is_held_out

LINES = ["def one():\n    pass", "", "  two: ü 漢字 🙂\t", "three", f"it says {END} and ends"]


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path / "model")


def refusal(*words, kind=DataError):
    error = command("prepare", *words).exception
    assert isinstance(error, kind), repr(error)
    assert error.hint
    return error.message


def manifest_of(out: Path) -> TokenManifest:
    return parse_manifest((out / "tokens.json").read_bytes(), str(out))


def texts_of(out: Path, tokenizer: Path, side: str = "train") -> list[str]:
    """The documents of a side, in their order, with what stands before each."""
    tokens = np.concatenate([np.load(path) for path in sorted(out.glob(f"{side}-*.npy"))])
    end = manifest_of(out).end
    ends = np.flatnonzero(tokens == end)
    assert ends[-1] == len(tokens) - 1
    return [decoded(tokenizer, part[:-1]) for part in np.split(tokens, ends + 1)[:-1]]


def write_json(path: Path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))
    return path


# What becomes of documents


def test_documents_come_back_from_their_tokens(tmp_path, tokenizer):
    source = write_json(tmp_path / "a.jsonl", LINES)
    prepared(source, "--tokenizer", tokenizer, "--out", tmp_path / "out", "--held-out", 0)
    assert texts_of(tmp_path / "out", tokenizer) == [text for text in LINES if text]
    manifest = manifest_of(tmp_path / "out")
    (said,) = manifest.sources
    assert (said.train.documents, said.empty, said.files) == (4, 1, 1)
    assert manifest.dtype == "uint16"
    assert manifest.tokenizer.vocabulary == VOCABULARY
    assert manifest.largest < VOCABULARY


def test_all_kinds_of_files_hold_the_same_documents(tmp_path, tokenizer):
    texts = [text for text in LINES if text and "\n" not in text]
    table = pa.table({"id": range(len(texts)), "body": texts})
    made = {
        "lines.jsonl": write_json(tmp_path / "lines.jsonl", texts, "body").read_bytes(),
        "lines.txt": "\r\n".join(["\ufeff" + texts[0], *texts[1:]]).encode(),
        "plain.text": ("\n".join(texts) + "\n").encode(),
    }
    made |= {
        "a.json.gz": gzip.compress(made["lines.jsonl"]),
        "b.txt.bz2": bz2.compress(made["plain.text"]),
        "c.ndjson.xz": lzma.compress(made["lines.jsonl"]),
        "d.jsonl.zst": pa.Codec("zstd").compress(made["lines.jsonl"]).to_pybytes(),
    }
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    parquet.write_table(table, tmp_path / "e.parquet", row_group_size=2)
    found = {}
    for name in [*made, "e.parquet"]:
        out = tmp_path / f"of-{name}"
        more = ["--field", "body", "--documents", "line", "--held-out", 0]
        prepared(tmp_path / name, "--tokenizer", tokenizer, "--out", out, *more)
        found[name] = texts_of(out, tokenizer)
    assert found == dict.fromkeys(found, texts)


def test_what_datasets_saved_is_one_source_with_its_splits_in_order(tmp_path, tokenizer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        datasets = pytest.importorskip("datasets")
    texts = [f"document {number}" for number in range(9)]
    saved = datasets.Dataset.from_dict({"id": range(9), "text": texts})
    splits = {"one": saved.select([4, 2, 7]), "two": saved.select([0, 1])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "texts" / "saved"))
    (tmp_path / "texts" / "z.txt").write_text("last")
    given = ["--tokenizer", tokenizer, "--held-out", 0, "--shard-bytes", 20, "--out"]
    prepared(tmp_path / "texts", *given, tmp_path / "out")
    wanted = [texts[number] for number in (4, 2, 7, 0, 1)] + ["last"]
    assert texts_of(tmp_path / "out", tokenizer) == wanted
    assert manifest_of(tmp_path / "out").sources[0].files == 3
    arrow = next((tmp_path / "texts/saved/two").glob("*.arrow"))
    prepared(arrow, *given, tmp_path / "of-arrow")
    assert texts_of(tmp_path / "of-arrow", tokenizer) == texts[:2]
    arrow.write_bytes(arrow.read_bytes()[:40])
    assert "cannot be read as Saved data" in refusal(tmp_path / "texts", *given, tmp_path / "o2")


def test_parquet_takes_nothing_for_an_empty_document(tmp_path, tokenizer):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": pa.array(["a", None, "b"], pa.large_string())}), path)
    prepared(path, "--tokenizer", tokenizer, "--out", tmp_path / "out", "--held-out", 0)
    assert texts_of(tmp_path / "out", tokenizer) == ["a", "b"]
    assert manifest_of(tmp_path / "out").sources[0].empty == 1


def test_a_text_file_is_a_document_and_a_folder_is_all_its_visible_files(tmp_path, tokenizer):
    folder = make_texts(tmp_path / "texts", 5)
    (folder / "below").mkdir()
    (folder / "below" / "z.txt").write_text("below")
    (folder / ".hidden").write_bytes(b"\xff")
    prepared(folder, "--tokenizer", tokenizer, "--out", tmp_path / "out", "--held-out", 0)
    wanted = [path.read_text() for path in sorted(folder.rglob("*.txt"))]
    assert texts_of(tmp_path / "out", tokenizer) == wanted


def test_a_glob_in_quotes_and_a_file_of_two_sources(tmp_path, tokenizer):
    folder = make_texts(tmp_path / "texts", 4)
    glob, out = f"{folder}/**/a*.txt", tmp_path / "out"
    prepared(glob, folder, "--tokenizer", tokenizer, "--out", out, "--held-out", 0)
    first, second = manifest_of(out).sources
    assert first.files + second.files == 4
    assert first.files == len(list(folder.glob("a*.txt"))) > 0


def test_what_is_held_out_follows_from_the_text(tmp_path, tokenizer):
    texts = [f"document {number}" for number in range(300)]
    for name, order in (("one", texts), ("two", texts[::-1] * 2)):
        write_json(tmp_path / f"{name}.jsonl", order)
        given = [tmp_path / f"{name}.jsonl", "--tokenizer", tokenizer, "--held-out", 0.1]
        prepared(*given, "--out", tmp_path / name)
    held = {text for text in texts if is_held_out(text, 0.1)}
    assert 10 < len(held) < 60
    for name in ("one", "two"):
        assert set(texts_of(tmp_path / name, tokenizer, "held_out")) == held
        assert set(texts_of(tmp_path / name, tokenizer)) == set(texts) - held


@pytest.mark.parametrize("begin", [False, True])
def test_the_ends_are_what_the_tokenizer_and_its_folder_say(tmp_path, begin):
    tokenizer = make_tokenizer(tmp_path / "model", begin=begin)
    source = write_json(tmp_path / "a.jsonl", ["a", "b"])
    given = [source, "--tokenizer", tokenizer, "--held-out", 0, "--out"]
    prepared(*given, tmp_path / "out")
    known = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    manifest = manifest_of(tmp_path / "out")
    assert manifest.end == known.token_to_id(END)
    assert manifest.begin == ((known.token_to_id(BEGIN),) if begin else ())
    before = BEGIN if begin else ""
    assert texts_of(tmp_path / "out", tokenizer) == [before + "a", before + "b"]
    prepared(*given, tmp_path / "other", "--begin", "none", "--end", known.token_to_id(BEGIN))
    assert texts_of(tmp_path / "other", tokenizer) == ["a", "b"]
    assert manifest_of(tmp_path / "other").end == known.token_to_id(BEGIN)


def test_the_end_of_config_json_where_the_tokenizer_says_none(tmp_path, tokenizer):
    (tokenizer / "tokenizer_config.json").unlink()
    source = write_json(tmp_path / "a.jsonl", ["a"])
    given = [source, "--tokenizer", tokenizer, "--held-out", 0, "--out", tmp_path / "out"]
    assert "which token ends" in refusal(*given, kind=ConfigError)
    (tokenizer / "config.json").write_text('{"eos_token_id": [7, 8]}')
    prepared(*given)
    assert manifest_of(tmp_path / "out").end == 7


def test_a_special_token_in_a_text_is_text_unless_asked(tmp_path, tokenizer):
    source = write_json(tmp_path / "a.jsonl", [f"a{END}b"])
    given = [source, "--tokenizer", tokenizer, "--held-out", 0]
    prepared(*given, "--out", tmp_path / "out")
    assert texts_of(tmp_path / "out", tokenizer) == [f"a{END}b"]
    prepared(*given, "--out", tmp_path / "special", "--special")
    assert texts_of(tmp_path / "special", tokenizer) == ["a", "b"]


def test_what_a_tokenizer_file_does_to_single_texts_does_nothing_here(tmp_path):
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": BEGIN,
    }  # fmt: skip
    tokenizer = make_tokenizer(tmp_path / "model", truncation=truncation, padding=padding)
    document = json.loads((tokenizer / "tokenizer.json").read_text())
    document["model"]["dropout"] = 0.5
    (tokenizer / "tokenizer.json").write_text(json.dumps(document))
    text = "a rather long document of a few words"
    source = write_json(tmp_path / "a.jsonl", [text] * 5)
    given = [source, "--tokenizer", tokenizer, "--held-out", 0]
    prepared(*given, "--out", tmp_path / "out")
    assert texts_of(tmp_path / "out", tokenizer) == [text] * 5
    tokens = np.load(tmp_path / "out/train-00000.npy")
    assert (tokens.reshape(5, -1) == tokens.reshape(5, -1)[0]).all()


def test_a_vocabulary_beyond_16_bits_takes_32(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "model")
    document = json.loads((tokenizer / "tokenizer.json").read_text())
    document["model"]["vocab"]["of no text"] = 70_000
    (tokenizer / "tokenizer.json").write_text(json.dumps(document))
    source = write_json(tmp_path / "a.jsonl", ["a", "b"])
    prepared(source, "--tokenizer", tokenizer, "--held-out", 0, "--out", tmp_path / "out")
    manifest = manifest_of(tmp_path / "out")
    assert (manifest.dtype, manifest.tokenizer.vocabulary) == ("uint32", 70_001)
    assert np.load(tmp_path / "out/train-00000.npy").dtype == np.uint32
    assert texts_of(tmp_path / "out", tokenizer) == ["a", "b"]


def test_a_long_document_is_encoded_in_parts_that_end_with_lines(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(tokenizer_module, "PART_CHARACTERS", 50)
    text = "".join(f"line {number}\n" for number in range(40)) + "x" * 200
    parts = list(tokenizer_module._parts(text))
    assert "".join(parts) == text
    assert all(len(part) <= 50 for part in parts)
    assert all(part.endswith("\n") for part in parts[:6])
    source = write_json(tmp_path / "a.jsonl", [text])
    prepared(source, "--tokenizer", tokenizer, "--held-out", 0, "--out", tmp_path / "out")
    assert texts_of(tmp_path / "out", tokenizer) == [text]


# The same bytes


def test_the_bytes_do_not_depend_on_the_number_of_threads(tmp_path, tokenizer):
    folder = make_texts(tmp_path / "texts")
    write_json(folder / "lines.jsonl", [f"line {number}" for number in range(2_000)])
    given = [folder, "--tokenizer", tokenizer, "--shard-bytes", 9_000, "--held-out", 0.1]
    for workers in (1, 2):
        prepared(*given, "--workers", workers, "--out", tmp_path / str(workers))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    names = set(contents(tmp_path / "1"))
    assert {"train-00000.npy", "train-00005.npy", "tokens.json"} < names
    assert not any(name.startswith(".") for name in names)
    lines = [text for text in texts_of(tmp_path / "1", tokenizer) if text.startswith("line ")]
    assert len(lines) == len(set(lines)) > 1_500


def test_what_is_whole_stays_as_it_is(tmp_path, tokenizer):
    source = write_json(tmp_path / "a.jsonl", ["a"])
    given = [source, "--tokenizer", tokenizer, "--held-out", 0, "--out", tmp_path / "out"]
    first = prepared(*given).stdout
    path = tmp_path / "out" / "train-00000.npy"
    before = path.stat()
    (tmp_path / "out" / ".prepare").mkdir()
    for name in ("00000.json", "plan.json"):
        (tmp_path / "out" / ".prepare" / name).write_text("left by a kill")
    assert prepared(*given).stdout == first
    assert set(contents(tmp_path / "out")) == {path.name, "tokens.json"}
    assert path.stat().st_mtime_ns == before.st_mtime_ns


class StoppedError(Exception):
    """A kill between two pieces."""


def test_what_was_ended_midway_goes_on_with_what_is_missing(tmp_path, tokenizer, monkeypatch):
    folder = make_texts(tmp_path / "texts", 12)
    lines = write_json(tmp_path / "lines.jsonl", [f"line {number}" for number in range(900)])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    parquet.write_table(pa.table({"text": ["row"] * 5000}), folder / "c.parquet")
    given = [folder, "--tokenizer", tokenizer, "--shard-bytes", 3_000, "--held-out", 0.1]
    given += ["--workers", 1]
    prepared(*given, "--out", tmp_path / "whole")
    out, read_documents, read = tmp_path / "out", documents.read_documents, []

    def until(most):
        def counted(*words, **named):
            for document in read_documents(*words, **named):
                if len(read) >= most:
                    raise StoppedError
                read.append(document)
                yield document

        monkeypatch.setattr("diloco.models.data.prepare.read_documents", counted)

    # Amid the compressed file, the rows, and a text behind them.
    for most in (2, 500, 3_000, 5_908):
        until(most)
        assert isinstance(command("prepare", *given, "--out", out).exception, StoppedError)
    assert (out / ".prepare/plan.json").exists()
    assert "not prepared to its end" in checked(out).exception.message
    until(100_000)
    prepared(*given, "--out", out)
    assert contents(out) == contents(tmp_path / "whole")
    # Of pieces that were done nothing is read twice.
    assert len(read) < 12 + 900 + 5_000 + 4 * 1_000


def test_a_place_of_other_options_or_sources_is_refused_and_left_alone(tmp_path, tokenizer):
    source = write_json(tmp_path / "a.jsonl", ["a", "b"])
    given = [source, "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    prepared(*given, "--held-out", 0)
    before = contents(tmp_path / "out")
    assert "another held_out: 0.0, not 0.5" in refusal(*given, "--held-out", 0.5, kind=ConfigError)
    write_json(source, ["a", "b", "c"])
    assert "other sources" in refusal(*given, "--held-out", 0, kind=ConfigError)
    write_json(source, ["a", "b"])
    given[2] = make_tokenizer(tmp_path / "other", begin=True)
    assert "another tokenizer" in refusal(*given, "--held-out", 0, kind=ConfigError)
    assert contents(tmp_path / "out") == before


def test_sources_that_change_amid_the_work_are_refused(tmp_path, tokenizer):
    texts = make_texts(tmp_path / "texts", 3)
    (texts / "z.txt").write_bytes(b"\xff")
    given = [texts, "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    refusal(*given)
    (texts / "z.txt").write_bytes(b"z")
    assert "changed since" in refusal(*given, kind=ConfigError)


def test_a_folder_with_something_else_is_refused(tmp_path, tokenizer):
    source = write_json(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    said = refusal(source, "--tokenizer", tokenizer, "--out", tmp_path / "out", kind=ConfigError)
    assert "thesis.tex" in said
    assert list(contents(tmp_path / "out")) == ["thesis.tex"]


def test_an_out_folder_among_the_sources_is_refused(tmp_path, tokenizer):
    texts = make_texts(tmp_path / "texts", 3)
    given = ["--tokenizer", tokenizer, "--out"]
    assert "lies in the source" in refusal(texts, *given, texts / "out", kind=ConfigError)
    assert "lies in the source" in refusal(texts, *given, texts, kind=ConfigError)


@pytest.mark.parametrize(
    ("file", "word", "next_step"),
    [
        ("train-000001.npz", "rows with images", "processor"),
        ("config.json", "a checkpoint", "option model"),
        ("train-000001.npy", "tokens of your own", "option data"),
    ],
)
def test_a_folder_of_another_kind_is_called_what_it_is(tmp_path, file, word, next_step):
    (tmp_path / file).touch()
    refused = checked(tmp_path).exception
    assert word in refused.message
    assert next_step in refused.hint
    assert "data prepare" not in refused.hint


def test_a_copy_that_was_ended_midway_is_not_prepared(tmp_path, tokenizer):
    source = write_json(tmp_path / "a.jsonl", ["a"])
    given = [source, "--tokenizer", tokenizer, "--held-out", 0, "--out"]
    prepared(*given, tmp_path / "out")
    (tmp_path / "copy" / ".prepare").mkdir(parents=True)
    plan = (tmp_path / "out" / "tokens.json").read_bytes()
    (tmp_path / "copy" / ".prepare" / "plan.json").write_bytes(plan)
    assert "begun by diloco data copy" in refusal(*given, tmp_path / "copy", kind=ConfigError)
    assert command("copy", tmp_path / "out", tmp_path / "copy").exit_code == 0


# Bad input


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", b"good\n\xff\xfe", ["a.txt", "not UTF-8, at byte 5"]),
        ("a.txt", "utf sixteen".encode("utf-16-le"), ["a.txt", "zero byte, at byte 1"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ["a.jsonl", "at byte 24"]),
        ("a.jsonl", b'{"text": "a"}\n\n{"body": "b"}\n', ["line 3", "no field 'text'", "body"]),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', ["line 2", "no field 'text'", "['b']"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', ["line 2", "not JSON"]),
        ("a.jsonl", b'{"text": 5}\n', ["line 1", "holds int"]),
        ("a.jsonl", b'{"text": "\\ud800"}\n', ["line 1", "surrogate"]),
        ("a.json", b'[\n{"text": "a"}\n]', ["line 1", "not JSON"]),
        ("a.jsonl", b"[" * 100_000, ["line 1", "not JSON"]),
        ("a.parquet", b"PAR1 but not really", ["a.parquet", "cannot be read as Parquet data"]),
        ("a.jsonl.gz", b"no gzip", ["a.jsonl.gz", "cannot be unpacked"]),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:40],
            ["cannot be unpacked"],
        ),
        ("a.jsonl.xz", b"no xz", ["a.jsonl.xz", "cannot be unpacked"]),
        ("a.jsonl.bz2", b"no bzip", ["a.jsonl.bz2", "cannot be unpacked"]),
        ("a.jsonl.zst", b"no zstd at all", ["a.jsonl.zst", "cannot be unpacked"]),
        ("a.parquet.gz", b"x", ["a.parquet.gz", "compressed file of Parquet"]),
        ("a.zip", b"x", ["a.zip", "archive"]),
        ("a.txt", b"", ["a.txt", "is empty"]),
        ("a.jsonl", b'{"text": ""}\n', ["a.jsonl", "none of its documents has any text"]),
    ],
)
def test_sources_that_are_no_documents_are_refused(tmp_path, tokenizer, name, data, words):
    (tmp_path / name).write_bytes(data)
    said = refusal(tmp_path / name, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert all(word in said for word in words), said
    assert not (tmp_path / "out" / "tokens.json").exists()


def test_a_parquet_file_without_the_column_says_which_it_has(tmp_path, tokenizer):
    parquet.write_table(pa.table({"id": [1], "body": ["a"]}), tmp_path / "a.parquet")
    given = [tmp_path / "a.parquet", "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    assert "has no column 'text'; it has id, body" in refusal(*given)
    assert "'id'" in refusal(*given, "--field", "id")


def test_a_folder_of_nothing_and_a_path_of_nothing(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    given = ["--tokenizer", tokenizer, "--out", tmp_path / "out"]
    assert "is empty" in refusal(tmp_path / "empty", *given)
    assert "does not exist" in refusal(tmp_path / "nowhere", *given, kind=ConfigError)


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text elsewhere")
def test_a_name_that_is_no_text_is_taken_in_a_folder_and_refused_as_a_source(tmp_path, tokenizer):
    folder = make_texts(tmp_path / "texts", 2)
    strange = os.fsdecode(bytes(folder) + b"/z\xff.txt")
    Path(strange).write_text("strange")
    given = ["--tokenizer", tokenizer, "--held-out", 0, "--out", tmp_path / "out"]
    assert "not text in UTF-8" in refusal(strange, *given, kind=ConfigError)
    prepared(folder, *given)
    assert texts_of(tmp_path / "out", tokenizer)[-1] == "strange"


def test_a_side_without_documents_is_refused(tmp_path, tokenizer):
    (tmp_path / "one.txt").write_text("one document alone\n" * 3)
    given = [tmp_path / "one.txt", "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    assert "of 1 documents 0 are held out" in refusal(*given)


def test_a_document_too_large_for_memory_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(documents, "MOST_BYTES", 1000)
    (tmp_path / "one.txt").write_text("x" * 1001)
    write_json(tmp_path / "two.jsonl", ["a", "x" * 1001])
    given = ["--tokenizer", tokenizer, "--out"]
    assert "one document of more" in refusal(tmp_path / "one.txt", *given, tmp_path / "o1")
    assert "line 2" in refusal(tmp_path / "two.jsonl", *given, tmp_path / "o2")
    parquet.write_table(pa.table({"text": ["a", "x" * 1001]}), tmp_path / "three.parquet")
    assert "row 2" in refusal(tmp_path / "three.parquet", *given, tmp_path / "o3")


def test_a_tokenizer_that_is_none(tmp_path, tokenizer):
    source = write_json(tmp_path / "a.jsonl", ["a"])
    given = [source, "--out", tmp_path / "out", "--tokenizer"]
    assert "cannot be read" in refusal(*given, tmp_path / "nowhere", kind=ConfigError)
    assert "cannot be read" in refusal(*given, tmp_path, kind=ConfigError)
    assert "not a tokenizer" in refusal(*given, source)
    assert "no token '<|other|>'" in refusal(
        *given, tokenizer, "--end", "<|other|>", kind=ConfigError
    )
    assert "no token '99999'" in refusal(*given, tokenizer, "--begin", "99999", kind=ConfigError)
