"""What a machine can do at most: float32 values changed in place, by all of its cores.

Every ratio of the array benchmarks is to this figure, measured in the same run between the
repeats of what it is compared with, as the machines are shared and their speed changes.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.jit, donate_argnums=0)
def _increment(values_N: jax.Array) -> jax.Array:
    return values_N + 1


class Stream:
    """A vector of float32 values, as long as the one it is compared with."""

    def __init__(self, size: int) -> None:
        self._values_N = _increment(jnp.zeros(size))
        self._bytes = 8 * size

    def bytes_per_s(self) -> float:
        """Bytes read and written in a second, by the faster of two passes."""
        return self._bytes / min(seconds(self._pass) for _ in range(2))

    def _pass(self) -> None:
        self._values_N = _increment(self._values_N)
        self._values_N.block_until_ready()


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call, with whatever JAX arrays it returns."""
    began_s = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began_s


def table(rows: list[list[str]]) -> str:
    """Rows in columns; the first row is the heading, the first column is words."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def median(values: list[float]) -> float:
    """Median of repeats."""
    return statistics.median(values)
