"""An update is the same bit for bit however its sender cut it; what cannot be one is refused."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.aggregator.arrays import merge
from diloco.aggregator.arrays.grid import make_grid
from diloco.aggregator.arrays.merge import Contribution
from diloco.aggregator.owner.download_and_verify import read_parts, read_payload
from diloco.common.protocol import shards, slices, wire
from diloco.common.protocol.codecs import CODECS, Encoded
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.common.storage.store import MemoryStore
from diloco.learner.tensors.quantize_and_pack import encode

BLOCK = 16
LAYOUT = make_layout(
    [
        Tensor(name="w", shape=(24, 32), dtype="float32"),
        Tensor(name="b", shape=(5,), dtype="float32"),
    ],
    fragments=1,
    block=BLOCK,
)
SHARD_BLOCKS = 12
GRID = make_grid(LAYOUT.fragments[0], BLOCK, SHARD_BLOCKS * BLOCK)
BLOCKS = GRID.size // BLOCK
VALUES = np.random.default_rng(0).normal(size=GRID.size).astype(np.float32)


@functools.cache
def encoded(codec):
    return Encoded(*map(np.asarray, encode(codec, VALUES, BLOCK)))


def packed(codec, blocks):
    """A shard's bytes: blocks stand by themselves."""
    scales, codes = encoded(codec)
    rows = codes.reshape(BLOCKS, -1)[blocks].reshape(-1)
    return shards.pack(codec, Encoded(scales[blocks] if scales.size else scales, rows), BLOCK)


def stored(store, codec, parts):
    """An update whose shards hold these blocks."""
    entries = []
    for index, part in enumerate(parts):
        data = packed(codec, part)
        store.put(f"{codec}.{index}", data)
        entries.append(
            wire.Shard(
                name=f"{codec}.{index}",
                size_bytes=len(data),
                crc32c=shards.crc32c(data),
                slices=slices.describe(part),
            )
        )
    return tuple(entries)


def sharded(rng, most):
    return [np.sort(part) for part in slices.cut(rng.permutation(BLOCKS), most)]


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), st.integers(1, SHARD_BLOCKS), st.sampled_from(CODECS))
def test_parts_are_the_same_bits_however_they_were_cut(seed, most, codec):
    store = MemoryStore()
    ranges = [np.arange(start // BLOCK, stop // BLOCK) for start, stop in GRID.ranges]
    whole = tuple(read_parts(store, codec, stored(store, codec, ranges), GRID))
    other = MemoryStore()
    entries = stored(other, codec, sharded(np.random.default_rng(seed), most))
    found = tuple(read_parts(other, codec, entries, GRID))
    assert len(found) == len(whole) == 5
    for a, b in zip(found, whole, strict=True):
        assert (a.codes.dtype, a.scales.dtype) == (b.codes.dtype, b.scales.dtype)
        assert (a.codes.tobytes(), a.scales.tobytes()) == (b.codes.tobytes(), b.scales.tobytes())


@pytest.mark.parametrize("codec", CODECS)
def test_a_merge_is_the_same_bits_of_the_sum(codec):
    def merged(parts):
        store = MemoryStore()
        manifest = SimpleNamespace(codec=codec, shards=stored(store, codec, parts))
        payload = read_payload(store, manifest, GRID)
        total = merge.Accumulator(GRID)
        contribution = Contribution(payload.norms_S, 3.0, 0.5, 1.0)
        total.add(codec, payload.parts, merge.coefficients(GRID, contribution))
        factors_S = merge.factors(GRID, total, [contribution])
        return payload.norm, factors_S.tobytes(), payload.norms_S.tobytes()

    ranges = [np.arange(start // BLOCK, stop // BLOCK) for start, stop in GRID.ranges]
    columns = np.arange(48).reshape(24, 2)
    halves = [*slices.cut(columns[:, 0], 12), *slices.cut(columns[:, 1], 12), np.array([48])]
    for parts in (halves, sharded(np.random.default_rng(1), 5)):
        assert merged(parts) == merged(ranges)


def test_a_sum_that_is_begun_again_has_nothing_of_before():
    """Nor an update that waited to be added when the sum was discarded."""
    store = MemoryStore()
    ranges = [np.arange(start // BLOCK, stop // BLOCK) for start, stop in GRID.ranges]
    manifest = SimpleNamespace(codec="int4", shards=stored(store, "int4", ranges))
    payload = read_payload(store, manifest, GRID)
    contribution = Contribution(payload.norms_S, 3.0, 0.5, 1.0)
    fresh, again = merge.Accumulator(GRID), merge.Accumulator(GRID)
    for total, times in ((fresh, 1), (again, 2)):
        for _ in range(times):
            total.reset()
            total.add("int4", payload.parts, merge.coefficients(GRID, contribution))
    assert again.inputs == 1
    assert np.array_equal(again.total(), fresh.total())


def test_what_is_no_update_is_refused_before_it_is_read():
    entries = stored(MemoryStore(), "int4", sharded(np.random.default_rng(2), 7))
    wrong = {
        "hold 42": entries[:-1],
        "hold 56": (*entries, entries[0]),
        "two shards": (entries[0], entries[0], *entries[2:]),
        "at most 12": (
            entries[0].model_copy(update={"slices": slices.of_range(0, GRID.size, BLOCK)}),
        ),
        "fragment has 49": (
            entries[0].model_copy(
                update={"slices": slices.of_range(GRID.size, GRID.size + BLOCK, BLOCK)}
            ),
            *entries[1:],
        ),
    }
    for named, changed in wrong.items():
        with pytest.raises(WireError, match=named) as caught:
            tuple(read_parts(MemoryStore(), "int4", changed, GRID))
        assert caught.value.reason == "shards"


def test_an_object_of_other_blocks_than_its_slices_claim():
    store = MemoryStore()
    entries = stored(store, "int4", sharded(np.random.default_rng(3), 7))
    data = packed("int4", np.arange(6))
    store.put("short", data)
    claims = {"name": "short", "size_bytes": len(data), "crc32c": shards.crc32c(data)}
    changed = (entries[0].model_copy(update=claims), *entries[1:])
    with pytest.raises(WireError) as caught:
        tuple(read_parts(store, "int4", changed, GRID))
    assert caught.value.reason == "truncated"
