"""Follow a run and hand its figures on. It reads the bus and the store: no learner waits for it."""

import asyncio
import contextlib
from collections.abc import Callable

from diloco.cli.opening import open_run
from diloco.common import names, wire
from diloco.common.bus import Message
from diloco.common.errors import StreamMissingError, WireError
from diloco.common.service import cancel
from diloco.common.tape import (
    Entry,
    Item,
    RunContext,
    decode_as,
    last_record,
    messages_of,
    read_item,
    read_tape,
)
from diloco.model.scores import all_kept
from diloco.trackers.points import Point, Points
from diloco.trackers.sinks import Sink

# Seconds between two looks for scores that others have kept.
SCORES_S = 30.0


async def track(target: str, make: Callable[[RunContext], list[Sink]], *, once: bool) -> int:
    """Hand on a run's figures until it ends, and how many points those were.

    Args:
        target: the run.
        make: makes the sinks.
        once: only what is there now.

    Raises:
        DilocoError: no such run; bus or store are away.
    """
    async with open_run(target, name="track", reads=True) as opened:
        tracker = Tracker(opened.context, make(opened.context))
        try:
            await tracker.follow(once=once)
        finally:
            await asyncio.to_thread(tracker.close)
        return tracker.written


class Tracker:
    """Hands a run's figures to sinks.

    Args:
        context: the run's.
        sinks: take them.

    Attributes:
        written: points, so far.
    """

    def __init__(self, context: RunContext, sinks: list[Sink]) -> None:
        self._context = context
        self._sinks = sinks
        self._points = Points()
        self._scored: set[tuple[int, ...]] = set()
        self.written = 0

    async def follow(self, *, once: bool) -> None:
        """Until the run's end, or to what is there now."""
        for fragment in range(len(self._context.layout.fragments)):
            record, _ = await last_record(self._context, fragment)
            self._points.reached(record.global_step)
        if once:
            await self._now()
        else:
            beside = [asyncio.ensure_future(task) for task in (self._heartbeats(), self._score())]
            try:
                await self._tape()
            finally:
                await cancel(*beside)
        await self._scores()

    def close(self) -> None:
        """Have everything kept."""
        for sink in self._sinks:
            sink.close()

    async def _now(self) -> None:
        context = self._context
        async for item in read_tape(context):
            self._take(item)
        # An exported tape is without them.
        with contextlib.suppress(StreamMissingError):
            stream, subjects = _heartbeats_of(context)
            async for message in messages_of(context.bus, stream, subjects, 1):
                self._hear(message)

    async def _tape(self) -> None:
        context = self._context
        subjects = names.tape_subjects(context.run)
        async for message in context.bus.read(context.tape, subjects, 1):
            self._take(await read_item(context, message))
            if message.subject == names.end(context.run):
                return

    async def _heartbeats(self) -> None:
        stream, subjects = _heartbeats_of(self._context)
        async for message in self._context.bus.read(stream, subjects, 1):
            self._hear(message)

    def _take(self, item: Item) -> None:
        if isinstance(item, Entry):
            for point in self._points.of_entry(item):
                self._write(point)

    def _hear(self, message: Message) -> None:
        with contextlib.suppress(WireError):
            beat = decode_as(wire.Heartbeat, message.subject, message.payload)
            self._write(self._points.of_heartbeat(beat, message.time_s))

    async def _score(self) -> None:
        while True:
            await self._scores()
            await asyncio.sleep(SCORES_S)

    async def _scores(self) -> None:
        for score in await all_kept(self._context):
            if score.record_seqs not in self._scored:
                self._scored.add(score.record_seqs)
                self._write(self._points.of_score(score))

    def _write(self, point: Point) -> None:
        self.written += 1
        for sink in self._sinks:
            sink.write(point)


def _heartbeats_of(context: RunContext) -> tuple[str, list[str]]:
    return names.ops_stream(context.run), [names.heartbeat(context.run, "*")]
