"""Whether anybody answers what a learner sends: a run takes updates without an aggregator too.

Training goes on all the same, and updates wait on the tape; but whoever watches should hear of it
before the end.
"""

from dataclasses import dataclass

from diloco.common import log
from diloco.common.config import RunSettings
from diloco.common.health import Health

TROUBLE = "unanswered"
ADVICE = (
    "see whether an aggregator of this run is alive, or start one: diloco aggregator --config FILE;"
    " what was sent waits on the tape"
)


@dataclass
class Answers:
    """The run's records since this learner's updates were announced; on the event loop.

    Attributes:
        since_s: when the first update was announced that no record has followed.
    """

    since_s: float | None = None
    told: bool = False

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


def longest_round_s(settings: RunSettings, step_time_s: float) -> float:
    """So long no round takes: its pace, twice over, and its deadline."""
    sync = settings.sync
    return settings.quorum.deadline_s + 2 * sync.interval_steps * step_time_s
