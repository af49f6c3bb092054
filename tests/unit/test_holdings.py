"""Shares of the data: whoever comes and goes, no batch is merged twice, and each is reached."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.common.process.config import parse_settings
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.data_share_allocation import (
    Holding,
    Holdings,
    Sizes,
    declared_sizes,
    end_of,
)
from diloco.common.storage.tape import first_sequence

SIZES = Sizes(3, 4)
# Where the tape is by then: behind all joins.
SEQ = 10**6


def word(learner: str, life: int, what: str, position: int = 0, share: int = 0, first: int = 0):
    return wire.Claim(
        run="r", learner=learner, incarnation=life, what=what, shares=SIZES.shares,
        batches=SIZES.batches, share=share, first=first, position=position, lost=(),
    )  # fmt: skip


def test_a_share_belongs_to_the_first_who_claims_it():
    held = Holdings()
    assert held.apply_claim(word("a", 1, "begin"), SEQ)
    assert held.apply_claim(word("b", 2, "begin"), SEQ)
    assert held.apply_claim(word("a", 1, "claim", share=1), SEQ)
    assert not held.apply_claim(word("b", 2, "claim", share=1), SEQ)
    # From its beginning only: who skips some would leave them to nobody.
    assert not held.apply_claim(word("b", 2, "claim", share=0, first=1), SEQ)
    assert held.apply_claim(word("b", 2, "claim", share=0), SEQ)
    # None of the next epoch before all of this one are given out.
    assert not held.apply_claim(word("a", 1, "claim", position=4, share=3), SEQ)
    assert held.apply_claim(word("a", 1, "claim", position=4, share=2), SEQ)
    assert held.apply_claim(word("a", 1, "claim", position=8, share=3), SEQ)
    assert held.of("a") == (Holding(1, 0, 0), Holding(2, 0, 4), Holding(3, 0, 8))
    assert held.holders() == ("a", "b")


def test_what_the_run_declares_no_first_claim_changes():
    run = {"name": "r", "steps": 1, "data_shares": SIZES.shares, "share_batches": SIZES.batches}
    held = Holdings(declared_sizes(parse_settings({"run": run})))
    lie = {"shares": 1 << 62, "batches": 1}
    assert not held.apply_claim(word("x", 1, "begin").model_copy(update=lie), SEQ)
    assert held.apply_claim(word("a", 1, "begin"), SEQ)
    assert held.apply_claim(word("a", 1, "claim", share=1), SEQ)
    del run["data_shares"], run["share_batches"]
    assert declared_sizes(parse_settings({"run": run})) is None
    with pytest.raises(ConfigError, match="say together"):
        parse_settings({"run": {**run, "data_shares": 3}})


def test_who_has_outlived_its_tape_moves_nothing_on_the_next():
    """Or the learner's next life would wait for the batches before that end for ever."""
    held = Holdings(SIZES)
    seq = first_sequence(1) + 20
    life = first_sequence(1) + 10
    assert not held.apply_claim(word("a", 9, "end", position=25), seq)
    assert held.apply_claim(word("a", life, "begin", position=4), seq + 1)
    assert held.next_position("a") == 0
    assert held.apply_claim(word("a", life, "claim", position=4), seq + 2)


def test_an_end_frees_what_lies_behind_its_position():
    held = Holdings()
    for learner, life in (("a", 1), ("b", 2)):
        held.apply_claim(word(learner, life, "begin"), SEQ)
    held.apply_claim(word("a", 1, "claim", share=0), SEQ)
    held.apply_claim(word("a", 1, "claim", position=4, share=1), SEQ)
    assert held.apply_claim(word("a", 1, "end", position=6), SEQ)
    assert held.of("a") == ()
    assert held.holders() == ()
    assert held.is_over("a", 1)
    assert held.next_position("a") == 6
    assert held.partial == {1: 2}
    assert not held.apply_claim(word("b", 2, "claim", share=1), SEQ)  # from its third batch only
    assert held.apply_claim(word("b", 2, "claim", share=1, first=2), SEQ)
    assert end_of(SIZES, held.of("b")[-1]) == 2
    # The share before it is at its end, and nobody's any more.
    assert not held.apply_claim(word("b", 2, "claim", position=2, share=0), SEQ)
    held.apply_claim(word("a", 7, "begin"), SEQ)
    assert not held.apply_claim(word("a", 7, "claim", position=5, share=2), SEQ)
    assert held.apply_claim(word("a", 7, "claim", position=6, share=2), SEQ)


def test_who_has_said_its_end_claims_nothing_more():
    """Its next life would wait for ever: it begins before what was claimed behind the end."""
    held = Holdings()
    held.apply_claim(word("a", 1, "begin"), SEQ)
    held.apply_claim(word("a", 1, "claim", share=0), SEQ)
    assert not held.is_over("a", 1)
    held.apply_claim(word("a", 1, "end", position=2), SEQ)
    assert held.is_over("a", 1)
    assert not held.apply_claim(word("a", 1, "claim", position=4, share=0, first=2), SEQ)
    assert not held.is_over("a", 7)
    held.apply_claim(word("a", 7, "begin"), SEQ)
    assert held.apply_claim(word("a", 7, "claim", position=2, share=0, first=2), SEQ)
    assert held.of("a") == (Holding(0, 2, 2),)


def test_a_share_that_is_given_up_twice_goes_on_where_the_second_one_ended():
    held = Holdings()
    for learner, life, first in (("a", 1, 0), ("b", 2, 1)):
        held.apply_claim(word(learner, life, "begin"), SEQ)
        assert held.apply_claim(
            word(learner, life, "claim", position=10, share=0, first=first), SEQ
        )
        held.apply_claim(word(learner, life, "end", position=11), SEQ)
    assert held.partial == {0: 2}


def test_words_of_an_earlier_life_are_void():
    held = Holdings()
    held.apply_claim(word("a", 1, "begin"), SEQ)
    held.apply_claim(word("a", 1, "claim", share=0), SEQ)
    assert not held.apply_claim(word("a", 7, "claim", position=4, share=1), SEQ)  # it has not begun
    assert held.apply_claim(word("a", 7, "begin"), SEQ)
    assert not held.apply_claim(word("a", 1, "end", position=1), SEQ)
    assert not held.apply_claim(word("a", 1, "claim", position=4, share=1), SEQ)
    assert held.of("a") == (Holding(0, 0, 0),)
    assert held.apply_claim(word("a", 7, "claim", position=4, share=1), SEQ)


def test_who_divides_an_epoch_otherwise_is_given_nothing():
    held = Holdings()
    held.apply_claim(word("a", 1, "begin"), SEQ)
    other = word("b", 2, "begin").model_copy(update={"batches": 5})
    assert not held.apply_claim(other, SEQ)
    assert held.sizes == SIZES


def test_a_life_that_could_not_have_begun_yet_has_no_word():
    held = Holdings()
    assert not held.apply_claim(word("liar", 10, "begin").model_copy(update={"batches": 5}), 10)
    assert held.sizes is None
    assert held.apply_claim(word("a", 9, "begin"), 10)
    assert not held.apply_claim(word("a", (1 << 63) - 1, "begin"), 11)
    assert held.apply_claim(word("a", 9, "claim"), 12)
    # An aggregator that ends a life may do so by a join behind its last word.
    assert held.apply_claim(word("a", 13, "end"), 14)
    assert held.of("a") == ()


def test_a_claim_is_judged_at_once_however_many_shares_its_sender_says_there_are():
    held = Holdings()
    many = {"shares": 1 << 62, "batches": 1}
    assert held.apply_claim(word("a", 1, "begin").model_copy(update=many), SEQ)
    for share in (1 << 62, (1 << 63) - 1):
        assert not held.apply_claim(word("a", 1, "claim", share=share).model_copy(update=many), SEQ)
    last = word("a", 1, "claim", share=(1 << 62) - 1).model_copy(update=many)
    assert held.apply_claim(last, SEQ)
    assert not held.apply_claim(last.model_copy(update={"position": 1}), SEQ)


class Fleet:
    """Learners that claim, train, announce, crash, are expired and come back, on one tape."""

    def __init__(self) -> None:
        self.held = Holdings()
        self.seq = 0
        # Of the newest life of each: its number, where it trains, what it has announced.
        self.lives: dict[str, tuple[int, int]] = {}
        self.announced: dict[str, int] = Counter()
        self.merged: Counter[tuple[int, int]] = Counter()

    def put(self, learner: str, what: str, life: int, position: int, choice=(0, 0)) -> bool:
        self.seq += 1
        return self.held.apply_claim(word(learner, life, what, position, *choice), SEQ)

    def join(self, learner: str) -> None:
        """Also of one that has crashed, or that another process supersedes."""
        self.seq += 1
        self.lives[learner] = (self.seq, self.announced[learner])
        self.put(learner, "begin", self.seq, 0)

    def train(self, learner: str, batches: int, *, announce: bool) -> None:
        if learner not in self.lives:
            return
        life, position = self.lives[learner]
        for _ in range(batches):
            if position >= self.held.next_position(learner) or not self.held.of(learner):
                at = max(position, self.held.next_position(learner))
                assert self.put(learner, "claim", life, at, self.held.choose(learner, SIZES))
            position += 1
        self.lives[learner] = (life, position)
        if announce:
            self._announce(learner, position)

    def _announce(self, learner: str, position: int) -> None:
        """An update with all since the last one; it is merged."""
        for at in range(self.announced[learner], position):
            for share, first, begin in self.held.of(learner):
                if begin <= at < end_of(SIZES, Holding(share, first, begin)):
                    self.merged[share, first + at - begin] += 1
        self.announced[learner] = position

    def claim(self, learner: str) -> None:
        """One more, ahead of what it reads."""
        if learner in self.lives:
            life, position = self.lives[learner]
            at = max(position, self.held.next_position(learner))
            assert self.put(learner, "claim", life, at, self.held.choose(learner, SIZES))

    def grab(self, learner: str, share: int) -> None:
        """Whatever it is: it has not read what others claimed before."""
        if learner in self.lives:
            life, position = self.lives[learner]
            at = max(position, self.held.next_position(learner))
            self.put(learner, "claim", life, at, (share, 0))

    def leave(self, learner: str) -> None:
        if learner in self.lives:
            life, position = self.lives.pop(learner)
            self._announce(learner, position)
            self.put(learner, "end", life, position)

    def crash(self, learner: str) -> None:
        self.lives.pop(learner, None)

    def expire(self, learner: str) -> None:
        """An aggregator ends its life, though the process may live and train on."""
        self.lives.pop(learner, None)
        self.seq += 1
        self.put(learner, "end", self.seq, self.announced[learner])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "claim", "grab", "train", "send", "leave", "crash", "expire"]),
        st.sampled_from("abcd"),
        st.integers(1, 9),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(STEPS)
def test_no_batch_is_merged_twice_and_each_is_reached_while_somebody_lives(steps):
    fleet = Fleet()
    for what, learner, batches in steps:
        if what in ("train", "send"):
            fleet.train(learner, batches, announce=what == "send")
        elif what == "grab":
            fleet.grab(learner, batches)
        else:
            getattr(fleet, what)(learner)
    assert set(fleet.merged.values()) <= {1}
    # All end; one comes, and takes on whatever is left of every epoch that was begun.
    for learner in "abcd":
        fleet.expire(learner)
    last = max((share for share, _ in fleet.merged), default=0)
    fleet.join("e")
    every = (last // SIZES.shares + 1) * SIZES.shares * SIZES.batches
    fleet.train("e", every + SIZES.batches, announce=True)
    assert set(fleet.merged.values()) == {1}
    expected = {(n // SIZES.batches, n % SIZES.batches) for n in range(every)}
    assert expected <= set(fleet.merged)
