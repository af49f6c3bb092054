"""The connection that a bus keeps: a link at a time, replaced whenever it is lost."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.errors
from nats.js import JetStreamContext

from diloco.common.process.service import cancel
from diloco.common.protocol.errors import (
    AccessDeniedError,
    BusError,
    BusUnavailableError,
    ConfigError,
)
from diloco.common.storage.bus.jetstream.faults import ours
from diloco.common.storage.bus.jetstream.link import CALL_TIMEOUT_S, Address, Link, Pause

_DIAL_TIMEOUT_S = 10.0

T = TypeVar("T")


class Connection:
    """Keeps a link to the servers up until it is closed.

    Args:
        address: where they are.
        link: the first one, open.

    Attributes:
        link: the present one; None while it is lost.
        closed: whether `close` was called.
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
        """Release the link, and make no other."""
        self.closed = True
        self._linked.set()
        await cancel(self._keeper)
        if self.link is not None:
            await self.link.close()
            self.link = None

    def current(self) -> Link:
        """The link.

        Raises:
            BusError: why there is none.
        """
        if self.closed:
            raise BusError("this bus is closed")
        if self.link is None:
            # A new one each time: a raised error collects its traceback.
            raise type(self._outage)(self._outage.message, hint=self._outage.hint)
        return self.link

    async def wait_linked(self, pause: Pause) -> None:
        """Wait before another attempt, until there is a link.

        Raises:
            BusError: the server does not want us any more.
        """
        await pause.wait()
        while not self._linked.is_set():
            if not self._outage.retry:
                self.current()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._linked.wait()

    async def call(self, subject: str, make: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        """Run one request on the link; its failure as one of our errors.

        Args:
            subject: what the server names if it denies the request.
            make: the request.

        Raises:
            BusUnavailableError: there is no link, or no answer within `CALL_TIMEOUT_S`.
            BusError: refused, or this bus is closed.
        """
        link, loop = self.current(), asyncio.get_running_loop()
        since, ended = loop.time(), loop.create_future()

        def end(_call: object = None) -> None:
            if not ended.done():
                ended.set_result(None)

        # A task of its own, because nats-py swallows a cancellation while it waits to flush.
        call = asyncio.ensure_future(make(link.js))
        # Looked at also if we are cancelled just as it fails, or asyncio complains in the log.
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        call.add_done_callback(end)
        # No task for each of what else may end it: every update waits for a call.
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
            raise ours(error, subject) from error
        finally:
            link.waiting.discard(end)
            timer.cancel()
            call.cancel()

    async def _keep_linked(self, link: Link) -> None:
        """Replace the link whenever it is lost."""
        while True:
            await link.wait_lost()
            self.link = None
            self._linked.clear()
            await link.close()
            link = await self._dial()
            self.link = link
            self._linked.set()

    async def _dial(self) -> Link:
        pause, refusals = Pause(), 0
        while True:
            await pause.wait()
            link = Link(self.address)
            try:
                await link.open(_DIAL_TIMEOUT_S)
            except (BusError, ConfigError) as error:
                refusals = 0 if error.retry else refusals + 1
                if refusals != 1:  # While it reloads, a server refuses whom it knows.
                    self._outage = (
                        error
                        if isinstance(error, BusError)
                        # Its credentials are gone, or of another kind than before.
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
