"""Whatever happens to a fragment's machine, the oracle decides the same from tape and records.

The histories are those of `test_machine_properties.py`, with a hostile learner and an operator beside.
The machine's records are completed as the driver would complete them, and given to the oracle.
"""

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from machinelab import LAYOUT, Lab, lab_rules, lab_settings, make_manifest
from test_machine_properties import ACTIONS, History, OneLearner, name_of

from diloco.aggregator.core import events
from diloco.common.protocol import names, wire
from diloco.common.storage.tape import Entry, InvalidMessage, record_digest
from diloco.judge.oracle.finding import Violation
from diloco.judge.oracle.fragment_walk import Chain

HISTORIES = 60
EVENTS = 600
CHOICES = {
    "run.steps": [480, 1 << 30],
    "sync.mode": ["async", "async", "async", "lockstep"],
    "sync.overlap_steps": [0, 2, 20],
    "sync.snapshot_interval_versions": [1],
    "sync.warmup_steps": [0, 0, 60],
    "quorum.min_learners": [1, 2, 3, 4],
    "quorum.pace": [0.0, 0.1, 0.9],
    "quorum.deadline_s": [5.0, 60.0],
    "quorum.read_timeout_s": [2.0, 60.0],
    "quorum.grace_fraction": [0.0, 0.9],
    "staleness.rule": ["constant", "polynomial", "hinge", "exponential", "inverse"],
    "staleness.threshold": [0],
    "staleness.max_versions": [0, 0, 1],
    "bounds.max_steps_per_s": [10],
    "bounds.max_updates_per_s": [0.2, 20.0],
    "bounds.max_tokens_per_step": [100, 1 << 32],
    "bounds.norm_clip": [1.5, 10.0],
    "bounds.learners": [{}, {"a": {"max_steps_per_s": 3.0, "max_tokens_per_step": 20}}],
    "bounds.quarantine_offences": [2, 16],
    "run.trust": ["own", "others"],
}


class Judged(History):
    """A history of more kinds of events, whose records are judged."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        chosen = {key: self.rng.choice(values) for key, values in CHOICES.items()}
        self.lab = Lab(lab_rules(**chosen))
        self.settings = lab_settings(**chosen)
        self.odds |= {self.quarantine: 1, self.beside: 4, self.spread_norms: 12}
        self.odds |= {self.announce: 60, self.fetched: 40, self.commit: 60, self.join: 1}
        self.odds[self.stop] = self.rng.choice([0, 0, 0.5])

    def note(self, effects):
        """A hostile learner's manifests are ignored now and then."""
        super().note([e for e in effects if type(e).__name__ != "Ignored"])

    def quarantine(self) -> None:
        """An operator shuts a learner out, or lets it in again."""
        active = self.rng.random() < 0.3
        self.read(self.lab.put(events.Quarantined, self.now_s, self.rng.choice("abc"), active))

    def beside(self) -> None:
        """A manifest of another tape, of a life that nobody joined, or while one is in flight."""
        name = self.rng.choice("abc")
        if not self.lives[name]:
            return
        size_bytes = self.rng.choice([0, 0, 9_000, 400_000])
        if self.rng.random() < 0.2:
            self.read(self.lab.put(events.Undecoded, self.now_s, name, size_bytes))
            return
        life, kind = self.lives[name][-1], self.rng.choice(["epoch", "life", "flight"])
        sent = make_manifest(
            self.lab.rules, name, life + (kind == "life") * 10_000,
            self.sent.get((name, life), 0) + 1, epoch=int(kind == "epoch"),
        )  # fmt: skip
        if kind == "flight":
            self.sent[name, life] = sent.seq
        if kind != "epoch":
            self.updates.setdefault(name_of(sent), self.lab.stream_seq + 1)
        self.read(self.lab.put(events.Announced, self.now_s, sent, size_bytes))

    def spread_norms(self) -> None:
        """Updates that are longer than most, some by far: they are clipped."""
        if self.fetching:
            update = self.fetching.pop()
            self.step(events.Fetched(self.now_s, update, self.rng.choice([5.0, 30.0, 900.0])))

    def wait(self) -> None:
        """Timers are told as their time comes, as a driver does that nothing holds up."""
        until_s = self.now_s + self.rng.choice([0.1, 1.0, 10.0, 100.0])
        for _ in range(9):
            due_s = self.lab.deadline()
            if due_s is None or due_s > until_s:
                break
            self.now_s = max(self.now_s, due_s)
            super().step(events.Timer(self.now_s))
        self.now_s = until_s

    def step(self, event):
        """... and before anything else that comes at that time."""
        due_s = self.lab.deadline()
        if due_s is not None and due_s < self.now_s and not isinstance(event, events.Timer):
            super().step(events.Timer(self.now_s))
        if isinstance(event, events.FromTape) and self.now_s > self.lab.state.now_s:
            super().step(events.Tick(self.now_s))
        return super().step(event)

    def crash(self) -> None:
        """The next life's clock goes on from this one's."""
        self.now_s += 500.0
        super().crash()
        self.now_s = self.lab.state.now_s

    def check_records(self) -> None:
        """The oracle does, at the end."""
        for record in self.lab.records[self.checked + 1 :]:
            for fate in (*record.inputs, *record.rejected):
                self.fates[fate.learner, fate.incarnation, fate.seq] += 1
        self.checked = len(self.lab.records) - 1

    def play(self) -> None:
        """As before; what is dropped without a verdict is never resolved."""
        for name in "abc"[: self.rng.randint(1, 3)]:
            self.join(name)
        for action in self.rng.choices(list(self.odds), self.odds.values(), k=EVENTS):
            action()
        self.stop()
        self.read_again(len(self.unread))

    # The tape

    def body(self, event: events.Event) -> wire.Body:
        """The message of an event."""
        match event:
            case events.Announced():
                return event.manifest
            case events.Joined():
                return wire.Join(
                    run="lab", learner=event.learner, layout=LAYOUT.digest, host="",
                    holds=event.holds,
                )  # fmt: skip
            case events.Departed() | events.Finished():
                fragments = (0,) if isinstance(event, events.Finished) else ()
                return wire.Leave(
                    run="lab", learner=event.learner, incarnation=event.incarnation, position=0,
                    fragments=fragments,
                )  # fmt: skip
            case events.Quarantined():
                return wire.Quarantine(
                    run="lab", learner=event.learner, active=event.active, reason="",
                    by="operator",
                )  # fmt: skip
        return wire.Stop(run="lab", global_step=0, reason="steps", by="test")

    def item(self, event: events.Event) -> Entry | InvalidMessage:
        """The message of an event, as a reader of the tape has it."""
        at, size_bytes = (event.stream_seq, event.stored_at_s), getattr(event, "size_bytes", 1)
        if isinstance(event, events.Undecoded):
            return InvalidMessage(*at, names.update("lab", event.learner, 0), "", size_bytes)
        return Entry(*at, "", self.body(event), size_bytes)

    def items(self) -> list[Entry | InvalidMessage]:
        """The tape, with completed records."""
        found = [self.item(event) for event in self.lab.tape]
        before = None
        for seq, record in zip(self.lab.record_seqs, self.lab.records, strict=True):
            done = self.completed(record, before)
            found.append(Entry(seq, 0.0, names.record("lab", 0), done, 1))
            before = (seq, done)
        return sorted(found, key=lambda entry: entry.seq)

    def completed(self, record: wire.Record, before) -> wire.Record:
        """Completes a record by the driver's part: sums, objects and the size of the step."""
        outer = self.settings.outer
        share = record.learning_rate if record.what == "version" else 1.0
        fields = {"learning_rate": outer.learning_rate * share, "deltas": ()}
        fields["momentum"] = outer.momentum**share
        if before is None:
            record = record.model_copy(update={"what": "version", "position": 1})
        else:
            base_seq, base = before
            fields |= {"totals": sums(base.totals, record), "base_digest": base.view_digest}
            fields["previous"] = record_digest(base)
            if record.what == "verdict":
                fields |= {"outer_seq": base.outer_seq or base_seq, "delta": None}
        if record.what == "version":
            fields |= {"snapshot_version": record.version, "outer_version": record.version}
            fields |= {
                "outer_seq": 0,
                "snapshot": stored("view", record.version),
                "outer": stored("outer", record.version),
                "delta": stored("delta", record.version),
            }
        elif before is not None:
            fields |= {
                name: getattr(before[1], name)
                for name in ("snapshot", "snapshot_version", "outer", "outer_version",
                             "view_digest", "outer_digest")
            }  # fmt: skip
        return record.model_copy(update=fields)

    def judge(self) -> tuple[list[Violation], Chain]:
        """Returns the oracle's findings."""
        chain = Chain(LAYOUT, self.settings, {}, 0)
        chain.late_s = 1e-6
        findings = []
        for entry in self.items():
            if isinstance(entry, InvalidMessage):
                chain.pass_over(entry)
                continue
            chain.hear(entry)
            if isinstance(entry.body, wire.Record):
                findings += chain.judge(entry.body, entry.seq)
        return findings, chain


def stored(what: str, version: int) -> wire.ObjectRef:
    """An object of a version."""
    name = names.version_object("lab", 0, version, what, "0" * 32)
    return wire.ObjectRef(name=name, size_bytes=1, crc32c=0)


def sums(before: wire.Totals, record: wire.Record) -> wire.Totals:
    """The totals with one more record."""
    taken, not_taken = record.inputs, record.rejected
    fields = {
        "updates_merged": before.updates_merged + len(taken),
        "updates_rejected": before.updates_rejected + len(not_taken),
        "tokens_merged": before.tokens_merged + sum(one.tokens for one in taken),
        "tokens_rejected": before.tokens_rejected + sum(one.tokens for one in not_taken),
        "steps_merged": before.steps_merged + sum(one.steps for one in taken),
        "tokens_credited": before.tokens_credited + sum(one.tokens_credited for one in taken),
    }
    return wire.Totals(**{name: min(value, wire.GREATEST) for name, value in fields.items()})


@pytest.mark.parametrize("part", range(2))
def test_the_oracle_decides_every_history_alike(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, HISTORIES, 2):
        history = Judged(seed)
        try:
            history.play()
            findings, chain = history.judge()
            assert [finding.sentence for finding in findings] == []
            assert not chain.unknown
        except BaseException as error:
            error.add_note(f"seed {seed}: Judged({seed}).play() repeats it")
            raise
        seen["followed"] += chain.followed
        for record in history.lab.records:
            seen[record.reason] += 1
            seen.update(one.reason for one in record.rejected)
            seen["clipped"] += sum(one.clip < 1 for one in record.inputs)
            seen["stale"] += sum(one.discount < 1 for one in record.inputs)
            seen["credited less"] += sum(one.steps_credited < one.steps for one in record.inputs)
            seen["capped"] += sum(
                one.tokens_credited < one.tokens * one.steps_credited // one.steps
                for one in record.inputs
            )
            seen["alone"] += record.learning_rate < history.settings.outer.learning_rate
    # What is never met is not judged.
    for what in ("complete", "grace", "deadline", "rejections", "quarantined", "superseded",
                 "unknown_incarnation", "stale", "clipped", "credited less", "capped",
                 "alone", "not_held"):  # fmt: skip
        assert seen[what], f"no history has {what}: {dict(seen)}"
    assert seen["followed"] > 10 * HISTORIES / 2


class JudgedLives(Judged, OneLearner):
    """One learner that begins life after life, whose records are judged."""

    def __init__(self) -> None:
        super().__init__(0)
        chosen = {"quorum.read_timeout_s": 5.0, "sync.snapshot_interval_versions": 1}
        self.lab, self.settings = Lab(lab_rules(**chosen)), lab_settings(**chosen)


@given(st.lists(ACTIONS, max_size=24))
@example([
    OneLearner.begin_life, OneLearner.crash_loop, OneLearner.recover, OneLearner.read_oldest,
    OneLearner.end_round, OneLearner.announce_oldest_again, OneLearner.recover,
])  # fmt: skip
def test_the_oracle_decides_alike_through_any_lives_and_recoveries(actions) -> None:
    one = JudgedLives()
    for action in actions:
        action(one)
    one.come_to_an_end()
    findings, chain = one.judge()
    assert [finding.sentence for finding in findings] == []
    assert not chain.unknown
