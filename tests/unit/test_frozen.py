"""Leaves that are not synchronized: stored once, read in the slices that somebody needs."""

import io

import numpy as np
import pytest

from diloco.common.protocol import frozen, names, shards
from diloco.common.protocol.errors import IntegrityError
from diloco.common.protocol.frozen import Frozen, store_frozen, tile_of
from diloco.common.storage.store import MemoryStore

RUN = "demo"
ARRAYS = {
    "frozen/base": np.arange(48 * 40, dtype=np.float32).reshape(48, 40),
    "frozen/scale": np.float32(3.0).reshape(()),
    "state/seen": np.int32([1, 2, 3]),
}


class Counting(MemoryStore):
    """A store that remembers what is read."""

    def __init__(self):
        super().__init__()
        self.read: list[str] = []

    def get(self, name, limit_bytes=None, within_s=None):
        self.read.append(name)
        return super().get(name, limit_bytes, within_s)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(frozen, "TILE_BYTES", 1024)
    return Counting()


def test_leaves_come_back_whole_and_in_slices(store):
    index = store_frozen(RUN, store.put, ARRAYS)
    found = Frozen(RUN, store.get, index)
    assert found.names() == list(ARRAYS)
    for name, array in ARRAYS.items():
        again = found.read(name)
        assert again.dtype == array.dtype
        np.testing.assert_array_equal(again, array)
    part = (slice(5, 30), slice(7, 9))
    np.testing.assert_array_equal(found.read("frozen/base", part), ARRAYS["frozen/base"][part])


@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_reads_the_tiles_that_it_meets(store, axis):
    index = store_frozen(RUN, store.put, ARRAYS)
    found = Frozen(RUN, store.get, index)
    tiles = len(found.leaves["frozen/base"].digests)
    store.read.clear()
    half = [slice(None), slice(None)]
    half[axis] = slice(0, ARRAYS["frozen/base"].shape[axis] // 2)
    found.read("frozen/base", tuple(half))
    assert tiles >= 4
    assert len(store.read) == tiles // 2


def test_tiles_are_small_and_cut_the_longest_axis(monkeypatch):
    monkeypatch.setattr(frozen, "TILE_BYTES", 1024)
    assert tile_of((48, 40), 4) == (12, 20)
    assert tile_of((), 4) == ()


def test_equal_tiles_are_stored_once(store):
    store_frozen(RUN, store.put, {"a": np.zeros(1000, np.float32), "b": np.zeros(1000, np.float32)})
    objects = [info.name for info in store.list(names.global_prefix(RUN))]
    assert len([name for name in objects if "/tile-" in name]) == 1


def test_a_damaged_tile_is_refused(store):
    index = store_frozen(RUN, store.put, {"a": ARRAYS["state/seen"]})
    found = Frozen(RUN, store.get, index)
    (tile,) = [info.name for info in store.list("") if "/tile-" in info.name]
    store.delete(tile)
    store.put(tile, b"\0" * 12)
    with pytest.raises(IntegrityError, match="has digest"):
        found.read("a")


def test_a_leaf_that_learners_load_is_checked_by_digest(store):
    index = store_frozen(RUN, store.put, ARRAYS, loaded={"frozen/base"})
    found = Frozen(RUN, store.get, index)
    assert "frozen/base" not in found.names()
    found.check("frozen/base", ARRAYS["frozen/base"])
    with pytest.raises(IntegrityError, match="is not the run's"):
        found.check("frozen/base", ARRAYS["frozen/base"] + 1)


def test_an_index_of_an_earlier_commit_is_told_in_a_sentence(store):
    buffer = io.BytesIO()
    np.savez(buffer, count=ARRAYS["state/seen"])
    name = names.constants_object(RUN, shards.digest(buffer.getvalue()))
    store.put(name, buffer.getvalue())
    with pytest.raises(IntegrityError, match="created by another release"):
        Frozen(RUN, store.get, name)
