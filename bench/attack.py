"""One liar of four: what its attacks do to a run, in virtual time.

    .venv/bin/python -m bench.attack [--seeds 3] [--budget 400] [--only NAME]

The machine, the merge and the learner's core are those of the daemons (`bench/emulate.py`); the
task is the student of `bench/student.py`. Each row is compared with the same run of the honest
three alone: the held-out loss, and versions for each second. The liar, the last of four, trains as
the others do, and forges what it announces.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from bench import student
from bench.emulate import Life, Outcome, Start, Weather, World, begin
from diloco.common import wire
from diloco.common.codec import Encoded
from diloco.common.config import RunSettings, make_config

LIAR = "learner-3"
Parts = tuple[Encoded, ...]


class Attack(NamedTuple):
    """What a liar makes of its updates.

    Attributes:
        claims: of the manifest, other than they are.
        forge: the codes and scales that it stores.
        joins_s: when it joins.
    """

    name: str
    claims: Callable[[wire.Manifest], dict[str, object]] = lambda _: {}
    forge: Callable[[Encoded], Encoded] = lambda honest: honest
    joins_s: float = 0.0


def _scaled(factor: float, sign: int = 1) -> Callable[[Encoded], Encoded]:
    def forge(honest: Encoded) -> Encoded:
        scales = (honest.scales.astype(np.float32) * factor).astype(honest.scales.dtype)
        return Encoded(scales, sign * honest.codes)

    return forge


def _noise(honest: Encoded) -> Encoded:
    rng = np.random.default_rng(honest.codes.size)
    codes = rng.integers(-127, 128, honest.codes.shape, dtype=np.int8)
    return Encoded(_scaled(10.0)(honest).scales, codes)


def _greatest(_: wire.Manifest) -> dict[str, object]:
    return {"steps": 60_000, "tokens": 60_000 << 32}


ATTACKS = (
    Attack("none: an honest fourth"),
    Attack("60,000 steps of 2^32 tokens", _greatest),
    Attack("the same, joins late", _greatest, joins_s=200.0),
    Attack("2^32 tokens a step", lambda sent: {"tokens": sent.steps << 32}),
    Attack("tiny step time", lambda _: {"step_time_s": 1e-9}),
    Attack("huge step time", lambda _: {"step_time_s": 1e12}),
    Attack("one step and one token", lambda _: {"steps": 1, "tokens": 1}),
    Attack("tiny updates", lambda _: {"step_time_s": 1e-9}, _scaled(2.0**-40)),
    Attack("zeros with these claims", _greatest, _scaled(1.0, sign=0)),
    Attack("true claims, the direction turned", forge=_scaled(1.0, sign=-1)),
    Attack("true claims, turned and ten times as long", forge=_scaled(9.9, sign=-1)),
    Attack("these claims, noise ten times as long, joins late", _greatest, _noise, joins_s=200.0),
)


class Attacked(World):
    """A world in which the last learner forges."""

    attack = ATTACKS[0]

    def forge(self, manifest: wire.Manifest, parts: Parts) -> tuple[wire.Manifest, Parts]:
        """The liar's; everybody else's as they are."""
        if manifest.learner != LIAR:
            return manifest, parts
        claims = self.attack.claims(manifest)
        forged = tuple(self.attack.forge(Encoded(*map(np.asarray, part))) for part in parts)
        return manifest.model_copy(update=claims), forged


def settings(seed: int, steps: int) -> RunSettings:
    """Of a run of the student."""
    document = {
        "run": {"name": "attack", "steps": steps, "seed": seed},
        "store": {"url": "unused"},
        "sync": {"codec": "int8", "fragments": 4, "block": 16, "shard_elements": 1 << 20},
        "quorum": {"min_learners": 2},
    }
    return make_config(document, source="bench/attack.py").settings()


@functools.cache
def _start(seed: int, steps: int) -> Start:
    """Compiled once."""
    return begin(settings(seed, steps), student.build(steps=steps, seed=seed))


def play(seed: int, steps: int, attack: Attack | None) -> Outcome:
    """One run: of the honest three, or with a liar beside them."""
    run, start = settings(seed, steps), _start(seed, steps)
    weather = Weather((1.0,) * (3 if attack is None else 4))
    if attack is not None and attack.joins_s:
        weather = weather._replace(lives=((Life(),),) * 3 + ((Life(attack.joins_s),),))
    world = Attacked(run, start, weather)
    if attack is not None:
        world.attack = attack
    outcome = world.run()
    assert outcome is not None
    return outcome


def rows(seeds: int, steps: int, only: str) -> Iterator[str]:
    """The table, line by line."""
    alone = [play(seed, steps, None) for seed in range(seeds)]
    yield "| the fourth learner | held-out loss, % over the honest three's | versions a second, % |"
    yield "| --- | --- | --- |"
    for attack in ATTACKS:
        if only not in attack.name:
            continue
        found = [play(seed, steps, attack) for seed in range(seeds)]
        losses = [f.loss / a.loss - 1 for f, a in zip(found, alone, strict=True)]
        rates = [
            (f.versions / f.took_s) / (a.versions / a.took_s) - 1
            for f, a in zip(found, alone, strict=True)
        ]
        yield f"| {attack.name} | {_percent(losses)} | {_percent(rates)} |"


def _percent(values: list[float]) -> str:
    error = f" ± {100 * stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):+.2f}{error}"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="bench.attack", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=400, help="length of each run, in steps")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    arguments = parser.parse_args()
    for line in rows(arguments.seeds, arguments.budget, arguments.only):
        print(line, flush=True)


if __name__ == "__main__":
    main()
