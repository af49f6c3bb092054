"""The background of one learner: the event loop that does all network traffic beside training.

The training loop gives work to the background, takes events from it, and never waits for the
network. An error in the background that ends the learner is raised in the training loop, when that
next takes events. This module also has the state that the background's tasks share, and the
interface to the learner's other hosts.
"""

import asyncio
import dataclasses
import queue
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from diloco.common.process import log
from diloco.common.process.config import RunSettings
from diloco.common.process.health import Health
from diloco.common.process.metrics import Metrics
from diloco.common.process.signals import unless_asked
from diloco.common.process.tasks import cancel, within
from diloco.common.protocol import wire
from diloco.common.protocol.errors import DilocoError
from diloco.common.storage.catchup import Change
from diloco.common.storage.tape import RunContext
from diloco.learner.core.events import (
    Event,
)
from diloco.learner.core.handover import NOTHING, Arrived, Boundary, Decoded

T = TypeVar("T")


class Background:
    """The training thread's interface to the learner's tasks on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: queue.SimpleQueue[Arrived | BaseException] = queue.SimpleQueue()
        self._tasks: set[asyncio.Future[None]] = set()
        self._failed: BaseException | None = None

    def call(self, coroutine: Coroutine[Any, Any, T], within_s: float | None = None) -> T:
        """Runs a coroutine on the event loop, waits for its result, and returns the result.

        Raises:
            TimeoutError: the coroutine took longer than `within_s` seconds, and is cancelled.
        """
        limited = within(within_s, coroutine)
        return asyncio.run_coroutine_threadsafe(limited, self.loop).result()

    def call_unless_failed(
        self, coroutine: Coroutine[Any, Any, T], asked: Callable[[], bool] = lambda: False
    ) -> T:
        """Runs a coroutine as `call` does, and cancels it if the learner ends meanwhile.

        What it waits for may never come then: a message of a tape that is lost, or a store that is
        away.

        Raises:
            BaseException: the error that ended a task of the background.
            AskedToStopError: `asked` became true.
        """

        def ends() -> bool:
            self.check()
            return asked()

        return self.call(unless_asked(coroutine, ends))

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine on the event loop; returns at once. `close` cancels it.

        An exception of the coroutine ends the learner, as by `fail`.
        """
        self.loop.call_soon_threadsafe(self._begin, coroutine)

    def events(self, wait_s: float = 0.0) -> list[Arrived]:
        """Returns the events that have arrived; with none, waits up to `wait_s` for the first.

        Raises:
            BaseException: the error that ended a task of the background.
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

    def post(self, event: Event, payload: Decoded = NOTHING) -> None:
        """Gives an event to the training loop; may be called from any thread."""
        self._arrived.put(Arrived(event, payload))

    def fail(self, error: BaseException) -> None:
        """Ends the learner: the next `events` or `check` raises `error`; from any thread."""
        self._failed = error
        self._arrived.put(error)

    def check(self) -> None:
        """Raises the error that ends the learner, if there is one; takes no event.

        Raises:
            BaseException: the error that ended a task of the background.
        """
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Cancels all tasks that still run."""
        self.call(cancel(*self._tasks))

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


# --- The state that the background's tasks share

TROUBLE = "unanswered"
ADVICE = (
    "see whether an aggregator of this run is alive, or start one: diloco aggregator --config FILE;"
    " what was sent waits on the tape"
)
# LONG_IN_A_ROW updates of a fragment in a row, each of at least LONG times H steps, are not due to
# an outage: the loop is too fast for the rounds.
LONG = 10
LONG_IN_A_ROW = 3
OUTRUN = (
    "a round takes longer than the loop needs for many times sync.interval_steps, and moves the"
    " run's clock by no more than that: raise sync.interval_steps, or have a step do more work"
)


@dataclass
class RecordWatch:
    """Detects that no aggregator makes records, or that rounds are too slow for the loop.

    Must be used on the event loop.

    Attributes:
        since_s: time of the first announcement of an update since the last record; None: none.
        told: a warning was logged that no record comes.
        interval_steps: H, if the run's settings were changed meanwhile; 0: they were not.
    """

    since_s: float | None = None
    told: bool = False
    interval_steps: int = 0
    _long: dict[int, int] = field(default_factory=dict)
    _told_outrun: bool = False

    def announced(self, now_s: float) -> None:
        """Notes that an update of this learner was announced at `now_s`."""
        if self.since_s is None:
            self.since_s = now_s

    def heard(self, health: Health, logger: log.Logger) -> None:
        """Notes that a record came; logs that once if a warning had been logged before."""
        self.since_s = None
        if self.told:
            self.told = False
            health.troubles.pop(TROUBLE, None)
            logger.info("answered")

    def look(self, now_s: float, longest_s: float, health: Health, logger: log.Logger) -> None:
        """Logs one warning, and sets a trouble, if updates wait for a record for `longest_s`."""
        if self.told or self.since_s is None or now_s - self.since_s < longest_s:
            return
        self.told = True
        waited_s = round(now_s - self.since_s)
        health.troubles[TROUBLE] = (
            f"no version and no verdict for {waited_s} s since its updates were announced"
        )
        logger.warning("unanswered", waited_s=waited_s, advice=ADVICE)

    def covered(self, fragment: int, steps: int, settings: RunSettings, logger: log.Logger) -> None:
        """Notes that an update of `steps` inner steps was sent; warns once if rounds are too slow.

        Rounds are too slow if updates of a fragment cover many times H steps, again and again.
        """
        interval_steps = self.interval_steps or settings.sync.interval_steps
        long = steps >= LONG * interval_steps
        self._long[fragment] = self._long.get(fragment, 0) + 1 if long else 0
        if self._long[fragment] >= LONG_IN_A_ROW and not self._told_outrun:
            self._told_outrun = True
            logger.warning("rounds_outrun", steps=steps, of=interval_steps, advice=OUTRUN)


def longest_round_s(settings: RunSettings, step_time_s: float) -> float:
    """Returns an upper bound on the seconds of a round: twice H steps, plus the deadline."""
    sync = settings.sync
    return settings.quorum.deadline_s + 2 * sync.interval_steps * step_time_s


class TrafficCounts:
    """Counts for heartbeats, since this learner joined: stored bytes, read bytes, sent updates."""

    def __init__(self) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.updates_sent = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context(RunContext):
    """The objects that all background tasks of one learner share.

    Attributes:
        learner: the learner's name.
        holds: the modules that it holds; empty: all.
        announced: by fragment, the number of the newest update of this life whose manifest may be
            on the tape.
        traffic: counts of bytes and updates.
        record_watch: detects that no record comes.
        metrics: the learner's Prometheus metrics.
        health: the learner's liveness, readiness and troubles.
    """

    learner: str
    holds: tuple[str, ...] = ()
    announced: dict[int, int] = dataclasses.field(default_factory=dict)
    traffic: TrafficCounts = dataclasses.field(default_factory=TrafficCounts)
    record_watch: RecordWatch = dataclasses.field(default_factory=RecordWatch)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    health: Health = dataclasses.field(default_factory=Health)


# --- The interface of host 0 to the learner's other hosts


class Preparation:
    """An attempt to have all other hosts fetch a version; this class is for no other hosts."""

    async def ready(self) -> None:
        """Waits until all other hosts have the version's tensors; here returns at once.

        Raises:
            ObjectMissingError: a host reports that an object is missing.
            IntegrityError: a host reports that an object is damaged.
        """

    def drop(self) -> None:
        """Tells the other hosts to free the version's tensors, since they will not be adopted."""


class NoOtherHosts:
    """The other hosts of a learner of one host: none, so that most methods do nothing.

    The subclass `Coordinator` does the same for a learner of several hosts.

    Attributes:
        hosts: the number of the learner's hosts, this one included.
        lookahead: the number of boundaries planned ahead, so that no host waits for its plan.
    """

    hosts = 1
    lookahead = 0

    def asked_to_leave(self) -> bool:
        """True if another host was asked to end."""
        return False

    def say(self, message: Any) -> None:
        """Sends a `HostMessage` to all other hosts; may be called from any thread."""

    def write(self, message: Any) -> None:
        """Sends a `HostMessage` to all other hosts; must be called on the event loop."""

    def tell(self, boundary: Boundary) -> None:
        """Sends the plan of a step boundary to all other hosts; callable from any thread."""

    def give_up(self, _error: DilocoError) -> None:
        """Sends all other hosts the error that ends host 0; may be called from any thread."""

    def prepare(self, _change: Change) -> Preparation:
        """Asks all other hosts to fetch a version; must be called on the event loop."""
        return Preparation()

    async def checkpoints(self) -> list[set[tuple[int, int]]]:
        """Returns the checkpoints of which each other host has its part: here of none."""
        return []

    async def snapshots(self) -> list[set[tuple[int, int]]]:
        """Returns the snapshots of which each other host has its part: here of none."""
        return []

    def made(self, _local_step: int) -> bool:
        """True if all other hosts are done with their parts of a checkpoint."""
        return True

    async def stored(self, _fragment: int, _seq: int) -> tuple[wire.Shard, ...]:
        """Waits until the other hosts have stored their shards of an update; returns the shards."""
        return ()
