"""Leaves that are not synchronized, as a run stores them: in tiles, each named by its digest.

A run's frozen leaves, and the initial values of leaves that are local to learners, are cut into
tiles by halving their longest axis. The reader of a slice of a leaf fetches only the tiles that
overlap the slice. A tile is a C-ordered part of a leaf, in an object named by the digest of its
bytes, so that equal tiles are stored once. The index of all leaves is an object too; the run's
specification names it. Of a leaf that each learner loads by itself, only a digest is stored.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import numpy as np

from diloco.common.protocol import names, shards
from diloco.common.protocol.errors import IntegrityError

TILE_BYTES = 32 << 20

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenLeaf:
    """The entry of one leaf in the index.

    Attributes:
        tile: shape of the leaf's tiles; the last tile along an axis may be smaller.
        digests: digests of the tiles, in C order.
        stored: True if the run stores the tiles. False if learners load the leaf by themselves;
            then `digests` has one entry, the digest of the whole leaf.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tile: tuple[int, ...]
    digests: tuple[str, ...]
    stored: bool


class Frozen:
    """Reads leaves that are not synchronized from a run's store, one leaf at each `read`.

    Args:
        run: the run's name.
        get: returns the bytes of an object, given the object's name.
        name: name of the object with the index, which is read at once.

    Attributes:
        leaves: the index: a leaf's name -> its entry.

    Raises:
        IntegrityError: the index is damaged.
    """

    def __init__(self, run: str, get: Callable[[str], bytes], name: str) -> None:
        self._run, self._get = run, get
        data = _checked(get(name), name.rsplit("-", 1)[1], name)
        self.leaves = _parse(data)

    def names(self) -> list[str]:
        """Returns the names of the leaves that the run stores."""
        return [name for name, leaf in self.leaves.items() if leaf.stored]

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Returns the leaf `name`, or its slice `index`, which has one `slice` for each axis.

        Raises:
            KeyError: the index has no leaf of that name.
            IntegrityError: a tile is damaged.
            ObjectMissingError, StoreUnavailableError: a tile cannot be read.
        """
        leaf = self.leaves[name]
        wanted = _bounds(index or (slice(None),) * len(leaf.shape), leaf.shape)
        found = np.empty([stop - start for start, stop in wanted], np.dtype(leaf.dtype))
        for digest, tile in zip(leaf.digests, _tiles(leaf.shape, leaf.tile), strict=True):
            if meeting := _meeting(tile, wanted):
                there, here = meeting
                found[there] = self._tile(leaf, digest, tile)[here]
        return found

    def check(self, name: str, array: Any) -> None:
        """Compares a leaf that a learner has loaded by itself with the run's digest of that leaf.

        Raises:
            IntegrityError: the loaded leaf differs from the run's.
        """
        leaf = self.leaves[name]
        found = shards.digest(np.asarray(array))
        if (str(array.dtype), array.shape, (found,)) != (leaf.dtype, leaf.shape, leaf.digests):
            raise IntegrityError(
                f"the frozen leaf {name!r} that was loaded here is not the run's: {array.dtype}"
                f"{list(array.shape)} of digest {found}, not {leaf.dtype}{list(leaf.shape)} of"
                f" {leaf.digests[0]}",
                hint="load the same base that the run was created with",
            )

    def _tile(self, leaf: FrozenLeaf, digest: str, tile: list[tuple[int, int]]) -> np.ndarray:
        name = names.tile_object(self._run, digest)
        data = _checked(self._get(name), digest, name)
        shape = [stop - start for start, stop in tile]
        return np.frombuffer(data, np.dtype(leaf.dtype)).reshape(shape)


def store_frozen(
    run: str,
    put: Callable[[str, bytes], None],
    arrays: Mapping[str, np.ndarray],
    loaded: Collection[str] = (),
) -> str | None:
    """Stores the leaves `arrays`; returns the name of their index, None if there are no leaves.

    Args:
        run: the run's name.
        put: stores an object under a name.
        arrays: the leaves by name; those in `loaded` may be lazy arrays that are not read yet.
        loaded: names of the leaves that each learner loads by itself.
    """
    if not arrays:
        return None
    leaves = [
        _named(name, array) if name in loaded else _stored(run, put, name, array)
        for name, array in arrays.items()
    ]
    data: bytes = msgpack.packb({"leaves": [asdict(leaf) for leaf in leaves]})
    name = names.constants_object(run, shards.digest(data))
    put(name, data)
    return name


def _named(name: str, array: np.ndarray) -> FrozenLeaf:
    return _leaf(
        name, array, tile=array.shape, digests=(shards.digest(np.asarray(array)),), stored=False
    )


def _stored(
    run: str, put: Callable[[str, bytes], None], name: str, array: np.ndarray
) -> FrozenLeaf:
    tile = tile_of(array.shape, array.itemsize)
    digests = []
    for bounds in _tiles(array.shape, tile):
        part = np.ascontiguousarray(array[tuple(slice(*span) for span in bounds)])
        digests.append(shards.digest(part.tobytes()))
        put(names.tile_object(run, digests[-1]), part.tobytes())
    return _leaf(name, array, tile=tile, digests=tuple(digests), stored=True)


def _leaf(name: str, array: np.ndarray, **rest: Any) -> FrozenLeaf:
    return FrozenLeaf(name=name, dtype=str(array.dtype), shape=tuple(array.shape), **rest)


def tile_of(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Returns the tile shape of a leaf: the longest axis is halved until a tile fits TILE_BYTES."""
    tile = list(shape)
    while item_bytes * int(np.prod(tile, dtype=np.int64)) > TILE_BYTES:
        longest = tile.index(max(tile))
        tile[longest] = -(-tile[longest] // 2)
    return tuple(tile)


def _tiles(shape: tuple[int, ...], tile: tuple[int, ...]) -> Iterator[list[tuple[int, int]]]:
    """Yields the bounds [start, stop) along each axis of every tile, in C order."""
    spans = [
        [(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(shape, tile, strict=True)
    ]
    return map(list, itertools.product(*spans))


def _bounds(index: Index, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]


def _meeting(
    tile: list[tuple[int, int]], wanted: list[tuple[int, int]]
) -> tuple[Index, Index] | None:
    """Returns a tile's overlap with the `wanted` bounds, as slices of the result and of the tile.

    Returns None if tile and `wanted` do not overlap.
    """
    there, here = [], []
    for (start, stop), (first, last) in zip(tile, wanted, strict=True):
        low, high = max(start, first), min(stop, last)
        if low >= high:
            return None
        there.append(slice(low - first, high - first))
        here.append(slice(low - start, high - start))
    return tuple(there), tuple(here)


def _checked(data: bytes, digest: str, name: str) -> bytes:
    if shards.digest(data) != digest:
        raise IntegrityError(
            f"object {name!r} has digest {shards.digest(data)}",
            hint="runbooks/digest-mismatch.md",
        )
    return data


def _parse(data: bytes) -> dict[str, FrozenLeaf]:
    import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16

    try:
        found = msgpack.unpackb(data, use_list=False)["leaves"]
        leaves = [FrozenLeaf(**fields) for fields in found]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise IntegrityError(
            f"the index of the leaves that are not synchronized is invalid: {error}"[:300],
            hint="was the run created by another release? create it again with this one",
        ) from error
    return {leaf.name: leaf for leaf in leaves}
