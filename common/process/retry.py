"""Retries of transient faults, and the clock, the threads and the randomness that retries need.

`Runtime` holds these three, so that a simulation can give drivers virtual time and a seed.

A machine's wall clock can be set at any time, by hours, forwards or backwards. So all waits and
durations use `Clock`, which cannot be set; a `Clock` differs from other machines' clocks by as much
as the wall clock did when the process started.
"""

import asyncio
import contextlib
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from diloco.common.process import log
from diloco.common.protocol.errors import BusError, DilocoError, StoreError


class Clock:
    """A clock that cannot be set: the wall clock's time when made, plus monotonic seconds.

    Args:
        wall: returns seconds since the epoch; called once.
        monotonic: returns seconds since some moment, which only grow.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._began_s = wall() - monotonic()
        self._monotonic = monotonic

    def __call__(self) -> float:
        """Returns the seconds since the epoch."""
        return self._began_s + self._monotonic()


P = ParamSpec("P")
T = TypeVar("T")

ID_BYTES = 16
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 10.0


def unguessable_id() -> str:
    """Returns 128 random bits in hex, which nobody can predict from earlier ids."""
    return secrets.token_hex(ID_BYTES)


async def offload_to_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a blocking function on a thread of the event loop's pool; returns its result."""
    return await asyncio.to_thread(function, *args, **kwargs)


@dataclass
class Retries:
    """Counts the attempts that wait because of transient faults, and all faults so far.

    The keys are pairs (attempt, cause): the attempt's name, and the place of the fault, which is
    "bus", "store" or "other". The event loop changes the counts; other threads read them.

    Attributes:
        waiting: number of attempts that wait now.
        faults: number of faults since the start.
    """

    waiting: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)

    @contextlib.contextmanager
    def note(self, what: str) -> Iterator[Callable[[DilocoError], None]]:
        """Yields a function to be called with each fault of the attempt named `what`.

        The attempt counts as waiting from its first fault until the block ends.
        """
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

    def waits_for(self, where: str) -> bool:
        """True if an attempt waits now because of a fault of `where`: "bus", "store" or "other"."""
        return any(count for (_, cause), count in self.waiting.copy().items() if cause == where)

    def now(self) -> tuple[str, ...]:
        """Returns the names of the attempts that wait now."""
        return tuple(what for (what, _), count in sorted(self.waiting.copy().items()) if count)


def _cause(error: DilocoError) -> str:
    if isinstance(error, BusError):
        return "bus"
    return "store" if isinstance(error, StoreError) else "other"


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Time, threads and randomness, as the drivers see them.

    Attributes:
        clock: returns seconds since the epoch; steps of the wall clock do not change it.
        offload: runs a blocking function and returns its result.
        rng: for jitter only, as its values can be predicted.
        new_id: returns a unique id that nobody can predict.
        retries: counts the calls that `retry` is repeating now.
    """

    clock: Callable[[], float] = field(default_factory=Clock)
    offload: Callable[..., Awaitable[object]] = offload_to_thread
    rng: random.Random = field(default_factory=random.Random)
    new_id: Callable[[], str] = unguessable_id
    retries: Retries = field(default_factory=Retries)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking function off the event loop; returns its result."""
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
        """Calls `attempt` until it succeeds, and returns its result.

        An error is transient if its `retry` is True, and permanent else. If an error's `patience_s`
        is not None, the error counts as permanent once it has lasted for more seconds than that.

        The waits between attempts are an exponential backoff with full jitter, up to 10 s.

        Args:
            what: the attempt's name in the log, which has a line for the first fault and a line for
                the success after faults.
            attempt: makes one attempt.
            logger: the log.
            deadline_s: seconds after which a transient error is raised too; None: never.

        Raises:
            DilocoError: a permanent error, or the last transient error at the deadline.
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
