"""The held-out part, and the sizes of shards and manifests: the pure functions."""

import numpy as np
import pytest

from diloco.common.protocol.errors import DataError
from diloco.models.data.manifest import dtype_for, parse_manifest, rules_digest, shard_name
from diloco.models.data.prepare import header, is_held_out


def test_a_document_is_held_out_by_its_text_alone():
    texts = [f"document {number}" for number in range(20_000)]
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
    names = [shard_name("train", piece) for piece in (0, 9, 10, 99_999)]
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
