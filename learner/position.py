"""Where a learner's data goes on: behind all that any of its messages covers.

Exactly-once training hangs on it: a position that misses one message trains again what was sent.
The last message of a subject may come from a replica that is behind, so it is compared with what
the stream's leader says; where the two differ, the subject is read in order up to there.
"""

import contextlib
from typing import NamedTuple

from diloco.common import wire
from diloco.common.bus import Bus, Message
from diloco.common.errors import StaleReadError, SwapLostError
from diloco.common.holdings import lost_batches
from diloco.common.tape import data_reached
from diloco.learner.context import Context


class Place(NamedTuple):
    """Where a learner's data goes on; of each fragment, the batches before that a crash has lost.

    Those are in no update of the fragment, and not trained again: others have them.
    """

    position: int
    lost: tuple[int, ...]


async def place_after_join(context: Context) -> Place:
    """Where the data of a learner goes on whose join is on the tape.

    Before the join an update of an earlier life could still come, and be merged; what is stored
    behind the join is rejected as superseded.
    """
    reached = await data_reached(context, context.learner, lambda subject: _last(context, subject))
    position = max(reached.values())
    lost = lost_batches(position, reached, len(context.layout.fragments))
    return Place(position, lost if any(lost) else ())


async def _last(context: Context, subject: str) -> Message | None:
    """The last message of a subject of this learner's own, however far behind a replica is."""

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


async def last_at_leader(bus: Bus, subject: str) -> int:
    """Sequence of the last message of a subject that one may publish to; 0 if it has none.

    The stream's leader alone checks a swap, so its refusal of one that cannot succeed says what
    the last message is. A learner may read its subjects one by one only, from any replica: there
    is no single order in which it could read up to its join.

    Raises:
        StaleReadError: the leader did not say; ask again.
    """
    try:
        await bus.publish(subject, b"", expected_last=wire.GREATEST)
    except SwapLostError as error:
        if error.last is not None:
            return error.last
    raise StaleReadError(f"the leader does not say what the last message of {subject!r} is")
