"""What a run's tape, heartbeats and objects say about its health, as sentences.

Functions from what was read to findings; `doctor.py` does the reading. Each finding that asks for
something names its runbook.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple

from diloco.aggregator.tape_watch import NEARLY_FULL, share
from diloco.check.audit import Audit, Breach, Objects
from diloco.check.rules import Judged
from diloco.common import wire
from diloco.common.bus import Filled
from diloco.common.config import RunSettings, warnings
from diloco.common.reasons import find
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

# Clocks that differ by more confuse deadlines and people; what breaks is
# `quorum.liveness_timeout_s`.
SKEW_S = 1.0
# Of a learner's updates, so many are looked back on.
RECENT = 16
# Mean staleness, in versions, from which a learner's work hardly counts.
STALE = 4.0
REJECTED_SHARE = 0.1
# Fewer than this may be an accident of clocks.
CUT_LEAST = 4
# What is said of updates that count for less than they claim.
LESS = {
    "steps": "claim more steps than there was time for",
    "weight": "claim far more tokens than the others' weigh",
    "norm": "were shortened: far longer for their steps than the others'",
}
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


class Answer(NamedTuple):
    """What became of an update: its staleness if it was merged, else the reason.

    `less`: in which ways a merged one counts for less than it claims.
    """

    stream_seq: int
    staleness: int | None
    reason: str
    less: tuple[str, ...] = ()


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


def learners(history: History, views: dict[str, LastHeartbeat], now_s: float) -> Iterator[Finding]:
    """Learners that are shut out, silent or superseded, or whose work hardly counts."""
    stop_seq = history.stop[0] if history.stop else 0
    words = {word.learner: word for _, word in history.quarantines}
    newest = [chain[-1][1].policy for _, chain in sorted(history.records.items())]
    told = answers(history.all_records(), RECENT)
    lives, members = dict[str, int](), members_of(newest)
    for seq, join in history.joins:
        lives[join.learner] = seq
    leaves_of = history.full_leaves()
    for name, life in sorted(lives.items()):
        leaves, view = [seq for seq, _ in leaves_of.get((name, life), ())], views.get(name)
        found = [*shut_out(name, newest, words.get(name))]
        if not leaves and not stop_seq:
            liveness_timeout_s = history.settings.quorum.liveness_timeout_s
            found += superseded(name, life, view)
            found += silence(name, of_life(view, life), now_s, liveness_timeout_s)
            found += usefulness(name, told.get(name, ()))
        if not leaves and stop_seq and not found:
            found = [*_missing_at_the_end(name, members.get((name, life), ()))]
        if found:
            yield from found
            continue
        left = bool(leaves) and (not stop_seq or leaves[0] < stop_seq)
        state = "has left" if left else "took part to the end" if stop_seq else _pace(view)
        yield Finding(severity="ok", about=f"learner {name}", sentence=state)
    if not history.joins and not stop_seq:
        yield Finding(severity="note", about="learners", sentence="no learner has joined yet")


def shut_out(
    name: str, newest: Iterable[wire.PolicyState], word: wire.Quarantine | None = None
) -> Iterator[Finding]:
    """A learner that is quarantined, whatever else it does: nothing of it is merged.

    Args:
        name: the learner.
        newest: what the fragments' machines remember.
        word: the newest of it on the tape, which may be trimmed.
    """
    remembered = any(name in memory.quarantined for memory in newest)
    if not (word.active if word is not None else remembered):
        return
    yield Finding(
        severity="warning",
        about=f"learner {name}",
        sentence=f"is quarantined{f': {word.reason}' if word is not None else ''}",
        advice=f"find out why; `diloco learners RUN --release {name}` lets it in again",
        runbook=QUARANTINED_LEARNER,
    )


def of_life(view: LastHeartbeat | None, life: int) -> LastHeartbeat | None:
    """A learner's heartbeat, if it is not one of an earlier life than its newest."""
    return view if view is not None and view.heartbeat.incarnation >= life else None


def superseded(name: str, life: int, view: LastHeartbeat | None) -> Iterator[Finding]:
    """A process of an earlier life that goes on under a learner's name."""
    if view is None or of_life(view, life) is not None:
        return
    yield Finding(
        severity="warning",
        about=f"learner {name}",
        sentence=f"its last heartbeat is of incarnation {view.heartbeat.incarnation}, "
        f"but {life} has joined since: the earlier process is superseded",
        advice="if it still runs, end it, or give it a name of its own",
        runbook=LAGGING_LEARNER,
    )


def members_of(
    newest: Iterable[wire.PolicyState],
) -> dict[tuple[str, int], list[wire.MemberState]]:
    """What the fragments' machines remember of each life."""
    found: dict[tuple[str, int], list[wire.MemberState]] = defaultdict(list)
    for memory in newest:
        for member in memory.members:
            found[member.learner, member.incarnation].append(member)
    return found


def _missing_at_the_end(name: str, known: Collection[wire.MemberState]) -> Iterator[Finding]:
    """A learner that was silent when the run stopped: it did not take part to the end."""
    if known and not any(member.live or member.final for member in known):
        yield Finding(
            severity="note", about=f"learner {name}", sentence="was silent when the run stopped"
        )


def _pace(view: LastHeartbeat | None) -> str:
    if view is None:
        return "has joined"
    beat = view.heartbeat
    return f"trains, {beat.tokens_per_s:,.0f} tokens/s, step {beat.local_step:,}"


def silence(
    name: str, view: LastHeartbeat | None, now_s: float, liveness_timeout_s: float
) -> Iterator[Finding]:
    """A learner that has joined, has not left, and was not heard of for `liveness_timeout_s`."""
    if view is not None and now_s - view.heard_at_s <= liveness_timeout_s:
        return
    since = f"for {now_s - view.heard_at_s:,.0f} s" if view is not None else "since it joined"
    yield Finding(
        severity="warning",
        about=f"learner {name}",
        sentence=f"silent {since}, and has not left the run",
        advice="check whether its process runs and reaches NATS; start it again if not",
        runbook=LAGGING_LEARNER,
    )


def answers(records: Iterable[wire.Record], last: int = 0) -> dict[str, list[Answer]]:
    """What became of each learner's updates; with `last`, at least of so many that came last."""
    found: dict[str, list[Answer]] = defaultdict(list)
    for record in records:
        told = [(t.learner, Answer(t.stream_seq, t.staleness, "", t.less_for))
                for t in record.inputs]  # fmt: skip
        told += [(t.learner, Answer(t.stream_seq, None, t.reason)) for t in record.rejected]
        for learner, answer in told:
            own = found[learner]
            own.append(answer)
            if last and len(own) > 4 * last:
                found[learner] = sorted(own, key=itemgetter(0))[-last:]
    return found


def usefulness(name: str, resolved: Iterable[Answer]) -> Iterator[Finding]:
    """Of what a learner sent last: how stale it was, and how much was rejected."""
    recent = sorted(resolved, key=lambda item: item[0])[-RECENT:]
    stale = [one.staleness for one in recent if one.staleness is not None]
    reasons = Counter(one.reason for one in recent if one.reason)
    less = Counter(what for one in recent for what in one.less)
    if less.total() >= max(CUT_LEAST, REJECTED_SHARE * len(recent)):
        yield Finding(
            severity="warning",
            about=f"learner {name}",
            sentence=f"of its last {len(recent)} updates "
            + ", ".join(f"{count} {LESS[what]}" for what, count in less.most_common()),
            advice="declare it in bounds.learners if it is as fast as it says; if not, it is "
            "misconfigured or lies",
            runbook=REJECTED_UPDATES,
        )
    if stale and statistics.fmean(stale) >= STALE:
        yield Finding(
            severity="warning",
            about=f"learner {name}",
            sentence=f"its last updates were {statistics.fmean(stale):.1f} versions old: they "
            "count for little",
            advice="give it faster steps, or a larger H for all",
            runbook=LAGGING_LEARNER,
        )
    if reasons.total() > REJECTED_SHARE * len(recent):
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        most = find(reasons.most_common(1)[0][0])
        yield Finding(
            severity="warning",
            about=f"learner {name}",
            sentence=f"{reasons.total()} of its last {len(recent)} updates were rejected: {listed}",
            advice=f"{most}: {most.text}" if most else "it is a reason of another release",
            runbook=most.runbook if most else REJECTED_UPDATES,
        )


def fragments(history: History, found: Audit, now_s: float) -> Iterator[Finding]:
    """Fragments whose updates wait, and nobody merges them."""
    longest_s = patience_s(history.settings)
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
    if not stopped:
        versions = history.versions()
        state = "ended" if history.end else "stopping" if history.stop else "under way"
        yield Finding(
            severity="ok",
            about="fragments",
            sentence=f"{state}: {len(versions)} fragments at versions {min(versions, default=0)} "
            f"to {max(versions, default=0)}",
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
        yield Finding(
            severity="ok",
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
