"""Collections that are replaced, never changed, at a cost that hardly grows with their size.

The machine gives a new state for each event. A copy of a dictionary of all learners, or a median
over all of them, costs each event what the fleet is large, and a version its square.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from immutables import Map

K = TypeVar("K")
V = TypeVar("V")


class PersistentMap(Mapping[K, V]):
    """A mapping in the order in which its keys were first put, as a dictionary's.

    Args:
        items: the items at the beginning.
    """

    __slots__ = ("_map", "_next")

    def __init__(self, items: Mapping[K, V] | None = None) -> None:
        numbered = enumerate((items or {}).items())
        self._map: Map[K, tuple[int, V]] = Map({key: (at, value) for at, (key, value) in numbered})
        self._next = len(self._map)

    def put(self, key: K, value: V) -> "PersistentMap[K, V]":
        """The mapping with this value; an existing key keeps its place."""
        there = self._map.get(key)
        place = self._next if there is None else there[0]
        return self._made(self._map.set(key, (place, value)), self._next + (there is None))

    def drop(self, key: K) -> "PersistentMap[K, V]":
        """The mapping without this key, which must exist."""
        return self._made(self._map.delete(key), self._next)

    def place(self, key: K) -> int:
        """The number of a key's place, by which keys are in order."""
        return self._map[key][0]

    def unordered(self) -> Iterator[V]:
        """The values, where their order does not matter: without sorting."""
        return (value for _, value in self._map.values())

    def find(self, key: K) -> V | None:
        """The value of a key, if it is there; `get` without an exception."""
        entry = self._map.get(key)
        return None if entry is None else entry[1]

    def __getitem__(self, key: K) -> V:
        """The value of a key."""
        return self._map[key][1]

    def __contains__(self, key: object) -> bool:
        """Whether there is one."""
        return key in self._map

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._map)

    def __iter__(self) -> Iterator[K]:
        """The keys, in order."""
        return iter(sorted(self._map, key=self.place))

    def _made(self, entries: "Map[K, tuple[int, V]]", following: int) -> "PersistentMap[K, V]":
        made = object.__new__(type(self))
        made._map, made._next = entries, following
        return made


class Ranked:
    """Numbers in order, some of them more than once.

    Args:
        values: the numbers at the beginning.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values = array("d", sorted(values))

    def swap(self, old: float | None, new: float | None) -> "Ranked":
        """The numbers without one `old`, which must be there, and with `new` unless it is None."""
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
        """The lower one of two middle values; None if there is none."""
        return self._values[(len(self) - 1) // 2] if len(self) else None

    def upper_median(self, without: float | None, least: int) -> float | None:
        """The upper of two middle values once `without` is left out; None of fewer than `least`."""
        count = len(self) - (without is not None)
        if count < max(1, least):
            return None
        rank = count // 2
        if without is not None and bisect_left(self._values, without) <= rank:
            rank += 1
        return self._values[rank]

    def least(self) -> float | None:
        """The least of the numbers."""
        return self._values[0] if len(self) else None

    def __len__(self) -> int:
        """The number of numbers."""
        return len(self._values)


class Tally(Mapping[K, int]):
    """Counts of items, all above 0."""

    __slots__ = ("_map",)

    def __init__(self, keys: Iterable[K] = ()) -> None:
        counts: dict[K, int] = {}
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        self._map: Map[K, int] = Map(counts)

    def more(self, key: K, by: int = 1) -> "Tally[K]":
        """The counts with `by` added to one of them."""
        made, count = object.__new__(type(self)), self.of(key) + by
        made._map = self._map.set(key, count) if count else self._map.delete(key)
        return made

    def of(self, key: K) -> int:
        """The count of an item; 0 if it was not counted."""
        return self._map.get(key, 0)

    def __getitem__(self, key: K) -> int:
        """The count of an item."""
        return self._map[key]

    def __contains__(self, key: object) -> bool:
        """Whether there is any."""
        return key in self._map

    def __len__(self) -> int:
        """The number of different items."""
        return len(self._map)

    def __iter__(self) -> Iterator[K]:
        """Each counted item once, in no order."""
        return iter(self._map)
