"""Retries of transient faults, and what they need: a clock, threads and randomness.

`Runtime` holds these three, so that a simulation can give drivers virtual time and a seed.

A machine's clock can be set at any time, by hours and either way. So all waits and durations use
`Clock`, which nobody can set; compared with other machines' times it is as right as the wall clock
was at the start.
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
    """A clock that nobody can set: the wall clock's time when made, plus monotonic seconds.

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
    """Runs a blocking call on a thread of the event loop's pool."""
    return await asyncio.to_thread(function, *args, **kwargs)


@dataclass
class Retries:
    """Counts the attempts that wait because of transient faults, and all faults so far.

    The keys are what was attempted, and where the fault was: "bus", "store" or "other". The event
    loop changes the counts; other threads read them.
    """

    waiting: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)

    @contextlib.contextmanager
    def note(self, what: str) -> Iterator[Callable[[DilocoError], None]]:
        """Yields a function that counts a fault of an attempt at `what`, while the block runs."""
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
        """True if an attempt waits now because of a fault that was at `where`."""
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
        """Runs a blocking function off the event loop."""
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
        """Calls `attempt` until it succeeds, and waits out transient faults (`error.retry`).

        A fault with `patience_s` that lasts longer than this counts as permanent.

        Exponential backoff with full jitter, from 0.1 s up to 10 s between attempts.

        Args:
            what: named in the log, once when it begins to fail and once when it works again.
            attempt: makes one attempt.
            logger: the log.
            deadline_s: seconds after which to give up; None: never.

        Raises:
            DilocoError: a permanent fault, or the last transient one at the deadline.
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
