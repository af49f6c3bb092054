"""The machine's decisions as a record states them, and deciding again from a tape.

A record's observations are all inputs of the machine since the previous record that are not on the
tape, each with the stream sequence up to which the tape had been read. So the tape, the records
and `machine.step` reproduce every decision: when a round opened and closed, which updates were
merged with which weight, which were rejected and why, and the machine's memory afterwards.

Functions are pure, as in `machine.py`.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from diloco.aggregator.core import events, machine, memory, rounds
from diloco.aggregator.core.events import Commit
from diloco.aggregator.core.round_and_weight_formulas import FragmentRules
from diloco.aggregator.core.state import State, Storing
from diloco.aggregator.core.updates import RejectedUpdate, UpdateId
from diloco.common.protocol import wire


class Decided(NamedTuple):
    """The part of a record that the machine alone decides: fields of `wire.Record`.

    Records that an operator's command makes (`restore`, `restored`) state the same fields.
    """

    what: Literal["version", "verdict", "restore", "restored"]
    base_seq: int
    version: int
    global_step: int
    reason: str
    position: int
    policy: wire.PolicyState
    opened_at_s: float
    quorum_at_s: float
    closed_at_s: float
    final: bool = False
    rejected: tuple[wire.Rejected, ...] = ()
    observations: tuple[wire.Observation, ...] = ()


def decided_of(record: wire.Record) -> Decided:
    """Returns the fields of a record that are in `Decided`."""
    return Decided(**{name: getattr(record, name) for name in Decided._fields})


def decide(rules: FragmentRules, commit: Commit) -> Decided:
    """Returns the machine's decisions for the record of `commit`."""
    state = commit.state
    # A verdict changes neither version nor clock: learners have nothing to adopt (invariant 1).
    made = commit.what == "version"
    return Decided(
        what=commit.what,
        base_seq=state.record_seq,
        version=state.version + made,
        global_step=rounds.global_step_after(rules, state) if made else state.global_step,
        rejected=tuple(_rejected(refused) for refused in state.rejected),
        reason=commit.reason,
        position=memory.position(state),
        observations=state.observations,
        policy=memory.policy_after(state),
        final=commit.final,
        opened_at_s=state.opened_at_s,
        quorum_at_s=state.quorum_at_s,
        closed_at_s=commit.at_s,
    )


def _rejected(refused: RejectedUpdate) -> wire.Rejected:
    manifest = refused.manifest
    return wire.Rejected(
        learner=manifest.learner,
        incarnation=manifest.incarnation,
        seq=manifest.seq,
        stream_seq=refused.stream_seq,
        tokens=manifest.tokens,
        steps=manifest.steps,
        reason=refused.reason,
        detail=refused.detail,
    )


class TapeEvent(NamedTuple):
    """A message of the tape as the machine's event.

    Attributes:
        stream_seq: the message's stream sequence.
        event: the event.
        rules: the new rules, if the message changes settings.
    """

    stream_seq: int
    event: events.Event
    rules: FragmentRules | None = None


class Decision(NamedTuple):
    """The result of deciding a record again.

    Attributes:
        record_seq: the record's stream sequence.
        record: the record.
        outcome: "same"; "different", with `fields`; "unknown", with the reason `why`.
        why: why the record cannot be decided again; else ''.
        commit: the machine's `Commit`; None if the machine did not commit.
        fields: name, recorded and decided value of each field that differs.
    """

    record_seq: int
    record: wire.Record
    outcome: Literal["same", "different", "unknown"]
    why: str = ""
    commit: Commit | None = None
    fields: tuple[tuple[str, Any, Any], ...] = ()


# Returns further fields of a record, not in `Decided`, from the commit and the recorded record.
FurtherFields = Callable[[Commit, wire.Record], Mapping[str, Any]]


def decide_again(
    chain: Sequence[tuple[int, wire.Record]],
    tape: Sequence[TapeEvent],
    *,
    rules_at: Callable[[int], FragmentRules],
    whole_from: int,
    further: FurtherFields,
) -> Iterator[Decision]:
    """Decides every record of a fragment again, and compares the decisions field by field.

    Args:
        chain: (stream sequence, record) of the fragment, in order. Each record is decided from the
            one before; the first is not decided.
        tape: the events of this fragment, in order, up to the run's end.
        rules_at: returns the rules by the settings message with a sequence; 0: the first rules.
        whole_from: the sequence from which on `tape` has all events of the fragment.
        further: returns further fields to compare, from a commit and the recorded record.
    """
    follower = _Follower(tape, rules_at, whole_from)
    for (base_seq, base), (seq, record) in itertools.pairwise(chain):
        if record.what not in ("version", "verdict"):
            follower.state = None  # An operator made it.
            continue
        why = follower.follow(base, base_seq, record)
        if why:
            yield Decision(seq, record, "unknown", why)
            continue
        commit = follower.commit
        if commit is None:
            fields: tuple[tuple[str, Any, Any], ...] = (("what", record.what, "nothing yet"),)
        else:
            again = {**decide(follower.rules, commit)._asdict(), **further(commit, record)}
            fields = tuple(
                (name, getattr(record, name), value)
                for name, value in again.items()
                if getattr(record, name) != value
            )
        # A different decision proves nothing about the next one, which begins from its own base
        # record, if it can.
        if fields:
            follower.state = None
        yield Decision(seq, record, "different" if fields else "same", "", commit, fields)


# The first observation of an owner that continues from a record of its own.
GOES_ON = ("made", "committed")
OTHER_RULES = "another release decided it, by other rules"


class _Follower:
    """A machine that receives the same events in the same order as those that made the records."""

    rules: FragmentRules

    def __init__(
        self, tape: Sequence[TapeEvent], rules_at: Callable[[int], FragmentRules], whole_from: int
    ) -> None:
        self.state: State | None = None
        self.commit: Commit | None = None
        self._tape = tape
        self._rules_at = rules_at
        self._whole_from = whole_from
        self._next = 0
        self._began_at_s = 0.0

    def follow(self, base: wire.Record, base_seq: int, record: wire.Record) -> str:
        """Gives the machine the events between two records; returns '', or why it cannot."""
        if record.policy.rules != memory.RULES:
            self.state = None
            return OTHER_RULES
        first = record.observations[0] if record.observations else None
        why = ""
        if first and first.what in GOES_ON and self.state is None:
            why = self._cannot_begin(base, first)
        self.commit = None
        for observation in record.observations:
            # A record has the observations of all tenures since the previous record. Each tenure
            # begins from that record, so only the decisions of the last one count.
            if observation.what == "resumed":
                self._began_at_s = observation.at_s
                why = "the tape is trimmed before it" if base.position < self._whole_from else ""
                self.state = None
                if not why:
                    self._begin(base, base_seq, observation.at_s)
            elif why:
                continue
            elif observation.what in GOES_ON and self.state is None:
                # The owner continues with its own clock, so `resume` must not cap the times.
                self._begin(base, base_seq, max(observation.at_s, base.policy.closed_at_s))
                self._take_over(base, observation)
            elif self.state is None:
                why = "the record does not say how its maker began"
            else:
                self._hear_until(observation.after_seq)
                if observation.what == "committed" and self.state.storing is None:
                    # No record was being stored, so the machine did not receive this.
                    self.commit = None
                    return ""
                self._step(_event(observation, base, base_seq, record))
        if why or self.state is None:
            return why or "the record does not say how its maker began"
        self._hear_until(record.policy.seen_seq)
        return ""

    def _begin(self, base: wire.Record, base_seq: int, at_s: float) -> None:
        """Starts the machine from a record, as an owner does after recovery."""
        self.state = memory.resume(base, base_seq, at_s)
        self.rules = self._rules_at(base.policy.settings_seq)
        self.commit = None
        self._next = bisect_left(self._tape, base.position, key=attrgetter("stream_seq"))

    def _cannot_begin(self, base: wire.Record, first: wire.Observation) -> str:
        """Returns why the machine cannot start from a record in the middle of a tenure, or ''.

        A record has the whole state of its machine only if no update was waiting. After the stop,
        an owner's deadline counts from the beginning of its tenure, which only the first record of
        that tenure states. Of messages that the machine received between the record and its next
        observation nobody knows the time.
        """
        if base.position <= base.policy.seen_seq:
            return "updates were waiting when the record before was made"
        if base.policy.stopping_at_s:
            return "the record before was made after the run's stop"
        if first.after_seq != base.policy.seen_seq:
            return "the record does not say when its maker received the messages before"
        if base.policy.seen_seq + 1 < self._whole_from:
            return "the tape is trimmed before it"
        return ""

    def _take_over(self, base: wire.Record, observation: wire.Observation) -> None:
        """Completes the state as in the owner that made the record `base` and continues from it."""
        assert self.state is not None
        self.state = self.state._replace(
            observations=(observation,),
            began_at_s=self._began_at_s,
            now_s=observation.at_s,
            opened_at_s=base.opened_at_s,
            quorum_at_s=base.quorum_at_s,
            storing=Storing(True, ()) if observation.what == "made" else None,
        )

    def _hear_until(self, seq: int) -> None:
        """Gives the machine the tape's events up to a stream sequence, or until it commits."""
        while self._next < len(self._tape) and not self.commit:
            heard = self._tape[self._next]
            if heard.stream_seq > seq:
                break
            self._next += 1
            assert self.state is not None
            if heard.rules is not None and heard.stream_seq > self.state.settings_seq:
                self.rules = heard.rules
            self._step(heard.event)

    def _step(self, event: events.Event) -> None:
        assert self.state is not None
        self.state, effects = machine.step(self.rules, self.state, event)
        for effect in effects:
            if isinstance(effect, Commit):
                self.commit = effect


def _event(
    observation: wire.Observation, base: wire.Record, base_seq: int, record: wire.Record
) -> events.Event:
    """Returns the event that an observation in `record` stands for.

    The reason of a failed update is taken from its rejection in `record`.
    """
    at_s, learner = observation.at_s, observation.learner
    update = UpdateId(learner, observation.incarnation, observation.seq)
    match observation.what:
        case "fetched":
            return events.Fetched(at_s, update, observation.value)
        case "failed":
            for taken in record.rejected:
                if (taken.learner, taken.incarnation, taken.seq) == update:
                    return events.Failed(at_s, update, taken.reason, taken.detail)
            return events.Failed(at_s, update, "", "")
        case "broke":
            return events.AdditionFailed(at_s, update)
        case "cut":
            return events.CutKnown(at_s, observation.seq)
        case "made":
            return events.Made(at_s, base.view_digest)
        case "committed":
            return events.Committed(at_s, base_seq)
        case "timer":
            return events.Timer(at_s)
        case "tick":
            return events.Tick(at_s)
    return events.Liveness(at_s, learner, observation.incarnation, observation.what == "live")
