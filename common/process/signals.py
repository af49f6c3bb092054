"""Handles SIGINT (Ctrl-C) and SIGTERM: the first asks a process to stop, the second ends it."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

from diloco.common.process.tasks import cancel

T = TypeVar("T")

# Seconds between two checks of whether a starting daemon was asked to stop.
ASKED_LOOK_S = 0.2


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

    A Python handler that was set before is called too, at each signal. If no Python handler was
    set, the second signal has its default effect. Ignored signals stay ignored. Only the main
    thread may set handlers, so this function does nothing on another thread.
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
    """Returns the result of `coroutine`, a step of a daemon's start, unless asked to stop first.

    A step may wait for other machines for ever, which must not block this machine's shutdown.

    Args:
        coroutine: the step.
        asked: returns True once the daemon is asked to stop; called several times a second.

    Raises:
        AskedToStopError: `asked` returned True before the step ended; the step was cancelled.
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


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delays a Ctrl-C until the block ends; then raises `KeyboardInterrupt`.

    A Ctrl-C while JAX is being loaded would abort the process, or be lost. Blocking SIGINT in this
    thread would not help, as a library's thread would receive the signal. On a thread other than
    the main one, this function does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came.is_set():
        raise KeyboardInterrupt
