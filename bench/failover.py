"""Aggregators in trouble: killed, and flooded.

    .venv/bin/python -m bench.failover [--parameters 50000000] [--learners 2] [--trials 6]
    .venv/bin/python -m bench.failover flood [--rate 1000] [--bytes 0] [--span 15] [--spans 3]

**failover**, without a word: from the SIGKILL of an aggregator to the next version of each of its
fragments. Two real aggregators, one nats-server, a folder as the store. One aggregator owns every
fragment, the other stands by, pinned to the same ones. The learners here do not train: each sends a
stored update of a fragment whenever a record has resolved its last one, so that rounds go on and
updates are always on their way when the owner dies. What is shown is the time less the lease: what
notices, recovers (outer state, re-merge of recorded inputs) and makes the next version.

**flood**: the honest learners' version rate while another learner floods the tape with manifests. A
real aggregator, one nats-server, two honest learners that do not train, and a process that sends
`--rate` manifests a second over every fragment: a quarter is no message, a quarter one update again
and again, the rest are updates of lives that never were. With `--bytes` each manifest has as many
shards as fit into so many bytes. Spans without and with the flood take turns; shown is the honest
versions a second in each, their ratio, and the processor time of the aggregator.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

import jax.numpy as jnp
import numpy as np
import tomli_w

from bench.harness import run_part
from diloco.common.process import log
from diloco.common.process.config import Config, load_config
from diloco.common.process.nats_server import NatsServer
from diloco.common.process.retry import Runtime
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.layout import Layout, Tensor, make_layout
from diloco.common.storage.bus import Bus, jetstream
from diloco.common.storage.store import DirectoryStore
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.operate.create import create_run

# --- Killed


FRAGMENTS = 8
TENSORS = 32
STEPS = 24
TOKENS = STEPS * 8192
GOAL_S = 3.0


class CommittedVersion(NamedTuple):
    """A version of a fragment, who made it, and when it was read."""

    fragment: int
    version: int
    aggregator: str
    read_at_s: float


@dataclass
class Sender:
    """A learner that always has an update of every fragment to send."""

    name: str
    bus: Bus
    layout: Layout
    config: Config
    shards: list[tuple[wire.Shard, ...]]
    step_time_s: float = 0.01
    incarnation: int = 0
    seqs: dict[int, int] = field(default_factory=dict)

    async def join(self) -> None:
        """Begin a life."""
        run = self.config.run.name
        message = wire.Join(run=run, learner=self.name, layout=self.layout.digest, host="bench")
        self.incarnation = await self.bus.publish(names.join(run, self.name), wire.encode(message))

    async def follow(self, record: wire.Record) -> None:
        """Send the next update of a fragment, if the record resolves the last one."""
        fragment, seq = record.fragment, self.seqs.get(record.fragment, 0)
        marks = {(m.learner, m.incarnation): m.seq for m in record.policy.marks}
        if marks.get((self.name, self.incarnation), 0) < seq:
            return
        self.seqs[fragment] = seq + 1
        manifest = self._manifest(record, seq + 1)
        subject = names.update(self.config.run.name, self.name, fragment)
        await self.bus.publish(subject, wire.encode(manifest))

    def _manifest(self, record: wire.Record, seq: int) -> wire.Manifest:
        return wire.Manifest(
            run=self.config.run.name,
            learner=self.name,
            epoch=0,
            incarnation=self.incarnation,
            seq=seq,
            fragment=record.fragment,
            base_version=record.version,
            base_digest=record.view_digest,
            layout=self.layout.digest,
            codec=self.config.sync.codec,
            shards=self._shards(record.fragment, seq),
            tokens=TOKENS,
            steps=STEPS,
            position=seq * STEPS,
            local_step=seq * STEPS,
            loss=1.0,
            step_time_s=self.step_time_s,
            encode_s=0.0,
            upload_s=0.0,
            attempt=0,
            final=False,
        )

    def _shards(self, fragment: int, seq: int) -> tuple[wire.Shard, ...]:
        """The stored shards under this update's names: links, so that sending costs nothing."""
        root = Path(self.config.store.url)
        linked = []
        for index, shard in enumerate(self.shards[fragment]):
            name = names.shard(
                self.config.run.name, self.name, fragment, 0, self.incarnation, seq, index
            )
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.hardlink_to(root / shard.name)
            linked.append(shard.model_copy(update={"name": name}))
        return tuple(linked)


@dataclass
class AggregatorProcesses:
    """The aggregators' processes."""

    config_path: Path
    logs: Path
    _files: list[IO[bytes]] = field(default_factory=list)
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        """An aggregator that is pinned to every fragment: whoever comes second stands by."""
        self._files.append((self.logs / f"{name}.log").open("ab"))
        command = [sys.executable, "-m", "diloco", "aggregator", "--name", name]
        command += ["--fragments", f"0-{FRAGMENTS - 1}", "--config", str(self.config_path)]
        self.started.append(subprocess.Popen(command, stderr=self._files[-1]))
        return self.started[-1]

    def end(self) -> None:
        """End what still runs."""
        for process in self.started:
            process.kill()
            process.wait()
        for file in self._files:
            file.close()


def prepare(folder: Path, url: str, parameters: int, *, deadline_s: float = 600.0) -> Config:
    """The run's file."""
    document = {
        "run": {"name": "failover", "steps": (1 << 31) - 1},
        "sync": {"fragments": FRAGMENTS},
        "quorum": {
            "pace": 0.1,
            "min_learners": 1 << 10,
            "liveness_timeout_s": 1e6,
            "deadline_s": deadline_s,
        },
        "bus": {"url": url},
        "store": {"url": str(folder / "store")},
        "task": {"options": {"parameters": parameters}},
    }
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(document))
    return load_config(path)


async def create(config: Config, bus: Bus, parameters: int) -> Layout:
    """Streams, layout and version 0 of a model that nobody trains."""
    each = parameters // TENSORS
    shape = (each // 64, 64)
    tensors = [Tensor(name=f"t{i:02}", shape=shape, dtype="float32") for i in range(TENSORS)]
    layout = make_layout(tensors, fragments=FRAGMENTS, block=config.sync.block)
    params = {tensor.name: jnp.zeros(shape) for tensor in tensors}
    store = DirectoryStore(Path(config.store.url))
    await create_run(config.settings(), config.bus, layout, params, bus, store, Runtime())
    return layout


def store_updates(config: Config, layout: Layout) -> list[tuple[wire.Shard, ...]]:
    """One update of each fragment, stored once; senders link it."""
    store, rng = DirectoryStore(Path(config.store.url)), np.random.default_rng(0)
    codec, block = config.sync.codec, config.sync.block
    found = []
    for fragment in layout.fragments:
        entries = []
        for start, stop in shards.shard_ranges(fragment.size, block, config.sync.shard_elements):
            values = rng.normal(scale=1e-3, size=stop - start).astype(np.float32)
            data = shards.pack(codec, encode(codec, jnp.asarray(values), block), block)
            name = f"{config.run.name}/bench/{fragment.index}-{start}"
            store.put(name, data)
            entries.append(
                wire.Shard(
                    name=name, size_bytes=len(data), crc32c=shards.crc32c(data),
                    slices=slices.of_range(start, stop, block),
                )
            )  # fmt: skip
        found.append(tuple(entries))
    return found


class RecordWatch:
    """Follows the records, has the senders answer each, and notes which aggregator made it, and
    when.
    """

    def __init__(self, config: Config, bus: Bus, senders: list[Sender]) -> None:
        self._config, self._bus, self._senders = config, bus, senders
        self.newest: dict[int, CommittedVersion] = {}
        self._changed = asyncio.Event()

    async def follow(self) -> None:
        """For ever."""
        run = self._config.run.name
        async for message in self._bus.read(names.tape_stream(run), [names.record(run, "*")], 1):
            record = wire.decode(wire.Record, message.payload)
            self.newest[record.fragment] = CommittedVersion(
                record.fragment, record.version, record.aggregator, time.monotonic()
            )
            self._changed.set()
            for sender in self._senders:
                await sender.follow(record)

    async def until_all_by(self, name: str, least: dict[int, int]) -> dict[int, float]:
        """When each fragment first had a version of `name`'s, beyond `least`; monotonic seconds."""
        found: dict[int, float] = {}
        while len(found) < FRAGMENTS:
            self._changed.clear()
            for fragment, newest in self.newest.items():
                ours = newest.aggregator == name and newest.version > least[fragment]
                if ours and fragment not in found:
                    found[fragment] = newest.read_at_s
            await asyncio.wait({asyncio.ensure_future(self._changed.wait())}, timeout=120.0)
        return found

    def versions(self) -> dict[int, int]:
        """Newest version of each fragment."""
        return {fragment: newest.version for fragment, newest in self.newest.items()}


@contextlib.contextmanager
def fleet_in(config_path: Path, logs: Path) -> Iterator[AggregatorProcesses]:
    """Aggregators, none of which outlives the block."""
    fleet = AggregatorProcesses(config_path, logs)
    try:
        yield fleet
    finally:
        fleet.end()


async def measure(folder: Path, url: str, options: argparse.Namespace) -> list[list[float]]:
    """For each trial, the seconds from the kill to each fragment's next version."""
    config = prepare(folder, url, options.parameters)
    bus = await jetstream.connect(url, name="bench-failover")
    layout = await create(config, bus, options.parameters)
    stored = store_updates(config, layout)
    senders = [
        Sender(f"learner-{index}", bus, layout, config, stored) for index in range(options.learners)
    ]
    for sender in senders:
        await sender.join()
    watch = RecordWatch(config, bus, senders)
    following = asyncio.ensure_future(watch.follow())
    try:
        with fleet_in(folder / "run.toml", folder) as fleet:
            return [trial async for trial in _trials(fleet, watch, options)]
    finally:
        await cancel(following)
        await bus.close()


async def _trials(fleet: AggregatorProcesses, watch: RecordWatch, options: argparse.Namespace):  # type: ignore[no-untyped-def]
    nothing = dict.fromkeys(range(FRAGMENTS), -1)
    owner = fleet.start("owner-0")
    await watch.until_all_by("owner-0", nothing)
    for trial in range(options.trials):
        following, name = trial + 1, f"owner-{trial + 1}"
        standby = fleet.start(name)
        # Long enough to have heard of the leases; odd, so that kills meet every kind of version.
        await asyncio.sleep(6.0 + 0.37 * following)
        versions, killed_s = watch.versions(), time.monotonic()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        made = await watch.until_all_by(name, versions)
        took = [at_s - killed_s for at_s in made.values()]
        print(
            f"trial {trial}: versions {min(versions.values())} to {max(versions.values())}, first "
            f"{min(took):.2f} s, last {max(took):.2f} s",
            flush=True,
        )
        yield took
        owner = standby


def failover_main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--trials", type=int, default=6)
    options = parser.parse_args()
    log.configure("error")
    with (
        tempfile.TemporaryDirectory(prefix="bench-failover-") as folder,
        NatsServer(Path(folder) / "nats") as server,
    ):
        trials = asyncio.run(measure(Path(folder), server.url, options))
        lease_ttl_s = load_config(Path(folder) / "run.toml").aggregator.lease_ttl_s
    last = [max(took) - lease_ttl_s for took in trials]
    print(f"lease {lease_ttl_s:g} s, {options.parameters:,} parameters in {FRAGMENTS} fragments")
    print(
        f"from SIGKILL to the next version of the last fragment, less the lease: median "
        f"{statistics.median(last):.2f} s, worst {max(last):.2f} s (goal: {GOAL_S:g} s)"
    )
    print("goal reached" if max(last) <= GOAL_S else "GOAL MISSED")


# --- Flooded


FLOOD_GOAL = 0.95
PARAMETERS = 1 << 20
# As a learner in earnest, but quick: rounds of a fragment follow each other in about a second.
STEP_TIME_S = 0.4
NAME = "flooder"
LANES = 4
DEADLINE_S = 3.0
# Of those that never were; messages are told apart by their ids.
LIVES = 32


async def flood(config_path: Path, rate: float, size_bytes: int) -> None:
    """Send for ever; what was sent in each second is told on standard output."""
    config = load_config(config_path)
    bus = await jetstream.connect(config.bus.url, name=NAME)
    run = config.run.name
    message = wire.Join(run=run, learner=NAME, layout="0" * 32, host="bench")
    incarnation = await bus.publish(names.join(run, NAME), wire.encode(message))
    shards = filling(size_bytes)
    sent = 0

    async def lane(number: int) -> None:
        nonlocal sent
        began_s, count = time.monotonic(), 0
        while True:
            await _send(bus, run, incarnation, number + LANES * count, shards)
            count, sent = count + 1, sent + 1
            ahead_s = began_s + count * LANES / rate - time.monotonic()
            await asyncio.sleep(max(0.0, ahead_s))

    async def tell() -> None:
        nonlocal sent
        while True:
            await asyncio.sleep(1.0)
            print(sent, flush=True)
            sent = 0

    await asyncio.gather(tell(), *(lane(number) for number in range(LANES)))


def filling(size_bytes: int) -> tuple[wire.Shard, ...]:
    """Number of shards, at least one, that give a manifest about these bytes."""
    shard = wire.Shard(name="x", size_bytes=1, crc32c=0, slices=slices.of_range(0, 16, 16))
    if not size_bytes:
        return (shard,)
    shard = shard.model_copy(update={"slices": shard.slices * 16})
    bare, full = (len(wire.encode(_flooding("r", 1, 0, 0, (shard,) * count))) for count in (1, 101))
    return (shard,) * max(1, (size_bytes - bare) * 100 // (full - bare))


async def _send(
    bus: Bus, run: str, incarnation: int, number: int, shards: tuple[wire.Shard, ...]
) -> None:
    fragment = number % FRAGMENTS
    subject = names.update(run, NAME, fragment)
    kind = number // FRAGMENTS % 4
    if kind == 0:
        await bus.publish(subject, secrets.token_bytes(400 * len(shards)))
        return
    life = incarnation if kind == 1 else 10**12 + number % LIVES
    payload = _payload(run, life, fragment, shards)
    await bus.publish(subject, payload, msg_id=secrets.token_hex(16))


@lru_cache(2 * LIVES)
def _payload(run: str, life: int, fragment: int, shards: tuple[wire.Shard, ...]) -> bytes:
    """Kept, so that encoding what is long takes no time from those who are measured."""
    return wire.encode(_flooding(run, life, fragment, 0, shards))


def _flooding(
    run: str, life: int, fragment: int, attempt: int, shards: tuple[wire.Shard, ...]
) -> wire.Manifest:
    return wire.Manifest(
        run=run, learner=NAME, epoch=0, incarnation=life, seq=1, fragment=fragment, base_version=0,
        base_digest="0" * 32, layout="0" * 32, codec="int4", shards=shards, tokens=1, steps=1,
        position=1, local_step=1, loss=0.0, step_time_s=1.0, encode_s=0.0, upload_s=0.0,
        attempt=attempt, final=False,
    )  # fmt: skip


class Throughput(NamedTuple):
    """Versions a second, and the part of a core that the aggregator used."""

    versions: float
    core: float


async def measure_flood(
    folder: Path, url: str, options: argparse.Namespace
) -> tuple[list[Throughput], list[Throughput], list[int]]:
    """Each span without and with the flood, and what was sent a second."""
    config = prepare(folder, url, PARAMETERS, deadline_s=DEADLINE_S)
    bus = await jetstream.connect(url, name="bench-flood")
    layout = await create(config, bus, PARAMETERS)
    stored = store_updates(config, layout)
    senders = [
        Sender(f"learner-{index}", bus, layout, config, stored, step_time_s=STEP_TIME_S)
        for index in range(2)
    ]
    # The first rounds wait for the flooder as well: it has joined, and never works.
    for sender in [*senders, Sender(NAME, bus, layout, config, stored)]:
        await sender.join()
    watch = RecordWatch(config, bus, senders)
    following = asyncio.ensure_future(watch.follow())
    calm, flooded, sent = list[Throughput](), list[Throughput](), list[int]()
    try:
        with fleet_in(folder / "run.toml", folder) as fleet:
            owner = fleet.start("owner").pid
            await watch.until_all_by("owner", dict.fromkeys(range(FRAGMENTS), 5))
            for _ in range(options.spans):
                calm.append(await _span(watch, owner, options.span))
                flooder = _start_flooder(folder / "run.toml", options)
                try:
                    await asyncio.sleep(3.0)
                    flooded.append(await _span(watch, owner, options.span))
                finally:
                    flooder.kill()
                    said, _ = flooder.communicate()
                sent += [int(line) for line in said.splitlines()[2:]]
                print(
                    f"without {calm[-1].versions:.2f} versions/s, with {flooded[-1].versions:.2f}",
                    flush=True,
                )
                await asyncio.sleep(2.0)
    finally:
        await cancel(following)
        await bus.close()
    return calm, flooded, sent


def _start_flooder(config_path: Path, options: argparse.Namespace) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.failover", "flood", "--flooder", str(config_path)]
    command += ["--rate", str(options.rate), "--bytes", str(options.bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def _span(watch: RecordWatch, owner: int, span_s: float) -> Throughput:
    before, used_s, began_s = sum(watch.versions().values()), cpu_s(owner), time.monotonic()
    await asyncio.sleep(span_s)
    took_s = time.monotonic() - began_s
    return Throughput(
        (sum(watch.versions().values()) - before) / took_s, (cpu_s(owner) - used_s) / took_s
    )


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def flood_main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--bytes", type=int, default=0, help="of each manifest")
    parser.add_argument("--span", type=float, default=15.0)
    parser.add_argument("--spans", type=int, default=3)
    parser.add_argument("--flooder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    log.configure("error")
    if options.flooder:
        asyncio.run(flood(options.flooder, options.rate, options.bytes))
        return
    with (
        tempfile.TemporaryDirectory(prefix="bench-flood-") as folder,
        NatsServer(Path(folder) / "nats") as server,
    ):
        calm, flooded, sent = asyncio.run(measure_flood(Path(folder), server.url, options))
    (rate, core), (flooded_rate, flooded_core) = (
        [statistics.mean(column) for column in zip(*spans, strict=True)]
        for spans in (calm, flooded)
    )
    ratio = flooded_rate / rate
    print(
        f"{statistics.median(sent):,.0f} manifests/s (median); honest versions/s: "
        f"{rate:.2f} without, {flooded_rate:.2f} with: {ratio:.1%}; "
        f"the aggregator used {core:.2f} of a core without, {flooded_core:.2f} with"
    )
    print("goal reached" if ratio >= FLOOD_GOAL else "FLOOD_GOAL MISSED")


if __name__ == "__main__":
    run_part({"failover": failover_main, "flood": flood_main})
