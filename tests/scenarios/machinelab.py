"""A fragment's machine on a bench: a tape in a list, joins, manifests and records made for it.

Shared by the scenario scripts and the property tests. The lab does what the driver does around
`aggregator/core/machine.py`, less the arrays: it keeps the tape, makes records of what is committed, and
can crash: `resume` from the last record and meet the tape again from its position.
"""

from derived import check_derived
from records import make_record

from diloco.aggregator.arrays.fragment import make_input as merged_input
from diloco.aggregator.core import events, machine, memory, rounds
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.decisions import decide
from diloco.aggregator.core.events import AskCut, Commit, Effect
from diloco.aggregator.core.state import State
from diloco.common.process.config import RunSettings, make_config
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.layout import Tensor, make_layout

BLOCK = 16
LAYOUT = make_layout([Tensor(name="w", shape=(32, 64), dtype="float32")], fragments=1, block=BLOCK)
CODEC = "int4"
# One fragment; H = 24; two shards an update.
BASIS = {
    "sync": {"fragments": 1, "interval_steps": 24, "block": BLOCK, "shard_elements": 1024},
    "quorum": {"pace": 0.0},
}


def lab_settings(**changes) -> RunSettings:
    """Settings of the lab's run; `changes` are "section.key": value."""
    document = {"run": {"name": "lab", "steps": 1 << 30}, "store": {"url": "unused"}}
    document |= {section: dict(values) for section, values in BASIS.items()}
    for key, value in changes.items():
        section, name = key.split(".")
        document.setdefault(section, {})[name] = value
    return make_config(document, source="lab").settings()


def lab_rules(**changes) -> formulas.FragmentRules:
    """Rules of the lab's fragment, of such settings."""
    return formulas.fragment_rules(lab_settings(**changes), LAYOUT, 0)


def digest_of(version: int) -> str:
    """Returns the lab's digest of the view of a version."""
    return f"{version:032x}"


def make_manifest(rules, learner, incarnation, seq, base=0, **changes) -> wire.Manifest:
    """A manifest as an honest learner sends it, with `changes`."""
    cuts = shards.shard_ranges(rules.size, rules.block, rules.shard_elements)
    fields = {
        "run": rules.run,
        "learner": learner,
        "epoch": rules.epoch,
        "incarnation": incarnation,
        "seq": seq,
        "fragment": rules.fragment,
        "base_version": base,
        "base_digest": digest_of(base),
        "layout": rules.layout,
        "codec": rules.codec,
        "shards": tuple(
            wire.Shard(
                name=names.shard(rules.run, learner, rules.fragment, 0, incarnation, seq, index),
                size_bytes=shards.shard_bytes(rules.codec, stop - start, rules.block),
                crc32c=0,
                slices=slices.of_range(start, stop, rules.block),
            )
            for index, (start, stop) in enumerate(cuts)
        ),
        "tokens": 240,
        "steps": 24,
        "position": 24 * seq,
        "local_step": 24 * seq,
        "loss": 2.0,
        "step_time_s": 1.0,
        "encode_s": 0.01,
        "upload_s": 0.1,
        "attempt": 0,
        "final": False,
    }
    # The wire's own checks hold here too: what the lab sends, a learner could send.
    return wire.decode(wire.Manifest, wire.encode(wire.Manifest(**(fields | changes))))


def record_of(rules, commit: Commit, base_digest: str) -> wire.Record:
    """The record that the driver would make of a commit, as far as the machine's part goes."""
    decided = decide(rules, commit)
    return make_record(
        **decided._asdict(),
        run=rules.run,
        epoch=rules.epoch,
        fragment=rules.fragment,
        base_digest=base_digest,
        layout=rules.layout,
        inputs=tuple(merged_input(taken, b"", 0) for taken in commit.state.admitted),
        # Of an outer step of 1.
        learning_rate=rounds.step_share(
            commit.state, participation=False, centered=rules.robust and not rules.averaged
        ),
        view_digest=digest_of(decided.version),
        outer_digest=digest_of(decided.version),
    )


class Lab:
    """One fragment's tape, machine and records. `step` is the only way into the machine."""

    def __init__(self, rules: formulas.FragmentRules) -> None:
        self.rules = rules
        self.tape: list[events.Event] = []
        self.stream_seq = 0
        self.records: list[wire.Record] = []
        self.record_seqs: list[int] = []
        self.open_commit: Commit | None = None
        self.unheard = False
        self.cut_asked = False
        genesis = State(
            version=0,
            record_seq=0,
            view_digest=digest_of(0),
            seen_seq=0,
        )
        self._store(Commit("verdict", "created", False, 0.0, genesis))
        self.state = memory.resume(self.records[-1], self.stream_seq, 0.0)

    def step(self, event: events.Event) -> tuple[Effect, ...]:
        """Give the machine an event; note the commit it asks for."""
        if isinstance(event, events.Committed):
            self.unheard = False
        if isinstance(event, events.CutKnown):
            self.cut_asked = False
        now_s = event.stored_at_s if isinstance(event, events.FromTape) else event.at_s
        self.state, effects = machine.step_at(self.rules, self.state, event, now_s)
        check_derived(self.state)
        for effect in effects:
            if isinstance(effect, AskCut):
                assert not self.cut_asked, "asked twice"
                self.cut_asked = True
            if isinstance(effect, Commit):
                assert not self.open_commit, "a second commit while one is open"
                assert not self.unheard, "a commit before the last one is known to be done"
                self.open_commit = effect
                if effect.what == "version":
                    made = events.Made(effect.at_s, digest_of(effect.state.version + 1))
                    effects += self.step(made)
        return effects

    def last_update(self) -> int:
        """Returns the sequence of the last update by the stream's leader; 0 for none."""
        found = [event.stream_seq for event in self.tape if isinstance(event, events.Announced)]
        return max(found, default=0)

    def put(self, make, *args) -> events.Event:
        """Store a message on the tape: `make(at_s, stream_seq, ...)` is its event."""
        self.stream_seq += 1
        at_s, *rest = args
        self.tape.append(make(at_s, self.stream_seq, *rest))
        return self.tape[-1]

    def commit(self, at_s: float) -> tuple[Effect, ...]:
        """The record that is open reaches the tape, and the machine hears of it."""
        self.store_record()
        return self.hear_of_record(at_s)

    def store_record(self) -> None:
        """The record that is open reaches the tape; learners may read it from now on."""
        assert self.open_commit is not None
        self._store(self.open_commit)
        self.open_commit = None
        self.unheard = True

    def roll_back(self, version: int) -> None:
        """An operator's record reaches the tape, and the machine's owner does not know it yet."""
        newest = self.records[-1]
        (origin,) = [r for r in self.records if r.version == version and r.what == "version"]
        self.stream_seq += 1
        restore = newest.model_copy(
            update={
                "what": "restore",
                "version": newest.version + 1,
                "restored_version": version,
                "inputs": (),
                "rejected": (),
                "view_digest": digest_of(newest.version + 1),
                "global_step": origin.global_step,
                "policy": newest.policy.model_copy(update={"floor": newest.version + 1}),
            }
        )
        self.records.append(wire.decode(wire.Record, wire.encode(restore)))
        self.record_seqs.append(self.stream_seq)

    def hear_of_record(self, at_s: float) -> tuple[Effect, ...]:
        """The machine hears that its record is on the tape."""
        return self.step(events.Committed(at_s, self.record_seqs[-1]))

    def crash(self, at_s: float) -> list[events.Event]:
        """Lose the machine; resume from the newest record. Gives what is to be read again."""
        self.open_commit, self.unheard, self.cut_asked = None, False, False
        newest = self.records[-1]
        self.state = memory.resume(newest, self.record_seqs[-1], at_s)
        return [event for event in self.tape if event.stream_seq >= newest.position]

    def deadline(self) -> float | None:
        """When the machine wants a timer."""
        return rounds.deadline(self.rules, self.state)

    def _store(self, commit: Commit) -> None:
        self.stream_seq += 1
        record = record_of(self.rules, commit, digest_of(commit.state.version))
        # Through the wire, so that whatever the machine remembers survives it.
        self.records.append(wire.decode(wire.Record, wire.encode(record)))
        self.record_seqs.append(self.stream_seq)
