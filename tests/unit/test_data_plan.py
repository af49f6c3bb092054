"""How sources are cut into pieces, what is held out, and what a manifest takes: the pure parts."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from diloco.common.errors import DataError
from diloco.common.token_manifest import dtype_for, parse_manifest, rules_digest, shard_name
from diloco.data.plan import SourceFile, is_held_out, pieces
from diloco.data.shards import header

KINDS = st.sampled_from(["text", "json", "parquet"])


@st.composite
def files(draw):
    found = []
    for number in range(draw(st.integers(1, 8))):
        kind = draw(KINDS)
        groups = tuple(draw(st.lists(st.integers(1, 300), max_size=4))) if kind == "parquet" else ()
        size = sum(groups) if groups else draw(st.integers(0, 1000))
        compression = draw(st.sampled_from(["", ".gz"])) if kind != "parquet" else ""
        found.append(
            SourceFile(
                source=0, path=f"{number}", size_bytes=size, modified_ns=0, kind=kind,
                compression=compression, groups=groups,
            )
        )  # fmt: skip
    return found


@given(files(), st.integers(1, 400), st.booleans())
def test_each_byte_and_row_group_is_in_one_piece_and_in_order(files, piece_bytes, by_line):
    spans = [span for piece in pieces(files, piece_bytes, by_line=by_line) for span in piece]
    for file in files:
        own = [span for span in spans if span.file is file]
        if file.kind == "parquet":
            assert [(span.start, span.stop) for span in own] == [
                (number, number + 1) for number in range(len(file.groups))
            ]
        elif file.compression or (file.kind == "text" and not by_line):
            assert [(span.start, span.stop) for span in own] == [(0, None)]
        else:
            ends = [0, *(span.stop for span in own)]
            assert [span.start for span in own] == ends[:-1]
            assert ends[-1] == file.size_bytes
    assert [span.file.path for span in spans] == sorted(span.file.path for span in spans)


@given(files(), st.integers(1, 400))
def test_a_piece_of_several_spans_is_no_larger_than_asked(files, piece_bytes):
    for piece in pieces(files, piece_bytes, by_line=True):
        assert len(piece) == 1 or sum(span.size_bytes for span in piece) <= piece_bytes


def test_a_document_is_held_out_by_its_text_alone():
    texts = [f"document {number}".encode() for number in range(20_000)]
    held = [is_held_out(text, 0.05) for text in texts]
    assert sum(held) / len(held) == pytest.approx(0.05, abs=0.01)
    assert not any(is_held_out(text, 0.0) for text in texts)
    # A larger share takes none away.
    assert all(is_held_out(text, 0.1) for text, was in zip(texts, held, strict=True) if was)


def test_the_smallest_type_that_holds_every_token():
    assert [dtype_for(1 << 16), dtype_for((1 << 16) + 1)] == ["uint16", "uint32"]


@pytest.mark.parametrize("count", [1, 10**6, 10**15])
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_header_is_numpys(tmp_path, count, dtype):
    path = tmp_path / "x.npy"
    path.write_bytes(header(np.dtype(dtype), count))
    with path.open("rb") as file:
        assert np.lib.format.read_magic(file) == (1, 0)
        assert np.lib.format.read_array_header_1_0(file) == ((count,), False, np.dtype(dtype))
        assert file.tell() == path.stat().st_size == 128


def test_names_in_order_are_shards_in_order():
    names = [shard_name("train", piece, part) for piece in (0, 9, 10, 99_999) for part in (0, 11)]
    assert names == sorted(names)


def test_a_manifest_names_no_file_elsewhere():
    with pytest.raises(DataError, match="not a manifest"):
        parse_manifest(b"{}", "x")
    with pytest.raises(DataError, match="not a manifest"):
        parse_manifest(b"\xff", "x")


def test_files_of_one_tokenizer_have_the_same_rules():
    model = {"type": "BPE", "vocab": {"a": 0}}
    special = {"id": 1, "content": "<|chat|>", "special": True}
    plain = {"id": 2, "content": "\n\n", "special": False}
    base = {"model": model, "added_tokens": [plain]}
    assert rules_digest(base) == rules_digest(
        base | {"padding": {}, "truncation": 3, "added_tokens": [special, plain]}
    )
    others = [base | {"model": {}}, base | {"added_tokens": []}, base | {"normalizer": {}}]
    assert len({rules_digest(other) for other in [base, *others]}) == 4
