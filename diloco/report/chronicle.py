"""A run's tape as columns of numbers, for figures: read once, message by message.

A row is 8 bytes a column, so a run of 100,000 versions is some hundred megabytes at most; the
messages themselves are let go as they pass. What garbage collection has trimmed from the tape is
not in it; the totals, which records carry, are whole.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.check.history import decode_message, messages_of
from diloco.common import names, wire
from diloco.common.bus import Message
from diloco.common.config import RunSettings
from diloco.common.errors import IntegrityError, ObjectMissingError, WireError
from diloco.common.layout import Layout
from diloco.common.store import ObjectStore
from diloco.common.tape import RunContext
from diloco.report.agreement import mean_cosine

Column = npt.NDArray[np.float64]

# Rejected updates and events that are kept word for word; all of them are counted.
WORDS = 500
# Cosines are taken of at most about so many rounds, evenly over the run.
COSINES = 8000
# Messages between two calls of `progress`.
PROGRESS_EVERY = 2000


class Table:
    """Rows of numbers under named columns, appended one by one."""

    def __init__(self, *columns: str) -> None:
        self._index = {name: position for position, name in enumerate(columns)}
        self._values = array("d")

    def add(self, *row: float) -> None:
        """Append a row; one value for each column."""
        self._values.extend(row)

    def __len__(self) -> int:
        return len(self._values) // len(self._index)

    def __getitem__(self, name: str) -> Column:
        """A column, float64 [rows]."""
        rows = np.frombuffer(self._values, np.float64).reshape(-1, len(self._index))
        return rows[:, self._index[name]].copy()


class Refused(NamedTuple):
    """A rejected update, in words."""

    at_s: float
    learner: str
    fragment: int
    reason: str
    detail: str


class Event(NamedTuple):
    """Something that happened to a run, in words."""

    at_s: float
    what: str


@dataclass
class Life:
    """A life of a learner: one incarnation.

    `left_s` is None unless it said that it leaves; `position` is where its data had come to then.
    `merged_s` is when its first update was merged.
    """

    learner: str
    incarnation: int
    joined_s: float
    host: str
    left_s: float | None = None
    position: int = 0
    merged_s: float | None = None


@dataclass
class Chronicle:
    """A run's tape up to now; times are seconds since the epoch, as the server stored messages.

    Attributes:
        learners: names; tables have their indices.
        updates: first announcements of updates. `position` in batches, after it.
        rounds: records that made a version by merging. `live`: learners that were live then;
            `tokens`: merged by all rounds of the fragment so far; `down_bytes`: what a learner
            reads for it; `seq`: the record's in the stream.
        inputs: merged updates. `round` is a row of `rounds`.
        cosines: of sampled rounds, weighted mean over pairs of inputs and over tensors.
        versions: every record that made a version, with rollbacks, as (seq, fragment, time).
        reasons: why rounds closed.
        totals: of each fragment, by its newest record.
        whole_from: no message from here on is missing; it was stored at `whole_s`.
    """

    run: str
    settings: RunSettings
    layout: Layout
    created_s: float
    learners: list[str] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    updates: Table = field(
        default_factory=lambda: Table(
            "learner", "incarnation", "fragment", "time_s", "tokens", "steps", "position", "loss",
            "step_time_s", "encode_s", "upload_s", "bytes",
        )
    )  # fmt: skip
    rounds: Table = field(
        default_factory=lambda: Table(
            "seq", "fragment", "version", "step", "inputs", "opened_s", "quorum_s", "closed_s",
            "merged_s", "stored_s", "tokens", "down_bytes", "live",
        )
    )  # fmt: skip
    inputs: Table = field(
        default_factory=lambda: Table(
            "round", "learner", "fragment", "time_s", "staleness", "weight", "discount", "clip",
            "norm", "tokens", "steps", "loss",
        )
    )  # fmt: skip
    cosines: Table = field(default_factory=lambda: Table("fragment", "time_s", "cosine", "inputs"))
    versions: Table = field(default_factory=lambda: Table("seq", "fragment", "time_s"))
    refusals: Table = field(default_factory=lambda: Table("learner", "time_s", "tokens", "steps"))
    refused: deque[Refused] = field(default_factory=lambda: deque(maxlen=WORDS))
    refusal_reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=WORDS))
    totals: dict[int, wire.Totals] = field(default_factory=dict)
    global_step: int = 0
    beats: dict[str, tuple[wire.Heartbeat, float]] = field(default_factory=dict)
    unreadable: int = 0
    garbage: int = 0
    whole_from: int = 1
    whole_s: float = 0.0
    last_s: float = 0.0
    ended_s: float | None = None

    @property
    def trimmed(self) -> bool:
        """Whether garbage collection has taken something from the tape."""
        return self.whole_from > 1

    @property
    def fragments(self) -> int:
        """P."""
        return len(self.layout.fragments)

    @property
    def begins_s(self) -> float:
        """When what is shown begins: the first join, or where a trimmed tape becomes whole."""
        if self.trimmed:
            return self.whole_s
        return min([life.joined_s for life in self.lives], default=self.last_s)

    @property
    def ends_s(self) -> float:
        """When it ends: the run's end, or the last sign of it."""
        beats = [heard_s for _, heard_s in self.beats.values()]
        return self.ended_s or max([self.last_s, *beats])

    def tokens_merged(self) -> float:
        """Tokens whose work is in the model; each is in every fragment, so it is their mean."""
        return sum(t.tokens_merged for t in self.totals.values()) / max(self.fragments, 1)


async def read_chronicle(
    context: RunContext, created_s: float, progress: Callable[[int, int], None] | None = None
) -> Chronicle:
    """Everything on a run's tape up to now.

    Args:
        context: the run's.
        created_s: when the run was created.
        progress: called now and then with messages read, and how many there are about.

    Raises:
        BusError, StoreUnavailableError: bus or store are away.
    """
    chronicle = Chronicle(context.run, context.settings, context.layout, created_s)
    last = await context.bus.last_sequence(context.tape)
    writer = Writer(chronicle, context.epoch, context.store, every=1 + last // (5 * COSINES))
    subjects = names.tape_subjects(context.run)
    async for message in messages_of(context.bus, context.tape, subjects):
        writer.write(message)
        if progress is not None and message.seq % PROGRESS_EVERY == 0:
            progress(message.seq, last)
    for learner in chronicle.learners:
        beat = await context.bus.last(
            names.ops_stream(context.run), names.heartbeat(context.run, learner)
        )
        if beat is not None:
            writer.hear(beat)
    return chronicle


class Writer:
    """Adds a tape's messages to a chronicle, in their order.

    Args:
        chronicle: to be written.
        epoch: of the tape.
        store: where large records have their bodies.
        every: one version in so many is looked at for its cosine.
    """

    def __init__(
        self, chronicle: Chronicle, epoch: int, store: ObjectStore, *, every: int = 1
    ) -> None:
        self._chronicle = chronicle
        self._epoch = epoch
        self._store = store
        self._every = every
        self._before = 0
        self._indices: dict[str, int] = {}
        self._lives: dict[tuple[str, int], Life] = {}
        self._announced: dict[tuple[str, int, int], int] = {}
        radial = chronicle.settings.outer.merge == "rda"
        self._radial = [
            np.asarray([radial and rule == "rda" for rule in fragment.segment_rules()])
            for fragment in chronicle.layout.fragments
        ]

    def write(self, message: Message) -> None:
        """Take the next message of the tape."""
        chronicle = self._chronicle
        if message.seq != self._before + 1:
            chronicle.whole_from, chronicle.whole_s = message.seq, message.time_s
        self._before, chronicle.last_s = message.seq, message.time_s
        kind = message.subject.split(".")[2]
        try:
            if kind in ("join", "leave", "update", "record"):
                self._said(message)
            else:
                self._happened(kind, message)
        except WireError:
            chronicle.garbage += 1
        except (IntegrityError, ObjectMissingError):
            chronicle.unreadable += 1

    def hear(self, message: Message) -> None:
        """Take a learner's newest heartbeat."""
        try:
            beat = wire.decode(wire.Heartbeat, message.payload)
        except WireError:
            return
        self._chronicle.beats[beat.learner] = (beat, message.time_s)

    def _said(self, message: Message) -> None:
        match decode_message(
            message, run=self._chronicle.run, epoch=self._epoch, store=self._store
        ):
            case wire.Manifest() as manifest:
                self._announce(manifest, message.time_s)
            case wire.Record() as record:
                self._record(record, message)
            case wire.Join() as join:
                self._join(join, message)
            case wire.Leave() as leave:
                self._leave(leave, message.time_s)

    def _happened(self, kind: str, message: Message) -> None:
        chronicle, at_s = self._chronicle, message.time_s
        if kind == "settings":
            changed = wire.decode(wire.Settings, message.payload).changed
            chronicle.events.append(Event(at_s, "settings changed: " + "; ".join(changed)))
        elif kind == "checkpoint":
            name = wire.decode(wire.Checkpoint, message.payload).name
            chronicle.events.append(Event(at_s, f"checkpoint {name}"))
        elif kind == "quarantine":
            word = wire.decode(wire.Quarantine, message.payload)
            what = "quarantined" if word.active else "let in again"
            chronicle.events.append(
                Event(at_s, f"{word.learner} {what} by {word.by}: {word.reason}")
            )
        elif kind == "stop":
            stop = wire.decode(wire.Stop, message.payload)
            chronicle.events.append(
                Event(at_s, f"stop at global step {stop.global_step} ({stop.reason})")
            )
        elif kind == "end":
            chronicle.ended_s = at_s
            chronicle.events.append(Event(at_s, "end: every fragment's last version is committed"))

    def _index(self, learner: str) -> int:
        if learner not in self._indices:
            self._indices[learner] = len(self._indices)
            self._chronicle.learners.append(learner)
        return self._indices[learner]

    def _join(self, join: wire.Join, message: Message) -> None:
        self._index(join.learner)
        life = Life(join.learner, message.seq, message.time_s, join.host)
        again = any(learner == join.learner for learner, _ in self._lives)
        self._lives[join.learner, message.seq] = life
        self._chronicle.lives.append(life)
        self._chronicle.events.append(
            Event(message.time_s, f"{join.learner} joined{' again' if again else ''}")
        )

    def _leave(self, leave: wire.Leave, at_s: float) -> None:
        life = self._lives.get((leave.learner, leave.incarnation))
        if leave.fragments or life is None:
            return
        life.left_s, life.position = at_s, leave.position
        self._chronicle.events.append(Event(at_s, f"{leave.learner} left"))

    def _announce(self, manifest: wire.Manifest, at_s: float) -> None:
        sender = (manifest.learner, manifest.incarnation, manifest.fragment)
        if manifest.seq <= self._announced.get(sender, 0):
            return  # It was announced before.
        self._announced[sender] = manifest.seq
        self._chronicle.updates.add(
            self._index(manifest.learner),
            manifest.incarnation,
            manifest.fragment,
            at_s,
            manifest.tokens,
            manifest.steps,
            manifest.position,
            manifest.loss,
            manifest.step_time_s,
            manifest.encode_s,
            manifest.upload_s,
            sum(shard.size_bytes for shard in manifest.shards),
        )

    def _record(self, record: wire.Record, message: Message) -> None:
        chronicle, at_s = self._chronicle, message.time_s
        chronicle.totals[record.fragment] = record.totals
        chronicle.global_step = max(chronicle.global_step, record.global_step)
        for refused in record.rejected:
            self._refuse(record.fragment, refused, at_s)
        if record.what == "verdict":
            return
        chronicle.versions.add(message.seq, record.fragment, at_s)
        if record.what == "restore":
            chronicle.global_step = record.global_step
            what = f"fragment {record.fragment} rolled back to version {record.restored_version}"
            chronicle.events.append(Event(at_s, what))
        if record.inputs:
            self._merged(record, message)

    def _refuse(self, fragment: int, refused: wire.Rejected, at_s: float) -> None:
        chronicle = self._chronicle
        chronicle.refusals.add(self._index(refused.learner), at_s, refused.tokens, refused.steps)
        chronicle.refusal_reasons[refused.reason, refused.learner] += 1
        chronicle.refused.append(
            Refused(at_s, refused.learner, fragment, refused.reason, refused.detail)
        )

    def _merged(self, record: wire.Record, message: Message) -> None:
        chronicle, at_s, row = self._chronicle, message.time_s, len(self._chronicle.rounds)
        chronicle.reasons[record.reason] += 1
        chronicle.rounds.add(
            message.seq,
            record.fragment,
            record.version,
            record.global_step,
            len(record.inputs),
            record.opened_at_s,
            record.quorum_at_s,
            record.closed_at_s,
            record.merged_at_s,
            at_s,
            record.totals.tokens_merged,
            len(message.payload) + (record.delta.size_bytes if record.delta else 0),
            sum(member.live for member in record.policy.members),
        )
        for taken in record.inputs:
            self._take(record.fragment, taken, row, at_s)
        if record.version % self._every == 0:
            cosine = mean_cosine(record, self._radial[record.fragment])
            if cosine is not None:
                chronicle.cosines.add(record.fragment, at_s, cosine, len(record.inputs))

    def _take(self, fragment: int, taken: wire.Input, row: int, at_s: float) -> None:
        life = self._lives.get((taken.learner, taken.incarnation))
        if life is not None and life.merged_s is None:
            life.merged_s = at_s
        self._chronicle.inputs.add(
            row,
            self._index(taken.learner),
            fragment,
            at_s,
            taken.staleness,
            taken.weight,
            taken.discount,
            taken.clip,
            taken.norm,
            taken.tokens,
            taken.steps,
            taken.loss,
        )
