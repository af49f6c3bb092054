"""A run as it is at a moment: a `RunStatus`, with what is in it.

That is a `LearnerStatus` for each learner, a `FragmentStatus` for each fragment, and `Finding`s;
`observed.py` comes to them, and status, page, alerts, trackers and doctor show them. Pure.

What records say is a fact. What heartbeats say is a learner's word of itself, and may be false.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from diloco.common.storage.tape import InvalidMessage

# Of a learner's updates, so many are looked back on.
RECENT = 16
HOUR_S = 3600.0
# Without a version for so long, and for so many of the usual times between two, no rate is told.
QUIET_S, QUIET_ROUNDS = 60.0, 5.0

Severity = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence on a run's health.

    Attributes:
        about: the subject: "bus", "store", "clock", "learner island-a" ...
        advice: what to do; "" when there is nothing to do.
        runbook: path from the repository's root; None when there is nothing to do.
        evidence: figures that it follows from, where they are not in the sentence.
        harm: what the learner's updates did to the held-out loss, where that was found out.
        since: version of a fragment whose round it began with, stored at `since_s` (seconds since
            the epoch); None: unknown, or it is so now.
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
    """A change of settings: when, at which version of the fragment that is furthest, and by whom.

    Attributes:
        changed: one line for each key, `section.key: before -> after`.
    """

    at_s: float
    version: int
    changed: tuple[str, ...]
    by: str


class StoodStill(NamedTuple):
    """The longest recent wait of an update for its version: that version, and its time."""

    wait_s: float
    version: int
    at_s: float


class ShardFigures(NamedTuple):
    """A learner's newest updates beside the others', by their shards.

    Attributes:
        cosine: mean, to the others' in their rounds.
        still: tensors in which they are next to nothing, and the others' are not.
        norms: of them in each other tensor, beside the median of the others': logarithms of ratios.
        lone: how many of them have a few elements far beyond everything that the others have
            there, and `factor` how far the farthest; of `updates` that were compared.
        to_zero: median cosine to the parameters: at 1 they are taken straight to zero. None: the
            parameters were not read.
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
        version: of its fragment, that its round made.
        others_loss: median loss of the others in its round; None if it was alone.
        tokens_per_s: that were credited, at the speed that was seen; 0: unknown.
    """

    at_s: float
    loss: float
    norm: float
    version: int
    others_loss: float | None
    tokens_per_s: float = 0.0


class Throughput(NamedTuple):
    """The rates of a learner's newest merged updates, by records alone.

    Attributes:
        tokens_per_s: median; `updates_per_s`: how often one is merged.
        tokens_change, updates_change: how many times as much as before; 1 where little was before.
    """

    tokens_per_s: float
    updates_per_s: float
    tokens_change: float = 1.0
    updates_change: float = 1.0


class Delays(NamedTuple):
    """Times of several updates, in seconds and in inner steps of their learners."""

    mean_s: float
    worst_s: float
    mean_steps: float
    worst_steps: float

    @property
    def said(self) -> str:
        """Mean and worst, in words."""
        mean = f"{self.mean_steps:.1f} steps ({self.mean_s:.1f} s)"
        return f"{mean}, {self.worst_steps:.1f} at worst ({self.worst_s:.1f} s)"


def delays_of(waits: Iterable[tuple[float, float]]) -> Delays | None:
    """The delays of several waits, each in seconds and in steps; None without waits."""
    found = [*waits]
    if not found:
        return None
    times_s, steps = zip(*found, strict=True)
    return Delays(fmean(times_s), max(times_s), fmean(steps), max(steps))


class UpdateAnswer(NamedTuple):
    """The answer to an update: rejected for a reason, or merged with staleness and loss.

    Attributes:
        less: in which ways a merged one counts for far less than it claims.
        norm: relative to the median of its round.
        others_loss: median loss of the others in its round; None if it was alone.
        wait: from its announcement to its version, by the server, in seconds and in its steps.
        tokens: that a merged one claims; `credited`: that it counts for.
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
class LearnerStatus:
    """One learner, at a moment.

    Attributes:
        state: "quarantined" whatever it does, else "left", "failed" or "silent", else its own word.
        why: the reason of its quarantine, where the tape still says it.
        incarnation: its newest life; `lives`: how many were read.
        sudden_ends: lives that another followed although they had not left, within the last hour,
            or that before the run's end.
        left: its newest life has ended on purpose; `finished`: not before the run was stopped.
        failed: an error has ended it, by its own word; `silent`: it was not heard of for
            `quorum.liveness_timeout_s`.
        live: an owner waits for it, or has its last update; None: no record knows its newest life.
        superseded: an earlier life of it that goes on beside the newest; 0: none.
        heard_s: age of its newest heartbeat; None: its newest life sent none.
        trouble: its own word, as are `local_step` to `bytes_down`.
        merged: updates that records merged, of those read; `rejected` likewise.
        tokens: credited of what was merged, on the mean over the fragments.
        reasons: how many were rejected, by reason; `less`: how many of those merged count for less
            than they claim, by what: "steps" that there was no time for, "weight" far above the
            others', "norm" far above the others'.
        offences: the most that any fragment counts; see `bounds.quarantine_offences`.
        staleness: mean of its last updates, in versions; None before any was merged.
        wait: of those, from announcement to version.
        delay: its own word of its last updates, from the step that sent one to the one that had
            the answer; None before any. `adoption` likewise of the last versions, from the record
            to the step that adopted it.
        merged_loss: median of them, `norm` likewise: what was merged, not what it says.
        recent: what became of its last updates; `beside`: of the last that were merged together
            with somebody else's.
        trend: its merged updates, spread over all that was read.
        shards: what those of its newest updates say; None: they were not read, or are gone.
        release: its program, packages and platform, as its join says.
        errors: that ended its last lives, by their own words.
        twins: times when an earlier life of it still ran although a newer had joined.
        views: version and time of each check by which it held another view than the run's.
        upload_s: median time that its last updates took from their bytes to the last shard stored.
        ahead_s: of its clock before the server's, by its newest heartbeat; None: it says none.
        throughput: None before enough was merged.
        invalid: its newest messages that are none of the protocol's, of `invalids`.
        step_s: seconds of a step by its updates' own word, and by when they were announced, as
            medians of the newest; None before there are enough.
        sent_s: since it announced an update or joined; None: nobody knows.
        missed: rounds of others' work without work of it, of the fragment where they are fewest.
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
        """A finding on the learner, which began with its `first` such update, or at a time."""
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
        owner: who has its lease, if somebody; `free`: nobody has, and there is something to do.
        refused_by: aggregators that serve it no more: its objects gave them other digests.
        waiting: updates that are not answered yet; the first of them came `waiting_s` ago.
        version_s: age of its newest record.
        round_updates: merged by its newest version, which took `round_s`, of the `live_learners`
            that were there then.
    """

    fragment: int
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
        current: False where the bus is away: all is as it was at `as_of_s` (seconds since the
            epoch), for nobody can say who has gone silent since.
        whole: counts are of the whole tape, and not of its end alone.
        quiet_s: age of the tape's newest message; `stopping_s`: of the word that it stops, or of
            a newer record.
        strangers: learners whose newest heartbeat is of a life that never joined, and that life.
        staleness: mean of recently merged updates, in versions; `round_size`: their mean number.
        wait: of those, from announcement to version; None before any.
        usual_wait_s: median over those rounds of the mean wait of their updates; 0 of none.
        delay, adoption: of all learners, as theirs.
        stall_fraction: share of the learners' time that synchronization took from training.
        stood_still: None before any version was made of updates.
        takeovers: times within the last hour when a fragment came to another aggregator process.
        changes: the newest of the settings.
        stored: findings on what the store has, where somebody has looked.
        findings: on its health, good and bad.
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
    delay: Delays | None
    adoption: Delays | None
    round_size: float
    stall_fraction: float
    tape_bytes: int
    tape_limit_bytes: int
    quiet_s: float
    stopping_s: float
    strangers: Mapping[str, int]
    learners: tuple[LearnerStatus, ...]
    fragments: tuple[FragmentStatus, ...]
    takeovers: tuple[float, ...] = ()
    stood_still: StoodStill | None = None
    changes: tuple[Change, ...] = ()
    stored: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()

    def learner(self, name: str) -> LearnerStatus | None:
        """The learner of a name."""
        return next((one for one in self.learners if one.name == name), None)

    @property
    def pace(self) -> str:
        """Versions made a minute; or the time without one, where that is unusual."""
        newest_s = min((one.version_s for one in self.fragments), default=0.0)
        if newest_s > QUIET_S and newest_s * self.versions_per_s > QUIET_ROUNDS:
            return f"nothing for {newest_s:,.0f} s"
        return f"{60 * self.versions_per_s:.3g} versions a minute"

    @property
    def alerts(self) -> tuple[Finding, ...]:
        """The findings that ask for something."""
        return tuple(one for one in self.findings if one.severity in ("warning", "error"))


def share(part_s: float, whole_s: float) -> float:
    """Part over whole, both as a learner claims them: 1 at most, 0 where the whole is 0."""
    return min(part_s / whole_s, 1.0) if whole_s else 0.0
