"""How an aggregator comes back: from the newest outer state and the records after it.

Every version since that state is merged again from the inputs its record names, and its digests
are compared. Nothing else is needed, and nothing is trusted that does not reproduce.
"""

from typing import NamedTuple

from aggregator.context import Context
from aggregator.fragment import FragmentArrays
from common import names, wire
from common.config import RunSettings
from common.tape import get_object, last_record, read_record, settings_at


class Recovered(NamedTuple):
    """A fragment as its newest record left it.

    `settings` are the run's that it was made under; `merged_again` counts the versions that were
    made once more to get there.
    """

    record: wire.Record
    record_seq: int
    settings: RunSettings
    arrays: FragmentArrays
    merged_again: int


async def recover(context: Context, fragment: int) -> Recovered:
    """Bring a fragment's arrays to its newest record.

    Raises:
        IntegrityError: stored objects do not give the recorded digests.
        RunMismatchError: the run has no such fragment.
        BusUnavailableError, StoreUnavailableError: passing faults; call again.
    """
    newest, newest_seq = await last_record(context, fragment)
    arrays = await _load_outer_state(context, newest)
    outer_seq = newest.outer_seq or newest_seq
    merged_again = 0
    if outer_seq < newest_seq:
        subjects = [names.record(context.run, fragment)]
        async for message in context.bus.read(context.tape, subjects, outer_seq + 1):
            record = await read_record(context, message.payload)
            if record.what == "version":
                await context.runtime.call(arrays.merge_again, record, context.store)
                merged_again += 1
            if message.seq >= newest_seq:
                # Another aggregator may have gone further meanwhile; its record is the newer one.
                newest, newest_seq = record, message.seq
                break
    if newest.outer_seq == 0:
        newest = newest.model_copy(update={"outer_seq": newest_seq})
    settings = await settings_at(context, newest.policy.settings_seq)
    arrays.settings = settings
    return Recovered(newest, newest_seq, settings, arrays, merged_again)


async def _load_outer_state(context: Context, newest: wire.Record) -> FragmentArrays:
    """The arrays at `newest.outer_version`, where view and outer state were stored together."""

    def load() -> FragmentArrays:
        return FragmentArrays.from_objects(
            context.settings,
            context.layout,
            newest.fragment,
            view=get_object(context.store, newest.snapshot),
            outer_state=get_object(context.store, newest.outer),
        )

    return await context.runtime.call(load)
