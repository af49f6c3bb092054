"""Makes, stores and commits a fragment's records, by compare-and-swap, in the background.

A record has three parts: the machine's decisions (`core/decisions.py`), the facts about arrays and
objects (`RecordContents`), and the identity of the process that makes it.
"""

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import NamedTuple

from diloco.aggregator.arrays.fragment import ClosedRound, FragmentArrays
from diloco.aggregator.compare_and_swap import swap
from diloco.aggregator.context import Context
from diloco.aggregator.core import events, rounds
from diloco.aggregator.core.decisions import Decided, decide
from diloco.aggregator.core.events import Commit
from diloco.aggregator.core.round_and_weight_formulas import FragmentRules
from diloco.aggregator.core.state import State
from diloco.aggregator.core.updates import Admitted
from diloco.common.process import log, metrics, release
from diloco.common.process.metrics import Metrics
from diloco.common.process.tasks import Tasks
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import (
    DilocoError,
)
from diloco.common.protocol.shards import Buffers
from diloco.common.storage.tape import record_digest


class RecordContents(NamedTuple):
    """A record's fields about the arrays at its version, and the objects that hold them.

    Each field is the field of this name in `wire.Record`.
    """

    inputs: tuple[wire.Input, ...]
    factors: bytes
    kept: bytes
    radii: bytes
    learning_rate: float
    momentum: float
    delta: wire.ObjectRef | None
    snapshot: wire.ObjectRef
    snapshot_version: int
    deltas: tuple[wire.ObjectRef, ...]
    outer: wire.ObjectRef
    outer_version: int
    outer_seq: int
    view_digest: str
    outer_digest: str
    merged_at_s: float


def contents_of(record: wire.Record) -> RecordContents:
    """Returns the fields of a record that are in `RecordContents`."""
    return RecordContents(**{name: getattr(record, name) for name in RecordContents._fields})


def unchanged(previous: wire.Record, merged_at_s: float) -> RecordContents:
    """Returns the contents of a record of verdicts alone: those of `previous`, nothing merged."""
    return contents_of(previous)._replace(
        inputs=(), factors=b"", kept=b"", radii=b"", delta=None, merged_at_s=merged_at_s
    )


def compose(
    context: Context,
    fragment: int,
    decided: Decided,
    contents: RecordContents,
    *,
    previous: wire.Record | None,
    totals: wire.Totals,
    restored_version: int | None = None,
) -> wire.Record:
    """Returns a record of a fragment, made by this process.

    Args:
        context: the context of the process, with its run and epoch.
        fragment: the fragment's index.
        decided: the machine's decisions.
        contents: the facts about arrays and objects.
        previous: the fragment's previous record; None for the first record of a tape.
        totals: sums of the fragment's records, this one included.
        restored_version: the version whose contents a rollback repeats; else None.
    """
    return wire.Record(
        **decided._asdict(),
        **contents._asdict(),
        run=context.run,
        epoch=context.epoch,
        fragment=fragment,
        restored_version=restored_version,
        base_digest=previous.view_digest if previous is not None else "",
        layout=context.layout.digest,
        totals=totals,
        aggregator=context.name,
        attempt_id=context.runtime.new_id(),
        previous=record_digest(previous) if previous is not None else "",
        release=release.release(),
        lock=release.lock(),
    )


def cited(record: wire.Record, record_seq: int) -> wire.Record:
    """Returns a record with an `outer_seq` of 0, "this record", replaced by `record_seq`."""
    return record.model_copy(update={"outer_seq": record.outer_seq or record_seq})


NOTHING = wire.Totals(**dict.fromkeys(wire.Totals.model_fields, 0))


def sum_up(
    before: wire.Totals, inputs: tuple[wire.Input, ...], rejected: tuple[wire.Rejected, ...]
) -> wire.Totals:
    """Returns `before` plus the counts of one more record; no sum exceeds `wire.GREATEST`."""
    return wire.Totals(
        updates_merged=_sum(before.updates_merged, len(inputs)),
        updates_rejected=_sum(before.updates_rejected, len(rejected)),
        tokens_merged=_sum(before.tokens_merged, *(taken.tokens for taken in inputs)),
        tokens_rejected=_sum(before.tokens_rejected, *(taken.tokens for taken in rejected)),
        steps_merged=_sum(before.steps_merged, *(taken.steps for taken in inputs)),
        tokens_credited=_sum(before.tokens_credited, *(taken.tokens_credited for taken in inputs)),
    )


def _sum(*counts: int) -> int:
    return min(sum(counts), wire.GREATEST)


class Version(NamedTuple):
    """A version whose outer step is taken and whose objects are not stored yet.

    Attributes:
        made: the closed round.
        merged_at_s: when the outer step was taken, in seconds of Unix time.
        with_snapshot: True if view and outer state are to be stored in addition to the delta.
    """

    made: ClosedRound
    merged_at_s: float
    with_snapshot: bool


async def make_version(context: Context, arrays: FragmentArrays, state: State) -> Version:
    """Makes a version: takes the outer step over the updates that the round has merged.

    Args:
        context: the aggregator's context.
        arrays: the fragment's arrays, whose sum has these updates; changed in place.
        state: the machine's state when the round closed.
    """
    settings = arrays.own_settings
    part = rounds.step_share(
        state, participation=settings.outer.participation, centered=arrays.grid.centered
    )
    with timing(context.metrics, context.runtime.clock, "merge"):
        made = await context.runtime.call(arrays.close_round, state.admitted, part)
    due = (state.version + 1) % settings.sync.snapshot_interval_versions == 0
    return Version(made, context.runtime.clock(), due)


async def store_version(
    context: Context,
    arrays: FragmentArrays,
    version: int,
    made_version: Version,
    previous: wire.Record,
    logger: log.Logger,
) -> RecordContents:
    """Stores the objects of a version, while the next round may merge; returns its contents.

    Args:
        context: the aggregator's context.
        arrays: the fragment's arrays, whose view and outer state are of this version.
        version: the version's number.
        made_version: the version, with its delta.
        previous: the fragment's newest record.
        logger: the fragment's logger.
    """
    fragment, made = previous.fragment, made_version.made
    with timing(context.metrics, context.runtime.clock, "store"):
        delta = await store_version_object(context, fragment, version, "delta", made.delta, logger)
        contents = contents_of(previous)._replace(
            **(made._asdict() | {"delta": delta}),
            deltas=(*previous.deltas, delta),
            merged_at_s=made_version.merged_at_s,
        )
        if not made_version.with_snapshot:
            return contents
        return await with_snapshot(context, fragment, version, arrays, contents, logger)


async def with_snapshot(
    context: Context,
    fragment: int,
    version: int,
    arrays: FragmentArrays,
    contents: RecordContents,
    logger: log.Logger,
) -> RecordContents:
    """Stores view and outer state of a version; returns `contents` with references to them."""
    view, outer = arrays.view_object(), arrays.outer_object()
    return contents._replace(
        snapshot=await store_version_object(context, fragment, version, "view", view, logger),
        snapshot_version=version,
        deltas=(),
        outer=await store_version_object(context, fragment, version, "outer", outer, logger),
        outer_version=version,
        outer_seq=0,
    )


async def store_version_object(
    context: Context,
    fragment: int,
    version: int,
    what: str,
    data: bytes | Buffers,
    logger: log.Logger,
) -> wire.ObjectRef:
    """Stores an object under a name with its digest; returns a reference to it.

    Retries for as long as the store is unreachable.

    Args:
        context: the aggregator's context.
        fragment: the fragment's index.
        version: the version.
        what: "delta", "view", "outer" or "record".
        data: the object's bytes.
        logger: the fragment's logger.
    """
    name = names.version_object(context.run, fragment, version, what, shards.digest(data))
    await context.runtime.retry(
        f"storing {what}",
        lambda: context.runtime.call(context.store.put, name, data),
        logger=logger,
    )
    context.metrics.add(metrics.STORED, len(data))
    return wire.ObjectRef(name=name, size_bytes=len(data), crc32c=shards.crc32c(data))


async def commit_record(context: Context, record: wire.Record, base_id: str = "") -> int:
    """Publishes a record as the successor of `record.base_seq`; returns its stream sequence.

    A large record is stored as an object, named after a version that is not committed yet, so that
    garbage collection cannot remove the object before the record is committed. The pointer to it is
    then the commit: until it stands, nobody knows of the object.

    Args:
        context: the aggregator's context.
        record: the record to publish.
        base_id: attempt id of the base record, to be compared too; '' for no comparison.

    Raises:
        SwapLostError: another record succeeds the base.
    """
    payload = wire.encode(record)
    if len(payload) > context.record_bytes:
        version = record.version + (record.what == "verdict")
        data, answers = wire.with_answers(record, payload)
        body = await store_version_object(
            context, record.fragment, version, "record", data, context.logger
        )
        pointer = wire.RecordPointer(
            word=wire.word_of(record),
            body=body,
            answers=answers,
            attempt_id=record.attempt_id,
        )
        payload = wire.encode(pointer)
    subject = names.record(context.run, record.fragment)
    return await swap(context, subject, payload, record.attempt_id, record.base_seq, base_id)


# The least seconds between two logged messages with the same reason.
SAMPLE_S = 1.0


class IgnoredMessages:
    """Counts messages that are no valid update of a fragment, and logs a sample of each reason."""

    def __init__(self, context: Context, fragment: int, logger: log.Logger) -> None:
        self._context = context
        self._fragment = fragment
        self._logger = logger
        self._sampled_at_s: dict[str, float] = {}
        self._unseen: Counter[str] = Counter()

    async def take(self, subject: str, reason: str, detail: str) -> None:
        """Counts a message; logs and publishes it unless one with this reason was just logged."""
        self._context.metrics.add(metrics.IGNORED, 1, reason)
        now_s = self._context.runtime.clock()
        self._unseen[reason] += 1
        if now_s - self._sampled_at_s.get(reason, 0.0) < SAMPLE_S:
            return
        self._sampled_at_s[reason] = now_s
        count = self._unseen.pop(reason)
        self._logger.warning("ignored", subject=subject, reason=reason, detail=detail, count=count)
        learner = names.subject_learner(subject) or "operator"
        await self.show(learner, 0, 0, reason, detail)

    async def show(
        self, learner: str, incarnation: int, seq: int, reason: str, detail: str
    ) -> None:
        """Publishes a copy of a rejection for operators; a failure to publish is logged."""
        rejection = wire.Rejection(
            fragment=self._fragment,
            learner=learner,
            incarnation=incarnation,
            seq=seq,
            reason=reason,
            detail=wire.note(detail),
        )
        subject = names.rejected(self._context.run, learner)
        try:
            await self._context.bus.publish(subject, wire.encode(rejection))
        except DilocoError as error:
            self._logger.warning("rejection_not_shown", error=error.message)


class Committer:
    """Commits the machine's decisions, one record at a time.

    Args:
        context: the aggregator's context.
        newest: the fragment's newest record.
        arrays: the fragment's arrays.
        ignored: publishes copies of rejections for operators.
        answer: called with the event for the machine once a record is committed.
        tasks: runs the commits; fails with `SwapLostError` if another record is committed instead.
        on_snapshot: called when a version is committed whose view and outer state are stored.
        logger: the fragment's logger.

    Attributes:
        newest: the fragment's newest record.
    """

    def __init__(
        self,
        context: Context,
        newest: wire.Record,
        arrays: FragmentArrays,
        ignored: IgnoredMessages,
        answer: Callable[[events.Committed], Awaitable[None]],
        tasks: Tasks,
        on_snapshot: Callable[[], None],
        logger: log.Logger,
    ) -> None:
        self.newest = newest
        self._context = context
        self._arrays = arrays
        self._ignored = ignored
        self._answer = answer
        self._tasks = tasks
        self._on_snapshot = on_snapshot
        self._logger = logger

    async def begin(self, rules: FragmentRules, commit: Commit) -> events.Made | None:
        """Makes the version of `commit`, and starts to store and publish the record.

        Returns the event that the version is made; None if the record has verdicts alone.
        """
        version = None
        if commit.what == "version":
            version = await make_version(self._context, self._arrays, commit.state)
        self._tasks.start(self._commit(rules, commit, version))
        if version is None:
            return None
        return events.Made(version.merged_at_s, version.made.view_digest)

    async def _commit(self, rules: FragmentRules, commit: Commit, version: Version | None) -> None:
        """Stores the objects, publishes the record by compare-and-swap, and calls `answer`."""
        context, clock = self._context, self._context.runtime.clock
        record = await self._draft(rules, commit, version)
        with timing(context.metrics, clock, "publish"):
            record_seq = await commit_record(context, record, self.newest.attempt_id)
        count_record(context.metrics, self.newest, record)
        self.newest = cited(record, record_seq)
        committed_at_s = clock()
        count_waits(context.metrics, commit.state.admitted, committed_at_s)
        self._logger.info(
            "committed",
            what=record.what,
            version=record.version,
            record_seq=record_seq,
            learners=[taken.learner for taken in record.inputs],
            updates=[f"{taken.incarnation}-{taken.seq}" for taken in record.inputs],
            staleness=[taken.staleness for taken in record.inputs],
            rejected=[f"{taken.learner}:{taken.reason}" for taken in record.rejected],
            reason=record.reason,
            took_s=round(committed_at_s - commit.at_s, 4),
        )
        await self._answer(events.Committed(committed_at_s, record_seq))
        if record.what == "version" and record.snapshot_version == record.version:
            self._on_snapshot()
        for one in record.rejected:
            await self._ignored.show(one.learner, one.incarnation, one.seq, one.reason, one.detail)

    async def _draft(
        self, rules: FragmentRules, commit: Commit, version: Version | None
    ) -> wire.Record:
        """Stores the objects of `commit`, and returns its record."""
        previous, decided = self.newest, decide(rules, commit)
        contents = unchanged(previous, commit.at_s)
        if version is not None:
            contents = await store_version(
                self._context, self._arrays, decided.version, version, previous, self._logger
            )
        return compose(
            self._context,
            previous.fragment,
            decided,
            contents,
            previous=previous,
            totals=sum_up(previous.totals, contents.inputs, decided.rejected),
        )


def count_record(counted: Metrics, before: wire.Record, record: wire.Record) -> None:
    """Counts a committed record in the metrics: inputs, rejections, and the phases of its round."""
    for taken in record.inputs:
        counted.observe(metrics.STALENESS, taken.staleness, taken.learner)
    for refused in record.rejected:
        counted.add(metrics.VERDICTS, 1, refused.learner, refused.reason)
    if record.what != "version":
        return
    counted.observe(metrics.ROUND_UPDATES, len(record.inputs))
    if before.what == "version" and before.inputs:
        counted.observe(metrics.ROUND, max(0.0, record.opened_at_s - before.closed_at_s), "idle")
    quorum_at_s = record.quorum_at_s or record.closed_at_s
    counted.observe(metrics.ROUND, max(0.0, quorum_at_s - record.opened_at_s), "quorum")
    counted.observe(metrics.ROUND, max(0.0, record.closed_at_s - quorum_at_s), "grace")


def count_waits(counted: Metrics, merged: Iterable[Admitted], committed_at_s: float) -> None:
    """Observes the seconds from the arrival of each merged update's manifest to the commit."""
    for one in merged:
        waited_s = max(0.0, committed_at_s - one.announced_at_s)
        counted.observe(metrics.WAIT, waited_s, one.manifest.learner)


@contextlib.contextmanager
def timing(counted: Metrics, clock: Callable[[], float], part: str) -> Iterator[None]:
    """Observes the duration of the `with` block as phase `part` of a round, unless it raises."""
    began_s = clock()
    yield
    counted.observe(metrics.ROUND, clock() - began_s, part)
