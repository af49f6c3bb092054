"""The rules of admission: which updates are merged, from whom, and how many may be announced."""

import math

from diloco.aggregator.core import events, policy, quarantine
from diloco.aggregator.core.policy import FragmentRules
from diloco.aggregator.core.state import Allowance, State
from diloco.aggregator.core.updates import RejectedUpdate, UpdateId
from diloco.common.protocol import wire
from diloco.common.protocol.reasons import Reason


def judge(rules: FragmentRules, state: State, event: events.Announced) -> tuple[Reason, str] | None:
    """Returns (reason, detail) if an announced update is to be rejected at once, else None."""
    manifest = event.manifest
    member = state.members.get(manifest.learner)
    # An incarnation is the sequence of a join. If no such join came before, the learner made it up;
    # an honest learner joins before it announces updates.
    if member is None or manifest.incarnation > member.incarnation:
        return (
            Reason.UNKNOWN_INCARNATION,
            f"no join of incarnation {manifest.incarnation} precedes it",
        )
    # Judged by its place on the tape: an update stored before the newer join is honest work and is
    # merged. One stored later comes from a second process, whose steps the new life may train again
    # (invariant 4).
    if manifest.incarnation < member.incarnation < event.stream_seq:
        return Reason.SUPERSEDED, f"incarnation {member.incarnation} joined before it was stored"
    if state.final:
        return Reason.ENDED, "the fragment's last version is committed"
    # Rejected, not ignored: its learner, once released, must not wait for an answer for ever.
    shut_out = quarantine.quarantined(state, manifest)
    if shut_out is not None:
        return shut_out
    wrong = policy.malformed(rules, manifest)
    if wrong is not None:
        return wrong
    return wrong_base(rules, state, manifest)


def may_announce(rules: FragmentRules, state: State, event: events.Undecoded) -> bool:
    """True if a message under an update's subject may be decoded: its sender has allowance."""
    return _allowance(rules, state, event.learner, event).left >= 1


def spend(
    rules: FragmentRules,
    state: State,
    learner: str,
    event: events.Announced | events.Undecoded,
) -> tuple[State, bool]:
    """Takes a message's cost from its sender's allowance; returns whether it had any left."""
    # A token bucket for each learner: a flood of manifests would otherwise fill everybody's
    # records, and long manifests would cost us time. It may go below zero: a long message makes its
    # sender wait longer before the next.
    before = _allowance(rules, state, learner, event)
    allowed = before.left >= 1
    after = before._replace(left=before.left - allowed * policy.cost(event.size_bytes))
    # Messages up to `known_seq` were charged before this aggregator's life. Charging them again
    # would shut out an honest learner after a crash of ours; not charging would make us decode a
    # whole flood when we come back. So they are charged to a separate bucket of this life.
    if event.stream_seq <= state.known_seq:
        return state._replace(met_again=state.met_again.put(learner, after)), allowed
    return state._replace(allowances=state.allowances.put(learner, after)), allowed


def _allowance(
    rules: FragmentRules,
    state: State,
    learner: str,
    event: events.Announced | events.Undecoded,
) -> Allowance:
    """Returns a learner's allowance at the time when its message was stored."""
    buckets = state.met_again if event.stream_seq <= state.known_seq else state.allowances
    # The time may go backwards too: a server's clock that was set back must not stop the refilling.
    # What is then refilled twice is at most a full allowance.
    before = buckets.get(learner, Allowance(math.inf, event.stored_at_s))
    left = policy.allowance(rules.bounds, before.left, before.at_s, event.stored_at_s)
    return Allowance(left, event.stored_at_s)


def charge(state: State, refused: RejectedUpdate) -> State:
    """Takes from the sender's allowance what a rejection costs, if it was not taken before."""
    # The life before this one has charged it.
    if refused.stream_seq <= state.known_seq:
        return state
    learner = refused.manifest.learner
    before = state.allowances[learner]
    after = before._replace(left=before.left - policy.REJECTION_COST + 1)
    return state._replace(allowances=state.allowances.put(learner, after))


def overtakes(state: State, update: UpdateId) -> bool:
    """True if the learner announced an update while an earlier one of its life is unanswered.

    Updates in a record that is being published count as answered: the learner may read the record
    before this machine knows that it is committed.
    """
    # By life and not by learner: a new life may announce while updates of the old one still wait.
    unresolved = (state.pending.lives, state.admitted.lives, state.rejected.lives)
    return any(update[:2] in lives for lives in unresolved)


def wrong_base(
    rules: FragmentRules, state: State, manifest: wire.Manifest
) -> tuple[Reason, str] | None:
    """Returns (reason, detail) if an update's base does not fit the current version, else None.

    Called when the update is announced, and again when it is merged, as waiting makes it stale.
    """
    # Merging it would bring back versions that an operator has rolled back.
    if manifest.base_version < state.floor:
        return Reason.ROLLED_BACK, f"based on version {manifest.base_version}, before the rollback"
    # Nobody can have built on what is not committed.
    staleness = state.version - manifest.base_version
    if staleness < 0:
        return (
            Reason.FUTURE,
            f"based on version {manifest.base_version}, the newest is {state.version}",
        )
    # Equal digests show that learner and aggregator have the same bits. Digests of older versions
    # are not stored; updates on them are discounted.
    if staleness == 0 and manifest.base_digest != state.view_digest:
        return (
            Reason.BASE_DIGEST,
            f"view {manifest.base_digest}, version {state.version} is another",
        )
    # The devices hold other bits: memory errors, or a decoder of another release.
    if manifest.held_digest not in (None, manifest.base_digest):
        held = f"view {manifest.held_digest} is held as version {manifest.base_version}"
        return Reason.VIEW, f"{held}, which is {manifest.base_digest}"
    # Off by default: old updates are discounted, and rejecting them loses tokens (invariant 4
    # counts these as rejected).
    if rules.staleness.max_versions and staleness > rules.staleness.max_versions:
        return Reason.STALE, f"{staleness} versions old, at most {rules.staleness.max_versions}"
    return None
