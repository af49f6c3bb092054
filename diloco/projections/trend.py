"""How a learner's loss, norm and agreement went over a run, in few points whatever its length."""

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from diloco.common import wire

# Points that are kept: beyond, every other one is let go.
POINTS = 64


class Point(NamedTuple):
    """A merged update: its training loss, and its norm relative to the median of its round."""

    at_s: float
    loss: float
    norm: float


class Trend:
    """Points spread over all that came."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._stride = 1
        self._came = 0

    def add(self, point: Point) -> None:
        """The next one."""
        if self._came % self._stride == 0:
            self.points.append(point)
        self._came += 1
        if len(self.points) > POINTS:
            self.points = self.points[::2]
            self._stride *= 2


def points_of(record: wire.Record) -> Iterator[tuple[str, Point]]:
    """(learner, point) of each update that a record merges."""
    usual = median([taken.norm for taken in record.inputs] or [1.0]) or 1.0
    for taken in record.inputs:
        yield taken.learner, Point(record.closed_at_s, taken.loss, taken.norm / usual)
