"""A learner's devices as a mesh, and the sharding of tensors on it.

The mesh has four axes: `data` (replicas of the model), `fsdp` (each tensor is sharded, and gathered
for its use), `expert` (experts of a mixture are distributed, and tokens are sent to them) and
`tensor` (matrix products are sharded). A batch is sharded along `data`, `fsdp` and `expert`
together. Learners of one run may have different meshes: only the shapes of tensors are common to a
run.

To *cut* an axis of a tensor is to shard that axis over mesh axes. `Task.partition` says how each
tensor is cut; without that function, the largest axis of a tensor whose size `fsdp` divides is cut
along `fsdp`. In both cases three rules hold:

1. An axis whose size the mesh axes do not divide is not cut along them.
2. The first axis of a tensor whose rows are in several fragments is not cut, since sending a
   fragment would gather that tensor.
3. A cut that rules 1 and 2 forbid moves to another axis of the tensor, if one fits.
4. A cut along `fsdp` that would divide quantization blocks also moves, if blocks stay whole then.
   Otherwise devices exchange a fragment's values whenever it is sent or adopted. Tensors of experts
   stay as asked, since the layer of a mixture would exchange them at each step.

An exception is an axis of experts: if the mesh does not divide that axis, the mesh is refused.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from diloco.common.process.config import AXES, MeshSection
from diloco.common.protocol.errors import ConfigError, TaskError
from diloco.common.protocol.layout import Layout
from diloco.learner.task import Params, Task, is_floating, own_name
from diloco.learner.tensors import tree

# Mesh axes along which the rows of a batch are cut.
ROWS = ("data", "fsdp", "expert")
# The mesh axis along which an axis of a decoder's tensor is cut, by the axis's kind.
OF_DECODERS = {"width": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
# For each axis of a tensor, the names of the mesh axes that cut it.
Cuts = tuple[tuple[str, ...], ...]
AUTO = (AxisType.Auto,) * len(AXES)
# A smaller tensor is not worth gathering: each device has it whole.
LEAST_ELEMENTS = 1 << 12


def make_mesh(section: MeshSection, devices: list[Any] | None = None, slices: int = 1) -> Mesh:
    """Returns the mesh of a learner.

    With several slices, the axis `data` is that many times longer: slice by slice, so that each
    slice has a whole copy of the model.

    Args:
        section: sizes of the axes; an axis of size 0 takes the devices that the others leave. With
            several slices, sizes of the mesh of each slice.
        devices: the learner's devices, slice by slice; None: all devices of all its hosts.
        slices: the number of slices.

    Raises:
        ConfigError: the product of the sizes is not the number of devices, or the links between
            the devices do not allow a mesh of these sizes.
    """
    devices = jax.devices() if devices is None else devices
    if slices > 1:
        each, rest = divmod(len(devices), slices)
        if rest or not each:
            raise ConfigError(
                f"{len(devices)} devices are not {slices} slices of equal size",
                hint="the devices are those of all slices of the learner together",
            )
        meshes = [
            _of_slice(section, devices[n * each : (n + 1) * each], "a slice") for n in range(slices)
        ]
        grid = np.concatenate([mesh.devices for mesh in meshes], axis=AXES.index("data"))
        return Mesh(grid, AXES, axis_types=AUTO)
    return _of_slice(section, devices, "this learner")


def _of_slice(section: MeshSection, devices: Sequence[Any], whose: str) -> Mesh:
    shape = section.shape(len(devices))
    if shape is None:
        raise ConfigError(
            f"learner.mesh ({section}) does not fit the {len(devices)} devices of {whose}",
            hint="the sizes must multiply to the number of devices; 0 takes what the others leave",
        )
    try:
        return jax.make_mesh(shape, AXES, devices=devices, axis_types=AUTO)
    except NotImplementedError as error:
        raise ConfigError(
            f"learner.mesh ({section}) cannot be laid over the links of this slice: "
            f"{str(error).partition('. ')[0]}",
            hint="each size must be the product of some sides of the slice, such as 4, 16 or 64 on"
            " 4x4x4",
        ) from error


def abstract_mesh(section: MeshSection, slices: int = 1) -> AbstractMesh:
    """Returns a mesh without devices, for checks of shardings.

    Args:
        section: sizes of the axes of one slice; an axis of size 0 gets size 1.
        slices: the number of slices, along `data`.
    """
    shape = section.shape(section.given)
    assert shape is not None
    sizes = dict(zip(AXES, shape, strict=True))
    sizes["data"] *= slices
    return AbstractMesh(tuple(sizes.values()), AXES, axis_types=AUTO)


def single(device: Any = None) -> Mesh:
    """Returns a mesh of one device; None: the first device of this process."""
    return make_mesh(MeshSection(), [device or jax.local_devices()[0]])


def constrain(values: jax.Array, *axes: Any) -> jax.Array:
    """Constrains the sharding of an activation, to be called in a jitted function.

    Returns `values` unchanged outside of a mesh, and within `shard_map`, whose body is per device.

    Args:
        values: the activation.
        axes: for each leading axis of `values`, an item of a `PartitionSpec`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return values
    constrained: jax.Array = jax.lax.with_sharding_constraint(values, known_spec(*axes))
    return constrained


def known_spec(*axes: Any) -> PartitionSpec:
    """Returns the `PartitionSpec` of `axes`; leaves out names in tuples that the mesh lacks.

    The mesh is the one that is set where this function is called.
    """
    known = jax.sharding.get_abstract_mesh().shape
    return PartitionSpec(
        *(tuple(one for one in each if one in known) if isinstance(each, tuple) else each
          for each in axes)
    )  # fmt: skip


def by_kind_of_axis(kinds: Sequence[str], *, mixture: bool = False) -> PartitionSpec:
    """Returns the `PartitionSpec` of a tensor of a decoder, by the kinds of the tensor's axes.

    Args:
        kinds: the kind of each axis, such as "width" or "heads"; axes of other kinds than those of
            `OF_DECODERS` and "experts" are not cut.
        mixture: the decoder is a mixture of experts. Tensors of experts are cut along `expert`, and
            the width of other tensors along both `fsdp` and `expert`.
    """
    cuts: dict[str, Any] = dict(OF_DECODERS)
    if mixture and "mlp" in kinds and "experts" in kinds:
        cuts["experts"] = "expert"
    elif mixture:
        cuts["width"] = ("fsdp", "expert")
    return PartitionSpec(*map(cuts.get, kinds))


def parts_along(axis: str) -> int:
    """Returns the size of an axis of the present mesh; 1 where `constrain` has no effect."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or mesh.manual_axes else mesh.shape.get(axis, 1)


# --- Parameters


def param_shardings(
    task: Task, layout: Layout, params: Params, mesh: Mesh | AbstractMesh
) -> Params:
    """Returns the sharding of each leaf on the mesh, as a tree like `params`.

    Args:
        task: the task; `Task.partition` is called for each floating leaf, if the task has it.
        layout: the run's layout.
        params: the task's parameters, of arrays or shapes.
        mesh: the learner's mesh.

    Raises:
        TaskError: `Task.partition` returns something other than a PartitionSpec that fits a tensor.
        ConfigError: `tensor` is larger than 1 without `Task.partition`; or `expert` is larger than
            1, and no tensor is cut along it, or it does not divide the number of experts.
    """
    if task.partition is None and mesh.shape["tensor"] > 1:
        raise ConfigError(
            f"learner.mesh has tensor={mesh.shape['tensor']}, but the task has no `partition`, so"
            " nothing would be cut along it",
            hint="use fsdp instead, or give the task a `partition` (docs/tasks.md)",
        )
    asked: set[str] = set()
    split = split_tensors(layout)
    placed = {}
    for name, leaf in tree.by_name(params).items():
        shape = tuple(leaf.shape)
        whole = {0} if name in split else set()
        if not is_floating(leaf):
            wanted = _fsdp(shape, whole, mesh)
        elif task.partition is None:
            whole |= {*range(task.hint(own_name(name), shape).norm_axes)}
            wanted = _fsdp(shape, whole, mesh)
        else:
            wanted = _asked(name, shape, task.partition(own_name(name), shape))
            _check_experts(name, shape, wanted, mesh)
            asked |= {axis for axes in wanted for axis in axes}
        cuts = fit(shape, wanted, mesh, whole)
        if ("expert",) not in wanted:
            cuts = _whole_blocks(shape, cuts, mesh, whole, layout.block)
        placed[name] = sharding_of(mesh, cuts)
    if mesh.shape["expert"] > 1 and "expert" not in asked:
        raise ConfigError(
            f"learner.mesh has expert={mesh.shape['expert']}, but the task's model has no experts",
            hint="use fsdp instead; a task of your own names `expert` in its `partition`",
        )
    return tree.from_names(params, placed)


def _check_experts(
    name: str, shape: tuple[int, ...], wanted: Cuts, mesh: Mesh | AbstractMesh
) -> None:
    """Checks that the mesh axis `expert` divides the number of a tensor's experts.

    Raises:
        ConfigError: it does not.
    """
    for size, axes in zip(shape, wanted, strict=True):
        if axes == ("expert",) and size % mesh.shape["expert"]:
            raise ConfigError(
                f"learner.mesh has expert={mesh.shape['expert']}, which does not divide the {size} "
                f"experts of {name!r}",
                hint="choose a divisor of their number, and let fsdp take the other devices",
            )


def split_tensors(layout: Layout) -> set[str]:
    """Returns the names of the tensors whose rows are in several fragments."""
    sizes = {tensor.name: tensor.size for tensor in layout.tensors}
    return {
        piece.tensor
        for fragment in layout.fragments
        for piece in fragment.pieces
        if math.prod(piece.shape) != sizes[piece.tensor]
    }


def fit(
    shape: tuple[int, ...],
    wanted: Cuts,
    mesh: Mesh | AbstractMesh,
    whole: Collection[int] = frozenset(),
) -> Cuts:
    """Returns the cuts of a tensor that come closest to `wanted`.

    A cut whose mesh axis does not divide the size of the tensor's axis moves to the tensor's
    largest axis that it divides; if there is none, the cut is left out.

    Args:
        shape: the tensor's shape.
        wanted: for each axis of the tensor, the mesh axes to cut it along.
        mesh: the learner's mesh.
        whole: axes of the tensor that must not be cut.
    """
    cuts: list[list[str]] = [[] for _ in shape]
    homeless = []

    def divides(axis: int, name: str) -> bool:
        parts = math.prod(mesh.shape[other] for other in cuts[axis])
        return axis not in whole and shape[axis] % (parts * mesh.shape[name]) == 0

    for axis, names in enumerate(wanted):
        for name in names:
            if mesh.shape[name] == 1:
                continue
            if divides(axis, name):
                cuts[axis].append(name)
            else:
                homeless.append(name)
    for name in homeless:
        room = [axis for axis in range(len(shape)) if divides(axis, name)]
        if room:
            cuts[max(room, key=lambda axis: shape[axis])].append(name)
    return tuple(tuple(names) for names in cuts)


def _whole_blocks(
    shape: tuple[int, ...],
    cuts: Cuts,
    mesh: Mesh | AbstractMesh,
    whole: Collection[int],
    block: int,
) -> Cuts:
    """Moves a tensor's cut along `fsdp` to its largest axis with which no cut divides a block.

    Tensors are gathered along `fsdp` for their use, so it does not matter which axis is cut.

    Args:
        shape: the tensor's shape.
        cuts: for each axis of the tensor, the mesh axes that cut it.
        mesh: the learner's mesh.
        whole: axes of the tensor that must not be cut.
        block: number of elements, one after the other, that share a quantization scale.

    Returns:
        The new cuts; `cuts` if blocks are whole already, or no axis fits.
    """

    def parts(names: Iterable[str]) -> int:
        return math.prod(mesh.shape[name] for name in names)

    def are_whole(cuts: Cuts) -> bool:
        # The elements that a device has one after the other follow from the last axis that is cut.
        last = max((axis for axis, names in enumerate(cuts) if names), default=0)
        return math.prod(shape[last:]) // parts(cuts[last]) % block == 0

    fsdp = next((axis for axis, names in enumerate(cuts) if "fsdp" in names), None)
    if fsdp is None or are_whole(cuts):
        return cuts
    kept = [tuple(name for name in names if name != "fsdp") for names in cuts]
    room = (axis for axis in range(len(shape)) if axis not in whole and axis != fsdp)
    for axis in sorted(room, key=lambda axis: -shape[axis]):
        moved = (*kept[:axis], (*kept[axis], "fsdp"), *kept[axis + 1 :])
        if shape[axis] % parts(moved[axis]) == 0 and are_whole(moved):
            return moved
    return cuts


def sharding_of(mesh: Mesh | AbstractMesh, cuts: Cuts) -> NamedSharding:
    """Returns the sharding with these cuts; its `PartitionSpec` omits uncut axes at the end."""
    names = [axes if len(axes) > 1 else (axes or (None,))[0] for axes in cuts]
    while names and names[-1] is None:
        names.pop()
    return NamedSharding(mesh, PartitionSpec(*names))


def cuts_of(sharding: NamedSharding, axes: int) -> Cuts:
    """Returns, for each of a tensor's `axes` axes, the mesh axes that cut it."""
    spec = (*sharding.spec, *(None,) * (axes - len(sharding.spec)))
    return tuple(
        () if names is None else (names,) if isinstance(names, str) else tuple(names)
        for names in spec
    )


def _fsdp(shape: tuple[int, ...], whole: set[int], mesh: Mesh | AbstractMesh) -> Cuts:
    """Returns cuts of the tensor's largest axis along `fsdp`, among axes that `fsdp` divides.

    Axes in `whole` are not cut, nor are tensors of less than `LEAST_ELEMENTS` elements.
    """
    cuts: list[tuple[str, ...]] = [() for _ in shape]
    room = [
        axis
        for axis, size in enumerate(shape)
        if axis not in whole and size and size % mesh.shape["fsdp"] == 0
    ]
    if room and math.prod(shape) >= LEAST_ELEMENTS:
        cuts[max(room, key=lambda axis: shape[axis])] = ("fsdp",)
    return tuple(cuts)


def _asked(name: str, shape: tuple[int, ...], spec: Any) -> Cuts:
    if not isinstance(spec, PartitionSpec) or len(spec) > len(shape):
        raise TaskError(
            f"Task.partition must return a PartitionSpec of at most {len(shape)} axes for {name!r} "
            f"of shape {shape}, but it returned {spec!r}",
            hint="jax.sharding.PartitionSpec() leaves a tensor whole",
        )
    cuts = tuple(
        () if names is None else (names,) if isinstance(names, str) else tuple(names)
        for names in (*spec, *(None,) * (len(shape) - len(spec)))
    )
    used = [axis for names in cuts for axis in names]
    if not set(used) <= set(AXES) or len(set(used)) != len(used):
        raise TaskError(
            f"Task.partition names mesh axes {used} for {name!r}; there are {', '.join(AXES)}, "
            "each to be used once",
            hint="see docs/tasks.md",
        )
    return cuts


# --- The optimizer's state


def state_shardings(state: Any, trained: Params, shardings: Params, mesh: Mesh) -> Any:
    """Returns the shardings of an optimizer's state, as a tree like `state`.

    A leaf of the state, such as a moment, gets the sharding of the parameter that has the same
    shape and whose path is the end of the leaf's path. All other leaves, such as counts, are
    replicated on all devices.

    Args:
        state: shapes of the optimizer's state.
        trained: shapes of the trained parameters.
        shardings: shardings of the trained parameters.
        mesh: the learner's mesh.
    """
    leaves = jax.tree_util.tree_flatten_with_path(trained)[0]
    of_path = {
        path: (tuple(leaf.shape), sharding)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
    }
    everywhere = NamedSharding(mesh, PartitionSpec())

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for start in range(len(path) + 1):
            found = of_path.get(path[start:])
            if found is not None and found[0] == tuple(leaf.shape):
                sharding: NamedSharding = found[1]
                return sharding
        return everywhere

    return jax.tree_util.tree_map_with_path(of, state)


# --- Batches


def rows_of_batch(mesh: Mesh | AbstractMesh, batch: Any) -> tuple[int, int]:
    """Returns (the rows of a whole batch, the number of parts into which the mesh cuts them).

    Raises:
        ConfigError: the rows cannot be cut into equal parts.
    """
    cuts = math.prod(mesh.shape[axis] for axis in ROWS)
    sizes = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)}
    if len(sizes) > 1 and cuts > 1:
        raise ConfigError(
            f"leaves of a batch have {sorted(sizes)} rows, so a mesh cannot cut it",
            hint="give all leaves of a batch the same first axis, or use one device",
        )
    count = min(sizes, default=0)
    if count % cuts:
        raise ConfigError(
            f"a batch of {count} rows cannot be cut into {' x '.join(ROWS)} = "
            f"{cuts} parts of the learner's mesh",
            hint="choose a batch size that they divide: learner.options = { batch = ... }",
        )
    return count, cuts


class BatchPlacer:
    """Places a host's rows of each batch on the devices of the mesh.

    Args:
        mesh: the learner's mesh.
        batch: one whole batch of the learner, or its shapes.

    Attributes:
        rows: (start, stop): the rows of a batch that this host's devices need.
        whole: True if `rows` are all rows of a batch.

    Raises:
        ConfigError: the rows of a batch cannot be cut into equal parts.
    """

    def __init__(self, mesh: Mesh, batch: Any) -> None:
        self._mesh = mesh
        self._count, self._cuts = rows_of_batch(mesh, batch)
        self._rows = NamedSharding(mesh, PartitionSpec(ROWS))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self.rows = self._local_rows()
        self.whole = self.rows == (0, self._count)

    def _local_rows(self) -> tuple[int, int]:
        if not self._count:
            return 0, 0
        indices = self._rows.addressable_devices_indices_map((self._count,)).values()
        spans = [index[0].indices(self._count) for index in indices if index is not None]
        if not spans:  # None of the mesh's devices is this host's: it only compiles.
            return 0, 0
        return min(span[0] for span in spans), max(span[1] for span in spans)

    def sharded(self, batch: Any) -> Any:
        """Returns the shapes of a whole batch, with the shardings of the arrays that `place` makes.

        Shapes have no shardings where `place` leaves arrays on the host.
        """
        if self._mesh.size > 1 and self._cuts == 1:
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), batch
            )

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            cut = np.ndim(leaf) and self._mesh.size > 1
            place = self._rows if cut else self._everywhere
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=place)

        return jax.tree.map(placed, batch)

    def place(self, rows: Any) -> Any:
        """Returns the whole batch as JAX arrays on the devices of all hosts.

        Args:
            rows: this host's rows of the batch, NumPy arrays. They are returned unchanged if a mesh
                of several devices does not cut the batch.
        """
        if self._mesh.size == 1:
            # Before the step: a program would wait for arguments that are still on the host.
            return jax.device_put(rows, self._everywhere)
        if self._cuts == 1:
            return rows
        start, stop = self.rows

        def placed(leaf: np.ndarray) -> jax.Array:
            if not np.ndim(leaf):
                return jax.make_array_from_callback((), self._everywhere, lambda _: leaf)
            shape = (self._count, *leaf.shape[1:])
            assert leaf.shape[0] == stop - start

            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                first, last, _ = index[0].indices(self._count)
                return leaf[first - start : last - start]

            return jax.make_array_from_callback(shape, self._rows, part)

        return jax.tree.map(placed, rows)


@contextlib.contextmanager
def within(mesh: Mesh, precision: str | None = None) -> Iterator[None]:
    """Sets the mesh and the precision of matrix products for programs traced in the block.

    Args:
        mesh: the learner's mesh.
        precision: as for `jax.default_matmul_precision`; None: the platform's default.
    """
    with jax.set_mesh(mesh), jax.default_matmul_precision(precision or "default"):
        yield


# --- Hosts


def open_groups(shardings: Iterable[Sharding | None], meet: Callable[[], None]) -> None:
    """Runs a first collective in every group of devices over which the mesh may sum.

    Does nothing but call `meet` unless the devices are CPUs of several hosts. Between CPUs, the
    first collective of a group of devices fails unless all hosts start it within 30 s, and hosts
    may differ by more than that in the time to compile a program. Later collectives of the group
    wait for half an hour.

    Args:
        shardings: the shardings of a learner's tensors.
        meet: waits until all hosts have called `meet`.
    """
    lying = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    sums = [
        _sums(mesh)
        for mesh in dict.fromkeys(lying)
        if isinstance(mesh, Mesh)
        and {device.platform for device in mesh.devices.flat} == {"cpu"}
        and len({device.process_index for device in mesh.devices.flat}) > 1
    ]
    meet()
    for add in sums:
        jax.block_until_ready(add())


def _sums(mesh: Mesh) -> Callable[[], Any]:
    """Returns a compiled program that sums a number per device over each set of mesh axes."""
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    groups = [group for count in range(len(axes)) for group in combinations(axes, count + 1)]
    cut = PartitionSpec(tuple(axes))

    def summed(number: jax.Array) -> list[jax.Array]:
        return [jax.lax.psum(number, group) for group in groups]

    numbers = np.arange(mesh.size, dtype=np.float32)
    lying = NamedSharding(mesh, cut)
    with jax.set_mesh(mesh):
        given = jax.make_array_from_callback(numbers.shape, lying, numbers.__getitem__)
        program = jax.jit(
            jax.shard_map(summed, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
        )
        return partial(program.lower(given).compile(), given)
