"""Reads the words of records, and fetches versions onto devices, in order per fragment.

A record is given to the training loop only when its tensors are verified and on the devices of all
hosts, so that the adoption at a step boundary is quick. Records that wait are fetched together
(`catchup.py`), and no more is decoded than the devices have room for (`Room`). If an object was
deleted by garbage collection meanwhile, or a record builds on another view than the learner's, the
learner loads the newest view. While an update of a fragment waits for its answer, the answers to
this learner are read with each record of the fragment.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from diloco.common.process.config import sync_of
from diloco.common.process.tasks import all_of
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.errors import (
    HostFetchError,
    IntegrityError,
    ObjectMissingError,
    StaleReadError,
    WireError,
)
from diloco.common.storage.bus import Message
from diloco.common.storage.catchup import (
    NO_ANSWER,
    Adopted,
    Change,
    FetchMove,
    UnfetchedRecord,
    next_move,
)
from diloco.common.storage.store import CachedStore
from diloco.common.storage.tape import (
    RecordedWord,
    decode_as,
    get_object,
    last_word,
    lost_for_good,
    parse_changed,
    read_answer,
    read_word,
)
from diloco.common.storage.views import Loaded, assemble_view, load_view
from diloco.learner.background import Context, NoOtherHosts
from diloco.learner.core.events import (
    Changed,
    End,
    Ready,
    RoundOpened,
    Start,
    Stop,
    sync_rules,
)
from diloco.learner.core.handover import NOTHING, Decoded, Post
from diloco.learner.tensors.send_and_adopt import Replica

# Decoded versions that wait on the devices may take as many bytes as this number of views of the
# largest fragment: two, so that one is fetched while another waits for its boundary.
WAITING_VIEWS = 2
_FLOAT32_BYTES = 4


class Room:
    """A limit on the bytes of decoded versions that wait on the devices for a step boundary.

    Args:
        limit_bytes: the limit; a single version may exceed it.

    Attributes:
        taken_bytes: the bytes that wait now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._freed = asyncio.Event()
        self._lock = threading.Lock()
        self._wake: Callable[[], object] | None = None
        self.taken_bytes = 0

    def fits(self, size_bytes: int) -> bool:
        """True if `size_bytes` more may be decoded now; always if no version waits.

        If False, `freed` waits for the next change.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if not self.taken_bytes or self.taken_bytes + size_bytes <= self._limit_bytes:
                return True
            self._wake = partial(loop.call_soon_threadsafe, self._freed.set)
            return False

    def take(self, size_bytes: int) -> None:
        """Counts `size_bytes` more as waiting on the devices."""
        with self._lock:
            self.taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Counts the bytes of a version as waiting no more; from any thread; wakes `freed`."""
        with self._lock:
            self.taken_bytes -= size_bytes
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    async def freed(self) -> None:
        """Waits for the next `give_back`; to be called after `fits` returned False."""
        await self._freed.wait()
        self._freed.clear()


async def load(context: Context, fragment: int) -> Loaded:
    """Loads and verifies the newest version of a fragment; retries transient faults.

    If a replica of the stream lags, the version may be older than the newest; the learner then
    reads the records after that version in order.
    """
    loaded = await context.runtime.retry(
        "loading a version", lambda: load_view(context, fragment), logger=context.logger
    )
    context.traffic.bytes_down += loaded.read_bytes
    return loaded


def start_at(loaded: Loaded) -> Start:
    """Returns the core's `Start` for a loaded version of a fragment."""
    record = loaded.record
    return Start(
        record.version,
        record.view_digest,
        loaded.record_seq,
        record.global_step,
        record.floor,
    )


def whole(loaded: Loaded) -> Change:
    """Returns the `Change` with the snapshot and deltas that a loaded view was made from."""
    record = loaded.record
    return Change(
        record.fragment, loaded.record_seq, record.view_digest, loaded.snapshot, loaded.deltas
    )


class VersionFetcher:
    """Fetches versions from the store onto the devices of one host.

    Only the blocks that belong on these devices are read of a delta.

    Args:
        context: the learner's context.
        tensors: the learner's tensors on this host.
    """

    def __init__(self, context: Context, tensors: Replica) -> None:
        self._context = context
        self._tensors = tensors

    async def fetch(self, change: Change) -> Any:
        """Fetches and verifies the objects of a version, and puts them on this host's devices.

        Args:
            change: the objects: a delta, or a snapshot and deltas.

        Returns:
            A `Delta`, or with a snapshot a `PendingView`.

        Raises:
            ObjectMissingError: garbage collection has deleted an object.
            IntegrityError: an object is damaged.
        """
        if change.snapshot is None:
            return await self._context.runtime.call(self._delta, change)
        return await self._context.runtime.call(self._view, change, change.snapshot)

    async def place(self, loaded: Loaded) -> Any:
        """Puts a loaded view on this host's devices; returns it as a `PendingView`."""
        place = self._tensors.place_view
        return await self._context.runtime.call(place, loaded.record.fragment, loaded.view)

    def _delta(self, change: Change) -> Any:
        context, (ref,) = self._context, change.deltas
        fragment = context.layout.fragments[change.fragment]
        section, size = sync_of(context.settings.sync, fragment), fragment.size
        held = self._tensors.local_blocks(change.fragment)
        codec, block = section.delta_codec, section.block
        if held.size * block == size:
            data = get_object(context.store, ref)
            context.traffic.bytes_down += len(data)
            rows = shards.unpack_delta(data, codec=codec, count=size, block=block)
        else:
            read = partial(shards.read_blocks, codec=codec, count=size, block=block, blocks=held)
            rows = self._blocks(ref.name, read)
        return self._tensors.place(change.fragment, rows)

    def _blocks(self, name: str, read: Callable[..., Encoded]) -> Encoded:
        """Reads some blocks of a delta: by a cache if there is one, by checksums of the store."""
        store = self._context.store
        if isinstance(store, CachedStore):
            nearby = self._reader(name, store.get_range_nearby)
            try:
                return read(nearby, read_checksums=self._reader(name, store.get_range))
            except (IntegrityError, WireError):
                store.refuse(name)
        return read(self._reader(name, store.get_range))

    def _reader(self, name: str, get_range: Callable[[str, int, int], bytes]) -> shards.Read:
        def read(start: int, stop: int) -> bytes:
            data = get_range(name, start, stop)
            self._context.traffic.bytes_down += len(data)
            return data

        return read

    def _view(self, change: Change, snapshot: wire.ObjectRef) -> Any:
        view, read_bytes = assemble_view(
            self._context, change.fragment, change.view_digest, snapshot, change.deltas
        )
        self._context.traffic.bytes_down += read_bytes
        return self._tensors.place_view(change.fragment, view)


class Receiver:
    """Reads the run's records for a learner, from its join to its end.

    Args:
        context: the learner's context.
        post: gives events to the training loop.
        fetcher: fetches versions onto this host's devices.
        peers: the learner's other hosts, which fetch versions onto their own devices.
        starts: for each fragment, the version that the learner begins with; None: it does not hold
            the fragment's module, and does not read its records.
        incarnation: the sequence of the learner's join in the stream, which its updates carry.
    """

    def __init__(
        self,
        context: Context,
        post: Post,
        fetcher: VersionFetcher,
        peers: NoOtherHosts,
        starts: Sequence[Start | None],
        incarnation: int,
    ) -> None:
        self._context = context
        self._post = post
        self._fetcher = fetcher
        self._peers = peers
        self._incarnation = incarnation
        self._adopted = {
            fragment: Adopted(at.record_seq, at.version, at.view_digest)
            for fragment, at in enumerate(starts)
            if at is not None
        }
        self._resolved = dict.fromkeys(self._adopted, 0)
        self._queues = {fragment: asyncio.Queue[Message]() for fragment in self._adopted}
        self._of_all = len(self._adopted) == len(starts)
        largest = max(context.layout.fragments[fragment].size for fragment in self._adopted)
        self._room = Room(WAITING_VIEWS * _FLOAT32_BYTES * largest)
        self._ahead_s = math.inf

    async def follow(self) -> None:
        """Posts records, changed settings, open rounds, the run's stop and end; never returns."""
        try:
            await all_of(
                *(self._follow_fragment(fragment) for fragment in self._adopted),
                self._read_records(),
                follow_run(self._context, self._post),
            )
        finally:
            self._context.logger.debug("stopped_following")

    # A fragment's records

    async def _read_records(self) -> None:
        start = min(at.record_seq for at in self._adopted.values()) + 1
        of = ["*"] if self._of_all else [*self._adopted]
        subjects = [names.record(self._context.run, fragment) for fragment in of]
        async for message in self._context.bus.read(self._context.tape, subjects, start):
            subject = names.parse_subject(message.subject)
            fragment = subject.fragment if subject else None
            if fragment in self._queues:
                self._queues[fragment].put_nowait(message)

    async def _follow_fragment(self, fragment: int) -> None:
        waiting: list[UnfetchedRecord] = []
        while True:
            waiting += await self._arrived(fragment, waiting)
            if not waiting:
                continue
            move = next_move(self._adopted[fragment], waiting)
            needs = move.change.held_bytes if move is not None and move.change is not None else 0
            if not self._room.fits(needs):
                # Records that come meanwhile may allow a jump.
                await self._room.freed()
                continue
            covered = waiting[: len(waiting) if move is None else move.covers]
            newest_seq = await self._take(fragment, move, covered)
            waiting = [one for one in waiting if one.record_seq > newest_seq]

    async def _arrived(
        self, fragment: int, waiting: Sequence[UnfetchedRecord]
    ) -> list[UnfetchedRecord]:
        """Returns the records of a fragment that came since the last of `waiting`.

        If `waiting` is empty, waits for a record first. The result may still be empty: records that
        are no newer than the adopted one are left out.
        """
        queue = self._queues[fragment]
        messages = [] if waiting else [await queue.get()]
        while not queue.empty():
            messages.append(queue.get_nowait())
        newest_seq = waiting[-1].record_seq if waiting else self._adopted[fragment].record_seq
        return [await self._read(one) for one in messages if one.seq > newest_seq]

    async def _read(self, message: Message) -> UnfetchedRecord:
        context = self._context
        context.record_watch.heard(context.health, context.logger)
        # The server's clock may differ by hours: the fastest message shows by how much.
        self._ahead_s = min(self._ahead_s, context.runtime.clock() - message.time_s)
        made_at_s = message.time_s + self._ahead_s
        try:
            told = read_word(context, message)
            answer = await context.runtime.retry(
                "reading a verdict", lambda: self._answer(told), logger=context.logger
            )
        except (ObjectMissingError, IntegrityError) as error:
            context.logger.warning("record_skipped", record_seq=message.seq, why=error.message)
            return UnfetchedRecord(message.seq, None, made_at_s)
        return UnfetchedRecord(message.seq, told.word, made_at_s, answer)

    async def _answer(self, told: RecordedWord) -> wire.Answer:
        """Returns a record's answer to this life; does not read it if no update waits for one.

        Raises:
            ObjectMissingError, IntegrityError: as `read_answer`.
        """
        context, fragment = self._context, told.word.fragment
        # An update is noted as announced before its manifest can be on the tape: a record that
        # answers it comes later. And it waits until the training loop has its answer.
        if context.announced.get(fragment, 0) <= self._resolved[fragment]:
            return NO_ANSWER
        return await read_answer(context, told, context.learner, self._incarnation)

    async def _take(
        self, fragment: int, move: FetchMove | None, covered: Sequence[UnfetchedRecord]
    ) -> int:
        """Fetches the tensors of a move, and gives them to the training loop.

        If that is not possible, loads the newest view instead.

        Args:
            fragment: the fragment's index.
            move: what to fetch; None: the newest record cannot be read.
            covered: the waiting records that the move covers.

        Returns:
            The sequence of the record whose version the training loop now has.
        """
        newest = covered[-1]
        if move is not None:
            assert newest.record is not None
            try:
                payload = await self._moved(move)
            except (ObjectMissingError, IntegrityError) as error:
                why = error.message
            else:
                self._hand_over(newest.record_seq, newest.record, covered, payload, newest.answer)
                return newest.record_seq
        else:
            why = f"record {newest.record_seq} cannot be read"
        self._context.logger.warning("reloading", fragment=fragment, why=why)
        loaded, payload, answer = await self._reload(fragment, newest.record_seq)
        self._hand_over(loaded.record_seq, loaded.record, covered, payload, answer)
        return loaded.record_seq

    async def _moved(self, move: FetchMove) -> Decoded:
        """Fetches the tensors of a move, and counts their bytes as waiting on the devices.

        Raises:
            ObjectMissingError: garbage collection has deleted an object.
            IntegrityError: an object is damaged.
        """
        change, context = move.change, self._context
        if change is None:
            return NOTHING
        self._room.take(change.held_bytes)
        try:
            tensors = await context.runtime.retry(
                "reading a version", lambda: self._prepare(change), logger=context.logger
            )
        except BaseException:
            self._room.give_back(change.held_bytes)
            raise
        return self._decoded(tensors, change.held_bytes)

    def _decoded(self, tensors: Any, size_bytes: int) -> Decoded:
        return Decoded(tensors, partial(self._room.give_back, size_bytes))

    async def _prepare(self, change: Change) -> Any:
        """Fetches a version onto the devices of all hosts; returns this host's tensors."""
        preparation = self._peers.prepare(change)
        try:
            tensors = await self._fetcher.fetch(change)
            await preparation.ready()
        except BaseException:
            preparation.drop()
            raise
        return tensors

    async def _reload(self, fragment: int, record_seq: int) -> tuple[Loaded, Decoded, wire.Answer]:
        """Loads the newest view of a fragment onto the devices of all hosts.

        Retries with growing pauses while a replica of the stream lags or a host cannot read the
        view.

        Args:
            fragment: the fragment's index.
            record_seq: the view must be of this record or a later one.

        Returns:
            The loaded version, its tensors on this host's devices, and its record's answer. There
            are no tensors if the view is the adopted one, since that would overwrite the training
            since its adoption.

        Raises:
            HostFetchError: a host could not read the view for long.
        """
        context = self._context

        async def attempt() -> tuple[Loaded, Any, wire.Answer]:
            loaded = await load(context, fragment)
            if loaded.record_seq < record_seq:
                raise StaleReadError(
                    f"fragment {fragment} was read up to record {loaded.record_seq}, but the tape "
                    f"has record {record_seq}: a replica lags behind"
                )
            answer = await self._newest_answer(loaded.told)
            stays = known == (loaded.record.version, loaded.record.view_digest)
            return loaded, None if stays else await self._spread(loaded), answer

        known = self._adopted[fragment][1:]
        loaded, tensors, answer = await context.runtime.retry(
            "loading a version", attempt, logger=context.logger
        )
        if tensors is None:
            return loaded, NOTHING, answer
        size_bytes = _FLOAT32_BYTES * context.layout.fragments[fragment].size
        self._room.take(size_bytes)
        return loaded, self._decoded(tensors, size_bytes), answer

    async def _newest_answer(self, told: RecordedWord) -> wire.Answer:
        """Returns the answer of a fragment's newest record to this life.

        Raises:
            StaleReadError: the record was collected meanwhile, so there is a newer one.
            ObjectLostError: the record is the newest one, and its object is gone.
            IntegrityError: its object is damaged.
        """
        context = self._context
        try:
            return await self._answer(told)
        except ObjectMissingError as error:
            newest = await last_word(context, told.word.fragment)
            what = f"record {told.record_seq} of fragment {told.word.fragment}"
            if newest.record_seq == told.record_seq:
                raise lost_for_good(what, error) from error
            raise StaleReadError(f"{what} was collected while it was read") from error

    async def _spread(self, loaded: Loaded) -> Any:
        """Puts a loaded view on the devices of all hosts; returns this host's tensors.

        Raises:
            HostFetchError: another host cannot read the view, or an object is gone meanwhile.
        """
        preparation = self._peers.prepare(whole(loaded))
        try:
            tensors = await self._fetcher.place(loaded)
            await preparation.ready()
        except (ObjectMissingError, IntegrityError) as error:
            preparation.drop()
            raise HostFetchError(error.message, hint=error.hint) from error
        except BaseException:
            preparation.drop()
            raise
        return tensors

    def _hand_over(
        self,
        record_seq: int,
        record: wire.RecordWord,
        covered: Sequence[UnfetchedRecord],
        payload: Decoded,
        answer: wire.Answer,
    ) -> None:
        context, fragment = self._context, record.fragment
        before = self._adopted[fragment].version
        self._adopted[fragment] = Adopted(record_seq, record.version, record.view_digest)
        context.logger.debug("arrived", fragment=fragment, version=record.version, what=record.what)
        answers = [answer, *(one.answer for one in covered)]
        resolved_seq = max(each.resolved_seq for each in answers)
        self._resolved[fragment] = max(self._resolved[fragment], resolved_seq)
        ready = Ready(
            fragment=fragment,
            record_seq=record_seq,
            version=record.version,
            view_digest=record.view_digest,
            global_step=record.global_step,
            resolved_seq=resolved_seq,
            # Also when a jump skipped the record of the rollback itself.
            rolled_back=record.floor > before,
            merged_seq=max(each.merged_seq for each in answers),
            made_at_s=covered[-1].made_at_s,
        )
        self._post(ready, payload)


# --- Messages to the whole run: changed settings, its stop and end, and open rounds


async def follow_run(context: Context, post: Post) -> None:
    """Posts an event for each settings message, stop, end and open round; never returns."""
    run = context.run
    # One reader for each subject, so that the server can restrict what a learner reads. The order
    # between subjects does not matter here.
    subjects = (names.settings(run), names.stop(run), names.end(run))
    following = (_follow_subject(context, post, subject) for subject in subjects)
    await all_of(*following, _listen(context, post))


async def _follow_subject(context: Context, post: Post, subject: str) -> None:
    """Posts the last message of a subject and all messages that follow; never returns.

    A replica that lags may give an older message as the last one, so that reading continues in
    order after that message.
    """
    last = await context.runtime.retry(
        "reading the tape",
        lambda: context.bus.last(context.tape, subject),
        logger=context.logger,
    )
    if last is not None:
        _pass_on(context, post, last)
    start = 1 if last is None else last.seq + 1
    async for message in context.bus.read(context.tape, [subject], start):
        # A bus may deliver old messages again: settings that no longer hold.
        if message.seq >= start:
            start = message.seq + 1
            _pass_on(context, post, message)


def _pass_on(context: Context, post: Post, message: Message) -> None:
    # Stop and end count by their subject, whatever the body: a run must be stoppable.
    match names.parse_subject(message.subject):
        case names.Subject(kind="stop"):
            post(Stop())
        case names.Subject(kind="end"):
            post(End())
        case _:
            try:
                settings = parse_changed(context.settings, message)
            except WireError as error:
                context.logger.warning("unreadable", subject=message.subject, reason=error.reason)
                return
            context.logger.info("settings", settings_seq=message.seq)
            context.record_watch.interval_steps = settings.sync.interval_steps
            rules = sync_rules(settings.sync, context.layout, paused=settings.run.paused)
            post(Changed(rules))


async def _listen(context: Context, post: Post) -> None:
    async for heard, payload in context.bus.listen(names.round_open(context.run, "*")):
        try:
            opened = decode_as(wire.RoundOpen, heard, payload)
        except WireError as error:
            context.logger.warning("unreadable", subject=heard, reason=error.reason)
            continue
        post(RoundOpened(opened.fragment, opened.version))
