"""A decoder of some thousand parameters, and tokens for it, as folders on disk."""

import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from diloco.learner.tensors.tree import named_leaves
from diloco.models.decoders import checkpoint, model
from diloco.models.decoders.config import DecoderConfig, parse_config, read_config
from diloco.models.decoders.tensors import table
from tests.models.cases import LLAMA


def write_tiny(folder: Path, files: Sequence[str], tokens: int) -> dict[str, str]:
    """Write them; the options "model" and "data" of a task that reads them.

    Args:
        folder: that takes both.
        files: of tokens, without their endings.
        tokens: of each file.
    """
    config = parse_config(LLAMA, source="")
    params = model.init_params(config, jax.random.key(3))
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(params)}
    checkpoint.write_checkpoint(folder / "model", config, arrays, file_bytes=20_000)
    (folder / "data").mkdir()
    rng = np.random.default_rng(0)
    for name in files:
        np.save(folder / "data" / f"{name}.npy", rng.integers(96, size=tokens).astype(np.uint16))
    return {"model": str(folder / "model"), "data": str(folder / "data")}


def parameter_count(config: DecoderConfig) -> int:
    return sum(math.prod(entry.shape) for entry in table(config).values())


def open_folder(folder: Path) -> tuple[DecoderConfig, dict[str, checkpoint.Rows]]:
    config = read_config(folder)
    return config, checkpoint.read_checkpoint(folder, config)
