"""What a run's tape, heartbeats and objects say about its health, as sentences.

Functions from what was read to findings; `doctor.py` does the reading. Each finding that asks for
something names its runbook.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.aggregator.tape_watch import NEARLY_FULL, share
from diloco.check.audit import Audit, Breach, Objects
from diloco.check.rules import Judged
from diloco.common import wire
from diloco.common.bus import Filled
from diloco.common.config import RunSettings, warnings
from diloco.common.errors import DilocoError
from diloco.projections.history import History
from diloco.projections.live import LastHeartbeat

Severity = Literal["ok", "note", "warning", "error"]

BAD_CONFIGURATION = "runbooks/bad-configuration.md"
RUN_MISMATCH = "runbooks/run-mismatch.md"
NATS_AWAY = "runbooks/nats-away.md"
STORE_AWAY = "runbooks/store-away.md"
PERMISSIONS = "runbooks/permissions.md"
CLOCK_SKEW = "runbooks/clock-skew.md"
LAGGING_LEARNER = "runbooks/lagging-learner.md"
REJECTED_UPDATES = "runbooks/rejected-updates.md"
FRAGMENT_STOPPED = "runbooks/fragment-stopped.md"
MISSING_OBJECT = "runbooks/missing-object.md"
ORPHANED_OBJECTS = "runbooks/orphaned-objects.md"
DIGEST_MISMATCH = "runbooks/digest-mismatch.md"
BROKEN_INVARIANT = "runbooks/broken-invariant.md"
TAPE_FULL = "runbooks/tape-full.md"
DISK_FULL = "runbooks/disk-full.md"
QUARANTINED_LEARNER = "runbooks/quarantined-learner.md"
RESTORE = "runbooks/restore-from-bucket.md"
NO_LEARNERS = "runbooks/no-learners.md"

# Of a stream that names no number, as those of earlier releases: what a server without accounts
# takes (from 2.15 on; jetstream.limits.default_max_consumers).
USUAL_READERS = 1000
# Clocks that differ by more confuse deadlines and people; what breaks is
# `quorum.liveness_timeout_s`.
SKEW_S = 1.0
# Of a learner's updates, so many are looked back on.
RECENT = 16
# A fragment stands still when what is in flight has waited for so many hard deadlines.
PATIENCE = 3.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence on a run's health.

    Attributes:
        about: what was looked at: "bus", "store", "clock", "learner island-a" ...
        advice: what to do; "" when there is nothing to do.
        runbook: path from the repository's root; None when there is nothing to do.
    """

    severity: Severity
    about: str
    sentence: str
    advice: str = ""
    runbook: str | None = None


def failed(about: str, error: DilocoError, runbook: str) -> Finding:
    """What a look met with an error."""
    return Finding(
        severity="error",
        about=about,
        sentence=error.message,
        advice=(error.hint or "").removesuffix(runbook).rstrip(": "),
        runbook=runbook,
    )


def configuration(settings: RunSettings) -> Iterator[Finding]:
    """Settings in regions that are known to train badly."""
    found = warnings(settings)
    for sentence in found:
        yield Finding(
            severity="warning",
            about="configuration",
            sentence=sentence,
            advice="change it before the run, or with `diloco run set`",
            runbook=BAD_CONFIGURATION,
        )
    if not found:
        yield Finding(
            severity="ok", about="configuration", sentence="no setting is known to train badly"
        )


def clock(about: str, ahead_s: float, liveness_timeout_s: float) -> Finding:
    """A clock that is `ahead_s` seconds ahead of the server's."""
    if abs(ahead_s) <= SKEW_S:
        return Finding(
            severity="ok", about=about, sentence=f"within {SKEW_S:g} s of the NATS server's clock"
        )
    way = "ahead of" if ahead_s > 0 else "behind"
    return Finding(
        severity="error" if abs(ahead_s) > liveness_timeout_s else "warning",
        about=about,
        sentence=f"{abs(ahead_s):.1f} s {way} the NATS server's clock",
        advice="let all machines follow the same time service",
        runbook=CLOCK_SKEW,
    )


def aggregator_clocks(history: History) -> Iterator[Finding]:
    """Aggregators whose records were closed, by their own clock, after the server stored them."""
    ahead: dict[str, float] = {}
    for chain in history.records.values():
        for seq, record in chain[-RECENT:]:
            if record.what == "version" and record.inputs:
                early_s = record.closed_at_s - history.times_s[seq]
                ahead[record.aggregator] = max(ahead.get(record.aggregator, early_s), early_s)
    for name, ahead_s in sorted(ahead.items()):
        # Behind says nothing: closing a round takes its time.
        if ahead_s > SKEW_S:
            yield clock(f"clock of {name}", ahead_s, history.settings.quorum.liveness_timeout_s)


def fragments(history: History, found: Audit, now_s: float) -> Iterator[Finding]:
    """Fragments whose updates wait, and nobody merges them."""
    longest_s = patience_s(history.in_force)
    newest_s = {f: history.times_s[chain[-1][0]] for f, chain in history.records.items()}
    waiting: dict[int, list[float]] = defaultdict(list)
    for update, at in found.in_flight.items():
        waiting[update.fragment].append(at.time_s)
    stopped = []
    for fragment, since in sorted(waiting.items()):
        waited_s = now_s - max(min(since), newest_s.get(fragment, 0.0))
        if waited_s > longest_s:
            stopped.append(fragment)
            yield standing_still(fragment, len(since), waited_s)
    if stopped:
        return
    if history.stop and not history.end:
        stopping_s = now_s - max(history.times_s[history.stop[0]], *newest_s.values())
        if stopping_s > longest_s:
            yield stops_for_long(stopping_s)
            return
    versions = history.versions()
    state = "ended" if history.end else "stopping" if history.stop else _under_way(history)
    yield Finding(
        severity="ok",
        about="fragments",
        sentence=f"{state}: {len(versions)} fragments at {_range(versions)}",
    )


def _range(versions: Sequence[int]) -> str:
    low, high = min(versions, default=0), max(versions, default=0)
    return f"version {low}" if low == high else f"versions {low} to {high}"


def _under_way(history: History) -> str:
    """What a run does that was not stopped: without learners it makes nothing."""
    left = {
        (leave.learner, leave.incarnation) for _, leave in history.leaves if not leave.fragments
    }
    lives = {join.learner: seq for seq, join in history.joins}
    return "under way" if lives.items() - left else "waiting for learners"


def stops_for_long(stopping_s: float) -> Finding:
    """A run that was told to stop, and neither ends nor makes anything."""
    return Finding(
        severity="error",
        about="fragments",
        sentence=f"stopping for {stopping_s:,.0f} s without a record, and no end is on the tape",
        advice="check whether an aggregator runs, and in its log for what it waits",
        runbook=FRAGMENT_STOPPED,
    )


def quiet(history: History, views: dict[str, LastHeartbeat], now_s: float) -> Iterator[Finding]:
    """Learners train, and nothing comes to the tape: it stores nothing, or they cannot send."""
    settings = history.in_force
    step_times_s = [
        view.heartbeat.step_time_s
        for view in views.values()
        if view.heartbeat.state == "training"
        and now_s - view.heard_at_s <= settings.quorum.liveness_timeout_s
    ]
    if not step_times_s or history.stop:
        return
    each_s = settings.sync.interval_steps * min(step_times_s)
    quiet_s = now_s - history.extent.last_s
    if quiet_s > patience_s(settings) + PATIENCE * each_s:
        yield Finding(
            severity="error",
            about="tape",
            sentence=f"learners train, and for {quiet_s:,.0f} s nothing has come to the tape",
            advice="look in their logs for what they wait for; a stream that met a full disk takes "
            "nothing until its nats-server is restarted",
            runbook=DISK_FULL,
        )


def patience_s(settings: RunSettings) -> float:
    """How long updates may wait for a record before their fragment stands still."""
    return PATIENCE * settings.quorum.deadline_s + settings.sync.reannounce_timeout_s


def standing_still(fragment: int, updates: int, waited_s: float) -> Finding:
    """A fragment whose updates wait for longer than they may."""
    return Finding(
        severity="error",
        about=f"fragment {fragment}",
        sentence=f"stalled: {updates} updates wait, and there has been no record "
        f"for {waited_s:,.0f} s",
        advice="check whether an aggregator runs, and in its log for this fragment",
        runbook=FRAGMENT_STOPPED,
    )


def owners(history: History, leases: dict[int, wire.Lease]) -> Iterator[Finding]:
    """Fragments that no aggregator has a lease of, while the run goes on."""
    if history.end is not None:
        return
    states = {fragment: lease.state for fragment, lease in leases.items()}
    free = [f for f in sorted(history.records) if states.get(f, "released") == "released"]
    if free and history.joins:
        yield ownerless(free)
    shares = Counter(lease.aggregator for lease in leases.values() if lease.state == "held")
    if shares and not free:
        listed = ", ".join(f"{name} {count}" for name, count in sorted(shares.items()))
        yield Finding(severity="ok", about="owners", sentence=f"fragments are owned by {listed}")


def ownerless(free: Sequence[int]) -> Finding:
    """Fragments that nobody has a lease of."""
    listed = ", ".join(str(fragment) for fragment in free[:12])
    return Finding(
        severity="warning",
        about="owners",
        sentence=f"no aggregator owns fragment {listed}{' ...' if len(free) > 12 else ''}",
        advice="start an aggregator; one that was just killed is replaced within its lease",
        runbook=FRAGMENT_STOPPED,
    )


def tape(history: History, found: Audit) -> Iterator[Finding]:
    """What the audit of the tape found, by rule."""
    yield from _breaches(found.breaches, "tape", BROKEN_INVARIANT)
    account = found.account
    since = "since the oldest record, " if history.trimmed else ""
    if not found.breaches:
        yield Finding(
            severity="ok",
            about="tape",
            sentence=f"{since}{account.sent:,} updates sent = {account.merged:,} merged + "
            f"{account.rejected:,} rejected + {account.in_flight:,} in flight; no gap, no fork",
        )
    if history.garbage:
        subjects = Counter(item.subject for item in history.garbage)
        yield Finding(
            severity="note",
            about="tape",
            sentence=f"{len(history.garbage)} messages do not follow this run's protocol, most on "
            f"{subjects.most_common(1)[0][0]!r}: they were passed over",
        )


def stores_nothing(stream: str, error: str) -> Finding:
    """A server that answers, and does not store what it is sent."""
    return Finding(
        severity="error",
        about="bus",
        sentence=f"NATS answers, and stores nothing in stream {stream!r}: {error}",
        advice="its disk is full, or was: a stream that met a full disk takes nothing more, also "
        "with room again, until its nats-server is restarted",
        runbook=DISK_FULL,
    )


def room(filled: Filled) -> Iterator[Finding]:
    """How near the tape is to its limit."""
    used = share(filled)
    if not filled.max_bytes:
        return
    sizes = f"{_bytes(filled.size_bytes)} of {_bytes(filled.max_bytes)}"
    if used < NEARLY_FULL:
        yield Finding(severity="ok", about="tape", sentence=f"it holds {sizes}")
        return
    yield Finding(
        severity="warning",
        about="tape",
        sentence=f"nearly full: {sizes}; a full tape accepts no message",
        advice="find out who fills it, and let garbage collection or a larger limit make room",
        runbook=TAPE_FULL,
    )


def readers(filled: Filled) -> Iterator[Finding]:
    """How near the tape is to as many readers as the server gives it; each process is one."""
    most = filled.max_readers or USUAL_READERS
    if filled.readers < NEARLY_FULL * most:
        return
    unless = "" if filled.max_readers else ", unless its account says another number"
    yield Finding(
        severity="warning",
        about="tape",
        sentence=f"{filled.readers} processes read it, and the server lets {most} of them{unless}: "
        "then no learner joins, and no aggregator starts",
        advice="raise the number in the server's configuration (docs/operations.md, Large fleets)",
        runbook=NO_LEARNERS,
    )


def objects(found: Objects, *, deep: bool) -> Iterator[Finding]:
    """What became of the objects that the tape names."""
    gone = [b for b in found.breaches if b.rule == "objects"]
    yield from _breaches(gone, "store", MISSING_OBJECT)
    wrong = [b for b in found.breaches if b.rule == "digests"]
    yield from _breaches(wrong, "store", DIGEST_MISMATCH)
    if not found.breaches:
        remade = f"; {found.remade:,} versions made again to the bit" if deep else ""
        yield Finding(
            severity="ok",
            about="store",
            sentence=f"all {found.needed:,} objects ({_bytes(found.needed_bytes)}) that recovery "
            f"needs are there{remade}",
        )
    if found.orphans:
        yield Finding(
            severity="note",
            about="store",
            sentence=f"{len(found.orphans):,} objects ({_bytes(sum(found.orphans.values()))}) "
            "are not referenced by the tape: uploads in progress, or left by crashes",
            advice="" if found.newer else "garbage collection removes them later",
            runbook=ORPHANED_OBJECTS,
        )


def rules(judged: Judged) -> Iterator[Finding]:
    """Whether every record follows from the tape by the rules."""
    yield from _breaches(judged.breaches, "rules", BROKEN_INVARIANT)
    if not judged.breaches:
        unknown = f"; {judged.unknown:,} could not be followed" if judged.unknown else ""
        followed = bool(judged.followed or not judged.unknown)
        yield Finding(
            severity="ok" if followed else "note",
            about="rules",
            sentence=f"{judged.followed:,} decisions follow from the tape by the rules{unknown}; "
            f"{judged.remade:,} versions agree with plain arithmetic",
        )


def _breaches(breaches: Sequence[Breach], about: str, runbook: str) -> Iterator[Finding]:
    """One finding for each rule, with its first breach."""
    by_rule: dict[str, list[Breach]] = defaultdict(list)
    for breach in breaches:
        by_rule[breach.rule].append(breach)
    for rule, found in by_rule.items():
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        yield Finding(
            severity="error",
            about=f"{about}: {rule}",
            sentence=f"{first.where}: {first.what}{more}",
            advice="stop and delete nothing until the cause is known",
            runbook=runbook,
        )


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
