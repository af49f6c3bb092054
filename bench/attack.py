"""Liars among learners: what their attacks do to a run, in virtual time.

    .venv/bin/python -m bench.attack [--seeds 3] [--budget 400] [--only NAME] [--merges A,B]

The machine, the merge and the learner's core are those of the daemons (`bench/emulate.py`); the
task is the student of `bench/student.py`. Each row is compared with the same run of the honest
alone: the held-out loss, and versions for each second. Liars train as the others do, and forge what
they announce.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from bench import student
from bench.emulate import Life, Outcome, Start, Weather, World, begin
from diloco.common import wire
from diloco.common.codec import Encoded
from diloco.common.config import RunSettings, make_config

Parts = tuple[Encoded, ...]
# What liars claim at most.
GREATEST = {"steps": 60_000, "tokens": 60_000 << 32}


class Attack(NamedTuple):
    """What liars make of their updates.

    Attributes:
        claims: of the manifest, other than they are.
        forge: the codes and scales that one stores; None: those of an honest learner's newest.
        joins_s: when they join.
        liars: how many there are; `honest` the others.
    """

    name: str
    claims: Callable[[wire.Manifest], dict[str, object]] = lambda _: {}
    forge: Callable[[Encoded], Encoded] | None = lambda honest: honest
    joins_s: float = 0.0
    liars: int = 1
    honest: int = 3


def _scaled(factor: float, sign: int = 1) -> Callable[[Encoded], Encoded]:
    def forge(honest: Encoded) -> Encoded:
        scales = (honest.scales.astype(np.float32) * factor).astype(honest.scales.dtype)
        return Encoded(scales, sign * honest.codes)

    return forge


def _noise(honest: Encoded) -> Encoded:
    """The same noise in each update of a size."""
    rng = np.random.default_rng(honest.codes.size)
    codes = rng.integers(-127, 128, honest.codes.shape, dtype=np.int8)
    return Encoded(_scaled(10.0)(honest).scales, codes)


def _drift(honest: Encoded) -> Encoded:
    """Signs that are always the same, ten times as long as an honest update."""
    rng = np.random.default_rng(honest.codes.size)
    codes = np.where(rng.random(honest.codes.shape) < 0.5, -127, 127).astype(np.int8)
    return Encoded(_scaled(5.0)(honest).scales, codes)


def _one_tensor(honest: Encoded) -> Encoded:
    """All of its length in its last tenth."""
    codes = honest.codes.copy()
    codes[: codes.size * 9 // 10] = 0
    return Encoded(_scaled(30.0, sign=-1)(honest).scales, codes)


def _dragging(sent: wire.Manifest) -> dict[str, object]:
    """A little more with each update: slower steps, more tokens."""
    more = 1.05**sent.seq
    return {"step_time_s": sent.step_time_s * more, "tokens": int(sent.tokens * more)}


def _tenfold(sent: wire.Manifest) -> dict[str, object]:
    return {"steps": 10 * sent.steps, "tokens": 10 * sent.tokens}


def _greatest(_: wire.Manifest) -> dict[str, object]:
    return dict(GREATEST)


_long = _scaled(9.9, sign=-1)

ATTACKS = (
    Attack("none: an honest fourth"),
    Attack("60,000 steps of 2^32 tokens", _greatest),
    Attack("the same, joins late", _greatest, joins_s=200.0),
    Attack("2^32 tokens a step", lambda sent: {"tokens": sent.steps << 32}),
    Attack("ten times its steps and tokens", _tenfold),
    Attack("tiny step time", lambda _: {"step_time_s": 1e-9}),
    Attack("huge step time", lambda _: {"step_time_s": 1e12}),
    Attack("drags the medians, 5 % with each update", _dragging),
    Attack("one step and one token", lambda _: {"steps": 1, "tokens": 1}),
    Attack("tiny updates", lambda _: {"step_time_s": 1e-9}, _scaled(2.0**-40)),
    Attack("zeros with the greatest claims", _greatest, _scaled(1.0, sign=0)),
    Attack("copies of an honest learner's updates", forge=None),
    Attack("copies with the greatest claims", _greatest, forge=None),
    Attack("true claims, the direction turned", forge=_scaled(1.0, sign=-1)),
    Attack("true claims, turned and ten times as long", forge=_long),
    Attack("true claims, turned and long in one tensor", forge=_one_tensor),
    Attack("true claims, a drift ten times as long", forge=_drift),
    Attack("greatest claims and long noise, joins late", _greatest, _noise, joins_s=200.0),
    Attack("two of eight: turned and ten times as long", forge=_long, liars=2, honest=6),
    Attack("three of eight: turned and ten times as long", forge=_long, liars=3, honest=5),
    Attack("three of eight: a drift ten times as long", forge=_drift, liars=3, honest=5),
    Attack("three of eight: the greatest claims", _greatest, liars=3, honest=5),
)  # fmt: skip


class Attacked(World):
    """A world in which the last learners forge."""

    attack = ATTACKS[0]

    def __init__(self, run: RunSettings, start: Start, weather: Weather, attack: Attack) -> None:
        self.attack = attack
        self._liars = {f"learner-{attack.honest + index}" for index in range(attack.liars)}
        self._seen: dict[int, Parts] = {}
        super().__init__(run, start, weather)

    def forge(self, manifest: wire.Manifest, parts: Parts) -> tuple[wire.Manifest, Parts]:
        """A liar's; everybody else's as they are."""
        if manifest.learner not in self._liars:
            self._seen[manifest.fragment] = parts
            return manifest, parts
        forge = self.attack.forge
        if forge is None:
            forged = self._seen.get(manifest.fragment, parts)
        else:
            forged = tuple(forge(Encoded(*map(np.asarray, part))) for part in parts)
        return manifest.model_copy(update=self.attack.claims(manifest)), forged


def settings(seed: int, steps: int, merge: str) -> RunSettings:
    """Of a run of the student; `merge` may name a radius: centered_clipping:0.5."""
    rule, _, radius = merge.partition(":")
    document: dict[str, dict[str, object]] = {
        "run": {"name": "attack", "steps": steps, "seed": seed},
        "store": {"url": "unused"},
        "sync": {"codec": "int8", "fragments": 4, "block": 16, "shard_elements": 1 << 20},
        "quorum": {"min_learners": 2},
        "outer": {"merge": rule, **({"clip_radius": float(radius)} if radius else {})},
    }
    return make_config(document, source="bench/attack.py").settings()


@functools.cache
def _start(seed: int, steps: int, merge: str) -> Start:
    """Compiled once."""
    return begin(settings(seed, steps, merge), student.build(steps=steps, seed=seed))


def play(seed: int, steps: int, merge: str, attack: Attack) -> Outcome:
    """One run; without liars, of the honest alone."""
    run, start = settings(seed, steps, merge), _start(seed, steps, merge)
    weather = Weather((1.0,) * (attack.honest + attack.liars))
    if attack.joins_s:
        lives = ((Life(),),) * attack.honest + ((Life(attack.joins_s),),) * attack.liars
        weather = weather._replace(lives=lives)
    outcome = Attacked(run, start, weather, attack).run()
    assert outcome is not None
    return outcome


@functools.cache
def _alone(seed: int, steps: int, merge: str, honest: int) -> Outcome:
    return play(seed, steps, merge, Attack("nobody", liars=0, honest=honest))


def rows(seeds: int, steps: int, only: str, merges: Sequence[str]) -> Iterator[str]:
    """The table, line by line."""
    heads = [f"{merge}: held-out loss, % | versions a second, %" for merge in merges]
    yield f"| the liar beside three | {' | '.join(heads)} |"
    yield f"|{' --- |' * (1 + 2 * len(merges))}"
    first = [_alone(seed, steps, merges[0], 3).loss for seed in range(seeds)]
    cells = []
    for merge in merges:
        losses = [_alone(seed, steps, merge, 3).loss for seed in range(seeds)]
        cells.append(_percent([a / b - 1 for a, b in zip(losses, first, strict=True)]) + " | ")
    yield f"| nobody, against the first merge | {' | '.join(cells)} |"
    for attack in ATTACKS:
        if only in attack.name:
            cells = [_effect(attack, seeds, steps, merge) for merge in merges]
            yield f"| {attack.name} | {' | '.join(cells)} |"


def _effect(attack: Attack, seeds: int, steps: int, merge: str) -> str:
    """Held-out loss and versions a second, over those of the honest alone under the same merge."""
    found = [play(seed, steps, merge, attack) for seed in range(seeds)]
    alone = [_alone(seed, steps, merge, attack.honest) for seed in range(seeds)]
    losses = [f.loss / a.loss - 1 for f, a in zip(found, alone, strict=True)]
    rates = [
        (f.versions / f.took_s) / (a.versions / a.took_s) - 1
        for f, a in zip(found, alone, strict=True)
    ]
    return f"{_percent(losses)} | {_percent(rates)}"


def _percent(values: list[float]) -> str:
    error = f" ± {100 * stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):+.2f}{error}"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="bench.attack", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=400, help="length of each run, in steps")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument(
        "--merges", default="rda,centered_clipping", help="of outer.merge; one may have a radius"
    )
    arguments = parser.parse_args()
    merges = arguments.merges.split(",")
    for line in rows(arguments.seeds, arguments.budget, arguments.only, merges):
        print(line, flush=True)


if __name__ == "__main__":
    main()
