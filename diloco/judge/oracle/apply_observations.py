"""Applies observations to an owner's state: the events that no message of the tape contains."""

from collections.abc import Callable

from diloco.common.protocol import wire
from diloco.common.protocol.reasons import Reason, find
from diloco.judge.oracle import numbers
from diloco.judge.oracle.apply_messages import wrong_base
from diloco.judge.oracle.credit import shortened
from diloco.judge.oracle.life import MergedUpdate, OwnerLife, WaitingUpdate
from diloco.judge.oracle.memory import UpdateId
from diloco.judge.oracle.rounds import settle, time_is_up, time_up_s

# The greatest difference of equal times that were computed in two ways.
ROUNDING_S = 1e-6


def watch(life: OwnerLife, seen: wire.Observation, record: wire.Record) -> None:
    """Applies an observation of `record` to an owner's state, or notes that it breaks a rule."""
    life.now_s = seen.at_s
    handler = _WATCH.get(seen.what)
    if handler is None:
        life.breach("observation", seen.what, sorted(_WATCH), seen.what)
        return
    handler(life, seen, record)


def _waiting(life: OwnerLife, seen: wire.Observation) -> WaitingUpdate | None:
    one = life.waiting.get(UpdateId(seen.learner, seen.incarnation, seen.seq))
    if one is None:
        life.breach("observation", seen.what, "an update that waits", seen.model_dump())
    return one


def _fetched(life: OwnerLife, seen: wire.Observation, _record: wire.Record) -> None:
    one = _waiting(life, seen)
    if one is None:
        return
    manifest = one.manifest
    shut_out = manifest.learner in life.memory.quarantined
    reason = Reason.QUARANTINED if shut_out else wrong_base(life, manifest)
    if reason is not None:
        _reject(life, one, reason)
        return
    bounds, learner = life.settings.bounds, manifest.learner
    clip = shortened(bounds, life.norms(), learner, one.credit, seen.value)
    del life.waiting[UpdateId(seen.learner, seen.incarnation, seen.seq)]
    staleness = life.version - manifest.base_version
    life.merged.append(
        MergedUpdate(
            manifest=manifest,
            stream_seq=one.stream_seq,
            announced_at_s=one.announced_at_s,
            norm=seen.value,
            credit=one.credit,
            staleness=staleness,
            discount=numbers.discount(life.settings.staleness, staleness),
            clip=clip,
        )
    )
    settle(life)


def _reject(life: OwnerLife, one: WaitingUpdate, reason: str) -> None:
    life.charge(one.manifest, one.stream_seq)
    life.refuse(one.manifest, one.stream_seq, reason)
    settle(life)


def _failed(life: OwnerLife, seen: wire.Observation, record: wire.Record) -> None:
    """Rejects an update whose objects failed, for the reason that the record gives.

    It checks only that the reason is one that objects can give.
    """
    one = _waiting(life, seen)
    if one is None:
        return
    said = [r.reason for r in record.rejected if r.stream_seq == one.stream_seq]
    reason = said[0] if said else ""
    known = find(reason)
    by_objects = known is None or ("objects" in known.stages and known != Reason.LATE)
    # A wrong partition of blocks is a reason for manifests and for objects.
    if not by_objects and known is not Reason.SHARDS:
        life.breach("admission", "reason", "one of objects", reason)
    _reject(life, one, reason)


def _broke(life: OwnerLife, seen: wire.Observation, _record: wire.Record) -> None:
    """Discards the sum, as adding an update to it failed.

    All its updates wait again. An update that fails again, beside others, is rejected.
    """
    one = _waiting(life, seen)
    if one is None:
        return
    others = life.merged_learners() - {seen.learner}
    life.discard_sum()
    del life.waiting[UpdateId(seen.learner, seen.incarnation, seen.seq)]
    if one.broke and others:
        settle(life)
        _reject(life, one, Reason.INTERNAL)
        return
    one.broke += 1
    life.waiting[UpdateId(seen.learner, seen.incarnation, seen.seq)] = one
    settle(life)


def _liveness(life: OwnerLife, seen: wire.Observation, _record: wire.Record) -> None:
    member, live = life.memory.members.get(seen.learner), seen.what == "live"
    possible = (
        member is not None
        and member.incarnation == seen.incarnation
        and not member.left
        and member.live != live
    )
    if not possible:
        life.breach("observation", seen.what, "news of a learner that has not left", member)
        return
    life.memory.change(seen.learner, live=live)
    settle(life)


def _timer(life: OwnerLife, seen: wire.Observation, _record: wire.Record) -> None:
    due_s = time_up_s(life)
    if due_s is None or seen.at_s < due_s - ROUNDING_S:
        life.breach("round", "timer", due_s, seen.at_s)
        return
    time_is_up(life)


def _cut(life: OwnerLife, seen: wire.Observation, _record: wire.Record) -> None:
    if life.cut is None or life.cut_at_s:
        life.breach("cut", "cut", "a round that is being cut", seen.seq)
        return
    life.cut_seq, life.cut_at_s = seen.seq, seen.at_s
    settle(life)


def _made(life: OwnerLife, _seen: wire.Observation, _record: wire.Record) -> None:
    settle(life)


def _committed(life: OwnerLife, seen: wire.Observation, _record: wire.Record) -> None:
    if not life.storing:
        life.breach("observation", "committed", "a record under way", "none")
    if life.storing == "version":
        took_s = numbers.between_s(life.memory.closed_at_s, seen.at_s)
        life.memory.sync_s = numbers.commit_s(life.memory.sync_s, took_s)
    life.storing = ""
    settle(life)


def _tick(_life: OwnerLife, _seen: wire.Observation, _record: wire.Record) -> None:
    """Takes the observation's time only."""


_WATCH: dict[str, Callable[[OwnerLife, wire.Observation, wire.Record], None]] = {
    "fetched": _fetched,
    "failed": _failed,
    "broke": _broke,
    "live": _liveness,
    "dead": _liveness,
    "timer": _timer,
    "cut": _cut,
    "made": _made,
    "committed": _committed,
    "tick": _tick,
}
