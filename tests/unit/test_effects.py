"""Very many effects: kept as numbers, and judged as few are."""

import math

import pytest
from records import make_input, make_record

from diloco.replay import blame
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
    assert (worst.learner, worst.conclusion, worst.updates) == ("bad", "harmful", 2500)
    assert worst.since is not None
    assert worst.since.record_seq == 10 + 1500
    assert [one.conclusion for one in others] == ["helpful", "helpful"]


@pytest.mark.parametrize(("began", "word"), [(2.0, "harmful"), (5.5, "unclear"), (1e9, "unclear")])
@pytest.mark.parametrize("rounds", [8, 400])
def test_harm_that_is_little_beside_what_was_learnt_is_nobodys(began, word, rounds):
    """An update alone does 0.04, against a loss of 1. In many rounds it is much all the same.

    Learners say what the loss was at the beginning: ten times today's is believed.
    """
    word = "harmful" if rounds == 400 else word
    effects = Effects(Effect)
    for round_ in range(rounds):
        for learner in ("a", "b", "c"):
            alone = 0.04 if learner == "c" else 1e-3 * math.sin(round_)
            effects.append(effect(round_, learner, alone + 1e-3 * math.cos(round_)))
    assert {one.learner: one.conclusion for one in judge(effects, began=began)}["c"] == word


def test_who_comes_first_with_a_huge_loss_does_not_say_what_the_run_has_learnt():
    alone = make_record(inputs=(make_input(learner="liar", loss=1e9),))
    three = (("liar", 1e9), ("a", 2.3), ("b", 2.2))
    inputs = tuple(make_input(learner=name, loss=loss) for name, loss in three)
    later = tuple(make_input(learner=name, loss=0.1) for name in ("liar", "a", "b"))
    chain = [
        (1, alone),
        (2, alone),
        (3, make_record(inputs=inputs)),
        (4, make_record(inputs=later)),
    ]
    assert blame.first_loss({0: chain, 1: chain[:2]}) == 2.3


@pytest.mark.parametrize(("did", "word"), [(-0.01, "helpful"), (0.01, "harmful")])
def test_who_helped_its_rounds_is_not_blamed_for_what_its_updates_do_alone(did, word):
    """Where steps are long an update alone may do harm, and be one that the average needs."""
    effects = Effects(Effect)
    for round_ in range(200):
        for learner in ("a", "b", "c"):
            one = effect(round_, learner, 0.05 if learner == "c" else 0.01 * math.sin(round_))
            effects.append(one._replace(did=did if learner == "c" else -0.01))
    assert {one.learner: one.conclusion for one in judge(effects)}["c"] == word


@pytest.mark.parametrize(
    ("alone", "word"),
    [(-0.0005, "useless"), (-0.006, "helpful"), (0.004, "harmful"), (0.0002, "helpful")],
    ids=["of no use", "of less use", "in its way", "as all of them near the end"],
)
def test_who_is_of_no_use_and_who_does_harm(alone, word):
    effects = Effects(Effect)
    # Near the end an update of others does little, and one of it little harm.
    usual, did = (-0.0001, 1e-5) if 0 < alone < 0.001 else (-0.01, 4e-4)
    for round_ in range(48):
        for place, learner in enumerate(("a", "b", "c", "d")):
            scatter = usual * math.sin(5 * round_ + 3 * place) / 4
            one = effect(round_, learner, (alone if learner == "c" else usual) + scatter)
            effects.append(one._replace(did=did if learner == "c" else 0.0))
    assert {one.learner: one.conclusion.replace("unclear", "helpful") for one in judge(effects)} == {
        "a": "helpful", "b": "helpful", "c": word, "d": "helpful",
    }  # fmt: skip


@pytest.mark.parametrize(("scatter", "word"), [(0.01, "harmful"), (0.12, "unclear")])
def test_a_mean_is_held_against_the_scatter_of_its_own_updates(scatter, word):
    """One late update of an honest learner did more harm than all others of it did good."""
    effects = Effects(Effect)
    for round_ in range(24):
        for learner in ("a", "b", "c"):
            alone = 0.02 + scatter * math.sin(9 * round_) if learner == "c" else -0.01
            effects.append(effect(round_, learner, alone + 1e-3 * math.sin(round_)))
    assert {one.learner: one.conclusion for one in judge(effects)}["c"] == word


def by_slice(*learners, rounds=24, **harm):
    """Effects on all the data and on slices "common", "rare": each update alone, by learner."""
    tables = {name: Effects(Effect) for name in ("", "common", "rare")}
    for round_ in range(rounds):
        for place, learner in enumerate(learners):
            noise = 2e-3 * math.sin(7 * round_ + 3 * place)
            for name, table in tables.items():
                alone = harm.get(learner, {}).get(name, -0.01) + noise
                table.append(effect(round_, learner, alone))
    return tables[""], {name: table for name, table in tables.items() if name}


def test_who_turns_one_slice_is_named_with_it_where_all_the_data_tell_nothing():
    effects, slices = by_slice("a", "b", "c", "d", d={"rare": 0.04})
    assert {one.conclusion for one in judge(effects)} == {"helpful"}
    worst, *others = judge(effects, slices)
    assert (worst.learner, worst.conclusion, worst.slice) == ("d", "harmful", "rare")
    assert (worst.worse, worst.updates) == (24, 24)
    assert worst.since is not None
    assert {(one.conclusion, one.slice) for one in others} == {("helpful", "")}


def test_harm_to_all_the_data_is_told_as_such_unless_a_slice_has_most_of_it():
    effects, slices = by_slice("a", "b", "c", d={"": 0.02, "rare": 0.03, "common": 0.02})
    assert {one.slice for one in judge(effects, slices)} == {""}
    effects, slices = by_slice("a", "b", "c", "d", d={"": 0.01, "rare": 0.1})
    assert [one.slice for one in judge(effects, slices)] == ["rare", "", "", ""]


def test_who_alone_has_the_data_of_a_slice_is_uneven_and_not_accused():
    effects, slices = by_slice("a", "b", "c", "d", d={"rare": -0.05, "common": 0.02})
    (uneven,) = [one for one in judge(effects, slices) if one.slice]
    assert (uneven.learner, uneven.conclusion, uneven.slice) == ("d", "uneven", "common")


@pytest.mark.parametrize("others", [("a", "b"), ("a", "b", "c", "e", "f", "g", "h")])
def test_who_does_harm_where_most_do_is_not_accused(others):
    harm = {name: {"rare": 0.02} for name in others}
    effects, slices = by_slice(*others, "d", **harm, d={"rare": -0.08})
    assert {one.slice for one in judge(effects, slices)} == {""}


def test_nobody_is_judged_where_nothing_was_merged():
    assert judge(Effects(Effect)) == []
