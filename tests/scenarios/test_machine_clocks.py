"""Rounds follow the owner's clock: the server's, on the tape's messages, may be hours off."""

import pytest
from machinelab import Lab, lab_rules, make_manifest

from diloco.aggregator.core import events, machine, memory, rounds
from diloco.aggregator.core.updates import UpdateId

OFF_S = (-7200.0, 0.0, 7200.0)


def told(lab, now_s, make, *rest):
    """A message that reaches the owner at `now_s`, with the time of a server that is off."""
    event = lab.put(make, now_s + lab.off_s, *rest)
    lab.state, _ = machine.step_at(lab.rules, lab.state, event, now_s)
    return event


def lab_at(off_s, **changes):
    lab = Lab(lab_rules(**changes))
    lab.off_s = off_s
    lab.state = memory.resume(lab.records[-1], lab.stream_seq, 1000.0)
    for at_s, learner in ((1000.0, "a"), (1001.0, "b")):
        told(lab, at_s, events.Joined, learner)
    return lab


@pytest.mark.parametrize("off_s", OFF_S)
def test_a_round_that_a_leave_completes_closes_at_the_owners_time(off_s):
    lab = lab_at(off_s, **{"quorum.min_learners": 2})
    joined = lab.state.members["a"].incarnation
    told(lab, 1010.0, events.Announced, make_manifest(lab.rules, "a", joined, 1))
    lab.step(events.Fetched(1011.0, UpdateId("a", joined, 1), 1.0))
    assert lab.state.phase == "open"
    told(lab, 1015.0, events.Departed, "b", lab.state.members["b"].incarnation)
    assert (lab.state.phase, lab.state.closed_at_s) == ("closing", 1015.0)


@pytest.mark.parametrize("off_s", OFF_S)
def test_the_end_waits_for_its_deadline_and_no_longer(off_s):
    lab = lab_at(off_s)
    told(lab, 1020.0, events.Stopped)
    assert rounds.deadline(lab.rules, lab.state) == 1020.0 + lab.rules.quorum.deadline_s


@pytest.mark.parametrize("by_s", OFF_S)
def test_an_allowance_fills_again_after_the_servers_clock_was_set(by_s):
    lab = lab_at(0.0, **{"bounds.max_updates_per_s": 1.0})
    joined = lab.state.members["a"].incarnation
    told(lab, 1010.0, events.Announced, make_manifest(lab.rules, "a", joined, 1))
    # The rejection is charged by the owner, whose clock has nothing to do with the server's.
    lab.step(events.Failed(9e9, UpdateId("a", joined, 1), "missing", ""))
    lab.commit(9e9)
    lab.off_s = by_s
    told(lab, 1020.0, events.Announced, make_manifest(lab.rules, "a", joined, 2))
    assert lab.state.allowances["a"].at_s == 1020.0 + by_s
