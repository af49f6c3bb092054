"""One tenure of a fragment: from a recovered record until another process commits a record.

A tenure turns the tape's messages into events for the fragment's state machine. While a version is
being made, the machine receives no events: events from the tape and from fetches wait in a queue,
in order. The version's objects are stored and its record is published while later events are
handled.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import NamedTuple

from diloco.aggregator.arrays.fragment import Payload
from diloco.aggregator.context import Context
from diloco.aggregator.core import admission_and_credit, events, machine, memory, rounds
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.events import (
    AskCut,
    Commit,
    Discard,
    Effect,
    Fetch,
    Ignored,
    Merge,
    OpenRound,
)
from diloco.aggregator.core.round_and_weight_formulas import FragmentRules
from diloco.aggregator.core.state import Quarantine
from diloco.aggregator.core.updates import UpdateId, update_id
from diloco.aggregator.owner.committer import Committer, IgnoredMessages
from diloco.aggregator.owner.download_and_verify import UpdateFetcher
from diloco.aggregator.owner.quarantine_messages import quarantine
from diloco.aggregator.owner.recovery import Recovered
from diloco.common.process import log
from diloco.common.process.config import RunSettings
from diloco.common.process.tasks import Tasks
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import IntegrityError, SwapLostError, WireError
from diloco.common.protocol.layout import Layout
from diloco.common.storage.bus import Message
from diloco.common.storage.tape import RunContext, check_length, decode, parse_changed


class TapeRecord(NamedTuple):
    """The stream sequence of a record of the fragment, published by this process or another."""

    stream_seq: int


class TapeSettings(NamedTuple):
    """The run's changed settings, and the event that tells the machine."""

    settings: RunSettings
    event: events.Changed


class TapeUpdate(NamedTuple):
    """A message under an update's subject, not decoded yet: its sender may lack the allowance.

    Attributes:
        message: the message; without its bytes if it is too long for its fragment.
        event: the event for the machine if the message is not decoded, or is invalid.
        why: the error of a message that is too long; else None.
    """

    message: Message
    event: events.Undecoded
    why: WireError | None = None


class TapeEnd(NamedTuple):
    """Stands for the run's `end` message."""


def subjects(run: str, fragment: int) -> list[str]:
    """Returns the subjects of the tape that the owner of a fragment reads, some with wildcards."""
    return [
        names.join(run, "*"),
        names.leave(run, "*"),
        names.update(run, "*", fragment),
        names.record(run, fragment),
        names.settings(run),
        names.quarantine(run, "*"),
        names.stop(run),
        names.end(run),
    ]


def decode_message(
    context: RunContext, fragment: int, message: Message
) -> events.Event | TapeUpdate | TapeRecord | TapeSettings | TapeEnd | None:
    """Decodes a tape message for the owner of a fragment; None if it concerns other fragments.

    Updates are not decoded here, but by `decode_event` once their sender's allowance is checked.

    Args:
        context: the run's context.
        fragment: the fragment's index.
        message: a message with one of the subjects that `subjects` returns.

    Raises:
        WireError: as `decode_event`.
    """
    if message.subject == names.end(context.run):
        return TapeEnd()
    if message.subject == names.record(context.run, fragment):
        return TapeRecord(message.seq)
    if message.subject == names.settings(context.run):
        settings = parse_changed(context.settings, message)
        return TapeSettings(settings, events.Changed(message.time_s, message.seq))
    parsed = names.parse_subject(message.subject)
    if parsed is not None and parsed.kind == "update" and parsed.learner is not None:
        return _update_stored(context.layout, message, parsed.learner)
    return decode_event(message, fragment)


def _update_stored(layout: Layout, message: Message, learner: str) -> TapeUpdate:
    size_bytes = len(message.payload)
    event = events.Undecoded(message.time_s, message.seq, learner, size_bytes)
    try:
        check_length(layout, message.subject, size_bytes)
    except WireError as error:
        return TapeUpdate(message._replace(payload=b""), event, error)
    return TapeUpdate(message, event)


def decode_event(message: Message, fragment: int) -> events.Event | None:
    """Returns the machine's event for a tape message; None if it does not concern the fragment.

    Raises:
        WireError: the message cannot be decoded, or names another sender than its subject does.
    """
    parsed = names.parse_subject(message.subject)
    if parsed is not None and parsed.kind == "stop":
        # Its subject suffices, as for all daemons, so that a malformed stop still stops the run.
        return events.Stopped(message.time_s, message.seq)
    body = decode(message.subject, message.payload)
    return event_of(body, message.seq, message.time_s, fragment, len(message.payload))


def event_of(
    body: wire.Body, seq: int, stored_at_s: float, fragment: int, size_bytes: int
) -> events.Event | None:
    """Returns the machine's event for a decoded tape message; None if `fragment` has none.

    Args:
        body: the decoded message.
        seq: its stream sequence.
        stored_at_s: when the server stored it, in seconds of Unix time.
        fragment: the machine's fragment.
        size_bytes: length of the encoded message.
    """
    match body:
        case wire.Quarantine() as word:
            return events.Quarantined(stored_at_s, seq, word.learner, word.active)
        case wire.Join() as join:
            return events.Joined(stored_at_s, seq, join.learner, join.holds)
        case wire.Leave() as leave if not leave.fragments:
            return events.Departed(stored_at_s, seq, leave.learner, leave.incarnation)
        case wire.Leave() as leave if fragment in leave.fragments:
            return events.Finished(stored_at_s, seq, leave.learner, leave.incarnation)
        case wire.Manifest() as manifest if manifest.fragment == fragment:
            return events.Announced(stored_at_s, seq, manifest, size_bytes)
        case wire.Stop():
            return events.Stopped(stored_at_s, seq)
    return None


# The reader of the tape pauses while this many events wait for the machine,
QUEUE = 1024
# or while more bytes of undecoded messages than this wait.
QUEUE_BYTES = 16 << 20

# An entry of the queue: an event from the tape or a fetch, and the payload of a fetched update.
Item = tuple[events.Event | TapeUpdate | TapeRecord | TapeSettings | TapeEnd, Payload | None]


# The pause after a failed addition: memory may get free, and a bug must not fill the log.
BROKEN_PAUSE_S = 1.0
# After this many failed additions in a row, of several learners, this computer may be at fault.
BROKEN_MOST = 3


class _MergeError(Exception):
    """An update could not be added to the sum; `update` is its id."""

    def __init__(self, update: UpdateId) -> None:
        super().__init__(update)
        self.update = update


class Tenure:
    """Makes versions of one fragment until another process commits a record of it.

    Args:
        context: the aggregator's context.
        recovered: the fragment as of its newest record.
        ignored: counts and logs messages that are no valid update.
        on_snapshot: called when a version is committed whose view and outer state are stored.
        others_may: returns True if another live aggregator may own the fragment.

    Attributes:
        fragment: the fragment's index.
        state: the state of the fragment's machine.
        rules: the rules by the settings in force.
    """

    def __init__(
        self,
        context: Context,
        recovered: Recovered,
        ignored: IgnoredMessages,
        on_snapshot: Callable[[], None],
        others_may: Callable[[], bool],
    ) -> None:
        self._others_may = others_may
        self._broken: list[str] = []  # senders of the failed additions in a row
        record = recovered.record
        self.state = memory.resume(record, recovered.record_seq, context.runtime.clock())
        self._context = context
        self.fragment = record.fragment
        self.rules = self._rules(recovered.settings)
        self._arrays = recovered.arrays
        self._ignored = ignored
        self._logger = context.logger.bind(fragment=self.fragment)
        self._queue: asyncio.Queue[Item] = asyncio.Queue(QUEUE)
        self._undecoded_bytes = 0
        self._room = asyncio.Event()
        self._heard_seq = recovered.record_seq
        self._tasks = Tasks()
        self._fetcher = UpdateFetcher(
            context, recovered.arrays.grid, self._put, self._tasks, self._logger
        )
        self._last_update = LastUpdate(
            context, record.fragment, record.position - 1, self._put_cut, self._tasks, self._logger
        )
        self._committer = Committer(
            context,
            record,
            recovered.arrays,
            ignored,
            self._put,
            self._tasks,
            on_snapshot,
            self._logger,
        )

    @property
    def newest(self) -> wire.Record:
        """The fragment's newest record."""
        return self._committer.newest

    @property
    def paused(self) -> bool:
        """True if the settings in force pause the run."""
        return self._arrays.settings.run.paused

    @property
    def queued(self) -> int:
        """The number of events that wait for the machine."""
        return self._queue.qsize()

    def work(self) -> tuple[Coroutine[object, object, None], ...]:
        """Returns the coroutines to run at the same time, until one of them ends.

        The coroutines raise these errors.

        Raises:
            SwapLostError: another process has committed a record of the fragment.
            IntegrityError: this process fails to add updates, and another aggregator may own the
                fragment.
        """
        return self._read_tape(), self._serve(), self._tasks.failure()

    async def end(self) -> None:
        """Cancels the fetches and commits in progress, and waits for their end."""
        await self._tasks.stop()

    def tell(self, event: events.Liveness) -> None:
        """Gives the machine a change of liveness; drops the change while the queue is full."""
        if not self._queue.full():
            self._queue.put_nowait((event, None))

    async def _put(self, event: events.Event, payload: Payload | None = None) -> None:
        await self._queue.put((event, payload))

    async def _put_cut(self, stream_seq: int) -> None:
        await self._put(events.CutKnown(self._context.runtime.clock(), stream_seq))

    def _rules(self, settings: RunSettings) -> FragmentRules:
        context = self._context
        return formulas.fragment_rules(settings, context.layout, self.fragment, context.epoch)

    async def _read_tape(self) -> None:
        context = self._context
        messages = context.bus.read(
            context.tape, subjects(context.run, self.fragment), self.newest.position
        )
        async for message in messages:
            try:
                event = decode_message(context, self.fragment, message)
            except WireError as error:
                event = None
                await self._ignored.take(message.subject, error.reason, error.message)
            if isinstance(event, TapeUpdate):
                await self._await_room(len(event.message.payload))
            if event is not None:
                await self._queue.put((event, None))
            if isinstance(event, TapeEnd):
                break
            await self._last_update.passed(message.seq)
        # What follows the end gets no verdict: with a record whose position is behind the end, the
        # fragment's next owner would never read it, and wait for ever.
        await asyncio.Event().wait()

    async def _await_room(self, size_bytes: int) -> None:
        while self._undecoded_bytes > QUEUE_BYTES:
            self._room.clear()
            await self._room.wait()
        self._undecoded_bytes += size_bytes

    # The machine

    async def _serve(self) -> None:
        ended = False
        while not ended or self.state.storing is not None:
            event, payload = await self._next_item()
            match event:
                case TapeEnd():
                    ended = True
                case TapeRecord():
                    self._heard_seq = event.stream_seq
                    self._check_ours()
                case TapeSettings():
                    await self._change(event)
                case TapeUpdate():
                    await self._take(await self._decoded(event), None)
                case _:
                    await self._take(event, payload)
            if payload is not None:
                self._fetcher.release()
        if not self.state.final:
            # Another aggregator has committed the final record: recover, to see what it left.
            raise self._overtaken()

    async def _next_item(self) -> Item:
        """Returns the next entry of the queue, or a `Timer` once the machine's deadline has passed.

        The timer comes before the entries that wait.
        """
        due_s = rounds.deadline(self.rules, self.state)
        if due_s is None:
            return await self._queue.get()
        clock = self._context.runtime.clock
        if clock() < due_s:
            with contextlib.suppress(asyncio.QueueEmpty):
                return self._queue.get_nowait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s - clock()):
                    return await self._queue.get()
        return events.Timer(max(due_s, clock())), None

    async def _decoded(self, stored: TapeUpdate) -> events.Event:
        """Returns the event of a message under an update's subject, decoded if that is allowed.

        Returns `Undecoded` if the sender has no allowance left or the message is invalid.
        """
        self._undecoded_bytes -= len(stored.message.payload)
        self._room.set()
        if not admission_and_credit.may_announce(self.rules, self.state, stored.event):
            return stored.event
        try:
            if stored.why is not None:
                raise stored.why
            return decode_event(stored.message, self.fragment) or stored.event
        except WireError as error:
            await self._ignored.take(stored.message.subject, error.reason, error.message)
            return stored.event

    def _check_ours(self) -> None:
        """Checks that the newest record read from the tape is the one that the machine builds on.

        Not while this tenure publishes a record, which may be the newest on the tape.

        Raises:
            SwapLostError: another process has committed a record.
        """
        if self._heard_seq > self.state.record_seq and self.state.storing is None:
            raise self._overtaken()

    def _overtaken(self) -> SwapLostError:
        subject = names.record(self._context.run, self.fragment)
        return SwapLostError(subject, self.state.record_seq)

    async def _change(self, change: TapeSettings) -> None:
        if change.event.stream_seq > self.state.settings_seq:
            self.rules = self._rules(change.settings)
            self._arrays.settings = change.settings
            self._logger.info("settings", settings_seq=change.event.stream_seq)
        await self._take(change.event, None)

    async def _take(self, event: events.Event, payload: Payload | None) -> None:
        before = self.state
        now_s = self._context.runtime.clock()
        self.state, effects = machine.step_at(self.rules, before, event, now_s)
        try:
            for effect in effects:
                await self._perform(effect, payload)
        except _MergeError as error:
            # The decision assumed a sum that is now spoilt, so the decision is undone; none of its
            # later effects was carried out.
            self._logger.exception("merging_failed", update=list(error.update))
            self._check_additions(error)
            self.state = before
            await asyncio.sleep(BROKEN_PAUSE_S)
            await self._take(
                events.AdditionFailed(self._context.runtime.clock(), error.update), None
            )
        if isinstance(event, events.Committed):
            self._check_ours()

    def _check_additions(self, error: _MergeError) -> None:
        """Notes a failed addition of an update to the sum.

        Raises:
            IntegrityError: many additions in a row failed, and another aggregator may own the
                fragment.
        """
        self._broken.append(error.update.learner)
        many = len(self._broken) >= BROKEN_MOST and len({*self._broken}) > 1
        if many and self._others_may():
            raise IntegrityError(
                f"fragment {self.fragment}: {len(self._broken)} updates could not be added",
                hint="another aggregator takes over; restart this one when the machine has memory",
            ) from error

    async def _perform(self, effect: Effect, payload: Payload | None) -> None:
        match effect:
            case Fetch():
                self._fetcher.start(effect)
            case OpenRound():
                await self._open_round(effect.version)
            case AskCut():
                self._last_update.ask()
            case Discard():
                await self._context.runtime.call(self._arrays.discard)
            case Merge():
                assert payload is not None
                await self._merge(payload, effect)
            case Ignored():
                subject = names.update(self._context.run, effect.learner, self.fragment)
                await self._ignored.take(subject, effect.reason, effect.detail)
            case Commit():
                made = await self._committer.begin(self.rules, effect)
                if made is not None:
                    await self._take(made, None)
            case Quarantine():
                await self._quarantine(effect)

    async def _merge(self, payload: Payload, effect: Merge) -> None:
        try:
            await self._context.runtime.call(self._arrays.merge, payload, effect.admitted)
        except Exception as error:
            # Updates are added in place, piece by piece, so any failure spoils the sum.
            raise _MergeError(update_id(effect.admitted.manifest)) from error
        self._broken = []

    async def _quarantine(self, effect: Quarantine) -> None:
        """Publishes a quarantine; all fragments' machines learn of it from the tape."""
        context = self._context
        self._logger.warning(
            "quarantined",
            learner=effect.learner,
            reason=effect.reason,
            runbook="runbooks/quarantined-learner.md",
        )
        await context.runtime.retry(
            "quarantine",
            lambda: quarantine(context, effect.learner, active=True, reason=effect.reason),
            logger=self._logger,
        )

    async def _open_round(self, version: int) -> None:
        message = wire.RoundOpen(fragment=self.fragment, version=version)
        subject = names.round_open(self._context.run, self.fragment)
        await self._context.bus.broadcast(subject, wire.encode(message))


class LastUpdate:
    """Asks the stream's leader for the sequence of the fragment's last update, for a round's cut.

    A replica may lag, so the leader is asked. The tenure's reading of the tape may lag too, so the
    leader's answer is passed on only once the tape was read up to that sequence.

    Args:
        context: the aggregator's context.
        fragment: the fragment's index.
        read_seq: the stream sequence up to which the tape counts as read.
        answer: called with the stream sequence of the last update; 0 if there is none.
        tasks: the tenure's tasks.
        logger: the fragment's logger.
    """

    def __init__(
        self,
        context: Context,
        fragment: int,
        read_seq: int,
        answer: Callable[[int], Awaitable[None]],
        tasks: Tasks,
        logger: log.Logger,
    ) -> None:
        self._context = context
        self._pattern = names.update(context.run, "*", fragment)
        self._read_seq = read_seq
        self._answer = answer
        self._tasks = tasks
        self._logger = logger
        self._wanted: int | None = None

    def ask(self) -> None:
        """Asks the leader in the background; `answer` is called later with the result."""
        self._tasks.start(self._ask())

    async def passed(self, stream_seq: int) -> None:
        """Notes that messages up to a sequence were read and are in the machine's queue."""
        self._read_seq = max(self._read_seq, stream_seq)
        await self._answer_if_read()

    async def _ask(self) -> None:
        context = self._context
        last = await context.runtime.retry(
            "asking for the last update",
            lambda: context.bus.last(context.tape, self._pattern),
            logger=self._logger,
        )
        self._wanted = last.seq if last else 0
        await self._answer_if_read()

    async def _answer_if_read(self) -> None:
        if self._wanted is not None and self._wanted <= self._read_seq:
            seq, self._wanted = self._wanted, None
            await self._answer(seq)
