"""Where the data of a learner's next life may go on, by what lives before it have said."""

from types import SimpleNamespace

import pytest

from diloco.check.audit import _earlier_ends, _goes_on, _Reached
from diloco.oracle.data import Data


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


def update(position, steps, base):
    return SimpleNamespace(
        learner="a", incarnation=1, fragment=0, position=position, steps=steps, base_version=base
    )


@pytest.mark.parametrize(
    ("kept", "base", "steps", "goes_on"),
    [
        (1.0, 4, 24, True),
        (1.0, 4, 23, False),
        (0.7, 4, 24, True),
        (0.7, 4, 16, True),  # ceil(0.3 x 24) = 8
        (0.7, 4, 15, False),
        (0.7, 4, 25, False),
        (0.7, 3, 23, False),  # No version came between the two.
        (0.0, 4, 1, True),
    ],
)
def test_a_blend_lets_go_of_no_more_than_its_share(kept, base, steps, goes_on):
    before, after = update(48, 24, 3), update(72, steps, base)
    assert _goes_on([], before, after, kept) == goes_on


@pytest.mark.parametrize(("merged", "most"), [(4, 56), (5, 48), (0, 48)])
def test_the_oracle_knows_which_version_has_the_update_before(merged, most):
    """A gap behind an update that was rejected, or is in a later version only, is none of a blend."""
    data = Data(SimpleNamespace(epoch=0), {}, (), 0.7)
    sent = SimpleNamespace(seq=1, position=48, base_version=3, merged_version=merged)
    assert data._bounds(update(72, 24, 4), sent, None) == (48, most)
