"""Ideas that might train better, or cheaper: one honest try each, in the emulator.

    .venv/bin/python -m bench.ideas --results FILE [--seeds 0,1,2] [--named TEXT]

All of them train task "language" with Muon inside, 1,080 steps of four equal learners, H = 6, int4
both ways, and differ in one thing from "as it is". What is no part of the system is done here, the
kindest way: without its bytes, its latency or its rounding, so that what does not help here would
not help at all.

Two bits: each block's four levels are those of Lloyd and Max for a normal distribution, by its root
mean square. The greatest 3 %: by magnitude, of a fragment; the others wait, as all does that a
codec cannot carry. Moments together: all float leaves of the inner optimizers' states are averaged
over the learners, every 24 steps. One learner, outer step: as in SNOO, what it did in six steps is
an outer gradient. Mean of views: an exponential one, over about fifty steps, for evaluation alone.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from bench import cases, emulate, loops, sweep
from bench.cases import CLOSE, LEARNERS, LONG, SYNCHRONOUS, Case, outer
from diloco.common.codec import Encoded
from diloco.learner import tree
from diloco.learner.delta import Blocks, Codes
from diloco.learner.replica import Replica
from diloco.learner.task import Params, held_out_loss

NEAR = CLOSE | {"sync.overlap_steps": 2}
# Of a normal distribution of width 1: levels, and what is between them (Max, 1960).
INNER_LEVEL, OUTER_LEVEL, BORDER = 0.4528, 1.510, 0.9816
# The int4 codes that stand for them: 2 / 7 is nearly 0.4528 / 1.510.
INNER_CODE, OUTER_CODE = 2, 7
GREATEST_SHARE = 0.03
MOMENTS_STEPS = 24
MEAN_DECAY = 0.98

Recode = Callable[[Blocks, Blocks], Codes]


@jax.jit
def two_bits(view: Blocks, theta: Blocks) -> Codes:
    """V - theta in four levels a block, as int4 codes: 2.25 bits an element, scales included."""
    return tuple(_two_bits(one - other) for one, other in zip(view, theta, strict=True))


def _two_bits(values: jax.Array) -> Encoded:
    width = jnp.sqrt(jnp.mean(jnp.square(values), axis=-1, keepdims=True))
    size = jnp.where(jnp.abs(values) < BORDER * width, INNER_CODE, OUTER_CODE)
    codes = (jnp.where(values < 0, -size, size) + 8).astype(jnp.uint8)
    half = values.shape[-1] // 2
    scales = jnp.maximum(OUTER_LEVEL / OUTER_CODE * width[..., 0], 2.0**-64)
    packed = codes[..., :half] | codes[..., half:] << 4
    return Encoded(scales.astype(ml_dtypes.bfloat16), packed)


@jax.jit
def greatest(view: Blocks, theta: Blocks) -> Codes:
    """V - theta where it is among the fragment's greatest, zero elsewhere; float32."""
    values = [one - other for one, other in zip(view, theta, strict=True)]
    every = jnp.concatenate([jnp.abs(one).reshape(-1) for one in values])
    least = jnp.quantile(every, 1 - GREATEST_SHARE)
    none = jnp.zeros(0, ml_dtypes.bfloat16)
    found = (jnp.where(jnp.abs(one) >= least, one, 0) for one in values)
    return tuple(Encoded(jnp.zeros((*one.shape[:-1], 0), none.dtype), one) for one in found)


class Recoded(Replica):
    """A replica whose updates are coded another way; what that cannot carry stays unsent."""

    recode: Recode

    def send(self, fragment: int) -> Codes:
        """Encode what is unsent of a fragment and keep the codes as in flight."""
        kernels = self._kernels[fragment]
        trained = tree.by_name(self.trained)
        leaves = self._placement.inward({name: trained[name] for name in kernels.names})
        codes = type(self).recode(self._view(fragment), kernels.blocks(leaves))
        self._in_flight[fragment] = codes
        return codes


class RecodedWorld(emulate.World):
    """A world of such replicas."""

    kind: type[Replica]

    def make_replica(self) -> Replica:
        """At the newest views."""
        replica = super().make_replica()
        replica.__class__ = self.kind
        return replica


class TwoBits(Recoded):
    """Four levels."""

    recode = staticmethod(two_bits)


class Greatest(Recoded):
    """The greatest alone."""

    recode = staticmethod(greatest)


class TwoBitsWorld(RecodedWorld):
    """Updates of four levels."""

    kind = TwoBits


class GreatestWorld(RecodedWorld):
    """Updates of the greatest elements."""

    kind = Greatest


class TogetherWorld(emulate.World):
    """Inner optimizers' states are averaged now and then, at once and exactly."""

    def look(self) -> None:
        """After each step of anybody."""
        if self.steps % (MOMENTS_STEPS * LEARNERS):
            return
        states = [learner.optimizer_state for learner in self.learners.values()]
        mean = jax.tree.map(_mean, *states)
        for learner in self.learners.values():
            learner.optimizer_state = jax.tree.map(jnp.copy, mean)


def _mean(*leaves: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        return leaves[0]
    return sum(leaves[1:], leaves[0]) / len(leaves)


class FlushedWorld(emulate.World):
    """The last rounds take a whole step: an outer rate of 1."""

    def _say_stop(self) -> None:
        for owner in self.owners:
            settings = owner.arrays.settings
            section = settings.outer.model_copy(update={"learning_rate": 1.0})
            owner.arrays.settings = settings.model_copy(update={"outer": section})
        super()._say_stop()


class MeanWorld(emulate.World):
    """Keeps an exponential mean of the views."""

    mean: list[np.ndarray] | None = None

    def look(self) -> None:
        """After each step of anybody."""
        if self.steps % LEARNERS:
            return
        views = [owner.arrays.view.copy() for owner in self.owners]
        if self.mean is None:
            self.mean = views
        pairs = zip(self.mean, views, strict=True)
        self.mean = [MEAN_DECAY * kept + (1 - MEAN_DECAY) * view for kept, view in pairs]

    def run(self, pause: loops.Pause = loops.never) -> emulate.Outcome | None:
        """As any world, measured at the mean."""
        outcome = super().run(pause)
        assert outcome is not None
        assert self.mean is not None
        for owner, kept in zip(self.owners, self.mean, strict=True):
            owner.arrays.view[:] = kept
        return outcome._replace(loss=held_out_loss(self.start.task, self.view()))


def ideas(seed: int) -> dict[str, tuple[Case, type[emulate.World]]]:
    """By name: what is run, in which world."""

    def case(settings: cases.Settings | None = None) -> Case:
        changed = NEAR | (settings or {})
        return _case(seed, settings=changed)

    world = emulate.World
    later = {"sync.warmup_interval_steps": 6, "sync.warmup_steps": LONG * 2 // 3}
    alone = SYNCHRONOUS | {"sync.interval_steps": 6, "quorum.min_learners": 1, "sync.min_steps": 3}
    found = {
        "as it is": (case(), world),
        "two bits up": (case(), TwoBitsWorld),
        "float32 up": (case({"sync.codec": "float32"}), world),
        "the greatest 3 % up": (case({"sync.codec": "float32"}), GreatestWorld),
        "moments together every 24 steps": (case(), TogetherWorld),
        "last rounds at rate 1": (case(), FlushedWorld),
        "mean of views": (case(), MeanWorld),
        "H = 8": (case({"sync.interval_steps": 8}), world),
        "H = 6, of the last third 24": (case({"sync.interval_steps": 24} | later), world),
    }
    for text in ("sgd 1.0", "nesterov 0.5/0.5", "nesterov 0.7/0.6"):
        found[f"one learner, outer {text}"] = (case(alone | outer(text)), world)
    return found


def _case(seed: int, **fields: Any) -> Case:
    return Case(group="ideas", name="", budget=LONG, seed=seed, optimizer="muon", **fields)


def _one_learner(case: Case) -> bool:
    return case.settings.get("quorum.min_learners") == 1


def run(case: Case, world: type[emulate.World]) -> dict[str, Any]:
    """What a case came to."""
    task, start = sweep.task_of(sweep.Recipe.of(case), case.seed), sweep.start_of(case)
    settings, weather = sweep.settings_of(case), case.weather()
    if _one_learner(case):
        # Of as many steps as each of the four takes.
        weather = weather._replace(speeds=(1.0,), latency_steps=0.0, stop_steps=LONG)
    layout = tree.task_layout(task, settings.sync)
    outcome = world(settings, emulate.Start(task, layout, start), weather).run()
    assert outcome is not None
    return outcome._asdict()


def baselines(seed: int) -> dict[str, Callable[[], float]]:
    """What some ideas are compared with: plain loops over the same tokens."""
    case = _case(seed, data_parallel=True)
    task, start = sweep.task_of(sweep.Recipe.of(case), seed), sweep.start_of(case)
    plain = partial(loops.data_parallel, task, steps=LONG, seed=seed, began=start)
    return {
        "data-parallel": partial(plain, learners=LEARNERS),
        "data-parallel, mean of parameters": partial(_data_parallel_mean, task, start, LONG),
        "one learner": partial(plain, learners=1),
    }


def _as_result(loss: Callable[[], float]) -> dict[str, Any]:
    return {"loss": loss()}


def _data_parallel_mean(task: Any, start: loops.Start, steps: int) -> float:
    """Data-parallel, measured at an exponential mean of its parameters."""
    batches = loops.together([task.batches(name, 0) for name in loops.learner_names(LEARNERS)])
    trained, state = start.params, task.optimizer.init(start.params)
    mean: Params = loops.copy(trained)

    @jax.jit
    def fading(kept: Params, new: Params) -> Params:
        return jax.tree.map(lambda a, b: MEAN_DECAY * a + (1 - MEAN_DECAY) * b, kept, new)

    for step in range(steps):
        trained, state, _ = start.inner_step(trained, state, next(batches), np.int32(step))
        mean = fading(mean, trained)
    return held_out_loss(task, mean)


def main() -> None:
    """Run what is not yet there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--seeds", default="0,1,2", help="joined by commas")
    parser.add_argument("--named", default="", help="a part of the names of the ideas to run")
    options = parser.parse_args()
    there = sweep.known(options.results)
    for seed in map(int, options.seeds.split(",")):
        tries: dict[str, Callable[[], dict[str, Any]]] = {
            name: partial(run, case, world) for name, (case, world) in ideas(seed).items()
        }
        tries |= {name: partial(_as_result, loss) for name, loss in baselines(seed).items()}
        for name, attempt in tries.items():
            key = f"language/ideas/{name}/{LONG}/{seed}"
            if options.named not in name or key in there:
                continue
            began_s = time.perf_counter()
            line = {"key": key, "name": name, "seed": seed, **attempt()}
            line["took_s"] = round(time.perf_counter() - began_s, 1)
            with options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{line['took_s']:6.1f} s  {line['loss']:.4f}  {key}", flush=True)


if __name__ == "__main__":
    main()
