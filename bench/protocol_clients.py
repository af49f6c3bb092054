"""A forecast held against the real aggregator: learners that speak the protocol and train nothing.

    .venv/bin/python -m bench.protocol_clients [--learners 64] [--fragment 41666667] [--step-s 0.5]

A real aggregator, a nats-server, the tests' server of Google Cloud Storage with a link of `--gbit`,
and learners of the production core (`learner/core/sync.py`), each with a connection to the bus,
whose steps pass without computing. Updates are of the true size and are read, verified and merged;
they are sent by linking one stored update, after the time that their bytes would take. After the
first versions it counts updates in a version, staleness, seconds between versions, the
aggregator's processor time and the store's bytes, and shows what `diloco plan` forecasts of each.
With `--fragments` and `--aggregators` several processes share the fragments of one model; it then
also shows each one's fragments and peak memory. `--commands` times what operators call while the
run goes on, and `--failover` the time from the SIGKILL of an aggregator until others stand where it
was with its fragments.

    .venv/bin/python -m bench.protocol_clients virtual [--learners 10000] [--kill 0.01]

The same fleet in virtual time, within one process: the real aggregator on a bus and a store in
memory, behind a link of `--gbit`. Learners also send heartbeats; a share of them dies in each
interval, at any moment, and begins anew later. Of each version it counts the learners that lived
all the while and are missing, and how long updates waited; and of the aggregator and of a learner's
reading the processor time.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tomli_w

from bench.harness import run_part
from diloco.aggregator.context import Context
from diloco.aggregator.daemon import aggregate
from diloco.common.process import log
from diloco.common.process.config import Config, load_config, make_config
from diloco.common.process.nats_server import NatsServer
from diloco.common.process.retry import Runtime
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.layout import Layout, Tensor, make_layout
from diloco.common.storage.bus import Bus, MemoryBus, Message, jetstream
from diloco.common.storage.bus.memory import MemoryBroker
from diloco.common.storage.store import MemoryStore, ObjectInfo, ObjectStore, open_store
from diloco.common.storage.tape.run import record_in
from diloco.learner.core import sync
from diloco.learner.core.events import (
    Event,
    Published,
    Ready,
    RoundOpened,
    Send,
    Start,
    Stepped,
    sync_rules,
)
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.operate.create import create_run
from diloco.plan import traffic as plan_traffic
from diloco.plan.forecast import DAY_S, Fleet, PlannedIsland, make_plan
from diloco.plan.simulated_rounds import JITTER
from tests.gcs_server import GcsServer
from tests.sim.simclock import VirtualLoop

RUN = "protocol"
BUCKET, PREFIX = "bench", "runs/"
STORE_URL = f"gs://{BUCKET}/{PREFIX}"
TENSORS = 8
TOKENS = 8192
COMMANDS = (("status", "--once", "--json"), ("doctor",), ("status", "--learners"))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class VersionSample(NamedTuple):
    """A version, and what had been used when its record was read."""

    fragment: int
    owner: str
    at_s: float
    staleness: tuple[int, ...]
    cpu_s: float
    read_bytes: int
    written_bytes: int


class Figures(NamedTuple):
    """Figures of one version of one fragment, forecast or measured; the interval is a median."""

    merged: float
    staleness: float
    interval_s: float
    core_s: float
    read_bytes: float
    written_bytes: float


# How far a forecast may be off: a share, and for staleness versions.
GOALS = Figures(0.05, 0.05, 0.05, 0.2, 0.05, 0.05)
# In memory nothing is sent: the forecast has the processor time of connections too.
IN_MEMORY = GOALS._replace(core_s=1.0)


def now_s() -> float:
    """The event loop's time."""
    return asyncio.get_running_loop().time()


@dataclass
class Store:
    """The store, and one update of each fragment that all learners send.

    Attributes:
        objects: the store.
        copy: stores an object under another name too, without its bytes.
        updates: the shards of each fragment's update.
    """

    objects: ObjectStore
    copy: Callable[[str, str], None]
    updates: list[tuple[wire.Shard, ...]]

    def link(self, fragment: int, prefix: str) -> tuple[wire.Shard, ...]:
        """A fragment's update under a learner's own names."""
        linked = []
        for index, shard in enumerate(self.updates[fragment]):
            name = f"{prefix}{index}"
            self.copy(shard.name, name)
            linked.append(shard.model_copy(update={"name": name}))
        return tuple(linked)


@dataclass
class Client:
    """A learner whose steps take their time and nothing else."""

    name: str
    bus: Bus
    layout: Layout
    config: Config
    store: Store
    starts: tuple[Start, ...]
    step_s: float
    up_s: float
    down_s: float
    rng: np.random.Generator
    incarnation: int = 0
    began_s: float = 0.0
    steps: int = 0

    async def live(self) -> None:
        """Train and read for ever."""
        await self._join()
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._read())
            self._tasks.create_task(self._listen())
            self._tasks.create_task(self._step())

    async def train(self) -> None:
        """Train and send heartbeats for ever; somebody else reads for it."""
        await self._join()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._beat())
                self._tasks.create_task(self._step())
        finally:
            self.incarnation = 0

    async def _join(self) -> None:
        self.rules = sync_rules(self.config.sync)
        self.state = sync.begin(self.rules, self.starts)
        message = wire.Join(run=RUN, learner=self.name, layout=self.layout.digest, host="bench")
        self.incarnation = await self.bus.publish(names.join(RUN, self.name), wire.encode(message))
        self.began_s = now_s()

    async def _beat(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, HEARTBEAT_S))
        while True:
            beat = wire.Heartbeat(
                learner=self.name, incarnation=self.incarnation, local_step=self.steps,
                global_step=0, tokens=0, loss=1.0, tokens_per_s=TOKENS / self.step_s,
                step_time_s=self.step_s, stall_s=0.0, run_s=1.0, bytes_up=0, bytes_down=0,
                updates_sent=0, state="training",
            )  # fmt: skip
            await self.bus.publish(names.heartbeat(RUN, self.name), wire.encode(beat))
            await asyncio.sleep(HEARTBEAT_S)

    async def _step(self) -> None:
        began_s = now_s() - self.steps * self.step_s
        while True:
            self.steps += 1
            await asyncio.sleep(max(0.0, began_s + self.steps * self.step_s - now_s()))
            self.tell(Stepped(now_s(), TOKENS))

    def tell(self, event: Event) -> None:
        """Take an event, and send what it asks for."""
        self.state, effects = sync.step(self.rules, self.state, event)
        for effect in effects:
            if isinstance(effect, Send):
                self._tasks.create_task(self._send(effect))

    async def _send(self, send: Send) -> None:
        await asyncio.sleep(self.up_s * self.rng.uniform(1 - JITTER, 1 + JITTER))
        manifest = self._manifest(send)
        await self.bus.publish(names.update(RUN, self.name, send.fragment), wire.encode(manifest))
        self.tell(Published(now_s(), send.fragment, send.seq))

    def _manifest(self, send: Send) -> wire.Manifest:
        prefix = names.shards_prefix(RUN, self.name, send.fragment, 0, self.incarnation, send.seq)
        return wire.Manifest(
            run=RUN,
            learner=self.name,
            epoch=0,
            incarnation=self.incarnation,
            seq=send.seq,
            fragment=send.fragment,
            base_version=send.base_version,
            base_digest=send.base_digest,
            layout=self.layout.digest,
            codec=self.config.sync.codec,
            shards=self.store.link(send.fragment, prefix),
            tokens=send.tokens,
            steps=send.steps,
            position=self.steps,
            local_step=self.steps,
            loss=1.0,
            step_time_s=self.step_s,
            encode_s=0.0,
            upload_s=self.up_s,
            attempt=0,
            final=False,
        )

    async def _read(self) -> None:
        async for message in self.bus.read(names.tape_stream(RUN), [names.record(RUN, "*")], 1):
            found = _decoded(message.payload)
            answer = await asyncio.to_thread(self.answer, found)
            self.hear(message, found, answer)

    def hear(
        self, message: Message, found: wire.Record | wire.RecordPointer, answer: wire.Answer
    ) -> None:
        """Adopt a version once its bytes have come."""
        word = found.word if isinstance(found, wire.RecordPointer) else wire.word_of(found)
        ready = Ready(
            word.fragment, message.seq, word.version, word.view_digest, word.global_step,
            answer.resolved_seq,
        )  # fmt: skip
        self._tasks.create_task(self._adopt(ready))

    def answer(self, found: wire.Record | wire.RecordPointer) -> wire.Answer:
        """A record's answer to this learner; of an object, each learner reads its own range."""
        if isinstance(found, wire.Record):
            return wire.answers_of(found).get((self.name, self.incarnation), wire.Answer())
        start, stop = wire.answers_range(found, self.name)
        data = self.store.objects.get_range(found.body.name, start, stop)
        return wire.answer_in(found, data, self.name, self.incarnation)

    async def _adopt(self, ready: Ready) -> None:
        await asyncio.sleep(self.down_s)
        self.tell(ready)

    async def _listen(self) -> None:
        async for _, payload in self.bus.listen(names.round_open(RUN, "*")):
            opened = wire.decode(wire.RoundOpen, payload)
            self.tell(RoundOpened(opened.fragment, opened.version))


@lru_cache(maxsize=64)
def _decoded(payload: bytes) -> wire.Record | wire.RecordPointer:
    """Decoded once for all learners of this process."""
    return wire.decode_record(payload)


def _record(objects: ObjectStore, message: Message) -> wire.Record:
    """The whole record."""
    found = _decoded(message.payload)
    return (
        record_in(objects, message.subject, found)
        if isinstance(found, wire.RecordPointer)
        else found
    )


def document(options: argparse.Namespace, **sections: dict[str, Any]) -> dict[str, Any]:
    """The run's file."""
    return {
        "run": {"name": RUN, "steps": (1 << 31) - 1},
        "sync": {"fragments": options.fragments, "interval_steps": options.interval},
        "gc": {"enabled": False},
        "task": {"options": {"parameters": options.fragment * options.fragments}},
        **sections,
    }


def configure(folder: Path, url: str, options: argparse.Namespace) -> Config:
    """The run's file, written and read."""
    path = folder / "run.toml"
    sections = document(
        options,
        quorum={"min_learners": options.least, "liveness_timeout_s": 1e6},
        bus={"url": url},
        store={"url": STORE_URL, "emulator": True},
    )
    path.write_text(tomli_w.dumps(sections))
    return load_config(path)


async def create(
    config: Config,
    bus: Bus,
    store: ObjectStore,
    options: argparse.Namespace,
    runtime: Runtime,
) -> Layout:
    """Streams, layout and version 0 of a model that nobody trains."""
    shape = (options.fragment // TENSORS // 64, 64)
    count = TENSORS * options.fragments
    tensors = [Tensor(name=f"t{i:03}", shape=shape, dtype="float32") for i in range(count)]
    layout = make_layout(tensors, fragments=options.fragments, block=config.sync.block)
    zeros = jnp.zeros(shape)
    params = {tensor.name: zeros for tensor in tensors}
    await create_run(config.settings(), config.bus, layout, params, bus, store, runtime)
    return layout


def store_updates(
    config: Config, layout: Layout, store: ObjectStore
) -> list[tuple[wire.Shard, ...]]:
    """An update of each fragment, stored once."""
    rng = np.random.default_rng(0)
    codec, block = config.sync.codec, config.sync.block
    found = []
    for fragment in layout.fragments:
        entries = []
        for start, stop in shards.shard_ranges(fragment.size, block, config.sync.shard_elements):
            values = rng.standard_normal(stop - start, dtype=np.float32) * np.float32(1e-3)
            data = shards.pack(codec, encode(codec, jnp.asarray(values), block), block)
            name = f"{RUN}/bench/{fragment.index}-{start}"
            store.put(name, data)
            shard = wire.Shard(
                name=name, size_bytes=len(data), crc32c=shards.crc32c(data),
                slices=slices.of_range(start, stop, block),
            )  # fmt: skip
            entries.append(shard)
        found.append(tuple(entries))
    return found


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


async def observe(
    objects: ObjectStore,
    bus: Bus,
    used: Callable[[], tuple[float, int, int]],
    options: argparse.Namespace,
    made: Callable[[Message, wire.Record], None] = lambda _message, _record: None,
) -> list[VersionSample]:
    """Versions as they come, until each fragment has as many as are wanted.

    `used` returns the aggregators' processor time and the store's bytes that were read and written;
    `made` is called with each version.
    """
    found: list[VersionSample] = []
    left = dict.fromkeys(range(options.fragments), options.settle + options.versions)
    async for message in bus.read(names.tape_stream(RUN), [names.record(RUN, "*")], 1):
        record = _record(objects, message)
        if record.rejected and not options.kill:
            sys.exit(f"rejected: {record.rejected[0].reason}: {record.rejected[0].detail}")
        if record.what != "version" or not record.version:
            continue
        staleness = tuple(taken.staleness for taken in record.inputs)
        made(message, record)
        found.append(
            VersionSample(record.fragment, record.aggregator, message.time_s, staleness, *used())
        )
        if record.fragment == 0:
            about = f"{len(staleness)} updates ({record.reason})"
            print(f"version {record.version} of fragment 0: {about}", flush=True)
        left[record.fragment] -= 1
        if max(left.values()) <= 0:
            break
    return found


def measured(seen: list[VersionSample], settle: int, fragments: int) -> Figures:
    """Per version, after the first ones of each fragment."""
    begin, made = 0, Counter[int]()
    while len(made) < fragments or min(made.values()) < settle:
        made[seen[begin].fragment] += 1
        begin += 1
    first, last, counted = seen[begin - 1], seen[-1], seen[begin:]
    staleness = [each for one in counted for each in one.staleness]
    times = [[one.at_s for one in seen[begin - 1 :] if one.fragment == f] for f in range(fragments)]
    return Figures(
        len(staleness) / len(counted),
        float(np.mean(staleness)),
        float(np.median(np.concatenate([np.diff(each) for each in times]))),
        (last.cpu_s - first.cpu_s) / len(counted),
        (last.read_bytes - first.read_bytes) / len(counted),
        (last.written_bytes - first.written_bytes) / len(counted),
    )


def forecast(config: Config, layout: Layout, options: argparse.Namespace) -> Figures:
    """The forecast of `diloco plan` for the same fleet."""
    settings = config.settings()
    sized = plan_traffic.sizes(settings, [fragment.size for fragment in layout.fragments])
    island = PlannedIsland(
        step_s=options.step_s, step_tokens=TOKENS, gbit=options.learner_gbit, rtt_s=0.001
    )
    fleet = Fleet(islands=(island,) * options.learners, aggregator_gbit=options.gbit, tls=False)
    made = make_plan(settings, fleet, options.fragment * options.fragments, sized)
    versions = DAY_S / made.interval_s * options.fragments
    snapshots = sized.snapshot_bytes / sized.snapshot_interval_versions / options.fragments
    record = plan_traffic.record_bytes(sized, options.learners, made.participants)
    body = record if record > wire.RECORD_BYTES else 0.0
    return Figures(
        made.participants,
        made.staleness,
        made.interval_s,
        made.busy_cores * DAY_S / versions,
        made.participants * sized.update_bytes / options.fragments,
        sized.delta_bytes / options.fragments + snapshots + body,
    )


def start_aggregator(folder: Path, name: str) -> "subprocess.Popen[bytes]":
    """A real one."""
    command = [sys.executable, "-m", "diloco", "aggregator", "--name", name]
    command += ["--config", str(folder / "run.toml")]
    with (folder / f"{name}.log").open("wb") as said:
        return subprocess.Popen(command, stderr=said)


def clients(
    config: Config, layout: Layout, store: Store, buses: list[Bus], starts: tuple[Start, ...],
    options: argparse.Namespace,
) -> list[Client]:  # fmt: skip
    """The learners."""
    up_s, down_s = plan_traffic.travel_s(
        plan_traffic.sizes(config.settings(), [fragment.size for fragment in layout.fragments]),
        options.interval * options.step_s,
        options.learner_gbit,
    )
    return [
        Client(
            f"learner-{number}", bus, layout, config, store, starts, options.step_s, up_s, down_s,
            np.random.default_rng(number),
        )
        for number, bus in enumerate(buses)
    ]  # fmt: skip


async def beginnings(bus: Bus, objects: ObjectStore, fragments: int) -> tuple[Start, ...]:
    """The newest version of each fragment, with which a learner begins."""
    starts = []
    for fragment in range(fragments):
        message = await bus.last(names.tape_stream(RUN), names.record(RUN, fragment))
        assert message is not None
        record = _record(objects, message)
        starts.append(Start(record.version, record.view_digest, message.seq, record.global_step))
    return tuple(starts)


async def measure(
    folder: Path, url: str, server: GcsServer, options: argparse.Namespace
) -> tuple[Figures, Figures]:
    """(forecast, measured)."""
    config = configure(folder, url, options)
    bus = await jetstream.connect(url, name="bench")
    objects = open_store(STORE_URL, emulator=True)
    layout = await create(config, bus, objects, options, Runtime())

    def copy(name: str, other: str) -> None:
        server.copy(server.find(BUCKET, PREFIX + name), BUCKET, PREFIX + other)

    store = Store(objects, copy, store_updates(config, layout, objects))
    planned = forecast(config, layout, options)
    starts = await beginnings(bus, objects, options.fragments)
    buses: list[Bus] = [
        await jetstream.connect(url, name=f"learner-{n}") for n in range(options.learners)
    ]
    processes = {
        name: start_aggregator(folder, name)
        for name in (f"aggregator-{number}" for number in range(options.aggregators))
    }
    fleet = clients(config, layout, store, buses, starts, options)
    living = [asyncio.ensure_future(client.live()) for client in fleet]
    try:
        pids = [process.pid for process in processes.values()]

        def used() -> tuple[float, int, int]:
            return sum(map(cpu_s, pids)), server.down.carried, server.up.carried

        seen = await observe(objects, bus, used, options)
        show_owners(seen, processes, options.fragments)
        if options.commands:
            for command in COMMANDS:
                await asyncio.to_thread(time_command, command, folder / "run.toml")
        if options.failover:
            await fail_over(folder, seen, processes, config.aggregator.lease_ttl_s)
    finally:
        for life in living:
            await cancel(life)
        for process in processes.values():
            process.kill()
            process.wait()
        for each in [bus, *buses]:
            await each.close()
    return planned, measured(seen, options.settle, options.fragments)


def time_command(command: tuple[str, ...], path: Path) -> None:
    """Run an operator's command, and print the time that it took."""
    began_s = time.monotonic()
    with (path.parent / "command.log").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco", *command, str(path)], stdout=said, stderr=said
        )
        _, status, used = os.wait4(process.pid, 0)
    took_s = time.monotonic() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    print(
        f"{' '.join(command)}: {took_s:.2f} s, {used.ru_utime + used.ru_stime:.2f} s of processor,"
        f" {used.ru_maxrss / 1e3:.0f} MB, exit status {process.returncode}",
        flush=True,
    )


async def fail_over(
    folder: Path,
    seen: list[VersionSample],
    processes: dict[str, "subprocess.Popen[bytes]"],
    lease_s: float,
) -> None:
    """Kill an aggregator, and say when others stood where it was with each of its fragments."""
    owners = {one.fragment: one.owner for one in seen}
    victim = owners[0]
    left = {fragment for fragment, owner in owners.items() if owner == victim}
    processes[victim].kill()
    killed = datetime.now(UTC)
    while left:
        await asyncio.sleep(0.1)
        for name in processes:
            for line in (folder / f"{name}.log").read_text().splitlines():
                entry = json.loads(line)
                taken_at = datetime.fromisoformat(entry["timestamp"])
                if entry.get("action") != "recovered" or taken_at < killed:
                    continue
                if entry["fragment"] in left:
                    left.remove(entry["fragment"])
                    after_s = (taken_at - killed).total_seconds() - lease_s
                    print(
                        f"fragment {entry['fragment']}: recovered {after_s:+.2f} s after the lease"
                        f" of {lease_s:g} s, in {entry['took_s']:.2f} s",
                        flush=True,
                    )


def show_owners(
    seen: list[VersionSample], processes: dict[str, "subprocess.Popen[bytes]"], fragments: int
) -> None:
    """Print each aggregator's fragments at the end, its processor time and memory."""
    owners = dict(zip((one.fragment for one in seen), (one.owner for one in seen), strict=True))
    print("| aggregator | fragments | versions | processor s | peak memory |")
    for name, process in processes.items():
        owned = sum(owners.get(fragment) == name for fragment in range(fragments))
        made = sum(one.owner == name for one in seen)
        used = f"{cpu_s(process.pid):.1f} | {peak_bytes(process.pid) / 1e9:.2f} GB"
        print(f"| {name} | {owned} | {made} | {used} |")


def show(planned: Figures, found: Figures, goals: Figures = GOALS) -> bool:
    """Print the comparison; whether every forecast is near enough."""
    held = True
    print("| of a version | forecast | measured | error | goal |")
    for name, said, was, goal in zip(Figures._fields, planned, found, goals, strict=True):
        off = abs(said - was) if name == "staleness" else abs(said / was - 1)
        held &= off <= goal
        unit = f"{off:.3f}" if name == "staleness" else f"{said / was - 1:+.1%}"
        print(f"| {name} | {said:.5g} | {was:.5g} | {unit} | {goal:g} |")
    return held


def parsed(arguments: list[str] | None = None, **defaults: float) -> argparse.Namespace:
    """The options; `defaults` instead of those of real processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--learners", type=int, default=64)
    parser.add_argument("--least", type=int, default=1, help="K, the quorum")
    parser.add_argument("--fragment", type=int, default=41_664_512, help="its parameters")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--aggregators", type=int, default=1)
    parser.add_argument("--interval", type=int, default=24, help="H")
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--gbit", type=float, default=2.0, help="of the aggregator's link")
    parser.add_argument("--learner-gbit", type=float, default=1.0)
    parser.add_argument("--settle", type=int, default=3, help="versions that are not counted")
    parser.add_argument("--versions", type=int, default=16, help="versions that are")
    parser.add_argument("--commands", action="store_true", help="time an operator's commands")
    parser.add_argument("--failover", action="store_true", help="kill an aggregator at the end")
    parser.add_argument("--folder", type=Path, help="where temporary files go")
    parser.add_argument("--kill", type=float, default=0.0, help="share that dies in an interval")
    parser.set_defaults(**defaults)
    return parser.parse_args(arguments)


def real() -> None:
    """Measure real processes, and print."""
    options = parsed()
    log.configure("error")
    with (
        tempfile.TemporaryDirectory(prefix="bench-protocol-", dir=options.folder) as folder,
        GcsServer(Path(folder) / "store", BUCKET, gbit=options.gbit) as server,
        NatsServer(Path(folder) / "nats") as nats,
    ):
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        planned, found = asyncio.run(measure(Path(folder), nats.url, server, options))
    print(json.dumps(vars(options), default=str))
    sys.exit(0 if show(planned, found) else 1)


# --- Virtual time

# True in what the aggregator runs.
AGGREGATES: ContextVar[bool] = ContextVar("aggregates", default=False)
HEARTBEAT_S = 10.0
LIVENESS_S = 30.0
# Seconds for which a killed learner is away.
AWAY_S = (5.0, 90.0)
# Every so many answers the reading of one learner is timed.
TIMED = 997


class MeteredLoop(VirtualLoop):
    """A loop in virtual time that counts the aggregator's processor time."""

    def __init__(self) -> None:
        super().__init__()
        self.aggregator_s = 0.0

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., None], *args: Any, context: Any = None
    ) -> Any:
        context = copy_context() if context is None else context
        if context.get(AGGREGATES):
            callback, args = self._meter, (callback, *args)
        return super().call_soon(callback, *args, context=context)  # type: ignore[no-untyped-call]

    call_soon_threadsafe = call_soon

    def _meter(self, callback: Callable[..., None], *args: Any) -> None:
        began_s = time.process_time()
        callback(*args)
        self.aggregator_s += time.process_time() - began_s


class LinkedStore(ObjectStore):
    """The aggregator's view of a store: the bytes that it moves take their time on its link."""

    def __init__(self, behind: ObjectStore, gbit: float) -> None:
        self._behind = behind
        self._bytes_per_s = gbit * 1e9 / 8
        self._free_s = 0.0
        self.read_bytes = self.written_bytes = 0

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Implements `ObjectStore.get`."""
        data = self._behind.get(name, limit_bytes, within_s)
        self.read_bytes += len(data)
        return data

    def put(self, name: str, data: Any) -> None:
        """Implements `ObjectStore.put`."""
        self._behind.put(name, data)
        self.written_bytes += len(data)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Implements `ObjectStore.get_range`."""
        return self._behind.get_range(name, start, stop)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Implements `ObjectStore.walk`."""
        return self._behind.walk(prefix)

    def delete(self, name: str) -> None:
        """Implements `ObjectStore.delete`."""
        self._behind.delete(name)

    async def offload(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function at once; return its result once the bytes that it moved have passed."""
        before = self.read_bytes + self.written_bytes
        result = function(*args, **kwargs)
        moved = self.read_bytes + self.written_bytes - before
        if moved:
            self._free_s = max(self._free_s, now_s()) + moved / self._bytes_per_s
            await asyncio.sleep(self._free_s - now_s())
        return result


class Crowd:
    """Learners in virtual time: one reader of records serves them all, and some die.

    Attributes:
        missing: of each version, the learners that lived all the while and have no update in it.
        waits_s: of each merged update, the time from its announcement to its version.
        reading_s: processor times of one learner's reading of a version.
        deaths: learners that were killed.
    """

    def __init__(self, fleet: list[Client], options: argparse.Namespace) -> None:
        self.fleet = fleet
        self.missing: list[int] = []
        self.waits_s: list[float] = []
        self.reading_s: list[float] = []
        self.deaths = 0
        self._options = options
        self._rng = np.random.default_rng(1)
        self._before_s: dict[int, float] = {}
        self._heard = 0

    async def live(self, bus: Bus, objects: ObjectStore) -> None:
        """Let all live for ever."""
        async with asyncio.TaskGroup() as tasks:
            for client in self.fleet:
                tasks.create_task(self._keep(client, bus, objects))
            tasks.create_task(self._read(bus))
            tasks.create_task(self._listen(bus))

    async def _keep(self, client: Client, bus: Bus, objects: ObjectStore) -> None:
        """A learner's lives, one after the other."""
        often_s = self._options.interval * self._options.step_s / max(self._options.kill, 1e-9)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rng.exponential(often_s)):
                    await client.train()
            self.deaths += 1
            await asyncio.sleep(self._rng.uniform(*AWAY_S))
            client.starts = await beginnings(bus, objects, self._options.fragments)

    async def _read(self, bus: Bus) -> None:
        async for message in bus.read(names.tape_stream(RUN), [names.record(RUN, "*")], 1):
            found = _decoded(message.payload)
            answers = wire.answers_of(found) if isinstance(found, wire.Record) else None
            for client in self._living():
                self._heard += 1
                if self._heard % TIMED == 1:
                    began_s = time.process_time()
                    client.answer(wire.decode_record(message.payload))
                    self.reading_s.append(time.process_time() - began_s)
                if answers is None:
                    answer = client.answer(found)
                else:
                    answer = answers.get((client.name, client.incarnation), wire.Answer())
                client.hear(message, found, answer)

    async def _listen(self, bus: Bus) -> None:
        async for _, payload in bus.listen(names.round_open(RUN, "*")):
            opened = wire.decode(wire.RoundOpen, payload)
            for client in self._living():
                client.tell(RoundOpened(opened.fragment, opened.version))

    def _living(self) -> list[Client]:
        return [client for client in self.fleet if client.incarnation]

    def made(self, message: Message, record: wire.Record) -> None:
        """Count who is missing in a version, and how long its updates waited."""
        merged = {(one.learner, one.incarnation) for one in record.inputs}
        since_s = self._before_s.get(record.fragment, 0.0)
        lived = {(one.name, one.incarnation) for one in self._living() if one.began_s < since_s}
        self.missing.append(len(lived - merged))
        self.waits_s += [message.time_s - one.announced_at_s for one in record.inputs]
        self._before_s[record.fragment] = message.time_s


def run_in_virtual_time(options: argparse.Namespace) -> tuple[Figures, Figures, Crowd]:
    """Returns what is forecast of a version, what it was, and the learners."""
    loop = MeteredLoop()  # type: ignore[abstract]
    loop.now_s = 1e6
    try:
        found: tuple[Figures, Figures, Crowd] = loop.run_until_complete(_measure(loop, options))
    finally:
        loop.drain()
    return found


async def _measure(
    loop: MeteredLoop, options: argparse.Namespace
) -> tuple[Figures, Figures, Crowd]:
    config = make_config(
        document(
            options,
            quorum={"min_learners": options.least, "liveness_timeout_s": LIVENESS_S},
            store={"url": "memory://bench"},
        ),
        source="bench",
    )
    broker, objects = MemoryBroker(loop.time), MemoryStore()
    linked = LinkedStore(objects, options.gbit)
    runtime = Runtime(clock=loop.time, offload=linked.offload, rng=random.Random(0))
    bus = MemoryBus(broker)
    layout = await create(config, bus, objects, options, runtime)
    context = Context(
        name="aggregator",
        settings=config.settings(),
        layout=layout,
        epoch=0,
        bus=MemoryBus(broker),
        store=linked,
        runtime=runtime,
        logger=log.get(),
        gc=config.gc,
    )
    store = Store(
        objects,
        lambda name, other: objects.put(other, objects.get(name)),
        store_updates(config, layout, objects),
    )
    planned = forecast(config, layout, options)
    starts = await beginnings(bus, objects, options.fragments)
    crowd = Crowd(
        clients(config, layout, store, [bus] * options.learners, starts, options), options
    )
    metered = copy_context()
    metered.run(AGGREGATES.set, True)
    work = [
        loop.create_task(aggregate(context), context=metered),
        loop.create_task(crowd.live(bus, objects)),
    ]

    def used() -> tuple[float, int, int]:
        return loop.aggregator_s, linked.read_bytes, linked.written_bytes

    seen = loop.create_task(observe(objects, bus, used, options, crowd.made))
    await asyncio.wait([*work, seen], return_when=asyncio.FIRST_COMPLETED)
    for one in work:
        if one.done():
            one.result()
    return planned, measured(seen.result(), options.settle, options.fragments), crowd


def virtual() -> None:
    """Measure a fleet in virtual time, and print."""
    options = parsed(
        learners=10_000, fragment=65_536, interval=48, step_s=1.0, gbit=10.0, versions=8, kill=0.01
    )
    log.configure("error")
    planned, found, crowd = run_in_virtual_time(options)
    print(json.dumps(vars(options), default=str))
    held = show(planned, found, IN_MEMORY)
    settle = options.settle * options.fragments
    versions = options.fragments / found.interval_s
    reading = float(np.mean(crowd.reading_s)) * versions
    waits = np.array(crowd.waits_s) / options.step_s
    print(f"learners killed: {crowd.deaths}")
    print(
        f"learners that lived and are missing in a version: at most {max(crowd.missing[settle:])}"
    )
    print(f"an update waits {waits.mean():.2f} steps for its version, at worst {waits.max():.1f}")
    print(f"the aggregator takes {1e3 * found.core_s / found.merged:.2f} ms of processor an update")
    print(f"a learner reads with {reading:.4%} of a core")
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    run_part({"real": real, "virtual": virtual})
