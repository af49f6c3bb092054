"""How old the run's newest checkpoint is: the timer that makes them may fail for long unseen."""

import asyncio

from diloco.aggregator.checkpoint import checkpoints, load_file
from diloco.aggregator.context import Context
from diloco.common import metrics
from diloco.common.errors import DilocoError

LOOK_S = 60.0


async def watch_checkpoints(context: Context) -> None:
    """Keep the metric of the newest checkpoint in the store; never returns."""
    known = None
    while True:
        try:
            names = await context.runtime.call(checkpoints, context.store, context.run)
            if names and names[-1] != known:
                known = names[-1]
                file = await context.runtime.call(load_file, context.store, context.run, known)
                context.metrics.set(metrics.RUN_CHECKPOINTED_AT, file.created_at_s)
        except DilocoError as error:
            context.logger.warning("checkpoint_unread", error=error.message)
        await asyncio.sleep(LOOK_S)
