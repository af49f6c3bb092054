"""Time and memory of what reads a whole tape, on runs of as many versions as are asked for.

    python -m bench.tapes make DIR --versions 1000        # a run's bundle, by the real writers
    python -m bench.tapes make DIR --versions 16 --learners 1000
    python -m bench.tapes measure DIR                     # what each command takes
    python -m bench.tapes index DIR --versions 100000     # what the index of so many takes

The run is made by the real aggregator, on a bus in memory and a store in a folder; its learners are
hands that send noise, so that the time goes into rounds. Each command then runs in a process of its
own, and its highest resident memory is read when it has ended.
"""

import argparse
import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco.aggregator.context import Context
from diloco.aggregator.daemon import aggregate
from diloco.common import log, names, shards, slices, wire
from diloco.common.bus import MemoryBroker, MemoryBus, Message
from diloco.common.config import BusSection, GcSection, RunSettings
from diloco.common.quantize import encode
from diloco.common.service import Runtime, cancel
from diloco.common.store import MemoryStore, ObjectStore
from diloco.common.tape import RunContext, last_record, messages_of, read_record
from diloco.learner import tree
from diloco.learner.task import Task
from diloco.operate.create import create_run

RUN = "tape"
SHAPE, FRAGMENTS = (8, 16), 4
STEPS = 8
PATIENCE_S = 600.0
ROUND_S = 1.0
# Starts a command from a small process: what a process has in memory counts for those it starts.
LAUNCH = """
import json, resource, subprocess, sys, time
began_s = time.monotonic()
status = subprocess.call(sys.argv[1:], stderr=subprocess.STDOUT)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
told = {
    "status": status, "seconds": round(time.monotonic() - began_s, 1),
    "cpu_s": round(used.ru_utime + used.ru_stime, 1),
    "peak_mib": round(used.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)),
}
json.dump(told, sys.stderr)
"""
# Of a command that writes, where to.
OUT = "OUT"
COMMANDS = {
    "verify": ["replay"],
    "decide": ["replay", "--decide"],
    "score": ["replay", "--score"],
    "blame": ["replay", "--blame", "--json"],
    "doctor": ["doctor"],
    "learners": ["learners"],
    "status": ["status", "--once"],
    "report": ["report", "--out", OUT],
}


def build(*, steps: int, seed: int) -> Task:  # noqa: ARG001 - as a task's
    """A task whose evaluation takes no time."""

    def init(key: Any) -> dict[str, Any]:
        keys = jax.random.split(key, FRAGMENTS)
        return {f"part{i}": jax.random.normal(keys[i], SHAPE) for i in range(FRAGMENTS)}

    def loss(params: Any, batch: Any) -> Any:
        return sum(jnp.square(leaf - batch).mean() for leaf in params.values())

    def batches(learner: str, position: int) -> Any:  # noqa: ARG001
        while True:
            yield np.zeros((), np.float32)

    def evaluate(params: Any) -> float:
        return float(sum(np.square(np.asarray(leaf)).mean() for leaf in params.values()))

    return Task(
        init=init, loss=loss, batches=batches, evaluate=evaluate, tokens_per_batch=1,
        optimizer=optax.identity(), schedule=optax.constant_schedule(0.1),
    )  # fmt: skip


async def at_once(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Run on the event loop what a daemon gives to a thread: nothing here blocks."""
    return function(*args, **kwargs)


class Maker:
    """A run under way in this process.

    Its clock gains `ROUND_S` with each round, which takes a small part of that: who announces a
    thousand updates within seconds is taken for a flood.
    """

    def __init__(self, store: ObjectStore, learners: int, began_s: float) -> None:
        self.gained_s = began_s - time.time()
        self.learners = [f"island-{index:04d}" for index in range(learners)]
        settings = RunSettings.model_validate(
            {
                "run": {"name": RUN, "steps": 1 << 30},
                "task": {"build": "bench.tapes:build"},
                "sync": {
                    "fragments": FRAGMENTS, "interval_steps": STEPS, "block": 16,
                    "snapshot_interval_versions": 50,
                },
                "outer": {"learning_rate": 0.1, "momentum": 0.5},
                "quorum": {
                    "pace": 0.0, "min_learners": learners, "deadline_s": PATIENCE_S,
                    "liveness_timeout_s": 1e9,
                },
            }
        )  # fmt: skip
        task = build(steps=1, seed=0)
        self.params = task.init(jax.random.key(0))
        self.bus = MemoryBus(MemoryBroker(self.clock))
        self.context = Context(
            name="aggregator", settings=settings, layout=tree.task_layout(task, settings.sync),
            epoch=0, bus=self.bus, store=store,
            runtime=Runtime(clock=self.clock, offload=at_once), logger=log.get(),
            gc=GcSection(enabled=False),
        )  # fmt: skip
        self.lives: dict[str, int] = {}
        sync, size = settings.sync, self.context.layout.fragments[0].size
        rng = np.random.default_rng(0)
        noise = [jnp.asarray(rng.normal(size=size) / 100, jnp.float32) for _ in range(64)]
        self.payloads = [
            shards.pack(sync.codec, encode(sync.codec, one, sync.block), sync.block)
            for one in noise
        ]
        self.blocks = slices.describe(np.arange(size // sync.block))

    def clock(self) -> float:
        """The run's time, in seconds since the epoch."""
        return time.time() + self.gained_s

    async def make(self, versions: int) -> None:
        """Rounds until there are so many versions, over all fragments."""
        context = self.context
        await create_run(
            context.settings, BusSection(), context.layout, self.params, self.bus, context.store,
            context.runtime,
        )  # fmt: skip
        work = asyncio.ensure_future(aggregate(context))
        try:
            for learner in self.learners:
                join = wire.Join(run=RUN, learner=learner, layout=context.layout.digest, host="h")
                self.lives[learner] = await self.bus.publish(
                    names.join(RUN, learner), wire.encode(join)
                )
                beat = wire.Heartbeat(
                    learner=learner, incarnation=self.lives[learner], local_step=0, global_step=0,
                    tokens=0, loss=1.0, tokens_per_s=0.0, step_time_s=0.001, stall_s=0.0,
                    run_s=1.0, bytes_up=0, bytes_down=0, updates_sent=0, state="training",
                )  # fmt: skip
                await self.bus.publish(names.heartbeat(RUN, learner), wire.encode(beat))
            rounds = (self._rounds(f, versions // FRAGMENTS) for f in range(FRAGMENTS))
            await asyncio.gather(*rounds)
        finally:
            await cancel(work)
            with contextlib.suppress(asyncio.CancelledError):
                work.result()

    async def _rounds(self, fragment: int, count: int) -> None:
        context, subject = self.context, names.record(RUN, fragment)
        base, at = await last_record(context, fragment)
        records = context.bus.read(context.tape, [subject], at + 1)
        async with contextlib.aclosing(records):  # type: ignore[type-var]
            for seq in range(1, count + 1):
                for index, learner in enumerate(self.learners):
                    await self._send(learner, index, fragment, base, seq)
                async with asyncio.timeout(PATIENCE_S):
                    message = await anext(records)
                base = await read_record(context, message)
                self.gained_s += ROUND_S / FRAGMENTS

    async def _send(
        self, learner: str, index: int, fragment: int, base: wire.Record, seq: int
    ) -> None:
        context, life = self.context, self.lives[learner]
        data = self.payloads[(7 * seq + index) % len(self.payloads)]
        name = names.shard(RUN, learner, fragment, 0, life, seq, 0)
        context.store.put(name, data)
        shard = wire.Shard(
            name=name, size_bytes=len(data), crc32c=shards.crc32c(data), slices=self.blocks
        )
        manifest = wire.Manifest(
            run=RUN, learner=learner, epoch=0, incarnation=life, seq=seq, fragment=fragment,
            base_version=base.version, base_digest=base.view_digest, layout=context.layout.digest,
            codec=context.settings.sync.codec, tokens=STEPS, steps=STEPS, position=STEPS * seq,
            shards=(shard,), local_step=STEPS * seq, loss=1.0, step_time_s=0.001, encode_s=0.0,
            upload_s=0.0, attempt=0, final=False,
        )  # fmt: skip
        await self.bus.publish(names.update(RUN, learner, fragment), wire.encode(manifest))


async def make(folder: Path, versions: int, learners: int) -> None:
    """A run's bundle, in one process and without a server."""
    from diloco.common.kept import BundleWriter

    store, began_s = MemoryStore(), time.monotonic()
    maker = Maker(store, learners, time.time() - ROUND_S * versions / FRAGMENTS)
    await maker.make(versions)
    context: RunContext = maker.context
    folder.mkdir(parents=True, exist_ok=True)
    header = {"run": RUN, "made_s": maker.clock(), "redacted": False, "lost": ""}
    with BundleWriter(folder / "run.bundle", header) as writer:
        subjects = names.tape_subjects(RUN)
        async for message in messages_of(maker.bus, context.tape, subjects):
            writer.message(message)
        beats = names.ops_subjects(RUN)
        async for message in messages_of(maker.bus, names.ops_stream(RUN), beats):
            writer.ops(message)
        for info in store.list(f"{RUN}/"):
            writer.object(info.name, store.get(info.name))
    size = (folder / "run.bundle").stat().st_size
    took_s = time.monotonic() - began_s
    print(json.dumps({"versions": versions, "bytes": size, "made_s": round(took_s, 1)}))


def measure(folder: Path, commands: list[str], more: list[str]) -> None:
    """Run each command on the bundle; a line of JSON for each."""
    for name in commands:
        verb, *options = [str(folder / "report") if w == OUT else w for w in COMMANDS[name]]
        command = [sys.executable, "-m", "diloco", verb, str(folder / "run.bundle"), *options]
        with (folder / f"{name}.out").open("wb") as out:
            done = subprocess.run(
                [sys.executable, "-c", LAUNCH, *command, *more], stdout=out, stderr=subprocess.PIPE,
                check=True,
            )  # fmt: skip
        print(json.dumps({"command": name, **json.loads(done.stderr)}), flush=True)


def index(versions: int) -> None:
    """What a history and a kept file index of such a run's messages, without the messages."""
    from diloco.common.kept.index import Log
    from diloco.projections.spool import Spool, Spooled, Times

    learners = 3
    began_mib, log_, times_s, spool = resident_mib(), Log(), Times(), Spool()
    entries = [Spooled[int](spool, lambda at, _: at) for _ in range(2)]
    whose, sizes, places = array("i"), array("i"), array("i")
    for seq in range(1, versions * (learners + 1) + 1):
        subject = f"subject{seq % (FRAGMENTS * (learners + 1))}"
        log_.add(100 * seq, Message(subject, seq, 0.0, b"", ""))
        times_s.add(seq, float(seq))
        if seq % (learners + 1):
            whose.append(seq % learners)
            sizes.append(300)
            places.append(seq)
            for one in entries:
                one.add(seq, 100 * seq)
    held_mib = resident_mib() - began_mib
    del entries, one, whose, sizes, places
    left_mib = resident_mib() - began_mib
    print(json.dumps({"index_mib": round(held_mib, 1), "without_messages_mib": round(left_mib, 1)}))


def resident_mib() -> float:
    """What this process has in memory now; on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    """Make, measure or count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "measure", "index"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--learners", type=int, default=3)
    parser.add_argument("--commands", nargs="+", default=[*COMMANDS], choices=[*COMMANDS])
    given, more = parser.parse_known_args()
    log.configure("error")
    if given.what == "make":
        asyncio.run(make(given.folder, given.versions, given.learners))
    elif given.what == "index":
        index(given.versions)
    else:
        measure(given.folder, given.commands, more)


if __name__ == "__main__":
    main()
