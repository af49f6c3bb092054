"""Work on a fragment's pieces, shared among threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.aggregator.arrays.grid import Pieces


class Run(NamedTuple):
    """Neighbouring pieces of one shard's range, which one thread works on.

    Attributes:
        shard: its index.
        first: piece.
        last: piece, and one.
    """

    first: int
    last: int
    shard: int


def shared(pieces: Pieces, threads: int) -> list[Run]:
    """All pieces; several runs for each thread, so that one that is held up does not hold up all."""
    longest = -(-len(pieces.segment_P) // (4 * threads))
    return [
        Run(first, min(first + longest, last), shard)
        for shard, (start, last) in enumerate(pieces.of_ranges)
        for first in range(start, last, longest)
    ]


def share_out(work: Callable[[Any], None], items: Sequence[Any], threads: int) -> None:
    """Have `work` done on each item by some threads."""
    if threads == 1 or len(items) == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        list(pool.map(work, items))


def as_bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Bfloat16s as the bits that kernels take; other arrays as they are."""
    return values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values
