"""A whole run within one process: the real aggregator on a bus and a store in memory.

Learners are hands: a test says what they send. Quorums of one make a version of each update.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from diloco.aggregator.context import Context
from diloco.aggregator.daemon import aggregate
from diloco.common.process import log
from diloco.common.process.config import BusSection, GcSection, RunSettings
from diloco.common.process.retry import Runtime
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.layout import Hint, Tensor, default_hint, make_layout
from diloco.common.storage.bus import Bus, MemoryBus
from diloco.common.storage.store import MemoryStore, ObjectStore
from diloco.common.storage.tape import Recorded, last_record, records_of
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.operate.create import create_run

RUN = "lab"
ROWS = 8
BLOCK = 16
SNAPSHOT_EVERY = 3
# As long as a test waits for what should come at once.
PATIENCE_S = 300.0


class Lab:
    """One run: its context, and what learners' hands need.

    Args:
        fragments: how many.
        sections: of the settings, over those that a lab has anyway.
        store: of its objects; None: in memory.
        hint: of its tensors.
        gc: of the collection of garbage.
    """

    def __init__(
        self,
        *,
        fragments: int = 1,
        sections: dict[str, Any] | None = None,
        store: ObjectStore | None = None,
        hint: Hint = default_hint,
        **gc: Any,
    ) -> None:
        tensors = [
            Tensor(name=f"w{index}", shape=(ROWS, BLOCK), dtype="float32")
            for index in range(fragments)
        ]
        self.params = {tensor.name: jnp.ones(tensor.shape) for tensor in tensors}
        self.bus: Bus = MemoryBus()
        self.store = store or MemoryStore()
        document: dict[str, dict[str, Any]] = {
            "run": {"name": RUN, "steps": 1 << 30},
            "sync": {
                "fragments": fragments,
                "block": BLOCK,
                "codec": "float32",
                "delta_codec": "float32",
                "interval_steps": max(8, fragments),
                "snapshot_interval_versions": SNAPSHOT_EVERY,
            },
            "quorum": {"pace": 0.0, "grace_fraction": 0.0, "deadline_s": 1.0},
        }
        for name, section in (sections or {}).items():
            document[name] = {**document.get(name, {}), **section}
        self.context = Context(
            name="aggregator",
            gc=GcSection(**gc),
            settings=RunSettings.model_validate(document),
            layout=make_layout(tensors, fragments=fragments, block=BLOCK, hint=hint),
            epoch=0,
            bus=self.bus,
            store=self.store,
            runtime=Runtime(),
            logger=log.get(),
        )
        self.rng = np.random.default_rng(0)
        self.lives: dict[str, int] = {}
        self.scattered: set[str] = set()
        self.loudness: dict[str, float] = {}
        self.sent: dict[tuple[str, int, int], int] = {}

    async def create(self) -> None:
        context = self.context
        await create_run(
            context.settings, BusSection(), context.layout, self.params, self.bus, self.store,
            context.runtime,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def aggregating(self) -> AsyncIterator[None]:
        """An aggregator for as long as the block lasts."""
        work = asyncio.ensure_future(aggregate(self.context))
        try:
            yield
        finally:
            await cancel(work)
            if not work.cancelled():
                work.result()

    # Learners' hands

    async def join(self, learner: str, holds: tuple[str, ...] = ()) -> int:
        message = wire.Join(
            run=RUN, learner=learner, layout=self.context.layout.digest, host="here", holds=holds
        )
        self.lives[learner] = await self.bus.publish(names.join(RUN, learner), wire.encode(message))
        return self.lives[learner]

    def upload(self, learner: str, fragment: int = 0) -> wire.Manifest:
        """Store the next update; what `announce` takes."""
        life = (learner, self.lives[learner], fragment)
        seq = self.sent[life] = self.sent.get(life, 0) + 1
        # Over all its lives.
        position = 8 * sum(
            count for of, count in self.sent.items() if (of[0], of[2]) == (learner, fragment)
        )
        vector = self.rng.normal(size=self.context.layout.fragments[fragment].size)
        rows = (
            (vector / 100 * self.loudness.get(learner, 1.0)).astype(np.float32).reshape(-1, BLOCK)
        )
        entries = tuple(
            self._shard(names.shard(RUN, learner, fragment, 0, life[1], seq, index), rows, blocks)
            for index, blocks in enumerate(self._blocks(learner, len(rows)))
        )
        return wire.Manifest(
            run=RUN, learner=learner, epoch=0, incarnation=life[1], seq=seq, fragment=fragment,
            base_version=0, base_digest="0" * 32, layout=self.context.layout.digest,
            codec=self.context.settings.sync.codec, shards=entries, tokens=80, steps=8, position=position,
            local_step=8 * seq, loss=1.0, step_time_s=0.001, encode_s=0.0, upload_s=0.0, attempt=0,
            final=False,
        )  # fmt: skip

    def _blocks(self, learner: str, count: int) -> list[np.ndarray]:
        """The blocks of each shard of an update: all of them, or two halves drawn at random."""
        if learner not in self.scattered:
            return [np.arange(count)]
        order = self.rng.permutation(count)
        return [np.sort(order[: count // 2]), np.sort(order[count // 2 :])]

    def _shard(self, name: str, rows: np.ndarray, blocks: np.ndarray) -> wire.Shard:
        codec = self.context.settings.sync.codec
        encoded = encode(codec, jnp.asarray(rows[blocks].reshape(-1)), BLOCK)
        data = shards.pack(codec, encoded, BLOCK)
        self.store.put(name, data)
        return wire.Shard(
            name=name,
            size_bytes=len(data),
            crc32c=shards.crc32c(data),
            slices=slices.describe(blocks),
        )

    async def announce(self, manifest: wire.Manifest) -> None:
        record, _ = await self.newest(manifest.fragment)
        manifest = manifest.model_copy(
            update={"base_version": record.version, "base_digest": record.view_digest}
        )
        subject = names.update(RUN, manifest.learner, manifest.fragment)
        await self.bus.publish(subject, wire.encode(manifest))

    async def send(self, learner: str, fragment: int = 0) -> wire.Record:
        """Send an update and wait for the record that answers it."""
        manifest = self.upload(learner, fragment)
        await self.announce(manifest)
        return await self.answered(manifest)

    async def answered(self, manifest: wire.Manifest) -> wire.Record:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                record, _ = await self.newest(manifest.fragment)
                marks = {(m.learner, m.incarnation): m.seq for m in record.policy.marks}
                if marks.get((manifest.learner, manifest.incarnation), 0) >= manifest.seq:
                    return record
                await asyncio.sleep(0.005)

    async def send_many(self, learner: str, count: int, fragment: int = 0) -> wire.Record:
        for _ in range(count):
            record = await self.send(learner, fragment)
        return record

    # Looking

    async def newest(self, fragment: int = 0) -> tuple[wire.Record, int]:
        return await last_record(self.context, fragment)

    async def records(self, fragment: int = 0) -> list[Recorded]:
        return [item async for item in records_of(self.context, fragment)]

    async def on_tape(self, subject: str) -> list[int]:
        """Sequences of the messages of a subject."""
        last = await self.bus.last(self.context.tape, subject)
        found: list[int] = []
        if last is not None:
            messages = self.bus.read(self.context.tape, [subject], 1)
            async with contextlib.aclosing(messages):
                async for message in messages:
                    found.append(message.seq)
                    if message.seq >= last.seq:
                        break
        return found

    def objects(self, prefix: str = "") -> set[str]:
        return {info.name for info in self.store.list(prefix)}

    def remove(self, refs: Iterable[wire.ObjectRef | wire.Shard]) -> None:
        for ref in refs:
            self.store.delete(ref.name)

    def damage(self, ref: wire.ObjectRef) -> None:
        """Turn a bit of an object."""
        data = bytearray(self.store.get(ref.name))
        data[len(data) // 2] ^= 1
        self.store.delete(ref.name)
        self.store.put(ref.name, bytes(data))

    async def until(self, condition, what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await condition():  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not within {PATIENCE_S:.0f} s: {what}") from None
