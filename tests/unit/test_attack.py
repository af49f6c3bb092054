"""The search for attacks: its words say a lie whole, and a lie does what it says."""

import numpy as np
import pytest

from bench.attack import Fleet, Lie, drawn, effect, lie_of, said, search, varied

FLEET = Fleet(3, 1)


def test_words_say_a_lie_whole() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lie = varied(drawn(rng), rng)
        again = lie_of(said(lie))
        assert again.direction == lie.direction
        for name in set(Lie._fields) - {"direction"}:
            assert getattr(again, name) == pytest.approx(getattr(lie, name), rel=0.01), name
    assert lie_of(said(Lie())) == Lie()


@pytest.mark.long
def test_a_search_finds_nothing_less_than_the_worst_that_was_known() -> None:
    found, most = search(1, 30, "own", FLEET, "loss", 0)
    known = effect(0, 30, "own", FLEET, Lie(direction="drift", length=10.0)).loss
    assert most >= known > effect(0, 30, "own", FLEET, Lie()).loss
    assert effect(0, 30, "own", FLEET, found).loss == most


BOUNDS = pytest.mark.parametrize(("fleet", "most"), [(FLEET, 0.1), (Fleet(3, 2), 0.2)])
FAST = "pace=3 direction=drift length=10"


@pytest.mark.long
@BOUNDS
@pytest.mark.parametrize("lie", ["direction=drift length=1.5", FAST])
def test_where_learners_are_others_a_minority_of_liars_moves_the_loss_little(fleet, most, lie):
    found = effect(1, 300, "others", fleet, lie_of(lie))
    assert found.loss < most
    assert found.rate > -0.05


@pytest.mark.long
@BOUNDS
def test_where_learners_are_its_own_a_fast_liar_moves_the_loss_much(fleet, most):
    assert effect(1, 300, "own", fleet, lie_of(FAST)).loss > 100 * most
