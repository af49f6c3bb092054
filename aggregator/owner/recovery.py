"""Recovers a fragment from the newest stored outer state and the records after it.

Every version since that state is merged again from the inputs that its record names, and the
digests of view and outer state are compared with the recorded ones. Nothing else is needed, and
nothing is trusted without a matching digest.
"""

import asyncio
import contextlib
from collections import deque
from typing import Final, NamedTuple

from diloco.aggregator.arrays.arithmetic import PRODUCTION
from diloco.aggregator.arrays.fragment import FragmentArrays, unmergeable
from diloco.aggregator.context import Context
from diloco.aggregator.owner.committer import cited
from diloco.aggregator.owner.download_and_verify import read_input
from diloco.common.process import cores
from diloco.common.process.config import RunSettings
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.errors import DilocoError, IntegrityError, ObjectMissingError, WireError
from diloco.common.storage.tape import (
    get_object,
    last_record,
    lost_for_good,
    messages_up_to,
    read_record,
    settings_at,
)
from diloco.common.storage.views import older_snapshot

# The most inputs of a version that are read at once; together no larger than its view.
MOST_AHEAD: Final = 16


class Recovered(NamedTuple):
    """A fragment at one of its records, usually the newest.

    Attributes:
        record: the record, as `cited` returns it.
        record_seq: the record's stream sequence.
        settings: the run's settings at that record.
        arrays: the fragment's arrays after that record.
        merged_again: the number of versions that were merged again for this.
    """

    record: wire.Record
    record_seq: int
    settings: RunSettings
    arrays: FragmentArrays
    merged_again: int


async def recover(context: Context, fragment: int) -> Recovered:
    """Recovers a fragment at its newest record.

    Raises:
        IntegrityError: stored objects do not give the recorded digests, or are gone.
        RunMismatchError: the tape has no record of the fragment.
        BusUnavailableError, StoreUnavailableError: transient faults; call again.
    """
    newest, newest_seq = await last_record(context, fragment)
    while True:
        try:
            return await rebuild(context, newest, newest_seq)
        except (ObjectMissingError, IntegrityError) as error:
            # Another owner may have committed since, and its garbage collection removed objects.
            missed_seq = newest_seq
            newest, newest_seq = await last_record(context, fragment)
            if newest_seq == missed_seq:
                if (missing := missing_object(error)) is None:
                    raise
                what = f"version {newest.version} of fragment {fragment}"
                raise lost_for_good(what, missing) from error


def missing_object(error: DilocoError) -> ObjectMissingError | None:
    """Returns `error` or its cause, if that is a missing object; None if neither is."""
    why = error if isinstance(error, ObjectMissingError) else error.__cause__
    return why if isinstance(why, ObjectMissingError) else None


async def rebuild(context: Context, record: wire.Record, record_seq: int) -> Recovered:
    """Recovers a fragment at one of its records.

    Starts from the stored state, view and outer state, that the record names, or from an older one
    if that state is damaged or gone.

    Raises:
        ObjectMissingError: there is no stored state to start from, or a record after it is gone.
        DilocoError: as `recover`.
    """
    outer_seq = record.outer_seq or record_seq
    try:
        arrays = await _load_outer_state(context, record)
    except (ObjectMissingError, IntegrityError) as error:
        arrays, outer_seq = await _load_older_state(context, record, record_seq, error)
    merged_again = 0
    if outer_seq < record_seq:
        subjects, before_seq = [names.record(context.run, record.fragment)], outer_seq
        async for message in messages_up_to(context, subjects, record_seq, outer_seq + 1):
            again = await read_record(context, message)
            # Checked first: merging over a gap would give another digest, and look like damage.
            if again.base_seq != before_seq:
                raise ObjectMissingError(
                    f"the tape has no record of fragment {record.fragment} between messages "
                    f"{before_seq} and {message.seq}: it was collected"
                )
            before_seq = message.seq
            if again.what == "version":
                await _merge_again(context, arrays, again)
                merged_again += 1
    settings = await settings_at(context, record.policy.settings_seq)
    arrays.settings = settings
    return Recovered(cited(record, record_seq), record_seq, settings, arrays, merged_again)


async def _merge_again(context: Context, arrays: FragmentArrays, record: wire.Record) -> None:
    """Merges a recorded version again; reads some inputs ahead, as each read waits for the store.

    Raises:
        As `FragmentArrays.merge_again`, and as `recover`.
    """
    call = context.runtime.call
    arrays.begin_again(record)
    sizes = [sum(shard.size_bytes for shard in taken.shards) for taken in record.inputs]
    ahead = min(MOST_AHEAD, max(1, arrays.view.nbytes // max(sizes, default=1)))
    left, reads = iter(record.inputs), deque[asyncio.Task[tuple[Encoded, ...]]]()

    def read_next() -> None:
        if (taken := next(left, None)) is not None:
            reading = call(read_input, context.store, arrays.grid, taken)
            reads.append(asyncio.ensure_future(reading))

    try:
        for _ in range(ahead):
            read_next()
        for taken in record.inputs:
            parts = await reads[0]
            reads.popleft()
            read_next()
            await call(arrays.add_again, taken, parts)
    except (ObjectMissingError, WireError) as error:
        raise unmergeable(record, error.message) from error
    finally:
        await cancel(*reads)
    await call(arrays.end_again, record)


async def _load_older_state(
    context: Context,
    record: wire.Record,
    record_seq: int,
    error: ObjectMissingError | IntegrityError,
) -> tuple[FragmentArrays, int]:
    """Returns (arrays, record sequence) of a stored state older than the one that `record` names.

    Raises:
        ObjectMissingError, IntegrityError: the argument `error`, if no older state can be read.
    """
    older = await older_snapshot(context, record, record_seq)
    if older is not None:
        basis = older.basis
        context.logger.warning(
            "state_skipped",
            fragment=record.fragment,
            version=record.outer_version,
            instead=basis.record.version,
            why=error.message,
        )
        with contextlib.suppress(ObjectMissingError, IntegrityError):
            return await _load_outer_state(context, basis.record), basis.record_seq
    raise error


async def _load_outer_state(context: Context, at: wire.Record) -> FragmentArrays:
    """Returns the arrays from the stored view and outer state that the record `at` names."""

    def load() -> FragmentArrays:
        return FragmentArrays.from_objects(
            context.settings,
            context.layout,
            at.fragment,
            view=get_object(context.store, at.snapshot),
            outer_state=get_object(context.store, at.outer),
            arithmetic=context.arithmetic or PRODUCTION,
            threads=cores.available(),
        )

    return await context.runtime.call(load)
