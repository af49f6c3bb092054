"""Reads an update's shards from the store, verifies them, and puts their blocks in order."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from diloco.aggregator.arrays.grid import Grid
from diloco.common.protocol import shards, slices, wire
from diloco.common.protocol.codec import (
    Encoded,
    aligned_empty,
    code_count,
    code_dtype,
    scale_count,
)
from diloco.common.protocol.errors import ObjectTooLargeError, ObjectUnreadableError, WireError
from diloco.common.protocol.reasons import Reason

if TYPE_CHECKING:
    from diloco.aggregator.arrays.arithmetic import Arithmetic
    from diloco.aggregator.arrays.fragment import Payload


class Reads(Protocol):
    """The calls of a store that reading an update needs."""

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """As `ObjectStore.get`."""


def read_payload(
    store: Reads,
    manifest: wire.Manifest,
    grid: Grid,
    arithmetic: "Arithmetic | None" = None,
    threads: int = 1,
) -> "Payload":
    """Read and verify all shards of an update, for `arithmetic`; None: that of aggregators.

    Some threads measure it.

    Raises:
        ObjectMissingError: a shard is not there, though the manifest says that it is.
        WireError: a shard is not what the manifest says; "oversize" (then nothing is read),
            "checksum", "unreadable", or as `shards.unpack`; "shards" as `slices.partition`.
        StoreUnavailableError: a transient fault; StoreSlowError: a `Limited` store's time is over.
    """
    # Who only looks at updates needs no JAX.
    from diloco.aggregator.arrays.arithmetic import PRODUCTION
    from diloco.aggregator.arrays.fragment import payload_of

    parts = tuple(read_parts(store, manifest.codec, manifest.shards, grid))
    return payload_of(grid, manifest.codec, parts, arithmetic or PRODUCTION, threads)


def read_input(store: Reads, grid: Grid, taken: wire.Input) -> tuple[Encoded, ...]:
    """The verified parts of an update that a record names as an input.

    Raises:
        As `read_payload`.
    """
    return tuple(read_parts(store, taken.codec, taken.shards, grid))


def read_parts(
    store: Reads, codec: Any, entries: Sequence[wire.Shard], grid: Grid
) -> Iterator[Encoded]:
    """An update as one part for each of the grid's ranges in order, however its sender cut it.

    Memory: shards that are the grid's ranges are read one by one as the parts are asked for, and
    used where they lie. Others are copied to their places, which takes the update's scales and
    codes once, as they were sent, and one shard, which is at most as long as the longest range.

    Raises:
        As `read_payload`.
    """
    if not cut_alike(entries, grid):
        yield from _assemble(store, codec, entries, grid)
        return
    for entry, (start, stop) in zip(entries, grid.ranges, strict=True):
        yield _read_shard(store, codec, entry, stop - start, grid.block)


def cut_alike(entries: Sequence[wire.Shard], grid: Grid) -> bool:
    """Whether an update's shards are the grid's ranges."""
    if len(entries) != len(grid.ranges):
        return False
    return all(
        slices.is_range(entry.slices, start, stop, grid.block)
        for entry, (start, stop) in zip(entries, grid.ranges, strict=True)
    )


def _assemble(
    store: Reads, codec: Any, entries: Sequence[wire.Shard], grid: Grid
) -> tuple[Encoded, ...]:
    blocks = grid.size // grid.block
    most = max(stop - start for start, stop in grid.ranges) // grid.block
    counts = slices.partition([entry.slices for entry in entries], blocks, most)
    scales = aligned_empty(scale_count(codec, grid.size, grid.block), np.dtype(ml_dtypes.bfloat16))
    codes = aligned_empty(code_count(codec, grid.size), code_dtype(codec))
    for entry, count in zip(entries, counts, strict=True):
        part = _read_shard(store, codec, entry, count * grid.block, grid.block)
        slices.scatter(codes.reshape(blocks, -1), entry.slices, part.codes.reshape(count, -1))
        if scales.size:
            slices.scatter(scales[:, None], entry.slices, part.scales[:, None])
    return tuple(
        Encoded(
            scales[slice(*(scale_count(codec, end, grid.block) for end in ends))],
            codes[slice(*(code_count(codec, end) for end in ends))],
        )
        for ends in grid.ranges
    )


def _read_shard(store: Reads, codec: Any, entry: wire.Shard, count: int, block: int) -> Encoded:
    try:
        data = store.get(entry.name, entry.size_bytes)
    except ObjectTooLargeError as error:
        raise WireError(Reason.OVERSIZE, error.message) from error
    except ObjectUnreadableError as error:
        raise WireError(Reason.UNREADABLE, error.message) from error
    if len(data) == entry.size_bytes and shards.crc32c(data) != entry.crc32c:
        raise WireError(Reason.CHECKSUM, f"object {entry.name!r} is not what its manifest says")
    return shards.unpack(data, codec=codec, count=count, block=block)
