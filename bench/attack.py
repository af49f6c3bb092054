"""Liars among learners: what their attacks do to a run, in virtual time.

    .venv/bin/python -m bench.attack [--seeds 3] [--budget 400] [--only NAME] [--merges A,B]

The machine, the merge and the learner's core are those of the daemons (`bench/emulate.py`); the
task is the student of `bench/tasks.py`. Each row is compared with the same run of the honest
alone: the held-out loss, and versions for each second. Liars train as the others do, and forge what
they announce.

Below them the liar of `bench/attack_live.py`: a process with learners' credentials, and no learner.
It waits until every honest learner was merged, and makes its attacks one after another: each under
a name of its own, which joins, does one thing for a while, and is silent from then on.
"""

import argparse
import asyncio
import dataclasses
import functools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Final, NamedTuple

import numpy as np

from bench.emulate import LifeSpan, RunOutcome, Start, Weather, World, begin
from bench.failover import filling
from bench.tasks import student
from diloco.common.process.config import RunSettings, load_config, make_config
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.codec import Encoded
from diloco.common.protocol.errors import DilocoError
from diloco.common.storage.bus import Bus, jetstream
from diloco.common.storage.store import DirectoryStore
from diloco.common.storage.tape import Entry, RunContext, read_item
from diloco.run.cli.opening import open_run

Parts = tuple[Encoded, ...]
# What liars claim at most.
GREATEST = {"steps": 60_000, "tokens": 60_000 << 32}


class Attack(NamedTuple):
    """The changes that liars make to their updates.

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
    """Settings of a run of the student; `merge` may name a radius: centered_clipping:0.5."""
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
    return begin(settings(seed, steps, merge), student(steps=steps, seed=seed))


def play(seed: int, steps: int, merge: str, attack: Attack) -> RunOutcome:
    """One run; without liars, of the honest alone."""
    run, start = settings(seed, steps, merge), _start(seed, steps, merge)
    weather = Weather((1.0,) * (attack.honest + attack.liars))
    if attack.joins_s:
        lives = ((LifeSpan(),),) * attack.honest + ((LifeSpan(attack.joins_s),),) * attack.liars
        weather = weather._replace(lives=lives)
    outcome = Attacked(run, start, weather, attack).run()
    assert outcome is not None
    return outcome


@functools.cache
def _alone(seed: int, steps: int, merge: str, honest: int) -> RunOutcome:
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


# --- The liar, a process


CODEC: Final = "int8"
RUN, HONEST = "live", ("a", "b", "c")
STEP_S = 0.06
# Updates of each honest learner that are merged before anybody lies.
FIRST = 30
# Between two attacks.
GAP_S = 5.0


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


def forging(attack: Attack) -> Act:
    """Answers every version with an update that is forged after an honest one."""

    async def act(liar: Liar) -> None:
        async for record in liar.records():
            taken = liar.model(record)
            if taken is None:
                continue
            sent = liar.manifest(record, taken)
            parts = [Encoded(*map(np.asarray, part)) for part in liar.read(taken)]
            forged = parts if attack.forge is None else [*map(attack.forge, parts)]
            claims = attack.claims(sent)
            await liar.announce(liar.store(sent, forged).model_copy(update=claims))

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
FORGED = (
    "none: an honest fourth",
    "60,000 steps of 2^32 tokens",
    "tiny step time",
    "huge step time",
    "one step and one token",
    "tiny updates",
    "zeros with the greatest claims",
    POISONED,
)
_FORGING = {attack.name: forging(attack) for attack in ATTACKS if attack.name in FORGED}
ACTS: dict[str, Act] = {
    **{name: act for name, act in _FORGING.items() if name != POISONED},
    "heartbeats and nothing else": silent,
    "objects that are links to /dev/zero": spoiling(_link),
    "objects of a terabyte": spoiling(_endless),
    "deletes what was merged": deleting,
    # What these leave behind, a spoilt model or a long tape, is to meet few after them.
    POISONED: _FORGING[POISONED],
    "1,000 manifests a second": flooding(1000.0, 0),
    "40 manifests a second of 1 MB": flooding(40.0, 1_000_000),
}


class AttackSpan(NamedTuple):
    """An attack, when its name had joined, and when it ended; what ended it early."""

    name: str
    began_s: float
    ended_s: float
    wrong: str = ""


def liar_name(index: int) -> str:
    """The name of the attack at an index."""
    return f"liar-{index}"


async def lie(folder: Path, attacks: Sequence[str], span_s: float) -> None:
    """The liar's process: "" among the attacks is nobody. Tells of each on standard output."""
    for index, attack in enumerate(attacks):
        name = liar_name(index)
        config = folder / f"{name}.toml"
        async with open_run(str(config), name=name, reads=True) as opened:
            section = load_config(config).bus
            bus = await jetstream.connect(
                section.url, name=name, credentials=section.credentials, tls_ca=section.tls_ca
            )
            liar = Liar(opened.context, bus, name, config)
            if not index:
                await liar.wait()
            print(json.dumps(await _act(liar, attack, span_s)), flush=True)
            await bus.close()
        await asyncio.sleep(GAP_S)


async def _act(liar: Liar, attack: str, span_s: float) -> AttackSpan:
    if attack:
        await liar.join()
    began_s, wrong = time.time(), ""
    try:
        async with asyncio.timeout(span_s):
            await (ACTS[attack](liar) if attack else asyncio.sleep(2 * span_s))
    except TimeoutError:
        pass
    except DilocoError as error:
        wrong = error.message
    return AttackSpan(attack, began_s, time.time(), wrong)


if __name__ == "__main__":
    main()
