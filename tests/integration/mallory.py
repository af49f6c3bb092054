"""Hand-made messages of learners with good credentials and bad intentions."""

import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from audit import Tape
from harness import World

from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.shards import shard_ranges
from diloco.common.storage.bus import Bus
from diloco.common.storage.store import open_store
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.run.history import Sent

TOKENS_PER_STEP = 1000


@dataclass
class Mallory:
    """Hand-made messages of as many learners as it takes: each trick has a name of its own."""

    world: World
    tape: Tape
    expected: dict[Sent, str] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    undecodable: int = 0

    @property
    def names(self) -> list[str]:
        return [*self.lives]

    async def join(self, bus: Bus, learner: str) -> int:
        join = wire.Join(
            run=self.world.name, learner=learner, layout=self.tape.layout.digest, host="mallory"
        )
        self.lives[learner] = await bus.publish(
            names.join(self.world.name, learner), wire.encode(join)
        )
        return self.lives[learner]

    async def leave(self, bus: Bus) -> None:
        for learner, incarnation in self.lives.items():
            leave = wire.Leave(
                run=self.world.name,
                learner=learner,
                incarnation=incarnation,
                position=0,
                fragments=(),
            )
            await bus.publish(names.leave(self.world.name, learner), wire.encode(leave))

    def payloads(self, fragment: int, value: float = 1e-3) -> list[bytes]:
        """An update's shards as an honest learner would store them."""
        sync, size = self.tape.settings.sync, self.tape.layout.fragments[fragment].size
        return [
            shards.pack(
                sync.codec,
                encode(sync.codec, np.full(stop - start, value, np.float32), sync.block),
                sync.block,
            )
            for start, stop in shard_ranges(size, sync.block, sync.shard_elements)
        ]

    def manifest(
        self, learner: str, payloads: list[bytes] | None = None, **changes: Any
    ) -> wire.Manifest:
        """A manifest that is right but for `changes`; its shards are stored if given."""
        fragment, incarnation = changes.get("fragment", 0), self.lives[learner]
        seq, sync = changes.get("seq", 1), self.tape.settings.sync
        claimed = payloads or self.payloads(fragment)
        ranges = shard_ranges(
            self.tape.layout.fragments[fragment].size, sync.block, sync.shard_elements
        )
        entries = []
        for index, ((start, stop), data) in enumerate(zip(ranges, claimed, strict=True)):
            name = names.shard(self.world.name, learner, fragment, 0, incarnation, seq, index)
            if payloads is not None:
                open_store(str(self.world.store)).put(name, data)
            entries.append(
                wire.Shard.model_construct(
                    name=name,
                    size_bytes=len(data),
                    crc32c=shards.crc32c(data),
                    slices=slices.of_range(start, stop, sync.block),
                )
            )
        newest = self.tape.records[fragment][-1][1]
        fields: dict[str, Any] = {
            "run": self.world.name,
            "learner": learner,
            "epoch": 0,
            "incarnation": incarnation,
            "seq": seq,
            "fragment": fragment,
            "base_version": newest.version,
            "base_digest": newest.view_digest,
            "layout": self.tape.layout.digest,
            "codec": sync.codec,
            "shards": tuple(entries),
            "tokens": 80,
            "steps": 10,
            "position": 10,
            "local_step": 10,
            "loss": 1.0,
            "step_time_s": 0.02,
            "encode_s": 0.0,
            "upload_s": 0.0,
            "attempt": 0,
            "final": False,
        }
        return wire.Manifest.model_construct(**{**fields, **changes})

    async def publish(self, bus: Bus, manifest: wire.Manifest) -> None:
        subject = names.update(self.world.name, manifest.learner, manifest.fragment)
        await bus.publish(subject, wire.encode(manifest), msg_id=secrets.token_hex(16))

    async def refused_for(self, bus: Bus, reason: str, manifest: wire.Manifest) -> None:
        """Publish what is to be rejected for `reason`."""
        key = Sent(manifest.learner, manifest.incarnation, manifest.fragment, manifest.seq)
        self.expected[key] = reason
        await self.publish(bus, manifest)

    async def raw(self, bus: Bus, payload: bytes, learner: str, fragment: object = 0) -> None:
        self.undecodable += 1
        await bus.publish(names.update(self.world.name, learner, str(fragment)), payload)
