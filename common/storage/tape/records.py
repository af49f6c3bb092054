"""The records of a fragment, and the objects that they name."""

from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgpack

from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import (
    IntegrityError,
    NewTapeError,
    ObjectMissingError,
    RunIncompleteError,
    WireError,
)
from diloco.common.protocol.reasons import Reason
from diloco.common.storage.bus import Message
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.tape.messages import check_fits, decode
from diloco.common.storage.tape.objects import get_object, lost_for_good
from diloco.common.storage.tape.run import RunContext, first_message, messages_up_to


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
                f"run {context.run!r} has no record of fragment {fragment}",
                hint="create the run with: diloco run create --config FILE",
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
