"""Compiles the kernels ahead of a run: `python -m diloco.aggregator.compile_kernels`.

A kernel is compiled at its first call with arrays of given types, which takes seconds. The types
depend only on a run's codecs and block size, so that the kernels can be called on small arrays
beforehand. The compiled code is kept on disk (`kernel_cache.py`).
"""

import sys
import time

import ml_dtypes
import numpy as np

from diloco.aggregator.arrays.grid import Grid
from diloco.aggregator.arrays.merge import Accumulator, segment_norms
from diloco.aggregator.arrays.outer import close_round, make_outer
from diloco.common.process.config import SyncSection
from diloco.common.protocol.codecs import (
    CODECS,
    Codec,
    Encoded,
    aligned_zeros,
    code_count,
    code_dtype,
    scale_count,
)

_BLOCKS = 4


def prepare(codec: Codec, delta_codec: Codec, block: int) -> float:
    """Compiles the kernels of merging, of the outer step and of the version delta; blocks.

    Args:
        codec: codec of updates.
        delta_codec: codec of version deltas.
        block: number of elements that share a scale.

    Returns:
        The seconds that it took; below one if all was compiled before.
    """
    began_s = time.perf_counter()
    size = _BLOCKS * block
    grid = Grid(
        size=size,
        block=block,
        ranges=((0, size),),
        lengths=np.array([_BLOCKS], np.int64),
        radial=np.ones(1, np.bool_),
    )
    update = Encoded(
        np.ones(scale_count(codec, size, block), ml_dtypes.bfloat16),
        np.zeros(code_count(codec, size), code_dtype(codec)),
    )
    segment_norms(grid, codec, [update])
    total = Accumulator(grid)
    total.add(codec, [update], np.ones(1, ml_dtypes.bfloat16))
    close_round(
        grid,
        total,
        np.ones(1, np.float32),
        theta_N=aligned_zeros(size),
        view_N=aligned_zeros(size),
        state={},
        optimizer=make_outer("sgd"),
        learning_rate=1.0,
        momentum=0.0,
        delta_codec=delta_codec,
    )
    return time.perf_counter() - began_s


def main() -> None:
    """Compiles for every codec with blocks of the default size, and prints its progress."""
    block = SyncSection().block
    for number, codec in enumerate(CODECS, start=1):
        sys.stderr.write(f"compiling the merge of {codec} ({number} of {len(CODECS)})\n")
        prepare(codec, codec, block)


if __name__ == "__main__":
    main()
