"""The parameters and facts that a training loop brings when it joins a run."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from diloco.common.protocol.errors import RunMismatchError
from diloco.common.protocol.layout import Hint, Layout, Tensor, make_layout
from diloco.learner.task import Params
from diloco.learner.tensors import tree
from diloco.learner.tensors.placement import Shardings, shardings_of
from diloco.learner.tensors.utilization import full_tokens_per_s

# The number of tensors that an error names.
NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Member:
    """A training loop as a member of a run: its parameters' shapes and shardings, its properties.

    Attributes:
        learner: the learner's name.
        like: the tree of the loop's parameters, with a shape and dtype for each array.
        shardings: the loop's sharding of each of these arrays, by the tensor's name.
        anchor: memory that holds the adopted views: "device" or "host" (`sync.anchor`).
        tokens_per_step: tokens of one inner step, of all hosts together.
        hint: (tensor's name, shape) -> `TensorHint`, as in `Task`, from which the layout is made
            and compared with the run's; None: the run's layout is taken as it is.
        warm_up: compiles the loop's programs; its argument makes copies of the parameters that it
            may donate.
        flops_per_token: as in `Task`.
        compiling: a context in which programs are compiled.
        load_frozen: returns leaves that the run does not store, by name.
    """

    learner: str
    like: Params
    shardings: Shardings
    anchor: str
    tokens_per_step: int
    hint: Hint | None = None
    warm_up: Callable[[Callable[[], Params]], object] | None = None
    compiling: Callable[[], AbstractContextManager[None]] = nullcontext
    load_frozen: Callable[[], Mapping[str, Any]] | None = None
    flops_per_token: float | None = None

    @classmethod
    def of(cls, like: Params, **rest: Any) -> Self:
        """Returns a member whose parameters have the shapes and shardings of `like`.

        Args:
            like: a tree of arrays or shapes.
            rest: the member's other attributes.
        """
        tree.tensors_of(like)  # raises for a leaf that is no array
        return cls(like=jax.tree.map(_shape, like), shardings=shardings_of(like), **rest)

    def full_tokens_per_s(self) -> float:
        """Returns the tokens a second at its devices' peak; 0 if unknown."""
        lying = [one for one in self.shardings.values() if one is not None]
        devices = {device for one in lying for device in one.device_set}
        return full_tokens_per_s(devices, self.flops_per_token)

    def synced(self, layout: Layout) -> Params:
        """Returns the shapes of the leaves that are synchronized."""
        return tree.split(self.like, tree.synced_marks(self.like, layout))[0]

    def shardings_of(self, layout: Layout) -> Shardings:
        """Returns the shardings of the leaves that are synchronized."""
        return {tensor.name: self.shardings[tensor.name] for tensor in layout.tensors}

    def frozen_shapes(self, layout: Layout) -> Params:
        """Returns the shapes of the leaves that are not synchronized."""
        return tree.split(self.like, tree.synced_marks(self.like, layout))[1]

    def layout(self, fragments: int, block: int) -> Layout | None:
        """Returns the layout of its tensors by its own hint; None without a hint."""
        if self.hint is None:
            return None
        tensors = self._tensors()
        return make_layout(tensors, fragments=fragments, block=block, hint=self.hint)

    def check(self, layout: Layout) -> None:
        """Refuses a run of another model.

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
        return tree.tensors_of(self.like)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)


def _words(found: tuple[tuple[int, ...], str] | None) -> str:
    return "none" if found is None else f"{found[1]}{list(found[0])}"
