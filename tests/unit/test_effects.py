"""Very many effects: kept as numbers, and judged as few are."""

import math

import pytest

from diloco.replay.blame_learners import Effect, Effects, judge


def effect(round_: int, learner: str, alone: float) -> Effect:
    return Effect(
        round_ % 2, 1 + round_ // 2, 10 + round_, 8 * round_, 1e9 + round_, learner, 7, round_, 1.5,
        0.25, 64.0, 1, 0.5, alone / 2, alone, 1.0, 0.5, 0.25,
    )  # fmt: skip


def test_an_effect_comes_back_as_it_was_added():
    added = [effect(0, "a", -1.0), effect(0, "b", 2.0), effect(1, "a", 0.5)]
    effects = Effects(Effect)
    for one in added:
        effects.append(one)
    assert [*effects] == added
    assert effects[-1] == added[-1]
    assert [*effects[1:]] == added[1:]
    assert type(effects[0].record_seq) is int
    assert effects.texts == ["a", "b"]
    assert effects.column("alone").tolist() == [-1.0, 2.0, 0.5]
    with pytest.raises(IndexError):
        effects[3]


def test_of_thousands_of_updates_the_bad_learner_is_named_with_its_first():
    """More than 1,029, beyond which ways to choose them are no floating-point number any more."""
    effects = Effects(Effect)
    for round_ in range(2500):
        bad = round_ >= 1500
        for learner in ("good", "well", "bad"):
            harm = 0.02 if bad and learner == "bad" else -0.01
            effects.append(effect(round_, learner, harm + 1e-3 * math.sin(round_ + len(learner))))
    worst, *others = judge(effects)
    assert (worst.learner, worst.word, worst.updates) == ("bad", "harmful", 2500)
    assert worst.since is not None
    assert worst.since.record_seq == 10 + 1500
    assert [one.word for one in others] == ["helpful", "helpful"]


@pytest.mark.parametrize(("did", "word"), [(-0.01, "helpful"), (0.01, "harmful")])
def test_who_helped_its_rounds_is_not_blamed_for_what_its_updates_do_alone(did, word):
    """Where steps are long an update alone may do harm, and be one that the average needs."""
    effects = Effects(Effect)
    for round_ in range(200):
        for learner in ("a", "b", "c"):
            one = effect(round_, learner, 0.05 if learner == "c" else 0.01 * math.sin(round_))
            effects.append(one._replace(did=did if learner == "c" else -0.01))
    assert {one.learner: one.word for one in judge(effects)}["c"] == word


def test_nobody_is_judged_where_nothing_was_merged():
    assert judge(Effects(Effect)) == []
