"""The liar of `bench/attack_live.py`: a process with learners' credentials, and no learner.

It waits until every honest learner was merged, and makes its attacks one after another: each under
a name of its own, which joins, does one thing for a while, and is silent from then on.
"""

import asyncio
import dataclasses
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bench.attack import ATTACKS, Attack
from bench.flood import filling
from diloco.cli.opening import open_run
from diloco.common import names, shards, slices, wire
from diloco.common.bus import Bus, jetstream
from diloco.common.codec import Encoded
from diloco.common.config import load_config
from diloco.common.errors import DilocoError
from diloco.common.store import DirectoryStore
from diloco.common.tape import Entry, RunContext, read_item

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
        """The next record with an honest learner's update, and that."""
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
    """So many manifests a second, of so many bytes."""

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


class Span(NamedTuple):
    """An attack, when its name had joined, and when it ended; what ended it early."""

    name: str
    began_s: float
    ended_s: float
    wrong: str = ""


def liar_name(index: int) -> str:
    """Of the attack at an index."""
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


async def _act(liar: Liar, attack: str, span_s: float) -> Span:
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
    return Span(attack, began_s, time.time(), wrong)
