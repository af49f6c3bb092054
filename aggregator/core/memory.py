"""The memory that a record carries from one machine to the next, and past updates' answers."""

from collections.abc import Mapping

from diloco.aggregator.core.members import LIVES, PATIENCE, Member, Members
from diloco.aggregator.core.persistent import PersistentMap
from diloco.aggregator.core.state import (
    NOBODY,
    Allowance,
    Marks,
    State,
    newest_incarnation,
    to_resolve,
    with_observation,
)
from diloco.aggregator.core.updates import (
    Admitted,
    RejectedUpdate,
    UpdateCredit,
    UpdateId,
    WaitingUpdates,
    update_id,
)
from diloco.common.protocol import wire
from diloco.common.protocol.reasons import is_offence

# Says in each record, and in each life's first observation, by which rules it decides: 0 were
# those of a round that opened with pace, 1 believed what learners claim, 2 had the median's pace, 3
# took what was on its way for slowness. A record of other rules cannot be decided again by these.
RULES = 4.0


def beginning(
    *,
    quarantined: tuple[str, ...] = (),
    floor: int = 0,
    quorum_s: float = 0.0,
    sync_s: float = 0.0,
) -> wire.PolicyState:
    """The memory of a tape's first record: nothing that has a sequence number.

    Args:
        quarantined: who is shut out already.
        floor: the oldest version that an update may be based on.
        quorum_s: moving average of the tape before, from a round's opening to its quorum.
        sync_s: likewise, from its close to its record.
    """
    return wire.PolicyState(
        members=(),
        marks=(),
        quarantined=quarantined,
        allowances=(),
        seen_seq=0,
        floor=floor,
        settings_seq=0,
        closed_at_s=0.0,
        stopping_at_s=0.0,
        quorum_s=quorum_s,
        sync_s=sync_s,
        credits=(),
        rules=RULES,
    )


def resume(record: wire.Record, record_seq: int, now_s: float) -> State:
    """The machine as a record left it; feed it the tape from `record.position` on.

    Times of a writer whose clock was ahead are taken as `now_s`, or they would stop the run.
    """
    # Nothing of what the machine before had in hand comes back, its open round least of all: it is
    # on the tape, and is met again (invariant 2).
    memory = record.policy
    state = State(
        version=record.version,
        record_seq=record_seq,
        view_digest=record.view_digest,
        # From the lowest sequence that is not resolved: what lies above it and is resolved is met
        # again, and known by its mark. So position needs no acknowledgement, which could be lost
        # (invariant 2).
        seen_seq=record.position - 1,
        global_step=record.global_step,
        floor=memory.floor,
        settings_seq=memory.settings_seq,
        quarantined=frozenset(memory.quarantined),
        allowances=PersistentMap(
            {one.learner: Allowance(one.left, one.at_s) for one in memory.allowances}
        ),
        final=record.final,
        members=Members(
            {m.learner: Member(**m.model_dump(exclude={"learner"})) for m in memory.members},
            frozenset(memory.quarantined),
        ),
        marks=Marks({(mark.learner, mark.incarnation): mark for mark in memory.marks}),
        # What waited lies at or above the position, and is announced again by the reading.
        pending=WaitingUpdates(),
        # A predecessor whose clock was an hour ahead must not make us wait an hour.
        closed_at_s=min(memory.closed_at_s, now_s),
        stopping_at_s=min(memory.stopping_at_s, now_s),
        quorum_s=memory.quorum_s,
        sync_s=memory.sync_s,
        credits={
            UpdateId(c.learner, c.incarnation, c.seq): UpdateCredit(c.steps, c.tokens, c.weight)
            for c in memory.credits
        },
        # Up to here the predecessor's averages and allowances have everything; what it did not read
        # it has not counted.
        known_seq=memory.seen_seq,
        began_at_s=now_s,
    )
    return with_observation(state, "resumed", now_s, NOBODY, RULES)


def policy_after(state: State) -> wire.PolicyState:
    """The memory that the record that commits `state` must keep for `resume`."""
    # As it will be once this very record stands, since it is read only then.
    committed = after_record(state)
    members = tuple(
        wire.MemberState(learner=learner, **member._asdict())
        for learner, member in committed.members.items()
    )
    return wire.PolicyState(
        members=members,
        marks=tuple(committed.marks.values()),
        quarantined=tuple(sorted(committed.quarantined)),
        allowances=tuple(
            wire.Allowance(learner=learner, **allowance._asdict())
            for learner, allowance in committed.allowances.items()
        ),
        # A life that dies before it has caught up has still inherited what the one before had met.
        seen_seq=max(committed.seen_seq, committed.known_seq),
        floor=committed.floor,
        settings_seq=committed.settings_seq,
        closed_at_s=committed.closed_at_s,
        stopping_at_s=committed.stopping_at_s,
        quorum_s=committed.quorum_s,
        sync_s=committed.sync_s,
        credits=_credits(committed),
        rules=RULES,
    )


def _credits(state: State) -> tuple[wire.Credit, ...]:
    """Credits of updates that will be met again, as of now: their senders' time has passed."""
    unresolved = dict(state.credits) if not has_met_all(state) else {}
    unresolved |= {update: pending.credit for update, pending in state.pending.items()}
    return tuple(
        wire.Credit(**update._asdict(), **credit._asdict()) for update, credit in unresolved.items()
    )


def position(state: State) -> int:
    """Lowest stream sequence that is not resolved once `state`'s record is committed."""
    # What waits is in no record yet: a position above it would lose it (invariant 2).
    waiting = (pending.stream_seq for pending in state.pending.unordered())
    return min(waiting, default=state.seen_seq + 1)


def has_met_all(state: State) -> bool:
    """Whether the machine has read the tape again as far as its first record had read it."""
    return state.seen_seq >= state.known_seq


def is_known(state: State, update: UpdateId) -> bool:
    """Whether an update was met before: it is resolved, or on its way through this machine."""
    if is_answered(state, update):
        return True
    if any(
        update in those for those in (state.pending, state.admitted.named, state.rejected.named)
    ):
        return True
    # What the memory says was met and is in no record is owed an answer, however old its life.
    if (update.learner, update.incarnation) in state.marks or update in state.credits:
        return False
    # Memory has a bound: without one, a learner that restarts for a year would fill every record.
    # All else of a life so old that its mark is gone was answered long ago.
    joined = newest_incarnation(state, update.learner)
    lives = [
        life
        for life in state.marks.lives(update.learner)
        if (life > joined) == (update.incarnation > joined)
    ]
    return len(lives) >= LIVES and update.incarnation < min(lives)


def is_answered(state: State, update: UpdateId) -> bool:
    """Whether a record has resolved an update."""
    mark = state.marks.get((update.learner, update.incarnation))
    # Lower sequences of a life were resolved before: it has one update in flight at a time.
    return mark is not None and update.seq <= mark.seq


def after_record(state: State) -> State:
    """Marks and members once the record being committed is on the tape."""
    marks = dict(state.marks)
    resolved = to_resolve(state)
    for taken in resolved:
        update = update_id(taken.manifest)
        # One update of a life is in flight at a time, so its highest resolved seq stands for all
        # before it: the memory does not grow with updates.
        marks[update[:2]] = wire.Mark(**update._asdict(), stream_seq=taken.stream_seq)
    # Before marks go: what is answered is owed nothing more, and announced again it is known by
    # neither.
    owed = {
        update: credit
        for update, credit in state.credits.items()
        if update[:2] not in marks or update.seq > marks[update[:2]].seq
    }
    # Forgotten by life and not by age: a learner that was away for a month must still be known when
    # it announces again.
    lives_of: dict[str, list[int]] = {}
    for learner, life in marks:
        lives_of.setdefault(learner, []).append(life)
    for learner, lives in lives_of.items():
        joined = newest_incarnation(state, learner)
        # Lives that somebody made up must not take the place of those that were.
        for some in ([n for n in lives if n <= joined], [n for n in lives if n > joined]):
            for life in sorted(some)[:-LIVES]:
                del marks[learner, life]
    members = state.members.but(members=_judged(state, resolved), norms={})
    return state._replace(marks=Marks(marks), members=members, credits=owed)


def _judged(state: State, resolved: tuple[Admitted | RejectedUpdate, ...]) -> Mapping[str, Member]:
    """The members with their offences once these updates are answered."""
    members = dict(state.members)
    for taken in resolved:
        learner = taken.manifest.learner
        if learner not in members:
            continue
        if isinstance(taken, RejectedUpdate) and not is_offence(taken.reason):
            continue
        # Merged work makes up for offences, or every learner would be shut out some day.
        change = 1 if isinstance(taken, RejectedUpdate) else -1
        count = max(0, members[learner].offences + change)
        members[learner] = members[learner]._replace(offences=count)
    if state.admitted:
        _take_part(state, members)
    return members


def _take_part(state: State, members: dict[str, Member]) -> None:
    """Note who had work in the round that ends with a version, and of which size."""
    norms = {one.manifest.learner: one.norm_per_step for one in state.admitted}
    for learner in members.keys() & (set(state.members.present) | norms.keys()):
        now = members[learner]
        if learner in norms:
            members[learner] = now._replace(norm=norms[learner], missed=0)
        else:
            members[learner] = now._replace(missed=min(PATIENCE, now.missed + 1))
