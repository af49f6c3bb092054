"""The places of a learner's tensors: their devices, and the blocks of a fragment on a host.

A custom training loop has its parameters on one device, sharded over a mesh of its own, or as
arrays of the host. Synchronization needs a `NamedSharding`, and keeps the rules of `mesh.py`. Most
often the two agree; where they do not, leaves are moved when a fragment is sent or adopted, and
at no other step. If both shardings put equal pieces on the same devices, no bytes are moved.

A host *holds* the blocks that its devices hold; it fetches no others of a version. It *owns* some
of those: where several hosts hold copies of the same part of a piece, one of them uploads it, and
pieces take turns, so that each block of an update is uploaded once and no host uploads all. The
blocks that the hosts own partition the fragment (tests/unit/test_ownership.py).

Rows on the host lie in the order of the fragment's vector: scales [n], codes [n, items], where n
is the number of blocks held or owned.
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
# By a leaf's name; None: an array of the host.
Shardings = Mapping[str, Sharding | None]


class Placement(NamedTuple):
    """The sharding of each leaf, by name.

    Attributes:
        inner: the sharding for synchronization.
        outer: the caller's sharding, where it differs.
    """

    inner: Mapping[str, NamedSharding]
    outer: Shardings

    def inward(self, leaves: Mapping[str, Any]) -> Leaves:
        """Returns the caller's leaves with the shardings that synchronization needs."""
        return {name: self._in(name, leaf) for name, leaf in leaves.items()}

    def outward(self, leaves: Leaves) -> dict[str, Any]:
        """Returns the leaves with the caller's shardings."""
        return {name: self._out(name, leaf) for name, leaf in leaves.items()}

    def _in(self, name: str, leaf: Any) -> jax.Array:
        if hasattr(leaf, "__jax_array__") and not isinstance(leaf, jax.Array):
            leaf = leaf.__jax_array__()  # another framework's, of which each host has a part
        # A loop's program may return arrays with another sharding than its arguments had.
        if isinstance(leaf, jax.Array) and leaf.sharding == self.inner[name]:
            return leaf
        if not isinstance(leaf, jax.Array):
            # The host's array stays the caller's; its copy on the device is donated.
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
        like: the trained tree, of shapes.
        asked: shardings of the caller's leaves; all on one device, if None.
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
    """Returns each leaf's sharding by name; a shape without a sharding counts as on one device."""
    alone = NamedSharding(single(), PartitionSpec())

    def of(leaf: Any) -> Sharding | None:
        if not hasattr(leaf, "sharding"):
            return None
        return alone if leaf.sharding is None else leaf.sharding

    return {name: of(leaf) for name, leaf in tree.named_leaves(params)}


def put_like(value: Any, like: Any) -> Any:
    """Returns `value` on the devices of `like`, or on the host if `like` is there."""
    if isinstance(like, jax.Array):
        return jax.device_put(value, like.sharding)
    sharding = getattr(like, "sharding", None)
    return np.array(value) if sharding is None else jax.device_put(value, sharding)


def placed(
    sharding: Sharding | None,
    like: Any,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> Any:
    """Returns an array with this sharding, or on the host if None; a host reads only its part."""
    if sharding is None:
        return np.array(read((slice(None),) * len(like.shape)))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return read(index)

    return jax.make_array_from_callback(tuple(like.shape), sharding, part)


def _automatic(mesh: Any) -> Mesh:
    """Returns the mesh with automatic axes, as the kernels need it: the compiler shards them."""
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
    """The blocks of one piece that a host holds, and those that it uploads.

    Attributes:
        placed: the positions of the piece's blocks.
        box: smallest box around the host's blocks; `held` is the place of its first block among
            the rows that the host holds.
        owned: boxes that the host uploads, each on one of its devices; `rows` are the places of
            their blocks among the owned rows.
    """

    placed: Placed
    box: Box
    held: int
    owned: tuple[Box, ...]
    rows: tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """The blocks of one fragment that one host holds, and those that it uploads.

    Attributes:
        held: numbers in the fragment of the blocks that the host holds, ascending, int64 [n].
        owned: numbers of the blocks that it uploads, ascending.
    """

    codec: Codec
    delta_codec: Codec
    block: int
    held: np.ndarray
    owned: np.ndarray
    parts: tuple[_OwnedPiece, ...]

    def collect(self, codes: Codes) -> Encoded:
        """Copies this host's owned rows of an update to the host: scales [n], codes [n, items].

        Waits for the devices.
        """
        scales = [encoded.scales for encoded in codes]
        scaled = scales[0].ndim == len(self.parts[0].placed.grid)
        return Encoded(
            self.gather(scales) if scaled else np.zeros(0, scales[0].dtype),
            self.gather([encoded.codes for encoded in codes]),
        )

    def gather(self, arrays: Sequence[jax.Array]) -> np.ndarray:
        """Copies the owned rows from `arrays` of blocks, one for each piece of the fragment."""
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
        """Puts this host's blocks of a version delta on its devices; `rows` has a row for each."""
        scaled = bool(np.size(rows.scales))
        codes_NxI = np.asarray(rows.codes).reshape(len(self.held), -1)
        placed = []
        for part in self.parts:
            codes = self._place(part, codes_NxI)
            scales = self._place(part, np.asarray(rows.scales)) if scaled else _NO_SCALES
            placed.append(Encoded(scales, codes))
        return tuple(placed)

    def place_view(self, view_N: np.ndarray) -> tuple[jax.Array, ...]:
        """Puts this host's blocks of a view on its devices; the view is whole, float32 [N]."""
        rows = view_N.reshape(-1, self.block)
        if len(self.held) != len(rows):
            rows = rows[self.held]
        return tuple(self._place(part, rows, copy=True) for part in self.parts)

    def _place(self, part: _OwnedPiece, rows: np.ndarray, *, copy: bool = False) -> jax.Array:
        """Puts a piece's rows on the devices; on CPU they may share memory, unless `copy`."""
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
    """Returns a sharding of blocks, cut to the first `axes` axes, or extended by unsharded ones."""
    spec = jax.sharding.PartitionSpec(*(*sharding.spec, *(None,) * axes)[:axes])
    return jax.sharding.NamedSharding(sharding.mesh, spec)


def process_of(device: Any) -> int:
    """Returns the index of the process that a device belongs to."""
    index: int = device.process_index
    return index


def make_ownership(
    kernels: Kernels, process: int | None = None, process_of: ProcessOf = process_of
) -> Ownership:
    """Returns the blocks that one host holds and uploads of the fragment that `kernels` works on.

    Args:
        kernels: the fragment's kernels.
        process: index of the host's process; this one, if None.
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
    """Returns the processes that hold each part of a piece, ascending; the parts tile the piece."""
    holders: dict[Box, set[int]] = {}
    shape = placed.grid
    sharding = jax.sharding.NamedSharding(
        placed.sharding.mesh, jax.sharding.PartitionSpec(*placed.sharding.spec[: len(shape)])
    )
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(_box(index, shape), set()).add(process_of(device))
    return {box: sorted(holders[box]) for box in sorted(holders)}


def _numbers(placed: Placed, boxes: Iterable[Box]) -> np.ndarray:
    """Returns the numbers of the blocks in these parts of a piece, ascending within each; int64."""
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
