"""The thread beside training: an event loop that publishes and adopts.

The training loop puts work in and takes events out; neither ever waits for the network. What goes
wrong for good here is raised in the training loop, at its next look.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from diloco.common.process.service import cancel
from diloco.learner.core import sync
from diloco.learner.core.boundary import NOTHING, Arrived, Decoded

T = TypeVar("T")


class Background:
    """A learner's tasks on the event loop, as its training thread sees them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: queue.SimpleQueue[Arrived | BaseException] = queue.SimpleQueue()
        self._tasks: set[asyncio.Future[None]] = set()
        self._failed: BaseException | None = None

    def call(self, coroutine: Coroutine[Any, Any, T], within_s: float | None = None) -> T:
        """Run a coroutine and wait for its result.

        Raises:
            TimeoutError: it takes longer than `within_s`; it is cancelled.
        """
        limited = asyncio.wait_for(coroutine, within_s)
        return asyncio.run_coroutine_threadsafe(limited, self.loop).result()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside training, to its end or that of this life."""
        self.loop.call_soon_threadsafe(self._begin, coroutine)

    def events(self, wait_s: float = 0.0) -> list[Arrived]:
        """The events that have arrived; with `wait_s`, wait so long for a first one.

        Raises:
            BaseException: what ended a part of the background for good.
        """
        arrived = []
        try:
            item = self._arrived.get(timeout=wait_s) if wait_s else self._arrived.get_nowait()
            while True:
                if isinstance(item, BaseException):
                    raise item
                arrived.append(item)
                item = self._arrived.get_nowait()
        except queue.Empty:
            return arrived

    def post(self, event: sync.Event, payload: Decoded = NOTHING) -> None:
        """Hand an event to the training loop; from any thread."""
        self._arrived.put(Arrived(event, payload))

    def fail(self, error: BaseException) -> None:
        """End this life, at the training loop's next look; from any thread."""
        self._failed = error
        self._arrived.put(error)

    def check(self) -> None:
        """Look whether this life is to end, and at nothing else.

        Raises:
            BaseException: what ended a part of the background for good.
        """
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """End everything that still runs here."""
        self.call(cancel(*self._tasks))

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


@contextlib.contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="background", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
