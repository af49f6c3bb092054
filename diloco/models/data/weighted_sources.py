"""Defines epochs over several data sources that are mixed by weight. Pure.

Rules:
  1. An epoch has rows of each source in proportion to the source's weight, and as many as possible
     without reading a row twice: the source with the fewest rows for its weight is read whole.
  2. The next epoch resumes in each source after the last row that was read, and wraps around at the
     source's end: every row of a source is read before any row is read again.
"""

import math
from collections.abc import Sequence

import numpy as np


class WeightedSources:
    """Maps each index from 0 on to (number of a source, row of that source).

    The first `len` indices are the first epoch, the next `len` the second, and so on without end.
    grain calls such an object a selection map; the reader shuffles the order within an epoch.

    Args:
        lengths: the number of rows of each source.
        weights: weight of each source, above 0; only their proportions matter.

    Attributes:
        parts: the number of rows of each source in an epoch.

    Raises:
        ValueError: a source would have less than one row in an epoch; the error's argument is the
            source's number.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float]) -> None:
        self._lengths = tuple(lengths)
        epochs = [length / weight for length, weight in zip(lengths, weights, strict=True)]
        most = min(epochs)
        # The source that is exhausted first is read whole, whatever a product of floats gives.
        self.parts = tuple(
            length if epoch == most else min(length, math.floor(most * weight))
            for length, weight, epoch in zip(lengths, weights, epochs, strict=True)
        )
        if not all(self.parts):
            raise ValueError(self.parts.index(0))
        self._ends = np.cumsum(self.parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[int, int]:
        epoch, place = divmod(index, len(self))
        source = int(np.searchsorted(self._ends, place, side="right"))
        number = place - (int(self._ends[source - 1]) if source else 0)
        return source, (epoch * self.parts[source] + number) % self._lengths[source]
