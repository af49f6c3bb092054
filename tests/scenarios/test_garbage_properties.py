"""Garbage collection takes nothing that anybody needs, and all the rest.

A history plays one fragment: lives of learners, their updates, versions, verdicts, rollbacks,
checkpoints, candidates that lost their race, drawn from a seed. It collects now and then, as
`aggregator/owner/garbage_collector.py` does, and goes on with what is left. What must be there is said here a
second time, in terms of what the history knows, without the planner.
"""

import random
from dataclasses import dataclass, field

import pytest
from records import make_input, make_record, make_ref

from diloco.aggregator.core import garbage, memory
from diloco.aggregator.core.garbage import Announcers, Ledger
from diloco.aggregator.core.updates import UpdateId
from diloco.common.protocol import names, slices, wire

RUN, FRAGMENT, EPOCH = "lab", 3, 1
LEARNERS = ("a", "b", "c")
SHARDS = 2
EVENTS = 250
HISTORIES = 300


def object_of(version: int, what: str, digest: int) -> str:
    return names.version_object(RUN, FRAGMENT, version, what, f"{digest:032x}")


def shards_of(update: UpdateId, epoch: int = EPOCH) -> list[str]:
    return [
        names.shard(RUN, update.learner, FRAGMENT, epoch, *update[1:], i) for i in range(SHARDS)
    ]


def make_shard(name: str) -> wire.Shard:
    return wire.Shard(name=name, size_bytes=1, crc32c=0, slices=slices.of_range(0, 1, 1))


def with_marks(marks: dict[tuple[str, int], int]) -> wire.PolicyState:
    kept = tuple(
        wire.Mark(learner=who, incarnation=life, seq=seq, stream_seq=1)
        for (who, life), seq in marks.items()
    )
    return wire.PolicyState(**(dict(memory.beginning()) | {"marks": kept}))


@dataclass
class TapeRecord:
    """A record on the tape."""

    record: wire.Record
    seq: int
    at_s: float
    body: str | None


@dataclass
class Life:
    """A learner's newest life: its update on the way, if it has one."""

    incarnation: int
    seq: int = 0
    flying: UpdateId | None = None
    announced: bool = False


@dataclass
class History:
    """One fragment's tape and store, and what is true of them."""

    rng: random.Random
    every: int  # versions between snapshots
    replay_window_s: float
    keep: int
    resumed: bool
    haste: float  # how soon updates are merged
    seq: int = 10
    snapshots: int = 0
    now_s: float = 1000.0
    tape: list[TapeRecord] = field(default_factory=list)
    manifests: dict[int, UpdateId] = field(default_factory=dict)
    store: dict[str, int] = field(default_factory=dict)
    lives: dict[str, Life] = field(default_factory=dict)
    pending: dict[UpdateId, int] = field(default_factory=dict)
    marks: dict[tuple[str, int], int] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    ledger: Ledger = field(default_factory=lambda: Ledger(RUN, FRAGMENT, EPOCH))
    collections: int = 0
    deleted: int = 0

    def __post_init__(self) -> None:
        first = self.rng.randrange(30) if self.resumed else 0
        if self.resumed:
            # What the tape before this one has left.
            for version in range(first + 20):
                self.put(object_of(version, self.rng.choice(["delta", "view", "outer"]), 77))
            for seq in range(4):
                for name in shards_of(UpdateId("a", 9, seq), EPOCH - 1):
                    self.put(name)
        self.commit("restored" if self.resumed else "version", first, (), ())

    # What happens

    @property
    def newest(self) -> TapeRecord:
        return self.tape[-1]

    def put(self, name: str) -> None:
        self.store[name] = self.store.get(name, self.rng.randrange(1, 100))

    def next_seq(self) -> int:
        self.seq += self.rng.randrange(1, 4)
        return self.seq

    def commit(self, what, version, inputs, refused, restored_version=None) -> None:
        before = self.tape[-1].record if self.tape else None
        digest = self.rng.randrange(1 << 60)
        made = what != "verdict"
        whole = made and (before is None or what == "restore" or version % self.every == 0)
        delta = None
        if what == "version" and before is not None:
            delta = make_ref(object_of(version, "delta", digest))
            self.put(delta.name)
        fields = {"snapshot": None, "outer": None, "snapshot_version": version, "deltas": ()}
        self.snapshots += whole
        if whole:
            for field_name, kind in (("snapshot", "view"), ("outer", "outer")):
                fields[field_name] = make_ref(object_of(version, kind, digest))
                self.put(fields[field_name].name)
        else:
            fields = {
                "snapshot": before.snapshot,
                "outer": before.outer,
                "snapshot_version": before.snapshot_version,
                "deltas": before.deltas + ((delta,) if delta else ()),
            }
        body = None
        if self.rng.random() < 0.2:
            body = object_of(version + (what == "verdict"), "record", digest)
            self.put(body)
        for update in (*inputs, *refused):
            self.marks[update[:2]] = update.seq
            del self.pending[update]
            life = self.lives[update.learner]
            if life.flying == update:
                life.flying = None
        seq = self.next_seq()
        record = make_record(
            what=what,
            version=version,
            restored_version=restored_version,
            inputs=tuple(
                make_input(
                    learner=u.learner,
                    incarnation=u.incarnation,
                    seq=u.seq,
                    shards=tuple(make_shard(name) for name in shards_of(u)),
                )
                for u in inputs
            ),
            delta=delta,
            **fields,
            outer_version=fields["snapshot_version"],
            position=min(self.pending.values(), default=seq),
            policy=with_marks(self.newest_marks()),
        )
        self.tape.append(TapeRecord(record, seq, self.now_s, body))

    def newest_marks(self) -> dict[tuple[str, int], int]:
        """Records keep the marks of a learner's newest lives alone."""
        kept = {}
        for who in LEARNERS:
            own = sorted(key for key in self.marks if key[0] == who)
            kept |= {key: self.marks[key] for key in own[-2:]}
        return kept

    def join(self) -> None:
        self.lives[self.rng.choice(LEARNERS)] = Life(self.next_seq())

    def upload(self) -> None:
        idle = [name for name, life in self.lives.items() if life.flying is None]
        if not idle:
            return
        life = self.lives[name := self.rng.choice(idle)]
        life.seq += 1
        life.flying, life.announced = UpdateId(name, life.incarnation, life.seq), False
        for shard in shards_of(life.flying):
            self.put(shard)

    def announce(self) -> None:
        for life in self.lives.values():
            if life.flying and not life.announced and self.rng.random() < 0.6:
                life.announced = True
                seq = self.next_seq()
                self.manifests[seq] = life.flying
                self.pending[life.flying] = seq

    def version(self) -> None:
        taken = [update for update in self.pending if self.rng.random() < self.haste]
        cut = self.rng.randrange(len(taken) + 1)
        inputs, refused = taken[cut:], taken[:cut]
        if inputs:
            self.commit("version", self.newest.record.version + 1, inputs, refused)
        elif refused:
            self.commit("verdict", self.newest.record.version, (), refused)

    def restore(self) -> None:
        version = self.newest.record.version
        target = self.rng.choice([at.record.version for at in self.tape])
        self.commit("restore", version + 1, (), (), restored_version=target)

    def lose_race(self) -> None:
        """Somebody stores what never gets a record, for a version that is next or has been."""
        version = self.newest.record.version + self.rng.randrange(-3, 2)
        for what in ("delta", "view", "outer", "record"):
            if version >= 0 and self.rng.random() < 0.5:
                self.put(object_of(version, what, self.rng.randrange(1 << 60)))

    def stray(self) -> None:
        """Adds objects that are not ours to judge."""
        self.put(names.version_object(RUN, FRAGMENT + 1, 0, "view", "0" * 32))
        self.put(names.shard(RUN, "a", FRAGMENT + 1, EPOCH - 1, 1, 1, 0))
        self.put(names.shard(RUN, "a", FRAGMENT, EPOCH + 1, 1, 1, 0))
        self.put(names.fragment_prefix(RUN, FRAGMENT) + "readme")
        self.put(names.updates_prefix(RUN, "a", FRAGMENT) + "readme")

    def checkpoint(self) -> None:
        name = f"{EPOCH:04d}-{self.next_seq():012d}"
        version = self.checkpoints[name] = self.newest.record.version
        for what in ("view", "outer"):
            self.put(object_of(version, what, 5))
        if self.rng.random() < 0.8:
            self.whole.add(name)

    def pass_time(self) -> None:
        self.now_s += self.rng.expovariate(1 / 20)

    def play(self) -> None:
        weighed = {
            self.join: self.rng.choice([0.1, 1.0]),
            self.upload: 6,
            self.announce: 5,
            self.version: 6,
            self.restore: self.rng.choice([0, 0.3]),
            self.lose_race: 0.7,
            self.stray: 0.2,
            self.checkpoint: 0.4,
            self.pass_time: 4,
            self.collect: 1,
        }
        for _ in range(EVENTS):
            (event,) = self.rng.choices([*weighed], [*weighed.values()])
            event()
        self.collect()

    # Collecting

    def fleet(self) -> Announcers:
        lives = {name: life.incarnation for name, life in self.lives.items()}
        return Announcers(lives, frozenset(self.pending))

    def pinned(self) -> set[int]:
        kept = garbage.pinned_checkpoints(self.checkpoints, self.whole, self.keep)
        return {self.checkpoints[name] for name in kept}

    def plan(self, ledger: Ledger) -> garbage.GarbagePlan:
        for at in self.tape:
            ledger.take(at.record, at.seq, at.at_s, at.body)
        plan = garbage.plan(
            ledger,
            list(self.store.items()),
            fleet=self.fleet(),
            pinned=self.pinned(),
            replay_window_s=self.replay_window_s,
        )
        assert plan is not None
        return plan

    def collect(self) -> None:
        anew = self.rng.random() < 0.3
        ledger = Ledger(RUN, FRAGMENT, EPOCH) if anew else self.ledger
        before = dict(self.store)
        plan = self.plan(ledger)
        for trim in plan.trims:
            self.trim(trim)
        ledger.forget_below(plan.floor_seq)
        self.ledger = ledger
        for item in plan.objects:
            assert self.store.pop(item.name) == item.size_bytes
        self.collections += 1
        self.deleted += len(plan.objects)
        self.check(before)

    def trim(self, trim: garbage.Trim) -> None:
        """As `Bus.trim`."""
        if trim.subject == names.record(RUN, FRAGMENT):
            last = self.newest.seq
            self.tape = [at for at in self.tape if at.seq >= trim.below_seq or at.seq == last]
            return
        own = [s for s, u in self.manifests.items() if update_subject(u) == trim.subject]
        for seq in own:
            if seq < trim.below_seq and seq != max(own):
                del self.manifests[seq]

    # What must hold

    def check(self, before: dict[str, int]) -> None:
        self.check_recovery()
        self.check_learners()
        self.check_replay()
        self.check_pending()
        self.check_checkpoints(before)
        self.check_strays(before)
        self.check_twice()
        self.check_nothing_else_stays()

    def needs(self, *objects: str) -> None:
        missing = [name for name in objects if name not in self.store]
        assert not missing, missing

    def wholes(self) -> list[int]:
        """Indices on the tape of records that stored view and outer state of their version."""
        return [
            index
            for index, at in enumerate(self.tape)
            if at.record.what != "verdict" and at.record.snapshot_version == at.record.version
        ]

    def check_recovery(self) -> None:
        """(i) Outer state and the inputs since, from the newest snapshot and the one before."""
        assert len(self.wholes()) >= min(2, self.snapshots)
        for whole in self.wholes()[-2:]:
            begin = self.tape[whole].record
            self.needs(begin.snapshot.name, begin.outer.name)
            self.needs(*(n for at in self.tape[whole + 1 :] for n in inputs_of(at)))
        newest = self.newest.record
        assert newest.snapshot_version in {self.tape[i].record.version for i in self.wholes()}
        assert self.newest.record.position <= min(self.pending.values(), default=1 << 60)
        for update, seq in self.pending.items():
            assert self.manifests[seq] == update

    def check_learners(self) -> None:
        """(ii) From any record's view on, by deltas and by what rollbacks stored."""
        for at in self.tape:
            record = at.record
            self.needs(record.snapshot.name, *(delta.name for delta in record.deltas))
            if at.body:
                self.needs(at.body)
        for at in self.tape[1:]:
            if at.record.what == "version":
                self.needs(at.record.delta.name)
        versions = [at.record.version for at in self.tape if at.record.what != "verdict"]
        assert versions == [*range(versions[0], versions[0] + len(versions))]

    def check_replay(self) -> None:
        """(iii) Each version of the window is made again from states stored before it."""
        for index, at in enumerate(self.tape):
            young = at.at_s > self.newest.at_s - self.replay_window_s
            if young and at.record.inputs:
                begin = max(whole for whole in self.wholes() if whole < index)
                stored = self.tape[begin].record
                self.needs(stored.snapshot.name, stored.outer.name)
                self.needs(*(n for a in self.tape[begin + 1 : index + 1] for n in inputs_of(a)))

    def check_pending(self) -> None:
        """(iv) What waits for its verdict, and what may still be announced."""
        for update in self.pending:
            self.needs(*shards_of(update))
        for life in self.lives.values():
            if life.flying:
                self.needs(*shards_of(life.flying))

    def check_checkpoints(self, before: dict[str, int]) -> None:
        """(v) View and outer state of the versions of the newest checkpoints."""
        newest = [*sorted(self.checkpoints)[-self.keep :], *sorted(self.whole)[-self.keep :]]
        pinned = {self.checkpoints[name] for name in newest}
        for name in before:
            made = names.parse_version_object(RUN, FRAGMENT, name)
            if made and made.version in pinned and made.what in ("view", "outer"):
                self.needs(name)

    def check_strays(self, before: dict[str, int]) -> None:
        """Checks that no object of others, or of a version that may be under commit, is removed."""
        for name in before:
            made = names.parse_version_object(RUN, FRAGMENT, name)
            if is_stray(name) or (made and made.version > self.newest.record.version):
                self.needs(name)

    def check_twice(self) -> None:
        """(vi) A second look finds nothing more, with the ledger kept or made anew."""
        for ledger in (self.ledger, Ledger(RUN, FRAGMENT, EPOCH)):
            again = self.plan(ledger)
            assert again.objects == ()
            assert again.floor_seq == self.tape[0].seq

    def check_nothing_else_stays(self) -> None:
        """(vii) Whatever is left has a reason."""
        reasons = set()
        for index, at in enumerate(self.tape):
            record = at.record
            reasons |= {record.snapshot.name, record.outer.name, at.body}
            if index:
                reasons |= {*inputs_of(at)} | ({record.delta.name} if record.delta else set())
        for update in self.pending:
            reasons |= {*shards_of(update)}
        for life in self.lives.values():
            reasons |= {*shards_of(life.flying)} if life.flying else set()
        for name in self.store:
            made = names.parse_version_object(RUN, FRAGMENT, name)
            future = made and made.version > self.newest.record.version
            pinned = made and made.version in self.pinned() and made.what in ("view", "outer")
            # A shard of somebody who has no life here: the whole run's collection knows more.
            unknown = names.parse_shard(RUN, name)
            unknown = unknown and unknown.epoch == EPOCH and unknown.learner not in self.lives
            assert name in reasons or future or pinned or unknown or is_stray(name), name
        self.check_floor()

    def check_floor(self) -> None:
        """The tape begins no earlier than the rules want: one snapshot later breaks one."""
        wholes = self.wholes()
        assert wholes[0] == 0
        if len(wholes) <= 2:
            return
        second = wholes[1]
        young = [
            index
            for index, at in enumerate(self.tape)
            if at.record.inputs and at.at_s > self.newest.at_s - self.replay_window_s
        ]
        stands_alone = [
            at
            for at in self.tape[:second]
            if at.record.what != "verdict"
            and not at.record.inputs
            and at.at_s > self.newest.at_s - self.replay_window_s
        ]
        assert (young and young[0] <= second) or stands_alone


def inputs_of(at: TapeRecord) -> list[str]:
    return [shard.name for taken in at.record.inputs for shard in taken.shards]


def update_subject(update: UpdateId) -> str:
    return names.update(RUN, update.learner, FRAGMENT)


def is_stray(name: str) -> bool:
    sent = names.parse_shard(RUN, name)
    if sent is not None:
        return sent.fragment != FRAGMENT or sent.epoch > EPOCH
    return names.parse_version_object(RUN, FRAGMENT, name) is None


def history(seed: int) -> History:
    rng = random.Random(seed)
    return History(
        rng=rng,
        every=rng.choice([1, 2, 3, 8]),
        replay_window_s=rng.choice([0.0, 0.0, 50.0, 300.0, 1e9]),
        keep=rng.choice([1, 2, 3]),
        resumed=rng.random() < 0.3,
        haste=rng.choice([0.2, 0.6]),
    )


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_what_goes_is_garbage_and_all_garbage_goes(seed):
    history(seed).play()


def test_nothing_goes_where_the_records_do_not_reach_back_to_a_snapshot():
    played = next(at for at in map(history, range(HISTORIES)) if at.every == 8)
    for _ in range(EVENTS):
        played.join()
        played.upload()
        played.announce()
        played.version()
    ledger = Ledger(RUN, FRAGMENT, EPOCH)
    assert garbage.plan(ledger, [], fleet=played.fleet(), pinned=(), replay_window_s=0.0) is None
    hole = next(at for at in played.tape if at.record.snapshot_version < at.record.version)
    ledger.take(hole.record, hole.seq, hole.at_s, hole.body)
    found = list(played.store.items())
    assert garbage.plan(ledger, found, fleet=played.fleet(), pinned=(), replay_window_s=0.0) is None
    # Nor where they reach one snapshot: should that be damaged, only older objects are left.
    for at in played.tape[played.tape.index(hole) :]:
        ledger.take(at.record, at.seq, at.at_s, at.body)
        if at.record.snapshot_version == at.record.version:
            break
    assert [entry.whole for entry in ledger.entries].count(True) == 1
    assert garbage.plan(ledger, found, fleet=played.fleet(), pinned=(), replay_window_s=0.0) is None


def test_joins_and_leaves_stay_from_where_the_slowest_fragment_would_read_again():
    assert garbage.plan_run("r", [30, 12, 44], ["b", "a"], []) == (
        garbage.Trim("diloco.r.join.a", 12),
        garbage.Trim("diloco.r.leave.a", 12),
        garbage.Trim("diloco.r.join.b", 12),
        garbage.Trim("diloco.r.leave.b", 12),
    )


def test_joins_stay_from_the_oldest_incarnation_on_whose_messages_may_have_come_too_late():
    marked = [("a", 9), ("a", 4), ("a", 7), ("b", 20)]
    assert garbage.plan_run("r", [30, 12], ["b", "a"], marked) == (
        garbage.Trim("diloco.r.join.a", 4),
        garbage.Trim("diloco.r.leave.a", 12),
        garbage.Trim("diloco.r.join.b", 12),
        garbage.Trim("diloco.r.leave.b", 12),
    )
