"""Makes, stores and commits the records of one fragment, beside what its machine does next."""

from collections.abc import Awaitable, Callable

from diloco.aggregator import instruments
from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.context import Context
from diloco.aggregator.core import events
from diloco.aggregator.core.decisions import decide
from diloco.aggregator.core.effects import Commit
from diloco.aggregator.core.policy import FragmentRules
from diloco.aggregator.records import (
    Version,
    cited,
    compose,
    make_version,
    store_version,
    sum_up,
    unchanged,
)
from diloco.aggregator.samples import Samples
from diloco.aggregator.swap import commit_record
from diloco.aggregator.tasks import Tasks
from diloco.common import log, wire


class Committer:
    """Commits what the machine decides, one record at a time.

    Args:
        context: the aggregator's.
        newest: the record that the fragment stands at.
        arrays: the fragment's.
        samples: takes copies of verdicts for people.
        answer: takes the machine's event once a record stands.
        tasks: the tenure's; fail with `SwapLostError` if another record stands in its place.
        on_snapshot: called when a stored state is committed.
        logger: the fragment's.

    Attributes:
        newest: the record that the fragment stands at.
    """

    def __init__(
        self,
        context: Context,
        newest: wire.Record,
        arrays: FragmentArrays,
        samples: Samples,
        answer: Callable[[events.Committed], Awaitable[None]],
        tasks: Tasks,
        on_snapshot: Callable[[], None],
        logger: log.Logger,
    ) -> None:
        self.newest = newest
        self._context = context
        self._arrays = arrays
        self._samples = samples
        self._answer = answer
        self._tasks = tasks
        self._on_snapshot = on_snapshot
        self._logger = logger

    async def begin(self, rules: FragmentRules, commit: Commit) -> events.Made | None:
        """Make the version, if there is one; its record is stored and published by itself."""
        version = None
        if commit.what == "version":
            version = await make_version(self._context, self._arrays, commit.state)
        self._tasks.start(self._commit(rules, commit, version))
        if version is None:
            return None
        return events.Made(version.merged_at_s, version.made.view_digest)

    async def _commit(self, rules: FragmentRules, commit: Commit, version: Version | None) -> None:
        """Store the objects, publish the record by compare-and-swap, tell the machine."""
        context, clock = self._context, self._context.runtime.clock
        record = await self._draft(rules, commit, version)
        with instruments.timing(context.metrics, clock, "publish"):
            record_seq = await commit_record(context, record, self.newest.attempt_id)
        instruments.count_record(context.metrics, self.newest, record)
        self.newest = cited(record, record_seq)
        committed_at_s = clock()
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
            await self._samples.show(one.learner, one.incarnation, one.seq, one.reason, one.detail)

    async def _draft(
        self, rules: FragmentRules, commit: Commit, version: Version | None
    ) -> wire.Record:
        """The record of `commit`, with its objects stored."""
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
