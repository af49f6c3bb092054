"""Plans: what a learner does at each boundary, and that several hosts can know it ahead."""

from dataclasses import replace

import msgpack
import pytest

from diloco.common import wire
from diloco.learner import sync
from diloco.learner.adopt import Change
from diloco.learner.director import Director, Plan
from diloco.learner.hosts import pack_change, pack_plan, unpack_change, unpack_plan
from diloco.learner.publish import Arrived

RULES = sync.SyncRules(
    interval_steps=6, min_steps=2, reannounce_timeout_s=30.0, lockstep=False, overwrite=False,
    warmup_steps=0, warmup_interval_steps=6,
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
        return [Arrived(event, None) for event in self.found.get(self.looks, [])]


def director(inbox, *, rules=RULES, fragments=2, **options):
    starts = tuple(sync.Start(0, "0" * 32, 1 + fragment, 0) for fragment in range(fragments))
    return Director(
        rules=rules, state=sync.begin(rules, starts), inbox=inbox, tokens_per_step=10,
        clock=lambda: float(inbox.looks), **options,
    )  # fmt: skip


def plans_of(made, count):
    found = []
    while len(found) < count:
        found.append(made.next())
        if found[-1].then == "end":
            break
    return found


def resolve(fragment, seq, version):
    ready = sync.Ready(fragment, 10 * version + fragment, version, "1" * 32, 6 * version, seq)
    return [sync.Published(0.0, fragment, seq), ready]


def test_the_same_is_planned_ahead_and_at_the_boundary():
    """Nothing arrives: a learner of several hosts sends at the same boundaries, as much."""
    at_once = plans_of(director(Inbox()), 12)
    ahead = plans_of(director(Inbox(), lead=2), 12)
    assert ahead == at_once
    sent = [(n + 1, e.fragment, e.steps) for n, p in enumerate(ahead) for e in p.effects]
    assert sent == [(3, 0, 3), (6, 1, 6)]


def test_what_arrives_is_adopted_as_many_boundaries_later_as_plans_are_ahead():
    for lead in (0, 2):
        made = director(Inbox(e5=resolve(0, 1, 1)), lead=lead)
        found = plans_of(made, 8)
        adopted = [n + 1 for n, p in enumerate(found) for e in p.effects if type(e) is sync.Adopt]
        # The look at which it arrives is that of a plan which is `lead` boundaries away.
        assert adopted == [5]
        assert made.payload(0, 10) is None


def test_plans_are_told_before_their_boundary_comes():
    told: list[Plan] = []
    made = director(Inbox(), lead=2, tell=told.append)
    for boundary in range(1, 8):
        plan = made.next()
        assert len(told) == boundary + 2
        assert told[boundary - 1] == plan


def test_work_is_counted_for_the_boundary_at_which_it_is_sent():
    """Steps that a plan counts as trained are those before its boundary, whatever the lead."""
    for lead in (0, 2):
        made = director(Inbox(e4=resolve(0, 1, 1)), lead=lead)
        steps = {}
        for number, plan in enumerate(plans_of(made, 20), start=1):
            for effect in plan.effects:
                if isinstance(effect, sync.Send):
                    steps.setdefault(effect.fragment, []).append((number, effect.steps))
        for sends in steps.values():
            assert sum(count for _, count in sends) == sends[-1][0]


def test_a_stop_ends_training_sends_the_rest_and_waits_for_the_tape():
    events = Inbox(e2=[sync.Stop()], e6=[sync.Published(1.0, 0, 1), sync.Published(1.0, 1, 1)])
    found = plans_of(director(events, drain_timeout_s=1.0), 50)
    assert [plan.then for plan in found] == ["step", "hold", "hold", "hold", "hold", "end"]
    assert [type(effect) for effect in found[1].effects] == [sync.Send, sync.Send]
    assert [plan.state for plan in found] == ["training"] + 5 * ["flushing"]
    assert [plan.checkpoint for plan in found] == [False, True, False, False, False, False]
    assert events.waits[:2] == [0.0, 0.0]
    assert min(events.waits[2:]) > 0


@pytest.mark.parametrize("lead", [0, 2])
def test_one_checkpoint_is_planned_when_one_is_due(lead):
    made = 0

    def due():
        return inbox.looks >= 4 and not made

    inbox = Inbox()
    directed = director(inbox, lead=lead, checkpoint_due=due)
    found = []
    for _ in range(10):
        found.append(directed.next())
        made += found[-1].checkpoint
    assert [plan.checkpoint for plan in found].count(True) == 1


def test_who_was_asked_to_leave_gives_up_after_a_while():
    inbox = Inbox()
    asked = director(inbox, drain_timeout_s=5.0, asked_to_leave=lambda: inbox.looks >= 3)
    found = plans_of(asked, 50)
    assert found[-1].then == "end"
    assert len(found) == 3 + 6


@pytest.mark.parametrize("lead", [0, 2])
def test_lockstep_holds_until_the_version_is_there(lead):
    rules = replace(RULES, interval_steps=1, min_steps=1, lockstep=True, warmup_interval_steps=1)
    made = director(Inbox(e4=resolve(0, 1, 1)), rules=rules, fragments=1, lead=lead)
    assert [plan.then for plan in plans_of(made, 5)] == ["hold", "hold", "hold", "step", "hold"]


def test_the_other_hosts_read_what_host_0_plans():
    ready = sync.Ready(1, 7, 3, "2" * 32, 12, 4, restored=True)
    send = sync.Send(0, 2, 3, "3" * 32, 5, 50, final=True)
    plan = Plan(
        (sync.Adopt(ready, True), send, sync.Republish(0, 1, 1)), "hold", 9, "flushing", True
    )
    read = unpack_plan(through_msgpack(pack_plan(plan)))
    assert read == plan._replace(effects=plan.effects[:2])


def test_the_other_hosts_read_what_they_are_to_prepare():
    ref = wire.ObjectRef(name="r/global/0/x", size_bytes=7, crc32c=9)
    for snapshot in (None, ref):
        change = Change(2, 44, "4" * 32, snapshot, (ref, ref))
        message = through_msgpack({"change": pack_change(change)})
        assert unpack_change(message["change"]) == change


def through_msgpack(message):
    return msgpack.unpackb(msgpack.packb(message), use_list=False)
