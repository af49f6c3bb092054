"""The parameters and facts that a training loop brings when it joins a run."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import numpy as np

from diloco.common.protocol.errors import RunMismatchError
from diloco.common.protocol.layout import Hint, Layout, Tensor, default_hint, make_layout
from diloco.learner.task import Params
from diloco.learner.tensors import tree
from diloco.learner.tensors.placement import Shardings, shardings_of
from diloco.learner.tensors.utilization import full_tokens_per_s

# The number of tensors that an error names.
NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Member:
    """The facts about a training loop that a learner needs before it joins a run.

    Attributes:
        learner: the learner's name.
        like: the tree of the run's parameters, with a shape and dtype for each array; also of
            modules that this learner does not hold.
        shardings: the loop's sharding of each of these arrays, by the tensor's name; None for an
            array in the host's memory.
        holds: the modules that this learner holds, in any order before `within`; empty: all.
        anchor: memory that holds the adopted views: "device" or "host" (`sync.anchor`).
        tokens_per_step: tokens of one inner step, of all hosts together.
        hint: (tensor's name, shape) -> `TensorHint`, as in `Task`. From it follows the layout: the
            division of the tensors into fragments and blocks. None: the run's layout is used.
        warm_up: a function that compiles the loop's programs before the learner joins. Its argument
            is a function that returns copies of the parameters, which `warm_up` may donate.
        flops_per_token: floating-point operations of training on one token; None: unknown.
        compiling: returns a context manager, in whose block all programs are compiled.
        load_frozen: a function that returns, by name, the frozen leaves whose values the run does
            not store.
    """

    learner: str
    like: Params
    shardings: Shardings
    anchor: str
    tokens_per_step: int
    hint: Hint | None = None
    holds: tuple[str, ...] = ()
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

        Raises:
            TaskError: a leaf of `like` is not an array of numbers.
        """
        tree.tensors_of(like)  # raises for a leaf that is no array
        return cls(like=jax.tree.map(_shape, like), shardings=shardings_of(like), **rest)

    def within(self, layout: Layout) -> Self:
        """Returns the member with its modules in the order of the run's layout; () if all.

        Raises:
            TaskError: no tensor of the run is in a module that the loop holds.
        """
        if not self.holds:
            return self
        who = f"the loop of the learner {self.learner!r} holds"
        return replace(self, holds=layout.in_order(self.holds, who))

    def full_tokens_per_s(self) -> float:
        """Returns the tokens a second that the devices would train at their peak; 0 if unknown."""
        lying = [one for one in self.shardings.values() if one is not None]
        devices = {device for one in lying for device in one.device_set}
        return full_tokens_per_s(devices, self.flops_per_token)

    def synced(self, layout: Layout) -> Params:
        """Returns the leaves of `like` that are held and synchronized, and None for others."""
        return self._held(layout, synced=True)

    def shardings_of(self, layout: Layout) -> Shardings:
        """Returns, by name, the shardings of the leaves of `synced`."""
        return {name: self.shardings[name] for name in tree.by_name(self.synced(layout))}

    def frozen_shapes(self, layout: Layout) -> Params:
        """Returns the leaves of `like` that are held and not synchronized, and None for others."""
        return self._held(layout, synced=False)

    def _held(self, layout: Layout, *, synced: bool) -> Params:
        held = tree.held_names(layout, self.hint or default_hint, self.holds)
        names = {tensor.name for tensor in (layout.tensors if synced else layout.constants)}
        return tree.split(self.like, tree.marks(self.like, held & names))[0]

    def layout(self, fragments: int, block: int) -> Layout | None:
        """Returns the layout that the member's `hint` gives; None if the member has no hint.

        Args:
            fragments: the number of fragments.
            block: the number of elements that share one scale when they are quantized.
        """
        if self.hint is None:
            return None
        tensors = self._tensors()
        return make_layout(tensors, fragments=fragments, block=block, hint=self.hint)

    def check(self, layout: Layout) -> None:
        """Compares the member's tensors with those of the run: names, shapes and dtypes.

        Raises:
            RunMismatchError: tensors differ; the error names them.
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
