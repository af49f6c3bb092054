"""Sources in given proportions, as an epoch over several of them. Pure.

Rules:
  1. An epoch has of each source a number of rows in proportion to its weight, as many as the source
     that is exhausted first allows. So none of them is twice in an epoch.
  2. The next epoch goes on where the last one stopped, in each source, and from its end to its
     beginning: every row is read before one is read again.
"""

import math
from collections.abc import Sequence

import numpy as np


class WeightedSources:
    """The source and the row for each index of an endless order of epochs.

    grain calls this a selection map; the reader shuffles the order within an epoch.

    Args:
        lengths: rows of each source.
        weights: of each, above 0; in proportion.

    Raises:
        ValueError: a source has less than a row in an epoch.
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
