"""The rules of admission: the updates that are taken, from whom, and with which credit.

Steps that can be measured are not asked, and nobody judges himself. Steps take time, and the tape
says how much of it a learner had. Tokens and weight nobody can measure: there others' claims say
what is usual, by upper medians that no single learner moves up, and no minority down. With fewer
than two others there is no median, and claims are believed.
"""

import math

from diloco.aggregator.core import events, policy
from diloco.aggregator.core.members import GREATEST, Member
from diloco.aggregator.core.policy import FragmentRules
from diloco.aggregator.core.state import Allowance, Quarantine, State
from diloco.aggregator.core.updates import RejectedUpdate, Resolved, UpdateCredit, UpdateId
from diloco.common.process.config import BoundsSection
from diloco.common.protocol import wire
from diloco.common.protocol.reasons import Reason


def judge(rules: FragmentRules, state: State, event: events.Announced) -> tuple[Reason, str] | None:
    """(reason, detail) to reject an announced update at once, or None."""
    manifest = event.manifest
    member = state.members.get(manifest.learner)
    # An incarnation is the sequence of a join: one that the tape does not have is made up, or the
    # join is behind its updates, which no honest learner does.
    if member is None or manifest.incarnation > member.incarnation:
        return (
            Reason.UNKNOWN_INCARNATION,
            f"no join of incarnation {manifest.incarnation} precedes it",
        )
    # By where the tape stored it, not by when it was made: what was stored before the newer join is
    # honest work and is merged. Later it would be the work of a twin, whose steps the new life may
    # train again (invariant 4).
    if manifest.incarnation < member.incarnation < event.stream_seq:
        return Reason.SUPERSEDED, f"incarnation {member.incarnation} joined before it was stored"
    if state.final:
        return Reason.ENDED, "the fragment's last version is committed"
    # Answered even so: its learner, once released, must not find an update in flight for ever.
    shut_out = quarantined(state, manifest)
    if shut_out is not None:
        return shut_out
    wrong = policy.malformed(rules, manifest)
    if wrong is not None:
        return wrong
    return wrong_base(rules, state, manifest)


def quarantined(state: State, manifest: wire.Manifest) -> tuple[Reason, str] | None:
    """(reason, detail) if an update's sender is quarantined."""
    if manifest.learner in state.quarantined:
        return (
            Reason.QUARANTINED,
            f"{manifest.learner} is quarantined until an operator releases it",
        )
    return None


def may_announce(rules: FragmentRules, state: State, event: events.Undecoded) -> bool:
    """Whether to decode a message of an update's subject: its sender has allowance left."""
    return _allowance(rules, state, event.learner, event).left >= 1


def spend(
    rules: FragmentRules,
    state: State,
    learner: str,
    event: events.Announced | events.Undecoded,
) -> tuple[State, bool]:
    """Take a message's price from its sender's allowance; return whether it had any left."""
    # A bucket of tokens for each learner: a flood of manifests would otherwise fill the records of
    # everybody, and long ones our time. It may go below zero: whoever sends what is long waits the
    # longer for its next.
    before = _allowance(rules, state, learner, event)
    allowed = before.left >= 1
    after = before._replace(left=before.left - allowed * policy.cost(event.size_bytes))
    # What the record before this life had met was paid for then: paid again, a crash of ours would
    # shut out an honest learner. It is paid from a bucket of this life's own, or whoever floods us
    # would have all of it decoded when we come back.
    if event.stream_seq <= state.known_seq:
        return state._replace(met_again=state.met_again.put(learner, after)), allowed
    return state._replace(allowances=state.allowances.put(learner, after)), allowed


def _allowance(
    rules: FragmentRules,
    state: State,
    learner: str,
    event: events.Announced | events.Undecoded,
) -> Allowance:
    """A learner's allowance when its message was stored."""
    buckets = state.met_again if event.stream_seq <= state.known_seq else state.allowances
    # Also backwards: a server's clock that was set back must not end the filling. What is then
    # earned twice is no more than the most that an allowance holds.
    before = buckets.get(learner, Allowance(math.inf, event.stored_at_s))
    left = policy.allowance(rules.bounds, before.left, before.at_s, event.stored_at_s)
    return Allowance(left, event.stored_at_s)


def charge(state: State, refused: RejectedUpdate) -> State:
    """Take from the sender's allowance what its rejection costs, if it was not taken before."""
    # The life before this one has charged for it.
    if refused.stream_seq <= state.known_seq:
        return state
    learner = refused.manifest.learner
    before = state.allowances[learner]
    after = before._replace(left=before.left - policy.REJECTION_COST + 1)
    return state._replace(allowances=state.allowances.put(learner, after))


def overtakes(state: State, update: UpdateId) -> bool:
    """Whether the learner announced an update while an earlier one was not resolved.

    What a record under way resolves counts: the learner may read it before we know that it stands.
    """
    # By life and not by learner: a new life's first update is not in the way of what the old one
    # still has on the tape.
    unresolved = (state.pending.lives, state.admitted.lives, state.rejected.lives)
    return any(update[:2] in lives for lives in unresolved)


def wrong_base(
    rules: FragmentRules, state: State, manifest: wire.Manifest
) -> tuple[Reason, str] | None:
    """(reason, detail) if an update's base does not fit the version being built on, else None.

    Judged when it is announced and again when it is merged: an update that waits grows stale.
    """
    # Work on versions that an operator took back would bring them in again.
    if manifest.base_version < state.floor:
        return Reason.ROLLED_BACK, f"based on version {manifest.base_version}, before the rollback"
    # Nobody can have built on what is not committed.
    staleness = state.version - manifest.base_version
    if staleness < 0:
        return (
            Reason.FUTURE,
            f"based on version {manifest.base_version}, the newest is {state.version}",
        )
    # The digest says that learner and aggregator mean the same bits. Older ones are not kept, and
    # their delta is discounted.
    if staleness == 0 and manifest.base_digest != state.view_digest:
        return (
            Reason.BASE_DIGEST,
            f"view {manifest.base_digest}, version {state.version} is another",
        )
    # What the devices really hold: memory errors, or a decoder of another release.
    if manifest.held_digest not in (None, manifest.base_digest):
        held = f"view {manifest.held_digest} is held as version {manifest.base_version}"
        return Reason.VIEW, f"{held}, which is {manifest.base_digest}"
    # Off by default: the discount makes old work small, and throwing it away costs tokens
    # (invariant 4 counts them as rejected).
    if rules.staleness.max_versions and staleness > rules.staleness.max_versions:
        return Reason.STALE, f"{staleness} versions old, at most {rules.staleness.max_versions}"
    return None


def offenders(
    rules: FragmentRules, state: State, resolved: Resolved[RejectedUpdate]
) -> tuple[Quarantine, ...]:
    """The learners to quarantine, once a record stands that rejects the `resolved` updates."""
    # Counted in rejected less merged, so that an honest learner with a rare fault is never shut
    # out, and one that only offends soon is.
    limit = rules.bounds.quarantine_offences
    found = {}
    for refused in resolved:
        learner = refused.manifest.learner
        member = state.members.get(learner)
        if limit and member and member.offences >= limit and learner not in state.quarantined:
            found[learner] = Quarantine(
                learner,
                f"{member.offences} more updates of fragment {rules.fragment} rejected than "
                f"merged, the last one for {refused.reason!r}: {refused.detail}"[:1000],
            )
    return tuple(found.values())


# A learner's steps a second may be so many times those that it was seen to take, or that the median
# of the others takes: on a busy machine it may have been slow, and not the others. And at most so
# many times those of the others.
QUICKER = 2.0
FASTEST = 10.0
# How much of the highest rate so far the next update may take off it.
FADING = 0.75
# A learner's weight may be so many times the median of the others, over the time that it had:
# twice, and a tenth for what step boundaries and uploads add to one update and take from the next.
HEAVIEST = 2.0 * 1.1
# Once where learners may lie: of five, two that weighed twice as much would be most of a merge.
HEAVIEST_ROBUST = 1.1
# What is equal but for rounding is not cut.
ROUNDING = 1e-9


def passed_s(member: Member, stored_at_s: float, now_s: float) -> float:
    """Seconds between a learner's previous update and one that is stored and read now."""
    if stored_at_s < member.heard_at_s and member.read_at_s:
        # The server's clock was set back; ours is another.
        return policy.elapsed_s(member.read_at_s, now_s)
    return policy.elapsed_s(member.heard_at_s, stored_at_s)


def available_s(member: Member, stored_at_s: float, now_s: float) -> float:
    """Seconds that no update of a learner has claimed, when one is stored and read now."""
    return min(member.unused_s + passed_s(member, stored_at_s, now_s), wire.GREATEST_S)


def steps_per_s(bounds: BoundsSection, learner: str, member: Member, usual: float | None) -> float:
    """The rate at which steps are credited to a learner, where that of the others is `usual`."""
    declared = bounds.of(learner).max_steps_per_s
    if declared:
        return declared
    rate = bounds.max_steps_per_s
    if member.speed:
        rate = min(rate, QUICKER * max(member.speed, usual or 0.0))
    return rate if usual is None else min(rate, FASTEST * usual)


def greatest_weight(rules: FragmentRules, learner: str, usual: float | None, had_s: float) -> float:
    """The greatest weight that `had_s` seconds of a learner's work may have.

    `usual`: the weight of one second of the other learners' work; None: not known.
    """
    declared = rules.bounds.of(learner)
    if declared.max_steps_per_s and declared.max_tokens_per_step:
        return math.inf
    # By time and not by update: the work of an outage counts in full, and so does that of who
    # sends seldom.
    heaviest = HEAVIEST_ROBUST if rules.robust else HEAVIEST
    return math.inf if usual is None else heaviest * min(usual, GREATEST) * had_s


def credit(
    rules: policy.FragmentRules, state: State, manifest: wire.Manifest, stored_at_s: float
) -> UpdateCredit:
    """The credit of an announced update."""
    bounds = rules.bounds
    learner, members = manifest.learner, state.members
    had_s = available_s(members[learner], stored_at_s, state.now_s)
    rate = steps_per_s(bounds, learner, members[learner], members.others_rate(learner))
    most = rate * had_s * (1 + ROUNDING)
    steps = manifest.steps if manifest.steps <= most else max(1, int(most))
    # Steps that are not believed take their tokens with them: the rest must not weigh the more.
    tokens = manifest.tokens * steps // manifest.steps
    declared = bounds.of(learner).max_tokens_per_step or bounds.max_tokens_per_step
    tokens = max(1, min(tokens, declared * steps))
    heaviest = greatest_weight(rules, learner, members.others_tokens_rate(learner), had_s)
    if policy.weight(tokens, steps) > heaviest * (1 + ROUNDING):
        tokens = max(1, int(math.sqrt(heaviest * steps)))
    return UpdateCredit(steps, tokens, policy.weight(tokens, steps, averaged=rules.averaged))


def observed(
    rules: FragmentRules,
    state: State,
    manifest: wire.Manifest,
    given: UpdateCredit,
    stored_at_s: float,
) -> Member:
    """A learner's member state after it has announced an update."""
    learner, member = manifest.learner, state.members[manifest.learner]
    had_s = available_s(member, stored_at_s, state.now_s)
    most = steps_per_s(rules.bounds, learner, member, state.members.others_rate(learner))
    # Its own word, which knows what it waited for, as far as it is believed; what it was credited
    # with took no longer than all its time.
    told = 1 / manifest.step_time_s if manifest.step_time_s > 1 / GREATEST else 0.0
    speed = min(most, max(told, _over(given.steps, had_s, most), FADING * member.speed))
    # The least time in which it can have done what it is credited with. What is left counts for its
    # next update: this one may have been on its way for as long as the one before was announced,
    # for one is under way at a time. A bus that was away, a busy machine or a slow link would else
    # take time from one update, and give none to the next.
    usual = state.members.others_tokens_rate(learner)
    heaviest_per_s = greatest_weight(rules, learner, usual, 1.0)
    needed_s = max(given.steps / most, policy.weight(given.tokens, given.steps) / heaviest_per_s)
    left_s = min(had_s - needed_s, passed_s(member, stored_at_s, state.now_s))
    claimed = min(manifest.tokens / manifest.steps, GREATEST)
    return member._replace(
        final=member.final or manifest.final,
        step_time_s=policy.ema(member.step_time_s, manifest.step_time_s),
        tokens_per_step=policy.ema(member.tokens_per_step, claimed),
        weight=policy.ema(member.weight, given.weight),
        heard_at_s=stored_at_s,
        read_at_s=state.now_s,
        speed=speed,
        unused_s=max(0.0, left_s),
    )


def _over(steps: int, time_s: float, most: float) -> float:
    """Steps a second, at most so many."""
    return min(steps / time_s, most) if time_s > steps / GREATEST else most


def greatest_norm(bounds: BoundsSection, state: State, learner: str) -> float:
    """The norm of a credited step that an update of a learner may be merged with."""
    # As others' updates were merged, those of the open round with them.
    usual = state.members.others_norm(learner)
    return math.inf if usual is None else bounds.norm_clip * usual


def clip(
    bounds: BoundsSection, state: State, learner: str, given: UpdateCredit, norm: float
) -> float:
    """The factor that shortens an update; 1 leaves it as it is."""
    most = greatest_norm(bounds, state, learner) * given.steps
    return 1.0 if norm <= most else most / norm
