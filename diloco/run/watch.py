"""Reads a run's present state from its tape, heartbeats and leases, and follows the changes."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from diloco.common.process.config import BusSection, load_config, parse_settings
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    BusUnavailableError,
    RunMissingError,
    StoreError,
    StreamMissingError,
    WireError,
)
from diloco.common.storage.bundle import BundleBus
from diloco.common.storage.bus import Bus, Message, jetstream
from diloco.common.storage.tape import (
    Entry,
    Item,
    Recorded,
    RunContext,
    check_record,
    decode,
    decode_as,
    effective_settings,
    last_record,
    load_specification,
    read_item,
    read_tape,
)
from diloco.run.agreement import shard_figures
from diloco.run.cli.opening import CONNECT_S, find_config
from diloco.run.health_findings import NATS_AWAY, STORE_AWAY, failed, judged, ranked
from diloco.run.learner_history import LastHeartbeat
from diloco.run.newest_objects import object_findings
from diloco.run.observed import Observed
from diloco.run.state import Finding, RunStatus

# Messages at the end of the tape that are read if a part of it suffices.
WINDOW = 2000
NEVER_S = math.inf
# Seconds that a single status waits for the store; seconds between two checks of the store when
# following, and the largest share of the time that they take.
FIRST_LOOK_S, STORE_S, STORE_SHARE = 1.0, 20.0, 0.05


class Watch:
    """Follows the state of a run, from some point of its tape on.

    Args:
        context: the run's context.
        beside: called with each message of the tape that is read.
        heard: called with each heartbeat that comes during `follow`, and with the time when it was
            stored (seconds since the epoch).

    Attributes:
        observed: the state of the run, from the messages read.
    """

    def __init__(
        self,
        context: RunContext,
        beside: Callable[[Item], None] | None = None,
        heard: Callable[[wire.Heartbeat, float], None] | None = None,
    ) -> None:
        self._context = context
        self._beside = beside
        self._heard = heard
        self._next_seq = 1
        self._as_of_s = 0.0
        copied = isinstance(context.bus, BundleBus)
        self.observed = Observed(
            context.run,
            context.epoch,
            context.settings,
            copied=copied,
            modules=[fragment.module for fragment in context.layout.fragments],
        )

    async def first_seq(self) -> int:
        """Returns the stream sequence from which to read the tape for the run's present state."""
        context = self._context
        return max(1, await context.bus.last_sequence(context.tape) - WINDOW)

    async def begin(self, start_seq: int | None = None) -> RunStatus:
        """Reads the tape to its end, then heartbeats, leases and store; returns the run's status.

        Args:
            start_seq: stream sequence to begin with (1: the whole tape); None: `first_seq`.
        """
        self._next_seq = start_seq or await self.first_seq()
        self.observed.from_start = self._next_seq == 1
        async for item in read_tape(self._context, self._next_seq):
            self.take(item)
        for fragment in range(len(self._context.layout.fragments)):
            if fragment not in self.observed.records:
                record, seq = await last_record(self._context, fragment)
                self.observed.note_record(Recorded(record, seq, record.closed_at_s))
        await self.caught_up()
        # An ended run does not change, so it is judged once, without a time limit.
        return await self.look_into_store(NEVER_S if self.observed.ended else FIRST_LOOK_S)

    async def caught_up(self) -> RunStatus:
        """Reads heartbeats and leases, once the tape is read; returns the run's status."""
        context, observed = self._context, self.observed
        if not observed.from_start:
            observed.settings, _ = await effective_settings(context)
            await self._read_joins()
        beats = await read_heartbeats(context, observed.names())
        for one in beats.values():
            observed.hear(one.heartbeat, one.heard_at_s)
        self._as_of_s = context.runtime.clock()
        return await self.now()

    async def _read_joins(self) -> None:
        """Reads the newest joins of the learners whose joins are older than what was read."""
        context, observed = self._context, self.observed
        for learner in observed.names():
            if not observed.known[learner].joined:
                message = await context.bus.last(context.tape, names.join(context.run, learner))
                with contextlib.suppress(WireError):
                    if message is not None:
                        join = decode_as(wire.Join, message.subject, message.payload)
                        observed.known[learner].join(join, message.seq, message.time_s)

    async def follow(self, start_seq: int | None = None, *, store: bool = False) -> None:
        """Follows tape and heartbeats; returns at the run's end.

        Args:
            start_seq: stream sequence to begin with; None: after the last message read.
            store: whether to check the store at intervals as well.
        """
        if self.observed.ended:
            return
        context = self._context
        beats = asyncio.ensure_future(self._follow_heartbeats())
        looking = asyncio.ensure_future(self._follow_store() if store else asyncio.sleep(0))
        subjects = names.tape_subjects(context.run)
        try:
            reading = context.bus.read(context.tape, subjects, start_seq or self._next_seq)
            async for message in reading:
                self.take(await read_item(context, message))
                if self.observed.ended:
                    return
        finally:
            await cancel(beats, looking)

    def take(self, item: Item) -> None:
        """Notes the tape's next message.

        Raises:
            IntegrityError: the message is a record of another layout.
            NewTapeError: the message is a record of another epoch: the run has a new tape.
        """
        if self._beside is not None:
            self._beside(item)
        if isinstance(item, Entry) and isinstance(item.body, wire.Record):
            check_record(self._context, item.body)
        self.observed.take(item)
        self._next_seq = item.seq + 1

    async def _follow_heartbeats(self) -> None:
        context = self._context
        subjects = [names.heartbeat(context.run, "*")]
        async for message in context.bus.read(names.ops_stream(context.run), subjects, 1):
            if (beat := heartbeat(message)) is not None:
                self.observed.hear(beat, message.time_s)
                if self._heard is not None:
                    self._heard(beat, message.time_s)

    async def now(self) -> RunStatus:
        """Returns the run's present status; if the bus is unreachable, the last known one."""
        context, observed = self._context, self.observed
        try:
            observed.leases, observed.aggregators = await read_leases(context)
            observed.filled = await context.bus.filled(context.tape)
            observed.last_seq = await context.bus.last_sequence(context.tape)
        except BusUnavailableError as error:
            was = self.as_it_was()
            return replace(was, findings=(failed("bus", error, NATS_AWAY), *was.findings))
        self._as_of_s = context.runtime.clock()
        return self._run(current=True)

    async def _follow_store(self) -> None:
        while True:
            began_s = time.monotonic()
            await self.look_into_store(STORE_S)
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(STORE_S, took_s / STORE_SHARE))

    async def look_into_store(
        self, within_s: float = NEVER_S, *, objects: bool = True
    ) -> RunStatus:
        """Checks the store; returns the last known status, with findings on the store.

        Args:
            within_s: seconds after which no more shards are read.
            objects: whether to check the objects of versions as well as the newest rounds' shards.
        """
        context, observed = self._context, self.observed
        rounds = [*observed.rounds]

        def newest() -> list[wire.Record]:
            return [one.record for one in observed.records.values()]

        call, stored = context.runtime.call, list[Finding]()
        try:
            observed.shards = await call(shard_figures, context, rounds, within_s)
            # The run of a copy may have advanced, and its store too.
            if objects and not observed.copied:
                look = partial(object_findings, context.store, context.run, rounds, newest)
                stored = await call(look)
        except StoreError as error:
            stored = [failed("store", error, STORE_AWAY)]
        observed.stored = tuple(stored)
        return self._run(current=True)

    def as_it_was(self) -> RunStatus:
        """Returns the last known status, marked as not current."""
        return self._run(current=False)

    def _run(self, *, current: bool) -> RunStatus:
        observed = self.observed
        run = observed.run(self._as_of_s, current=current)
        found = judged(run, observed.settings, copied=observed.copied)
        return replace(run, findings=tuple(ranked(found)))


def heartbeat(message: Message) -> wire.Heartbeat | None:
    """Returns the heartbeat in a message; None if it is invalid or its subject names another."""
    with contextlib.suppress(WireError):
        return decode_as(wire.Heartbeat, message.subject, message.payload)
    return None


async def read_heartbeats(context: RunContext, learners: Iterable[str]) -> dict[str, LastHeartbeat]:
    """Returns the newest stored heartbeat of each of these learners that has one."""
    found: dict[str, LastHeartbeat] = {}
    for learner in learners:
        subject = names.heartbeat(context.run, learner)
        message = await context.bus.last(names.ops_stream(context.run), subject)
        if message is not None and (beat := heartbeat(message)) is not None:
            found[learner] = LastHeartbeat(beat, message.time_s)
    return found


async def read_leases(context: RunContext) -> tuple[dict[int, wire.Lease], list[wire.Lease]]:
    """Returns each fragment's lease, by fragment, and the lease of each live aggregator itself."""
    owners: dict[int, wire.Lease] = {}
    aggregators: list[wire.Lease] = []
    with contextlib.suppress(StreamMissingError):
        async for message in _standing(context.bus, context.run):
            with contextlib.suppress(WireError):
                lease = decode_as(wire.Lease, message.subject, message.payload)
                subject = names.parse_subject(message.subject)
                if subject is not None and subject.fragment is not None:
                    owners[subject.fragment] = lease
                elif lease.state == "held":
                    aggregators.append(lease)
    return owners, aggregators


async def _standing(bus: Bus, run: str) -> AsyncIterator[Message]:
    """Yields the newest message of each subject of a run's leases that has not expired."""
    stream, subjects = names.leases_stream(run), names.leases_subjects(run)
    # Not the stream's last sequence: that key may have expired, and the wait for it would not end.
    last = await bus.last(stream, subjects[0])
    if last is None:
        return
    async with contextlib.aclosing(bus.read(stream, subjects, 1)) as reading:  # type: ignore[type-var]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                async for message in reading:
                    yield message
                    if message.seq >= last.seq:
                        return


def is_bus(target: str) -> bool:
    """Returns whether `target` is the URL of a bus, not a run's name or file."""
    return "://" in target and not Path(target).exists()


def bus_section(target: str | None) -> BusSection:
    """Returns the configuration of a bus given by its URL or a run's file; None: the default."""
    if target is None:
        return BusSection()
    return BusSection(url=target) if is_bus(target) else load_config(find_config(target)).bus


async def read_runs(section: BusSection) -> list[RunStatus]:
    """Returns the status of every run of a bus, the one with the newest message first.

    Only the last record of each fragment is read, so learners are those that the records name.

    Raises:
        BusUnavailableError: the bus is unreachable.
        BusError: the bus does not permit this.
    """
    bus = await jetstream.connect(
        section.url,
        name="operator",
        credentials=section.credentials,
        tls_ca=section.tls_ca,
        connect_timeout_s=CONNECT_S,
    )
    try:
        runs = []
        for stream in await bus.streams():
            run = stream.removeprefix("diloco-")
            if run != stream and names.valid_name(run):
                # A run without a specification is not ours, or being created.
                with contextlib.suppress(RunMissingError, WireError):
                    runs.append(await _read(bus, run))
    finally:
        await bus.close()
    return sorted(runs, key=lambda one: one.quiet_s)


async def _read(bus: Bus, run: str) -> RunStatus:
    """Returns a run's status from its fragments' last records, settings, stop and end."""
    specification = await load_specification(bus, run)
    settings, stream = parse_settings(specification.settings), names.tape_stream(run)
    records = [names.record(run, index) for index in range(settings.sync.fragments)]
    subjects = [*records, names.settings(run), names.stop(run), names.end(run)]
    last = [await bus.last(stream, subject) for subject in subjects]
    observed = Observed(run, specification.epoch, settings)
    for message in sorted((one for one in last if one is not None), key=lambda one: one.seq):
        # The body of a large record is in the store, which is not read here.
        body = decode(message.subject, message.payload)
        size_bytes = len(message.payload)
        observed.take(Entry(message.seq, message.time_s, message.subject, body, size_bytes))
    observed.filled = await bus.filled(stream)
    found = observed.run(time.time())
    whole = None not in last[: len(records)]
    return found if whole else replace(found, state="not wholly created")
