"""Applies the tape's messages to an owner's state: joins, leaves, manifests and others."""

from diloco.common.process.config import RunSettings, settings_of
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.reasons import Reason
from diloco.common.storage.tape import Entry, InvalidMessage, changed_settings
from diloco.judge.oracle import numbers
from diloco.judge.oracle.credit import CreditBasis
from diloco.judge.oracle.life import OwnerLife, WaitingUpdate, update_id
from diloco.judge.oracle.memory import LIVES, MemberRecord, OracleCredit
from diloco.judge.oracle.rounds import settle
from diloco.judge.oracle.shares import wrong_claim


def concerns(item: Entry | InvalidMessage, fragment: int) -> bool:
    """True if the owner of `fragment` acts on the message."""
    if isinstance(item, InvalidMessage):
        parsed = names.parse_subject(item.subject)
        return parsed is not None and (parsed.kind, parsed.fragment) == ("update", fragment)
    match item.body:
        case wire.Manifest() as manifest:
            return manifest.fragment == fragment
        case wire.Leave() as leave:
            return not leave.fragments or fragment in leave.fragments
    return isinstance(item.body, wire.Join | wire.Stop | wire.Settings | wire.Quarantine)


def hear(life: OwnerLife, created: RunSettings, entry: Entry | InvalidMessage) -> None:
    """Applies the next message of the tape that concerns the owner to `life`.

    Args:
        life: the owner's state.
        created: the specification's settings, which a message `Settings` changes.
        entry: the message.
    """
    if isinstance(entry, InvalidMessage):
        life.read_seq = max(life.read_seq, entry.seq)
        _pays(life, names.subject_learner(entry.subject) or "", entry)
        return
    body, seq = entry.body, entry.seq
    if isinstance(body, wire.Settings):
        _settings(life, created, body, seq)
        return
    life.read_seq = max(life.read_seq, seq)
    match body:
        case wire.Join():
            _join(life, body, seq, entry.time_s)
        case wire.Leave():
            _leave(life, body)
        case wire.Quarantine():
            _quarantine(life, body)
        case wire.Stop():
            if not life.memory.stopping_at_s and not life.final:
                life.memory.stopping_at_s = life.now_s
                settle(life)
        case wire.Manifest():
            if _pays(life, body.learner, entry):
                _announcement(life, body, seq, entry.time_s)


def _settings(life: OwnerLife, created: RunSettings, body: wire.Settings, seq: int) -> None:
    try:
        changed = changed_settings(created, body)
    except WireError:
        return  # Invalid settings have no effect: every reader drops them.
    life.read_seq = max(life.read_seq, seq)
    if seq > life.memory.settings_seq:
        life.memory.settings_seq = seq
        life.settings = settings_of(changed, life.layout, life.fragment)
        settle(life)


def _join(life: OwnerLife, join: wire.Join, seq: int, stored_at_s: float) -> None:
    learner, members = join.learner, life.memory.members
    known = members.get(learner)
    if known is not None and known.incarnation >= seq:
        return
    member = known or MemberRecord(seq, heard_at_s=stored_at_s, read_at_s=life.now_s)
    held_before = member.incarnation not in member.not_holding
    members[learner] = member._replace(incarnation=seq, live=True, left=False, final=False)
    module = life.layout.fragments[life.fragment].module
    if join.holds and module not in join.holds:
        # It has left this fragment; of its lives that do not hold it, the newest four are known.
        lives = [*member.not_holding, seq][-LIVES:]
        life.memory.change(learner, live=False, left=True, not_holding=tuple(lives))
        settle(life)
    elif not held_before:
        life.memory.change(learner, unused_s=0.0, heard_at_s=stored_at_s, read_at_s=life.now_s)


def _leave(life: OwnerLife, leave: wire.Leave) -> None:
    member = life.memory.members.get(leave.learner)
    if member is None or member.incarnation != leave.incarnation:
        return
    if leave.fragments:
        life.memory.change(leave.learner, final=True)
    else:
        life.memory.change(leave.learner, live=False, left=True)
    settle(life)


def _quarantine(life: OwnerLife, word: wire.Quarantine) -> None:
    if word.active:
        life.memory.quarantined.add(word.learner)
        if word.learner in life.merged_learners():
            life.discard_sum()
    else:
        life.memory.quarantined.discard(word.learner)
        if word.learner in life.memory.members:
            life.memory.change(word.learner, offences=0)
    settle(life)


def _announcement(life: OwnerLife, manifest: wire.Manifest, seq: int, stored_at_s: float) -> None:
    if _is_dropped(life, manifest):
        return
    reason = _reason(life, manifest, seq)
    if reason is not None:
        life.charge(manifest, seq)
        life.refuse(manifest, seq, reason)
        settle(life)
        return
    life.waiting[update_id(manifest)] = WaitingUpdate(
        manifest, seq, life.now_s, _credit(life, manifest, stored_at_s)
    )
    settle(life)


def _credit(life: OwnerLife, manifest: wire.Manifest, stored_at_s: float) -> OracleCredit:
    """Returns an update's credit, and updates its sender's member record.

    An update that an earlier life of an owner has read keeps its credit, and changes no record.
    """
    learner, member = manifest.learner, life.memory.members[manifest.learner]
    met = life.memory.credits.get(update_id(manifest))
    if met is not None:
        life.memory.change(learner, final=member.final or manifest.final)
        return met
    settings, others = life.settings, life.settings.run.trust == "others"
    judge = CreditBasis(
        settings.bounds, life.memory, manifest, stored_at_s, life.now_s, life.averaged, others
    )
    credit = judge.credit()
    if manifest.incarnation == member.incarnation:
        life.memory.members[learner] = judge.known_after(credit)
    return credit


def _is_dropped(life: OwnerLife, manifest: wire.Manifest) -> bool:
    """True if the owner ignores a manifest, and no record answers it.

    Its epoch is another one, the update is known already, or an earlier update of the same
    learner's life has no verdict yet.
    """
    update = update_id(manifest)
    if manifest.epoch != life.epoch or life.is_under_way(update) or life.memory.answered(update):
        return True
    return life.has_unresolved(manifest.learner, manifest.incarnation)


def _pays(life: OwnerLife, learner: str, message: Entry | InvalidMessage) -> bool:
    """Takes a message's price from its sender's allowance; returns False if it must be dropped.

    Messages that an earlier life of an owner has read are paid from a separate allowance.
    """
    purse = life.again if message.seq <= life.known_seq else life.memory.allowances
    left, at_s = purse.get(learner, (float("inf"), message.time_s))
    left = numbers.refilled(life.settings.bounds, left, message.time_s - at_s)
    may = left >= 1
    purse[learner] = (left - may * numbers.price(message.size_bytes), message.time_s)
    return may


def _reason(life: OwnerLife, manifest: wire.Manifest, seq: int) -> str | None:
    """Returns the reason to reject a manifest without reading its objects, or None."""
    member = life.memory.members.get(manifest.learner)
    if member is None or manifest.incarnation > member.incarnation:
        return Reason.UNKNOWN_INCARNATION
    if manifest.incarnation < member.incarnation and seq > member.incarnation:
        return Reason.SUPERSEDED
    if life.final:
        return Reason.ENDED
    if manifest.learner in life.memory.quarantined:
        return Reason.QUARANTINED
    if manifest.incarnation in member.not_holding:
        return Reason.NOT_HELD
    claim = wrong_claim(life.settings, life.layout, life.epoch, manifest)
    if claim is not None:
        return claim
    return wrong_base(life, manifest)


def wrong_base(life: OwnerLife, manifest: wire.Manifest) -> str | None:
    """Returns the reason why a manifest's base does not fit the newest version, or None."""
    staleness = life.version - manifest.base_version
    if manifest.base_version < life.memory.floor:
        return Reason.ROLLED_BACK
    if staleness < 0:
        return Reason.FUTURE
    if staleness == 0 and manifest.base_digest != life.view_digest:
        return Reason.BASE_DIGEST
    if manifest.held_digest not in (None, manifest.base_digest):
        return Reason.VIEW
    most = life.settings.staleness.max_versions
    return Reason.STALE if most and staleness > most else None
