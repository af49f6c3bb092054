"""The state machine of one fragment: it decides what happens to each update, event by event.

    idle --announced, and pace allows--> open --quorum announced--> grace --time--> cut
    any of these --every update read, or every one before the cut--> closing --version made--> idle

Updates are read and merged in every phase, from the moment the last version is made. That version's
record is stored and published meanwhile; the next record begins once that record is committed.

Rules of the core:
- `step(rules, state, event) -> (state, effects)` is the whole interface. No IO, clock, randomness
  or logging; times come in with events, in seconds of Unix time, and `rounds.deadline` says
  when the machine wants a `Timer`.
- Rounds follow the owner's clock alone: a message of the tape happens at `state.now_s`, the time of
  the owner's last event. The server's clock, which may differ by hours, only measures intervals
  between messages of one sender.
- The machine relies on messages being well-formed (`common/protocol/wire`), and on none of their
  claims.
- An update leaves the machine exactly once: in the `Commit` of a record, merged or rejected. Until
  that record is committed its stream sequence stays at or above the position in the record, so
  that an owner that recovers from the record receives the update again.
- Every input of a decision is on the tape, or is noted in `observations`, which go into the next
  record: so a reader of the tape can make the same decisions.
- In phase `closing` the arrays take the outer step. The machine's driver (the owner of a fragment
  in `tenure.py`, `diloco/plan/virtual_time.py`, the what-if of a replay) sends no event before
  `Made`, and then the events that came meanwhile, in order. While the record is stored and
  published the machine receives events as usual.
"""

from collections.abc import Callable
from typing import Any

from diloco.aggregator.core import admission_and_credit, events, memory, rounds
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.events import Discard, Ignored, Merge, Result
from diloco.aggregator.core.members import LIVES, Member
from diloco.aggregator.core.round_and_weight_formulas import FragmentRules
from diloco.aggregator.core.state import (
    NOBODY,
    State,
    Storing,
    awaiting,
    passed_on,
    with_admitted,
    with_member,
    with_observation,
    with_pending,
    with_quarantined,
    without_pending,
    without_round,
)
from diloco.aggregator.core.updates import (
    Admitted,
    Pending,
    UpdateId,
    refuse,
)
from diloco.common.protocol import wire
from diloco.common.protocol.reasons import Reason

# After so many observations a record is published for them, so that no record gets too long. Each
# update that is read is one, so that a large fleet has more of them: a round is to be one record.
OBSERVATIONS, MOST_OBSERVATIONS = 1 << 13, 1 << 15
# A tape message this many seconds after the last event is preceded by a `Tick` with the time, which
# the next record states.
TICK_S = 0.1


def step(rules: FragmentRules, state: State, event: events.Event) -> Result:
    """Returns the state after `event`, and the effects that the driver must carry out, in order."""
    if isinstance(event, events.FromTape):
        # The tape may deliver a message again, out of order. It counted at its own place only: an
        # update ignored there stays ignored, and a quarantine lifted since is not renewed (a reader
        # of the tape, who receives it once, decides the same).
        if event.stream_seq <= state.seen_seq:
            return state, ()
        state = state._replace(seen_seq=event.stream_seq)
    state, effects = _HANDLERS[type(event)](rules, state, event)
    count = len(state.observations)
    if count < OBSERVATIONS or count < observations_limit(len(state.members)):
        return state, effects
    if state.phase == "closing" or state.storing:
        return state, effects
    state, more = rounds.give_verdicts(
        rules, state, state.observations[-1].at_s, "observations", final=state.final
    )
    return state, effects + more


def observations_limit(members: int) -> int:
    """Returns how many observations a record is published for, given the learners known so far."""
    return min(max(OBSERVATIONS, 2 * members), MOST_OBSERVATIONS)


def step_at(rules: FragmentRules, state: State, event: events.Event, now_s: float) -> Result:
    """Calls `step` for an event that its driver received at `now_s`.

    A tape message does not state when it was received, but rounds follow that time. So if the
    machine's last event is more than `TICK_S` seconds old, a `Tick` with `now_s` comes first.
    """
    if isinstance(event, events.FromTape) and now_s - state.now_s > TICK_S:
        state, _ = step(rules, state, events.Tick(now_s))
    return step(rules, state, event)


def _on_joined(rules: FragmentRules, state: State, event: events.Joined) -> Result:
    # After a recovery joins are read again that the memory has already. Only the newest incarnation
    # counts, so an older join read later changes nothing (invariant 3: the same tape gives the same
    # state, however often it is read).
    known = state.members.get(event.learner)
    if known and known.incarnation >= event.stream_seq:
        return state, ()
    # A new incarnation starts with the speed and weight of the one before, so that pace and grace
    # do not jump at each restart. Its offences stay too, or a crash would erase them.
    if known is not None:
        # It may now send what it had not sent when it left, so its time counts on. `missed` stays:
        # rounds do not wait again for a learner that only joins.
        member = known._replace(incarnation=event.stream_seq, live=True, left=False, final=False)
    else:
        member = Member(event.stream_seq, heard_at_s=event.stored_at_s, read_at_s=state.now_s)
    if not event.holds or rules.module in event.holds:
        if known is not None and not known.holds:
            # It has nothing unsent of a fragment that it did not hold: its time begins now.
            member = member._replace(
                heard_at_s=event.stored_at_s, read_at_s=state.now_s, unused_s=0.0
            )
        return with_member(state, event.learner, member), ()
    # As one that has left this fragment: no round waits for it, and no median counts it.
    not_holding = (*member.not_holding, event.stream_seq)[-LIVES:]
    member = member._replace(live=False, left=True, not_holding=not_holding)
    return rounds.advance(rules, with_member(state, event.learner, member), state.now_s)


def _on_departed(rules: FragmentRules, state: State, event: events.Departed) -> Result:
    member = state.members.get(event.learner)
    # A late leave of an older life must not end the newer one.
    if member is None or member.incarnation != event.incarnation:
        return state, ()
    # `left` in addition to `live`, so that a heartbeat still on its way does not revive a learner
    # that left, for which the round would then wait.
    state = with_member(state, event.learner, member._replace(live=False, left=True))
    return rounds.advance(rules, state, state.now_s)


def _on_finished(rules: FragmentRules, state: State, event: events.Finished) -> Result:
    member = state.members.get(event.learner)
    if member is None or member.incarnation != event.incarnation:
        return state, ()
    # This learner had nothing unsent of the fragment: the last round need not wait for an update
    # that never comes.
    state = with_member(state, event.learner, member._replace(final=True))
    return rounds.advance(rules, state, state.now_s)


def _on_announced(rules: FragmentRules, state: State, event: events.Announced) -> Result:
    manifest = event.manifest
    update = UpdateId(manifest.learner, manifest.incarnation, manifest.seq)
    # First of all, as decoding alone costs us time, whatever the message says.
    state, allowed = admission_and_credit.spend(rules, state, manifest.learner, event)
    if not allowed:
        return state, (_ignored(manifest, Reason.RATE),)
    if manifest.epoch != rules.epoch:
        # The incarnation belongs to another tape, so it gets no mark here.
        return state, (_ignored(manifest, Reason.EPOCH),)
    # Learners announce again in case a message was lost, and the tape may deliver twice: an update
    # gets one verdict, in one record (invariant 2).
    if memory.is_known(state, update):
        return state, ()
    # An incarnation's mark is its highest seq with a verdict: of two updates in flight, a verdict
    # on the later one first would lose the earlier one (invariants 2 and 4).
    if admission_and_credit.overtakes(state, update):
        return state, (_ignored(manifest, Reason.IN_FLIGHT),)
    # Judged before its shards are read: refusing an update by its manifest must cost no reading.
    verdict = admission_and_credit.judge(rules, state, event)
    if verdict is not None:
        refused = refuse(manifest, event.stream_seq, *verdict)
        return rounds.reject(rules, state, refused, state.now_s)
    member = state.members[manifest.learner]
    given = state.credits.get(update)
    if given is not None:
        # The memory has counted this update already. Counting it again would make the memory differ
        # from that of a machine that never died (invariant 3).
        member = member._replace(final=member.final or manifest.final)
    else:
        given = admission_and_credit.credit(rules, state, manifest, event.stored_at_s)
        # An update of an older incarnation: over the allowance when it was read before a recovery.
        if manifest.incarnation == member.incarnation:
            member = admission_and_credit.observed(rules, state, manifest, given, event.stored_at_s)
    state = with_member(state, manifest.learner, member)
    waits = Pending(manifest, event.stream_seq, state.now_s, event.stored_at_s, given)
    state = with_pending(state, update, waits)
    return rounds.go_on(rules, state, state.now_s)


def _ignored(manifest: wire.Manifest, reason: Reason) -> Ignored:
    return Ignored(manifest.learner, reason, f"seq {manifest.seq}")


def _on_undecoded(rules: FragmentRules, state: State, event: events.Undecoded) -> Result:
    state, allowed = admission_and_credit.spend(rules, state, event.learner, event)
    if allowed:
        return state, ()
    return state, (Ignored(event.learner, Reason.RATE, f"{event.size_bytes} bytes not decoded"),)


def _on_stopped(rules: FragmentRules, state: State, _event: events.Stopped) -> Result:
    # Only the first stop counts: the final deadline is relative to it, and must not move when the
    # message is read again.
    if state.stopping_at_s or state.final:
        return state, ()
    state = state._replace(stopping_at_s=state.now_s)
    return rounds.go_on(rules, state, state.now_s)


def _on_changed(rules: FragmentRules, state: State, event: events.Changed) -> Result:
    # The memory names the settings in force; older messages, read again after a recovery, do not
    # apply any more.
    if event.stream_seq <= state.settings_seq:
        return state, ()
    return rounds.go_on(rules, state._replace(settings_seq=event.stream_seq), state.now_s)


def _on_quarantined(rules: FragmentRules, state: State, event: events.Quarantined) -> Result:
    one = frozenset({event.learner})
    if event.active:
        state = with_quarantined(state, state.quarantined | one)
        if event.learner in state.admitted.senders:
            # An update cannot be subtracted exactly, so the sum is made again without it.
            state, effects = rounds.go_on(rules, awaiting(state), state.now_s)
            return state, (Discard(), *effects)
    else:
        state = with_quarantined(state, state.quarantined - one)
        member = state.members.get(event.learner)
        # A released learner starts with no offences, or its next mistake would shut it out again.
        if member is not None:
            state = with_member(state, event.learner, member._replace(offences=0))
    # Rounds do not wait for a quarantined learner.
    return rounds.advance(rules, state, state.now_s)


def _on_fetched(rules: FragmentRules, state: State, event: events.Fetched) -> Result:
    # It is answered already: the run's end rejected it while its shards were being read.
    pending = state.pending.get(event.update)
    if pending is None:
        return state, ()
    # Arrival and norm are not on the tape, so a replay needs the observation (invariant 5).
    state = with_observation(state, "fetched", event.at_s, event.update, event.norm)
    # Judged again, since it waited: meanwhile there may have been a version, a rollback or a
    # quarantine, and only updates that fit the current version are merged.
    manifest = pending.manifest
    wrong = admission_and_credit.quarantined(state, manifest) or admission_and_credit.wrong_base(
        rules, state, manifest
    )
    if wrong is not None:
        refused = refuse(manifest, pending.stream_seq, *wrong)
        return rounds.reject(rules, without_pending(state, event.update), refused, event.at_s)
    # The norm is measured, not claimed, so it limits an update's effect whatever the manifest says.
    # Too long updates are clipped, never rejected: norms fall by orders of magnitude as a model
    # converges, and honest learners differ.
    clip = admission_and_credit.clip(
        rules.bounds, state, manifest.learner, pending.credit, event.norm
    )
    return _admit(rules, state, pending, clip, event)


def _admit(
    rules: FragmentRules, state: State, pending: Pending, clip: float, event: events.Fetched
) -> Result:
    """Merges a verified update, then advances the round."""
    manifest = pending.manifest
    staleness = state.version - manifest.base_version
    admitted = Admitted(
        manifest,
        pending.stream_seq,
        pending.credit,
        staleness,
        formulas.discount(rules.staleness, staleness),
        clip,
        event.norm,
        pending.announced_at_s,
        pending.stored_at_s,
    )
    state = with_admitted(state, event.update, admitted)
    state, more = rounds.advance(rules, state, event.at_s)
    return state, (Merge(admitted), *more)


def _on_failed(rules: FragmentRules, state: State, event: events.Failed) -> Result:
    pending = state.pending.get(event.update)
    if pending is None:
        return state, ()
    # A record tells the sender: an update with bad shards must not stay in flight for ever
    # (invariant 2).
    state = with_observation(state, "failed", event.at_s, event.update, 0.0)
    refused = refuse(pending.manifest, pending.stream_seq, event.reason, event.detail)
    return rounds.reject(rules, without_pending(state, event.update), refused, event.at_s)


def _on_addition_failed(rules: FragmentRules, state: State, event: events.AdditionFailed) -> Result:
    """Discards the round's sum, which the failed addition of an update has spoilt.

    All its updates are read and added again, the one whose addition failed last. The failure may
    be due to a lack of memory or a bug of ours, so an update is rejected only if its addition fails
    a second time while other learners' updates are added.
    """
    pending = state.pending.get(event.update)
    if pending is None:
        return state, ()
    state = with_observation(state, "broke", event.at_s, event.update, 0.0)
    others = set(state.admitted.senders) - {event.update.learner}
    again = without_pending(awaiting(state), event.update)
    if pending.broke and others:
        detail = "adding it failed twice, while others were added"
        refused = refuse(pending.manifest, pending.stream_seq, Reason.INTERNAL, detail)
        again, effects = rounds.go_on(rules, again, event.at_s)
        again, more = rounds.reject(rules, again, refused, event.at_s)
        return again, (Discard(), *effects, *more)
    # Last of all, so that the others' updates are in the sum by then.
    once_more = pending._replace(fetching=False, broke=pending.broke + 1)
    again = with_pending(again, event.update, once_more)
    again, effects = rounds.go_on(rules, again, event.at_s)
    return again, (Discard(), *effects)


def _on_liveness(rules: FragmentRules, state: State, event: events.Liveness) -> Result:
    member = state.members.get(event.learner)
    if member is None or member.incarnation != event.incarnation or member.left:
        return state, ()
    if member.live == event.live or len(state.observations) >= MOST_OBSERVATIONS:
        # Dropped, as it will be reported again: observations pile up while no record can be stored.
        return state, ()
    about = UpdateId(event.learner, event.incarnation, 0)
    state = with_observation(state, "live" if event.live else "dead", event.at_s, about, 0.0)
    state = with_member(state, event.learner, member._replace(live=event.live))
    return rounds.advance(rules, state, event.at_s)


def _on_timer(rules: FragmentRules, state: State, event: events.Timer) -> Result:
    due = rounds.deadline(rules, state)
    # An event since then may have moved the deadline.
    if due is None or event.at_s < due:
        return state, ()
    state = with_observation(state, "timer", event.at_s, NOBODY, 0.0)
    if state.cut is not None:
        return rounds.advance(rules, passed_on(state), event.at_s)
    if state.stopping_at_s:
        # The run ends even with updates missing: a learner that died before its last update must
        # not hold up the run.
        return rounds.cut(state, "deadline", final=True)
    if state.phase == "idle":
        return rounds.advance(rules, state, event.at_s)
    return rounds.cut(state, "grace" if state.phase == "grace" else "deadline")


def _on_tick(_rules: FragmentRules, state: State, event: events.Tick) -> Result:
    return with_observation(state, "tick", event.at_s, NOBODY, 0.0), ()


def _on_cut_known(rules: FragmentRules, state: State, event: events.CutKnown) -> Result:
    cut = state.cut
    if cut is None or cut.known_at_s:
        return state, ()
    # The leader's answer is not on the tape, so a replay needs the observation (invariant 5).
    about = UpdateId("", 0, event.stream_seq)
    state = with_observation(state, "cut", event.at_s, about, 0.0)
    known = cut._replace(stream_seq=event.stream_seq, known_at_s=event.at_s)
    return rounds.go_on(rules, state._replace(cut=known), event.at_s)


def _on_made(rules: FragmentRules, state: State, event: events.Made) -> Result:
    resolved = state.rejected
    after = memory.after_record(state)
    state = without_round(after)._replace(
        version=state.version + 1,
        global_step=rounds.global_step_after(rules, state),
        view_digest=event.view_digest,
        phase="idle",
        observations=(),
        storing=Storing(True, admission_and_credit.offenders(rules, after, resolved)),
    )
    # The next round begins before the record is committed, so that a slow store delays no reading.
    # If another owner's record is committed instead, this tenure ends, and its decisions are
    # dropped (invariants 1 and 3).
    state = with_observation(state, "made", event.at_s, NOBODY, 0.0)
    return rounds.go_on(rules, state, event.at_s)


def _on_committed(rules: FragmentRules, state: State, event: events.Committed) -> Result:
    assert state.storing is not None
    storing, took_s = state.storing, formulas.elapsed_s(state.closed_at_s, event.at_s)
    # The grace window leaves room for the time of a commit, as learners cannot adopt before it.
    sync_s = formulas.sync_s(state.sync_s, took_s) if storing.makes_version else state.sync_s
    state = state._replace(record_seq=event.record_seq, storing=None, sync_s=sync_s)
    state = with_observation(state, "committed", event.at_s, NOBODY, 0.0)
    state, effects = rounds.go_on(rules, state, event.at_s)
    # After the record, so that a quarantine is never on the tape before the rejections behind it.
    return state, storing.offenders + effects


_HANDLERS: dict[type, Callable[[FragmentRules, State, Any], Result]] = {
    events.Joined: _on_joined,
    events.Departed: _on_departed,
    events.Finished: _on_finished,
    events.Announced: _on_announced,
    events.Undecoded: _on_undecoded,
    events.Stopped: _on_stopped,
    events.Changed: _on_changed,
    events.Quarantined: _on_quarantined,
    events.Fetched: _on_fetched,
    events.Failed: _on_failed,
    events.AdditionFailed: _on_addition_failed,
    events.Liveness: _on_liveness,
    events.Timer: _on_timer,
    events.CutKnown: _on_cut_known,
    events.Made: _on_made,
    events.Tick: _on_tick,
    events.Committed: _on_committed,
}
