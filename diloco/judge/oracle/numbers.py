"""The numbers of the rules, as docs/design/design.md states them, "A round and its merge".

No code is shared with the aggregator: both compute the same values separately.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from diloco.common.process.config import BoundsSection, RunSettings, StalenessSection

# Moving averages of times and weights move by half of the distance to each new value.
MOVE = 0.5
# A learner's credited speed is at most twice its observed speed, or twice the others' median, and
# never above ten times that median; each update forgets a quarter of the observed speed.
TWICE = 2.0
BELIEVED = 10.0
REMEMBERED = 0.75
# The greatest weight per second of a learner, as a multiple of the median of the others; the second
# if learners may lie.
GREATEST_SHARE = 2.2
GREATEST_SHARE_OF_OTHERS = 1.1
# After this many rounds in a row without its work a learner is no longer awaited.
MISSES = 3
# A relative tolerance for rounding; and a bound: products of two numbers up to it are finite.
SAME = 1e-9
FINITE = 1e150
# An allowance grows for at most this many seconds. Prices are in announcements: a rejection costs
# ten, and a long message one for each 4 KiB.
ALLOWANCE_S = 10.0
SHORT_BYTES = 4 << 10
REJECTION = 10.0
# The greatest times and sums that a message can hold.
LONGEST_S = 1e12


def weight(tokens: int, steps: int, *, averaged: bool = False) -> float:
    """Returns an update's weight: tokens squared over steps; of averaged state, its tokens."""
    return tokens * tokens / (tokens if averaged else steps)


def discount(rule: StalenessSection, staleness: int) -> float:
    """Returns the discount of an update that is `staleness` versions old, by the rule in force."""
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
    """Returns a moving average after one more value; an average of 0 is replaced by the value."""
    return average * (1 - MOVE) + value * MOVE if average else value


def commit_s(average_s: float, took_s: float) -> float:
    """Returns the moving average of commit times; a time counts at most twice the average."""
    return moved(average_s, min(took_s, 2 * average_s) if average_s else took_s)


def between_s(earlier_s: float, later_s: float) -> float:
    """Returns the seconds between two times, at least 0 and at most what a message can hold."""
    return max(0.0, min(later_s - earlier_s, LONGEST_S))


def offset(fragment: int, fragments: int, interval: int) -> int:
    """Returns the step at which a fragment is first due: P fragments divide H steps evenly."""
    share = Fraction((fragment + 1) * interval, fragments)
    return math.floor(share) if fragments <= interval else math.ceil(share)


def clock_after(settings: RunSettings, fragment: int, step: int) -> int:
    """Returns the global step of the version after the one at `step`, ignoring the run's end."""
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
    """Returns the seconds that the fastest learner needs for `quorum.pace` times `steps` steps.

    The result is 0 in lockstep, and while no step time is known. A step time counts as at least
    half of the median learner's. If learners may lie, the median step time itself is used.
    """
    told = [value for value in step_times_s if value > 0]
    if settings.sync.mode == "lockstep" or not told:
        return 0.0
    median_s = lower_median(told)
    step_s = median_s if settings.run.trust == "others" else max(min(told), 0.5 * median_s)
    return settings.quorum.pace * steps * step_s


def lower_median(values: Sequence[float]) -> float:
    """Returns the lower median of the values above 0; 0 if there is none."""
    told = sorted(value for value in values if value > 0)
    return told[(len(told) + 1) // 2 - 1] if told else 0.0


def upper_median(values: Sequence[float]) -> float | None:
    """Returns the upper median of the values above 0; None if there are fewer than two."""
    told = sorted((value for value in values if value > 0), reverse=True)
    return told[(len(told) + 1) // 2 - 1] if len(told) > 1 else None


def grace_s(
    settings: RunSettings, step_times_s: Sequence[float], quorum_s: float, sync_s: float
) -> float:
    """Returns the grace window: gamma (tau x step time - quorum_s - sync_s) within [0, cap].

    gamma is `quorum.grace_fraction`, tau `sync.overlap_steps`, cap `quorum.grace_cap_s`. The step
    time is the lower median; `quorum_s` and `sync_s` are the moving averages of `wire.PolicyState`.
    """
    step_s = lower_median(step_times_s)
    if not step_s:
        return 0.0
    room_s = settings.sync.overlap_steps * step_s - (quorum_s + sync_s)
    quorum = settings.quorum
    return max(0.0, min(quorum.grace_cap_s, quorum.grace_fraction * room_s))


def refilled(bounds: BoundsSection, left: float, since_s: float) -> float:
    """Returns an allowance of `left` announcements after `since_s` more seconds."""
    most = max(1.0, ALLOWANCE_S * bounds.max_updates_per_s)
    return min(most, left + max(0.0, since_s) * bounds.max_updates_per_s)


def price(size_bytes: int) -> float:
    """Returns the price of a message of this size, in announcements."""
    return size_bytes / SHORT_BYTES if size_bytes > SHORT_BYTES else 1.0


def growth(learners: int) -> float:
    """Returns the factor of the outer step for a number of learners, where learners may lie."""
    return float((max(5, min(8, learners)) / 5) ** 0.5)


def near(expected: float, found: float) -> bool:
    """True if two floats are equal up to the order of their computation.

    Times since the epoch may differ by up to a tenth of a millisecond.
    """
    return math.isclose(expected, found, rel_tol=1e-13, abs_tol=1e-9)
