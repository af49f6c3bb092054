"""A learner's state at a moment: training, silent, failed, left or quarantined, and its figures.

Figures from records are facts; figures from heartbeats are claims of the learner, and may be false.
Pure.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from diloco.common.protocol import wire
from diloco.common.protocol.wire import LEARNER_STATES
from diloco.run.contradictions import step_times
from diloco.run.learner_history import LearnerHistory, Reading, throughput, told_delays
from diloco.run.state import (
    HOUR_S,
    Delays,
    LearnerStatus,
    ShardFigures,
    SlicesStatus,
    delays_of,
    share,
)


class Moment(NamedTuple):
    """Facts about a run at a moment that the state of every learner depends on.

    Times are seconds since the epoch, by the server's clock.

    Attributes:
        now_s: the moment.
        until_s: the moment too; of a run that has ended, when its last message was stored.
        whole_s: from when on no message of the tape is missing; 0: none is missing.
        stop_seq: stream sequence of the message that stopped the run; 0: none has.
        liveness_timeout_s: a learner without a heartbeat for more seconds than this is silent.
        fragments: number of fragments that have a record.
    """

    now_s: float
    until_s: float
    whole_s: float
    stop_seq: int
    liveness_timeout_s: float
    fragments: int


def learner_status(
    name: str, read: Reading, moment: Moment, shards: ShardFigures | None
) -> LearnerStatus:
    """Returns the status of a learner at a moment.

    Args:
        name: the learner's name.
        read: its history, its last heartbeat and its entries in the fragments' newest records.
        moment: the run at that moment.
        shards: figures of the shards of its updates, if they were read.
    """
    known, recent = read.known, [*read.known.recent]
    beat, heard_s = read.beat(moment.now_s)
    merged = [one for one in recent if not one.reason]
    left = read.left
    silent = heard_s is None or heard_s > moment.liveness_timeout_s
    failed = beat is not None and beat.state == "failed"
    own = beat.state if beat is not None and (failed or not silent) else "silent"
    own = own if own in (*LEARNER_STATES, "silent") else "unknown"
    current = [one for one in read.members if one.incarnation == read.newest]
    sent_at_s = max(known.sent_at_s, moment.whole_s)
    return LearnerStatus(
        name=name,
        state="quarantined" if read.quarantined else "left" if left else own,
        why=known.word.reason if known.word is not None and known.word.active else "",
        host=known.host,
        incarnation=read.newest,
        lives=known.lives,
        sudden_ends=sum(at_s >= moment.until_s - HOUR_S for at_s in known.sudden_s),
        left=left,
        finished=bool(moment.stop_seq) and (not left or known.left_seq > moment.stop_seq),
        failed=failed,
        silent=silent,
        live=any(one.live or one.final for one in current) if current else None,
        superseded=read.superseded,
        heard_s=heard_s,
        trouble=beat.trouble if beat else "",
        local_step=beat.local_step if beat else 0,
        loss=beat.loss if beat else None,
        metrics=beat.metrics if beat else {},
        tokens_per_s=beat.tokens_per_s if beat and not (silent or left or failed) else 0.0,
        step_time_s=beat.step_time_s if beat else 0.0,
        stall_fraction=share(beat.stall_s, beat.run_s) if beat else 0.0,
        data_fraction=share(beat.data_s, beat.run_s) if beat else 0.0,
        updates_sent=beat.updates_sent if beat else 0,
        bytes_up=beat.bytes_up if beat else 0,
        bytes_down=beat.bytes_down if beat else 0,
        merged=known.merged,
        rejected=known.rejected,
        # Of a learner of some modules only the fragments that it holds have it as a member.
        tokens=known.tokens // max(1, len(read.members) if known.holds else moment.fragments),
        reasons=dict(known.reasons),
        less=dict(known.less),
        offences=max((one.offences for one in read.members), default=0),
        staleness=fmean(one.staleness for one in merged) if merged else None,
        wait=delays_of(one.wait for one in merged),
        delay=told_delays(beat),
        adoption=told_adoption([beat] if beat else []),
        merged_loss=median(one.loss for one in merged) if merged else None,
        norm=median(one.norm for one in merged) if merged else None,
        recent=tuple(recent),
        beside=tuple(known.beside),
        trend=tuple(known.trend.points),
        shards=shards,
        release=known.release,
        errors=tuple(known.errors),
        twins=tuple(known.twins_s),
        views=tuple(known.views),
        upload_s=median(known.uploads_s) if known.uploads_s else None,
        ahead_s=read.ahead_s,
        throughput=throughput(known.newest, known.trend.points, known.merged),
        invalid=tuple(known.invalid),
        invalids=known.invalids,
        step_s=step_times(known.told_s, known.took_s),
        sent_s=moment.until_s - sent_at_s if sent_at_s else None,
        missed=min((one.missed for one in current), default=0),
        slices=_slices(known, moment.until_s, left=left, trains=not (silent or left or failed)),
        holds=known.holds,
    )


def _slices(
    known: LearnerHistory, until_s: float, *, left: bool, trains: bool
) -> SlicesStatus | None:
    found, from_s = known.slices, known.left_at_s if left else known.fewer_from_s
    if found is None:
        return None
    return SlicesStatus(
        present=found.present if trains else 0,
        given=found.given,
        least=found.least,
        fewer_s=max(0.0, until_s - from_s) if from_s else 0.0,
    )


def trained_per_s(learners: Sequence[LearnerStatus]) -> float:
    """Returns the sum of the learners' reported tokens a second, each limited to its credited rate.

    A learner whose credited rate is unknown, since few of its updates are merged, is limited to the
    fastest credited rate of another.
    """
    credited = [one.throughput.tokens_per_s for one in learners if one.throughput is not None]
    most = max(credited, default=math.inf)
    return sum(
        min(one.tokens_per_s, one.throughput.tokens_per_s if one.throughput else most)
        for one in learners
    )


def told_adoption(beats: Iterable[wire.Heartbeat]) -> Delays | None:
    """Combines the reported delays from a version's record to its adoption; None if there are none.

    Args:
        beats: the heartbeats that report them.
    """
    return over_all(
        Delays(
            beat.adoption_s, beat.worst_adoption_s, beat.adoption_steps, beat.worst_adoption_steps
        )
        for beat in beats
        if beat.worst_adoption_s
    )


def over_all(each: Iterable[Delays | None]) -> Delays | None:
    """Combines delays: the mean of the means, and the worst; None if there are none."""
    found = [one for one in each if one is not None]
    if not found:
        return None
    means_s, worst_s, means, worst = zip(*found, strict=True)
    return Delays(fmean(means_s), max(worst_s), fmean(means), max(worst))
