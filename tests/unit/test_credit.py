"""Credit of updates: honest work in full, and to nobody more than the others do."""

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "scenarios"))

from machinelab import Lab, lab_rules, make_manifest

from diloco.aggregator.core import admission_and_credit, events
from diloco.aggregator.core.events import AskCut, Fetch, Merge
from diloco.aggregator.core.members import Member, Members
from diloco.aggregator.core.updates import Admitted

H, TOKENS = 24, 10
BEGAN_S = 1000.0


class Sender:
    """A learner that takes steps all the time, and has at most one update under way."""

    def __init__(self, name: str, incarnation: int, speed: float) -> None:
        self.name, self.incarnation, self.speed = name, incarnation, speed
        self.seq, self.sent_steps = 0, 0

    def due_s(self) -> float:
        return BEGAN_S + (self.sent_steps + H) / self.speed

    def manifest(self, lab: Lab, now_s: float, **lies):
        steps = int((now_s - BEGAN_S) * self.speed + 1e-9) - self.sent_steps
        self.seq, self.sent_steps = self.seq + 1, self.sent_steps + steps
        fields = {"steps": steps, "tokens": TOKENS * steps, "step_time_s": 1 / self.speed}
        version = lab.state.version
        return make_manifest(
            lab.rules, self.name, self.incarnation, self.seq, version, **(fields | lies)
        )


class Fleet:
    """Learners of some speeds, and a machine that reads at once unless it is told otherwise."""

    def __init__(self, *speeds: float, **rules) -> None:
        self.lab = Lab(lab_rules(**rules))
        self.lies = {}
        self.norms = {}
        self.merged: list[Admitted] = []
        self.senders = {}
        for name, speed in zip("abcdefgh", speeds, strict=False):
            joined = self.lab.put(events.Joined, BEGAN_S, name)
            self.lab.step(joined)
            self.senders[name] = Sender(name, joined.stream_seq, speed)

    def of(self, name: str) -> list[Admitted]:
        return [one for one in self.merged if one.manifest.learner == name]

    def work(self, until_s: float) -> None:
        """Everybody trains and sends; the aggregator answers at once."""
        while True:
            sender = min(self.free(), key=Sender.due_s, default=None)
            due_s = sender.due_s() if sender else math.inf
            timer_s = self.lab.deadline() or math.inf
            now_s = max(min(due_s, timer_s), self.lab.state.now_s)
            if now_s >= until_s:
                return
            if timer_s <= due_s:
                self.take(events.Timer(now_s))
            else:
                self.announce(sender, now_s)

    def free(self) -> list[Sender]:
        busy = {one.manifest.learner for one in self.lab.state.pending.values()}
        busy |= {one.manifest.learner for one in self.lab.state.admitted}
        return [sender for sender in self.senders.values() if sender.name not in busy]

    def announce(self, sender: Sender, now_s: float, stored_at_s: float | None = None) -> None:
        manifest = sender.manifest(self.lab, now_s, **self.lies.get(sender.name, {}))
        self.take(self.lab.put(events.Announced, stored_at_s or now_s, manifest))

    def take(self, event: events.Event) -> None:
        for effect in self.lab.step(event):
            now_s = self.lab.state.now_s
            match effect:
                case Fetch(update, manifest):
                    norm = self.norms.get(update.learner, 1.0) * manifest.steps
                    self.take(events.Fetched(now_s, update, norm))
                case AskCut():
                    self.take(events.CutKnown(now_s, self.lab.last_update()))
                case Merge(admitted):
                    self.merged.append(admitted)
        if self.lab.open_commit:
            self.lab.store_record()
            for effect in self.lab.hear_of_record(self.lab.state.now_s):
                assert not isinstance(effect, AskCut)


def assert_in_full(merged: list[Admitted]) -> None:
    for one in merged:
        manifest = one.manifest
        expected = (manifest.steps, manifest.tokens, manifest.tokens**2 / manifest.steps)
        assert tuple(one.credit) == pytest.approx(expected, rel=1e-12)
        assert one.clip == 1.0


@pytest.mark.parametrize(
    "speeds",
    [(1.0,), (1.0, 0.1), (1.0,) * 4, (1.0, 1.0, 0.5, 0.25), (2.0, 1.0, 1.0), (8.0, 8.0, 4.0, 6.0)],
    ids=str,
)
def test_honest_fleets_are_credited_in_full(speeds):
    fleet = Fleet(*speeds, **{"quorum.pace": 0.9})
    fleet.work(BEGAN_S + 100 * H / min(speeds))
    assert len({one.manifest.learner for one in fleet.merged}) == len(speeds)
    assert_in_full(fleet.merged)


HOURS_S = 7200.0


def outage_of_the_bus(fleet: Fleet, from_s: float) -> float:
    """After an outage each learner stores the update that it had begun, then all later ones."""
    back_s = from_s + HOURS_S
    for sender in fleet.senders.values():
        sent_s = sender.due_s()
        assert from_s <= sent_s < back_s
        manifest = sender.manifest(fleet.lab, sent_s)
        fleet.take(fleet.lab.put(events.Announced, back_s, manifest))
    return back_s


def outage_of_the_store(fleet: Fleet, from_s: float) -> float:
    """As of the bus, one after the other; and the first one's was announced before it."""
    first = min(fleet.senders.values(), key=Sender.due_s)
    manifest = first.manifest(fleet.lab, from_s)
    update = fleet.lab.put(events.Announced, from_s, manifest)
    held = [e for e in fleet.lab.step(update) if isinstance(e, Fetch)]
    back_s = from_s + HOURS_S
    for sender in fleet.senders.values():
        if sender is not first:
            manifest = sender.manifest(fleet.lab, sender.due_s())
            fleet.take(fleet.lab.put(events.Announced, back_s, manifest))
    for fetch in held:
        fleet.take(events.Fetched(back_s, fetch.update, float(fetch.manifest.steps)))
    return back_s


def outage_of_the_aggregator(fleet: Fleet, from_s: float) -> float:
    """The tape goes on; who comes back reads everything at one time."""
    updates = [
        fleet.lab.put(events.Announced, sender.due_s(), sender.manifest(fleet.lab, sender.due_s()))
        for sender in sorted(fleet.senders.values(), key=Sender.due_s)
    ]
    back_s = from_s + HOURS_S
    again = fleet.lab.crash(back_s)
    assert [e for e in again if isinstance(e, events.Announced)][-len(updates) :] == updates
    for event in again:
        fleet.take(event)
    return back_s


@pytest.mark.parametrize(
    "outage",
    [outage_of_the_bus, outage_of_the_store, outage_of_the_aggregator],
    ids=lambda outage: outage.__name__,
)
@pytest.mark.parametrize("rounds", [1, 2, 30])
def test_two_hours_of_honest_work_are_credited_in_full_after_an_outage(outage, rounds):
    fleet = Fleet(1.0, 1.0, 0.9, 0.8, **{"quorum.pace": 0.9, "quorum.deadline_s": 20.0})
    from_s = BEGAN_S + rounds * H / 0.8 + 1
    fleet.work(from_s)
    before = len(fleet.merged)
    back_s = outage(fleet, from_s)
    fleet.work(back_s + 100)
    caught_up = [one.manifest.steps for one in fleet.merged[before:]]
    assert sum(steps > 0.7 * HOURS_S for steps in caught_up) == len(fleet.senders)
    assert_in_full(fleet.merged)


# How long updates wait


def test_the_fastest_learner_waits_for_no_pace():
    """By the median's pace its updates waited almost an interval, and 53 of 60 were sent."""
    fleet = Fleet(*(1 / (1 + at / 16) for at in range(8)), **{"quorum.pace": 0.9})
    fleet.work(BEGAN_S + 60 * H)
    assert len(fleet.of("a")) == pytest.approx(60, abs=2)


def test_rounds_close_the_gap_in_one_after_an_aggregator_that_was_late():
    """Everybody sends as soon as it is back; they waited nine tenths of an interval, then eight."""
    fleet = Fleet(1.0, 1.0, 1.0, 1.0, **{"quorum.pace": 0.9})
    back_s = outage_of_the_aggregator(fleet, BEGAN_S + 10 * H + 1)
    fleet.work(back_s + 20 * H)
    stored_s = {event.stream_seq: event.stored_at_s for event in fleet.lab.tape}
    waits_s = [
        record.closed_at_s - stored_s[taken.stream_seq]
        for record in fleet.lab.records
        for taken in record.inputs
        if stored_s[taken.stream_seq] >= back_s
    ]
    assert len(waits_s) > 15 * len(fleet.senders)
    assert max(waits_s) < 1


def test_a_liars_step_time_at_most_halves_the_interval():
    honest = {str(at): Member(1, step_time_s=1.0 + at / 8) for at in range(4)}
    assert Members(honest).fastest_step_s() == 1.0
    assert Members({**honest, "d": Member(1, step_time_s=1e-9)}).fastest_step_s() == 1.125 / 2
    assert Members({"a": Member(1)}).fastest_step_s() == 0.0


def test_where_learners_may_lie_a_fast_one_weighs_as_the_others_and_halves_no_interval():
    equal, fast = (
        Fleet(1.0, 1.0, 1.0, speed, **{"quorum.pace": 0.9, "run.trust": "others"})
        for speed in (1.0, 4.0)
    )
    for fleet in (equal, fast):
        fleet.work(BEGAN_S + 100 * H)
    # A round takes three of the four: each of the slow ones may miss every fourth.
    assert fast.lab.state.version <= equal.lab.state.version * 5 / 4
    assert all(len({one.learner for one in record.inputs}) >= 3 for record in fast.lab.records[1:])
    weights = {name: sum(one.weight for one in fast.of(name)[1:]) for name in "ad"}
    # Over all its time, and the interval before the first that counts.
    assert weights["d"] <= 1.1 * (weights["a"] * (1 + 1e-6) + 2 * fast.of("a")[0].weight)
    for name in "abc":
        assert_in_full(fast.of(name))


# Whoever claims more


def liar(**lies) -> Fleet:
    """Three honest learners and d, who lies from its join on."""
    fleet = Fleet(1.0, 1.0, 1.0, 1.0, **{"quorum.pace": 0.9})
    fleet.lies["d"] = lies
    return fleet


def test_who_claims_more_steps_and_tokens_weighs_at_most_twice_the_others():
    fleet = liar(steps=1 << 40, tokens=1 << 60)
    fleet.work(BEGAN_S + 100 * H)
    honest = [one.weight for one in fleet.of("a")]
    false = [one.weight for one in fleet.of("d")]
    assert len(false) > 90
    # What it says before two others are known is bounded by nothing but the bounds.
    assert max(false[1:]) <= 2.2 * max(honest) * (1 + 1e-6)
    credited = sum(one.credit.tokens for one in fleet.of("d")[1:])
    assert credited <= 100 * H * TOKENS * 10
    for name in "abc":
        assert_in_full(fleet.of(name))


@pytest.mark.parametrize("step_time_s", [1e-9, 0.0, 1e12])
def test_a_step_time_moves_neither_clock_nor_anybody_elses_credit(step_time_s):
    honest, fleet = Fleet(1.0, 1.0, 1.0, **{"quorum.pace": 0.9}), liar(step_time_s=step_time_s)
    for one in (honest, fleet):
        one.work(BEGAN_S + 100 * H)
    assert fleet.lab.state.version == pytest.approx(honest.lab.state.version, abs=2)
    for name in "abc":
        assert_in_full(fleet.of(name))


@pytest.mark.parametrize("norm", [1e-9, 0.0, 1e9])
def test_one_learners_norms_shorten_nobody_else(norm):
    fleet = liar(tokens=1)
    fleet.norms["d"] = norm
    fleet.work(BEGAN_S + 100 * H)
    assert not any(record.rejected for record in fleet.lab.records)
    assert not fleet.lab.state.quarantined
    for name in "abc":
        assert_in_full(fleet.of(name))
    lengths = [one.clip * one.norm / one.credit.steps for one in fleet.of("d")]
    assert max(lengths[1:]) <= 10 * (1 + 1e-9)


def test_norms_that_fall_by_orders_of_magnitude_are_honest():
    """As a model converges; the running median over updates refused two of four learners."""
    fleet = Fleet(1.0, 1.0, 0.5, 0.25, **{"quorum.pace": 0.9})
    for fall in range(60):
        fleet.norms = {name: 10.0 ** (-fall / 6) * (1 + index) for index, name in enumerate("abcd")}
        fleet.work(BEGAN_S + (fall + 1) * 10 * H)
    assert len(fleet.merged) > 1000
    assert not any(record.rejected for record in fleet.lab.records)
    assert_in_full(fleet.merged)


def test_what_an_operator_declares_is_believed():
    declared = {"d": {"max_steps_per_s": 50.0, "max_tokens_per_step": 100}}
    fleet = Fleet(1.0, 1.0, 1.0, 40.0, **{"quorum.pace": 0.9, "bounds.learners": declared})
    fleet.lies["d"] = {"tokens": 1 << 50}
    fleet.work(BEGAN_S + 20 * H)
    for one in fleet.of("d"):
        assert one.credit.steps == one.manifest.steps
        assert one.credit.tokens == 100 * one.manifest.steps


def test_medians_are_of_what_is_known_and_of_two_at_least():
    def others_norm(norms):
        beside = {str(at): Member(1, norm=norm) for at, norm in enumerate(norms)}
        return Members({"a": Member(1, norm=9.0), **beside}).others_norm("a")

    assert others_norm([]) is None
    assert others_norm([1.0, 0.0]) is None
    assert others_norm([1.0, 2.0]) == 2.0
    assert others_norm([3.0, 0.0, 1.0, 2.0]) == 2.0
    assert others_norm([1.0, 2.0, 3.0, 4.0]) == 3.0


@given(
    st.floats(0, 1e12), st.floats(0, 1e12), st.floats(0, 1e12),
    st.floats(0, 1e12), st.floats(0, 1e12),
)  # fmt: skip
def test_time_that_is_available_is_finite_and_never_negative(heard, read, unused, stored, now):
    member = Member(1, heard_at_s=heard, read_at_s=read, unused_s=unused)
    assert unused <= admission_and_credit.available_s(member, stored, now) <= 1e12


def test_a_servers_clock_that_is_set_back_takes_no_credit():
    member = Member(1, heard_at_s=5000.0, read_at_s=100.0)
    assert admission_and_credit.available_s(member, 1400.0, 124.0) == 24.0


@given(st.floats(0, 1e308), st.floats(0, 1e308), st.floats(0, 1e12))
def test_absurd_words_of_others_give_numbers(step_time_s, tokens_per_step, had_s):
    absurd = Member(1, step_time_s=step_time_s, tokens_per_step=tokens_per_step)
    fleet = Members({"a": Member(1), "b": absurd, "c": absurd, "d": absurd})
    rules, rate = lab_rules(), fleet.others_rate("a")
    bounds = rules.bounds
    assert (
        0
        < admission_and_credit.steps_per_s(bounds, "a", fleet["a"], rate)
        <= bounds.max_steps_per_s
    )
    assert (
        admission_and_credit.greatest_weight(rules, "a", fleet.others_tokens_rate("a"), had_s) >= 0
    )
