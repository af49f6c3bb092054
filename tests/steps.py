"""Outer steps along given gradients, for tests of the arithmetic."""

import ml_dtypes
import numpy as np

from diloco.aggregator.arrays.grid import Grid
from diloco.aggregator.arrays.merge import Accumulator
from diloco.aggregator.arrays.outer import OuterOptimizer, State, close_round, make_outer
from diloco.common.protocol.codecs import Codec, Encoded

NO_SCALES = np.empty(0, ml_dtypes.bfloat16)


def grid_of(size: int, block: int = 16, shard_elements: int = 1 << 30) -> Grid:
    """A grid in which each block is a segment, so that each has a factor of its own."""
    starts = range(0, size, shard_elements)
    return Grid(
        size=size,
        block=block,
        ranges=tuple((start, min(start + shard_elements, size)) for start in starts),
        lengths=np.ones(size // block, np.int64),
        radial=np.zeros(size // block, np.bool_),
    )


def summed(grid: Grid, gradient_N: np.ndarray) -> Accumulator:
    """A sum that is this gradient."""
    total = Accumulator(grid)
    parts = [Encoded(NO_SCALES, gradient_N[start:stop]) for start, stop in grid.ranges]
    total.add("float32", parts, np.ones(len(grid.lengths), ml_dtypes.bfloat16))
    return total


def take_step(
    optimizer: OuterOptimizer,
    theta_N: np.ndarray,
    gradient_N: np.ndarray,
    state: State,
    *,
    learning_rate: float,
    momentum: float,
    factors_S: np.ndarray | None = None,
    grid: Grid | None = None,
) -> None:
    """Move `theta_N` and `state` by one step of an outer optimizer."""
    grid = grid or grid_of(theta_N.size)
    close_round(
        grid,
        summed(grid, gradient_N),
        np.ones(len(grid.lengths), np.float32) if factors_S is None else factors_S,
        theta_N=theta_N,
        view_N=theta_N.copy(),
        state=state,
        optimizer=optimizer,
        learning_rate=learning_rate,
        momentum=momentum,
        delta_codec="float32",
    )


def advance_view(
    theta_N: np.ndarray, view_N: np.ndarray, codec: Codec, block: int, threads: int = 1
) -> Encoded:
    """Move the view towards parameters that stay where they are; the delta."""
    grid = grid_of(theta_N.size, block)
    return close_round(
        grid,
        Accumulator(grid),
        np.ones(len(grid.lengths), np.float32),
        theta_N=theta_N,
        view_N=view_N,
        state={},
        optimizer=make_outer("sgd"),
        learning_rate=0.0,
        momentum=0.0,
        delta_codec=codec,
        threads=threads,
    )
