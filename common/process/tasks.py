"""Runs coroutines concurrently, and makes the event loops that they need."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

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
    """Runs an event loop on a new thread while the block runs; then cancels the loop's tasks."""
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


async def within(limit_s: float | None, awaitable: Awaitable[T]) -> T:
    """Returns the result of `awaitable`.

    `asyncio.wait_for` of Python 3.11 loses a cancellation that comes with the result.

    Raises:
        TimeoutError: it took longer than `limit_s` seconds; None: it may take as long as it likes.
    """
    async with asyncio.timeout(limit_s):
        return await awaitable


async def first_of(*coroutines: Coroutine[object, object, None]) -> None:
    """Runs coroutines until one of them ends; then cancels the others.

    Raises:
        Exception: the error of the coroutine that ended, if it failed.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        await cancel(*tasks)


async def all_of(*coroutines: Coroutine[object, object, None]) -> None:
    """Runs coroutines until all have ended, or one has failed; then cancels the others.

    Raises:
        Exception: the error of the coroutine that failed.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels tasks, and waits until they have ended.

    A task that goes on is cancelled again: `asyncio.wait_for` of Python 3.11 and nats-py each
    forget a cancellation that comes at the wrong moment. Tasks are cancelled in the order given,
    not in that of a set, which follows from addresses: two simulations with the same seed would
    differ.
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
        """Runs `work` concurrently, until `work` ends or `stop` cancels it."""
        task = asyncio.ensure_future(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)

    async def failure(self) -> None:
        """Raises the first exception of a task; waits for ever if none fails."""
        await self._broken

    async def stop(self) -> None:
        """Cancels all tasks, and waits until they have ended."""
        await cancel(*self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)
