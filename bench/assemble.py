"""What other shardings than the grid's cost the aggregator: `python -m bench.assemble`.

An update of one fragment in 8 shards, from objects in memory to verified parts for the merge: as
contiguous ranges, which are used where they lie, and as eighths of a tensor's columns, whose blocks
are copied to their places. The finest cut gives each shard every eighth block.
"""

import argparse
from functools import partial

import ml_dtypes
import numpy as np

from bench.streaming import median, seconds, table
from diloco.aggregator.arrays.grid import Grid, make_grid
from diloco.aggregator.shard_reader import read_parts
from diloco.common import shards, slices, wire
from diloco.common.codec import Encoded
from diloco.common.layout import Tensor, make_layout
from diloco.common.store import MemoryStore

BLOCK = 64
SHARDS = 8
ROW_BLOCKS = 128
REPEATS = 9


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--size", type=int, default=1 << 26, help="elements of the fragment")
    options = parser.parse_args()
    grid = _grid(options.size)
    updates = {name: _stored(grid, parts) for name, parts in _cuts(grid).items()}
    taken_s: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(REPEATS + 1):
        for name, (store, entries) in updates.items():
            work = partial(_read, store, entries, grid)
            taken_s[name].append(seconds(work))
    zero_copy_s = next(iter(taken_s.values()))[1:]
    rows = [["shards", "slices each", "ms", "times the first"]]
    for name, (_, entries) in updates.items():
        ratio = _ratio(taken_s[name][1:], zero_copy_s)
        milliseconds = f"{median(taken_s[name][1:]) * 1e3:.1f}"
        rows.append([name, str(len(entries[0].slices)), milliseconds, f"{ratio:.2f}"])
    print(f"{options.size:,} elements, int4, {SHARDS} shards of objects in memory\n")
    print(table(rows))


def _ratio(taken_s: list[float], base_s: list[float]) -> float:
    return median([one / base for one, base in zip(taken_s, base_s, strict=True)])


def _grid(size: int) -> Grid:
    layout = make_layout(
        [
            Tensor(
                name="x", shape=(size // ROW_BLOCKS // BLOCK, ROW_BLOCKS * BLOCK), dtype="float32"
            )
        ],
        fragments=1,
        block=BLOCK,
    )
    return make_grid(layout.fragments[0], BLOCK, size // SHARDS)


def _cuts(grid: Grid) -> dict[str, list[slices.Blocks]]:
    """Blocks of each shard, by what the cut is called."""
    whole_RxC = np.arange(grid.size // BLOCK).reshape(-1, ROW_BLOCKS)
    columns = np.split(whole_RxC, SHARDS, axis=1)
    return {
        "contiguous ranges": np.split(whole_RxC.reshape(-1), SHARDS),
        "columns of a tensor": [part.reshape(-1) for part in columns],
        "every eighth block": [whole_RxC.reshape(-1)[index::SHARDS] for index in range(SHARDS)],
    }


def _stored(grid: Grid, parts: list[slices.Blocks]) -> tuple[MemoryStore, list[wire.Shard]]:
    rng, store, entries = np.random.default_rng(0), MemoryStore(), []
    for index, part in enumerate(parts):
        codes = rng.integers(1, 16, part.size * grid.block // 2, dtype=np.uint8)
        codes |= codes[::-1] << 4
        scales = rng.uniform(1e-4, 2e-4, part.size).astype(ml_dtypes.bfloat16)
        data = shards.pack("int4", Encoded(scales, codes), grid.block)
        store.put(str(index), data)
        entries.append(
            wire.Shard(
                name=str(index),
                size_bytes=len(data),
                crc32c=shards.crc32c(data),
                slices=slices.describe(part),
            )
        )
    return store, entries


def _read(store: MemoryStore, entries: list[wire.Shard], grid: Grid) -> None:
    for _ in read_parts(store, "int4", entries, grid):
        pass


if __name__ == "__main__":
    main()
