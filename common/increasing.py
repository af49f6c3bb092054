"""Increasing whole numbers in runs, such as sequences of a tape, which mostly follow each other."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import overload


class Increasing(Sequence[int]):
    """A list of whole numbers, each greater than the one before."""

    def __init__(self) -> None:
        # Of each run of neighbours its first number, and where in the list that stands.
        self._firsts, self._begins = array("q"), array("q")
        self._length = 0
        self._last = 0

    def append(self, number: int) -> None:
        """The next number."""
        if not self._length or number != self._last + 1:
            self._firsts.append(number)
            self._begins.append(self._length)
        self._length += 1
        self._last = number

    def find(self, number: int) -> int | None:
        """Where a number stands; None if it is not there."""
        index = self.first_from(number)
        return index if index < self._length and self[index] == number else None

    def first_from(self, number: int) -> int:
        """Where the first number that is not less stands; the length if there is none."""
        run = bisect_right(self._firsts, number) - 1
        if run < 0:
            return 0
        end = self._begins[run + 1] if run + 1 < len(self._begins) else self._length
        return min(self._begins[run] + number - self._firsts[run], end)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self._at(each) for each in range(*index.indices(self._length))]
        return self._at(range(self._length)[index])

    def _at(self, index: int) -> int:
        run = bisect_right(self._begins, index) - 1
        return self._firsts[run] + index - self._begins[run]

    def __iter__(self) -> Iterator[int]:
        for run, first in enumerate(self._firsts):
            begin = self._begins[run]
            end = self._begins[run + 1] if run + 1 < len(self._begins) else self._length
            yield from range(first, first + end - begin)
