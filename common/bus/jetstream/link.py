"""One connection to a server, from its making to its loss."""

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from diloco.common.bus.jetstream.address import Address
from diloco.common.errors import AccessDeniedError, BusError, BusUnavailableError, ConfigError

CALL_TIMEOUT_S = 5.0
_CLOSE_S = 2.0


class _Client(Client):
    """nats-py's client, which hears a refusal: over TLS it would write on into a broken pipe.

    And it outlives what a sender may write for headers and subjects: of headers that it cannot
    read it has none, and of a subject's bytes that are no text it has the mark for those. nats-py
    loses the connection, so that one stored message would end every connection on which it is read.
    """

    async def _process_headers(self, headers: Any) -> dict[str, str] | None:
        """The headers of a message; None of what are none."""
        try:
            found: dict[str, str] | None = await super()._process_headers(headers)
        except Exception:  # noqa: BLE001 - whatever a sender's bytes may raise
            return None
        return found

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        """A message as the application has it."""
        text = subject.decode(errors="replace").encode()
        message: Msg = super()._build_message(sid, text, reply, data, headers)
        return message

    def _connect_command(self) -> bytes:
        """CONNECT with the PING that nats-py sends after it, so that it reads before it writes."""
        transport: Any = self._transport

        def connect_and_ping(data: bytes) -> None:
            transport.write = leave_out
            type(transport).write(transport, data)

        def leave_out(_ping: bytes) -> None:
            del transport.write

        transport.write = connect_and_ping
        command: bytes = super()._connect_command()
        return command + b"PING\r\n"


class Link:
    """One connection, from its making to its loss."""

    def __init__(self, address: Address) -> None:
        self.lost = asyncio.Event()
        self.client = _Client()
        self.js: JetStreamContext = self.client.jetstream(
            prefix=address.api, timeout=CALL_TIMEOUT_S
        )
        self.api = address.api
        self.queues: set[asyncio.Queue[Msg | None]] = set()  # None tells that the link is lost
        self.waiting: set[Callable[[], None]] = set()  # called when it is
        self._address = address
        self._problem: Exception | None = None
        self._denied: deque[tuple[float, str]] = deque(maxlen=64)

    async def open(self, timeout_s: float) -> None:
        """Connect, or fail within `timeout_s` seconds.

        Raises:
            BusUnavailableError: nobody answers there.
            BusError: the server refuses us.
        """
        address = self._address
        try:
            async with asyncio.timeout(timeout_s):
                await self.client.connect(
                    servers=address.url.split(","),
                    name=address.name,
                    tls=address.tls(),
                    inbox_prefix=address.inbox_prefix,
                    error_cb=self._on_error,
                    closed_cb=self._on_closed,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=5,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    **address.identity(),
                )
        except ConfigError:
            await self.close()
            raise
        except Exception as error:
            await self.close()
            raise self._refusal(error) from error
        except BaseException:
            await self.close()
            raise
        _mark_tls(self.client)
        for task in (self.client._flusher_task, self.client._reading_task):  # noqa: SLF001
            if task is not None:
                task.add_done_callback(_look_at)

    async def close(self) -> None:
        """Send what is queued and close; never takes long, never raises."""
        self._mark_lost()
        # AssertionError: nats-py has one when the client got nowhere near a connection.
        # A task of its own: it may forget a cancellation, and then wait on for a peer that is gone.
        closing = asyncio.ensure_future(self._close_client())
        closing.add_done_callback(_look_at)
        try:
            await asyncio.wait({closing}, timeout=_CLOSE_S)
        finally:
            closing.cancel()
        # nats-py fails to close a connection that broke with data unsent; these would wait on.
        for subscription in self.client._subs.values():  # noqa: SLF001
            if subscription._wait_for_msgs_task is not None:  # noqa: SLF001
                subscription._wait_for_msgs_task.cancel()  # noqa: SLF001

    async def _close_client(self) -> None:
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError, AssertionError):
            await self.client.close()

    async def wait_lost(self) -> None:
        """Return once the connection is gone."""
        # Closing a half-open connection can hang in nats-py before it tells, hence the polling.
        while not self.lost.is_set() and not self.client.is_closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.lost.wait()
        self._mark_lost()

    def denial(self, subject: str, since: float) -> BusError | None:
        """The server's word that `subject` (or our inbox) is not permitted, if it gave it."""
        inbox = f'subscription to "{self._address.inbox_prefix.lower()}.'
        for time, text in self._denied:
            if (time >= since and f'"{subject.lower()}"' in text) or inbox in text:
                return AccessDeniedError(
                    f"not permitted on {subject!r} as {self._address.name!r}: {text}",
                    hint="grant it in the NATS server's permissions, or use other credentials: "
                    "runbooks/permissions.md",
                )
        return None

    def _refusal(self, error: Exception) -> BusError:
        reason = self._problem or error
        text = str(reason) or type(reason).__name__
        if "authorization" in text.lower() or "authentication" in text.lower():
            return AccessDeniedError(
                f"NATS at {self._address.shown()} refused {self._address.name!r}: {text}",
                hint="check the credentials, and that the server knows them: "
                "runbooks/credentials.md",
            )
        if isinstance(error, ssl.SSLError) or "certificate" in text.lower():
            return BusError(
                f"no trust between {self._address.name!r} and NATS at "
                f"{self._address.shown()}: {text}",
                hint="bus.tls_ca must name the certificate of the authority that signed the "
                "server's, and bus.url a name that stands in it",
            )
        return BusUnavailableError(
            f"no connection to NATS at {self._address.shown()}: {text}",
            hint="check the address and that nats-server runs: runbooks/nats-away.md",
        )

    async def _on_error(self, error: Exception) -> None:
        self._problem = error
        if "permissions violation" in str(error).lower():
            self._denied.append((asyncio.get_running_loop().time(), str(error).lower()))

    async def _on_closed(self) -> None:
        self._mark_lost()

    def _mark_lost(self) -> None:
        self.lost.set()
        for queue in self.queues:
            queue.put_nowait(None)
        for end in self.waiting:
            end()


def _look_at(task: "asyncio.Task[None]") -> None:
    """Take note of how one of nats-py's tasks ended, or asyncio would write a trace of it.

    The loss of its link is noticed elsewhere.
    """
    if not task.cancelled():
        task.exception()


def _mark_tls(client: Client) -> None:
    """Tell asyncio that the stream has become TLS: nats-py does not, and asyncio would warn."""
    transport: Any = client._transport  # noqa: SLF001
    writer = transport._io_writer  # noqa: SLF001
    if writer.get_extra_info("sslcontext") is not None:
        writer.transport.get_protocol()._over_ssl = True  # noqa: SLF001
