"""The state that the parts of one learner share: run, counters, requests to its tensors."""

import dataclasses
from dataclasses import dataclass, field

from diloco.common.process import log
from diloco.common.process.config import RunSettings
from diloco.common.process.health import Health
from diloco.common.process.metrics import Metrics
from diloco.common.storage.tape import RunContext

TROUBLE = "unanswered"
ADVICE = (
    "see whether an aggregator of this run is alive, or start one: diloco aggregator --config FILE;"
    " what was sent waits on the tape"
)
# Updates of this many times H steps, so many in a row of one fragment, are no outage's.
LONG = 10
LONG_IN_A_ROW = 3
OUTRUN = (
    "a round takes longer than the loop needs for many times sync.interval_steps, and moves the"
    " run's clock by no more than that: raise sync.interval_steps, or have a step do more work"
)


@dataclass
class Answers:
    """The run's records since this learner's updates were announced; on the event loop.

    Attributes:
        since_s: when the first update was announced that no record has followed.
        interval_steps: H, once settings have changed it; 0 before.
    """

    since_s: float | None = None
    told: bool = False
    interval_steps: int = 0
    _long: dict[int, int] = field(default_factory=dict)
    _told_outrun: bool = False

    def announced(self, now_s: float) -> None:
        """An update is on the tape."""
        if self.since_s is None:
            self.since_s = now_s

    def heard(self, health: Health, logger: log.Logger) -> None:
        """A record came: somebody makes versions, or verdicts."""
        self.since_s = None
        if self.told:
            self.told = False
            health.troubles.pop(TROUBLE, None)
            logger.info("answered")

    def look(self, now_s: float, longest_s: float, health: Health, logger: log.Logger) -> None:
        """Say once that nothing has come for longer than a round takes."""
        if self.told or self.since_s is None or now_s - self.since_s < longest_s:
            return
        self.told = True
        waited_s = round(now_s - self.since_s)
        health.troubles[TROUBLE] = (
            f"no version and no verdict for {waited_s} s since its updates were announced"
        )
        logger.warning("unanswered", waited_s=waited_s, advice=ADVICE)

    def covered(self, fragment: int, steps: int, settings: RunSettings, logger: log.Logger) -> None:
        """An update of so many steps was sent: say once that the loop outruns the rounds."""
        interval_steps = self.interval_steps or settings.sync.interval_steps
        long = steps >= LONG * interval_steps
        self._long[fragment] = self._long.get(fragment, 0) + 1 if long else 0
        if self._long[fragment] >= LONG_IN_A_ROW and not self._told_outrun:
            self._told_outrun = True
            logger.warning("rounds_outrun", steps=steps, of=interval_steps, advice=OUTRUN)


def longest_round_s(settings: RunSettings, step_time_s: float) -> float:
    """So long no round takes: its pace, twice over, and its deadline."""
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
