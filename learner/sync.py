"""The learner's core: which fragment is due, what is in flight, what to adopt at a step boundary.

Rules of this file:
- `step(rules, state, event) -> (state, effects)` is the whole interface; no IO, clock, randomness,
  threads or logging, and no arrays: effects name what the training loop does to its tensors.
- One update of a fragment is in flight at most. It is resolved by the first record whose mark of
  this incarnation reaches its seq, merged or rejected; until then nothing more of that fragment
  is sent, and steps taken meanwhile wait for the next update.
- Only `Stepped` gives `Adopt` and `Send`: tensors change at step boundaries alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diloco.common.config import SyncSection
from diloco.common.layout import Rhythm, next_step, offset_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncRules:
    """What the core must know of the run."""

    interval_steps: int
    warmup_steps: int
    warmup_interval_steps: int
    min_steps: int
    reannounce_timeout_s: float
    lockstep: bool
    overwrite: bool


def sync_rules(sync: SyncSection) -> SyncRules:
    """The rules of a run's learners."""
    return SyncRules(
        interval_steps=sync.interval_steps,
        warmup_steps=sync.warmup_steps,
        warmup_interval_steps=sync.warmup_interval_steps,
        min_steps=sync.min_steps,
        reannounce_timeout_s=sync.reannounce_timeout_s,
        lockstep=sync.mode == "lockstep",
        overwrite=sync.adopt == "overwrite",
    )


class InFlight(NamedTuple):
    """An update of `steps` on its way; `announced_at_s` is 0 until its manifest is on the tape.

    `void`: a rollback came meanwhile; it will be rejected, and its codes are forgotten.
    """

    seq: int
    steps: int
    announced_at_s: float = 0.0
    attempt: int = 0
    void: bool = False


class Ready(NamedTuple):
    """A record that has arrived and whose delta, if it has one, is decoded.

    `resolved_seq`: this incarnation's mark in the record; `rolled_back`: a rollback lies between
    the version adopted before and this one.
    """

    fragment: int
    record_seq: int
    version: int
    view_digest: str
    global_step: int
    resolved_seq: int
    rolled_back: bool = False


class Work(NamedTuple):
    """Inner steps, and the tokens they were taken over."""

    steps: int = 0
    tokens: int = 0


NO_WORK = Work()


class FragmentState(NamedTuple):
    """One fragment: what is adopted, what is sent, what is in flight.

    `sent` counts the work of this life that is sent, or let go by an overwrite or a rollback.
    `due_steps`: unsent steps at which it is due; `open_version`: of the round last announced.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The core's state.

    `done` is the work of this life; `clock_step` is the newest global step heard of, `since_clock`
    the own steps since then. `stopping`: the run is at its end; `ended`: it is over, no record
    follows; `leaving`: this learner was asked to.
    """

    fragments: tuple[FragmentState, ...]
    done: Work = NO_WORK
    clock_step: int = 0
    since_clock: int = 0
    stopping: bool = False
    ended: bool = False
    leaving: bool = False


# Events


class Stepped(NamedTuple):
    """An inner step was taken over `tokens` tokens; 0 steps at the flush after the end."""

    now_s: float
    tokens: int
    steps: int = 1


class RoundOpened(NamedTuple):
    """The aggregator has opened a round that makes `version`."""

    fragment: int
    version: int


class Published(NamedTuple):
    """The manifest of an update is on the tape."""

    now_s: float
    fragment: int
    seq: int


class Changed(NamedTuple):
    """The run's settings have changed; the rules that follow from them are given from now on."""

    rules: SyncRules


class Stop(NamedTuple):
    """The run's stop message arrived."""


class End(NamedTuple):
    """The run's end message arrived: nothing that is still in flight will be answered."""


class Leave(NamedTuple):
    """This learner was asked to end."""


Event = Stepped | Ready | RoundOpened | Published | Changed | Stop | End | Leave


# Effects


class Adopt(NamedTuple):
    """Apply a record's delta to view and parameters; drop what was in flight if `resolved`.

    After a rollback (`ready.rolled_back`) the parameters become the view, and codes in flight are
    forgotten.
    """

    ready: Ready
    resolved: bool


class Send(NamedTuple):
    """Encode the fragment's unsent work, keep its codes as in flight, upload, publish."""

    fragment: int
    seq: int
    base_version: int
    base_digest: str
    steps: int
    tokens: int
    final: bool


class Republish(NamedTuple):
    """Announce again: no record has resolved the update for long."""

    fragment: int
    seq: int
    attempt: int


class Finished(NamedTuple):
    """Tell the aggregator that nothing more of these fragments comes."""

    fragments: tuple[int, ...]


Effect = Adopt | Send | Republish | Finished
Result = tuple[State, tuple[Effect, ...]]


class Start(NamedTuple):
    """The version of a fragment with which a learner begins."""

    version: int
    view_digest: str
    record_seq: int
    global_step: int


def begin(rules: SyncRules, starts: tuple[Start, ...]) -> State:
    """The state of a learner that has just loaded these versions."""
    count = len(starts)
    clock_step = max(start.global_step for start in starts)
    warm = clock_step < rules.warmup_steps
    interval_steps = rules.warmup_interval_steps if warm else rules.interval_steps
    fragments = tuple(
        FragmentState(
            version=start.version,
            view_digest=start.view_digest,
            record_seq=start.record_seq,
            due_steps=offset_steps(index, count, interval_steps),
        )
        for index, start in enumerate(starts)
    )
    return State(fragments=fragments, clock_step=clock_step)


def step(rules: SyncRules, state: State, event: Event) -> Result:
    """The state after `event`, and what the training loop must do, in order."""
    return _HANDLERS[type(event)](rules, state, event)


def clock(rules: SyncRules, state: State) -> int:
    """The run's global step as far as this learner can tell: what schedules follow.

    Between records it goes on with the learner's own steps, for at most H of them: while the
    aggregator is away the run's clock stands.
    """
    return state.clock_step + min(state.since_clock, rules.interval_steps)


def must_wait(rules: SyncRules, state: State) -> bool:
    """Whether a learner in lockstep waits for a version before its next step."""
    if not rules.lockstep or state.ended:
        return False
    return any(fragment.in_flight is not None for fragment in state.fragments)


def flushed(state: State) -> bool:
    """Whether all that was trained is on the tape, after `Stop` or `Leave`; after `End` it is over.

    What is unsent of a fragment whose update is in flight is sent once a record resolves that one.
    """
    return state.ended or all(
        fragment.final and (fragment.in_flight is None or fragment.in_flight.announced_at_s > 0)
        for fragment in state.fragments
    )


def unsent_of(state: State, fragment: FragmentState) -> Work:
    """The work that no update of a fragment covers yet."""
    done, sent = state.done, fragment.sent
    return Work(done.steps - sent.steps, done.tokens - sent.tokens)


def unsent(state: State) -> dict[int, int]:
    """Steps that no manifest on the tape covers, by fragment that has any."""
    found = {}
    for index, fragment in enumerate(state.fragments):
        flying = fragment.in_flight
        steps = unsent_of(state, fragment).steps
        if flying is not None and not flying.announced_at_s:
            steps += flying.steps
        if steps:
            found[index] = steps
    return found


def _on_stepped(rules: SyncRules, state: State, event: Stepped) -> Result:
    done = Work(state.done.steps + event.steps, state.done.tokens + event.tokens)
    state = replace(state, done=done, since_clock=state.since_clock + event.steps)
    effects: list[Effect] = []
    fragments = []
    for index, fragment in enumerate(state.fragments):
        adopted = _adopt(rules, state, fragment, effects)
        fragments.append(_send(rules, state, index, adopted, event.now_s, effects))
    finished = tuple(
        index
        for index, (before, after) in enumerate(zip(state.fragments, fragments, strict=True))
        if after.final and not before.final and after.next_seq == before.next_seq
    )
    if finished:
        effects.append(Finished(finished))
    return replace(state, fragments=tuple(fragments)), tuple(effects)


def _adopt(
    rules: SyncRules, state: State, fragment: FragmentState, effects: list[Effect]
) -> FragmentState:
    """Take every record that is ready, in order.

    Where views overwrite parameters, the steps not sent by then are lost and no longer counted
    (paper §3: counters of p reset).
    """
    for ready in fragment.ready:
        flying = fragment.in_flight
        resolved = flying is not None and flying.seq <= ready.resolved_seq
        void = ready.rolled_back or (flying is not None and flying.void)
        effects.append(Adopt(ready, resolved and not void))
        if ready.rolled_back or (rules.overwrite and ready.version > fragment.version):
            fragment = fragment._replace(sent=state.done)
        if flying is not None:
            flying = None if resolved else flying._replace(void=void)
        fragment = fragment._replace(
            version=ready.version,
            view_digest=ready.view_digest,
            record_seq=ready.record_seq,
            in_flight=flying,
        )
    return fragment._replace(ready=()) if fragment.ready else fragment


def _send(
    rules: SyncRules,
    state: State,
    index: int,
    fragment: FragmentState,
    now_s: float,
    effects: list[Effect],
) -> FragmentState:
    """Start an update if the fragment is due; announce one again that nobody resolves."""
    flying = fragment.in_flight
    if flying is not None:
        waited_s = now_s - flying.announced_at_s
        if not flying.announced_at_s or waited_s < rules.reannounce_timeout_s:
            return fragment
        again = flying._replace(announced_at_s=now_s, attempt=flying.attempt + 1)
        effects.append(Republish(index, flying.seq, again.attempt))
        return fragment._replace(in_flight=again)
    ending = state.stopping or state.leaving
    if fragment.final:
        return fragment
    work = unsent_of(state, fragment)
    if work.steps == 0:
        return fragment._replace(final=True) if ending else fragment
    opened = (
        fragment.open_version > fragment.version
        and work.steps >= rules.min_steps
        and not rules.lockstep
    )
    if not (ending or opened or work.steps >= fragment.due_steps):
        return fragment
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
        due_steps=_next_due(rules, state, index),
        next_seq=fragment.next_seq + 1,
        in_flight=InFlight(fragment.next_seq, work.steps),
        final=ending,
    )


def _next_due(rules: SyncRules, state: State, index: int) -> int:
    """Steps from a fragment's update to its next."""
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
    if event.record_seq <= newest:
        return state, ()
    state = _with_fragment(state, event.fragment, fragment._replace(ready=(*fragment.ready, event)))
    if event.global_step > state.clock_step or event.rolled_back:
        state = replace(state, clock_step=event.global_step, since_clock=0)
    return state, ()


def _on_round_opened(_rules: SyncRules, state: State, event: RoundOpened) -> Result:
    if not 0 <= event.fragment < len(state.fragments):
        return state, ()
    fragment = state.fragments[event.fragment]
    opened = fragment._replace(open_version=max(fragment.open_version, event.version))
    return _with_fragment(state, event.fragment, opened), ()


def _on_published(_rules: SyncRules, state: State, event: Published) -> Result:
    fragment = state.fragments[event.fragment]
    flying = fragment.in_flight
    if flying is None or flying.seq != event.seq:
        return state, ()
    announced = flying._replace(announced_at_s=event.now_s)
    return _with_fragment(state, event.fragment, fragment._replace(in_flight=announced)), ()


def _on_changed(_rules: SyncRules, state: State, _event: Changed) -> Result:
    return state, ()


def _on_stop(_rules: SyncRules, state: State, _event: Stop) -> Result:
    return replace(state, stopping=True), ()


def _on_end(_rules: SyncRules, state: State, _event: End) -> Result:
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
