"""Reads a run's tape from beginning to end, one message in memory at a time.

A message that cannot be decoded does not end the reading: it becomes an item, and the caller
decides what it means. `read_message` is for messages that the caller has already.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    BusUnavailableError,
    IntegrityError,
    ObjectMissingError,
    WireError,
)
from diloco.common.protocol.layout import Layout
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.sequences import begins_tape
from diloco.common.storage.bus import Bus, Message
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.store.protocol import get_object
from diloco.common.storage.tape.messages import check_length, decode
from diloco.common.storage.tape.run import RunContext, record_of

# The longest wait for a message that the server says it has.
SILENCE_S = 30.0


class Entry(NamedTuple):
    """A decoded message of the tape.

    Attributes:
        body: of the class that belongs to its subject; never a `RecordPointer`.
        size_bytes: size of the message without its subject.
        stored: the object that holds its body, if the body is too large for the tape.
        raw: the bytes from which the body was decoded.
    """

    seq: int
    time_s: float
    subject: str
    body: wire.Body
    size_bytes: int
    stored: wire.ObjectRef | None = None
    raw: bytes = b""


class InvalidMessage(NamedTuple):
    """A message that breaks the protocol, or names another sender than its subject.

    Under an update's subject its bytes count against the sender's allowance.
    """

    seq: int
    time_s: float
    subject: str
    why: str
    size_bytes: int = 0


class Unreadable(NamedTuple):
    """A record that is damaged, or whose body is damaged or gone."""

    seq: int
    time_s: float
    subject: str
    fragment: int
    why: str
    stored: wire.ObjectRef | None = None


Item = Entry | InvalidMessage | Unreadable


@dataclass
class Extent:
    """The part of a tape that was read, and the sequence from which on no message was missing.

    Garbage collection trims the tape: before `whole_from` only the last messages of subjects and
    the last records of fragments are left.
    """

    whole_from: int = 1  # 1: no message of the tape is missing, whatever its first sequence
    whole_s: float = 0.0
    last_seq: int = 0
    last_s: float = 0.0

    def take(self, item: Item) -> None:
        """Extends the extent by the next item of the tape."""
        if item.seq != self.last_seq + 1 and (self.last_seq or not begins_tape(item.seq)):
            self.whole_from, self.whole_s = item.seq, item.time_s
        self.last_seq, self.last_s = item.seq, item.time_s


async def messages_of(
    bus: Bus, stream: str, subjects: list[str], start_seq: int = 1
) -> AsyncIterator[Message]:
    """Yields every message that a stream holds now, from `start_seq` on.

    The stream's newest message must exist and match one of `subjects`, as on any tape.

    Raises:
        StreamMissingError: there is no such stream.
        BusUnavailableError: the next message did not come within `SILENCE_S`.
    """
    last, count, at = await bus.last_sequence(stream), 0, 0
    if last < start_seq:
        return
    async with contextlib.aclosing(bus.read(stream, subjects, start_seq)) as reading:  # type: ignore[type-var]
        while at < last:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await anext(reading)
            except TimeoutError as error:
                raise BusUnavailableError(
                    f"stream {stream!r}: after {count} messages none came for {SILENCE_S:g} s"
                ) from error
            count, at = count + 1, message.seq
            yield message


async def read_tape(context: RunContext, start_seq: int = 1) -> AsyncIterator[Item]:
    """Yields every message that a run's tape holds now, from `start_seq` on, decoded.

    Raises:
        StreamMissingError, BusUnavailableError: as `messages_of`.
        StoreUnavailableError: a record's body cannot be read now.
    """
    subjects = names.tape_subjects(context.run)
    async for message in messages_of(context.bus, context.tape, subjects, start_seq):
        yield await read_item(context, message)


async def read_item(context: RunContext, message: Message) -> Item:
    """Decodes a message of the tape; reads a record's body from its object if it is stored there.

    Raises:
        StoreUnavailableError: the body cannot be read now.
    """
    item = _decoded(message, context.layout)
    if isinstance(item, Entry) and isinstance(item.body, wire.RecordPointer):
        return await context.runtime.call(_with_body, item, item.body, context.store)
    return item


def read_message(message: Message, store: ObjectStore, layout: Layout) -> Item:
    """Does the same as `read_item`; blocks while a record's body is read.

    Raises:
        StoreUnavailableError: the body cannot be read now.
    """
    item = _decoded(message, layout)
    if isinstance(item, Entry) and isinstance(item.body, wire.RecordPointer):
        return _with_body(item, item.body, store)
    return item


def _decoded(message: Message, layout: Layout) -> Item:
    """Decodes a message as it is on the tape; a large record as its pointer."""
    subject, seq, time_s, payload, msg_id = message
    try:
        check_length(layout, subject, len(payload))
        body = decode(subject, payload)
        if isinstance(body, wire.Record | wire.RecordPointer):
            # A record's attempt id equals its message id, by which its author recognized it.
            _check_attempt(body, msg_id)
    except WireError as error:
        parsed = names.parse_subject(subject)
        if parsed is not None and parsed.kind == "record" and parsed.fragment is not None:
            return Unreadable(seq, time_s, subject, parsed.fragment, error.message)
        return InvalidMessage(seq, time_s, subject, error.message, len(payload))
    return Entry(seq, time_s, subject, body, len(payload), raw=payload)


def _with_body(entry: Entry, pointer: wire.RecordPointer, store: ObjectStore) -> Item:
    """Replaces a pointer's entry by the entry of the record that it points to."""
    try:
        raw = get_object(store, pointer.body)
        record = record_of(entry.subject, raw)
        _check_attempt(record, pointer.attempt_id)
    except (WireError, IntegrityError, ObjectMissingError) as error:
        seq, time_s, subject = entry[:3]
        return Unreadable(seq, time_s, subject, pointer.fragment, error.message, pointer.body)
    return entry._replace(body=record, stored=pointer.body, raw=raw)


def _check_attempt(body: wire.Record | wire.RecordPointer, attempt_id: str) -> None:
    if body.attempt_id != attempt_id:
        raise WireError(
            Reason.SENDER, f"a record of attempt {body.attempt_id!r} came as that of {attempt_id!r}"
        )
