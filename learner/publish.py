"""The learner's outbound side: shards to the store, then the manifest to the tape; heartbeats.

Everything here runs beside training and retries passing faults for ever: while NATS or the store
is away, updates wait here and training goes on.
"""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from common import metrics, names, shards, slices, wire
from common.errors import DilocoError
from common.health import Health
from common.metrics import Metrics
from common.quantize import Encoded
from common.tape import RunContext
from learner import sync


class Outgoing(NamedTuple):
    """One update, as the training loop hands it over; `parts` may still be computing.

    `parts` are the encoded shards in order of their ranges.
    """

    send: sync.Send
    parts: Sequence[Encoded]
    position: int
    local_step: int
    loss: float
    step_time_s: float
    dispatched_at_s: float


class Traffic:
    """Bytes and updates of this life, for heartbeats."""

    def __init__(self) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.updates_sent = 0


class Post(Protocol):
    """Hands an event to the training loop, with what it carries."""

    def __call__(self, event: sync.Event, payload: object = None) -> None:
        """May be called from the background thread."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context(RunContext):
    """What the background side of one learner shares."""

    learner: str
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    health: Health = dataclasses.field(default_factory=Health)


class Publisher:
    """Sends one learner's messages, under one incarnation."""

    def __init__(self, context: Context, post: Post) -> None:
        self._context = context
        self._post = post
        self._manifests: dict[int, wire.Manifest] = {}
        self._announcing: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._nonce = f"{context.runtime.chance.getrandbits(128):032x}"
        self.incarnation = 0

    async def join(self, host: str) -> int:
        """Begin a life; its incarnation is the sequence of the join in the stream."""
        context = self._context
        message = wire.Join(
            run=context.run, learner=context.learner, layout=context.layout.digest, host=host
        )
        subject = names.join(context.run, context.learner)
        self.incarnation = await self._publish(subject, message, f"join-{self._nonce}")
        return self.incarnation

    async def leave(self, position: int, fragments: tuple[int, ...] = ()) -> None:
        """End this life, or only the sending of `fragments`."""
        message = wire.Leave(
            run=self._context.run,
            learner=self._context.learner,
            incarnation=self.incarnation,
            position=position,
            fragments=fragments,
        )
        subject = names.leave(self._context.run, self._context.learner)
        token = "-".join(str(fragment) for fragment in fragments)
        await self._publish(subject, message, f"leave-{self._nonce}-{token}")

    async def send(self, outgoing: Outgoing) -> None:
        """Store an update's shards, publish its manifest, tell the training loop."""
        context, send = self._context, outgoing.send
        began_s = context.runtime.clock()
        packed = [
            await context.runtime.call(shards.pack, context.settings.sync.codec, part, self._block)
            for part in outgoing.parts
        ]
        encoded_at_s = context.runtime.clock()
        entries = await asyncio.gather(
            *(self._upload(send, index, data) for index, data in enumerate(packed))
        )
        manifest = wire.Manifest(
            run=context.run,
            learner=context.learner,
            epoch=context.epoch,
            incarnation=self.incarnation,
            seq=send.seq,
            fragment=send.fragment,
            base_version=send.base_version,
            base_digest=send.base_digest,
            layout=context.layout.digest,
            codec=context.settings.sync.codec,
            shards=tuple(entries),
            tokens=send.tokens,
            steps=send.steps,
            position=outgoing.position,
            local_step=outgoing.local_step,
            loss=outgoing.loss,
            step_time_s=outgoing.step_time_s,
            encode_s=max(0.0, encoded_at_s - min(outgoing.dispatched_at_s, began_s)),
            upload_s=max(0.0, context.runtime.clock() - encoded_at_s),
            attempt=0,
            final=send.final,
        )
        self._manifests[send.fragment] = manifest
        stored_at_s = context.runtime.clock()
        await self._announce(manifest)
        context.traffic.updates_sent += 1
        context.logger.debug(
            "sent",
            fragment=send.fragment,
            version=send.base_version,
            update=f"{self.incarnation}-{send.seq}",
            steps=send.steps,
            tokens=send.tokens,
        )
        for part, took_s in (
            ("encode", manifest.encode_s),
            ("upload", manifest.upload_s),
            ("publish", max(0.0, context.runtime.clock() - stored_at_s)),
        ):
            context.metrics.observe(metrics.SENDING, took_s, part)
        context.traffic.bytes_up += sum(len(data) for data in packed)

    async def republish(self, again: sync.Republish) -> None:
        """Announce an update again that no record has resolved for long.

        Not while it is still being announced, or a newer one is: the next life's data goes on
        behind the last manifest of each subject, so that no older one may come behind it.
        """
        manifest = self._manifests.get(again.fragment)
        announcing = self._announcing[again.fragment].locked()
        if manifest is not None and manifest.seq == again.seq and not announcing:
            await self._announce(manifest.model_copy(update={"attempt": again.attempt}))

    async def beat(self, state: Callable[[], wire.Heartbeat], every_s: float) -> None:
        """Say every so often that this learner is alive; a lost heartbeat is not repeated."""
        subject = names.heartbeat(self._context.run, self._context.learner)
        while True:
            try:
                await self._context.bus.publish(subject, wire.encode(state()))
            except DilocoError as error:
                self._context.logger.debug("heartbeat_lost", error=error.message)
            await asyncio.sleep(every_s)

    @property
    def _block(self) -> int:
        return self._context.settings.sync.block

    async def _upload(self, send: sync.Send, index: int, data: bytes) -> wire.Shard:
        context = self._context
        name = names.shard(
            context.run,
            context.learner,
            send.fragment,
            context.epoch,
            self.incarnation,
            send.seq,
            index,
        )
        await context.runtime.retry(
            "storing a shard",
            lambda: context.runtime.call(context.store.put, name, data),
            logger=context.logger,
        )
        sync_section = context.settings.sync
        start, stop = shards.shard_ranges(
            context.layout.fragments[send.fragment].size, self._block, sync_section.shard_elements
        )[index]
        return wire.Shard(
            name=name,
            size_bytes=len(data),
            crc32c=shards.crc32c(data),
            slices=slices.of_range(start, stop, self._block),
        )

    async def _announce(self, manifest: wire.Manifest) -> None:
        subject = names.update(self._context.run, manifest.learner, manifest.fragment)
        identity = f"{self._nonce}-{manifest.fragment}-{manifest.seq}-{manifest.attempt}"
        async with self._announcing[manifest.fragment]:
            await self._publish(subject, manifest, identity)
        now_s = self._context.runtime.clock()
        self._post(sync.Published(now_s, manifest.fragment, manifest.seq))

    async def _publish(self, subject: str, body: wire.Body, msg_id: str) -> int:
        payload = wire.encode(body)
        return await self._context.runtime.retry(
            f"publishing {body.kind}",
            lambda: self._context.bus.publish(subject, payload, msg_id=msg_id),
            logger=self._context.logger,
        )
