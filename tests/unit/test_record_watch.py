"""A loop that outruns its rounds hears of it once; a fast learner's and an outage's do not count."""

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.process import log
from diloco.common.process.config import RunSettings
from diloco.common.process.health import Health
from diloco.learner.background import TROUBLE, RecordWatch

SETTINGS = RunSettings(run={"name": "quick", "steps": 60}, sync={"interval_steps": 8})


def told(updates, changed=0):
    """Returns the answers to updates, each (fragment, steps)."""
    answers = RecordWatch(interval_steps=changed)
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


LONGEST_S = 60.0
# Who announces again looks whether it was answered.
happening = st.tuples(st.sampled_from(["announced", "again", "again", "heard"]), st.floats(1, 50))


@given(st.lists(happening, max_size=40))
def test_a_learner_says_that_no_record_follows_its_updates_for_longer_than_a_round(happenings):
    answers, health, now_s = RecordWatch(), Health(), 1000.0
    first_s, troubled = None, False
    for what, passes_s in happenings:
        now_s += passes_s
        if what == "heard":
            answers.heard(health, log.get())
            first_s, troubled = None, False
        else:
            answers.announced(now_s)
            first_s = now_s if first_s is None else first_s
        if what == "again":
            answers.look(now_s, LONGEST_S, health, log.get())
            troubled = troubled or now_s - first_s >= LONGEST_S
        assert (TROUBLE in health.troubles) == troubled
