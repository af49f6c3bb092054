"""The choice of the next read of a fragment, among the records that wait. Pure.

Rules of this file:
- Every record is read, also those whose delta is not: it may resolve an update in flight.
- What waits is taken together. Where the newest stored view and the deltas behind it are fewer
  bytes than all the deltas that wait, the reader jumps there; what it skips it never fetches.
- A delta is added only to the very view that it was made from: codes carry what quantization lost,
  so that any other base, or another order, gives other bits than the aggregator's.
"""

from collections.abc import Sequence
from typing import NamedTuple

from diloco.common.protocol import wire


class Change(NamedTuple):
    """The step from the version adopted to a record's: a delta, or a stored view and deltas.

    Attributes:
        fragment, record_seq: of the record.
        view_digest: of the view that it leads to.
        snapshot: the stored view to begin with; None: with the view adopted.
        deltas: to be added, in order; one, if there is no snapshot.
    """

    fragment: int
    record_seq: int
    view_digest: str
    snapshot: wire.ObjectRef | None
    deltas: tuple[wire.ObjectRef, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes of all its objects."""
        first = 0 if self.snapshot is None else self.snapshot.size_bytes
        return first + sum(ref.size_bytes for ref in self.deltas)

    @property
    def held_bytes(self) -> int:
        """Size in bytes of the first object: a delta's codes and scales, or a view in float32."""
        (ref, *_) = self.deltas if self.snapshot is None else (self.snapshot,)
        return ref.size_bytes


class Adopted(NamedTuple):
    """The record up to which a fragment was handed to the training loop, and its view."""

    record_seq: int
    version: int
    view_digest: str


class UnfetchedRecord(NamedTuple):
    """A record that was read, None if its body is gone or damaged; and when it was made."""

    record_seq: int
    record: wire.Record | None
    made_at_s: float = 0.0


class FetchMove(NamedTuple):
    """The next change to fetch (None: nothing), and how many of the waiting records it covers."""

    covers: int
    change: Change | None


def next_move(adopted: Adopted, waiting: Sequence[UnfetchedRecord]) -> FetchMove | None:
    """The next move towards the newest of the waiting records; None: none of them leads on."""
    first, newest = waiting[0], waiting[-1]
    if first.record is not None and _stays(adopted, first.record):
        return FetchMove(1, None)
    chain_bytes = _chain_bytes(adopted, waiting)
    if newest.record is None:
        return None
    if chain_bytes is None and _stays(adopted, newest.record):
        # Only verdicts came, and one of them cannot be read: the newest has the same marks.
        return FetchMove(len(waiting), None)
    jump = _jump(newest.record_seq, newest.record)
    if chain_bytes is None or chain_bytes > jump.read_bytes:
        return FetchMove(len(waiting), jump)
    assert first.record is not None
    return FetchMove(1, delta_of(first.record, first.record_seq))


def delta_of(record: wire.Record, record_seq: int) -> Change:
    """The change by the delta of a record that has one, from the view before it."""
    assert record.delta is not None
    return Change(record.fragment, record_seq, record.view_digest, None, (record.delta,))


def _stays(adopted: Adopted, record: wire.Record) -> bool:
    """Whether a record leaves the view as it is."""
    return record.version == adopted.version and record.view_digest == adopted.view_digest


def _chain_bytes(adopted: Adopted, waiting: Sequence[UnfetchedRecord]) -> int | None:
    """Bytes of all deltas from the view adopted to the newest; None if the chain is broken."""
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


def _jump(record_seq: int, record: wire.Record) -> Change:
    return Change(record.fragment, record_seq, record.view_digest, record.snapshot, record.deltas)
