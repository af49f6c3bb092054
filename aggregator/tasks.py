"""Work beside a fragment's machine, whose failures end the tenure."""

import asyncio
from collections.abc import Coroutine

from diloco.common.service import cancel


class Tasks:
    """A set of coroutines that run by themselves; must be made in a running event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Run `work` beside everything else."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def failure(self) -> None:
        """Raise what one of them raises; wait for ever if none does."""
        await self._broken

    async def stop(self) -> None:
        """End them all."""
        await cancel(*self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)
