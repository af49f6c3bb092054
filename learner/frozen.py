"""Frozen leaves that each learner loads from a place of its own."""

from typing import Any

from diloco.common.errors import TaskError
from diloco.learner import tree
from diloco.learner.task import Task, Variables, params_shapes, signature, tree_words


def loaded_frozen(task: Task) -> dict[str, Any]:
    """What `Task.load_frozen` gives, by the leaves' names; empty without one.

    A leaf may be one that is read as it is asked for: it has a shape and a dtype, is sliced as an
    array is, and becomes one by `numpy.asarray`.

    Raises:
        TaskError: it is not shaped as `init` says.
    """
    if task.load_frozen is None:
        return {}
    shapes = params_shapes(task)
    frozen = shapes.frozen if isinstance(shapes, Variables) else None
    loaded = task.load_frozen()
    if signature(loaded) != signature(frozen):
        raise TaskError(
            f"Task.load_frozen must give the frozen leaves as `init` shapes them, "
            f"{tree_words(frozen)}, but it gave {tree_words(loaded)}",
            hint="give a tree like Variables.frozen",
        )
    return tree.by_name(Variables(None, loaded, None))
