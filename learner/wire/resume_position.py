"""The position at which a learner's data resumes: after all batches that it reported on the tape.

A learner's updates and leaves report its position.
"""

import contextlib
from typing import NamedTuple

from diloco.common.storage.bus import Message
from diloco.common.storage.data_share_allocation import lost_batches
from diloco.common.storage.tape import data_reached
from diloco.learner.background import Context
from diloco.learner.wire.incarnation import last_at_leader


class ResumePosition(NamedTuple):
    """The data position of a learner that has joined.

    Attributes:
        position: the number of the batch with which training continues.
        lost: for each fragment, how many batches before `position` are in none of the fragment's
            updates, as after a crash; empty if there are none. Lost batches are not trained again,
            since they may be in updates of other fragments.
    """

    position: int
    lost: tuple[int, ...]


async def place_after_join(context: Context) -> ResumePosition:
    """Returns the data position of this learner, from the tape; to be called after the join.

    Before the join, an update of an earlier process of the same name could still be stored and
    merged. Updates of that process that are stored after the join are rejected as superseded.
    """
    reached = await data_reached(context, context.learner, lambda subject: _last(context, subject))
    position = max(reached.values())
    lost = lost_batches(position, reached, len(context.layout.fragments))
    return ResumePosition(position, lost if any(lost) else ())


async def _last(context: Context, subject: str) -> Message | None:
    """Returns the last message of one of this learner's subjects; None if there is none.

    If a replica of the stream lags, waits until that message can be read.
    """

    async def attempt() -> Message | None:
        newest_seq = await last_at_leader(context.bus, subject)
        if not newest_seq:
            return None
        found = await context.bus.last(context.tape, subject)
        if found is not None and found.seq >= newest_seq:
            return found
        context.logger.info("stale_read", subject=subject, record_seq=newest_seq)
        messages = context.bus.read(context.tape, [subject], newest_seq)
        async with contextlib.aclosing(messages):  # type: ignore[type-var]
            return await anext(messages)

    return await context.runtime.retry("reading the tape", attempt, logger=context.logger)
