"""Increasing numbers in runs are the list that they stand for."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.increasing import Increasing


@given(st.sets(st.integers(-5, 60)), st.integers(-10, 70))
def test_they_are_the_list_that_they_stand_for(numbers, wanted):
    plain, found = sorted(numbers), Increasing()
    for number in plain:
        found.append(number)
    assert [*found] == plain
    assert len(found) == len(plain)
    assert [found[index] for index in range(len(plain))] == plain
    assert found[1:4] == plain[1:4]
    assert found.first_from(wanted) == bisect_left(plain, wanted)
    assert found.find(wanted) == (plain.index(wanted) if wanted in plain else None)


def test_one_beyond_the_end_is_none_of_them():
    found = Increasing()
    with pytest.raises(IndexError):
        found[0]
    found.append(7)
    assert found[-1] == 7
    with pytest.raises(IndexError):
        found[1]
