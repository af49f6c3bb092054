"""Learners that are far from the fleet are told of, and nobody else is."""

import pytest
import spoiled
from records import make_input, make_record

from diloco.check import directions, fleet
from diloco.cli.opening import Place, open_run, use_place
from diloco.projections.history import read_history
from diloco.projections.learners import read_learners


def rounds(**of_c):
    """Rounds of three learners, of whom c is as it is said to be."""
    return [
        make_record(
            version=version,
            inputs=tuple(
                make_input(
                    learner=name, loss=0.05 + 0.001 * version, norm=1.0 + 0.1 * (version % 2)
                )
                if name != "c"
                else make_input(learner=name, **({"loss": 0.05, "norm": 1.1} | of_c))
                for name in "abc"
            ),
        )
        for version in range(1, 17)
    ]


def test_a_fleet_of_equals_has_no_strangers():
    assert [*fleet.strangers(rounds())] == []


@pytest.mark.parametrize(
    ("of_c", "sentence"),
    [
        ({"loss": 14.5}, "its loss is 14.5, the others' in the same rounds 0.05"),
        ({"norm": 50.0}, "times as long as the others'"),
        ({"norm": 0.01}, "times as long as the others'"),
    ],
)
def test_who_is_far_from_the_others_is_told_of(of_c, sentence):
    (found,) = fleet.strangers(rounds(**of_c))
    assert (found.about, found.severity) == ("learner c", "warning")
    assert sentence in found.sentence


def test_updates_that_point_elsewhere_are_told_of(tmp_path, run_async):
    run = spoiled.make_run(tmp_path, "noise", versions=5)

    async def look():
        async with open_run(str(run.tape), reads=True) as opened:
            history = await read_history(opened.context)
            return [*directions.strangers(history)], await read_learners(opened.context)

    use_place(Place(None, str(run.store)))
    try:
        found, learners = run_async(look())
    finally:
        use_place(Place())
    assert [one.about for one in found] == [f"learner {spoiled.CULPRIT}"]
    assert "point elsewhere" in found[0].sentence
    assert all(one.loss is not None and 0.5 < one.norms < 2 for one in learners)
