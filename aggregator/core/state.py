"""The state of one fragment's machine, with small queries and changes of it."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from diloco.aggregator.core.immutable_collections import PersistentMap, Tally
from diloco.aggregator.core.members import Member, Members
from diloco.aggregator.core.updates import (
    Admitted,
    MergedUpdates,
    Pending,
    RejectedUpdate,
    Resolved,
    UpdateCredit,
    UpdateId,
    WaitingUpdates,
    update_id,
)
from diloco.common.protocol import wire

# The subject of observations that concern no learner: a timer, a commit.
NOBODY = UpdateId("", 0, 0)


class Allowance(NamedTuple):
    """The number of updates that a learner may announce: `left`, at the server's time `at_s`."""

    # It counts updates only, as joins and leaves cost next to nothing.
    left: float
    at_s: float


class Marks(Mapping[tuple[str, int], wire.Mark]):
    """The marks, by (learner, incarnation); immutable.

    A mark is the last update of an incarnation that has a verdict.

    Args:
        marks: the initial marks.
    """

    __slots__ = ("_lives", "_marks")

    def __init__(self, marks: Mapping[tuple[str, int], wire.Mark] = MappingProxyType({})) -> None:
        self._marks = dict(marks)
        self._lives: dict[str, list[int]] = {}
        for learner, life in self._marks:
            self._lives.setdefault(learner, []).append(life)

    def lives(self, learner: str) -> list[int]:
        """Returns the incarnations of a learner that have a mark."""
        return self._lives.get(learner, [])

    def __getitem__(self, life: tuple[str, int]) -> wire.Mark:
        """Returns the mark of (learner, incarnation)."""
        return self._marks[life]

    def __len__(self) -> int:
        """Returns the number of marks."""
        return len(self._marks)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yields (learner, incarnation) in the order of the first marks."""
        return iter(self._marks)


class Quarantine(NamedTuple):
    """Effect: publish that a learner is quarantined. Repeated until the message is on the tape."""

    learner: str
    reason: str


class Cut(NamedTuple):
    """The end of a round: updates up to a sequence of the stream belong to it, later ones do not.

    When the round's time is up, the owner asks the stream's leader for that sequence (`AskCut`).

    Attributes:
        reason: why the round ends.
        final: True if no round follows.
        stream_seq: the leader's answer: the sequence of the fragment's last update; 0: none.
        known_at_s: when the answer came, in seconds by the owner's clock; 0: it has not come yet.
    """

    reason: str
    final: bool
    stream_seq: int = 0
    known_at_s: float = 0.0


class Storing(NamedTuple):
    """A record that is being stored and published.

    Attributes:
        makes_version: True if the record commits a version, False if it has verdicts alone.
        offenders: the quarantines to publish once the record is committed.
    """

    makes_version: bool
    offenders: tuple[Quarantine, ...]


Phase = Literal["idle", "open", "grace", "cut", "closing"]


class State(NamedTuple):
    """The machine's state; immutable, mappings included.

    A machine's life is one tenure of the fragment (`owner/tenure.py`): it begins from a record, at
    `began_at_s`. Times of rounds are in seconds of Unix time, by the owner's clock. Comments
    describe the fields.
    """

    # The newest version, the record that committed it, and its view's digest, with which the base
    # of an update is compared.
    version: int
    record_seq: int
    view_digest: str
    # The stream sequence up to which the tape was read. A record's position, from which the next
    # owner reads, follows from it.
    seen_seq: int
    members: Members = Members()
    # The last update of each incarnation with a verdict. Only marks distinguish a repeated
    # announcement from a new update (invariant 2), so each record has all marks.
    marks: Marks = Marks()
    pending: WaitingUpdates = WaitingUpdates()
    # The run's clock at `version`; not computed from it, since a rollback sets the clock back while
    # versions go on.
    global_step: int = 0
    # The version of the newest rollback; updates on older versions are not merged any more.
    floor: int = 0
    # The settings message that the rules come from. The rules come with each event, so that the
    # state stays small.
    settings_seq: int = 0
    quarantined: frozenset[str] = frozenset()
    # Every learner that ever announced an update, as a restart must not give a full allowance.
    allowances: PersistentMap[str, Allowance] = PersistentMap()
    # Allowances for messages that this tenure reads again, charged before to `allowances`.
    met_again: PersistentMap[str, Allowance] = PersistentMap()
    phase: Phase = "idle"
    # The fragment's last version is committed, or is being committed: none follows (invariant 1).
    final: bool = False
    # The updates merged since the last version was made, in the order of the sum, as floating-point
    # addition depends on the order and recovery repeats it (invariant 3).
    admitted: MergedUpdates = MergedUpdates()
    rejected: Resolved[RejectedUpdate] = Resolved()
    observations: tuple[wire.Observation, ...] = ()
    # The number of each learner's updates that belong to the round, read or not, until it is cut.
    announced_by: Tally[str] = Tally()
    # The end of the round, once its time is up.
    cut: Cut | None = None
    # The record that is being published; the next record begins once this one is committed.
    storing: Storing | None = None
    opened_at_s: float = 0.0
    quorum_at_s: float = 0.0
    closed_at_s: float = 0.0
    # When the run's stop was stored; 0 before it.
    stopping_at_s: float = 0.0
    # Moving averages: from a round's opening to its quorum, from its close to its record.
    quorum_s: float = 0.0
    sync_s: float = 0.0
    # Credits of updates without a verdict that an earlier owner had received.
    credits: Mapping[UpdateId, UpdateCredit] = MappingProxyType({})
    # This tenure began at `began_at_s` from a record whose maker had received messages up to the
    # sequence `known_seq`; averages and allowances count these messages already.
    known_seq: int = 0
    began_at_s: float = 0.0
    # The time of the last event, by the owner's clock, as all times of rounds are.
    now_s: float = 0.0


def to_resolve(state: State) -> tuple[Admitted | RejectedUpdate, ...]:
    """Returns the updates on which the next record has a verdict: the merged, then the rejected."""
    return (*state.admitted, *state.rejected)


def has_unread(state: State) -> bool:
    """True if `unread` returns any update."""
    if state.cut is None or not state.cut.known_at_s:
        return state.pending.awaited > 0
    last_seq = state.cut.stream_seq
    return state.pending.awaited > 0 and any(
        one.stream_seq <= last_seq for one in state.pending.unordered() if not one.passed
    )


def unread(state: State) -> list[Pending]:
    """Returns the announced updates that the round waits for, neither merged nor rejected yet.

    Once the round's cut is known, only those up to the cut's sequence.
    """
    waited_for = [one for one in state.pending.values() if not one.passed]
    if state.cut is None or not state.cut.known_at_s:
        return waited_for
    return [one for one in waited_for if one.stream_seq <= state.cut.stream_seq]


def passed_on(state: State) -> State:
    """Returns the state in which no round waits for the present round's unread updates."""
    for one in unread(state):
        state = with_pending(state, update_id(one.manifest), one._replace(passed=True))
    return state


def awaiting(state: State) -> State:
    """Returns the state in which the round's merged updates wait to be read again."""
    if not state.admitted:
        return state
    pending = state.pending
    for one in state.admitted:
        again = Pending(
            one.manifest, one.stream_seq, one.announced_at_s, one.stored_at_s, one.credit
        )
        pending = pending.put(update_id(one.manifest), again)
    members = state.members.but(norms={})
    # `announced_by` counts an update in the same way, whether merged or waiting.
    return state._replace(admitted=MergedUpdates(), pending=pending, members=members)


def with_admitted(state: State, update: UpdateId, admitted: Admitted) -> State:
    """Returns the state with an update moved from the waiting updates to the round's merged ones.

    Args:
        state: the state.
        update: identity of the waiting update.
        admitted: the same update with its staleness, discount, clip and norm.
    """
    learner = admitted.manifest.learner
    passed = state.pending[update].passed
    return state._replace(
        pending=state.pending.drop(update),
        admitted=state.admitted.plus(admitted),
        members=state.members.merged(learner, admitted.norm_per_step),
        announced_by=state.announced_by.more(learner) if passed else state.announced_by,
    )


def with_round_of(state: State, other: State) -> State:
    """Returns `state` with its merged and waiting updates replaced by those of `other`.

    What depends on these updates is replaced too: the number announced by each learner, and the
    norms of the merged updates' learners.
    """
    norms = {one.manifest.learner: one.norm_per_step for one in other.admitted}
    return state._replace(
        admitted=other.admitted,
        pending=other.pending,
        announced_by=other.announced_by,
        members=state.members.but(norms=norms),
    )


def without_round(state: State) -> State:
    """Returns the state without merged and rejected updates, which a record has."""
    return state._replace(
        admitted=MergedUpdates(), rejected=Resolved(), announced_by=state.pending.awaited_from
    )


def is_answered_in_round(state: State, learner: str) -> bool:
    """True if the next record has a verdict on an update of a learner.

    The learner sends no further update before it reads that verdict.
    """
    if learner in state.admitted.senders:
        return True
    return (learner, newest_incarnation(state, learner)) in state.rejected.lives


def are_answered(state: State, learners: Tally[str]) -> bool:
    """True if `is_answered_in_round` holds for each of these learners."""
    if len(state.admitted.senders) + len(state.rejected.senders) < len(learners):
        return False
    return all(is_answered_in_round(state, learner) for learner in learners)


def newest_incarnation(state: State, learner: str) -> int:
    """Returns the newest incarnation of a learner; 0 if it never joined."""
    member = state.members.get(learner)
    return member.incarnation if member else 0


def with_member(state: State, learner: str, member: Member) -> State:
    """Returns the state with the `Member` of a learner replaced or added."""
    return state._replace(members=state.members.put(learner, member))


def with_pending(state: State, update: UpdateId, pending: Pending) -> State:
    """Returns the state with an update added to the waiting ones, or replaced."""
    return _with_waiting(state, update, state.pending.put(update, pending))


def without_pending(state: State, update: UpdateId) -> State:
    """Returns the state without an update among the waiting ones."""
    return _with_waiting(state, update, state.pending.drop(update))


def _with_waiting(state: State, update: UpdateId, pending: WaitingUpdates) -> State:
    learner = update.learner
    by = pending.awaited_from.of(learner) - state.pending.awaited_from.of(learner)
    announced_by = state.announced_by.more(learner, by) if by else state.announced_by
    return state._replace(pending=pending, announced_by=announced_by)


def with_quarantined(state: State, quarantined: frozenset[str]) -> State:
    """Returns the state in which exactly these learners are quarantined."""
    members = state.members.but(shut_out=quarantined)
    return state._replace(quarantined=quarantined, members=members)


def with_observation(state: State, what: str, at_s: float, about: UpdateId, value: float) -> State:
    """Returns the state with one more observation: an input that is not on the tape."""
    observation = wire.Observation(
        what=what,
        at_s=at_s,
        after_seq=state.seen_seq,
        learner=about.learner,
        incarnation=about.incarnation,
        seq=about.seq,
        value=value,
    )
    return state._replace(observations=(*state.observations, observation), now_s=at_s)
