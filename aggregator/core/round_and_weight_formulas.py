"""Formulas of the aggregator's rules, as pure functions: weight, discount, quorum, pace, grace.

`rounds.py` uses them to decide when a round closes, `admission_and_credit.py` to compute weights.
No IO, clock, randomness or logging here; times are arguments, in seconds.
"""

import math
from dataclasses import dataclass

from diloco.common.process.config import (
    BoundsSection,
    QuorumSection,
    RunSettings,
    StalenessSection,
    settings_of,
)
from diloco.common.protocol import wire
from diloco.common.protocol.codecs import Codec
from diloco.common.protocol.layout import Layout, Rhythm

# Weight of the newest observation in the moving averages of times. The paper names EMAs without
# constants (P §3); a half follows a learner that changed its speed within a few rounds.
EMA = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentRules:
    """The run's settings and sizes that the machine of one fragment uses.

    Attributes:
        run: the run's name.
        epoch: the epoch of the tape.
        steps: the run's length in global steps, `run.steps`.
        fragment: the fragment's index.
        module: the fragment's module; "": the model is one module.
        size: elements of the fragment's vector.
        layout: the layout's digest.
        codec: codec of the fragment's updates.
        block: elements of a block.
        shard_elements: most elements of a shard.
        rhythm: the intervals at which the fragment is due, in inner steps.
        overlap_steps: tau, the inner steps that an update and its version may take to travel.
        staleness, quorum, bounds: these sections of the settings.
        lockstep: True if every round waits for all learners.
        averaged: True if the fragment has averaged state (`TensorHint.kind`) and no parameters.
        robust: True if learners may lie: quorums are larger, and limits of weights lower.
    """

    run: str
    epoch: int
    steps: int
    fragment: int
    module: str
    size: int
    layout: str
    codec: Codec
    block: int
    shard_elements: int
    rhythm: Rhythm
    overlap_steps: int
    staleness: StalenessSection
    quorum: QuorumSection
    bounds: BoundsSection
    lockstep: bool
    averaged: bool
    robust: bool


def fragment_rules(
    settings: RunSettings, layout: Layout, fragment: int, epoch: int = 0
) -> FragmentRules:
    """Returns the rules of one fragment of a run, on the tape of an epoch."""
    settings = settings_of(settings, layout, fragment)
    sync = settings.sync
    return FragmentRules(
        run=settings.run.name,
        epoch=epoch,
        steps=settings.run.steps,
        fragment=fragment,
        module=layout.fragments[fragment].module,
        size=layout.fragments[fragment].size,
        layout=layout.digest,
        codec=sync.codec,
        block=sync.block,
        shard_elements=sync.shard_elements,
        rhythm=sync.rhythm(fragment),
        overlap_steps=sync.overlap_steps,
        staleness=settings.staleness,
        quorum=settings.quorum,
        bounds=settings.bounds,
        lockstep=sync.mode == "lockstep",
        averaged=layout.fragments[fragment].averaged,
        robust=settings.robust,
    )


def weight(tokens: int, steps: int, *, averaged: bool = False) -> float:
    """Returns the weight of an update: quantity times quality, tokens x (tokens / steps) (P §3)."""
    # Averaged state is a mean over tokens, whatever the number of steps.
    if averaged:
        return float(tokens)
    # Quality is tokens per step: a large batch has a less noisy gradient, and counts for more than
    # the same tokens in many small steps.
    return tokens * (tokens / steps)


def discount(rule: StalenessSection, staleness: int) -> float:
    """Returns S(s), the factor for an update s versions old (docs/design/paper.md, section 4)."""
    # It shrinks the update itself and not only its share: it multiplies numerators and not
    # denominators, so that a stale update alone in its round is discounted too.
    match rule.rule:
        case "constant":
            return 1.0
        case "polynomial":
            return float((1 + staleness) ** -rule.power)
        case "hinge":
            late = staleness - rule.threshold
            return 1.0 if late <= 0 else 1 / (rule.rate * late + 1)
        case "exponential":
            return math.exp(-rule.rate * staleness)
        case "inverse":
            return 1 / (1 + rule.rate * staleness)


def ema(average: float, value: float) -> float:
    """Returns a moving average after one more value; `average` is 0 before the first value."""
    # It starts with the first value and not with 0, which would understate the first rounds.
    return value if average == 0 else average + EMA * (value - average)


def sync_s(average_s: float, took_s: float) -> float:
    """Returns the moving average of commit times, each counted as at most twice the average.

    A commit that stores a snapshot takes longest. If its time counted in full, the rounds after it
    would have no grace, and the next round would close with the fastest learner alone.
    """
    return ema(average_s, min(took_s, 2 * average_s) if average_s else took_s)


def elapsed_s(since_s: float, until_s: float) -> float:
    """Returns the seconds from one time to another, in [0, `wire.GREATEST_S`]."""
    return min(max(0.0, until_s - since_s), wire.GREATEST_S)


def effective_quorum(quorum: QuorumSection, live: int) -> int:
    """Returns min(K, live learners), at least 1; K is `quorum.min_learners`."""
    # A smaller fleet never has K learners (invariant 6: no progress depends on absent learners).
    return max(1, min(quorum.min_learners, live))


def robust_quorum(live: int, version: int) -> int:
    """Returns the quorum if learners may lie: two thirds of `live`; at least 3 for version 1."""
    # Else fast learners would be alone in rounds, where liars could be the majority. The first
    # round has no earlier norms to judge by, and the first learner to join may lie.
    return max(math.ceil(2 * live / 3), 1 if version else 3)


# The default learning rate suits a mean of this many updates; longer steps were tried up to a mean
# of this many.
SHORT_MEAN, LARGEST_MEAN = 5, 8


def mean_growth(senders: int) -> float:
    """Returns the outer step's factor that makes up for the short mean of many updates (ADR 81)."""
    # The components that differ among updates shrink with the root of the number of updates.
    return math.sqrt(min(max(senders, SHORT_MEAN), LARGEST_MEAN) / SHORT_MEAN)


def pace_s(rules: FragmentRules, fastest_s: float, interval_steps: int | None = None) -> float:
    """Returns the shortest time between two rounds of a fragment: H steps of the fastest learner.

    Args:
        rules: the fragment's rules, with the factor `quorum.pace`.
        fastest_s: step time of the fastest learner; 0: unknown.
        interval_steps: steps between these two rounds; None: H.
    """
    # Lockstep waits for all anyway; and before any step time is known there is no pace.
    if rules.lockstep or not fastest_s:
        return 0.0
    return rules.quorum.pace * (interval_steps or rules.rhythm.interval_steps) * fastest_s


def grace_s(rules: FragmentRules, usual_s: float, quorum_s: float, sync_s: float) -> float:
    """Returns the seconds of grace after the quorum: gamma x (tau x step - (quorum + sync)).

    The result is limited to [0, `quorum.grace_cap_s`]. Source: P Eq. 3.

    Args:
        rules: the fragment's rules: gamma is `quorum.grace_fraction`, tau is `overlap_steps`.
        usual_s: the median learner's step time; 0: unknown, which gives no grace.
        quorum_s: the average time from a round's opening to its quorum.
        sync_s: the average time from a round's close to its committed record.
    """
    if not usual_s:
        return 0.0
    # The window is what the median learner's overlap leaves, so that waiting for more updates costs
    # that learner no step (P, Eq. 3).
    slack_s = rules.overlap_steps * usual_s - (quorum_s + sync_s)
    return min(max(0.0, rules.quorum.grace_fraction * slack_s), rules.quorum.grace_cap_s)
