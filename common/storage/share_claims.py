"""Holdings: which learner reads which share of the data, from the claims on the tape. Pure.

Rules:
1. A pass over the data, an epoch, is `shares` fixed shares of `batches` batches each. A share's
   number is epoch x `shares` + its place in the epoch.
2. A learner holds a share from its claim on, if the share is free where the claim stands on the
   tape: of two claims the first counts, and nobody has to decide it.
3. A learner's end says the position that it has reached. Of each share that it holds, the batches
   before that are behind it; the others are free. It says so itself; once it is silent an
   aggregator does, after ending its life on the tape.
4. A life has what earlier ones of its name held. After its first word theirs are void, after its
   end its own. A word of a life that could not have begun where it stands on the tape is none.
5. Shares of one epoch are all given out before any of the next: only what is free of the earliest
   epoch that has anything free can be claimed.

Nothing of a life is merged that is stored behind its end. So no batch is in two updates of a
fragment, and every batch is reached as long as somebody lives.
"""

import heapq
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.common.process.config import RunSettings
from diloco.common.protocol import wire

# Of the ids of joins by which aggregators end lives that are silent.
EXPIRY = "expiry-"


class Sizes(NamedTuple):
    """The division of an epoch into shares; claims with another one than the run's are void."""

    shares: int
    batches: int


class Holding(NamedTuple):
    """Part of a learner's data: at its `position` it reads batch `first` of a share."""

    share: int
    first: int
    position: int


def end_of(sizes: Sizes, holding: Holding) -> int:
    """The position behind a holding's last batch."""
    return holding.position + sizes.batches - holding.first


def lost_batches(
    position: int, reached: Mapping[int | None, int], fragments: int
) -> tuple[int, ...]:
    """For each fragment, the number of batches before a position that are in none of its updates.

    Args:
        position: where a learner's data goes on.
        reached: batches that updates of each fragment reach; under None, those of other messages.
        fragments: of the run.
    """
    said = reached.get(None, 0)
    return tuple(position - max(said, reached.get(index, 0)) for index in range(fragments))


def sizes_of(claim: wire.Claim) -> Sizes:
    """The sizes by which a claim's sender divides an epoch."""
    return Sizes(claim.shares, claim.batches)


def declared_sizes(settings: RunSettings) -> Sizes | None:
    """The division of an epoch that the run's operator declares; None if there is none."""
    run = settings.run
    return Sizes(run.data_shares, run.share_batches) if run.data_shares else None


@dataclass
class _LearnerHoldings:
    """A learner's holdings; its next holding begins no earlier than at `least`.

    `ended`: the newest life whose end was said.
    """

    incarnation: int = 0
    ended: int = 0
    least: int = 0
    held: tuple[Holding, ...] = ()


@dataclass
class Holdings:
    """The shares of all learners, after the claims taken so far.

    Attributes:
        sizes: as declared, or as the first message says; None before it.
        partial: first free batch of each share that was given up before its end.
        unclaimed: every share from here on is free, but those in `ahead`.
    """

    sizes: Sizes | None = None
    partial: dict[int, int] = field(default_factory=dict)
    unclaimed: int = 0
    ahead: set[int] = field(default_factory=set)
    # Least first: those of `partial`, and some that were.
    _given_up: list[int] = field(default_factory=list)
    _learners: dict[str, _LearnerHoldings] = field(default_factory=dict)

    def take(self, claim: wire.Claim, seq: int) -> bool:
        """Take the tape's next claim, in the tape's order; returns whether it counts."""
        # A life is the sequence of a join. One that was not there yet nobody could ever end.
        if claim.incarnation >= seq:
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
        """A learner's holdings, oldest first."""
        return self._learners[learner].held if learner in self._learners else ()

    def is_over(self, learner: str, life: int) -> bool:
        """Whether a life can claim nothing more: it has ended, or a newer life is known."""
        known = self._learners.get(learner, _LearnerHoldings())
        return life < known.incarnation or life <= known.ended

    def newest_life(self, learner: str) -> int:
        """The newest life of a learner that has said anything; 0 for none."""
        return self._learners[learner].incarnation if learner in self._learners else 0

    def holders(self) -> tuple[str, ...]:
        """Names of the learners that hold something."""
        return tuple(name for name, one in self._learners.items() if one.held)

    def next_position(self, learner: str) -> int:
        """The earliest position at which a learner's next holding begins."""
        known = self._learners.get(learner, _LearnerHoldings())
        if self.sizes is None or not known.held:
            return known.least
        return end_of(self.sizes, known.held[-1])

    def choose(self, learner: str, sizes: Sizes) -> tuple[int, int]:
        """A free share and its first free batch, for a learner that asks.

        Those who ask at the same time are mostly given different ones.
        """
        free = list(self._free(sizes))
        return free[zlib.crc32(learner.encode()) % len(free)]

    def _free(self, sizes: Sizes) -> Iterator[tuple[int, int]]:
        """Free shares, and their first free batches, of the earliest epoch that has any."""
        epoch = self._earliest() // sizes.shares
        for share in range(epoch * sizes.shares, (epoch + 1) * sizes.shares):
            if share in self.partial:
                yield share, self.partial[share]
            elif share >= self.unclaimed and share not in self.ahead:
                yield share, 0

    def _earliest(self) -> int:
        """The first share that may be free: none before it is."""
        while self._given_up and self._given_up[0] not in self.partial:
            heapq.heappop(self._given_up)
        return min([self.unclaimed, *self._given_up[:1]])

    def _is_free(self, claim: wire.Claim) -> bool:
        # Not looked for among all that is free: a claim may say how many shares there are.
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
