"""Work on a fragment's pieces, shared among threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.aggregator.arrays.grid import Pieces

Item = TypeVar("Item")
Result = TypeVar("Result")


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


# Pieces that are not worth a thread's start: a million elements at most.
LEAST_PIECES: Final = 16


def shared(pieces: Pieces, threads: int) -> list[Run]:
    """All pieces; several runs a thread, so that one that is held up does not hold up all."""
    longest = max(LEAST_PIECES, -(-len(pieces.segment_P) // (4 * threads)))
    return [
        Run(first, min(first + longest, last), shard)
        for shard, (start, last) in enumerate(pieces.of_ranges)
        for first in range(start, last, longest)
    ]


def share_out(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """Have `work` done on each item by some threads; what it gives, in order."""
    if threads == 1 or len(items) == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(work, items))


def as_bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Bfloat16s as the bits that kernels take; other arrays as they are."""
    return values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values
