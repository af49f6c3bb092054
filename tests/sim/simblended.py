"""The checker of blended versions (docs/adr/0063-blend-on-adoption.md).

A learner that adopts a version with its own update keeps a share of its progress since that update.
The checkers count the rest as dropped: a number of whole steps, rounded up, that directly follow
the update; at least one step stays. At a verdict, or at a version without the learner's update,
the learner drops nothing.
"""

import bisect
from dataclasses import dataclass, field

from simaveraged import Life
from simchain import UpdateId, hold
from simtensors import Covers, faded

from diloco.common.protocol import wire
from diloco.learner.core.events import Ready


@dataclass
class _Account:
    """The updates and data positions of one incarnation. Positions are in batches.

    Attributes:
        restored: positions at which a rollback was adopted, ascending; the first is the position at
            which the incarnation began.
        seq: number of the newest update.
        sent: the position at which the newest update ends.
        let_go: number of steps after `sent` that were dropped.
        merged: version and record sequence that merged the newest update; (0, 0) if none has.
    """

    restored: list[int]
    seq: int = 0
    sent: int = 0
    let_go: int = 0
    merged: tuple[int, int] = (0, 0)


@dataclass
class Blended:
    """Checks a fragment, on one tape, whose versions learners blend with their own progress."""

    fragment: int
    fading: float
    _lives: dict[tuple[str, int], _Account] = field(default_factory=dict)

    def begin(self, life: Life, _version: int, position: int) -> None:
        """Note that a life begins at this data position."""
        self._lives[life.learner, life.incarnation] = _Account([position], sent=position)

    def merge(self, record: wire.Record, record_seq: int) -> None:
        """Note the updates that a record merges."""
        for taken in record.inputs:
            account = self._lives.get((taken.learner, taken.incarnation))
            if account is not None and account.seq == taken.seq:
                account.merged = (record.version, record_seq)

    def adopt(self, life: Life, ready: Ready, position: int) -> None:
        """Note that a life has adopted a record's version at this data position."""
        account = self._lives[life.learner, life.incarnation]
        if ready.rolled_back:
            # Steps dropped before stay counted: an update taken before the rollback may yet be sent.
            account.restored.append(position)
            account.merged = (0, 0)
            return
        version, record_seq = account.merged
        if not 0 < version <= ready.version:
            return
        account.merged = (0, 0)
        # A learner that skipped an unreadable record does not know of the merge, and drops nothing.
        if ready.record_seq == record_seq or ready.merged_seq == account.seq:
            account.let_go = faded(self.fading, position - account.sent)

    def check_data(self, update: UpdateId, covers: Covers) -> int:
        """Checks where an update begins; returns the number of steps dropped before it."""
        account = self._lives[update.learner, update.incarnation]
        newest = bisect.bisect_left(account.restored, covers.stop) - 1
        hold(newest >= 0, "data", update, f"{covers} was taken before its life")
        restored = account.restored[newest]
        expected = max(account.sent + account.let_go, restored)
        hold(covers.start == expected, "data", update, f"{covers} is to begin {expected}")
        let_go = max(0, covers.start - max(account.sent, restored))
        account.seq, account.sent = update.seq, covers.stop
        account.let_go, account.merged = 0, (0, 0)
        return let_go
