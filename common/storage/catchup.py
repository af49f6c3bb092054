"""Chooses the objects that a learner or a follower fetches next to reach the newest view. Pure.

A record *waits* from when it is read until its view is adopted. Rules:
- Every record is read, even if its delta is not fetched: the record may answer an update in flight.
- Waiting records are handled together. If the newest stored view and the deltas since are fewer
  bytes than all waiting deltas, the reader jumps to that view and skips the older deltas.
- A delta is added only to the view that the delta was made from. A delta's codes carry the
  quantization error of earlier deltas, so another base or order would give other bits than the
  aggregator's.
"""

from collections.abc import Sequence
from typing import NamedTuple

from diloco.common.protocol import wire

NO_ANSWER = wire.Answer()


class Change(NamedTuple):
    """The objects that lead from the adopted view to the view of a record.

    Attributes:
        fragment: the record's fragment.
        record_seq: the record's stream sequence.
        view_digest: digest of the view that results.
        snapshot: the stored view to begin with; None: begin with the adopted view.
        deltas: the deltas to add, in order; exactly one if there is no snapshot.
    """

    fragment: int
    record_seq: int
    view_digest: str
    snapshot: wire.ObjectRef | None
    deltas: tuple[wire.ObjectRef, ...]

    @property
    def read_bytes(self) -> int:
        """The size in bytes of all objects to read."""
        first = 0 if self.snapshot is None else self.snapshot.size_bytes
        return first + sum(ref.size_bytes for ref in self.deltas)

    @property
    def held_bytes(self) -> int:
        """The size in bytes of the first object to read: the stored view, or else the delta."""
        (ref, *_) = self.deltas if self.snapshot is None else (self.snapshot,)
        return ref.size_bytes


class Adopted(NamedTuple):
    """The last record of a fragment that was given to the training loop, and its view's digest."""

    record_seq: int
    version: int
    view_digest: str


class UnfetchedRecord(NamedTuple):
    """A record that was read and not yet adopted.

    Attributes:
        record: the record's word; None if an answer to this learner cannot be read.
        made_at_s: when the record was stored, in seconds since the epoch of the reader's clock; 0:
            unknown.
        answer: the record's answer to the reader, if that is a learner with an update in flight.
    """

    record_seq: int
    record: wire.RecordWord | None
    made_at_s: float = 0.0
    answer: wire.Answer = NO_ANSWER


class FetchMove(NamedTuple):
    """The next change to fetch, and the number of waiting records that are then done.

    Attributes:
        change: None if nothing must be fetched, as the view stays.
    """

    covers: int
    change: Change | None


def next_move(adopted: Adopted, waiting: Sequence[UnfetchedRecord]) -> FetchMove | None:
    """Returns the next move towards the view of the newest waiting record.

    Returns None if the newest record cannot be read and the first one does not keep the view.

    Args:
        adopted: the adopted record.
        waiting: the records after the adopted one, oldest first; at least one.
    """
    first, newest = waiting[0], waiting[-1]
    if first.record is not None and _stays(adopted, first.record):
        return FetchMove(1, None)
    chain_bytes = _chain_bytes(adopted, waiting)
    if newest.record is None:
        return None
    if chain_bytes is None and _stays(adopted, newest.record):
        # All are verdicts, and one of them cannot be read: the newest answers the same updates.
        return FetchMove(len(waiting), None)
    jump = _jump(newest.record_seq, newest.record)
    if chain_bytes is None or chain_bytes > jump.read_bytes:
        return FetchMove(len(waiting), jump)
    assert first.record is not None
    return FetchMove(1, delta_of(first.record, first.record_seq))


def delta_of(record: wire.AnyRecord, record_seq: int) -> Change:
    """Returns the change from the view before `record` to the view after it: the record's delta."""
    assert record.delta is not None
    return Change(record.fragment, record_seq, record.view_digest, None, (record.delta,))


def _stays(adopted: Adopted, record: wire.RecordWord) -> bool:
    """True if a record leaves the view unchanged."""
    return record.version == adopted.version and record.view_digest == adopted.view_digest


def _chain_bytes(adopted: Adopted, waiting: Sequence[UnfetchedRecord]) -> int | None:
    """Returns the size in bytes of all deltas from the adopted view to the newest record's view.

    Returns None if the deltas do not lead there: a record is unreadable, or a rollback.
    """
    version, digest, found = adopted.version, adopted.view_digest, 0
    for one in waiting:
        record = one.record
        if record is None:
            return None
        if record.version == version and record.view_digest == digest:
            continue
        follows = record.version == version + 1 and record.base_digest == digest
        if not follows or record.delta is None:
            return None
        version, digest = record.version, record.view_digest
        found += record.delta.size_bytes
    return found


def _jump(record_seq: int, record: wire.RecordWord) -> Change:
    return Change(record.fragment, record_seq, record.view_digest, record.snapshot, record.deltas)
