"""The checker of the data's shares: counts the batches that learners really trained.

Learners report the batch and the share of each step to the checker, since messages do not state
them. From the steps follow the batches that each update covers, and how far each share is read. Two
rules are checked:

- no batch is in two merged updates of a fragment;
- no batch is skipped: a learner trains a batch only if all earlier ones of its share were trained,
  and leaves a share only at its end; the position at which an incarnation ends by its messages is
  exactly the position after its last step.

The oracle checks that free shares are granted, and to whom.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from simaveraged import Life
from simchain import UpdateId, hold
from simtensors import Covers

from diloco.common.protocol import wire
from diloco.common.storage.data_share_allocation import EXPIRY, Holding, Sizes
from diloco.common.storage.tape import same_tape

Batch = tuple[int, int]


class _Said(NamedTuple):
    """A data position that a learner has announced for `fragments`; None: for all fragments.

    `left` tells that a leave for some fragments announced it.
    """

    seq: int
    position: int
    fragments: Collection[int] | None = None
    left: bool = False


class Batches:
    """Checks the batches of one tape.

    Args:
        sizes: the sizes of epoch and shares; None: the data has no shares.
        fragments: the run's number of fragments.
        earlier: each learner's data position at the tape's beginning.
        injected: counts events by kind.
    """

    def __init__(
        self,
        sizes: Sizes | None,
        fragments: int,
        earlier: Mapping[str, int],
        injected: Mapping[str, int],
    ) -> None:
        self._sizes = sizes
        self._fragments = range(fragments)
        self._injected = injected
        # By life: the batch trained at each position, and the position at which it ended in order.
        self._trained: defaultdict[tuple[str, int], dict[int, Batch]] = defaultdict(dict)
        self._left: dict[tuple[str, int], int] = {}
        # The first batch of each share that nobody has trained.
        self._reached: defaultdict[int, int] = defaultdict(int)
        self._merged: defaultdict[int, dict[Batch, UpdateId]] = defaultdict(dict)
        self._said: defaultdict[str, list[_Said]] = defaultdict(list)
        self._trimmed: defaultdict[str, int] = defaultdict(int)
        for learner, position in earlier.items():
            self._said[learner].append(_Said(0, position))
        # Lives that go on with what the life before had not sent.
        self._going_on: set[tuple[str, int]] = set()
        # Where lives go on whose life before ended in order, which freed its share.
        self._freed: set[tuple[str, int, int]] = set()
        self._newest: dict[str, int] = {}
        # By life, and of the life before each, the fragments whose modules it does not hold.
        self._lacks: dict[tuple[str, int], Collection[int]] = {}
        self._lacked: dict[tuple[str, int], Collection[int]] = {}
        self._expiries: set[int] = set()
        # Of each learner, the ends of its claims that count; and the newest life with any claim.
        self._ends: defaultdict[str, list[_Said]] = defaultdict(list)
        self._claims: dict[str, int] = {}

    # Learners

    def begin(self, life: Life, position: int, before: int) -> None:
        """Checks where a life's data begins: after all that its learner has announced in time.

        A life that goes on with the unsent work of the one `before` begins where that work ends,
        which is no further than that life has trained.
        """
        said = self._before(life.learner, life.incarnation)
        ends = [one for one in self._ends[life.learner] if one.seq < life.incarnation]
        expected = max((one.position for one in (*said, *ends)), default=0)
        # It may have read ends of a process that is still there.
        late = [one.position for one in self._ends[life.learner] if one.position > expected]
        what = f"begins at {position}, its learner's work ends at {expected}"
        about = f"{life.learner} {life.incarnation}"
        if not before:
            # Or what a newer life has said, while it waited for the answer to its own join.
            superseded = position > expected and self._newest[life.learner] > life.incarnation
            hold(superseded or position in (expected, *late), "batches", about, what)
            return
        hold(position >= expected, "batches", about, what)
        self._going_on.add((life.learner, life.incarnation))
        if self._sizes is not None:
            trained = self._trained[life.learner, before]
            last = max(trained, default=-1)
            hold(position <= last + 1, "batches", about, f"begins at {position}, it had {last}")
            ours = {at: batch for at, batch in trained.items() if at < position}
            self._trained[life.learner, life.incarnation] = ours
            if (life.learner, before) in self._left:
                self._freed.add((life.learner, life.incarnation, position))

    def train(self, life: Life, position: int, holding: Holding) -> None:
        """Checks the batch, at this data position, on which a life begins a step."""
        assert self._sizes is not None
        about = f"{life.learner} {life.incarnation}"
        share, number = holding.share, holding.first + position - holding.position
        hold(0 <= number < self._sizes.batches, "batches", about, f"batch {number} of {holding}")
        ended = (life.learner, life.incarnation) in self._left
        hold(not ended, "batches", about, f"trains batch {number} of {holding} behind its end")
        known = self._trained[life.learner, life.incarnation]
        before = known.get(position - 1)
        freed = (life.learner, life.incarnation, position) in self._freed
        if before is not None and before[0] != share and not freed:
            unread = self._reached[before[0]] < self._sizes.batches
            hold(not unread, "batches", about, f"leaves share {before[0]} behind batch {before[1]}")
        skipped = number > self._reached[share]
        what = f"trains batch {number} of share {share}, nobody has batch {self._reached[share]}"
        hold(not skipped, "batches", about, what)
        self._reached[share] = max(self._reached[share], number + 1)
        known[position] = (share, number)

    def leave(self, life: Life, position: int) -> None:
        """Note that a life ends in order at this data position."""
        self._left[life.learner, life.incarnation] = position

    # The tape

    def join(self, learner: str, seq: int, msg_id: str, lacks: Collection[int] = ()) -> None:
        """Note a join: a learner's own, or one by which an aggregator ends a silent life.

        `lacks` are the fragments whose modules the life does not hold.
        """
        before = (learner, self._newest.get(learner, 0))
        self._lacks[learner, seq] = lacks
        self._lacked[learner, seq] = self._lacks.get(before, ())
        self._newest[learner] = seq
        if msg_id.startswith(EXPIRY):
            self._expiries.add(seq)

    def announce(self, update: UpdateId, fragment: int, covers: Covers, seq: int) -> None:
        """Note the first announcement of an honest update."""
        self._say(update.learner, update.incarnation, _Said(seq, covers.stop, {fragment}))

    def leave_said(self, word: wire.Leave, seq: int) -> None:
        """Checks and notes a leave, of a whole life or for some fragments."""
        if word.incarnation in self._expiries:
            self._check_end(word.learner, word.incarnation, word.position)
        said = _Said(seq, word.position, word.fragments or None, left=bool(word.fragments))
        self._say(word.learner, word.incarnation, said)

    def trim_leaves(self, learner: str, below_seq: int) -> None:
        """Note that a learner's leaves below a sequence are about to be removed; the last stays."""
        self._trimmed[learner] = max(below_seq, self._trimmed[learner])

    def _say(self, learner: str, incarnation: int, said: _Said) -> None:
        # Updates of superseded lives are rejected: their batches must be trained again.
        if incarnation == self._newest.get(learner):
            self._said[learner].append(said)

    def claim(self, word: wire.Claim, seq: int) -> None:
        """Checks the position of an end, and the number of lost batches that a message states."""
        if word.what == "claim" or not same_tape(word.incarnation, seq):
            return
        if word.incarnation >= self._claims.get(word.learner, 0):
            self._claims[word.learner] = word.incarnation
            if word.what == "end":
                self._ends[word.learner].append(_Said(seq, word.position, ()))
        if word.what == "end":
            self._injected["expiry"] += word.incarnation in self._expiries
            self._check_end(word.learner, word.incarnation, word.position)
        elif word.incarnation != self._newest.get(word.learner):
            return  # An aggregator has ended the life: its end says what is lost, and this is void.
        if word.incarnation < self._claims[word.learner]:
            return  # An end that came too late is void, and collection goes on meanwhile.
        orderly = word.what == "end" and word.incarnation not in self._expiries
        lost = [(0, 0) if orderly else self._lost(word, at) for at in self._fragments]
        self._injected["work_lost"] += any(least for least, _ in lost)
        about, told = f"{word.learner} {word.incarnation}", word.lost or (0,) * len(lost)
        # Who goes on has lost nothing, except where versions overwrite or roll back.
        goes_on = (word.learner, word.incarnation) in self._going_on
        right = all(
            (0 if goes_on else least) <= one <= most
            for one, (least, most) in zip(told, lost, strict=True)
        )
        hold(right, "batches", about, f"{word.what} says lost {told}, not {lost}")

    def _lost(self, word: wire.Claim, fragment: int) -> tuple[int, int]:
        """Returns how many batches before a life's position are in no update of a fragment.

        The most is without leaves for some fragments that collection has removed.
        """
        if fragment in self._lacked.get((word.learner, word.incarnation), ()):
            return 0, 0  # The life before did not train it.
        said = self._before(word.learner, word.incarnation)
        mine = [one for one in said if one.fragments is None or fragment in one.fragments]
        below_seq = self._trimmed[word.learner]
        left = [one for one in mine if not (one.left and one.seq < below_seq)]
        least, most = (
            word.position - max((one.position for one in ones), default=0) for ones in (mine, left)
        )
        return least, most

    def _before(self, learner: str, incarnation: int) -> list[_Said]:
        return [one for one in self._said[learner] if one.seq < incarnation]

    def _check_end(self, learner: str, incarnation: int, position: int) -> None:
        if incarnation in self._expiries:
            said = self._before(learner, incarnation)
            expected = max((one.position for one in said), default=0)
        else:
            expected = self._left.get((learner, incarnation), -1)
        what = f"ends at {position}, its work at {expected}"
        hold(position == expected, "batches", f"{learner} {incarnation}", what)

    def merge(self, fragment: int, update: UpdateId, covers: Covers) -> None:
        """Checks that the batches of a merged update are in no other merged update."""
        if self._sizes is None:
            return
        trained = self._trained[update.learner, update.incarnation]
        merged = self._merged[fragment]
        for position in range(covers.start, covers.stop):
            batch = trained[position]
            twice = merged.get(batch)
            hold(twice is None, "batches", update, f"{batch} of {position} is in {twice} as well")
            merged[batch] = update
