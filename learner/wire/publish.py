"""Sends a learner's updates and heartbeats: shards to the object store, all messages to NATS.

An update's manifest, the message that announces the update, is published after all shards are
stored. All coroutines run beside training, and retry transient faults for ever: while NATS or the
store is unreachable, updates wait and training continues.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from diloco.common.process import metrics
from diloco.common.process.config import sync_of
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.errors import DilocoError, DivergedError
from diloco.common.protocol.layout import Fragment
from diloco.common.storage.tape import publish_once
from diloco.learner.background import Context, NoOtherHosts, longest_round_s
from diloco.learner.core.events import (
    Published,
    Republish,
    Send,
)
from diloco.learner.core.handover import Done, Outgoing, Post
from diloco.learner.tensors.send_and_adopt import Replica
from diloco.learner.wire.incarnation import Membership

T = TypeVar("T")

# Seconds without a stored heartbeat until the learner logs a warning: longer than the election of
# a stream's leader.
SILENT_S = 8.0
# The number of a fragment's tensors that an error names.
NAMED = 8


class UploadResult(NamedTuple):
    """The shards of an update that one host has stored.

    `encoded_at_s` is the time when the codes had been computed and packed.
    """

    shards: tuple[wire.Shard, ...]
    encoded_at_s: float


class _Packed(NamedTuple):
    """The shards of an update with their bytes, and the time when they had been packed."""

    shards: tuple[tuple[wire.Shard, bytes], ...]
    encoded_at_s: float


class Uploader:
    """Stores the shards of updates with the blocks that one host owns, that is, is to upload.

    Args:
        context: the learner's context.
        tensors: the learner's tensors on this host.
        host: this host's number.
        hosts: the number of the learner's hosts.
    """

    def __init__(self, context: Context, tensors: Replica, host: int = 0, hosts: int = 1) -> None:
        self._context = context
        self._tensors = tensors
        self._host = host
        self._hosts = hosts
        # The blocks of a shard, by fragment and the shard's index; they never change.
        self._slices: dict[tuple[int, int], tuple[wire.Slice, ...]] = {}

    async def store(self, incarnation: int, send: Send, codes: Any) -> UploadResult:
        """Stores this host's shards of an update; retries until they are stored.

        Args:
            incarnation: the sequence of the learner's join in the stream.
            send: the core's decision, with the update's fragment and number.
            codes: the quantized update on the devices, which may still be computing.

        Raises:
            DivergedError: the update has values that are infinite or NaN.
        """
        context = self._context
        packed: _Packed | None = None

        def begin() -> _Packed:
            """Packs the shards once. A single shard is stored here, to save a change of threads."""
            nonlocal packed
            if packed is None:
                packed = _Packed(self._pack(incarnation, send, codes), context.runtime.clock())
            if len(packed.shards) == 1:
                self._put(*packed.shards[0])
            return packed

        found = await self._retry(begin)
        if len(found.shards) > 1:
            await asyncio.gather(*(self._retry(partial(self._put, *one)) for one in found.shards))
        context.traffic.bytes_up += sum(shard.size_bytes for shard, _ in found.shards)
        return UploadResult(tuple(shard for shard, _ in found.shards), found.encoded_at_s)

    async def _retry(self, function: Callable[[], T]) -> T:
        """Calls a blocking function on another thread, again after each transient fault."""
        context = self._context
        return await context.runtime.retry(
            "storing a shard", lambda: context.runtime.call(function), logger=context.logger
        )

    def _put(self, shard: wire.Shard, data: bytes) -> None:
        self._context.store.put(shard.name, data)

    def _pack(
        self, incarnation: int, send: Send, codes: Any
    ) -> tuple[tuple[wire.Shard, bytes], ...]:
        """Returns the shards of an update, each with its bytes."""
        context, fragment = self._context, send.fragment
        sync_section = sync_of(context.settings.sync, context.layout.fragments[fragment])
        codec, block = sync_section.codec, sync_section.block
        owned_n = self._tensors.owned(fragment)
        if not len(owned_n):  # Other hosts have copies of all blocks of this host, and send them.
            return ()
        rows = self._tensors.collect(fragment, codes)
        _check_finite(rows, context.layout.fragments[fragment])
        codes_NxI = np.asarray(rows.codes).reshape(len(owned_n), -1)
        packed: list[tuple[wire.Shard, bytes]] = []
        done = 0
        most_blocks = max(1, sync_section.shard_elements // block)
        for index, part in enumerate(slices.cut(owned_n, most_blocks)):
            rows_of = slice(done, done + len(part))
            scales = rows.scales[rows_of] if np.size(rows.scales) else rows.scales
            encoded = Encoded(scales, codes_NxI[rows_of].reshape(-1))
            data = shards.pack(codec, encoded, block)
            packed.append((self._shard(incarnation, send, index, data, part), data))
            done += len(part)
        return tuple(packed)

    def _shard(
        self, incarnation: int, send: Send, index: int, data: bytes, blocks: np.ndarray
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
        return wire.Shard(
            name=name,
            size_bytes=len(data),
            crc32c=shards.crc32c(data),
            slices=self._described(send.fragment, index, blocks),
        )

    def _described(self, fragment: int, index: int, blocks: np.ndarray) -> tuple[wire.Slice, ...]:
        key = fragment, index
        if key not in self._slices:
            self._slices[key] = slices.describe(blocks)
        return self._slices[key]


def _check_finite(rows: Encoded, fragment: Fragment) -> None:
    """Checks that an update has no values that are infinite or NaN.

    The blocks of such values have the scale NaN, or such codes. A check at the step boundary would
    have to wait for the devices.

    Args:
        rows: scales and codes of this host's blocks.
        fragment: the update's fragment, whose tensors the error names.

    Raises:
        DivergedError: a value is infinite or NaN.
    """
    # NumPy has no `isfinite` of bfloat16.
    told = rows.scales if np.size(rows.scales) else rows.codes
    if not np.isfinite(np.asarray(told).astype(np.float32, copy=False)).all():
        tensors = ", ".join(dict.fromkeys(piece.tensor for piece in fragment.pieces[:NAMED]))
        raise DivergedError(
            "parameters are infinite or not a number, in one of these tensors of fragment "
            f"{fragment.index}: {tensors}{', ...' * (len(fragment.pieces) > NAMED)}",
            hint="nothing of it was sent. Restart it: it resumes from the run's newest version; if "
            "it diverges again, lower the learning rate or clip gradients",
        )


async def _publish(context: Context, subject: str, body: wire.Body) -> int:
    payload = wire.encode(body)
    return await publish_once(
        context,
        f"publishing {body.kind}",
        lambda msg_id: context.bus.publish(subject, payload, msg_id=msg_id),
    )


class Publisher:
    """Sends one learner's messages to the run, from its join to its end.

    Args:
        context: the learner's context.
        post: gives the training loop a `Published` event for each announced update.
        uploader: stores this host's shards.
        peers: the learner's other hosts, which store their own shards.
        life: the learner's join on the tape.
    """

    def __init__(
        self,
        context: Context,
        post: Post,
        uploader: Uploader,
        peers: NoOtherHosts,
        life: Membership,
    ) -> None:
        self._context = context
        self._post = post
        self._uploader = uploader
        self._peers = peers
        self._life = life
        self._manifests: dict[int, wire.Manifest] = {}
        self._announcing: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def say(self, word: Outgoing | Republish | Done) -> None:
        """Sends an update, announces it again, or publishes a leave, by the type of `word`."""
        match word:
            case Outgoing():
                await self.send(word)
            case Republish():
                await self.republish(word)
            case Done(position, fragments):
                await self.leave(position, fragments)

    async def leave(self, position: int, fragments: tuple[int, ...] = ()) -> None:
        """Publishes a leave: this learner ends, or sends no more updates of `fragments`.

        Args:
            position: the learner's data position, in batches.
            fragments: indices of the fragments; empty: the learner ends.
        """
        context, life = self._context, self._life
        message = wire.Leave(
            run=context.run,
            learner=context.learner,
            incarnation=life.incarnation,
            position=position,
            fragments=fragments,
        )
        await _publish(context, names.leave(context.run, context.learner), message)

    async def send(self, outgoing: Outgoing) -> None:
        """Stores an update's shards, publishes the manifest, and posts a `Published` event.

        Raises:
            DivergedError: the loss or a value of the update is infinite or NaN; the update is not
                announced.
        """
        context, send, life = self._context, outgoing.send, self._life
        began_s = context.runtime.clock()
        storing = self._uploader.store(life.incarnation, send, outgoing.codes)
        others: tuple[wire.Shard, ...] = ()
        if self._peers.hosts == 1:
            stored = await storing
        else:
            stored, others = await asyncio.gather(
                storing, self._peers.stored(send.fragment, send.seq)
            )
        loss = await context.runtime.call(outgoing.loss)
        held = await context.runtime.call(outgoing.digest) if outgoing.digest else None
        manifest = wire.Manifest(
            run=context.run,
            learner=context.learner,
            epoch=context.epoch,
            incarnation=life.incarnation,
            seq=send.seq,
            fragment=send.fragment,
            base_version=send.base_version,
            base_digest=send.base_digest,
            held_digest=held,
            layout=context.layout.digest,
            codec=sync_of(context.settings.sync, context.layout.fragments[send.fragment]).codec,
            shards=(*stored.shards, *others),
            tokens=send.tokens,
            steps=send.steps,
            position=outgoing.position,
            local_step=outgoing.local_step,
            loss=loss,
            step_time_s=outgoing.step_time_s,
            encode_s=max(0.0, stored.encoded_at_s - min(outgoing.dispatched_at_s, began_s)),
            upload_s=max(0.0, context.runtime.clock() - stored.encoded_at_s),
            attempt=0,
            final=send.final,
        )
        if outgoing.covered is not None:
            await outgoing.covered()
        self._manifests[send.fragment] = manifest
        context.announced[send.fragment] = send.seq
        stored_at_s = context.runtime.clock()
        await self._announce(manifest)
        context.traffic.updates_sent += 1
        context.record_watch.covered(send.fragment, send.steps, context.settings, context.logger)
        context.logger.info(
            "sent",
            fragment=send.fragment,
            version=send.base_version,
            update=f"{life.incarnation}-{send.seq}",
            steps=send.steps,
            tokens=send.tokens,
        )
        for part, took_s in (
            ("encode", manifest.encode_s),
            ("upload", manifest.upload_s),
            ("publish", max(0.0, context.runtime.clock() - stored_at_s)),
        ):
            context.metrics.observe(metrics.SENDING, took_s, part)

    async def republish(self, again: Republish) -> None:
        """Publishes the manifest of an update again, as no record has resolved the update for long.

        Does nothing if a newer update of the fragment exists, or one is being announced. A learner
        that restarts takes its data position from the last manifest of each fragment: so no older
        manifest may follow a newer one.
        """
        manifest = self._manifests.get(again.fragment)
        announcing = self._announcing[again.fragment].locked()
        if manifest is not None and manifest.seq == again.seq and not announcing:
            await self._announce(manifest.model_copy(update={"attempt": again.attempt}))
            context = self._context
            longest_s = longest_round_s(context.settings, manifest.step_time_s)
            now_s = context.runtime.clock()
            context.record_watch.look(now_s, longest_s, context.health, context.logger)

    async def beat(self, state: Callable[[], wire.Heartbeat], every_s: float) -> None:
        """Sends a heartbeat every `every_s` seconds; never returns.

        A heartbeat that could not be sent is not sent again. After `SILENT_S` seconds without one a
        warning is logged.

        Args:
            state: returns the heartbeat to send.
            every_s: seconds between two heartbeats.
        """
        context = self._context
        subject = names.heartbeat(context.run, context.learner)
        stored_at_s, warned = context.runtime.clock(), False
        while True:
            try:
                await context.bus.publish(subject, wire.encode(self._stamped(state())))
            except DilocoError as error:
                silent_s = context.runtime.clock() - stored_at_s
                # Without heartbeats this learner counts as dead, even while its updates are stored.
                if silent_s > SILENT_S and not warned:
                    context.logger.warning("heartbeats_lost", error=error.message)
                    warned = True
                context.logger.debug("heartbeat_lost", error=error.message)
            else:
                if warned:
                    context.logger.info("heartbeats_resumed")
                stored_at_s, warned = context.runtime.clock(), False
            await asyncio.sleep(every_s)

    async def last_word(self, beat: wire.Heartbeat) -> None:
        """Sends the heartbeat `beat` once; it says how this learner ended.

        Raises:
            BusError: the heartbeat could not be published.
        """
        subject = names.heartbeat(self._context.run, self._context.learner)
        await self._context.bus.publish(subject, wire.encode(self._stamped(beat)))

    def _stamped(self, beat: wire.Heartbeat) -> wire.Heartbeat:
        """Returns the heartbeat with this machine's time, to be compared with the server's."""
        return beat.model_copy(update={"now_s": max(0.0, self._context.runtime.clock())})

    async def _announce(self, manifest: wire.Manifest) -> None:
        subject = names.update(self._context.run, manifest.learner, manifest.fragment)
        async with self._announcing[manifest.fragment]:
            await _publish(self._context, subject, manifest)
        now_s = self._context.runtime.clock()
        self._context.record_watch.announced(now_s)
        self._post(Published(now_s, manifest.fragment, manifest.seq))
