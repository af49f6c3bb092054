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
    found, most = search(1, 30, "rda", FLEET, "loss", 0)
    known = effect(0, 30, "rda", FLEET, Lie(direction="drift", length=10.0)).loss
    assert most >= known > effect(0, 30, "rda", FLEET, Lie()).loss
    assert effect(0, 30, "rda", FLEET, found).loss == most
