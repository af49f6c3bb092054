"""Tasks of the benches: the built-in one, and sizes small enough for sweeps."""

import functools
import tempfile
from importlib import resources
from pathlib import Path
from pydoc_data import topics
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


@functools.cache
def other_text() -> dict[str, str]:
    """Options of a corpus whose held-out text is of another kind: JAX's source, Python's manual.

    Both are pinned with the interpreter and the requirements, so that they are the same anywhere.
    """
    root = Path(tempfile.mkdtemp(prefix="diloco-text-"))
    for name in ("source", "manual"):
        (root / name).mkdir()
    sources = sorted(p for p in _files(resources.files("jax")) if p.suffix == ".py")
    code = b"".join(path.read_bytes() for path in sources)
    (root / "source" / "jax.py").write_bytes(code)
    (root / "manual" / "topics.txt").write_text("\n".join(topics.topics.values()))
    return {"corpus": str(root / "source"), "held_out": str(root / "manual")}


def _files(root: Any) -> list[Path]:
    return [path for path in Path(root).rglob("*") if path.is_file()]
