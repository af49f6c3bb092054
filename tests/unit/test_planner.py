"""Plans: what a learner does at each boundary, and that several hosts can know it ahead."""

from dataclasses import replace

import pytest

from diloco.learner.core import sync
from diloco.learner.core.events import (
    Adopt,
    Changed,
    Published,
    Ready,
    Send,
    Start,
    Stop,
    SyncRules,
)
from diloco.learner.core.handover import Arrived, Boundary
from diloco.learner.synchronizer import Planner

RULES = SyncRules(
    interval_steps=6, min_steps=2, overlap_steps=2, reannounce_timeout_s=30.0, lockstep=False, overwrite=False,
    blend=1.0, warmup_steps=0, warmup_interval_steps=6,
)  # fmt: skip


class Inbox:
    """Events by the number of the look at which they arrive."""

    def __init__(self, **events):
        self.looks = 0
        self.waits = []
        self.found = {int(look[1:]): found for look, found in events.items()}

    def events(self, wait_s=0.0):
        self.looks += 1
        self.waits.append(wait_s)
        return [Arrived(event) for event in self.found.get(self.looks, [])]


def planner(inbox, *, rules=RULES, fragments=2, **options):
    starts = tuple(Start(0, "0" * 32, 1 + fragment, 0) for fragment in range(fragments))
    return Planner(
        rules=rules, state=sync.begin(rules, starts), inbox=inbox, tokens_per_step=10,
        clock=lambda: float(inbox.looks), **options,
    )  # fmt: skip


def boundaries_of(made, count):
    found = []
    while len(found) < count:
        found.append(made.next())
        if found[-1].then == "end":
            break
    return found


def resolve(fragment, seq, version):
    ready = Ready(fragment, 10 * version + fragment, version, "1" * 32, 6 * version, seq)
    return [Published(0.0, fragment, seq), ready]


def test_the_same_is_planned_ahead_and_at_the_boundary():
    """Nothing arrives: a learner of several hosts sends at the same boundaries, as much."""
    at_once = boundaries_of(planner(Inbox()), 12)
    ahead = boundaries_of(planner(Inbox(), lookahead=2), 12)
    assert ahead == at_once
    sent = [(n + 1, e.fragment, e.steps) for n, p in enumerate(ahead) for e in p.effects]
    assert sent == [(3, 0, 3), (6, 1, 6)]


def test_what_arrives_is_adopted_as_many_boundaries_later_as_plans_are_ahead():
    for lookahead in (0, 2):
        made = planner(Inbox(e5=resolve(0, 1, 1)), lookahead=lookahead)
        found = boundaries_of(made, 8)
        adopted = [n + 1 for n, p in enumerate(found) for e in p.effects if type(e) is Adopt]
        # The look at which it arrives is that of a plan which is `lookahead` boundaries away.
        assert adopted == [5]
        assert made.payload(0, 10) is None


def test_plans_are_told_before_their_boundary_comes():
    told: list[Boundary] = []
    made = planner(Inbox(), lookahead=2, tell=told.append)
    for boundary in range(1, 8):
        plan = made.next()
        assert len(told) == boundary + 2
        assert told[boundary - 1] == plan


def test_work_is_counted_for_the_boundary_at_which_it_is_sent():
    """Steps that a plan counts as trained are those before its boundary, whatever the lead."""
    for lookahead in (0, 2):
        made = planner(Inbox(e4=resolve(0, 1, 1)), lookahead=lookahead)
        steps = {}
        for number, plan in enumerate(boundaries_of(made, 20), start=1):
            for effect in plan.effects:
                if isinstance(effect, Send):
                    steps.setdefault(effect.fragment, []).append((number, effect.steps))
        for sends in steps.values():
            assert sum(count for _, count in sends) == sends[-1][0]


def test_a_stop_ends_training_sends_the_rest_and_waits_for_the_tape():
    events = Inbox(e2=[Stop()], e6=[Published(1.0, 0, 1), Published(1.0, 1, 1)])
    found = boundaries_of(planner(events, drain_timeout_s=1.0), 50)
    assert [plan.then for plan in found] == ["step", "hold", "hold", "hold", "hold", "end"]
    assert [type(effect) for effect in found[1].effects] == [Send, Send]
    assert [plan.state for plan in found] == ["training"] + 5 * ["flushing"]
    assert [plan.checkpoint for plan in found] == [False, True, False, False, False, False]
    assert events.waits[:2] == [0.0, 0.0]
    assert min(events.waits[2:]) > 0


@pytest.mark.parametrize("lookahead", [0, 2])
def test_one_checkpoint_is_planned_when_one_is_due(lookahead):
    made = 0

    def due():
        return inbox.looks >= 4 and not made

    inbox = Inbox()
    directed = planner(inbox, lookahead=lookahead, checkpoint_due=due)
    found = []
    for _ in range(10):
        found.append(directed.next())
        made += found[-1].checkpoint
    assert [plan.checkpoint for plan in found].count(True) == 1


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_paused_run_holds_and_goes_on_where_it_was(lookahead):
    rules = planner(Inbox()).rules
    paused = Changed(replace(rules, paused=True))
    inbox = Inbox(e3=[paused], e6=[Changed(rules)])
    found = [planned.next() for planned in [planner(inbox, lookahead=lookahead)] for _ in range(10)]
    assert [plan.then for plan in found] == 2 * ["step"] + 3 * ["hold"] + 5 * ["step"]
    assert [plan.state for plan in found] == 2 * ["training"] + 3 * ["paused"] + 5 * ["training"]


def test_a_paused_learner_that_is_asked_to_leave_leaves():
    inbox = Inbox(e2=[Changed(replace(planner(Inbox()).rules, paused=True))])
    asked = planner(inbox, drain_timeout_s=5.0, asked_to_leave=lambda: inbox.looks >= 4)
    assert boundaries_of(asked, 50)[-1].then == "end"


def test_who_was_asked_to_leave_gives_up_after_a_while():
    inbox = Inbox()
    asked = planner(inbox, drain_timeout_s=5.0, asked_to_leave=lambda: inbox.looks >= 3)
    found = boundaries_of(asked, 50)
    assert found[-1].then == "end"
    assert len(found) == 3 + 6


def test_who_is_asked_to_leave_makes_a_snapshot_of_its_last_step():
    """It may not get to send all: no record comes, and its time is short."""
    inbox = Inbox()
    asked = planner(
        inbox, drain_timeout_s=5.0, asked_to_leave=lambda: inbox.looks >= 5,
        snapshot_steps=50, saver_idle=lambda: True,
    )  # fmt: skip
    found = boundaries_of(asked, 50)
    (last,) = (
        index for index, plan in enumerate(found) if plan.unsent and plan.state != "training"
    )
    assert found[last].checkpoint
    assert [plan.then for plan in found[last - 1 : last + 1]] == ["step", "hold"]


def test_the_first_step_with_carried_work_makes_a_snapshot():
    """Until then a second crash loses what this life took over."""
    made = planner(Inbox(), snapshot_steps=50, saver_idle=lambda: True)
    made.snapshot_soon()
    assert [bool(plan.unsent) for plan in boundaries_of(made, 2)] == [True, False]


@pytest.mark.parametrize("lookahead", [0, 2])
def test_lockstep_holds_until_the_version_is_there(lookahead):
    rules = replace(RULES, interval_steps=1, min_steps=1, lockstep=True, warmup_interval_steps=1)
    made = planner(Inbox(e4=resolve(0, 1, 1)), rules=rules, fragments=1, lookahead=lookahead)
    assert [plan.then for plan in boundaries_of(made, 5)] == [
        "hold",
        "hold",
        "hold",
        "step",
        "hold",
    ]
