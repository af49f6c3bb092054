"""Reads and writes tensors of another framework as leaves of a run, in host memory.

A leaf is a tensor of the run's parameters. Each tensor of the framework is one leaf, by default
with its own order of axes, and its own name with "/" for ".".
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diloco.common.protocol.errors import ConfigError


class Leaf(NamedTuple):
    """The leaf that corresponds to a tensor.

    Attributes:
        name: the leaf's name in the run.
        axes: the tensor's axes in the leaf's order, as for `numpy.transpose`; None: the same order.
    """

    name: str
    axes: tuple[int, ...] | None = None


Table = Mapping[str, Leaf | str]


def leaf_of(tensor: str, table: Table) -> Leaf:
    """Returns a tensor's leaf, from the table if the table has an entry for the tensor's name."""
    said = table.get(tensor, tensor.replace(".", "/"))
    return Leaf(said) if isinstance(said, str) else Leaf(*said)


def check_table(tensors: Iterable[str], table: Table) -> None:
    """Checks a table against the tensors' names.

    Raises:
        ConfigError: the table names a tensor that does not exist, or gives two tensors one leaf.
    """
    known = list(tensors)
    if unknown := sorted(set(table) - set(known)):
        raise ConfigError(
            f"the table names tensors that are not here: {', '.join(unknown[:6])}",
            hint=f"there are {', '.join(sorted(known)[:12])}",
        )
    names = [leaf_of(tensor, table).name for tensor in known]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the table gives two tensors one name: {', '.join(twice)}")


class Tensors(Protocol):
    """The parameters of another framework's loop, by the names that the framework gives them."""

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Returns the shape and dtype of each tensor."""

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor's values in host memory.

        The array may be a view of the tensor: the caller reads it at once, and does not change it.
        """

    def write(self, name: str, values: np.ndarray) -> None:
        """Sets a tensor's values, in place."""


class HostTensors:
    """NumPy arrays or DLPack tensors in host memory, by name; changed in place.

    Raises:
        ConfigError: a tensor is read-only.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._views = {name: _view(name, tensor) for name, tensor in tensors.items()}

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Returns the shape and dtype of each tensor."""
        return {name: (view.shape, view.dtype) for name, view in self._views.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor's values, without a copy."""
        return self._views[name]

    def write(self, name: str, values: np.ndarray) -> None:
        """Sets a tensor's values, in place."""
        self._views[name][...] = values


def _view(name: str, tensor: Any) -> np.ndarray:
    view = tensor if isinstance(tensor, np.ndarray) else np.from_dlpack(tensor)
    if not view.flags.writeable:
        raise ConfigError(
            f"the tensor {name!r} cannot be changed in place",
            hint="give NumPy arrays that own their memory, or tensors whose DLPack is writable",
        )
    return view


class LazyLeaf:
    """A leaf whose values are read from the loop's tensor when they are needed.

    Args:
        tensors: the loop's tensors.
        tensor: the tensor's name.
        leaf: the leaf of that tensor.

    Attributes:
        shape: the leaf's shape: the tensor's with its axes in the leaf's order.
        dtype: the tensor's dtype.
    """

    def __init__(self, tensors: Tensors, tensor: str, leaf: Leaf) -> None:
        shape, self.dtype = tensors.shapes()[tensor]
        self._tensors, self._tensor, self._axes = tensors, tensor, leaf.axes
        self.shape = tuple(shape) if leaf.axes is None else tuple(shape[axis] for axis in leaf.axes)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self._tensors.read(self._tensor)
        if self._axes is not None:
            values = values.transpose(self._axes)
        return np.array(values, dtype, copy=copy is not False)

    def take(self, values: Any) -> None:
        """Copies the leaf's new values into the loop's tensor."""
        values = np.asarray(values)
        if self._axes is not None:
            values = values.transpose(np.argsort(self._axes))
        self._tensors.write(self._tensor, values)


class ShardedLeaf(LazyLeaf):
    """A leaf that is divided among processes; to JAX it is one array over all of them.

    Args:
        tensors: the loop's tensors, of which each process has a part.
        tensor: the tensor's name.
        leaf: the leaf of that tensor.
        sharding: the division of the tensor, in the tensor's order of axes.

    Attributes:
        sharding: the division of the leaf, in the leaf's order of axes.
    """

    def __init__(self, tensors: Tensors, tensor: str, leaf: Leaf, sharding: NamedSharding) -> None:
        super().__init__(tensors, tensor, leaf)
        order = range(len(self.shape)) if leaf.axes is None else leaf.axes
        cuts = (*sharding.spec, *(None for _ in self.shape))
        self.sharding = NamedSharding(sharding.mesh, PartitionSpec(*(cuts[axis] for axis in order)))

    def __jax_array__(self) -> jax.Array:
        own = jax.device_put(self.__array__(), jax.local_devices()[0])
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, [own])

    def take(self, values: Any) -> None:
        """Copies this process's part of the leaf's new values into its part of the tensor."""
        super().take(values.addressable_data(0) if isinstance(values, jax.Array) else values)


def leaves_of(tensors: Tensors, table: Table) -> dict[str, LazyLeaf]:
    """Returns a leaf for each of the loop's tensors, by the leaves' names.

    Leaves are `ShardedLeaf` if `tensors` has a method `sharding`.

    Raises:
        ConfigError: the table does not fit the tensors' names or axes.
    """
    shapes = tensors.shapes()
    check_table(shapes, table)
    found = {}
    for name, (shape, _) in shapes.items():
        leaf = leaf_of(name, table)
        if leaf.axes is not None and sorted(leaf.axes) != list(range(len(shape))):
            raise ConfigError(
                f"the table orders the axes of {name!r} as {leaf.axes}, but it has {len(shape)}",
                hint="give each of its axes once, such as (1, 0) for a matrix's transpose",
            )
        sharding = getattr(tensors, "sharding", None)
        found[leaf.name] = (
            LazyLeaf(tensors, name, leaf)
            if sharding is None
            else ShardedLeaf(tensors, name, leaf, sharding(name))
        )
    return found
