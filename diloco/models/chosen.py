"""Selects a model's parameters by patterns of their names, such as "*/router*".

Some are trained by all learners, some by each learner for itself, and the rest by none.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from diloco.common.protocol.errors import TaskError
from diloco.common.protocol.layout import TensorHint
from diloco.learner.task import Task, Variables
from diloco.learner.tensors import tree

Patterns = Sequence[Annotated[str, Field(min_length=1)]]


class Chosen(NamedTuple):
    """The parameters to train, by patterns (`fnmatch`) of their names.

    Attributes:
        trained: patterns of the parameters that are trained.
        frozen: patterns of parameters among these that are not trained after all.
    """

    trained: Patterns
    frozen: Patterns

    def __call__(self, name: str) -> bool:
        """Returns True if the parameter with this name is trained."""
        return matched(name, self.trained) and not matched(name, self.frozen)

    def check(self, names: Iterable[str]) -> None:
        """Checks the patterns against the names of all parameters.

        Raises:
            TaskError: a pattern fits no parameter, or no parameter is left to train.
        """
        known, some = _fitting((*self.trained, *self.frozen), names)
        if not any(self(name) for name in known):
            raise TaskError("the options trained and frozen leave no parameter to train", hint=some)


def with_private(task: Task, private: Patterns) -> Task:
    """Returns a task of which each learner trains some parameters for itself.

    Args:
        task: the task.
        private: patterns of the names of trained parameters that are never sent; the names are
            those that `Task.hint` is called with.

    Raises:
        TaskError: a pattern fits no trained parameter.
    """
    if not private:
        return task
    shapes = task.shapes
    _fitting(private, tree.by_name(shapes.trained if isinstance(shapes, Variables) else shapes))

    def hint(name: str, shape: tuple[int, ...]) -> TensorHint:
        said = task.hint(name, shape)
        own = said.kind == "trained" and matched(name, private)
        return dataclasses.replace(said, kind="private") if own else said

    return dataclasses.replace(task, hint=hint)


def _fitting(patterns: Iterable[str], names: Iterable[str]) -> tuple[list[str], str]:
    """Returns the names in order, and a text that lists the first of them.

    Raises:
        TaskError: a pattern fits no name.
    """
    known = sorted(names)
    some = f"parameters are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise TaskError(f"the pattern {pattern!r} names no parameter", hint=some)
    return known, some


def matched(name: str, patterns: Patterns) -> bool:
    """Returns True if one of the patterns (`fnmatch`) fits the whole name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
