"""One tenure of a fragment: from a recovered record until another process commits a record.

It turns the tape's messages into events for the machine. While a version is being made, the machine
receives no events: those from the tape and from fetches wait in a queue, in order. The version's
record is stored and published while later events are handled.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import NamedTuple

from diloco.aggregator.arrays.fragment import Payload
from diloco.aggregator.context import Context
from diloco.aggregator.core import admission, events, machine, memory, rounds
from diloco.aggregator.core import weights_and_discounts as formulas
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
from diloco.aggregator.core.state import Quarantine
from diloco.aggregator.core.updates import UpdateId, update_id
from diloco.aggregator.core.weights_and_discounts import FragmentRules
from diloco.aggregator.owner.committer import Committer, Samples
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
    """A record of the fragment on the tape, from this process or another."""

    stream_seq: int


class TapeSettings(NamedTuple):
    """Changed settings, with the machine's event for them."""

    settings: RunSettings
    event: events.Changed


class TapeUpdate(NamedTuple):
    """A message under an update's subject, not decoded yet: the sender may lack the allowance.

    For a message that is too long for its fragment, `why` says so and the bytes are dropped.
    """

    message: Message
    event: events.Undecoded
    why: WireError | None = None


class TapeEnd(NamedTuple):
    """The run's end message on the tape."""


def subjects(run: str, fragment: int) -> list[str]:
    """Returns the subjects of the tape that the owner of a fragment reads."""
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
    """Decodes a message of `subjects` for a fragment's owner; None if it concerns other fragments.

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
    """Returns the machine's event for a message of the tape; None if it has none for this fragment.

    Raises:
        WireError: it cannot be decoded, or names another sender than its subject.
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
    """Returns the machine's event for a decoded message of the tape; None if there is none."""
    match body:
        case wire.Quarantine() as word:
            return events.Quarantined(stored_at_s, seq, word.learner, word.active)
        case wire.Join() as join:
            return events.Joined(stored_at_s, seq, join.learner)
        case wire.Leave() as leave if not leave.fragments:
            return events.Departed(stored_at_s, seq, leave.learner, leave.incarnation)
        case wire.Leave() as leave if fragment in leave.fragments:
            return events.Finished(stored_at_s, seq, leave.learner, leave.incarnation)
        case wire.Manifest() as manifest if manifest.fragment == fragment:
            return events.Announced(stored_at_s, seq, manifest, size_bytes)
        case wire.Stop():
            return events.Stopped(stored_at_s, seq)
    return None


# The most events that wait for a fragment's machine before its tape reader pauses,
QUEUE = 1024
# and the most bytes of undecoded messages among them.
QUEUE_BYTES = 16 << 20

# An event for the machine from the tape or a fetch, with the payload of a fetched update.
Item = tuple[events.Event | TapeUpdate | TapeRecord | TapeSettings | TapeEnd, Payload | None]


# The pause after adding an update failed: memory may get free, and a bug must not fill the log.
BROKEN_PAUSE_S = 1.0
# After so many failures in a row, at updates of several learners, the machine may be at fault.
BROKEN_MOST = 3


class _MergeError(Exception):
    """An update could not be added to the sum."""

    def __init__(self, update: UpdateId) -> None:
        super().__init__(update)
        self.update = update


class Tenure:
    """Makes versions of one fragment until another process commits a record of it.

    Args:
        context: the aggregator's context.
        recovered: the fragment as of its newest record.
        samples: counts and shows messages that are no valid update.
        on_snapshot: called when a stored state is committed.
        others_may: returns whether another aggregator may own the fragment.

    Attributes:
        fragment: the fragment's index.
        state: the machine's state.
        rules: the rules in force.
    """

    def __init__(
        self,
        context: Context,
        recovered: Recovered,
        samples: Samples,
        on_snapshot: Callable[[], None],
        others_may: Callable[[], bool],
    ) -> None:
        self._others_may = others_may
        self._broken: list[str] = []  # the learners whose updates have failed since one did not
        record = recovered.record
        self.state = memory.resume(record, recovered.record_seq, context.runtime.clock())
        self._context = context
        self.fragment = record.fragment
        self.rules = self._rules(recovered.settings)
        self._arrays = recovered.arrays
        self._samples = samples
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
            samples,
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

        Raises:
            SwapLostError: another process has committed a record of the fragment.
            IntegrityError: this process fails to add updates, and another aggregator may own the
                fragment.
        """
        return self._read_tape(), self._serve(), self._tasks.failure()

    async def end(self) -> None:
        """Cancels the fetches and commits in progress."""
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
                await self._samples.take(message.subject, error.reason, error.message)
            if isinstance(event, TapeUpdate):
                await self._await_room(len(event.message.payload))
            if event is not None:
                await self._queue.put((event, None))
            await self._last_update.passed(message.seq)

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
        """Returns the next event; a deadline that has passed comes before waiting events."""
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
        """Decodes a message of an update's subject if its sender has allowance left for it."""
        self._undecoded_bytes -= len(stored.message.payload)
        self._room.set()
        if not admission.may_announce(self.rules, self.state, stored.event):
            return stored.event
        try:
            if stored.why is not None:
                raise stored.why
            return decode_event(stored.message, self.fragment) or stored.event
        except WireError as error:
            await self._samples.take(stored.message.subject, error.reason, error.message)
            return stored.event

    def _check_ours(self) -> None:
        """Raises if the newest record on the tape is not the one that the machine builds on.

        While a record of ours is being published, the newest may be that one, so this waits.
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
            # The decision assumed a sum that is now spoilt, so it is undone; no effect followed it.
            self._logger.exception("merging_failed", update=list(error.update))
            self._check_additions(error)
            self.state = before
            await asyncio.sleep(BROKEN_PAUSE_S)
            await self._take(events.Broke(self._context.runtime.clock(), error.update), None)
        if isinstance(event, events.Committed):
            self._check_ours()

    def _check_additions(self, error: _MergeError) -> None:
        """Notes a failed addition; raises if many failed and others may own the fragment."""
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
                await self._samples.take(subject, effect.reason, effect.detail)
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
    """Asks the stream's leader for the fragment's last update, to cut a round there.

    A replica may lag, so the leader is asked. Our own reading of the tape may lag too, so the
    leader's answer is passed on only once the tape was read that far.

    Args:
        context: the aggregator's context.
        fragment: the fragment's index.
        read_seq: the sequence before the first message that the tenure reads.
        answer: receives the sequence of the last update, 0 if there is none.
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
        """Asks the leader; `answer` receives the result later."""
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
