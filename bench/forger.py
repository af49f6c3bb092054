"""Makes up the tape of a long run, for the bench and the tests of the report.

The layout is the run's own. Every learner sends an update to each round; now and then one is
rejected, and a learner is killed. No object is stored, so nothing of it can be merged again.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from diloco.common import names, shards, slices, wire
from diloco.common.bus import Bus
from diloco.common.tape import RunContext, last_record

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
        inputs = tuple(self.taken(m, segments) for m in manifests if m not in refused)
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
                        "updates_rejected": before.totals.updates_rejected + len(refused),
                    }
                ),
                "policy": before.policy.model_copy(
                    update={
                        "members": tuple(self.member(name, now_s) for name in self.learners),
                        "marks": tuple(self.mark(m) for m in manifests),
                        "norms": tuple(self.rng.random(16)),
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
        staleness = int(self.rng.geometric(0.8)) - 1
        weight, discount = TOKENS**2 / STEPS, (1 + staleness) ** -0.5
        # Each segment's norm is 1.
        coefficients = np.full(segments, weight * discount, ml_dtypes.bfloat16)
        return wire.Input(
            learner=manifest.learner, incarnation=manifest.incarnation, seq=manifest.seq,
            stream_seq=1, codec="int4", shards=manifest.shards, weight=weight,
            staleness=staleness, discount=discount, clip=1.0,
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
            step_time_s=STEP_S, weight=1.0, heard_at_s=now_s, offences=0,
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
