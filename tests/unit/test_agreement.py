"""Cosines between updates: from records alone, and from their shards."""

import jax.numpy as jnp
import numpy as np
import pytest
from records import make_record

from diloco.aggregator.arrays import merge
from diloco.aggregator.arrays.grid import make_grid
from diloco.common.process.config import SyncSection
from diloco.common.protocol import shards, slices, wire
from diloco.common.protocol.codecs import decode_numpy
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.common.storage.store import MemoryStore
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.run.agreement import Pairs, compare_round, mean_cosine

BLOCK = 16
CODEC = "int4"
SYNC = SyncSection(fragments=1, block=BLOCK, codec=CODEC, shard_elements=1 << 10)
LAYOUT = make_layout([Tensor(name="w", shape=(64, 48), dtype="float32")], fragments=1, block=BLOCK)
PLAIN = make_layout(
    [Tensor(name="w", shape=(64, 48), dtype="float32")], fragments=1, block=BLOCK,
    hint=lambda *_: TensorHint(merge="average"),
)  # fmt: skip


def a_round(layout, store, *, updates=3, alike=0.7, weights=(1.0, 2.0, 5.0), discounts=(1, 0.7, 1)):
    """A record of a merge as the aggregator makes it, and the exact vectors merged."""
    rng = np.random.default_rng(5)
    (fragment,) = layout.fragments
    grid = make_grid(fragment, BLOCK, SYNC.shard_elements)
    common = rng.normal(size=fragment.size)
    accumulator = merge.Accumulator(grid)
    contributions, inputs, vectors = [], [], []
    for index in range(updates):
        own = rng.normal(size=fragment.size)
        vector = (alike * common + (1 - alike) * own).astype(np.float32) * (index + 1)
        parts = [encode(CODEC, jnp.asarray(vector[a:b]), BLOCK) for a, b in grid.ranges]
        norms = merge.segment_norms(grid, CODEC, parts)
        contribution = merge.Contribution(norms, weights[index], discounts[index], 1.0)
        coefficients = merge.coefficients(grid, contribution)
        accumulator.add(CODEC, parts, coefficients)
        contributions.append(contribution)
        vectors.append(np.concatenate([decode_numpy(CODEC, part, BLOCK) for part in parts]))
        refs = tuple(put(store, f"u{index}.{n}", part, span) for n, (part, span) in
                     enumerate(zip(parts, grid.ranges, strict=True)))  # fmt: skip
        inputs.append(
            wire.Input(
                learner=f"l{index}", incarnation=1, seq=1, stream_seq=1, codec=CODEC, shards=refs,
                weight=weights[index], staleness=0, discount=discounts[index], clip=1.0, norm=1.0,
                tokens=1, steps=1, loss=1.0, final=False, coefficients=coefficients.tobytes(),
                weight_unit=0, steps_credited=1, tokens_credited=1, announced_at_s=1000.0,
            )
        )  # fmt: skip
    factors = merge.factors(grid, accumulator, contributions)
    record = make_record(inputs=tuple(inputs), factors=factors.tobytes())
    return record, np.stack(vectors)


def put(store, name, part, span):
    data = shards.pack(CODEC, part, BLOCK)
    store.put(name, data)
    return wire.Shard(
        name=name,
        size_bytes=len(data),
        crc32c=shards.crc32c(data),
        slices=slices.of_range(*span, BLOCK),
    )


def cosines(vectors):
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.7, 0.95])
def test_a_record_tells_the_mean_cosine(alike):
    record, vectors = a_round(LAYOUT, MemoryStore(), alike=alike)
    found = mean_cosine(record, np.asarray([True]))
    shares = np.asarray([taken.weight * taken.discount for taken in record.inputs])
    pairs = np.outer(shares, shares) * (1 - np.eye(len(shares)))
    assert found == pytest.approx((cosines(vectors) * pairs).sum() / pairs.sum(), abs=0.01)


def test_a_plain_average_tells_none():
    record, _ = a_round(PLAIN, MemoryStore())
    assert mean_cosine(record, np.asarray([False])) is None


def test_one_update_agrees_with_nobody():
    record, _ = a_round(LAYOUT, MemoryStore(), updates=1)
    assert mean_cosine(record, np.asarray([True])) is None


def test_shards_tell_every_pair():
    store = MemoryStore()
    record, vectors = a_round(LAYOUT, store)
    assert len(record.inputs[0].shards) > 1
    found = compare_round(LAYOUT, SYNC, store, record).cosines
    np.testing.assert_allclose(found, cosines(vectors), atol=1e-5)
    pairs = Pairs(["l2", "l1", "l0", "nobody"])
    pairs.add(record, found)
    mean = pairs.mean()
    assert mean[0, 1] == pytest.approx(found[2, 1])
    assert np.isnan(mean[3]).all()


def test_parameters_tell_which_update_leads_to_zero():
    store = MemoryStore()
    record, vectors = a_round(LAYOUT, store)
    # An update is taken from the parameters: along them it leads to zero.
    parameters = vectors[1] + 0.1 * np.random.default_rng(6).normal(size=vectors[1].size)
    store.put(record.snapshot.name, parameters.astype(np.float32).tobytes())
    assert compare_round(LAYOUT, SYNC, store, record).to_zero is None
    found = compare_round(LAYOUT, SYNC, store, record, parameters=True).to_zero
    np.testing.assert_allclose(found, cosines(np.stack([parameters, *vectors]))[0, 1:], atol=1e-5)
    store.delete(record.snapshot.name)
    gone = compare_round(LAYOUT, SYNC, store, record, parameters=True)
    assert gone.to_zero is None
    np.testing.assert_allclose(gone.cosines, cosines(vectors), atol=1e-5)


def test_shards_that_are_gone():
    store = MemoryStore()
    record, _ = a_round(LAYOUT, store)
    store.delete(record.inputs[1].shards[0].name)
    assert compare_round(LAYOUT, SYNC, store, record) is None
