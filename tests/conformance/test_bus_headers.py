"""Headers are whatever a message's sender put there: who reads a stream is told nothing by them.

With its own credential a learner publishes on its own subjects, with any header, and bytes that are
neither headers nor text.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest

from diloco.common.storage.bundle.check import as_message
from diloco.common.storage.bus import Bus, Message, StreamLimits
from diloco.common.storage.bus.jetstream import connect

HEADERS: dict[str, dict[str, str]] = {
    "no such message": {"Status": "404"},
    "idle": {"Status": "100"},
    "deleted": {"Status": "409", "Description": "Consumer Deleted"},
    "a pull that ended": {
        "Status": "408", "Description": "Batch Completed", "Nats-Pending-Messages": "0",
    },
    "a time that is none": {"Diloco-Stored-At": "soon"},
    "no number": {"Diloco-Stored-At": "nan"},
    "the future": {"Diloco-Stored-At": "1e308"},
    "the past": {"Diloco-Stored-At": "0.0"},
    "another place": {"Nats-Sequence": "9", "Nats-Subject": "x", "Nats-Time-Stamp": "soon"},
}  # fmt: skip


# (subject, headers), byte for byte.
BYTES: dict[str, tuple[bytes, bytes]] = {
    "no headers": (b"liar", b"X\r\n\r\n"),
    "nothing": (b"liar", b"NATS/1.0"),
    "half a line": (b"liar", b"NATS/1.0\r\n"),
    "noughts": (b"liar", b"\0" * 40),
    "no text": (b"liar", b"NATS/1.0\r\n\xff\xfe: \xff\r\n\r\n"),
    "no status": (b"liar", b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
    "a status in line": (b"liar", b"NATS/1.0 404 No Messages\r\n\r\n"),
    "a status of no text": (b"liar", b"NATS/1.0 404 \xff\r\n\r\n"),
    "a folded id": (b"liar", b"NATS/1.0\r\nDiloco-Msg-Id: a\r\n b\rc\r\n\r\n"),
    "a subject of no text": (b"\xff\xfe", b"NATS/1.0\r\nA: b\r\n\r\n"),
    "a terminal's subject": (b"\x1b[31m", b"NATS/1.0\r\nA: b\r\n\r\n"),
}


async def send_bytes(url: str, subject: bytes, headers: bytes, payload: bytes) -> None:
    """Publish what no client would."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    await reader.readline()
    options = {"verbose": True, "pedantic": False, "headers": True, "lang": "", "version": "1"}
    writer.write(b"CONNECT " + json.dumps(options | {"protocol": 1}).encode() + b"\r\n")
    assert await reader.readline() == b"+OK\r\n"
    sizes = (len(headers), len(headers) + len(payload))
    writer.write(b"HPUB %s %d %d\r\n" % (subject, *sizes) + headers + payload + b"\r\n")
    assert await reader.readline() == b"+OK\r\n"
    writer.close()
    await writer.wait_closed()


def on_nats(url: str, work: Callable[[Bus, Any], Coroutine[Any, Any, None]]) -> None:
    """With the project's client, and with one that sends what it likes."""

    async def run() -> None:
        bus, liar = await connect(url, name="test"), await nats.connect(url)
        try:
            async with asyncio.timeout(300.0):
                await work(bus, liar.jetstream())
        finally:
            await liar.close()
            await bus.close()

    asyncio.run(run())


async def all_of(bus: Bus, stream: str, count: int) -> list[Message]:
    """So many messages of a stream, which must come."""
    found: list[Message] = []
    async with asyncio.timeout(300.0):
        async for message in bus.read(stream, [f"{stream}.*"], 1):
            found.append(message)
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize("case", HEADERS)
def test_a_message_is_read_whatever_its_headers_say(nats_server, unique, case) -> None:
    t = unique

    async def work(bus: Bus, liar: Any) -> None:
        began_s = time.time()
        await bus.create_stream(t, [f"{t}.*"], StreamLimits())
        await bus.publish(f"{t}.a", b"before")
        await liar.publish(f"{t}.liar", b"it", headers=HEADERS[case])
        await bus.publish(f"{t}.a", b"behind")
        found = await all_of(bus, t, 3)
        assert [one.payload for one in found] == [b"before", b"it", b"behind"]
        assert [one.seq for one in found] == [1, 2, 3]
        last = await bus.last(t, f"{t}.liar")
        assert last == found[1]
        assert began_s - 5.0 < last.time_s < time.time() + 5.0

    on_nats(nats_server.url, work)


@pytest.mark.parametrize("case", BYTES)
def test_a_message_is_read_whatever_bytes_it_is_made_of(
    nats_server, unique, case, tmp_path
) -> None:
    t, (token, headers) = unique, BYTES[case]

    async def work(bus: Bus, _: Any) -> None:
        await bus.create_stream(t, [f"{t}.*"], StreamLimits())
        await bus.publish(f"{t}.a", b"before")
        await send_bytes(nats_server.url, f"{t}.".encode() + token, headers, b"it")
        async with asyncio.timeout(300.0):
            while await bus.last_sequence(t) < 2:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        await bus.publish(f"{t}.a", b"behind")
        found = await all_of(bus, t, 3)
        assert [one.payload for one in found] == [b"before", b"it", b"behind"]
        last = await bus.last(t, f"{t}.*")
        assert last is not None
        assert last.payload == b"behind"
        # And a file holds it.
        for message in found:
            as_message(tmp_path, list(message))

    on_nats(nats_server.url, work)


def test_times_of_an_import_are_believed_and_none_of_what_came_behind_it(
    nats_server, unique
) -> None:
    t = unique
    exported = [Message(f"{t}.a", seq, 1e9 + seq, b"", "") for seq in (3, 4)]

    async def work(bus: Bus, liar: Any) -> None:
        began_s = time.time()
        await bus.restore(t, [f"{t}.*"], StreamLimits(), iter(exported))
        await liar.publish(f"{t}.liar", b"", headers={"Diloco-Stored-At": "1.5"})
        *before, behind = await all_of(bus, t, 3)
        assert before == exported
        assert behind.time_s > began_s - 5.0
        assert await bus.last(t, f"{t}.a") == exported[-1]
        assert await bus.last(t, f"{t}.liar") == behind

    on_nats(nats_server.url, work)
