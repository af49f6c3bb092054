"""One learner's tensors: its parameters, the view of each fragment, the updates in flight.

The *view* of a fragment is the fragment's parameters in the version that was adopted last. Arrays
are sharded over the learner's mesh, and operations donate their arguments: a donated array may not
be used again. Only the training loop's thread calls this module, on every host of a learner in the
same order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from diloco.common.process.config import SyncSection, sync_of
from diloco.common.protocol import shards
from diloco.common.protocol.codecs import Encoded, code_count, code_dtype, scale_count
from diloco.common.protocol.layout import Layout
from diloco.learner.core.carry import Carried
from diloco.learner.task import Params
from diloco.learner.tensors.checkpoint import copied
from diloco.learner.tensors.placement import Shardings, make_ownership, make_placement
from diloco.learner.tensors.send_and_adopt_kernels import (
    Blocks,
    Codes,
    Kernels,
    Leaves,
    make_kernels,
)
from diloco.learner.tensors.tree import named_leaves


class Delta(NamedTuple):
    """A version that follows the adopted one: the codes of new view minus old, on the devices."""

    codes: Codes


class PendingView(NamedTuple):
    """A version that does not follow the adopted one: the whole new view, on the devices."""

    values: Blocks


class UnsentValues(NamedTuple):
    """The values of a learner's unsent work, by leaf, sharded over the learner's mesh.

    Attributes:
        ahead: theta + q - V, float32: the parameters less the views, without the updates in flight.
        flying: q, the values of the updates in flight, in the leaves' dtypes; 0 elsewhere.
    """

    ahead: Leaves
    flying: Leaves


class Replica:
    """The synchronized parameters of a learner, the adopted views, and the updates in flight.

    Args:
        settings: the run's sync section.
        layout: the run's layout.
        like: the synchronized leaves that the learner holds, a tree of arrays or shapes.
        views: the newest view of each fragment that has these leaves, in order: float32 [N]. Each
            view is released before the next is taken.
        shardings: the shardings of the training loop's leaves, by name; None: all leaves are on one
            device.
        anchor: "device" or "host", the memory in which views are kept; from "host" views are
            copied to the devices for each operation.

    Attributes:
        trained: the parameters, a tree like `like`, with the training loop's shardings.
    """

    def __init__(
        self,
        settings: SyncSection,
        layout: Layout,
        like: Params,
        views: Iterable[np.ndarray],
        *,
        shardings: Shardings | None = None,
        anchor: str = "device",
    ) -> None:
        self._names = [name for name, _ in named_leaves(like)]
        names = set(self._names)
        # A fragment has leaves of one module, of which a learner holds all or none.
        held = [one for one in layout.fragments if one.pieces[0].tensor in names]
        self._settings = {one.index: sync_of(settings, one) for one in held}
        self._averaged = {one.index: one.averaged for one in held}
        self._sizes = {one.index: one.size for one in held}
        self._structure = jax.tree.structure(like)
        self._like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like)
        self._placement = make_placement(layout, like, shardings)
        self._kernels = {
            fragment: make_kernels(
                layout,
                fragment,
                codec=own.codec,
                delta_codec=own.delta_codec,
                shardings=self._placement.inner,
            )
            for fragment, own in self._settings.items()
        }
        self._ownership = {
            fragment: make_ownership(kernels) for fragment, kernels in self._kernels.items()
        }
        self._anchor = anchor_memory(anchor)
        self._views: dict[int, Blocks] = {}
        self._in_flight: dict[int, Codes] = {}
        # With `blend`: theta - V of a fragment when its update in flight was sent.
        self._ahead: dict[int, Blocks] = {}
        leaves = _zeros(like, self._placement.inner)
        for (fragment, kernels), view in zip(self._kernels.items(), views, strict=True):
            blocks = self._ownership[fragment].place_view(view)
            leaves |= kernels.overwrite(_part(leaves, kernels), blocks)
            self._views[fragment] = self._at_anchor(blocks)
        self.trained = self._tree(self._placement.outward(leaves))

    def send(self, fragment: int) -> Codes:
        """Returns the codes of a fragment's unsent work, and keeps them as the update in flight.

        The codes may still be computing on the devices.
        """
        kernels = self._kernels[fragment]
        leaves = self._placement.inward(_part(self._leaves(), kernels))
        codes = kernels.send(leaves, self._view(fragment))
        self._in_flight[fragment] = codes
        if self._settings[fragment].adopt == "blend":
            self._ahead[fragment] = self._at_anchor(kernels.ahead(leaves, self._view(fragment)))
        return codes

    def owned(self, fragment: int) -> np.ndarray:
        """Returns the numbers of the blocks that this host uploads, ascending, int64 [n]."""
        return self._ownership[fragment].owned

    def local_blocks(self, fragment: int) -> np.ndarray:
        """Returns the numbers of the blocks that this host's devices hold, ascending, int64 [n]."""
        return self._ownership[fragment].held

    def collect(self, fragment: int, codes: Codes) -> Encoded:
        """Returns the scales and codes of this host's owned blocks of an update; waits for devices.

        Args:
            fragment: the fragment's index.
            codes: the result of `send`.
        """
        return self._ownership[fragment].collect(codes)

    def place(self, fragment: int, rows: Encoded) -> Delta:
        """Puts a version delta on this host's devices.

        Args:
            fragment: the fragment's index.
            rows: scales and codes of the blocks that `local_blocks` numbers, in that order.
        """
        return Delta(self._ownership[fragment].place(rows))

    def place_view(self, fragment: int, view: np.ndarray) -> PendingView:
        """Puts a whole view, float32 [N], on this host's devices."""
        return PendingView(self._ownership[fragment].place_view(view))

    def adopt(
        self,
        fragment: int,
        payload: Delta | PendingView | None,
        *,
        resolved: bool,
        blended: bool = False,
    ) -> None:
        """Moves view and parameters to a record's version; drops the update in flight if resolved.

        Args:
            fragment: the fragment's index.
            payload: the record's delta or view; None: the record's view is the adopted one.
            resolved: the record resolves the update in flight.
            blended: the version has merged the update in flight, and only the share `sync.blend` of
                the training since the send is to stay.
        """
        kernels, settings = self._kernels[fragment], self._settings[fragment]
        leaves = self._leaves()
        if payload is None and not resolved:
            return
        part = self._placement.inward(_part(leaves, kernels))
        if payload is not None:
            move = self._overwrite if settings.adopt == "overwrite" else self._rebase
            part = move(fragment, part, payload)
        if payload is not None and settings.adopt == "overwrite":
            # The view replaces all work since, the update in flight included.
            self._in_flight.pop(fragment, None)
        elif resolved:
            if blended:
                part = self._blended(fragment, part)
            part = self._settled(fragment, part)
        self._take(leaves, part)

    def roll_back(self, fragment: int, view: PendingView) -> None:
        """Sets view and parameters to the view after a rollback; drops the update in flight."""
        kernels = self._kernels[fragment]
        leaves = self._leaves()
        self._in_flight.pop(fragment, None)
        self._ahead.pop(fragment, None)
        part = self._placement.inward(_part(leaves, kernels))
        part = kernels.overwrite(part, view.values)
        self._views[fragment] = self._at_anchor(view.values)
        self._take(leaves, part)

    def viewed(self) -> Iterator[dict[str, Any]]:
        """Yields for each fragment its leaves by name, with the adopted view as the rows' values.

        Rows that belong to other fragments have the values of `trained`. Use each item before
        taking the next: fragments may share a leaf.
        """
        for fragment, kernels in self._kernels.items():
            part = copied(self._placement.inward(_part(self._leaves(), kernels)))
            yield self._placement.outward(kernels.overwrite(part, self._view(fragment)))

    def unsent(self) -> "UnsentValues":
        """Returns the values of the unsent work, for a snapshot; they may still be computing."""
        leaves = self._placement.inward(self._leaves())
        ahead, views = copied(leaves), copied(leaves)
        flying = _zeros(self._like, self._placement.inner)
        for fragment, kernels in self._kernels.items():
            views |= kernels.overwrite(_part(views, kernels), self._view(fragment))
            codes = self._in_flight.get(fragment)
            if codes is not None and not self._averaged[fragment]:
                ahead |= kernels.settle(_part(ahead, kernels), codes)
                flying |= kernels.settle(_part(flying, kernels), codes)
        return UnsentValues(_differences(ahead, views), flying)

    def unsent_shapes(self) -> "UnsentValues":
        """Returns the shapes of `unsent`, with their shardings."""
        inner = self._placement.inner
        named = named_leaves(self._like)

        def shapes(dtype: Any = None) -> dict[str, Any]:
            return {
                name: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=inner[name])
                for name, leaf in named
            }

        return UnsentValues(shapes(jnp.float32), shapes())

    def carry(self, values: "UnsentValues", found: Sequence[Carried]) -> None:
        """Moves the parameters from the views by unsent work of the life before.

        Args:
            values: the work, as `unsent` returned it in that life; it is donated.
            found: how each fragment's work is taken over.
        """
        ahead = dict(values.ahead)
        for fragment, kernels in self._kernels.items():
            one = found[fragment]
            # What is not to be taken over, in the fragment's rows.
            part = _part(values.flying if one.again else ahead, kernels)
            if one.again or one.dropped:
                away = _negative(kernels.blocks(part))
                ahead |= kernels.add(_part(ahead, kernels), away)
        leaves = self._placement.inward(self._leaves())
        self.trained = self._tree(self._placement.outward(_sums(leaves, ahead)))

    def digest(self, fragment: int) -> Callable[[], str] | None:
        """Returns a function that computes the digest of a fragment's view; it waits for devices.

        Returns None if this host does not own all blocks of the fragment, as with several hosts.
        """
        ownership, view = self._ownership[fragment], self._views[fragment]
        if len(ownership.owned) * ownership.block != self._sizes[fragment]:
            return None
        # The next adoption reuses the memory of the view on the devices.
        copy = copied(view) if self._anchor is None else view
        return lambda: shards.digest(ownership.gather(copy).reshape(-1))

    def warm_up(self) -> None:
        """Compiles every operation on copies, so that no training step waits for a compiler."""
        for index, kernels in self._kernels.items():
            ownership = self._ownership[index]
            part = _part(self._leaves(), kernels)
            copies, view = copied((self._placement.inward(part), self._view(index)))
            codes = kernels.send(copies, view)
            delta = ownership.place(_zero_rows(kernels, len(ownership.held)))
            sent = kernels.ahead(copies, view) if self._settings[index].adopt == "blend" else None
            copies, view = kernels.apply(copies, view, delta)
            if sent is not None:
                copies = kernels.blend(copies, view, sent, self._settings[index].blend)
            jax.block_until_ready(kernels.settle(copies, codes))

    def _take(self, leaves: dict[str, Any], part: Leaves) -> None:
        """Sets `trained` to `leaves`, with a fragment's leaves replaced by those of `part`."""
        self.trained = self._tree(leaves | self._placement.outward(part))

    def _leaves(self) -> dict[str, Any]:
        """Returns the parameters by name."""
        return dict(zip(self._names, jax.tree.leaves(self.trained), strict=True))

    def _tree(self, leaves: dict[str, Any]) -> Params:
        return jax.tree.unflatten(self._structure, [leaves[name] for name in self._names])

    def _settled(self, fragment: int, part: Leaves) -> Leaves:
        """Drops the update in flight, and returns the leaves plus the update's values.

        So the update's work is not sent again. Averaged state is sent whole each time: its leaves
        are returned unchanged.
        """
        codes = self._in_flight.pop(fragment, None)
        self._ahead.pop(fragment, None)
        if codes is None or self._averaged[fragment]:
            return part
        return self._kernels[fragment].settle(part, codes)

    def _blended(self, fragment: int, part: Leaves) -> Leaves:
        """Returns the leaves with only a share of the training since the update in flight was sent.

        That training is the change of theta - V since the send, which an adoption does not change.
        The error of the update's quantization is not part of it, and is sent with the next update.
        """
        sent = self._fetched(fragment, self._ahead.pop(fragment))
        share = self._settings[fragment].blend
        return self._kernels[fragment].blend(part, self._view(fragment), sent, share)

    def _view(self, fragment: int) -> Blocks:
        """Returns a fragment's view on the devices."""
        return self._fetched(fragment, self._views[fragment])

    def _fetched(self, fragment: int, kept: Blocks) -> Blocks:
        """Returns blocks of a view on the devices, copied there if views are in host memory."""
        if self._anchor is None:
            return kept
        placed = self._kernels[fragment].placed
        return tuple(
            jax.device_put(piece, where.sharding) for piece, where in zip(kept, placed, strict=True)
        )

    def _at_anchor(self, blocks: Blocks) -> Blocks:
        """Returns blocks of a view in the memory in which views are kept."""
        if self._anchor is None:
            return blocks
        return tuple(
            jax.device_put(piece, piece.sharding.with_memory_kind(self._anchor)) for piece in blocks
        )

    def _rebase(self, fragment: int, part: Leaves, payload: Delta | PendingView) -> Leaves:
        kernels, view = self._kernels[fragment], self._view(fragment)
        if isinstance(payload, Delta):
            part, view = kernels.apply(part, view, payload.codes)
        else:
            part, view = kernels.jump(part, view, payload.values)
        self._views[fragment] = self._at_anchor(view)
        return part

    def _overwrite(self, fragment: int, part: Leaves, payload: Delta | PendingView) -> Leaves:
        kernels = self._kernels[fragment]
        if isinstance(payload, Delta):
            view = kernels.advance(self._view(fragment), payload.codes)
        else:
            view = payload.values
        self._views[fragment] = self._at_anchor(view)
        if alpha := self._settings[fragment].alpha:
            return kernels.mix(part, view, alpha)
        return kernels.overwrite(part, view)


def _zero_rows(kernels: Kernels, blocks: int) -> Encoded:
    """Returns scales and codes of zero bytes, of the shapes for `blocks` blocks of a delta."""
    codec, block = kernels.delta_codec, kernels.block
    scales = np.zeros(scale_count(codec, blocks * block, block), code_dtype("bfloat16"))
    return Encoded(scales, np.zeros((blocks, code_count(codec, block)), code_dtype(codec)))


@jax.jit
def _differences(new: Leaves, old: Leaves) -> Leaves:
    return {name: new[name].astype(jnp.float32) - old[name].astype(jnp.float32) for name in new}


@jax.jit
def _sums(leaves: Leaves, values: Leaves) -> Leaves:
    return {
        name: (leaf.astype(jnp.float32) + values[name]).astype(leaf.dtype)
        for name, leaf in leaves.items()
    }


@jax.jit
def _negative(blocks: Blocks) -> Blocks:
    return tuple(-piece for piece in blocks)


def _part(leaves: dict[str, Any], kernels: Kernels) -> dict[str, Any]:
    return {name: leaves[name] for name in kernels.names}


def _zeros(like: Params, shardings: Mapping[str, NamedSharding]) -> Leaves:
    leaves = named_leaves(like)
    shapes = tuple((name, leaf.shape, jnp.dtype(leaf.dtype)) for name, leaf in leaves)
    made: Leaves = _zeros_maker(shapes, tuple(shardings[name] for name, _ in leaves))()
    return made


@lru_cache(maxsize=4)
def _zeros_maker(
    shapes: tuple[tuple[str, tuple[int, ...], np.dtype], ...], shardings: tuple[NamedSharding, ...]
) -> Callable[[], Leaves]:
    """Returns a jitted function that makes zeros of these names, shapes, dtypes and shardings.

    The function is cached, so that a process that makes several replicas compiles it once.
    """

    def zeros() -> Leaves:
        return {name: jnp.zeros(shape, dtype) for name, shape, dtype in shapes}

    names = (name for name, _, _ in shapes)
    return jax.jit(zeros, out_shardings=dict(zip(names, shardings, strict=True)))


def anchor_memory(anchor: str) -> str | None:
    """Returns JAX's kind of memory in which views are kept; None: the devices' default memory.

    Args:
        anchor: "device" or "host"; "host" counts as "device" if devices cannot read host memory.
    """
    kinds = {memory.kind for memory in jax.local_devices()[0].addressable_memories()}
    return "pinned_host" if anchor == "host" and "pinned_host" in kinds else None
