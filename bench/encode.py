"""Encoding on the device: `python -m bench.encode`.

Float32 blocks that lie on the device, as a learner's tensors do, to codes on the device.
Bytes are those of the input; the ratio is to this machine's streaming bandwidth, which counts
reading and writing, so reading alone at full speed would show as 100 %.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from bench.streaming import Stream, median, seconds, table
from diloco.common.codec import CODECS
from diloco.common.quantize import encode_blocks

Work = Callable[[], Any]
REPEATS = 11
FLOOR_BYTES_PER_S = 4e9


def main() -> None:
    """Print the table; with --check, fail below the floor."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--size", type=int, default=1 << 24, help="elements")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--check", action="store_true", help="fail below the floor")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = (options.size // options.block, options.block)
    new, old = ((jax.device_put(rng.standard_normal(shape, dtype=np.float32)),) for _ in range(2))
    works: dict[str, Work] = {codec: partial(encode_blocks, codec, new) for codec in CODECS}
    works["int4 of a difference"] = partial(encode_blocks, "int4", new, old)
    speeds, bandwidths = _measure(works, options.size)
    rows = [["codec", "ms", "GB/s of input", "of streaming"]]
    for name, each in speeds.items():
        ratio = median([speed / band for speed, band in zip(each, bandwidths, strict=True)])
        taken_s = 4 * options.size / median(each)
        rows.append([name, f"{taken_s * 1e3:.1f}", f"{median(each) / 1e9:.1f}", f"{ratio:.0%}"])
    held = median(speeds["int4"]) >= FLOOR_BYTES_PER_S
    print(f"{options.size:,} elements, blocks of {options.block}")
    print(f"streaming in place, float32: {median(bandwidths) / 1e9:.1f} GB/s\n")
    print(table(rows))
    print(f"\nfloor of int4, {FLOOR_BYTES_PER_S / 1e9:.0f} GB/s: {'held' if held else 'MISSED'}")
    if options.check and not held:
        sys.exit(1)


def _measure(works: dict[str, Work], size: int) -> tuple[dict[str, list[float]], list[float]]:
    """Bytes of input per second of each work, and the bandwidth, in turns."""
    stream = Stream(size)
    speeds: dict[str, list[float]] = {name: [] for name in works}
    bandwidths = []
    for work in works.values():
        seconds(work)
    for _ in range(REPEATS):
        bandwidths.append(stream.bytes_per_s())
        for name, work in works.items():
            speeds[name].append(4 * size / seconds(work))
    return speeds, bandwidths


if __name__ == "__main__":
    main()
