"""A run's tape as columns of numbers, for figures: read once, message by message.

A row takes 8 bytes a column, so a run of 100,000 versions takes some hundred megabytes at most;
messages are dropped once they are read. Messages that garbage collection has trimmed from the tape
are missing; the totals are complete, since each record carries them.
"""

import contextlib
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.common.process.config import RunSettings
from diloco.common.protocol import wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.layout import Layout
from diloco.common.storage.tape import (
    Entry,
    Extent,
    InvalidMessage,
    Item,
    RunContext,
    Unreadable,
    changed_settings,
    read_tape,
)
from diloco.run.agreement import mean_cosine
from diloco.run.history import Event, act_of
from diloco.run.learner_history import LastHeartbeat
from diloco.run.watch import read_heartbeats

Column = npt.NDArray[np.float64]

# The most rejected updates and events that are kept in full; all of them are counted.
WORDS = 500
# About the most rounds whose cosines are computed, evenly over the run.
COSINES = 8000
# Columns of an update from its manifest, and of a merged one from the record.
SENT = ("tokens", "steps", "position", "loss", "step_time_s")
TAKEN = ("staleness", "weight", "discount", "clip", "norm", "tokens", "steps", "loss")
# Messages between two calls of `progress`.
PROGRESS_EVERY = 2000


class Columns:
    """Rows of numbers under named columns, appended one by one."""

    def __init__(self, *columns: str) -> None:
        self._index = {name: position for position, name in enumerate(columns)}
        self._values = array("d")

    def add(self, *row: float) -> None:
        """Appends a row; one value for each column."""
        self._values.extend(row)

    def __len__(self) -> int:
        return len(self._values) // len(self._index)

    def __getitem__(self, name: str) -> Column:
        """Returns a column, float64 [rows]."""
        return self._rows()[:, self._index[name]].copy()

    def newest(self, count: int) -> dict[str, Column]:
        """Returns the last `count` rows, or all if there are fewer: float64 [rows] by column."""
        rows = self._rows()[-count:]
        return {name: rows[:, place].copy() for name, place in self._index.items()}

    def replace(self, columns: dict[str, Column]) -> None:
        """Replaces all rows by those of the given columns, each float64 [rows]."""
        rows = np.stack([columns[name] for name in self._index], axis=1)
        self._values = array("d", np.ascontiguousarray(rows, np.float64).tobytes())

    def _rows(self) -> Column:
        return np.frombuffer(self._values, np.float64).reshape(-1, len(self._index))


class RejectionRow(NamedTuple):
    """A rejected update: when its record was stored (seconds since the epoch), and why."""

    at_s: float
    learner: str
    fragment: int
    reason: str
    detail: str


@dataclass
class Incarnation:
    """A life of a learner; times are seconds since the epoch.

    Attributes:
        incarnation: stream sequence of the life's join.
        left_s: when the life left in order; None: it did not.
        position: batches of the learner's data that were behind it when it left.
        merged_s: when the first record that merged an update of it was stored; None: none was.
        slices: from its join: the slices that train, of a learner that has several.
        holds: from its join: the modules that it holds; empty: all.
    """

    learner: str
    incarnation: int
    joined_s: float
    host: str
    left_s: float | None = None
    position: int = 0
    merged_s: float | None = None
    slices: wire.LearnerSlices | None = None
    holds: tuple[str, ...] = ()


@dataclass
class TimeSeries:
    """A run's tape up to now; times are seconds since the epoch, as the server stored messages.

    Attributes:
        learners: their names; the columns `learner` hold indices into this list.
        updates: a row for the first announcement of each update, or for several updates after
            `condense`; the column `updates` counts them. `position`: the sender's place in its
            data after the update, in batches.
        rounds: a row for each record that made a version by merging. `live`: number of learners
            that were live at that time; `tokens`: credited by all rounds of the fragment so far;
            `down_bytes`: bytes that a learner reads for the version; `seq`: sequence of the record.
        inputs: a row for each merged update, or for several after `condense`; `round` is the index
            of its round's row in `rounds`.
        cosines: for sampled rounds, the mean cosine between the inputs (`mean_cosine`).
        versions: a row (seq, fragment, time) for each record that made a version, also by rollback.
        refusals: a row for each rejected update; `refused`: the newest `WORDS` of them in full;
            `refusal_reasons`: their numbers by (reason, learner).
        events: the newest `WORDS` events of the run.
        totals: each fragment's totals, from its newest record.
        global_step: the greatest of any fragment; a rollback sets it back.
        beats: each learner's newest heartbeat.
        unreadable: number of damaged records; `garbage`: number of messages that are not of the
            protocol, or are of another epoch.
        extent: the part of the tape that was read, and from where on nothing is missing.
        ended_s: when the run's end was stored; None: it goes on.
    """

    run: str
    settings: RunSettings
    layout: Layout
    created_s: float
    learners: list[str] = field(default_factory=list)
    lives: list[Incarnation] = field(default_factory=list)
    updates: Columns = field(
        default_factory=lambda: Columns(
            "learner", "incarnation", "fragment", "time_s", *SENT, "bytes", "updates"
        )
    )
    rounds: Columns = field(
        default_factory=lambda: Columns(
            "seq", "fragment", "version", "inputs", "opened_s", "quorum_s", "closed_s",
            "merged_s", "stored_s", "tokens", "down_bytes", "live",
        )
    )  # fmt: skip
    inputs: Columns = field(
        default_factory=lambda: Columns(
            "round", "learner", "fragment", "time_s", *TAKEN, "wait_s", "worst_wait_s", "updates"
        )
    )
    cosines: Columns = field(default_factory=lambda: Columns("fragment", "time_s", "cosine"))
    versions: Columns = field(default_factory=lambda: Columns("seq", "fragment", "time_s"))
    refusals: Columns = field(default_factory=lambda: Columns("learner", "time_s"))
    refused: deque[RejectionRow] = field(default_factory=lambda: deque(maxlen=WORDS))
    refusal_reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=WORDS))
    totals: dict[int, wire.Totals] = field(default_factory=dict)
    global_step: int = 0
    beats: dict[str, LastHeartbeat] = field(default_factory=dict)
    unreadable: int = 0
    garbage: int = 0
    extent: Extent = field(default_factory=Extent)
    ended_s: float | None = None

    @property
    def trimmed(self) -> bool:
        """Whether garbage collection has removed messages from the tape."""
        return self.extent.whole_from > 1

    @property
    def fragments(self) -> int:
        """The number of fragments, P."""
        return len(self.layout.fragments)

    def fragments_of(self) -> dict[str, float]:
        """Returns, by learner, the number of fragments that it holds, as a mean of its lives."""
        counts: dict[str, list[int]] = {name: [] for name in self.learners}
        for life in self.lives:
            counts.setdefault(life.learner, []).append(len(self.layout.held(life.holds)))
        return {name: float(np.mean(found or [self.fragments])) for name, found in counts.items()}

    @property
    def begins_s(self) -> float:
        """When the series begins: at the first join, or where a trimmed tape becomes whole."""
        if self.trimmed:
            return self.extent.whole_s
        return min([life.joined_s for life in self.lives], default=self.extent.last_s)

    @property
    def ends_s(self) -> float:
        """When the series ends: at the run's end, or its last message or heartbeat."""
        beats = [beat.heard_at_s for beat in self.beats.values()]
        return self.ended_s or max([self.extent.last_s, *beats])

    def rejected_for(self) -> Counter[str]:
        """Returns the number of rejected updates by reason."""
        found: Counter[str] = Counter()
        for (reason, _), count in self.refusal_reasons.items():
            found[reason] += count
        return found

    def tokens_merged(self) -> float:
        """Returns the tokens credited to the model.

        It is the mean over fragments, since each trained token is credited once in every fragment.
        """
        return sum(t.tokens_credited for t in self.totals.values()) / max(self.fragments, 1)


async def read_time_series(
    context: RunContext, created_s: float, progress: Callable[[int, int], None] | None = None
) -> TimeSeries:
    """Reads a run's tape up to now as a time series.

    Args:
        context: the run's context.
        created_s: when the run was created, in seconds since the epoch.
        progress: called at intervals with the numbers of messages read and of all messages, both
            approximate.

    Raises:
        BusError, StoreUnavailableError: bus or store are unreachable.
    """
    series = TimeSeries(context.run, context.settings, context.layout, created_s)
    last = await context.bus.last_sequence(context.tape)
    builder = Builder(series, context.epoch)
    builder.set_cosine_sampling(last)
    async for item in read_tape(context):
        builder.take(item)
        if progress is not None and item.seq % PROGRESS_EVERY == 0:
            progress(item.seq, last)
    series.beats = await read_heartbeats(context, series.learners)
    return series


class Builder:
    """Adds a tape's messages to a time series, in their order.

    Args:
        series: the time series to fill.
        epoch: epoch of the tape.
    """

    def __init__(self, series: TimeSeries, epoch: int) -> None:
        self._series = series
        self._created = series.settings
        self._epoch = epoch
        self._every = 1
        self._indices: dict[str, int] = {}
        self._lives: dict[tuple[str, int], Incarnation] = {}
        self._announced: dict[tuple[str, int, int], int] = {}
        radial = series.settings.merge == "rda"
        self._radial = [
            np.asarray([radial and rule == "rda" for rule in fragment.segment_rules()])
            for fragment in series.layout.fragments
        ]

    def set_cosine_sampling(self, messages: int) -> None:
        """Sets the rounds whose cosines are computed: about `COSINES` on a tape of this length."""
        self._every = 1 + messages // (5 * COSINES)

    def take(self, item: Item) -> None:
        """Adds the tape's next message."""
        self._series.extent.take(item)
        match item:
            case InvalidMessage():
                self._series.garbage += 1
            case Unreadable():
                self._series.unreadable += 1
            case Entry():
                self._take_entry(item)

    def _take_entry(self, entry: Entry) -> None:
        match entry.body:
            case wire.Manifest() as manifest:
                self._announce(manifest, entry.time_s)
            case wire.Record() as record:
                self._record(record, entry)
            case wire.Join() as join:
                self._join(join, entry)
            case wire.Leave() as leave:
                self._leave(leave, entry.time_s)
            case wire.End():
                self._series.ended_s = entry.time_s
            case wire.Settings() as settings:
                self._change(settings)
        if (act := act_of(entry.body, entry.time_s)) is not None:
            self._series.events.append(act)

    def _change(self, message: wire.Settings) -> None:
        with contextlib.suppress(WireError):  # Invalid settings have no effect.
            self._series.settings = changed_settings(self._created, message)

    def _index(self, learner: str) -> int:
        if learner not in self._indices:
            self._indices[learner] = len(self._indices)
            self._series.learners.append(learner)
        return self._indices[learner]

    def _join(self, join: wire.Join, entry: Entry) -> None:
        self._index(join.learner)
        life = Incarnation(
            join.learner,
            entry.seq,
            entry.time_s,
            join.host,
            slices=join.slices,
            holds=join.holds,
        )
        self._lives[join.learner, entry.seq] = life
        self._series.lives.append(life)

    def _leave(self, leave: wire.Leave, at_s: float) -> None:
        life = self._lives.get((leave.learner, leave.incarnation))
        if leave.fragments or life is None:
            return
        life.left_s, life.position = at_s, leave.position

    def _announce(self, manifest: wire.Manifest, at_s: float) -> None:
        if manifest.epoch != self._epoch:
            self._series.garbage += 1
            return
        sender = (manifest.learner, manifest.incarnation, manifest.fragment)
        if manifest.seq <= self._announced.get(sender, 0):
            return  # A repeated announcement.
        self._announced[sender] = manifest.seq
        self._series.updates.add(
            self._index(manifest.learner),
            manifest.incarnation,
            manifest.fragment,
            at_s,
            *(getattr(manifest, name) for name in SENT),
            sum(shard.size_bytes for shard in manifest.shards),
            1,
        )

    def _record(self, record: wire.Record, entry: Entry) -> None:
        series, at_s = self._series, entry.time_s
        series.totals[record.fragment] = record.totals
        series.global_step = max(series.global_step, record.global_step)
        for refused in record.rejected:
            self._refuse(record.fragment, refused, at_s)
        if record.what == "verdict":
            return
        series.versions.add(entry.seq, record.fragment, at_s)
        if record.what == "restore":
            series.global_step = record.global_step
        if record.inputs:
            self._merged(record, entry)

    def _refuse(self, fragment: int, refused: wire.Rejected, at_s: float) -> None:
        series = self._series
        series.refusals.add(self._index(refused.learner), at_s)
        series.refusal_reasons[refused.reason, refused.learner] += 1
        series.refused.append(
            RejectionRow(at_s, refused.learner, fragment, refused.reason, refused.detail)
        )

    def _merged(self, record: wire.Record, entry: Entry) -> None:
        series, at_s, row = self._series, entry.time_s, len(self._series.rounds)
        series.rounds.add(
            entry.seq,
            record.fragment,
            record.version,
            len(record.inputs),
            record.opened_at_s,
            record.quorum_at_s,
            record.closed_at_s,
            record.merged_at_s,
            at_s,
            record.totals.tokens_credited,
            entry.size_bytes + (record.delta.size_bytes if record.delta else 0),
            sum(member.live for member in record.policy.members),
        )
        for taken in record.inputs:
            self._take(record.fragment, taken, row, at_s)
        if record.version % self._every == 0:
            cosine = mean_cosine(record, self._radial[record.fragment])
            if cosine is not None:
                series.cosines.add(record.fragment, at_s, cosine)

    def _take(self, fragment: int, taken: wire.Input, row: int, at_s: float) -> None:
        # The credited work, not the sender's claim.
        columns = ("tokens_credited" if name == "tokens" else name for name in TAKEN)
        wait_s = max(0.0, at_s - taken.announced_at_s)
        life = self._lives.get((taken.learner, taken.incarnation))
        if life is not None and life.merged_s is None:
            life.merged_s = at_s
        self._series.inputs.add(
            row,
            self._index(taken.learner),
            fragment,
            at_s,
            *(getattr(taken, column) for column in columns),
            wait_s,
            wait_s,
            1,
        )


# Long time series in few rows, so that following a run without end takes bounded memory:
# neighbouring updates of a learner and fragment become one row. Tokens, steps and bytes are summed,
# time and data position are the later one's, the worst wait is the longest, all else the mean. So
# sums stay exact, and curves lose detail that no screen shows.
SUMS = frozenset({"tokens", "steps", "bytes", "updates"})
LATER = frozenset({"time_s", "position", "round"})
LONGEST = frozenset({"worst_wait_s"})
# The most rows of updates sent, and of updates merged.
MOST_ROWS = 200_000


def condense(series: TimeSeries, most_rows: int = MOST_ROWS) -> bool:
    """Merges each two neighbouring rows of `updates` and of `inputs` into one, in a long table.

    Args:
        series: the time series to shorten.
        most_rows: a table with more rows than this is long.

    Returns:
        Whether a table was shortened.
    """
    keys = {"updates": ("learner", "incarnation", "fragment"), "inputs": ("learner", "fragment")}
    done = False
    for name, key in keys.items():
        table: Columns = getattr(series, name)
        if len(table) > most_rows:
            table.replace(_halved(table.newest(len(table)), key))
            done = True
    return done


def _halved(columns: dict[str, Column], key: tuple[str, ...]) -> dict[str, Column]:
    """Returns columns in which each two rows of equal key that are next in time became one."""
    order = np.lexsort([columns["time_s"], *(columns[name] for name in reversed(key))])
    sorted_rows = {name: values[order] for name, values in columns.items()}
    changed = np.zeros(len(order), bool)
    for name in key:
        changed[1:] |= sorted_rows[name][1:] != sorted_rows[name][:-1]
    changed[0] = True
    places = np.arange(len(order))
    within = places - np.maximum.accumulate(np.where(changed, places, 0))
    (begins,) = np.nonzero(within % 2 == 0)
    counts = np.diff(np.append(begins, len(order)))
    made = {}
    for name, values in sorted_rows.items():
        sums = np.add.reduceat(values, begins)
        if name in SUMS:
            made[name] = sums
        elif name in LATER:
            made[name] = values[begins + counts - 1]
        elif name in LONGEST:
            made[name] = np.maximum.reduceat(values, begins)
        else:
            made[name] = sums / counts
    again = np.argsort(made["time_s"], kind="stable")
    return {name: values[again] for name, values in made.items()}
