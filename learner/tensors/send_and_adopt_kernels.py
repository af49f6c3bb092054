"""JAX kernels that send and adopt a fragment, with error feedback.

`send_and_adopt.py` chooses among the kernels for each version; `learner/core/sync.py` decides when.

Shapes: a fragment is a float32 vector, cut into blocks that share a scale each. A *piece* of the
fragment (`common/protocol/layout.py`) is rows of one tensor. On the devices a piece is an array of
its blocks: float32 [*G, n, b], where b is the number of elements of a block. The blocks have the
order that they have in the fragment's vector. G and n keep as many axes of the tensor as blocks
allow, and are sharded over the learner's mesh as the tensor is; where a cut would go through a
block, the piece is cut along another axis. So each device encodes its own elements without moving
data, and codes do not depend on the mesh.

Per fragment a learner has theta (its leaves), the view V that it adopted last, and the codes of the
update in flight, whose dequantized values are q. The unsent work is V - q - theta, which includes
earlier errors of quantization: error feedback (docs/design/design.md, "Each step's work is sent
once"). Below, Q quantizes, deQ dequantizes, V' is the next view, alpha is `sync.alpha`, a is
`sync.blend`:

    send       codes = Q(V - theta)             settle     theta += q
    apply      V' = V + deQ(delta); theta += V' - V
    jump       theta += V' - V, V' given        overwrite  theta = V (paper, alpha = 0)
    mix        theta = alpha theta + (1 - alpha) V
    blend      theta -= (1 - a) (theta - V' - d), before settle; d is theta - V at the send

Send, settle and apply are one program each, shared by fragments whose pieces have the same shapes:
learners restart often, and would wait for the compiler. (Sending a large fragment takes several
programs: `MOST_AT_ONCE`.) V' equals the aggregator's view bit for bit: a product of code and scale
is exact, so V + code x scale is rounded once however the program is compiled. The product in a
blend is not exact, so the sum of a blend is a separate program.

Arrays that an operation replaces are donated: the caller must not touch them again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco.common.protocol.codecs import Codec, Encoded
from diloco.common.protocol.layout import Layout, Piece, Tensor
from diloco.learner.tensors.mesh import Cuts, cuts_of, fit, sharding_of, single
from diloco.learner.tensors.quantize_and_pack import decode_blocks, encode_blocks

Leaves = dict[str, jax.Array]
# A fragment of more elements is encoded by several programs in a row: in a single program XLA's CPU
# compiler fuses too much, which takes twice as long.
MOST_AT_ONCE = 1 << 20
# One item for each piece of a fragment: its blocks, float32 [*G, n, b]; or their codes and scales.
Blocks = tuple[jax.Array, ...]
Codes = tuple[Encoded, ...]


class _KernelPiece(NamedTuple):
    """The shapes and shardings of a piece of a fragment, which a kernel is compiled for.

    Attributes:
        leaf: index of the piece's leaf among the fragment's leaves.
        lies: the sharding of that leaf.
        whole: True if the piece is the whole leaf. Otherwise the piece is rows of the leaf, and an
            argument of the kernel gives the first row.
        shape: the piece's shape.
        rows: the sharding of the piece before it is divided into blocks.
        kept: the piece's shape as [*G, group_size], if groups are padded to whole blocks; None:
            there is no padding.
        grid: [*G, n], the number of blocks along each axis.
        blocks: the sharding of the piece's blocks, [*G, n, b].
    """

    leaf: int
    lies: NamedSharding
    whole: bool
    shape: tuple[int, ...]
    rows: NamedSharding
    kept: tuple[int, ...] | None
    grid: tuple[int, ...]
    blocks: NamedSharding

    @property
    def same(self) -> bool:
        """True if the leaf is on one device, and its elements are those of the blocks in order."""
        return self.whole and self.kept is None and len(self.blocks.device_set) == 1


class _Geometry(NamedTuple):
    """The pieces of a fragment, and the elements of a block: a static argument of the kernels.

    Fragments whose pieces have equal shapes have equal geometries, and share compiled programs.
    """

    parts: tuple[_KernelPiece, ...]
    block: int


class Placed(NamedTuple):
    """The blocks of a piece: where they are in the fragment and on the devices.

    Attributes:
        first: the number in the fragment of the piece's first block.
        grid: [*G, n], the number of blocks along each axis.
        sharding: the sharding of the blocks, [*G, n, b].
    """

    first: int
    grid: tuple[int, ...]
    sharding: NamedSharding


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The operations on one fragment's parameters.

    The argument `leaves` has, by name, the whole tensors of which the fragment has rows, in any
    floating dtype. Returned leaves have the same names, shapes, dtypes and shardings.

    Attributes:
        names: the names of the leaves of which the fragment has rows, which are to be passed.
        codec: the codec of updates.
        delta_codec: the codec of version deltas.
        block: the number of elements of a block, which share a scale.
        placed: for each piece, where its blocks are.
        geometry: the shapes and shardings for which kernels are compiled.
        starts: for each piece, the number of its first row in its leaf.
    """

    names: tuple[str, ...]
    codec: Codec
    delta_codec: Codec
    block: int
    placed: tuple[Placed, ...]
    geometry: _Geometry
    starts: tuple[int, ...]

    def blocks(self, leaves: Leaves) -> Blocks:
        """Returns the fragment's pieces as blocks, with zeros for padding."""
        found: Blocks = _blocks(self._tuple(leaves), self._starts(), self.geometry)
        return found

    def send(self, leaves: Leaves, view: Blocks) -> Codes:
        """Returns the codes of the learner's work since its view: Q(V - theta)."""
        if sum(math.prod(part.grid) for part in self.geometry.parts) * self.block > MOST_AT_ONCE:
            return encode_blocks(self.codec, view, self._encodable(leaves))
        own, starts = self._tuple(leaves), self._starts()
        codes: Codes = _send(own, starts, view, self.geometry, self.codec)
        return codes

    def settle(self, leaves: Leaves, update: Codes) -> Leaves:
        """Returns the leaves plus the values of `update`, which a record has resolved.

        Donates the leaves.
        """
        own, starts = self._tuple(leaves), self._starts()
        return self._named(_settle(own, starts, update, self.geometry, self.codec))

    def apply(self, leaves: Leaves, view: Blocks, delta: Codes) -> tuple[Leaves, Blocks]:
        """Returns (leaves, view), both moved by a version delta; donates leaves and view."""
        own, starts = self._tuple(leaves), self._starts()
        changed, moved = _apply(own, starts, view, delta, self.geometry, self.delta_codec)
        return self._named(changed), moved

    def advance(self, view: Blocks, delta: Codes) -> Blocks:
        """Returns the view plus the values of a version delta; donates the view."""
        moved: Blocks = _advance(view, delta, self.delta_codec, self.block)[0]
        return moved

    def jump(self, leaves: Leaves, view: Blocks, new_view: Blocks) -> tuple[Leaves, Blocks]:
        """Returns (leaves + `new_view` - `view`, `new_view`); donates leaves and `view`."""
        return self.add(leaves, _difference(new_view, view)), new_view

    def overwrite(self, leaves: Leaves, view: Blocks) -> Leaves:
        """Returns the leaves with the fragment's rows replaced by the view; donates the leaves."""
        return self._named(_replace(self._tuple(leaves), self._starts(), view, self.geometry))

    def mix(self, leaves: Leaves, view: Blocks, alpha: float) -> Leaves:
        """Returns alpha * leaves + (1 - alpha) * view (paper, §1); donates the leaves."""
        mixed = _mix(self._tuple(leaves), self._starts(), view, np.float32(alpha), self.geometry)
        return self._named(mixed)

    def ahead(self, leaves: Leaves, view: Blocks) -> Blocks:
        """Returns the leaves minus the view, theta - V, as blocks; float32."""
        found: Blocks = _ahead(self._tuple(leaves), self._starts(), view, self.geometry)
        return found

    def blend(self, leaves: Leaves, view: Blocks, sent: Blocks, share: float) -> Leaves:
        """Returns the leaves with only a share of the training since an update was sent.

        Computes in float32, and rounds to each leaf's dtype. Donates `leaves` and `sent`.

        Args:
            leaves: the result of `apply` or `jump`; `settle` must not have been called yet.
            view: the newest view.
            sent: the result of `ahead` when the update was sent.
            share: the share of the training since then that stays (`sync.blend`).
        """
        own, starts = self._tuple(leaves), self._starts()
        return self.add(leaves, _fading(own, starts, view, sent, np.float32(share), self.geometry))

    def add(self, leaves: Leaves, values: Blocks) -> Leaves:
        """Returns the leaves plus `values`, added in float32; donates the leaves."""
        return self._named(_add(self._tuple(leaves), self._starts(), values, self.geometry))

    def _encodable(self, leaves: Leaves) -> tuple[jax.Array, ...]:
        """Returns each piece as blocks; the leaf itself where its elements have the blocks' order.

        To use the leaf avoids a copy, which would take as much memory, and for a large fragment
        half of the time of a send.
        """
        own, parts = self._tuple(leaves), self.geometry.parts
        same = [part.same and own[part.leaf].dtype == jnp.float32 for part in parts]
        others = tuple(index for index, one in enumerate(same) if not one)
        starts = self._starts()[list(others)]
        geometry = self.geometry._replace(parts=tuple(parts[index] for index in others))
        made = iter(_blocks(own, starts, geometry) if others else ())
        return tuple(
            own[part.leaf] if one else next(made) for part, one in zip(parts, same, strict=True)
        )

    def _tuple(self, leaves: Leaves) -> tuple[jax.Array, ...]:
        return tuple(leaves[name] for name in self.names)

    def _named(self, leaves: tuple[jax.Array, ...]) -> Leaves:
        return dict(zip(self.names, leaves, strict=True))

    def _starts(self) -> np.ndarray:
        return np.asarray(self.starts, np.int32)


def make_kernels(
    layout: Layout,
    fragment: int,
    *,
    codec: Codec,
    delta_codec: Codec,
    shardings: Mapping[str, NamedSharding] | None = None,
) -> Kernels:
    """Returns the operations on a fragment; cheap, since a kernel is compiled at its first call.

    Args:
        layout: the run's layout.
        fragment: index of the fragment.
        codec: the codec of updates.
        delta_codec: the codec of version deltas.
        shardings: each leaf's sharding on the learner's mesh (`mesh.param_shardings`), by name;
            None: all leaves are on one device.
    """
    pieces = layout.fragments[fragment].pieces
    names = tuple(dict.fromkeys(piece.tensor for piece in pieces))
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    if shardings is None:
        alone = NamedSharding(single(), PartitionSpec())
        shardings = dict.fromkeys(names, alone)
    parts = tuple(
        _part(
            piece,
            names.index(piece.tensor),
            tensors[piece.tensor],
            shardings[piece.tensor],
            layout.block,
        )
        for piece in pieces
    )
    return Kernels(
        names=names,
        codec=codec,
        delta_codec=delta_codec,
        block=layout.block,
        placed=tuple(
            Placed(piece.offset // layout.block, part.grid, part.blocks)
            for piece, part in zip(pieces, parts, strict=True)
        ),
        geometry=_Geometry(parts, layout.block),
        starts=tuple(piece.start for piece in pieces),
    )


def vector_of(layout: Layout, fragment: int, leaves: Leaves) -> np.ndarray:
    """Returns a fragment's vector in the host's memory, with zeros for padding: float32 [N]."""
    kernels = make_kernels(layout, fragment, codec="float32", delta_codec="float32")
    blocks = kernels.blocks({name: leaves[name] for name in kernels.names})
    return np.concatenate([np.asarray(piece).reshape(-1) for piece in blocks])


# --- How a piece is divided into blocks


def _part(
    piece: Piece,
    leaf: int,
    tensor: Tensor,
    lies: NamedSharding,
    block: int,
) -> _KernelPiece:
    mesh = lies.mesh
    assert isinstance(mesh, Mesh)
    last = _last_axis(piece, block)
    padded = last is None
    axis = _group_axes(piece) if last is None else last
    lead = piece.shape[:axis]
    grid = (*lead, piece.stride // math.prod(lead) // block)
    cuts = cuts_of(lies, len(piece.shape))
    # No cut may go through a block: cuts of the axes from `axis` on move to the blocks' axis n, or
    # to another axis.
    behind = tuple(name for names in cuts[axis:] for name in names)
    fitted = fit(grid, (*cuts[:axis], behind), mesh)
    before = _before(piece.shape, fitted, axis, mesh, padded=padded)
    rows = sharding_of(mesh, before)
    return _KernelPiece(
        leaf=leaf,
        lies=lies,
        whole=piece.shape == tensor.shape,
        shape=piece.shape,
        rows=rows,
        kept=(*lead, piece.group_size) if padded else None,
        grid=grid,
        blocks=sharding_of(mesh, (*fitted, ())),
    )


def _group_axes(piece: Piece) -> int:
    """Returns the number of leading axes whose sizes multiply to the piece's number of groups."""
    return next(
        axes
        for axes in range(len(piece.shape) + 1)
        if math.prod(piece.shape[:axes]) == piece.groups
    )


def _last_axis(piece: Piece, block: int) -> int | None:
    """Returns the last axis from which on the elements fill whole blocks; None: there is none."""
    if piece.group_stride != piece.group_size:
        return None
    for axis in reversed(range(_group_axes(piece), len(piece.shape))):
        if math.prod(piece.shape[axis:]) % block == 0:
            return axis
    return None


def _before(shape: tuple[int, ...], fitted: Cuts, axis: int, mesh: Mesh, *, padded: bool) -> Cuts:
    """Returns the cuts of a piece with which dividing the piece into blocks moves no data.

    Args:
        shape: the piece's shape.
        fitted: the cuts of the blocks' grid.
        axis: the axis from which on elements become blocks.
        mesh: the learner's mesh.
        padded: groups are padded to whole blocks.
    """
    ahead = list(fitted[:axis])
    if axis == len(shape):
        return tuple(ahead)
    parts = math.prod(mesh.shape[name] for name in fitted[axis])
    divides = not padded and shape[axis] % parts == 0
    ahead.append(fitted[axis] if divides else ())
    return (*ahead, *((),) * (len(shape) - len(ahead)))


# --- Kernels over the leaves


def _rows(leaf: jax.Array, start: jax.Array, part: _KernelPiece) -> jax.Array:
    """Returns a piece's values, in the leaf's dtype."""
    if part.whole:
        return leaf
    rows = jax.lax.dynamic_slice_in_dim(leaf, start, part.shape[0])
    # Sharded as the leaf, or the compiler moves the whole leaf to the blocks' sharding.
    return _sharded(rows, part.lies)


def _with_rows(
    leaf: jax.Array, start: jax.Array, part: _KernelPiece, values: jax.Array
) -> jax.Array:
    """Returns the leaf with a piece's rows replaced by `values`, rounded to the leaf's dtype."""
    values = _sharded(values.astype(leaf.dtype), part.lies)
    if part.whole:
        return values
    return _sharded(jax.lax.dynamic_update_slice_in_dim(leaf, values, start, axis=0), part.lies)


def _in_blocks(values: jax.Array, part: _KernelPiece, block: int) -> jax.Array:
    """Returns a piece's values as blocks; float32 [*G, n, b]."""
    values = _sharded(values.astype(jnp.float32), part.rows)
    if part.kept is not None:
        missing = part.grid[-1] * block - part.kept[-1]
        values = jnp.pad(
            values.reshape(part.kept), [(0, 0)] * (len(part.kept) - 1) + [(0, missing)]
        )
    return _sharded(values.reshape(*part.grid, block), part.blocks)


def _of_blocks(blocks: jax.Array, part: _KernelPiece) -> jax.Array:
    """Returns a piece's values from its blocks, without padding; float32 of the piece's shape."""
    if part.kept is not None:
        rows = blocks.reshape(*part.grid[:-1], -1)
        blocks = rows[..., : part.kept[-1]]
    return _sharded(blocks.reshape(part.shape), part.rows)


def _sharded(values: jax.Array, sharding: NamedSharding) -> jax.Array:
    sharded: jax.Array = jax.lax.with_sharding_constraint(values, sharding)
    return sharded


@partial(jax.jit, static_argnames="geometry")
def _blocks(leaves: tuple[jax.Array, ...], starts: jax.Array, geometry: _Geometry) -> Blocks:
    return tuple(
        _in_blocks(_rows(leaves[part.leaf], starts[index], part), part, geometry.block)
        for index, part in enumerate(geometry.parts)
    )


@partial(jax.jit, static_argnames="geometry", donate_argnames="leaves")
def _add(
    leaves: tuple[jax.Array, ...], starts: jax.Array, values: Blocks, geometry: _Geometry
) -> tuple[jax.Array, ...]:
    changed = list(leaves)
    for index, part in enumerate(geometry.parts):
        leaf, start = changed[part.leaf], starts[index]
        moved = _rows(leaf, start, part).astype(jnp.float32) + _of_blocks(values[index], part)
        changed[part.leaf] = _with_rows(leaf, start, part, moved)
    return tuple(changed)


@partial(jax.jit, static_argnames="geometry", donate_argnames="leaves")
def _replace(
    leaves: tuple[jax.Array, ...], starts: jax.Array, view: Blocks, geometry: _Geometry
) -> tuple[jax.Array, ...]:
    changed = list(leaves)
    for index, part in enumerate(geometry.parts):
        values = _of_blocks(view[index], part)
        changed[part.leaf] = _with_rows(changed[part.leaf], starts[index], part, values)
    return tuple(changed)


@partial(jax.jit, static_argnames="geometry", donate_argnames="leaves")
def _mix(
    leaves: tuple[jax.Array, ...],
    starts: jax.Array,
    view: Blocks,
    alpha: jax.Array,
    geometry: _Geometry,
) -> tuple[jax.Array, ...]:
    changed = list(leaves)
    for index, part in enumerate(geometry.parts):
        leaf, start = changed[part.leaf], starts[index]
        mine = _rows(leaf, start, part).astype(jnp.float32)
        values = alpha * mine + (1 - alpha) * _of_blocks(view[index], part)
        changed[part.leaf] = _with_rows(leaf, start, part, values)
    return tuple(changed)


# --- Kernels over the blocks


@partial(jax.jit, static_argnames=("codec", "block"), donate_argnames="view")
def _advance(view: Blocks, delta: Codes, codec: Codec, block: int) -> tuple[Blocks, Blocks]:
    """Returns (view plus a version delta, the difference of that to `view` in float32)."""
    moved = tuple(
        values + decode_blocks(codec, encoded, block)
        for values, encoded in zip(view, delta, strict=True)
    )
    return moved, tuple(new - old for new, old in zip(moved, view, strict=True))


@partial(jax.jit, donate_argnames="old")
def _difference(new: Blocks, old: Blocks) -> Blocks:
    return tuple(one - other for one, other in zip(new, old, strict=True))


@partial(jax.jit, static_argnames="geometry")
def _ahead(
    leaves: tuple[jax.Array, ...], starts: jax.Array, view: Blocks, geometry: _Geometry
) -> Blocks:
    values = _blocks(leaves, starts, geometry)
    return tuple(one - other for one, other in zip(values, view, strict=True))


@partial(jax.jit, static_argnames="geometry", donate_argnames="sent")
def _fading(
    leaves: tuple[jax.Array, ...],
    starts: jax.Array,
    view: Blocks,
    sent: Blocks,
    share: jax.Array,
    geometry: _Geometry,
) -> Blocks:
    """Returns the term that a blend adds to the leaves: (share - 1) * the training since `sent`."""
    ahead = _ahead(leaves, starts, view, geometry)
    return tuple((share - 1) * (now - before) for now, before in zip(ahead, sent, strict=True))


# --- The operations of every round, each one compiled program


@partial(jax.jit, static_argnames=("geometry", "codec"))
def _send(
    leaves: tuple[jax.Array, ...],
    starts: jax.Array,
    view: Blocks,
    geometry: _Geometry,
    codec: Codec,
) -> Codes:
    return encode_blocks(codec, view, _blocks(leaves, starts, geometry))


@partial(jax.jit, static_argnames=("geometry", "codec"), donate_argnames="leaves")
def _settle(
    leaves: tuple[jax.Array, ...],
    starts: jax.Array,
    update: Codes,
    geometry: _Geometry,
    codec: Codec,
) -> tuple[jax.Array, ...]:
    values = tuple(decode_blocks(codec, encoded, geometry.block) for encoded in update)
    settled: tuple[jax.Array, ...] = _add(leaves, starts, values, geometry)
    return settled


@partial(jax.jit, static_argnames=("geometry", "codec"), donate_argnames=("leaves", "view"))
def _apply(
    leaves: tuple[jax.Array, ...],
    starts: jax.Array,
    view: Blocks,
    delta: Codes,
    geometry: _Geometry,
    codec: Codec,
) -> tuple[tuple[jax.Array, ...], Blocks]:
    moved, step = _advance(view, delta, codec, geometry.block)
    return _add(leaves, starts, step, geometry), moved
