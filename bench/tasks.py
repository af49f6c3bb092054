"""Tasks of the benches: the built-in one, and a size small enough for sweeps."""

from typing import Any

from learner import model
from learner.task import Task

# 123,200 parameters with the embedding: small enough for sweeps on one core.
TINY = model.Preset(layers=2, width=64, heads=2, learning_rate=4e-3, tied=True)


def build(*, steps: int, seed: int, preset: str = "1m", **options: Any) -> Task:
    """`learner.model:build` with one preset more: "tiny", of 64-byte windows."""
    if preset == "tiny":
        model.PRESETS.setdefault("tiny", TINY)
        options = {"length": 64, **options}
    return model.build(steps=steps, seed=seed, preset=preset, **options)
