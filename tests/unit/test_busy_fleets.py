"""Honest fleets on busy machines, in virtual time: their work counts in full, and nobody is accused.

The learners' and the aggregator's cores are those of the daemons. What is between them is as on a
machine with too much to do: learners that slow down together and each by itself, announcements that
come late and in a heap, a server and an aggregator that stand still for seconds, and kills.
"""

import bisect
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scenarios"))

from machinelab import digest_of, lab_settings, record_of

from diloco.aggregator.core import events
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.events import AskCut, Commit, Effect, Fetch, OpenRound
from diloco.common.protocol import names, wire
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.common.storage.tape import Entry, InvalidMessage, Recorded
from diloco.learner.core import sync
from diloco.learner.core.events import Event, Published, RoundOpened, Send, Stepped, sync_rules
from diloco.plan.virtual_time import Timeline, VirtualFragment
from diloco.run.health_findings import judged
from diloco.run.observed import Observed
from diloco.run.state import Finding

BEGAN_S, TOKENS, FRAGMENTS, H = 1000.0, 10, 2, 24
LAYOUT = make_layout(
    [Tensor(name=f"w{at}", shape=(32, 64), dtype="float32") for at in range(FRAGMENTS)],
    fragments=FRAGMENTS,
    block=16,
)


class Course:
    """Values that change at random times, each valid from its time on."""

    def __init__(self, draw: Callable[[], tuple[float, float]]) -> None:
        self._draw, self._until_s = draw, BEGAN_S
        self._from_s: list[float] = []
        self._values: list[float] = []

    def at(self, now_s: float) -> float:
        while self._until_s <= now_s:
            took_s, value = self._draw()
            self._from_s.append(self._until_s)
            self._values.append(value)
            self._until_s += took_s
        return self._values[bisect.bisect(self._from_s, now_s) - 1]


def load(rng: random.Random, every_s: float, worst: float) -> Course:
    """The share of its speed that is left, another every so many seconds."""
    return Course(lambda: (rng.expovariate(1 / every_s), worst ** -rng.random()))


def stands(rng: random.Random, every_s: float, for_s: float) -> Callable[[float], float]:
    """When what comes at a time is done: at once, or when a standstill is over."""
    ends, stood = [BEGAN_S], [True]

    def draw() -> tuple[float, float]:
        stood[0] = not stood[0]
        took_s = rng.expovariate(1 / (for_s if stood[0] else every_s))
        ends[0] += took_s
        return took_s, ends[0] if stood[0] else 0.0

    course = Course(draw)
    return lambda now_s: max(now_s, course.at(now_s))


class Owner(VirtualFragment):
    """A fragment's aggregator: while it stands still, what comes waits."""

    def __init__(self, fleet: "BusyFleet", rules: formulas.FragmentRules) -> None:
        super().__init__(rules, fleet.time, digest_of(0))
        self.fleet = fleet

    def decide(self, event: events.Event) -> None:
        now_s = self.timeline.now_s
        if (back_s := self.fleet.reads(now_s)) > now_s:
            self.timeline.at(back_s, self.decide, event)
        else:
            super().decide(event._replace(at_s=now_s) if hasattr(event, "at_s") else event)

    def announce(self, manifest: wire.Manifest) -> None:
        super().announce(manifest)
        self.fleet.note(names.update("lab", manifest.learner, manifest.fragment), manifest)

    def perform(self, effect: Effect) -> None:
        after, soon_s = self.timeline.after, self.fleet.soon_s
        match effect:
            case Fetch(update, manifest):
                read = events.Fetched(0.0, update, float(manifest.steps))
                after(soon_s(), self.decide, read)
            case OpenRound(version):
                for one in self.fleet.learners:
                    after(soon_s(), one.hear, RoundOpened(self.rules.fragment, version), one.life)
            case AskCut():
                after(soon_s(), lambda: self.decide(events.CutKnown(0.0, self.newest_seq)))
            case Commit():
                digest = digest_of(effect.state.version + (effect.what == "version"))
                if effect.what == "version":
                    after(soon_s(), self.made, digest)
                after(0.05, self.stored, effect, digest)

    def stored(self, commit: Commit, digest: str) -> None:
        seq, fleet = self.timeline.next_seq(), self.fleet
        record = record_of(self.rules, commit, digest_of(commit.state.version))
        fleet.records.append(record)
        fleet.seen.note_record(Recorded(record, seq, self.timeline.now_s))
        self.decide(events.Committed(self.timeline.now_s, seq))
        ready = self.read_by(commit, seq, digest)
        for one in fleet.learners:
            self.timeline.after(fleet.soon_s(), one.hear, ready(one.name, one.life), one.life)


class Learner:
    """A learner's core, step by step."""

    def __init__(self, fleet: "BusyFleet", name: str, speed: float, kills: float) -> None:
        self.fleet, self.name, self.speed, self.kills = fleet, name, speed, kills
        self.rng = rng = random.Random(f"{name} of {fleet.seed}")
        self.load = load(rng, rng.choice([1.0, 5.0, 20.0]), 4.0)
        self.sends = stands(rng, 15.0, 2.0)
        self.join()

    def join(self) -> None:
        self.life, self.step_time_s, self.position = self.fleet.time.next_seq(), 0.0, 0
        joins = wire.Join(run="lab", learner=self.name, layout=LAYOUT.digest, host="here")
        self.fleet.note(names.join("lab", self.name), joins)
        starts = tuple(owner.join(self.name, self.life) for owner in self.fleet.owners)
        self.state = sync.begin(self.fleet.rules, starts)
        self.go_on()

    def go_on(self) -> None:
        now_s, fleet = self.fleet.time.now_s, self.fleet
        share = self.load.at(now_s) * fleet.load.at(now_s)
        done_s = fleet.runs(now_s + 1 / (self.speed * share))
        fleet.time.at(done_s, self.step, done_s - now_s)

    def step(self, took_s: float) -> None:
        self.step_time_s += (took_s - self.step_time_s) * (0.1 if self.step_time_s else 1.0)
        self.position += 1
        for effect in self.tell(Stepped(self.fleet.time.now_s, TOKENS, 1)):
            if isinstance(effect, Send):
                self.send(effect)
        if self.rng.random() < self.kills / H:
            self.life = 0
            self.fleet.time.after(self.rng.uniform(1, 60), self.join)
        else:
            self.go_on()

    def send(self, send: Send) -> None:
        fleet, owner = self.fleet, self.fleet.owners[send.fragment]
        manifest = owner.manifest(self.name, self.life, send, self.position, self.step_time_s)
        ready_s = fleet.runs(fleet.time.now_s + fleet.soon_s())
        fleet.time.at(fleet.stores(self.sends(ready_s)), self.announce, manifest)

    def announce(self, manifest: wire.Manifest) -> None:
        if manifest.incarnation == self.life:
            self.tell(Published(self.fleet.time.now_s, manifest.fragment, manifest.seq))
            self.fleet.owners[manifest.fragment].announce(manifest)

    def hear(self, event: Event, life: int) -> None:
        if life == self.life:
            self.tell(event)

    def beat(self, **lies: Any) -> None:
        """Say that it is here."""
        fields: dict[str, Any] = {
            "learner": self.name, "incarnation": self.life, "local_step": self.position,
            "global_step": 0, "tokens": 0, "loss": 1.0, "tokens_per_s": 1.0, "state": "training",
            "step_time_s": self.step_time_s, "stall_s": 0.0, "run_s": 1.0, "bytes_up": 0,
            "bytes_down": 0, "updates_sent": 0,
        }  # fmt: skip
        self.fleet.seen.hear(wire.Heartbeat(**(fields | lies)), self.fleet.time.now_s)

    def tell(self, event: Event) -> tuple[Any, ...]:
        self.state, effects = sync.step(self.fleet.rules, self.state, event)
        return effects


class BusyFleet:
    """A run without arrays; `records` are those that its aggregator stored."""

    def __init__(
        self, speeds: tuple[float, ...], seed: str, kills: float = 0.0, **changes: Any
    ) -> None:
        self.seed, self.time, self.records = seed, Timeline(BEGAN_S), list[wire.Record]()
        sizes = {"sync.fragments": FRAGMENTS, "sync.interval_steps": H}
        self.settings = lab_settings(**sizes, **changes)
        self.rules = sync_rules(self.settings.sync)
        self.rng = rng = random.Random(seed)
        self.load = load(rng, rng.choice([2.0, 10.0, 30.0]), 8.0)
        self.reads, self.stores, self.runs = (
            stands(random.Random(f"{at} of {seed}"), *each)
            for at, each in enumerate([(20.0, 2.0), (40.0, 1.0), (30.0, 1.0)])
        )
        self.seen = Observed("lab", 0, self.settings)
        rules = [formulas.fragment_rules(self.settings, LAYOUT, at) for at in range(FRAGMENTS)]
        self.learners: list[Learner] = []
        self.owners = [Owner(self, each) for each in rules]
        for name, speed in zip("abcd", speeds, strict=False):
            self.learners.append(Learner(self, name, speed, kills))

    def soon_s(self) -> float:
        """How long a message or a read takes."""
        return self.rng.uniform(0.002, 0.05)

    def note(self, subject: str, body: wire.Body) -> None:
        """A message of the tape, as status reads it; records it hears of apart."""
        seq = self.seen.extent.last_seq + 1
        self.seen.take(Entry(seq, self.time.now_s, subject, body, 1000))

    def work(self, until_s: float) -> None:
        while self.time.next_s < until_s:
            self.time.advance()

    def accused(self) -> list[Finding]:
        """Returns the findings on learners that ask for action."""
        for one in self.learners:
            if one.life:
                one.beat()
        found = judged(self.seen.run(self.time.now_s), self.settings, copied=True)
        here = {f"learner {one.name}" for one in self.learners if one.life}
        amiss = [one for one in found if one.severity in ("warning", "error")]
        # Who is killed starts again.
        return [
            one
            for one in amiss
            if one.about in here and not one.sentence.startswith("started again")
        ]


LASTS_S = 120
KINDS = {
    "equal": ((10, 10, 10), 0.9, 0.0),
    "unequal": ((10, 5, 2.5, 10), 0.9, 0.0),
    "unpaced": ((10, 10, 10), 0.0, 0.0),
    "killed": ((10, 10, 10, 10), 0.9, 0.05),
}


@pytest.mark.parametrize(
    ("trust", "seeds"),
    [("own", 3), ("others", 3), pytest.param("own", 25, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_honest_work_counts_and_nobody_is_accused_on_a_busy_machine(
    kind: str, trust: str, seeds: int
) -> None:
    speeds, pace, kills = KINDS[kind]
    claimed = credited = updates = 0
    for seed in range(seeds):
        changes = {"quorum.pace": pace, "run.trust": trust}
        fleet = BusyFleet(speeds, f"{kind} {seed}", kills, **changes)
        for until_s in range(5, LASTS_S, 5):
            fleet.work(BEGAN_S + until_s)
            assert fleet.accused() == [], (seed, until_s)
        taken = [one for record in fleet.records for one in record.inputs]
        updates += len(taken)
        claimed += sum(one.steps for one in taken)
        credited += sum(one.steps_credited for one in taken)
    assert updates > 30 * seeds
    # A late announcement took from the next one what it had too much of itself: 0.5 to 1.3 %.
    assert credited > 0.997 * claimed


# Who says what is not so


class Liar(Learner):
    """As another, but for what it says of its steps; or it sends nothing."""

    lies: ClassVar[dict[str, Any]] = {}
    sends_nothing = False

    def announce(self, manifest: wire.Manifest) -> None:
        if not self.sends_nothing:
            super().announce(manifest.model_copy(update=self.lies))


def said_of_a_liar(within_s: float, **powers: Any) -> str:
    """Returns the findings on one of four at the end of the first minute; honest ones have none."""
    fleet = BusyFleet((10, 10, 10), f"beside {powers}", **{"quorum.pace": 0.9})
    liar = type("Some", (Liar,), powers)(fleet, "liar", 10, 0.0)
    fleet.learners.append(liar)
    fleet.work(BEGAN_S + within_s)
    found = fleet.accused()
    assert {one.about for one in found} == {"learner liar"}
    return "; ".join(one.sentence for one in found)


@pytest.mark.parametrize(
    ("lies", "said"),
    [
        ({"step_time_s": 1e-9}, "says that a step of it takes 1e-09 s, and announces one every"),
        ({"step_time_s": 1e12}, "says that a step of it takes 1e+12 s, and announces one every"),
        ({"steps": 60_000, "tokens": 60_000 << 32}, "claim more steps than there was time for"),
    ],
)
def test_who_claims_what_the_tape_contradicts_is_named_within_a_minute(
    lies: dict[str, Any], said: str
) -> None:
    assert said in said_of_a_liar(60, lies=lies)


def test_who_sends_heartbeats_alone_is_named() -> None:
    # A busy one's three intervals take longer than a minute here.
    said = said_of_a_liar(150, sends_nothing=True)
    assert "says that it trains, and has announced nothing for" in said


def test_who_sends_what_is_no_message_is_named_with_it() -> None:
    fleet = BusyFleet((10, 10, 10), "garbage", **{"quorum.pace": 0.9})
    fleet.work(BEGAN_S + 20)
    for at in range(4):
        seq, subject = fleet.seen.extent.last_seq + 1, names.update("lab", "b", 0)
        assert fleet.accused() == []
        why = f"message of {1_000_000 + at} bytes"
        fleet.seen.take(InvalidMessage(seq, fleet.time.now_s, subject, why, 1_000_000))
    (one,) = fleet.accused()
    assert one.about == "learner b"
    assert "4 of its messages are none of the protocol's, the last of 1.0 MB: message of" in (
        one.sentence
    )
    assert one.since_s == fleet.time.now_s


def test_nobodys_word_of_its_speed_is_shown_as_work_of_all() -> None:
    fleet = BusyFleet((10, 10, 10), "boasts", **{"quorum.pace": 0.9})
    fleet.work(BEGAN_S + 120)
    for one in fleet.learners:
        one.beat(tokens_per_s=1e15 if one.name == "b" else 100.0)
    run = fleet.seen.run(fleet.time.now_s)
    assert {one.name: one.tokens_per_s for one in run.learners}["b"] == 1e15
    # Of at most ten steps a second, ten tokens each.
    assert 0 < run.tokens_per_s <= 300
