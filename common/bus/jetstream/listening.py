"""Hearing broadcasts on one link."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import nats.errors
from nats.aio.msg import Msg

from diloco.common.bus.jetstream.faults import vendor_errors
from diloco.common.bus.jetstream.link import CALL_TIMEOUT_S, Link
from diloco.common.bus.protocol import LISTEN_BACKLOG
from diloco.common.errors import BusUnavailableError


async def listen_on(link: Link, subject: str) -> AsyncGenerator[tuple[str, bytes], None]:
    """Broadcasts heard on `link`; BusUnavailableError once it is lost."""
    queue: asyncio.Queue[Msg | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    since = loop.time()

    async def keep(raw: Msg) -> None:
        if queue.qsize() < LISTEN_BACKLOG:
            queue.put_nowait(raw)

    with vendor_errors(subject):
        subscription = await link.client.subscribe(subject, cb=keep)
    link.queues.add(queue)
    try:
        while not link.lost.is_set():
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    raw = await queue.get()
            except TimeoutError:
                if denial := link.denial(subject, since):
                    raise denial from None
                continue
            if raw is not None:
                yield raw.subject, raw.data
        raise BusUnavailableError("the connection is lost")
    finally:
        link.queues.discard(queue)
        with contextlib.suppress(nats.errors.Error):
            await subscription.unsubscribe()
