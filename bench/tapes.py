"""Long tapes, and what reading a whole one takes.

`Forger` makes up the tape of a long run, for the benches and the tests of what reads one: the
layout is the run's own, every learner sends an update to each round; now and then one is rejected,
and a learner is killed. No object is stored, so nothing of it can be merged again.

`python -m bench.tapes` measures time and memory of what reads a tape, of runs that can be merged:

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from diloco.aggregator.context import Context
from diloco.aggregator.daemon import aggregate
from diloco.common.process import log
from diloco.common.process.config import BusSection, GcSection, RunSettings
from diloco.common.process.retry import Runtime
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.storage.bus import Bus, MemoryBroker, MemoryBus, Message
from diloco.common.storage.store import MemoryStore, ObjectStore
from diloco.common.storage.tape import RunContext, last_record, messages_of, read_record
from diloco.learner.task import Task
from diloco.learner.tensors import tree
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.operate.create import create_run

# --- Made up


STEPS = 24
STEP_S = 0.01
TOKENS = STEPS * 1024
# Messages that are published at once.
BATCH = 512

Waiting = list[tuple[str, bytes, str | None]]


@dataclass
class Forger:
    """Makes up the messages of a run, from its version 0 on.

    Attributes:
        context: the run's.
        learners: their names.
        rejected_one_in: updates for each that is rejected.
        killed_one_in: rounds for each in which the last learner is killed and joins again.
    """

    context: RunContext
    learners: list[str]
    rejected_one_in: int = 997
    killed_one_in: int = 9973
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    lives: dict[str, int] = field(default_factory=dict)
    sent: dict[tuple[str, int], int] = field(default_factory=dict)

    async def join(self, learner: str) -> None:
        layout = self.context.layout.digest
        message = wire.Join(
            run=self.context.run, learner=learner, layout=layout, host=f"host-of-{learner}"
        )
        self.lives[learner] = await self.context.bus.publish(
            names.join(self.context.run, learner), wire.encode(message)
        )

    def manifest(self, learner: str, fragment: int, version: int) -> wire.Manifest:
        seq = self.sent[learner, fragment] = self.sent.get((learner, fragment), 0) + 1
        life = self.lives[learner]
        size = self.context.layout.fragments[fragment].size
        block = self.context.layout.block
        shard = wire.Shard(
            name=names.shard(self.context.run, learner, fragment, 0, life, seq, 0),
            size_bytes=shards.shard_bytes("int4", size, block),
            crc32c=0,
            slices=slices.of_range(0, size, block),
        )
        return wire.Manifest(
            run=self.context.run, learner=learner, epoch=0, incarnation=life, seq=seq,
            fragment=fragment,
            base_version=version, base_digest="0" * 32, layout=self.context.layout.digest,
            codec="int4", shards=(shard,), tokens=TOKENS, steps=STEPS, position=STEPS * seq,
            local_step=STEPS * seq, loss=float(1.5 + 4 / (1 + version / 50) + self.noise() / 20),
            step_time_s=STEP_S, encode_s=0.001, upload_s=0.002, attempt=0, final=False,
        )  # fmt: skip

    def noise(self) -> float:
        return float(self.rng.normal())

    def record(
        self, before: wire.Record, manifests: list[wire.Manifest], now_s: float
    ) -> wire.Record:
        """The next version of a fragment, of all these updates but those rejected."""
        fragment = before.fragment
        segments = len(self.context.layout.fragments[fragment].segment_rules())
        refused = [m for m in manifests if self.rng.integers(self.rejected_one_in) == 0]
        inputs = tuple(self.taken(m, segments, now_s) for m in manifests if m not in refused)
        # The merged norm over the length of the sum of directions, as `merge.factors` has it.
        shares = max(sum(taken.weight * taken.discount for taken in inputs), 1.0)
        factor_S = 1 / (self.rng.uniform(0.6, 0.9, segments) * shares)
        merged = before.totals.updates_merged + len(inputs)
        delta = before.snapshot.model_copy(update={"size_bytes": manifests[0].shards[0].size_bytes})
        return before.model_copy(
            update={
                "version": before.version + 1,
                "what": "version" if inputs else "verdict",
                "global_step": before.global_step + STEPS,
                "inputs": inputs,
                "rejected": tuple(self.refuse(m) for m in refused),
                "reason": "complete",
                "factors": factor_S.astype(np.float32).tobytes(),
                "delta": delta,
                "deltas": (*before.deltas, delta)[-8:],
                "totals": before.totals.model_copy(
                    update={
                        "updates_merged": merged,
                        "tokens_merged": merged * TOKENS,
                        "tokens_credited": merged * TOKENS,
                        "updates_rejected": before.totals.updates_rejected + len(refused),
                    }
                ),
                "policy": before.policy.model_copy(
                    update={
                        "members": tuple(self.member(name, now_s) for name in self.learners),
                        "marks": tuple(self.mark(m) for m in manifests),
                    }
                ),
                "observations": tuple(self.fetched(m, now_s) for m in manifests),
                "opened_at_s": now_s - 0.03,
                "quorum_at_s": now_s - 0.02,
                "closed_at_s": now_s - 0.005,
                "merged_at_s": now_s - 0.003,
                "attempt_id": f"{fragment}-{before.version}",
            }
        )

    def taken(self, manifest: wire.Manifest, segments: int, now_s: float) -> wire.Input:
        staleness = int(self.rng.geometric(0.8)) - 1
        weight, discount = TOKENS**2 / STEPS, (1 + staleness) ** -0.5
        # Each segment's norm is 1.
        coefficients = np.full(segments, weight * discount, ml_dtypes.bfloat16)
        return wire.Input(
            learner=manifest.learner, incarnation=manifest.incarnation, seq=manifest.seq,
            stream_seq=1, codec="int4", shards=manifest.shards, weight=weight,
            staleness=staleness, discount=discount, clip=1.0,
            norm=abs(1 + self.noise() / 10), tokens=TOKENS, steps=STEPS, loss=manifest.loss,
            final=False, coefficients=coefficients.tobytes(), weight_unit=0, steps_credited=STEPS,
            tokens_credited=TOKENS, announced_at_s=now_s - 0.03,
        )  # fmt: skip

    def refuse(self, manifest: wire.Manifest) -> wire.Rejected:
        return wire.Rejected(
            learner=manifest.learner, incarnation=manifest.incarnation, seq=manifest.seq,
            stream_seq=1, tokens=TOKENS, steps=STEPS, reason="checksum",
            detail="a shard is not what its manifest says",
        )  # fmt: skip

    def member(self, learner: str, now_s: float) -> wire.MemberState:
        return wire.MemberState(
            learner=learner, incarnation=self.lives[learner], live=True, left=False, final=False,
            step_time_s=STEP_S, weight=1.0, heard_at_s=now_s, offences=0,
            tokens_per_step=TOKENS / STEPS, read_at_s=now_s, speed=1 / STEP_S, unused_s=0.0,
            norm=1.0, missed=0, not_holding=(),
        )  # fmt: skip

    def mark(self, manifest: wire.Manifest) -> wire.Mark:
        return wire.Mark(
            learner=manifest.learner, incarnation=manifest.incarnation, seq=manifest.seq,
            stream_seq=1,
        )  # fmt: skip

    def fetched(self, manifest: wire.Manifest, now_s: float) -> wire.Observation:
        return wire.Observation(
            what="fetched", at_s=now_s, after_seq=1, learner=manifest.learner,
            incarnation=manifest.incarnation, seq=manifest.seq, value=1.0,
        )  # fmt: skip

    async def forge(self, versions: int) -> None:
        """Put this number of versions, over all fragments, on the tape."""
        fragments = range(len(self.context.layout.fragments))
        newest = [(await last_record(self.context, fragment))[0] for fragment in fragments]
        for learner in self.learners:
            await self.join(learner)
        waiting: Waiting = []
        for count in range(versions):
            if count % self.killed_one_in == self.killed_one_in - 1:
                await publish(self.context.bus, waiting)
                waiting = []
                await self.join(self.learners[-1])
            waiting += self.round(newest, count % len(newest))
            if len(waiting) >= BATCH:
                await publish(self.context.bus, waiting)
                waiting = []
        await publish(self.context.bus, waiting)

    def round(
        self, newest: list[wire.Record], fragment: int
    ) -> Iterator[tuple[str, bytes, str | None]]:
        manifests = [
            self.manifest(name, fragment, newest[fragment].version) for name in self.learners
        ]
        for manifest in manifests:
            yield (
                names.update(self.context.run, manifest.learner, fragment),
                wire.encode(manifest),
                None,
            )
        record = newest[fragment] = self.record(newest[fragment], manifests, time.time())
        yield names.record(self.context.run, fragment), wire.encode(record), record.attempt_id


async def publish(bus: Bus, messages: Waiting) -> None:
    """Put messages on the tape; one connection keeps their order."""
    await asyncio.gather(
        *(bus.publish(subject, data, msg_id=msg_id) for subject, data, msg_id in messages)
    )


# --- Merged


RUN = "tape"
SHAPE, FRAGMENTS = (8, 16), 4
MERGED_STEPS = 8
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
    "learners": ["status", "--learners"],
    "status": ["status", "--once"],
    "report": ["report", "--out", OUT],
}


def build(*, steps: int, seed: int) -> Task:  # noqa: ARG001 - as a task's
    """A task whose evaluation takes no time."""

    def init(key: Any) -> dict[str, Any]:
        keys = jax.random.split(key, FRAGMENTS)
        return {f"part{i}": jax.random.normal(keys[i], SHAPE) for i in range(FRAGMENTS)}

    def loss(params: Any, batch: Any, key: Any) -> Any:  # noqa: ARG001
        return sum(jnp.square(leaf - batch).mean() for leaf in params.values()), {}

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
                    "fragments": FRAGMENTS, "interval_steps": MERGED_STEPS, "block": 16,
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
        """Make rounds until there is this number of versions, over all fragments."""
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
            codec=context.settings.sync.codec, tokens=MERGED_STEPS, steps=MERGED_STEPS,
            position=MERGED_STEPS * seq, shards=(shard,), local_step=MERGED_STEPS * seq, loss=1.0,
            step_time_s=0.001, encode_s=0.0, upload_s=0.0, attempt=0, final=False,
        )  # fmt: skip
        await self.bus.publish(names.update(RUN, learner, fragment), wire.encode(manifest))


async def make(folder: Path, versions: int, learners: int) -> None:
    """A run's bundle, in one process and without a server."""
    from diloco.common.storage.bundle import BundleWriter

    store, began_s = MemoryStore(), time.monotonic()
    maker = Maker(store, learners, time.time() - ROUND_S * versions / FRAGMENTS)
    await maker.make(versions)
    context: RunContext = maker.context
    folder.mkdir(parents=True, exist_ok=True)
    header = {"run": RUN, "made_s": maker.clock(), "objects": True, "redacted": False, "lost": ""}
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
    """Print the memory that history and bundle take to index such a run, without its messages."""
    from diloco.common.storage.bundle.reader import StreamIndex
    from diloco.run.spool import Spool, Spooled, Times

    learners = 3
    began_mib, stream_index, times_s, spool = resident_mib(), StreamIndex(), Times(), Spool()
    entries = [Spooled[int](spool, lambda at, _: at) for _ in range(2)]
    whose, sizes, places = array("i"), array("i"), array("i")
    for seq in range(1, versions * (learners + 1) + 1):
        subject = f"subject{seq % (FRAGMENTS * (learners + 1))}"
        stream_index.add(100 * seq, Message(subject, seq, 0.0, b"", ""))
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
    """MiB that this process has in memory now; on Linux."""
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
