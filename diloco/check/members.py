"""What tape and heartbeats say of each learner: who is well, and what is amiss with the others.

A learner is called well only where nothing else can be said of it: whoever is shut out, ended by an
error, superseded, silent, or of no use is told of as that, also once it has left.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

from diloco.check.symptoms import (
    DISK_FULL,
    LAGGING_LEARNER,
    NO_LEARNERS,
    QUARANTINED_LEARNER,
    RECENT,
    REJECTED_UPDATES,
    Finding,
)
from diloco.common import wire
from diloco.common.reasons import find
from diloco.common.wire import LEARNER_STATES, note
from diloco.projections.history import History
from diloco.projections.live import LastHeartbeat

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
_AS_FAST = "declare it in bounds.learners if it is as fast as it says; if not, it is misconfigured "
CURE = {
    "steps": f"{_AS_FAST}or lies",
    "weight": f"{_AS_FAST}or lies",
    "norm": "compare its learning rate and its data with the others'; `diloco replay RUN --blame` "
    "says what its updates did",
}


class Answer(NamedTuple):
    """What became of an update: its staleness if it was merged, else the reason.

    `less`: in which ways a merged one counts for less than it claims.
    """

    stream_seq: int
    staleness: int | None
    reason: str
    less: tuple[str, ...] = ()


def learners(
    history: History, views: dict[str, LastHeartbeat], now_s: float, *, copied: bool = False
) -> Iterator[Finding]:
    """Learners that are shut out, silent or superseded, or whose work hardly counts.

    Args:
        history: the tape.
        views: last heartbeats, by learner.
        now_s: the time.
        copied: whether this is a copy in a file, of a run that may go on without it.
    """
    stop_seq = history.stop[0] if history.stop else 0
    words = {word.learner: word for _, word in history.quarantines}
    newest = [chain[-1][1].policy for _, chain in sorted(history.records.items())]
    told = answers(history.all_records(), RECENT)
    merged = {one.learner for record in history.all_records() for one in record.inputs}
    lives, known = dict[str, int](), members_of(newest)
    for seq, join in history.joins:
        lives[join.learner] = seq
    leaves_of = history.full_leaves()
    for name, life in sorted(lives.items()):
        leaves, view = [seq for seq, _ in leaves_of.get((name, life), ())], views.get(name)
        ended = [*failed(name, of_life(view, life))]
        found = [*shut_out(name, newest, words.get(name)), *ended]
        if not stop_seq:
            gone_s = history.times_s[leaves[0]] if leaves else None
            found += superseded(name, life, view, gone_s)
        if not leaves and not stop_seq and not ended:
            liveness_timeout_s = history.in_force.quorum.liveness_timeout_s
            found += silence(name, of_life(view, life), now_s, liveness_timeout_s)
        found += usefulness(name, told.get(name, ()))
        if not leaves and stop_seq and not found:
            found = [*_missing_at_the_end(name, known.get((name, life), ()))]
        if found:
            yield from found
        elif leaves or stop_seq:
            left = bool(leaves) and (not stop_seq or leaves[0] < stop_seq)
            how = "has left" if left else "took part to the end"
            yield _gone(name, how, of_use=bool(history.trimmed) or name in merged)
        else:
            yield from _pace(name, view)
    if not stop_seq and not history.in_force.run.paused and not copied:
        there = {name: of_life(views.get(name), life) for name, life in lives.items()}
        who_left = {name for name, life in lives.items() if (name, life) in leaves_of}
        timeout_s = history.in_force.quorum.liveness_timeout_s
        yield from nobody(there, who_left, now_s, timeout_s)
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


def unborn(
    views: Mapping[str, LastHeartbeat],
    lives: Mapping[str, int],
    read_seq: int,
    last_seq: int,
) -> Iterator[Finding]:
    """Learners whose heartbeats are of a life that never joined: nothing that they say counts.

    Args:
        views: last heartbeats, by learner.
        lives: each learner's newest life; 0 for none.
        read_seq: where the tape was read to, of which `lives` are; 0 where only a part was read.
        last_seq: the tape's last sequence, asked for behind the heartbeats: a life is the sequence
            of its join, and none is beyond.
    """
    for name, view in sorted(views.items()):
        life, newest = view.heartbeat.incarnation, lives.get(name, 0)
        if life > last_seq or newest < life <= read_seq:
            yield Finding(
                severity="warning",
                about=f"learner {name}",
                sentence=f"sends heartbeats of incarnation {life}, which never joined: they count "
                "for nothing",
                advice="end that process; if you did not start it, revoke the learner's credential",
                runbook=LAGGING_LEARNER,
            )


def born(views: Mapping[str, LastHeartbeat], unborn: Iterable[Finding]) -> dict[str, LastHeartbeat]:
    """The heartbeats of lives that may have joined."""
    named = {finding.about for finding in unborn}
    return {name: view for name, view in views.items() if f"learner {name}" not in named}


def failed(name: str, view: LastHeartbeat | None) -> Iterator[Finding]:
    """A learner whose newest life was ended by an error, in its own words."""
    if view is None or view.heartbeat.state != "failed":
        return
    yield Finding(
        severity="warning",
        about=f"learner {name}",
        sentence=f"an error has ended it: {note(view.heartbeat.trouble)}",
        advice="its log says more; repair that, and start it again",
        runbook=LAGGING_LEARNER,
    )


def superseded(
    name: str, life: int, view: LastHeartbeat | None, gone_s: float | None = None
) -> Iterator[Finding]:
    """A process of an earlier life that goes on under a learner's name.

    Args:
        name: the learner.
        life: its newest.
        view: its last heartbeat.
        gone_s: when the newest life has left, if it has.
    """
    if view is None or of_life(view, life) is not None:
        return
    if gone_s is not None and view.heard_at_s <= gone_s:
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
    if not any(member.live or member.final for member in known):
        why = "was silent when the run stopped" if known else "no record knows of its last life"
        yield Finding(severity="note", about=f"learner {name}", sentence=why)


def _gone(name: str, how: str, *, of_use: bool) -> Finding:
    """A learner that ended in order; well only if something of it was merged."""
    if of_use:
        return Finding(severity="ok", about=f"learner {name}", sentence=how)
    nothing = f"{how}, and nothing of it was merged"
    return Finding(severity="note", about=f"learner {name}", sentence=nothing)


def _pace(name: str, view: LastHeartbeat | None) -> Iterator[Finding]:
    """A learner that is there; of its troubles it says itself."""
    if view is None or view.heartbeat.trouble:
        return
    beat = view.heartbeat
    trains = beat.state == "training"
    pace = f"trains, {beat.tokens_per_s:,.0f} tokens/s, step {beat.local_step:,}"
    yield Finding(
        severity="ok" if trains else "note",
        about=f"learner {name}",
        sentence=pace if trains else f"does not train: {state_of(beat)}",
    )


def state_of(beat: wire.Heartbeat) -> str:
    """A learner's own word for what it does, if it is one."""
    return beat.state if beat.state in LEARNER_STATES else "unknown"


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


def nobody(
    there: Mapping[str, LastHeartbeat | None],
    left: Collection[str],
    now_s: float,
    liveness_timeout_s: float,
) -> Iterator[Finding]:
    """A run that goes on, of whose learners all have left, are silent or were ended by an error.

    Args:
        there: last heartbeat of each learner's newest life.
        left: those of them that have left.
        now_s: the time.
        liveness_timeout_s: who was not heard of for so long is silent.
    """
    silent = [
        name
        for name, view in there.items()
        if name not in left
        and [*failed(name, view), *silence(name, view, now_s, liveness_timeout_s)]
    ]
    if not there or len(silent) + len(left) < len(there):
        return
    gone = [f"{len(silent)} silent or ended by an error"] if silent else []
    gone += [f"{len(left)} left in order"] if left else []
    yield Finding(
        severity="error" if silent else "warning",
        about="learners",
        sentence=f"no learner is there, and nothing is trained: {', '.join(gone)}",
        advice="start them again; if they all stop at once, look at what they share",
        runbook=NO_LEARNERS,
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
            advice=CURE[less.most_common(1)[0][0]],
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


def troubles(views: Mapping[str, LastHeartbeat], left: Collection[str] = ()) -> Iterator[Finding]:
    """What learners themselves say that somebody should look at; who has left needs nobody."""
    for name, view in sorted(views.items()):
        if view.heartbeat.trouble and view.heartbeat.state != "failed" and name not in left:
            yield Finding(
                severity="warning",
                about=f"learner {name}",
                sentence=f"says: {note(view.heartbeat.trouble)}",
                advice="its log says more; a crash would cost it what its newest checkpoint lacks",
                runbook=DISK_FULL,
            )
