"""How old the run's newest checkpoint is: the timer that makes them may fail for long unseen."""

import asyncio

from diloco.aggregator.checkpoint import checkpoints, load_file
from diloco.aggregator.context import Context
from diloco.common import metrics
from diloco.common.errors import DilocoError
from diloco.common.tape import load_specification

LOOK_S = 60.0


async def watch_checkpoints(context: Context) -> None:
    """Keep the metric of the newest checkpoint in the store; never returns."""
    known = None
    while True:
        try:
            names = await context.runtime.call(checkpoints, context.store, context.run)
            newest = names[-1] if names else ""
            if newest != known:
                at_s = await made_at_s(context, newest)
                context.metrics.set(metrics.RUN_CHECKPOINTED_AT, at_s)
                known = newest
        except DilocoError as error:
            context.logger.warning("checkpoint_unread", error=error.message)
        await asyncio.sleep(LOOK_S)


async def made_at_s(context: Context, newest: str) -> float:
    """When the newest checkpoint was made; when the run was, if `newest` is ""."""
    if not newest:
        return (await load_specification(context.bus, context.run)).created_at_s
    file = await context.runtime.call(load_file, context.store, context.run, newest)
    return file.created_at_s
