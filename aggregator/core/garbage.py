"""Plans which messages and objects of a fragment are garbage, from its records and store listing.

Rules of this file:
- No IO, no clock: the newest record's time is "now". `garbage_collector.py` deletes: first from
  the tape, then the objects.
- The floor is a version whose view and outer state are stored, and from which the fragment can be
  recovered: the older of the two newest such versions, or an earlier one if versions of the last
  `replay_window_s` seconds could not be merged again otherwise. Below the floor only what
  checkpoints pin stays; from the floor on everything that records name stays.
- In doubt an object stays: an object of a version that is not committed yet, of an update that may
  still be announced, or with a name that this project does not use.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.aggregator.core.updates import UpdateId
from diloco.common.protocol import names, wire


class LedgerEntry(NamedTuple):
    """The facts of one record that matter for garbage collection.

    Attributes:
        record_seq: the record's stream sequence.
        stored_at_s: when the server stored the record, in seconds of Unix time.
        version: the fragment's version after the record.
        made: True if the record made this version; a record of verdicts makes none.
        merged: True if the version was made from updates, `inputs`.
        whole: True if view and outer state of this version are stored.
        states: object names of the newest stored view and outer state at this record.
        delta: object name of the version's delta; None if it has none.
        body: name of the object with the record's body; None if the record is on the tape.
        inputs: the merged updates.
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

    Attributes:
        run: the run's name.
        fragment: the fragment's index.
        epoch: the epoch of the tape.
        entries: the facts of each record.
        position: the position in the newest record.
        marks: by (learner, incarnation), the seq of the last update with a verdict.
        answered_at: by learner, the stream sequence of the last update with a verdict, if it is one
            of the newest incarnation; 0 if none of that incarnation has a verdict.
    """

    run: str
    fragment: int
    epoch: int
    entries: list[LedgerEntry] = field(default_factory=list)
    position: int = 1
    marks: dict[tuple[str, int], int] = field(default_factory=dict)
    answered_at: dict[str, int] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    @property
    def newest_seq(self) -> int:
        """The stream sequence of the newest record added; 0 if there is none."""
        return self.entries[-1].record_seq if self.entries else 0

    def take(
        self, record: wire.Record, record_seq: int, stored_at_s: float, body: str | None
    ) -> None:
        """Adds the next record of the tape; ignores a record that was added before.

        Args:
            record: the record.
            record_seq: the record's stream sequence.
            stored_at_s: when the server stored the record, in seconds of Unix time.
            body: name of the object with the record's body; None if the record is on the tape.
        """
        # Each reading continues where the last one ended, and may repeat the last record.
        if record_seq <= self.newest_seq:
            return
        states = (record.snapshot.name, record.outer.name)
        if self.entries and self.entries[-1].states == states:
            states = self.entries[-1].states  # Shares one tuple, to save memory.
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
        newest = {one.learner: one.incarnation for one in record.policy.members}
        self.answered_at = {}
        for mark in sorted(record.policy.marks, key=lambda mark: mark.incarnation):
            # What a superseded incarnation sent late gives no data position: the one before stays.
            # Only a mark of the newest incarnation is surely not of such an update.
            is_newest = mark.incarnation >= newest.get(mark.learner, 0)
            self.answered_at[mark.learner] = mark.stream_seq if is_newest else 0

    def _update(self, taken: wire.Input) -> UpdateId:
        learner = self._names.setdefault(taken.learner, taken.learner)
        return UpdateId(learner, taken.incarnation, taken.seq)

    def forget_below(self, record_seq: int) -> None:
        """Drops the entries of records below a stream sequence."""
        self.entries = [entry for entry in self.entries if entry.record_seq >= record_seq]


class Announcers(NamedTuple):
    """The learners that may still announce updates, as before the ledger was read to its end.

    Attributes:
        lives: the newest incarnation of each learner. Older incarnations cannot announce any more.
        pending: updates that are announced and have no committed verdict, of any incarnation.
    """

    lives: Mapping[str, int]
    pending: Collection[UpdateId]


class GarbageObject(NamedTuple):
    """An object to delete; `kind` is "delta", "view", "outer", "record" or "shard"."""

    kind: str
    name: str
    size_bytes: int


class Trim(NamedTuple):
    """Messages to remove: those of a subject whose stream sequence is below `below_seq`."""

    subject: str
    below_seq: int


class GarbagePlan(NamedTuple):
    """The messages and objects of a fragment to remove; the tape is to be trimmed first.

    Attributes:
        floor_version: the oldest version that stays.
        floor_seq: the stream sequence of that version's record.
        answered_seq: the fragment needs no message below this stream sequence.
        trims: the messages to remove.
        objects: the objects to delete.
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
    """Plans which messages and objects of a fragment to remove; None if no snapshot is recorded.

    Args:
        ledger: the fragment's records, up to one that was read after `found` and `fleet`.
        found: (name, bytes) of objects in the store; those of other fragments are ignored.
        fleet: the learners that may still announce updates.
        pinned: versions whose view and outer state checkpoints need.
        replay_window_s: versions younger than this many seconds can still be merged again.
    """
    # All follows from one version, the floor: it stays, with all that leads from it to the newest.
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
    # Recovery reads from the position, a replay from the floor's record: the tape stays for both
    # (invariants 2 and 5).
    answered_seq = min(ledger.position, floor.record_seq)
    run, fragment = ledger.run, ledger.fragment
    # The last message of a subject stays, as it gives a learner its data position. It may be from a
    # process that outlived its life or tape, so messages of the newest life stay too.
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
    """Returns the index of the floor's record in `entries`; None if nothing can be deleted."""
    wholes = [index for index, entry in enumerate(entries) if entry.whole]
    # One snapshot after records whose own snapshot is gone: too uncertain to delete anything.
    if not wholes or (len(wholes) == 1 and wholes[0] > 0):
        return None
    # The newest record's time is now, so that a wrong clock here deletes nothing early.
    since_s = entries[-1].stored_at_s - replay_window_s
    made = (i for i, entry in enumerate(entries) if entry.made and entry.stored_at_s > since_s)
    recent = next(made, len(entries) - 1)
    # Merging a version again begins from the version before it.
    basis = [whole for whole in wholes if whole < recent + (not entries[recent].merged)]
    # Two snapshots, since the newest may prove damaged when it is needed (invariant 3).
    return min(wholes[-2:][0], basis[-1] if basis else wholes[0])


def newer_than_tape(ledger: Ledger, found: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Yields the names of objects of versions beyond the tape's end.

    Versions are stored one at a time, so at most one version is stored before its record. If there
    is an object of a later version, delete nothing: the tape was cut or restored from an older
    copy, and the objects that the tape does not name show what it contained. Shards are no such
    evidence, as a learner may store anything under its prefix.

    Args:
        ledger: the fragment's records, read after the store was listed.
        found: (name, bytes) of objects in the store.
    """
    newest = ledger.entries[-1].version if ledger.entries else 0
    for name, _ in found:
        made = names.parse_version_object(ledger.run, ledger.fragment, name)
        # A resumed run continues from a checkpoint; later versions of its earlier tape are stored
        # too.
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
        """Returns the kind of an object to delete; None for an object that stays."""
        run, fragment = self.ledger.run, self.ledger.fragment
        made = names.parse_version_object(run, fragment, name)
        if made is not None:
            return None if self._keeps_object(name, made) else made.what
        sent = names.parse_shard(run, name)
        if sent is not None and sent.fragment == fragment and not self._keeps_shard(sent):
            return "shard"
        return None

    def _keeps_object(self, name: str, made: names.VersionObject) -> bool:
        # An owner may be about to commit the version of an uncommitted object; once the version is
        # committed without the object, nobody needs it.
        if made.version > self.ledger.entries[-1].version or name in self.named:
            return True
        return made.what in ("view", "outer") and made.version in self.pinned

    def _keeps_shard(self, sent: names.ShardName) -> bool:
        if sent.epoch != self.ledger.epoch:
            # An older tape has ended, so its shards go; a newer tape's shards are not ours to
            # judge.
            return sent.epoch > self.ledger.epoch
        # Shards are stored before their update is announced, so unannounced ones of a newest
        # incarnation stay (invariant 2).
        update = UpdateId(sent.learner, sent.incarnation, sent.seq)
        if update in self.inputs or update in self.fleet.pending:
            return True
        if self.ledger.marks.get((sent.learner, sent.incarnation), 0) >= sent.seq:
            return False
        return sent.incarnation >= self.fleet.lives.get(sent.learner, 0)


def plan_run(
    run: str,
    answered: Iterable[int],
    learners: Iterable[str],
    marked: Iterable[tuple[str, int]],
) -> tuple[Trim, ...]:
    """Plans which joins and leaves of learners to trim.

    Args:
        run: the run's name.
        answered: for each fragment the lower of its newest record's position, where recovery begins
            to read, and its oldest record's sequence, where a replay begins.
        learners: the learners whose messages to trim.
        marked: (learner, incarnation) of the marks in the newest record of each fragment.
    """
    below_seq = min(answered)
    # The joins after an incarnation's own tell which of its messages came too late to count.
    joins_from: dict[str, int] = {}
    for learner, incarnation in marked:
        joins_from[learner] = min(incarnation, joins_from.get(learner, below_seq))
    return tuple(
        trim
        for learner in sorted(learners)
        for trim in (
            Trim(names.join(run, learner), joins_from.get(learner, below_seq)),
            Trim(names.leave(run, learner), below_seq),
        )
    )


# So many checkpoints without a file may be in the making; where no file can be stored, each attempt
# leaves one.
MOST_IN_MAKING = 16


def pinned_checkpoints(marked: Iterable[str], whole: Iterable[str], keep: int) -> frozenset[str]:
    """Returns the names of the newest checkpoints, which keep their objects.

    A checkpoint on the tape without a file may be in the making, by several aggregators at once. It
    keeps its objects as long as it would be one of the newest `keep` if it got its file now.

    Args:
        marked: names of the checkpoints on the tape, including those without a stored file.
        whole: names of the checkpoints with a file, of this epoch and of earlier ones.
        keep: the number of newest checkpoints with a file to keep.
    """
    kept = sorted(whole)[-keep:]
    oldest = kept[0] if len(kept) == keep else ""
    in_making = sorted(name for name in marked if name > oldest)[-max(keep, MOST_IN_MAKING) :]
    return frozenset(kept) | frozenset(in_making)
