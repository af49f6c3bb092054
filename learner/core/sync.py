"""The learner's core: decides at each step boundary what to adopt and which updates to send.

A *life* is a learner's time from its join to its end; the join's sequence in the stream is the
life's *incarnation*. In a life, the updates of a fragment have the numbers (`seq`) 1, 2, 3 ...

Rules of this file:
- `step(rules, state, event) -> (state, effects)` is the whole interface; no IO, clock, randomness,
  threads or logging, and no arrays: effects name what the training loop does to its tensors
  (`learner/tensors/send_and_adopt.py`).
- One update of a fragment is in flight at most. A record's *mark* of an incarnation is the highest
  seq that is resolved, that is, merged or rejected. The first record whose mark reaches an update's
  seq resolves the update. Until then no other update of the fragment is sent; steps that are done
  meanwhile are covered by the next update.
- Only `Stepped` gives `Adopt` and `Send`: tensors change at step boundaries alone.

Invariants that the rules below keep, by the names that comments use:
- *sent once*: each step's work enters exactly one update, or is dropped: by a version that
  overwrites or blends parameters, or by a rollback. Per fragment, tokens done = sent + unsent at
  every boundary.
- *exact base*: an update is taken against the view that its manifest names, bit for bit.
- *answered*: a record, or the end of the run, resolves every update in flight, which is announced
  until then and never forgotten.
- *never waits*: no event makes a step wait for a peer, the aggregator, NATS or the store, except in
  lockstep mode.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, NamedTuple

from diloco.common.protocol.layout import Rhythm, next_step, offset_steps
from diloco.learner.core.events import (
    Adopt,
    Changed,
    Effect,
    End,
    Event,
    Finished,
    Leave,
    Published,
    Ready,
    Republish,
    RoundOpened,
    Send,
    Start,
    Stepped,
    Stop,
    SyncRules,
)


# An update is in flight from the boundary at which it is encoded, not from its announcement: its
# codes are q in V - q - theta from then on, and the next update must not cover them again (sent
# once). Whether it is announced only decides whether it can be announced again.
class InFlight(NamedTuple):
    """An update that was sent, and that no record has resolved.

    Attributes:
        seq: the update's number among this life's updates of the fragment.
        steps: the inner steps that the update covers.
        announced_at_s: when the update was announced last; 0 until its manifest is on the tape.
        waits_from: this life's steps when the update was announced, or when the newest round
            after the announcement opened.
        attempt: how often the update was announced again.
        void: a rollback came after the send: the update will be rejected, and its codes are
            dropped.
        tokens: the tokens of the update's steps.
    """

    seq: int
    steps: int
    announced_at_s: float = 0.0
    waits_from: int = 0
    attempt: int = 0
    void: bool = False
    tokens: int = 0


class Work(NamedTuple):
    """A number of inner steps, and the tokens that they were taken over."""

    steps: int = 0
    tokens: int = 0


NO_WORK = Work()


# `sent` is a sum over this life, compared with `State.done`, and no count that is set back to zero:
# work that is done while an update is being encoded, or while settings change, cannot fall between
# two counters (sent once).
class FragmentState(NamedTuple):
    """The core's state of one fragment.

    Attributes:
        version: the adopted version; `view_digest` is its view's, `record_seq` its record's.
        due_steps: the number of unsent steps at which the next update is due.
        sent: this life's work that is sent, or dropped by an overwrite, a blend or a rollback. Less
            than nothing in a life that begins with unsent work of the life before (`carry.py`).
        next_seq: the number of the next update.
        in_flight: the update that no record has resolved; None: there is none.
        open_version: the version of the newest round of which the aggregator announced the opening.
        final: the last update of this life is sent, or none is needed.
        ready: records to adopt at the next boundary, in order.
        held: False if this life does not hold the fragment's module: it sends and adopts nothing.
    """

    version: int
    view_digest: str
    record_seq: int
    due_steps: int
    sent: Work = NO_WORK
    next_seq: int = 1
    in_flight: InFlight | None = None
    open_version: int = 0
    final: bool = False
    ready: tuple[Ready, ...] = ()
    held: bool = True


NOT_HELD = FragmentState(-1, "", 0, 0, final=True, held=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The core's state.

    Attributes:
        fragments: the state of each fragment, by index.
        done: the steps and tokens of this life.
        clock_step: the newest global step that a record stated.
        since_clock: the steps that this learner has done since that record.
        stopping: the run's stop or end was read.
        ended: the run's end was read, so that no record follows.
        leaving: this learner was asked to leave.
    """

    fragments: tuple[FragmentState, ...]
    done: Work = NO_WORK
    clock_step: int = 0
    since_clock: int = 0
    stopping: bool = False
    ended: bool = False
    leaving: bool = False


Result = tuple[State, tuple[Effect, ...]]


def begin(rules: SyncRules, starts: tuple[Start | None, ...]) -> State:
    """Returns the state of a learner that has just loaded `starts`, one version per fragment.

    A start is None if the learner does not hold the fragment's module.
    """
    count = len(starts)
    # Fragments' newest records are of different steps of the run; the run itself is at the newest.
    clock_step = max(start.global_step for start in starts if start is not None)
    warm = clock_step < rules.warmup_steps
    interval_steps = rules.warmup_interval_steps if warm else rules.interval_steps
    fragments = tuple(
        FragmentState(
            version=start.version,
            view_digest=start.view_digest,
            record_seq=start.record_seq,
            # Its own offset, and not a whole interval: fragments stay spread over H, so that the
            # link carries one after the other, also when all learners begin at once.
            due_steps=offset_steps(index, count, interval_steps),
        )
        if start is not None
        else NOT_HELD
        for index, start in enumerate(starts)
    )
    return State(fragments=fragments, clock_step=clock_step)


def step(rules: SyncRules, state: State, event: Event) -> Result:
    """Returns the state after `event`, and the effects for the training loop, in order."""
    return _HANDLERS[type(event)](rules, state, event)


def clock(rules: SyncRules, state: State) -> int:
    """Returns the run's global step, as far as this learner knows it; schedules follow this clock.

    Between records the clock advances with the learner's own steps, for at most H of them: while
    no record comes, the run's clock does not advance.
    """
    return state.clock_step + min(state.since_clock, rules.interval_steps)


def must_wait(rules: SyncRules, state: State) -> bool:
    """True if a learner in lockstep waits for a version before its next step."""
    # After the end no record comes that could resolve anything: waiting would never end.
    if not rules.lockstep or state.ended:
        return False
    # It waits for every fragment, and not only for the one that is due next: then all learners
    # take each step from the same parameters, which makes the run equal synchronous training.
    return any(fragment.in_flight is not None for fragment in state.fragments)


def flushed(state: State) -> bool:
    """True if nothing is left to announce after `Stop` or `Leave`, or if the run has ended.

    A fragment with unsent work and an update in flight is not flushed: that work is sent only after
    a record has resolved the update in flight.
    """
    # An announcement is enough: the aggregator's last rounds resolve it without the learner. But
    # a final update that is not announced would be lost work (sent once).
    return state.ended or all(
        fragment.final and (fragment.in_flight is None or fragment.in_flight.announced_at_s > 0)
        for fragment in state.fragments
    )


def unsent_of(state: State, fragment: FragmentState) -> Work:
    """Returns the work that no update of a fragment covers yet."""
    done, sent = state.done, fragment.sent
    return Work(done.steps - sent.steps, done.tokens - sent.tokens)


def unsent(state: State) -> dict[int, int]:
    """Returns, by fragment, this life's steps that no manifest on the tape covers; omits zeros."""
    found = {}
    for index, fragment in enumerate(state.fragments):
        if not fragment.held:
            continue
        flying = fragment.in_flight
        steps = unsent_of(state, fragment).steps
        # An update counts as sent at its boundary, but can be merged only once it is announced.
        if flying is not None and not flying.announced_at_s:
            steps += flying.steps
        if steps:
            found[index] = steps
    return found


def _on_stepped(rules: SyncRules, state: State, event: Stepped) -> Result:
    if event.steps or event.tokens:
        done = Work(state.done.steps + event.steps, state.done.tokens + event.tokens)
        # The work is counted first: an update that is sent below covers the step just taken.
        state = replace(state, done=done, since_clock=state.since_clock + event.steps)
    effects: list[Effect] = []
    fragments = []
    for index, fragment in enumerate(state.fragments):
        # Adopt before send: the update is then against the newest view, so least stale; and an
        # update that a record has just resolved makes room for the next at this same boundary.
        adopted = _adopt(rules, state, index, fragment, effects)
        fragments.append(_send(rules, state, index, adopted, event.now_s, effects))
    if all(map(is_, fragments, state.fragments)):
        return state, ()
    # Final without an update: there was nothing unsent. Otherwise the last manifest says `final`,
    # which a `Finished` could overtake on the tape.
    finished = tuple(
        index
        for index, (before, after) in enumerate(zip(state.fragments, fragments, strict=True))
        if after.final and not before.final and after.next_seq == before.next_seq
    )
    if finished:
        effects.append(Finished(finished))
    return replace(state, fragments=tuple(fragments)), tuple(effects)


def _adopt(
    rules: SyncRules, state: State, index: int, fragment: FragmentState, effects: list[Effect]
) -> FragmentState:
    """Returns the fragment after all its ready records are adopted; appends an `Adopt` for each.

    Where views overwrite parameters, unsent steps are lost and no longer counted as unsent
    (paper §3: the counters of fragment p are reset).
    """
    for ready in fragment.ready:
        flying = fragment.in_flight
        # The mark is the highest seq that records have resolved of this incarnation: a later
        # record says it again, so that a learner which jumped over the answer has it all the same
        # (answered). An earlier life's mark says nothing of this one's seqs.
        resolved = flying is not None and flying.seq <= ready.resolved_seq
        # A rollback sets theta to the view: q is gone from theta with everything else, and to add
        # it when its rejection comes would bring work back that the operator has undone.
        void = ready.rolled_back or (flying is not None and flying.void)
        # Only where the view has the update: a rejected update's work is lost already.
        blended = (
            _blends(rules, index)
            and flying is not None
            and resolved
            and not void
            and flying.seq == ready.merged_seq
        )
        effects.append(Adopt(ready, resolved and not void, blended))
        if blended:
            fragment = _without_blended(rules, state, fragment)
        # Dropped work counts as sent, or the next manifest would claim tokens whose work is in no
        # tensor any more.
        if ready.rolled_back or (overwrites(rules, index) and ready.version > fragment.version):
            fragment = fragment._replace(sent=state.done)
        # A void update stays in flight: the aggregator will answer it, and until then no update
        # with a later seq may follow (answered).
        if flying is not None:
            flying = None if resolved else flying._replace(void=void)
        fragment = fragment._replace(
            version=ready.version,
            view_digest=ready.view_digest,
            record_seq=ready.record_seq,
            in_flight=flying,
        )
    return fragment._replace(ready=()) if fragment.ready else fragment


def _without_blended(rules: SyncRules, state: State, fragment: FragmentState) -> FragmentState:
    """Returns the fragment without the share of its unsent steps whose effect a blend removes.

    The number of subtracted steps is rounded up, so that a manifest claims no more steps than its
    tensors contain; but one step always stays, to be sent when the update is due.
    """
    work = unsent_of(state, fragment)
    if not work.steps:
        return fragment
    steps = min(math.ceil((1 - rules.blend) * work.steps), work.steps - 1)
    tokens = work.tokens * steps // work.steps
    return fragment._replace(
        sent=Work(fragment.sent.steps + steps, fragment.sent.tokens + tokens),
        due_steps=fragment.due_steps - steps,
    )


def _send(
    rules: SyncRules,
    state: State,
    index: int,
    fragment: FragmentState,
    now_s: float,
    effects: list[Effect],
) -> FragmentState:
    """Returns the fragment after sending an update, if one is due; appends the effect.

    An update in flight that no record has resolved for long is announced again instead.
    """
    flying = fragment.in_flight
    if flying is not None:
        # From the last announcement, not from the boundary: an upload that takes minutes is not
        # announced twice for it. An update that is not announced yet is being retried elsewhere.
        waited_s = now_s - flying.announced_at_s
        if not flying.announced_at_s or waited_s < rules.reannounce_timeout_s:
            return fragment
        # A new attempt number: the server drops a message with an earlier message id. The update is
        # the same, so that an aggregator that reads both takes one of them (sent once).
        again = flying._replace(announced_at_s=now_s, attempt=flying.attempt + 1)
        effects.append(Republish(index, flying.seq, again.attempt))
        return fragment._replace(in_flight=again)
    ending = state.stopping or state.leaving
    # Nothing may follow a `final`: the aggregator counts this learner out of the fragment's rounds.
    if fragment.final:
        return fragment
    work = unsent_of(state, fragment)
    # An update of no steps would weigh nothing and still take a place in a round.
    if work.steps == 0:
        return fragment._replace(final=True) if ending else fragment
    # An open round draws an update early, so that slow learners come into phase with fast ones. Not
    # below `min_steps`: so short an update is not worth its upload. Not in lockstep, whose updates
    # all cover the same steps. `open_version` above the adopted version means that its round may
    # still be open; once its record has come, the round is over.
    opened = (
        fragment.open_version > fragment.version
        and work.steps >= rules.min_steps
        and not rules.lockstep
    )
    if not (ending or opened or work.steps >= fragment.due_steps):
        return fragment
    # Base and digest are those adopted at this boundary: the codes are taken against that view in
    # the same effect list, before anything else can move it (exact base).
    effects.append(
        Send(
            index,
            fragment.next_seq,
            fragment.version,
            fragment.view_digest,
            work.steps,
            work.tokens,
            ending,
        )
    )
    return fragment._replace(
        sent=state.done,
        due_steps=next_due(rules, state, index),
        next_seq=fragment.next_seq + 1,
        in_flight=InFlight(fragment.next_seq, work.steps, tokens=work.tokens),
        final=ending,
    )


def next_due(rules: SyncRules, state: State, index: int) -> int:
    """Returns the number of steps from the update of a fragment that is sent now to the next."""
    # By the run's clock and not the learner's own steps: all learners leave the warm-up together,
    # also one that joined late.
    step = clock(rules, state)
    if step >= rules.warmup_steps:
        return rules.interval_steps
    rhythm = Rhythm(
        index,
        len(state.fragments),
        rules.interval_steps,
        rules.warmup_steps,
        rules.warmup_interval_steps,
    )
    return next_step(rhythm, step) - step


def _on_ready(_rules: SyncRules, state: State, event: Ready) -> Result:
    fragment = state.fragments[event.fragment]
    newest = fragment.ready[-1].record_seq if fragment.ready else fragment.record_seq
    # A record twice would move theta twice by one delta; an older one would move it back.
    if event.record_seq <= newest:
        return state, ()
    state = _with_fragment(state, event.fragment, fragment._replace(ready=(*fragment.ready, event)))
    # The clock goes back only by a rollback. Otherwise a slow fragment's record, which is of an
    # earlier step, would set learning rates back.
    if event.global_step > state.clock_step or event.rolled_back:
        state = replace(state, clock_step=event.global_step, since_clock=0)
    return state, ()


def _on_round_opened(rules: SyncRules, state: State, event: RoundOpened) -> Result:
    # The event came as a broadcast, which any client of the bus may have sent: a wrong number must
    # not end a learner.
    if not 0 <= event.fragment < len(state.fragments):
        return state, ()
    fragment = state.fragments[event.fragment]
    if not fragment.held:
        return state, ()
    # Broadcasts may overtake each other; the newest round counts.
    if event.version <= fragment.open_version:
        return state, ()
    opened = _in_phase(rules, state, event.fragment, fragment)._replace(open_version=event.version)
    return _with_fragment(state, event.fragment, opened), ()


def _in_phase(rules: SyncRules, state: State, index: int, fragment: FragmentState) -> FragmentState:
    """Delays a fragment's next update by the steps for which the last one waited for a round.

    Rounds are paced from round to round, but `due_steps` counts from the update: without this,
    after an outage, every update would come too early for its round by the same number of steps.
    """
    flying, done = fragment.in_flight, state.done.steps
    # Where versions overwrite, `due_steps` counts from the version already. And a slow learner must
    # still be drawn in by a round that opens, or it would miss every second one.
    if flying is None or not flying.announced_at_s or overwrites(rules, index):
        return fragment
    if fragment.due_steps < 2 * rules.min_steps:
        return fragment
    # The overlap's own steps do not count as waiting.
    waited = max(0, done - flying.waits_from - rules.overlap_steps)
    return fragment._replace(
        due_steps=fragment.due_steps + waited, in_flight=flying._replace(waits_from=done)
    )


def _on_published(_rules: SyncRules, state: State, event: Published) -> Result:
    fragment = state.fragments[event.fragment]
    flying = fragment.in_flight
    # A record may resolve an update before the event that its manifest is on the tape.
    if flying is None or flying.seq != event.seq:
        return state, ()
    since = flying.waits_from if flying.announced_at_s else state.done.steps
    announced = flying._replace(announced_at_s=event.now_s, waits_from=since)
    return _with_fragment(state, event.fragment, fragment._replace(in_flight=announced)), ()


def _on_changed(_rules: SyncRules, state: State, _event: Changed) -> Result:
    # The caller of `step` passes the new rules from the next event on. `due_steps` stays: it was
    # set when the last update was sent; only updates after the next are due by the new H.
    return state, ()


def _on_stop(_rules: SyncRules, state: State, _event: Stop) -> Result:
    return replace(state, stopping=True), ()


def _on_end(_rules: SyncRules, state: State, _event: End) -> Result:
    # An end may come without a stop: a learner that was away reads only the last such message.
    return replace(state, stopping=True, ended=True), ()


def _on_leave(_rules: SyncRules, state: State, _event: Leave) -> Result:
    return replace(state, leaving=True), ()


_HANDLERS: dict[type, Callable[[SyncRules, State, Any], Result]] = {
    Stepped: _on_stepped,
    Ready: _on_ready,
    RoundOpened: _on_round_opened,
    Published: _on_published,
    Changed: _on_changed,
    Stop: _on_stop,
    End: _on_end,
    Leave: _on_leave,
}


def _with_fragment(state: State, index: int, fragment: FragmentState) -> State:
    fragments = (*state.fragments[:index], fragment, *state.fragments[index + 1 :])
    return replace(state, fragments=fragments)


def overwrites(rules: SyncRules, fragment: int) -> bool:
    """True if a version of the fragment overwrites the learner's parameters."""
    return rules.overwrite or fragment in rules.averaged


def _blends(rules: SyncRules, fragment: int) -> bool:
    """True if a version that has merged the learner's update keeps only a share of later steps."""
    return rules.blend < 1 and fragment not in rules.averaged
