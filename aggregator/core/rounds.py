"""Decides when a round opens, is cut and closes, and when the machine wants a timer.

Pace delays the opening of a round, and thereby its close, never its work: updates are read and
merged from the moment the last version is made. A slow store delays the version, and excludes no
update that was announced in time.
"""

from diloco.aggregator.core import admission_and_credit, memory
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.events import AskCut, Commit, Fetch, OpenRound, Result
from diloco.aggregator.core.round_and_weight_formulas import FragmentRules
from diloco.aggregator.core.state import (
    Cut,
    State,
    Storing,
    are_answered,
    awaiting,
    has_unread,
    is_answered_in_round,
    with_round_of,
)
from diloco.aggregator.core.updates import RejectedUpdate, Resolved, WaitingUpdates, refuse
from diloco.common.protocol.layout import next_step
from diloco.common.protocol.reasons import Reason


def deadline(rules: FragmentRules, state: State) -> float | None:
    """Returns when the machine next wants a `Timer`, in seconds of Unix time; None: no timer."""
    # Nothing is decided before the version is made, nor after the last one.
    if state.phase == "closing" or state.final:
        return None
    if state.cut is not None:
        # Waiting for the leader's answer, or for a record to be committed, needs no timer.
        waits = state.cut.known_at_s and has_unread(state)
        return state.cut.known_at_s + rules.quorum.read_timeout_s if waits else None
    if state.stopping_at_s:
        # An owner that begins after the stop has first to read what came meanwhile.
        return max(state.stopping_at_s, state.began_at_s) + rules.quorum.deadline_s
    if state.phase == "idle":
        return _opens_at_s(rules, state)
    # Without a quorum the round still closes: no learner waits for a peer that may never come
    # (invariant 6).
    if state.phase == "open":
        return state.opened_at_s + rules.quorum.deadline_s
    return _grace_ends_s(rules, state)


def global_step_after(rules: FragmentRules, state: State) -> int:
    """Returns the run's clock at the next version, in steps; at most the run's number of steps."""
    return min(rules.steps, _next_step(rules, state))


def has_next(rules: FragmentRules, state: State) -> bool:
    """True if the run is long enough for another version of the fragment."""
    return _next_step(rules, state) <= rules.steps


def step_share(state: State, *, participation: bool, centered: bool) -> float:
    """Returns the share of a full outer step that the round takes, above 0.

    The share is at most 1, except with centered clipping, where the mean of many updates is short.
    """
    # A learner alone in a round takes only its share of a step, even without `participation`.
    senders = len(state.admitted.senders)
    part = share(state) if participation or senders == 1 else 1.0
    return part * formulas.mean_growth(senders) if centered else part


def share(state: State) -> float:
    """Returns the part of the fleet's weight that the round has merged, in (0, 1]."""
    held = sum(admitted.weight for admitted in state.admitted)
    # An unknown weight is 0, so that a learner that has just joined does not shrink the step.
    present, awaited = state.admitted.senders, state.members.awaited
    # In the same order on every machine, as a sum of floats depends on it.
    absent = sum(
        member.weight
        for name, member in state.members.items()
        if name in awaited and name not in present
    )
    return held / (held + absent) if held else 1.0


def may_follow(rules: FragmentRules, state: State) -> bool:
    """True if the fragment may make another version; after the stop one merges what is left."""
    # A version after the last would change the run's result after its end (invariant 1).
    if state.final:
        return False
    return bool(state.stopping_at_s) or has_next(rules, state)


def go_on(rules: FragmentRules, state: State, now_s: float) -> Result:
    """Continues after a change of rules or state: `fetch_waiting`, then `advance`."""
    state, effects = fetch_waiting(rules, state)
    state, more = advance(rules, state, now_s)
    return state, effects + more


def fetch_waiting(rules: FragmentRules, state: State) -> Result:
    """Asks to fetch the waiting updates; after the cut, only those that belong to the round."""
    if not may_follow(rules, state) or (state.cut is not None and not state.cut.known_at_s):
        return state, ()
    last_seq = None if state.cut is None else state.cut.stream_seq
    # All at once, in the order of announcement. The order of merging then depends on the store, and
    # is recorded (invariant 5).
    pending = state.pending
    fetches = []
    for update in pending.unfetched():
        one = pending[update]
        if last_seq is None or one.stream_seq <= last_seq:
            pending = pending.put(update, one._replace(fetching=True))
            fetches.append(Fetch(update, one.manifest))
    return state._replace(pending=pending), tuple(fetches)


def advance(rules: FragmentRules, state: State, now_s: float) -> Result:
    """Opens the round, counts its quorum or closes it, as far as the state at `now_s` permits."""
    state = _without_empty_round(state)
    if state.phase == "idle" and state.rejected and state.storing is None:
        # At once: the sender waits for a record with the answer, and there may be no further round
        # to carry it.
        return give_verdicts(rules, state, now_s, "rejections", final=state.final)
    if state.phase == "closing" or state.final:
        return state, ()
    if state.cut is not None:
        return _advance_cut(rules, state, state.cut, now_s)
    state, opened = _open(rules, state, now_s)
    if state.stopping_at_s:
        # The run's last round has another rule of completeness: it waits only for learners with
        # unsent updates.
        state, more = _advance_to_end(rules, state, now_s)
        return state, opened + more
    if state.phase == "idle":
        return state, opened
    state = _count_quorum(rules, state, now_s)
    # All learners that could contribute have done so; waiting longer would gain nothing. A rejected
    # update counts too, since its sender learns of it from this record and sends nothing before.
    if _is_complete(rules, state) and state.storing is None:
        state, more = close(rules, state, now_s, "complete")
        return state, opened + more
    return state, opened


def cut(state: State, reason: str, *, final: bool = False) -> Result:
    """Ends the round for updates announced later; asks for the sequence of the last update.

    Args:
        state: the machine's state.
        reason: why the round ends: "grace" or "deadline".
        final: True if no round follows.
    """
    return state._replace(phase="cut", cut=Cut(reason, final)), (AskCut(),)


def close(
    rules: FragmentRules, state: State, now_s: float, reason: str, *, final: bool = False
) -> Result:
    """Closes the round: commits a version; if no update was merged, only verdicts."""
    if not state.admitted:
        return give_verdicts(rules, state, now_s, reason, final=final)
    # Pace counts between versions, so that a rejection between two rounds does not delay the next.
    closing = state._replace(phase="closing", final=final, closed_at_s=now_s, cut=None)
    return closing, (Commit("version", reason, final, now_s, closing),)


def give_verdicts(
    rules: FragmentRules, state: State, now_s: float, reason: str, *, final: bool
) -> Result:
    """Commits the rejections in a record without a version; merged updates stay in the round."""
    # The record makes no version, but uses the same compare-and-swap, so that no stale owner can
    # reject what its successor merges (invariant 2).
    said = awaiting(state)._replace(final=final)
    after = memory.after_record(said)
    storing = Storing(False, admission_and_credit.offenders(rules, after, state.rejected))
    after = with_round_of(after, state)._replace(
        rejected=Resolved(),
        observations=(),
        storing=storing,
        phase="idle" if final else state.phase,
        cut=None if final else state.cut,
    )
    return after, (Commit("verdict", reason, final, now_s, said),)


def reject(rules: FragmentRules, state: State, refused: RejectedUpdate, now_s: float) -> Result:
    """Adds a rejection to the next record; if no round is open, commits a record of verdicts."""
    # Outside of a round a rejection costs a record, so its sender is charged for it.
    state = admission_and_credit.charge(state, refused)
    return advance(rules, state._replace(rejected=state.rejected.plus(refused)), now_s)


def _next_step(rules: FragmentRules, state: State) -> int:
    return next_step(rules.rhythm, state.global_step)


def _pace_time_s(rules: FragmentRules, state: State) -> float:
    """Returns the earliest opening of the next round by pace, in seconds of Unix time; 0: none."""
    # Neither the last round, which merges what there is, nor the first is delayed. Without pace the
    # fastest learner would cause many small rounds, which cost quality (P, Table 5).
    if state.stopping_at_s or not state.closed_at_s:
        return 0.0
    # The actual interval, not H, as offsets make the first one shorter.
    interval_steps = _next_step(rules, state) - state.global_step
    members = state.members
    step_s = members.usual_step_s() if rules.robust else members.fastest_step_s()
    return state.closed_at_s + formulas.pace_s(rules, step_s, interval_steps)


def _opens_at_s(rules: FragmentRules, state: State) -> float | None:
    """Returns the time from which the round may open; None: not yet, or no round follows.

    It is the latest of three: the pace time, the first announcement, and the beginning of this
    tenure, since a new owner must first read the updates that were announced earlier.
    """
    if not may_follow(rules, state):
        return None
    each_s = (state.pending.first_announced_at_s, state.admitted.first_announced_at_s)
    announced_at_s = [first_s for first_s in each_s if first_s is not None]
    if not announced_at_s:
        return None
    return max(_pace_time_s(rules, state), min(announced_at_s), state.began_at_s)


def _grace_ends_s(rules: FragmentRules, state: State) -> float:
    # Lockstep waits for all, to equal synchronous DiLoCo (invariant 7), so it has no grace window.
    # The deadline stays, for learners that die in the round.
    hard_s = state.opened_at_s + rules.quorum.deadline_s
    if rules.lockstep:
        return hard_s
    usual_s = state.members.usual_step_s()
    grace_s = formulas.grace_s(rules, usual_s, state.quorum_s, state.sync_s)
    return min(hard_s, state.quorum_at_s + grace_s)


def _without_empty_round(state: State) -> State:
    """Returns the state in phase idle if the round has no updates left, since all were rejected.

    While the stream's leader is being asked for a cut, the round stays open, since the leader's
    answer would otherwise count for the next cut.
    """
    asked = state.cut is not None and (state.cut.final or not state.cut.known_at_s)
    waits = state.pending.awaited > 0
    if asked or state.phase in ("idle", "closing") or state.admitted or waits:
        return state
    return state._replace(phase="idle", cut=None)


def _open(rules: FragmentRules, state: State, now_s: float) -> Result:
    opens_at_s = _opens_at_s(rules, state) if state.phase == "idle" else None
    # A learner that has announced sends nothing more before the record. Once all have, pace would
    # prevent no small round, and after an outage of ours would make all wait for many rounds.
    if opens_at_s is None or (now_s < opens_at_s and not _has_everybody(state)):
        return state, ()
    opened_at_s = min(opens_at_s, now_s)
    state = state._replace(phase="open", opened_at_s=opened_at_s, quorum_at_s=0.0)
    return state, (OpenRound(state.version + 1),)


def _has_everybody(state: State) -> bool:
    """True if all present learners have announced an update for the round."""
    # Including those that rounds do not wait for: else one learner that outlasts the others would
    # count as everybody.
    present, announced_by = state.members.present, state.announced_by
    return len(present) <= len(announced_by) and all(learner in announced_by for learner in present)


def _count_quorum(rules: FragmentRules, state: State, now_s: float) -> State:
    """Starts the grace window once enough learners have announced, whether their updates are read.

    The round goes back to `open` if an announced update fails and the quorum is lost.
    """
    # A fleet smaller than K must still make versions, except in lockstep.
    least = rules.quorum.min_learners
    there = len(state.members.awaited)
    quorum = least if rules.lockstep else formulas.effective_quorum(rules.quorum, there)
    if rules.robust:
        quorum = max(quorum, formulas.robust_quorum(there, state.version))
    reached = len(state.announced_by) >= quorum
    if state.phase == "open" and reached:
        reached_at_s = max(state.opened_at_s, now_s)
        waited_s = formulas.elapsed_s(state.opened_at_s, reached_at_s)
        # Time spent waiting for the quorum is subtracted from the grace window (P, Eq. 3).
        quorum_s = formulas.ema(state.quorum_s, waited_s)
        return state._replace(phase="grace", quorum_at_s=reached_at_s, quorum_s=quorum_s)
    if state.phase == "grace" and not reached:
        return state._replace(phase="open", quorum_at_s=0.0)
    return state


def _is_complete(rules: FragmentRules, state: State) -> bool:
    """True if the round waits for no update any more.

    Every announced update is read, and each awaited learner has an update that is merged or is
    rejected by this round. In lockstep each present learner, and at least `quorum.min_learners`.
    """
    if has_unread(state):
        return False
    if not rules.lockstep:
        return are_answered(state, state.members.awaited)
    if not are_answered(state, state.members.present):
        return False
    senders = {*state.admitted.senders, *state.rejected.senders}
    count = sum(is_answered_in_round(state, sender) for sender in senders)
    return count >= rules.quorum.min_learners


def _advance_cut(rules: FragmentRules, state: State, cut: Cut, now_s: float) -> Result:
    """Closes a cut round once all its updates are read or have passed on to later rounds."""
    if not cut.known_at_s or has_unread(state) or state.storing is not None:
        return state, ()
    if cut.final:
        return close(rules, _refuse_late(state), now_s, cut.reason, final=True)
    if state.admitted:
        return close(rules, state, now_s, cut.reason)
    # No update that was announced in time could be read, so the round opens again.
    state = state._replace(phase="open", opened_at_s=now_s, quorum_at_s=0.0, cut=None)
    return go_on(rules, state, now_s)


def _advance_to_end(rules: FragmentRules, state: State, now_s: float) -> Result:
    """After the stop: closes the round once no learner can contribute to it any more.

    A learner with an update in this round sends its last update only after the round's record.
    Updates that the previous owner had received must first be read again.
    """
    # Messages that this tenure has not read again yet may have updates that need a verdict
    # (invariant 2).
    if state.pending or not memory.has_caught_up(state) or state.storing is not None:
        return state, ()
    awaited = state.members.unfinished
    if not awaited:
        return close(rules, state, now_s, "final", final=True)
    if state.admitted and are_answered(state, awaited):
        return close(rules, state, now_s, "complete")
    return state, ()


def _refuse_late(state: State) -> State:
    """Returns the state with all waiting updates rejected as late, at the run's final deadline."""
    # Rejected and not dropped, so that tokens add up at the end as well (invariant 4).
    late = tuple(
        refuse(pending.manifest, pending.stream_seq, Reason.LATE, "not here when the run ended")
        for pending in state.pending.values()
    )
    rejected = Resolved((*state.rejected, *late))
    return state._replace(
        pending=WaitingUpdates(), rejected=rejected, announced_by=state.admitted.senders
    )
