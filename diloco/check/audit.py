"""Holds docs/design/design.md's invariants against what a run has on its tape and in its store.

It wants nothing but read access, and believes no daemon: what a record claims is compared with the
manifests it answers and the records before it. A run may be under way, and its tape trimmed; then
each fragment is judged from its oldest record on. `remake.py` goes on with the objects' contents.
"""

import heapq
import itertools
import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from diloco.check.stored import carried_state, own_deltas, own_state
from diloco.common import wire
from diloco.common.averaged import sync_of
from diloco.common.errors import IntegrityError, ObjectMissingError, WireError
from diloco.common.layout import next_step
from diloco.common.tape import read_positions
from diloco.projections.history import (
    Chain,
    History,
    Settled,
    answered,
    identity,
    resolves,
)
from diloco.projections.sent import Announced, Sent, Updates

# Updates that build on an older version than so many are not held against its view.
KNOWN_VIEWS = 256


class Breach(NamedTuple):
    """An invariant that does not hold.

    Attributes:
        rule: "chain", "resolved", "position", "totals", "inputs", "data", "end", "objects" or
            "digests".
        where: which part of the run.
        what: what was expected and what stands there.
    """

    rule: str
    where: str
    what: str


@dataclass
class Objects:
    """What became of a run's objects.

    Attributes:
        needed: how many recovery and learners need; `needed_bytes` of them.
        collected: how many that the tape names are gone, and may be.
        orphans: objects below the run's prefix that nothing on the tape names, in bytes.
        newer: objects of what the tape has not come to, in bytes.
        remade: versions that were merged again, and gave their digests.
    """

    breaches: list[Breach] = field(default_factory=list)
    needed: int = 0
    needed_bytes: int = 0
    collected: int = 0
    orphans: dict[str, int] = field(default_factory=dict)
    newer: dict[str, int] = field(default_factory=dict)
    remade: int = 0


@dataclass
class Account:
    """The updates of a run since each fragment's oldest record; tokens beside their counts."""

    sent: int = 0
    merged: int = 0
    rejected: int = 0
    in_flight: int = 0
    tokens_sent: int = 0
    tokens_merged: int = 0
    tokens_rejected: int = 0
    tokens_in_flight: int = 0


@dataclass
class Audit:
    """What an audit found: breaches, the account, and what is still in flight."""

    history: History
    breaches: list[Breach] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    in_flight: dict[Sent, Announced] = field(default_factory=dict)

    def hold(self, condition: bool, rule: str, where: str, what: str) -> None:
        """Note a breach unless `condition` holds."""
        if not condition:
            self.breaches.append(Breach(rule, where, what))


def audit(history: History, *, hostile: Sequence[str] = (), data: bool = True) -> Audit:
    """Every invariant that the tape alone can show.

    Args:
        history: the tape.
        hostile: senders that need not cover their data without a gap.
        data: also whether learners were trained on all of their data, and once.
    """
    found = Audit(history)
    for bad in history.unreadable:
        where = f"fragment {bad.fragment}, record {bad.seq}"
        found.hold(False, "chain", where, f"unreadable: {bad.why}")
    for fragment in range(len(history.layout.fragments)):
        chain = history.records.get(fragment, [])
        found.hold(bool(chain), "chain", f"fragment {fragment}", "has no record")
        if chain:
            own = history.sent(fragment)
            _check_chain(found, fragment, chain)
            _check_totals(found, fragment, chain)
            _check_resolved(found, fragment, chain, own)
    _check_inputs(found)
    if data:
        _check_data(found, hostile)
    if history.end is not None:
        _check_end(found, history.end, hostile)
    return found


def _check_chain(found: Audit, fragment: int, chain: Chain) -> None:
    """Versions without gap or fork, each on the record before it."""
    history, (first_seq, first) = found.history, chain[0]
    where = f"fragment {fragment}, record {first_seq}"
    if first.base_seq:
        found.hold(
            first.base_seq < history.whole_from, "chain", where,
            f"builds on record {first.base_seq}, which is gone",
        )  # fmt: skip
    else:
        begins = first.what == "restored" or (first.what, first.version) == ("version", 0)
        found.hold(begins, "chain", where, f"a chain begins with a {first.what} {first.version}")
    for seq, record in chain:
        own = (record.epoch, record.layout) == (history.specification.epoch, history.layout.digest)
        found.hold(own, "chain", where, f"epoch {record.epoch}, layout {record.layout}")
        for what in own_state(record):
            found.hold(False, "chain", f"fragment {fragment}, record {seq}", what)
    for what in own_deltas(first):
        found.hold(False, "chain", where, what)
    for (before_seq, before), (seq, record) in itertools.pairwise(chain):
        _check_link(found, before_seq, before, seq, record)


def _check_link(
    found: Audit, before_seq: int, before: wire.Record, seq: int, record: wire.Record
) -> None:
    """One record follows from the one before it."""
    where = f"fragment {record.fragment}, record {seq}"

    def hold(condition: bool, what: str) -> None:
        found.hold(condition, "chain", where, what)

    hold(record.base_seq == before_seq, f"builds on {record.base_seq}, not on {before_seq}")
    hold(record.base_digest == before.view_digest, "builds on another view than the one before")
    hold(record.position >= before.position, f"position went back to {record.position}")
    made = record.what in ("version", "restore")
    hold(record.version == before.version + made, f"{record.what} {record.version} after "
         f"{before.version}")  # fmt: skip
    hold(bool(record.inputs) == (record.what == "version"),
         f"a {record.what} with {len(record.inputs)} inputs")  # fmt: skip
    hold(record.what != "restored", "an epoch begins in the midst of a chain")
    # Releases before records were chained do not name themselves either.
    hold(bool(record.previous) or not record.release, "does not name the record before it")
    if record.what == "restore":
        _check_restore(found, where, record)
        return
    hold(record.restored_version is None, f"a {record.what} that restores a version")
    _check_rules(found, where, before, record)
    hold(record.final or not before.final, "goes on after the final record")
    stop = found.history.stop
    hold(not record.final or (stop is not None and stop[0] < seq), "is final without a stop")
    hold(record.what != "version" or not before.final, "a version after the final one")
    if record.what == "verdict":
        hold(record.view_digest == before.view_digest, "a verdict with another view")
        hold(bool(record.rejected) or record.final, "says nothing")
    hold(_follows_clock(found.history, before, record),
         f"global step {record.global_step} after {before.global_step}")  # fmt: skip
    hold(len(record.deltas) == record.version - record.snapshot_version,
         f"{len(record.deltas)} deltas from version {record.snapshot_version}")  # fmt: skip
    for what in carried_state(before_seq, before, record):
        hold(False, what)


def _check_rules(found: Audit, where: str, before: wire.Record, record: wire.Record) -> None:
    """Settings that the tape has, and the rules of its maker's release."""
    history, policy = found.history, record.policy
    trimmed = policy.settings_seq < history.whole_from
    known = not policy.settings_seq or policy.settings_seq in history.changes or trimmed
    found.hold(known, "chain", where, f"message {policy.settings_seq} has no settings")
    same = (record.release, record.lock) == (before.release, before.lock)
    found.hold(
        not same or policy.rules == before.policy.rules,
        "chain", where, f"decided by rules {policy.rules:g}, as its release does not",
    )  # fmt: skip


def _check_restore(found: Audit, where: str, record: wire.Record) -> None:
    """A rollback is a version with the view of an earlier one."""
    earlier = record.restored_version
    known = [
        (old.view_digest, old.outer_digest, old.global_step)
        for _, old in found.history.records[record.fragment]
        if old.version == earlier and old.what != "verdict"
    ]
    same = {*known} <= {(record.view_digest, record.outer_digest, record.global_step)}
    whole = record.snapshot_version == record.outer_version == record.version
    found.hold(whole and not record.deltas, "chain", where, "a restore without objects of its own")
    found.hold(
        earlier is not None and earlier < record.version and same,
        "chain", where, f"not the view, outer state and clock of version {earlier}",
    )  # fmt: skip


def _follows_clock(history: History, before: wire.Record, record: wire.Record) -> bool:
    """Whether a record carries the run's clock on by one interval, or stands still for verdicts."""
    settings = history.settings_of(record)
    if record.what == "verdict" or settings is None:
        return record.global_step >= before.global_step
    following = next_step(settings.sync.rhythm(record.fragment), before.global_step)
    return record.global_step == min(settings.run.steps, following)


def _check_totals(found: Audit, fragment: int, chain: Chain) -> None:
    """A record's totals are the sums over all up to it."""
    sums = chain[0][1].totals.model_dump()
    sums["tokens_credited"] = chain[0][1].totals.believed_tokens
    for seq, record in chain[1:]:
        sums["updates_merged"] += len(record.inputs)
        sums["updates_rejected"] += len(record.rejected)
        sums["tokens_merged"] += sum(taken.tokens for taken in record.inputs)
        sums["tokens_rejected"] += sum(taken.tokens for taken in record.rejected)
        sums["steps_merged"] += sum(taken.steps for taken in record.inputs)
        sums["tokens_credited"] += sum(taken.believed_tokens for taken in record.inputs)
        capped = {name: min(count, wire.GREATEST) for name, count in sums.items()}
        totals = record.totals.model_dump()
        if totals["tokens_credited"] is None:  # Of an earlier release.
            totals["tokens_credited"] = capped["tokens_credited"]
        where = f"fragment {fragment}, record {seq}"
        found.hold(totals == capped, "totals", where, f"says {totals}, the sums are {capped}")


def _check_resolved(found: Audit, fragment: int, chain: Chain, sent: Updates) -> None:
    """Each update in one record at most; a record's position leaves no unresolved one behind."""
    turns = _turns(chain, sent)
    # By row the record that resolves an update, once that is passed; of others by identity.
    resolved_by, others = array("q", bytes(8 * len(sent))), dict[Sent, int]()
    due = [row for row in range(len(sent)) if not turns.old[row]]
    # A rejection counts ten times against the limit of a sender's rate, and what is beyond it is
    # dropped: of a learner that is shut out that may be anything.
    unread = {row for row in due if _is_shut_out(found.history, sent, row)}
    passed, first_seq = 0, chain[0][0]
    for seq, record in chain[1:]:
        where = f"fragment {fragment}, record {seq}"
        for taken in resolves(record):
            update = answered(record, taken)
            row = sent.row(update)
            old = first_seq if row is not None and turns.old[row] else 0
            twice = (others.get(update, 0) if row is None else resolved_by[row]) or old
            found.hold(not twice, "resolved", where, f"{update} was resolved by {twice}")
            from_tape = row is not None or taken.stream_seq < found.history.whole_from
            found.hold(from_tape, "resolved", where, f"{update} was never announced")
            if row is None:
                others[update] = seq
            else:
                resolved_by[row] = seq
        while passed < len(due) and sent.stream_seq(due[passed]) < record.position:
            row = due[passed]
            met = bool(resolved_by[row]) or row in turns.ignored or row in unread
            found.hold(
                met, "position", where, f"{record.position} leaves {sent.update(row)} behind"
            )
            passed += 1
    flying = {row for row in due if not resolved_by[row] and row not in turns.ignored}
    end = found.history.end
    if end is not None:
        flying = {row for row in flying if sent.stream_seq(row) < end[0]}
        for row in sorted(flying - unread):
            what = f"{sent.update(row)} was never resolved"
            found.hold(False, "resolved", f"fragment {fragment}", what)
    found.in_flight.update({sent.update(row): sent.at(row) for row in sorted(flying)})
    counted = [row for row in range(len(sent)) if resolved_by[row] or row in flying]
    _balance(found, fragment, chain, sent, counted, flying)


def _is_shut_out(history: History, sent: Updates, row: int) -> bool:
    """Whether the sender of an update was quarantined, by the tape, when it announced it."""
    if not history.quarantines:
        return False
    learner, at_seq = sent.update(row).learner, sent.stream_seq(row)
    words = [word for seq, word in history.quarantines if seq < at_seq and word.learner == learner]
    return bool(words) and words[-1].active


class _Turns(NamedTuple):
    """Of each row of what was sent, whether an earlier record than the chain's resolved it.

    `ignored`: updates that are none: an earlier one of that life was unresolved, or a later one
    was sent. An aggregator passes them over until they are announced in their turn.
    """

    old: bytearray
    ignored: set[int]


def _turns(chain: Chain, sent: Updates) -> _Turns:
    settled = Settled(chain[0][1])
    old = bytearray(settled(sent.update(row), sent.stream_seq(row)) for row in range(len(sent)))
    resolved_at = array("q", bytes(8 * len(sent)))
    for seq, record in chain:
        for taken in resolves(record):
            if (row := sent.row(answered(record, taken))) is not None:
                resolved_at[row] = seq
    ignored = set()
    for _, rows in sent.lives():
        for before, row in itertools.pairwise(rows):
            announced = sent.stream_seq(row)
            waits = not old[before] and (resolved_at[before] or announced + 1) > announced
            out_of_turn = waits or sent.update(row).seq < sent.update(before).seq
            if not resolved_at[row] and out_of_turn:
                ignored.add(row)
    return _Turns(old, ignored)


def _balance(
    found: Audit,
    fragment: int,
    chain: Chain,
    sent: Updates,
    counted: Sequence[int],
    flying: Collection[int],
) -> None:
    """Tokens sent = merged + rejected + in flight, since the oldest record.

    Args:
        found: takes the account.
        fragment: whose updates they are.
        chain: its records.
        sent: its updates, of which the rows that are `counted` were resolved or are `flying`.
        counted: see there.
        flying: see there.
    """
    first, last = chain[0][1].totals, chain[-1][1].totals
    account = found.account
    tokens_sent = sum(sent.at(row).tokens for row in counted)
    tokens_flying = sum(sent.at(row).tokens for row in flying)
    merged = last.tokens_merged - first.tokens_merged
    rejected = last.tokens_rejected - first.tokens_rejected
    chosen = {*counted} if len(counted) < len(sent) else range(len(sent))
    gone = [
        taken.tokens
        for _, record in chain[1:]
        for taken in resolves(record)
        if sent.row(answered(record, taken)) not in chosen
    ]
    tokens_sent += sum(gone)
    capped = max(last.tokens_merged, last.tokens_rejected) == wire.GREATEST
    found.hold(
        capped or tokens_sent == merged + rejected + tokens_flying,
        "totals", f"fragment {fragment}",
        f"{tokens_sent} tokens sent, {merged} merged, {rejected} rejected, "
        f"{tokens_flying} in flight",
    )  # fmt: skip
    account.merged += last.updates_merged - first.updates_merged
    account.rejected += last.updates_rejected - first.updates_rejected
    account.in_flight += len(flying)
    account.sent += len(counted) + len(gone)
    account.tokens_sent += tokens_sent
    account.tokens_merged += merged
    account.tokens_rejected += rejected
    account.tokens_in_flight += tokens_flying


def _check_inputs(found: Audit) -> None:
    """What a record says of an update is what its manifest says."""
    for chain in found.history.records.values():
        views: dict[int, str] = {}
        for _, record in chain:
            for taken in resolves(record):
                _check_taken(found, record, taken, views)
            views[record.version] = record.view_digest
            if len(views) > KNOWN_VIEWS:
                del views[next(iter(views))]


def _check_taken(
    found: Audit,
    record: wire.Record,
    taken: wire.Input | wire.Rejected,
    views: Mapping[int, str],
) -> None:
    """One update that a record resolves; `views` are digests by version, of the newest ones."""
    where = f"fragment {record.fragment}, version {record.version}"
    manifest = found.history.manifest_at(taken.stream_seq)
    if manifest is None:
        trimmed = taken.stream_seq < found.history.whole_from
        found.hold(trimmed, "inputs", where, f"no manifest at {taken.stream_seq}")
        return
    update = answered(record, taken)
    same = identity(manifest) == update and (taken.tokens, taken.steps) == (
        manifest.tokens,
        manifest.steps,
    )
    if isinstance(taken, wire.Input):
        staleness = record.version - 1 - manifest.base_version
        base_digest = views.get(manifest.base_version, manifest.base_digest)
        same = same and taken.staleness == staleness >= 0
        same = same and (taken.shards, taken.final) == (manifest.shards, manifest.final)
        same = same and (taken.codec, taken.loss) == (manifest.codec, manifest.loss)
        same = same and (record.layout, base_digest) == (manifest.layout, manifest.base_digest)
        same = same and _credited(taken)
    found.hold(same, "inputs", where, f"{update} is not what its manifest says")


def _credited(taken: wire.Input) -> bool:
    """Whether an update was credited with no more than it claims."""
    return taken.steps_credited <= taken.steps and taken.tokens_credited <= taken.tokens


def _check_data(found: Audit, hostile: Sequence[str]) -> None:
    """Each step's work is in one update of a fragment at most, whatever lives it took.

    Within a life updates follow each other without a gap; a life begins behind all that earlier
    manifests and leaves cover. Where versions overwrite what learners have, as of averaged state,
    adopting one lets go what was not sent; where they blend, a share of it.
    """
    history = found.history
    begins: dict[tuple[str, int], set[int]] = defaultdict(set)
    for fragment in sorted(history.manifests_of):
        _check_lives(found, fragment, hostile, begins)
    earlier = _earlier(found)
    if earlier is not None:
        ended = _earlier_ends(history, [*begins], earlier)
        for life, starts in begins.items():
            _check_beginning(found, life, starts, ended[life])


def _check_lives(
    found: Audit, fragment: int, hostile: Sequence[str], begins: dict[tuple[str, int], set[int]]
) -> None:
    """Updates of a fragment follow each other; where each life begins goes to `begins`."""
    history = found.history
    own = sync_of(history.settings.sync, history.layout.fragments[fragment])
    overwritten = own.adopt == "overwrite"
    kept = {"rebase": 1.0, "blend": own.blend, "overwrite": 0.0}[own.adopt]
    chain = history.records[fragment]
    restores = [record.version for _, record in chain if record.what == "restore"]
    sent = history.sent(fragment)
    for (learner, incarnation, _), rows in sent.lives():
        if learner in hostile:
            continue
        where = f"{learner}, life {incarnation}, fragment {fragment}"
        rows.sort(key=lambda row: sent.update(row).seq)
        first_seq, first = sent.update(rows[0]).seq, sent.at(rows[0])
        if overwritten:
            pass
        elif first_seq == 1:
            begins[learner, incarnation].add(first.position - first.steps)
        else:
            found.hold(history.trimmed, "data", where, f"begins with {first_seq}")
        updates = ((sent.update(row).seq, sent.at(row)) for row in rows)
        for (before_seq, before), (seq, after) in itertools.pairwise(updates):
            found.hold(
                seq == before_seq + 1
                and _goes_on(restores, before, after, kept)
                and after.base_version >= before.base_version,
                "data", where, f"update {seq} does not follow {before_seq}",
            )  # fmt: skip


def _earlier(found: Audit) -> Mapping[str, int] | None:
    """Data positions of earlier epochs; None if they are lost."""
    history = found.history
    try:
        return read_positions(history.store, history.specification)
    except (ObjectMissingError, IntegrityError, WireError) as error:
        found.hold(False, "data", "the specification", error.message)
        return None


def _goes_on(restores: Sequence[int], before: Announced, after: Announced, kept: float) -> bool:
    """Whether the data of an update begins where that of the one before ended.

    A rollback between them drops what was not sent; any version may drop all but a share of it,
    where it overwrites or is blended.
    """
    dropped = after.position - after.steps - before.position
    if any(before.base_version < version <= after.base_version for version in restores):
        return dropped >= 0
    adopted = before.base_version < after.base_version
    taken = after.position - before.position
    return 0 <= dropped <= (math.ceil((1 - kept) * taken) if adopted else 0)


class _Reached(NamedTuple):
    """How far a learner's data had come when a life of it began: at least, and at most."""

    least: int
    most: int


def _earlier_ends(
    history: History, lives: Sequence[tuple[str, int]], earlier: Mapping[str, int]
) -> dict[tuple[str, int], _Reached]:
    """How far the data had come, by what earlier lives had said, when each life began.

    What an earlier life says after the join is rejected, and whoever joins may have seen it: its
    data may go on behind that, too.
    """
    own: dict[str, list[int]] = defaultdict(list)
    for learner, incarnation in sorted(lives):
        own[learner].append(incarnation)
    least = {life: earlier.get(life[0], 0) for life in lives}
    late: dict[tuple[str, int], int] = {}
    spoken: set[tuple[str, int]] = set()
    said: Iterator[tuple[int, wire.Manifest | wire.Leave]]
    said = heapq.merge(history.manifests, history.leaves, key=itemgetter(0))
    for seq, message in said:
        learner, known = message.learner, own[message.learner]
        spoken.add((learner, message.incarnation))
        after = bisect_left(known, max(seq, message.incarnation + 1))
        for incarnation in known[after : after + 1]:
            life = (learner, incarnation)
            least[life] = max(least[life], message.position)
        for incarnation in known[max(0, after - 1) : after]:
            life = (learner, incarnation)
            if message.incarnation < incarnation and life not in spoken:
                late[life] = max(late.get(life, 0), message.position)
    for learner, known in own.items():
        for one, following in itertools.pairwise(known):
            least[learner, following] = max(least[learner, following], least[learner, one])
    return {life: _Reached(at, max(at, late.get(life, 0))) for life, at in least.items()}


def _check_beginning(
    found: Audit, life: tuple[str, int], starts: set[int], behind: _Reached
) -> None:
    # What earlier lives have sent may be trimmed; then it lies further on.
    most = math.inf if found.history.trimmed else behind.most
    fits = len(starts) == 1 and behind.least <= min(starts) <= most
    where = f"{life[0]}, life {life[1]}"
    ended = f"earlier lives ended at {behind.least}"
    found.hold(fits, "data", where, f"begins at {sorted(starts)}, {ended}")


def _check_end(found: Audit, at: tuple[int, wire.End], hostile: Sequence[str]) -> None:
    """The run's end agrees with its records; who was there to the end sent all it had."""
    history, (end_seq, end) = found.history, at
    found.hold(history.stop is not None, "end", "the tape", "an end without a stop")
    for fragment, chain in history.records.items():
        before = [(seq, record) for seq, record in chain if seq < end_seq]
        said, named = end.versions[fragment], end.record_seqs[fragment]
        version = chain[-1][1].version if before else None
        # What came too late is answered by a record more, which whoever says the end may not know.
        finals = [seq for seq, record in before if record.final]
        about = f"fragment {fragment}"
        found.hold(said == version, "end", about, f"says version {said}, but is at {version}")
        found.hold(named in finals, "end", about, f"names record {named}, of final ones {finals}")
    covered: Counter[tuple[str, int, int]] = Counter()
    for _, manifest in history.manifests:
        life = (manifest.learner, manifest.incarnation, manifest.fragment)
        covered[life] = max(covered[life], manifest.position)
    for _, leave in history.leaves:
        for fragment in leave.fragments:
            life = (leave.learner, leave.incarnation, fragment)
            covered[life] = max(covered[life], leave.position)
    lives = {join.learner: seq for seq, join in history.joins}
    left = history.full_leaves()
    for learner in lives.keys() - {*hostile}:
        last = lives[learner]
        leaves = left.get((learner, last), ())
        stopped = history.stop[0] if history.stop else end_seq
        # Who came after the end, or was trimmed away, had nothing to send; and whom the end
        # overtook, as one that was cut off, can send nothing any more.
        if leaves and stopped < leaves[0][0] < end_seq and history.whole_from <= last:
            _check_flushed(found, learner, last, leaves[0][1].position, covered)


def _check_flushed(
    found: Audit,
    learner: str,
    incarnation: int,
    position: int,
    covered: Counter[tuple[str, int, int]],
) -> None:
    """A life's manifests cover all its steps up to `position`."""
    for fragment in found.history.records:
        reached = covered[learner, incarnation, fragment]
        where = f"{learner}, life {incarnation}, fragment {fragment}"
        found.hold(reached == position, "end", where, f"sent up to {reached}, left at {position}")
