"""Fills streams from an export: each message keeps its sequence, time and message id."""

import asyncio
from collections.abc import Iterable

from nats.js import api

from diloco.common.protocol.errors import BusError, BusUnavailableError
from diloco.common.storage.bus.jetstream.connection import (
    EXPORTED_ID,
    STORED_AT,
    Connection,
    store,
    stream_info,
)
from diloco.common.storage.bus.protocol import Message

# In a stream's configuration, which no learner can write: its last imported sequence.
_IMPORTED_TO = "diloco-imported-to"
_RESTORED_AT_ONCE = 256

_Entry = tuple[int, str, bytes, dict[str, str]]


async def imported_to(connection: Connection, stream: str) -> int:
    """Returns the sequence up to which a stream was imported; 0: not imported, or not known.

    Credentials without the right to a stream's settings get 0.

    Raises:
        BusUnavailableError: no answer.
    """
    try:
        metadata = (await stream_info(connection, stream)).config.metadata or {}
    except BusUnavailableError:
        raise
    except BusError:
        return 0
    return int(metadata.get(_IMPORTED_TO, "0"))


async def mark_imported(connection: Connection, config: api.StreamConfig, last_seq: int) -> None:
    """Marks messages up to `last_seq` as imported: readers then trust the times in the headers.

    Raises:
        BusError: the server refuses.
        BusUnavailableError: no answer.
    """
    marked = config.evolve(metadata={_IMPORTED_TO: str(last_seq)})
    await connection.call(
        f"{connection.address.api}.STREAM.UPDATE.{config.name}",
        lambda js: js.update_stream(marked),
    )


async def fill(
    connection: Connection,
    stream: str,
    subjects: list[str],
    messages: Iterable[Message],
    first_seq: int,
) -> int:
    """Publishes `messages` to an empty stream, each at its exported sequence; returns their number.

    Args:
        connection: the connection to the servers.
        stream: the empty stream.
        subjects: the stream's subject patterns.
        messages: the exported messages, in order.
        first_seq: the sequence that the stream gives to its first message.

    Raises:
        BusError: the server refuses a message, or somebody else published meanwhile.
        BusUnavailableError: no answer.
    """
    filler = _filler(subjects)
    count, last_seq, gaps = 0, first_seq - 1, False
    batch: list[_Entry] = []
    for message in messages:
        for seq in range(last_seq + 1, message.seq):
            batch.append((seq, filler, b"", {}))
            gaps = True
            if len(batch) >= _RESTORED_AT_ONCE:
                await _append(connection, batch)
        headers = {STORED_AT: repr(message.time_s), EXPORTED_ID: message.msg_id}
        batch.append((message.seq, message.subject, message.payload, headers))
        count, last_seq = count + 1, message.seq
        if len(batch) >= _RESTORED_AT_ONCE:
            await _append(connection, batch)
    await _append(connection, batch)
    if gaps:
        asked = f"{connection.address.api}.STREAM.PURGE.{stream}"
        await connection.call(asked, lambda js: js.purge_stream(stream, subject=filler))
    return count


async def _append(connection: Connection, batch: list[_Entry]) -> None:
    """Publishes the messages of a batch in order, and empties the batch.

    Raises:
        BusError: a message got another sequence than its own.
    """
    sent = [store(connection, subject, payload, headers) for _, subject, payload, headers in batch]
    for (seq, subject, *_), stored in zip(batch, await asyncio.gather(*sent), strict=True):
        if stored.seq != seq:
            raise BusError(f"a message of {subject!r} got sequence {stored.seq}, not {seq}")
    batch.clear()


def _filler(subjects: list[str]) -> str:
    """Returns a subject of the stream that no message has, as names have no capital letters."""
    for pattern in subjects:
        if {"*", ">"} & {*pattern.split(".")}:
            return pattern.replace("*", "GAP").replace(">", "GAP")
    raise BusError(f"none of the subjects {subjects} has room for what fills gaps")
