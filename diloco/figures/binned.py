"""Curves of many values in few points: quantiles in bins. No drawing is loaded for it."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

# Values that a quantile is taken of.
FEWEST = 12


class Binned(NamedTuple):
    """Values in bins along x: centres, quantiles and means of those bins that hold any."""

    centre: Column
    low: Column
    middle: Column
    high: Column
    mean: Column


def binned(x: Column, y: Column, bins: int) -> Binned:
    """10 %, 50 % and 90 % quantiles of `y` in bins of equal numbers of values along `x`.

    At most `bins`, and fewer where a bin would hold less than a dozen values.
    """
    order = np.argsort(x, kind="stable")
    count = int(np.clip(len(order) // FEWEST, 1, bins))
    parts = [part for part in np.array_split(order, count) if part.size]
    quantiles = np.asarray([np.quantile(y[part], (0.1, 0.5, 0.9)) for part in parts])
    centre = np.asarray([x[part].mean() for part in parts])
    quantiles = quantiles.reshape(-1, 3)
    mean = np.asarray([y[part].mean() for part in parts])
    return Binned(centre, quantiles[:, 0], quantiles[:, 1], quantiles[:, 2], mean)
