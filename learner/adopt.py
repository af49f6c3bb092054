"""The learner's inbound side: reads records, fetches and decodes deltas, in order per fragment.

A record is handed to the training loop only when its delta is here and verified, so that adopting
it is one small step on the device. A learner that has fallen so far behind that a delta is gone,
or whose view is not the one that a record builds on, loads the newest view instead.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import numpy as np

from common import names, shards, wire
from common.bus import Message
from common.errors import IntegrityError, ObjectMissingError, WireError
from common.quantize import Encoded
from common.service import cancel
from common.tape import (
    data_position,
    get_object,
    parse_changed,
    read_record,
)
from common.views import Loaded, load_view
from learner import sync
from learner.publish import Context, Post


class Delta(NamedTuple):
    """Carried by a `Ready` of a version that follows the one adopted: new view less the old."""

    encoded: Encoded


class View(NamedTuple):
    """Carried by a `Ready` that jumps: the whole view, float32 [size]."""

    values: np.ndarray


def starts(loaded: Sequence[Loaded]) -> tuple[sync.Start, ...]:
    """Where the core begins, for a learner that has loaded these versions."""
    return tuple(
        sync.Start(
            item.record.version,
            item.record.view_digest,
            item.record_seq,
            item.record.global_step,
        )
        for item in loaded
    )


class Adopter:
    """Follows the run's records for one learner."""

    def __init__(self, context: Context, post: Post) -> None:
        self._context = context
        self._post = post
        self._newest: dict[int, tuple[int, int, str]] = {}
        self._queues: dict[int, asyncio.Queue[Message]] = {}
        self.incarnation = 0

    async def load(self) -> list[Loaded]:
        """The newest version of every fragment, verified: where a learner begins."""
        fragments = range(len(self._context.layout.fragments))
        return [await self._load_fragment(fragment) for fragment in fragments]

    async def position(self) -> int:
        """Where this learner's data goes on: behind all that any of its manifests covers."""
        return await data_position(self._context, self._context.learner)

    async def follow(self) -> None:
        """Hand over records, settings and the run's stop as they come; never returns."""
        context = self._context
        start = min(seq for seq, _, _ in self._newest.values()) + 1
        self._queues = {fragment: asyncio.Queue() for fragment in self._newest}
        workers = [
            asyncio.ensure_future(self._follow_fragment(fragment)) for fragment in self._newest
        ]
        run = context.run
        words = [names.settings(run), names.stop(run), names.end(run)]
        readers = [
            asyncio.ensure_future(self._read_records(start)),
            *(asyncio.ensure_future(self._read_word(word, start)) for word in words),
            asyncio.ensure_future(self._listen()),
        ]
        try:
            await asyncio.gather(*readers, *workers)
        finally:
            await cancel(*readers, *workers)
            context.logger.debug("stopped_following")

    async def _read_records(self, start: int) -> None:
        async for message in self._messages(names.record(self._context.run, "*"), start):
            fragment = int(message.subject.rsplit(".", 1)[1])
            self._queues[fragment].put_nowait(message)

    async def _read_word(self, subject: str, start: int) -> None:
        """Hand over the messages of one subject that is about the whole run.

        The last one may lie before the newest records, so it is asked for apart.
        """
        if (last := await self._last(subject)) is not None:
            self._pass_on(last)
        async for message in self._messages(subject, start):
            self._pass_on(message)

    def _messages(self, subject: str, start: int) -> AsyncIterator[Message]:
        # One subject to a reader: so the server can fence what a learner reads. Their order among
        # each other does not matter here.
        return self._context.bus.read(self._context.tape, [subject], start)

    def _pass_on(self, message: Message) -> None:
        """Hand over a message that is about the whole run."""
        context = self._context
        match message.subject.split(".")[2]:
            case "stop":
                self._post(sync.Stop())
            case "end":
                self._post(sync.End())
            case _:
                try:
                    settings = parse_changed(context.settings, message.payload)
                except WireError as error:
                    context.logger.warning(
                        "unreadable", subject=message.subject, reason=error.reason
                    )
                    return
                context.logger.info("settings", settings_seq=message.seq)
                self._post(sync.Changed(sync.sync_rules(settings.sync)))

    async def _listen(self) -> None:
        subject = names.round_open(self._context.run, "*")
        async for heard, payload in self._context.bus.listen(subject):
            try:
                opened = wire.decode(wire.RoundOpen, payload)
            except WireError as error:
                self._context.logger.warning("unreadable", subject=heard, reason=error.reason)
                continue
            self._post(sync.RoundOpened(opened.fragment, opened.version))

    async def _follow_fragment(self, fragment: int) -> None:
        queue = self._queues[fragment]
        while True:
            message = await queue.get()
            if message.seq <= self._newest[fragment][0]:
                continue
            await self._context.runtime.retry(
                "reading a version",
                lambda message=message: self._take(fragment, message),  # type: ignore[misc]
                logger=self._context.logger,
            )

    async def _take(self, fragment: int, message: Message) -> None:
        _, version, _ = self._newest[fragment]
        record_seq = message.seq
        payload: Delta | View | None
        try:
            record = await read_record(self._context, message.payload)
            payload = await self._change(fragment, record)
        except (ObjectMissingError, IntegrityError) as error:
            self._context.logger.warning("reloading", fragment=fragment, why=error.message)
            loaded = await self._load_fragment(fragment)
            record, record_seq, payload = loaded.record, loaded.record_seq, View(loaded.view)
        self._newest[fragment] = (record_seq, record.version, record.view_digest)
        context = self._context
        context.logger.debug("arrived", fragment=fragment, version=record.version, what=record.what)
        # Also when the rollback itself was jumped over.
        restored = record.policy.floor > version
        self._post(self._ready(record, record_seq, restored=restored), payload)

    async def _change(self, fragment: int, record: wire.Record) -> Delta | None:
        """What leads from the version adopted to a record's; None for verdicts.

        Raises:
            ObjectMissingError: nothing does, or it was collected.
            IntegrityError: what does is damaged.
        """
        if record.what == "verdict":
            return None
        _, version, digest = self._newest[fragment]
        follows = record.version == version + 1 and record.base_digest == digest
        if not follows or record.delta is None:
            raise ObjectMissingError(f"version {record.version} does not follow {version}")
        return Delta(await self._read_delta(fragment, record.delta))

    def _ready(self, record: wire.Record, record_seq: int, *, restored: bool) -> sync.Ready:
        resolved = [
            mark.seq
            for mark in record.policy.marks
            if mark.learner == self._context.learner and mark.incarnation == self.incarnation
        ]
        return sync.Ready(
            fragment=record.fragment,
            record_seq=record_seq,
            version=record.version,
            view_digest=record.view_digest,
            global_step=record.global_step,
            resolved_seq=max(resolved, default=0),
            restored=restored,
        )

    async def _load_fragment(self, fragment: int) -> Loaded:
        """The newest version, from snapshot and deltas; passing faults are waited out."""
        loaded = await self._context.runtime.retry(
            "loading a version",
            lambda: load_view(self._context, fragment),
            logger=self._context.logger,
        )
        record = loaded.record
        self._context.traffic.bytes_down += loaded.read_bytes
        self._newest[fragment] = (loaded.record_seq, record.version, record.view_digest)
        return loaded

    async def _read_delta(self, fragment: int, delta: wire.ObjectRef) -> Encoded:
        data = await self._get(delta)
        sync_section = self._context.settings.sync
        return shards.unpack_delta(
            data,
            codec=sync_section.delta_codec,
            count=self._context.layout.fragments[fragment].size,
            block=sync_section.block,
        )

    async def _get(self, expected: wire.ObjectRef) -> bytes:
        data = await self._context.runtime.call(get_object, self._context.store, expected)
        self._context.traffic.bytes_down += len(data)
        return data

    async def _last(self, subject: str) -> Message | None:
        return await self._context.runtime.retry(
            "reading the tape",
            lambda: self._context.bus.last(self._context.tape, subject),
            logger=self._context.logger,
        )
