"""Losses of a run's moments, and where they rose."""

import math

from diloco.replay.score_and_bisect import Moment, Moments, Rise, Scored


def moment(at: int) -> Moment:
    return Moment(at % 2, at // 2, 10 + at, 6 * at, 100.5 + at, at % 3 == 0)


def scored(*losses: float | None) -> Scored:
    found = Scored(Moments(Moment, (moment(at) for at in range(len(losses)))))
    for at, loss in enumerate(losses):
        if loss is not None:
            found.put(at, loss)
    return found


def test_moments_are_what_they_were_given():
    every = Moments(Moment, (moment(at) for at in range(7)))
    assert [*every] == [moment(at) for at in range(7)]
    assert every[-1] == moment(6)
    assert [*every[1:5:2]] == [moment(1), moment(3)]
    assert every[3].stored is True
    assert every.column("stored").tolist() == [1, 0, 0, 1, 0, 0, 1]
    assert every.column("global_step").tolist() == [6 * at for at in range(7)]
    assert len(Moments(Moment)) == 0


def test_the_largest_rises_come_first_and_pass_over_what_has_no_loss():
    found = scored(3.0, None, 2.0, 2.5, 2.25, None, 3.25)
    assert found.rises(2) == [Rise(1.0, 4, 6), Rise(0.5, 2, 3)]
    assert found.rises(9)[-1] == Rise(-1.0, 0, 2)
    assert [(index, at.record_seq, loss) for index, at, loss in found.points()] == [
        (0, 10, 3.0), (2, 12, 2.0), (3, 13, 2.5), (4, 14, 2.25), (6, 16, 3.25),
    ]  # fmt: skip
    assert scored(1.0).rises(5) == []


def test_a_loss_that_becomes_no_number_is_the_greatest_rise():
    found = scored(2.0, 9.0, math.nan, math.nan, 1.0)
    assert found.rises(1) == [Rise(math.inf, 1, 2)]
    assert found.rises(2)[1] == Rise(7.0, 0, 1)
