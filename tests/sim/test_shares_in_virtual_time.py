"""Shares of the data in virtual time: though learners come, go or die, no batch is read twice."""

import asyncio

import pytest
import simlearner
from simrun import simulate
from simshrink import explain
from simtrial import Trial

from diloco.common.protocol import names, wire
from diloco.learner.leading_host import say_end

TROUBLE = ("crash", "pause", "partition", "lost_answer", "delay", "stale_read", "standby")


@pytest.mark.long
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


def test_who_has_said_its_end_says_nothing_behind_it(monkeypatch):
    """A learner publishes no claim after its end, even if its process still runs."""

    async def end_and_stay(*arguments, **named):
        await say_end(*arguments, **named)
        await asyncio.sleep(2.0)

    monkeypatch.setattr(simlearner, "say_end", end_and_stay)
    plans = (Trial(seed=seed, minutes=1.0, learners=3, kinds=("shares",)) for seed in range(9))
    outcome = simulate(next(plan for plan in plans if plan.has("shares")))
    world = outcome.world
    assert outcome.violation is None
    for learner in range(3):
        claims = world.messages(wire.Claim, names.claim(world.run_name, f"learner-{learner}"))
        assert [word.what for _, word in claims].index("end") == len(claims) - 1
        # Who dies between both has given up nothing yet, and goes on where it has left.
        *_, (left, _) = world.messages(
            wire.Leave, names.leave(world.run_name, f"learner-{learner}")
        )
        assert left < claims[-1][0]
