"""Properties of the learner's core that hold for arrivals in any order."""

import math
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.common.process.config import SyncSection
from diloco.learner.core import sync
from diloco.learner.core.events import (
    Adopt,
    Leave,
    Published,
    Ready,
    Republish,
    RoundOpened,
    Send,
    Start,
    Stepped,
    Stop,
    sync_rules,
)

FRAGMENTS = 3
fragment = st.integers(0, FRAGMENTS - 1)
event = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("wait")),
    st.tuples(st.just("publish"), fragment),
    # A record: of a new version or a verdict; it resolves what is in flight, or not; old or new.
    # What a version resolves is merged, or rejected at its side.
    st.tuples(
        st.just("record"), fragment, st.booleans(), st.booleans(), st.booleans(), st.booleans()
    ),
    st.tuples(st.just("round"), st.integers(-1, FRAGMENTS), st.integers(0, 9)),
    st.tuples(st.just("pass"), st.sampled_from([0.5, 5.0, 40.0])),
)
merging = st.tuples(st.just("record"), fragment, *map(st.just, (True, True, False, True)))
ending = st.sampled_from([Stop, Leave])


class Sent(NamedTuple):
    """An update that the core has sent."""

    seq: int
    steps: int
    tokens: int


class Learner:
    """Plays events on the core and keeps a ledger of what was stepped, sent and adopted."""

    def __init__(self, **section) -> None:
        self.rules = sync_rules(
            SyncSection(interval_steps=6, fragments=FRAGMENTS, min_steps=2, **section)
        )
        self.state = sync.begin(self.rules, (Start(0, "0", 1, 0),) * FRAGMENTS)
        self.now_s = 1000.0
        self.record_seq = 1
        self.stepped = [0, 0]
        self.sent: list[list[Sent]] = [[] for _ in range(FRAGMENTS)]
        self.versions = [0] * FRAGMENTS
        self.resolved = [0] * FRAGMENTS  # highest seq that a record on the tape has resolved
        self.adopted = [1] * FRAGMENTS  # record sequence
        self.let_go = [0] * FRAGMENTS  # by blends
        self.covered = [0] * FRAGMENTS  # the newest update that is known to be on the tape

    def play(self, event) -> None:
        match event:
            case "step", tokens:
                self.stepped[0] += 1
                self.stepped[1] += tokens
                self.now_s += 1
                self.step(Stepped(self.now_s, tokens))
            case ("wait",):
                self.step(Stepped(self.now_s, 0, steps=0))
            case "publish", index:
                self.publish(index)
            case "record", index, version, resolves, stale, merges:
                self.record(index, version, resolves, stale, merges)
            case "round", index, version:
                self.step(RoundOpened(index, version))
            case "pass", seconds:
                self.now_s += seconds

    def publish(self, index) -> None:
        self.covered[index] = len(self.sent[index])
        self.step(Published(self.now_s, index, self.covered[index]))

    def record(self, index, version, resolves, stale, merges=False) -> None:
        merged = 0
        if stale:
            seq = max(1, self.record_seq - 1)
        else:
            self.record_seq += 1
            seq = self.record_seq
            self.versions[index] += version
            if resolves:
                self.resolved[index] = len(self.sent[index])
                merged = self.resolved[index] if version and merges else 0
        self.step(
            Ready(
                index,
                seq,
                self.versions[index],
                str(self.versions[index]),
                6 * self.versions[index],
                self.resolved[index],
                merged_seq=merged,
            )
        )

    def unsent_steps(self, index: int) -> int:
        """Steps that are neither in an update nor let go by a blend."""
        return self.stepped[0] - sum(sent.steps for sent in self.sent[index]) - self.let_go[index]

    def step(self, event) -> None:
        before = self.state
        self.state, effects = sync.step(self.rules, before, event)
        assert isinstance(event, Stepped) or not effects, "tensors change at boundaries alone"
        for effect in effects:
            match effect:
                case Send(index, seq, version, digest, steps, tokens, _):
                    # 1, 2, 3 ..., each only once the one before is resolved, on what is adopted.
                    assert seq == len(self.sent[index]) + 1
                    assert self.resolved[index] >= len(self.sent[index])
                    assert (version, digest) == (self.state.fragments[index].version, str(version))
                    assert steps > 0
                    assert tokens > 0
                    self.sent[index].append(Sent(seq, steps, tokens))
                case Adopt(ready, resolved, blended):
                    assert ready.record_seq > self.adopted[ready.fragment], "each record once"
                    self.adopted[ready.fragment] = ready.record_seq
                    if resolved:
                        assert ready.resolved_seq >= len(self.sent[ready.fragment])
                        self.covered[ready.fragment] = len(self.sent[ready.fragment])
                    if blended:
                        assert resolved
                        assert self.rules.blend < 1
                        assert ready.merged_seq == len(self.sent[ready.fragment])
                        unsent = self.unsent_steps(ready.fragment)
                        fading = math.ceil((1 - self.rules.blend) * unsent)
                        self.let_go[ready.fragment] += min(fading, max(0, unsent - 1))
                case Republish(index, seq, attempt):
                    assert seq == len(self.sent[index])
                    assert attempt > 0
                    assert before.fragments[index].in_flight.announced_at_s > 0

    def check_accounts(self) -> None:
        """Per fragment: stepped = sent + unsent, in steps and in tokens.

        Who leaves tells of the steps that no update on the tape covers.
        """
        told = sync.unsent(self.state)
        for index, state in enumerate(self.state.fragments):
            unsent = sync.unsent_of(self.state, state)
            steps = sum(sent.steps for sent in self.sent[index]) + unsent.steps
            tokens = sum(sent.tokens for sent in self.sent[index]) + unsent.tokens
            assert [steps, tokens] == self.stepped
            on_tape = sum(sent.steps for sent in self.sent[index][: self.covered[index]])
            assert told.get(index, 0) == self.stepped[0] - on_tape

    def finish(self, end) -> None:
        """Whatever has happened, stopping or leaving comes to its end."""
        self.step(end())
        for _ in range(4):
            self.step(Stepped(self.now_s, 0, steps=0))
            for index in range(FRAGMENTS):
                self.publish(index)
                self.record(index, version=True, resolves=True, stale=False)
        assert sync.flushed(self.state)


@settings(max_examples=200)
@given(st.lists(event, max_size=80), ending)
def test_every_step_is_sent_once(events, end):
    learner = Learner()
    for one in events:
        learner.play(one)
        learner.check_accounts()
    learner.finish(end)
    learner.check_accounts()
    assert all(state.final for state in learner.state.fragments)
    assert not sync.unsent(learner.state)


@settings(max_examples=100)
@given(st.lists(event, max_size=80), ending)
def test_overwriting_sends_no_step_twice(events, end):
    """Steps that views overwrite are lost; the rest is never more than was stepped."""
    learner = Learner(adopt="overwrite")
    for one in events:
        learner.play(one)
        for index, state in enumerate(learner.state.fragments):
            sent = sum(sent.tokens for sent in learner.sent[index])
            unsent = sync.unsent_of(learner.state, state)
            assert sent + unsent.tokens <= learner.stepped[1]
    learner.finish(end)


@settings(max_examples=100)
@given(
    st.lists(st.one_of(event, merging), min_size=20, max_size=80),
    ending,
    st.sampled_from([0.3, 0.5, 0.9]),
)
def test_a_blend_lets_go_of_a_share_of_what_follows_an_update(events, end, share):
    """Nothing where no version has the update; the pace is that of a learner that keeps all."""
    learner, keeping = Learner(adopt="blend", blend=share), Learner()
    # Who has let go of steps may have too few for a round that is open.
    for one in [one for one in events if one[0] != "round"]:
        learner.play(one)
        keeping.play(one)
        for index, state in enumerate(learner.state.fragments):
            unsent = sync.unsent_of(learner.state, state)
            assert unsent.steps == learner.unsent_steps(index)
            assert (unsent.tokens > 0) == (unsent.steps > 0)
    flying = [state.in_flight is not None for state in learner.state.fragments]
    assert flying == [state.in_flight is not None for state in keeping.state.fragments]
    learner.finish(end)


@settings(max_examples=100)
@given(st.lists(event, max_size=80))
def test_lockstep_waits_exactly_while_its_own_update_is_unresolved(events):
    learner = Learner(mode="lockstep")
    for one in events:
        if one[0] == "step" and sync.must_wait(learner.rules, learner.state):
            continue
        learner.play(one)
        flying = [state.in_flight is not None for state in learner.state.fragments]
        assert sync.must_wait(learner.rules, learner.state) == any(flying)
        # Open rounds hurry nobody: what is sent was due, by its offset or after H steps.
        assert all(sent.steps == 6 for updates in learner.sent for sent in updates[1:])


@settings(max_examples=100)
@given(st.lists(event, max_size=80))
def test_between_records_the_clock_goes_on_for_at_most_h_steps(events):
    learner = Learner()
    before = 0
    for one in events:
        learner.play(one)
        now = sync.clock(learner.rules, learner.state)
        newest = learner.state.clock_step
        assert newest <= now <= newest + 6
        if one[0] != "record":
            assert now >= before
        before = now


def test_a_rollback_alone_sets_the_clock_back():
    """Learning rates follow it; the record of a slow fragment is of an earlier step."""
    learner = Learner()
    for index, record_seq, global_step, rolled_back, expected in (
        (0, 2, 60, False, 60),
        (1, 3, 54, False, 60),
        (0, 4, 30, True, 30),
        (1, 5, 30, True, 30),
        (2, 6, 36, False, 36),
    ):
        ready = Ready(index, record_seq, record_seq, "0", global_step, 0, rolled_back=rolled_back)
        learner.step(ready)
        assert sync.clock(learner.rules, learner.state) == expected
