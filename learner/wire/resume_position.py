"""Where a learner's data resumes: behind all that its updates and leaves on the tape cover."""

import contextlib
from typing import NamedTuple

from diloco.common.storage.bus import Message
from diloco.common.storage.data_share_allocation import lost_batches
from diloco.common.storage.tape import data_reached
from diloco.learner.background import Context
from diloco.learner.wire.incarnation import last_at_leader


class ResumePosition(NamedTuple):
    """A learner's data position, and by fragment the batches before it that a crash has lost.

    Lost batches are in no update of their fragment; they are not trained again, since they may be
    in updates of other fragments.
    """

    position: int
    lost: tuple[int, ...]


async def place_after_join(context: Context) -> ResumePosition:
    """Returns the data position of a learner whose join is on the tape.

    Before the join, an update of an earlier life could still be stored and merged; updates stored
    after the join are rejected as superseded.
    """
    reached = await data_reached(context, context.learner, lambda subject: _last(context, subject))
    position = max(reached.values())
    lost = lost_batches(position, reached, len(context.layout.fragments))
    return ResumePosition(position, lost if any(lost) else ())


async def _last(context: Context, subject: str) -> Message | None:
    """Returns the last message of one of this learner's subjects, even from a replica that lags."""

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
