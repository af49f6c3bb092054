"""The oracle's findings on merged batches, by claims of any size."""

from types import SimpleNamespace

import pytest
from machinelab import lab_rules, make_manifest

from diloco.common.process.config import RunSection
from diloco.common.protocol import wire
from diloco.judge.oracle.shares import Shares

HUGE = 1 << 62


def claim(seq, what="claim", share=0, first=0, position=0, batches=10):
    body = wire.Claim(
        run="lab", learner="a", incarnation=4, what=what, share=share, first=first,
        position=position, shares=2, batches=batches, lost=(),
    )  # fmt: skip
    return seq, body


def update(seq, number, steps, position):
    return seq, make_manifest(
        lab_rules(), "a", 4, number, fragment=0, steps=steps, position=position
    )


def record(*numbers):
    inputs = [SimpleNamespace(learner="a", incarnation=4, seq=number) for number in numbers]
    return 99, SimpleNamespace(fragment=0, inputs=inputs)


def findings(*story, shares=None):
    shares = shares or Shares()
    found = []
    for seq, body in story:
        heard = shares.take if not isinstance(body, SimpleNamespace) else shares.resolve
        found += [(one.field, one.expected, one.found) for one in heard(body, seq)]
    return shares, found


BEGUN = claim(5, what="begin"), claim(6)


def test_batches_that_follow_each_other_are_merged_once() -> None:
    story = (*BEGUN, update(7, 1, 4, 4), update(8, 2, 6, 10), record(1), record(2))
    shares, found = findings(*story)
    assert found == []
    assert shares.merged(0) == [(0, 0, 10)]
    assert shares.merged(1) == []


@pytest.mark.parametrize(("steps", "position"), [(2, 3), (6, 6), (1, 4), (4, 4)])
def test_batches_that_are_merged_again_are_named(steps, position) -> None:
    story = (*BEGUN, update(7, 1, 4, 4), update(8, 2, steps, position), record(1), record(2))
    assert findings(*story)[1] == [("", "each batch once", (0, 0, 4))]


def test_an_update_of_batches_that_nobody_was_given_is_named() -> None:
    assert findings(*BEGUN, update(7, 1, 4, 12))[1] == [("steps", 2, 4)]


@pytest.mark.parametrize(("steps", "expected"), [(4, []), (5, [("steps", 4, 5)])])
def test_what_an_ended_life_had_trained_may_be_sent_behind_its_end(steps, expected) -> None:
    """By the next life, which goes on with its unsent work; the rest of the share is others'."""
    story = (*BEGUN, claim(7, what="end", position=4), update(8, 1, steps, steps))
    assert findings(*story)[1] == expected


def test_what_the_run_declares_no_first_claim_changes() -> None:
    run = RunSection(name="lab", steps=1, data_shares=2, share_batches=10)
    begun = claim(5, what="begin", batches=HUGE), claim(6, what="begin"), claim(7)
    story = (*begun, update(8, 1, 4, 4), record(1))
    shares, found = findings(*story, shares=Shares(run))
    assert (shares.merged(0), found) == ([(0, 0, 4)], [])
    assert findings(*story)[0].merged(0) == []


def test_claims_and_updates_of_any_size_cost_no_more_than_small_ones() -> None:
    begun = claim(5, what="begin", batches=HUGE), claim(6, batches=HUGE)
    shares, found = findings(*begun, update(7, 1, HUGE, HUGE), record(1))
    assert found == []
    assert shares.merged(0) == [(0, 0, HUGE)]
