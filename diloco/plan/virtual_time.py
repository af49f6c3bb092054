"""Runs the aggregator's state machine in virtual time: a queue of scheduled calls drives it. Pure.

Subclasses of `VirtualFragment` say how long it takes to read updates and to make versions:
`diloco/plan/simulated_rounds.py` only counts them, `bench/emulate.py` merges tensors. A `Timeline`
can be pickled with its scheduled calls, if these are bound methods of picklable objects.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from diloco.aggregator.core import events, machine, memory, rounds
from diloco.aggregator.core.events import Commit, Effect
from diloco.aggregator.core.round_and_weight_formulas import FragmentRules
from diloco.aggregator.core.state import State
from diloco.common.protocol import names, wire
from diloco.common.protocol.shards import shard_bytes, shard_ranges
from diloco.common.protocol.slices import of_range
from diloco.learner.core.events import (
    Ready,
    Send,
    Start,
)

NEVER_S = math.inf

# A scheduled call: its time, its order among calls at that time, and the call.
_Call = tuple[float, int, Callable[[], None]]


class Timeline:
    """A queue of calls by virtual time; it also numbers the messages of the simulated tape.

    Attributes:
        now_s: the present virtual time, in seconds.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._seq = self._order = 0
        self._calls: list[_Call] = []

    @property
    def next_s(self) -> float:
        """The time of the next call; `NEVER_S` if none is scheduled."""
        return self._calls[0][0] if self._calls else NEVER_S

    def at(self, at_s: float, call: Callable[..., None], *args: Any) -> None:
        """Schedules `call(*args)` at `at_s`, or now if that has passed.

        Calls at the same time run in the order of scheduling.
        """
        self._order += 1
        planned: _Call = (max(at_s, self.now_s), self._order, partial(call, *args))
        heapq.heappush(self._calls, planned)

    def after(self, wait_s: float, call: Callable[..., None], *args: Any) -> None:
        """Schedules `call(*args)` in `wait_s` seconds."""
        self.at(self.now_s + wait_s, call, *args)

    def advance(self) -> None:
        """Sets `now_s` to the time of the next scheduled call, and runs the call."""
        self.now_s, _, call = heapq.heappop(self._calls)
        call()

    def next_seq(self) -> int:
        """Returns the sequence number for a message that is published now."""
        self._seq += 1
        return self._seq


class VirtualFragment:
    """The aggregator of one fragment: a state machine that gets events at their virtual times.

    Attributes:
        rules: the fragment's rules.
        timeline: the queue of calls.
        state: the machine's state.
        newest_seq: sequence of the fragment's newest update on the tape; 0 before the first.
    """

    def __init__(self, rules: FragmentRules, timeline: Timeline, digest: str) -> None:
        self.rules = rules
        self.timeline = timeline
        self.state = State(
            version=0, record_seq=timeline.next_seq(), view_digest=digest, seen_seq=0
        )
        self.newest_seq = 0
        self._held: deque[events.Event] = deque()
        self._timer_s = NEVER_S
        self._shards = _shards(rules)

    def perform(self, effect: Effect) -> None:
        """Performs an effect of the machine; a later call of `decide` reports its result."""
        raise NotImplementedError

    def decide(self, event: events.Event) -> None:
        """Gives the machine an event, and performs its effects.

        While a version is being made, other events wait until `made` is called.
        """
        if self.state.phase == "closing" and not isinstance(event, events.Made):
            # As a fragment's owner does: its machine gets no event until the version is made.
            self._held.append(event)
            return
        self.state, effects = machine.step_at(self.rules, self.state, event, self.timeline.now_s)
        for effect in effects:
            self.perform(effect)
        due_s = rounds.deadline(self.rules, self.state)
        if due_s is not None and due_s != self._timer_s:
            self._timer_s = due_s
            self.timeline.at(due_s, self._ring, due_s)

    def join(self, learner: str, incarnation: int) -> Start:
        """Tells the machine that a learner joined; returns the version that the learner adopts."""
        self.decide(events.Joined(self.timeline.now_s, incarnation, learner))
        state = self.state
        return Start(state.version, state.view_digest, state.record_seq, state.global_step)

    def announce(self, manifest: wire.Manifest) -> None:
        """Puts an update's manifest on the tape, and tells the machine."""
        self.newest_seq = self.timeline.next_seq()
        self.decide(events.Announced(self.timeline.now_s, self.newest_seq, manifest))

    def made(self, digest: str) -> None:
        """Tells the machine that its version is made, then gives it the events that waited.

        `digest` is that of the version's view.
        """
        self.decide(events.Made(self.timeline.now_s, digest))
        while self._held and self.state.phase != "closing":
            self.decide(self._held.popleft())

    def manifest(
        self,
        learner: str,
        incarnation: int,
        send: Send,
        position: int,
        step_time_s: float,
        loss: float = 0.0,
    ) -> wire.Manifest:
        """Returns the manifest that announces an update.

        Args:
            learner: the learner's name.
            incarnation: the learner's incarnation.
            send: the core's effect that sends the update.
            position: batches of the learner's data that are behind it.
            step_time_s: seconds of one of the learner's steps.
            loss: mean loss of the update's steps.
        """
        rules = self.rules
        prefix = names.shards_prefix(
            rules.run, learner, rules.fragment, rules.epoch, incarnation, send.seq
        )
        # Not validated: the cores' own values are valid, and validation would take most of the
        # time.
        return wire.Manifest.model_construct(
            run=rules.run,
            learner=learner,
            epoch=rules.epoch,
            incarnation=incarnation,
            seq=send.seq,
            fragment=rules.fragment,
            base_version=send.base_version,
            base_digest=send.base_digest,
            layout=rules.layout,
            codec=rules.codec,
            shards=tuple(
                shard.model_copy(update={"name": f"{prefix}{index}"})
                for index, shard in enumerate(self._shards)
            ),
            tokens=max(1, send.tokens),
            steps=send.steps,
            position=position,
            local_step=position,
            loss=loss,
            step_time_s=step_time_s,
            encode_s=0.0,
            upload_s=0.0,
            attempt=0,
            final=send.final,
        )

    def read_by(self, commit: Commit, record_seq: int, digest: str) -> Callable[[str, int], Ready]:
        """Returns a function (learner, incarnation) -> the event of a record for that learner.

        Args:
            commit: the machine's effect that commits the record.
            record_seq: sequence of the record on the tape.
            digest: the digest of the view after the record.
        """
        # Computed now: the machine's state may have changed when a learner gets the record.
        state, made = commit.state, commit.what == "version"
        marks = memory.after_record(state).marks
        taken = [admitted.manifest for admitted in state.admitted] if made else []
        merged = {(one.learner, one.incarnation): one.seq for one in taken}
        made_at_s = self.timeline.now_s
        clock = rounds.global_step_after(self.rules, state) if made else state.global_step

        def ready(learner: str, incarnation: int) -> Ready:
            mark = marks.get((learner, incarnation))
            return Ready(
                fragment=self.rules.fragment,
                record_seq=record_seq,
                version=state.version + made,
                view_digest=digest,
                global_step=clock,
                resolved_seq=mark.seq if mark else 0,
                merged_seq=merged.get((learner, incarnation), 0),
                made_at_s=made_at_s,
            )

        return ready

    def _ring(self, due_s: float) -> None:
        if due_s == self._timer_s:
            self._timer_s = NEVER_S
            if self.state.phase != "closing":
                self.decide(events.Timer(self.timeline.now_s))


def _shards(rules: FragmentRules) -> tuple[wire.Shard, ...]:
    """Returns the shards of an update; `VirtualFragment.manifest` gives them their names."""
    return tuple(
        wire.Shard(
            name="update",
            size_bytes=shard_bytes(rules.codec, stop - start, rules.block),
            crc32c=0,
            slices=of_range(start, stop, rules.block),
        )
        for start, stop in shard_ranges(rules.size, rules.block, rules.shard_elements)
    )
