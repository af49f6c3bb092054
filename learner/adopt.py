"""The learner's inbound side: reads records, fetches and decodes deltas, in order per fragment.

A record is handed to the training loop only when its delta is here and verified, on the devices of
all hosts, so that adopting it is one small step there. A learner that has fallen so far behind
that a delta is gone, or whose view is not the one that a record builds on, loads the newest view.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np

from diloco.common import names, shards, wire
from diloco.common.bus import Message
from diloco.common.errors import IntegrityError, ObjectMissingError, WireError
from diloco.common.service import cancel
from diloco.common.tape import (
    data_position,
    decode_as,
    get_object,
    parse_changed,
    read_record,
)
from diloco.common.views import Loaded, assemble_view, load_view
from diloco.learner import sync
from diloco.learner.publish import Context, Post, Tensors


class Change(NamedTuple):
    """What leads from the version adopted to a record's: a delta, or a stored view and deltas.

    Attributes:
        fragment, record_seq: of the record.
        view_digest: of the view that it leads to.
        snapshot: the stored view to begin with; None: with the view adopted.
        deltas: to be added, in order; one, if there is no snapshot.
    """

    fragment: int
    record_seq: int
    view_digest: str
    snapshot: wire.ObjectRef | None
    deltas: tuple[wire.ObjectRef, ...]


class Fetcher:
    """Fetches and decodes what one host holds of versions, and puts it on its devices."""

    def __init__(self, context: Context, tensors: Tensors) -> None:
        self._context = context
        self._tensors = tensors

    async def fetch(self, change: Change) -> Any:
        """The payload of a change.

        Raises:
            ObjectMissingError: garbage collection has taken an object.
            IntegrityError: an object is damaged.
        """
        if change.snapshot is None:
            return await self._context.runtime.call(self._delta, change)
        return await self._context.runtime.call(self._view, change, change.snapshot)

    def place(self, fragment: int, view: np.ndarray) -> Any:
        """The payload of a view that is here already, float32 [N]."""
        return self._tensors.place_view(fragment, view)

    def _delta(self, change: Change) -> Any:
        context, (ref,) = self._context, change.deltas
        section, held = context.settings.sync, self._tensors.held(change.fragment)
        size = context.layout.fragments[change.fragment].size
        codec, block = section.delta_codec, section.block
        if held.size * block == size:
            data = get_object(context.store, ref)
            context.traffic.bytes_down += len(data)
            rows = shards.unpack_delta(data, codec=codec, count=size, block=block)
        else:
            rows = shards.read_blocks(
                self._reader(ref), codec=codec, count=size, block=block, blocks=held
            )
        return self._tensors.place(change.fragment, rows)

    def _reader(self, ref: wire.ObjectRef) -> shards.Read:
        def read(start: int, stop: int) -> bytes:
            data = self._context.store.get_range(ref.name, start, stop)
            self._context.traffic.bytes_down += len(data)
            return data

        return read

    def _view(self, change: Change, snapshot: wire.ObjectRef) -> Any:
        view, read_bytes = assemble_view(
            self._context, change.fragment, change.view_digest, snapshot, change.deltas
        )
        self._context.traffic.bytes_down += read_bytes
        return self._tensors.place_view(change.fragment, view)


Prepare = Callable[[Change], Awaitable[None]]


async def nobody_else(_change: Change) -> None:
    """What the other hosts of a learner of one host have to fetch."""


def start_at(loaded: Loaded) -> sync.Start:
    """Where the core begins with a fragment of which a learner has loaded this version."""
    record = loaded.record
    return sync.Start(record.version, record.view_digest, loaded.record_seq, record.global_step)


def whole(loaded: Loaded) -> Change:
    """The change that leads to a view from nothing."""
    record = loaded.record
    return Change(
        record.fragment, loaded.record_seq, record.view_digest, loaded.snapshot, loaded.deltas
    )


class Adopter:
    """Follows the run's records for one learner.

    Attributes:
        fetcher: of this host; set before `follow`.
        others: waits until the other hosts have a change on their devices.
    """

    fetcher: Fetcher

    def __init__(self, context: Context, post: Post) -> None:
        self._context = context
        self._post = post
        self._newest: dict[int, tuple[int, int, str]] = {}
        self._queues: dict[int, asyncio.Queue[Message]] = {}
        self.incarnation = 0
        self.others: Prepare = nobody_else

    async def load(self, fragment: int) -> Loaded:
        """The newest version of a fragment, verified: where a learner begins."""
        return await self._load_fragment(fragment)

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
            subject = names.parse_subject(message.subject)
            if subject is not None and subject.fragment in self._queues:
                self._queues[subject.fragment].put_nowait(message)

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
        # Stop and end by their subject alone: a run that nobody could stop is worse.
        match names.parse_subject(message.subject):
            case names.Subject(kind="stop"):
                self._post(sync.Stop())
            case names.Subject(kind="end"):
                self._post(sync.End())
            case _:
                try:
                    settings = parse_changed(context.settings, message)
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
                opened = decode_as(wire.RoundOpen, heard, payload)
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
        payload: Any = None
        try:
            record = await read_record(self._context, message)
            if record.what != "verdict":
                payload = await self._prepare(self._change(fragment, record, record_seq))
        except (ObjectMissingError, IntegrityError) as error:
            self._context.logger.warning("reloading", fragment=fragment, why=error.message)
            loaded, payload = await self._reload(fragment)
            record, record_seq = loaded.record, loaded.record_seq
        self._newest[fragment] = (record_seq, record.version, record.view_digest)
        context = self._context
        context.logger.debug("arrived", fragment=fragment, version=record.version, what=record.what)
        # Also when the rollback itself was jumped over.
        restored = record.policy.floor > version
        self._post(self._ready(record, record_seq, restored=restored), payload)

    def _change(self, fragment: int, record: wire.Record, record_seq: int) -> Change:
        """What leads from the version adopted to a record's.

        Raises:
            ObjectMissingError: nothing does.
        """
        _, version, digest = self._newest[fragment]
        follows = record.version == version + 1 and record.base_digest == digest
        if not follows or record.delta is None:
            raise ObjectMissingError(f"version {record.version} does not follow {version}")
        return Change(fragment, record_seq, record.view_digest, None, (record.delta,))

    async def _prepare(self, change: Change) -> Any:
        """What a change brings, on the devices of all hosts; this host's is returned.

        Raises:
            ObjectMissingError: an object was collected.
            IntegrityError: one is damaged.
        """
        payload, _ = await asyncio.gather(self.fetcher.fetch(change), self.others(change))
        return payload

    async def _reload(self, fragment: int) -> tuple[Loaded, Any]:
        """The newest view, on the devices of all hosts; anew when a collection was faster."""
        while True:
            loaded = await self._load_fragment(fragment)
            view = self._context.runtime.call(self.fetcher.place, fragment, loaded.view)
            try:
                payload, _ = await asyncio.gather(view, self.others(whole(loaded)))
            except (ObjectMissingError, IntegrityError) as error:
                self._context.logger.warning("reloading", fragment=fragment, why=error.message)
            else:
                return loaded, payload

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

    async def _last(self, subject: str) -> Message | None:
        return await self._context.runtime.retry(
            "reading the tape",
            lambda: self._context.bus.last(self._context.tape, subject),
            logger=self._context.logger,
        )
