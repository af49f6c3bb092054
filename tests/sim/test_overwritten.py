"""Tapes are sound also if versions overwrite learners' parameters, or are blended with them."""

import pytest
from simlearner import SimLearner
from simrun import simulate
from simtensors import Light
from simtrial import KINDS, Trial
from test_decided_again import history_of
from test_run_in_virtual_time import finished, make_world, run_fleet

from diloco.judge.audit import audit
from diloco.replay.decide import decide


@pytest.mark.parametrize("adopt", ["state", "overwrite", "blend"])
def test_steps_that_are_let_go_are_no_gap(adopt):
    sync = {"fragments": 2} if adopt == "state" else {"fragments": 2, "adopt": adopt}
    world = make_world(tensors=Light(32), averaged=adopt == "state", sync=sync)
    # Of unequal speeds, so that versions come between a learner's updates.
    learners = [SimLearner(world, index, step_s=0.7 + 0.4 * index) for index in range(3)]
    world.run(lambda: run_fleet(world, learners))
    assert finished(world)["let_go"] > 0
    history = history_of(world)
    assert audit(history).breaches == []
    for fragment, chain in history.records.items():
        assert {one.outcome for one in decide(history, fragment, chain)} <= {"same", "unknown"}


@pytest.mark.parametrize("seed", [11, 13, 30])
def test_what_a_verdict_rejects_is_sent_once(seed):
    """The tensors are ledgers, which show the steps that each update covers."""
    trial = Trial(seed=seed, minutes=1.0, dense=True, kinds=(*KINDS, "overwrite"))
    assert trial.has("overwrite")
    outcome = simulate(trial)
    assert outcome.violation is None
    assert outcome.fates["rejected"] > 0


def test_averaged_state_of_many_takes_no_longer_step_where_learners_may_lie():
    """Trained fragments do (docs/adr/0081-a-mean-of-many-takes-a-longer-step.md)."""
    trial = Trial(seed=7, minutes=0.5, learners=8, kinds=("numbers", "averaged"))
    outcome = simulate(trial)
    assert outcome.violation is None  # `simaveraged.check_mean` holds the rate of each record
    assert outcome.world.settings.robust
    assert outcome.world.layout.fragments[1].averaged
    rates = [
        [record.learning_rate for _, record in chain if len(record.inputs) > 5]
        for _, chain in sorted(history_of(outcome.world).records.items())
    ]
    assert max(rates[0]) > outcome.world.settings.outer.learning_rate
    assert set(rates[1]) == {1.0}
