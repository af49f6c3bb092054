"""Kernels in tiles: the bits of the ones by XLA, interpreted here; a TPU's compiler in `make tpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from diloco.common.config import MeshSection
from diloco.common.layout import Layout, Tensor, TensorHint, make_layout
from diloco.learner import tiles
from diloco.learner.delta import Kernels, make_kernels
from diloco.learner.mesh import make_mesh

SPECIAL = np.array(
    [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-39, 1.2e-38, 3e-20, 3e38, -3e38, 1e13],
    np.float32,
)
# Parts of tiles along rows and columns, one that lies turned, a stack, and what is left to XLA.
TENSORS = (
    Tensor(name="bias", shape=(192,), dtype="float32"),
    Tensor(name="few", shape=(2, 64, 128), dtype="float32"),
    Tensor(name="half", shape=(384, 192), dtype="bfloat16"),
    Tensor(name="odd", shape=(130, 150), dtype="float32"),
    Tensor(name="stack", shape=(2, 3, 128, 128), dtype="float32"),
    Tensor(name="wide", shape=(300, 1088), dtype="float32"),
)
IN_TILES = {"half", "stack", "wide"}


def layout_of(tensors=TENSORS, fragments: int = 1) -> Layout:
    return make_layout(
        list(tensors),
        fragments=fragments,
        block=64,
        hint=lambda _name, shape: TensorHint(norm_axes=max(len(shape) - 2, 0)),
    )


def values_of(shape, dtype, rng):
    """Of many magnitudes, some blocks with what is no usual number."""
    values = rng.standard_normal(shape).astype(np.float32)
    values *= np.exp2(rng.integers(-30, 30, (*shape[:-1], 1))).astype(np.float32)
    flat = values.reshape(-1)
    for start in rng.integers(0, max(flat.size - 64, 1), 8):
        flat[start : start + rng.integers(1, 64)] = rng.choice(SPECIAL)
    return values.astype(dtype)


def tree_of(like, rng):
    return jax.tree.map(lambda one: values_of(one.shape, one.dtype, rng), like)


def bits(tree):
    """Bytes of the leaves; all NaN alike, of which a sum or product has no certain bits."""

    def of(leaf):
        values = np.asarray(leaf)
        if values.dtype.kind in "iu":
            return values.tobytes()
        wide = values.astype(np.float32)
        return np.where(np.isnan(wide), np.float32(np.nan), wide).tobytes()

    return [of(leaf) for leaf in jax.tree.leaves(tree)]


def everything(kernels: Kernels, leaves, view, new_view, delta):
    """What each operation gives, of copies."""

    def fresh(tree):
        return jax.tree.map(jnp.copy, tree)

    sent = kernels.send(leaves, view)
    return {
        "send": sent,
        "settle": kernels.settle(fresh(leaves), sent),
        "apply": kernels.apply(fresh(leaves), fresh(view), delta),
        "jump": kernels.jump(fresh(leaves), fresh(view), new_view)[0],
    }


def compared(layout, fragment, codec, seed, shardings=None):
    """Names of the operations of which the tiles give other bits."""
    rng = np.random.default_rng(seed)
    by_xla, in_tiles = (
        make_kernels(
            layout, fragment, codec=codec, delta_codec=codec, shardings=shardings, kind=kind
        )
        for kind in ("plain", "tiles")
    )
    leaves = {
        tensor.name: values_of(tensor.shape, jnp.dtype(tensor.dtype), rng)
        for tensor in layout.tensors
        if tensor.name in by_xla.names
    }
    if shardings is None:
        leaves = jax.tree.map(jnp.asarray, leaves)
    else:
        leaves = {name: jax.device_put(leaf, shardings[name]) for name, leaf in leaves.items()}
    placed = jax.eval_shape(by_xla.blocks, leaves)
    views = [
        tuple(
            jax.device_put(values, where.sharding)
            for values, where in zip(tree_of(placed, rng), by_xla.placed, strict=True)
        )
        for _ in range(2)
    ]
    delta = by_xla.send(leaves, views[1])
    arrays = leaves, *views, delta
    wanted, found = everything(by_xla, *arrays), everything(in_tiles, *arrays)
    return [name for name in wanted if bits(wanted[name]) != bits(found[name])], in_tiles


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1))
def test_tiles_give_the_bits_of_xla(seed):
    differ, kernels = compared(layout_of(), 0, "int4", seed)
    assert not differ
    names = [kernels.names[part.leaf] for part in kernels.geometry.parts if part.tiled]
    assert set(names) == IN_TILES


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1))
def test_tiles_of_int8_give_the_bits_of_xla(seed):
    differ, kernels = compared(layout_of(TENSORS[2:3]), 0, "int8", seed)
    assert not differ
    assert kernels.geometry.parts[0].tiled


@pytest.mark.parametrize(
    ("shape", "dtype"), [((512, 128), "float32"), ((4, 2, 128, 128), "bfloat16")]
)
def test_tiles_of_the_later_rows_of_a_tensor(shape, dtype):
    layout = layout_of([Tensor(name="large", shape=shape, dtype=dtype)], fragments=2)
    later = max(range(2), key=lambda index: layout.fragments[index].pieces[0].start)
    differ, kernels = compared(layout, later, "int4", 0)
    assert not differ
    (part,) = kernels.geometry.parts
    assert part.tiled
    assert kernels.starts == (shape[0] // 2,)


def test_tiles_over_a_mesh():
    mesh = make_mesh(MeshSection(fsdp=2, tensor=2, data=2), jax.devices())
    layout = layout_of(
        [
            Tensor(name="both", shape=(256, 512), dtype="float32"),
            Tensor(name="columns", shape=(128, 256), dtype="bfloat16"),
            Tensor(name="short", shape=(128, 128), dtype="float32"),
        ]
    )
    shardings = {
        "both": NamedSharding(mesh, PartitionSpec("fsdp", "tensor")),
        "columns": NamedSharding(mesh, PartitionSpec(None, "tensor")),
        # Of which a device has too few rows.
        "short": NamedSharding(mesh, PartitionSpec("fsdp")),
    }
    differ, kernels = compared(layout, 0, "int4", 1, shardings)
    assert not differ
    names = [kernels.names[part.leaf] for part in kernels.geometry.parts if part.tiled]
    assert set(names) == {"both", "columns"}


def test_what_has_no_scales_is_left_to_xla():
    differ, kernels = compared(layout_of(), 0, "bfloat16", 0)
    assert not differ
    assert not kernels._tiled("bfloat16")


def test_a_reciprocal_is_rounded_whatever_it_was_divided_by():
    scales = (np.arange(0x1F80, 0x5380, dtype=np.uint32) << 16).view(np.float32)
    exact = np.float32(1) / scales
    for units in range(-4, 5):
        first = (exact.view(np.int32) + np.int32(units)).view(np.float32)
        assert np.array_equal(tiles.corrected(jnp.asarray(first), jnp.asarray(scales)), exact)


def test_where_there_is_no_tpu_nothing_is_tiled():
    kernels = make_kernels(layout_of(), 0, codec="int4", delta_codec="int4")
    assert not any(part.tiled for part in kernels.geometry.parts)


@pytest.mark.parametrize(
    ("shape", "dtype", "block"),
    [
        ((128, 128), "float32", 32),
        ((128, 128), "float32", 256),
        ((128, 128), "float16", 64),
        ((128, 160), "float32", 64),
        ((127, 128), "float32", 64),
        ((128, 64), "float32", 64),
        ((4096,), "float32", 64),
    ],
)
def test_what_does_not_fit(shape, dtype, block):
    assert tiles.fits((128, 128), "float32", 64)
    assert not tiles.fits(shape, dtype, block)
