"""Selects a model's parameters to train by patterns of their names, such as "*/router*"."""

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from diloco.common.protocol.errors import TaskError

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
        known = sorted(names)
        some = f"parameters are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
        for pattern in (*self.trained, *self.frozen):
            if not fnmatch.filter(known, pattern):
                raise TaskError(f"the pattern {pattern!r} names no parameter", hint=some)
        if not any(self(name) for name in known):
            raise TaskError("the options trained and frozen leave no parameter to train", hint=some)


def matched(name: str, patterns: Patterns) -> bool:
    """Returns True if one of the patterns (`fnmatch`) fits the whole name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
