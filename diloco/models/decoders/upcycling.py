"""Makes a mixture of experts from a dense checkpoint: sparse upcycling (arXiv 2212.05055).

Each expert begins as a copy of the checkpoint's MLP, and the router as noise. The weights of a
token's experts add up to 1, so that version 0 computes the same function as the dense decoder; in
training the experts become different.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from diloco.common.protocol.errors import ConfigError
from diloco.models.decoders.checkpoint import Rows, read_checkpoint
from diloco.models.decoders.config import DecoderConfig, different_fields
from diloco.models.decoders.tensor_names_and_shapes import LAYERS, table

ROUTER_STD = 0.02
_SEED = 2212_05055
# Fields of `DecoderConfig` in which the dense decoder and the mixture may differ.
_OTHER = {"family", "experts", "mlp_width"}


class LayersOf:
    """A tensor that stacks layers along its first axis, each computed when it is read; float32.

    Args:
        shape: the whole tensor's shape.
        made: (number of a layer) -> that layer, float32.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, shape: tuple[int, ...], made: Callable[[int], np.ndarray]) -> None:
        self.shape, self._made = shape, made

    def __getitem__(self, rows: slice) -> np.ndarray:
        found = [self._made(layer) for layer in range(*rows.indices(self.shape[0]))]
        return np.stack(found) if found else np.empty((0, *self.shape[1:]), np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return self[:].astype(dtype or np.float32, copy=False)


def read_upcycled(
    folder: Path, dense: DecoderConfig, config: DecoderConfig
) -> dict[str, Rows | LayersOf]:
    """Returns the tensors of a mixture made from a dense checkpoint, by name; reads no values yet.

    Args:
        folder: the checkpoint's folder.
        dense: the checkpoint's configuration.
        config: the mixture's configuration.

    Raises:
        ConfigError: shapes differ, or the mixture would not compute the same function.
    """
    _check_alike(folder, dense, config)
    source = read_checkpoint(folder, dense)
    found: dict[str, Rows | LayersOf] = {}
    for name, entry in table(config).items():
        of_layer = entry.shape[1:]
        if name == f"{LAYERS}router":
            found[name] = LayersOf(entry.shape, partial(_noise, of_layer))
        elif name.startswith(f"{LAYERS}expert_"):
            matrix = source[name.replace("expert_", "")]
            found[name] = LayersOf(entry.shape, partial(_copies, of_layer, matrix))
        else:
            found[name] = source[name]
    return found


def _copies(shape: tuple[int, ...], matrix: Rows, layer: int) -> np.ndarray:
    return np.broadcast_to(matrix[layer : layer + 1], shape)


def _noise(shape: tuple[int, ...], layer: int) -> np.ndarray:
    drawn = np.random.default_rng((_SEED, layer)).standard_normal(shape, np.float32)
    return drawn * np.float32(ROUTER_STD)


def _check_alike(folder: Path, dense: DecoderConfig, config: DecoderConfig) -> None:
    assert config.experts is not None
    different = different_fields(dense, config, _OTHER)
    if config.experts.beside:
        different.append("experts beside the MLP, not in its place")
    if dense.mlp_width != config.experts.width:
        different.append("width of the MLP and of an expert")
    if different:
        raise ConfigError(
            f"experts cannot begin as the MLP of {str(folder)!r}: its decoder is of another shape"
            f" than the task's: {', '.join(different)}",
            hint="write the task's config.json after the checkpoint's: all but the experts alike",
        )
    if not config.experts.normed:
        raise ConfigError(
            "norm_topk_prob is not true: the weights of a token's experts would not add up to 1,"
            f" and the mixture would begin as less than {str(folder)!r}",
            hint='"norm_topk_prob": true in the config.json of the task\'s model',
        )
