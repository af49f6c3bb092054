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
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import tomli_w

from diloco.common.process import log
from diloco.common.process.config import Config, load_config
from diloco.common.process.nats_server import NatsServer
from diloco.common.process.retry import Runtime
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.layout import Layout, Tensor, make_layout
from diloco.common.storage.bus import Bus, jetstream
from diloco.common.storage.store import ObjectStore, open_store
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


@dataclass
class Store:
    """The store, and one update of each fragment that all learners send."""

    server: GcsServer
    updates: list[tuple[wire.Shard, ...]] = field(default_factory=list)

    def link(self, fragment: int, prefix: str) -> tuple[wire.Shard, ...]:
        """A fragment's update under a learner's own names."""
        linked = []
        for index, shard in enumerate(self.updates[fragment]):
            name = f"{prefix}{index}"
            stored = self.server.find(BUCKET, PREFIX + shard.name)
            self.server.copy(stored, BUCKET, PREFIX + name)
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
    steps: int = 0

    async def live(self) -> None:
        """Train for ever."""
        self.rules = sync_rules(self.config.sync)
        self.state = sync.begin(self.rules, self.starts)
        message = wire.Join(run=RUN, learner=self.name, layout=self.layout.digest, host="bench")
        self.incarnation = await self.bus.publish(names.join(RUN, self.name), wire.encode(message))
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._read())
            tasks.create_task(self._listen())
            tasks.create_task(self._step())

    async def _step(self) -> None:
        began_s = time.monotonic()
        while True:
            self.steps += 1
            await asyncio.sleep(max(0.0, began_s + self.steps * self.step_s - time.monotonic()))
            self._tell(Stepped(time.time(), TOKENS))

    def _tell(self, event: Event) -> None:
        self.state, effects = sync.step(self.rules, self.state, event)
        for effect in effects:
            if isinstance(effect, Send):
                self._tasks.create_task(self._send(effect))

    async def _send(self, send: Send) -> None:
        await asyncio.sleep(self.up_s * self.rng.uniform(1 - JITTER, 1 + JITTER))
        manifest = self._manifest(send)
        await self.bus.publish(names.update(RUN, self.name, send.fragment), wire.encode(manifest))
        self._tell(Published(time.time(), send.fragment, send.seq))

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
            word = found.word if isinstance(found, wire.RecordPointer) else wire.word_of(found)
            answer = await asyncio.to_thread(_answer, found, self.name, self.incarnation)
            ready = Ready(
                word.fragment, message.seq, word.version, word.view_digest, word.global_step,
                answer.resolved_seq,
            )  # fmt: skip
            self._tasks.create_task(self._adopt(ready))

    async def _adopt(self, ready: Ready) -> None:
        await asyncio.sleep(self.down_s)
        self._tell(ready)

    async def _listen(self) -> None:
        async for _, payload in self.bus.listen(names.round_open(RUN, "*")):
            opened = wire.decode(wire.RoundOpen, payload)
            self._tell(RoundOpened(opened.fragment, opened.version))


@lru_cache(maxsize=64)
def _decoded(payload: bytes) -> wire.Record | wire.RecordPointer:
    """Decoded once for all learners of this process."""
    return wire.decode_record(payload)


@lru_cache(maxsize=1)
def _bucket() -> ObjectStore:
    return open_store(STORE_URL, emulator=True)


def _answer(found: wire.Record | wire.RecordPointer, learner: str, incarnation: int) -> wire.Answer:
    """A record's answer to a learner; of an object, each learner reads its own range."""
    if isinstance(found, wire.Record):
        return wire.answers_of(found).get((learner, incarnation), wire.Answer())
    start, stop = wire.answers_range(found, learner)
    data = _bucket().get_range(found.body.name, start, stop)
    return wire.answer_in(found, data, learner, incarnation)


def _record(subject: str, payload: bytes) -> wire.Record:
    """The whole record."""
    found = _decoded(payload)
    return record_in(_bucket(), subject, found) if isinstance(found, wire.RecordPointer) else found


def configure(folder: Path, url: str, options: argparse.Namespace) -> Config:
    """The run's file, read."""
    document = {
        "run": {"name": RUN, "steps": (1 << 31) - 1},
        "sync": {"fragments": options.fragments, "interval_steps": options.interval},
        "quorum": {"min_learners": options.least, "liveness_timeout_s": 1e6},
        "bus": {"url": url},
        "store": {"url": STORE_URL, "emulator": True},
        "gc": {"enabled": False},
        "task": {"options": {"parameters": options.fragment * options.fragments}},
    }
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(document))
    return load_config(path)


async def create(config: Config, bus: Bus, options: argparse.Namespace) -> Layout:
    """Streams, layout and version 0 of a model that nobody trains."""
    shape = (options.fragment // TENSORS // 64, 64)
    count = TENSORS * options.fragments
    tensors = [Tensor(name=f"t{i:03}", shape=shape, dtype="float32") for i in range(count)]
    layout = make_layout(tensors, fragments=options.fragments, block=config.sync.block)
    zeros = jnp.zeros(shape)
    params = {tensor.name: zeros for tensor in tensors}
    store = open_store(STORE_URL, emulator=True)
    await create_run(config.settings(), config.bus, layout, params, bus, store, Runtime())
    return layout


def store_updates(config: Config, layout: Layout) -> list[tuple[wire.Shard, ...]]:
    """An update of each fragment, stored once."""
    store, rng = open_store(STORE_URL, emulator=True), np.random.default_rng(0)
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
    store: Store, bus: Bus, pids: list[int], options: argparse.Namespace
) -> list[VersionSample]:
    """Versions as they come, until each fragment has as many as are wanted."""
    found: list[VersionSample] = []
    server = store.server
    left = dict.fromkeys(range(options.fragments), options.settle + options.versions)
    async for message in bus.read(names.tape_stream(RUN), [names.record(RUN, "*")], 1):
        record = _record(message.subject, message.payload)
        if record.rejected:
            sys.exit(f"rejected: {record.rejected[0].reason}: {record.rejected[0].detail}")
        if record.what != "version" or not record.version:
            continue
        staleness = tuple(taken.staleness for taken in record.inputs)
        used_s = sum(map(cpu_s, pids))
        found.append(
            VersionSample(
                record.fragment, record.aggregator, message.time_s, staleness, used_s,
                server.down.carried, server.up.carried,
            )
        )  # fmt: skip
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
    return Figures(
        made.participants,
        made.staleness,
        made.interval_s,
        made.busy_cores * DAY_S / versions,
        made.participants * sized.update_bytes / options.fragments,
        sized.delta_bytes / options.fragments + snapshots,
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


async def measure(
    folder: Path, url: str, server: GcsServer, options: argparse.Namespace
) -> tuple[Figures, Figures]:
    """(forecast, measured)."""
    config = configure(folder, url, options)
    bus = await jetstream.connect(url, name="bench")
    layout = await create(config, bus, options)
    store = Store(server, store_updates(config, layout))
    planned = forecast(config, layout, options)
    starts = []
    for fragment in range(options.fragments):
        message = await bus.last(names.tape_stream(RUN), names.record(RUN, fragment))
        assert message is not None
        record = _record(message.subject, message.payload)
        starts.append(Start(0, record.view_digest, message.seq, 0))
    buses: list[Bus] = [
        await jetstream.connect(url, name=f"learner-{n}") for n in range(options.learners)
    ]
    processes = {
        name: start_aggregator(folder, name)
        for name in (f"aggregator-{number}" for number in range(options.aggregators))
    }
    fleet = clients(config, layout, store, buses, tuple(starts), options)
    living = [asyncio.ensure_future(client.live()) for client in fleet]
    try:
        pids = [process.pid for process in processes.values()]
        seen = await observe(store, bus, pids, options)
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


def show(planned: Figures, found: Figures) -> bool:
    """Print the comparison; whether every forecast is near enough."""
    held = True
    print("| of a version | forecast | measured | error | goal |")
    for name, said, was, goal in zip(Figures._fields, planned, found, GOALS, strict=True):
        off = abs(said - was) if name == "staleness" else abs(said / was - 1)
        held &= off <= goal
        unit = f"{off:.3f}" if name == "staleness" else f"{said / was - 1:+.1%}"
        print(f"| {name} | {said:.5g} | {was:.5g} | {unit} | {goal:g} |")
    return held


def parsed() -> argparse.Namespace:
    """The command line."""
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
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
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


if __name__ == "__main__":
    main()
