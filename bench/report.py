"""Time and memory of `diloco report` on the tape of a long run.

    .venv/bin/python -m bench.report [--versions 100000] [--learners 4] [--keep DIR]

The tape is made up, on a real nats-server: the demo's layout, an update of every learner in each
round, now and then a rejected one and a learner that is killed. The report is made by the command
itself, in a process of its own, whose time and peak memory are shown. Evaluation is left out: it
takes what the task takes.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import tomli_w

from common import names, shards, wire
from common.bus import Bus
from common.config import Config, load_config
from common.nats_server import NatsServer
from common.tape import RunContext, last_record
from diloco.create import create
from diloco.opening import open_run

RUN = "bench"
STEPS = 24
STEP_S = 0.01
TOKENS = STEPS * 1024
BATCH = 512
GOAL_S, GOAL_GB = 60.0, 2.0
# One update in so many is rejected; one round in so many a learner is killed.
REJECTED, KILLED = 997, 9973


@dataclass
class Forger:
    """Makes up the messages of a run, from its version 0 on."""

    context: RunContext
    versions0: list[wire.Record]
    learners: list[str]
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    lives: dict[str, int] = field(default_factory=dict)
    sent: dict[tuple[str, int], int] = field(default_factory=dict)

    async def join(self, learner: str) -> None:
        layout = self.context.layout.digest
        message = wire.Join(run=RUN, learner=learner, layout=layout, host=f"host-of-{learner}")
        self.lives[learner] = await self.context.bus.publish(
            names.join(RUN, learner), wire.encode(message)
        )

    def manifest(self, learner: str, fragment: int, version: int) -> wire.Manifest:
        seq = self.sent[learner, fragment] = self.sent.get((learner, fragment), 0) + 1
        life = self.lives[learner]
        size = self.context.layout.fragments[fragment].size
        block = self.context.layout.block
        shard = wire.Shard(
            name=names.shard(RUN, learner, fragment, 0, life, seq, 0),
            size_bytes=shards.shard_bytes("int4", size, block),
            crc32c=0,
            start=0,
            stop=size,
        )
        return wire.Manifest(
            run=RUN, learner=learner, epoch=0, incarnation=life, seq=seq, fragment=fragment,
            base_version=version, base_digest="0" * 32, layout=self.context.layout.digest,
            codec="int4", shards=(shard,), tokens=TOKENS, steps=STEPS, position=STEPS * seq,
            local_step=STEPS * seq, loss=float(1.5 + 4 / (1 + version / 50) + self.noise() / 20),
            step_time_s=STEP_S, encode_s=0.001, upload_s=0.002, attempt=0, final=False,
        )  # fmt: skip

    def noise(self) -> float:
        return float(self.chance.normal())

    def record(
        self, before: wire.Record, manifests: list[wire.Manifest], now_s: float
    ) -> wire.Record:
        """The next version of a fragment, of all these updates but those rejected."""
        fragment = before.fragment
        segments = len(self.context.layout.fragments[fragment].segment_rules())
        refused = [m for m in manifests if self.chance.integers(REJECTED) == 0]
        inputs = tuple(self.taken(m, segments) for m in manifests if m not in refused)
        length_S = self.chance.uniform(0.5, 1.0, segments) * sum(taken.weight for taken in inputs)
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
                "factors": (1 / length_S).astype(np.float32).tobytes(),
                "delta": delta,
                "deltas": (*before.deltas, delta)[-8:],
                "totals": before.totals.model_copy(
                    update={"updates_merged": merged, "tokens_merged": merged * TOKENS}
                ),
                "policy": before.policy.model_copy(
                    update={
                        "members": tuple(self.member(name, now_s) for name in self.learners),
                        "marks": tuple(self.mark(m) for m in manifests),
                        "norms": tuple(self.chance.random(16)),
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

    def taken(self, manifest: wire.Manifest, segments: int) -> wire.Input:
        staleness = int(self.chance.geometric(0.8)) - 1
        coefficients = self.chance.uniform(100, 200, segments).astype(ml_dtypes.bfloat16)
        return wire.Input(
            learner=manifest.learner, incarnation=manifest.incarnation, seq=manifest.seq,
            stream_seq=1, codec="int4", shards=manifest.shards, weight=TOKENS**2 / STEPS,
            staleness=staleness, discount=(1 + staleness) ** -0.5, clip=1.0,
            norm=abs(1 + self.noise() / 10), tokens=TOKENS, steps=STEPS, loss=manifest.loss,
            final=False, coefficients=coefficients.tobytes(),
        )  # fmt: skip

    def refuse(self, manifest: wire.Manifest) -> wire.Rejected:
        return wire.Rejected(
            learner=manifest.learner, incarnation=manifest.incarnation, seq=manifest.seq,
            stream_seq=1, tokens=TOKENS, steps=STEPS, reason="norm", detail="1e9 times the median",
        )  # fmt: skip

    def member(self, learner: str, now_s: float) -> wire.MemberState:
        return wire.MemberState(
            learner=learner, incarnation=self.lives[learner], live=True, left=False, final=False,
            step_time_s=STEP_S, weight=1.0, heard_at_s=now_s,
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
        """Put so many versions, over all fragments, on the tape."""
        newest = list(self.versions0)
        for learner in self.learners:
            await self.join(learner)
        waiting: list[tuple[str, bytes, str | None]] = []
        for count in range(versions):
            if count % KILLED == KILLED - 1:
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
            yield names.update(RUN, manifest.learner, fragment), wire.encode(manifest), None
        record = newest[fragment] = self.record(newest[fragment], manifests, time.time())
        yield names.record(RUN, fragment), wire.encode(record), record.attempt_id


async def publish(bus: Bus, messages: list[tuple[str, bytes, str | None]]) -> None:
    """Put messages on the tape; one connection keeps their order."""
    await asyncio.gather(
        *(bus.publish(subject, data, msg_id=msg_id) for subject, data, msg_id in messages)
    )


async def make_tape(run_dir: Path, versions: int, learners: int) -> None:
    async with open_run(run_dir) as run:
        context = run.context
        fragments = range(len(context.layout.fragments))
        versions0 = [(await last_record(context, fragment))[0] for fragment in fragments]
        names_of = [f"learner-{index}" for index in range(learners)]
        await Forger(context, versions0, names_of).forge(versions)


def prepare(run_dir: Path, url: str) -> Config:
    document = {
        "run": {"name": RUN, "steps": 1 << 30},
        "bus": {"url": url},
        "store": {"url": str(run_dir / "store")},
    }
    path = run_dir / "run.toml"
    path.write_text(tomli_w.dumps(document))
    config = load_config(path)
    create(config, None)
    return config


def measure(run_dir: Path, out: Path) -> tuple[float, float]:
    """Seconds and peak gigabytes of the command."""
    command = [sys.executable, "-m", "diloco", "report", str(run_dir), "--evaluations", "0"]
    began_s = time.perf_counter()
    process = subprocess.Popen([*command, "--out", str(out)])
    _, status, usage = os.wait4(process.pid, 0)
    took_s = time.perf_counter() - began_s
    assert status == 0, f"diloco report ended with status {status}"
    # Linux counts in units of 1,024 bytes, macOS in bytes.
    return took_s, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="time and memory of diloco report")
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="folder that keeps the report")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        # Nobody cuts the power of a made-up tape.
        with NatsServer(run_dir / "nats", sync_interval="2m") as server:
            prepare(run_dir, server.url)
            began_s = time.perf_counter()
            asyncio.run(make_tape(run_dir, options.versions, options.learners))
            made_s = time.perf_counter() - began_s
            messages = options.versions * (options.learners + 1)
            print(f"tape of {options.versions:,} versions, {messages:,} messages: {made_s:.0f} s")
            took_s, peak_gb = measure(run_dir, options.keep or run_dir / "out")
    print(f"report: {took_s:.1f} s (goal {GOAL_S:.0f}), peak {peak_gb:.2f} GB (goal {GOAL_GB:g})")


if __name__ == "__main__":
    main()
