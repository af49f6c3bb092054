"""Findings on a run's health that need its whole tape or its objects.

The functions turn facts, which `doctor.py` reads, into findings. Each finding that needs action
names its runbook. Findings that follow from a `RunStatus` and the settings are in
`run/health_findings.py`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from diloco.aggregator.tape_watch import NEARLY_FULL
from diloco.common.protocol import wire
from diloco.common.storage.bus import Filled
from diloco.judge.audit import Audit, Breach, ObjectsReport
from diloco.run.comparison import LOSS_SPIKE
from diloco.run.health_findings import (
    DIGEST_MISMATCH,
    DISK_FULL,
    MISSING_OBJECT,
    NO_LEARNERS,
    SKEW_S,
    clock,
)
from diloco.run.history import History
from diloco.run.newest_objects import breach
from diloco.run.state import RECENT, Finding

RUN_MISMATCH = "runbooks/run-mismatch.md"
PERMISSIONS = "runbooks/permissions.md"
ORPHANED_OBJECTS = "runbooks/orphaned-objects.md"
BROKEN_INVARIANT = "runbooks/broken-invariant.md"
RESTORE = "runbooks/restore-from-bucket.md"

# The assumed limit of a stream whose configuration states none: the default of nats-server from
# 2.15 on (jetstream.limits.default_max_consumers). A number of the stream's account prevails over
# it, and the stream does not show that one.
USUAL_READERS = 1000
# A held-out loss is ruined if it is above its least value by more than LOST_SHARE of its fall (the
# first value less the least) and by more than LOST_LEAST of the least value. A series of fewer than
# FEWEST_SCORES is not judged.
FEWEST_SCORES = 3
LOST_SHARE, LOST_LEAST = 0.5, 0.1


def aggregator_clocks(history: History) -> Iterator[Finding]:
    """Yields a finding for each aggregator whose clock is fast.

    Its newest records state that the round closed later than the server stored the record.
    """
    ahead: dict[str, float] = {}
    for chain in history.records.values():
        for seq, record in chain[-RECENT:]:
            if record.what == "version" and record.inputs:
                early_s = record.closed_at_s - history.times_s[seq]
                ahead[record.aggregator] = max(ahead.get(record.aggregator, early_s), early_s)
    for name, ahead_s in sorted(ahead.items()):
        # A closing time before the server's says nothing: closing a round takes time.
        if ahead_s > SKEW_S:
            yield clock(f"clock of {name}", ahead_s, history.settings.quorum.liveness_timeout_s)


def tape(history: History, found: Audit) -> Iterator[Finding]:
    """Yields the findings of a tape's audit: one for each broken rule, or that none is broken."""
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
            f"{subjects.most_common(1)[0][0]!r}: readers ignore them",
        )


def stores_nothing(stream: str, error: str) -> Finding:
    """Returns the finding on a server that answers, but stores nothing."""
    return Finding(
        severity="error",
        about="bus",
        sentence=f"NATS answers, and stores nothing in stream {stream!r}: {error}",
        advice="the server's disk is full, or was: a stream that met a full disk accepts no "
        "message, even once there is room again, until its nats-server is restarted",
        runbook=DISK_FULL,
    )


def readers(filled: Filled) -> Iterator[Finding]:
    """Yields a warning if the tape's consumers are nearly as many as the server allows."""
    most = filled.max_readers or USUAL_READERS
    if filled.readers < NEARLY_FULL * most:
        return
    unless = "" if filled.max_readers else ", unless its account says another number"
    yield Finding(
        severity="warning",
        about="tape",
        sentence=f"the tape has {filled.readers} readers, of which a learner needs about five, and "
        f"the server allows {most}{unless}: beyond that number no learner joins, and no aggregator "
        "starts",
        advice="raise the number in the server's configuration (docs/operations.md, Large fleets)",
        runbook=NO_LEARNERS,
    )


def objects(found: ObjectsReport, *, deep: bool) -> Iterator[Finding]:
    """Yields the findings on objects that the tape names, on orphans and on invented objects."""
    gone = [b for b in found.breaches if b.rule == "objects"]
    yield from _breaches(gone, "store", MISSING_OBJECT)
    wrong = [b for b in found.breaches if b.rule in ("bytes", "digests")]
    yield from _breaches(wrong, "store", DIGEST_MISMATCH)
    if not found.breaches:
        remade = f"; {found.remade:,} versions made again to the bit" if deep else ""
        remade += f"; the bytes of the newest {found.read:,} were compared" if found.read else ""
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
    for learner, count in sorted(found.invented.items()):
        yield Finding(
            severity="warning",
            about=f"learner {learner}",
            sentence=f"{count:,} objects below its prefix are of lives that it never began: it is "
            "misconfigured or lies",
            advice="nothing depends on them; look at its machine, or revoke its credentials",
            runbook=ORPHANED_OBJECTS,
        )


def rules(found: Audit) -> Iterator[Finding]:
    """Yields, after a deep audit without breaches, the numbers of what was recomputed."""
    if found.deep and not found.breaches:
        unknown = f"; {found.unknown:,} could not be recomputed" if found.unknown else ""
        followed = bool(found.followed or not found.unknown)
        yield Finding(
            severity="ok" if followed else "note",
            about="rules",
            sentence=f"{found.followed:,} decisions follow from the tape by the rules{unknown}; "
            f"{found.remade:,} versions agree with plain arithmetic",
        )


def ruined(scores: Sequence[wire.Score]) -> Iterator[Finding]:
    """Yields a warning for each held-out loss that is ruined (see `LOST_SHARE`).

    The losses are that of all held-out data, and those of its slices by the names of the newest
    score.

    Args:
        scores: the stored scores, in order of time.
    """
    if not scores:
        return
    newest = scores[-1]
    others = [one for one in scores if one.slices.keys() != newest.slices.keys()]
    yield from _risen("held-out loss", [(one.loss, one.global_step) for one in scores])
    for name in newest.slices:
        having = [one for one in scores if name in one.slices]
        losses = [(one.slices[name]["loss"], one.global_step) for one in having]
        yield from _risen(f"held-out loss of {name}", losses)
    if others:
        was, now = (", ".join(one.slices) or "none" for one in (others[-1], newest))
        yield Finding(
            severity="note",
            about="held-out slices",
            sentence=f"kept scores name other slices: {wire.note(was)} at step "
            f"{others[-1].global_step:,}, {wire.note(now)} at step {newest.global_step:,}",
            advice="score with one release of the task; `diloco evaluate RUN --version V` scores "
            "an earlier version with today's slices",
        )


def _risen(about: str, losses: Sequence[tuple[float, int]]) -> Iterator[Finding]:
    """Yields a warning if a series of (loss, global step), in order of time, is ruined."""
    if len(losses) < FEWEST_SCORES:
        return
    (first, _), (newest, at), (best, best_at) = losses[0], losses[-1], min(losses)
    if newest - best > max(LOST_SHARE * (first - best), LOST_LEAST * abs(best)):
        yield Finding(
            severity="warning",
            about=about,
            sentence=f"{newest:.4g} at step {at:,}; it was {best:.4g} at step {best_at:,}",
            advice="`diloco replay RUN --bisect` finds the version at which the loss rose, and "
            "`--blame` the learner; if no learner did it, the outer step is too long: `diloco "
            "replay RUN --set outer.learning_rate=0.5`",
            runbook=LOSS_SPIKE,
        )


def _breaches(breaches: Sequence[Breach], about: str, runbook: str) -> Iterator[Finding]:
    """Yields one finding for each broken rule: its first breach, and their number."""
    by_rule: dict[str, list[Breach]] = defaultdict(list)
    for one in breaches:
        by_rule[one.rule].append(one)
    for rule, found in by_rule.items():
        yield breach(rule, [f"{each.where}: {each.what}" for each in found], runbook, about)


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
