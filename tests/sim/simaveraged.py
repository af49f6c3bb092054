"""Averaged state, as the checkers keep account of it (docs/adr/0039-trained-frozen-state.md).

A learner takes a version of it as it is: what the learner has not sent by then is let go. So each
step that a life has taken is in an update, and ends as that does, or is let go at a version that
the life adopted behind it; nothing else is left out, and nothing is sent twice. The same holds of
every fragment where `sync.adopt` is "overwrite". What a version of state is made with is not the
run's: a mean by tokens.
"""

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

from simadmission import LIAR
from simchain import UpdateId, hold
from simtensors import Covers

from diloco.common.protocol import wire
from diloco.learner.core.events import Ready

# What an update on an older version may still count for.
NEARLY_NOTHING = 1e-5


class Life(NamedTuple):
    """A life of a learner on one tape."""

    epoch: int
    learner: str
    incarnation: int


@dataclass
class _Account:
    """One life: what it has adopted, where its work that is neither sent nor let go begins.

    `overwritten`: positions at which it adopted a newer version, ascending; the first is where it
    began. `sent`: where its last update ended.
    """

    version: int
    overwritten: list[int]
    sent: int


@dataclass
class Overwritten:
    """One fragment whose versions overwrite what learners have, on one tape."""

    fragment: int
    _lives: dict[tuple[str, int], _Account] = field(default_factory=dict)

    def begin(self, life: Life, version: int, position: int) -> None:
        """A life begins with this version."""
        account = _Account(version, [position], position)
        self._lives[life.learner, life.incarnation] = account

    def adopt(self, life: Life, ready: Ready, position: int) -> None:
        """A life has adopted a record: a newer version overwrites what it has."""
        account = self._lives[life.learner, life.incarnation]
        if ready.version > account.version:
            account.version = ready.version
            account.overwritten.append(position)

    def check_data(self, update: UpdateId, covers: Covers) -> int:
        """An update begins where nothing was let go or sent any more; the steps let go before it."""
        account = self._lives[update.learner, update.incarnation]
        # At a boundary versions are adopted first: one that came with this update left it nothing.
        newest = bisect.bisect_left(account.overwritten, covers.stop) - 1
        hold(newest >= 0, "data", update, f"{covers} was taken before its life")
        expected = max(account.sent, account.overwritten[newest])
        hold(covers.start == expected, "data", update, f"{covers} is to begin {expected}")
        let_go, account.sent = covers.start - account.sent, covers.stop
        return let_go


def check_mean(record: wire.Record) -> None:
    """Checks that the view is the mean, by tokens, of updates on the newest version."""
    about = f"fragment {record.fragment}"
    learners = {taken.learner for taken in record.inputs}
    if learners:
        # Nobody moves it for all: who is alone in a round takes its part of a step.
        rate, whole = record.learning_rate, len(learners) > 1
        fits = rate == 1 if whole else 0 < rate <= 1
        made = f"made of {len(learners)} learners at {rate}, {record.momentum}"
        hold(fits and record.momentum == 0, "averaged", about, made)
    for taken in record.inputs:
        update = f"{taken.learner} {taken.incarnation}-{taken.seq}"
        counts = taken.discount <= NEARLY_NOTHING if taken.staleness else taken.discount == 1
        hold(counts, "averaged", update, f"{taken.staleness} old, counts {taken.discount}")
        hold(taken.codec == "float32", "averaged", update, f"is in {taken.codec}")
        hold(taken.clip == 1, "averaged", update, f"was shortened to {taken.clip}")
        weighs = taken.learner == LIAR or taken.weight == taken.tokens_credited
        hold(weighs, "averaged", update, f"weighs {taken.weight}, not its tokens")
    stale = [one.learner for one in record.rejected if one.reason == "stale"]
    hold(not stale, "averaged", about, f"refused for their age: {stale}")
