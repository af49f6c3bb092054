"""Immutable collections: each change returns a new one, at little cost even for large ones.

The machine returns a new state for each event. Copying a dictionary of all learners, or computing a
median over all of them, would cost each event time in proportion to the fleet.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from immutables import Map

K = TypeVar("K")
V = TypeVar("V")


class PersistentMap(Mapping[K, V]):
    """An immutable mapping, in the order in which its keys were first put.

    Args:
        items: the initial items.
    """

    __slots__ = ("_map", "_next")

    def __init__(self, items: Mapping[K, V] | None = None) -> None:
        numbered = enumerate((items or {}).items())
        self._map: Map[K, tuple[int, V]] = Map({key: (at, value) for at, (key, value) in numbered})
        self._next = len(self._map)

    def put(self, key: K, value: V) -> "PersistentMap[K, V]":
        """Returns the mapping with `key` set to `value`; an existing key keeps its position."""
        there = self._map.get(key)
        place = self._next if there is None else there[0]
        return self._made(self._map.set(key, (place, value)), self._next + (there is None))

    def drop(self, key: K) -> "PersistentMap[K, V]":
        """Returns the mapping without `key`, which must exist."""
        return self._made(self._map.delete(key), self._next)

    def place(self, key: K) -> int:
        """Returns a key's sort number: keys are ordered by these numbers, which may have gaps."""
        return self._map[key][0]

    def unordered(self) -> Iterator[V]:
        """Yields the values in any order, which is faster."""
        return (value for _, value in self._map.values())

    def find(self, key: K) -> V | None:
        """Returns the value of a key; None if there is none. Faster than `get`."""
        entry = self._map.get(key)
        return None if entry is None else entry[1]

    def __getitem__(self, key: K) -> V:
        """Returns the value of a key."""
        return self._map[key][1]

    def __contains__(self, key: object) -> bool:
        """True if the key exists."""
        return key in self._map

    def __len__(self) -> int:
        """Returns the number of keys."""
        return len(self._map)

    def __iter__(self) -> Iterator[K]:
        """Yields the keys, in order."""
        return iter(sorted(self._map, key=self.place))

    def _made(self, entries: "Map[K, tuple[int, V]]", following: int) -> "PersistentMap[K, V]":
        made = object.__new__(type(self))
        made._map, made._next = entries, following
        return made


class Ranked:
    """An immutable sorted collection of numbers, which may repeat.

    Args:
        values: the initial numbers.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values = array("d", sorted(values))

    def swap(self, old: float | None, new: float | None) -> "Ranked":
        """Returns the numbers without one `old`, which must exist, and with one `new`."""
        if old == new:
            return self
        made, values = object.__new__(Ranked), self._values
        if old is not None:
            place = bisect_left(values, old)
            values = values[:place] + values[place + 1 :]
        if new is not None:
            place = bisect_left(values, new)
            values = values[:place] + array("d", (new,)) + values[place:]
        made._values = values
        return made

    def lower_median(self) -> float | None:
        """Returns the median, the lower of two middle values; None if there are no numbers."""
        return self._values[(len(self) - 1) // 2] if len(self) else None

    def upper_median(self, without: float | None, least: int) -> float | None:
        """Returns the upper median of all numbers but one.

        None if fewer than `least` numbers remain.

        Args:
            without: a number of the collection that is left out once; None: leave out none.
            least: the fewest numbers that have a median.
        """
        count = len(self) - (without is not None)
        if count < max(1, least):
            return None
        rank = count // 2
        if without is not None and bisect_left(self._values, without) <= rank:
            rank += 1
        return self._values[rank]

    def least(self) -> float | None:
        """Returns the least number; None if there are no numbers."""
        return self._values[0] if len(self) else None

    def __len__(self) -> int:
        """Returns the number of numbers."""
        return len(self._values)


class Tally(Mapping[K, int]):
    """An immutable count of items; an item whose count is 0 is not in the mapping."""

    __slots__ = ("_map",)

    def __init__(self, keys: Iterable[K] = ()) -> None:
        counts: dict[K, int] = {}
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        self._map: Map[K, int] = Map(counts)

    def more(self, key: K, by: int = 1) -> "Tally[K]":
        """Returns the counts with `by`, which may be negative, added to the count of `key`."""
        made, count = object.__new__(type(self)), self.of(key) + by
        made._map = self._map.set(key, count) if count else self._map.delete(key)
        return made

    def of(self, key: K) -> int:
        """Returns the count of an item; 0 if the item is not in the mapping."""
        return self._map.get(key, 0)

    def __getitem__(self, key: K) -> int:
        """Returns the count of an item; raises `KeyError` if the count is 0."""
        return self._map[key]

    def __contains__(self, key: object) -> bool:
        """True if the item's count is above 0."""
        return key in self._map

    def __len__(self) -> int:
        """Returns the number of different items."""
        return len(self._map)

    def __iter__(self) -> Iterator[K]:
        """Yields each counted item once, in any order."""
        return iter(self._map)
