"""Computes from the claims on the tape which learner reads which share of the data. Pure.

A *life* is one incarnation of a learner. Its number is the stream sequence of its join. A learner's
*position* counts the batches that the learner has read, over all lives. Claim messages have a kind
(`what`): "begin", "claim" or "end". Rules:
1. A pass over the data, an epoch, is `shares` fixed shares of `batches` batches each. Share i of
   epoch e has the number e x `shares` + i.
2. A learner holds a share from its claim on, if the share is free after all earlier messages of the
   tape. Of two claims the first counts, so nobody has to decide between them.
3. An "end" states the position that the learner has reached. Of each share that the learner holds,
   the batches before that position are done; the others become free. The learner publishes its
   "end". For a silent learner an aggregator does, after it has ended the learner's life.
4. A life inherits the shares that earlier lives of the learner held. After its first message, later
   messages of earlier lives are void; after its "end", its own later claims are void. A message
   is also void if its life began on an earlier tape, or if the life's number is not smaller than
   the message's sequence.
5. All shares of an epoch are claimed before any share of the next: only free shares of the earliest
   epoch that has a free share can be claimed.

An update that was stored after the end of its life is not merged. So no batch is in two updates of
a fragment, and every batch is read as long as one learner lives.
"""

import heapq
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.common.process.config import RunSettings
from diloco.common.protocol import wire
from diloco.common.protocol.sequences import same_tape

# The prefix of message ids of the joins by which aggregators end silent lives.
EXPIRY = "expiry-"


class Sizes(NamedTuple):
    """The shares in an epoch, and the batches in a share; claims with other sizes are void."""

    shares: int
    batches: int


class Holding(NamedTuple):
    """A share that a learner holds, from the batch `first` on.

    Attributes:
        share: the share's number.
        first: the first free batch of the share when it was claimed.
        position: the learner's position at which it reads that batch.
    """

    share: int
    first: int
    position: int


def end_of(sizes: Sizes, holding: Holding) -> int:
    """Returns the learner's position after the holding's last batch."""
    return holding.position + sizes.batches - holding.first


def lost_batches(
    position: int, reached: Mapping[int | None, int], fragments: int
) -> tuple[int, ...]:
    """Returns, for each fragment, how many batches before `position` are in none of its updates.

    Args:
        position: the position at which the learner's data continues.
        reached: fragment -> the position that the learner's updates reach, as `data_reached` of
            `tape/run.py` returns; the key None has the position that holds for all fragments.
        fragments: number of fragments of the run.
    """
    said = reached.get(None, 0)
    return tuple(position - max(said, reached.get(index, 0)) for index in range(fragments))


def sizes_of(claim: wire.Claim) -> Sizes:
    """Returns the sizes with which a claim's sender divides an epoch."""
    return Sizes(claim.shares, claim.batches)


def declared_sizes(settings: RunSettings) -> Sizes | None:
    """Returns the sizes that the run's settings declare; None if they declare none."""
    run = settings.run
    return Sizes(run.data_shares, run.share_batches) if run.data_shares else None


@dataclass
class _LearnerHoldings:
    """A learner's holdings.

    Attributes:
        incarnation: number of the newest life that has begun or ended; 0: none.
        ended: number of the newest life that has ended; 0: none.
        least: the learner's next holding begins at this position or later.
        held: the holdings, oldest first.
    """

    incarnation: int = 0
    ended: int = 0
    least: int = 0
    held: tuple[Holding, ...] = ()


@dataclass
class Holdings:
    """The holdings of all learners, after the claims taken so far.

    Attributes:
        sizes: the sizes that the settings declare, or else those of the first claim; None before.
        partial: share -> first free batch, for each share that was given up before its end.
        unclaimed: every share from this number on is free, except the shares in `ahead`.
        ahead: claimed shares with numbers greater than `unclaimed`.
    """

    sizes: Sizes | None = None
    partial: dict[int, int] = field(default_factory=dict)
    unclaimed: int = 0
    ahead: set[int] = field(default_factory=set)
    # A heap of shares that were given up; some may have been claimed again.
    _given_up: list[int] = field(default_factory=list)
    _learners: dict[str, _LearnerHoldings] = field(default_factory=dict)

    def apply_claim(self, claim: wire.Claim, seq: int) -> bool:
        """Applies the next claim of the tape, at sequence `seq`; returns False if it is void."""
        # A life's number is the sequence of its join, which comes before its claims; a life with a
        # higher number could not be ended. A life of an earlier tape knows nothing of this one.
        if claim.incarnation >= seq or not same_tape(claim.incarnation, seq):
            return False
        known = self._learners.setdefault(claim.learner, _LearnerHoldings())
        self.sizes = self.sizes or sizes_of(claim)
        if claim.incarnation < known.incarnation or sizes_of(claim) != self.sizes:
            return False
        if claim.what == "claim":
            return self._give(claim, known)
        known.incarnation = claim.incarnation
        if claim.what == "end":
            self._end(claim.position, known)
        return True

    def of(self, learner: str) -> tuple[Holding, ...]:
        """Returns a learner's holdings, oldest first."""
        return self._learners[learner].held if learner in self._learners else ()

    def is_over(self, learner: str, life: int) -> bool:
        """True if a life can claim no more shares: the life has ended, or a newer life is known."""
        known = self._learners.get(learner, _LearnerHoldings())
        return life < known.incarnation or life <= known.ended

    def newest_life(self, learner: str) -> int:
        """Returns the number of a learner's newest life; 0 if no life has begun or ended."""
        return self._learners[learner].incarnation if learner in self._learners else 0

    def holders(self) -> tuple[str, ...]:
        """Returns the names of the learners that hold at least one share."""
        return tuple(name for name, one in self._learners.items() if one.held)

    def first_position(self, learner: str) -> int:
        """Returns the first position at which a learner's data is, or can become, its own.

        The data before that position was read by lives that have ended.
        """
        known = self._learners.get(learner, _LearnerHoldings())
        return known.held[0].position if known.held else known.least

    def next_position(self, learner: str) -> int:
        """Returns the earliest position at which a learner's next holding can begin."""
        known = self._learners.get(learner, _LearnerHoldings())
        if self.sizes is None or not known.held:
            return known.least
        return end_of(self.sizes, known.held[-1])

    def choose(self, learner: str, sizes: Sizes) -> tuple[int, int]:
        """Returns (share, first free batch) of a free share for a learner to claim.

        The choice depends on the learner's name, so that learners that choose at the same time
        mostly choose different shares.
        """
        free = list(self._free(sizes))
        return free[zlib.crc32(learner.encode()) % len(free)]

    def _free(self, sizes: Sizes) -> Iterator[tuple[int, int]]:
        """Yields (share, first free batch) of all free shares of the earliest epoch with any."""
        epoch = self._earliest() // sizes.shares
        for share in range(epoch * sizes.shares, (epoch + 1) * sizes.shares):
            if share in self.partial:
                yield share, self.partial[share]
            elif share >= self.unclaimed and share not in self.ahead:
                yield share, 0

    def _earliest(self) -> int:
        """Returns the number of a share such that all shares before it are taken."""
        while self._given_up and self._given_up[0] not in self.partial:
            heapq.heappop(self._given_up)
        return min([self.unclaimed, *self._given_up[:1]])

    def _is_free(self, claim: wire.Claim) -> bool:
        # Does not search all free shares: a peer's claim states how many shares an epoch has.
        share = claim.share
        if share // claim.shares != self._earliest() // claim.shares:
            return False
        if share in self.partial:
            return self.partial[share] == claim.first
        return claim.first == 0 and share >= self.unclaimed and share not in self.ahead

    def _give(self, claim: wire.Claim, known: _LearnerHoldings) -> bool:
        begun = known.ended < claim.incarnation == known.incarnation
        behind = claim.position >= self.next_position(claim.learner)
        if not (begun and behind and self._is_free(claim)):
            return False
        known.held += (Holding(claim.share, claim.first, claim.position),)
        if self.partial.pop(claim.share, None) is None:
            self.ahead.add(claim.share)
        while self.unclaimed in self.ahead:
            self.ahead.remove(self.unclaimed)
            self.unclaimed += 1
        return True

    def _end(self, position: int, known: _LearnerHoldings) -> None:
        assert self.sizes is not None
        for holding in known.held:
            reached = holding.first + max(0, position - holding.position)
            if reached < self.sizes.batches:
                self.partial[holding.share] = reached
                heapq.heappush(self._given_up, holding.share)
        known.held, known.least = (), max(known.least, position)
        known.ended = known.incarnation
