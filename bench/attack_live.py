"""A liar beside three honest learners, all of them processes: what its attacks do to the run.

    .venv/bin/python -m bench.attack_live [--steps 600] [--only NAME] [--merges A,B] [--seeds 1]

A nats-server with credentials and permissions (`diloco auth`), an aggregator, three learners that
train `examples/digits.py` at a pace that leaves most of a core idle, a folder as their store, and a
process with a fourth learner's credentials that lies: each attack in a run of its own, from when
every honest learner was merged until the run's end. Shown are versions and honest updates merged in
a second, the part of a core that all but the liar used, and the held-out loss, in % of the same
run without a liar.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

import numpy as np
import tomli_w

from bench.attack import ATTACKS, Attack
from bench.flood import cpu_s, filling
from diloco import Task, load
from diloco.auth import files as auth
from diloco.cli.opening import open_run
from diloco.common import log, names, shards, slices, wire
from diloco.common.bus import Bus, jetstream
from diloco.common.codec import Encoded
from diloco.common.config import load_config
from diloco.common.nats_server import NatsServer
from diloco.common.store import DirectoryStore
from diloco.common.tape import Entry, RunContext, read_item, read_tape
from diloco.learner.contract import build_task
from diloco.operate.create import create

DIGITS = "examples.digits:build"
CODEC: Final = "int8"
RUN, HONEST, LIAR = "live", ("a", "b", "c"), "liar"
STEP_S = 0.03
LATEST_S = 240.0


def build(*, steps: int, seed: int) -> Task:
    """The digits, at a pace."""
    task = build_task(DIGITS, steps=steps, seed=seed, options={})

    def paced(learner: str, position: int) -> Iterator[Any]:
        for batch in task.batches(learner, position):
            time.sleep(STEP_S)
            yield batch

    return dataclasses.replace(task, batches=paced)


# The liar


@dataclasses.dataclass
class Liar:
    """A process with a learner's credentials, and no learner."""

    context: RunContext
    bus: Bus
    incarnation: int = 0
    seqs: dict[int, int] = dataclasses.field(default_factory=dict)

    async def join(self) -> None:
        """Begin a life."""
        message = wire.Join(
            run=RUN, learner=LIAR, layout=self.context.layout.digest, host="elsewhere"
        )
        self.incarnation = await self.bus.publish(names.join(RUN, LIAR), wire.encode(message))

    async def records(self) -> AsyncIterator[wire.Record]:
        """The records from now on."""
        start = await self.bus.last_sequence(self.context.tape) + 1
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
        return next((taken for taken in record.inputs if taken.learner != LIAR), None)

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
        prefix = names.shards_prefix(RUN, LIAR, fragment, 0, self.incarnation, seq)
        entries = tuple(
            shard.model_copy(update={"name": f"{prefix}{index}"})
            for index, shard in enumerate(taken.shards)
        )
        return wire.Manifest(
            run=RUN, learner=LIAR, epoch=0, incarnation=self.incarnation, seq=seq,
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
        subject = names.update(RUN, LIAR, manifest.fragment)
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
            learner=LIAR, incarnation=liar.incarnation, local_step=1, global_step=1, tokens=1,
            loss=1.0, tokens_per_s=1.0, step_time_s=STEP_S, stall_s=0.0, run_s=1.0, bytes_up=0,
            bytes_down=0, updates_sent=0, state="training",
        )  # fmt: skip
        await liar.bus.publish(names.heartbeat(RUN, LIAR), wire.encode(beat))
        await asyncio.sleep(0.2)


def flooding(rate: float, size_bytes: int) -> Act:
    """So many manifests a second, of so many bytes."""

    async def act(liar: Liar) -> None:
        record, taken = await liar.first()
        sent = liar.manifest(record, taken)
        long = sent.model_copy(update={"shards": filling(size_bytes)}) if size_bytes else sent
        payload, began_s, count = wire.encode(long), time.monotonic(), 0
        while True:
            await liar.bus.publish(names.update(RUN, LIAR, record.fragment), payload)
            count += 1
            await asyncio.sleep(max(0.0, began_s + count / rate - time.monotonic()))

    return act


def spoiling(spoil: Callable[[Path], None]) -> Act:
    """Objects that are none, or none any more."""

    async def act(liar: Liar) -> None:
        root = DirectoryStore(Path(load_config(Path(sys.argv[-1])).store.url)).root
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
    root = DirectoryStore(Path(load_config(Path(sys.argv[-1])).store.url)).root
    async for record in liar.records():
        for taken in record.inputs:
            if taken.learner == LIAR:
                for shard in taken.shards:
                    (root / shard.name).unlink(missing_ok=True)
        if (honest := liar.model(record)) is not None:
            await liar.announce(liar.store(liar.manifest(record, honest), liar.read(honest)))


FORGED = (
    "none: an honest fourth",
    "60,000 steps of 2^32 tokens",
    "tiny step time",
    "huge step time",
    "one step and one token",
    "tiny updates",
    "zeros with the greatest claims",
    "true claims, turned and ten times as long",
)
ACTS: dict[str, Act] = {
    **{attack.name: forging(attack) for attack in ATTACKS if attack.name in FORGED},
    "heartbeats and nothing else": silent,
    "1,000 manifests a second": flooding(1000.0, 0),
    "40 manifests a second of 1 MB": flooding(40.0, 1_000_000),
    "objects that are links to /dev/zero": spoiling(_link),
    "objects of a terabyte": spoiling(_endless),
    "deletes what was merged": deleting,
}


async def lie(name: str, config: Path) -> None:
    """The liar's process, for ever."""
    async with open_run(str(config), name=LIAR, reads=True) as opened:
        section = load_config(config).bus
        bus = await jetstream.connect(
            section.url, name=LIAR, credentials=section.credentials, tls_ca=section.tls_ca
        )
        liar = Liar(opened.context, bus)
        await liar.join()
        await ACTS[name](liar)


# The run


class Outcome(NamedTuple):
    """Versions and honest updates a second, the part of a core in use, and the held-out loss."""

    versions: float
    merged: float
    core: float
    loss: float


class Merged(NamedTuple):
    """When a version was stored, and whose updates it holds."""

    at_s: float
    learners: tuple[str, ...]


def play(folder: Path, name: str, merge: str, steps: int, seed: int) -> Outcome:
    """One run, with or without a liar (name "")."""
    auth.init(folder / "auth", RUN, ["127.0.0.1"])
    for learner in (*HONEST, LIAR):
        auth.add(folder / "auth", learner, "learner")
    auth.add(folder / "auth", "agg", "aggregator")
    tls = folder / "auth" / "tls"
    extra = f'tls {{ cert_file: "{tls}/nats-1.pem", key_file: "{tls}/nats-1.key" }}\n'
    extra += 'accounts { include "../auth/accounts.conf" }\n'
    with NatsServer(folder / "nats", extra_config=extra) as server, _processes() as started:
        files = _files(folder, server.port, merge, steps, seed)
        create(load_config(files["operator"]), None)
        started.append(_start(folder, "agg", ["aggregator", "--config", str(files["agg"])]))
        for learner in HONEST:
            command = ["learner", "--config", str(files[learner]), "--learner", learner]
            started.append(_start(folder, learner, command))
        assert server.pid is not None
        used = [server.pid, *(process.pid for process in started)]
        asyncio.run(_until(files["operator"], lambda seen: _all_merged(seen, 2)))
        began_s, used_s = time.time(), sum(map(cpu_s, used))
        if name:
            started.append(_lying(folder, name, files[LIAR]))
        core = asyncio.run(_watch(files["operator"], used, used_s, began_s))
        seen = asyncio.run(_versions(files["operator"]))
        params = load(files["operator"])
    last_s = max(one.at_s for one in seen)
    later = [one for one in seen if one.at_s > began_s]
    merged = sum(learner in HONEST for one in later for learner in one.learners)
    evaluate: Any = build_task(DIGITS, steps=steps, seed=seed, options={}).evaluate
    took_s = last_s - began_s
    return Outcome(len(later) / took_s, merged / took_s, core, float(evaluate(params)))


def _files(folder: Path, port: int, merge: str, steps: int, seed: int) -> dict[str, Path]:
    files = {}
    for name in (*HONEST, LIAR, "agg", "operator"):
        document = {
            "run": {"name": RUN, "steps": steps, "seed": seed},
            "task": {"build": "bench.attack_live:build"},
            "sync": {"fragments": 2, "interval_steps": 12, "codec": CODEC, "block": 16},
            "outer": {"merge": merge},
            # The end waits no longer for who never sends his last update.
            "quorum": {"deadline_s": 5.0, "read_timeout_s": 5.0},
            "bus": {
                "url": f"tls://127.0.0.1:{port}",
                "credentials": str(folder / "auth" / "credentials" / f"{name}.toml"),
                "tls_ca": str(folder / "auth" / "tls" / "ca.pem"),
            },
            "store": {"url": str(folder / "store")},
        }
        files[name] = folder / f"{name}.toml"
        files[name].write_text(tomli_w.dumps(document))
    return files


@contextlib.contextmanager
def _processes() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes, none of which outlives the block."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def _start(folder: Path, name: str, arguments: list[str]) -> "subprocess.Popen[bytes]":
    with (folder / f"{name}.log").open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "diloco", *arguments], stderr=file)


def _lying(folder: Path, name: str, config: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "bench.attack_live", "--lie", name, "--config", str(config)]
    with (folder / "liar.log").open("wb") as file:
        return subprocess.Popen(command, stderr=file)


async def _versions(config: Path) -> list[Merged]:
    async with open_run(str(config), name="watch", reads=True) as opened:
        return [
            Merged(item.time_s, tuple(taken.learner for taken in item.body.inputs))
            async for item in read_tape(opened.context)
            if isinstance(item, Entry) and isinstance(item.body, wire.Record) and item.body.inputs
        ]


def _all_merged(seen: list[Merged], least: int) -> bool:
    counts = [learner for one in seen for learner in one.learners]
    return all(counts.count(name) >= least for name in HONEST)


async def _until(config: Path, done: Callable[[list[Merged]], bool]) -> None:
    async with asyncio.timeout(LATEST_S):
        while True:
            if done(await _versions(config)):
                return
            await asyncio.sleep(0.2)


async def _watch(config: Path, used: list[int], used_s: float, began_s: float) -> float:
    """The part of a core in use, once the run has ended; daemons leave then."""
    core = 0.0
    async with open_run(str(config), name="watch") as opened, asyncio.timeout(LATEST_S):
        bus, context = opened.context.bus, opened.context
        while await bus.last(context.tape, names.end(RUN)) is None:
            with contextlib.suppress(FileNotFoundError, IndexError):
                core = (sum(map(cpu_s, used)) - used_s) / (time.time() - began_s)
            await asyncio.sleep(0.5)
    return core


def rows(options: argparse.Namespace, merges: Sequence[str]) -> Iterator[str]:
    """The table, line by line."""
    heads = [f"{merge}: loss, % | versions a second, % | honest updates, %" for merge in merges]
    yield f"| the liar beside three | {' | '.join(heads)} | of a core |"
    yield f"|{' --- |' * (2 + 3 * len(merges))}"
    alone = {merge: _all(options, "", merge) for merge in merges}
    first = [one.loss for one in alone[merges[0]]]
    for name in ("", *ACTS):
        if options.only not in name:
            continue
        found = {merge: _all(options, name, merge) if name else alone[merge] for merge in merges}
        cells = []
        for merge in merges:
            base = alone[merge] if name else alone[merges[0]]
            pairs = [*zip(found[merge], base, strict=True)]
            cells += [
                _percent([one.loss / other.loss - 1 for one, other in pairs]),
                _percent([one.versions / other.versions - 1 for one, other in pairs]),
                _percent([one.merged / other.merged - 1 for one, other in pairs]),
            ]
        core = fmean(one.core for made in found.values() for one in made)
        yield f"| {name or 'nobody'} | {' | '.join(cells)} | {core:.2f} |"
    rate = fmean(one.versions for made in alone.values() for one in made)
    yield f"\nNobody: {rate:.2f} versions a second, held-out loss {fmean(first):.4f}"


def _all(options: argparse.Namespace, name: str, merge: str) -> list[Outcome]:
    found = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory(prefix="bench-live-") as folder:
            found.append(play(Path(folder), name, merge, options.steps, seed))
            print(json.dumps([name, merge, *found[-1]]), file=sys.stderr, flush=True)
    return found


def _percent(values: list[float]) -> str:
    error = f" ± {100 * stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):+.1f}{error}"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="bench.attack_live", description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="of each run")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument("--merges", default="rda,centered_clipping", help="of outer.merge")
    parser.add_argument("--lie", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    log.configure("error")
    if options.lie:
        asyncio.run(lie(options.lie, options.config))
        return
    for line in rows(options, options.merges.split(",")):
        print(line, flush=True)


if __name__ == "__main__":
    main()
