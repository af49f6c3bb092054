"""Placement of the parameters on devices: for the caller's loop, and for synchronization.

A loop of the user's own has its parameters where it wants them: on one device, cut over a mesh of
its own, or as arrays of the host. Synchronization needs a `NamedSharding`, and keeps the rules of
`mesh.py`. Most often the two are one; where they are not, leaves are moved when a fragment is sent
or adopted, and at no other step. On the same devices in the same pieces that moves no bytes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from diloco.common.protocol.layout import Layout
from diloco.learner.task import Params, named_leaves
from diloco.learner.tensors import tree
from diloco.learner.tensors.mesh import cuts_of, fit, sharding_of, single, split_tensors

Leaves = dict[str, jax.Array]
# By a leaf's name; None: an array of the host.
Shardings = Mapping[str, Sharding | None]


class Placement(NamedTuple):
    """The sharding of each leaf, by name.

    Attributes:
        inner: for synchronization.
        outer: for the caller, where that is another way.
    """

    inner: Mapping[str, NamedSharding]
    outer: Shardings

    def inward(self, leaves: Mapping[str, Any]) -> Leaves:
        """The caller's leaves as synchronization needs them."""
        return {name: self._in(name, leaf) for name, leaf in leaves.items()}

    def outward(self, leaves: Leaves) -> dict[str, Any]:
        """The leaves as the caller has them."""
        return {name: self._out(name, leaf) for name, leaf in leaves.items()}

    def _in(self, name: str, leaf: Any) -> jax.Array:
        # A loop's program may give its own outputs another sharding than it was given.
        if isinstance(leaf, jax.Array) and leaf.sharding == self.inner[name]:
            return leaf
        if not isinstance(leaf, jax.Array):
            # The host's array stays the caller's; what is put on a device is donated.
            leaf = np.array(leaf)
        placed: jax.Array = jax.device_put(leaf, self.inner[name])
        return placed

    def _out(self, name: str, leaf: jax.Array) -> Any:
        if name not in self.outer:
            return leaf
        sharding = self.outer[name]
        return np.array(leaf) if sharding is None else jax.device_put(leaf, sharding)


def make_placement(layout: Layout, like: Params, asked: Shardings | None = None) -> Placement:
    """The placement of a tree's leaves.

    Args:
        layout: the run's.
        like: the trained tree, of shapes.
        asked: how the caller's leaves lie; all on one device, if None.
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
    """How arrays lie, by name; shapes without a sharding: on one device."""
    alone = NamedSharding(single(), PartitionSpec())

    def of(leaf: Any) -> Sharding | None:
        if not hasattr(leaf, "sharding"):
            return None
        return alone if leaf.sharding is None else leaf.sharding

    return {name: of(leaf) for name, leaf in named_leaves(params)}


def put_like(value: Any, like: Any) -> Any:
    """A leaf where another one lies; an array of the host, if that one is."""
    if isinstance(like, jax.Array):
        return jax.device_put(value, like.sharding)
    sharding = getattr(like, "sharding", None)
    return np.array(value) if sharding is None else jax.device_put(value, sharding)


def placed(
    sharding: Sharding | None,
    like: Any,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> Any:
    """An array of which each host reads what its devices hold; of the host, without a sharding."""
    if sharding is None:
        return np.array(read((slice(None),) * len(like.shape)))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return read(index)

    return jax.make_array_from_callback(tuple(like.shape), sharding, part)


def _automatic(mesh: Any) -> Mesh:
    """The mesh, with axes whose shardings the compiler propagates, as the kernels need it."""
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
