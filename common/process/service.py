"""The runtime of every daemon: retrying transient faults, taking signals, keeping time.

`Runtime` holds the clock, the thread pool and the randomness that drivers use, so that a
simulation can give them virtual time and a seed.

Somebody may set a machine's clock at any time, by hours and either way. Whatever waits, or says how
long something took, follows `Clock`, which nobody can set; what it shows beside other machines'
times is as right as the wall clock was at the start.
"""

import asyncio
import contextlib
import os
import random
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from diloco.common.process import log
from diloco.common.protocol.errors import BusError, DilocoError, StoreError


class Clock:
    """Seconds since the epoch when it was made, and the seconds that have passed since.

    Args:
        wall: seconds since the epoch, read once.
        monotonic: seconds since some moment, which only grow.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._began_s = wall() - monotonic()
        self._monotonic = monotonic

    def __call__(self) -> float:
        """Now."""
        return self._began_s + self._monotonic()


P = ParamSpec("P")
T = TypeVar("T")

ID_BYTES = 16
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 10.0
# Between two looks at whether a daemon that starts is to end.
ASKED_LOOK_S = 0.2
# Longer than any farewell takes: giving up leases, closing a connection.
CANCEL_AGAIN_S = 10.0


def unguessable_id() -> str:
    """128 bits of the system's randomness, in hex, which no earlier ids predict."""
    return secrets.token_hex(ID_BYTES)


async def offload_to_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call on a thread of the loop's pool."""
    return await asyncio.to_thread(function, *args, **kwargs)


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
    """An event loop on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="loop", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass
class Retries:
    """Counts of attempts that wait because of transient faults, and of those that have met one.

    Counted by what was attempted and whose fault it was: "bus", "store" or "other". Changed on
    the event loop; read from other threads.
    """

    waiting: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)

    @contextlib.contextmanager
    def note(self, what: str) -> Iterator[Callable[[DilocoError], None]]:
        """Gives the function to call at each fault of an attempt at `what`, while a block lasts."""
        met: list[tuple[str, str]] = []

        def end() -> None:
            while met:
                self.waiting[met.pop()] -= 1

        def fault(error: DilocoError) -> None:
            end()
            met.append((what, _cause(error)))
            self.waiting[met[0]] += 1
            self.faults[met[0]] += 1

        try:
            yield fault
        finally:
            end()

    def now(self) -> tuple[str, ...]:
        """The attempts that wait now."""
        return tuple(what for (what, _), count in sorted(self.waiting.copy().items()) if count)


def _cause(error: DilocoError) -> str:
    if isinstance(error, BusError):
        return "bus"
    return "store" if isinstance(error, StoreError) else "other"


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Time, threads and randomness, as the drivers see them.

    Attributes:
        clock: seconds since the epoch; steps of the wall clock do not change it.
        offload: runs a blocking function and gives its result.
        rng: for jitter only: its values can be predicted.
        new_id: gives an id that nobody has or can predict.
        retries: the calls that `retry` is repeating now.
    """

    clock: Callable[[], float] = field(default_factory=Clock)
    offload: Callable[..., Awaitable[object]] = offload_to_thread
    rng: random.Random = field(default_factory=random.Random)
    new_id: Callable[[], str] = unguessable_id
    retries: Retries = field(default_factory=Retries)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function off the event loop."""
        result: T = await self.offload(function, *args, **kwargs)  # type: ignore[assignment]
        return result

    async def retry(
        self,
        what: str,
        attempt: Callable[[], Awaitable[T]],
        *,
        logger: log.Logger,
        deadline_s: float | None = None,
    ) -> T:
        """Call `attempt` until it succeeds; transient faults (`error.retry`) are waited out.

        A fault with `patience_s` that stays for so long is none that passes.

        Exponential backoff with full jitter, from 0.1 s up to 10 s between attempts.

        Args:
            what: named in the log, once when it begins to fail and once when it works again.
            attempt: makes one attempt.
            logger: where to tell.
            deadline_s: give up after so many seconds; None for never.

        Raises:
            DilocoError: one that is no transient fault, or the last one at the deadline.
        """
        with self.retries.note(what) as fault:
            return await self._retry(what, attempt, fault, logger, deadline_s)

    async def _retry(
        self,
        what: str,
        attempt: Callable[[], Awaitable[T]],
        fault: Callable[[DilocoError], None],
        logger: log.Logger,
        deadline_s: float | None,
    ) -> T:
        began_s = self.clock()
        patient_since_s: float | None = None
        backoff_s = FIRST_BACKOFF_S
        failures = 0
        while True:
            try:
                result = await attempt()
            except DilocoError as error:
                now_s = self.clock()
                late = deadline_s is not None and now_s - began_s > deadline_s
                if error.patience_s is None:
                    patient_since_s = None
                else:
                    patient_since_s = now_s if patient_since_s is None else patient_since_s
                    late = late or now_s - patient_since_s > error.patience_s
                if not error.retry or late:
                    raise
                fault(error)
                if failures == 0:
                    logger.warning("waiting", what=what, error=error.message, hint=error.hint)
                failures += 1
                await asyncio.sleep(self.rng.uniform(0, backoff_s))
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            else:
                if failures:
                    waited_s = round(self.clock() - began_s, 3)
                    logger.info("resumed", what=what, attempts=failures + 1, waited_s=waited_s)
                return result


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
    """Run until the first of these ends; cancel the others; raise what it raised."""
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
