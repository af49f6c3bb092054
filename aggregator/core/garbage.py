"""Garbage of a run: a plan for one fragment, from its records and the store's listing.

Rules of this file:
- No IO, no clock: the newest record's time is "now". Whoever deletes does it as
  `garbage_collector.py` says: first the tape, then the objects.
- The floor is a version whose view and outer state are stored, and from which a fragment can be
  recovered: the older of the two newest such versions, or an earlier one if versions of the last
  `replay_window_s` seconds could not be merged again otherwise. Of what is below the floor nothing
  stays but what checkpoints pin; of what is above it everything that its records name.
- Where it cannot be known that something is not needed, it stays: an object of a version that is
  not committed yet, an update that may still be announced, a name that is not of our making.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.aggregator.core.updates import UpdateId
from diloco.common.protocol import names, wire


class LedgerEntry(NamedTuple):
    """The facts of one record from which the plan of garbage follows.

    Attributes:
        made: the record made its version; a verdict makes none.
        merged: the version was made from updates, `inputs`.
        whole: view and outer state of the record's own version are stored.
        states: names of the newest view and outer state at this record.
        delta, body: names of its delta and of the object it is stored in, if there are any.
    """

    record_seq: int
    stored_at_s: float
    version: int
    made: bool
    merged: bool
    whole: bool
    states: tuple[str, str]
    delta: str | None
    body: str | None
    inputs: tuple[UpdateId, ...]


@dataclass
class Ledger:
    """A fragment's records from some snapshot on, in the order of the tape.

    `position` and `marks` are the newest record's: marks by (learner, incarnation).
    """

    run: str
    fragment: int
    epoch: int
    entries: list[LedgerEntry] = field(default_factory=list)
    position: int = 1
    marks: dict[tuple[str, int], int] = field(default_factory=dict)
    # Of each learner's newest life: sequence of its newest update that has an answer.
    answered_at: dict[str, int] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    @property
    def newest_seq(self) -> int:
        """Sequence of the newest record taken; 0 if there is none."""
        return self.entries[-1].record_seq if self.entries else 0

    def take(
        self, record: wire.Record, record_seq: int, stored_at_s: float, body: str | None
    ) -> None:
        """Add the next record of the tape; one that was taken before is passed over."""
        # The tape is read from where the last reading ended, and may give the last record twice.
        if record_seq <= self.newest_seq:
            return
        states = (record.snapshot.name, record.outer.name)
        if self.entries and self.entries[-1].states == states:
            states = self.entries[-1].states  # Days of records must not fill the memory.
        made = record.what != "verdict"
        merged = record.what == "version" and record.version > 0
        self.entries.append(
            LedgerEntry(
                record_seq=record_seq,
                stored_at_s=stored_at_s,
                version=record.version,
                made=made,
                merged=merged,
                whole=made and record.snapshot_version == record.outer_version == record.version,
                states=states,
                delta=record.delta.name if record.delta is not None and made else None,
                body=body,
                inputs=tuple(self._update(taken) for taken in record.inputs),
            )
        )
        self.position = record.position
        self.marks = {(m.learner, m.incarnation): m.seq for m in record.policy.marks}
        by_life = sorted(record.policy.marks, key=lambda mark: mark.incarnation)
        self.answered_at = {mark.learner: mark.stream_seq for mark in by_life}

    def _update(self, taken: wire.Input) -> UpdateId:
        learner = self._names.setdefault(taken.learner, taken.learner)
        return UpdateId(learner, taken.incarnation, taken.seq)

    def forget_below(self, record_seq: int) -> None:
        """Drop the entries of records before one."""
        self.entries = [entry for entry in self.entries if entry.record_seq >= record_seq]


class Announcers(NamedTuple):
    """Learners that may still announce: read before the ledger's newest record.

    Attributes:
        lives: newest incarnation of each learner. Nothing that an older one announces from now
            on is taken; what it announced before and is not resolved is in `pending`.
        pending: updates that are announced and not resolved.
    """

    lives: Mapping[str, int]
    pending: Collection[UpdateId]


class GarbageObject(NamedTuple):
    """An object that may go; `kind` is "delta", "view", "outer", "record" or "shard"."""

    kind: str
    name: str
    size_bytes: int


class Trim(NamedTuple):
    """Messages of a subject that may go: those below a sequence."""

    subject: str
    below_seq: int


class GarbagePlan(NamedTuple):
    """Messages and objects of a fragment that may be removed; the tape is to be trimmed first.

    `floor_version` and `floor_seq`: the oldest version that stays, and its record; what stands on
    the tape before `answered_seq` is of no use to the fragment.
    """

    floor_version: int
    floor_seq: int
    answered_seq: int
    trims: tuple[Trim, ...]
    objects: tuple[GarbageObject, ...]


def plan(
    ledger: Ledger,
    found: Iterable[tuple[str, int]],
    *,
    fleet: Announcers,
    pinned: Collection[int],
    replay_window_s: float,
) -> GarbagePlan | None:
    """Plan which messages and objects of a fragment to remove; None if no record holds a snapshot.

    Args:
        ledger: the fragment's records, up to one that was read after `found` and `fleet`.
        found: (name, bytes) of objects in the store; those of other fragments are passed over.
        fleet: who may still announce what.
        pinned: versions whose view and outer state checkpoints keep.
        replay_window_s: versions not older than this stay such that they can be merged again.
    """
    # Everything else follows from one version, so that what stays is whole: a floor, and all that
    # leads from it to the newest version.
    index = _floor(ledger.entries, replay_window_s)
    if index is None:
        return None
    floor = ledger.entries[index]
    keep = _Retention.of(ledger, index, fleet, pinned)
    garbage = [
        GarbageObject(kind, name, size_bytes)
        for name, size_bytes in found
        if (kind := keep.judge(name)) is not None
    ]
    # Recovery reads from the position, a replay from the floor's record: the tape is kept for both
    # (invariants 2 and 5).
    answered_seq = min(ledger.position, floor.record_seq)
    run, fragment = ledger.run, ledger.fragment
    # A subject keeps its last message, by which a learner knows where its data goes on; but that
    # may be of a process that outlived its life or its tape: what the newest life sent stays too.
    kept_from = {who: ledger.answered_at.get(who, answered_seq) for who in sorted(fleet.lives)}
    trims = (
        Trim(names.record(run, fragment), floor.record_seq),
        *(
            Trim(names.update(run, who, fragment), min(answered_seq, seq))
            for who, seq in kept_from.items()
        ),
    )
    return GarbagePlan(floor.version, floor.record_seq, answered_seq, trims, tuple(garbage))


def _floor(entries: list[LedgerEntry], replay_window_s: float) -> int | None:
    """Index of the oldest record that stays."""
    wholes = [index for index, entry in enumerate(entries) if entry.whole]
    # With one snapshot and older records of a chain whose beginning is gone, nothing is certain.
    if not wholes or (len(wholes) == 1 and wholes[0] > 0):
        return None
    # The newest record is the clock: a machine whose own is wrong must not delete anything early.
    since_s = entries[-1].stored_at_s - replay_window_s
    made = (i for i, entry in enumerate(entries) if entry.made and entry.stored_at_s > since_s)
    recent = next(made, len(entries) - 1)
    # To merge a version again one begins from the one before it.
    basis = [whole for whole in wholes if whole < recent + (not entries[recent].merged)]
    # Two, since the newest one may prove damaged when it is needed (invariant 3).
    return min(wholes[-2:][0], basis[-1] if basis else wholes[0])


def newer_than_tape(ledger: Ledger, found: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Objects of versions beyond the tape's end, which no aggregator of this tape can have made.

    Versions are stored one at a time, so at most the next one is there before its record. Whoever
    sees such an object must delete nothing: the tape was cut, or goes back to an older copy, and
    what it does not name is the evidence of what it was. Shards are no evidence: under its prefix a
    learner may store what it likes.

    Args:
        ledger: the fragment's records; read after `found`.
        found: (name, bytes) of objects in the store.
    """
    newest = ledger.entries[-1].version if ledger.entries else 0
    for name, _ in found:
        made = names.parse_version_object(ledger.run, ledger.fragment, name)
        # A resumed run counts on from a checkpoint: what its earlier tape made later is there too.
        if made is not None and ledger.epoch == 0 and made.version > newest + 1:
            yield name


class _Retention(NamedTuple):
    """The facts that decide which objects of a fragment stay."""

    ledger: Ledger
    fleet: Announcers
    pinned: Collection[int]
    named: frozenset[str]
    inputs: frozenset[UpdateId]

    @classmethod
    def of(
        cls, ledger: Ledger, floor: int, fleet: Announcers, pinned: Collection[int]
    ) -> "_Retention":
        staying, above = ledger.entries[floor:], ledger.entries[floor + 1 :]
        named = {name for entry in staying for name in (*entry.states, entry.body) if name}
        named |= {entry.delta for entry in above if entry.delta}
        inputs = frozenset(update for entry in above for update in entry.inputs)
        return cls(ledger, fleet, pinned, frozenset(named), inputs)

    def judge(self, name: str) -> str | None:
        """The kind of an object that may go; None for one that stays."""
        run, fragment = self.ledger.run, self.ledger.fragment
        made = names.parse_version_object(run, fragment, name)
        if made is not None:
            return None if self._keeps_object(name, made) else made.what
        sent = names.parse_shard(run, name)
        if sent is not None and sent.fragment == fragment and not self._keeps_shard(sent):
            return "shard"
        return None

    def _keeps_object(self, name: str, made: names.VersionObject) -> bool:
        # An object of a version that is not committed may be an owner's that is about to commit it:
        # only once that version stands without it is it nobody's.
        if made.version > self.ledger.entries[-1].version or name in self.named:
            return True
        return made.what in ("view", "outer") and made.version in self.pinned

    def _keeps_shard(self, sent: names.ShardName) -> bool:
        if sent.epoch != self.ledger.epoch:
            # An older tape has ended. A newer one is none of our business.
            return sent.epoch > self.ledger.epoch
        # Shards come before their announcement: what a live life has not announced yet may still
        # come (invariant 2).
        update = UpdateId(sent.learner, sent.incarnation, sent.seq)
        if update in self.inputs or update in self.fleet.pending:
            return True
        if self.ledger.marks.get((sent.learner, sent.incarnation), 0) >= sent.seq:
            return False
        return sent.incarnation >= self.fleet.lives.get(sent.learner, 0)


def plan_run(run: str, answered: Iterable[int], learners: Iterable[str]) -> tuple[Trim, ...]:
    """Plan which joins and leaves of learners to trim.

    Args:
        run: the run's name.
        answered: for each fragment the lower of its newest record's position, from which whoever
            recovers reads on, and its oldest record, with which a replay begins.
        learners: whose messages to trim.
    """
    below_seq = min(answered)
    return tuple(
        Trim(subject(run, learner), below_seq)
        for learner in sorted(learners)
        for subject in (names.join, names.leave)
    )


def pinned_checkpoints(marked: Iterable[str], whole: Iterable[str], keep: int) -> frozenset[str]:
    """Names of the checkpoints that keep their objects: the newest ones.

    Args:
        marked: those on the tape; one that is being made has no file yet, or never gets one.
        whole: those that have their file, of this epoch and of earlier ones.
        keep: the number that is kept of each.
    """
    return frozenset(sorted(marked)[-keep:]) | frozenset(sorted(whole)[-keep:])
