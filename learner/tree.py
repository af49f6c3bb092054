"""A task's parameters as the system sees them: trained leaves by name, constants apart.

A *trained* tree has None where the task's tree has an integer or bool leaf, a *constants* tree
the reverse; JAX takes None for a subtree without leaves, so optimizers pass over it.
"""

import io
from typing import Any

import jax
import numpy as np

from diloco.common import shards
from diloco.common.config import SyncSection
from diloco.common.errors import IntegrityError
from diloco.common.layout import Layout, Tensor, make_layout
from diloco.learner.task import Params, Task, is_trained, named_leaves, params_shapes


def task_layout(task: Task, sync: SyncSection) -> Layout:
    """The layout of a task's parameters under a run's settings; allocates nothing."""
    tensors = tensors_of(params_shapes(task))
    return make_layout(tensors, fragments=sync.fragments, block=sync.block, hint=task.hint)


def tensors_of(params: Params) -> list[Tensor]:
    """The leaves of a tree, as a layout knows them."""
    return [
        Tensor(name=name, shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype).name)
        for name, leaf in named_leaves(params)
    ]


def split(params: Params) -> tuple[Params, Params]:
    """(trained, constants) of a task's parameters."""
    trained = jax.tree.map(lambda leaf: leaf if is_trained(leaf) else None, params)
    constants = jax.tree.map(lambda leaf: None if is_trained(leaf) else leaf, params)
    return trained, constants


def join(trained: Params, constants: Params) -> Params:
    """The task's parameters again."""
    return jax.tree.map(
        lambda leaf, constant: constant if leaf is None else leaf,
        trained,
        constants,
        is_leaf=lambda leaf: leaf is None,
    )


def by_name(params: Params) -> dict[str, Any]:
    """Leaves of a tree by name."""
    return dict(named_leaves(params))


def from_names(like: Params, leaves: dict[str, Any]) -> Params:
    """The tree `like` with the leaves of these names."""
    ordered = [leaves[name] for name, _ in named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), ordered)


def pack_constants(constants: Params) -> bytes:
    """Leaves that are not trained, as the bytes of one object (NumPy's npz)."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in named_leaves(constants)}
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def unpack_constants(data: bytes, like: Params, digest: str) -> Params:
    """The constants in an object that `pack_constants` made.

    Raises:
        IntegrityError: the bytes are not those of `digest`.
    """
    if shards.digest(data) != digest:
        raise IntegrityError(f"object of constants: digest {shards.digest(data)}, not {digest}")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return from_names(like, {name: arrays[name] for name in arrays.files})
