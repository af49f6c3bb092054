"""The checker of averaged state and of overwriting versions (docs/adr/0039-trained-frozen-state.md).

A version of averaged state overwrites a learner's state, and the learner drops the progress that it
has not sent by then. So each step of an incarnation is either in exactly one update, or was dropped
at a version that the learner adopted after the step. The same holds for every fragment where
`sync.adopt` is "overwrite". A version of averaged state is a mean weighted by tokens, whatever the
run's outer optimizer is.
"""

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

from simadmission import LIAR
from simchain import UpdateId, hold
from simtensors import Covers

from diloco.common.protocol import wire
from diloco.learner.core.events import Ready

# The greatest discount of an update on an older version of averaged state.
NEARLY_NOTHING = 1e-5


class Life(NamedTuple):
    """An incarnation of a learner on the tape of one epoch."""

    epoch: int
    learner: str
    incarnation: int


@dataclass
class _Account:
    """The version and the data positions of one incarnation. Positions are in batches.

    Attributes:
        version: the newest adopted version.
        overwritten: positions at which a newer version was adopted, ascending; the first is the
            position at which the incarnation began.
        sent: the position at which the last update ends.
    """

    version: int
    overwritten: list[int]
    sent: int


@dataclass
class Overwritten:
    """Checks a fragment, on one tape, whose versions overwrite the learners' values."""

    fragment: int
    _lives: dict[tuple[str, int], _Account] = field(default_factory=dict)

    def begin(self, life: Life, version: int, position: int) -> None:
        """Note that a life begins with this version, at this data position."""
        account = _Account(version, [position], position)
        self._lives[life.learner, life.incarnation] = account

    def adopt(self, life: Life, ready: Ready, position: int) -> None:
        """Note that a life has adopted a record's version at this data position."""
        account = self._lives[life.learner, life.incarnation]
        if ready.version > account.version:
            account.version = ready.version
            account.overwritten.append(position)

    def check_data(self, update: UpdateId, covers: Covers) -> int:
        """Checks where an update begins; returns the number of steps dropped before it."""
        account = self._lives[update.learner, update.incarnation]
        # At a boundary versions are adopted before updates are made.
        newest = bisect.bisect_left(account.overwritten, covers.stop) - 1
        hold(newest >= 0, "data", update, f"{covers} was taken before its life")
        expected = max(account.sent, account.overwritten[newest])
        hold(covers.start == expected, "data", update, f"{covers} is to begin {expected}")
        let_go, account.sent = covers.start - account.sent, covers.stop
        return let_go


def check_mean(record: wire.Record) -> None:
    """Checks that a record of averaged state makes the mean, weighted by tokens, of its updates."""
    about = f"fragment {record.fragment}"
    learners = {taken.learner for taken in record.inputs}
    if learners:
        # A round with one learner moves the state by a part of a step only.
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
