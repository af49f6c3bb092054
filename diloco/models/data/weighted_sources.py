"""Epochs over several data sources, mixed by weight. Pure.

Rules:
  1. An epoch has rows of each source in proportion to the source's weight, as many as the source
     that is exhausted first allows. So no row occurs twice in an epoch.
  2. In each source the next epoch resumes where the last one stopped, and wraps around at the
     source's end: every row is read before one is read again.
"""

import math
from collections.abc import Sequence

import numpy as np


class WeightedSources:
    """Maps each index of endless epochs to (number of a source, row of that source).

    grain calls this a selection map; the reader shuffles the order within an epoch.

    Args:
        lengths: the number of rows of each source.
        weights: weight of each source, above 0; only their proportions matter.

    Raises:
        ValueError: a source has less than one row in an epoch; the argument is its number.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float]) -> None:
        self._lengths = tuple(lengths)
        epochs = [length / weight for length, weight in zip(lengths, weights, strict=True)]
        most = min(epochs)
        # The one that is exhausted first is whole, whatever a product of floats gives.
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
