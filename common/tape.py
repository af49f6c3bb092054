"""A run as its tape holds it: the specification, settings, records, and the objects they name."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from diloco.common import log, names, shards, wire
from diloco.common.bus import Bus, Message
from diloco.common.config import RunSettings, check_changeable, parse_settings
from diloco.common.errors import (
    ConfigError,
    IntegrityError,
    ObjectLostError,
    ObjectMissingError,
    RunIncompleteError,
    RunMismatchError,
    RunMissingError,
    StreamMissingError,
    WireError,
)
from diloco.common.layout import Layout
from diloco.common.service import Runtime
from diloco.common.store import ObjectStore


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What all parts of one daemon share of its run."""

    settings: RunSettings
    layout: Layout
    epoch: int
    bus: Bus
    store: ObjectStore
    runtime: Runtime
    logger: log.Logger

    @property
    def run(self) -> str:
        """The run's name."""
        return self.settings.run.name

    @property
    def tape(self) -> str:
        """The run's stream."""
        return names.tape_stream(self.run)


async def load_specification(bus: Bus, run: str) -> wire.Specification:
    """The run's specification, the tape's first message.

    Raises:
        RunMissingError: there is no such run.
    """
    message = None
    with contextlib.suppress(StreamMissingError):
        message = await bus.last(names.tape_stream(run), names.spec(run))
    if message is None:
        raise RunMissingError(
            f"there is no run {run!r} on this bus",
            hint="create it with: diloco run create --config FILE",
        )
    return wire.decode(wire.Specification, message.payload)


async def data_position(
    context: RunContext,
    learner: str,
    last: Callable[[str], Awaitable[Message | None]] | None = None,
) -> int:
    """Where a learner's data goes on, in batches: behind all that its messages cover.

    Args:
        context: of the run.
        learner: its name.
        last: gives a subject's last message; `Bus.last`, which may be stale, if None.
    """
    run = context.run
    last = last or partial(_last, context)
    specification = await _first(context, names.spec(run), wire.Specification)
    positions = [specification.positions.get(learner, 0)]
    positions.append(await _position_on(context, names.leave(run, learner), wire.Leave, last))
    for fragment in range(len(context.layout.fragments)):
        subject = names.update(run, learner, fragment)
        positions.append(await _position_on(context, subject, wire.Manifest, last))
    return max(positions)


async def _first(context: RunContext, subject: str, kind: type[wire.T]) -> wire.T:
    """The first message of a subject that has one, read in order: no replica takes it for missing.

    Raises:
        WireError: it cannot be decoded.
    """
    messages = context.bus.read(context.tape, [subject], 1)
    async with contextlib.aclosing(messages):  # type: ignore[type-var]
        return wire.decode(kind, (await anext(messages)).payload)


async def _last(context: RunContext, subject: str) -> Message | None:
    return await context.runtime.retry(
        "reading the tape", lambda: context.bus.last(context.tape, subject), logger=context.logger
    )


async def _position_on(
    context: RunContext,
    subject: str,
    kind: type[wire.Manifest | wire.Leave],
    last: Callable[[str], Awaitable[Message | None]],
) -> int:
    """Position in the last message of a subject; in all of them, if that is not readable."""
    newest = await last(subject)
    if newest is None:
        return 0
    try:
        return wire.decode(kind, newest.payload).position
    except WireError as error:
        context.logger.warning("unreadable", subject=subject, reason=error.reason)
    position = 0
    async for message in context.bus.read(context.tape, [subject], 1):
        with contextlib.suppress(WireError):
            position = max(position, wire.decode(kind, message.payload).position)
        if message.seq >= newest.seq:
            break
    return position


def parse_changed(created: RunSettings, payload: bytes) -> RunSettings:
    """The run's settings in a message that changes them.

    Args:
        created: those of the specification.
        payload: the message.

    Raises:
        WireError: it cannot be decoded, or changes what no run can change.
    """
    message = wire.decode(wire.Settings, payload)
    try:
        changed = parse_settings(message.settings)
        check_changeable(created, changed)
    except ConfigError as error:
        raise WireError("settings", error.message) from error
    return changed


async def settings_at(context: RunContext, settings_seq: int) -> RunSettings:
    """The run's settings that a message of the tape put in force; 0: the specification's.

    Raises:
        IntegrityError: there is no such message.
    """
    if not settings_seq:
        return context.settings
    subject = names.settings(context.run)
    messages = context.bus.read(context.tape, [subject], settings_seq)
    async with contextlib.aclosing(messages):  # type: ignore[type-var]
        async for message in messages:
            if message.seq == settings_seq:
                return parse_changed(context.settings, message.payload)
            break
    raise IntegrityError(
        f"the tape has no settings at sequence {settings_seq}, which a record names",
        hint="was the stream purged by hand? restore it, or resume from a checkpoint",
    )


async def last_record(context: RunContext, fragment: int) -> tuple[wire.Record, int]:
    """The newest record of a fragment, and its stream sequence.

    Raises:
        RunIncompleteError: the run has no such fragment: it was not created, or not wholly.
        IntegrityError: the record was made for another layout, or its body is gone.
    """
    missed = 0
    while True:
        message = await context.bus.last(context.tape, names.record(context.run, fragment))
        if message is None:
            raise RunIncompleteError(
                f"run {context.run!r} has no record of fragment {fragment}",
                hint="create the run with: diloco run create --config FILE",
            )
        try:
            return await read_record(context, message.payload), message.seq
        except ObjectMissingError as error:
            if message.seq == missed:
                raise lost_for_good(
                    f"record {message.seq} of fragment {fragment}", error
                ) from error
            missed = message.seq


def lost_for_good(what: str, error: ObjectMissingError) -> ObjectLostError:
    """The error of an object that the newest record needs: no collection took it."""
    return ObjectLostError(f"{what}: {error.message}", hint="runbooks/missing-object.md")


async def read_record(context: RunContext, payload: bytes) -> wire.Record:
    """The record in a message of the tape, or in the object that the message names.

    Raises:
        IntegrityError: it is of another layout, or its object is not what the message says.
        RunMismatchError: it is of another epoch.
        ObjectMissingError: its object is gone; it is not needed any more if newer ones follow.
    """
    found = wire.decode_record(payload)
    if isinstance(found, wire.RecordPointer):
        body = await context.runtime.call(get_object, context.store, found.body)
        found = wire.decode(wire.Record, body)
    if found.epoch != context.epoch:
        raise RunMismatchError(
            f"run {context.run!r} is in epoch {found.epoch}, this process began in epoch "
            f"{context.epoch}: the run was resumed on a new tape",
            hint="start this process again",
        )
    if found.layout != context.layout.digest:
        raise IntegrityError(
            f"record of fragment {found.fragment}: layout {found.layout}, "
            f"the run's specification has {context.layout.digest}"
        )
    return found


class Recorded(NamedTuple):
    """A record, and where and when the tape has it (seconds since the epoch).

    `body`: the object that holds it, if it is too large for the tape.
    """

    record: wire.Record
    record_seq: int
    stored_at_s: float
    body: wire.ObjectRef | None = None


async def records_of(
    context: RunContext, fragment: int, start_seq: int = 1
) -> AsyncIterator[Recorded]:
    """A fragment's records, from the oldest that the tape still has to the newest of now.

    Those before `start_seq` are passed over, and those that are collected meanwhile.

    Raises:
        RunMismatchError, IntegrityError: as `last_record`.
        ObjectMissingError: the body of a record that stays is gone.
    """
    _, newest_seq = await last_record(context, fragment)
    if start_seq > newest_seq:
        return
    subject = names.record(context.run, fragment)
    async for message in context.bus.read(context.tape, [subject], start_seq):
        try:
            record = await read_record(context, message.payload)
        except ObjectMissingError:
            if await _stands(context, subject, message.seq):
                raise
        else:
            found = wire.decode_record(message.payload)
            body = found.body if isinstance(found, wire.RecordPointer) else None
            yield Recorded(record, message.seq, message.time_s, body)
        if message.seq >= newest_seq:
            return


async def _stands(context: RunContext, subject: str, seq: int) -> bool:
    """Whether the tape still has a message of a subject, which had later ones."""
    messages = context.bus.read(context.tape, [subject], seq)
    async with contextlib.aclosing(messages):  # type: ignore[type-var]
        return (await anext(messages)).seq == seq


def get_object(store: ObjectStore, expected: wire.ObjectRef) -> bytes:
    """The bytes of an object, compared with what its record says.

    Raises:
        IntegrityError: its size or checksum differs.
        ObjectMissingError, StoreUnavailableError: as `ObjectStore.get`.
    """
    data = store.get(expected.name)
    if len(data) != expected.size_bytes or shards.crc32c(data) != expected.crc32c:
        raise IntegrityError(
            f"object {expected.name!r}: {len(data)} bytes with crc32c {shards.crc32c(data)}, "
            f"its record says {expected.size_bytes} with {expected.crc32c}",
            hint="runbooks/digest-mismatch.md",
        )
    return data
