"""The learner's outbound side: shards to the store, then the manifest to the tape; heartbeats.

Everything here runs beside training and retries passing faults for ever: while NATS or the store
is away, updates wait here and training goes on.
"""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from diloco.common import metrics, names, shards, slices, wire
from diloco.common.codec import Encoded
from diloco.common.errors import DilocoError
from diloco.common.health import Health
from diloco.common.metrics import Metrics
from diloco.common.tape import RunContext
from diloco.learner import sync


class Outgoing(NamedTuple):
    """One update, as the training loop hands it over; `codes` may still be computing."""

    send: sync.Send
    codes: Any
    position: int
    local_step: int
    loss: float
    step_time_s: float
    dispatched_at_s: float


class Tensors(Protocol):
    """What the background needs of a host's tensors: `replica.Replica`."""

    def owned(self, fragment: int) -> np.ndarray:
        """Numbers of the blocks that this host uploads, ascending, int64 [n]."""

    def held(self, fragment: int) -> np.ndarray:
        """Numbers of the blocks that this host's devices hold, ascending, int64 [n]."""

    def collect(self, fragment: int, codes: Any) -> Encoded:
        """The rows owned of an update, once the devices have computed them."""

    def place(self, fragment: int, rows: Encoded) -> Any:
        """The rows held of a version delta, on the devices."""

    def place_view(self, fragment: int, view: np.ndarray) -> Any:
        """A whole view, float32 [N], on the devices."""


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


class Arrived(NamedTuple):
    """An event for the core, and the delta or view that it carries."""

    event: sync.Event
    payload: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context(RunContext):
    """What the background side of one learner shares."""

    learner: str
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    health: Health = dataclasses.field(default_factory=Health)


class Stored(NamedTuple):
    """What a host has stored of an update, and when its codes were there."""

    shards: tuple[wire.Shard, ...]
    encoded_at_s: float


class Uploader:
    """Stores what one host owns of updates.

    Args:
        context: the learner's.
        tensors: the host's.
        host: its number; `hosts` how many there are.
    """

    def __init__(self, context: Context, tensors: Tensors, host: int = 0, hosts: int = 1) -> None:
        self._context = context
        self._tensors = tensors
        self._host = host
        self._hosts = hosts

    async def store(self, incarnation: int, send: sync.Send, codes: Any) -> Stored:
        """Store this host's shards of an update."""
        context, fragment = self._context, send.fragment
        packed = await context.runtime.call(self._pack, fragment, codes)
        encoded_at_s = context.runtime.clock()
        entries = await asyncio.gather(
            *(
                self._upload(incarnation, send, index, data, where)
                for index, (data, where) in enumerate(packed)
            )
        )
        context.traffic.bytes_up += sum(len(data) for data, _ in packed)
        return Stored(tuple(entries), encoded_at_s)

    def _pack(self, fragment: int, codes: Any) -> list[tuple[bytes, np.ndarray]]:
        """Bytes and blocks of each shard."""
        sync_section = self._context.settings.sync
        codec, block = sync_section.codec, sync_section.block
        owned_n = self._tensors.owned(fragment)
        if not len(owned_n):  # All its blocks are other hosts' too, and theirs to send.
            return []
        rows = self._tensors.collect(fragment, codes)
        codes_NxI = np.asarray(rows.codes).reshape(len(owned_n), -1)
        packed = []
        done = 0
        most_blocks = max(1, sync_section.shard_elements // block)
        for part in slices.cut(owned_n, most_blocks):
            rows_of = slice(done, done + len(part))
            scales = rows.scales[rows_of] if np.size(rows.scales) else rows.scales
            encoded = Encoded(scales, codes_NxI[rows_of].reshape(-1))
            packed.append((shards.pack(codec, encoded, block), part))
            done += len(part)
        return packed

    async def _upload(
        self, incarnation: int, send: sync.Send, index: int, data: bytes, blocks: np.ndarray
    ) -> wire.Shard:
        context = self._context
        name = names.shard(
            context.run,
            context.learner,
            send.fragment,
            context.epoch,
            incarnation,
            send.seq,
            # No two hosts give the same number.
            index * self._hosts + self._host,
        )
        await context.runtime.retry(
            "storing a shard",
            lambda: context.runtime.call(context.store.put, name, data),
            logger=context.logger,
        )
        return wire.Shard(
            name=name,
            size_bytes=len(data),
            crc32c=shards.crc32c(data),
            slices=slices.describe(blocks),
        )


Gather = Callable[[int, int], Awaitable[tuple[wire.Shard, ...]]]


async def nobody_else(_fragment: int, _seq: int) -> tuple[wire.Shard, ...]:
    """What the other hosts of a learner of one host have stored."""
    return ()


class Publisher:
    """Sends one learner's messages, under one incarnation.

    Attributes:
        uploader: of this host's shards; set before the first `send`.
        others: waits until the other hosts have stored theirs of (fragment, seq).
    """

    uploader: Uploader

    def __init__(self, context: Context, post: Post) -> None:
        self._context = context
        self._post = post
        self._manifests: dict[int, wire.Manifest] = {}
        self._announcing: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._nonce = f"{context.runtime.chance.getrandbits(128):032x}"
        self.incarnation = 0
        self.others: Gather = nobody_else

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
        stored, others = await asyncio.gather(
            self.uploader.store(self.incarnation, send, outgoing.codes),
            self.others(send.fragment, send.seq),
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
            shards=(*stored.shards, *others),
            tokens=send.tokens,
            steps=send.steps,
            position=outgoing.position,
            local_step=outgoing.local_step,
            loss=outgoing.loss,
            step_time_s=outgoing.step_time_s,
            encode_s=max(0.0, stored.encoded_at_s - min(outgoing.dispatched_at_s, began_s)),
            upload_s=max(0.0, context.runtime.clock() - stored.encoded_at_s),
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
