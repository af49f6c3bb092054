"""Makes the findings on a run's health that status, alerts and doctor share.

All follow from one `RunStatus`, the run at a moment; findings that need the whole tape or the store
are made in `diloco/judge`. A learner is reported as well only if it has no other finding. Learners
that are quarantined, superseded, ended by an error or of little use are reported also after they
have left.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from diloco.aggregator.core.members import LEAST_OTHERS
from diloco.aggregator.tape_watch import NEARLY_FULL
from diloco.common.process.config import Broken, RunSettings, broken
from diloco.common.protocol.errors import DilocoError
from diloco.common.protocol.reasons import Reason, find
from diloco.common.protocol.wire import note
from diloco.run.cli.format_numbers import age, human_bytes
from diloco.run.comparison import LAGGING_LEARNER, LOSS_SPIKE
from diloco.run.contradictions import REJECTED_SHARE, REJECTED_UPDATES, contradictions
from diloco.run.outliers import outliers
from diloco.run.state import Change, Finding, LearnerStatus, RunStatus, Severity

ADD_LEARNER = "runbooks/add-remove-learner.md"
AGGREGATOR_DOWN = "runbooks/aggregator-down.md"
BAD_CONFIGURATION = "runbooks/bad-configuration.md"
CHECKPOINTS_FAIL = "runbooks/checkpoints-fail.md"
CLOCK_SKEW = "runbooks/clock-skew.md"
DIGEST_MISMATCH = "runbooks/digest-mismatch.md"
DISK_FULL = "runbooks/disk-full.md"
FEWER_SLICES = "runbooks/fewer-slices.md"
FRAGMENT_STOPPED = "runbooks/fragment-stopped.md"
MISSING_OBJECT = "runbooks/missing-object.md"
NATS_AWAY = "runbooks/nats-away.md"
NO_LEARNERS = "runbooks/no-learners.md"
QUARANTINED_LEARNER = "runbooks/quarantined-learner.md"
STORE_AWAY = "runbooks/store-away.md"
TAPE_FULL = "runbooks/tape-full.md"

# Severities, the worst first.
ORDER: tuple[Severity, ...] = ("error", "warning", "note", "ok")
# A fragment counts as stopped when its updates have waited for this many deadlines.
PATIENCE = 3.0
# From this median staleness on, in versions, a learner's work hardly counts; and the fewest
# updates for that median.
STALE = 4.0
STALE_LEAST = 4
# The number of subjects that a group of findings names.
NAMED = 5
# A shorter wait is the latency of messages, and no finding.
WAIT_LEAST_S = 1.0
# This many lives that end without a leave message within an hour are a crash loop.
SUDDEN_ENDS = 3
# The cause if a learner ended by NaN or infinity, and the errors that show it.
NOT_A_NUMBER = ", for values that are not finite (NaN)"
NOT_FINITE = re.compile(r"\bnan\b|\binf|not a number|diverged", re.IGNORECASE)
# The error of a life of several hosts that ended with one of them.
HOST_LOST = re.compile(r"of this learner is gone")
# Seconds that a learner may train with fewer slices than it has: a machine takes some to come back.
FEWER_S = 600.0
# The difference of clocks that is reported; a heartbeat may be LATE_S old when it arrives.
SKEW_S, LATE_S = 1.0, 10.0
ENDS = "see what ends it: systemctl status diloco-aggregator, its journal, its memory"


def judged(run: RunStatus, settings: RunSettings, *, copied: bool = False) -> Iterator[Finding]:
    """Yields the findings on a run at one moment, in no order; works also after the run's end.

    Args:
        run: the run at that moment.
        settings: the settings in force then.
        copied: whether the tape is a copy in a file, without leases.
    """
    stopped = run.state in ("stopping", "ended")
    yield from tape_fill(run.tape_bytes, run.tape_limit_bytes)
    for name, life in run.unjoined.items():
        yield _of_no_life(name, life)
    amiss = [*outliers(run.learners), *contradictions(run, settings)]
    yield from amiss
    told = {one.about for one in amiss}
    for one in run.learners:
        found = _of_learner(one, whole=run.whole, stopped=stopped)
        # A learner with some fault gets no finding that it is well.
        yield from (said for said in found if said.severity != "ok" or said.about not in told)
    if not run.learners and not stopped:
        yield Finding(severity="note", about="learners", sentence="no learner has joined yet")
    if run.state in ("under way", "waiting for learners") and not copied:
        yield from _nobody(run.learners)
        yield from _held_by_few(run, settings)
    yield from run.stored
    yield from _taken_up(run, patience_s(settings))
    # Only changed settings: doctor reports those with which the run was created.
    yield from (one for one in configuration(settings, run.changes) if one.since_s is not None)
    yield from _waits(run, settings.sync.interval_steps)
    yield from _fragments(run, settings)
    yield from _quiet(run, settings)
    if run.state != "ended" and not copied:
        yield from _refused(run)
        yield from _cut_off(run)
        yield from _owners(run)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings sorted: the worst first; of equally severe ones, the earliest version first.

    Findings whose first version is unknown come last among the equally severe ones.
    """
    return sorted(
        findings,
        key=lambda one: (ORDER.index(one.severity), math.inf if one.since is None else one.since),
    )


def grouped(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings, worst first, with each group of like ones replaced by one finding.

    Findings are alike if severity, runbook and advice are equal. The finding for a group has the
    first one's sentence with the group's size, and names the first `NAMED` subjects.
    """
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for one in ranked(findings):
        # Findings without advice stay separate.
        said = "" if one.advice else (one.about, one.sentence)
        groups.setdefault((one.severity, one.runbook, one.advice, said), []).append(one)
    return [_merged(group) for group in groups.values()]


def _merged(group: Sequence[Finding]) -> Finding:
    first, names = group[0], [*dict.fromkeys(one.about for one in group)]
    if len(group) == 1:
        return first
    listed = f"{', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"
    sentence = f"{first.sentence} ({len(group):,} findings like this)"
    return replace(first, about=listed, sentence=sentence)


def failed(about: str, error: DilocoError, runbook: str) -> Finding:
    """Returns the finding on subject `about` that a check of it failed with this error.

    The error's message is the finding's sentence, its hint without `runbook` the advice.
    """
    return Finding(
        severity="error",
        about=about,
        sentence=error.message,
        advice=(error.hint or "").removesuffix(runbook).rstrip(": "),
        runbook=runbook,
    )


def tape_fill(size_bytes: int, limit_bytes: int) -> Iterator[Finding]:
    """Yields the finding on how full the tape is; nothing if it has no limit (0)."""
    if not limit_bytes:
        return
    sizes = f"{human_bytes(size_bytes)} of {human_bytes(limit_bytes)}"
    if size_bytes < NEARLY_FULL * limit_bytes:
        yield Finding(severity="ok", about="tape", sentence=f"it holds {sizes}")
        return
    yield Finding(
        severity="warning",
        about="tape",
        sentence=f"nearly full: {sizes}; a full tape accepts no message",
        advice="find out who fills it, and let garbage collection or a larger limit make room",
        runbook=TAPE_FULL,
    )


# Learners


def _of_learner(one: LearnerStatus, *, whole: bool, stopped: bool) -> Iterator[Finding]:
    """Yields the faults of a learner; if it has none, one finding on its progress."""
    found = [*_amiss(one, stopped=stopped)]
    if not found and stopped and not one.left and not one.live:
        known = one.live is not None
        why = "was silent when the run stopped" if known else "no record knows of its last life"
        found = [one.told(why, severity="note")]
    if found:
        yield from found
    elif one.left or stopped:
        how = "took part to the end" if one.finished else f"has left{_its_least(one)}"
        if one.merged or not whole:
            yield one.told(how, severity="ok")
        else:
            yield one.told(f"{how}, and nothing of it was merged", severity="note")
    elif one.state == "training":
        trains = f"trains, {one.tokens_per_s:,.0f} tokens/s, step {one.local_step:,}"
        yield one.told(trains, severity="ok")
    else:
        yield one.told(f"does not train: {one.state}", severity="note")


def _amiss(one: LearnerStatus, *, stopped: bool) -> Iterator[Finding]:
    if one.state == "quarantined":
        # Whatever else it does: nothing of it is merged.
        why = f"is quarantined{f': {one.why}' if one.why else ''}"
        advice = f"find out why; `diloco run release RUN {one.name}` lets it in again"
        yield one.told(why, advice, QUARANTINED_LEARNER)
    if one.sudden_ends >= SUDDEN_ENDS:
        why = (
            f"started again {one.sudden_ends} times within an hour, each time without having left "
            "the run"
        )
        advice = f"see what ends it: systemctl status diloco-learner@{one.name}, and the journal"
        yield one.told(why, advice, LAGGING_LEARNER, severity="error")
    if _forms_anew(one):
        why = f"a life ended, and its slices begin another: {note(one.trouble)}"
        yield one.told(why, "nothing, unless it repeats", FEWER_SLICES, severity="note")
    elif one.failed:
        cause = NOT_A_NUMBER if NOT_FINITE.search(one.trouble) else ""
        why = f"an error has ended it{cause}: {note(one.trouble)}"
        advice = "its log says more; repair that, and start it again"
        yield one.told(why, advice, LAGGING_LEARNER)
    if one.superseded and not stopped:
        why = (
            f"its last heartbeat is of incarnation {one.superseded}, "
            f"but {one.incarnation} has joined since: the earlier process is superseded"
        )
        advice = "if it still runs, end it, or give it a name of its own"
        yield one.told(why, advice, LAGGING_LEARNER)
    if one.silent and not (one.left or stopped or one.failed):
        since = f"for {one.heard_s:,.0f} s" if one.heard_s is not None else "since it joined"
        why = f"silent {since}, and has not left the run{_its_least(one)}"
        advice = "check whether its process runs and reaches NATS; start it again if not"
        yield one.told(why, advice, FEWER_SLICES if one.slices else LAGGING_LEARNER)
    if (one.left or not one.silent) and not (one.failed or stopped):
        yield from _of_its_slices(one)
    yield from _of_its_state(one)
    yield from _of_little_use(one)
    if one.trouble and not one.failed and not one.left:
        advice = "its log says more; a crash would cost it what its newest checkpoint lacks"
        page = CHECKPOINTS_FAIL if one.trouble.startswith("checkpoints fail") else LAGGING_LEARNER
        yield one.told(f"says: {note(one.trouble)}", advice, page)


def _forms_anew(one: LearnerStatus) -> bool:
    """True if a learner of several slices has lost a host, and was heard of since."""
    lost = one.slices is not None and one.failed and HOST_LOST.search(one.trouble) is not None
    return lost and not one.silent


def _its_least(one: LearnerStatus) -> str:
    """Returns with how many slices a learner trains, as the end of a sentence; "": it has one."""
    if one.slices is None:
        return ""
    return f"; it has {one.slices.given} slices, and trains with {one.slices.least} or more"


def _of_its_slices(one: LearnerStatus) -> Iterator[Finding]:
    """Yields the finding that a learner has trained for long with fewer slices than it has.

    Whether one that left was to end, or only has too few slices, nobody says: if it trains with one
    slice, it was to end.
    """
    if one.slices is None or one.slices.fewer_s <= FEWER_S:
        return
    advice = "see which of its hosts are away, and start them again"
    if not one.left:
        why = f"trains with {one.slices_said} slices, for {age(one.slices.fewer_s)}"
        yield one.told(why, advice, FEWER_SLICES)
    elif one.slices.least > 1:
        why = f"has left, {age(one.slices.fewer_s)} ago{_its_least(one)}"
        yield one.told(why, f"if it was not to end, {advice}", FEWER_SLICES)


def _of_its_state(one: LearnerStatus) -> Iterator[Finding]:
    """Yields findings on a learner's model, its process and its errors."""
    if one.views:
        (version, at_s), count = one.views[0], len(one.views)
        sentence = (
            f"the view that it holds differs from the run's ({count} checks): another release "
            "decodes otherwise, or its memory has errors"
        )
        advice = "give it the release and the packages of the others, and start it again"
        found = one.told(sentence, advice, LAGGING_LEARNER, severity="error")
        release, lock, platform = one.release
        evidence = f"release {release}, packages {lock[:8]}, on {platform}" if release else ""
        yield replace(found, since=version, since_s=at_s, evidence=evidence)
    if one.twins:
        sentence = (
            f"two processes run under the same name: {len(one.twins)} times an earlier one still "
            "ran when another had joined"
        )
        advice = "end one of them, or give it a name of its own"
        yield one.told(sentence, advice, ADD_LEARNER, since_s=one.twins[0])
    # Slices are lost, and a new life begins by itself: that is what they are for.
    errors = [why for why in one.errors if one.slices is None or not HOST_LOST.search(why)]
    if errors:
        (why, times), lives = Counter(errors).most_common(1)[0], one.lives
        cause = NOT_A_NUMBER if NOT_FINITE.search(why) else ""
        sentence = f"errors have ended {len(errors)} of its {lives} lives{cause}: {note(why)}"
        advice = (
            "its log says more; lower its learning rate, clip its gradients, or look at its data"
        )
        advice = advice if cause else "its log says more; repair that"
        runbook = LOSS_SPIKE if cause else LAGGING_LEARNER
        yield one.told(sentence, advice, runbook, evidence=f"{times} times the same error")
    if one.ahead_s is not None and not -LATE_S <= one.ahead_s <= SKEW_S:
        yield clock(f"learner {one.name}", one.ahead_s, LATE_S, "its clock is ")


def clock(about: str, ahead_s: float, error_s: float, whose: str = "") -> Finding:
    """Returns the finding on a clock compared with that of the NATS server.

    Args:
        about: the finding's subject.
        ahead_s: seconds by which the clock is ahead; negative if it is behind.
        error_s: a difference above this is an error; above `SKEW_S`, a warning; else it is ok.
        whose: begins the sentence of an error or warning, such as "its clock is ".
    """
    if abs(ahead_s) <= SKEW_S:
        return Finding(
            severity="ok", about=about, sentence=f"within {SKEW_S:g} s of the NATS server's clock"
        )
    way = "ahead of" if ahead_s > 0 else "behind"
    return Finding(
        severity="error" if abs(ahead_s) > error_s else "warning",
        about=about,
        sentence=f"{whose}{abs(ahead_s):,.1f} s {way} the NATS server's clock",
        advice="let all machines follow the same time service",
        runbook=CLOCK_SKEW,
    )


def _of_little_use(one: LearnerStatus) -> Iterator[Finding]:
    """Yields findings on a learner's last updates: their staleness, and rejections."""
    count = len(one.recent)
    reasons = Counter(answer.reason for answer in one.recent if answer.reason)
    # A learner cannot know that the last version was made while its update was on the way.
    del reasons[Reason.ENDED]
    stale = [answer.staleness for answer in one.recent if not answer.reason]
    # A learner that joins late sends one stale update, which is normal.
    if len(stale) >= STALE_LEAST and (usual := median(stale)) >= STALE:
        why = f"its last updates were {usual:.1f} versions old: they count for little"
        advice = "give it faster steps, or a larger H for all"
        yield one.told(why, advice, LAGGING_LEARNER)
    if reasons.total() > REJECTED_SHARE * count:
        listed = ", ".join(f"{reason} {times}" for reason, times in reasons.most_common())
        most = find(reasons.most_common(1)[0][0])
        why = f"{reasons.total()} of its last {count} updates were rejected: {listed}"
        advice = f"{most}: {most.text}" if most else "the aggregator's release has other reasons"
        yield one.told(why, advice, most.runbook if most else REJECTED_UPDATES)


def _of_no_life(name: str, life: int) -> Finding:
    return Finding(
        severity="warning",
        about=f"learner {name}",
        sentence=f"sends heartbeats of incarnation {life}, which never joined: they count "
        "for nothing",
        advice="end that process; if you did not start it, revoke the learner's credential",
        runbook=LAGGING_LEARNER,
    )


def _nobody(learners: Sequence[LearnerStatus]) -> Iterator[Finding]:
    """Yields the finding that all learners of a run have left, are silent or failed."""
    left = [one for one in learners if one.left]
    silent = [
        one
        for one in learners
        if not one.left and (one.silent or one.failed) and not _forms_anew(one)
    ]
    if not learners or len(silent) + len(left) < len(learners):
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


def _held_by_few(run: RunStatus, settings: RunSettings) -> Iterator[Finding]:
    """Yields a finding for each module that no learner holds, although learners are there.

    Also for a module that so few hold that no others bound a liar (`LEAST_OTHERS`), if learners may
    lie.
    """
    there = [one for one in run.learners if not (one.left or one.silent or one.failed)]
    for module in dict.fromkeys(one.module for one in run.fragments if one.module and there):
        # Who holds what is not known of a learner whose join was not read.
        holders = sum(not one.holds or module in one.holds for one in there)
        if holders == 0:
            yield Finding(
                severity="warning",
                about=f"module {module}",
                sentence="no learner that is there holds it: it is stalled, and the run does not "
                "end by steps or tokens",
                advice="start a learner that holds it, or end the run: diloco run end RUN",
                runbook=NO_LEARNERS,
            )
        elif holders <= LEAST_OTHERS and settings.run.trust == "others":
            yield Finding(
                severity="note",
                about=f"module {module}",
                sentence=f"{holders} of its holders are there, so that no median of others bounds "
                "an update of it: only the limits of the settings do",
                advice=f"let at least {LEAST_OTHERS + 1} learners hold it, or only owners whom you "
                "trust",
            )


# The run


def _taken_up(run: RunStatus, longest_s: float) -> Iterator[Finding]:
    """Yields findings on aggregators that crash repeatedly, or that let updates wait.

    A wait of more than `longest_s` seconds is a finding.
    """
    times, stood = run.takeovers, run.stood_still
    if stood is not None and stood.wait_s > longest_s:
        yield Finding(
            severity="note",
            about="aggregators",
            sentence=f"updates waited {stood.wait_s:,.0f} s for a version: no aggregator was "
            "there, its store was away, or the run was paused",
            advice=ENDS,
            runbook=AGGREGATOR_DOWN,
            since=stood.version,
            since_s=stood.at_s,
        )
    if len(times) >= SUDDEN_ENDS:
        yield Finding(
            severity="error",
            about="aggregators",
            sentence=f"within an hour a fragment came {len(times)} times to another process: an "
            "aggregator ends, or loses its lease, again and again",
            advice=ENDS,
            runbook=AGGREGATOR_DOWN,
            since_s=times[0],
            evidence=f"over {times[-1] - times[0]:,.0f} s",
        )


def configuration(settings: RunSettings, changes: Sequence[Change] = ()) -> Iterator[Finding]:
    """Yields a finding for each setting known to train badly, or one that no setting is.

    Args:
        settings: the settings in force.
        changes: changes of settings, the oldest first; a finding names who made the last one that
            concerns it, and the values before.
    """
    found = broken(settings)
    for one in found:
        change = next((change for change in reversed(changes) if _is_of(change, one)), None)
        advice, said = "change it before the run, or with `diloco run set`", ""
        if change is not None:
            lines = [line for line in change.changed if line.partition(":")[0] in one.about]
            said = f"; {change.by} changed {', '.join(lines)}"
            advice = f"set it back: diloco run set RUN {' '.join(map(_back, lines))}"
        yield Finding(
            severity="warning",
            about="configuration",
            sentence=f"{one.sentence}{said}",
            advice=advice,
            runbook=BAD_CONFIGURATION,
            evidence=one.evidence,
            since=change.version if change else None,
            since_s=change.at_s if change else None,
        )
    if not found:
        yield Finding(
            severity="ok", about="configuration", sentence="no setting is known to train badly"
        )


def _is_of(change: Change, rule: Broken) -> bool:
    return any(line.partition(":")[0] in rule.about for line in change.changed)


def _back(line: str) -> str:
    """Returns the setting that undoes `section.key: before -> after`: `section.key=before`."""
    key, _, values = line.partition(": ")
    return f"{key}={values.partition(' -> ')[0]}"


# Fragments


def _waits(run: RunStatus, interval_steps: int) -> Iterator[Finding]:
    """Yields a finding on updates that wait for their version longer than an interval.

    A shorter wait is normal: the version arrives before the learner's next update is due.
    """
    wait = run.wait
    if wait is None:
        return
    long = (
        f"{wait.mean_steps:.1f} steps of their learners on average ({wait.mean_s:.1f} s), "
        f"{wait.worst_steps:.1f} at worst"
    )
    # The usual wait counts, not the worst: during an outage of the aggregator, updates wait.
    if run.usual_wait_steps <= interval_steps or run.usual_wait_s < WAIT_LEAST_S:
        yield Finding(severity="ok", about="rounds", sentence=f"updates wait {long}")
        return
    yield Finding(
        severity="warning",
        about="rounds",
        sentence=f"updates wait {long}; sync.interval_steps is {interval_steps}",
        advice="compare the learners' speeds and uploads and the aggregator's load; learners that "
        "differ need more of sync.interval_steps, or a smaller quorum",
        runbook=LAGGING_LEARNER,
    )


def patience_s(settings: RunSettings) -> float:
    """Returns the seconds for which updates may wait before their fragment counts as stalled."""
    return PATIENCE * settings.quorum.deadline_s + settings.sync.reannounce_timeout_s


def _fragments(run: RunStatus, settings: RunSettings) -> Iterator[Finding]:
    """Yields findings on fragments whose updates nobody merges, and on a stop that takes long."""
    longest_s, stalled = patience_s(settings), False
    for one in run.fragments if run.state != "ended" else ():
        waited_s = min(one.waiting_s, one.version_s)
        if one.waiting and waited_s > longest_s:
            stalled = True
            yield Finding(
                severity="error",
                about=f"fragment {one.fragment}",
                sentence=f"stalled: {one.waiting} updates wait, and there has been no record "
                f"for {waited_s:,.0f} s",
                advice="check whether an aggregator runs, and in its log for this fragment",
                runbook=FRAGMENT_STOPPED,
            )
    if stalled:
        return
    if run.state == "stopping" and run.stopping_s > longest_s:
        yield Finding(
            severity="error",
            about="fragments",
            sentence=f"stopping for {run.stopping_s:,.0f} s without a record, and no end is on the "
            "tape",
            advice="check whether an aggregator runs, and in its log for what it waits",
            runbook=FRAGMENT_STOPPED,
        )
        return
    versions = [one.version for one in run.fragments]
    low, high = min(versions, default=0), max(versions, default=0)
    at = f"version {low}" if low == high else f"versions {low} to {high}"
    yield Finding(
        severity="ok", about="fragments", sentence=f"{run.state}: {len(versions)} fragments at {at}"
    )


def _quiet(run: RunStatus, settings: RunSettings) -> Iterator[Finding]:
    """Yields the finding that learners train and no update reaches the tape."""
    training = [one for one in run.learners if one.state == "training"]
    if not training or run.state in ("stopping", "ended"):
        return
    each_s = settings.sync.interval_steps * min(one.step_time_s for one in training)
    if run.quiet_s > patience_s(settings) + PATIENCE * each_s:
        yield Finding(
            severity="error",
            about="tape",
            sentence=f"learners train, and for {run.quiet_s:,.0f} s nothing has come to the tape",
            advice="look in their logs for what they wait for; a stream that met a full disk takes "
            "nothing until its nats-server is restarted",
            runbook=DISK_FULL,
        )


def _cut_off(run: RunStatus) -> Iterator[Finding]:
    """Yields findings on aggregators that the store does not answer."""
    for name in run.cut_off:
        yield Finding(
            severity="warning",
            about=f"aggregator {name}",
            sentence="the store does not answer it; aggregators that it answers take its fragments",
            advice="look at that machine's network, or, if it answers none, at the store",
            runbook=STORE_AWAY,
        )


def _refused(run: RunStatus) -> Iterator[Finding]:
    """Yields findings on fragments that an aggregator refused; another one may own them."""
    for one in run.fragments:
        if not one.refused_by:
            continue
        who = f"what is stored did not give {', '.join(one.refused_by)} the recorded digests"
        yield Finding(
            severity="error" if one.free else "warning",
            about=f"fragment {one.fragment}",
            sentence=f"stopped: {who}, and no other aggregator serves it"
            if one.free
            else f"served by {one.owner}; {who}",
            advice="start an aggregator on another machine; if it fails too, objects are damaged"
            if one.free
            else "look at that machine's memory, disk and packages; started again, it tries again",
            runbook=DIGEST_MISMATCH if one.free else FRAGMENT_STOPPED,
        )


def _owners(run: RunStatus) -> Iterator[Finding]:
    """Yields the finding on fragments that no aggregator owns, or on how many each one owns."""
    free = [one.fragment for one in run.fragments if one.free and not one.refused_by]
    if free and run.learners:
        listed = ", ".join(str(fragment) for fragment in free[:12])
        yield Finding(
            severity="warning",
            about="owners",
            sentence=f"no aggregator owns fragment {listed}{' ...' if len(free) > 12 else ''}",
            advice="start an aggregator; one that was just killed is replaced within its lease",
            runbook=FRAGMENT_STOPPED,
        )
    shares = Counter(one.owner for one in run.fragments if one.owner is not None)
    if shares and not free:
        listed = ", ".join(f"{name} {count}" for name, count in sorted(shares.items()))
        yield Finding(severity="ok", about="owners", sentence=f"fragments are owned by {listed}")
