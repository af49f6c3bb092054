"""The credit of an update: steps that can be measured are not asked, and nobody judges himself.

Steps take time, and the tape says how much of it a learner had. Tokens and weight nobody can
measure: there others' claims say what is usual, by upper medians that no single learner moves up,
and no minority down. With fewer than two others there is no median, and claims are believed.
"""

import math

from diloco.aggregator.core import policy
from diloco.aggregator.core.members import GREATEST, Member
from diloco.aggregator.core.state import State
from diloco.aggregator.core.updates import UpdateCredit
from diloco.common.process.config import BoundsSection
from diloco.common.protocol import wire

# A learner's steps a second may be so many times those that it was seen to take, and so many times
# those of the median of the others.
QUICKER = 2.0
FASTEST = 10.0
# How much of the highest rate seen so far the next update may take off it. An outage looks like a
# slow learner until the update after it has come.
FADING = 0.75
# A learner's weight may be so many times the median of the others, over the time that it had:
# twice, and a tenth for what step boundaries and uploads add to one update and take from the next.
HEAVIEST = 2.0 * 1.1
# What is equal but for rounding is not cut.
ROUNDING = 1e-9


def passed_s(member: Member, stored_at_s: float, now_s: float) -> float:
    """Time since a learner's update before, when one is stored and read now."""
    if stored_at_s < member.heard_at_s and member.read_at_s:
        # The server's clock was set back; ours is another.
        return policy.elapsed_s(member.read_at_s, now_s)
    return policy.elapsed_s(member.heard_at_s, stored_at_s)


def available_s(member: Member, stored_at_s: float, now_s: float) -> float:
    """Time of a learner's that no update of it has claimed, when one is stored and read now."""
    return min(member.unused_s + passed_s(member, stored_at_s, now_s), wire.GREATEST_S)


def steps_per_s(bounds: BoundsSection, learner: str, member: Member, usual: float | None) -> float:
    """The rate at which steps are credited to a learner, where that of the others is `usual`."""
    declared = bounds.of(learner).max_steps_per_s
    if declared:
        return declared
    rate = bounds.max_steps_per_s
    if member.speed:
        rate = min(rate, QUICKER * member.speed)
    return rate if usual is None else min(rate, FASTEST * usual)


def greatest_weight(
    bounds: BoundsSection, learner: str, usual: float | None, had_s: float
) -> float:
    """The weight that a learner's work of so many seconds may have.

    `usual`: that of a second of the others'.
    """
    declared = bounds.of(learner)
    if declared.max_steps_per_s and declared.max_tokens_per_step:
        return math.inf
    # By time and not by update: the work of an outage counts in full, and so does that of who
    # sends seldom.
    return math.inf if usual is None else HEAVIEST * min(usual, GREATEST) * had_s


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
    heaviest = greatest_weight(bounds, learner, members.others_tokens_rate(learner), had_s)
    if policy.weight(tokens, steps) > heaviest * (1 + ROUNDING):
        tokens = max(1, int(math.sqrt(heaviest * steps)))
    return UpdateCredit(steps, tokens, policy.weight(tokens, steps, averaged=rules.averaged))


def observed(
    bounds: BoundsSection,
    state: State,
    manifest: wire.Manifest,
    given: UpdateCredit,
    stored_at_s: float,
) -> Member:
    """A learner's member state after it has announced an update."""
    learner, member = manifest.learner, state.members[manifest.learner]
    had_s = available_s(member, stored_at_s, state.now_s)
    most = steps_per_s(bounds, learner, member, state.members.others_rate(learner))
    # Until it was seen, its own word: too high a rate would leave it time that it has used up.
    told = 1 / manifest.step_time_s if manifest.step_time_s > 1 / GREATEST else most
    before = member.speed or min(most, told)
    # It took these steps in the time since the update before, or in what was unused as well:
    # which of the two nobody knows, so as it was is believed as far as it can be.
    slowest = _over(given.steps, had_s, most)
    quickest = _over(given.steps, passed_s(member, stored_at_s, state.now_s), most)
    speed = max(slowest, min(before, quickest), FADING * before)
    claimed = min(manifest.tokens / manifest.steps, GREATEST)
    return member._replace(
        final=member.final or manifest.final,
        step_time_s=policy.ema(member.step_time_s, manifest.step_time_s),
        tokens_per_step=policy.ema(member.tokens_per_step, claimed),
        weight=policy.ema(member.weight, given.weight),
        heard_at_s=stored_at_s,
        read_at_s=state.now_s,
        speed=speed,
        unused_s=max(0.0, had_s - given.steps / speed) if speed else had_s,
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
