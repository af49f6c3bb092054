"""The shardings of a learner's tensors, and which blocks of a fragment each host has and uploads.

A custom training loop has its parameters on one device, sharded over a mesh of its own, or as NumPy
arrays. Synchronization needs a `NamedSharding` that keeps the rules of `mesh.py`. Most often the
loop's sharding is such a one. Otherwise leaves are resharded when a fragment is sent or adopted,
and at no other step. If both shardings put equal pieces on the same devices, no bytes are moved.

A fragment is a vector of blocks; its *pieces* are rows of tensors (`send_and_adopt_kernels.py`). A
host *holds* the blocks that are on its devices, and fetches only these blocks of a version. A host
*owns* the blocks that it uploads. Where several hosts hold copies of the same part of a piece, one
of these hosts owns it; the choice rotates from piece to piece, so that no host uploads all. Each
block of a fragment has exactly one owner (tests/unit/test_ownership.py).

In the host's memory, blocks are rows in the order of the fragment's vector: scales [n] and codes
[n, items], where n is the number of blocks held or owned.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from diloco.common.protocol.codecs import Codec, Encoded, code_dtype
from diloco.common.protocol.layout import Layout
from diloco.learner.task import Params
from diloco.learner.tensors import tree
from diloco.learner.tensors.mesh import cuts_of, fit, sharding_of, single, split_tensors
from diloco.learner.tensors.send_and_adopt_kernels import Codes, Kernels, Placed

Leaves = dict[str, jax.Array]
# The sharding of each leaf, by the leaf's name; None: the leaf is a NumPy array.
Shardings = Mapping[str, Sharding | None]


class Placement(NamedTuple):
    """The shardings of leaves in the caller's training loop and in synchronization.

    Attributes:
        inner: the sharding for synchronization, by the leaf's name.
        outer: the caller's sharding, by the leaf's name; only of leaves for which it differs.
    """

    inner: Mapping[str, NamedSharding]
    outer: Shardings

    def inward(self, leaves: Mapping[str, Any]) -> Leaves:
        """Returns the caller's leaves with the shardings that synchronization needs."""
        return {name: self._in(name, leaf) for name, leaf in leaves.items()}

    def outward(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the leaves with the caller's shardings, or as NumPy arrays if those are."""
        return {name: self._out(name, leaf) for name, leaf in leaves.items()}

    def _in(self, name: str, leaf: Any) -> jax.Array:
        if hasattr(leaf, "__jax_array__") and not isinstance(leaf, jax.Array):
            leaf = leaf.__jax_array__()  # an array of another framework, sharded over hosts
        # A loop's program may return arrays with another sharding than its arguments had.
        if isinstance(leaf, jax.Array) and leaf.sharding == self.inner[name]:
            return leaf
        if not isinstance(leaf, jax.Array):
            # The caller keeps the NumPy array; the copy on the device is donated.
            leaf = np.array(leaf)
        placed: jax.Array = jax.device_put(leaf, self.inner[name])
        return placed

    def _out(self, name: str, leaf: jax.Array) -> Any:
        if name not in self.outer:
            return leaf
        sharding = self.outer[name]
        return np.array(leaf) if sharding is None else jax.device_put(leaf, sharding)


def make_placement(layout: Layout, like: Params, asked: Shardings | None = None) -> Placement:
    """Returns the placement of a tree's leaves.

    Args:
        layout: the run's layout.
        like: shapes of the synchronized leaves, a tree.
        asked: shardings of the caller's leaves, by name; None: all leaves are on one device.
    """
    leaves = tree.by_name(like)
    if asked is None:
        alone = NamedSharding(single(), PartitionSpec())
        return Placement(dict.fromkeys(leaves, alone), {})
    meshes = [one.mesh for one in asked.values() if isinstance(one, NamedSharding)]
    mesh = _automatic(meshes[0]) if meshes else None
    split = split_tensors(layout)
    inner: dict[str, NamedSharding] = {}
    outer: dict[str, Sharding | None] = {}
    for name, leaf in leaves.items():
        inner[name] = _inner(asked[name], tuple(leaf.shape), mesh, whole=name in split)
        if asked[name] != inner[name]:
            outer[name] = asked[name]
    return Placement(inner, outer)


def shardings_of(params: Params) -> dict[str, Sharding | None]:
    """Returns each leaf's sharding by name; None for a NumPy array.

    A `jax.ShapeDtypeStruct` without a sharding counts as an array on one device.
    """
    alone = NamedSharding(single(), PartitionSpec())

    def of(leaf: Any) -> Sharding | None:
        if not hasattr(leaf, "sharding"):
            return None
        return alone if leaf.sharding is None else leaf.sharding

    return {name: of(leaf) for name, leaf in tree.named_leaves(params)}


def put_like(value: Any, like: Any) -> Any:
    """Returns `value` with the sharding of `like`; as a NumPy array if `like` has no sharding."""
    if isinstance(like, jax.Array):
        return jax.device_put(value, like.sharding)
    sharding = getattr(like, "sharding", None)
    return np.array(value) if sharding is None else jax.device_put(value, sharding)


def placed(
    sharding: Sharding | None,
    like: Any,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> Any:
    """Returns an array whose values `read` gives; a host reads only the slices for its devices.

    Args:
        sharding: the array's sharding; None: the result is a NumPy array.
        like: an array or shape; the result has its shape.
        read: (index, a tuple of slices) -> the values of that part of the array.
    """
    if sharding is None:
        return np.array(read((slice(None),) * len(like.shape)))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return read(index)

    return jax.make_array_from_callback(tuple(like.shape), sharding, part)


def _automatic(mesh: Any) -> Mesh:
    """Returns the mesh with all axes of type `AxisType.Auto`, which the kernels need."""
    assert isinstance(mesh, Mesh)
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _inner(
    asked: Sharding | None, shape: tuple[int, ...], mesh: Mesh | None, *, whole: bool
) -> NamedSharding:
    if mesh is None:
        devices = list(asked.device_set) if asked is not None else []
        return NamedSharding(single(devices[0] if devices else None), PartitionSpec())
    if not isinstance(asked, NamedSharding):
        return NamedSharding(mesh, PartitionSpec())
    cuts = cuts_of(asked, len(shape))
    fitted = fit(shape, cuts, mesh, {0} if whole else set())
    if fitted == cuts and asked.mesh is mesh:
        return asked
    return sharding_of(mesh, fitted)


# --- The blocks of a host

ProcessOf = Callable[[Any], int]
Box = tuple[tuple[int, int], ...]  # [start, stop) along each axis


class _OwnedPiece(NamedTuple):
    """The blocks of one piece that a host holds, and the blocks that it owns, that is, uploads.

    A box is a range of blocks along each axis of the piece's grid.

    Attributes:
        placed: where the piece's blocks are in the fragment and on the devices.
        box: the smallest box with all blocks that the host holds.
        held: the index of the first block of `box` among all blocks that the host holds.
        owned: the boxes that the host owns; each is on one device.
        rows: for each box of `owned`, the indices of its blocks among all blocks that the host
            owns.
    """

    placed: Placed
    box: Box
    held: int
    owned: tuple[Box, ...]
    rows: tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """The blocks of one fragment that one host holds, and the blocks that it owns.

    Attributes:
        codec: the codec of updates.
        delta_codec: the codec of version deltas.
        block: the number of elements of a block.
        held: the numbers in the fragment of the blocks that are on the host's devices; int64 [n].
        owned: the numbers of the blocks that the host uploads, ascending; int64 [n].
        parts: the same for each piece of the fragment.
    """

    codec: Codec
    delta_codec: Codec
    block: int
    held: np.ndarray
    owned: np.ndarray
    parts: tuple[_OwnedPiece, ...]

    def collect(self, codes: Codes) -> Encoded:
        """Copies the host's owned blocks of an update from its devices; waits for the devices.

        Args:
            codes: the update, for each piece of the fragment.

        Returns:
            Scales [n] (float codecs: [0]) and codes [n, items], n the number of owned blocks.
        """
        scales = [encoded.scales for encoded in codes]
        scaled = scales[0].ndim == len(self.parts[0].placed.grid)
        return Encoded(
            self.gather(scales) if scaled else np.zeros(0, scales[0].dtype),
            self.gather([encoded.codes for encoded in codes]),
        )

    def gather(self, arrays: Sequence[jax.Array]) -> np.ndarray:
        """Copies the host's owned blocks from its devices; waits for the devices.

        Args:
            arrays: for each piece of the fragment, an array with an item, such as a scale or codes,
                for each block: [*grid, *items].

        Returns:
            The items of the owned blocks: [n, *items].
        """
        items = arrays[0].shape[len(self.parts[0].placed.grid) :]
        rows = np.empty((len(self.owned), *items), arrays[0].dtype)
        for part, array in zip(self.parts, arrays, strict=True):
            found = {
                _box(shard.index, array.shape): shard.data for shard in array.addressable_shards
            }
            for box, places in zip(part.owned, part.rows, strict=True):
                values = np.asarray(found[_with_items(box, items)]).reshape(-1, *items)
                if places[-1] - places[0] + 1 == len(places):
                    rows[places[0] : places[-1] + 1] = values
                else:
                    rows[places] = values
        return rows

    def place(self, rows: Encoded) -> Codes:
        """Puts the host's held blocks of a version delta on its devices.

        Args:
            rows: scales and codes of the held blocks, in order.
        """
        scaled = bool(np.size(rows.scales))
        codes_NxI = np.asarray(rows.codes).reshape(len(self.held), -1)
        placed = []
        for part in self.parts:
            codes = self._place(part, codes_NxI)
            scales = self._place(part, np.asarray(rows.scales)) if scaled else _NO_SCALES
            placed.append(Encoded(scales, codes))
        return tuple(placed)

    def place_view(self, view_N: np.ndarray) -> tuple[jax.Array, ...]:
        """Puts the host's held blocks of a view on its devices.

        Args:
            view_N: the whole view of the fragment, float32 [N].

        Returns:
            For each piece, its blocks: float32 [*G, n, b].
        """
        rows = view_N.reshape(-1, self.block)
        if len(self.held) != len(rows):
            rows = rows[self.held]
        return tuple(self._place(part, rows, copy=True) for part in self.parts)

    def _place(self, part: _OwnedPiece, rows: np.ndarray, *, copy: bool = False) -> jax.Array:
        """Puts a piece's held blocks on the devices, from the rows of all held blocks.

        On CPU the result may share memory with `rows`, unless `copy`.
        """
        sides = tuple(stop - start for start, stop in part.box)
        items = rows.shape[1:]
        mine = rows[part.held : part.held + math.prod(sides)].reshape(*sides, *items)

        def of(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            box = _box(index, (*part.placed.grid, *items))[: len(sides)]
            here = tuple(
                slice(start - low, stop - low)
                for (start, stop), (low, _) in zip(box, part.box, strict=True)
            )
            return mine[here].copy() if copy else mine[here]

        shape = (*part.placed.grid, *items)
        return jax.make_array_from_callback(shape, _of_axes(part.placed.sharding, len(shape)), of)


_NO_SCALES = np.zeros(0, code_dtype("bfloat16"))


@functools.lru_cache(maxsize=1024)
def _of_axes(sharding: jax.sharding.NamedSharding, axes: int) -> jax.sharding.NamedSharding:
    """Returns a sharding for arrays of `axes` axes: further axes are dropped or not sharded."""
    spec = jax.sharding.PartitionSpec(*(*sharding.spec, *(None,) * axes)[:axes])
    return jax.sharding.NamedSharding(sharding.mesh, spec)


def process_of(device: Any) -> int:
    """Returns the index of the process that a device belongs to."""
    index: int = device.process_index
    return index


def make_ownership(
    kernels: Kernels, process: int | None = None, process_of: ProcessOf = process_of
) -> Ownership:
    """Returns which blocks of a fragment one host holds, and which it owns.

    Args:
        kernels: the fragment's kernels.
        process: index of the host's process; None: this process.
        process_of: returns the index of the process that a device belongs to.
    """
    process = jax.process_index() if process is None else process
    held_of, owned_of, drafts = [], [], []
    for number, placed in enumerate(kernels.placed):
        holders = holders_of(placed, process_of)
        mine = [box for box, processes in holders.items() if process in processes]
        box = _hull(mine)
        owned = tuple(one for one in mine if holders[one][number % len(holders[one])] == process)
        held_of.append(_numbers(placed, [box]))
        owned_of.append(_numbers(placed, owned))
        drafts.append((placed, box, owned))
    held = np.concatenate(held_of) if held_of else np.zeros(0, np.int64)
    owned_blocks = np.sort(np.concatenate(owned_of)) if owned_of else np.zeros(0, np.int64)
    firsts = np.cumsum([0, *(len(blocks) for blocks in held_of)])
    return Ownership(
        codec=kernels.codec,
        delta_codec=kernels.delta_codec,
        block=kernels.block,
        held=held,
        owned=owned_blocks,
        parts=tuple(
            _OwnedPiece(
                placed,
                box,
                int(first),
                owned,
                tuple(np.searchsorted(owned_blocks, _numbers(placed, [one])) for one in owned),
            )
            for (placed, box, owned), first in zip(drafts, firsts, strict=False)
        ),
    )


def holders_of(placed: Placed, process_of: ProcessOf = process_of) -> dict[Box, list[int]]:
    """Returns, for each box of blocks on a device, the processes whose devices have that box.

    Process indices are ascending. The boxes partition the piece's grid of blocks.
    """
    holders: dict[Box, set[int]] = {}
    shape = placed.grid
    sharding = jax.sharding.NamedSharding(
        placed.sharding.mesh, jax.sharding.PartitionSpec(*placed.sharding.spec[: len(shape)])
    )
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(_box(index, shape), set()).add(process_of(device))
    return {box: sorted(holders[box]) for box in sorted(holders)}


def _numbers(placed: Placed, boxes: Iterable[Box]) -> np.ndarray:
    """Returns the numbers in the fragment of the blocks in `boxes` of a piece; int64.

    Boxes are in the given order; the numbers of one box are ascending.
    """
    strides = np.cumprod([1, *placed.grid[:0:-1]])[::-1] if placed.grid else np.ones(0, np.int64)
    found = []
    for box in boxes:
        numbers = np.full((), placed.first, np.int64)
        for (start, stop), stride in zip(box, strides, strict=True):
            numbers = numbers[..., None] + np.arange(start, stop, dtype=np.int64) * stride
        found.append(numbers.reshape(-1))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _hull(boxes: list[Box]) -> Box:
    return tuple(
        (min(side[0] for side in sides), max(side[1] for side in sides))
        for sides in zip(*boxes, strict=True)
    )


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    spans = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple((start, stop) for start, stop, _ in spans)


def _with_items(box: Box, items: tuple[int, ...]) -> Box:
    return (*box, *((0, size) for size in items))
