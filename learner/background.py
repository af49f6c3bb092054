"""The thread beside training: an event loop that publishes and adopts.

The training loop puts work in and takes events out; neither ever waits for the network. What goes
wrong for good here is raised in the training loop, at its next look.
"""

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from diloco.common import wire
from diloco.common.service import cancel
from diloco.common.views import Loaded
from diloco.learner import sync
from diloco.learner.adopt import Adopter, Fetcher
from diloco.learner.hosts import Crew
from diloco.learner.publish import Arrived, Context, Outgoing, Publisher, Tensors, Uploader

T = TypeVar("T")


class Background:
    """The outside of one learner.

    Args:
        context: the learner's; its bus must have been made on `loop`.
        loop: the event loop, run by this object's thread from `start` to `close`.
    """

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop
        self._arrived: queue.SimpleQueue[Arrived | BaseException] = queue.SimpleQueue()
        self._publisher = Publisher(context, self._post)
        self._adopter = Adopter(context, self._post)
        self._tasks: set[asyncio.Future[None]] = set()

    # For the training loop

    def load(self, fragment: int) -> Loaded:
        """The newest version of a fragment."""
        return self._run(self._adopter.load(fragment))

    def attach(self, tensors: Tensors, crew: Crew | None = None) -> None:
        """Say whose tensors are sent and moved, and what other hosts there are."""
        hosts = 1 if crew is None else crew.hosts
        self._publisher.uploader = Uploader(self._context, tensors, hosts=hosts)
        self._adopter.fetcher = Fetcher(self._context, tensors)
        if crew is not None:
            self._publisher.others = crew.stored
            self._adopter.others = crew.prepare

    def position(self) -> int:
        """Where this learner's data goes on; only once it has joined is that certain."""
        return self._run(self._adopter.position())

    def fetch(self, what: str, function: Callable[[], T]) -> T:
        """Call a function that reads the store; passing faults are waited out.

        Raises:
            DilocoError: one that is no passing fault.
        """
        runtime, logger = self._context.runtime, self._context.logger
        return self._run(runtime.retry(what, lambda: runtime.call(function), logger=logger))

    def join(self, heartbeat: Callable[[int], wire.Heartbeat], every_s: float) -> int:
        """Begin a life: announce it, follow the records, send heartbeats; its incarnation."""
        incarnation = self._run(self._publisher.join(socket.gethostname()))
        self._adopter.incarnation = incarnation
        self._spawn(self._adopter.follow())
        self._spawn(self._publisher.beat(lambda: heartbeat(incarnation), every_s))
        return incarnation

    def events(self, wait_s: float = 0.0) -> list[Arrived]:
        """What has arrived; with `wait_s`, wait so long for a first one.

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

    def send(self, outgoing: Outgoing) -> None:
        """Upload an update and publish its manifest."""
        self._submit(self._publisher.send(outgoing))

    def republish(self, again: sync.Republish) -> None:
        """Announce an update once more."""
        self._submit(self._publisher.republish(again))

    def finished(self, position: int, fragments: tuple[int, ...]) -> None:
        """Say that nothing more of these fragments comes."""
        self._submit(self._publisher.leave(position, fragments))

    def watch(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something beside training, to the end of this life."""
        self._spawn(coroutine)

    def leave(self, position: int, within_s: float) -> None:
        """Announce the end of this life; give up after `within_s` seconds."""
        leaving = asyncio.wait_for(self._publisher.leave(position), within_s)
        try:
            self._run(leaving)
        except TimeoutError:
            self._context.logger.warning("left_silently", waited_s=within_s)

    def fail(self, error: BaseException) -> None:
        """End this life, at the training loop's next look; called on the event loop."""
        self._arrived.put(error)

    def close(self) -> None:
        """End everything that still runs here."""
        self._run(cancel(*self._tasks))

    # Between the threads

    def _post(self, event: sync.Event, payload: object = None) -> None:
        self._arrived.put(Arrived(event, payload))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _submit(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._spawn_here, coroutine)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._submit(coroutine)

    def _spawn_here(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._arrived.put(error)


def run_loop() -> tuple[asyncio.AbstractEventLoop, Callable[[], None]]:
    """An event loop on a thread of its own, and the function that ends it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="background", daemon=True)
    thread.start()

    def stop() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    return loop, stop
