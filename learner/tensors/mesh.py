"""A learner's devices as a mesh, and the sharding of tensors on it.

The mesh has four axes: `data` (copies of the model), `fsdp` (each tensor cut, gathered where it is
used), `expert` (a mixture's experts dealt out, to which tokens travel) and `tensor` (matrix
products cut). A batch is cut along `data`, `fsdp` and `expert` together. Learners of one run may
have different meshes: only the shapes of tensors are common to a run.

A `Task.partition` says how a tensor is cut; without one, the largest axis that divides goes along
`fsdp`. Three rules hold for either: an axis that its part of the mesh does not divide stays
whole; so does the first axis of a tensor whose rows lie in several fragments, because a fragment
would gather it; a cut that these two rules refuse moves to another axis that divides. An axis of
experts alone must divide: a mesh that does not fit it is refused.
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

# Axes along which a batch is cut.
ROWS = ("data", "fsdp", "expert")
# The mesh axis along which an axis of a decoder's tensor is cut, by the axis's kind.
OF_DECODERS = {"width": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
# Mesh axes of one axis of a tensor, for each of its axes.
Cuts = tuple[tuple[str, ...], ...]
AUTO = (AxisType.Auto,) * len(AXES)
# A smaller tensor is not worth gathering: each device has it whole.
LEAST_ELEMENTS = 1 << 12


def make_mesh(section: MeshSection, devices: list[Any] | None = None) -> Mesh:
    """Returns the mesh of a learner.

    Args:
        section: sizes of the axes; an axis of size 0 takes the devices that the others leave.
        devices: the learner's devices; if None, all devices of all its hosts.

    Raises:
        ConfigError: the sizes do not multiply to the number of devices, or their links have
            another shape.
    """
    devices = jax.devices() if devices is None else devices
    shape = section.shape(len(devices))
    if shape is None:
        raise ConfigError(
            f"learner.mesh ({section}) does not fit the {len(devices)} devices of this learner",
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


def abstract_mesh(section: MeshSection) -> AbstractMesh:
    """Returns the mesh of as many devices as its sizes say; an axis of size 0 has one.

    Shardings on it can be checked, but have no devices.
    """
    shape = section.shape(section.given)
    assert shape is not None
    return AbstractMesh(shape, AXES, axis_types=AUTO)


def single(device: Any = None) -> Mesh:
    """Returns a mesh of one device; if None, the process's first."""
    return make_mesh(MeshSection(), [device or jax.local_devices()[0]])


def constrain(values: jax.Array, *axes: Any) -> jax.Array:
    """Constrains an activation's sharding: one item of a `PartitionSpec` for each leading axis.

    Returns `values` unchanged outside of a mesh, and within `shard_map`, whose body is per device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return values
    constrained: jax.Array = jax.lax.with_sharding_constraint(values, known_spec(*axes))
    return constrained


def known_spec(*axes: Any) -> PartitionSpec:
    """Returns a `PartitionSpec` of those `axes` that the mesh in use has."""
    known = jax.sharding.get_abstract_mesh().shape
    return PartitionSpec(
        *(tuple(one for one in each if one in known) if isinstance(each, tuple) else each
          for each in axes)
    )  # fmt: skip


def by_kind_of_axis(kinds: Sequence[str], *, mixture: bool = False) -> PartitionSpec:
    """Returns the `PartitionSpec` of a decoder's tensor whose axes are of these kinds.

    Args:
        kinds: of the axes.
        mixture: whether the decoder has experts: theirs are cut along `expert`, and the width of
            other tensors along `fsdp` and `expert`.
    """
    cuts: dict[str, Any] = dict(OF_DECODERS)
    if mixture and "mlp" in kinds and "experts" in kinds:
        cuts["experts"] = "expert"
    elif mixture:
        cuts["width"] = ("fsdp", "expert")
    return PartitionSpec(*map(cuts.get, kinds))


def parts_along(axis: str) -> int:
    """Returns the size of a mesh axis; 1 where `constrain` has no effect."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or mesh.manual_axes else mesh.shape.get(axis, 1)


# --- Parameters


def param_shardings(
    task: Task, layout: Layout, params: Params, mesh: Mesh | AbstractMesh
) -> Params:
    """Returns the sharding of each leaf on the mesh, as a tree like `params`.

    Args:
        task: its `partition` is called, if it has one.
        layout: the run's layout.
        params: the task's parameters, of arrays or shapes.
        mesh: the learner's mesh.

    Raises:
        TaskError: `partition` returns something other than a PartitionSpec of this tensor.
        ConfigError: the mesh has a `tensor` axis, but the task has no `partition` for it.
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
            axes = task.hint(own_name(name), shape).norm_axes
            wanted = _fsdp(shape, {*whole, *range(axes)}, mesh)
        else:
            wanted = _asked(name, shape, task.partition(own_name(name), shape))
            _check_experts(name, shape, wanted, mesh)
            asked |= {axis for axes in wanted for axis in axes}
        cuts = fit(shape, wanted, mesh, whole)
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
    """Refuses a mesh whose axis `expert` does not divide a tensor's experts."""
    for size, axes in zip(shape, wanted, strict=True):
        if axes == ("expert",) and size % mesh.shape["expert"]:
            raise ConfigError(
                f"learner.mesh has expert={mesh.shape['expert']}, which does not divide the {size} "
                f"experts of {name!r}",
                hint="choose a divisor of their number, and let fsdp take the other devices",
            )


def split_tensors(layout: Layout) -> set[str]:
    """Returns the names of the tensors whose rows lie in several fragments."""
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
    """Returns the cuts of `wanted` that divide `shape`; others move to another axis or are dropped.

    Args:
        shape: the tensor's shape.
        wanted: for each of its axes, the mesh axes to cut it along.
        mesh: the learner's mesh.
        whole: axes that must not be cut.
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


def sharding_of(mesh: Mesh | AbstractMesh, cuts: Cuts) -> NamedSharding:
    """Returns the sharding with these cuts, in its shortest form."""
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
    """Returns the cuts with the largest axis that divides along `fsdp`."""
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
    """Returns the shardings of an optimizer's state: each leaf has its parameter's.

    A leaf belongs to the parameter whose path ends the leaf's path and whose shape it has, as
    moments do; all others (counts, keys) are whole on each device.

    Args:
        state: shapes of the state.
        trained: shapes of the parameters.
        shardings: shardings of the parameters.
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
    """Returns the rows of a whole batch, and the parts into which the mesh cuts them.

    Raises:
        ConfigError: the mesh does not divide the batch.
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
    """Places a host's rows of a batch on the devices, as the mesh requires.

    Args:
        mesh: the learner's mesh.
        batch: shapes of one whole batch of the learner.

    Attributes:
        rows: [start, stop) of the batch's rows that this host's devices need.
        whole: whether `rows` is the whole batch.

    Raises:
        ConfigError: the mesh does not divide the batch.
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
        return min(span[0] for span in spans), max(span[1] for span in spans)

    def sharded(self, batch: Any) -> Any:
        """Returns the shapes of a whole batch, with the shardings that `place` gives it."""
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
        """Returns the global batch on the devices; this host contributes its `rows`."""
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
    """Traces programs under the mesh and this precision of matrix products within the block."""
    with jax.set_mesh(mesh), jax.default_matmul_precision(precision or "default"):
        yield


# --- Hosts


def open_groups(shardings: Iterable[Sharding | None], meet: Callable[[], None]) -> None:
    """Has all hosts open their collectives' connections, in every group over which a mesh may sum.

    Between CPUs the first collective of a group must find its peers within 30 s, and hosts may take
    longer than that to compile the same program. Later collectives wait for half an hour.

    Args:
        shardings: those of a learner's tensors.
        meet: waits until all hosts have called it.
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
    """Returns a compiled program that sums one number of each device over every group of axes."""
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
