"""What a run's messages say in figures. Pure.

Everything is at the run's global step. A learner's messages do not carry it: theirs is that of the
newest record before them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from diloco.common import wire
from diloco.common.tape import Entry
from diloco.projections.live import share


class Point(NamedTuple):
    """Figures by name, at a global step; `at_s` in seconds since the epoch."""

    step: int
    at_s: float
    values: dict[str, float]


class Points:
    """Makes points of the messages of a run, in their order."""

    def __init__(self) -> None:
        self._step = 0
        self._furthest: int | None = None
        self._tokens: dict[int, int] = {}

    def reached(self, step: int) -> None:
        """The run's records have come to a global step: no learner's word is beyond it."""
        self._furthest = max(step, self._furthest or 0)

    def of_entry(self, entry: Entry) -> Iterator[Point]:
        """What a message of the tape says."""
        match entry.body:
            case wire.Record() as record if record.inputs:
                self._step = max(self._step, record.global_step)
                self.reached(self._step)
                self._tokens[record.fragment] = record.totals.tokens_merged
                yield Point(self._step, entry.time_s, self._of_round(record))
            case wire.Manifest() as manifest if not manifest.attempt:
                own = {"loss": manifest.loss, "step_seconds": manifest.step_time_s}
                yield Point(self._step, entry.time_s, _named(manifest.learner, own))

    def of_heartbeat(self, beat: wire.Heartbeat, at_s: float) -> Point:
        """What a learner says of itself."""
        figures = {"tokens_per_second": beat.tokens_per_s, **beat.metrics}
        if beat.run_s:
            figures["stall_share"] = share(beat.stall_s, beat.run_s)
            figures["data_wait_share"] = share(beat.data_s, beat.run_s)
        # A step of its own making would be the end of every tracker's axis.
        step = beat.global_step if self._furthest is None else min(beat.global_step, self._furthest)
        return Point(step, at_s, _named(beat.learner, figures))

    def of_score(self, score: wire.Score) -> Point:
        """What was measured on held-out data."""
        figures = {"loss": score.loss, **score.metrics}
        values = {f"held_out/{name}": value for name, value in figures.items()}
        return Point(score.global_step, score.at_s, values)

    def _of_round(self, record: wire.Record) -> dict[str, float]:
        inputs = record.inputs
        weight = sum(one.weight for one in inputs)
        return {
            "train/loss": sum(one.loss * one.weight for one in inputs) / weight,
            "train/tokens": sum(self._tokens.values()) / len(self._tokens),
            "round/updates": len(inputs),
            "round/rejected": len(record.rejected),
            "round/staleness": sum(one.staleness for one in inputs) / len(inputs),
            "round/seconds": record.closed_at_s - record.opened_at_s,
        }


def _named(learner: str, figures: dict[str, float]) -> dict[str, float]:
    return {f"learners/{learner}/{name}": value for name, value in figures.items()}
