"""A run as one daemon or command has it: its context, specification, settings and records."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
from diloco.common.storage.bus import Bus, Message
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.store.protocol import get_object, lost_for_good
from diloco.common.storage.tape.messages import check_fits, decode, decode_as
from diloco.common.storage.tape.positions import read_positions, same_tape

CREATED_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The objects that all parts of one daemon share of its run."""

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
        """The run's stream."""
        return names.tape_stream(self.run)


async def publish_once(
    context: RunContext, what: str, publish: Callable[[str], Awaitable[int]]
) -> int:
    """Publish a message that counts once, whatever is lost on the way; returns its sequence.

    It is published under an id that nobody can predict, and under another one where somebody has
    taken that.

    Args:
        context: the run's.
        what: is attempted, for the log.
        publish: makes one attempt, under the id that it is given.

    Raises:
        DilocoError: a fault that does not pass.
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
    """The run's specification, the tape's first message.

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
    """As `load_specification`; waits up to `within_s` seconds until the run is created."""
    until_s = time.monotonic() + within_s
    while True:
        if time.monotonic() >= until_s or await _is_created(bus, run):
            return await load_specification(bus, run)
        await asyncio.sleep(CREATED_LOOK_S)


async def _is_created(bus: Bus, run: str) -> bool:
    """Whether there is a run, and version 0 of all that it has."""
    try:
        settings = parse_settings((await load_specification(bus, run)).settings)
    except RunMissingError:
        return False
    subjects = [names.record(run, index) for index in range(settings.sync.fragments)]
    found = [await bus.last(names.tape_stream(run), subject) for subject in subjects]
    return None not in found


async def first_message(context: RunContext, subject: str, start_seq: int = 1) -> Message:
    """The first message of a subject from a sequence on; there must be one.

    It is read in order, so that a replica that is behind cannot call it missing.
    """
    messages = context.bus.read(context.tape, [subject], start_seq)
    async with contextlib.aclosing(messages):  # type: ignore[type-var]
        return await anext(messages)


async def messages_up_to(
    context: RunContext, subjects: Sequence[str], last_seq: int, start_seq: int = 1
) -> AsyncIterator[Message]:
    """Messages of some subjects, in order, up to a sequence at which one of them or later stands.

    They are read in order, so that a replica that is behind leaves none out.
    """
    messages = context.bus.read(context.tape, [*subjects], start_seq)
    async with contextlib.aclosing(messages):  # type: ignore[type-var]
        async for message in messages:
            yield message
            if message.seq >= last_seq:
                return


async def has_ended(bus: Bus, run: str) -> bool:
    """Whether the run's end is on the tape: then nothing is merged any more."""
    return await bus.last(names.tape_stream(run), names.end(run)) is not None


def changed_settings(created: RunSettings, message: wire.Settings) -> RunSettings:
    """The run's settings after a message that changes them.

    Args:
        created: those of the specification.
        message: the change.

    Raises:
        WireError: it changes what no run can change.
    """
    try:
        changed = parse_settings(message.settings)
        check_changeable(created, changed)
    except ConfigError as error:
        raise WireError(Reason.SETTINGS, error.message) from error
    return changed


def parse_changed(created: RunSettings, message: Message) -> RunSettings:
    """The run's settings after a message of the tape, as `changed_settings`.

    Raises:
        WireError: also when it cannot be decoded.
    """
    said = decode_as(wire.Settings, message.subject, message.payload)
    return changed_settings(created, said)


async def effective_settings(context: RunContext) -> tuple[RunSettings, int]:
    """The settings that the run follows, or will from each fragment's next version on.

    With the stream sequence of the message that said so, 0 for the specification's.
    """
    last = await context.bus.last(context.tape, names.settings(context.run))
    if last is None:
        return context.settings, 0
    return parse_changed(context.settings, last), last.seq


async def settings_at(context: RunContext, settings_seq: int) -> RunSettings:
    """The run's settings that a message of the tape put in force; 0: the specification's.

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
    """The data position of a learner, in batches: behind all that its messages cover.

    Arguments as of `data_reached`.
    """
    return max((await data_reached(context, learner, last, earlier)).values())


async def data_reached(
    context: RunContext,
    learner: str,
    last: Callable[[str], Awaitable[Message | None]] | None = None,
    earlier: Mapping[str, int] | None = None,
) -> dict[int | None, int]:
    """The batches that a learner's updates of each fragment reach; under None, its other messages.

    Args:
        context: of the run.
        learner: its name.
        last: gives a subject's last message; `Bus.last`, which may be stale, if None.
        earlier: positions of earlier epochs, by learner; those of the specification if None.
    """
    run = context.run
    last = last or partial(_last, context)
    if earlier is None:
        first = await first_message(context, names.spec(run))
        specification = decode_as(wire.Specification, first.subject, first.payload)
        earlier = await _earlier(context, specification)
    fragments = range(len(context.layout.fragments))
    kinds: dict[str, type[wire.Manifest | wire.Leave]] = {
        names.leave(run, learner): wire.Leave,
        **{names.update(run, learner, fragment): wire.Manifest for fragment in fragments},
    }
    newest = {subject: await last(subject) for subject in kinds}
    joins = await _sequences(context, await last(names.join(run, learner)))
    found: dict[int | None, int] = {None: earlier.get(learner, 0)}
    for subject, message in newest.items():
        if message is not None:
            position = await _position_on(context, kinds[subject], message, joins)
            parsed = names.parse_subject(subject)
            fragment = parsed.fragment if parsed else None
            found[fragment] = max(position, found.get(fragment, 0))
    return found


async def _earlier(context: RunContext, specification: wire.Specification) -> Mapping[str, int]:
    """Positions of earlier epochs; the store may be away, or not show the object yet."""

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


async def _sequences(context: RunContext, newest: Message | None) -> list[int]:
    """Sequences of all messages of a subject up to this one."""
    if newest is None:
        return []
    return [one.seq async for one in messages_up_to(context, [newest.subject], newest.seq)]


async def _position_on(
    context: RunContext,
    kind: type[wire.Manifest | wire.Leave],
    newest: Message,
    joins: Sequence[int],
) -> int:
    """Position in the last message of a subject; in all of them, if that one does not count.

    It is not readable, of a life that a newer one had superseded before, or of a process that
    outlived its tape: others may have got further.
    """
    subject = newest.subject
    try:
        said = decode_as(kind, subject, newest.payload)
    except WireError as error:
        context.logger.warning("unreadable", subject=subject, reason=error.reason)
    else:
        superseded = any(said.incarnation < seq < newest.seq for seq in joins)
        if _is_of_this_tape(context, said, newest.seq) and not superseded:
            return said.position
    position = 0
    async for message in messages_up_to(context, [subject], newest.seq):
        with contextlib.suppress(WireError):
            said = decode_as(kind, subject, message.payload)
            if _is_of_this_tape(context, said, message.seq):
                position = max(position, said.position)
    return position


def _is_of_this_tape(context: RunContext, said: wire.Manifest | wire.Leave, seq: int) -> bool:
    """Whether a message's work may be merged: it is of this tape and not of another."""
    if isinstance(said, wire.Manifest):
        return said.epoch == context.epoch
    return same_tape(said.incarnation, seq)


async def last_record(context: RunContext, fragment: int) -> tuple[wire.Record, int]:
    """The newest record of a fragment, and its stream sequence.

    Raises:
        RunIncompleteError: the run has no such fragment: it was not created, or not wholly.
        IntegrityError: the record was made for another layout, or its body is gone.
    """
    missed = 0
    while True:
        message = await context.bus.last(context.tape, names.record(context.run, fragment))
        if message is None:
            raise RunIncompleteError(
                f"run {context.run!r} has no record of fragment {fragment}: it is being created, or"
                " was not created wholly",
                hint="ask again in some seconds, or create it: diloco run create --config FILE",
            )
        try:
            return await read_record(context, message), message.seq
        except ObjectMissingError as error:
            if message.seq == missed:
                raise lost_for_good(
                    f"record {message.seq} of fragment {fragment}", error
                ) from error
            missed = message.seq


async def read_record(context: RunContext, message: Message) -> wire.Record:
    """The record in a message of the tape, or in the object that the message names.

    Raises:
        WireError: it is no record, or not of its subject.
        IntegrityError: it is of another layout, or its object is not what the message says.
        RunMismatchError: it is of another epoch.
        ObjectMissingError: its object is gone; it is not needed any more if newer ones follow.
    """
    found = decode(message.subject, message.payload)
    if isinstance(found, wire.RecordPointer):
        found = await context.runtime.call(record_in, context.store, message.subject, found)
    if not isinstance(found, wire.Record):
        raise WireError(Reason.KIND, f"expected a record on {message.subject!r}")
    check_record(context, found)
    return found


def record_in(store: ObjectStore, subject: str, pointer: wire.RecordPointer) -> wire.Record:
    """The record that a message of a subject points to.

    Raises:
        WireError: it is no record, or not of its subject.
        IntegrityError, ObjectMissingError: its object is damaged or gone.
    """
    return record_of(subject, get_object(store, pointer.body))


def record_of(subject: str, body: bytes) -> wire.Record:
    """The record in an object to which a message of a subject points.

    Raises:
        WireError: it is no record, or not of its subject.
    """
    record = wire.decode(wire.Record, body)
    check_fits(subject, record)
    return record


def check_record(context: RunContext, found: wire.Record) -> None:
    """Refuse a record of another epoch or layout than this process began with.

    Raises:
        IntegrityError: it is of another layout.
        NewTapeError: it is of another epoch.
    """
    if found.epoch != context.epoch:
        raise NewTapeError(
            f"run {context.run!r} is in epoch {found.epoch}, this process began in epoch "
            f"{context.epoch}: the run was resumed on a new tape",
            hint="start this process again",
        )
    if found.layout != context.layout.digest:
        raise IntegrityError(
            f"record of fragment {found.fragment}: layout {found.layout}, "
            f"the run's specification has {context.layout.digest}"
        )


class Recorded(NamedTuple):
    """A record, and where and when the tape has it (seconds since the epoch).

    `body`: the object that holds it, if it is too large for the tape.
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
    """A fragment's records, from the oldest that the tape still has to the newest of now.

    Those before `start_seq` are passed over, and those that are collected meanwhile. `unreadable`
    is called, if it is given, in place of one that stays and cannot be read.

    Raises:
        NewTapeError, IntegrityError: as `last_record`.
        WireError, IntegrityError, ObjectMissingError: a record that stays cannot be read.
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
            if not gone or await _stands(context, subject, message.seq):
                if unreadable is None:
                    raise
                unreadable()
        else:
            found = decode(message.subject, message.payload)
            body = found.body if isinstance(found, wire.RecordPointer) else None
            yield Recorded(record, message.seq, message.time_s, body)


async def _stands(context: RunContext, subject: str, seq: int) -> bool:
    """Whether the tape still has a message of a subject, which had later ones."""
    return (await first_message(context, subject, seq)).seq == seq


def record_digest(record: wire.Record) -> str:
    """A record's digest, by which the next one of its fragment names it.

    Of what its maker wrote: a field that an earlier release did not have is not in it. Nor is
    `outer_seq`, which says "this one" until the record has a sequence.
    """
    fields = record.model_dump(exclude_unset=True, exclude={"outer_seq"})
    packed: bytes = msgpack.packb(fields)
    return shards.digest(packed)
