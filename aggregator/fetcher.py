"""Reads and verifies updates beside a fragment's machine, a few at a time."""

import asyncio
from collections.abc import Awaitable, Callable

from diloco.aggregator.arrays.fragment import Payload
from diloco.aggregator.arrays.merge import Grid
from diloco.aggregator.context import Context
from diloco.aggregator.core import events
from diloco.aggregator.core.effects import Fetch
from diloco.aggregator.shard_reader import read_payload
from diloco.aggregator.tasks import Tasks
from diloco.common import log, metrics
from diloco.common.errors import ObjectMissingError, WireError

# Payloads of one fragment that may be in memory before they are merged.
FETCHES = 2

Answer = Callable[[events.Fetched | events.Failed, Payload | None], Awaitable[None]]


class Fetcher:
    """Reads the shards of one fragment's updates.

    Args:
        context: the aggregator's.
        grid: the fragment's.
        answer: takes what the machine is to hear, with the payload of an update that is verified;
            who has done with a payload calls `release`.
        tasks: the tenure's.
        logger: the fragment's.
    """

    def __init__(
        self, context: Context, grid: Grid, answer: Answer, tasks: Tasks, logger: log.Logger
    ) -> None:
        self._context = context
        self._grid = grid
        self._answer = answer
        self._logger = logger
        self._free = asyncio.Semaphore(FETCHES)
        self._tasks = tasks

    def start(self, fetch: Fetch) -> None:
        """Read an update once there is room for it."""
        self._tasks.start(self._fetch(fetch))

    def release(self) -> None:
        """A payload is used up."""
        self._free.release()

    async def _fetch(self, fetch: Fetch) -> None:
        """Its payload waits with the answer until the machine's word."""
        await self._free.acquire()
        runtime = self._context.runtime
        try:
            payload = await runtime.retry(
                "reading shards",
                lambda: runtime.call(read_payload, self._context.store, fetch.manifest, self._grid),
                logger=self._logger,
            )
        except ObjectMissingError as error:
            failed = events.Failed(runtime.clock(), fetch.update, "missing", error.message)
        except WireError as error:
            failed = events.Failed(runtime.clock(), fetch.update, error.reason, error.message)
        else:
            fetched = events.Fetched(runtime.clock(), fetch.update, payload.norm)
            received = sum(shard.size_bytes for shard in fetch.manifest.shards)
            self._context.metrics.add(metrics.RECEIVED, received)
            await self._answer(fetched, payload)
            return
        self.release()
        await self._answer(failed, None)
