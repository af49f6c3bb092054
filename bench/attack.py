"""A search for the worst that liars among learners can do to a run, in virtual time.

    .venv/bin/python -m bench.attack [--seeds 3] [--budget 300] [--draws 10] [--trust A,B]
    .venv/bin/python -m bench.attack --lie "pace=3 direction=drift length=10" [--fleets 3+2]
    .venv/bin/python -m bench.attack --minority [--fleets 3,8]
    .venv/bin/python -m bench.attack --backdoor [--fleets 4]

The machine, the merge and the learner's core are those of the daemons (`bench/emulate.py`); the
task is the student of `bench/tasks.py`. Liars train as the others do, at a pace of their own, and
forge what they announce: a `Lie` says how. Half of the draws are random, the other half vary the
best so far, which is at first the worst that was known. What was found is played again with other
seeds and printed beside "nobody": the same run of the honest alone. `--lie` plays one lie. With
`--minority` nobody lies, and the last learner alone has a slice of the data: what the merge of
others' learners costs that slice. With `--backdoor` one output of 16 is taught to the last learner
with its sign turned: what that does to all the data, and to the slice that this output is.
"""

import argparse
import functools
import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from bench.emulate import LifeSpan, RunOutcome, Start, Weather, World, begin
from bench.tasks import TURNED, student
from diloco.common.process.config import RunSettings, make_config
from diloco.common.protocol import wire
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.wire import WHOLE
from diloco.learner.task import scores

Parts = tuple[Encoded, ...]
Direction = Literal["own", "turned", "drift", "noise", "zero", "tensor", "copy"]
GREATEST: Final = {"steps": 60_000, "tokens": 60_000 << 32}


class Lie(NamedTuple):
    """The powers of a liar, and how it uses them.

    Attributes:
        pace: its speed in shares of an honest learner's.
        life_s: each of its lives ends after so long, and another begins; 0: it has one.
        delay_s: it announces each update so much later, to be near a round's end.
        honest: the share of its updates that it leaves as they are.
        direction: of the others: its own work's; that turned; signs that are always the same;
            noise; nothing; its own turned, in the last tenth alone; an honest learner's newest.
        length: of those, in lengths of its own work.
        steps: what it claims, in shares of the truth; `tokens`, `step_time` likewise.
        joins_s: when it joins.
    """

    pace: float = 1.0
    life_s: float = 0.0
    delay_s: float = 0.0
    honest: float = 0.0
    direction: Direction = "own"
    length: float = 1.0
    steps: float = 1.0
    tokens: float = 1.0
    step_time: float = 1.0
    joins_s: float = 0.0

    def claims(self, sent: wire.Manifest) -> wire.Manifest:
        """A manifest with what the liar claims."""
        steps = _within(self.steps * sent.steps, GREATEST["steps"])
        tokens = _within(self.tokens * sent.tokens * steps / sent.steps, steps << 32)
        step_time_s = min(1e12, self.step_time * sent.step_time_s)
        claims = {"steps": steps, "tokens": tokens, "step_time_s": step_time_s}
        return sent.model_copy(update=claims)

    def forge(self, own: Encoded, honest: Encoded) -> Encoded:
        """The codes and scales that the liar stores, given its own work and an honest learner's."""
        codes, length = own.codes, self.length
        match self.direction:
            case "copy":
                own, codes = honest, honest.codes
            case "turned":
                codes = -codes
            case "zero":
                codes = np.zeros_like(codes)
            case "tensor":
                first = np.arange(codes.size).reshape(codes.shape) < 0.9 * codes.size
                codes = np.where(first, 0, -codes)
                length *= 10**0.5
            case "drift" | "noise":
                length *= float(np.sqrt(np.mean(np.square(codes, dtype=np.float64)))) / 127
                seed = [codes.size] if self.direction == "drift" else list(codes.tobytes()[:64])
                codes = np.where(np.random.default_rng(seed).random(codes.shape) < 0.5, -127, 127)
        scales = (own.scales.astype(np.float32) * length).astype(own.scales.dtype)
        return Encoded(scales, codes.astype(np.int8))


def _within(claim: float, most: int) -> int:
    return max(1, int(min(most, claim)))


class Attacked(World):
    """A world in which the last learners lie."""

    def __init__(
        self, run: RunSettings, start: Start, weather: Weather, lie: Lie, liars: int
    ) -> None:
        self.lie = lie
        everybody = len(weather.speeds)
        self._liars = {f"learner-{index}" for index in range(everybody - liars, everybody)}
        self._seen: dict[int, Parts] = {}
        self._whim = np.random.default_rng(run.run.seed)
        super().__init__(run, start, weather)

    def forge(self, manifest: wire.Manifest, parts: Parts) -> tuple[wire.Manifest, Parts]:
        """A liar's; everybody else's as they are."""
        if manifest.learner not in self._liars:
            self._seen[manifest.fragment] = parts
            return manifest, parts
        if self._whim.random() < self.lie.honest:
            return manifest, parts
        own = tuple(Encoded(*map(np.asarray, part)) for part in parts)
        seen = self._seen.get(manifest.fragment, own)
        forged = tuple(self.lie.forge(*pair) for pair in zip(own, seen, strict=True))
        return self.lie.claims(manifest), forged

    def travels_s(self, name: str) -> float:
        """A liar's announcements may be late."""
        return super().travels_s(name) + (self.lie.delay_s if name in self._liars else 0.0)


def settings(seed: int, steps: int, trust: str) -> RunSettings:
    """Settings of a run of the student; `trust` may name a radius and a rate: others:0.8:1.8."""
    whose, *numbers = trust.split(":")
    outer = dict(zip(("clip_radius", "learning_rate"), map(float, numbers), strict=False))
    document: dict[str, dict[str, Any]] = {
        "run": {"name": "attack", "steps": steps, "seed": seed, "trust": whose},
        "store": {"url": "unused"},
        "sync": {"codec": "int8", "fragments": 4, "block": 16, "shard_elements": 1 << 20},
        "outer": outer,
    }
    return make_config(document, source="bench/attack.py").settings()


@functools.cache
def _start(seed: int, steps: int, trust: str) -> Start:
    """Compiled once."""
    return begin(settings(seed, steps, trust), student(steps=steps, seed=seed))


class Fleet(NamedTuple):
    """The learners of a run: honest ones, at equal speeds, and liars."""

    honest: int = 3
    liars: int = 1


def play(seed: int, steps: int, trust: str, fleet: Fleet, lie: Lie) -> RunOutcome:
    """One run; without liars, of the honest alone."""
    run, start = settings(seed, steps, trust), _start(seed, steps, trust)
    weather = Weather((1.0,) * fleet.honest + (lie.pace,) * fleet.liars)
    lives = ((LifeSpan(),),) * fleet.honest + (_lives(lie, steps),) * fleet.liars
    outcome = Attacked(run, start, weather._replace(lives=lives), lie, fleet.liars).run()
    assert outcome is not None
    return outcome


def _lives(lie: Lie, steps: int) -> tuple[LifeSpan, ...]:
    if not lie.life_s:
        return (LifeSpan(lie.joins_s),)
    begins = np.arange(lie.joins_s, 2.0 * steps, lie.life_s)
    return tuple(LifeSpan(at_s, at_s + 0.9 * lie.life_s) for at_s in begins.tolist())


@functools.cache
def _alone(seed: int, steps: int, trust: str, honest: int) -> RunOutcome:
    return play(seed, steps, trust, Fleet(honest, 0), Lie())


# --- The search

# Every search begins with these, the worst of earlier ones.
KNOWN: Final = (
    Lie(direction="drift", length=10.0),
    Lie(direction="drift", length=10.0, pace=3.0),
    # As long as it may be and count in full, where learners may lie.
    Lie(direction="drift", length=1.5),
)
GOALS: Final = {
    "loss": lambda effect: effect.loss,
    "rate": lambda effect: -effect.rate,
    "work": lambda effect: -effect.work,
}


class Effect(NamedTuple):
    """A run with liars beside the same of the honest alone; each a ratio less one.

    Attributes:
        loss: held-out loss.
        rate: versions a second.
        work: steps of the honest that were credited and merged, a second.
    """

    loss: float
    rate: float
    work: float


def effect(seed: int, steps: int, trust: str, fleet: Fleet, lie: Lie) -> Effect:
    """Harm of a lie to one run."""
    found = play(seed, steps, trust, fleet, lie)
    alone = _alone(seed, steps, trust, fleet.honest)
    rates, works = [], []
    for run in (found, alone):
        rates.append(run.versions / run.took_s)
        works.append(sum(run.credited[f"learner-{n}"] for n in range(fleet.honest)) / run.took_s)
    # A model that is ruined has no finite loss.
    loss = found.loss if math.isfinite(found.loss) else 1e6
    return Effect(loss / alone.loss - 1, rates[0] / rates[1] - 1, works[0] / works[1] - 1)


def drawn(rng: np.random.Generator) -> Lie:
    """A lie at random; half of its powers are not used."""

    def some(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high)))) if rng.random() < 0.5 else 1.0

    def rarely(high: float) -> float:
        return float(rng.uniform(0.02, 1) * high) if rng.random() < 0.3 else 0.0

    return Lie(
        pace=some(0.1, 10),
        life_s=rarely(100.0),
        delay_s=rarely(30.0),
        honest=rarely(0.9),
        direction=get_args(Direction)[rng.integers(len(get_args(Direction)))],
        length=some(0.01, 100),
        steps=some(0.01, 1000),
        tokens=some(0.01, 1000),
        step_time=some(1e-3, 1e3),
        joins_s=rarely(150.0),
    )


def varied(lie: Lie, rng: np.random.Generator) -> Lie:
    """A lie with two of its powers drawn again, and one a little more or less of what it was."""
    other = drawn(rng)._asdict()
    again = rng.choice(len(lie), 2, replace=False)
    fields = lie._asdict() | {lie._fields[at]: other[lie._fields[at]] for at in again}
    name = rng.choice([name for name in fields if name not in ("direction", "honest")])
    fields[name] *= float(rng.uniform(0.6, 1.6))
    return Lie(**fields | {"pace": min(10.0, max(0.1, fields["pace"]))})


def search(
    draws: int, steps: int, trust: str, fleet: Fleet, goal: str, seed: int
) -> tuple[Lie, float]:
    """The lie that reaches most of a goal, and how much, by one run of a seed for each draw."""
    rng = np.random.default_rng([seed, fleet.liars])
    best, most = Lie(), -math.inf
    for draw in range(-len(KNOWN), draws):
        lie = KNOWN[draw] if draw < 0 else drawn(rng)
        if draw >= draws // 2:
            lie = varied(best, rng)
        lie = lie_of(said(lie))
        reached = GOALS[goal](effect(seed, steps, trust, fleet, lie))
        if reached > most:
            best, most = lie, reached
    return best, most


def said(lie: Lie) -> str:
    """A lie in words, to three digits, as `--lie` takes them; none says what is left as it is."""
    words = []
    for name, value in lie._asdict().items():
        if value != Lie._field_defaults[name]:
            words.append(f"{name}={value if isinstance(value, str) else f'{value:.3g}'}")
    return " ".join(words)


def lie_of(words: str) -> Lie:
    """The lie that words say."""
    fields: dict[str, Any] = dict(word.split("=", 1) for word in words.split())
    for name in fields.keys() - {"direction"}:
        fields[name] = float(fields[name])
    return Lie(**fields)


def row(lie: Lie, fleet: Fleet, seeds: Sequence[int], steps: int, trust: str) -> str:
    """A line of the table: what a lie does, in %, by mean and standard error of the seeds."""
    found = [effect(seed, steps, trust, fleet, lie) for seed in seeds]
    cells = [_percent([getattr(one, name) for one in found]) for name in Effect._fields]
    words = said(lie) or "an honest one more"
    who = f"{fleet.liars} of {sum(fleet)}"
    return f"| {trust} | {who} | {words} | {' | '.join(cells)} |"


def nobody(honest: int, seeds: Sequence[int], steps: int, trust: str) -> str:
    """The line of the honest alone, against those of a run whose learners are its own."""
    pairs = [[_alone(seed, steps, rule, honest).loss for rule in (trust, "own")] for seed in seeds]
    loss = _percent([a / b - 1 for a, b in pairs])
    return f"| {trust} | 0 of {honest} | nobody | {loss} | 0 | 0 |"


def minority(learners: int, seeds: Sequence[int], steps: int, trust: str) -> str:
    """The line of a fleet whose last learner alone has a slice of the data.

    Losses of all data and of that slice, over those of a run whose learners are its own.
    """
    who = {"minority": learners - 1}
    found = [[_by_slice(seed, steps, rule, learners, **who) for rule in (trust, "own")]
             for seed in seeds]  # fmt: skip
    return _line(trust, learners, found, "rare")


def backdoor(learners: int, seeds: Sequence[int], steps: int, trust: str) -> str:
    """The line of a fleet whose last learner is taught one output wrongly.

    Losses of all data and of that output, over those of the fleet without that.
    """
    either: tuple[dict[str, int], ...] = ({"backdoor": learners - 1}, {})
    found = [[_by_slice(seed, steps, trust, learners, **who) for who in either] for seed in seeds]
    return _line(trust, learners, found, f"output-{TURNED}")


def _line(trust: str, learners: int, found: list[list[dict[str, float]]], part: str) -> str:
    cells = [_percent([a[name] / b[name] - 1 for a, b in found]) for name in (WHOLE, part)]
    return f"| {trust} | {learners} | {' | '.join(cells)} |"


@functools.cache
def _by_slice(
    seed: int, steps: int, trust: str, learners: int, *, minority: int = -1, backdoor: int = -1
) -> dict[str, float]:
    task = student(steps=steps, seed=seed, minority=minority, backdoor=backdoor)
    run = settings(seed, steps, trust)
    world = World(run, begin(run, task), Weather((1.0,) * learners))
    assert world.run() is not None
    return scores(task.evaluate(world.view())).losses()


def _percent(values: list[float]) -> str:
    error = f" ± {100 * stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):+.2f}{error}"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="bench.attack", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="what was found is played with")
    parser.add_argument("--budget", type=int, default=300, help="length of each run, in steps")
    parser.add_argument("--draws", type=int, default=10, help="of each search")
    parser.add_argument("--goals", default="loss,work", help=f"of {', '.join(GOALS)}")
    parser.add_argument("--lie", help="no search: this one, as the table says it")
    parser.add_argument("--minority", action="store_true", help="nobody lies; --fleets 2,3,8")
    parser.add_argument("--backdoor", action="store_true", help="one is taught wrongly; --fleets 4")
    parser.add_argument("--fleets", default="3+1,3+2", help="honest learners + liars")
    parser.add_argument(
        "--trust", default="own,others", help="of run.trust; with radius and rate: others:0.8:1.8"
    )
    options = parser.parse_args()
    # The search has seed 0; a lie that only fits its luck does not fit that of others.
    seeds, steps = range(1, options.seeds + 1), options.budget
    if options.minority or options.backdoor:
        play_slices = minority if options.minority else backdoor
        print(f"| trust | learners | held-out loss, % | of the slice, % |\n|{' --- |' * 4}")
        for trust in options.trust.split(","):
            for learners in map(int, options.fleets.split(",")):
                print(play_slices(learners, seeds, steps, trust), flush=True)
        return
    print("| trust | liars | lie | held-out loss, % | versions a second, % | honest work, % |")
    print(f"|{' --- |' * 6}")
    for trust in options.trust.split(","):
        for word in options.fleets.split(","):
            fleet = Fleet(*map(int, word.split("+")))
            print(nobody(fleet.honest, seeds, steps, trust), flush=True)
            lies = (
                [lie_of(options.lie)]
                if options.lie is not None
                else [
                    search(options.draws, steps, trust, fleet, goal, 0)[0]
                    for goal in options.goals.split(",")
                ]
            )
            for lie in lies:
                print(row(lie, fleet, seeds, steps, trust), flush=True)


if __name__ == "__main__":
    main()
