"""An index of a bundle's objects or files by name, which takes some 40 bytes for each entry.

A name is looked up by its hash; for listing, the names are kept compressed.
"""

import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

# The number of names that are compressed together.
BLOCK = 256


class FilePiece(NamedTuple):
    """The bytes [start, stop) of an object or a file, in the frame at offset `frame_at`."""

    frame_at: int
    start: int
    stop: int


@dataclass(frozen=True)
class Whole:
    """An object or a file, as a list of its pieces in the order of the bundle."""

    size_bytes: int
    pieces: tuple[FilePiece, ...]

    @property
    def complete(self) -> bool:
        """True if no piece is missing, and each piece begins where the piece before ends."""
        ends = 0
        for piece in self.pieces:
            if piece.start != ends:
                return False
            ends = piece.stop
        return ends == self.size_bytes


@dataclass
class _Names:
    """Names in the order in which they were added, with sizes in bytes."""

    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    _blocks: list[bytes] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)

    def add(self, name: str, size_bytes: int) -> None:
        self.sizes.append(size_bytes)
        self._open.append(name)
        if len(self._open) == BLOCK:
            self._blocks.append(zlib.compress(msgpack.packb(self._open), 1))
            self._open = []

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return zip(self._each(), self.sizes, strict=True)

    def _each(self) -> Iterator[str]:
        for block in self._blocks:
            yield from msgpack.unpackb(zlib.decompress(block))
        yield from self._open


class BundleContents:
    """The index of a bundle's objects, or of its files, by name."""

    def __init__(self) -> None:
        self._names = _Names()
        # Rows (hash, size, offset of its frame, or -1 if it has several): as added, and sorted.
        self._added = array("q")
        self._rows = np.empty((0, 3), np.int64)
        self._pieces: dict[int, list[FilePiece]] = {}

    def add(self, name: str, size_bytes: int, piece: FilePiece) -> None:
        """Adds a piece of the object or file `name`, which has `size_bytes` in all.

        Of each object or file, the piece that starts at 0 is added first.
        """
        key, single = _hash(name), piece.stop - piece.start == size_bytes
        if not single:
            self._pieces.setdefault(key, []).append(piece)
        if piece.start == 0:
            self._names.add(name, size_bytes)
            self._added.extend((key, size_bytes, piece.frame_at if single else -1))

    def _table(self) -> npt.NDArray[np.int64]:
        """Returns the rows (hash, size, offset of the frame), sorted by hash."""
        if self._added:
            new = np.frombuffer(self._added, np.int64).reshape(-1, 3)
            rows = np.concatenate([self._rows, new])
            self._rows, self._added = rows[np.argsort(rows[:, 0], kind="stable")], array("q")
        return self._rows

    def get(self, name: str) -> Whole | None:
        """Returns the object or file under a name; None if there is none."""
        rows, key = self._table(), _hash(name)
        index = int(np.searchsorted(rows[:, 0], key))
        if index == len(rows) or rows[index, 0] != key:
            return None
        size_bytes, frame_at = int(rows[index, 1]), int(rows[index, 2])
        if frame_at < 0:
            return Whole(size_bytes, tuple(self._pieces[key]))
        return Whole(size_bytes, (FilePiece(frame_at, 0, size_bytes),))

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __len__(self) -> int:
        return len(self._table())

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.sizes())

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yields name and size in bytes of each entry, in the order in which they were added."""
        return ((name, size) for name, size in self._names if name in self)

    def damaged(self) -> int:
        """Returns the number of entries that lack a piece, or whose name an earlier entry has."""
        return len(self) - int(self._sound().sum())

    def drop_damaged(self) -> None:
        """Removes entries that lack a piece, and all but one of the entries with the same name."""
        sound = self._sound()
        self._rows = self._rows[sound]

    def _sound(self) -> npt.NDArray[np.bool_]:
        rows = self._table()
        sound: npt.NDArray[np.bool_] = np.diff(rows[:, 0], prepend=-1) != 0
        for index in np.flatnonzero(rows[:, 2] < 0):
            pieces = self._pieces[int(rows[index, 0])]
            sound[index] &= Whole(int(rows[index, 1]), tuple(pieces)).complete
        return sound


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1
