"""Coroutines that run beside each other, the event loops they need, and their end by a signal."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

# Between two looks at whether a daemon that starts is to end.
ASKED_LOOK_S = 0.2
# Longer than any farewell takes: giving up leases, closing a connection.
CANCEL_AGAIN_S = 10.0


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, for code that is not asynchronous.

    Where an event loop runs on this thread already, as in a notebook, it has a thread of its own.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="beside") as pool:
        return pool.submit(asyncio.run, coroutine).result()


@contextlib.contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on a thread of its own; what still runs at the end is cancelled."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop):
            loop.run_forever()

    thread = threading.Thread(target=serve, name="loop", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def on_signals(stop: Callable[[], object]) -> None:
    """The first SIGINT or SIGTERM calls `stop`; the second ends the process at once.

    Call it on the main thread.
    """
    seen: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        stop()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


@contextlib.contextmanager
def asked_by_signals(stop: Callable[[], object]) -> Iterator[None]:
    """For as long as the block lasts, the first SIGINT or SIGTERM calls `stop`.

    Handlers that were there are called too, at each signal. From the second on, where there was
    none, a signal does what it did before. Signals that were ignored stay so. Off the main
    thread, which alone may set handlers, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        earlier = before[number]
        if not seen:
            stop()
        elif earlier in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, earlier)
            signal.raise_signal(number)
        seen.append(number)
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    taken = [number for number, earlier in before.items() if earlier not in (None, signal.SIG_IGN)]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


class AskedToStopError(Exception):
    """Somebody asked the daemon to stop before its work began."""


async def unless_asked(coroutine: Coroutine[Any, Any, T], asked: Callable[[], bool]) -> T:
    """Await one step of a start, unless the daemon is asked to stop first.

    A start waits for others, for ever if need be; it must not wait so when its machine goes down.

    Raises:
        AskedToStopError: it was asked; the coroutine is cancelled.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        while not asked():
            done, _ = await asyncio.wait([task], timeout=ASKED_LOOK_S)
            if done:
                return task.result()
    finally:
        await cancel(task)
    raise AskedToStopError


async def first_of(*coroutines: Coroutine[object, object, None]) -> None:
    """Run until the first of these ends; cancel the others; raise the first one's error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(*tasks)


async def all_of(*coroutines: Coroutine[object, object, None]) -> None:
    """Run until all of these have ended, or one has failed; then cancel the others and raise."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks and wait until they have ended.

    More than once if need be: `asyncio.wait_for` of Python 3.11 and nats-py each forget a
    cancellation that comes in the wrong moment, and the task would go on for ever.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # Looked at, or asyncio complains in the log.


class Tasks:
    """A set of coroutines that run by themselves; must be made in a running event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Run `work` beside everything else."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def failure(self) -> None:
        """Raise the first exception of a task; wait for ever if none fails."""
        await self._broken

    async def stop(self) -> None:
        """End them all."""
        await cancel(*self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)
