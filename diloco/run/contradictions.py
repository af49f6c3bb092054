"""Finds learners whose messages contradict each other, measurements, or the protocol.

Such messages may come from a broken program as well as from a lying one, so the findings state only
what was claimed and what was measured. Pure.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from diloco.common.process.config import RunSettings
from diloco.common.protocol.wire import note
from diloco.common.protocol.wire.manifests_and_records import FAR_LESS
from diloco.run.cli.format_numbers import human_bytes
from diloco.run.comparison import LAGGING_LEARNER
from diloco.run.state import HOUR_S, RECENT, Finding, LearnerStatus, RunStatus

REJECTED_UPDATES = "runbooks/rejected-updates.md"
# Fewer than this may be an accident.
LEAST = 4
REJECTED_SHARE = 0.1
# Sentences on updates that count for less than they claim.
LESS = {
    "steps": "claim more steps than there was time for",
    "weight": "claim far more tokens than the others' updates weigh",
    "norm": "were shortened: far longer for their steps than the others'",
}
_AS_FAST = "declare it in bounds.learners if it is as fast as it says; if not, it is misconfigured "
CURE = {
    "steps": f"{_AS_FAST}or lies",
    "weight": f"{_AS_FAST}or lies",
    "norm": "compare its learning rate and its data with the others'; `diloco replay RUN --blame` "
    "says what its updates did",
}
# Factors between the claimed time of a step and the time available that no busy machine explains.
LONGER, SHORTER = 10.0, 100.0
# Intervals without an update, and rounds of the others meanwhile, that no slow link explains.
PATIENCE = 3


def contradictions(run: RunStatus, settings: RunSettings) -> Iterator[Finding]:
    """Finds learners whose statements are false, or whose messages break the protocol."""
    for one in run.learners:
        yield from _cut(one)
        yield from _invalid(one, run.as_of_s)
        others = [other for other in run.learners if other.name != one.name]
        # In lockstep learners wait as long as they work.
        if settings.sync.mode != "lockstep":
            yield from _step_time(one, others)
        if run.state == "under way":
            yield from _nothing_sent(one, others, settings)


def _cut(one: LearnerStatus) -> Iterator[Finding]:
    """Finds updates that count for less than they claim."""
    count = len(one.recent)
    # A learner that was busy for a while claims no more in all than it did.
    credited = sum(answer.credited for answer in one.recent)
    far = credited * FAR_LESS < sum(answer.tokens for answer in one.recent)
    # An update credited with few steps is shortened for that reason alone.
    norm = ("norm",)
    cut = [said.less for said in one.recent if said.less == norm or (said.less and far)]
    if len(cut) >= max(LEAST, REJECTED_SHARE * count):
        less = Counter(what for each in cut for what in each)
        listed = ", ".join(f"{times} {LESS[what]}" for what, times in less.most_common())
        why = f"of its last {count} updates {listed}"
        yield one.told(why, CURE[less.most_common(1)[0][0]], REJECTED_UPDATES)


def _invalid(one: LearnerStatus, now_s: float) -> Iterator[Finding]:
    """Finds messages that cannot be read, or are too long for their kind."""
    if len(one.invalid) < LEAST or one.invalid[-1].time_s < now_s - HOUR_S:
        return
    last, first = one.invalid[-1], one.invalid[0]
    yield one.told(
        f"{one.invalids:,} of its messages are none of the protocol's, the last of "
        f"{human_bytes(last.size_bytes)}: {note(last.why)}",
        "give it the release of the others; if nobody knows why it sends them, `diloco auth "
        f"revoke DIR {one.name}` ends it",
        REJECTED_UPDATES,
        evidence=f"the last {len(one.invalid)} within {last.time_s - first.time_s:,.1f} s, under "
        f"{last.subject}",
        since_s=first.time_s,
    )


def _step_time(one: LearnerStatus, others: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Finds claimed step times that are far longer or far shorter than its updates allow."""
    if one.step_s is None:
        return
    told_s, took_s = one.step_s
    usual = [other.step_s[1] / other.step_s[0] for other in others if other.step_s is not None]
    # If all learners wait for something, the one does not contradict itself.
    waits = max(1.0, median(usual)) if usual else 1.0
    if LONGER * took_s < told_s or told_s * SHORTER * waits < took_s:
        yield one.told(
            f"says that a step of it takes {told_s:.2g} s, and announces one every {took_s:.2g} s: "
            "its step times, or its numbers of steps, are false",
            "see what it runs; the speed that it states changes no other learner's pace or share",
            REJECTED_UPDATES,
            evidence=f"median of its newest updates; the others' take {waits:.2g} times as long as "
            "they say",
        )


def _nothing_sent(
    one: LearnerStatus, others: Sequence[LearnerStatus], settings: RunSettings
) -> Iterator[Finding]:
    """Finds a learner that claims to train, but sends no update."""
    if one.state != "training" or one.sent_s is None or one.missed < PATIENCE:
        return
    known = [other.step_time_s for other in others if other.step_time_s > 0 and other.merged]
    usual_s = median(known) if known else one.step_time_s
    step_s = min(one.step_time_s or usual_s, LONGER * usual_s)
    each_s = settings.sync.interval_steps * step_s + (one.upload_s or 0.0)
    if one.sent_s > settings.quorum.liveness_timeout_s + PATIENCE * each_s:
        yield one.told(
            f"says that it trains, and has announced nothing for {one.sent_s:,.0f} s, where the "
            f"others' work came in {one.missed} rounds and more: no round waits for it",
            "see in its log what holds its updates up; if it sends heartbeats alone, `diloco auth "
            f"revoke DIR {one.name}` ends it",
            LAGGING_LEARNER,
            evidence=f"a step takes it {one.step_time_s:.2g} s by its own word, an update "
            f"{settings.sync.interval_steps} steps",
        )


def step_times(told_s: Sequence[float], took_s: Sequence[float]) -> tuple[float, float] | None:
    """Returns the median seconds of a step: (as claimed, as measured).

    Args:
        told_s: the claim of each update.
        took_s: for each update, the time since the one before divided by its steps.

    Returns:
        None with few updates, or if a median is 0.
    """
    if len(took_s) < RECENT // 2 or not (said := median(told_s)) or not (had := median(took_s)):
        return None
    return said, had
