"""Decides when a run stops and ends: follows all fragments' records, publishes `stop` and `end`.

Every aggregator of a run has a `Conductor`: both messages are published by compare-and-swap against
an empty subject, and an aggregator that loses the swap has nothing left to do.
"""

from dataclasses import dataclass, field

from diloco.aggregator.compare_and_swap import swap
from diloco.aggregator.context import Context
from diloco.common.process.config import RunSettings
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import SwapLostError, WireError
from diloco.common.protocol.layout import next_step
from diloco.common.storage.bus import Message
from diloco.common.storage.tape import last_word, parse_changed, read_word


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestRecord:
    """The fields of a fragment's newest record that decide the run's end.

    Attributes:
        version: the fragment's newest version.
        record_seq: stream sequence of the record.
        global_step: the run's clock at that version.
        tokens: tokens credited to the merged updates of the fragment's versions.
        final: True if no version follows.
    """

    version: int
    record_seq: int
    global_step: int
    tokens: int
    final: bool


def stop_reason(settings: RunSettings, newest: dict[int, NewestRecord]) -> str | None:
    """Returns why the run must stop: "tokens" or "steps"; None if it must not stop yet.

    Args:
        settings: the settings in force; `run.tokens` and `run.steps` limit each fragment.
        newest: each fragment's newest record, by the fragment's index.
    """
    run, sync = settings.run, settings.sync
    if run.tokens and min(n.tokens for n in newest.values()) >= run.tokens:
        return "tokens"
    following = [next_step(sync.rhythm(f), n.global_step) for f, n in newest.items()]
    return "steps" if min(following) > run.steps else None


@dataclass
class Conductor:
    """Follows the tape, and publishes the run's `stop` and `end` when they are due."""

    context: Context
    _settings: RunSettings = field(init=False)
    _newest: dict[int, NewestRecord] = field(default_factory=dict)
    _settings_seq: int = 0
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._settings = self.context.settings

    async def conduct(self) -> None:
        """Follows the tape until the run's `end` message is on it."""
        await self._follow()
        self.context.logger.info("ended", versions=self._versions())

    async def _follow(self) -> None:
        context = self.context
        await self._look()
        start = min(newest.record_seq for newest in self._newest.values())
        subjects = [
            names.record(context.run, "*"),
            names.settings(context.run),
            names.stop(context.run),
            names.end(context.run),
        ]
        await self._decide()
        async for message in context.bus.read(context.tape, subjects, start):
            if message.subject == names.end(context.run):
                return
            if message.subject == names.stop(context.run):
                self._stopped = True
                continue
            if message.subject == names.settings(context.run):
                self._change(message)
                # A run that was shortened may be complete already.
            else:
                self._note(read_word(context, message).word, message.seq)
            # The newest records may all be behind the end: then no message says it any more.
            if await self._decide():
                return

    async def _look(self) -> None:
        """Reads the newest record of each fragment, and the newest settings."""
        context = self.context
        for fragment in range(len(context.layout.fragments)):
            told = await context.runtime.retry(
                "records",
                lambda fragment=fragment: last_word(context, fragment),  # type: ignore[misc]
                logger=context.logger,
            )
            self._note(told.word, told.record_seq)
        settings = await context.runtime.retry(
            "settings",
            lambda: context.bus.last(context.tape, names.settings(context.run)),
            logger=context.logger,
        )
        if settings is not None:
            self._change(settings)

    def _change(self, message: Message) -> None:
        # Reading begins at the oldest of the newest records, and a bus may deliver a message again.
        # With old settings the run would stop at a length that it no longer has.
        if message.seq <= self._settings_seq:
            return
        self._settings_seq = message.seq
        try:
            self._settings = parse_changed(self.context.settings, message)
        except WireError as error:
            self.context.logger.warning("ignored", subject=message.subject, reason=error.reason)

    def _note(self, record: wire.RecordWord, seq: int) -> None:
        known = self._newest.get(record.fragment)
        if known is None or known.record_seq < seq:
            self._newest[record.fragment] = NewestRecord(
                version=record.version,
                record_seq=seq,
                global_step=record.global_step,
                tokens=record.totals.tokens_credited,
                final=record.final,
            )

    async def _decide(self) -> bool:
        """Publishes what is due; returns True if the run's `end` is on the tape."""
        if all(newest.final for newest in self._newest.values()):
            await self._say(names.end(self.context.run), self._end())
            return True
        if not self._stopped and stop_reason(self._settings, self._newest):
            # What is read of the tape may lag: the run may be longer now, or rolled back.
            await self._look()
            reason = stop_reason(self._settings, self._newest)
            if reason is not None:
                step = max(newest.global_step for newest in self._newest.values())
                stop = wire.Stop(
                    run=self.context.run, global_step=step, reason=reason, by=self.context.name
                )
                await self._say(names.stop(self.context.run), stop)
                self._stopped = True
        return False

    async def _say(self, subject: str, body: wire.Body) -> None:
        try:
            await swap(self.context, subject, wire.encode(body), self.context.runtime.new_id(), 0)
        except SwapLostError:
            return  # Another aggregator, or this one before a restart, has published it.
        self.context.logger.info(body.kind, **body.model_dump(exclude={"run"}))

    def _end(self) -> wire.End:
        ordered = [self._newest[fragment] for fragment in sorted(self._newest)]
        return wire.End(
            run=self.context.run,
            versions=tuple(newest.version for newest in ordered),
            record_seqs=tuple(newest.record_seq for newest in ordered),
        )

    def _versions(self) -> list[int]:
        return [self._newest[fragment].version for fragment in sorted(self._newest)]
