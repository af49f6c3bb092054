"""A follower: reads the views of a run, version after version, and verifies them.

The follower reads the tape by one consumer, which the server forgets when the follower disconnects,
and publishes nothing; the run does not wait for it. It catches up on missed records as learners do
(`catchup.py`); if it reads more slowly than records are made, it skips to the newest record. In
memory it has one view of each fragment, and a second view of a fragment that it moves to the next
version.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Self, TypeVar

import numpy as np

from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.errors import (
    IntegrityError,
    ObjectMissingError,
    WireError,
)
from diloco.common.storage.bus import Message
from diloco.common.storage.catchup import UnfetchedRecord, next_move
from diloco.common.storage.tape import (
    RunContext,
    effective_settings,
    first_message,
    last_word,
    parse_changed,
    read_word,
)
from diloco.common.storage.views import ViewStep, load_recorded, take_step
from diloco.run.model.whole import (
    FollowedFragment,
    FollowRules,
    HeardRecord,
    choose_whole,
    following,
)

T = TypeVar("T")

# The most records that are searched back for a whole version to begin with.
MOST_BACK = 64
# Records after which the distance to the newest version is checked against this number.
MOST_BEHIND = 16
_LOST = (ObjectMissingError, IntegrityError, WireError)


class Lag(NamedTuple):
    """How far a follower is behind the tape: 0 and 0 once it has handed out all changes.

    Attributes:
        versions: the most versions of a fragment that were not handed out.
        seconds: time since the newest of these versions was stored.
    """

    versions: int
    seconds: float


class Standing(NamedTuple):
    """The record of a view.

    Attributes:
        record: the record's word.
        record_seq: the record's stream sequence.
        stored_at_s: when the stream stored the record, in seconds since the epoch.
    """

    record: wire.RecordWord
    record_seq: int
    stored_at_s: float


class Advance(NamedTuple):
    """A change that a follower hands out: new views of one fragment or several.

    Attributes:
        heard: the record of each fragment whose view has changed.
        rolled_back: whether the run was rolled back since the last change.
        encoded: the delta, if one fragment advanced by one version; else None.
    """

    heard: tuple[HeardRecord, ...]
    rolled_back: bool
    encoded: Encoded | None = None

    @property
    def records(self) -> tuple[wire.RecordWord, ...]:
        """The words of the records of `heard`, without their sequences and times."""
        return tuple(one.record for one in self.heard if one.record is not None)


class Follower:
    """Follows one tape of a run; to be used as an asynchronous context manager.

    Args:
        context: the run's context.
        rules: the fragments and versions to hand out.
        carried: `carried()` of the follower of the run's earlier tape; None: begin anew.

    Attributes:
        ended: whether the run's end has been read.
        read_bytes: bytes of objects read so far.
    """

    def __init__(
        self,
        context: RunContext,
        rules: FollowRules,
        carried: list[FollowedFragment] | None = None,
    ) -> None:
        self._context = context
        self._rules = rules
        self._fragments = carried or [FollowedFragment(index) for index in rules.fragments]
        self._settings = context.settings
        self._settings_seq = 0
        self._moved = asyncio.Event()
        self._reading: asyncio.Future[None] | None = None
        self._behind = False
        self._error: Exception | None = None
        self.ended = False
        self.read_bytes = 0

    async def __aenter__(self) -> Self:
        await self._find_newest()
        self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reading is not None:
            await cancel(self._reading)

    def carried(self) -> list[FollowedFragment]:
        """Returns the fragments with their views, for a follower of the run's next tape."""
        # None of these records is on the new tape; a view may be the one with which it begins.
        return [
            FollowedFragment(
                one.index,
                one.view,
                one.adopted._replace(record_seq=0),
                given=one.given._replace(record_seq=0),
            )
            for one in self._fragments
        ]

    def view(self, fragment: int) -> np.ndarray:
        """Returns a fragment's view, float32 [elements]; valid until the next `advance`."""
        return self._of(fragment).view

    def standing(self) -> dict[int, Standing]:
        """Returns the record of each fragment's view, by fragment."""
        found = {one.index: one.history[0] for one in self._fragments}
        return {
            index: Standing(heard.record, heard.record_seq, heard.stored_at_s)
            for index, heard in found.items()
            if heard.record is not None
        }

    def lag(self) -> Lag:
        """Returns how far the newest change handed out is behind the records read."""
        found = self._target() or ()
        behind = [
            (heard.record.version - one.given.version, heard.stored_at_s)
            for heard in found
            if heard.record is not None
            and (one := self._of(heard.record.fragment)).given.view_digest
            != heard.record.view_digest
        ]
        if not behind:
            return Lag(0, 0.0)
        now_s = self._context.runtime.clock()
        return Lag(
            max(1, *(versions for versions, _ in behind)),
            max(0.0, now_s - max(stored_at_s for _, stored_at_s in behind)),
        )

    async def advance(self) -> Advance | None:
        """Waits for versions to hand out, moves the fragments' views to them, returns the change.

        Returns None once the run has ended or `FollowRules.stay_at` is reached, and all changes
        were handed out.

        Raises:
            NewTapeError: the run was resumed on a new tape.
            DilocoError: the bus refuses; the last version is damaged or missing.
        """
        while True:
            self._moved.clear()
            target = self._target()
            if target is not None and self._can_be_had(target):
                found = await (self._to_whole(target) if self._rules.whole else self._one_step())
                if found is not None:
                    return found
                continue
            if self._over():
                if self._error is not None and target is not None and self._refused(target):
                    raise self._error
                return None
            if self._behind:
                await self._catch_up()
            elif not await self._read_ahead():
                await self._wait()

    async def rest(self, for_s: float) -> None:
        """Waits `for_s` seconds, or less if the tape ends or cannot be read meanwhile."""
        assert self._reading is not None
        if self._behind:
            await asyncio.sleep(for_s)
        elif for_s > 0:
            await asyncio.wait([self._reading], timeout=for_s)

    # The target: the records to hand out

    def _target(self) -> tuple[HeardRecord, ...] | None:
        """Returns the records to hand out now, whether or not they were handed out already."""
        rules = self._rules
        histories = [one.history for one in self._fragments]
        if rules.whole:
            return choose_whole(histories, self._settings, ended=self.ended, most=rules.stay_at)
        found = []
        for history in histories:
            known = [
                one for one in history if one.record is not None
                and (rules.stay_at is None or one.record.version <= rules.stay_at)
            ]  # fmt: skip
            found += known[-1:]
        return tuple(found)

    def _can_be_had(self, target: Sequence[HeardRecord]) -> bool:
        """Returns whether a record of the target is due, and no due view was found unreadable."""
        return any(self._is_due(heard) for heard in target) and not self._refused(target)

    def _is_due(self, heard: HeardRecord) -> bool:
        record = heard.record
        assert record is not None
        given = self._of(record.fragment).given
        if record.view_digest == given.view_digest and record.version == given.version:
            return False
        last = self.ended or record.final or record.version == self._rules.stay_at
        back = record.floor > given.version or record.version <= given.version
        return record.version - given.version >= self._rules.every or last or back

    def _refused(self, target: Sequence[HeardRecord]) -> bool:
        """Returns whether the view of a due record of the target was found unreadable."""
        return any(
            heard.record_seq <= self._of(heard.record.fragment).refused_seq
            for heard in target
            if heard.record is not None and self._is_due(heard)
        )

    def _over(self) -> bool:
        stay_at = self._rules.stay_at
        there = stay_at is not None and all(
            one.given.version >= stay_at
            for one in self._fragments[-1 if self._rules.whole else 0 :]
        )
        return self.ended or there

    async def _wait(self) -> None:
        assert self._reading is not None
        if self._reading.done():
            self._reading.result()
        await self._moved.wait()

    # Moving to the target

    async def _to_whole(self, target: Sequence[HeardRecord]) -> Advance | None:
        """Moves all fragments to the target; returns None if a view of it cannot be read."""
        for one, heard in zip(self._fragments, target, strict=True):
            while one.adopted.record_seq < heard.record_seq:
                if await self._move(one, heard) is None:
                    return None
        moved = [
            (one, heard)
            for one, heard in zip(self._fragments, target, strict=True)
            if heard.record is not None and heard.record.view_digest != one.given.view_digest
        ]
        return self._give(moved, None)

    async def _one_step(self) -> Advance | None:
        """Moves the fragment whose next record is the oldest; returns None if that fails."""
        due = [
            (self._of(heard.record.fragment), heard)
            for heard in self._target() or ()
            if heard.record is not None and self._is_due(heard)
        ]
        one, heard = min(due, key=lambda pair: pair[0].waiting[0].record_seq)
        while one.adopted.record_seq < heard.record_seq:
            step = await self._move(one, heard)
            if step is None:
                return None
            now = one.history[0]
            if self._rules.every == 1 and self._is_due(now):
                return self._give([(one, now)], step.encoded)
        return self._give([(one, heard)], None)

    def _give(
        self,
        moved: Sequence[tuple[FollowedFragment, HeardRecord]],
        encoded: Encoded | None,
    ) -> Advance | None:
        heard, back = [], False
        for one, its in moved:
            assert its.record is not None
            first = one.given.version < 0
            back |= not first and its.record.floor > one.given.version
            heard.append(its)
        for one in self._fragments:
            if self._rules.whole or any(one is other for other, _ in moved):
                one.given = one.adopted
        self._error = None
        return Advance(tuple(heard), back, encoded) if heard else None

    async def _move(self, one: FollowedFragment, upto: HeardRecord) -> ViewStep | None:
        """Moves a fragment one step towards a record; returns None if no view can be read."""
        waiting = [each for each in one.waiting if each.record_seq <= upto.record_seq]
        move = next_move(one.adopted, [UnfetchedRecord(w.record_seq, w.record) for w in waiting])
        assert move is not None  # `upto` can be read.
        newest, change = waiting[move.covers - 1], move.change
        record = newest.record
        assert record is not None
        if change is None:
            one.adopt(newest, record, one.view)
            return ViewStep(one.view, 0, None)
        context = self._context
        try:
            try:
                step = await self._retry(
                    lambda: context.runtime.call(take_step, context, one.view, change)
                )
            except _LOST:
                newest = upto
                step = await self._retry(lambda: self._reload(one, upto))
        except _LOST as error:
            self._refuse(one, upto, error)
            return None
        assert newest.record is not None
        self.read_bytes += step.read_bytes
        one.adopt(newest, newest.record, step.view)
        return step

    async def _read_ahead(self) -> bool:
        """Moves one fragment towards the next whole version, before that is complete.

        Returns False if no fragment can be moved yet.
        """
        *others, last = self._fragments
        if not self._rules.whole or self._rules.every > 1 or last.given.version < 0:
            return False
        reach = following(self._settings, last.history[0])
        for one in others:
            ready = [
                heard for heard in one.waiting
                if heard.record is not None and heard.record.global_step <= reach
            ]  # fmt: skip
            if ready and ready[-1].record_seq > one.refused_seq:
                await self._move(one, ready[-1])
                return True
        return False

    async def _reload(self, one: FollowedFragment, upto: HeardRecord) -> ViewStep:
        """Loads a record's view from stored objects: a view, perhaps an older one with deltas."""
        assert upto.record is not None
        try:
            loaded = await load_recorded(self._context, upto.record, upto.record_seq)
        except IntegrityError as error:
            if one.history[-1].record_seq == upto.record_seq:
                raise
            # There are newer records: this one's objects were most likely collected.
            raise IntegrityError(error.message, hint=error.hint) from error
        return ViewStep(loaded.view, loaded.read_bytes, None)

    def _refuse(self, one: FollowedFragment, upto: HeardRecord, error: Exception) -> None:
        one.refused_seq = upto.record_seq
        self._error = error
        self._context.logger.warning(
            "version_skipped",
            fragment=one.index,
            record_seq=upto.record_seq,
            why=str(error),
        )

    # Reading the tape

    async def _find_newest(self) -> None:
        """Reads the newest record of each fragment, and skips those between.

        If they make no whole version, reads earlier ones, up to `MOST_BACK` times.
        """
        context, rules = self._context, self._rules
        self._settings, self._settings_seq = await self._retry(lambda: effective_settings(context))
        # Asked first: if the run has ended, the records read now are the last.
        self.ended = (
            await self._retry(lambda: context.bus.last(context.tape, names.end(context.run)))
            is not None
        )
        last = await asyncio.gather(
            *(self._retry(partial(last_word, context, one.index)) for one in self._fragments)
        )
        for one, told in zip(self._fragments, last, strict=True):
            one.history = [HeardRecord(told.record_seq, told.word.closed_at_s, told.word)]
        newest = [one.history[-1].record for one in self._fragments]
        if rules.stay_at is not None and all(
            record is not None and record.version > rules.stay_at for record in newest
        ):
            await self._go_to(rules.stay_at)
            return
        for _ in range(MOST_BACK):
            if self._target() is not None or not await self._back():
                return

    async def _go_to(self, version: int) -> None:
        """Makes an earlier version of the run the only one that is handed out."""
        from diloco.aggregator.rollback import find_versions

        found = await find_versions(self._context, dict.fromkeys(self._rules.fragments, version))
        for one in self._fragments:
            at = found[one.index]
            one.history = [HeardRecord(at.record_seq, at.stored_at_s, wire.word_of(at.record))]
        self.ended = True
        self._rules = self._rules._replace(stay_at=None)

    async def _back(self) -> bool:
        """Reads one earlier record of the fragments that lack one for a whole version.

        Returns False if the tape has no such record.
        """
        last = self._fragments[-1]
        found = False
        for one in [one for one in self._fragments if one.starts_after(last)] or [last]:
            oldest = one.history[0].record
            if oldest is None or oldest.what == "restore" or not oldest.base_seq:
                continue
            subject = names.record(self._context.run, one.index)
            message = await first_message(self._context, subject, oldest.base_seq)
            if message.seq == oldest.base_seq:
                one.history.insert(0, self._heard(message))
                found = True
        return found

    async def _catch_up(self) -> None:
        """Skips to the newest records; reads the tape again once these are handed out."""
        await self._find_newest()
        target = self._target()
        if target is None or not self._can_be_had(target):
            self._listen()

    def _listen(self) -> None:
        self._behind = False
        start_seq = min(one.history[-1].record_seq for one in self._fragments) + 1
        self._reading = asyncio.ensure_future(self._read_tape(start_seq))
        self._reading.add_done_callback(lambda _: self._moved.set())

    async def _read_tape(self, start_seq: int) -> None:
        """Reads records until the run's end, or until the newest is more than `MOST_BEHIND` ahead.

        Returns at once if the run's end was read already.
        """
        if self.ended:
            return
        context = self._context
        subjects = [
            names.record(context.run, "*"), names.settings(context.run), names.end(context.run)
        ]  # fmt: skip
        reading = context.bus.read(context.tape, subjects, start_seq)
        async with contextlib.aclosing(reading):  # type: ignore[type-var]
            count = 0
            async for message in reading:
                await self._take(message)
                if self.ended:
                    break
                count += 1
                if count % MOST_BEHIND == 0 and await self._is_far_behind():
                    self._behind = True
                    return
        # In a file the end of the tape is the end of the run.
        self.ended = True

    async def _is_far_behind(self) -> bool:
        last = self._fragments[-1]
        heard = next((one.record for one in reversed(last.history) if one.record is not None), None)
        try:
            newest = await self._retry(lambda: last_word(self._context, last.index))
        except _LOST:
            return False  # It is skipped when reading reaches it.
        return heard is not None and newest.word.version - heard.version > MOST_BEHIND

    async def _take(self, message: Message) -> None:
        match names.parse_subject(message.subject):
            case names.Subject(kind="end"):
                self.ended = True
            case names.Subject(kind="settings") if message.seq > self._settings_seq:
                with contextlib.suppress(WireError):  # Invalid settings have no effect.
                    self._settings = parse_changed(self._context.settings, message)
                    self._settings_seq = message.seq
            case names.Subject(kind="record", fragment=int(fragment)) if (
                fragment in self._rules.fragments
            ):
                self._of(fragment).hear(self._heard(message))
            case _:
                return
        self._moved.set()

    def _heard(self, message: Message) -> HeardRecord:
        """Reads the word in a message; its `record` is None if the message is damaged."""
        record: wire.RecordWord | None = None
        try:
            record = read_word(self._context, message).word
        except _LOST as error:
            why = error.message
            self._context.logger.warning("record_skipped", record_seq=message.seq, why=why)
        return HeardRecord(message.seq, message.time_s, record)

    def _of(self, fragment: int) -> FollowedFragment:
        return self._fragments[self._rules.fragments.index(fragment)]

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        runtime, logger = self._context.runtime, self._context.logger
        return await runtime.retry("following the run", attempt, logger=logger)
