"""The checkers: what must hold after every message stored and every object stored or deleted.

They keep accounts of their own, from what the broker and the store hold, and believe no actor.
The first thing that does not hold ends the simulation as a `Violation`.
"""

import bisect
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from simgarbage import GarbageChecker
from simoracle import Beside
from simstore import AsStored
from simtensors import TOKENS, Covers, Light

from diloco.common import names, shards, wire
from diloco.common.bus import Message
from diloco.common.errors import DilocoError, WireError
from diloco.common.tape import decode, decode_as

if TYPE_CHECKING:
    from simworld import World

# The learner that lies.
LIAR_INDEX = 15
LIAR = f"learner-{LIAR_INDEX}"
# Why an honest update may be rejected.
HONEST = {"superseded", "ended", "late", "missing", "rolled_back", "stale"}


class Violation(Exception):  # noqa: N818 - no error of ours, but of what is tested
    """Something that must hold does not.

    Args:
        rule: names the checker.
        about: the fragment, learner or object concerned, as it stands in traces.
    """

    def __init__(self, rule: str, about: str, what: str) -> None:
        super().__init__(rule, about, what)
        self.rule = rule
        self.about = about
        self.what = what

    def __str__(self) -> str:
        return f"{self.rule}: {self.about}: {self.what}"


class UpdateId(NamedTuple):
    learner: str
    incarnation: int
    seq: int


class Sent(NamedTuple):
    """An update whose manifest is on the tape; the manifest is forgotten once it is resolved."""

    manifest: wire.Manifest | None
    covers: Covers


@dataclass
class Chain:
    """A fragment as the tape has it.

    `unresolved` holds each update without a record, oldest first; `merged` the steps merged of
    each learner, as sorted starts and their stops.
    """

    record: wire.Record | None = None
    record_seq: int = 0
    sent: dict[UpdateId, Sent] = field(default_factory=dict)
    unresolved: dict[UpdateId, int] = field(default_factory=dict)
    fates: Counter[str] = field(default_factory=Counter)
    merged: dict[int, tuple[list[int], list[int]]] = field(
        default_factory=lambda: defaultdict(lambda: ([], []))
    )
    # Where the next update of a life begins, and how far any life has sent.
    next_start: dict[tuple[str, int], int] = field(default_factory=dict)
    until: dict[str, int] = field(default_factory=dict)
    digests: dict[int, tuple[str, str]] = field(default_factory=dict)
    restores: int = 0
    # What the first record of the epoch must be, and the sums that it brings along.
    begins_with: wire.Record | None = None
    before: tuple[int, ...] = (0, 0, 0, 0, 0)


class Checkers:
    """All invariants of one run.

    Args:
        world: whose broker and store call `on_message`, `on_stored` and `on_deleted`.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self.chains = [Chain() for _ in world.layout.fragments]
        self.joined: dict[str, int] = {}
        self.stopped = False
        self.end_seq = 0
        self.epoch = 0
        self.past: Counter[str] = Counter()
        self.oracle = Beside(world.layout, light=isinstance(world.tensors, Light))
        # Of hostile learners: updates by fragment, and whether each may be merged.
        self.hostile: dict[tuple[int, UpdateId], bool] = {}
        # Words about each learner that was ever shut out, oldest first: sequence, and whether it is.
        self.words: defaultdict[str, list[tuple[int, bool]]] = defaultdict(list)
        self.garbage = GarbageChecker(
            world.run_name,
            len(self.chains),
            replay_window_s=world.gc.replay_window_s,
            keep_checkpoints=world.gc.keep_checkpoints,
            hold=self._hold,
            sent=self._may_be_merged,
        )
        self._handlers = {
            "join": self._on_join,
            "update": self._on_update,
            "record": self._on_record,
            "checkpoint": self._on_checkpoint,
            "quarantine": self._on_quarantine,
            "stop": self._on_stop,
            "end": self._on_end,
        }

    def begin_epoch(self, epoch: int, file: wire.CheckpointFile) -> None:
        """From here on there is a new tape, which begins with a checkpoint; the old one is lost."""
        self.past = self.fates()
        self.past["abandoned"] += self.past.pop("in_flight")
        self.epoch, self.joined, self.stopped = epoch, {}, False
        self.hostile = {}
        self.words.clear()
        for learner in {name for record in file.records for name in record.policy.quarantined}:
            self.words[learner].append((0, True))
        digests = [chain.digests for chain in self.chains]
        self.chains = [Chain() for _ in self.chains]
        for record, known in zip(file.records, digests, strict=True):
            chain = self.chains[record.fragment]
            chain.begins_with, chain.before = record, _sums(record.totals)
            chain.until = dict(file.specification.positions)
            chain.digests = {v: pair for v, pair in known.items() if v <= record.version}
        self.garbage.begin_epoch(file)

    # Hooks

    def on_message(self, stream: str, message: Message) -> None:
        if stream != names.tape_stream(self._world.run_name):
            return
        subject = names.parse_subject(message.subject)
        handler = self._handlers.get(subject.kind) if subject else None
        if handler is not None:
            self._guard(handler, message)
        self._guard(self._ask_oracle, message)

    def _ask_oracle(self, message: Message) -> None:
        for finding in self.oracle.take(message, self._stored, self._world.injected):
            if finding.rule == "data" and LIAR in finding.about:
                continue  # Of its own data everybody may lie.
            raise Violation(f"oracle-{finding.rule}", finding.about, finding.sentence)

    def on_stored(self, name: str) -> None:
        """A new object is there."""

    def on_deleted(self, name: str) -> None:
        """An object is about to go."""
        self._guard(self.garbage.on_deleted, name)

    def on_trimming(self, stream: str, subject: str, below_seq: int) -> None:
        """Messages of a subject below a sequence are about to go."""
        self._guard(self.garbage.on_trimming, stream, subject, below_seq)

    def _may_be_merged(self, shard: names.ShardName) -> bool:
        """Whether the update of a shard is not resolved, and not void either."""
        chain = self.chains[shard.fragment]
        update = UpdateId(shard.learner, shard.incarnation, shard.seq)
        if shard.epoch != self.epoch or shard.learner == LIAR:
            return False
        joined_seq = self.joined.get(shard.learner, 0)
        announced_seq = chain.unresolved.get(update)
        if announced_seq is not None:  # Of an older life it counts if it came before the join.
            return shard.incarnation >= joined_seq or announced_seq < joined_seq
        return update not in chain.sent and shard.incarnation >= joined_seq

    @property
    def _stored(self) -> AsStored:
        return AsStored(self._world.store)

    def _guard(self, handler, *arguments) -> None:
        """Whatever a checker finds ends the simulation, not the actor that was the occasion."""
        try:
            handler(*arguments)
        except Violation as violation:
            self._world.fail(violation)
        except (DilocoError, ValueError, KeyError, AssertionError) as error:
            self._world.fail(Violation("readable", str(arguments[0])[:200], repr(error)))

    # The tape

    def _on_join(self, message: Message) -> None:
        join = decode_as(wire.Join, message.subject, message.payload)
        self.joined[join.learner] = message.seq

    def _on_update(self, message: Message) -> None:
        try:
            manifest = decode_as(wire.Manifest, message.subject, message.payload)
        except WireError:
            if names.subject_learner(message.subject) == LIAR:
                return  # It is no update, and nobody answers it.
            raise
        chain = self.chains[manifest.fragment]
        update = UpdateId(manifest.learner, manifest.incarnation, manifest.seq)
        known = chain.sent.get(update)
        if known is not None:
            if known.manifest is not None and manifest.learner != LIAR:
                same = known.manifest.model_copy(update={"attempt": manifest.attempt}) == manifest
                self._hold(same, "manifest", update, "announced again with other contents")
            return
        if manifest.epoch != self.epoch:
            return  # Of a process that goes on with a tape that is lost: nobody may resolve it.
        if manifest.learner == LIAR:
            covers = Covers(LIAR_INDEX, manifest.position - 1, manifest.position)
            chain.sent[update] = Sent(manifest, covers)
            return
        covers = self._covers(update, manifest)
        chain.sent[update] = Sent(manifest, covers)
        chain.unresolved[update] = message.seq
        chain.fates["sent"] += 1
        chain.fates["tokens_sent"] += manifest.tokens
        self._check_data(chain, update, covers)

    def _covers(self, update: UpdateId, manifest: wire.Manifest) -> Covers:
        world = self._world
        for entry in manifest.shards:
            if entry.name not in world.store:
                if update.incarnation < self.joined.get(update.learner, 0):
                    # It comes late, of a life that another has followed: it will be rejected, and
                    # garbage collection waits for no such message.
                    learner = int(manifest.learner.rsplit("-", 1)[1])
                    return Covers(learner, manifest.position, manifest.position)
                raise Violation("objects", str(update), f"no {entry.name}")
        covers = world.tensors.covers(self._stored, manifest, world.layout.block)
        if (
            f"learner-{covers.learner}" != manifest.learner
            or covers.stop - covers.start != manifest.steps
            or manifest.tokens != manifest.steps * TOKENS
            or manifest.position < covers.stop
        ):
            raise Violation("data", str(update), f"{covers}, but {manifest}")
        return covers

    def _check_data(self, chain: Chain, update: UpdateId, covers: Covers) -> None:
        """Each step is sent once: lives follow each other, and each leaves nothing out."""
        if update.incarnation != self.joined.get(update.learner):
            return  # Stored after a newer life has joined: it will be rejected.
        life = (update.learner, update.incarnation)
        expected = chain.next_start.get(life)
        least = chain.until.get(update.learner, 0)
        if chain.restores:
            expected = None  # A rollback lets go of what was not sent.
        if covers.start != expected if expected is not None else covers.start < least:
            raise Violation("data", str(update), f"{covers} is to follow {expected or least}")
        chain.next_start[life] = chain.until[update.learner] = covers.stop

    def _on_record(self, message: Message) -> None:
        record = self._read(message)
        chain = self.chains[record.fragment]
        self._check_link(chain, record)
        self._check_objects(record)
        for taken in record.inputs:
            self._resolve(chain, record, taken, "merged")
            self._check_admitted(record, taken)
            self._merge(chain, taken)
        for taken in record.rejected:
            self._resolve(chain, record, taken, "rejected")
            honest = self._is_honest(message.seq, taken)
            self._hold(honest, "rejected", self._id(taken), f"{taken.reason}: {taken.detail}")
        self._check_position(chain, record)
        self._check_totals(chain, record)
        self._check_digests(chain, record)
        self.garbage.needs[record.fragment].note(record, message.seq, message.time_s)
        chain.record, chain.record_seq = record, message.seq

    def _read(self, message: Message) -> wire.Record:
        found = decode(message.subject, message.payload)
        if isinstance(found, wire.RecordPointer):
            self._world.injected["bodies"] += 1
            found = wire.decode(wire.Record, self._stored.get(found.body.name))
        assert isinstance(found, wire.Record)
        return found

    def _check_link(self, chain: Chain, record: wire.Record) -> None:
        """Versions are 0, 1, 2 ... without gap or fork, and each record builds on the last."""
        about, before = f"fragment {record.fragment}", chain.record
        self._hold(record.epoch == self.epoch, "chain", about, f"is of epoch {record.epoch}")
        if before is None:
            origin = chain.begins_with
            version, digest = (origin.version, origin.view_digest) if origin else (0, None)
            first = (record.version, record.base_seq, record.base_digest) == (version, 0, "")
            same = digest in (None, record.view_digest)
            self._hold(first and same, "chain", about, f"begins with {record.version}")
            return
        moves = record.what in ("version", "restore")
        self._hold(record.version == before.version + moves, "chain", about,
                   f"{record.what} {record.version} after {before.version}")  # fmt: skip
        self._hold(record.base_seq == chain.record_seq, "chain", about,
                   f"built on {record.base_seq}, not {chain.record_seq}")  # fmt: skip
        self._hold(record.base_digest == before.view_digest, "chain", about,
                   f"version {record.version} is built on another view")  # fmt: skip
        self._hold(not (before.final and record.what == "version"), "chain", about,
                   f"version {record.version} after the last")  # fmt: skip
        forward = record.global_step >= before.global_step or record.what == "restore"
        self._hold(forward, "chain", about, f"the clock goes back to {record.global_step}")
        chain.restores += record.what == "restore"

    def _check_objects(self, record: wire.Record) -> None:
        """What a record names is stored before the record is."""
        named = [record.snapshot, record.outer, *record.deltas]
        named += [record.delta] if record.delta else []
        for ref in named:
            self._hold(ref.name in self._world.store, "objects", f"fragment {record.fragment}",
                       f"version {record.version} names {ref.name}, which is not there")  # fmt: skip

    def _resolve(
        self, chain: Chain, record: wire.Record, taken: wire.Input | wire.Rejected, fate: str
    ) -> None:
        """Every update ends in exactly one record."""
        update = self._id(taken)
        sent = chain.sent.get(update)
        if sent is None:
            raise Violation("resolved", str(update), f"{fate}, and was never sent")
        if taken.learner == LIAR and sent.manifest is not None:
            chain.fates["sent"] += 1
            chain.fates["tokens_sent"] += sent.manifest.tokens
        elif chain.unresolved.pop(update, None) is None or sent.manifest is None:
            what = f"{fate} by version {record.version}, and was resolved before"
            raise Violation("resolved", str(update), what)
        chain.sent[update] = sent._replace(manifest=None)
        if (taken.tokens, taken.steps) != (sent.manifest.tokens, sent.manifest.steps):
            raise Violation("resolved", str(update), "with other tokens or steps than it has")
        chain.fates[fate] += 1
        chain.fates[f"tokens_{fate}"] += taken.tokens
        if isinstance(taken, wire.Input):
            chain.fates["steps"] += taken.steps
            if taken.shards != sent.manifest.shards:
                raise Violation("resolved", str(update), "other shards than it has")

    def _check_admitted(self, record: wire.Record, taken: wire.Input) -> None:
        """Nothing is merged that is a lie, is damaged, or is of somebody who is shut out."""
        update = self._id(taken)
        fooled = self.hostile.get((record.fragment, update)) is False
        self._hold(not fooled, "fooled", update, f"merged: {taken}")
        rotten = [one.name for one in taken.shards if one.name in self._world.store.rotten]
        self._hold(not rotten, "rot", update, f"{rotten} was merged")
        shut_out = self._shut_out(taken.learner, taken.stream_seq, taken.stream_seq)
        self._hold(not shut_out, "quarantine", update, f"merged, sent at {taken.stream_seq}")

    def _shut_out(self, learner: str, since_seq: int, until_seq: int) -> bool:
        """Whether a learner was shut out by any word that counted between two sequences."""
        counted = False
        for seq, active in self.words.get(learner, ()):
            if seq > until_seq:
                break
            counted = active or (counted and seq > since_seq)
        return counted

    def _is_honest(self, record_seq: int, taken: wire.Rejected) -> bool:
        """Whether an update may be rejected for its reason."""
        if taken.learner == LIAR or taken.reason in HONEST:
            return True
        if taken.reason == "quarantined":
            return self._shut_out(taken.learner, taken.stream_seq, record_seq)
        return taken.reason == "checksum" and self._world.injected["rot"] > 0

    def _merge(self, chain: Chain, taken: wire.Input) -> None:
        """No step's progress is merged twice."""
        update = self._id(taken)
        covers = chain.sent[update].covers
        starts, stops = chain.merged[covers.learner]
        at = bisect.bisect_left(starts, covers.start)
        if (at > 0 and stops[at - 1] > covers.start) or (
            at < len(starts) and covers.stop > starts[at]
        ):
            raise Violation("data", str(update), f"{covers} was merged before")
        if at > 0 and stops[at - 1] == covers.start:
            stops[at - 1] = covers.stop
        else:
            starts.insert(at, covers.start)
            stops.insert(at, covers.stop)

    def _check_position(self, chain: Chain, record: wire.Record) -> None:
        """The position passes no unresolved update, and never goes back."""
        about = f"fragment {record.fragment}"
        if chain.record is not None:
            self._hold(record.position >= chain.record.position, "position", about,
                       f"{record.position} after {chain.record.position}")  # fmt: skip
        for update, first_seq in chain.unresolved.items():
            self._hold(first_seq >= record.position, "position", update,
                       f"at {first_seq}, unresolved and behind {record.position}")  # fmt: skip
            break  # They are in order.

    def _check_totals(self, chain: Chain, record: wire.Record) -> None:
        """Tokens sent = merged + rejected + in flight, and the record's sums are these."""
        fates, totals = chain.fates, record.totals
        unresolved = (chain.sent[update].manifest for update in chain.unresolved)
        flying = sum(manifest.tokens for manifest in unresolved if manifest is not None)
        about = f"fragment {record.fragment}"
        balance = fates["tokens_merged"] + fates["tokens_rejected"] + flying
        self._hold(fates["tokens_sent"] == balance, "tokens", about, f"{dict(fates)}, {flying}")
        found = _sums(totals)
        counters = ("merged", "rejected", "tokens_merged", "tokens_rejected", "steps")
        counted = tuple(
            min(before + fates[name], wire.GREATEST)
            for before, name in zip(chain.before, counters, strict=True)
        )
        self._hold(found == counted, "totals", about, f"{found}, counted are {counted}")

    def _check_digests(self, chain: Chain, record: wire.Record) -> None:
        """A rollback has an earlier version's; that each is of its contents, the oracle knows."""
        recorded = (record.view_digest, record.outer_digest)
        if record.what != "verdict":
            chain.digests[record.version] = recorded
        if record.restored_version is not None and record.what == "restore":
            same = chain.digests[record.restored_version] == recorded
            about = f"fragment {record.fragment}"
            self._hold(same, "digests", about, f"is not version {record.restored_version}")

    def _on_checkpoint(self, message: Message) -> None:
        self.garbage.note_checkpoint(decode_as(wire.Checkpoint, message.subject, message.payload))

    def _on_quarantine(self, message: Message) -> None:
        word = decode_as(wire.Quarantine, message.subject, message.payload)
        self.words[word.learner].append((message.seq, word.active))
        honest = word.learner != LIAR and not self._world.injected["rot"]
        wrong = honest and word.active and word.by != "operator"
        self._hold(not wrong, "quarantine", word.learner, f"shut out by {word.by}: {word.reason}")

    def _on_stop(self, message: Message) -> None:
        self._hold(not self.stopped, "end", message.subject, "stopped twice")
        self.stopped = True

    def _on_end(self, message: Message) -> None:
        end = decode_as(wire.End, message.subject, message.payload)
        self._hold(not self.end_seq, "end", message.subject, "ended twice")
        self.end_seq = message.seq
        records = [chain.record for chain in self.chains]
        final = all(record is not None and record.final for record in records)
        self._hold(final, "end", message.subject, "before every fragment's last version")
        versions = tuple(record.version for record in records if record is not None)
        self._hold(end.versions == versions, "end", message.subject, f"{end.versions}")

    # Learners

    def on_adopted(self, learner: str, fragment: int, view: np.ndarray, digest: str) -> None:
        """A learner has adopted a record: its view is the aggregator's, bit for bit."""
        if shards.digest(view) != digest:
            about = f"{learner} fragment {fragment}"
            self._world.fail(Violation("view", about, f"is not {digest}"))

    def on_stepped(self, learner: str, waited_s: float) -> None:
        """No step waits for anybody."""
        if waited_s > 1e-6:
            self._world.fail(Violation("waits", learner, f"{waited_s:.3f} s"))

    # The end

    def check_resolved(self) -> None:
        """Once a run has ended, nothing sent before its end is in flight."""
        self._hold(bool(self.end_seq), "end", "run", "has no end")
        for index, chain in enumerate(self.chains):
            late = [u for u, seq in chain.unresolved.items() if seq < self.end_seq]
            self._hold(not late, "resolved", f"fragment {index}", f"never resolved: {late}")

    def fates(self) -> Counter[str]:
        """Counts of updates by fate, over all fragments."""
        total = Counter(self.past)
        for chain in self.chains:
            total.update(chain.fates)
            total["in_flight"] += len(chain.unresolved)
            total["versions"] += len(chain.digests)
            total["restores"] += chain.restores
        return total

    @staticmethod
    def _id(taken: wire.Input | wire.Rejected) -> UpdateId:
        return UpdateId(taken.learner, taken.incarnation, taken.seq)

    @staticmethod
    def _hold(condition: bool, rule: str, about: object, what: str) -> None:
        if not condition:
            raise Violation(rule, str(about), what)


def _sums(totals: wire.Totals) -> tuple[int, ...]:
    return (
        totals.updates_merged,
        totals.updates_rejected,
        totals.tokens_merged,
        totals.tokens_rejected,
        totals.steps_merged,
    )
