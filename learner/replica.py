"""One learner's tensors: its parameters, the view of each fragment, the updates in flight.

Arrays live on the device and are donated from operation to operation; whoever holds an old one
may not use it again. Only the training loop's thread calls this.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from common.config import SyncSection
from common.layout import Layout
from common.quantize import Encoded, encode
from learner import tree
from learner.adopt import Delta, View
from learner.delta import Kernels, Leaves, make_kernels
from learner.task import Params


class Replica:
    """The parameters of a learner, relative to the views it has adopted.

    Args:
        settings: the run's sync section.
        layout: the run's.
        like: the task's trained tree, of arrays or shapes.
        views: newest view of every fragment, float32 [N].
    """

    def __init__(
        self, settings: SyncSection, layout: Layout, like: Params, views: Sequence[np.ndarray]
    ) -> None:
        self._settings = settings
        self._like = like
        self._kernels = [
            make_kernels(
                layout,
                fragment.index,
                codec=settings.codec,
                delta_codec=settings.delta_codec,
                shard_elements=settings.shard_elements,
            )
            for fragment in layout.fragments
        ]
        self._views = [jnp.asarray(view) for view in views]
        self._in_flight: dict[int, tuple[Encoded, ...]] = {}
        leaves: Leaves = {
            name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in tree.by_name(like).items()
        }
        for kernels, view in zip(self._kernels, self._views, strict=True):
            leaves |= kernels.overwrite(_part(leaves, kernels), view)
        self.trained = tree.from_names(like, leaves)

    def send(self, fragment: int) -> tuple[Encoded, ...]:
        """Encode what is unsent of a fragment and keep the codes as in flight."""
        kernels = self._kernels[fragment]
        leaves = _part(tree.by_name(self.trained), kernels)
        parts = kernels.send(leaves, self._views[fragment])
        self._in_flight[fragment] = parts
        return parts

    def adopt(self, fragment: int, payload: Delta | View | None, *, resolved: bool) -> None:
        """Move view and parameters to a record's; drop the update in flight if it is resolved."""
        kernels = self._kernels[fragment]
        leaves = tree.by_name(self.trained)
        part = _part(leaves, kernels)
        if payload is not None:
            move = self._overwrite if self._settings.adopt == "overwrite" else self._rebase
            part = move(fragment, part, payload)
        if resolved:
            codes = self._in_flight.pop(fragment)
            if self._settings.adopt == "rebase":
                part = kernels.settle(part, codes)
        self.trained = tree.from_names(self._like, leaves | part)

    def restore(self, fragment: int, view: View) -> None:
        """Set view and parameters to those of a rollback; forget what is in flight."""
        kernels = self._kernels[fragment]
        leaves = tree.by_name(self.trained)
        self._views[fragment] = jnp.asarray(view.values)
        self._in_flight.pop(fragment, None)
        part = kernels.overwrite(_part(leaves, kernels), self._views[fragment])
        self.trained = tree.from_names(self._like, leaves | part)

    def warm_up(self) -> None:
        """Compile every operation on copies, so that no training step waits for a compiler."""
        for index, kernels in enumerate(self._kernels):
            copies = _part(jax.tree.map(jnp.copy, tree.by_name(self.trained)), kernels)
            view = jnp.copy(self._views[index])
            parts = kernels.send(copies, view)
            zeros = encode(self._settings.delta_codec, jnp.zeros_like(view), kernels.block)
            on_host = Encoded(*map(np.asarray, zeros))
            copies, view = kernels.apply(copies, view, on_host)
            jax.block_until_ready(kernels.settle(copies, parts))

    def _rebase(self, fragment: int, part: Leaves, payload: Delta | View) -> Leaves:
        kernels, view = self._kernels[fragment], self._views[fragment]
        if isinstance(payload, Delta):
            part, self._views[fragment] = kernels.apply(part, view, payload.encoded)
        else:
            part, self._views[fragment] = kernels.jump(part, view, jnp.asarray(payload.values))
        return part

    def _overwrite(self, fragment: int, part: Leaves, payload: Delta | View) -> Leaves:
        kernels, view = self._kernels[fragment], self._views[fragment]
        if isinstance(payload, Delta):
            view = kernels.advance(view, payload.encoded)
        else:
            view = jnp.asarray(payload.values)
        self._views[fragment] = view
        if self._settings.alpha:
            return kernels.mix(part, view, self._settings.alpha)
        return kernels.overwrite(part, view)


def _part(leaves: Leaves, kernels: Kernels) -> Leaves:
    return {name: leaves[name] for name in kernels.names}
