"""Tasks of the benches: the built-in one, and a size small enough for sweeps."""

from typing import Any

from diloco.learner import model
from diloco.learner.task import Task

# 123,200 parameters with the embedding: small enough for sweeps on one core.
TINY = model.Preset(layers=2, width=64, heads=2, learning_rate=4e-3, tied=True)
# 41,088 parameters: for sweeps of a hundred runs.
SWEEP = model.Preset(layers=2, width=32, heads=2, learning_rate=8e-3, tied=True)
SMALL = {"tiny": TINY, "sweep": SWEEP}


def build(*, steps: int, seed: int, preset: str = "1m", **options: Any) -> Task:
    """The built-in task with two presets more, of 64-byte windows: "tiny" and "sweep"."""
    if preset in SMALL:
        model.PRESETS.setdefault(preset, SMALL[preset])
        options = {"length": 64, **options}
    return model.build(steps=steps, seed=seed, preset=preset, **options)
