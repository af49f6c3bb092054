"""A search for the worst that liars among learners can do to a run, in virtual time.

    .venv/bin/python -m bench.attack [--seeds 3] [--budget 300] [--draws 10] [--merges A,B]
    .venv/bin/python -m bench.attack --lie "pace=3 direction=drift length=10" [--fleets 3+2]

The machine, the merge and the learner's core are those of the daemons (`bench/emulate.py`); the
task is the student of `bench/tasks.py`. Liars train as the others do, at a pace of their own, and
forge what they announce: a `Lie` says how. Half of the draws are random, the other half vary the
best so far, which is at first the worst that was known. What was found is played again with other
seeds and printed beside "nobody": the same run of the honest alone. `--lie` plays one lie.

Below them the liar of `bench/attack_live.py`: a process with learners' credentials, and no learner.
"""

import argparse
import asyncio
import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from bench.emulate import LifeSpan, RunOutcome, Start, Weather, World, begin
from bench.failover import filling
from bench.tasks import student
from diloco.common.process.config import RunSettings, load_config, make_config
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.quantization import Encoded
from diloco.common.storage.bus import Bus
from diloco.common.storage.store import DirectoryStore
from diloco.common.storage.tape import Entry, RunContext, read_item

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
    return max(1, min(most, int(claim)))


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


def settings(seed: int, steps: int, merge: str) -> RunSettings:
    """Settings of a run of the student; `merge` may name a radius: centered_clipping:0.5."""
    rule, _, radius = merge.partition(":")
    document: dict[str, dict[str, object]] = {
        "run": {"name": "attack", "steps": steps, "seed": seed},
        "store": {"url": "unused"},
        "sync": {"codec": "int8", "fragments": 4, "block": 16, "shard_elements": 1 << 20},
        "outer": {"merge": rule, **({"clip_radius": float(radius)} if radius else {})},
    }
    return make_config(document, source="bench/attack.py").settings()


@functools.cache
def _start(seed: int, steps: int, merge: str) -> Start:
    """Compiled once."""
    return begin(settings(seed, steps, merge), student(steps=steps, seed=seed))


class Fleet(NamedTuple):
    """Who trains: the honest, at equal speeds, and liars."""

    honest: int = 3
    liars: int = 1


def play(seed: int, steps: int, merge: str, fleet: Fleet, lie: Lie) -> RunOutcome:
    """One run; without liars, of the honest alone."""
    run, start = settings(seed, steps, merge), _start(seed, steps, merge)
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
def _alone(seed: int, steps: int, merge: str, honest: int) -> RunOutcome:
    return play(seed, steps, merge, Fleet(honest, 0), Lie())


# --- The search

# Every search begins with these, the worst of earlier ones.
KNOWN: Final = (
    Lie(direction="drift", length=10.0),
    Lie(direction="drift", length=10.0, pace=3.0),
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


def effect(seed: int, steps: int, merge: str, fleet: Fleet, lie: Lie) -> Effect:
    """Harm of a lie to one run."""
    found = play(seed, steps, merge, fleet, lie)
    alone = _alone(seed, steps, merge, fleet.honest)
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
    draws: int, steps: int, merge: str, fleet: Fleet, goal: str, seed: int
) -> tuple[Lie, float]:
    """The lie that reaches most of a goal, and how much, by one run of a seed for each draw."""
    rng = np.random.default_rng([seed, fleet.liars])
    best, most = Lie(), -math.inf
    for draw in range(-len(KNOWN), draws):
        lie = KNOWN[draw] if draw < 0 else drawn(rng)
        if draw >= draws // 2:
            lie = varied(best, rng)
        lie = lie_of(said(lie))
        reached = GOALS[goal](effect(seed, steps, merge, fleet, lie))
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


def row(lie: Lie, fleet: Fleet, seeds: Sequence[int], steps: int, merge: str) -> str:
    """A line of the table: what a lie does, in %, by mean and standard error of the seeds."""
    found = [effect(seed, steps, merge, fleet, lie) for seed in seeds]
    cells = [_percent([getattr(one, name) for one in found]) for name in Effect._fields]
    words = said(lie) or "an honest one more"
    who = f"{fleet.liars} of {sum(fleet)}"
    return f"| {merge} | {who} | {words} | {' | '.join(cells)} |"


def nobody(honest: int, seeds: Sequence[int], steps: int, merge: str) -> str:
    """The line of the honest alone, against those under radial-directional averaging."""
    pairs = [[_alone(seed, steps, rule, honest).loss for rule in (merge, "rda")] for seed in seeds]
    loss = _percent([a / b - 1 for a, b in pairs])
    return f"| {merge} | 0 of {honest} | nobody | {loss} | 0 | 0 |"


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
    parser.add_argument("--fleets", default="3+1,3+2", help="honest learners + liars")
    parser.add_argument(
        "--merges", default="rda,centered_clipping", help="of outer.merge; one may have a radius"
    )
    options = parser.parse_args()
    # The search has seed 0; a lie that only fits its luck does not fit that of others.
    seeds, steps = range(1, options.seeds + 1), options.budget
    print("| merge | liars | lie | held-out loss, % | versions a second, % | honest work, % |")
    print(f"|{' --- |' * 6}")
    for merge in options.merges.split(","):
        for word in options.fleets.split(","):
            fleet = Fleet(*map(int, word.split("+")))
            print(nobody(fleet.honest, seeds, steps, merge), flush=True)
            lies = (
                [lie_of(options.lie)]
                if options.lie is not None
                else [
                    search(options.draws, steps, merge, fleet, goal, 0)[0]
                    for goal in options.goals.split(",")
                ]
            )
            for lie in lies:
                print(row(lie, fleet, seeds, steps, merge), flush=True)


# --- The liar, a process

CODEC: Final = "int8"
RUN, HONEST = "live", ("a", "b", "c")
STEP_S = 0.06
# Updates of each honest learner that are merged before anybody lies.
FIRST = 30


@dataclasses.dataclass
class Liar:
    """A process with a learner's credentials, and no learner."""

    context: RunContext
    bus: Bus
    name: str
    config: Path
    incarnation: int = 0
    seqs: dict[int, int] = dataclasses.field(default_factory=dict)

    async def join(self) -> None:
        """Begin a life."""
        message = wire.Join(
            run=RUN, learner=self.name, layout=self.context.layout.digest, host="elsewhere"
        )
        self.incarnation = await self.bus.publish(names.join(RUN, self.name), wire.encode(message))

    async def wait(self) -> None:
        """Until every honest learner was merged."""
        merged = Counter[str]()
        async for record in self.records(1):
            merged.update(taken.learner for taken in record.inputs)
            if all(merged[name] >= FIRST for name in HONEST):
                return

    async def records(self, start: int = 0) -> AsyncIterator[wire.Record]:
        """The records from now on, or from a sequence."""
        start = start or await self.bus.last_sequence(self.context.tape) + 1
        async for message in self.bus.read(self.context.tape, [names.record(RUN, "*")], start):
            item = await read_item(self.context, message)
            if isinstance(item, Entry) and isinstance(item.body, wire.Record):
                yield item.body

    async def first(self) -> tuple[wire.Record, wire.Input]:
        """The next record that merges an honest learner's update, and that update."""
        async for record in self.records():
            taken = self.model(record)
            if taken is not None:
                return record, taken
        raise AssertionError("the tape has an end")

    def model(self, record: wire.Record) -> wire.Input | None:
        """An honest learner's update, to be forged after."""
        return next((taken for taken in record.inputs if taken.learner in HONEST), None)

    def read(self, taken: wire.Input) -> list[Encoded]:
        """Its parts."""
        return [
            shards.unpack(
                self.context.store.get(shard.name),
                codec=CODEC,
                count=slices.check(shard.slices, 1 << 40) * self.context.layout.block,
                block=self.context.layout.block,
            )
            for shard in taken.shards
        ]

    def manifest(self, record: wire.Record, taken: wire.Input) -> wire.Manifest:
        """An announcement as an honest learner would make it; its shards are not stored yet."""
        fragment = record.fragment
        seq = self.seqs[fragment] = self.seqs.get(fragment, 0) + 1
        prefix = names.shards_prefix(RUN, self.name, fragment, 0, self.incarnation, seq)
        entries = tuple(
            shard.model_copy(update={"name": f"{prefix}{index}"})
            for index, shard in enumerate(taken.shards)
        )
        return wire.Manifest(
            run=RUN, learner=self.name, epoch=0, incarnation=self.incarnation, seq=seq,
            fragment=fragment, base_version=record.version, base_digest=record.view_digest,
            layout=self.context.layout.digest, codec=CODEC, shards=entries,
            tokens=taken.tokens, steps=taken.steps, position=seq, local_step=seq, loss=1.0,
            step_time_s=STEP_S, encode_s=0.0, upload_s=0.0, attempt=0, final=False,
        )  # fmt: skip

    def store(self, manifest: wire.Manifest, parts: Sequence[Encoded]) -> wire.Manifest:
        """Store an update's parts; the manifest, with their checksums."""
        entries = []
        for shard, part in zip(manifest.shards, parts, strict=True):
            data = shards.pack(manifest.codec, part, self.context.layout.block)
            self.context.store.put(shard.name, data)
            entries.append(shard.model_copy(update={"crc32c": shards.crc32c(data)}))
        return manifest.model_copy(update={"shards": tuple(entries)})

    async def announce(self, manifest: wire.Manifest) -> None:
        """Publish it."""
        subject = names.update(RUN, self.name, manifest.fragment)
        await self.bus.publish(subject, wire.encode(manifest))


Act = Callable[[Liar], Awaitable[None]]


def forging(lie: Lie) -> Act:
    """Answers every version with an update that is forged after an honest one."""

    async def act(liar: Liar) -> None:
        async for record in liar.records():
            taken = liar.model(record)
            if taken is None:
                continue
            sent = liar.manifest(record, taken)
            parts = [Encoded(*map(np.asarray, part)) for part in liar.read(taken)]
            forged = [lie.forge(part, part) for part in parts]
            await liar.announce(lie.claims(liar.store(sent, forged)))

    return act


async def silent(liar: Liar) -> None:
    """Heartbeats and nothing else."""
    while True:
        beat = wire.Heartbeat(
            learner=liar.name, incarnation=liar.incarnation, local_step=1, global_step=1, tokens=1,
            loss=1.0, tokens_per_s=1.0, step_time_s=STEP_S, stall_s=0.0, run_s=1.0, bytes_up=0,
            bytes_down=0, updates_sent=0, state="training",
        )  # fmt: skip
        await liar.bus.publish(names.heartbeat(RUN, liar.name), wire.encode(beat))
        await asyncio.sleep(0.2)


def flooding(rate: float, size_bytes: int) -> Act:
    """A flood of manifests: how many a second, and of how many bytes."""

    async def act(liar: Liar) -> None:
        record, taken = await liar.first()
        sent = liar.manifest(record, taken)
        long = sent.model_copy(update={"shards": filling(size_bytes)}) if size_bytes else sent
        payload, began_s, count = wire.encode(long), time.monotonic(), 0
        while True:
            await liar.bus.publish(names.update(RUN, liar.name, record.fragment), payload)
            count += 1
            await asyncio.sleep(max(0.0, began_s + count / rate - time.monotonic()))

    return act


def spoiling(spoil: Callable[[Path], None]) -> Act:
    """Objects that are none, or none any more."""

    async def act(liar: Liar) -> None:
        root = DirectoryStore(Path(load_config(liar.config).store.url)).root
        async for record in liar.records():
            taken = liar.model(record)
            if taken is None:
                continue
            sent = liar.store(liar.manifest(record, taken), liar.read(taken))
            for shard in sent.shards:
                spoil(root / shard.name)
            await liar.announce(sent)

    return act


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _endless(path: Path) -> None:
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)


async def deleting(liar: Liar) -> None:
    """Deletes what of its own was merged."""
    root = DirectoryStore(Path(load_config(liar.config).store.url)).root
    async for record in liar.records():
        for taken in record.inputs:
            if taken.learner == liar.name:
                for shard in taken.shards:
                    (root / shard.name).unlink(missing_ok=True)
        if (honest := liar.model(record)) is not None:
            await liar.announce(liar.store(liar.manifest(record, honest), liar.read(honest)))


POISONED = "true claims, turned and ten times as long"
FORGED = {
    "none: an honest fourth": Lie(),
    "60,000 steps of 2^32 tokens": Lie(steps=math.inf, tokens=math.inf),
    "tiny step time": Lie(step_time=1e-9),
    "huge step time": Lie(step_time=math.inf),
    "one step and one token": Lie(steps=0.0, tokens=0.0),
    "tiny updates": Lie(step_time=1e-9, length=2.0**-40),
    "zeros with the greatest claims": Lie(steps=math.inf, tokens=math.inf, direction="zero"),
}
ACTS: dict[str, Act] = {
    **{name: forging(lie) for name, lie in FORGED.items()},
    "heartbeats and nothing else": silent,
    "objects that are links to /dev/zero": spoiling(_link),
    "objects of a terabyte": spoiling(_endless),
    "deletes what was merged": deleting,
    # What these leave behind, a spoilt model or a long tape, is to meet few after them.
    POISONED: forging(Lie(direction="turned", length=10.0)),
    "1,000 manifests a second": flooding(1000.0, 0),
    "40 manifests a second of 1 MB": flooding(40.0, 1_000_000),
}


if __name__ == "__main__":
    main()
