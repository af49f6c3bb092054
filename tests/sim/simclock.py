"""An event loop in virtual time: its clock jumps to the next timer instead of waiting.

The loop is much leaner than asyncio's own, and adds two abilities: the callbacks of a *frozen*
(paused) actor do not run until the actor thaws, and a violation ends the loop at once, whatever the
code under test does with exceptions.
"""

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

# The actor to which the running code belongs; tasks and timers inherit it.
ACTOR: ContextVar[Any] = ContextVar("actor", default=None)


# Turns in one instant after which nothing is taken to let time pass any more.
MOST_TURNS = 100_000


class StuckError(Exception):
    """Nothing is scheduled, or time stands still, and the awaited result has not come."""


class _Handle(list[Any]):
    """A scheduled callback, its arguments, context and time; has the methods of asyncio's handles.

    The class is a list, which Python makes and unpacks faster than any other object of a class.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[0], self[1] = None, ()

    def cancelled(self) -> bool:
        return self[0] is None

    def when(self) -> float:
        return self[3]


class VirtualLoop(asyncio.AbstractEventLoop):
    """A loop for asyncio's tasks, futures, sleeps and timeouts, in virtual time from 0 s on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._timer_count = 0
        self._turns = 0
        self._frozen: dict[Any, list[_Handle]] = {}
        self._failure: BaseException | None = None

    def time(self) -> float:
        return self.now_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_soon(self, callback, *args, context=None):
        handle = _Handle((callback, args, copy_context() if context is None else context, 0.0))
        self._ready.append(handle)
        return handle

    # There is one thread only.
    call_soon_threadsafe = call_soon

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(self, when, callback, *args, context=None):
        handle = _Handle((callback, args, copy_context() if context is None else context, when))
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, handle))
        return handle

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignores the error of a task that nobody awaits."""

    # Actors

    def freeze(self, actor: object) -> None:
        """Hold back the actor's callbacks until `thaw`."""
        self._frozen.setdefault(actor, [])

    def thaw(self, actor: object) -> None:
        """Run the actor's callbacks again, first those that were held back."""
        self._ready.extend(self._frozen.pop(actor, ()))

    def fail(self, failure: BaseException) -> None:
        """Make `run_until_complete` raise this failure at once; only the first failure counts."""
        self._failure = self._failure or failure

    # Running

    def run_until_complete(self, future: Any) -> Any:
        """Run until the coroutine has ended; returns its result."""
        events._set_running_loop(self)
        try:
            task = asyncio.ensure_future(future)
            while not task.done():
                self._turn()
                if self._failure is not None:
                    raise self._failure
            return task.result()
        finally:
            events._set_running_loop(None)

    def drain(self) -> None:
        """Cancel all tasks and let them end, without advancing the clock."""
        self._failure, self._turns = None, 0
        for actor in list(self._frozen):
            self.thaw(actor)
        events._set_running_loop(self)
        try:
            while tasks := [task for task in asyncio.all_tasks(self) if not task.done()]:
                for task in tasks:
                    task.cancel()
                while self._ready:
                    self._turn()
        finally:
            self._failure = None
            events._set_running_loop(None)

    def _turn(self) -> None:
        ready, frozen = self._ready, self._frozen
        self._turns += 1
        if not ready:
            self._jump()
        elif self._turns > MOST_TURNS:
            raise StuckError(f"{MOST_TURNS} turns at {self.now_s:.3f} s")
        for _ in range(len(ready)):
            handle = ready.popleft()
            callback, args, context, _when_s = handle
            if callback is None:
                continue
            if frozen and (actor := context.get(ACTOR)) in frozen:
                frozen[actor].append(handle)
                continue
            context.run(callback, *args)
            if self._failure is not None:
                return

    def _jump(self) -> None:
        timers, ready = self._timers, self._ready
        self._turns = 0
        while not ready:
            if not timers:
                raise StuckError("nothing is scheduled")
            when_s, _, handle = heapq.heappop(timers)
            if handle.cancelled():
                continue
            self.now_s = max(self.now_s, when_s)
            ready.append(handle)
        while timers and timers[0][0] <= self.now_s:
            ready.append(heapq.heappop(timers)[2])
