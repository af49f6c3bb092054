"""The blocks of a fragment's vector that a shard holds: strided boxes of whole blocks.

Shapes: B blocks of a fragment, n blocks of a shard, W items of a block.

A fragment's vector is a sequence of blocks. A tensor's slice on one device of a mesh is a box of
the tensor's rows and columns, so its blocks are a box too: `Slice` describes the box by start,
shape and strides. A shard holds the blocks of one or more slices, in ascending order. A reader of
shards needs to know nothing of meshes; a learner with another sharding sends other slices of the
same blocks.

`check` and `partition` check slices from a peer with Python's integers before any array is made.
Only slices that have passed them may reach `scatter`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from diloco.common.protocol.errors import WireError
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.wire import MAX_AXES, Slice

Blocks = npt.NDArray[np.int64]

# The most slices of all shards of an update together; `wire.MAX_SLICES` is the most of one shard.
MOST_SLICES: Final = 1 << 13


def of_range(start: int, stop: int, block: int) -> tuple[Slice, ...]:
    """Returns the one slice of a shard with the elements [start, stop), multiples of `block`."""
    return (Slice(start=start // block, shape=((stop - start) // block,), strides=(1,)),)


def is_range(slices: Sequence[Slice], start: int, stop: int, block: int) -> bool:
    """True if `slices` are those that `of_range` returns."""
    if len(slices) != 1:
        return False
    found = (slices[0].start, slices[0].shape, slices[0].strides)
    return found == (start // block, ((stop - start) // block,), (1,))


def describe(blocks_n: Blocks) -> tuple[Slice, ...]:
    """Returns a short list of slices whose blocks, one slice after the other, are `blocks_n`.

    Runs of consecutive blocks become slices. Two passes then join equal slices at equal distances
    into one, so the blocks of a tensor's slice with up to three sharded axes become one slice.

    Args:
        blocks_n: ascending and distinct, int64 [n].
    """
    ends = np.flatnonzero(np.diff(blocks_n, append=blocks_n[-1:] + 2) != 1) + 1
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    boxes = [
        Slice(start=start, shape=(length,), strides=(1,))
        for start, length in zip(blocks_n[begins].tolist(), (ends - begins).tolist(), strict=True)
    ]
    return tuple(_grouped(_grouped(boxes)))


def _grouped(boxes: Sequence[Slice]) -> list[Slice]:
    """Joins equal boxes at equal distances into one box with one more axis."""
    steps = [
        after.start - before.start
        if (after.shape, after.strides) == (before.shape, before.strides)
        else 0
        for before, after in pairwise(boxes)
    ]
    grouped, at = [], 0
    while at < len(boxes):
        stop = at
        while stop < len(steps) and steps[stop] == steps[at] > 0:
            stop += 1
        first = boxes[at]
        if stop > at:
            shape, strides = (stop - at + 1, *first.shape), (steps[at], *first.strides)
            first = Slice(start=first.start, shape=shape, strides=strides)
        grouped.append(first)
        at = stop + 1
    return grouped


def expand(slices: Sequence[Slice], blocks: int) -> Blocks:
    """Returns the blocks of a shard's slices, ascending, int64 [n].

    Raises:
        WireError: as `check`.
    """
    check(slices, blocks)
    return np.concatenate([_indices(box) for box in slices])


def _indices(box: Slice) -> Blocks:
    found = np.asarray([box.start], np.int64)
    for length, stride in _axes(box):
        found = (found[:, None] + np.arange(length, dtype=np.int64) * stride).reshape(-1)
    return found


def cut(blocks_n: Blocks, most: int) -> list[Blocks]:
    """Cuts `blocks_n` into consecutive parts of at most `most` blocks, one for each shard."""
    return [blocks_n[start : start + most] for start in range(0, blocks_n.size, most)]


def check(slices: Sequence[Slice], blocks: int) -> int:
    """Checks a shard's slices; returns the number of blocks in them.

    The time does not depend on the sizes that the slices claim.

    Args:
        slices: the slices of a peer's shard.
        blocks: number of blocks of the fragment, B.

    Raises:
        WireError: "shards": a slice's shape and strides do not fit each other, the blocks do not
            ascend strictly, or a block lies outside of the fragment.
    """
    after, count = 0, 0
    for box in slices:
        if len(box.shape) != len(box.strides) or not 1 <= len(box.shape) <= MAX_AXES:
            raise WireError(
                Reason.SHARDS, f"a slice has axes {box.shape} and strides {box.strides}"
            )
        extent = 1
        for length, stride in reversed(list(zip(box.shape, box.strides, strict=True))):
            if length < 1 or (length > 1 and stride < extent):
                raise WireError(
                    Reason.SHARDS, f"blocks of a slice {box.shape} by {box.strides} do not ascend"
                )
            extent += (length - 1) * stride
        if box.start < after:
            raise WireError(
                Reason.SHARDS, f"a slice begins with block {box.start}, those before end at {after}"
            )
        after = box.start + extent
        if after > blocks:
            raise WireError(
                Reason.SHARDS, f"a slice ends at block {after}, the fragment has {blocks} blocks"
            )
        count += math.prod(box.shape)
    return count


def partition(shards: Sequence[Sequence[Slice]], blocks: int, most: int) -> list[int]:
    """Checks that the shards of an update hold each block once; returns the blocks in each shard.

    Allocates B bytes, but only after the numbers of blocks have been found right.

    Args:
        shards: the slices of each shard, from a peer's manifest.
        blocks: number of blocks of the fragment, B.
        most: the largest number of blocks in a shard.

    Raises:
        WireError: "shards": as `check`; a shard is empty or has more than `most` blocks; there are
            more than `MOST_SLICES` slices; a block is in no shard, or in two.
    """
    slices = sum(len(each) for each in shards)
    if slices > MOST_SLICES:
        raise WireError(Reason.SHARDS, f"the shards have {slices} slices, at most {MOST_SLICES}")
    counts = [check(each, blocks) for each in shards]
    wrong = next((count for count in counts if not 1 <= count <= most), None)
    if wrong is not None:
        raise WireError(Reason.SHARDS, f"a shard holds {wrong} blocks, the run has at most {most}")
    if sum(counts) != blocks:
        raise WireError(
            Reason.SHARDS, f"the shards hold {sum(counts)} blocks, the fragment {blocks}"
        )
    held_B = np.zeros(blocks, np.bool_)
    for box in (box for each in shards for box in each):
        view = _view(held_B, box)
        if view.any():
            raise WireError(
                Reason.SHARDS, f"a block of the slice from {box.start} is in two shards"
            )
        view[...] = True
    return counts


def scatter(
    rows_BxW: npt.NDArray[Any], slices: Sequence[Slice], rows_nxW: npt.NDArray[Any]
) -> None:
    """Copies the rows of a shard to their places among the fragment's rows.

    Args:
        rows_BxW: the fragment's rows; changed in place.
        slices: the shard's slices, which `check` or `partition` has passed for B.
        rows_nxW: the shard's rows.
    """
    rows_B, rows_n = _items(rows_BxW), _items(rows_nxW)
    done = 0
    for box in slices:
        view = _view(rows_B, box)
        count = math.prod(box.shape)
        view[...] = rows_n[done : done + count].reshape(view.shape)
        done += count


def _items(rows_BxW: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns each row as one item of raw bytes, which NumPy copies two to four times as fast."""
    row_bytes = rows_BxW.shape[1] * rows_BxW.itemsize
    kind = np.dtype(f"u{row_bytes}") if row_bytes in (1, 2, 4, 8) else np.dtype(f"V{row_bytes}")
    return rows_BxW.view(np.uint8).view(kind).reshape(-1)


def _view(rows_B: npt.NDArray[Any], box: Slice) -> npt.NDArray[Any]:
    """Returns a view [*shape] of the rows of a checked slice, without a copy or an index array."""
    strides = [stride * rows_B.itemsize for _, stride in _axes(box)]
    return np.lib.stride_tricks.as_strided(rows_B[box.start :], box.shape, strides)


def _axes(box: Slice) -> list[tuple[int, int]]:
    """Returns (length, stride in blocks) of each axis; an axis of length 1 gets the stride 0."""
    return [
        (length, stride if length > 1 else 0)
        for length, stride in zip(box.shape, box.strides, strict=True)
    ]
