"""A run as one daemon or command uses it: its context, specification, settings and records."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import msgpack

from diloco.common.process import log
from diloco.common.process.config import RunSettings, check_changeable, parse_settings
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import (
    ConfigError,
    IdTakenError,
    IntegrityError,
    NewTapeError,
    ObjectMissingError,
    RunIncompleteError,
    RunMissingError,
    StreamMissingError,
    WireError,
)
from diloco.common.protocol.layout import Layout
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.sequences import same_tape
from diloco.common.storage.bus import Bus, Message
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.store.protocol import get_object, lost_for_good
from diloco.common.storage.tape.messages import check_fits, decode, decode_as
from diloco.common.storage.tape.positions import read_positions

CREATED_LOOK_S = 0.1
T = TypeVar("T", bound=wire.Body)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The objects of a run that all modules of one daemon share.

    Attributes:
        settings: the settings of the specification; `effective_settings` returns later changes.
        epoch: the epoch of the tape that the daemon works on.
    """

    settings: RunSettings
    layout: Layout
    epoch: int
    bus: Bus
    store: ObjectStore
    runtime: Runtime
    logger: log.Logger

    @property
    def run(self) -> str:
        """The run's name."""
        return self.settings.run.name

    @property
    def tape(self) -> str:
        """The name of the run's tape, a stream."""
        return names.tape_stream(self.run)


async def publish_once(
    context: RunContext, what: str, publish: Callable[[str], Awaitable[int]]
) -> int:
    """Publishes a message exactly once; returns its stream sequence.

    Transient faults are retried under the same random message id, so that an attempt whose answer
    was lost is not stored twice. If another message has this id already, a new id is tried.

    Args:
        context: the run's context.
        what: describes the attempt, for the log.
        publish: makes one attempt, with the message id that it is given; returns the sequence.

    Raises:
        DilocoError: a permanent fault.
    """
    msg_id = context.runtime.new_id()

    async def attempt() -> int:
        nonlocal msg_id
        try:
            return await publish(msg_id)
        except IdTakenError:
            msg_id = context.runtime.new_id()
            raise

    return await context.runtime.retry(what, attempt, logger=context.logger)


async def load_specification(bus: Bus, run: str) -> wire.Specification:
    """Returns the run's specification, the tape's first message.

    Raises:
        RunMissingError: there is no such run.
    """
    message = None
    with contextlib.suppress(StreamMissingError):
        message = await bus.last(names.tape_stream(run), names.spec(run))
    if message is None:
        raise RunMissingError(
            f"there is no run {run!r} on this bus",
            hint="create it with: diloco run create --config FILE, or from a program with"
            " diloco.create(FILE, params)",
        )
    return decode_as(wire.Specification, message.subject, message.payload)


async def await_specification(bus: Bus, run: str, within_s: float) -> wire.Specification:
    """Waits up to `within_s` seconds for the run to be created; returns the run's specification.

    Raises:
        RunMissingError: there is no such run after that time.
    """
    until_s = time.monotonic() + within_s
    while True:
        if time.monotonic() >= until_s or await _is_created(bus, run):
            return await load_specification(bus, run)
        await asyncio.sleep(CREATED_LOOK_S)


async def _is_created(bus: Bus, run: str) -> bool:
    """True if the run exists with version 0 of all its fragments."""
    try:
        settings = parse_settings((await load_specification(bus, run)).settings)
    except RunMissingError:
        return False
    subjects = [names.record(run, index) for index in range(settings.sync.fragments)]
    found = [await bus.last(names.tape_stream(run), subject) for subject in subjects]
    return None not in found


async def first_message(context: RunContext, subject: str, start_seq: int = 1) -> Message:
    """Returns the first message of `subject` from `start_seq` on; waits until there is one.

    The message is found by `Bus.read`, as the answer of `Bus.last` could be stale.
    """
    messages = context.bus.read(context.tape, [subject], start_seq)
    async with contextlib.aclosing(messages):  # type: ignore[type-var]
        return await anext(messages)


async def messages_up_to(
    context: RunContext, subjects: Sequence[str], last_seq: int, start_seq: int = 1
) -> AsyncIterator[Message]:
    """Yields messages of `subjects` in order, up to the first with sequence `last_seq` or higher.

    Waits for such a message if there is none yet. The messages come from `Bus.read`, so that none
    is left out because a replica lags behind.
    """
    messages = context.bus.read(context.tape, [*subjects], start_seq)
    async with contextlib.aclosing(messages):  # type: ignore[type-var]
        async for message in messages:
            yield message
            if message.seq >= last_seq:
                return


async def has_ended(bus: Bus, run: str) -> bool:
    """True if the run's end message is on the tape, after which no update is merged."""
    return await bus.last(names.tape_stream(run), names.end(run)) is not None


def changed_settings(created: RunSettings, message: wire.Settings) -> RunSettings:
    """Returns the run's settings after a message that changes them.

    Args:
        created: the settings of the specification.
        message: the change.

    Raises:
        WireError: reason "settings": the message changes a setting that no run can change.
    """
    try:
        changed = parse_settings(message.settings)
        check_changeable(created, changed)
    except ConfigError as error:
        raise WireError(Reason.SETTINGS, error.message) from error
    return changed


def parse_changed(created: RunSettings, message: Message) -> RunSettings:
    """Decodes a message that changes settings; returns the settings after the change.

    Args:
        created: the settings of the specification.
        message: the message on the tape.

    Raises:
        WireError: the message cannot be decoded, or changes a setting that no run can change.
    """
    said = decode_as(wire.Settings, message.subject, message.payload)
    return changed_settings(created, said)


async def effective_settings(context: RunContext) -> tuple[RunSettings, int]:
    """Returns the settings that apply from each fragment's next version on.

    The second value is the stream sequence of the message with these settings; 0 if no message has
    changed those of the specification.

    Raises:
        WireError: as `parse_changed`.
        BusError: as `Bus.last`.
    """
    last = await context.bus.last(context.tape, names.settings(context.run))
    if last is None:
        return context.settings, 0
    return parse_changed(context.settings, last), last.seq


async def settings_at(context: RunContext, settings_seq: int) -> RunSettings:
    """Returns the settings in the message at `settings_seq`; for 0 those of the specification.

    Raises:
        IntegrityError: there is no such message.
    """
    if not settings_seq:
        return context.settings
    message = await first_message(context, names.settings(context.run), settings_seq)
    if message.seq == settings_seq:
        return parse_changed(context.settings, message)
    raise IntegrityError(
        f"the tape has no settings at sequence {settings_seq}, which a record names",
        hint="was the stream purged by hand? restore it, or resume from a checkpoint",
    )


async def data_position(
    context: RunContext,
    learner: str,
    last: Callable[[str], Awaitable[Message | None]] | None = None,
    earlier: Mapping[str, int] | None = None,
) -> int:
    """Returns the data position of a learner, in batches: the highest that `data_reached` returns.

    The arguments are those of `data_reached`.
    """
    return max((await data_reached(context, learner, last, earlier)).values())


async def data_reached(
    context: RunContext,
    learner: str,
    last: Callable[[str], Awaitable[Message | None]] | None = None,
    earlier: Mapping[str, int] | None = None,
    begins: int = 0,
) -> dict[int | None, int]:
    """Returns fragment -> the data position, in batches, that a learner's messages about it reach.

    These messages are updates of the fragment, and leaves that list it; a fragment without any has
    no entry. The key None has the position that holds for all fragments: that of leaves that end a
    life, or of earlier epochs. A fragment that the life before the newest one did not hold has the
    highest position, or `begins`, as that life lost none of its work.

    Args:
        context: the run's context.
        learner: the learner's name.
        last: returns a subject's last message; if None, `Bus.last`, whose answers may be stale.
        earlier: positions of earlier epochs, by learner; if None, those of the specification.
        begins: the learner's first position that no life which has ended has read.
    """
    run = context.run
    last = last or partial(_last, context)
    if earlier is None:
        earlier = await earlier_positions(context)
    fragments = range(len(context.layout.fragments))
    newest = {at: await last(names.update(run, learner, at)) for at in fragments}
    last_leave = await last(names.leave(run, learner))
    last_join = await last(names.join(run, learner))
    joins, held = await _joins(context, last_join)
    found: dict[int | None, int] = {None: earlier.get(learner, 0)}
    for fragment, message in newest.items():
        if message is not None:
            found[fragment] = await _position_of(context, message, joins)
    if last_leave is not None:
        # Each of the last ones may be of other fragments.
        async for said, seq in _readable(context, wire.Leave, last_leave):
            if may_be_merged(context, said, seq, joins):
                note_reached(found, said)
    note_not_held(context, found, held, begins)
    return found


def note_not_held(
    context: RunContext, found: dict[int | None, int], holds: Sequence[str], least: int = 0
) -> None:
    """Raises positions in `found`, a result of `data_reached`, of fragments that a life lacks.

    Args:
        context: the run's context.
        found: changed in place; these positions become the highest one.
        holds: the modules that the life held; empty: all.
        least: the least that these positions become.
    """
    highest = max(*found.values(), least)
    for fragment in context.layout.fragments:
        if holds and fragment.module not in holds:
            found[fragment.index] = highest


def note_reached(found: dict[int | None, int], said: wire.Manifest | wire.Leave) -> None:
    """Raises positions in `found`, a result of `data_reached`, to the position in a message.

    Args:
        found: changed in place.
        said: an update's manifest, or a leave, of the same learner.
    """
    fragments: tuple[int | None, ...] = (None,)
    if isinstance(said, wire.Manifest):
        fragments = (said.fragment,)
    elif said.fragments:
        fragments = said.fragments
    for fragment in fragments:
        found[fragment] = max(said.position, found.get(fragment, 0))


async def earlier_positions(context: RunContext) -> Mapping[str, int]:
    """Returns learner -> data position at the beginning of this epoch, in batches.

    Retries while the store is unreachable, or does not show the positions object yet.
    """
    first = await first_message(context, names.spec(context.run))
    specification = decode_as(wire.Specification, first.subject, first.payload)

    async def attempt() -> Mapping[str, int]:
        try:
            return await context.runtime.call(read_positions, context.store, specification)
        except ObjectMissingError as error:
            raise lost_for_good("the data positions", error) from error

    return await context.runtime.retry("reading data positions", attempt, logger=context.logger)


async def _last(context: RunContext, subject: str) -> Message | None:
    return await context.runtime.retry(
        "reading the tape", lambda: context.bus.last(context.tape, subject), logger=context.logger
    )


async def _joins(context: RunContext, newest: Message | None) -> tuple[list[int], tuple[str, ...]]:
    """Returns the sequences of a learner's readable joins, and what the life before the last held.

    Unreadable joins supersede no life; aggregators ignore them too.

    Args:
        context: the run's context.
        newest: the last join; None: there is none.
    """
    if newest is None:
        return [], ()
    found = [(seq, join.holds) async for join, seq in _readable(context, wire.Join, newest)]
    before = found[-2][1] if len(found) > 1 else ()
    return [seq for seq, _ in found], before


async def _readable(
    context: RunContext, kind: type[T], newest: Message
) -> AsyncIterator[tuple[T, int]]:
    """Yields (message, sequence) of the readable messages of one subject, up to `newest`."""
    async for message in messages_up_to(context, [newest.subject], newest.seq):
        with contextlib.suppress(WireError):
            yield decode_as(kind, message.subject, message.payload), message.seq


async def _position_of(context: RunContext, newest: Message, joins: Sequence[int]) -> int:
    """Returns the position in a subject's last manifest, `newest`, or the highest of earlier ones.

    Manifests that are unreadable, or that cannot be merged (`may_be_merged`), do not count. Only if
    `newest` does not count, the earlier manifests are read.
    """
    try:
        said = decode_as(wire.Manifest, newest.subject, newest.payload)
    except WireError as error:
        context.logger.warning("unreadable", subject=newest.subject, reason=error.reason)
    else:
        if may_be_merged(context, said, newest.seq, joins):
            return said.position
    position = 0
    async for said, seq in _readable(context, wire.Manifest, newest):
        if may_be_merged(context, said, seq, joins):
            position = max(position, said.position)
    return position


def may_be_merged(
    context: RunContext, said: wire.Manifest | wire.Leave, seq: int, joins: Sequence[int]
) -> bool:
    """True unless a message is void: its life is of an earlier tape, or was superseded before.

    Args:
        context: the run's context.
        said: the message.
        seq: the message's stream sequence.
        joins: the sequences of the learner's joins, which are its lives' numbers.
    """
    if isinstance(said, wire.Manifest):
        of_this_tape = said.epoch == context.epoch
    else:
        of_this_tape = same_tape(said.incarnation, seq)
    return of_this_tape and not any(said.incarnation < join < seq for join in joins)


async def last_record(context: RunContext, fragment: int) -> tuple[wire.Record, int]:
    """Returns the newest record of a fragment, and its stream sequence.

    Raises:
        RunIncompleteError: the fragment has no record: creating the run has not finished.
        IntegrityError: the record was made for another layout, or its object is damaged or gone.
        NewTapeError: the record is of another epoch.
        WireError: the record is damaged.
    """
    missed = 0
    while True:
        message = await last_record_message(context, fragment)
        try:
            return await read_record(context, message), message.seq
        except ObjectMissingError as error:
            if message.seq == missed:
                raise lost_for_good(
                    f"record {message.seq} of fragment {fragment}", error
                ) from error
            missed = message.seq


async def last_record_message(context: RunContext, fragment: int) -> Message:
    """Returns the message with a fragment's newest record.

    Raises:
        RunIncompleteError: the fragment has no record: creating the run has not finished.
    """
    message = await context.bus.last(context.tape, names.record(context.run, fragment))
    if message is None:
        raise RunIncompleteError(
            f"run {context.run!r} has no record of fragment {fragment}: it is being created, or"
            " was not created wholly",
            hint="ask again in some seconds, or create it: diloco run create --config FILE",
        )
    return message


async def read_record(context: RunContext, message: Message) -> wire.Record:
    """Returns the record in a message of the tape, or in the object that the message names.

    Raises:
        WireError: the message is no record, or names another run or fragment than its subject.
        IntegrityError: the record is of another layout, or the object is damaged.
        NewTapeError: the record is of another epoch.
        ObjectMissingError: the object is gone, which is harmless if newer records follow.
    """
    found = decode(message.subject, message.payload)
    if isinstance(found, wire.RecordPointer):
        found = await context.runtime.call(record_in, context.store, message.subject, found)
    if not isinstance(found, wire.Record):
        raise WireError(Reason.KIND, f"expected a record on {message.subject!r}")
    check_record(context, found)
    return found


def record_in(store: ObjectStore, subject: str, pointer: wire.RecordPointer) -> wire.Record:
    """Reads a record from the object that `pointer`, a message of `subject`, names.

    Raises:
        WireError: the object holds no record, or one of another run or fragment, or one that
            contradicts the pointer.
        IntegrityError, ObjectMissingError: the object is damaged or gone.
    """
    return record_of(subject, pointer, get_object(store, pointer.body))


def record_of(subject: str, pointer: wire.RecordPointer, data: bytes) -> wire.Record:
    """Decodes the record in the bytes of the object that `pointer`, a message of `subject`, names.

    Raises:
        WireError: the bytes hold no record, or one of another run or fragment, or one that
            contradicts the pointer.
    """
    record = wire.record_in_object(pointer, data)
    check_fits(subject, record)
    return record


def check_epoch(context: RunContext, epoch: int) -> None:
    """Refuses a tape of another epoch than that of `context`.

    Raises:
        NewTapeError: the run was resumed on a new tape, of the epoch `epoch`.
    """
    if epoch != context.epoch:
        raise NewTapeError(
            f"run {context.run!r} is in epoch {epoch}, this process began in epoch "
            f"{context.epoch}: the run was resumed on a new tape",
            hint="start this process again",
        )


def check_record(context: RunContext, found: wire.AnyRecord) -> None:
    """Refuses a record of another epoch or layout than those of `context`.

    Raises:
        IntegrityError: the record has another layout.
        NewTapeError: the record has another epoch, as the run was resumed on a new tape.
    """
    check_epoch(context, found.epoch)
    if found.layout != context.layout.digest:
        raise IntegrityError(
            f"record of fragment {found.fragment}: layout {found.layout}, "
            f"the run's specification has {context.layout.digest}"
        )


class Recorded(NamedTuple):
    """A record as it is on the tape.

    Attributes:
        record_seq: the record's stream sequence.
        stored_at_s: when the stream stored the record, in seconds since the epoch.
        body: the object that holds the record, if the record is too large for the tape; else None.
    """

    record: wire.Record
    record_seq: int
    stored_at_s: float
    body: wire.ObjectRef | None = None


async def records_of(
    context: RunContext,
    fragment: int,
    start_seq: int = 1,
    unreadable: Callable[[], None] | None = None,
) -> AsyncIterator[Recorded]:
    """Yields a fragment's records, from the oldest that the tape still has to the newest now.

    Skips records before `start_seq`, and records that garbage collection removes meanwhile. For any
    other record that cannot be read, `unreadable` is called; if it is None, an error is raised.

    Raises:
        DilocoError: as `last_record`.
        WireError, IntegrityError, ObjectMissingError: a record that is still on the tape cannot be
            read.
    """
    _, newest_seq = await last_record(context, fragment)
    if start_seq > newest_seq:
        return
    subject = names.record(context.run, fragment)
    async for message in messages_up_to(context, [subject], newest_seq, start_seq):
        try:
            record = await read_record(context, message)
        except (WireError, IntegrityError, ObjectMissingError) as error:
            gone = isinstance(error, ObjectMissingError)
            if not gone or await _still_on_tape(context, subject, message.seq):
                if unreadable is None:
                    raise
                unreadable()
        else:
            found = decode(message.subject, message.payload)
            body = found.body if isinstance(found, wire.RecordPointer) else None
            yield Recorded(record, message.seq, message.time_s, body)


async def _still_on_tape(context: RunContext, subject: str, seq: int) -> bool:
    """True if the tape still has the message at `seq`; its subject must have later messages."""
    return (await first_message(context, subject, seq)).seq == seq


def record_digest(record: wire.Record) -> str:
    """Returns a record's digest, which the fragment's next record has in `previous`.

    The digest covers the fields that the record's maker wrote, so not fields that later releases
    added, nor `outer_seq`, which is unknown until the record has a sequence.
    """
    fields = record.model_dump(exclude_unset=True, exclude={"outer_seq"})
    packed: bytes = msgpack.packb(fields)
    return shards.digest(packed)
