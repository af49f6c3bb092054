"""Version 0: stores and commits the fragments' initial parameters.

The creator of the run computes the parameters once and stores them. Every learner reads them, so
that all start from the same bits.
"""

import asyncio
from collections.abc import Callable

import numpy as np

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.context import Context
from diloco.aggregator.core import memory
from diloco.aggregator.core.decisions import Decided
from diloco.aggregator.owner.committer import (
    NOTHING,
    RecordContents,
    commit_record,
    compose,
    store_version_object,
)
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import RunMismatchError, SwapLostError
from diloco.common.storage.tape import decode

# The number of fragments stored at once; each needs some copies of its vector.
AT_ONCE = 4


async def commit_version_zero(context: Context, vector: Callable[[int], np.ndarray]) -> None:
    """Stores and commits version 0 of every fragment; skips fragments that have it already.

    Args:
        context: the context of the run's creator.
        vector: returns a fragment's vector, float32 [size]; called when it is stored, so that no
            copy of the whole model is made.

    Raises:
        RunMismatchError: the run exists and began with other parameters.
    """
    room = asyncio.Semaphore(AT_ONCE)

    async def commit(fragment: int) -> None:
        async with room:
            await _commit(context, fragment, await context.runtime.call(vector, fragment))

    await asyncio.gather(*(commit(each.index) for each in context.layout.fragments))


async def _commit(context: Context, fragment: int, vector: np.ndarray) -> None:
    arrays = FragmentArrays.from_view(context.settings, context.layout, fragment, vector)
    logger = context.logger
    view = await store_version_object(context, fragment, 0, "view", arrays.view_object(), logger)
    outer = await store_version_object(context, fragment, 0, "outer", arrays.outer_object(), logger)
    now_s = context.runtime.clock()
    decided = Decided(
        what="version",
        base_seq=0,
        version=0,
        global_step=0,
        reason="created",
        position=1,
        policy=memory.beginning(),
        opened_at_s=now_s,
        quorum_at_s=now_s,
        closed_at_s=now_s,
    )
    contents = RecordContents(
        inputs=(),
        factors=b"",
        kept=b"",
        radii=b"",
        learning_rate=context.settings.outer.learning_rate,
        momentum=context.settings.outer.momentum,
        delta=None,
        snapshot=view,
        snapshot_version=0,
        deltas=(),
        outer=outer,
        outer_version=0,
        outer_seq=0,
        view_digest=shards.digest(arrays.view),
        outer_digest=arrays.outer_digest(),
        merged_at_s=now_s,
    )
    record = compose(context, fragment, decided, contents, previous=None, totals=NOTHING)
    try:
        await commit_record(context, record)
    except SwapLostError:
        await _check_same_beginning(context, record)


async def _check_same_beginning(context: Context, ours: wire.Record) -> None:
    """Raises `RunMismatchError` unless the fragment's last record has the view of `ours`."""
    subject = names.record(context.run, ours.fragment)
    message = await context.bus.last(context.tape, subject)
    found = decode(subject, message.payload) if message else None
    if not isinstance(found, wire.Record) or found.view_digest != ours.view_digest:
        moved_on = isinstance(found, wire.Record) and found.version > 0
        differs = "is past version 0" if moved_on else "does not begin as this configuration says"
        raise RunMismatchError(
            f"run {context.run!r} exists, and fragment {ours.fragment} {differs}",
            hint="choose another run name, or start the daemons of the run that exists",
        )
