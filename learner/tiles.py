"""Sending and adopting a tensor in one pass over a TPU's memory: kernels of Pallas.

A TPU keeps blocks [S, R, n, b] with R innermost, since b elements fill no row of its tiles, but
the tensor that they are of with its columns innermost. So XLA copies a tensor to the other
arrangement ahead of each operation, or back after it, and passes over memory again for each step
of quantization. Here a tile is turned in the chip's fast memory, where it is encoded or moved too:
each array is read or written once.

Shapes: a tensor [S, R, C], S stacked matrices, any leading axes; n = C / b blocks in each row. The
kernels see blocks as they lie, [S, n, b, R]. There may be blocks of some of the matrices only, from
one whose place in the first axis is `start`, int32. Bits are those of `common/quantize.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from diloco.common.codec import GREATEST_CODE, Codec, Encoded, code_count, code_dtype
from diloco.common.quantize import (
    absolute_bits,
    float_of,
    round_int4,
    round_int8,
    scale_bits,
    scales_of_bits,
)

# A register's lanes; and of a tile, which with its copies has to fit into 16 MB.
LANES = 128
TILE_ROWS, TILE_COLUMNS = 256, 1024
# Codes of a smaller block fill no tile of bytes, scales of larger ones none of a tile's columns.
BLOCKS = (64, 128)
DTYPES = ("float32", "bfloat16")
# A tensor, and its new view where there is one.
Moved = tuple[jax.Array, tuple[jax.Array, ...]]


def fits(shape: Sequence[int], dtype: str, block: int) -> bool:
    """Whether the kernels work on this tensor of a device; small ones are left to XLA."""
    return (
        block in BLOCKS
        and dtype in DTYPES
        and len(shape) > 1
        and min(shape[-2:]) >= LANES
        and shape[-1] % block == 0
    )


def encode(
    codec: Codec,
    leaf: jax.Array,
    start: jax.Array,
    view: jax.Array,
    block: int,
    *,
    interpret: bool = False,
) -> Encoded:
    """Same as `encode_blocks` of a view, and of the blocks of the tensor [*G, R, C]."""

    def body(_: Any, leaf_ref: Any, view_ref: Any, bits_ref: Any, codes_ref: Any) -> None:
        values = view_ref[0] - _blocks(leaf_ref[0], block, turned=turned)
        bits = scale_bits(jnp.max(absolute_bits(values), axis=1), GREATEST_CODE[codec])
        quotients = values * _inverse(float_of(bits << 16))[:, None, :]
        bits_ref[0] = bits
        codes_ref[0] = _packed(codec, quotients)

    turned, blocks = _lies_turned(leaf), _inward(view)
    stack, count, _, rows = blocks.shape
    codes_shape = (stack, count, code_count(codec, block), rows)
    bits, codes = _call(
        body,
        _place(leaf, start),
        (_matrices(leaf), blocks),
        (
            jax.ShapeDtypeStruct((stack, count, rows), jnp.int32),
            jax.ShapeDtypeStruct(codes_shape, code_dtype(codec)),
        ),
        block,
        interpret=interpret,
    )
    scales = scales_of_bits(_outward(bits, view.shape))
    return Encoded(scales, _outward(codes, view.shape))


def settle(
    codec: Codec,
    leaf: jax.Array,
    start: jax.Array,
    update: Encoded,
    block: int,
    *,
    interpret: bool = False,
) -> Moved:
    """The tensor plus an update, in float32, rounded to its dtype."""

    def body(_: Any, leaf_ref: Any, scales_ref: Any, codes_ref: Any, moved_ref: Any) -> None:
        step = _decoded(codec, scales_ref[0], codes_ref[0])
        moved_ref[0] = _moved(leaf_ref[0], step, turned=turned)

    matrices, turned = _matrices(leaf), _lies_turned(leaf)
    taken = (matrices, *_encoded(update))
    (moved,) = _call(
        body, _place(leaf, start), taken, (_like(matrices),), block, interpret=interpret, kept=1
    )
    return _back(moved, leaf.shape, turned=turned), ()


def apply(
    codec: Codec,
    leaf: jax.Array,
    start: jax.Array,
    view: jax.Array,
    delta: Encoded,
    block: int,
    *,
    interpret: bool = False,
) -> Moved:
    """Tensor and view moved by a version delta."""

    def body(
        _: Any,
        leaf_ref: Any,
        view_ref: Any,
        scales_ref: Any,
        codes_ref: Any,
        moved_ref: Any,
        new_ref: Any,
    ) -> None:
        old = view_ref[0]
        new = old + _decoded(codec, scales_ref[0], codes_ref[0])
        moved_ref[0] = _moved(leaf_ref[0], new - old, turned=turned)
        new_ref[0] = new

    matrices, blocks, turned = _matrices(leaf), _inward(view), _lies_turned(leaf)
    moved, new = _call(
        body,
        _place(leaf, start),
        (matrices, blocks, *_encoded(delta)),
        (_like(matrices), _like(blocks)),
        block,
        interpret=interpret,
        kept=2,
    )
    return _back(moved, leaf.shape, turned=turned), (_outward(new, view.shape),)


def jump(
    leaf: jax.Array,
    start: jax.Array,
    view: jax.Array,
    new_view: jax.Array,
    block: int,
    *,
    interpret: bool = False,
) -> Moved:
    """The tensor moved as far as a newer view is from the old one."""

    def body(_: Any, leaf_ref: Any, old_ref: Any, new_ref: Any, moved_ref: Any) -> None:
        moved_ref[0] = _moved(leaf_ref[0], new_ref[0] - old_ref[0], turned=turned)

    matrices, turned = _matrices(leaf), _lies_turned(leaf)
    taken = (matrices, _inward(view), _inward(new_view))
    (moved,) = _call(
        body, _place(leaf, start), taken, (_like(matrices),), block, interpret=interpret, kept=1
    )
    return _back(moved, leaf.shape, turned=turned), ()


# --- Arrays as the kernels see them


def _sizes(leaf: jax.Array) -> tuple[int, int, int]:
    return math.prod(leaf.shape[:-2]), leaf.shape[-2], leaf.shape[-1]


def _lies_turned(leaf: jax.Array) -> bool:
    """Whether its rows are innermost: where its last tiles then have less padding."""
    _, rows, columns = _sizes(leaf)
    sublanes = 32 // leaf.dtype.itemsize

    def padded(outer: int, inner: int) -> int:
        return pl.cdiv(outer, sublanes) * sublanes * pl.cdiv(inner, LANES) * LANES

    return padded(columns, rows) < padded(rows, columns)


def _matrices(leaf: jax.Array) -> jax.Array:
    """[*G, R, C] as it lies: [..., S, R, C] or [..., S, C, R], ahead of it ones.

    With an axis more than the leaf, so that what comes back has to be reshaped: the compiler
    fails where a program gives just what a kernel put in an argument's place (libtpu 0.0.42.1).
    """
    ones = (1,) * (leaf.ndim - 2)
    matrices = leaf.reshape(*ones, *_sizes(leaf))
    return matrices.swapaxes(-1, -2) if _lies_turned(leaf) else matrices


def _place(leaf: jax.Array, start: jax.Array) -> jax.Array:
    """The first of the stacked matrices, int32 [1]."""
    return (start * math.prod(leaf.shape[1:-2])).astype(jnp.int32).reshape(1)


def _back(matrices: jax.Array, shape: Sequence[int], *, turned: bool) -> jax.Array:
    return (matrices.swapaxes(-1, -2) if turned else matrices).reshape(shape)


def _inward(blocks: jax.Array, items: int = 1) -> jax.Array:
    """[*G, R, n, *items] as it lies: [S, n, *items, R]."""
    lead = blocks.ndim - 2 - items
    stacked = blocks.reshape(math.prod(blocks.shape[:lead]), *blocks.shape[lead:])
    return jnp.moveaxis(stacked, 1, -1)


def _outward(blocks: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Back to [*G, R, n, *items], from the shape of such blocks."""
    turned = jnp.moveaxis(blocks, -1, 1)
    return turned.reshape(*shape[:-2], *turned.shape[2:])


def _encoded(encoded: Encoded) -> tuple[jax.Array, jax.Array]:
    """Scales as float32 [S, n, R], and codes [S, n, items, R]."""
    return _inward(encoded.scales.astype(jnp.float32), 0), _inward(encoded.codes)


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _call(
    body: Any,
    place: jax.Array,
    taken: Sequence[jax.Array],
    given: Sequence[jax.ShapeDtypeStruct],
    block: int,
    *,
    interpret: bool,
    kept: int = 0,
) -> Sequence[jax.Array]:
    """A kernel over all tiles.

    Args:
        body: of references to `place`, and to a tile of each array.
        place: of the tensor's matrices, the first that there are blocks of.
        taken: arrays; first the tensor, as it lies, then blocks [S, n, *items, R].
        given: what comes back.
        block: elements of a block.
        interpret: by XLA, where there is no TPU.
        kept: how many of those that are taken the first of those that are given replace.
    """
    stack, rows = taken[1].shape[0], taken[1].shape[-1]
    tensor = taken[0].shape
    columns = math.prod(tensor[-2:]) // rows
    tile_rows, tile_columns = min(rows, TILE_ROWS), min(columns, TILE_COLUMNS)
    ones, origin = (None,) * (len(tensor) - 3), (0,) * (len(tensor) - 3)

    def spec(array: Any) -> pl.BlockSpec:
        items = array.shape[2:-1]
        zeros = (0,) * len(items)
        return pl.BlockSpec(
            (1, tile_columns // block, *items, tile_rows), lambda s, i, j, _: (s, j, *zeros, i)
        )

    of_tensor = pl.BlockSpec(
        (*ones, 1, tile_rows, tile_columns), lambda s, i, j, at: (*origin, at[0] + s, i, j)
    )
    if tensor[-2:] != (rows, columns):
        of_tensor = pl.BlockSpec(
            (*ones, 1, tile_columns, tile_rows), lambda s, i, j, at: (*origin, at[0] + s, j, i)
        )
    # The tensor is first of what is taken; and, where it is replaced, of what is given.
    replaced = min(kept, 1)
    blocks: list[Any] = [*taken[1:], *given[replaced:]]
    # Each array goes to or from memory once; of the tensor, what there are blocks of.
    moved = (1 + replaced) * stack * rows * columns * taken[0].dtype.itemsize
    moved += sum(math.prod(one.shape) * one.dtype.itemsize for one in blocks)
    if not interpret:
        # Or the compiler brings whole arrays into fast memory ahead, and back after.
        taken = [pltpu.with_memory_space_constraint(one, pltpu.HBM) for one in taken]
        given = [pltpu.HBM(one.shape, one.dtype) for one in given]
    found: Sequence[jax.Array] = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(stack, pl.cdiv(rows, tile_rows), pl.cdiv(columns, tile_columns)),
            in_specs=[of_tensor, *map(spec, taken[1:])],
            out_specs=[*[of_tensor] * replaced, *map(spec, given[replaced:])],
        ),
        out_shape=list(given),
        # The first argument is `place`. What no tile is of stays as it was.
        input_output_aliases={1 + index: index for index in range(kept)},
        # About ten operations for each element.
        cost_estimate=pl.CostEstimate(
            flops=10 * stack * rows * columns, transcendentals=0, bytes_accessed=moved
        ),
        interpret=interpret,
    )(place, *taken)
    return found


# --- One tile: a matrix [r, c], or turned, and blocks [n, b, r]


def _blocks(matrix: jax.Array, block: int, *, turned: bool) -> jax.Array:
    """The blocks of a matrix, float32."""
    wide = matrix.astype(jnp.float32)
    columns_first = wide if turned else wide.T
    return columns_first.reshape(-1, block, columns_first.shape[1])


def _moved(matrix: jax.Array, step: jax.Array, *, turned: bool) -> jax.Array:
    """A matrix plus blocks."""
    columns_first = step.reshape(-1, step.shape[-1])
    moved = matrix.astype(jnp.float32) + (columns_first if turned else columns_first.T)
    return moved.astype(matrix.dtype)


def _inverse(scales: jax.Array) -> jax.Array:
    """Reciprocals, rounded as IEEE 754 wants it, whatever the chip's division does."""
    return corrected(1 / scales, scales)


def corrected(first: jax.Array, scales: jax.Array) -> jax.Array:
    """The reciprocals of scales from ones that are off by some units in the last place.

    What is missing to one is exact: half of a reciprocal's bits times a scale's eight fit a
    float32. And no reciprocal of eight bits is so near to the middle of two floats that its
    square could matter.
    """
    high = float_of(jax.lax.bitcast_convert_type(first, jnp.int32) & ~0xFFF)
    missing = (1 - scales * high) - scales * (first - high)
    return first + first * missing


def _packed(codec: Codec, quotients: jax.Array) -> jax.Array:
    """Codes [n, items, r], as `common/codec.py` lays them out in a block."""
    if codec == "int8":
        return round_int8(quotients)
    codes = round_int4(quotients)
    half = codes.shape[1] // 2
    return (codes[:, :half] | (codes[:, half:] << 4)).astype(jnp.uint8)


def _decoded(codec: Codec, scales: jax.Array, codes: jax.Array) -> jax.Array:
    """Values, float32 [n, b, r]: exact products."""
    wide = codes.astype(jnp.int32)
    if codec == "int4":
        wide = jnp.concatenate([wide & 15, wide >> 4], axis=1) - np.int32(8)
    return wide.astype(jnp.float32) * scales[:, None, :]
