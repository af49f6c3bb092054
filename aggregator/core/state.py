"""What the machine of one fragment knows, and the smallest questions and changes of it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from diloco.common import wire


class UpdateId(NamedTuple):
    """Names one update of this machine's fragment."""

    learner: str
    incarnation: int
    seq: int


# A round waits for a learner that had work in one of the last so many in which anybody's work came.
PATIENCE = 3

# Whom an observation is about that is about nobody: a timer, a commit.
NOBODY = UpdateId("", 0, 0)


class Credit(NamedTuple):
    """What an update counts for: of what it claims, as much as can be believed (`credit.py`)."""

    steps: int
    tokens: int
    weight: float


class Pending(NamedTuple):
    """An update that is announced and not yet verified; `fetching` once its shards are read.

    `passed`: it could not be read in the time of its round. It is merged when it comes, but no
    later round waits for it, or one sender's slow object would hold up every version. `broke`: how
    often adding it to the sum failed.
    """

    manifest: wire.Manifest
    stream_seq: int
    announced_at_s: float
    credit: Credit
    fetching: bool = False
    passed: bool = False
    broke: int = 0


class Admitted(NamedTuple):
    """An update that the round has merged."""

    manifest: wire.Manifest
    stream_seq: int
    credit: Credit
    staleness: int
    discount: float
    clip: float
    norm: float
    announced_at_s: float = 0.0

    @property
    def weight(self) -> float:
        """Its weight in the merge."""
        return self.credit.weight

    @property
    def norm_per_step(self) -> float:
        """As it was merged, by each step that it is credited with."""
        return self.clip * self.norm / self.credit.steps


class Refused(NamedTuple):
    """An update that the next record rejects; made by `refuse`."""

    manifest: wire.Manifest
    stream_seq: int
    reason: str
    detail: str


def refuse(manifest: wire.Manifest, stream_seq: int, reason: str, detail: str) -> Refused:
    """The rejection of an update.

    Its detail may quote the sender: bounded here, so that no manifest makes a record that cannot be
    written.
    """
    return Refused(manifest, stream_seq, reason, wire.note(detail))


class Member(NamedTuple):
    """What this fragment knows of a learner."""

    incarnation: int
    # Whether rounds wait for it. A learner is live from its join on: it has something to add to the
    # very round that is open.
    live: bool = True
    # It ended on purpose, and no heartbeat on its way brings it back.
    left: bool = False
    # Its last update of this fragment is announced, so that the run's last round need not wait.
    final: bool = False
    # Moving averages of what its updates claim; 0 while there was none. They are voices: only
    # medians of several learners' are used.
    step_time_s: float = 0.0
    tokens_per_step: float = 0.0
    # Moving average of the weights that its updates are credited with; 0 while there was none.
    weight: float = 0.0
    # When its last update, or its first join, was stored: steps are credited for the time since
    # then; and when the owner read it, by its own clock.
    heard_at_s: float = 0.0
    read_at_s: float = 0.0
    # Steps a second that it was last seen to take (0: never seen), and time that it had and did not
    # claim: what an outage held back comes in two updates, the first of which claims little.
    speed: float = 0.0
    unused_s: float = 0.0
    # Norm per credited step of its update merged last, as it was merged; 0 while there was none.
    norm: float = 0.0
    # Rounds of others' work, up to `PATIENCE`, since one had work of it.
    missed: int = 0
    # How many more of its updates were rejected for what they are than were merged.
    offences: int = 0


class Allowance(NamedTuple):
    """How many updates a learner may announce at once: `left` of them at the time `at_s`."""

    # In updates, not in messages of any kind: joins and leaves cost next to nothing.
    left: float
    at_s: float


class Mark(NamedTuple):
    """Highest resolved seq of an incarnation, and its manifest's stream sequence."""

    seq: int
    stream_seq: int


class Quarantine(NamedTuple):
    """Say on the tape that a learner is quarantined; said again until the tape has it."""

    learner: str
    reason: str


class Cut(NamedTuple):
    """The end of a round: what was announced by then belongs to it, what comes later does not.

    `reason`: why the round ends; `final`: it is the fragment's last. `stream_seq` is the last
    update that the stream's leader had, known since `known_at_s` (0: it is being asked).
    """

    reason: str
    final: bool
    stream_seq: int = 0
    known_at_s: float = 0.0


class Storing(NamedTuple):
    """A record that is on its way to the tape, and who is shut out once it stands."""

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
    members: Mapping[str, Member]
    # By (learner, incarnation). They alone tell an update that is announced once more from a new
    # one (invariant 2), so they outlive every record.
    marks: Mapping[tuple[str, int], Mark]
    pending: Mapping[UpdateId, Pending]
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
    allowances: Mapping[str, Allowance] = MappingProxyType({})
    # Theirs for what this life meets again, which an earlier one has paid from `allowances`.
    met_again: Mapping[str, Allowance] = MappingProxyType({})
    phase: Phase = "idle"
    # The fragment's last version is committed, or is being so: nothing follows it (invariant 1).
    final: bool = False
    # What the open round has merged, in this order: additions of floats do not commute, and
    # recovery repeats them (invariant 3).
    admitted: tuple[Admitted, ...] = ()
    rejected: tuple[Refused, ...] = ()
    observations: tuple[wire.Observation, ...] = ()
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
    credits: Mapping[UpdateId, Credit] = MappingProxyType({})
    # This life began at `began_at_s` from a record whose maker had met everything up to
    # `known_seq`: it counted it in the averages and allowances, which must not be done again.
    known_seq: int = 0
    began_at_s: float = 0.0
    # The last time that the owner told, by its own clock, as all times of rounds are.
    now_s: float = 0.0


def update_id(manifest: wire.Manifest) -> UpdateId:
    """The name of the update that a manifest announces."""
    return UpdateId(manifest.learner, manifest.incarnation, manifest.seq)


def to_resolve(state: State) -> tuple[Admitted | Refused, ...]:
    """What the next record resolves."""
    merged: tuple[Admitted | Refused, ...] = state.admitted
    return merged + state.rejected


def contributors(state: State) -> set[str]:
    """Learners of whom the round has merged an update."""
    return {admitted.manifest.learner for admitted in state.admitted}


def announcers(state: State) -> set[str]:
    """Learners that have announced an update for the round, read or not."""
    return contributors(state).union(pending.manifest.learner for pending in unread(state))


def unread(state: State) -> list[Pending]:
    """What belongs to the round and is not merged; once it is cut, what was announced by then."""
    waited_for = [one for one in state.pending.values() if not one.passed]
    if state.cut is None or not state.cut.known_at_s:
        return waited_for
    return [one for one in waited_for if one.stream_seq <= state.cut.stream_seq]


def passed_on(state: State) -> State:
    """The state in which the round waits no more for what it has not read."""
    late = {update_id(one.manifest): one._replace(passed=True) for one in unread(state)}
    return state._replace(pending={**state.pending, **late})


def awaiting(state: State) -> State:
    """The state with what the round has merged waiting again, as if it had not been read."""
    again = {
        update_id(one.manifest): Pending(
            one.manifest, one.stream_seq, one.announced_at_s, one.credit
        )
        for one in state.admitted
    }
    return state._replace(admitted=(), pending={**state.pending, **again})


def answered(state: State) -> set[str]:
    """Learners that send no more before the record: it merges, or rejects, an update of theirs."""
    return contributors(state).union(
        refused.manifest.learner
        for refused in state.rejected
        if is_current(state, refused.manifest)
    )


def is_current(state: State, manifest: wire.Manifest) -> bool:
    """Whether a manifest is of its learner's newest life."""
    member = state.members.get(manifest.learner)
    return member is not None and member.incarnation == manifest.incarnation


def live_members(state: State) -> dict[str, Member]:
    """Those who are here: the run's end and lockstep wait for all of them."""
    return {
        name: member
        for name, member in state.members.items()
        if member.live and name not in state.quarantined
    }


def awaited_members(state: State) -> dict[str, Member]:
    """Those whom a round waits for: who is here, and had work of late.

    Heartbeats cost nothing: whoever sends nothing else would make every round wait.
    """
    return {name: m for name, m in live_members(state).items() if m.missed < PATIENCE}


def others(state: State, learner: str) -> list[Member]:
    """All who are here but one: who judges it must not be moved by its own word."""
    return [member for name, member in live_members(state).items() if name != learner]


def step_times(state: State) -> list[float]:
    """Seconds that a step takes each live learner; 0 where it is not known."""
    return [member.step_time_s for member in live_members(state).values()]


def newest_incarnation(state: State, learner: str) -> int:
    """Newest incarnation that a learner's join gave it; 0 if it never joined."""
    member = state.members.get(learner)
    return member.incarnation if member else 0


def with_member(state: State, learner: str, member: Member) -> State:
    """This is known of a learner."""
    return state._replace(members={**state.members, learner: member})


def with_pending(state: State, update: UpdateId, pending: Pending) -> State:
    """This update waits."""
    return state._replace(pending={**state.pending, update: pending})


def without_pending(state: State, update: UpdateId) -> State:
    """This update waits no more."""
    remaining = {key: value for key, value in state.pending.items() if key != update}
    return state._replace(pending=remaining)


def with_observation(state: State, what: str, at_s: float, about: UpdateId, value: float) -> State:
    """An input that is not on the tape was taken: the next record says so."""
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
