"""When a round opens and closes, and when the machine wants a timer."""

from typing import Literal

from diloco.aggregator.core import admission, memory, policy
from diloco.aggregator.core.effects import Commit, Fetch, Result
from diloco.aggregator.core.policy import FragmentRules
from diloco.aggregator.core.state import (
    Refused,
    State,
    answered,
    contributors,
    live_members,
    step_times,
)
from diloco.common.layout import next_step
from diloco.common.reasons import Reason


def deadline(rules: FragmentRules, state: State) -> float | None:
    """When the machine next wants a `Timer`, in seconds since the epoch; None for never."""
    # Nothing is decided before the record stands, and nothing after the last one.
    if state.phase == "closing" or state.final:
        return None
    if state.stopping_at_s:
        # Whoever begins after the stop has first to read what came while nobody was there.
        return max(state.stopping_at_s, state.began_at_s) + rules.quorum.deadline_s
    # A timer that finds nothing to fetch would only wake the driver and leave an observation in the
    # next record.
    if state.phase == "idle":
        waits = any(not pending.fetching for pending in state.pending.values())
        return _opens_at_s(rules, state) if waits and _may_open(rules, state) else None
    # Without a quorum the round still closes: no learner's update waits for a peer that may never
    # come (invariant 6).
    if state.phase == "open":
        return state.opened_at_s + rules.quorum.deadline_s
    return _grace_ends_s(rules, state)


def global_step_after(rules: FragmentRules, state: State) -> int:
    """The run's clock at the version after `state`'s; the last rounds do not go beyond the run."""
    return min(rules.steps, _next_step(rules, state))


def has_next(rules: FragmentRules, state: State) -> bool:
    """Whether the run is long enough for another version of the fragment."""
    return _next_step(rules, state) <= rules.steps


def share(state: State) -> float:
    """Part of the live fleet's weight that the round holds, in (0, 1]."""
    held = sum(admitted.weight for admitted in state.admitted)
    # A weight that is not known yet is 0, so that a learner that has just joined does not shrink
    # everybody else's step.
    present = contributors(state)
    absent = sum(
        member.weight for name, member in live_members(state).items() if name not in present
    )
    return held / (held + absent) if held else 1.0


def takes_updates(rules: FragmentRules, state: State, now_s: float) -> bool:
    """Whether an update that is verified now is merged now."""
    if state.phase == "idle":
        return _may_open(rules, state) and now_s >= _opens_at_s(rules, state)
    return state.phase != "closing"


def _may_open(rules: FragmentRules, state: State) -> bool:
    """Whether another round belongs to the run; the one after the stop takes all that is left."""
    # A version beyond the last would move the run's result after its end was said (invariant 1).
    if state.final:
        return False
    return bool(state.stopping_at_s) or has_next(rules, state)


def _next_step(rules: FragmentRules, state: State) -> int:
    return next_step(rules.rhythm, state.global_step)


def _opens_at_s(rules: FragmentRules, state: State) -> float:
    # The last round takes what there is, and the first one is awaited by everybody: pace holds back
    # only what would follow too soon. Without it whoever is quickest starts a race of small rounds,
    # which costs quality (P, Table 5).
    if state.stopping_at_s or not state.closed_at_s:
        return 0.0
    # The clock's own interval, not H: offsets make the first one shorter.
    interval_steps = _next_step(rules, state) - state.global_step
    return state.closed_at_s + policy.pace_s(rules, step_times(state), interval_steps)


def _grace_ends_s(rules: FragmentRules, state: State) -> float:
    # Lockstep waits for all: it is to equal synchronous DiLoCo (invariant 7), which grace would cut
    # short. The deadline stays, for those who die in the round.
    hard_s = state.opened_at_s + rules.quorum.deadline_s
    if rules.lockstep:
        return hard_s
    grace_s = policy.grace_s(rules, step_times(state), state.quorum_s, state.sync_s)
    return min(hard_s, state.quorum_at_s + grace_s)


def go_on(rules: FragmentRules, state: State, now_s: float) -> Result:
    """What may follow from a change of the rules, or of what the machine stands at."""
    state, effects = fetch_waiting(rules, state, now_s)
    state, more = advance(rules, state, now_s)
    return state, effects + more


def fetch_waiting(rules: FragmentRules, state: State, now_s: float) -> Result:
    """Fetch what waits, if a round is open or may open now."""
    if not takes_updates(rules, state, now_s):
        return state, ()
    # In the order of announcement, all at once: which is merged first is then a matter of the
    # store, and stands in the record (invariant 5).
    waiting = [(key, pending) for key, pending in state.pending.items() if not pending.fetching]
    if not waiting:
        return state, ()
    fetching = {key: pending._replace(fetching=True) for key, pending in waiting}
    state = state._replace(pending={**state.pending, **fetching})
    return state, tuple(Fetch(key, pending.manifest) for key, pending in waiting)


def advance(rules: FragmentRules, state: State, now_s: float) -> Result:
    """Close the round if it is complete; begin the grace window if the quorum is reached."""
    if state.phase == "closing" or state.final:
        return state, ()
    if state.stopping_at_s:
        # The run's last round has another rule of completeness: nobody is left to be fair to but
        # those with something unsent.
        return _advance_to_end(state, now_s)
    if state.phase == "idle":
        return state, ()
    live = live_members(state)
    least = rules.quorum.min_learners
    if state.phase == "open":
        # A fleet smaller than K must still make versions; in lockstep it must not.
        quorum = least if rules.lockstep else policy.effective_quorum(rules.quorum, len(live))
        if len(contributors(state)) >= quorum:
            # Time spent waiting for the quorum is taken off the grace window (P, Eq. 3).
            quorum_s = policy.ema(state.quorum_s, max(0.0, now_s - state.opened_at_s))
            state = state._replace(phase="grace", quorum_at_s=now_s, quorum_s=quorum_s)
    # All who could still add something have: waiting on would cost everybody time and bring
    # nobody's work. A rejected update counts as an answer, since its sender learns of it from this
    # very record and sends nothing before.
    those = answered(state)
    if those >= live.keys() and (len(those) >= least or not rules.lockstep):
        return close(state, now_s, "complete")
    return state, ()


def _advance_to_end(state: State, now_s: float) -> Result:
    """After the stop: a round closes once nobody can add to it before it has closed.

    A learner that has an update in this round sends its last one only after the record. And what
    was met before this life began must first be met again.
    """
    # What this life has not read again yet may hold updates that the life before it had promised an
    # answer (invariant 2).
    if state.pending or not memory.has_met_all(state):
        return state, ()
    awaited = {name for name, member in live_members(state).items() if not member.final}
    if not awaited:
        return close(state, now_s, "final", final=True)
    if state.admitted and awaited <= answered(state):
        return close(state, now_s, "complete")
    return state, ()


def close(state: State, now_s: float, reason: str, *, final: bool = False) -> Result:
    """Close the round, or what waits without one; its record is to be committed."""
    # A verdict makes no version, but it is a record by the same compare-and-swap: no stale owner
    # can reject what its successor merges (invariant 2).
    merged = bool(state.admitted)
    state = state._replace(
        phase="closing",
        final=final,
        # So much is this record's; events that come while it is being stored are the next one's.
        committing=(len(state.rejected), len(state.observations)),
        # Pace counts from version to version: a rejection between two rounds must not delay the
        # next.
        closed_at_s=now_s if merged else state.closed_at_s,
    )
    what: Literal["version", "verdict"] = "version" if merged else "verdict"
    return state, (Commit(what, reason, final, now_s, state),)


def reject(rules: FragmentRules, state: State, refused: Refused, now_s: float) -> Result:
    """Note a rejection; with no round open it gets a record of its own, else the round's."""
    # Outside of a round a rejection costs a record, which is what a sender of rubbish would spend
    # for us.
    state = admission.charge(rules, state, refused, now_s)
    state = state._replace(rejected=(*state.rejected, refused))
    if state.phase == "idle":
        # At once: the sender has its update in flight until a record says what became of it, and no
        # round may come that could carry it.
        return close(state, now_s, "rejections", final=state.final)
    return advance(rules, state, now_s)


def refuse_late(state: State) -> State:
    """At the end's deadline: what is not verified by now is rejected."""
    # Refused and not dropped: the ledger of tokens adds up at the end as well (invariant 4).
    late = tuple(
        Refused(pending.manifest, pending.stream_seq, Reason.LATE, "not here when the run ended")
        for pending in state.pending.values()
    )
    return state._replace(pending={}, rejected=state.rejected + late)
