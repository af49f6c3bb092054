"""The state machine of one fragment: it decides what happens to each update, event by event.

    idle --announced, and pace allows--> open --quorum announced--> grace --time--> cut
    any of these --all in, or all that the cut has is read--> closing --version made--> idle

Updates are read and merged in every phase, from the moment the last version is made. Its record is
stored and published meanwhile; the next one begins once it stands.

Rules of the core:
- `step(rules, state, event) -> (state, effects)` is the whole interface. No IO, clock, randomness
  or logging; times come in with events, in seconds since the epoch, and `rounds.deadline` says
  when the machine wants a `Timer`.
- Rounds follow the owner's clock alone: a message of the tape happens at `state.now_s`, the last
  time that the owner told. When the server stored it, by a clock that may differ by hours, counts
  only against other such times of one sender.
- The machine trusts that messages were decoded (`common/protocol/wire`), and nothing else in them.
- An update leaves the machine exactly once: in the `Commit` of a record, merged or rejected. Until
  that record is committed its stream sequence stays at or above the position in the record, so
  that whoever recovers from the record meets it again.
- What the machine decides from is either on the tape or noted in `observations`, which go into
  the next record: a reader of the tape can decide the same again.
- In `closing` the arrays take the outer step. Whoever drives the machine (the owner of a fragment
  in `tenure.py`, `diloco/plan/virtual_time.py`, the what-if of a replay) tells it nothing before
  `Made`, and then what came meanwhile, in order. While the record is stored and published the
  machine takes everything as at any other time.
"""

from collections.abc import Callable
from typing import Any

from diloco.aggregator.core import admission, events, memory, policy, rounds
from diloco.aggregator.core.events import Discard, Ignored, Merge, Result
from diloco.aggregator.core.members import Member
from diloco.aggregator.core.policy import FragmentRules
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

# So many observations get a record of their own, lest one of a long wait be too long to be read.
OBSERVATIONS = 1 << 13
# A message of the tape that comes so much later than what was last told brings the time with it:
# each such time stands in the next record.
TICK_S = 0.1


def step(rules: FragmentRules, state: State, event: events.Event) -> Result:
    """The state after `event`, and what the driver must do, in order."""
    if isinstance(event, events.FromTape):
        # The tape may deliver a message again, out of its order. What it said counted where it
        # stands: an update that was in the way then is no new one, and a quarantine that was lifted
        # since is none (a reader of the tape, who meets it once, decides the same).
        if event.stream_seq <= state.seen_seq:
            return state, ()
        state = state._replace(seen_seq=event.stream_seq)
    state, effects = _HANDLERS[type(event)](rules, state, event)
    if len(state.observations) < OBSERVATIONS or state.phase == "closing" or state.storing:
        return state, effects
    state, more = rounds.give_verdicts(
        rules, state, state.observations[-1].at_s, "observations", final=state.final
    )
    return state, effects + more


def step_at(rules: FragmentRules, state: State, event: events.Event, now_s: float) -> Result:
    """As `step`, for an event that arrives at `now_s`.

    A message of the tape does not say when its reader has it, and rounds follow the reader's clock.
    """
    if isinstance(event, events.FromTape) and now_s - state.now_s > TICK_S:
        state, _ = step(rules, state, events.Tick(now_s))
    return step(rules, state, event)


def _on_joined(_rules: FragmentRules, state: State, event: events.Joined) -> Result:
    # Whoever recovers meets joins again that its memory has; and a learner's newest life is the one
    # that counts, so that an older join, met later, takes nothing back (invariant 3: the same tape
    # gives the same state, however often it is read).
    known = state.members.get(event.learner)
    if known and known.incarnation >= event.stream_seq:
        return state, ()
    # A new life is believed to be as fast and as heavy as the one before until it says otherwise:
    # pace and grace must not jump at each restart. Its offences stay as well, or a crash would wash
    # them off.
    if known is not None:
        # What it had not sent when it ended on purpose it may send now: its time counts on.
        # And whoever did nothing but join for some rounds is awaited no longer for another join.
        member = known._replace(incarnation=event.stream_seq, live=True, left=False, final=False)
    else:
        member = Member(event.stream_seq, heard_at_s=event.stored_at_s, read_at_s=state.now_s)
    return with_member(state, event.learner, member), ()


def _on_departed(rules: FragmentRules, state: State, event: events.Departed) -> Result:
    member = state.members.get(event.learner)
    # A leave that travelled slowly must not end the life that came after it.
    if member is None or member.incarnation != event.incarnation:
        return state, ()
    # `left` beside `live`: a heartbeat that is still on its way must not bring it back, and the
    # round would wait for somebody who said goodbye.
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
    # Before all else: decoding it is what costs us time, whatever it says.
    state, allowed = admission.spend(rules, state, manifest.learner, event)
    if not allowed:
        return state, (_ignored(manifest, Reason.RATE),)
    if manifest.epoch != rules.epoch:
        # Its incarnation is of another tape: nothing here may be marked with it.
        return state, (_ignored(manifest, Reason.EPOCH),)
    # Announcing again is how a learner makes up for a lost message, and the tape itself delivers
    # more than once: an update has one answer, in one record (invariant 2).
    if memory.is_known(state, update):
        return state, ()
    # The mark of a life is its highest resolved seq: were two under way, resolving the later one
    # first would lose the earlier (invariants 2 and 4).
    if admission.overtakes(state, update):
        return state, (_ignored(manifest, Reason.IN_FLIGHT),)
    # Judged before its shards are read: an update that can be refused by its manifest alone must
    # cost no bytes.
    verdict = admission.judge(rules, state, event)
    if verdict is not None:
        refused = refuse(manifest, event.stream_seq, *verdict)
        return rounds.reject(rules, state, refused, state.now_s)
    member = state.members[manifest.learner]
    given = state.credits.get(update)
    if given is not None:
        # The memory has this update already. Taken twice it would differ from that of a machine
        # that never died (invariant 3).
        member = member._replace(final=member.final or manifest.final)
    else:
        given = admission.credit(rules, state, manifest, event.stored_at_s)
        if manifest.incarnation == member.incarnation:
            member = admission.observed(rules, state, manifest, given, event.stored_at_s)
    state = with_member(state, manifest.learner, member)
    waits = Pending(manifest, event.stream_seq, state.now_s, event.stored_at_s, given)
    state = with_pending(state, update, waits)
    return rounds.go_on(rules, state, state.now_s)


def _ignored(manifest: wire.Manifest, reason: Reason) -> Ignored:
    return Ignored(manifest.learner, reason, f"seq {manifest.seq}")


def _on_undecoded(rules: FragmentRules, state: State, event: events.Undecoded) -> Result:
    state, allowed = admission.spend(rules, state, event.learner, event)
    if allowed:
        return state, ()
    return state, (Ignored(event.learner, Reason.RATE, f"{event.size_bytes} bytes not decoded"),)


def _on_stopped(rules: FragmentRules, state: State, _event: events.Stopped) -> Result:
    # The first word counts: the last deadline is reckoned from it, and must not move when the
    # message is met again.
    if state.stopping_at_s or state.final:
        return state, ()
    state = state._replace(stopping_at_s=state.now_s)
    return rounds.go_on(rules, state, state.now_s)


def _on_changed(rules: FragmentRules, state: State, event: events.Changed) -> Result:
    # The memory says which settings a record was made under; older ones, met again after a
    # recovery, are not in force any more.
    if event.stream_seq <= state.settings_seq:
        return state, ()
    return rounds.go_on(rules, state._replace(settings_seq=event.stream_seq), state.now_s)


def _on_quarantined(rules: FragmentRules, state: State, event: events.Quarantined) -> Result:
    one = frozenset({event.learner})
    if event.active:
        state = with_quarantined(state, state.quarantined | one)
        if event.learner in state.admitted.senders:
            # Nothing can be taken out of a sum: it is made again without them.
            state, effects = rounds.go_on(rules, awaiting(state), state.now_s)
            return state, (Discard(), *effects)
    else:
        state = with_quarantined(state, state.quarantined - one)
        member = state.members.get(event.learner)
        # An operator who lets a learner in again gives it a fresh start, or its next mistake would
        # shut it out.
        if member is not None:
            state = with_member(state, event.learner, member._replace(offences=0))
    # A round does not wait for somebody who is shut out.
    return rounds.advance(rules, state, state.now_s)


def _on_fetched(rules: FragmentRules, state: State, event: events.Fetched) -> Result:
    # Its answer stands already: the run's end refused it while its shards were on their way.
    pending = state.pending.get(event.update)
    if pending is None:
        return state, ()
    # When shards were here, and with which norm, is on no tape: a replay must be told (invariant
    # 5).
    state = with_observation(state, "fetched", event.at_s, event.update, event.norm)
    # Once more, since it waited: meanwhile a version may have been made, a rollback or a quarantine
    # may have come. What is merged fits the version that is built on now.
    manifest = pending.manifest
    wrong = admission.quarantined(state, manifest) or admission.wrong_base(rules, state, manifest)
    if wrong is not None:
        refused = refuse(manifest, pending.stream_seq, *wrong)
        return rounds.reject(rules, without_pending(state, event.update), refused, event.at_s)
    # The norm is measured, not claimed: the one bound on an update's effect that no manifest can
    # talk around. What is too long is shortened and never refused: norms fall by orders of
    # magnitude as a model converges, and honest learners differ.
    clip = admission.clip(rules.bounds, state, manifest.learner, pending.credit, event.norm)
    return _admit(rules, state, pending, clip, event)


def _admit(
    rules: FragmentRules, state: State, pending: Pending, clip: float, event: events.Fetched
) -> Result:
    """Merge a verified update, in a round that is opened for it if there is none."""
    manifest = pending.manifest
    staleness = state.version - manifest.base_version
    admitted = Admitted(
        manifest,
        pending.stream_seq,
        pending.credit,
        staleness,
        policy.discount(rules.staleness, staleness),
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
    # The sender is told through the record: an update whose shards are bad must not stay in flight
    # for ever (invariant 2).
    state = with_observation(state, "failed", event.at_s, event.update, 0.0)
    refused = refuse(pending.manifest, pending.stream_seq, event.reason, event.detail)
    return rounds.reject(rules, without_pending(state, event.update), refused, event.at_s)


def _on_broke(rules: FragmentRules, state: State, event: events.Broke) -> Result:
    """The sum is spoilt: it is made again from the others, and from this one once more.

    Whatever it was (memory, a bug of ours), nobody's honest work is rejected for it: only an update
    that breaks the sum again, beside others that do not, is.
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
    # Last of all, so that what others sent is in the sum by then.
    once_more = pending._replace(fetching=False, broke=pending.broke + 1)
    again = with_pending(again, event.update, once_more)
    again, effects = rounds.go_on(rules, again, event.at_s)
    return again, (Discard(), *effects)


def _on_liveness(rules: FragmentRules, state: State, event: events.Liveness) -> Result:
    member = state.members.get(event.learner)
    if member is None or member.incarnation != event.incarnation or member.left:
        return state, ()
    if member.live == event.live or len(state.observations) >= 4 * OBSERVATIONS:
        # It is told again; while no record can be stored there is no end of such news.
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
    if state.cut is not None:
        return rounds.advance(rules, passed_on(state), event.at_s)
    if state.stopping_at_s:
        # The end comes whatever is missing: a learner that died with its last update on its way
        # must not hold up a whole run.
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
    # What the leader had is on no tape: a replay must be told (invariant 5).
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
        storing=Storing(True, admission.offenders(rules, after, resolved)),
    )
    # The next round begins before the record stands: a store that is slow holds up nobody's
    # reading. If another owner's record stands in its place, all of this is forgotten with the
    # life that decided it (invariants 1 and 3).
    state = with_observation(state, "made", event.at_s, NOBODY, 0.0)
    return rounds.go_on(rules, state, event.at_s)


def _on_committed(rules: FragmentRules, state: State, event: events.Committed) -> Result:
    assert state.storing is not None
    storing, took_s = state.storing, policy.elapsed_s(state.closed_at_s, event.at_s)
    # The grace window leaves room for what a commit takes, since learners cannot adopt before.
    sync_s = policy.sync_s(state.sync_s, took_s) if storing.published else state.sync_s
    state = state._replace(record_seq=event.record_seq, storing=None, sync_s=sync_s)
    state = with_observation(state, "committed", event.at_s, NOBODY, 0.0)
    state, effects = rounds.go_on(rules, state, event.at_s)
    # After the record, since the word on the tape must never stand without the rejections that led
    # to it.
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
    events.Broke: _on_broke,
    events.Liveness: _on_liveness,
    events.Timer: _on_timer,
    events.CutKnown: _on_cut_known,
    events.Made: _on_made,
    events.Tick: _on_tick,
    events.Committed: _on_committed,
}
