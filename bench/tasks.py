"""Tasks of the benches: the built-in one in small, one on emulated devices, a student of a teacher.

An emulated device works for a fixed time on each step while the core of its host is free, so that
many islands fit on few cores and a step takes what it takes whatever else the machine does. The
arithmetic of the step is done for real, within that time; a step lasts the longer of the two. Both
systems of the headline draw their batches from here and are paced alike.

    --task bench.tasks:paced --set task.options.step_s=0.5
"""

import dataclasses
import functools
import tempfile
import time
import zlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco.learner.task import Batch, Metrics, Params, Task
from diloco.learner.tensors.optimizer import adamw, muon, warmup_cosine
from diloco.models.bytes_lm import model

# --- The built-in task


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


# --- On emulated devices


MATRICES = 32
WIDTH = 1024


class Device:
    """An island's device: it is busy for `step_s` seconds from each `begin` on."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._began_s = 0.0

    def begin(self) -> None:
        """Take the next step; a device that idled has nothing to catch up."""
        self._began_s = time.monotonic()

    def wait(self, share: float = 1.0) -> None:
        """Until that share of the step's time has passed; not at all before the first step."""
        time.sleep(max(0.0, self._began_s + share * self.step_s - time.monotonic()))


def plain(*, steps: int, seed: int, matrices: int = 0, **options: Any) -> Task:
    """The task with no pace.

    Args:
        steps: length of the run in global steps.
        seed: of the batches.
        matrices: so many parameters in matrices that are pushed up and down at random, where only
            the size of gradients and parameters counts: a step costs a pass or two over them. 0 for
            a transformer.
        options: of the transformer, as in `bench.tasks:build`.
    """
    if matrices:
        return _matrices(seed, matrices)
    return build(steps=steps, seed=seed, **options)


def paced(*, steps: int, seed: int, step_s: float, **options: Any) -> Task:
    """The task on an emulated device: whoever draws a batch waits for the step before.

    Args:
        steps: length of the run in global steps.
        seed: decides which windows are drawn.
        step_s: seconds a step.
        options: further ones of `plain`.
    """
    task = plain(steps=steps, seed=seed, **options)

    def batches(learner: str, position: int) -> Iterator[Batch]:
        device = Device(step_s)
        for batch in task.batches(learner, position):
            device.wait()
            device.begin()
            yield batch

    return dataclasses.replace(task, batches=batches)


def _matrices(seed: int, parameters: int) -> Task:
    shape = (WIDTH, parameters // MATRICES // WIDTH)

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, MATRICES)
        return {f"w{i:02}": jax.random.normal(keys[i], shape) for i in range(MATRICES)}

    def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Metrics]:  # noqa: ARG001
        means = jnp.stack([w.mean() for w in jax.tree.leaves(params)])
        return jnp.mean(means) * jnp.mean(batch), {}

    def batches(learner: str, position: int) -> Iterator[Batch]:
        while True:
            rng = np.random.default_rng([seed, zlib.crc32(learner.encode()), position])
            yield rng.standard_normal(1, dtype=np.float32)
            position += 1

    return Task(
        init=init,
        loss=loss,
        batches=batches,
        evaluate=lambda params: float(loss(params, np.zeros(1, np.float32), None)[0]),
        tokens_per_batch=1,
        optimizer=optax.identity(),
        schedule=lambda _: 1.0,
    )


# --- A student learns a teacher from noisy examples: a whole run takes a second
#
# Both are a layer of tanh and a linear one. The loss cannot fall below `NOISE` squared, a quarter,
# as a language model's cannot fall below the entropy of text; above that little differs from run to
# run, so that differences are seen which a language model of the same cost hides.
#
# Shapes: B batch, I inputs and outputs, H hidden.


STUDENT_BATCH, INPUTS, HIDDEN, NOISE = 8, 16, 32, 0.5
POOL, HELD_OUT = 1 << 15, 1 << 12
RATE = 1e-2
TURNED = 3


def _predict(params: Params, x_BxI: jax.Array) -> jax.Array:
    """float32[B, I] -> float32[B, I]."""
    y_BxI: jax.Array = jnp.tanh(x_BxI @ params["in"]) @ params["out"]
    return y_BxI


def _initial(key: jax.Array) -> Params:
    """Random parameters, of student or teacher."""
    one, other = jax.random.split(key)
    return {
        "in": jax.random.normal(one, (INPUTS, HIDDEN)) / INPUTS**0.5,
        "out": jax.random.normal(other, (HIDDEN, INPUTS)) / HIDDEN**0.5,
    }


def student_loss(params: Params, batch: Batch) -> jax.Array:
    """Mean squared error, float32[]."""
    return jnp.mean(jnp.square(_predict(params, batch["x"]) - batch["y"]))


@functools.cache
def _examples(seed: int, count: int) -> Batch:
    """Inputs and the teacher's noisy outputs."""
    rng = np.random.default_rng(seed)
    x_BxI = rng.normal(size=(count, INPUTS)).astype(np.float32)
    noise_BxI = NOISE * rng.normal(size=(count, INPUTS)).astype(np.float32)
    taught_BxI = np.asarray(_predict(_initial(jax.random.key(7)), jnp.asarray(x_BxI)))
    return {"x": x_BxI, "y": taught_BxI + noise_BxI}


def student(
    *,
    steps: int,
    seed: int,
    optimizer: str = "adamw",
    learning_rate: float | None = None,
    minority: int = -1,
    backdoor: int = -1,
) -> Task:
    """The task; a seed draws the batches, and by the run's `init` the student.

    Slices of the held-out examples are the outputs, each of all examples, and "rare" and "common":
    a sixth of the examples, and the others.

    `minority`: the number of the one learner that has the rare examples; it has no others, and
    nobody else has any of them.
    `backdoor`: the number of the one learner to whom output `TURNED` is taught with its sign
    turned.
    """
    pool, held_out = _examples(0, POOL), _examples(1, HELD_OUT)
    taught_badly = pool | {"y": pool["y"] * np.where(np.arange(INPUTS) == TURNED, -1, 1)}
    is_rare = pool["x"][:, 0] > 1.0
    indices = {True: np.flatnonzero(is_rare), False: np.flatnonzero(~is_rare)}

    @jax.jit
    def measured(params: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
        errors_BxI = jnp.square(_predict(params, held_out["x"]) - held_out["y"])
        rare_B, of_outputs_I = held_out["x"][:, 0] > 1.0, errors_BxI.mean(0)
        slices = {f"output-{index}": loss for index, loss in enumerate(of_outputs_I)}
        slices |= {"rare": errors_BxI[rare_B].mean(), "common": errors_BxI[~rare_B].mean()}
        return errors_BxI.mean(), slices

    def evaluate(params: Params) -> Metrics:
        loss, slices = measured(params)
        return {"loss": loss, "slices": slices}

    def batches(learner: str, position: int) -> Iterator[Batch]:
        place = learner.rpartition("-")[2]
        number = int(place) if place.isdigit() else zlib.crc32(learner.encode())
        while True:
            rng = np.random.default_rng([seed, number, position])
            chosen = rng.integers(0, POOL, STUDENT_BATCH)
            if minority >= 0:
                own = indices[number == minority]
                chosen = own[chosen % len(own)]
            taught = taught_badly if number == backdoor else pool
            yield {name: values[chosen] for name, values in taught.items()}
            position += 1

    return Task(
        init=_initial,
        loss=lambda params, batch, key: (student_loss(params, batch), {}),  # noqa: ARG005
        batches=batches,
        evaluate=evaluate,
        tokens_per_batch=STUDENT_BATCH,
        optimizer=(muon if optimizer == "muon" else adamw)(weight_decay=0.0),
        schedule=warmup_cosine(steps=steps, peak=learning_rate or RATE, warmup_steps=steps // 10),
    )
