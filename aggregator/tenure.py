"""One tenure of a fragment: from a record that was recovered to one that somebody else commits.

While a record is being committed the machine is told nothing: what the tape and the fetches bring
waits in the queue, in order.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

from diloco.aggregator import instruments
from diloco.aggregator.arrays.fragment import Payload
from diloco.aggregator.context import Context, commit_record
from diloco.aggregator.core import events, machine, memory, policy, rounds
from diloco.aggregator.core.decisions import decide
from diloco.aggregator.core.effects import (
    Commit,
    Effect,
    Fetch,
    Ignored,
    Merge,
    OpenRound,
    ShutOut,
)
from diloco.aggregator.core.policy import FragmentRules
from diloco.aggregator.fetcher import Fetcher
from diloco.aggregator.quarantine import quarantine
from diloco.aggregator.records import cited, compose, make_version, sum_up, unchanged
from diloco.aggregator.recovery import Recovered
from diloco.aggregator.samples import Samples
from diloco.aggregator.tape_events import Ended, Recorded, Resettled, decode_message, subjects
from diloco.common import names, wire
from diloco.common.config import RunSettings
from diloco.common.errors import SwapLostError, WireError

# Events that may wait for a fragment's machine before its tape reader waits for it.
QUEUE = 1024

# What the tape and the fetches have for the machine, with the payload that it is about.
Item = tuple[events.Event | Recorded | Resettled | Ended, Payload | None]


class Tenure:
    """Makes versions of one fragment for as long as nobody else does.

    Args:
        context: the aggregator's.
        recovered: the fragment as its newest record left it.
        samples: takes what is no update.
        on_snapshot: called when a stored state is committed.

    Attributes:
        fragment: its index.
        state: the machine's.
        newest: the record that the fragment stands at.
        rules: in force.
    """

    def __init__(
        self,
        context: Context,
        recovered: Recovered,
        samples: Samples,
        on_snapshot: Callable[[], None],
    ) -> None:
        record = recovered.record
        self.newest = record
        self.state = memory.resume(record, recovered.record_seq, context.runtime.clock())
        self._context = context
        self.fragment = record.fragment
        self.rules = self._rules(recovered.settings)
        self._arrays = recovered.arrays
        self._samples = samples
        self._on_snapshot = on_snapshot
        self._logger = context.logger.bind(fragment=self.fragment)
        self._queue: asyncio.Queue[Item] = asyncio.Queue(QUEUE)
        self._fetcher = Fetcher(context, recovered.arrays.grid, self._put, self._logger)

    @property
    def queued(self) -> int:
        """Events that wait for the machine."""
        return self._queue.qsize()

    def work(self) -> tuple[Coroutine[object, object, None], ...]:
        """What is to be done at the same time, until one of them ends.

        Raises:
            SwapLostError: somebody else has committed a record of the fragment.
        """
        return self._read_tape(), self._serve(), self._fetcher.failure()

    async def end(self) -> None:
        """Let go of what is being read."""
        await self._fetcher.stop()

    def tell(self, event: events.Liveness) -> None:
        """Give the machine a liveness change; dropped while its queue is full, and told again."""
        if not self._queue.full():
            self._queue.put_nowait((event, None))

    async def _put(self, event: events.Event, payload: Payload | None) -> None:
        await self._queue.put((event, payload))

    def _rules(self, settings: RunSettings) -> FragmentRules:
        context = self._context
        return policy.fragment_rules(settings, context.layout, self.fragment, context.epoch)

    async def _read_tape(self) -> None:
        context = self._context
        messages = context.bus.read(
            context.tape, subjects(context.run, self.fragment), self.newest.position
        )
        async for message in messages:
            try:
                event = decode_message(context, self.fragment, message)
            except WireError as error:
                await self._samples.take(message.subject, error.reason, error.message)
                continue
            if event is not None:
                await self._queue.put((event, None))

    # The machine

    async def _serve(self) -> None:
        while True:
            event, payload = await self._next_item()
            match event:
                case Ended():
                    break
                case Recorded():
                    self._check_ours(event.stream_seq)
                case Resettled():
                    await self._change(event)
                case _:
                    await self._take(event, payload)
            if payload is not None:
                self._fetcher.release()
        if not self.state.final:
            # Another aggregator has committed what ended the run: see what it left to answer.
            raise self._overtaken()

    async def _next_item(self) -> Item:
        """The next event; a deadline that has passed comes first, however many others wait."""
        due_s = rounds.deadline(self.rules, self.state)
        if due_s is None:
            return await self._queue.get()
        clock = self._context.runtime.clock
        if clock() < due_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s - clock()):
                    return await self._queue.get()
        return events.Timer(max(due_s, clock())), None

    def _check_ours(self, record_seq: int) -> None:
        """Refuse to go on from a state that is not the newest record's."""
        if record_seq > self.state.record_seq:
            raise self._overtaken()

    def _overtaken(self) -> SwapLostError:
        subject = names.record(self._context.run, self.fragment)
        return SwapLostError(subject, self.state.record_seq)

    async def _change(self, change: Resettled) -> None:
        if change.event.stream_seq > self.state.settings_seq:
            self.rules = self._rules(change.settings)
            self._arrays.settings = change.settings
            self._logger.info("settings", settings_seq=change.event.stream_seq)
        await self._take(change.event, None)

    async def _take(self, event: events.Event, payload: Payload | None) -> None:
        self.state, effects = machine.step(self.rules, self.state, event)
        for effect in effects:
            await self._perform(effect, payload)

    async def _perform(self, effect: Effect, payload: Payload | None) -> None:
        match effect:
            case Fetch():
                self._fetcher.start(effect)
            case OpenRound():
                await self._open_round(effect.version)
            case Merge():
                assert payload is not None
                await self._context.runtime.call(self._arrays.merge, payload, effect.admitted)
            case Ignored():
                subject = names.update(self._context.run, effect.manifest.learner, self.fragment)
                await self._samples.take(subject, effect.reason, f"seq {effect.manifest.seq}")
            case Commit():
                await self._commit(effect)
            case ShutOut():
                await self._shut_out(effect)

    async def _shut_out(self, effect: ShutOut) -> None:
        """Tell everybody; each fragment's machine hears of it from the tape, this one too."""
        context = self._context
        self._logger.warning(
            "quarantined",
            learner=effect.learner,
            reason=effect.reason,
            runbook="runbooks/quarantined-learner.md",
        )
        await context.runtime.retry(
            "quarantine",
            lambda: quarantine(context, effect.learner, active=True, reason=effect.reason),
            logger=self._logger,
        )

    async def _open_round(self, version: int) -> None:
        await self._context.runtime.call(self._arrays.open_round)
        message = wire.RoundOpen(fragment=self.fragment, version=version)
        subject = names.round_open(self._context.run, self.fragment)
        await self._context.bus.broadcast(subject, wire.encode(message))

    # The commit

    async def _commit(self, commit: Commit) -> None:
        """Store the objects, publish the record by compare-and-swap, tell the machine."""
        context, runtime = self._context, self._context.runtime
        record = await self._draft(commit)
        with instruments.timing(context.metrics, runtime.clock, "publish"):
            record_seq = await commit_record(context, record)
        instruments.count_record(context.metrics, self.newest, record)
        self.newest = cited(record, record_seq)
        committed = events.Committed(runtime.clock(), record_seq, record.view_digest)
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
            took_s=round(committed.at_s - commit.at_s, 4),
        )
        for one in record.rejected:
            await self._samples.show(one.learner, one.incarnation, one.seq, one.reason, one.detail)
        await self._take(committed, None)
        if record.what == "version" and record.snapshot_version == record.version:
            self._on_snapshot()

    async def _draft(self, commit: Commit) -> wire.Record:
        """The record of `commit`, with its objects stored."""
        previous, decided = self.newest, decide(self.rules, commit)
        if commit.what == "version":
            contents = await make_version(
                self._context, self._arrays, commit.state, previous, self._logger
            )
        else:
            contents = unchanged(previous, commit.at_s)
        return compose(
            self._context,
            self.fragment,
            decided,
            contents,
            base_digest=previous.view_digest,
            totals=sum_up(previous.totals, contents.inputs, decided.rejected),
        )
