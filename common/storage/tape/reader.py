"""Reads a run's tape from beginning to end, one message in memory at a time.

Each message becomes an `Item`. A message that cannot be decoded does not end the reading: it
becomes an `InvalidMessage` or an `Unreadable`, and the caller decides what follows.
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
        seq: the message's stream sequence.
        time_s: when the stream stored the message, in seconds since the epoch.
        body: the message, of the class that belongs to its subject; never a `RecordPointer`.
        size_bytes: size of the message on the tape, without its subject.
        stored: the object that holds a record that is too large for the tape; else None.
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
    """A message, not on a record's subject, that breaks the protocol or contradicts its subject.

    The bytes of such a message on an update's subject count against the sender's allowance.

    Attributes:
        why: a sentence with the fault.
    """

    seq: int
    time_s: float
    subject: str
    why: str
    size_bytes: int = 0


class Unreadable(NamedTuple):
    """A record that cannot be read: its message is damaged, or its object is damaged or gone.

    Attributes:
        why: a sentence with the fault.
        stored: the object that should hold the record; None if the message is damaged.
    """

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

    Attributes:
        whole_from: the first message after the last gap; 1: no message of the tape is missing,
            whatever the tape's first sequence.
        whole_s: when that message was stored, in seconds since the epoch; 0 without a gap.
        last_seq: the last message that was read; 0: none.
        last_s: when the last message was stored.
    """

    whole_from: int = 1
    whole_s: float = 0.0
    last_seq: int = 0
    last_s: float = 0.0

    def take(self, item: Item) -> None:
        """Adds the next item of the tape, in the tape's order."""
        if item.seq != self.last_seq + 1 and (self.last_seq or not begins_tape(item.seq)):
            self.whole_from, self.whole_s = item.seq, item.time_s
        self.last_seq, self.last_s = item.seq, item.time_s


async def messages_of(
    bus: Bus, stream: str, subjects: list[str], start_seq: int = 1
) -> AsyncIterator[Message]:
    """Yields the messages of `subjects` that a stream holds now, from `start_seq` on; then ends.

    The stream's newest message must match one of `subjects`.

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
    """Decodes a message of the tape; reads a large record from the object that the message names.

    Raises:
        StoreUnavailableError: the body cannot be read now.
    """
    item = _decoded(message, context.layout)
    if isinstance(item, Entry) and isinstance(item.body, wire.RecordPointer):
        return await context.runtime.call(_with_body, item, item.body, context.store)
    return item


def read_message(message: Message, store: ObjectStore, layout: Layout) -> Item:
    """Decodes a message of the tape as `read_item` does, for callers that may block.

    Reading a large record from the store blocks.

    Raises:
        StoreUnavailableError: the body cannot be read now.
    """
    item = _decoded(message, layout)
    if isinstance(item, Entry) and isinstance(item.body, wire.RecordPointer):
        return _with_body(item, item.body, store)
    return item


def _decoded(message: Message, layout: Layout) -> Item:
    """Decodes a message as it is on the tape: for a large record the body is its pointer."""
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
    """Returns the entry with the record that `pointer` names as its body, or an `Unreadable`."""
    try:
        raw = get_object(store, pointer.body)
        record = record_of(entry.subject, pointer, raw)
        _check_attempt(record, pointer.attempt_id)
    except (WireError, IntegrityError, ObjectMissingError) as error:
        seq, time_s, subject = entry[:3]
        return Unreadable(seq, time_s, subject, pointer.word.fragment, error.message, pointer.body)
    return entry._replace(body=record, stored=pointer.body, raw=raw[: pointer.answers.start])


def _check_attempt(body: wire.Record | wire.RecordPointer, attempt_id: str) -> None:
    if body.attempt_id != attempt_id:
        raise WireError(
            Reason.SENDER, f"a record of attempt {body.attempt_id!r} came as that of {attempt_id!r}"
        )
