"""Shares of the data in virtual time: whoever comes, goes, dies or is silent, no batch is read twice."""

import pytest
from simrun import simulate
from simshrink import explain
from simtrial import Trial

TROUBLE = ("crash", "pause", "partition", "lost_answer", "delay", "stale_read", "standby")


@pytest.mark.parametrize("others", [("membership",), ("membership", *TROUBLE)], ids=len)
def test_learners_that_leave_and_return_train_each_batch_once(others):
    granted = 0
    for seed in range(12):
        plan = Trial(seed=seed, minutes=1.0, learners=3, kinds=("shares", *others))
        outcome = simulate(plan)
        assert outcome.violation is None, explain(outcome)
        granted += outcome.injected["shares"]
    assert granted > 100


def test_the_shares_of_who_is_silent_go_to_others():
    expiries = 0
    for seed in range(100, 112):
        plan = Trial(seed=seed, minutes=1.0, learners=3, kinds=("shares", "crash", "crash_loop"))
        outcome = simulate(plan)
        assert outcome.violation is None, explain(outcome)
        expiries += outcome.injected["expiry"]
    assert expiries > 0
