"""Figures of a run under faults, read from its tape: time to recover of each kind, and goodput."""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from schedule import ALL

from diloco.common.protocol import wire
from diloco.run.history import History


class Suffered(NamedTuple):
    """A fault as it happened, in seconds since the epoch; `ended_s` is `at_s` for kills."""

    kind: str
    victim: str
    at_s: float
    ended_s: float


class TimedRecord(NamedTuple):
    """A record, and when the server stored it."""

    at_s: float
    seq: int
    record: wire.Record


def records_in_time(history: History) -> list[TimedRecord]:
    times = history.times_s
    chains = history.records.values()
    return sorted(TimedRecord(times[seq], seq, record) for chain in chains for seq, record in chain)


class Took(NamedTuple):
    """Seconds to recover; `alone` if nothing else was wrong meanwhile."""

    seconds: float
    alone: bool


@dataclass
class Recoveries:
    """Times to recover by kind; `unmeasured` hit whom nobody waited for."""

    took: dict[str, list[Took]] = field(default_factory=lambda: defaultdict(list))
    unmeasured: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def table(self) -> list[dict[str, Any]]:
        return [self._row(kind) for kind in sorted({*self.took, *self.unmeasured})]

    def _row(self, kind: str) -> dict[str, Any]:
        every = [took.seconds for took in self.took[kind]]
        alone = [took.seconds for took in self.took[kind] if took.alone]
        return {
            "kind": kind,
            "faults": len(every) + self.unmeasured[kind],
            "median_s": round(statistics.median(every), 2) if every else None,
            "worst_s": round(max(every), 2) if every else None,
            "alone": len(alone),
            "alone_median_s": round(statistics.median(alone), 2) if alone else None,
            "alone_worst_s": round(max(alone), 2) if alone else None,
        }


def recoveries(history: History, faults: list[Suffered]) -> Recoveries:
    """How long after each fault its victim was useful again.

    A killed learner: from the kill to the first merged update of its new life. A paused or cut-off
    one: from the end of that to the next merged update which it announced since. An aggregator,
    killed, paused or cut off: from the beginning to the next version of the last fragment of those
    whose newest version was its own. All others: from their end to the next version.
    """
    records = records_in_time(history)
    times = history.times_s
    found = Recoveries()
    for fault in faults:
        if "learner" in fault.kind or fault.victim.startswith("learner"):
            since_s = fault.ended_s
            recovered_s = _merged_again(records, times, history, fault)
        elif fault.victim.startswith("aggregator"):
            since_s = fault.at_s
            recovered_s = _owned_again(records, fault)
        else:
            since_s = fault.ended_s
            versions = (r.at_s for r in records if r.record.inputs and r.at_s > since_s)
            recovered_s = next(versions, None)
        kind = fault.kind
        if kind.endswith("network"):
            whose = "all" if fault.victim == ALL else f"one {fault.victim.split('-')[0]}"
            kind = f"{kind} of {whose}"
        if recovered_s is None:
            found.unmeasured[kind] += 1
        else:
            alone = not any(
                other != fault and other.at_s < recovered_s and other.ended_s > fault.at_s
                for other in faults
            )
            found.took[kind].append(Took(recovered_s - since_s, alone))
    return found


def _merged_again(
    records: list[TimedRecord], times: dict[int, float], history: History, fault: Suffered
) -> float | None:
    def counts(taken: wire.Input) -> bool:
        mark = taken.incarnation if fault.kind == "kill learner" else taken.stream_seq
        said_s = times.get(mark, 0.0)
        return taken.learner == fault.victim and said_s > fault.ended_s

    return next((r.at_s for r in records if any(counts(t) for t in r.record.inputs)), None)


def _owned_again(records: list[TimedRecord], fault: Suffered) -> float | None:
    """When the last fragment that the victim made versions of got its next one."""
    before: dict[int, str] = {}
    after: dict[int, float] = {}
    for stored in records:
        if stored.record.what != "version":
            continue
        if stored.at_s <= fault.at_s:
            before[stored.record.fragment] = stored.record.aggregator
        else:
            after.setdefault(stored.record.fragment, stored.at_s)
    owned = [fragment for fragment, name in before.items() if name == fault.victim]
    if not owned or not {*owned} <= {*after}:
        return None
    return max(after[fragment] for fragment in owned)


def merged_steps(history: History, begin_s: float, end_s: float) -> float:
    """Steps of all learners whose work was merged in a span of time."""
    total = sum(
        taken.steps
        for stored in records_in_time(history)
        if begin_s < stored.at_s <= end_s
        for taken in stored.record.inputs
    )
    return total / len(history.records)
