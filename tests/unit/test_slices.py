"""Slices: which blocks a shard holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.protocol import slices
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.wire import MAX_SLICES, Shard, Slice

BLOCKS = 200
GREATEST = (1 << 63) - 1
sets = st.sets(st.integers(0, BLOCKS - 1), min_size=1).map(lambda found: np.array(sorted(found)))


def box(start, shape, strides):
    return Slice(start=start, shape=shape, strides=strides)


@st.composite
def boxes(draw):
    """Blocks of a box of a row-major array, and the axes that the box does not fill."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    ends = [sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    whole = np.arange(np.prod(shape)).reshape(shape)
    return whole[tuple(slice(*end) for end in ends)].reshape(-1), whole.size


@given(sets)
def test_slices_give_back_the_blocks(blocks):
    found = slices.describe(blocks)
    np.testing.assert_array_equal(slices.expand(found, BLOCKS), blocks)
    assert slices.check(found, BLOCKS) == blocks.size
    assert found == slices.describe(blocks)


@given(boxes())
def test_a_box_of_a_tensor_is_one_slice(drawn):
    blocks, size = drawn
    (found,) = slices.describe(blocks)
    np.testing.assert_array_equal(slices.expand([found], size), blocks)


def test_boxes_of_several_tensors():
    first = np.arange(64).reshape(8, 8)[2:6, 4:8].reshape(-1)
    second = 64 + np.arange(60).reshape(3, 4, 5)[:, 1:3, 2:4].reshape(-1)
    assert slices.describe(np.concatenate([first, second])) == (
        box(20, (4, 4), (8, 1)),
        box(64 + 7, (3, 2, 2), (20, 5, 1)),
    )


@given(sets, st.integers(1, 50))
def test_parts_are_the_blocks_in_order(blocks, most):
    parts = slices.cut(blocks, most)
    np.testing.assert_array_equal(np.concatenate(parts), blocks)
    assert all(1 <= part.size <= most for part in parts)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ([box(0, (201,), (1,))], "200 blocks"),
        ([box(200, (1,), (1,))], "200 blocks"),
        ([box(GREATEST, (1,), (1,))], "200 blocks"),
        ([box(0, (2,), (200,))], "200 blocks"),
        ([box(0, (GREATEST,) * 4, (1,) * 4)], "ascend"),
        ([box(0, (GREATEST,), (GREATEST,))], "200 blocks"),
        ([box(0, (2, 3), (2, 1))], "ascend"),
        ([box(0, (2, 2), (1, 2))], "ascend"),
        ([box(0, (2, 2), (1,))], "strides"),
        ([box(5, (2,), (1,)), box(6, (1,), (1,))], "before end at 7"),
        ([box(5, (2,), (1,)), box(0, (1,), (1,))], "before end at 7"),
        ([box(0, (2,), (4,)), box(2, (1,), (1,))], "before end at 5"),
        ([Slice.model_construct(start=0, shape=(2,), strides=(-1,))], "ascend"),
        ([Slice.model_construct(start=0, shape=(0,), strides=(1,))], "ascend"),
        ([Slice.model_construct(start=-1, shape=(1,), strides=(1,))], "begins"),
        ([Slice.model_construct(start=0, shape=(), strides=())], "strides"),
        ([Slice.model_construct(start=0, shape=(1,) * 5, strides=(1,) * 5)], "strides"),
    ],
)
def test_slices_that_no_shard_has(wrong, named):
    with pytest.raises(WireError, match=named) as caught:
        slices.expand(wrong, BLOCKS)
    assert caught.value.reason == "shards"


def test_a_stride_that_is_never_taken_may_be_any():
    fine = [box(3, (1, 2), (GREATEST, 1)), box(7, (2, 1), (3, GREATEST))]
    np.testing.assert_array_equal(slices.expand(fine, 11), [3, 4, 7, 10])
    assert slices.partition([fine, [box(0, (3,), (1,)), box(5, (2,), (1,)), box(8, (2,), (1,))]],
                            11, 11) == [4, 7]  # fmt: skip


@given(st.permutations(range(60)), st.integers(1, 60), st.data())
def test_every_partition_passes_and_puts_rows_in_place(order, most, data):
    rows = np.arange(60 * 3).reshape(60, 3)
    parts = [np.sort(part) for part in slices.cut(np.array(order), most)]
    described = [slices.describe(part) for part in parts]
    assert slices.partition(described, 60, most) == [part.size for part in parts]
    put = np.full_like(rows, -1)
    for part, each in zip(parts, described, strict=True):
        slices.scatter(put, each, rows[part])
    np.testing.assert_array_equal(put, rows)
    # A block in two shards, or in none.
    wrong = data.draw(st.integers(0, 59))
    spoiled = np.where(parts[0] == parts[0][-1], wrong, parts[0])
    if wrong not in parts[0]:
        described[0] = slices.describe(np.sort(spoiled))
        with pytest.raises(WireError, match="two shards"):
            slices.partition(described, 60, most)
    with pytest.raises(WireError, match="hold"):
        slices.partition(described[1:], 60, most)


def test_limits_of_an_update():
    one = slices.of_range(0, 16, 16)
    with pytest.raises(WireError, match="at most 2"):
        slices.partition([slices.of_range(0, 48, 16)], 3, 2)
    with pytest.raises(WireError, match="8193 slices, at most 8192"):
        slices.partition([one * 4096, one * 4096, one], 3, 2)
    with pytest.raises(ValueError, match="at most 4096"):
        Shard(name="x", size_bytes=1, crc32c=0, slices=one * (MAX_SLICES + 1))
