"""The background of one learner: its event loop, the state that its parts share, the other hosts.

The training loop hands work over and takes events; it never waits for the network. An error that
ends the life is raised in the training loop, at its next check.
"""

import asyncio
import dataclasses
import queue
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from diloco.common.process import log
from diloco.common.process.config import RunSettings
from diloco.common.process.health import Health
from diloco.common.process.metrics import Metrics
from diloco.common.process.tasks import cancel
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
    """A learner's tasks on the event loop, as its training thread sees them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: queue.SimpleQueue[Arrived | BaseException] = queue.SimpleQueue()
        self._tasks: set[asyncio.Future[None]] = set()
        self._failed: BaseException | None = None

    def call(self, coroutine: Coroutine[Any, Any, T], within_s: float | None = None) -> T:
        """Runs a coroutine and waits for its result.

        Raises:
            TimeoutError: it takes longer than `within_s`; it is cancelled.
        """
        limited = asyncio.wait_for(coroutine, within_s)
        return asyncio.run_coroutine_threadsafe(limited, self.loop).result()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine beside training, until it ends or this life does."""
        self.loop.call_soon_threadsafe(self._begin, coroutine)

    def events(self, wait_s: float = 0.0) -> list[Arrived]:
        """Returns the events that have arrived; with none, waits up to `wait_s` for the first.

        Raises:
            BaseException: the error that ended a part of the background.
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
        """Hands an event to the training loop; may be called from any thread."""
        self._arrived.put(Arrived(event, payload))

    def fail(self, error: BaseException) -> None:
        """Ends this life with `error` at the loop's next check; may be called from any thread."""
        self._failed = error
        self._arrived.put(error)

    def check(self) -> None:
        """Raises the error that ends this life, if there is one; takes no event.

        Raises:
            BaseException: the error that ended a part of the background.
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


# --- The state that its parts share

TROUBLE = "unanswered"
ADVICE = (
    "see whether an aggregator of this run is alive, or start one: diloco aggregator --config FILE;"
    " what was sent waits on the tape"
)
# Updates of LONG times H steps, LONG_IN_A_ROW times of one fragment, are not due to an outage.
LONG = 10
LONG_IN_A_ROW = 3
OUTRUN = (
    "a round takes longer than the loop needs for many times sync.interval_steps, and moves the"
    " run's clock by no more than that: raise sync.interval_steps, or have a step do more work"
)


@dataclass
class Answers:
    """Notes whether records answer this learner's updates; used on the event loop.

    Attributes:
        since_s: time of the first announcement that no record has followed; None: there is none.
        interval_steps: H, once settings have changed it; 0 before.
    """

    since_s: float | None = None
    told: bool = False
    interval_steps: int = 0
    _long: dict[int, int] = field(default_factory=dict)
    _told_outrun: bool = False

    def announced(self, now_s: float) -> None:
        """Notes that an update is on the tape."""
        if self.since_s is None:
            self.since_s = now_s

    def heard(self, health: Health, logger: log.Logger) -> None:
        """Notes that a record came: an aggregator is at work."""
        self.since_s = None
        if self.told:
            self.told = False
            health.troubles.pop(TROUBLE, None)
            logger.info("answered")

    def look(self, now_s: float, longest_s: float, health: Health, logger: log.Logger) -> None:
        """Reports once that no record has come for longer than a round takes."""
        if self.told or self.since_s is None or now_s - self.since_s < longest_s:
            return
        self.told = True
        waited_s = round(now_s - self.since_s)
        health.troubles[TROUBLE] = (
            f"no version and no verdict for {waited_s} s since its updates were announced"
        )
        logger.warning("unanswered", waited_s=waited_s, advice=ADVICE)

    def covered(self, fragment: int, steps: int, settings: RunSettings, logger: log.Logger) -> None:
        """Notes an update of `steps` steps; warns once if the loop outruns the rounds by far."""
        interval_steps = self.interval_steps or settings.sync.interval_steps
        long = steps >= LONG * interval_steps
        self._long[fragment] = self._long.get(fragment, 0) + 1 if long else 0
        if self._long[fragment] >= LONG_IN_A_ROW and not self._told_outrun:
            self._told_outrun = True
            logger.warning("rounds_outrun", steps=steps, of=interval_steps, advice=OUTRUN)


def longest_round_s(settings: RunSettings, step_time_s: float) -> float:
    """Returns an upper bound on the seconds of a round: twice its pace, plus its deadline."""
    sync = settings.sync
    return settings.quorum.deadline_s + 2 * sync.interval_steps * step_time_s


class TrafficCounts:
    """Bytes and updates of this life, for heartbeats."""

    def __init__(self) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.updates_sent = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context(RunContext):
    """The state that the background side of one learner shares."""

    learner: str
    traffic: TrafficCounts = dataclasses.field(default_factory=TrafficCounts)
    answers: Answers = dataclasses.field(default_factory=Answers)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    health: Health = dataclasses.field(default_factory=Health)


# --- The learner's other hosts, as the modules of host 0 see them


class Preparation:
    """An attempt to bring a change onto the other hosts' devices; if there are none, it is done."""

    async def ready(self) -> None:
        """Waits until all other hosts have the change.

        Raises:
            ObjectMissingError, IntegrityError: as a host reports.
        """

    def drop(self) -> None:
        """Tells the workers that the change is not adopted, so that they free its tensors."""


class Alone:
    """Stands for the other hosts of a learner that has none; `Coordinator` stands for several.

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
        """Sends a `hosts.messages` message to the others; may be called from any thread."""

    def write(self, message: Any) -> None:
        """Sends a message to all other hosts; must be called on the event loop."""

    def tell(self, boundary: Boundary) -> None:
        """Sends a boundary to the other hosts; may be called from any thread."""

    def give_up(self, _error: DilocoError) -> None:
        """Tells the other hosts the error that ends this life; may be called from any thread."""

    def prepare(self, _change: Change) -> Preparation:
        """Asks the other hosts to fetch a change; must be called on the event loop."""
        return Preparation()

    async def stored(self, _fragment: int, _seq: int) -> tuple[wire.Shard, ...]:
        """Waits until the other hosts have stored their shards of an update; returns the shards."""
        return ()
