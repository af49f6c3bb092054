"""A learner on a mesh: who holds and who uploads what, and that nobody else can tell the mesh."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from diloco.common.process.config import MeshSection, SyncSection
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.layout import Layout, Tensor, TensorHint, make_layout
from diloco.learner.tensors import tree
from diloco.learner.tensors.mesh import make_mesh, param_shardings, within
from diloco.learner.tensors.placement import Ownership, make_ownership
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.learner.tensors.send_and_adopt import Replica
from diloco.learner.tensors.send_and_adopt_kernels import make_kernels

BLOCK = 16
# Odd sizes, a scalar, stacks, rows of several fragments, and axes of whole and of broken blocks.
SHAPES = {
    "scalar": (),
    "bias": (7,),
    "stack": (3, 5, 3),
    "matrix": (64, 256),
    "turned": (128, 96),
    "layers": (6, 64, 192),
    "embed": (256, 128),
}
ASKED = {
    "matrix": PartitionSpec("fsdp", "tensor"),
    "turned": PartitionSpec("tensor", "fsdp"),
    "layers": PartitionSpec(None, "fsdp", "tensor"),
    "embed": PartitionSpec("tensor", "fsdp"),
}
MESHES = ((2, 2, 2), (1, 3, 2))


def hint(name, shape):
    return TensorHint(norm_axes=int(len(shape) == 3), alone=name == "embed")


def layout_of(shapes, fragments=3) -> Layout:
    tensors = [Tensor(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()]
    return make_layout(tensors, fragments=fragments, block=BLOCK, hint=hint)


def task_of(asked):
    partition = None if asked is None else lambda name, _shape: asked.get(name, PartitionSpec())
    return types.SimpleNamespace(partition=partition, hint=hint)


def shapes_of(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def mesh_of(sizes):
    section = MeshSection(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    return make_mesh(section, jax.devices()[: int(np.prod(sizes))])


def ownerships(layout, shardings, processes) -> list[list[Ownership]]:
    """Returns each process's part of each fragment; devices belong to processes in equal turns."""
    count = len(next(iter(tree.by_name(shardings).values())).mesh.devices.flat)

    def process_of(device) -> int:
        return device.id * processes // count

    kernels = [
        make_kernels(
            layout, f.index, codec="int4", delta_codec="int4", shardings=tree.by_name(shardings)
        )
        for f in layout.fragments
    ]
    return [[make_ownership(k, p, process_of) for k in kernels] for p in range(processes)]


# --- Ownership


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 24, 48, 64]), max_size=3).map(tuple),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 3),
    st.sampled_from([(1, 2, 1), (2, 2, 2), (1, 8, 1), (1, 4, 2), (2, 1, 4), (1, 3, 2), (1, 5, 1)]),
    st.sampled_from([1, 2, 4]),
    st.randoms(use_true_random=False),
)
def test_what_hosts_own_is_a_partition_of_what_they_hold(shapes, fragments, sizes, hosts, rng):
    named = {f"t{number}": shape for number, shape in enumerate(shapes)}
    asked = {}
    for name, shape in named.items():
        axes = [axis if rng.random() < 0.7 else None for axis in ("fsdp", "tensor", "data")]
        rng.shuffle(axes)
        asked[name] = PartitionSpec(*axes[: len(shape)])
    layout = layout_of(named, min(fragments, len(named)))
    mesh = mesh_of(sizes)
    shardings = param_shardings(task_of(asked), layout, shapes_of(named), mesh)
    hosts = min(hosts, mesh.devices.size)
    for fragment, of_hosts in zip(
        layout.fragments, zip(*ownerships(layout, shardings, hosts), strict=True), strict=True
    ):
        owned = np.concatenate([ownership.owned for ownership in of_hosts])
        assert np.array_equal(np.sort(owned), np.arange(fragment.size // BLOCK))
        for ownership in of_hosts:
            assert np.isin(ownership.owned, ownership.held).all()
            assert (np.diff(ownership.owned) > 0).all()
            assert (np.diff(ownership.held) > 0).all()


def test_hosts_with_copies_share_the_uploads():
    layout = layout_of(SHAPES)
    shardings = param_shardings(task_of(ASKED), layout, shapes_of(SHAPES), mesh_of((8, 1, 1)))
    one, other = (
        sum(len(ownership.owned) for ownership in of_host)
        for of_host in ownerships(layout, shardings, 2)
    )
    assert min(one, other) > 0.25 * (one + other)


def test_a_host_holds_no_more_than_its_devices():
    layout = layout_of(SHAPES)
    shardings = param_shardings(task_of(ASKED), layout, shapes_of(SHAPES), mesh_of((1, 8, 1)))
    for of_host in ownerships(layout, shardings, 4):
        held = sum(len(ownership.held) for ownership in of_host)
        whole = sum(fragment.size // BLOCK for fragment in layout.fragments)
        small = 16  # blocks of tensors that are too small to be cut
        assert held <= whole / 4 + small


# --- The same bits on any mesh


def life(sizes, codec, asked, anchor="device"):
    """All that a replica sends and becomes in a round of every fragment."""
    layout = layout_of(SHAPES)
    mesh = mesh_of(sizes)
    like = shapes_of(SHAPES)
    sync = SyncSection(fragments=3, block=BLOCK, codec=codec, delta_codec=codec, anchor=anchor)
    shardings = param_shardings(task_of(asked), layout, like, mesh)
    rng = np.random.default_rng(0)
    views = [rng.standard_normal(f.size).astype(np.float32) for f in layout.fragments]
    found = []
    with within(mesh):
        replica = Replica(
            sync, layout, like, views, shardings=tree.by_name(shardings), anchor=anchor
        )
        replica.warm_up()
        steps = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
        replica.trained = jax.tree.map(
            lambda leaf, step: jax.device_put(leaf + step, leaf.sharding), replica.trained, steps
        )
        for fragment in range(3):
            rows = replica.collect(fragment, replica.send(fragment))
            found += [rows.scales.tobytes(), rows.codes.tobytes()]
            values = rng.standard_normal(layout.fragments[fragment].size).astype(np.float32)
            delta = Encoded(*map(np.asarray, encode(codec, values, BLOCK)))
            replica.adopt(fragment, replica.place(fragment, delta), resolved=True)
            found.append(replica.digest(fragment)())
            jump = replica.place_view(fragment, views[fragment])
            replica.adopt(fragment, jump, resolved=False)
            found.append(replica.digest(fragment)())
        for name, leaf in replica.trained.items():
            assert leaf.sharding == shardings[name]
            found.append(np.asarray(leaf).tobytes())
    return found


@functools.cache
def life_alone(codec):
    """On one device."""
    return life((1, 1, 1), codec, None)


@pytest.mark.parametrize(
    "codec",
    [
        "int4",
        pytest.param("float32", marks=pytest.mark.long),
        pytest.param("bfloat16", marks=pytest.mark.long),
        pytest.param("int8", marks=pytest.mark.long),
    ],
)
def test_no_mesh_changes_a_bit(codec):
    alone = life_alone(codec)
    for sizes in MESHES if codec == "int4" else MESHES[:1]:
        assert life(sizes, codec, ASKED) == alone, sizes


def test_by_default_large_tensors_are_cut_along_fsdp():
    assert life((1, 8, 1), "int4", None) == life_alone("int4")


@pytest.mark.long
def test_views_in_the_hosts_memory_are_the_same():
    assert life((1, 2, 2), "int4", ASKED, anchor="host") == life_alone("int4")


def test_a_host_that_holds_a_part_is_given_that_part():
    """Rows held, put on the devices, are those of the whole fragment."""
    layout = layout_of(SHAPES)
    shardings = param_shardings(task_of(ASKED), layout, shapes_of(SHAPES), mesh_of((1, 4, 2)))
    for fragment, of_hosts in zip(
        layout.fragments, zip(*ownerships(layout, shardings, 4), strict=True), strict=True
    ):
        numbers = np.arange(fragment.size // BLOCK, dtype=np.float32)
        for ownership in of_hosts:
            for part in ownership.parts:
                sides = [stop - start for start, stop in part.box]
                mine = ownership.held[part.held : part.held + int(np.prod(sides))]
                grid = numbers[part.placed.first :][: int(np.prod(part.placed.grid))]
                box = tuple(slice(*side) for side in part.box)
                assert np.array_equal(mine, grid.reshape(part.placed.grid)[box].reshape(-1))
