"""A loop that outruns its rounds hears of it once; a fast learner's and an outage's do not count."""

import pytest
import structlog

from diloco.common.process import log
from diloco.common.process.config import RunSettings
from diloco.learner.background import Answers

SETTINGS = RunSettings(run={"name": "quick", "steps": 60}, sync={"interval_steps": 8})


def told(updates, changed=0):
    """Returns the answers to updates, each (fragment, steps)."""
    answers = Answers(interval_steps=changed)
    with structlog.testing.capture_logs() as lines:
        for fragment, steps in updates:
            answers.covered(fragment, steps, SETTINGS, log.get())
    return lines


def test_a_loop_that_outruns_its_rounds_is_told_once():
    (line,) = told([(0, 80), (1, 6000), (0, 90), (0, 100), (0, 100), (1, 100), (1, 100)])
    assert (line["event"], line["steps"], line["of"]) == ("rounds_outrun", 100, 8)
    assert "sync.interval_steps" in line["advice"]


@pytest.mark.parametrize(
    "updates",
    [
        pytest.param([(0, 79)] * 9, id="fast learner"),
        pytest.param([(0, 8), (0, 5000), (0, 600), (0, 8), (0, 800), (0, 800)], id="outages"),
        pytest.param([(f, 5000) for f in range(5)], id="an outage of many fragments"),
    ],
)
def test_what_is_no_such_loop_is_told_nothing(updates):
    assert not told(updates)


def test_the_interval_that_is_in_force_counts():
    assert not told([(0, 80)] * 5, changed=24)
