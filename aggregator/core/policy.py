"""The aggregator's rules as pure functions: weights, discounts, pace, quorum, grace.

No IO, clock, randomness or logging here; times are arguments, in seconds.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from diloco.common.process.config import (
    BoundsSection,
    QuorumSection,
    RunSettings,
    StalenessSection,
    settings_of,
)
from diloco.common.protocol import names, slices, wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.layout import Layout, Rhythm
from diloco.common.protocol.quantization import Codec
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.shards import shard_bytes, shard_ranges

# Weight of the newest observation in the moving averages of times. The paper names EMAs without
# constants (P §3); a half follows a learner that changed its speed within a few rounds.
EMA = 0.5
# A learner may announce at once what it may announce in so many seconds.
BURST_S = 10.0
# So many bytes of a manifest cost as much as one announcement: a usual one has fewer.
ANNOUNCEMENT_BYTES = 4096
# A rejection takes so many announcements from its sender: outside of rounds it costs a record.
REJECTION_COST = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentRules:
    """The run's settings and sizes from which the machine of one fragment decides."""

    run: str
    epoch: int
    steps: int
    fragment: int
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
    """The rules of one fragment of a run, on the tape of an epoch."""
    settings = settings_of(settings, layout, fragment)
    sync = settings.sync
    return FragmentRules(
        run=settings.run.name,
        epoch=epoch,
        steps=settings.run.steps,
        fragment=fragment,
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
    """Weight of an update: quantity times quality, tokens x (tokens / steps) (P §3)."""
    # State is a mean over what was seen, whatever the steps that saw it.
    if averaged:
        return float(tokens)
    # Quality is tokens a step: a large batch makes a less noisy gradient, and it counts for more
    # than the same tokens in many small steps.
    return tokens * (tokens / steps)


def discount(rule: StalenessSection, staleness: int) -> float:
    """S(s), the share that an update s versions old keeps (docs/design/paper.md, section 4)."""
    # It shrinks the update itself and not only its share: numerators are multiplied by it and
    # denominators are not, so that a stale update alone in its round is discounted too.
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
    """Moving average after one more value; an average of 0 has seen none."""
    # From the first value on and not from 0: a learner's first round would else be taken for its
    # speed.
    return value if average == 0 else average + EMA * (value - average)


def sync_s(average_s: float, took_s: float) -> float:
    """Moving average of a commit's seconds, each counted as twice the average at most.

    A snapshot is stored with every C-th version alone. Counted in full it would leave the rounds
    after it no grace, and the first of them would close with the fastest learner alone.
    """
    return ema(average_s, min(took_s, 2 * average_s) if average_s else took_s)


def elapsed_s(since_s: float, until_s: float) -> float:
    """Seconds between two times, as a record can hold them: clocks and claims may be absurd."""
    return min(max(0.0, until_s - since_s), wire.GREATEST_S)


def effective_quorum(quorum: QuorumSection, live: int) -> int:
    """min(K, live learners), at least 1."""
    # K learners of a fleet that has fewer never come (invariant 6: nobody's progress hangs on who
    # is away).
    return max(1, min(quorum.min_learners, live))


def robust_quorum(live: int, version: int) -> int:
    """Two thirds of the live learners; three at least until a version was made."""
    # Whoever is quicker than the others would else be alone in rounds, and more than half of them.
    # The first round has no norms before it to judge by, and whoever joins first may lie.
    return max(math.ceil(2 * live / 3), 1 if version else 3)


def pace_s(rules: FragmentRules, fastest_s: float, interval_steps: int | None = None) -> float:
    """Shortest time between two rounds of a fragment: about H steps of the fastest learner.

    Args:
        rules: the fragment's.
        fastest_s: step time of that learner; 0: nobody has said it.
        interval_steps: between these two rounds, where it is not H.
    """
    # Lockstep waits for all anyway; before anybody has said how fast it is, there is nothing to
    # hold back by.
    if rules.lockstep or not fastest_s:
        return 0.0
    return rules.quorum.pace * (interval_steps or rules.rhythm.interval_steps) * fastest_s


def grace_s(rules: FragmentRules, usual_s: float, quorum_s: float, sync_s: float) -> float:
    """Grace after the quorum: gamma x (tau x step - (quorum + sync)) in [0, cap] (P Eq. 3).

    Of the median learner's step, `usual_s`.
    """
    if not usual_s:
        return 0.0
    # The window is what the median learner's overlap leaves, so that waiting for more updates
    # costs it no step (P, Eq. 3).
    slack_s = rules.overlap_steps * usual_s - (quorum_s + sync_s)
    return min(max(0.0, rules.quorum.grace_fraction * slack_s), rules.quorum.grace_cap_s)


def malformed(rules: FragmentRules, manifest: wire.Manifest) -> tuple[Reason, str] | None:
    """(reason, detail) if a manifest alone shows that its update cannot be merged, else None."""
    # With another layout the same codes are other parameters.
    if manifest.layout != rules.layout:
        return Reason.LAYOUT, f"layout {manifest.layout}, the run has {rules.layout}"
    if manifest.codec != rules.codec:
        return Reason.CODEC, f"codec {manifest.codec}, the run has {rules.codec}"
    return _wrong_shards(rules, manifest)


class _FragmentCut(NamedTuple):
    """The run's own cut of a fragment: slices and blocks of each shard."""

    slices: list[tuple[wire.Slice, ...]]
    counts: list[int]


@lru_cache
def _cut(size: int, block: int, shard_elements: int) -> _FragmentCut:
    """Kept, since the updates of every learner on one device are cut so."""
    ranges = shard_ranges(size, block, shard_elements)
    return _FragmentCut(
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
    # Only under the sender's own prefix, which the bucket's rules give to it alone: else a learner
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
        # Sizes are known before anything is read, so that no claim makes the reader take more
        # memory than the fragment needs.
        needed = _size_bytes(rules.codec, count * rules.block, rules.block)
        if shard.size_bytes != needed:
            return (
                Reason.SIZE,
                f"shard {index} claims {shard.size_bytes} bytes, its codec needs {needed}",
            )
    return None


def cost(size_bytes: int) -> float:
    """The price of a message of an update's subject, taken from its sender's allowance."""
    return max(1.0, size_bytes / ANNOUNCEMENT_BYTES)


def allowance(bounds: BoundsSection, left: float, at_s: float, now_s: float) -> float:
    """The number of updates that a learner may announce at `now_s`, given `left` at `at_s`."""
    # At least one, whatever the rate: a slow fleet's learners announce less than once in the
    # burst's time.
    most = max(1.0, bounds.max_updates_per_s * BURST_S)
    return min(most, left + bounds.max_updates_per_s * max(0.0, now_s - at_s))
