"""Where the data of a learner's next life may go on, by what lives before it have said."""

from types import SimpleNamespace

from diloco.check.audit import _earlier_ends, _Reached


def ends(*said, lives=(10, 20, 30)):
    """Of messages (sequence, life, position), in order."""
    found = [
        (seq, SimpleNamespace(learner="a", incarnation=life, position=position))
        for seq, life, position in said
    ]
    history = SimpleNamespace(manifests=found, leaves=[])
    reached = _earlier_ends(history, [("a", life) for life in lives], {})
    return [reached["a", life] for life in lives]


def test_a_life_goes_on_behind_what_was_said_before_its_join():
    assert ends((11, 10, 24), (15, 10, 48), (21, 20, 72)) == [
        _Reached(0, 0), _Reached(48, 48), _Reached(72, 72),
    ]  # fmt: skip


def test_what_an_earlier_life_says_late_may_have_been_seen():
    # The first says 50 after the second's join, and before the second said anything.
    assert ends((11, 10, 48), (22, 10, 50), (23, 20, 74)) == [
        _Reached(0, 0), _Reached(48, 50), _Reached(74, 74),
    ]  # fmt: skip
    # Once the second has spoken its place is taken.
    assert ends((11, 10, 48), (22, 20, 72), (23, 10, 50)) == [
        _Reached(0, 0), _Reached(48, 48), _Reached(72, 72),
    ]  # fmt: skip
