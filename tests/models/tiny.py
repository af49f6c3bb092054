"""A decoder of some thousand parameters, and tokens for it, as folders on disk."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diloco.learner.load_and_check_task import load_task
from diloco.learner.task import Task
from diloco.learner.tensors.tree import named_leaves
from diloco.models.decoders import checkpoint, model
from diloco.models.decoders.config import DecoderConfig, parse_config, read_config
from diloco.models.decoders.tensor_names_and_shapes import table
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


def task_of(folder: Path, model: Path, **options: Any) -> Task:
    """The task of a checkpoint, on random tokens in `folder`."""
    data = folder / "data"
    if not data.exists():
        data.mkdir()
        rng = np.random.default_rng(0)
        for side in ("train", "held_out"):
            np.save(data / f"{side}.npy", rng.integers(96, size=4_000).astype(np.uint16))
    given = {"model": str(model), "data": str(data), "length": 32, "batch": 2}
    options = given | {"learning_rate": 1e-2} | options
    return load_task("diloco.models.decoders:build", steps=20, seed=0, options=options)


def parameter_count(config: DecoderConfig) -> int:
    return sum(math.prod(entry.shape) for entry in table(config).values())


def open_folder(folder: Path) -> tuple[DecoderConfig, dict[str, checkpoint.Rows]]:
    config = read_config(folder)
    return config, checkpoint.read_checkpoint(folder, config)
