"""The data classes that describe a run at one moment. Pure.

A `RunStatus` has a `LearnerStatus` for each learner, a `FragmentStatus` for each fragment, and
`Finding`s. `observed.py` computes the status, `health_findings.py` the findings; status, page,
alerts, trackers and doctor show them.

Figures from records are facts. Heartbeats are a learner's own claims, and may be false.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from diloco.common.storage.tape import InvalidMessage

# The number of a learner's last updates that are considered.
RECENT = 16
HOUR_S = 3600.0
# Seconds without a version, and multiples of the usual interval, after which no rate is shown.
QUIET_S, QUIET_ROUNDS = 60.0, 5.0

Severity = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence on a run's health.

    Attributes:
        severity: "ok": the subject is well; "note": no action is needed; "warning" and "error": an
            operator should act.
        about: the subject: "bus", "store", "clock", "learner island-a" ...
        advice: what to do; "" if nothing needs to be done.
        runbook: path from the repository's root; None if nothing needs to be done.
        evidence: figures from which the finding follows, if they are not in the sentence.
        harm: effect of the learner's updates on the held-out loss, if that was measured.
        since: the fragment's version in whose round the fault began, stored at `since_s` (seconds
            since the epoch); None: unknown, or the finding is about the present alone.
    """

    severity: Severity
    about: str
    sentence: str
    advice: str = ""
    runbook: str | None = None
    evidence: str = ""
    harm: str = ""
    since: int | None = None
    since_s: float | None = None


class Change(NamedTuple):
    """A change of settings.

    Attributes:
        at_s: when it was stored, in seconds since the epoch.
        version: the version of the most advanced fragment then.
        changed: one line for each key, `section.key: before -> after`.
        by: who made it.
    """

    at_s: float
    version: int
    changed: tuple[str, ...]
    by: str


class StoodStill(NamedTuple):
    """The longest wait of a recent update, from its announcement to its version.

    Attributes:
        version: the version that merged the update, stored at `at_s` (seconds since the epoch).
    """

    wait_s: float
    version: int
    at_s: float


class ShardFigures(NamedTuple):
    """A learner's newest updates compared with the others', by their shards.

    Attributes:
        cosine: mean cosine of the learner's updates to the others' in the same rounds.
        updates: number of the learner's updates that were compared.
        still: tensors in which this learner's updates are close to zero, and the others' are not.
        norms: for each other tensor, the logarithm of the ratio of this learner's norm to the
            median of the others': the lower quartile over rounds if that is positive, the upper
            one if that is negative, else 0.
        lone: number of updates with a few elements that are far larger than the elements at the
            same index in the others' updates; `factor`: the largest ratio of such an element to a
            usual one of the others; `tensor`: the tensor that it is in.
        to_zero: median cosine of the updates to the parameters: at 1 the updates shrink the
            parameters straight to zero. None: the parameters were not read.
    """

    cosine: float
    updates: int
    still: tuple[str, ...] = ()
    norms: Mapping[str, float] = {}
    lone: int = 0
    factor: float = 0.0
    tensor: str = ""
    to_zero: float | None = None


class MergedPoint(NamedTuple):
    """A merged update: its training loss, and its norm relative to the median of its round.

    Attributes:
        at_s: when the update's round closed, in seconds since the epoch.
        version: the version of the fragment that the round made.
        others_loss: median loss of the other updates in its round; None if there were none.
        tokens_per_s: credited tokens a second, at the observed speed; 0: unknown.
    """

    at_s: float
    loss: float
    norm: float
    version: int
    others_loss: float | None
    tokens_per_s: float = 0.0


class Throughput(NamedTuple):
    """The rates of a learner's newest merged updates, from records alone.

    Attributes:
        tokens_per_s: median of the updates' tokens a second; `updates_per_s`: merged updates a
            second.
        tokens_change, updates_change: these rates divided by the rates of earlier updates; 1 if
            there are few earlier updates.
    """

    tokens_per_s: float
    updates_per_s: float
    tokens_change: float = 1.0
    updates_change: float = 1.0


class Delays(NamedTuple):
    """Mean and longest of several delays, in seconds and in inner steps of the learners."""

    mean_s: float
    worst_s: float
    mean_steps: float
    worst_steps: float

    @property
    def said(self) -> str:
        """Mean and longest delay as text."""
        mean = f"{self.mean_steps:.1f} steps ({self.mean_s:.1f} s)"
        return f"{mean}, {self.worst_steps:.1f} at worst ({self.worst_s:.1f} s)"


def delays_of(waits: Iterable[tuple[float, float]]) -> Delays | None:
    """Returns mean and longest of several delays, each (seconds, steps); None if there are none."""
    found = [*waits]
    if not found:
        return None
    times_s, steps = zip(*found, strict=True)
    return Delays(fmean(times_s), max(times_s), fmean(steps), max(steps))


class UpdateAnswer(NamedTuple):
    """The verdict on an update: rejected for a reason, or merged with staleness and loss.

    Attributes:
        reason: why it is rejected; "": it is merged.
        less: limits by which a merged update counts for far less than it claims: "steps",
            "weight", "norm".
        staleness: versions between its base and the version that its round built on.
        norm: the update's norm divided by the median of its round.
        others_loss: median loss of the other updates in its round; None if there were none.
        wait: time from its announcement to its version, by the server's clock: in seconds, and in
            steps of its learner.
        tokens: tokens that a merged update claims; `credited`: tokens that it counts for.
    """

    reason: str = ""
    less: tuple[str, ...] = ()
    staleness: int = 0
    loss: float = 0.0
    norm: float = 1.0
    others_loss: float | None = None
    wait: tuple[float, float] = (0.0, 0.0)
    tokens: int = 0
    credited: int = 0


@dataclass(frozen=True, kw_only=True)
class SlicesStatus:
    """The slices of a learner that has several, as its newest join says.

    Attributes:
        present: slices that train; 0 of a learner that is silent, has failed or has left.
        given: slices that it has; `least`: the fewest with which it trains.
        fewer_s: seconds for which it has trained with fewer than `given`, or since it has left; 0:
            it has all of them.
    """

    present: int
    given: int
    least: int
    fewer_s: float


@dataclass(frozen=True, kw_only=True)
class LearnerStatus:
    """One learner, at a moment.

    Attributes:
        state: "quarantined" if it is, else "left", "failed", "silent", or the state that its
            heartbeat states.
        why: the reason of its quarantine, if the tape still has it.
        incarnation: its newest life; `lives`: the number of lives on the part of the tape read.
        sudden_ends: number of its lives that ended without a leave and were followed by another,
            within the last hour, or within the hour before the run's end.
        left: its newest life has left on purpose; `finished`: it did so after the run's stop.
        failed: its heartbeat states that an error ended it; `silent`: no heartbeat came for
            `quorum.liveness_timeout_s`.
        live: a fragment's owner waits for its updates, or has its last one; None: no record knows
            its newest life.
        superseded: incarnation of an earlier life that still runs beside the newest; 0: none.
        heard_s: age of its newest heartbeat in seconds; None: its newest life sent none.
        trouble: the error or difficulty that its heartbeat states; `local_step` to `bytes_down`
            are from its heartbeat as well.
        merged: number of its updates merged by the records read; `rejected` likewise.
        tokens: tokens credited for merged updates, averaged over the fragments that it holds.
        reasons: rejected updates by reason; `less`: merged updates that count for less than they
            claim, by limit: "steps" without the time for them, "weight" or "norm" far above the
            others'.
        offences: its greatest count of offences in any fragment (`bounds.quarantine_offences`).
        staleness: mean staleness of its last updates, in versions; None before any was merged.
        wait: wait of those updates, from announcement to version.
        delay: by its heartbeat, delay of its last updates, from the step boundary that sent the
            update to the one that adopted the record with its verdict; None before any.
        adoption: by its heartbeat, delay of the last versions, from the record to the step boundary
            that adopted it; None before any.
        merged_loss: median loss of its last merged updates, `norm` likewise; both from records.
        recent: verdicts on its last updates; `beside`: verdicts on its last updates that were
            merged together with other learners'.
        trend: some of its merged updates, spread over all that was read.
        shards: figures from the shards of its newest updates; None: not read, or missing.
        release: from its join: the program's release, digest of the packages' versions, platform.
        errors: the errors that ended its last lives, from their heartbeats.
        twins: times when an earlier life of it still ran although a newer had joined.
        views: version and time of each check in which its view differed from the run's.
        upload_s: median time of its last updates from their encoding to the last shard stored.
        ahead_s: seconds by which its clock is ahead of the server's; None: unknown.
        throughput: rates of its newest merged updates; None while they are few.
        invalid: its newest messages that are not of the protocol; `invalids` counts all of them.
        step_s: median seconds of a step in its newest updates: as they claim, and as the times of
            their announcements show; None while they are few.
        sent_s: seconds since it announced an update or joined; None: unknown.
        missed: number of newest rounds in a row without an update of it, in the fragment where it
            is least.
        slices: from its join: its slices; None: it does not have several, or the join was not read.
        holds: from its join: the modules that it holds; empty: all; None: the join was not read.
    """

    name: str
    state: str
    why: str
    host: str
    incarnation: int
    lives: int
    sudden_ends: int
    left: bool
    finished: bool
    failed: bool
    silent: bool
    live: bool | None
    superseded: int
    heard_s: float | None
    trouble: str
    local_step: int
    loss: float | None
    metrics: Mapping[str, float]
    tokens_per_s: float
    step_time_s: float
    stall_fraction: float
    data_fraction: float
    updates_sent: int
    bytes_up: int
    bytes_down: int
    merged: int
    rejected: int
    tokens: int
    reasons: Mapping[str, int]
    less: Mapping[str, int]
    offences: int
    staleness: float | None
    wait: Delays | None
    delay: Delays | None
    adoption: Delays | None
    merged_loss: float | None
    norm: float | None
    recent: tuple[UpdateAnswer, ...]
    beside: tuple[UpdateAnswer, ...]
    trend: tuple[MergedPoint, ...]
    shards: ShardFigures | None = None
    release: tuple[str, str, str] = ("", "", "")
    errors: tuple[str, ...] = ()
    twins: tuple[float, ...] = ()
    views: tuple[tuple[int, float], ...] = ()
    upload_s: float | None = None
    ahead_s: float | None = None
    throughput: Throughput | None = None
    invalid: tuple[InvalidMessage, ...] = ()
    invalids: int = 0
    step_s: tuple[float, float] | None = None
    sent_s: float | None = None
    missed: int = 0
    slices: SlicesStatus | None = None
    holds: tuple[str, ...] | None = None

    @property
    def slices_said(self) -> str:
        """How many of its slices train, as text such as "3 of 4"; "-" if it has no several."""
        return "-" if self.slices is None else f"{self.slices.present} of {self.slices.given}"

    def told(
        self,
        sentence: str,
        advice: str = "",
        runbook: str | None = None,
        *,
        severity: Severity = "warning",
        evidence: str = "",
        first: MergedPoint | None = None,
        since_s: float | None = None,
    ) -> Finding:
        """Returns a finding on this learner.

        Args:
            sentence: `Finding.sentence`; `advice`, `runbook`, `severity` and `evidence` likewise.
            advice: what to do.
            runbook: path of the runbook.
            severity: the severity.
            evidence: figures.
            first: the update with which the fault began; None: unknown.
            since_s: when the fault began, in seconds since the epoch, if `first` is not given.
        """
        return Finding(
            severity=severity,
            about=f"learner {self.name}",
            sentence=sentence,
            advice=advice,
            runbook=runbook,
            evidence=evidence,
            since=first.version if first else None,
            since_s=first.at_s if first else since_s,
        )


@dataclass(frozen=True, kw_only=True)
class FragmentStatus:
    """One fragment, at a moment.

    Attributes:
        module: the module of its tensors; "": the model is one module.
        owner: the aggregator that has the fragment's lease; None: no aggregator.
        free: whether the lease is absent or released although work is left.
        refused_by: aggregators that no longer serve the fragment, since its objects gave them other
            digests than the recorded ones.
        waiting: number of updates without a verdict; the first was announced `waiting_s` ago.
        version_s: age of the fragment's newest record.
        round_updates: number of updates merged by its newest version's round, which lasted
            `round_s`; `live_learners`: number of live learners at that time.
    """

    fragment: int
    module: str
    version: int
    global_step: int
    owner: str | None
    free: bool
    refused_by: tuple[str, ...]
    waiting: int
    waiting_s: float
    version_s: float
    round_updates: int
    round_s: float
    live_learners: int


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run at a moment; times are ages in seconds.

    Attributes:
        state: "under way", "waiting for learners", "paused", "stopping", "ended", or "not wholly
            created".
        current: False if the bus is unreachable: the status is that of `as_of_s` (seconds since the
            epoch), and it is unknown who has become silent since.
        whole: whether counts are of the whole tape, not only of its last part.
        versions: sum of the fragments' versions; `versions_per_s`: versions made a second.
        tokens_merged: tokens credited, averaged over the fragments; `tokens_per_s`: sum of the
            learners' trained tokens a second.
        quiet_s: age of the tape's newest message; `stopping_s`: age of its stop message, or of a
            newer record.
        unjoined: by learner's name, the incarnation of the newest heartbeat if that life never
            joined.
        cut_off: aggregators that the store does not answer.
        staleness: mean staleness of the recent rounds' updates, in versions; `round_size`: mean
            number of updates in these rounds.
        wait: wait of these updates, from announcement to version; None before any.
        usual_wait_s, usual_wait_steps: the median over these rounds of their updates' mean wait; 0
            without any.
        delay, adoption: as `LearnerStatus.delay` and `LearnerStatus.adoption`, over all learners.
        stall_fraction: share of the learners' time that synchronization took from training.
        stood_still: the longest recent wait of an update; None before any version was made of
            updates.
        takeovers: times within the last hour when a fragment passed to another aggregator process.
        changes: the newest changes of the settings.
        stored: findings on the store, if it was checked.
        findings: findings on the run's health, good and bad.
    """

    run: str
    state: str
    current: bool
    as_of_s: float
    whole: bool
    epoch: int
    global_step: int
    steps: int
    versions: int
    tokens_merged: int
    updates_sent: int
    updates_merged: int
    updates_rejected: int
    versions_per_s: float
    tokens_per_s: float
    bytes_up_per_s: float
    bytes_up: int
    bytes_down: int
    staleness: float
    wait: Delays | None
    usual_wait_s: float
    usual_wait_steps: float
    delay: Delays | None
    adoption: Delays | None
    round_size: float
    stall_fraction: float
    tape_bytes: int
    tape_limit_bytes: int
    quiet_s: float
    stopping_s: float
    unjoined: Mapping[str, int]
    learners: tuple[LearnerStatus, ...]
    fragments: tuple[FragmentStatus, ...]
    cut_off: tuple[str, ...] = ()
    takeovers: tuple[float, ...] = ()
    stood_still: StoodStill | None = None
    changes: tuple[Change, ...] = ()
    stored: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()

    def learner(self, name: str) -> LearnerStatus | None:
        """Returns the learner of a name; None if there is none."""
        return next((one for one in self.learners if one.name == name), None)

    @property
    def pace(self) -> str:
        """The versions made a minute; or the time without one, if that is unusual."""
        newest_s = min((one.version_s for one in self.fragments), default=0.0)
        if newest_s > QUIET_S and newest_s * self.versions_per_s > QUIET_ROUNDS:
            return f"nothing for {newest_s:,.0f} s"
        return f"{60 * self.versions_per_s:.3g} versions a minute"

    @property
    def alerts(self) -> tuple[Finding, ...]:
        """The findings that ask for action."""
        return tuple(one for one in self.findings if one.severity in ("warning", "error"))


def share(part_s: float, whole_s: float) -> float:
    """Returns part over whole, both seconds claimed by a learner: at most 1; 0 if whole is 0."""
    return min(part_s / whole_s, 1.0) if whole_s else 0.0
