"""Warns when the tape is nearly full: on a full tape no process can publish anything."""

import asyncio

from diloco.aggregator.context import Context
from diloco.common.process import metrics
from diloco.common.protocol.errors import BusUnavailableError
from diloco.common.storage.bus import Filled

LOOK_S = 30.0
# The share of its limit from which on the tape is nearly full.
NEARLY_FULL = 0.8
# The warning is repeated whenever this much more of the limit is used.
AGAIN = 0.05


def share(filled: Filled) -> float:
    """Returns the fraction of its size limit that a stream uses; 0 without a limit."""
    return filled.size_bytes / filled.max_bytes if filled.max_bytes else 0.0


async def watch_tape(context: Context) -> None:
    """Logs a warning when the tape is nearly full, and again as it fills; never returns."""
    said = 0.0
    while True:
        try:
            filled = await context.bus.filled(context.tape)
        except BusUnavailableError:
            filled = Filled(0, 0)
        else:
            context.metrics.set(metrics.TAPE_SIZE, filled.size_bytes)
            context.metrics.set(metrics.TAPE_LIMIT, filled.max_bytes)
        used = share(filled)
        if used < NEARLY_FULL:
            said = 0.0
        elif used >= said + AGAIN:
            context.logger.warning(
                "tape_nearly_full",
                size_bytes=filled.size_bytes,
                max_bytes=filled.max_bytes,
                runbook="runbooks/tape-full.md",
            )
            said = used
        await asyncio.sleep(LOOK_S)
