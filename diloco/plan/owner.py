"""The aggregator's side of simulated rounds: one fragment's machine, and what its work takes.

Pure: times are seconds since the beginning.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from diloco.aggregator.core import events, machine, memory, rounds
from diloco.aggregator.core.effects import AskCut, Commit, Fetch, OpenRound
from diloco.aggregator.core.policy import FragmentRules
from diloco.aggregator.core.state import State
from diloco.common import wire
from diloco.learner import sync

# Later than any round that is simulated.
NEVER_S = float("inf")

# When, in which order at the same time, and what happens.
_Event = tuple[float, int, Callable[[], None]]


class Timeline:
    """What is still to come, up to a horizon.

    Attributes:
        now_s: the time of what happens now.
        horizon_s: what would come later does not happen.
    """

    def __init__(self, horizon_s: float) -> None:
        self.now_s = 0.0
        self.horizon_s = horizon_s
        self._order = count()
        self._heap: list[_Event] = []

    def at(self, at_s: float, happen: Callable[..., None], *args: Any) -> None:
        """Let something happen, in the order of times and then of calls."""
        if at_s < self.horizon_s:
            event: _Event = (at_s, next(self._order), partial(happen, *args))
            heapq.heappush(self._heap, event)

    def run(self) -> None:
        """Let everything happen."""
        while self._heap and self._heap[0][0] < self.horizon_s:
            self.now_s, _, happen = heapq.heappop(self._heap)
            happen()
        self.now_s = self.horizon_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Aggregator:
    """What its work takes; times in seconds.

    Attributes:
        read_s: of its link and its cores, to read and verify one update.
        make_s: from a round's close to the version: outer step and delta. It does nothing else.
        store_s: from the version to its record; it reads on meanwhile.
        snapshot_s: so much longer when view and outer state are stored too.
        message_s: a message, or the answer to a question.
    """

    read_s: float
    make_s: float
    store_s: float
    message_s: float
    snapshot_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class Rounds:
    """What came of the rounds.

    Attributes:
        committed_s: when each version was; `merged` how many updates it has.
        staleness: of each merged update, in versions, in their order.
        reads: updates that the aggregator read.
        reasons: how often rounds closed for which reason.
        kept: share of the trained tokens that were merged, or on their way at the end.
        utilization: share of the time in which learners could train that they did not wait.
        stands_for: learners of the fleet for each that was simulated.
    """

    committed_s: list[float] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    reads: int = 0
    kept: float = 1.0
    utilization: float = 1.0
    stands_for: float = 1.0

    @property
    def versions(self) -> int:
        """How many were made."""
        return len(self.committed_s)

    @property
    def interval_s(self) -> float:
        """Mean time between two versions of the fragment."""
        if self.versions < 2:
            return NEVER_S
        return (self.committed_s[-1] - self.committed_s[0]) / (self.versions - 1)

    @property
    def participants(self) -> float:
        """Mean number of updates in a version."""
        simulated = len(self.staleness) / self.versions if self.versions else 0.0
        return self.stands_for * simulated

    @property
    def mean_staleness(self) -> float:
        """Mean versions between an update's base and the version it became part of, less one."""
        return sum(self.staleness) / len(self.staleness) if self.staleness else 0.0

    @property
    def late_share(self) -> float:
        """Share of merged updates that missed the round for which they were sent."""
        return sum(s > 0 for s in self.staleness) / len(self.staleness) if self.staleness else 0.0


class Listeners(NamedTuple):
    """Who is told of what the owner does.

    Attributes:
        opened: a round of this version is open.
        committed: the record of a commit stands; a function from a learner's name and life to what
            it reads there.
        rejected: so many tokens were.
    """

    opened: Callable[[int], None]
    committed: Callable[[Callable[[str, int], sync.Ready]], None]
    rejected: Callable[[int], None]


def digest_of(version: int) -> str:
    """Stands for the view of a version."""
    return f"{version:032x}"


class Owner:
    """A fragment's machine, and the work of its aggregator in virtual time.

    Attributes:
        state: the machine's.
        found: what came of the rounds so far.
    """

    def __init__(
        self,
        rules: FragmentRules,
        aggregator: Aggregator,
        snapshots: int,
        timeline: Timeline,
        listeners: Listeners,
    ) -> None:
        self.state = State(
            version=0,
            record_seq=0,
            view_digest=digest_of(0),
            seen_seq=0,
        )
        self.found = Rounds()
        self._rules = rules
        self._aggregator = aggregator
        self._snapshots = snapshots
        self._timeline = timeline
        self._listeners = listeners
        self._stream = count(1)
        self._held: deque[events.Event] = deque()
        self._read_until_s = 0.0
        self._last_update = 0
        self._timer_s = NEVER_S

    def join(self, learner: str) -> int:
        """A learner joins; its incarnation."""
        incarnation = next(self._stream)
        self.decide(events.Joined(self._timeline.now_s, incarnation, learner))
        return incarnation

    def announce(self, manifest: wire.Manifest) -> None:
        """An update is on the tape."""
        self._last_update = next(self._stream)
        self.decide(events.Announced(self._timeline.now_s, self._last_update, manifest))

    def decide(self, event: events.Event) -> None:
        """Tell the machine, and do what it says."""
        if self.state.phase == "closing" and not isinstance(event, events.Made):
            # As a fragment's owner does: its machine is told nothing before the version is made.
            self._held.append(event)
            return
        self.state, effects = machine.step_at(self._rules, self.state, event, self._timeline.now_s)
        for effect in effects:
            if isinstance(effect, Fetch):
                self._fetch(effect)
            elif isinstance(effect, AskCut):
                asked_s = self._timeline.now_s + self._aggregator.message_s
                self._timeline.at(asked_s, self._tell_cut, self._last_update)
            elif isinstance(effect, OpenRound):
                self._listeners.opened(effect.version)
            elif isinstance(effect, Commit):
                self._close(effect)
        due_s = rounds.deadline(self._rules, self.state)
        if due_s is not None and due_s != self._timer_s:
            self._timer_s = due_s
            self._timeline.at(max(due_s, self._timeline.now_s), self._timer, due_s)

    def _timer(self, due_s: float) -> None:
        if due_s == self._timer_s:
            self._timer_s = NEVER_S
            if self.state.phase != "closing":
                self.decide(events.Timer(self._timeline.now_s))

    def _tell_cut(self, stream_seq: int) -> None:
        self.decide(events.CutKnown(self._timeline.now_s, stream_seq))

    def _fetch(self, fetch: Fetch) -> None:
        """Updates are read one after another: the aggregator's link is one for all of them."""
        self.found.reads += 1
        self._read_until_s = max(self._read_until_s, self._timeline.now_s) + self._aggregator.read_s
        self._timeline.at(self._read_until_s + self._aggregator.message_s, self._fetched, fetch)

    def _close(self, commit: Commit) -> None:
        made_s = self._timeline.now_s
        if commit.what == "version":
            made_s += self._aggregator.make_s
            self._timeline.at(made_s, self._made, commit.state.version + 1)
        stored_s = made_s + self._aggregator.store_s + self._aggregator.message_s
        if commit.what == "version" and (commit.state.version + 1) % self._snapshots == 0:
            stored_s += self._aggregator.snapshot_s
        self._timeline.at(stored_s, self._committed, commit)

    def _made(self, version: int) -> None:
        self.decide(events.Made(self._timeline.now_s, digest_of(version)))
        while self._held and self.state.phase != "closing":
            self.decide(self._held.popleft())

    def _fetched(self, fetch: Fetch) -> None:
        # Every update has the same norm per step: none is clipped.
        norm = float(fetch.manifest.steps)
        self.decide(events.Fetched(self._timeline.now_s, fetch.update, norm))

    def _committed(self, commit: Commit) -> None:
        closed = commit.state
        if closed.admitted:
            self.found.committed_s.append(self._timeline.now_s)
            self.found.merged.append(len(closed.admitted))
            self.found.staleness += [taken.staleness for taken in closed.admitted]
            self.found.reasons[commit.reason] = self.found.reasons.get(commit.reason, 0) + 1
        self._listeners.rejected(sum(refused.manifest.tokens for refused in closed.rejected))
        record_seq = next(self._stream)
        version = closed.version + bool(closed.admitted)
        # What the record says, not what was decided since.
        marks = memory.after_record(closed).marks
        sent = [taken.manifest for taken in closed.admitted]
        merged = {(one.learner, one.incarnation): one.seq for one in sent}
        clock = closed.global_step
        if closed.admitted:
            clock = rounds.global_step_after(self._rules, closed)
        self.decide(events.Committed(self._timeline.now_s, record_seq))

        def read_by(learner: str, incarnation: int) -> sync.Ready:
            mark = marks.get((learner, incarnation))
            return sync.Ready(
                fragment=0,
                record_seq=record_seq,
                version=version,
                view_digest=digest_of(version),
                global_step=clock,
                resolved_seq=mark.seq if mark else 0,
                merged_seq=merged.get((learner, incarnation), 0),
            )

        self._listeners.committed(read_by)
