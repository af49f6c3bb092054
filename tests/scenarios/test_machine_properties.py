"""Properties of the aggregator's core that hold for events in any order.

A history plays the tape, the shards, the clock, the fleet and the crashes, drawn from a seed; a
failure names the seed that repeats it. The history knows what was announced; the records say what
became of it.
"""

import math
import random
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from machinelab import Lab, digest_of, lab_rules, make_manifest

from diloco.aggregator.core import events, rounds
from diloco.aggregator.core.events import Fetch, Ignored
from diloco.aggregator.core.updates import UpdateId
from diloco.common.protocol import wire

LEARNERS = ("a", "b", "c")
LIVES = 5
EVENTS = 150
HISTORIES = 400

SPOILT = {
    "layout": {"layout": "f" * 32},
    "codec": {"codec": "int8"},
    "tokens": {"tokens": 1 << 62},
    "steps": {"steps": 1 << 62},
    "base_digest": {"base_digest": "f" * 32},
    "view": {"held_digest": "f" * 32},
}


class History:
    """One fragment's machine, its tape, and a ledger of every update on the tape."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        # In a third of the histories some lives do not hold the fragment's module.
        self.holding = random.Random(f"holds-{seed}")
        self.elsewhere = self.holding.choice([0.0, 0.0, 0.4])
        pick = self.rng.choice
        self.lab = Lab(
            lab_rules(
                **{
                    "run.steps": pick([24, 96, 1 << 30]),
                    "sync.mode": pick(["async", "async", "lockstep"]),
                    "quorum.min_learners": pick([1, 2, 3, 4]),
                    "quorum.pace": pick([0.0, 0.1, 0.9]),
                    "quorum.grace_fraction": pick([0.0, 0.9]),
                    "staleness.max_versions": pick([0, 0, 1]),
                    "bounds.max_steps_per_s": 10,
                }
            )
        )
        self.now_s = 1000.0
        self.lives: dict[str, list[int]] = {name: [] for name in LEARNERS}
        self.sent: dict[tuple[str, int], int] = {}
        self.updates: dict[UpdateId, int] = {}
        self.fetching: list[UpdateId] = []
        self.unread: list[events.Event] = []
        self.checked = 0
        self.fates: Counter[UpdateId] = Counter()
        # How often each thing happens; some histories have many crashes, some have none.
        self.odds = {
            self.announce: 30,
            self.fetched: pick([10, 30]),
            self.commit: pick([10, 60]),
            self.timer: 15,
            self.answer_cut: pick([5, 20]),
            self.wait: 10,
            self.read_again: 10,
            self.announce_again: 5,
            self.hear: 4,
            self.join: pick([1, 6]),
            self.crash: pick([0, 2, 8]),
            self.leave_or_finish: 1,
            self.stop: pick([0, 1]),
        }

    def play(self) -> None:
        """Plays events in random order; then lets the run come to an end."""
        for name in LEARNERS[: self.rng.randint(1, 3)]:
            self.join(name)
        for action in self.rng.choices(list(self.odds), self.odds.values(), k=EVENTS):
            action()
            self.check_state()
        self.come_to_an_end()

    # What the outside does

    def join(self, name: str = "") -> None:
        name = name or self.rng.choice(LEARNERS)
        if len(self.lives[name]) < LIVES:
            holds = ("elsewhere",) if self.holding.random() < self.elsewhere else ()
            event = self.lab.put(events.Joined, self.now_s, name, holds)
            self.lives[name].append(event.stream_seq)
            self.read(event)

    def announce(self) -> None:
        """An honest or spoilt update, one in flight at a time, on a version the learner may know."""
        pick, name = self.rng.choice, self.rng.choice(LEARNERS)
        if not self.lives[name]:
            return
        # Mostly this life's, but the one before may still have had something on its way.
        life = pick(self.lives[name][-2:] + self.lives[name][-1:] * 3)
        if self.in_flight(name, life):
            return
        # Learners read a record as soon as it is on the tape.
        newest = self.lab.records[-1].version
        spoil = pick([None] * 10 + list(SPOILT))
        seq = self.sent.get((name, life), 0) + 1
        self.sent[name, life] = seq
        sent = make_manifest(
            self.lab.rules,
            name,
            life,
            seq,
            pick([newest, newest, max(0, newest - 1), max(0, newest - 2)]),
            step_time_s=pick([0.0, 0.5, 2.0, 2.0, wire.GREATEST_S]),
            final=self.rng.random() < 0.05,
            **SPOILT.get(spoil, {}),
        )
        self.put_update(sent)

    def announce_again(self) -> None:
        if not self.updates:
            return
        update = self.rng.choice(list(self.updates))
        sent = next(
            event.manifest
            for event in self.lab.tape
            if isinstance(event, events.Announced) and update == name_of(event.manifest)
        )
        self.put_update(sent.model_copy(update={"attempt": sent.attempt + 1}))

    def leave_or_finish(self) -> None:
        name = self.rng.choice(LEARNERS)
        if self.lives[name]:
            verb = self.rng.choice([events.Departed, events.Finished])
            self.read(self.lab.put(verb, self.now_s, name, self.lives[name][-1]))

    def stop(self) -> None:
        if not any(isinstance(event, events.Stopped) for event in self.lab.tape):
            self.read(self.lab.put(events.Stopped, self.now_s))

    def hear(self) -> None:
        name = self.rng.choice(LEARNERS)
        if self.lives[name]:
            live = self.rng.random() < 0.5
            self.step(events.Liveness(self.now_s, name, self.lives[name][-1], live))

    def fetched(self, odds_of_failure: float = 0.1) -> None:
        if not self.fetching:
            return
        update = self.fetching.pop(self.rng.randrange(len(self.fetching)))
        if self.rng.random() < odds_of_failure / 2:
            self.step(events.AdditionFailed(self.now_s, update))
        elif self.rng.random() < odds_of_failure:
            self.step(events.Failed(self.now_s, update, "crc32c", "wrong bytes"))
        else:
            norm = self.rng.choice([0.0, 1.0, 1.0, 1.0, 1e9])
            self.step(events.Fetched(self.now_s, update, norm))

    def wait(self) -> None:
        self.now_s += self.rng.choice([0.1, 1.0, 10.0, 100.0])

    def timer(self) -> None:
        """A timer at the deadline makes progress: else the driver would spin."""
        due_s = self.lab.deadline()
        if due_s is None:
            self.step(events.Timer(self.now_s))
            return
        self.now_s, phase = max(self.now_s, due_s), self.lab.state.phase
        effects = self.step(events.Timer(self.now_s))
        after_s = self.lab.deadline()
        begins_anew = phase == "cut" and self.lab.state.phase != "cut"
        assert effects or after_s is None or after_s > due_s or begins_anew

    def answer_cut(self) -> None:
        """The driver answers once it has read what the leader has."""
        if self.lab.cut_asked and not self.unread:
            self.step(events.CutKnown(self.now_s, self.lab.last_update()))

    # What the driver does

    def commit(self) -> None:
        """The record reaches the tape, or the machine hears that it did."""
        if self.lab.unheard:
            self.note(self.lab.hear_of_record(self.now_s))
        elif self.lab.open_commit:
            self.lab.store_record()
            self.check_records()

    def crash(self) -> None:
        """Die with or without the open record on the tape; read it again from its position."""
        if self.lab.open_commit and self.rng.random() < 0.5:
            self.lab.store_record()
            self.check_records()
        self.fetching = []
        self.unread = self.lab.crash(self.now_s - self.rng.choice([0.0, 0.0, 500.0]))

    def read_again(self, count: int = 0) -> None:
        for _ in range(min(len(self.unread), count or self.rng.randint(1, 9))):
            self.step(self.unread.pop(0))

    # Helpers

    def put_update(self, sent):
        event = self.lab.put(events.Announced, self.now_s, sent)
        self.updates.setdefault(name_of(sent), event.stream_seq)
        self.read(event)

    def read(self, event):
        """The tape is read in order: what is new waits for what is being read again."""
        if self.unread:
            self.unread.append(event)
        else:
            self.step(event)

    def step(self, event):
        effects = self.lab.step(event)
        self.note(effects)
        return effects

    def note(self, effects):
        for effect in effects:
            if isinstance(effect, Fetch):
                self.fetching.append(effect.update)
            assert not isinstance(effect, Ignored), "honest learners are never ignored"

    def in_flight(self, name, life):
        return any(update[:2] == (name, life) and not self.fates[update] for update in self.updates)

    def check_records(self):
        """Versions without gap; each update in one record; the position passes none unresolved."""
        for before, record in zip(
            self.lab.records[self.checked :], self.lab.records[self.checked + 1 :], strict=False
        ):
            assert record.version == before.version + (record.what == "version")
            assert (record.what == "version") == bool(record.inputs)
            assert record.view_digest == digest_of(record.version)
            assert record.position >= before.position
            for fate in (*record.inputs, *record.rejected):
                update = UpdateId(fate.learner, fate.incarnation, fate.seq)
                assert update in self.updates
                self.fates[update] += 1
                assert self.fates[update] == 1, f"{update} is resolved twice"
            assert not before.final or not record.inputs, "a version after the last"
            in_time = record.what == "verdict" or record.global_step > before.global_step
            assert in_time or record.policy.stopping_at_s, "a version beyond the run's length"
        self.checked = len(self.lab.records) - 1
        unresolved = [seq for update, seq in self.updates.items() if not self.fates[update]]
        assert self.lab.records[-1].position <= min(unresolved, default=math.inf)

    def check_state(self) -> None:
        due_s, state = self.lab.deadline(), self.lab.state
        assert due_s is None or math.isfinite(due_s)
        assert state.phase != "closing", "a version is made at once"
        # A machine with something to do has asked for shards, for a timer, or for the cut.
        if state.pending and not state.final and not self.unread:
            asked = any(pending.fetching for pending in state.pending.values())
            beyond = not rounds.has_next(self.lab.rules, state)
            waits = self.lab.cut_asked or state.storing is not None
            assert asked or beyond or waits or due_s is not None

    def come_to_an_end(self) -> None:
        """Stop, read all, answer every fetch, commit: then nothing is unresolved."""
        self.stop()
        self.read_again(len(self.unread))
        lab = self.lab
        while (
            lab.open_commit
            or lab.unheard
            or lab.cut_asked
            or self.fetching
            or lab.deadline() is not None
        ):
            if lab.cut_asked:
                self.answer_cut()
            elif lab.open_commit or lab.unheard:
                self.commit()
            elif self.fetching:
                self.fetched(odds_of_failure=0)
            else:
                self.timer()
        assert self.lab.state.final
        assert not self.lab.state.pending
        unresolved = [update for update in self.updates if not self.fates[update]]
        assert not unresolved, f"never resolved: {unresolved}"


def name_of(manifest):
    return UpdateId(manifest.learner, manifest.incarnation, manifest.seq)


@pytest.mark.parametrize("part", range(4))
def test_any_history(part: int) -> None:
    for seed in range(part, HISTORIES, 4):
        history = History(seed)
        try:
            history.play()
        except BaseException as error:
            error.add_note(f"seed {seed}: History({seed}).play() repeats it")
            raise


class OneLearner(History):
    """One learner that begins life after life, with updates that are slow to read.

    Updates are announced by the newest life alone, as honest learners do.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.lab = Lab(lab_rules(**{"quorum.read_timeout_s": 5.0}))

    def announce_one(self) -> None:
        """By the newest life, which has none in flight."""
        if not self.lives["a"]:
            return
        life = self.lives["a"][-1]
        if not self.in_flight("a", life):
            seq = self.sent[life] = self.sent.get(life, 0) + 1
            newest = self.lab.records[-1].version
            self.put_update(make_manifest(self.lab.rules, "a", life, seq, newest))

    def begin_life_elsewhere(self) -> None:
        """Joins with modules that the fragment is not of, and announces an update all the same."""
        self.begin_life(("elsewhere",))

    def begin_life(self, holds=()) -> None:
        """Crashes, joins, and announces an update."""
        joined = self.lab.put(events.Joined, self.now_s, "a", holds)
        self.lives["a"].append(joined.stream_seq)
        self.read(joined)
        self.announce_one()

    def read_newest(self) -> None:
        """The shards of the update announced last are here."""
        if self.fetching:
            self.step(events.Fetched(self.now_s, self.fetching.pop(), 1.0))

    def read_oldest(self) -> None:
        """Reads the shards of the update that has waited longest."""
        if self.fetching:
            self.step(events.Fetched(self.now_s, self.fetching.pop(0), 1.0))

    def end_round(self) -> None:
        """Whatever the round still waits for; its record is stored and heard of."""
        for _ in range(4):
            self.answer_cut()
            self.commit()
            if self.lab.deadline() is not None:
                self.timer()

    def recover(self) -> None:
        """Another owner reads all there is."""
        self.crash()
        self.read_again(len(self.unread))

    def whole_life(self) -> None:
        """A life whose update is merged, past all that waits."""
        self.begin_life()
        self.read_newest()
        self.end_round()

    def announce_oldest_again(self) -> None:
        """Announces an update of a life that ended long ago."""
        for event in self.lab.tape:
            if isinstance(event, events.Announced):
                self.put_update(event.manifest)
                return

    def crash_loop(self) -> None:
        """More lives than have a mark."""
        for _ in range(LIVES):
            self.whole_life()


ACTIONS = st.sampled_from([
    OneLearner.begin_life, OneLearner.announce_one, OneLearner.read_newest, OneLearner.read_oldest,
    OneLearner.end_round, OneLearner.recover, OneLearner.whole_life, OneLearner.crash_loop,
    OneLearner.announce_oldest_again, OneLearner.announce_again, History.crash, History.read_again,
    OneLearner.begin_life_elsewhere,
])  # fmt: skip


@given(st.lists(ACTIONS, max_size=24))
@example([
    OneLearner.begin_life, OneLearner.crash_loop, OneLearner.recover, OneLearner.read_oldest,
    OneLearner.end_round, OneLearner.announce_oldest_again, OneLearner.recover,
])  # fmt: skip
def test_a_stored_update_is_answered_once_through_any_lives_and_recoveries(actions) -> None:
    one = OneLearner()
    for action in actions:
        action(one)
        one.check_state()
    one.come_to_an_end()
