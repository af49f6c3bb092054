"""What a learner does with the parameters of one fragment: send, settle, adopt. Pure arrays, JAX.

Shapes: N elements of the fragment's vector (`common/layout.py`).

Per fragment a learner holds theta (its leaves), the view V it last adopted, and the codes of the
update in flight, q dequantized. What is not yet sent is V - q - theta (DESIGN.md, "Each step's
work is sent once"):

    send       codes = Q(V - theta)             settle     theta += q
    apply      V' = V + deQ(delta); theta += V' - V
    jump       theta += V' - V, V' given        overwrite  theta = V (paper, alpha = 0)
    mix        theta = alpha theta + (1 - alpha) V

Each is one small kernel over the leaves, shared by fragments whose pieces have the same shapes,
and one over the vector, shared by fragments of the same size: learners restart often, and
compiling is what they would wait for. V' is bit for bit the aggregator's: a product of code and
scale is exact, so V + code x scale is rounded once however it is compiled.

Arrays that an operation replaces are donated: the caller must not touch them again.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.layout import Layout
from common.quantize import Codec, Encoded, decode, encode_difference
from common.shards import shard_ranges

Leaves = dict[str, jax.Array]


class _Part(NamedTuple):
    """A piece of a fragment as a kernel sees it: shapes and places, no names.

    Attributes:
        leaf: index among the fragment's leaves.
        whole: the piece is its whole leaf; otherwise rows from a start that the call gives.
        shape: of the piece; groups, group_size, group_stride, offset: of `layout.Piece`.
    """

    leaf: int
    whole: bool
    shape: tuple[int, ...]
    groups: int
    group_size: int
    group_stride: int
    offset: int


class _Plan(NamedTuple):
    """Static argument of the kernels: equal for fragments whose pieces have equal shapes."""

    parts: tuple[_Part, ...]
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The operations of one fragment.

    `leaves` are the tensors that the fragment holds parts of, by name, whole; any floating dtype.
    What comes back has the same names, shapes and dtypes. Vectors are float32 [N].

    Attributes:
        names: leaves the fragment holds parts of; others may not be passed.
        codec: of updates; `delta_codec` of version deltas.
        block: elements that share a scale.
        ranges: [start, stop) of each shard of an update.
    """

    names: tuple[str, ...]
    codec: Codec
    delta_codec: Codec
    block: int
    ranges: tuple[tuple[int, int], ...]
    plan: _Plan
    starts: tuple[int, ...]

    def flatten(self, leaves: Leaves) -> jax.Array:
        """The fragment's vector, with zeros for padding; float32 [N]."""
        vectors = _padded(self._tuple(leaves), self._starts(), self.plan)
        vector_N: jax.Array = _concatenated(vectors)
        return vector_N

    def send(self, leaves: Leaves, view_N: jax.Array) -> tuple[Encoded, ...]:
        """Codes of what the learner did since its view, one item for each shard."""
        theta_N = self.flatten(leaves)
        if len(self.ranges) == 1:
            return (encode_difference(self.codec, view_N, theta_N, self.block),)
        return tuple(
            encode_difference(self.codec, view_N[start:stop], theta_N[start:stop], self.block)
            for start, stop in self.ranges
        )

    def settle(self, leaves: Leaves, update: tuple[Encoded, ...]) -> Leaves:
        """Leaves plus an update of theirs that a record has resolved; leaves are donated."""
        parts = tuple(decode(self.codec, encoded, self.block) for encoded in update)
        return self.add(leaves, parts[0] if len(parts) == 1 else _concatenated(parts))

    def apply(self, leaves: Leaves, view_N: jax.Array, delta: Encoded) -> tuple[Leaves, jax.Array]:
        """Leaves and view moved by a version delta; both are donated."""
        moved_N, step_N = _advance(view_N, delta, self.delta_codec, self.block)
        return self.add(leaves, step_N), moved_N

    def advance(self, view_N: jax.Array, delta: Encoded) -> jax.Array:
        """The view moved by a version delta, leaves left alone; the view is donated."""
        moved_N: jax.Array = _advance(view_N, delta, self.delta_codec, self.block)[0]
        return moved_N

    def jump(
        self, leaves: Leaves, view_N: jax.Array, new_view_N: jax.Array
    ) -> tuple[Leaves, jax.Array]:
        """Leaves moved as far as a newer view is from the old one; leaves and view are donated."""
        return self.add(leaves, _difference(new_view_N, view_N)), new_view_N

    def overwrite(self, leaves: Leaves, view_N: jax.Array) -> Leaves:
        """The view's values in the leaves' dtypes; leaves are donated."""
        return self._named(_replace(self._tuple(leaves), self._starts(), view_N, self.plan))

    def mix(self, leaves: Leaves, view_N: jax.Array, alpha: float) -> Leaves:
        """Leaves and view in the shares alpha and 1 - alpha; leaves are donated (PAPER.md §1)."""
        mixed = _mix(self._tuple(leaves), self._starts(), view_N, np.float32(alpha), self.plan)
        return self._named(mixed)

    def add(self, leaves: Leaves, values_N: jax.Array) -> Leaves:
        """Leaves plus a vector, in float32, rounded to each leaf's dtype; leaves are donated."""
        return self._named(_add(self._tuple(leaves), self._starts(), values_N, self.plan))

    def _tuple(self, leaves: Leaves) -> tuple[jax.Array, ...]:
        return tuple(leaves[name] for name in self.names)

    def _named(self, leaves: tuple[jax.Array, ...]) -> Leaves:
        return dict(zip(self.names, leaves, strict=True))

    def _starts(self) -> np.ndarray:
        return np.asarray(self.starts, np.int32)


def make_kernels(
    layout: Layout, fragment: int, *, codec: Codec, delta_codec: Codec, shard_elements: int
) -> Kernels:
    """The operations of a fragment. Cheap: a kernel is compiled at its first call.

    Args:
        layout: the run's.
        fragment: index of the fragment.
        codec: of updates.
        delta_codec: of version deltas.
        shard_elements: the run's `sync.shard_elements`.
    """
    pieces, size = layout.fragments[fragment].pieces, layout.fragments[fragment].size
    names = tuple(dict.fromkeys(piece.tensor for piece in pieces))
    sizes = {tensor.name: tensor.size for tensor in layout.tensors}
    parts = tuple(
        _Part(
            leaf=names.index(piece.tensor),
            whole=piece.groups * piece.group_size == sizes[piece.tensor],
            shape=piece.shape,
            groups=piece.groups,
            group_size=piece.group_size,
            group_stride=piece.group_stride,
            offset=piece.offset,
        )
        for piece in pieces
    )
    return Kernels(
        names=names,
        codec=codec,
        delta_codec=delta_codec,
        block=layout.block,
        ranges=tuple(shard_ranges(size, layout.block, shard_elements)),
        plan=_Plan(parts, size),
        starts=tuple(piece.start for piece in pieces),
    )


# --- Kernels over the leaves


def _rows(leaf: jax.Array, start: jax.Array, part: _Part) -> jax.Array:
    """A piece's values, in the leaf's dtype."""
    if part.whole:
        return leaf
    return jax.lax.dynamic_slice_in_dim(leaf, start, part.shape[0])


def _with_rows(leaf: jax.Array, start: jax.Array, part: _Part, values: jax.Array) -> jax.Array:
    """The leaf with a piece replaced; `values` are rounded to its dtype."""
    values = values.astype(leaf.dtype)
    if part.whole:
        return values
    return jax.lax.dynamic_update_slice_in_dim(leaf, values, start, axis=0)


def _of_vector(values_N: jax.Array, part: _Part) -> jax.Array:
    """A piece's values in a vector, without the padding; float32, the piece's shape."""
    stop = part.offset + part.groups * part.group_stride
    groups = values_N[part.offset : stop].reshape(part.groups, part.group_stride)
    return groups[:, : part.group_size].reshape(part.shape)


@partial(jax.jit, static_argnames="plan")
def _padded(leaves: tuple[jax.Array, ...], starts: jax.Array, plan: _Plan) -> tuple[jax.Array, ...]:
    """Each piece as it stands in the vector, and the padding at the end; float32."""
    vectors = []
    for index, part in enumerate(plan.parts):
        values = _rows(leaves[part.leaf], starts[index], part).astype(jnp.float32)
        groups = values.reshape(part.groups, part.group_size)
        padding = part.group_stride - part.group_size
        vectors.append(jnp.pad(groups, ((0, 0), (0, padding))).reshape(-1))
    filled = sum(vector.shape[0] for vector in vectors)
    return (*vectors, jnp.zeros(plan.size - filled))


@jax.jit
def _concatenated(vectors: tuple[jax.Array, ...]) -> jax.Array:
    """A kernel of its own: fused with anything, XLA on CPU goes element by element (200 x)."""
    return jnp.concatenate(vectors)


@partial(jax.jit, static_argnames="plan", donate_argnames="leaves")
def _add(
    leaves: tuple[jax.Array, ...], starts: jax.Array, values_N: jax.Array, plan: _Plan
) -> tuple[jax.Array, ...]:
    changed = list(leaves)
    for index, part in enumerate(plan.parts):
        leaf, start = changed[part.leaf], starts[index]
        values = _rows(leaf, start, part).astype(jnp.float32) + _of_vector(values_N, part)
        changed[part.leaf] = _with_rows(leaf, start, part, values)
    return tuple(changed)


@partial(jax.jit, static_argnames="plan", donate_argnames="leaves")
def _replace(
    leaves: tuple[jax.Array, ...], starts: jax.Array, view_N: jax.Array, plan: _Plan
) -> tuple[jax.Array, ...]:
    changed = list(leaves)
    for index, part in enumerate(plan.parts):
        values = _of_vector(view_N, part)
        changed[part.leaf] = _with_rows(changed[part.leaf], starts[index], part, values)
    return tuple(changed)


@partial(jax.jit, static_argnames="plan", donate_argnames="leaves")
def _mix(
    leaves: tuple[jax.Array, ...],
    starts: jax.Array,
    view_N: jax.Array,
    alpha: jax.Array,
    plan: _Plan,
) -> tuple[jax.Array, ...]:
    changed = list(leaves)
    for index, part in enumerate(plan.parts):
        leaf, start = changed[part.leaf], starts[index]
        mine = _rows(leaf, start, part).astype(jnp.float32)
        values = alpha * mine + (1 - alpha) * _of_vector(view_N, part)
        changed[part.leaf] = _with_rows(leaf, start, part, values)
    return tuple(changed)


# --- Kernels over the vector


@partial(jax.jit, static_argnames=("codec", "block"), donate_argnames="view_N")
def _advance(
    view_N: jax.Array, delta: Encoded, codec: Codec, block: int
) -> tuple[jax.Array, jax.Array]:
    """The view plus a version delta, and how far it moved in float32."""
    moved_N = view_N + decode(codec, delta, block)
    return moved_N, moved_N - view_N


@partial(jax.jit, donate_argnames="old_N")
def _difference(new_N: jax.Array, old_N: jax.Array) -> jax.Array:
    return new_N - old_N
