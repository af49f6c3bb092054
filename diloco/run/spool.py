"""Keeps messages of a tape in a file, and decodes them on access.

Only indices are in memory, some 50 bytes a message. The file has no name, vanishes with the
process, and is as large as the tape; it is made in TMPDIR.
"""

import os
import struct
import tempfile
import weakref
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

T = TypeVar("T")
_SIZE = struct.Struct("<I")
# Bytes that are read at once: most messages are shorter.
READ_BYTES = 1 << 14
# The number of decoded messages in the cache.
RECENT = 32
RECENT_BYTES = 8 << 20


class Spool:
    """A temporary file of byte strings; each is found by the offset where it begins.

    One thread writes; once it has written all, any thread may read.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="diloco-tape-")  # noqa: SIM115 - as long as this
        weakref.finalize(self, self._file.close)
        self._end = self._flushed = 0

    def put(self, data: bytes) -> int:
        """Appends a byte string; returns the offset where it begins."""
        place = self._end
        self._file.write(_SIZE.pack(len(data)))
        self._file.write(data)
        self._end += _SIZE.size + len(data)
        return place

    def get(self, place: int) -> bytes:
        """Returns the byte string that begins at an offset that `put` returned."""
        if place >= self._flushed:
            self._file.flush()
            self._flushed = self._end
        data = os.pread(self._file.fileno(), READ_BYTES, place)
        end = _SIZE.size + _SIZE.unpack_from(data)[0]
        if end > len(data):
            data += os.pread(self._file.fileno(), end - len(data), place + len(data))
        return data[_SIZE.size : end]


class Lazy(Sequence[T]):
    """A list whose items are made on access; its slices are not copies."""

    def item(self, index: int) -> T:
        """Makes the item at an index of 0 or more."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        chosen = range(len(self))[index]
        return Subset(self, chosen) if isinstance(chosen, range) else self.item(chosen)

    def __iter__(self) -> Iterator[T]:
        return (self.item(index) for index in range(len(self)))


class Spooled(Lazy[T]):
    """A list of messages whose bytes are in a spool.

    Args:
        spool: the file.
        unpack: makes an item from its index in the list and its bytes.

    Attributes:
        seqs: stream sequences of the items, ascending.
    """

    def __init__(self, spool: Spool, unpack: Callable[[int, bytes], T]) -> None:
        self.seqs = array("q")
        self._places = array("q")
        self._spool = spool
        self._unpack = unpack
        self._held: dict[int, T] = {}
        self._recent: dict[int, T] = {}
        self._recent_bytes = 0

    def add(self, seq: int, place: int, item: T | None = None) -> None:
        """Appends an item.

        Args:
            seq: stream sequence, greater than that of the item before.
            place: offset of its bytes in the spool.
            item: the item itself, which is then kept in memory; None: it is decoded on access.
        """
        if item is not None:
            self._held[len(self.seqs)] = item
        self.seqs.append(seq)
        self._places.append(place)

    def at(self, seq: int) -> T | None:
        """Returns the item with a stream sequence; None if the list has none."""
        index = bisect_left(self.seqs, seq)
        found = index < len(self.seqs) and self.seqs[index] == seq
        return self[index] if found else None

    def __len__(self) -> int:
        return len(self.seqs)

    def item(self, index: int) -> T:
        """Returns the item at an index; decodes it unless it is in memory."""
        if index in self._held:
            return self._held[index]
        if (known := self._recent.get(index)) is not None:
            return known
        raw = self._spool.get(self._places[index])
        found = self._unpack(index, raw)
        self._recent_bytes += len(raw)
        if len(self._recent) >= RECENT or self._recent_bytes > RECENT_BYTES:
            self._recent, self._recent_bytes = {}, len(raw)
        self._recent[index] = found
        return found

    def __setitem__(self, index: int, item: T) -> None:
        index = range(len(self.seqs))[index]
        self._held[index] = item
        self._recent.pop(index, None)


class Subset(Lazy[T]):
    """Some items of a list, without a copy of them.

    Args:
        whole: the list.
        indices: the items' indices in the list.
    """

    def __init__(self, whole: Sequence[T], indices: Sequence[int]) -> None:
        self._whole = whole
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def item(self, index: int) -> T:
        """Returns the item of the whole list at this index of the subset."""
        return self._whole[self._indices[index]]


class Times(Mapping[int, float]):
    """When each message was stored (seconds since the epoch), by its stream sequence."""

    def __init__(self) -> None:
        self._seqs = array("q")
        self._times_s = array("d")

    def add(self, seq: int, time_s: float) -> None:
        """Adds the time of the next message; sequences ascend."""
        self._seqs.append(seq)
        self._times_s.append(time_s)

    def __getitem__(self, seq: int) -> float:
        index = bisect_left(self._seqs, seq)
        if index == len(self._seqs) or self._seqs[index] != seq:
            raise KeyError(seq)
        return self._times_s[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._seqs)

    def __len__(self) -> int:
        return len(self._seqs)
