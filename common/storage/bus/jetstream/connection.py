"""The connection that a bus keeps up: one `Link` at a time, replaced when the link is lost.

Also requests about a stream's settings and state, and the headers of messages.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.errors
from nats.js import JetStreamContext, api

from diloco.common.process.tasks import cancel
from diloco.common.protocol.errors import (
    AccessDeniedError,
    BusError,
    BusUnavailableError,
    ConfigError,
)
from diloco.common.storage.bus.jetstream.link import (
    CALL_TIMEOUT_S,
    Address,
    Backoff,
    Link,
    as_bus_error,
)
from diloco.common.storage.bus.protocol import Message

_DIAL_TIMEOUT_S = 10.0
# Headers of an imported message: when it was first stored, and its message id.
STORED_AT, EXPORTED_ID = "Diloco-Stored-At", "Diloco-Msg-Id"

T = TypeVar("T")


class Connection:
    """Keeps one link to the servers open until `close`: replaces a lost link by a new one.

    Args:
        address: the servers' address and the client's credentials.
        link: the first link, already open.

    Attributes:
        link: the present link; None while there is none.
        closed: True once `close` was called.
    """

    def __init__(self, address: Address, link: Link) -> None:
        self.address = address
        self.link: Link | None = link
        self.closed = False
        self._linked = asyncio.Event()
        self._linked.set()
        self._outage: BusError = BusUnavailableError(f"the connection to {address.shown()} is lost")
        self._keeper = asyncio.create_task(self._keep_linked(link))

    async def close(self) -> None:
        """Releases the link, and makes no new one."""
        self.closed = True
        self._linked.set()
        await cancel(self._keeper)
        if self.link is not None:
            await self.link.close()
            self.link = None

    def current(self) -> Link:
        """Returns the present link.

        Raises:
            BusError: there is no link now; the error states why.
        """
        if self.closed:
            raise BusError("this bus is closed")
        if self.link is None:
            # A new error each time, as a raised error collects tracebacks.
            raise type(self._outage)(self._outage.message, hint=self._outage.hint)
        return self.link

    async def wait_linked(self, backoff: Backoff) -> None:
        """Sleeps for the next pause of `backoff`, and then waits until there is a link.

        Raises:
            BusError: the server refuses this client.
        """
        await backoff.wait()
        while not self._linked.is_set():
            if not self._outage.retry:
                self.current()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._linked.wait()

    async def call(self, subject: str, make: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        """Makes one request over the present link, and returns its result.

        Args:
            subject: the subject that the server names if it denies the request.
            make: makes the request with nats-py's JetStream context.

        Raises:
            BusUnavailableError: there is no link, or no answer within `CALL_TIMEOUT_S`.
            BusError: the request was refused, or this bus is closed.
        """
        link, loop = self.current(), asyncio.get_running_loop()
        since, ended = loop.time(), loop.create_future()

        def end(_call: object = None) -> None:
            if not ended.done():
                ended.set_result(None)

        # A task of its own, because nats-py swallows a cancellation while it waits to flush.
        call = asyncio.ensure_future(make(link.js))
        # Reads the task's error even if we are cancelled meanwhile; else asyncio logs it.
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        call.add_done_callback(end)
        # Callbacks instead of tasks for the loss of the link and the time-out: updates wait here.
        link.waiting.add(end)
        timer = loop.call_later(CALL_TIMEOUT_S, end)
        try:
            if not link.lost.is_set():
                await ended
            if not call.done():
                raise self._no_answer(link, subject, since)
            return call.result()
        except TimeoutError as error:
            raise self._no_answer(link, subject, since) from error
        except nats.errors.Error as error:
            raise as_bus_error(error, subject) from error
        finally:
            link.waiting.discard(end)
            timer.cancel()
            call.cancel()

    async def _keep_linked(self, link: Link) -> None:
        """Waits until the link is lost, and opens a new one, for ever."""
        while True:
            await link.wait_lost()
            self.link = None
            self._linked.clear()
            await link.close()
            link = await self._dial()
            self.link = link
            self._linked.set()

    async def _dial(self) -> Link:
        backoff, refusals = Backoff(), 0
        while True:
            await backoff.wait()
            link = Link(self.address)
            try:
                await link.open(_DIAL_TIMEOUT_S)
            except (BusError, ConfigError) as error:
                refusals = 0 if error.retry else refusals + 1
                if refusals != 1:  # While a server reloads, it refuses clients that it knows.
                    self._outage = (
                        error
                        if isinstance(error, BusError)
                        # The credentials are gone, or of another kind than before.
                        else AccessDeniedError(error.message, hint=error.hint)
                    )
                continue
            self._outage = BusUnavailableError(f"the connection to {self.address.shown()} is lost")
            return link

    def _no_answer(self, link: Link, subject: str, since: float) -> BusError:
        if link.lost.is_set():
            return BusUnavailableError(f"the connection was lost during a request on {subject!r}")
        return link.denial(subject, since) or BusUnavailableError(
            f"no answer on {subject!r} within {CALL_TIMEOUT_S:g} s",
            hint="the server is slow, cut off, or its cluster elects a leader: "
            "runbooks/nats-node-lost.md",
        )


# The most readers of a stream: as many as a record can name learners. Without this setting a
# server allows 1,000.
MOST_READERS = 65_536


async def stream_info(connection: Connection, stream: str) -> api.StreamInfo:
    """Asks a stream's leader for the stream's settings and state.

    Raises:
        StreamMissingError: there is no such stream.
        BusError, BusUnavailableError: as `Connection.call`.
    """
    asked = f"{connection.address.api}.STREAM.INFO.{stream}"
    return await connection.call(asked, lambda js: js.stream_info(stream))


async def stream_names(connection: Connection) -> list[str]:
    """Returns the names of all streams, in the server's order."""
    asked, found = f"{connection.address.api}.STREAM.LIST", list[str]()

    def next_page(js: JetStreamContext) -> Awaitable[list[api.StreamInfo]]:
        page: Awaitable[list[api.StreamInfo]] = js.streams_info(offset=len(found))
        return page

    while page := await connection.call(asked, next_page):
        found += [str(info.config.name) for info in page]
    return found


async def store(
    connection: Connection, subject: str, payload: bytes, headers: dict[str, str]
) -> api.PubAck:
    """Appends a message to the stream that stores `subject`; returns the acknowledgement."""
    return await connection.call(
        subject, lambda js: js.publish(subject, payload, headers=headers or None)
    )


def publish_headers(
    msg_id: str | None, expected_last: int | None, ttl_s: float | None
) -> dict[str, str]:
    """Returns the headers for the arguments of `Bus.publish`; None adds no header."""
    headers: dict[str, str] = {}
    if msg_id is not None:
        headers[api.Header.MSG_ID.value] = msg_id
    if expected_last is not None:
        headers[api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = str(expected_last)
    if ttl_s is not None:
        headers[api.Header.MSG_TTL.value] = f"{round(ttl_s * 1000)}ms"
    return headers


def states_stored_time(headers: dict[str, str] | None) -> bool:
    """True if a header states when the message was first stored: by an importer, or forged."""
    return STORED_AT in (headers or {})


def message_of(
    subject: str,
    seq: int,
    time_s: float,
    data: bytes | None,
    headers: dict[str, str] | None,
    imported_to: int = 0,
) -> Message:
    """Returns a message as it was first published, here or in the stream that was exported.

    Up to sequence `imported_to` an importer wrote the header with the time, which replaces
    `time_s`. In later messages a sender may have written the header, so it is ignored. The other
    arguments are as the server gave them.
    """
    known = headers or {}
    imported = seq <= imported_to and STORED_AT in known
    msg_id = known.get(api.Header.MSG_ID.value) or known.get(EXPORTED_ID, "")
    return Message(
        subject,
        seq,
        float(known[STORED_AT]) if imported else time_s,
        data or b"",
        # A folded header is not an id, and no bundle could hold it.
        msg_id if msg_id.isprintable() else "",
    )
