"""Reads a run's whole tape and store and holds DESIGN.md's invariants against them.

`read_tape` decodes everything; `Tape.check` wants nothing but the tape and the objects, as an
auditor with read access would. It remakes every version from version 0 and compares digests.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from harness import World

from aggregator.fragment import FragmentArrays
from common import names, shards, wire
from common.bus import Bus, Message
from common.config import RunSettings, parse_settings
from common.errors import WireError
from common.layout import Layout, next_step, offset_steps, parse_layout
from common.quantize import decode_numpy
from common.store import ObjectStore, open_store
from common.tape import get_object


class At(NamedTuple):
    """A decoded message and where it stands."""

    seq: int
    body: object
    time_s: float


class Sent(NamedTuple):
    """An update by its identity, whatever how often it was announced."""

    learner: str
    incarnation: int
    fragment: int
    seq: int


@dataclass
class Tape:
    """A run's tape, decoded; `garbage` is what could not be."""

    settings: RunSettings
    layout: Layout
    store: ObjectStore
    messages: list[Message]
    garbage: list[Message]
    joins: list[tuple[int, wire.Join]]
    leaves: list[tuple[int, wire.Leave]]
    manifests: list[tuple[int, wire.Manifest]]
    records: dict[int, list[tuple[int, wire.Record]]]
    stop: tuple[int, wire.Stop] | None
    end: tuple[int, wire.End] | None

    # What it says

    def versions(self) -> list[int]:
        """Newest version of each fragment."""
        return [self.records[fragment][-1][1].version for fragment in sorted(self.records)]

    def all_records(self) -> list[wire.Record]:
        return [record for chain in self.records.values() for _, record in chain]

    def sent(self) -> dict[Sent, tuple[int, wire.Manifest]]:
        """Every distinct update, by its first announcement."""
        found: dict[Sent, tuple[int, wire.Manifest]] = {}
        for seq, manifest in self.manifests:
            found.setdefault(identity(manifest), (seq, manifest))
        return found

    def merged(self) -> dict[Sent, wire.Input]:
        return {
            Sent(taken.learner, taken.incarnation, record.fragment, taken.seq): taken
            for record in self.all_records()
            for taken in record.inputs
        }

    def rejected(self) -> dict[Sent, wire.Rejected]:
        return {
            Sent(taken.learner, taken.incarnation, record.fragment, taken.seq): taken
            for record in self.all_records()
            for taken in record.rejected
        }

    def lives(self, learner: str) -> list[int]:
        """Incarnations of a learner, in order."""
        return [seq for seq, join in self.joins if join.learner == learner]

    def full_leaves(self, learner: str) -> list[tuple[int, wire.Leave]]:
        """Ends of lives, without the words that only some fragments are finished."""
        return [at for at in self.leaves if at[1].learner == learner and not at[1].fragments]

    # Invariants

    def check(self, *, ended: bool = True, hostile: Sequence[str] = ()) -> None:
        """Every invariant that holds at any time; with `ended`, those of a finished run too.

        `hostile` senders need not cover their data without a gap.
        """
        for fragment in self.records:
            self.check_chain(fragment)
            self.check_recoverable(fragment)
            self.check_totals(fragment)
            self.check_remade(fragment)
            self.check_views(fragment)
        self.check_inputs()
        self.check_answered_once(all_of_them=ended)
        self.check_positions(hostile)
        if ended:
            self.check_end(hostile)

    def check_chain(self, fragment: int) -> None:
        """Versions 0, 1, 2 ... without gap or fork, each on the record before it."""
        sync = self.settings.sync
        offset = offset_steps(fragment, sync.fragments, sync.interval_steps)
        before_seq, version, digest, position, closed = 0, -1, "", 1, False
        clock = 0
        for seq, record in self.records[fragment]:
            where = f"fragment {fragment}, record {seq}"
            assert record.run == self.settings.run.name
            assert record.fragment == fragment, where
            assert record.layout == self.layout.digest, where
            assert record.base_seq == before_seq, where
            assert record.base_digest == digest, where
            assert record.position >= position, where
            if record.what == "version":
                version += 1
                assert bool(record.inputs) == (version > 0), where
                assert not closed, f"{where}: a version after the final one"
            else:
                assert not record.inputs, where
                assert record.view_digest == digest, where
                assert record.rejected or record.final, f"{where}: says nothing"
            assert record.version == version, where
            if record.what == "version" and version:
                following = next_step(clock, offset, sync.interval_steps)
                clock = min(self.settings.run.steps, following)
            assert record.global_step == clock, where
            closed = closed or record.final
            assert record.final == closed, where
            before_seq, digest, position = seq, record.view_digest, record.position

    def check_recoverable(self, fragment: int) -> None:
        """Whoever reads on from a record's position misses no update that it leaves unanswered."""
        first_announced = {
            update: seq for update, (seq, _) in self.sent().items() if update.fragment == fragment
        }
        for seq, record in self.records[fragment]:
            for taken in (*record.inputs, *record.rejected):
                update = Sent(taken.learner, taken.incarnation, fragment, taken.seq)
                first_announced.pop(update, None)
            lost = {u for u, announced in first_announced.items() if announced < record.position}
            assert not lost, f"fragment {fragment}, record {seq}: reads on behind {lost}"

    def check_totals(self, fragment: int) -> None:
        """A record's totals are the sums over all up to it."""
        sums = dict.fromkeys(wire.Totals.model_fields, 0)
        for seq, record in self.records[fragment]:
            sums["updates_merged"] += len(record.inputs)
            sums["updates_rejected"] += len(record.rejected)
            sums["tokens_merged"] += sum(taken.tokens for taken in record.inputs)
            sums["tokens_rejected"] += sum(taken.tokens for taken in record.rejected)
            sums["steps_merged"] += sum(taken.steps for taken in record.inputs)
            capped = {name: min(count, wire.GREATEST) for name, count in sums.items()}
            assert record.totals.model_dump() == capped, f"fragment {fragment}, record {seq}"

    def check_remade(self, fragment: int) -> None:
        """Remaking all versions from version 0 gives every published digest, bit for bit."""
        (_, first), *later = self.records[fragment]
        arrays = FragmentArrays.from_objects(
            self.settings,
            self.layout,
            fragment,
            view=get_object(self.store, first.snapshot),
            outer_state=get_object(self.store, first.outer),
        )
        assert shards.digest(arrays.view) == first.view_digest
        assert arrays.outer_digest() == first.outer_digest
        for _, record in later:
            if record.what == "version":
                arrays.merge_again(record, self.store)  # raises if a digest differs
            assert shards.digest(arrays.view) == record.view_digest
            assert arrays.outer_digest() == record.outer_digest
            if record.what == "version" and record.outer_version == record.version:
                assert get_object(self.store, record.outer) == arrays.outer_bytes()

    def check_views(self, fragment: int) -> None:
        """Snapshot and deltas of every record lead to its view: what a learner would load."""
        sync = self.settings.sync
        stepped: np.ndarray | None = None
        for _, record in self.records[fragment]:
            snapshot = np.frombuffer(get_object(self.store, record.snapshot), np.float32)
            view = snapshot.copy()
            assert len(record.deltas) == record.version - record.snapshot_version
            for delta in record.deltas:
                view += self._decoded(delta, view.size)
            assert shards.digest(view) == record.view_digest
            if record.what == "version":
                if stepped is None:
                    stepped = view.copy()
                else:
                    assert record.delta is not None
                    stepped += self._decoded(record.delta, view.size)
                assert shards.digest(stepped) == record.view_digest
                assert record.version % sync.snapshot_every or (
                    record.snapshot_version == record.version
                )

    def _decoded(self, delta: wire.ObjectRef, size: int) -> np.ndarray:
        sync = self.settings.sync
        data = get_object(self.store, delta)
        encoded = shards.unpack(data, codec=sync.delta_codec, count=size, block=sync.block)
        return decode_numpy(sync.delta_codec, encoded, sync.block)

    def check_inputs(self) -> None:
        """What a record says of an update is what its manifest says."""
        announced = dict(self.manifests)
        for record in self.all_records():
            for taken in (*record.inputs, *record.rejected):
                manifest = announced[taken.stream_seq]
                assert identity(manifest) == Sent(
                    taken.learner, taken.incarnation, record.fragment, taken.seq
                )
                assert (taken.tokens, taken.steps) == (manifest.tokens, manifest.steps)
            for taken in record.inputs:
                manifest = announced[taken.stream_seq]
                assert taken.staleness == record.version - 1 - manifest.base_version >= 0
                assert taken.shards == manifest.shards
                assert taken.final == manifest.final

    def check_answered_once(self, *, all_of_them: bool) -> None:
        """Every update stands in exactly one record; tokens sent = merged + rejected."""
        answers: dict[Sent, list[int]] = defaultdict(list)
        for fragment, chain in self.records.items():
            for seq, record in chain:
                for taken in (*record.inputs, *record.rejected):
                    answers[Sent(taken.learner, taken.incarnation, fragment, taken.seq)].append(seq)
        twice = {update: seqs for update, seqs in answers.items() if len(seqs) > 1}
        assert not twice, f"answered more than once: {twice}"
        sent = self.sent()
        assert set(answers) <= set(sent), f"from nowhere: {set(answers) - set(sent)}"
        if not all_of_them:
            return
        horizon = self.end[0] if self.end else self.messages[-1].seq + 1
        due = {update for update, (seq, _) in sent.items() if seq < horizon}
        assert not due - set(answers), f"never answered: {due - set(answers)}"
        for fragment, chain in self.records.items():
            totals = chain[-1][1].totals
            tokens = sum(sent[u][1].tokens for u in answers if u.fragment == fragment)
            if totals.tokens_rejected < wire.GREATEST:
                assert tokens == totals.tokens_merged + totals.tokens_rejected

    def check_positions(self, hostile: Sequence[str] = ()) -> None:
        """Each step's work is in one update of a fragment at most, whatever lives it took.

        Within a life updates follow each other without a gap; a life begins behind all that
        earlier manifests and leaves cover.
        """
        runs: dict[tuple[str, int, int], list[wire.Manifest]] = defaultdict(list)
        for update, (_, manifest) in self.sent().items():
            if update.learner in hostile:
                continue
            runs[update.learner, update.incarnation, update.fragment].append(manifest)
        begins: dict[tuple[str, int], set[int]] = defaultdict(set)
        for (learner, incarnation, fragment), manifests in runs.items():
            manifests.sort(key=lambda manifest: manifest.seq)
            where = f"{learner}, life {incarnation}, fragment {fragment}"
            assert [m.seq for m in manifests] == [*range(1, len(manifests) + 1)], where
            begins[learner, incarnation].add(manifests[0].position - manifests[0].steps)
            for before, after in itertools.pairwise(manifests):
                assert after.position - after.steps == before.position, where
                assert after.base_version >= before.base_version, where
        for (learner, incarnation), starts in begins.items():
            assert len(starts) == 1, f"{learner}, life {incarnation}: {starts}"
            earlier = [
                m.position
                for seq, m in (*self.manifests, *self.leaves)
                if m.learner == learner and m.incarnation < incarnation and seq < incarnation
            ]
            assert starts == {max(earlier, default=0)}, f"{learner}, life {incarnation}"

    def check_end(self, hostile: Sequence[str] = ()) -> None:
        """The run's end agrees with its records; who was there to the end sent all it had."""
        assert self.stop is not None
        assert self.end is not None
        end_seq, end = self.end
        for fragment, chain in self.records.items():
            before = [(seq, record) for seq, record in chain if seq < end_seq]
            assert end.versions[fragment] == before[-1][1].version == chain[-1][1].version
            assert end.record_seqs[fragment] == before[-1][0]
            assert before[-1][1].final
        for learner in {join.learner for _, join in self.joins} - {*hostile}:
            life = self.lives(learner)[-1]
            leave = next((a for a in self.full_leaves(learner) if a[1].incarnation == life), None)
            if leave is not None and leave[0] > self.stop[0]:
                self.check_flushed(learner, life, leave[1].position)

    def check_flushed(self, learner: str, incarnation: int, position: int) -> None:
        """A life's manifests cover all its steps up to `position`."""
        for fragment in self.records:
            covered = [
                manifest.position
                for update, (_, manifest) in self.sent().items()
                if update[:3] == (learner, incarnation, fragment)
            ]
            finished = [
                leave.position
                for _, leave in self.leaves
                if leave.incarnation == incarnation and fragment in leave.fragments
            ]
            assert max(covered + finished, default=0) == position, (learner, fragment)


def identity(manifest: wire.Manifest) -> Sent:
    return Sent(manifest.learner, manifest.incarnation, manifest.fragment, manifest.seq)


def read_tape(world: World) -> Tape:
    """Everything on the tape up to now."""
    return world.ask(lambda bus: tape_of(bus, world.name, open_store(str(world.store))))


async def tape_of(bus: Bus, run: str, store: ObjectStore) -> Tape:
    messages = await read_stream(bus, names.tape_stream(run), names.tape_subjects(run))
    first, *rest = messages
    specification = wire.decode(wire.Specification, first.payload)
    layout = parse_layout(
        store.get(names.layout_object(run, specification.layout)), specification.layout
    )
    tape = Tape(
        settings=parse_settings(specification.settings),
        layout=layout,
        store=store,
        messages=messages,
        garbage=[],
        joins=[],
        leaves=[],
        manifests=[],
        records=defaultdict(list),
        stop=None,
        end=None,
    )
    for message in rest:
        _sort(tape, message)
    return tape


async def read_stream(bus: Bus, stream: str, subjects: list[str]) -> list[Message]:
    """Every message a stream holds now."""
    last = await bus.last_sequence(stream)
    found: list[Message] = []
    if last:
        async with asyncio.timeout(30):
            async for message in bus.read(stream, subjects, 1):
                found.append(message)
                if message.seq >= last:
                    break
    return found


def _sort(tape: Tape, message: Message) -> None:
    _, _, kind, *rest = message.subject.split(".")
    try:
        match kind:
            case "join":
                join = wire.decode(wire.Join, message.payload)
                assert rest[0] == join.learner
                tape.joins.append((message.seq, join))
            case "leave":
                leave = wire.decode(wire.Leave, message.payload)
                tape.leaves.append((message.seq, leave))
            case "update":
                manifest = wire.decode(wire.Manifest, message.payload)
                own = [manifest.learner, str(manifest.fragment)]
                if rest == own and manifest.run == tape.settings.run.name:
                    tape.manifests.append((message.seq, manifest))
                else:
                    tape.garbage.append(message)
            case "record":
                found = wire.decode_record(message.payload)
                if isinstance(found, wire.RecordPointer):
                    found = wire.decode(wire.Record, get_object(tape.store, found.body))
                assert rest[0] == str(found.fragment)
                assert message.msg_id == found.attempt_id
                tape.records[found.fragment].append((message.seq, found))
            case "stop":
                assert tape.stop is None
                tape.stop = (message.seq, wire.decode(wire.Stop, message.payload))
            case "end":
                assert tape.end is None
                tape.end = (message.seq, wire.decode(wire.End, message.payload))
    except WireError:
        assert kind in ("join", "leave", "update"), f"undecodable {kind}"
        tape.garbage.append(message)
