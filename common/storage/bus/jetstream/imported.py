"""Streams filled from an export: each message has its old sequence, time and message id."""

import asyncio
from collections.abc import Iterable

from nats.js import api

from diloco.common.protocol.errors import BusError, BusUnavailableError
from diloco.common.storage.bus.jetstream.connection import Connection, store, stream_info
from diloco.common.storage.bus.protocol import Message

# Headers of a message that was imported: when it was stored at first, and its message id.
_STORED_AT, _EXPORTED_ID = "Diloco-Stored-At", "Diloco-Msg-Id"
# Of an imported stream, in its configuration, which no learner can write: its last such message.
_IMPORTED_TO = "diloco-imported-to"
_RESTORED_AT_ONCE = 256

_Entry = tuple[int, str, bytes, dict[str, str]]


def says_time(headers: dict[str, str] | None) -> bool:
    """Whether a message's header states when it was stored: it was imported, or forged."""
    return _STORED_AT in (headers or {})


async def imported_to(connection: Connection, stream: str) -> int:
    """Sequence up to which a stream was imported; 0 if it was not, or nobody may know.

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
    """Note that times in headers count in a stream up to a sequence.

    Raises:
        BusError, BusUnavailableError: the server does not take it.
    """
    marked = config.evolve(metadata={_IMPORTED_TO: str(last_seq)})
    await connection.call(
        f"{connection.address.api}.STREAM.UPDATE.{config.name}",
        lambda js: js.update_stream(marked),
    )


def message_of(
    subject: str,
    seq: int,
    time_s: float,
    data: bytes | None,
    headers: dict[str, str] | None,
    imported_to: int = 0,
) -> Message:
    """A message as it was published, here or where the stream was exported.

    `imported_to`: up to this sequence the header with the time is the importer's; in others it is
    whatever their sender put there, and is not looked at. The rest is as the server gives it.
    """
    known = headers or {}
    imported = seq <= imported_to and _STORED_AT in known
    msg_id = known.get(api.Header.MSG_ID.value) or known.get(_EXPORTED_ID, "")
    return Message(
        subject,
        seq,
        float(known[_STORED_AT]) if imported else time_s,
        data or b"",
        # A folded header is no id, and no file could hold it.
        msg_id if msg_id.isprintable() else "",
    )


async def fill(
    connection: Connection,
    stream: str,
    subjects: list[str],
    messages: Iterable[Message],
    first_seq: int,
) -> int:
    """Give an empty stream, which begins at `first_seq`, these messages under their own numbers.

    How many there are.

    Raises:
        BusError: it does not take a message, or something else was stored between.
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
        headers = {_STORED_AT: repr(message.time_s), _EXPORTED_ID: message.msg_id}
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
    """Publish a batch in its order, and empty it."""
    sent = [store(connection, subject, payload, headers) for _, subject, payload, headers in batch]
    for (seq, subject, *_), stored in zip(batch, await asyncio.gather(*sent), strict=True):
        if stored.seq != seq:
            raise BusError(f"a message of {subject!r} got sequence {stored.seq}, not {seq}")
    batch.clear()


def _filler(subjects: list[str]) -> str:
    """A subject of the stream that no message has: no name has capitals."""
    for pattern in subjects:
        if {"*", ">"} & {*pattern.split(".")}:
            return pattern.replace("*", "GAP").replace(">", "GAP")
    raise BusError(f"none of the subjects {subjects} has room for what fills gaps")
