"""The aggregator's core: what happens to each update of one fragment, and when a round closes.

    idle --first verified update, pace allows--> open --quorum--> grace --deadline or all in-->
    closing --record committed--> idle

Rules of this file:
- `step(rules, state, event) -> (state, effects)` is the whole interface. No IO, clock, randomness
  or logging; times come in with events, in seconds since the epoch, and `deadline` says when the
  machine wants a `Timer`.
- The machine trusts that messages were decoded (`common/wire.py`), and nothing else in them.
- An update leaves the machine exactly once: in the `Commit` of a record, merged or rejected. Until
  that record is committed its stream sequence stays at or above the position in the record, so
  that whoever recovers from the record meets it again.
- What the machine decides from is either on the tape or noted in `observations`, which go into
  the next record: a reader of the tape can decide the same again.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from diloco.aggregator import policy
from diloco.aggregator.policy import FragmentRules
from diloco.common import wire
from diloco.common.layout import next_step
from diloco.common.reasons import Reason, is_offence

# How many earlier lives of a learner keep their mark. An update of a life older than that, which
# is announced once more, is ignored instead of answered.
LIVES = 4


class UpdateId(NamedTuple):
    """Names one update of this machine's fragment."""

    learner: str
    incarnation: int
    seq: int


# Whom an observation is about that is about nobody.
_NOBODY = UpdateId("", 0, 0)


class Pending(NamedTuple):
    """An update that is announced and not yet verified; `fetching` once its shards are read."""

    manifest: wire.Manifest
    stream_seq: int
    fetching: bool


class Admitted(NamedTuple):
    """An update that the open round has merged."""

    manifest: wire.Manifest
    stream_seq: int
    weight: float
    staleness: int
    discount: float
    clip: float
    norm: float


class Refused(NamedTuple):
    """An update that the next record rejects."""

    manifest: wire.Manifest
    stream_seq: int
    reason: str
    detail: str


class Member(NamedTuple):
    """What this fragment knows of a learner.

    `final`: its last update of this fragment is announced; `left`: it ended on purpose;
    `heard_at_s`: when its last join or update was stored; `offences`: how many more of its
    updates were rejected for what they are than were merged.
    """

    incarnation: int
    live: bool = True
    left: bool = False
    final: bool = False
    step_time_s: float = 0.0
    weight: float = 0.0
    heard_at_s: float = 0.0
    offences: int = 0


class Allowance(NamedTuple):
    """How many updates a learner may announce at once: `left` of them at the time `at_s`."""

    left: float
    at_s: float


class Mark(NamedTuple):
    """Highest resolved seq of an incarnation, and its manifest's stream sequence."""

    seq: int
    stream_seq: int


Phase = Literal["idle", "open", "grace", "closing"]


class State(NamedTuple):
    """The machine's state; mappings are replaced, never changed.

    `global_step` is the run's clock at `version`; `floor` the version of the newest rollback;
    `settings_seq` the settings message that the rules come from. `quarantined` are shut out;
    `allowances` has everybody who announced something. `committing` counts the
    rejections and observations that the record being committed holds; `final`: the fragment's
    last version is committed, or is being so; `known_seq`: what is at or below it on the tape
    was met before the record that this life began from at `began_at_s`.
    """

    version: int
    record_seq: int
    view_digest: str
    seen_seq: int
    members: Mapping[str, Member]
    marks: Mapping[tuple[str, int], Mark]
    pending: Mapping[UpdateId, Pending]
    global_step: int = 0
    floor: int = 0
    settings_seq: int = 0
    quarantined: frozenset[str] = frozenset()
    allowances: Mapping[str, Allowance] = MappingProxyType({})
    phase: Phase = "idle"
    final: bool = False
    admitted: tuple[Admitted, ...] = ()
    rejected: tuple[Refused, ...] = ()
    observations: tuple[wire.Observation, ...] = ()
    committing: tuple[int, int] = (0, 0)
    opened_at_s: float = 0.0
    quorum_at_s: float = 0.0
    closed_at_s: float = 0.0
    stopping_at_s: float = 0.0
    quorum_s: float = 0.0
    sync_s: float = 0.0
    norms: tuple[float, ...] = ()
    known_seq: int = 0
    began_at_s: float = 0.0


# Events


class Joined(NamedTuple):
    """A learner's join, from the tape; its sequence is the incarnation."""

    stored_at_s: float
    stream_seq: int
    learner: str


class Departed(NamedTuple):
    """A learner's leave, from the tape."""

    stored_at_s: float
    stream_seq: int
    learner: str
    incarnation: int


class Finished(NamedTuple):
    """A learner's word, from the tape, that it sends nothing more of this fragment."""

    stored_at_s: float
    stream_seq: int
    learner: str
    incarnation: int


class Announced(NamedTuple):
    """A manifest of this fragment, from the tape."""

    stored_at_s: float
    stream_seq: int
    manifest: wire.Manifest


class Stopped(NamedTuple):
    """The run's stop message, from the tape."""

    stored_at_s: float
    stream_seq: int


class Changed(NamedTuple):
    """Changed settings, from the tape; the rules given with it and from now on follow them."""

    stored_at_s: float
    stream_seq: int


class Quarantined(NamedTuple):
    """The word, from the tape, that a learner is shut out, or with `active` False let in again."""

    stored_at_s: float
    stream_seq: int
    learner: str
    active: bool


class Fetched(NamedTuple):
    """All shards of an update are here and verified; `norm` is the update's L2 norm."""

    at_s: float
    update: UpdateId
    norm: float


class Failed(NamedTuple):
    """An update's shards are not what its manifest says."""

    at_s: float
    update: UpdateId
    reason: str
    detail: str


class Liveness(NamedTuple):
    """A learner was heard of again, or has not been for too long."""

    at_s: float
    learner: str
    incarnation: int
    live: bool


class Timer(NamedTuple):
    """The time that `deadline` asked for has come."""

    at_s: float


class Committed(NamedTuple):
    """The record of the last `Commit` is on the tape."""

    at_s: float
    record_seq: int
    view_digest: str


Event = (
    Joined
    | Departed
    | Finished
    | Announced
    | Stopped
    | Changed
    | Quarantined
    | Fetched
    | Failed
    | Liveness
    | Timer
    | Committed
)


# Effects


class Fetch(NamedTuple):
    """Read and verify an update's shards; answer `Fetched` or `Failed`. Any number in parallel."""

    update: UpdateId
    manifest: wire.Manifest


class Merge(NamedTuple):
    """Add the update just fetched to the round's accumulator, before the next event."""

    admitted: Admitted


class OpenRound(NamedTuple):
    """Begin an empty accumulator, then tell the learners that a round of this version is open."""

    version: int


class Commit(NamedTuple):
    """Store the objects, then publish the record, then answer `Committed`.

    `state` is the machine's at the close: all that the record says is in it.
    """

    what: Literal["version", "verdict"]
    reason: str
    final: bool
    at_s: float
    state: State


class Ignored(NamedTuple):
    """A message that is no update of the protocol: count it, keep a sample, do nothing."""

    manifest: wire.Manifest
    reason: str


class ShutOut(NamedTuple):
    """Say on the tape that a learner is quarantined; said again until the tape has it."""

    learner: str
    reason: str


Effect = Fetch | Merge | OpenRound | Commit | Ignored | ShutOut
Result = tuple[State, tuple[Effect, ...]]


def step(rules: FragmentRules, state: State, event: Event) -> Result:
    """The state after `event`, and what the driver must do, in order."""
    return _HANDLERS[type(event)](rules, state, event)


def deadline(rules: FragmentRules, state: State) -> float | None:
    """When the machine next wants a `Timer`, in seconds since the epoch; None for never."""
    if state.phase == "closing" or state.final:
        return None
    if state.stopping_at_s:
        # Whoever begins after the stop has first to read what came while nobody was there.
        return max(state.stopping_at_s, state.began_at_s) + rules.quorum.deadline_s
    if state.phase == "idle":
        waits = any(not pending.fetching for pending in state.pending.values())
        return _opens_at_s(rules, state) if waits and _may_open(rules, state) else None
    if state.phase == "open":
        return state.opened_at_s + rules.quorum.deadline_s
    return _grace_ends_s(rules, state)


# Beginnings


def resume(record: wire.Record, record_seq: int, now_s: float) -> State:
    """The machine as a record left it; feed it the tape from `record.position` on.

    Times of a writer whose clock was ahead are taken as `now_s`, or they would stop the run.
    """
    memory = record.policy
    state = State(
        version=record.version,
        record_seq=record_seq,
        view_digest=record.view_digest,
        seen_seq=record.position - 1,
        global_step=record.global_step,
        floor=memory.floor,
        settings_seq=memory.settings_seq,
        quarantined=frozenset(memory.quarantined),
        allowances={one.learner: Allowance(one.left, one.at_s) for one in memory.allowances},
        final=record.final,
        members={m.learner: Member(**m.model_dump(exclude={"learner"})) for m in memory.members},
        marks={(m.learner, m.incarnation): Mark(m.seq, m.stream_seq) for m in memory.marks},
        pending={},
        closed_at_s=min(memory.closed_at_s, now_s),
        stopping_at_s=min(memory.stopping_at_s, now_s),
        quorum_s=memory.quorum_s,
        sync_s=memory.sync_s,
        norms=memory.norms,
        known_seq=memory.seen_seq,
        began_at_s=now_s,
    )
    return _observe(state, "resumed", now_s, _NOBODY, 0.0)


EMPTY_POLICY = wire.PolicyState(
    members=(),
    marks=(),
    quarantined=(),
    allowances=(),
    seen_seq=0,
    floor=0,
    settings_seq=0,
    closed_at_s=0.0,
    stopping_at_s=0.0,
    quorum_s=0.0,
    sync_s=0.0,
    norms=(),
)


def policy_after(state: State) -> wire.PolicyState:
    """What the record that commits `state` must keep for `resume`."""
    committed = _after_record(state)
    members = tuple(
        wire.MemberState(learner=learner, **member._asdict())
        for learner, member in committed.members.items()
    )
    marks = tuple(
        wire.Mark(
            learner=learner, incarnation=incarnation, seq=mark.seq, stream_seq=mark.stream_seq
        )
        for (learner, incarnation), mark in committed.marks.items()
    )
    return wire.PolicyState(
        members=members,
        marks=marks,
        quarantined=tuple(sorted(committed.quarantined)),
        allowances=tuple(
            wire.Allowance(learner=learner, **allowance._asdict())
            for learner, allowance in committed.allowances.items()
        ),
        seen_seq=max(committed.seen_seq, committed.known_seq),
        floor=committed.floor,
        settings_seq=committed.settings_seq,
        closed_at_s=committed.closed_at_s,
        stopping_at_s=committed.stopping_at_s,
        quorum_s=committed.quorum_s,
        sync_s=committed.sync_s,
        norms=committed.norms,
    )


def position(state: State) -> int:
    """Lowest stream sequence that is not resolved once `state`'s record is committed."""
    waiting = (pending.stream_seq for pending in state.pending.values())
    return min(waiting, default=state.seen_seq + 1)


def has_met_all(state: State) -> bool:
    """Whether everything was read again that the record knew of which this life began from."""
    return state.seen_seq >= state.known_seq


def global_step_after(rules: FragmentRules, state: State) -> int:
    """The run's clock at the version after `state`'s; the last rounds do not go beyond the run."""
    return min(rules.steps, _next_step(rules, state))


def has_next(rules: FragmentRules, state: State) -> bool:
    """Whether the run is long enough for another version of the fragment."""
    return _next_step(rules, state) <= rules.steps


def share(state: State) -> float:
    """Part of the live fleet's weight that the round holds, in (0, 1]."""
    held = sum(admitted.weight for admitted in state.admitted)
    present = _present(state)
    absent = sum(member.weight for name, member in _live(state).items() if name not in present)
    return held / (held + absent) if held else 1.0


# Handlers


def _on_joined(_rules: FragmentRules, state: State, event: Joined) -> Result:
    state = _seen(state, event.stream_seq)
    known = state.members.get(event.learner)
    if known and known.incarnation >= event.stream_seq:
        return state, ()
    member = Member(
        event.stream_seq,
        step_time_s=known.step_time_s if known else 0.0,
        weight=known.weight if known else 0.0,
        heard_at_s=event.stored_at_s,
        offences=known.offences if known else 0,
    )
    return _with_member(state, event.learner, member), ()


def _on_departed(rules: FragmentRules, state: State, event: Departed) -> Result:
    state = _seen(state, event.stream_seq)
    member = state.members.get(event.learner)
    if member is None or member.incarnation != event.incarnation:
        return state, ()
    state = _with_member(state, event.learner, member._replace(live=False, left=True))
    return _advance(rules, state, event.stored_at_s)


def _on_finished(rules: FragmentRules, state: State, event: Finished) -> Result:
    state = _seen(state, event.stream_seq)
    member = state.members.get(event.learner)
    if member is None or member.incarnation != event.incarnation:
        return state, ()
    state = _with_member(state, event.learner, member._replace(final=True))
    return _advance(rules, state, event.stored_at_s)


def _on_announced(rules: FragmentRules, state: State, event: Announced) -> Result:
    manifest = event.manifest
    update = UpdateId(manifest.learner, manifest.incarnation, manifest.seq)
    state = _seen(state, event.stream_seq)
    if manifest.epoch != rules.epoch:
        # Its incarnation is of another tape: nothing here may be marked with it.
        return state, (Ignored(manifest, Reason.EPOCH),)
    if _is_known(state, update):
        return state, ()
    if _overtakes(state, update):
        return state, (Ignored(manifest, Reason.IN_FLIGHT),)
    if event.stream_seq > state.known_seq:
        state, allowed = _allow(rules, state, manifest.learner, event.stored_at_s)
        if not allowed:
            return state, (Ignored(manifest, Reason.RATE),)
    verdict = _judge(rules, state, event)
    if verdict is not None:
        refused = Refused(manifest, event.stream_seq, *verdict)
        return _reject(rules, state, refused, event.stored_at_s)
    member = state.members[manifest.learner]
    current = manifest.incarnation == member.incarnation
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
    return _pump(rules, state, event.stored_at_s)


def _on_stopped(rules: FragmentRules, state: State, event: Stopped) -> Result:
    state = _seen(state, event.stream_seq)
    if state.stopping_at_s or state.final:
        return state, ()
    state = state._replace(stopping_at_s=event.stored_at_s)
    return _go_on(rules, state, event.stored_at_s)


def _on_changed(rules: FragmentRules, state: State, event: Changed) -> Result:
    state = _seen(state, event.stream_seq)
    if event.stream_seq <= state.settings_seq:
        return state, ()
    return _go_on(rules, state._replace(settings_seq=event.stream_seq), event.stored_at_s)


def _on_quarantined(rules: FragmentRules, state: State, event: Quarantined) -> Result:
    state = _seen(state, event.stream_seq)
    one = frozenset({event.learner})
    if event.active:
        state = state._replace(quarantined=state.quarantined | one)
    else:
        state = state._replace(quarantined=state.quarantined - one)
        member = state.members.get(event.learner)
        if member is not None:
            state = _with_member(state, event.learner, member._replace(offences=0))
    # A round does not wait for somebody who is shut out.
    return _advance(rules, state, event.stored_at_s)


def _on_fetched(rules: FragmentRules, state: State, event: Fetched) -> Result:
    pending = state.pending.get(event.update)
    if pending is None:
        return state, ()
    state = _observe(state, "fetched", event.at_s, event.update, event.norm)
    if not _takes_updates(rules, state, event.at_s):
        # Too late for its round; its shards are read again when the next one opens.
        return _with_pending(state, event.update, pending._replace(fetching=False)), ()
    manifest = pending.manifest
    wrong = _shut_out(state, manifest) or _wrong_base(rules, state, manifest)
    if wrong is not None:
        refused = Refused(manifest, pending.stream_seq, *wrong)
        return _reject(rules, _without_pending(state, event.update), refused, event.at_s)
    clip = policy.judge_norm(rules.bounds, state.norms, event.norm, manifest.steps)
    if clip is None:
        detail = f"norm {event.norm:.3g} over {manifest.steps} steps is far above the median"
        refused = Refused(manifest, pending.stream_seq, Reason.NORM, detail)
        return _reject(rules, _without_pending(state, event.update), refused, event.at_s)
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
        opened = (OpenRound(state.version + 1),)
        state = state._replace(phase="open", opened_at_s=event.at_s, quorum_at_s=0.0)
    remaining = {key: value for key, value in state.pending.items() if key != event.update}
    norms = (*state.norms, clip * event.norm / manifest.steps)[-policy.NORM_WINDOW :]
    state = state._replace(pending=remaining, admitted=(*state.admitted, admitted), norms=norms)
    state, more = _advance(rules, state, event.at_s)
    return state, (*opened, Merge(admitted), *more)


def _on_failed(rules: FragmentRules, state: State, event: Failed) -> Result:
    pending = state.pending.get(event.update)
    if pending is None:
        return state, ()
    state = _observe(state, "failed", event.at_s, event.update, 0.0)
    refused = Refused(pending.manifest, pending.stream_seq, event.reason, event.detail)
    return _reject(rules, _without_pending(state, event.update), refused, event.at_s)


def _on_liveness(rules: FragmentRules, state: State, event: Liveness) -> Result:
    member = state.members.get(event.learner)
    if member is None or member.incarnation != event.incarnation or member.left:
        return state, ()
    if member.live == event.live:
        return state, ()
    about = UpdateId(event.learner, event.incarnation, 0)
    state = _observe(state, "live" if event.live else "dead", event.at_s, about, 0.0)
    state = _with_member(state, event.learner, member._replace(live=event.live))
    return _advance(rules, state, event.at_s)


def _on_timer(rules: FragmentRules, state: State, event: Timer) -> Result:
    due = deadline(rules, state)
    if due is None or event.at_s < due:
        return state, ()
    state = _observe(state, "timer", event.at_s, _NOBODY, 0.0)
    if state.stopping_at_s:
        return _close(_refuse_late(state), event.at_s, "deadline", final=True)
    if state.phase == "idle":
        return _pump(rules, state, event.at_s)
    return _close(state, event.at_s, "grace" if state.phase == "grace" else "deadline")


def _on_committed(rules: FragmentRules, state: State, event: Committed) -> Result:
    published = bool(state.admitted)
    took_s = max(0.0, event.at_s - state.closed_at_s)
    rejections, observations = state.committing
    resolved = state.rejected[:rejections]
    state = _after_record(state)._replace(
        version=state.version + published,
        global_step=global_step_after(rules, state) if published else state.global_step,
        record_seq=event.record_seq,
        view_digest=event.view_digest,
        phase="idle",
        admitted=(),
        rejected=state.rejected[rejections:],
        observations=state.observations[observations:],
        committing=(0, 0),
        sync_s=policy.ema(state.sync_s, took_s) if published else state.sync_s,
    )
    state = _observe(state, "committed", event.at_s, _NOBODY, 0.0)
    offenders = _offenders(rules, state, resolved)
    if state.rejected:
        state, effects = _close(state, event.at_s, "rejections", final=state.final)
    else:
        state, effects = _go_on(rules, state, event.at_s)
    return state, offenders + effects


_HANDLERS: dict[type, Callable[[FragmentRules, State, Any], Result]] = {
    Joined: _on_joined,
    Departed: _on_departed,
    Finished: _on_finished,
    Announced: _on_announced,
    Stopped: _on_stopped,
    Changed: _on_changed,
    Quarantined: _on_quarantined,
    Fetched: _on_fetched,
    Failed: _on_failed,
    Liveness: _on_liveness,
    Timer: _on_timer,
    Committed: _on_committed,
}


# Rules


def _judge(rules: FragmentRules, state: State, event: Announced) -> tuple[Reason, str] | None:
    """(reason, detail) to reject an announced update at once, or None."""
    manifest = event.manifest
    member = state.members.get(manifest.learner)
    if member is None or manifest.incarnation > member.incarnation:
        return (
            Reason.UNKNOWN_INCARNATION,
            f"no join of incarnation {manifest.incarnation} precedes it",
        )
    if manifest.incarnation < member.incarnation < event.stream_seq:
        return Reason.SUPERSEDED, f"incarnation {member.incarnation} joined before it was stored"
    if state.final:
        return Reason.ENDED, "the fragment's last version is committed"
    shut_out = _shut_out(state, manifest)
    if shut_out is not None:
        return shut_out
    wrong = policy.malformed(rules, manifest)
    if wrong is not None:
        return wrong
    since_s = event.stored_at_s - member.heard_at_s
    met_before = event.stream_seq <= state.known_seq
    if not met_before and policy.too_many_steps(rules.bounds, manifest.steps, since_s):
        return Reason.STEPS, f"{manifest.steps} steps within {since_s:.0f} s"
    # A learner may have read the record that is being committed: judged when it is to be merged.
    return None if state.phase == "closing" else _wrong_base(rules, state, manifest)


def _shut_out(state: State, manifest: wire.Manifest) -> tuple[Reason, str] | None:
    """(reason, detail) if an update's sender is quarantined."""
    if manifest.learner in state.quarantined:
        return (
            Reason.QUARANTINED,
            f"{manifest.learner} is quarantined until an operator releases it",
        )
    return None


def _allow(rules: FragmentRules, state: State, learner: str, now_s: float) -> tuple[State, bool]:
    """Whether a learner may announce one more update now; takes it from its allowance."""
    before = state.allowances.get(learner, Allowance(math.inf, now_s))
    left = policy.allowance(rules.bounds, before.left, before.at_s, now_s)
    allowed = left >= 1
    after = Allowance(left - allowed, max(now_s, before.at_s))
    return state._replace(allowances={**state.allowances, learner: after}), allowed


def _charge(rules: FragmentRules, state: State, refused: Refused, now_s: float) -> State:
    """Take from the sender's allowance what its rejection costs, if it was not taken before."""
    if refused.stream_seq <= state.known_seq:
        return state
    learner = refused.manifest.learner
    before = state.allowances[learner]
    left = policy.allowance(rules.bounds, before.left, before.at_s, now_s)
    after = Allowance(left - policy.REJECTION_COST + 1, max(now_s, before.at_s))
    return state._replace(allowances={**state.allowances, learner: after})


def _offenders(
    rules: FragmentRules, state: State, resolved: tuple[Refused, ...]
) -> tuple[Effect, ...]:
    """Whom to shut out, after the record that rejects what is `resolved`."""
    limit = rules.bounds.quarantine_offences
    found = {}
    for refused in resolved:
        learner = refused.manifest.learner
        member = state.members.get(learner)
        if limit and member and member.offences >= limit and learner not in state.quarantined:
            found[learner] = ShutOut(
                learner,
                f"{member.offences} more updates of fragment {rules.fragment} rejected than "
                f"merged, the last one for {refused.reason!r}: {refused.detail}"[:1000],
            )
    return tuple(found.values())


def _wrong_base(
    rules: FragmentRules, state: State, manifest: wire.Manifest
) -> tuple[Reason, str] | None:
    """(reason, detail) if an update's base does not fit the version being built on, else None.

    Judged when it is announced and again when it is merged: an update that waits grows stale.
    """
    if manifest.base_version < state.floor:
        return Reason.ROLLED_BACK, f"based on version {manifest.base_version}, before the rollback"
    staleness = state.version - manifest.base_version
    if staleness < 0:
        return (
            Reason.FUTURE,
            f"based on version {manifest.base_version}, the newest is {state.version}",
        )
    if staleness == 0 and manifest.base_digest != state.view_digest:
        return (
            Reason.BASE_DIGEST,
            f"view {manifest.base_digest}, version {state.version} is another",
        )
    if rules.staleness.maximum and staleness > rules.staleness.maximum:
        return Reason.STALE, f"{staleness} versions old, at most {rules.staleness.maximum}"
    return None


def _is_known(state: State, update: UpdateId) -> bool:
    mark = state.marks.get((update.learner, update.incarnation))
    if mark is not None and update.seq <= mark.seq:
        return True
    if update in state.pending:
        return True
    if any(
        taken.manifest.learner == update.learner and _id(taken.manifest) == update
        for taken in _taken(state)
    ):
        return True
    if mark is not None:
        return False
    # A life so old that its mark is gone was answered long ago.
    joined = _joined(state, update.learner)
    lives = [
        life
        for learner, life in state.marks
        if learner == update.learner and (life > joined) == (update.incarnation > joined)
    ]
    return len(lives) >= LIVES and update.incarnation < min(lives)


def _overtakes(state: State, update: UpdateId) -> bool:
    """Whether the learner announced an update while an earlier one was not resolved.

    What is being committed counts as resolved: the learner may read the record before we do.
    """
    still = state.rejected[state.committing[0] :] if state.phase == "closing" else _taken(state)
    unresolved = (*state.pending.values(), *still)
    return any(
        waiting.manifest.learner == update.learner
        and waiting.manifest.incarnation == update.incarnation
        for waiting in unresolved
    )


def _go_on(rules: FragmentRules, state: State, now_s: float) -> Result:
    state, effects = _pump(rules, state, now_s)
    state, more = _advance(rules, state, now_s)
    return state, effects + more


def _pump(rules: FragmentRules, state: State, now_s: float) -> Result:
    """Fetch what waits, if a round is open or may open now."""
    if not _takes_updates(rules, state, now_s):
        return state, ()
    waiting = [(key, pending) for key, pending in state.pending.items() if not pending.fetching]
    if not waiting:
        return state, ()
    fetching = {key: pending._replace(fetching=True) for key, pending in waiting}
    state = state._replace(pending={**state.pending, **fetching})
    return state, tuple(Fetch(key, pending.manifest) for key, pending in waiting)


def _takes_updates(rules: FragmentRules, state: State, now_s: float) -> bool:
    """Whether an update that is verified now is merged now."""
    if state.phase == "idle":
        return _may_open(rules, state) and now_s >= _opens_at_s(rules, state)
    return state.phase != "closing"


def _may_open(rules: FragmentRules, state: State) -> bool:
    """Whether another round belongs to the run; the one after the stop takes all that is left."""
    if state.final:
        return False
    return bool(state.stopping_at_s) or has_next(rules, state)


def _next_step(rules: FragmentRules, state: State) -> int:
    return next_step(rules.rhythm, state.global_step)


def _opens_at_s(rules: FragmentRules, state: State) -> float:
    if state.stopping_at_s or not state.closed_at_s:
        return 0.0
    interval_steps = _next_step(rules, state) - state.global_step
    return state.closed_at_s + policy.pace_s(rules, _step_times(state), interval_steps)


def _grace_ends_s(rules: FragmentRules, state: State) -> float:
    hard_s = state.opened_at_s + rules.quorum.deadline_s
    if rules.lockstep:
        return hard_s
    grace_s = policy.grace_s(rules, _step_times(state), state.quorum_s, state.sync_s)
    return min(hard_s, state.quorum_at_s + grace_s)


def _advance(rules: FragmentRules, state: State, now_s: float) -> Result:
    """Close the round if it is complete; begin the grace window if the quorum is reached."""
    if state.phase == "closing" or state.final:
        return state, ()
    if state.stopping_at_s:
        return _advance_to_end(state, now_s)
    if state.phase == "idle":
        return state, ()
    live = _live(state)
    least = rules.quorum.min_learners
    if state.phase == "open":
        quorum = least if rules.lockstep else policy.effective_quorum(rules.quorum, len(live))
        if len(_present(state)) >= quorum:
            quorum_s = policy.ema(state.quorum_s, max(0.0, now_s - state.opened_at_s))
            state = state._replace(phase="grace", quorum_at_s=now_s, quorum_s=quorum_s)
    answered = _answered(state)
    if answered >= live.keys() and (len(answered) >= least or not rules.lockstep):
        return _close(state, now_s, "complete")
    return state, ()


def _advance_to_end(state: State, now_s: float) -> Result:
    """After the stop: a round closes once nobody can add to it before it has closed.

    A learner that has an update in this round sends its last one only after the record. And what
    was met before this life began must first be met again.
    """
    if state.pending or not has_met_all(state):
        return state, ()
    awaited = {name for name, member in _live(state).items() if not member.final}
    if not awaited:
        return _close(state, now_s, "final", final=True)
    if state.admitted and awaited <= _answered(state):
        return _close(state, now_s, "complete")
    return state, ()


def _close(state: State, now_s: float, reason: str, *, final: bool = False) -> Result:
    merged = bool(state.admitted)
    state = state._replace(
        phase="closing",
        final=final,
        committing=(len(state.rejected), len(state.observations)),
        closed_at_s=now_s if merged else state.closed_at_s,
    )
    what: Literal["version", "verdict"] = "version" if merged else "verdict"
    return state, (Commit(what, reason, final, now_s, state),)


def _reject(rules: FragmentRules, state: State, refused: Refused, now_s: float) -> Result:
    """Note a rejection; with no round open it gets a record of its own, else the round's."""
    state = _charge(rules, state, refused, now_s)
    state = state._replace(rejected=(*state.rejected, refused))
    if state.phase == "idle":
        return _close(state, now_s, "rejections", final=state.final)
    return _advance(rules, state, now_s)


def _refuse_late(state: State) -> State:
    """At the end's deadline: what is not verified by now is rejected."""
    late = tuple(
        Refused(pending.manifest, pending.stream_seq, Reason.LATE, "not here when the run ended")
        for pending in state.pending.values()
    )
    return state._replace(pending={}, rejected=state.rejected + late)


# Small changes of state


def _id(manifest: wire.Manifest) -> UpdateId:
    return UpdateId(manifest.learner, manifest.incarnation, manifest.seq)


def _taken(state: State) -> tuple[Admitted | Refused, ...]:
    """What the next record resolves."""
    merged: tuple[Admitted | Refused, ...] = state.admitted
    return merged + state.rejected


def _present(state: State) -> set[str]:
    """Learners that have an update in the round."""
    return {admitted.manifest.learner for admitted in state.admitted}


def _answered(state: State) -> set[str]:
    """Learners that send no more before the record: it merges, or rejects, an update of theirs."""
    return _present(state).union(
        refused.manifest.learner
        for refused in state.rejected
        if _is_current(state, refused.manifest)
    )


def _is_current(state: State, manifest: wire.Manifest) -> bool:
    member = state.members.get(manifest.learner)
    return member is not None and member.incarnation == manifest.incarnation


def _live(state: State) -> dict[str, Member]:
    """Those whom a round waits for."""
    return {
        name: member
        for name, member in state.members.items()
        if member.live and name not in state.quarantined
    }


def _step_times(state: State) -> list[float]:
    return [member.step_time_s for member in _live(state).values()]


def _seen(state: State, stream_seq: int) -> State:
    return state._replace(seen_seq=max(state.seen_seq, stream_seq))


def _with_member(state: State, learner: str, member: Member) -> State:
    return state._replace(members={**state.members, learner: member})


def _with_pending(state: State, update: UpdateId, pending: Pending) -> State:
    return state._replace(pending={**state.pending, update: pending})


def _without_pending(state: State, update: UpdateId) -> State:
    remaining = {key: value for key, value in state.pending.items() if key != update}
    return state._replace(pending=remaining)


def _observe(state: State, what: str, at_s: float, about: UpdateId, value: float) -> State:
    observation = wire.Observation.model_construct(
        what=what,
        at_s=at_s,
        after_seq=state.seen_seq,
        learner=about.learner,
        incarnation=about.incarnation,
        seq=about.seq,
        value=value,
    )
    return state._replace(observations=(*state.observations, observation))


def _after_record(state: State) -> State:
    """Marks, offences and allowances once the record being committed is on the tape."""
    marks = dict(state.marks)
    resolved: tuple[Admitted | Refused, ...] = state.admitted
    resolved += state.rejected[: state.committing[0]]
    for taken in resolved:
        update = _id(taken.manifest)
        marks[update[:2]] = Mark(update.seq, taken.stream_seq)
    for learner in {learner for learner, _ in marks}:
        joined = _joined(state, learner)
        lives = sorted(life for name, life in marks if name == learner)
        # Lives that somebody made up must not take the place of those that were.
        for some in ([n for n in lives if n <= joined], [n for n in lives if n > joined]):
            for life in some[:-LIVES]:
                del marks[learner, life]
    return state._replace(marks=marks, members=_judged(state, resolved))


def _judged(state: State, resolved: tuple[Admitted | Refused, ...]) -> Mapping[str, Member]:
    """The members with their offences once these updates are answered."""
    members = dict(state.members)
    for taken in resolved:
        learner = taken.manifest.learner
        if learner not in members:
            continue
        if isinstance(taken, Refused) and not is_offence(taken.reason):
            continue
        change = 1 if isinstance(taken, Refused) else -1
        count = max(0, members[learner].offences + change)
        members[learner] = members[learner]._replace(offences=count)
    return members


def _joined(state: State, learner: str) -> int:
    """Newest incarnation that a learner's join gave it; 0 if it never joined."""
    member = state.members.get(learner)
    return member.incarnation if member else 0
