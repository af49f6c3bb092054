"""Many seeds of faults of every kind, and none breaks an invariant."""

import gc
from collections import Counter

import pytest
from simrun import simulate
from simshrink import explain, shrink
from simtrial import FULL, KINDS, WORLDS, Trial, settings

SEEDS = 45
# The kinds of the seeds that were found before learners made snapshots: other kinds, other faults.
NOT_CARRIED = tuple(kind for kind in FULL if kind != "carried")
# Of full worlds; `make sim FULL=1` has the rest.
FULL_SEEDS = 12
# The default suite has so many of each, which meet every fault.
FEW, FEW_FULL = 20, 6


@pytest.mark.parametrize(
    "seeds", [range(FEW), pytest.param(range(FEW, SEEDS), marks=pytest.mark.long)], ids=repr
)
def test_no_seed_breaks_an_invariant(seeds):
    fates: Counter[str] = Counter()
    injected: Counter[str] = Counter()
    for seed in seeds:
        outcome = simulate(Trial(seed=seed))
        if outcome.violation is not None:
            pytest.fail(explain(shrink(outcome)))
        fates.update(outcome.fates)
        injected.update(outcome.injected)
    resolved = fates["merged"] + fates["rejected"]
    assert fates["sent"] == resolved + fates["in_flight"] + fates["abandoned"]
    assert fates["merged"] > 50 * len(seeds)
    assert fates["rejected"] > 0
    assert min(injected[kind] for kind in KINDS) > 0


@pytest.mark.parametrize(
    "seeds",
    [range(FEW_FULL), pytest.param(range(FEW_FULL, FULL_SEEDS), marks=pytest.mark.long)],
    ids=repr,
)
def test_nor_does_one_of_a_full_world(seeds):
    injected: Counter[str] = Counter()
    for seed in seeds:
        outcome = simulate(Trial(seed=seed, kinds=FULL))
        if outcome.violation is not None:
            pytest.fail(explain(shrink(outcome)))
        injected.update(outcome.injected)
    assert sum(injected[kind] > 0 for kind in WORLDS) > len(WORLDS) / 2


def test_a_seed_means_the_same_each_time():
    """A seed gives one run; readers were once woken in the order of their addresses."""
    outcomes = [simulate(Trial(seed=909, minutes=1.0, learners=3, kinds=FULL)) for _ in range(4)]
    first, *others = [(one.events, dict(one.injected), dict(one.fates)) for one in outcomes]
    assert others == 3 * [first]


def test_nor_with_the_production_arithmetic():
    for seed in range(SEEDS, SEEDS + 3):
        outcome = simulate(Trial(seed=seed, minutes=1.0, dense=True))
        assert outcome.violation is None
        assert outcome.fates["merged"] > 20


@pytest.mark.long
def test_nor_with_more_fragments_than_steps_in_an_interval():
    for seed in range(900, 904):
        plan = Trial(seed=seed, minutes=1.0, fragments=14)
        assert settings(plan)["sync"]["interval_steps"] < plan.fragments
        outcome = simulate(plan)
        if outcome.violation is not None:
            pytest.fail(explain(shrink(outcome)))
        assert outcome.fates["merged"] > 50


def test_an_operator_who_was_killed_between_two_words_comes_back_and_lets_learners_in():
    """Every learner is shut out, and the command that would let them in is killed."""
    kinds = ("commands", "crash_at_effect")
    outcome = simulate(Trial(seed=940019, minutes=1.0, learners=3, kinds=kinds))
    assert outcome.injected["commands"] > 0
    assert outcome.violation is None, explain(outcome)


def test_an_update_over_the_allowance_that_is_read_after_a_recovery_is_of_its_own_life():
    """Its learner has joined again meanwhile: time and speed are the newer life's."""
    outcome = simulate(Trial(seed=7073, minutes=1.0, learners=3, kinds=NOT_CARRIED))
    assert outcome.violation is None


@pytest.mark.parametrize("seed", [230028, 231210, 231369])
def test_a_trimmed_tape_breaks_no_rule(seed):
    """An oracle that begins there did not know what was merged, dropped or heard before it."""
    outcome = simulate(Trial(seed=seed, minutes=1.0, learners=3, kinds=NOT_CARRIED))
    assert outcome.violation is None, explain(outcome)


def test_of_a_life_whose_first_messages_are_trimmed_an_update_may_come_out_of_turn():
    """A liar's, while the update before it had no verdict: it may be left behind."""
    outcome = simulate(Trial(seed=300111, minutes=1.0, learners=3, kinds=FULL))
    assert outcome.injected["hostile"] > 0
    assert outcome.violation is None, explain(outcome)


def test_the_update_at_whose_end_unsent_work_begins_may_be_trimmed():
    kinds = ("carried", "membership", "crash_loop", "standby")
    outcome = simulate(Trial(seed=741, minutes=1.5, learners=3, kinds=kinds))
    assert outcome.injected["carried"] > 0
    assert outcome.violation is None, explain(outcome)


def test_a_seed_leaves_the_garbage_collector_on_or_off_as_it_was():
    """A process of seeds alone has it off: it looked through each whole world once more."""
    plan = Trial(seed=0, minutes=0.2)
    try:
        gc.disable()
        simulate(plan)
        assert not gc.isenabled()
    finally:
        gc.enable()
    simulate(plan)
    assert gc.isenabled()


def test_a_seed_repeats_itself():
    def story(seed):
        outcome = simulate(Trial(seed=seed))
        return outcome.world.digests(), outcome.fates, outcome.injected, outcome.simulated_s

    assert story(7) == story(7)
    assert story(7) != story(8)


def test_a_formation_whose_process_was_given_up_is_over():
    """Its host led alone since, and waited for it for ever."""
    assert simulate(Trial(seed=96, kinds=("slices",))).violation is None
