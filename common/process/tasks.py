"""Runs coroutines concurrently, makes the event loops that they need, and ends them on signals."""

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

# Seconds between two checks of whether a starting daemon was asked to stop.
ASKED_LOOK_S = 0.2
# Longer than any clean-up takes: releasing leases, closing a connection.
CANCEL_AGAIN_S = 10.0


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine and returns its result, for code that is not asynchronous.

    If an event loop runs on this thread already, as in a notebook, the coroutine runs on another
    thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="beside") as pool:
        return pool.submit(asyncio.run, coroutine).result()


@contextlib.contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Runs an event loop on a thread of its own; cancels what still runs when the block ends."""
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
    """Makes the first SIGINT or SIGTERM call `stop`, and the second end the process at once.

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
    """While the block runs, makes the first SIGINT or SIGTERM call `stop`.

    Earlier Python handlers are called too, at each signal. Where there was none, a second signal
    has its default effect. Ignored signals stay ignored. Off the main thread, which alone may set
    handlers, nothing is done.
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
    """The daemon was asked to stop before its work began."""


async def unless_asked(coroutine: Coroutine[Any, Any, T], asked: Callable[[], bool]) -> T:
    """Awaits one step of a start, unless the daemon is asked to stop first.

    A step may wait for others for ever, which must not block a machine's shutdown.

    Raises:
        AskedToStopError: `asked` returned True; the coroutine was cancelled.
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
    """Runs until the first coroutine ends; then cancels the rest, and raises the first's error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        await cancel(*tasks)


async def all_of(*coroutines: Coroutine[object, object, None]) -> None:
    """Runs until all coroutines have ended, or one has failed; then cancels the rest and raises."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels tasks, and waits until they have ended.

    It cancels repeatedly if need be: `asyncio.wait_for` of Python 3.11 and nats-py each forget a
    cancellation that comes at the wrong moment, and the task would go on for ever. Tasks are
    cancelled in the order given: the order of a set follows from addresses, and a simulation would
    differ from one run of its seed to the next.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # Read, as asyncio else logs it.


class Tasks:
    """A set of concurrent coroutines; must be made in a running event loop."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order of their start
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Runs `work` concurrently, until it ends or `stop` cancels it."""
        task = asyncio.ensure_future(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)

    async def failure(self) -> None:
        """Raises the first exception of a task; waits for ever if none fails."""
        await self._broken

    async def stop(self) -> None:
        """Cancels all tasks."""
        await cancel(*self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)
