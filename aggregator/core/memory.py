"""The memory: the part of a machine's state that a record carries to the next owner's machine.

In a record the memory is the field `policy`. It has the marks, by which the machine knows which
updates have a verdict: a mark is the last update of an incarnation with a verdict.
"""

from collections.abc import Mapping

from diloco.aggregator.core.immutable_collections import PersistentMap
from diloco.aggregator.core.members import LIVES, PATIENCE, Member, Members
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

# The number of these rules, in each record and in each tenure's first observation. With rules 0 a
# round opened with pace; 1 believed learners' claims; 2 used the median's pace; 3 counted time in
# transit as slowness; 4 had one rate for rounds of any size. A record of other rules cannot be
# decided again by these.
RULES = 5.0


def beginning(
    *,
    quarantined: tuple[str, ...] = (),
    floor: int = 0,
    quorum_s: float = 0.0,
    sync_s: float = 0.0,
) -> wire.PolicyState:
    """Returns the memory of a tape's first record, which contains no sequence numbers.

    Args:
        quarantined: the learners that are quarantined already.
        floor: the oldest version that an update may be based on.
        quorum_s: the previous tape's moving average from a round's opening to its quorum.
        sync_s: the previous tape's moving average from a round's close to its record.
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
    """Returns the state of a machine that starts from a record.

    The machine must next receive the tape's messages from `record.position` on.

    Args:
        record: the record.
        record_seq: the record's stream sequence.
        now_s: the time, in seconds by the owner's clock. Later times in the record, from an owner
            whose clock was ahead, become `now_s`, or they would stop the run.
    """
    # The previous machine's waiting updates and open round are not restored: they are read from the
    # tape again (invariant 2).
    memory = record.policy
    state = State(
        version=record.version,
        record_seq=record_seq,
        view_digest=record.view_digest,
        # The position is the lowest unanswered sequence. Answered updates above it are read again,
        # and recognized by their marks; so no acknowledgement is needed, which could be lost
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
        # Updates that waited are at or above the position, and are read again.
        pending=WaitingUpdates(),
        # If the predecessor's clock was an hour ahead, we must not wait an hour.
        closed_at_s=min(memory.closed_at_s, now_s),
        stopping_at_s=min(memory.stopping_at_s, now_s),
        quorum_s=memory.quorum_s,
        sync_s=memory.sync_s,
        credits={
            UpdateId(c.learner, c.incarnation, c.seq): UpdateCredit(c.steps, c.tokens, c.weight)
            for c in memory.credits
        },
        # The predecessor's averages and allowances count all messages up to here, and none after.
        known_seq=memory.seen_seq,
        began_at_s=now_s,
    )
    return with_observation(state, "resumed", now_s, NOBODY, RULES)


def policy_after(state: State) -> wire.PolicyState:
    """Returns the memory for the next record, from which `resume` restores the state."""
    # As it will be once this record is committed, since it is read only then.
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
        # A tenure that ends before it has caught up passes on how far its predecessor had read.
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
    """Returns the credits of the updates without a verdict, which the next owner reads again."""
    unresolved = dict(state.credits) if not has_caught_up(state) else {}
    unresolved |= {update: pending.credit for update, pending in state.pending.items()}
    return tuple(
        wire.Credit(**update._asdict(), **credit._asdict()) for update, credit in unresolved.items()
    )


def position(state: State) -> int:
    """Returns the lowest stream sequence of a waiting update, or the first that is not read yet."""
    # A position above an update that waits, and is in no record yet, would lose it (invariant 2).
    waiting = (pending.stream_seq for pending in state.pending.unordered())
    return min(waiting, default=state.seen_seq + 1)


def has_caught_up(state: State) -> bool:
    """True if the machine has read the tape as far as the previous owner's machine had."""
    return state.seen_seq >= state.known_seq


def is_known(state: State, update: UpdateId) -> bool:
    """True if an update was received before: it has a verdict, or is in this machine's state."""
    if is_answered(state, update):
        return True
    if any(
        update in those for those in (state.pending, state.admitted.named, state.rejected.named)
    ):
        return True
    # An update in the credits is in no record, so it needs a verdict, however old its incarnation.
    if (update.learner, update.incarnation) in state.marks or update in state.credits:
        return False
    # The number of marks is limited, as a learner that restarts for a year would fill every record.
    # Updates of an incarnation so old that its mark is gone got their verdicts long ago.
    joined = newest_incarnation(state, update.learner)
    lives = [
        life
        for life in state.marks.lives(update.learner)
        if (life > joined) == (update.incarnation > joined)
    ]
    return len(lives) >= LIVES and update.incarnation < min(lives)


def is_answered(state: State, update: UpdateId) -> bool:
    """True if a record has a verdict on an update."""
    mark = state.marks.get((update.learner, update.incarnation))
    # Lower seqs of an incarnation got verdicts before: it has one update in flight at a time.
    return mark is not None and update.seq <= mark.seq


def after_record(state: State) -> State:
    """Returns the state with marks, members and credits as they are after the next record."""
    marks = dict(state.marks)
    resolved = to_resolve(state)
    for taken in resolved:
        update = update_id(taken.manifest)
        # An incarnation has one update in flight at a time, so its highest seq with a verdict
        # stands for all before it, and the memory does not grow with updates.
        marks[update[:2]] = wire.Mark(**update._asdict(), stream_seq=taken.stream_seq)
    # Before old marks are dropped: an update with a verdict needs no credit any more.
    owed = {
        update: credit
        for update, credit in state.credits.items()
        if update[:2] not in marks or update.seq > marks[update[:2]].seq
    }
    # Forgotten by number of incarnations and not by age: a learner that was offline for a month
    # must still be recognized.
    lives_of: dict[str, list[int]] = {}
    for learner, life in marks:
        lives_of.setdefault(learner, []).append(life)
    for learner, lives in lives_of.items():
        joined = newest_incarnation(state, learner)
        # Incarnations that a learner invented must not displace real ones.
        for some in ([n for n in lives if n <= joined], [n for n in lives if n > joined]):
            for life in sorted(some)[:-LIVES]:
                del marks[learner, life]
    members = state.members.but(members=_judged(state, resolved), norms={})
    return state._replace(marks=Marks(marks), members=members, credits=owed)


def _judged(state: State, resolved: tuple[Admitted | RejectedUpdate, ...]) -> Mapping[str, Member]:
    """Returns the members with offences, norms and missed rounds updated by these verdicts."""
    members = dict(state.members)
    for taken in resolved:
        learner = taken.manifest.learner
        if learner not in members:
            continue
        if isinstance(taken, RejectedUpdate) and not is_offence(taken.reason):
            continue
        # Merged updates offset offences, or every learner would be shut out some day.
        change = 1 if isinstance(taken, RejectedUpdate) else -1
        count = max(0, members[learner].offences + change)
        members[learner] = members[learner]._replace(offences=count)
    if state.admitted:
        _take_part(state, members)
    return members


def _take_part(state: State, members: dict[str, Member]) -> None:
    """Sets in `members`, in place, `norm` and `missed` by the closing round's merged updates."""
    norms = {one.manifest.learner: one.norm_per_step for one in state.admitted}
    for learner in members.keys() & (set(state.members.present) | norms.keys()):
        now = members[learner]
        if learner in norms:
            members[learner] = now._replace(norm=norms[learner], missed=0)
        else:
            members[learner] = now._replace(missed=min(PATIENCE, now.missed + 1))
