"""The state of one fragment's machine, and the smallest questions and changes of it."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from diloco.aggregator.core.members import Member, Members
from diloco.aggregator.core.persistent import PersistentMap, Tally
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

# Whom an observation is about that is about nobody: a timer, a commit.
NOBODY = UpdateId("", 0, 0)


class Allowance(NamedTuple):
    """A learner's allowance of announcements: `left` of them at the time `at_s`."""

    # In updates, not in messages of any kind: joins and leaves cost next to nothing.
    left: float
    at_s: float


class Marks(Mapping[tuple[str, int], wire.Mark]):
    """Marks by (learner, incarnation), replaced with each record.

    Args:
        marks: the marks to begin with.
    """

    __slots__ = ("_lives", "_marks")

    def __init__(self, marks: Mapping[tuple[str, int], wire.Mark] = MappingProxyType({})) -> None:
        self._marks = dict(marks)
        self._lives: dict[str, list[int]] = {}
        for learner, life in self._marks:
            self._lives.setdefault(learner, []).append(life)

    def lives(self, learner: str) -> list[int]:
        """The lives of a learner that have a mark."""
        return self._lives.get(learner, [])

    def __getitem__(self, life: tuple[str, int]) -> wire.Mark:
        """The mark of a life."""
        return self._marks[life]

    def __len__(self) -> int:
        """The number of marks."""
        return len(self._marks)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """The lives, in the order in which they got their first mark."""
        return iter(self._marks)


class Quarantine(NamedTuple):
    """Say on the tape that a learner is quarantined; said again until the tape has it."""

    learner: str
    reason: str


class Cut(NamedTuple):
    """The end of a round: updates announced by then belong to it, later ones do not.

    `reason`: why the round ends; `final`: it is the fragment's last. `stream_seq` is the last
    update that the stream's leader had, known since `known_at_s` (0: it is being asked).
    """

    reason: str
    final: bool
    stream_seq: int = 0
    known_at_s: float = 0.0


class Storing(NamedTuple):
    """A record on its way to the tape, and the learners to quarantine once it stands."""

    published: bool
    offenders: tuple[Quarantine, ...]


Phase = Literal["idle", "open", "grace", "cut", "closing"]


class State(NamedTuple):
    """The machine's state; mappings are replaced, never changed.

    `global_step` is the run's clock at `version`; `floor` the version of the newest rollback;
    `settings_seq` the settings message that the rules come from. `quarantined` are shut out;
    `allowances` has everybody who announced something. `admitted` are the round's, from the
    moment the last version was made; `cut` ends it; `storing` is a record under way: no other one
    begins before it stands. `final`: the fragment's last version is committed, or is being so;
    `known_seq`: what is at or below it on the tape was met before the record that this life began
    from at `began_at_s`.
    """

    # What stands: the newest version, the record that says so, and its view's digest, against which
    # the base of an update is judged.
    version: int
    record_seq: int
    view_digest: str
    # The tape is taken up to here. A record's position follows from it, and so what its successor
    # reads again.
    seen_seq: int
    members: Members = Members()
    # By (learner, incarnation). They alone tell an update that is announced once more from a new
    # one (invariant 2), so they outlive every record.
    marks: Marks = Marks()
    pending: WaitingUpdates = WaitingUpdates()
    # The run's clock at `version`. It is carried and not computed from `version`, since a rollback
    # sets it back while versions go on.
    global_step: int = 0
    # The version of the newest rollback: nothing that was made before it is merged any more.
    floor: int = 0
    # The settings message that the rules come from; the rules themselves are given with each event,
    # so that what the machine remembers is small.
    settings_seq: int = 0
    quarantined: frozenset[str] = frozenset()
    # Everybody who ever announced something: a learner that restarts must not get a full allowance.
    allowances: PersistentMap[str, Allowance] = PersistentMap()
    # Theirs for what this life meets again, which an earlier one has paid from `allowances`.
    met_again: PersistentMap[str, Allowance] = PersistentMap()
    phase: Phase = "idle"
    # The fragment's last version is committed, or is being so: nothing follows it (invariant 1).
    final: bool = False
    # What the open round has merged, in this order: additions of floats do not commute, and
    # recovery repeats them (invariant 3).
    admitted: MergedUpdates = MergedUpdates()
    rejected: Resolved[RejectedUpdate] = Resolved()
    observations: tuple[wire.Observation, ...] = ()
    # How many updates of each learner belong to the round, read or not, until it is cut.
    voices: Tally[str] = Tally()
    cut: Cut | None = None
    storing: Storing | None = None
    opened_at_s: float = 0.0
    quorum_at_s: float = 0.0
    closed_at_s: float = 0.0
    # When the run's stop was stored; 0 before it.
    stopping_at_s: float = 0.0
    # Moving averages: from a round's opening to its quorum, from its close to its record.
    quorum_s: float = 0.0
    sync_s: float = 0.0
    # What updates were credited with that an earlier life met and no record has resolved.
    credits: Mapping[UpdateId, UpdateCredit] = MappingProxyType({})
    # This life began at `began_at_s` from a record whose maker had met everything up to
    # `known_seq`: it counted it in the averages and allowances, which must not be done again.
    known_seq: int = 0
    began_at_s: float = 0.0
    # The last time that the owner told, by its own clock, as all times of rounds are.
    now_s: float = 0.0


def to_resolve(state: State) -> tuple[Admitted | RejectedUpdate, ...]:
    """The updates that the next record resolves."""
    return (*state.admitted, *state.rejected)


def has_unread(state: State) -> bool:
    """Whether anything belongs to the round that is not merged yet; see `unread`."""
    if state.cut is None or not state.cut.known_at_s:
        return state.pending.awaited > 0
    last_seq = state.cut.stream_seq
    return state.pending.awaited > 0 and any(
        one.stream_seq <= last_seq for one in state.pending.unordered() if not one.passed
    )


def unread(state: State) -> list[Pending]:
    """Updates of the round that are not merged; once it is cut, those announced by then."""
    waited_for = [one for one in state.pending.values() if not one.passed]
    if state.cut is None or not state.cut.known_at_s:
        return waited_for
    return [one for one in waited_for if one.stream_seq <= state.cut.stream_seq]


def passed_on(state: State) -> State:
    """The state in which the round no longer waits for updates that were not read."""
    for one in unread(state):
        state = with_pending(state, update_id(one.manifest), one._replace(passed=True))
    return state


def awaiting(state: State) -> State:
    """The state in which the round's merged updates wait again, as if they had not been read."""
    if not state.admitted:
        return state
    pending = state.pending
    for one in state.admitted:
        again = Pending(
            one.manifest, one.stream_seq, one.announced_at_s, one.stored_at_s, one.credit
        )
        pending = pending.put(update_id(one.manifest), again)
    members = state.members.but(norms={})
    # Each of them counts as before, merged or waiting.
    return state._replace(admitted=MergedUpdates(), pending=pending, members=members)


def with_admitted(state: State, update: UpdateId, admitted: Admitted) -> State:
    """The state once the round has merged an update that waited."""
    learner = admitted.manifest.learner
    passed = state.pending[update].passed
    return state._replace(
        pending=state.pending.drop(update),
        admitted=state.admitted.plus(admitted),
        members=state.members.merged(learner, admitted.norm_per_step),
        voices=state.voices.more(learner) if passed else state.voices,
    )


def with_round_of(state: State, other: State) -> State:
    """The state with the open round of another state: its merged and its waiting updates."""
    norms = {one.manifest.learner: one.norm_per_step for one in other.admitted}
    return state._replace(
        admitted=other.admitted,
        pending=other.pending,
        voices=other.voices,
        members=state.members.but(norms=norms),
    )


def without_round(state: State) -> State:
    """The state with nothing merged or refused, once a record has resolved it."""
    return state._replace(
        admitted=MergedUpdates(), rejected=Resolved(), voices=state.pending.awaited_from
    )


def is_answered_in_round(state: State, learner: str) -> bool:
    """Whether the next record answers an update of a learner, which sends none until then."""
    if learner in state.admitted.senders:
        return True
    return (learner, newest_incarnation(state, learner)) in state.rejected.lives


def are_answered(state: State, learners: Tally[str]) -> bool:
    """Whether `is_answered_in_round` holds for each of these learners."""
    if len(state.admitted.senders) + len(state.rejected.senders) < len(learners):
        return False
    return all(is_answered_in_round(state, learner) for learner in learners)


def newest_incarnation(state: State, learner: str) -> int:
    """Newest incarnation that a learner's join gave it; 0 if it never joined."""
    member = state.members.get(learner)
    return member.incarnation if member else 0


def with_member(state: State, learner: str, member: Member) -> State:
    """The state with this member in place of the learner's."""
    return state._replace(members=state.members.put(learner, member))


def with_pending(state: State, update: UpdateId, pending: Pending) -> State:
    """The state with this update among the pending ones."""
    return _with_waiting(state, update, state.pending.put(update, pending))


def without_pending(state: State, update: UpdateId) -> State:
    """The state without this update among the pending ones."""
    return _with_waiting(state, update, state.pending.drop(update))


def _with_waiting(state: State, update: UpdateId, pending: WaitingUpdates) -> State:
    learner = update.learner
    by = pending.awaited_from.of(learner) - state.pending.awaited_from.of(learner)
    voices = state.voices.more(learner, by) if by else state.voices
    return state._replace(pending=pending, voices=voices)


def with_quarantined(state: State, quarantined: frozenset[str]) -> State:
    """The state in which these learners, and no others, are in quarantine."""
    members = state.members.but(shut_out=quarantined)
    return state._replace(quarantined=quarantined, members=members)


def with_observation(state: State, what: str, at_s: float, about: UpdateId, value: float) -> State:
    """The state with an input that is not on the tape, which the next record states."""
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
