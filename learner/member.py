"""What a training loop brings with it when it joins a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from diloco.common.errors import RunMismatchError
from diloco.common.layout import Hint, Layout, Tensor, make_layout
from diloco.learner import tree
from diloco.learner.placement import Shardings, shardings_of
from diloco.learner.task import Params

# Of so many tensors an error speaks.
NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Member:
    """A loop's parameters, and its part in the run.

    Attributes:
        learner: its name.
        trained: shapes of the leaves that are synchronized, and `constants` of the others.
        shardings: how the trained leaves lie for the loop.
        anchor: where views are kept.
        tokens_per_step: of all hosts together.
        hint: of the tensors; None: the run's layout says what it would.
        warm_up: compiles the loop's programs, given copies of the parameters that it may donate.
    """

    learner: str
    trained: Params
    constants: Params
    shardings: Shardings
    anchor: str
    tokens_per_step: int
    hint: Hint | None = None
    warm_up: Callable[[Params], object] | None = None

    @classmethod
    def of(cls, like: Params, **rest: Any) -> Self:
        """With parameters like these, of arrays or shapes."""
        trained, constants = tree.split(jax.tree.map(_shape, like))
        return cls(
            trained=trained,
            constants=constants,
            shardings=shardings_of(tree.split(like)[0]),
            **rest,
        )

    def layout(self, fragments: int, block: int) -> Layout | None:
        """What its own hints make of its tensors."""
        if self.hint is None:
            return None
        tensors = self._tensors()
        return make_layout(tensors, fragments=fragments, block=block, hint=self.hint)

    def check(self, layout: Layout) -> None:
        """Refuse a run of another model.

        Raises:
            RunMismatchError: names the tensors that differ.
        """
        ours = {tensor.name: (tensor.shape, tensor.dtype) for tensor in self._tensors()}
        every = (*layout.tensors, *layout.constants)
        theirs = {tensor.name: (tensor.shape, tensor.dtype) for tensor in every}
        differ = [
            f"{name}: {_words(ours.get(name))} here, {_words(theirs.get(name))} in the run"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]
        if differ:
            more = f"; and {len(differ) - NAMED} more" if len(differ) > NAMED else ""
            raise RunMismatchError(
                "these parameters are not those of the run: " + "; ".join(differ[:NAMED]) + more,
                hint="give the tree that the run was created with: names, shapes and dtypes",
            )

    def _tensors(self) -> list[Tensor]:
        return tree.tensors_of(tree.join(self.trained, self.constants))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)


def _words(found: tuple[tuple[int, ...], str] | None) -> str:
    return "none" if found is None else f"{found[1]}{list(found[0])}"
