"""Compiles Numba kernels before a run: `python -m diloco.aggregator.compile_kernels`.

A kernel is a compiled loop of the merge or of the outer step. Numba compiles a kernel at its first
call with arrays of given types, which takes seconds. These types depend only on a run's codecs and
block size, so calls on small arrays compile all that a run needs. The compiled code is cached on
disk (`kernel_cache.py`).
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
    """Compiles the kernels of the merge, the outer step and the version delta; blocks the thread.

    Args:
        codec: codec of updates.
        delta_codec: codec of version deltas.
        block: number of elements that share a scale.

    Returns:
        The duration in seconds; below one if the disk cache had all kernels.
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
    """Compiles the kernels of every codec for the default block size; reports on stderr."""
    block = SyncSection().block
    for number, codec in enumerate(CODECS, start=1):
        sys.stderr.write(f"compiling the merge of {codec} ({number} of {len(CODECS)})\n")
        prepare(codec, codec, block)


if __name__ == "__main__":
    main()
