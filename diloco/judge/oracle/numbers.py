"""The numbers of the rules, as docs/design/design.md states them, "A round and its merge".

Nothing here is shared with the aggregator: what both compute, they compute apart.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from diloco.common.process.config import BoundsSection, RunSettings, StalenessSection

# Moving averages of times and weights move half of the way to each new value.
MOVE = 0.5
# Nobody is credited with more than twice the steps that he was seen to take, nor ten times those of
# the others' median; a quarter of what he was seen to take is forgotten with each update.
TWICE = 2.0
BELIEVED = 10.0
REMEMBERED = 0.75
# Nobody weighs more than twice the others' median, and a tenth of it; where learners may lie, once.
GREATEST_SHARE = 2.2
GREATEST_SHARE_OF_OTHERS = 1.1
# A learner without work in so many rounds of others is awaited no longer.
MISSES = 3
# Numbers equal but for rounding; and numbers that stay finite when multiplied.
SAME = 1e-9
FINITE = 1e150
# An allowance is of ten seconds; a rejection costs ten announcements, and a long message one for
# each 4 KiB.
ALLOWANCE_S = 10.0
SHORT_BYTES = 4 << 10
REJECTION = 10.0
# Times and sums that a message can hold.
LONGEST_S = 1e12


def weight(tokens: int, steps: int, *, averaged: bool = False) -> float:
    """Quantity times quality: tokens squared by steps; of averaged state, tokens."""
    return tokens * tokens / (tokens if averaged else steps)


def discount(rule: StalenessSection, staleness: int) -> float:
    """S(s), by the rule in force."""
    if rule.rule == "polynomial":
        return math.pow(1 + staleness, -rule.power)
    if rule.rule == "exponential":
        return math.exp(-(rule.rate * staleness))
    if rule.rule == "inverse":
        return 1.0 / (1.0 + rule.rate * staleness)
    if rule.rule == "hinge" and staleness > rule.threshold:
        return 1.0 / (1.0 + rule.rate * (staleness - rule.threshold))
    return 1.0


def moved(average: float, value: float) -> float:
    """A moving average after one more value; 0 has seen none."""
    return average * (1 - MOVE) + value * MOVE if average else value


def commit_s(average_s: float, took_s: float) -> float:
    """The moving average of commits: an outlier counts as twice the average."""
    return moved(average_s, min(took_s, 2 * average_s) if average_s else took_s)


def between_s(earlier_s: float, later_s: float) -> float:
    """Seconds that have passed, never negative, never longer than a message can hold."""
    return max(0.0, min(later_s - earlier_s, LONGEST_S))


def offset(fragment: int, fragments: int, interval: int) -> int:
    """The step of its interval at which a fragment is first due: P spread evenly over H steps."""
    share = Fraction((fragment + 1) * interval, fragments)
    return math.floor(share) if fragments <= interval else math.ceil(share)


def clock_after(settings: RunSettings, fragment: int, step: int) -> int:
    """The run's clock at a fragment's next version, without the run's end."""
    sync = settings.sync
    if step >= sync.warmup_steps:
        interval = sync.interval_steps
        return step + interval if step else offset(fragment, sync.fragments, interval)
    short = sync.warmup_interval_steps
    following = step + short if step else offset(fragment, sync.fragments, short)
    if following < sync.warmup_steps:
        return following
    return sync.warmup_steps + offset(fragment, sync.fragments, sync.interval_steps)


def pace_s(settings: RunSettings, step_times_s: Sequence[float], steps: int) -> float:
    """Pace x `steps` steps of the fastest live learner, in seconds; 0 in lockstep and at first.

    No step counts as shorter than half of the median learner's. Where learners
    may lie, of the median one.
    """
    told = [value for value in step_times_s if value > 0]
    if settings.sync.mode == "lockstep" or not told:
        return 0.0
    median_s = lower_median(told)
    step_s = median_s if settings.run.trust == "others" else max(min(told), 0.5 * median_s)
    return settings.quorum.pace * steps * step_s


def lower_median(values: Sequence[float]) -> float:
    """The lower median of those above 0; 0 if there is none."""
    told = sorted(value for value in values if value > 0)
    return told[(len(told) + 1) // 2 - 1] if told else 0.0


def upper_median(values: Sequence[float]) -> float | None:
    """The upper median of those above 0; None if they are fewer than two."""
    told = sorted((value for value in values if value > 0), reverse=True)
    return told[(len(told) + 1) // 2 - 1] if len(told) > 1 else None


def grace_s(
    settings: RunSettings, step_times_s: Sequence[float], quorum_s: float, sync_s: float
) -> float:
    """Grace: gamma (tau x step time - time to quorum - sync time) within [0, cap]."""
    step_s = lower_median(step_times_s)
    if not step_s:
        return 0.0
    room_s = settings.sync.overlap_steps * step_s - (quorum_s + sync_s)
    quorum = settings.quorum
    return max(0.0, min(quorum.grace_cap_s, quorum.grace_fraction * room_s))


def refilled(bounds: BoundsSection, left: float, since_s: float) -> float:
    """An allowance after some seconds."""
    most = max(1.0, ALLOWANCE_S * bounds.max_updates_per_s)
    return min(most, left + max(0.0, since_s) * bounds.max_updates_per_s)


def price(size_bytes: int) -> float:
    """The price of a message, which is taken from an allowance."""
    return size_bytes / SHORT_BYTES if size_bytes > SHORT_BYTES else 1.0


def near(expected: float, found: float) -> bool:
    """Whether two floats are the same number, in whatever order it was computed.

    Of times since the epoch that is a tenth of a millisecond.
    """
    return math.isclose(expected, found, rel_tol=1e-13, abs_tol=1e-9)
