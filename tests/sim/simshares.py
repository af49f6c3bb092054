"""Batches that learners really trained: a count of the simulation's own, which no message enters.

Each step that a learner takes says here which batch of which share it was. From that follow what
every update covers, and how far each share is read:

- no batch twice: of each fragment no batch is in two merged updates;
- no batch never: nobody goes on behind a batch that nobody trained, within a share or from a share
  to the next; what is given up ends exactly where the work ends that was announced.

A share that nobody took, though it was free, the oracle knows: who is granted one must have it by
the oracle's rules.
"""

from collections import defaultdict
from collections.abc import Mapping

from simaveraged import Life
from simchain import UpdateId, hold
from simtensors import Covers

from diloco.common.protocol import wire
from diloco.common.storage.share_allocation import EXPIRY, Holding, Sizes

Batch = tuple[int, int]


class Batches:
    """Of one tape.

    Args:
        sizes: how an epoch is divided; None: it is not.
        injected: counts what happened.
    """

    def __init__(self, sizes: Sizes | None, injected: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._injected = injected
        # By life: the batch that was trained at each position, and where an orderly end began.
        self._trained: defaultdict[tuple[str, int], dict[int, Batch]] = defaultdict(dict)
        self._left: dict[tuple[str, int], int] = {}
        # The first batch of each share that nobody has trained.
        self._reached: defaultdict[int, int] = defaultdict(int)
        self._merged: defaultdict[int, dict[Batch, UpdateId]] = defaultdict(dict)
        # Of each learner: (sequence, position) of what it announced, and of joins in its place.
        self._announced: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._expiries: set[int] = set()

    # Learners

    def train(self, life: Life, position: int, holding: Holding) -> None:
        """A life begins a step on the batch at a position."""
        assert self._sizes is not None
        about = f"{life.learner} {life.incarnation}"
        share, number = holding.share, holding.first + position - holding.position
        hold(0 <= number < self._sizes.batches, "batches", about, f"batch {number} of {holding}")
        ended = (life.learner, life.incarnation) in self._left
        hold(not ended, "batches", about, f"trains batch {number} of {holding} behind its end")
        known = self._trained[life.learner, life.incarnation]
        before = known.get(position - 1)
        if before is not None and before[0] != share:
            unread = self._reached[before[0]] < self._sizes.batches
            hold(not unread, "batches", about, f"leaves share {before[0]} behind batch {before[1]}")
        skipped = number > self._reached[share]
        what = f"trains batch {number} of share {share}, nobody has batch {self._reached[share]}"
        hold(not skipped, "batches", about, what)
        self._reached[share] = max(self._reached[share], number + 1)
        known[position] = (share, number)

    def leave(self, life: Life, position: int) -> None:
        """A life ends in order, here in its data."""
        self._left[life.learner, life.incarnation] = position

    # The tape

    def join(self, seq: int, msg_id: str) -> None:
        """Somebody joins; or an aggregator, in the place of one that is silent."""
        if msg_id.startswith(EXPIRY):
            self._expiries.add(seq)

    def announce(self, update: UpdateId, covers: Covers, seq: int) -> None:
        """An honest update is announced for the first time."""
        self._announced[update.learner].append((seq, covers.stop))

    def leave_said(self, word: wire.Leave, seq: int) -> None:
        """Of a life, or of some of its fragments."""
        self._announced[word.learner].append((seq, word.position))
        if word.incarnation in self._expiries:
            self._check_end(word.learner, word.incarnation, word.position)

    def claim(self, word: wire.Claim) -> None:
        """An end is where the learner stands; of a silent one, where its announced work ends."""
        if word.what != "end":
            return
        self._injected["expiry"] += word.incarnation in self._expiries
        self._check_end(word.learner, word.incarnation, word.position)

    def _check_end(self, learner: str, incarnation: int, position: int) -> None:
        if incarnation in self._expiries:
            said = self._announced[learner]
            expected = max((at for seq, at in said if seq < incarnation), default=0)
        else:
            expected = self._left.get((learner, incarnation), -1)
        what = f"ends at {position}, its work at {expected}"
        hold(position == expected, "batches", f"{learner} {incarnation}", what)

    def merge(self, fragment: int, update: UpdateId, covers: Covers) -> None:
        """A record merges an update."""
        if self._sizes is None:
            return
        trained = self._trained[update.learner, update.incarnation]
        merged = self._merged[fragment]
        for position in range(covers.start, covers.stop):
            batch = trained[position]
            twice = merged.get(batch)
            hold(twice is None, "batches", update, f"{batch} of {position} is in {twice} as well")
            merged[batch] = update
