"""The numeric functions on a fragment's arrays, as one value that a simulation can replace."""

from collections.abc import Callable
from typing import NamedTuple

from diloco.aggregator.arrays import centering, merge, outer
from diloco.aggregator.arrays.codec_kernels import Vector
from diloco.aggregator.arrays.grid import Grid
from diloco.aggregator.arrays.merge import Accumulator, Norms
from diloco.common.protocol.codecs import Encoded


class Arithmetic(NamedTuple):
    """The functions of `merge`, `centering` and `outer` that compute with arrays, by their names.

    Attributes:
        accumulator: returns an empty sum over a grid, computed by a number of threads.
    """

    accumulator: Callable[[Grid, int], Accumulator] = merge.Accumulator
    segment_norms: Callable[..., Norms] = merge.segment_norms
    distances: Callable[..., Norms] = centering.distances
    coefficients: Callable[..., Vector] = merge.coefficients
    factors: Callable[..., Vector] = merge.factors
    close_round: Callable[..., Encoded] = outer.close_round


PRODUCTION = Arithmetic()
