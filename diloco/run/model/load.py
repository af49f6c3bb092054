"""`diloco.load`: reads a run's global parameters in Python, without its task or an accelerator."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diloco.common.process.tasks import run_to_end
from diloco.common.protocol import wire
from diloco.common.protocol.errors import RunMismatchError
from diloco.common.protocol.frozen import Frozen
from diloco.common.protocol.layout import Layout, Piece
from diloco.common.storage.tape import RunContext
from diloco.common.storage.views import load_view
from diloco.run.cli.opening import open_run

Arrays = dict[str, np.ndarray]


def load(run: str | Path, *, like: Any = None) -> Any:
    """Reads the newest global parameters of a run, as NumPy arrays.

    Args:
        run: its TOML file, the folder of a local run, a run's name, or a bundle.
        like: a pytree whose leaves have the names of the run's.

    Returns:
        A tree like `like`, with the run's values; without `like`, a dictionary of arrays by name.

    Raises:
        RunMismatchError: `like` has other leaves than the run's model.
        DilocoError: no such run; bus or store are unreachable; an object is damaged.
    """
    arrays, unstored = run_to_end(_load(run))
    return arrays if like is None else _fill(like, arrays, unstored)


async def _load(run: str | Path) -> tuple[Arrays, set[str]]:
    async with open_run(run, name="load", reads=True) as opened:
        arrays = await global_arrays(opened.context, opened.specification)
        return arrays, {one.name for one in opened.context.layout.constants} - set(arrays)


async def global_arrays(context: RunContext, specification: wire.Specification) -> Arrays:
    """Returns the newest global parameters, and the leaves of `held_leaves`, by name.

    Raises:
        DilocoError: bus or store are unreachable; an object is missing or damaged.
    """
    fragments = range(len(context.layout.fragments))
    views = [(await load_view(context, fragment)).view for fragment in fragments]
    arrays = arrays_of(context.layout, views)
    return arrays | await held_leaves(context, specification)


async def held_leaves(context: RunContext, specification: wire.Specification) -> Arrays:
    """Returns, by name, the leaves that are not synchronized and that the run's store has.

    Their values are those of the run's creation. Leaves that each learner loads by itself are not
    in the store, and not returned.

    Raises:
        IntegrityError: a leaf is damaged.
        ObjectMissingError: a leaf is missing.
    """
    if specification.constants is None:
        return {}

    def read(name: str) -> Arrays:
        held = Frozen(context.run, context.store.get, name)
        return {leaf: held.read(leaf) for leaf in held.names()}

    return await context.runtime.call(read, specification.constants)


def arrays_of(layout: Layout, views: Sequence[np.ndarray]) -> Arrays:
    """Returns the synchronized tensors by name, each in its own shape and dtype.

    Args:
        layout: the run's layout.
        views: the view of each fragment, float32 [elements], in order of fragments.
    """
    import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16

    arrays = {
        tensor.name: np.empty(tensor.shape, np.dtype(tensor.dtype)) for tensor in layout.tensors
    }
    for fragment, view in zip(layout.fragments, views, strict=True):
        for piece in fragment.pieces:
            values = piece_values(piece, view)
            if arrays[piece.tensor].shape:
                arrays[piece.tensor][piece.start : piece.stop] = values
            else:
                arrays[piece.tensor][...] = values
    return arrays


def piece_values(piece: Piece, view: np.ndarray) -> np.ndarray:
    """Returns a piece's values from its fragment's view: [*piece.shape], without padding."""
    padded = view[piece.offset : piece.offset + piece.stride]
    groups = padded.reshape(piece.groups, piece.group_stride)[:, : piece.group_size]
    return groups.reshape(piece.shape)


def _fill(like: Any, arrays: Arrays, unstored: set[str]) -> Any:
    from diloco.learner.tensors import tree

    # Leaves that the run does not store, since each learner loads them, stay as they are.
    own = {name: leaf for name, leaf in tree.by_name(like).items() if name in unstored}
    arrays = own | arrays
    if wrong := sorted(set(tree.by_name(like)) ^ set(arrays)):
        raise RunMismatchError(
            f"`like` is not the run's model; missing or unknown: {', '.join(wrong[:8])}",
            hint="without `like`, the parameters come as a dictionary by name",
        )
    return tree.from_names(like, arrays)
