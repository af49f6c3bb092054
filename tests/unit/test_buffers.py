"""Bytes in several places are what one run of them would be."""

import google_crc32c
import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.common.process.config import make_config
from diloco.common.protocol import shards
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.common.protocol.shards import Buffers

RUNS = st.lists(st.binary(max_size=40), max_size=6)


@given(RUNS, st.integers(0, 300), st.integers(1, 50))
def test_pieces_checksums_and_ends_are_those_of_the_whole(runs, start, piece_bytes):
    whole, joined = b"".join(runs), Buffers(*runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "PIECE_BYTES", piece_bytes)
        pieces = [bytes(piece) for piece in joined]
        assert b"".join(pieces) == whole == bytes(joined)
        assert all(0 < len(piece) <= piece_bytes for piece in pieces)
        assert len(joined) == len(whole)
        assert bytes(joined.between(start)) == whole[start:]
        assert (
            bytes(joined.between(start, start + piece_bytes)) == whole[start : start + piece_bytes]
        )
        assert shards.digest(joined) == xxhash.xxh3_128_hexdigest(whole)
        assert shards.crc32c(joined) == google_crc32c.value(whole)


@given(RUNS, RUNS)
def test_they_equal_what_holds_the_same_bytes(runs, others):
    whole, other = b"".join(runs), b"".join(others)
    assert (Buffers(*runs) == Buffers(*others)) == (whole == other)
    assert Buffers(*runs) == whole
    assert Buffers(*runs) == memoryview(whole)
    assert (Buffers(*runs) == other) == (whole == other)
    assert Buffers(*runs) != 3


@pytest.mark.parametrize("size", [16, 64, 16_384, 65_536])
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "delayed_nesterov"])
def test_an_outer_state_is_stored_as_msgpack_writes_it(size, optimizer):
    """Beside each length that msgpack writes a size in: of one, two and four bytes."""
    document = {"run": {"name": "r", "steps": 9}, "store": {"url": "/nowhere"}}
    document |= {"sync": {"block": 16, "fragments": 1}, "outer": {"optimizer": optimizer}}
    settings = make_config(document, source="test").settings()
    layout = make_layout([Tensor(name="x", shape=(size,), dtype="float32")], fragments=1, block=16)
    view = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    arrays = FragmentArrays.from_view(settings, layout, 0, view)
    state = {name: array.tobytes() for name, array in arrays.state.items()}
    whole = msgpack.packb({"theta": view.tobytes(), **state})
    assert bytes(arrays.outer_object()) == whole
    assert bytes(arrays.view_object()) == view.tobytes()
    again = FragmentArrays.from_objects(settings, layout, 0, view=view.tobytes(), outer_state=whole)
    assert again.digests() == arrays.digests()
