"""What happens to each update of one fragment, event by event.

    idle --first verified update, pace allows--> open --quorum--> grace --deadline or all in-->
    closing --record committed--> idle

Rules of the core:
- `step(rules, state, event) -> (state, effects)` is the whole interface. No IO, clock, randomness
  or logging; times come in with events, in seconds since the epoch, and `rounds.deadline` says
  when the machine wants a `Timer`.
- The machine trusts that messages were decoded (`common/wire.py`), and nothing else in them.
- An update leaves the machine exactly once: in the `Commit` of a record, merged or rejected. Until
  that record is committed its stream sequence stays at or above the position in the record, so
  that whoever recovers from the record meets it again.
- What the machine decides from is either on the tape or noted in `observations`, which go into
  the next record: a reader of the tape can decide the same again.
- In `closing` nothing is decided but what needs no base: messages of the tape are taken, updates
  wait as pending and are judged against the version that is being committed once it stands,
  rejections go into the next record. So a driver may go on reading the tape while it commits.
  Today none does: the owner of a fragment (`tenure.py`), the planner and the what-if of a replay
  all give the machine its next event after `Committed`, in the order in which they came.
"""

from collections.abc import Callable
from typing import Any

from diloco.aggregator.core import admission, events, memory, policy, rounds
from diloco.aggregator.core.effects import Effect, Ignored, Merge, OpenRound, Result
from diloco.aggregator.core.policy import FragmentRules
from diloco.aggregator.core.state import (
    NOBODY,
    Admitted,
    Member,
    Pending,
    Refused,
    State,
    UpdateId,
    with_member,
    with_observation,
    with_pending,
    with_seen,
    without_pending,
)
from diloco.common.reasons import Reason


def step(rules: FragmentRules, state: State, event: events.Event) -> Result:
    """The state after `event`, and what the driver must do, in order."""
    return _HANDLERS[type(event)](rules, state, event)


def _on_joined(_rules: FragmentRules, state: State, event: events.Joined) -> Result:
    state = with_seen(state, event.stream_seq)
    # Whoever recovers meets joins again that its memory has; and a learner's newest life is the one
    # that counts, so that an older join, met later, takes nothing back (invariant 3: the same tape
    # gives the same state, however often it is read).
    known = state.members.get(event.learner)
    if known and known.incarnation >= event.stream_seq:
        return state, ()
    # A new life is believed to be as fast and as heavy as the one before until it says otherwise:
    # pace and grace must not jump at each restart. Its offences stay as well, or a crash would wash
    # them off.
    member = Member(
        event.stream_seq,
        step_time_s=known.step_time_s if known else 0.0,
        weight=known.weight if known else 0.0,
        heard_at_s=event.stored_at_s,
        offences=known.offences if known else 0,
    )
    return with_member(state, event.learner, member), ()


def _on_departed(rules: FragmentRules, state: State, event: events.Departed) -> Result:
    state = with_seen(state, event.stream_seq)
    member = state.members.get(event.learner)
    # A leave that travelled slowly must not end the life that came after it.
    if member is None or member.incarnation != event.incarnation:
        return state, ()
    # `left` beside `live`: a heartbeat that is still on its way must not bring it back, and the
    # round would wait for somebody who said goodbye.
    state = with_member(state, event.learner, member._replace(live=False, left=True))
    return rounds.advance(rules, state, event.stored_at_s)


def _on_finished(rules: FragmentRules, state: State, event: events.Finished) -> Result:
    state = with_seen(state, event.stream_seq)
    member = state.members.get(event.learner)
    if member is None or member.incarnation != event.incarnation:
        return state, ()
    # This learner had nothing unsent of the fragment: the last round need not wait for an update
    # that never comes.
    state = with_member(state, event.learner, member._replace(final=True))
    return rounds.advance(rules, state, event.stored_at_s)


def _on_announced(rules: FragmentRules, state: State, event: events.Announced) -> Result:
    manifest = event.manifest
    update = UpdateId(manifest.learner, manifest.incarnation, manifest.seq)
    state = with_seen(state, event.stream_seq)
    if manifest.epoch != rules.epoch:
        # Its incarnation is of another tape: nothing here may be marked with it.
        return state, (Ignored(manifest, Reason.EPOCH),)
    # Announcing again is how a learner makes up for a lost message, and the tape itself delivers
    # more than once: an update has one answer, in one record (invariant 2).
    if memory.is_known(state, update):
        return state, ()
    # The mark of a life is its highest resolved seq: were two under way, resolving the later one
    # first would lose the earlier (invariants 2 and 4).
    if admission.overtakes(state, update):
        return state, (Ignored(manifest, Reason.IN_FLIGHT),)
    # What the record before this life had met was paid for then: paid again, a crash of ours would
    # shut out an honest learner.
    if event.stream_seq > state.known_seq:
        state, allowed = admission.allow(rules, state, manifest.learner, event.stored_at_s)
        if not allowed:
            return state, (Ignored(manifest, Reason.RATE),)
    # Judged before its shards are read: an update that can be refused by its manifest alone must
    # cost no bytes.
    verdict = admission.judge(rules, state, event)
    if verdict is not None:
        refused = Refused(manifest, event.stream_seq, *verdict)
        return rounds.reject(rules, state, refused, event.stored_at_s)
    member = state.members[manifest.learner]
    current = manifest.incarnation == member.incarnation
    # The averages in the record have this update already. Taken twice they would differ from those
    # of a machine that never died (invariant 3).
    if current and event.stream_seq <= state.known_seq:
        member = member._replace(final=member.final or manifest.final)
    elif current:
        member = member._replace(
            final=member.final or manifest.final,
            step_time_s=policy.ema(member.step_time_s, manifest.step_time_s),
            weight=policy.ema(member.weight, policy.weight(manifest.tokens, manifest.steps)),
            heard_at_s=max(member.heard_at_s, event.stored_at_s),
        )
    state = state._replace(
        members={**state.members, manifest.learner: member},
        pending={**state.pending, update: Pending(manifest, event.stream_seq, fetching=False)},
    )
    # By the tape's time and not by ours: whoever reads this tape later opens the round at the same
    # message.
    return rounds.fetch_waiting(rules, state, event.stored_at_s)


def _on_stopped(rules: FragmentRules, state: State, event: events.Stopped) -> Result:
    state = with_seen(state, event.stream_seq)
    # The first word counts: the last deadline is reckoned from it, and must not move when the
    # message is met again.
    if state.stopping_at_s or state.final:
        return state, ()
    state = state._replace(stopping_at_s=event.stored_at_s)
    return rounds.go_on(rules, state, event.stored_at_s)


def _on_changed(rules: FragmentRules, state: State, event: events.Changed) -> Result:
    state = with_seen(state, event.stream_seq)
    # The memory says which settings a record was made under; older ones, met again after a
    # recovery, are not in force any more.
    if event.stream_seq <= state.settings_seq:
        return state, ()
    return rounds.go_on(rules, state._replace(settings_seq=event.stream_seq), event.stored_at_s)


def _on_quarantined(rules: FragmentRules, state: State, event: events.Quarantined) -> Result:
    state = with_seen(state, event.stream_seq)
    one = frozenset({event.learner})
    if event.active:
        state = state._replace(quarantined=state.quarantined | one)
    else:
        state = state._replace(quarantined=state.quarantined - one)
        member = state.members.get(event.learner)
        # An operator who lets a learner in again gives it a fresh start, or its next mistake would
        # shut it out.
        if member is not None:
            state = with_member(state, event.learner, member._replace(offences=0))
    # A round does not wait for somebody who is shut out.
    return rounds.advance(rules, state, event.stored_at_s)


def _on_fetched(rules: FragmentRules, state: State, event: events.Fetched) -> Result:
    # Its answer stands already: the run's end refused it while its shards were on their way.
    pending = state.pending.get(event.update)
    if pending is None:
        return state, ()
    # When shards were here, and with which norm, is on no tape: a replay must be told (invariant
    # 5).
    state = with_observation(state, "fetched", event.at_s, event.update, event.norm)
    if not rounds.takes_updates(rules, state, event.at_s):
        # Too late for its round; its shards are read again when the next one opens.
        return with_pending(state, event.update, pending._replace(fetching=False)), ()
    # Once more, since it waited: meanwhile a version may have been committed, a rollback or a
    # quarantine. What is merged fits the version that is built on now.
    manifest = pending.manifest
    wrong = admission.quarantined(state, manifest) or admission.wrong_base(rules, state, manifest)
    if wrong is not None:
        refused = Refused(manifest, pending.stream_seq, *wrong)
        return rounds.reject(rules, without_pending(state, event.update), refused, event.at_s)
    # The norm is measured, not claimed: the one bound on an update's effect that no manifest can
    # talk around.
    clip = policy.judge_norm(rules.bounds, state.norms, event.norm, manifest.steps)
    if clip is None:
        detail = f"norm {event.norm:.3g} over {manifest.steps} steps is far above the median"
        refused = Refused(manifest, pending.stream_seq, Reason.NORM, detail)
        return rounds.reject(rules, without_pending(state, event.update), refused, event.at_s)
    return _admit(rules, without_pending(state, event.update), pending, clip, event)


def _admit(
    rules: FragmentRules, state: State, pending: Pending, clip: float, event: events.Fetched
) -> Result:
    """Merge a verified update, in a round that is opened for it if there is none."""
    manifest = pending.manifest
    staleness = state.version - manifest.base_version
    admitted = Admitted(
        manifest,
        pending.stream_seq,
        policy.weight(manifest.tokens, manifest.steps),
        staleness,
        policy.discount(rules.staleness, staleness),
        clip,
        event.norm,
    )
    opened: tuple[Effect, ...] = ()
    if state.phase == "idle":
        # Not before something can be merged: the deadline of a round that is open runs, and an
        # update whose shards never come must not start it.
        opened = (OpenRound(state.version + 1),)
        state = state._replace(phase="open", opened_at_s=event.at_s, quorum_at_s=0.0)
    # The median is of norms as they were merged, so that one huge update cannot raise the bar for
    # the next; per step, so that the honest work of an outage is judged like any other.
    norms = (*state.norms, clip * event.norm / manifest.steps)[-policy.NORM_WINDOW :]
    state = state._replace(admitted=(*state.admitted, admitted), norms=norms)
    state, more = rounds.advance(rules, state, event.at_s)
    return state, (*opened, Merge(admitted), *more)


def _on_failed(rules: FragmentRules, state: State, event: events.Failed) -> Result:
    pending = state.pending.get(event.update)
    if pending is None:
        return state, ()
    # The sender is told through the record: an update whose shards are bad must not stay in flight
    # for ever (invariant 2).
    state = with_observation(state, "failed", event.at_s, event.update, 0.0)
    refused = Refused(pending.manifest, pending.stream_seq, event.reason, event.detail)
    return rounds.reject(rules, without_pending(state, event.update), refused, event.at_s)


def _on_liveness(rules: FragmentRules, state: State, event: events.Liveness) -> Result:
    member = state.members.get(event.learner)
    if member is None or member.incarnation != event.incarnation or member.left:
        return state, ()
    # A repeated word is no observation: records must not grow with the number of heartbeats.
    if member.live == event.live:
        return state, ()
    about = UpdateId(event.learner, event.incarnation, 0)
    state = with_observation(state, "live" if event.live else "dead", event.at_s, about, 0.0)
    state = with_member(state, event.learner, member._replace(live=event.live))
    return rounds.advance(rules, state, event.at_s)


def _on_timer(rules: FragmentRules, state: State, event: events.Timer) -> Result:
    due = rounds.deadline(rules, state)
    # An event that was taken meanwhile may have moved the deadline.
    if due is None or event.at_s < due:
        return state, ()
    state = with_observation(state, "timer", event.at_s, NOBODY, 0.0)
    if state.stopping_at_s:
        # The end comes whatever is missing: a learner that died with its last update on its way
        # must not hold up a whole run.
        return rounds.close(rounds.refuse_late(state), event.at_s, "deadline", final=True)
    if state.phase == "idle":
        return rounds.fetch_waiting(rules, state, event.at_s)
    return rounds.close(state, event.at_s, "grace" if state.phase == "grace" else "deadline")


def _on_committed(rules: FragmentRules, state: State, event: events.Committed) -> Result:
    published = bool(state.admitted)
    # The grace window leaves room for what a commit takes, since learners cannot adopt before.
    took_s = max(0.0, event.at_s - state.closed_at_s)
    rejections, observations = state.committing
    resolved = state.rejected[:rejections]
    # Only now: until the record stands, a crash must find the machine as it was before the close
    # (invariants 1 and 3). What came in meanwhile is beyond `committing` and goes into the next
    # record.
    state = memory.after_record(state)._replace(
        version=state.version + published,
        global_step=rounds.global_step_after(rules, state) if published else state.global_step,
        record_seq=event.record_seq,
        view_digest=event.view_digest,
        phase="idle",
        admitted=(),
        rejected=state.rejected[rejections:],
        observations=state.observations[observations:],
        committing=(0, 0),
        sync_s=policy.ema(state.sync_s, took_s) if published else state.sync_s,
    )
    # A clock of ours again, and `sync_s` follows from it.
    state = with_observation(state, "committed", event.at_s, NOBODY, 0.0)
    # After the record, since the word on the tape must never stand without the rejections that led
    # to it.
    offenders = admission.offenders(rules, state, resolved)
    # What was rejected while this record was being stored has waited for long enough: its senders
    # are blocked until they hear.
    if state.rejected:
        state, effects = rounds.close(state, event.at_s, "rejections", final=state.final)
    else:
        state, effects = rounds.go_on(rules, state, event.at_s)
    return state, offenders + effects


_HANDLERS: dict[type, Callable[[FragmentRules, State, Any], Result]] = {
    events.Joined: _on_joined,
    events.Departed: _on_departed,
    events.Finished: _on_finished,
    events.Announced: _on_announced,
    events.Stopped: _on_stopped,
    events.Changed: _on_changed,
    events.Quarantined: _on_quarantined,
    events.Fetched: _on_fetched,
    events.Failed: _on_failed,
    events.Liveness: _on_liveness,
    events.Timer: _on_timer,
    events.Committed: _on_committed,
}
