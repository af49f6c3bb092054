"""TCP proxies of our own: the network that chaos cuts and stalls.

Each daemon reaches nats-server through one of its own, so that one can be cut off alone. All run in
one thread with one event loop; methods may be called from any thread.
"""

import asyncio
import contextlib
import threading
from typing import Self

from diloco.common.process.nats_server import LOOPBACK


class Network:
    """The thread in which all proxies run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._proxies: list[Proxy] = []
        self._thread = threading.Thread(target=self.loop.run_forever, name="network", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end(self) -> None:
        for made in self._proxies:
            made.close()
        tasks = asyncio.all_tasks(self.loop) - {asyncio.current_task(self.loop)}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def proxy(self, port: int, address: str = LOOPBACK) -> "Proxy":
        """A new way to the server on `port`, for those who reach `address`."""
        made = Proxy(self.loop, port, address)
        self._proxies.append(made)
        asyncio.run_coroutine_threadsafe(made.listen(), self.loop).result(10)
        return made


class Proxy:
    """One daemon's way to nats-server; it passes everything on until told otherwise."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: int, address: str) -> None:
        self.port = 0
        self._address = address
        self._loop = loop
        self._target = target
        self._cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"nats://{self._address}:{self.port}"

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, self._address, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Take no more connections; only from the network's own thread."""
        assert self._server is not None
        self._server.close()

    def cut(self) -> None:
        """Reset all connections, and every new one."""
        self._loop.call_soon_threadsafe(self._do_cut)

    def stall(self) -> None:
        """Keep all connections, and let nothing through: neither side is told."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def heal(self) -> None:
        """Pass everything on again; what was stalled is delivered late."""
        self._loop.call_soon_threadsafe(self._do_heal)

    def _do_cut(self) -> None:
        self._cut = True
        for end in self._ends:
            end.transport.abort()

    def _do_heal(self) -> None:
        self._cut = False
        self._flowing.set()

    async def _serve(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        if self._cut:
            near_out.transport.abort()
            return
        try:
            far_in, far_out = await asyncio.open_connection(LOOPBACK, self._target)
        except OSError:  # the server is down: whoever connects shall hear so
            near_out.transport.abort()
            return
        self._ends |= {near_out, far_out}
        both = [
            asyncio.ensure_future(self._pump(near_in, far_out)),
            asyncio.ensure_future(self._pump(far_in, near_out)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in both:
                pump.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            for end in (near_out, far_out):
                self._ends.discard(end)
                end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
