"""The leaves of a model's parameters: their names, their kinds, and trees of some of the leaves.

A leaf is *synchronized* if the run stores versions of it: it is trained by all learners, or it is
state that is averaged over the fleet. All other leaves are *held*: they are frozen, or each learner
keeps its own: local state, and private leaves, which its optimizer trains. A tree of some of the
leaves has None in place of the others. JAX treats None as a subtree without leaves, so that
optimizers ignore it.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from diloco.common.process.config import SyncSection
from diloco.common.protocol.errors import TaskError
from diloco.common.protocol.layout import Hint, Layout, Tensor, kind_of, make_layout
from diloco.learner.task import (
    Params,
    Task,
    Variables,
    check_dtype,
    hint_of,
    kind,
    short,
    signature,
    tree_words,
)


class Division(NamedTuple):
    """The kind of each leaf of a task's parameters, as one flag per leaf in JAX's order.

    Attributes:
        trained: for each leaf, whether the inner optimizer changes the leaf.
        synced: for each leaf, whether it is synchronized: trained by all, or averaged state.
        own: for each leaf, whether each learner keeps its own: local state, or private.
    """

    trained: tuple[bool, ...]
    synced: tuple[bool, ...]
    own: tuple[bool, ...]

    @property
    def private(self) -> bool:
        """True if a leaf is private: trained by each learner for itself."""
        return any(trained and own for trained, own in zip(self.trained, self.own, strict=True))

    def trained_of(self, params: Params) -> Params:
        """Returns `params` with None in place of leaves that the inner optimizer does not change.

        Of a `Variables`, returns the tree `trained` only.
        """
        masked, _ = split(params, self.trained)
        return masked.trained if isinstance(params, Variables) else masked

    def with_trained(self, params: Params, trained: Params) -> Params:
        """Returns `params` with its trained leaves replaced by those of `trained`."""
        if isinstance(params, Variables):
            return params._replace(trained=join(trained, params.trained))
        return join(trained, params)


def division_of(task: Task, shapes: Params) -> Division:
    """Returns which leaves of a task are trained, synchronized or each learner's own.

    Args:
        task: the task.
        shapes: the shapes of its parameters.
    """
    hint = hint_of(task, shapes)
    kinds = [kind_of(tensor, hint) for tensor in tensors_of(shapes)]
    return Division(
        trained=tuple(kind in ("trained", "private") for kind in kinds),
        synced=tuple(kind in ("trained", "averaged") for kind in kinds),
        own=tuple(kind in ("local", "private") for kind in kinds),
    )


def task_layout(task: Task, sync: SyncSection) -> Layout:
    """Returns the division of a task's parameters into fragments and blocks; allocates nothing.

    Args:
        task: the task.
        sync: the run's sync section, which sets the number of fragments and the block size.
    """
    shapes = task.shapes
    return make_layout(
        tensors_of(shapes),
        fragments=sync.fragments,
        block=sync.block,
        hint=hint_of(task, shapes),
    )


def tensors_of(params: Params) -> list[Tensor]:
    """Returns the leaves of a tree as a layout's tensors: name, shape and dtype.

    Raises:
        TaskError: a leaf is not an array of numbers.
    """
    for name, leaf in named_leaves(params):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TaskError(
                f"the leaf {name!r} of the parameters must be an array, but is {leaf!r:.80}",
                hint="make it one, such as jnp.float32(0.5), or keep it out of the parameters; a"
                " class of your own must be registered with JAX as a pytree",
            )
        check_dtype(name, leaf.dtype)
    return [
        Tensor(name=name, shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype).name)
        for name, leaf in named_leaves(params)
    ]


def check_wide(layout: Layout) -> None:
    """Checks that JAX does not silently convert float64 leaves to float32.

    Raises:
        TaskError: a synchronized leaf is float64, and JAX's 64-bit mode is off.
    """
    wide = [tensor.name for tensor in layout.tensors if tensor.dtype == "float64"]
    if wide and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise TaskError(
            f"the leaf {wide[0]!r} of the parameters is float64, of which JAX makes float32",
            hint="give float32, in which versions are kept; or start each process of the run with"
            " JAX_ENABLE_X64=1",
        )


def marks(params: Params, names: Collection[str]) -> tuple[bool, ...]:
    """Returns for each leaf of a tree, in order, whether its name is in `names`."""
    return tuple(name in names for name, _ in named_leaves(params))


def synced_marks(params: Params, layout: Layout) -> tuple[bool, ...]:
    """Returns for each leaf of a tree, in order, whether the layout synchronizes it."""
    return marks(params, {tensor.name for tensor in layout.tensors})


def split(params: Params, chosen: Sequence[bool]) -> tuple[Params, Params]:
    """Divides a tree in two: the leaves that are chosen, and all others.

    Args:
        params: the tree.
        chosen: one flag for each leaf, in JAX's order.

    Returns:
        Two trees of the same structure, each with None in place of the other's leaves.
    """
    leaves, structure = jax.tree.flatten(params)
    pairs = list(zip(leaves, chosen, strict=True))
    return (
        jax.tree.unflatten(structure, [leaf if marked else None for leaf, marked in pairs]),
        jax.tree.unflatten(structure, [None if marked else leaf for leaf, marked in pairs]),
    )


def join(one: Params, other: Params) -> Params:
    """Returns a tree with the leaves of `one`, and those of `other` where `one` has None."""
    return jax.tree.map(
        lambda leaf, instead: instead if leaf is None else leaf,
        one,
        other,
        is_leaf=lambda leaf: leaf is None,
    )


def by_name(params: Params) -> dict[str, Any]:
    """Returns a tree's leaves by the names of `named_leaves`."""
    return dict(named_leaves(params))


def from_names(like: Params, leaves: dict[str, Any]) -> Params:
    """Returns a tree of the structure of `like`, with the leaves of the same names in `leaves`."""
    ordered = [leaves[name] for name, _ in named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), ordered)


# --- Modules that some learners hold


def held_modules(task: Task, learner: str, layout: Layout) -> tuple[str, ...]:
    """Returns the modules that a learner holds, by `Task.holds`, in the layout's order; (): all.

    Raises:
        TaskError: `Task.holds` names no module, or one that no tensor is in.
    """
    if task.holds is None:
        return ()
    try:
        said = task.holds(learner)
    except Exception as error:
        raise TaskError(
            f"Task.holds({learner!r}) failed: {short(error)}",
            hint="it takes the name of any learner of the run, and returns names of modules",
        ) from error
    if isinstance(said, str) or not isinstance(said, Collection):
        raise TaskError(
            f"Task.holds({learner!r}) must return names of modules, but it returned {kind(said)}",
            hint='return a list, such as ["trunk", "expert-0"]',
        )
    return layout.in_order(said, f"Task.holds gives the learner {learner!r}")


def held_names(layout: Layout, hint: Hint, holds: Collection[str]) -> set[str]:
    """Returns the names of the leaves that a learner holds.

    These are all leaves of its modules, and leaves that are not synchronized and in no module.

    Args:
        layout: the run's layout.
        hint: the task's hint, which gives the module of leaves that are not synchronized.
        holds: the modules; empty: all.
    """
    held = {piece.tensor for fragment in layout.held(holds) for piece in fragment.pieces}
    for leaf in layout.constants:
        if not holds or hint(leaf.name, leaf.shape).module in ("", *holds):
            held.add(leaf.name)
    return held


def held_task(task: Task, layout: Layout, holds: Collection[str]) -> Task:
    """Returns the task of a learner that holds only some modules: all other leaves are None.

    Args:
        task: the task of the whole model.
        layout: its layout.
        holds: the modules; empty: all.
    """
    if not holds:
        return task
    names = held_names(layout, hint_of(task, task.shapes), holds)

    def part(params: Params) -> Params:
        return split(params, marks(params, names))[0]

    def load_frozen() -> Params:
        assert task.load_frozen is not None
        return part(Variables(None, task.load_frozen(), None)).frozen

    return dataclasses.replace(
        task,
        init=lambda key: part(task.init(key)),
        load_frozen=None if task.load_frozen is None else load_frozen,
    )


# --- Frozen leaves that each learner loads from a place of its own


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns leaves as nested dictionaries: the leaf "a/b/c" is found at ["a"]["b"]["c"]."""
    found: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *places, last = name.split("/")
        branch = found
        for place in places:
            branch = branch.setdefault(place, {})
        branch[last] = leaf
    return found


def loaded_frozen(task: Task) -> dict[str, Any]:
    """Returns the leaves that `Task.load_frozen` returns, by name; empty without that function.

    A leaf may be loaded lazily: such a leaf has a shape and a dtype, slicing it reads a part, and
    `numpy.asarray` reads all of it.

    Raises:
        TaskError: the leaves differ in names, shapes or dtypes from the frozen leaves of `init`.
    """
    if task.load_frozen is None:
        return {}
    shapes = task.shapes
    frozen = shapes.frozen if isinstance(shapes, Variables) else None
    loaded = task.load_frozen()
    if signature(loaded) != signature(frozen):
        raise TaskError(
            f"Task.load_frozen must give the frozen leaves as `init` shapes them, "
            f"{tree_words(frozen)}, but it gave {tree_words(loaded)}",
            hint="give a tree like Variables.frozen",
        )
    return by_name(Variables(None, loaded, None))


def named_leaves(params: Params) -> list[tuple[str, Any]]:
    """Returns the leaves of `params` with readable names such as "layers/attn/qkv", in JAX's order.

    Names depend on the tree's structure alone. They hold letters, digits and `._/-`; any other
    character becomes `_`. A tree that is one leaf is named "params".

    Raises:
        TaskError: two leaves have the same name, or JAX cannot order the leaves.
    """
    try:
        leaves, structure = jax.tree.flatten(params)
        known = _NAMES.get(structure)
        found = [] if known is not None else jax.tree_util.tree_flatten_with_path(params)[0]
    # Keys are compared in JAX's C++, which may raise any exception.
    except (ValueError, TypeError, SystemError, RecursionError) as error:
        raise TaskError(
            f"JAX cannot take the tree of parameters apart: {short(error)}",
            hint="keys of one dictionary must be comparable, such as all strings; and a tree not"
            " nested in a thousand levels",
        ) from error
    if known is None:
        known = _names_of([path for path, _ in found])
        if len(_NAMES) >= _MOST_STRUCTURES:
            _NAMES.clear()
        _NAMES[structure] = known
    return list(zip(known, leaves, strict=True))


# Spelling names out takes longer than all else that a boundary does with a tree; the names are
# cached, since a loop has the same few trees at each boundary.
_NAMES: dict[Any, tuple[str, ...]] = {}
_MOST_STRUCTURES = 64


def _names_of(found: list[Any]) -> tuple[str, ...]:
    """Returns readable names of leaves from their paths.

    Raises:
        TaskError: two leaves have the same name.
    """
    paths: dict[str, str] = {}
    for path in found:
        name = _readable(
            jax.tree_util.keystr(path, simple=True, separator="/") if path else "params"
        )
        if name in paths:
            raise TaskError(
                f"every leaf of the parameters needs a name of its own, but {paths[name]} and "
                f"{jax.tree_util.keystr(path)} are both called {name!r}",
                hint="rename a key; characters other than A-Z a-z 0-9 . _ / - become _",
            )
        paths[name] = jax.tree_util.keystr(path)
    return tuple(paths)


def _readable(path: str) -> str:
    parts = re.sub(r"[^A-Za-z0-9._/-]", "_", path).split("/")
    return "/".join("_" * max(1, len(part)) if part.strip(".") == "" else part for part in parts)
