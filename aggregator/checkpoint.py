"""Checkpoints: points of the tape from which a run can resume, even with a new NATS server.

`mark` makes a checkpoint: it names the newest version of each fragment, ensures that view and outer
state of exactly these versions are stored, and stores all that a new tape needs in one object, the
checkpoint file. `diloco run resume` begins a new tape from that file, by `next_epoch`,
`begin_epoch` and `begin_fragments`. Each tape of a run is an epoch, as sequence numbers and
incarnations start again with each tape.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from diloco.aggregator.compare_and_swap import swap
from diloco.aggregator.context import Context
from diloco.aggregator.core import memory
from diloco.aggregator.core.decisions import Decided, decided_of
from diloco.aggregator.owner.committer import commit_record, compose, contents_of
from diloco.aggregator.owner.quarantine_messages import quarantined_learners
from diloco.aggregator.owner.recovery import rebuild
from diloco.aggregator.rollback import store_whole_view
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    IntegrityError,
    ObjectExistsError,
    ObjectMissingError,
    OtherCheckpointError,
    RunMismatchError,
    RunMissingError,
    StreamMissingError,
    SwapLostError,
)
from diloco.common.protocol.sequences import begins_tape, epoch_of
from diloco.common.storage.bus import Bus
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.tape import (
    Recorded,
    data_position,
    effective_settings,
    entries,
    last_record,
    last_word,
    load_specification,
    place_on_tape,
    read_positions,
    records_of,
    store_positions,
)

R = TypeVar("R")

# How often to try with newer versions, if garbage collection removed the objects needed.
ATTEMPTS = 3
# The number of learners whose newest messages are read at once.
AT_ONCE = 64


class Marked(NamedTuple):
    """A complete checkpoint: its name, and the version of each fragment."""

    name: str
    versions: tuple[int, ...]


async def mark(context: Context) -> Marked:
    """Makes a checkpoint of the newest versions.

    The checkpoint message is published first. Garbage collections that look for checkpoints later
    keep the stored views and outer states of these versions. One that looked before may remove
    those of a version that is not one of its fragment's two newest any more, and if a version has
    none stored yet, the objects from which it is recomputed may go. Then the checkpoint is tried
    again with newer versions.

    Raises:
        IntegrityError, ObjectMissingError: stored objects are gone, or do not give the recorded
            digests.
    """
    for left in reversed(range(ATTEMPTS)):
        newest = await _newest_of_all(context)
        try:
            return await _mark(context, newest)
        except (IntegrityError, ObjectMissingError) as error:
            # Without newer versions nothing was collected, so an object is damaged.
            if not left or _seqs(await _newest_of_all(context)) == _seqs(newest):
                raise
            context.logger.warning("checkpoint_overtaken", why=error.message)
    raise AssertionError("the last attempt returns or raises")


async def _newest_of_all(context: Context) -> list[Recorded]:
    fragments = range(len(context.layout.fragments))
    return await asyncio.gather(*(_newest(context, fragment) for fragment in fragments))


def _seqs(newest: list[Recorded]) -> list[int]:
    return [at.record_seq for at in newest]


async def _mark(context: Context, newest: list[Recorded]) -> Marked:
    """Makes a checkpoint of the versions of these records, one for each fragment."""
    point = await context.bus.last_sequence(context.tape)
    message = wire.Checkpoint(
        run=context.run,
        name=f"{context.epoch:04d}-{place_on_tape(point):012d}",
        versions=tuple(at.record.version for at in newest),
        record_seqs=tuple(at.record_seq for at in newest),
        created_at_s=context.runtime.clock(),
        by=context.name,
    )
    await context.bus.publish(
        names.checkpoint(context.run), wire.encode(message), msg_id=context.runtime.new_id()
    )
    await _check_newest(context, newest)
    quarantined = tuple(sorted(await quarantined_learners(context)))
    # One after the other, so that only one fragment's arrays are in memory.
    records = [await _beginning(context, at, quarantined) for at in newest]
    settings, _ = await effective_settings(context)
    specification = await load_specification(context.bus, context.run)
    positions = await _data_positions(context, specification, newest)
    few = len(positions) <= context.most_positions
    carried = {"positions": positions if few else {}, "positions_object": None}
    file = wire.CheckpointFile(
        name=message.name,
        specification=specification.model_copy(update=carried),
        settings=settings.model_dump(),
        records=tuple(records),
        created_at_s=message.created_at_s,
        data_positions=() if few else entries(positions),
    )
    await context.runtime.call(
        context.store.put, names.checkpoint_object(context.run, message.name), wire.encode(file)
    )
    return Marked(message.name, message.versions)


async def _check_newest(context: Context, named: list[Recorded]) -> None:
    """Raises if a collection that knows nothing of a checkpoint may remove what it names."""
    now = await asyncio.gather(*(last_word(context, one.record.fragment) for one in named))
    for one, told in zip(named, now, strict=True):
        newest, version = told.word, one.record.version
        # The floor of a collection is at most the older of the two newest stored versions.
        if newest.version > version + 1 and newest.snapshot_version > version:
            raise IntegrityError(
                f"fragment {newest.fragment}: version {newest.version} was made before the "
                f"checkpoint of version {version} was on the tape",
                hint="make the checkpoint again",
            )


async def _newest(context: Context, fragment: int) -> Recorded:
    """Returns the record that made the fragment's newest version, not one of verdicts alone."""
    record, record_seq = await last_record(context, fragment)
    if record.what != "verdict":
        return Recorded(record, record_seq, record.closed_at_s)
    made = [
        recorded
        async for recorded in records_of(context, fragment)
        if recorded.record.what != "verdict"
    ]
    return made[-1]


async def _beginning(context: Context, at: Recorded, quarantined: tuple[str, ...]) -> wire.Record:
    """Stores a fragment's view and outer state as they are after the record `at`.

    Args:
        context: the run.
        at: the record.
        quarantined: the learners that are in quarantine at the checkpoint.

    Returns:
        The record with which the fragment begins on a new tape, if `diloco run resume` makes one
        from this checkpoint.
    """
    source = at.record
    recovered = await rebuild(context, source, at.record_seq)
    contents = await store_whole_view(context, source, recovered, source.version)
    decided = Decided(
        what="restored",
        base_seq=0,
        version=source.version,
        global_step=source.global_step,
        reason="resumed",
        position=1,
        policy=memory.beginning(
            quarantined=quarantined,
            floor=source.version,
            quorum_s=source.policy.quorum_s,
            sync_s=source.policy.sync_s,
        ),
        opened_at_s=source.opened_at_s,
        quorum_at_s=source.quorum_at_s,
        closed_at_s=source.closed_at_s,
    )
    return compose(context, source.fragment, decided, contents, previous=None, totals=source.totals)


async def _data_positions(
    context: Context, specification: wire.Specification, newest: Sequence[Recorded]
) -> dict[str, int]:
    """Returns each learner's data position, in batches, from its manifests and leave messages."""
    earlier = await context.runtime.call(read_positions, context.store, specification)
    learners = {m.learner for at in newest for m in at.record.policy.members}
    known = sorted(learners | earlier.keys())
    positions: dict[str, int] = {}
    for start in range(0, len(known), AT_ONCE):
        some = known[start : start + AT_ONCE]
        found = await asyncio.gather(
            *(data_position(context, learner, earlier=earlier) for learner in some)
        )
        positions.update(zip(some, found, strict=True))
    return positions


# Resuming


async def from_newest(named: Sequence[str], resume: Callable[[str | None], Awaitable[R]]) -> R:
    """Resumes from the newest checkpoint, or from the one with which an interrupted call has begun.

    Args:
        named: the names of checkpoints, oldest first.
        resume: resumes from a checkpoint; from the newest if its name is None.

    Raises:
        OtherCheckpointError: the tape on this bus began with none of them.
    """
    for name in reversed(named[1:]):
        with contextlib.suppress(OtherCheckpointError):
            return await resume(name)
    return await resume(named[0] if named else None)


async def next_epoch(bus: Bus, store: ObjectStore, file: wire.CheckpointFile) -> int:
    """Returns the epoch of the run's tape on this bus; if there is no tape, reserves a new epoch.

    There is a tape if an interrupted `resume` has begun it. An epoch is reserved by an object in
    the store, so that no two tapes of a run share an epoch; it is higher than that of `file` and
    than all reserved before. If the tape's stream is there, its epoch is returned if it is a
    reserved one, since a stream's sequences are those of its epoch. Processes that outlived the
    tape before may have sent it messages. Another stream is removed, if it is empty.

    Raises:
        RunMismatchError: that stream has messages, and no specification.
    """
    run = file.specification.run
    with contextlib.suppress(RunMissingError):
        return (await load_specification(bus, run)).epoch
    prefix = names.epoch_prefix(run)
    # In this order: an epoch is reserved before its stream is made.
    begun, is_empty = await _begun(bus, run)
    used = [int(found.name.removeprefix(prefix)) for found in store.list(prefix)]
    if begun in used and begun > file.specification.epoch:
        return begun
    if not is_empty:
        raise RunMismatchError(
            f"the stream {names.tape_stream(run)!r} has messages, but none says what run it is",
            hint="see what they are with NATS's own tools, and remove the stream",
        )
    if begun >= 0:
        await bus.remove_stream(names.tape_stream(run))
    epoch = max([file.specification.epoch, *used]) + 1
    claim = secrets.token_bytes(16)
    while True:
        try:
            store.put(names.epoch_object(run, epoch), claim)
        except ObjectExistsError:
            epoch += 1
        else:
            return epoch


async def _begun(bus: Bus, run: str) -> tuple[int, bool]:
    """Returns the epoch of the run's tape, -1 if there is none, and whether it is empty."""
    try:
        last_seq = await bus.last_sequence(names.tape_stream(run))
    except StreamMissingError:
        return -1, True
    return epoch_of(last_seq + 1), begins_tape(last_seq + 1)


async def check_objects(context: Context, records: Sequence[wire.Record]) -> None:
    """Checks that each fragment can begin as a checkpoint's records say, before a tape begins.

    Raises:
        IntegrityError, ObjectMissingError: an object is missing or damaged.
    """
    # One after the other, so that only one fragment's arrays are in memory.
    for record in records:
        await rebuild(context, record, 1)


async def check_begun(context: Context, file: wire.CheckpointFile) -> None:
    """Checks the run's tape on this bus, if there is one: it began with this checkpoint.

    Raises:
        OtherCheckpointError, RunMismatchError: as `begin_epoch`.
    """
    with contextlib.suppress(RunMissingError):
        await _check_same(context, await load_specification(context.bus, context.run), file)


async def _check_same(
    context: Context, specification: wire.Specification, file: wire.CheckpointFile
) -> None:
    if specification.epoch <= file.specification.epoch:
        raise RunMismatchError(
            f"run {context.run!r} has its tape on this bus (epoch {specification.epoch})",
            hint="start its daemons, they resume; to return to an earlier version: "
            "diloco run rollback",
        )
    if specification != await _specification(replace(context, epoch=specification.epoch), file):
        raise _begun_otherwise(context)


async def begin_epoch(context: Context, file: wire.CheckpointFile) -> wire.Specification:
    """Publishes a new epoch's specification and the settings of `file` on an empty tape.

    Returns the specification on the tape. If an interrupted `resume` has published it already,
    continues from there.

    Raises:
        OtherCheckpointError: the bus has a tape of this run that began with another checkpoint.
        RunMismatchError: it has one of the epoch of `file` or an older one.
    """
    specification = await _specification(context, file)
    subject = names.spec(context.run)
    try:
        await swap(context, subject, wire.encode(specification), context.runtime.new_id(), 0)
    except SwapLostError:
        specification = await load_specification(context.bus, context.run)
        context = replace(context, epoch=specification.epoch)
        await _check_same(context, specification, file)
    if file.settings != specification.settings:
        message = wire.Settings(
            run=context.run, settings=file.settings, changed=(), by=context.name
        )
        subject = names.settings(context.run)
        with contextlib.suppress(SwapLostError):  # The interrupted `resume` has published it.
            await swap(context, subject, wire.encode(message), context.runtime.new_id(), 0)
    return specification


async def _specification(context: Context, file: wire.CheckpointFile) -> wire.Specification:
    carried: dict[str, object] = {"epoch": context.epoch}
    if file.data_positions:
        carried["positions_object"] = await context.runtime.call(
            store_positions, context.store, context.run, context.epoch, file.data_positions
        )
    return file.specification.model_copy(update=carried)


def _begun_otherwise(context: Context) -> OtherCheckpointError:
    return OtherCheckpointError(
        f"run {context.run!r} has a tape on this bus that began with another checkpoint",
        hint="if its daemons have not run yet, resume it with that checkpoint: --from NAME; else"
        " start them, and return to an earlier version by diloco run rollback",
    )


async def begin_fragments(context: Context, records: Sequence[wire.Record]) -> None:
    """Publishes each fragment's first record of the epoch, unless the fragment has one already.

    Raises:
        OtherCheckpointError: a fragment has begun with another checkpoint.
    """
    settings = await context.bus.last(context.tape, names.settings(context.run))
    settings_seq = settings.seq if settings else 0
    # All of them before any is published: no tape begins with parts of two checkpoints.
    await asyncio.gather(*(_check_beginning(context, record) for record in records))
    await asyncio.gather(*(_begin(context, record, settings_seq) for record in records))


async def _check_beginning(context: Context, ours: wire.Record) -> None:
    if await context.bus.last(context.tape, names.record(context.run, ours.fragment)) is None:
        return
    newest, _ = await last_record(context, ours.fragment)
    if newest.what == "restored" and _beginning_of(newest) != _beginning_of(ours):
        raise _begun_otherwise(context)


async def _begin(context: Context, source: wire.Record, settings_seq: int) -> None:
    now_s = context.runtime.clock()
    decided = decided_of(source)._replace(
        policy=source.policy.model_copy(update={"settings_seq": settings_seq}),
        opened_at_s=now_s,
        quorum_at_s=now_s,
        closed_at_s=now_s,
    )
    ours = compose(
        context,
        source.fragment,
        decided,
        contents_of(source)._replace(merged_at_s=now_s),
        previous=None,
        totals=source.totals,
    )
    try:
        await commit_record(context, ours)
    except SwapLostError:  # The interrupted `resume` has published it, or another one just now.
        await _check_beginning(context, ours)


def _beginning_of(record: wire.Record) -> tuple[int, str, str]:
    return record.version, record.view_digest, record.outer_digest
