"""Blended versions, as the checkers keep account of them (docs/adr/0063-blend-on-adoption.md).

A learner whose update is in a version that it adopts keeps a share of the steps that it has taken
since that update. The rest is let go there: in whole steps, rounded up, of those that follow the
update, and one stays. A verdict, or a version without its update, lets go of nothing.
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
    """One life: where the work begins that is neither sent nor let go.

    `merged`: version and record that have its newest update, 0 while none has. `restored`:
    positions at which it adopted a rollback, ascending; the first is where it began.
    """

    restored: list[int]
    seq: int = 0
    sent: int = 0
    let_go: int = 0
    merged: tuple[int, int] = (0, 0)


@dataclass
class Blended:
    """One fragment of a run whose learners blend, on one tape."""

    fragment: int
    fading: float
    _lives: dict[tuple[str, int], _Account] = field(default_factory=dict)

    def begin(self, life: Life, _version: int, position: int) -> None:
        """A life begins here in its data."""
        self._lives[life.learner, life.incarnation] = _Account([position], sent=position)

    def merge(self, record: wire.Record, record_seq: int) -> None:
        """A record merges updates."""
        for taken in record.inputs:
            account = self._lives.get((taken.learner, taken.incarnation))
            if account is not None and account.seq == taken.seq:
                account.merged = (record.version, record_seq)

    def adopt(self, life: Life, ready: Ready, position: int) -> None:
        """A life has adopted a record."""
        account = self._lives[life.learner, life.incarnation]
        if ready.rolled_back:
            account.restored.append(position)
            account.merged, account.let_go = (0, 0), 0
            return
        version, record_seq = account.merged
        if not 0 < version <= ready.version:
            return
        account.merged = (0, 0)
        # Who has jumped over a record that cannot be read does not know, and keeps everything.
        if ready.record_seq == record_seq or ready.merged_seq == account.seq:
            account.let_go = faded(self.fading, position - account.sent)

    def check_data(self, update: UpdateId, covers: Covers) -> int:
        """An update begins where nothing was let go or sent any more; the steps let go before it."""
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
