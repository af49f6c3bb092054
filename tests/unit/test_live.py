"""What those keep who follow a run as it goes on."""

from types import SimpleNamespace

import pytest

from diloco.projections.live import LEAST_RECENT, RECENT, RECENT_INPUTS, newest


@pytest.mark.parametrize(
    ("learners", "kept"), [(0, RECENT), (3, RECENT), (100, 40), (1000, 4), (5000, LEAST_RECENT)]
)
def test_rounds_are_kept_by_what_they_hold(learners: int, kept: int) -> None:
    records = [SimpleNamespace(version=n, inputs=(None,) * learners) for n in range(100)]
    assert [one.version for one in newest(records)] == [*range(100 - kept, 100)]
    assert learners * kept <= max(RECENT_INPUTS, learners * LEAST_RECENT)
    assert newest(records[:1]) == records[:1]
