"""Honest fleets with arrays and objects, in virtual time: status and why accuse nobody of them.

python tests/unit/test_honest_fleets.py [FLEETS]          so many of each kind; who is accused
python tests/unit/test_honest_fleets.py [FLEETS] half     half of one's labels are wrong; is it named?
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "scenarios")]
sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "drill")]

import drill_task
from watchedfleet import WatchedFleet, fleet_settings

import examples.digits
from bench.emulate import ALWAYS, LifeSpan, Weather
from bench.tasks import student
from diloco.common.protocol import wire
from diloco.common.protocol.codecs import Encoded, decode_numpy
from diloco.learner.task import Task
from diloco.learner.tensors.quantize_and_pack import encode

STEPS, LONG = 240, 1500
TASKS: dict[str, Any] = {
    "digits": examples.digits.build,
    "student": student,
    "words": lambda **which: drill_task.build(sleep_s=0, **which),
}


class Kind(NamedTuple):
    """A fleet: its speeds, whether rounds are paced, how long its lives last, and its steps."""

    speeds: tuple[float, ...] = (1.0,) * 4
    pace: float = 0.9
    lives_s: float = 0.0
    steps: int = STEPS


KINDS = {
    "equal": Kind(),
    "unequal": Kind((1.0, 0.5, 0.25, 1.0, 1.0)),
    "unpaced": Kind(pace=0.0),
    "killed": Kind((1.0,) * 5, lives_s=400.0),
    # Its data are learnt by heart: losses are small, and what is held out gets no better.
    "long": Kind((1.0, 0.5, 0.25, 1.0, 1.0), steps=LONG),
}


def lives(kind: Kind, rng: np.random.Generator) -> tuple[tuple[LifeSpan, ...], ...]:
    if not kind.lives_s:
        return (ALWAYS,) * len(kind.speeds)

    def of_one() -> Iterator[LifeSpan]:
        at_s = 0.0
        while at_s < 100 * kind.steps:
            ends_s = at_s + 10 + float(rng.exponential(kind.lives_s))
            yield LifeSpan(at_s, ends_s)
            at_s = ends_s + float(rng.uniform(1, 60))

    return tuple(tuple(of_one()) for _ in kind.speeds)


def fleet(
    task: str,
    kind: str,
    fragments: int,
    seed: int,
    of: type[WatchedFleet] = WatchedFleet,
    **sync: Any,
) -> WatchedFleet:
    how = KINDS[kind]
    cuts = {"fragments": fragments, "interval_steps": 12, "codec": "int8", **sync}
    run = fleet_settings(seed, how.steps, cuts, quorum={"pace": how.pace})
    built: Task = TASKS[task](steps=how.steps, seed=seed)
    rng = np.random.default_rng([seed, len(kind)])
    weather = Weather(how.speeds, jitter=0.3, lives=lives(how, rng))
    return of(run, built, weather, busy=seed % 4 > 0)


def accusations(one: WatchedFleet, looks: int = 4) -> list[str]:
    """Returns the findings during the run, at so many times, and at its end."""
    said: list[str] = []
    looked = 0

    def pause() -> bool:
        done = max(owner.state.global_step for owner in one.owners)
        steps = one.settings.run.steps
        return looked + 1 < looks and done * looks >= (looked + 1) * steps

    ended = None
    while ended is None:
        ended = one.run(pause)
        looked += 1
        said += [f"{looked}/{looks} {found.about}: {found.sentence}" for found in one.accused()]
    return said


def of_learners(said: list[str]) -> list[str]:
    return [one for one in said if " learner " in one]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_honest_is_accused(kind: str, seed: int) -> None:
    task, fragments = [*TASKS][seed % 3], (2, 12)[seed // 3]
    assert of_learners(accusations(fleet(task, kind, fragments, seed))) == []


class BadMemory(WatchedFleet):
    """A bit turns over in one of three updates of a learner, which takes a weight to zero."""

    def forge(
        self, manifest: wire.Manifest, parts: tuple[Encoded, ...]
    ) -> tuple[wire.Manifest, tuple[Encoded, ...]]:
        if manifest.learner == "learner-2" and manifest.seq % 3 == 0:
            block, view = self.settings.sync.block, self.owners[manifest.fragment].arrays.view
            values = decode_numpy(manifest.codec, parts[0], block)
            place = manifest.seq * 7919 % values.size
            place += int(np.argmax(np.abs(view[place : place + 16])))
            values[place] -= view[place]
            rows = encode(manifest.codec, jnp.asarray(values), block)
            parts = (
                Encoded(np.asarray(rows.scales), np.asarray(rows.codes).reshape(-1)),
                *parts[1:],
            )
        return super().forge(manifest, parts)


@pytest.mark.long
def test_bits_that_turn_over_in_memory_are_told_from_what_is_honest() -> None:
    said = of_learners(accusations(fleet("words", "equal", 2, 4, of=BadMemory, interval_steps=8)))
    assert said
    assert all("learner-2: single elements" in one for one in said if "memory" in one)
    assert any("its memory has errors" in one for one in said)


def half_wrong(build: Any) -> Any:
    """Builds the same task, in which half of the labels of learner-2 are others'."""

    def mixed(labels: Any, rng: np.random.Generator) -> Any:
        given = np.asarray(labels)
        wrong = rng.random(
            given.shape if given.ndim < 2 or given.dtype.kind == "i" else (len(given), 1)
        )
        turned = (
            -given
            if given.dtype.kind == "f"
            else rng.permutation(given.reshape(-1)).reshape(given.shape)
        )
        return np.where(wrong < 0.5, turned, given)

    def planted(**which: Any) -> Task:
        task = build(**which)

        def batches(learner: str, position: int) -> Iterator[Any]:
            for at, batch in enumerate(task.batches(learner, position)):
                rng = np.random.default_rng([7, position + at])
                if learner != "learner-2":
                    yield batch
                elif isinstance(batch, dict):
                    yield batch | {"y": mixed(batch["y"], rng)}
                else:
                    yield (batch[0], mixed(batch[1], rng), *batch[2:])

        return dataclasses.replace(task, batches=batches)

    return planted


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    if half := "half" in sys.argv:
        TASKS.update({name: half_wrong(build) for name, build in TASKS.items()})
    accused = runs = 0
    for kind in KINDS:
        for seed in range(count):
            task = [*TASKS][seed % len(TASKS)]
            fragments = (2, 12)[seed // len(TASKS) % 2]
            said = of_learners(accusations(fleet(task, kind, fragments, seed)))
            said = [one for one in said if not half or "learner-2" in one]
            runs, accused = runs + 1, accused + bool(said)
            print(kind, task, fragments, seed, *said, sep="\n  " if said else " ", flush=True)
    print(f"in {accused} of {runs} runs somebody is accused" + " who is wrong" * half)


if __name__ == "__main__":
    main()
