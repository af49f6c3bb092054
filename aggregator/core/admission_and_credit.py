"""The rules of admission: which updates are rejected, what they cost, what they are credited with.

Each learner has an allowance of announcements, from which its messages are paid. A manifest claims
steps and tokens; an update is *credited* with the part of these claims that is plausible. Steps
take time, and the tape shows how much time a learner had. Tokens and weight cannot be measured:
there the claims of the other learners show what is usual, by upper medians, which no single learner
can raise and no minority can lower. With fewer than two other learners there is no median, and
claims are believed.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from diloco.aggregator.core import events
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.members import GREATEST, Member
from diloco.aggregator.core.round_and_weight_formulas import FragmentRules
from diloco.aggregator.core.state import Allowance, Quarantine, State
from diloco.aggregator.core.updates import RejectedUpdate, Resolved, UpdateCredit, UpdateId
from diloco.common.process.config import BoundsSection
from diloco.common.protocol import names, slices, wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.shards import shard_bytes, shard_ranges

# A full allowance is what this many seconds refill.
BURST_S = 10.0
# Each this many bytes of a message cost one announcement; usual manifests are shorter.
ANNOUNCEMENT_BYTES = 4096
# A rejection costs its sender this many announcements, as outside of rounds it needs a record.
REJECTION_COST = 10.0


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
    # Judged by the order on the tape: an update stored before the newer join is honest work and is
    # merged. An update stored later comes from an older process, whose steps the newer one may
    # train again (invariant 4).
    if manifest.incarnation < member.incarnation < event.stream_seq:
        return Reason.SUPERSEDED, f"incarnation {member.incarnation} joined before it was stored"
    if state.final:
        return Reason.ENDED, "the fragment's last version is committed"
    # Rejected, not ignored: its learner, once released, must not wait for an answer for ever.
    shut_out = quarantined(state, manifest)
    if shut_out is not None:
        return shut_out
    if manifest.incarnation in member.not_holding:
        return (
            Reason.NOT_HELD,
            f"the join of incarnation {manifest.incarnation} does not name module {rules.module!r}",
        )
    wrong = malformed(rules, manifest)
    if wrong is not None:
        return wrong
    return wrong_base(rules, state, manifest)


def malformed(rules: FragmentRules, manifest: wire.Manifest) -> tuple[Reason, str] | None:
    """Returns (reason, detail) if the manifest alone shows the update to be unusable, else None."""
    # With another layout the same codes belong to other parameters.
    if manifest.layout != rules.layout:
        return Reason.LAYOUT, f"layout {manifest.layout}, the run has {rules.layout}"
    if manifest.codec != rules.codec:
        return Reason.CODEC, f"codec {manifest.codec}, the run has {rules.codec}"
    return _wrong_shards(rules, manifest)


class _OwnShards(NamedTuple):
    """The run's own division of a fragment into shards: slices and number of blocks of each."""

    slices: list[tuple[wire.Slice, ...]]
    counts: list[int]


@lru_cache
def _cut(size: int, block: int, shard_elements: int) -> _OwnShards:
    """Returns the run's division of a fragment, which all single-device learners use; cached."""
    ranges = shard_ranges(size, block, shard_elements)
    return _OwnShards(
        [slices.of_range(start, stop, block) for start, stop in ranges],
        [(stop - start) // block for start, stop in ranges],
    )


_size_bytes = lru_cache(shard_bytes)


def _wrong_shards(rules: FragmentRules, manifest: wire.Manifest) -> tuple[Reason, str] | None:
    cut = _cut(rules.size, rules.block, rules.shard_elements)
    held = [shard.slices for shard in manifest.shards]
    try:
        counts = (
            cut.counts
            if held == cut.slices
            else slices.partition(held, rules.size // rules.block, max(cut.counts))
        )
    except WireError as error:
        return error.reason, error.message
    # Shards must be under the sender's own prefix, where only the sender may write: else a learner
    # could announce another's shards as its own work.
    prefix = names.shards_prefix(
        rules.run,
        manifest.learner,
        rules.fragment,
        rules.epoch,
        manifest.incarnation,
        manifest.seq,
    )
    known: set[str] = set()
    for index, (shard, count) in enumerate(zip(manifest.shards, counts, strict=True)):
        if not shard.name.startswith(prefix) or not names.is_index(shard.name[len(prefix) :]):
            return (
                Reason.NAME,
                f"object {shard.name!r} is not this update's {prefix!r} and a number",
            )
        # The same bytes in two places would count one step's progress twice (invariant 4).
        if shard.name in known:
            return Reason.NAME, f"object {shard.name!r} is two shards"
        known.add(shard.name)
        # Sizes are checked before reading, so that no claim makes a reader allocate more memory
        # than the fragment needs.
        needed = _size_bytes(rules.codec, count * rules.block, rules.block)
        if shard.size_bytes != needed:
            return (
                Reason.SIZE,
                f"shard {index} claims {shard.size_bytes} bytes, its codec needs {needed}",
            )
    return None


def quarantined(state: State, manifest: wire.Manifest) -> tuple[Reason, str] | None:
    """Returns (reason, detail) if an update's sender is quarantined, else None."""
    if manifest.learner in state.quarantined:
        return (
            Reason.QUARANTINED,
            f"{manifest.learner} is quarantined until an operator releases it",
        )
    return None


def may_announce(rules: FragmentRules, state: State, event: events.Undecoded) -> bool:
    """True if a message under an update's subject may be decoded: its sender has allowance."""
    return _allowance(rules, state, event.learner, event).left >= 1


def spend(
    rules: FragmentRules,
    state: State,
    learner: str,
    event: events.Announced | events.Undecoded,
) -> tuple[State, bool]:
    """Takes a message's cost from its sender's allowance; returns (state, whether it could pay)."""
    # A token bucket for each learner: a flood of manifests would otherwise fill everybody's
    # records, and long manifests would cost us time. The bucket may go below zero: after a long
    # message the sender must wait longer.
    before = _allowance(rules, state, learner, event)
    allowed = before.left >= 1
    after = before._replace(left=before.left - allowed * cost(event.size_bytes))
    # Messages up to `known_seq` were charged before this tenure. Charging them again would shut out
    # an honest learner after a crash of ours; not charging would make us decode a whole flood when
    # we come back. So they are charged to a separate bucket of this tenure.
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
    left = allowance(rules.bounds, before.left, before.at_s, event.stored_at_s)
    return Allowance(left, event.stored_at_s)


def cost(size_bytes: int) -> float:
    """Returns the cost of a message under an update's subject, in announcements."""
    return max(1.0, size_bytes / ANNOUNCEMENT_BYTES)


def allowance(bounds: BoundsSection, left: float, at_s: float, now_s: float) -> float:
    """Returns the allowance at `now_s` of a learner that had `left` at `at_s`, in announcements."""
    # At least one, whatever the rate, as learners of a slow fleet announce less than once in
    # BURST_S.
    most = max(1.0, bounds.max_updates_per_s * BURST_S)
    return min(most, left + bounds.max_updates_per_s * max(0.0, now_s - at_s))


def charge(state: State, refused: RejectedUpdate) -> State:
    """Charges a rejected update to its sender's allowance, unless it was charged before."""
    # An earlier owner has charged it.
    if refused.stream_seq <= state.known_seq:
        return state
    learner = refused.manifest.learner
    before = state.allowances[learner]
    after = before._replace(left=before.left - REJECTION_COST + 1)
    return state._replace(allowances=state.allowances.put(learner, after))


def overtakes(state: State, update: UpdateId) -> bool:
    """True if an update of the same incarnation was announced before and has no verdict yet.

    A verdict in a record that is being published counts: the learner may read that record before
    this machine knows that it is committed.
    """
    # By incarnation and not by learner: a new one may announce while updates of the old one wait.
    unresolved = (state.pending.lives, state.admitted.lives, state.rejected.lives)
    return any(update[:2] in lives for lives in unresolved)


def wrong_base(
    rules: FragmentRules, state: State, manifest: wire.Manifest
) -> tuple[Reason, str] | None:
    """Returns (reason, detail) if an update's base does not fit the current version, else None.

    Called when the update is announced, and again before it is merged, as an update gets staler
    while it waits.
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


def offenders(
    rules: FragmentRules, state: State, resolved: Resolved[RejectedUpdate]
) -> tuple[Quarantine, ...]:
    """Returns quarantines for learners in `resolved` whose count of offences reached the limit."""
    # An offence adds 1 to the count, and a merged update takes 1 off, down to 0: an honest learner
    # with a rare fault is never shut out, and a learner that only offends soon is.
    limit = rules.bounds.quarantine_offences
    found = {}
    for refused in resolved:
        learner = refused.manifest.learner
        member = state.members.get(learner)
        if limit and member and member.offences >= limit and learner not in state.quarantined:
            found[learner] = Quarantine(
                learner,
                f"its count of offences in fragment {rules.fragment} is {member.offences}, the "
                f"last rejection is for {refused.reason!r}: {refused.detail}"[:1000],
            )
    return tuple(found.values())


# A learner is credited with at most QUICKER times the steps a second that it was seen to take, or
# that the others' median takes (its machine may have been busy), and at most FASTEST times the
# others' median.
QUICKER = 2.0
FASTEST = 10.0
# The share of the highest rate so far that remains after an update that shows a lower one.
FADING = 0.75
# A learner's weight over a time is at most this many times the others' median: twice, and a tenth
# for what step boundaries and uploads move from one update to the next.
HEAVIEST = 2.0 * 1.1
# Once if learners may lie: of five, two that weighed twice as much would be most of a merge.
HEAVIEST_ROBUST = 1.1
# Tolerance for rounding, so that equal values are not cut.
ROUNDING = 1e-9


def passed_s(member: Member, stored_at_s: float, now_s: float) -> float:
    """Returns the seconds between a learner's previous update and a new one.

    Args:
        member: the learner's state, with the times of the previous update.
        stored_at_s: when the server stored the new update.
        now_s: when the owner received the new update, by the owner's clock.
    """
    if stored_at_s < member.heard_at_s and member.read_at_s:
        # The server's clock was set back, so use our own.
        return formulas.elapsed_s(member.read_at_s, now_s)
    return formulas.elapsed_s(member.heard_at_s, stored_at_s)


def available_s(member: Member, stored_at_s: float, now_s: float) -> float:
    """Returns the seconds of work that a new update may claim; arguments as in `passed_s`."""
    return min(member.unused_s + passed_s(member, stored_at_s, now_s), wire.GREATEST_S)


def steps_per_s(bounds: BoundsSection, learner: str, member: Member, usual: float | None) -> float:
    """Returns the most steps a second that a learner is credited with.

    Args:
        bounds: the run's bounds.
        learner: the learner's name.
        member: the learner's state.
        usual: the median of the other learners' steps a second; None: unknown.
    """
    declared = bounds.of(learner).max_steps_per_s
    if declared:
        return declared
    rate = bounds.max_steps_per_s
    if member.speed:
        rate = min(rate, QUICKER * max(member.speed, usual or 0.0))
    return rate if usual is None else min(rate, FASTEST * usual)


def greatest_weight(rules: FragmentRules, learner: str, usual: float | None, had_s: float) -> float:
    """Returns the greatest weight that `had_s` seconds of a learner's work are credited with.

    Infinity if `usual`, the weight of one second of the other learners' work, is unknown (None), or
    if the operator has declared the learner's bounds.
    """
    declared = rules.bounds.of(learner)
    if declared.max_steps_per_s and declared.max_tokens_per_step:
        return math.inf
    # By time and not by update, so that work done during an outage counts in full, as does that of
    # learners that send seldom.
    heaviest = HEAVIEST_ROBUST if rules.robust else HEAVIEST
    return math.inf if usual is None else heaviest * min(usual, GREATEST) * had_s


def credit(
    rules: formulas.FragmentRules, state: State, manifest: wire.Manifest, stored_at_s: float
) -> UpdateCredit:
    """Returns the steps, tokens and weight that an announced update is credited with."""
    bounds = rules.bounds
    learner, members = manifest.learner, state.members
    had_s = available_s(members[learner], stored_at_s, state.now_s)
    rate = steps_per_s(bounds, learner, members[learner], members.others_rate(learner))
    most = rate * had_s * (1 + ROUNDING)
    steps = manifest.steps if manifest.steps <= most else max(1, int(most))
    # Tokens shrink with the credited steps, so that the rest does not weigh more per step.
    tokens = manifest.tokens * steps // manifest.steps
    declared = bounds.of(learner).max_tokens_per_step or bounds.max_tokens_per_step
    tokens = max(1, min(tokens, declared * steps))
    heaviest = greatest_weight(rules, learner, members.others_tokens_rate(learner), had_s)
    if formulas.weight(tokens, steps) > heaviest * (1 + ROUNDING):
        tokens = max(1, int(math.sqrt(heaviest * steps)))
    return UpdateCredit(steps, tokens, formulas.weight(tokens, steps, averaged=rules.averaged))


def observed(
    rules: FragmentRules,
    state: State,
    manifest: wire.Manifest,
    given: UpdateCredit,
    stored_at_s: float,
) -> Member:
    """Returns a learner's `Member` after it has announced an update with the credit `given`."""
    learner, member = manifest.learner, state.members[manifest.learner]
    had_s = available_s(member, stored_at_s, state.now_s)
    most = steps_per_s(rules.bounds, learner, member, state.members.others_rate(learner))
    # The learner's claim, which excludes its waits, up to `most`; at least the credited steps
    # divided by the time that it had.
    told = 1 / manifest.step_time_s if manifest.step_time_s > 1 / GREATEST else 0.0
    speed = min(most, max(told, _over(given.steps, had_s, most), FADING * member.speed))
    # The least time in which it can have done what it is credited with. The rest is credited to its
    # next update: only one is in flight at a time, so this one may have waited for the one before.
    # Else an outage, a busy machine or a slow link would take time from one update, and give none
    # to the next.
    usual = state.members.others_tokens_rate(learner)
    heaviest_per_s = greatest_weight(rules, learner, usual, 1.0)
    needed_s = max(given.steps / most, formulas.weight(given.tokens, given.steps) / heaviest_per_s)
    left_s = min(had_s - needed_s, passed_s(member, stored_at_s, state.now_s))
    claimed = min(manifest.tokens / manifest.steps, GREATEST)
    return member._replace(
        final=member.final or manifest.final,
        step_time_s=formulas.ema(member.step_time_s, manifest.step_time_s),
        tokens_per_step=formulas.ema(member.tokens_per_step, claimed),
        weight=formulas.ema(member.weight, given.weight),
        heard_at_s=stored_at_s,
        read_at_s=state.now_s,
        speed=speed,
        unused_s=max(0.0, left_s),
    )


def _over(steps: int, time_s: float, most: float) -> float:
    """Returns `steps` per second of `time_s`, at most `most`."""
    return min(steps / time_s, most) if time_s > steps / GREATEST else most


def greatest_norm(bounds: BoundsSection, state: State, learner: str) -> float:
    """Returns the greatest norm per credited step of a learner's update; infinity if unknown."""
    # From the norms of the others' merged updates, those of the open round included.
    usual = state.members.others_norm(learner)
    return math.inf if usual is None else bounds.norm_clip * usual


def clip(
    bounds: BoundsSection, state: State, learner: str, given: UpdateCredit, norm: float
) -> float:
    """Returns the factor in (0, 1] that shortens an update of L2 norm `norm` if it is too long."""
    most = greatest_norm(bounds, state, learner) * given.steps
    return 1.0 if norm <= most else most / norm
